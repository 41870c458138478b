"""Loss curves of several runs over each other, and how far each is from the first.

    python experiments/curves.py outputs/<date>/<sweep> --out experiments/strategy_parity/curves.png

Takes run folders, or a sweep's folder for all of its jobs; reads their records only. Prints the largest relative
difference of each run to the first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl

from disttrain.config.frozen import thaw
from disttrain.record import RunFolder

mpl.use("Agg")
from matplotlib import pyplot as plt

LINES = ("-", "--", "-.", ":")


def runs_in(folders: list[Path]) -> list[RunFolder]:
    """The runs named, a sweep standing for its jobs."""
    found = []
    for folder in folders:
        jobs = [folder] if (folder / "config.yaml").exists() else sorted(path.parent for path in folder.glob("*/config.yaml"))
        found += [RunFolder(job) for job in jobs]
    if not found:
        raise SystemExit(f"no runs in {', '.join(map(str, folders))}")
    return found


def curve(run: RunFolder, metric: str) -> dict[int, float]:
    """The metric by step."""
    return {row["step"]: row[metric] for row in run.read() if metric in row}


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--metric", default="train/loss")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    runs = runs_in(arguments.folders)
    curves = {thaw(run.config_text()).run_name: curve(run, arguments.metric) for run in runs}
    first = next(iter(curves.values()))
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), layout="constrained")
    for number, (name, values) in enumerate(curves.items()):
        style = LINES[number % len(LINES)]
        above.plot(list(values), list(values.values()), style, color=f"C{number}", label=name, linewidth=3 - 0.5 * (number % 4))
        common = [step for step in values if step in first]
        apart = [abs(values[step] - first[step]) / abs(first[step]) for step in common]
        print(f"{name:40} last {list(values.values())[-1]:.6f}   largest relative difference {max(apart):.2e}")
        if number:
            below.semilogy(common, [max(value, 1e-17) for value in apart], style, color=f"C{number}", label=name)
    above.set_ylabel(arguments.metric)
    above.set_title(arguments.title)
    above.legend()
    below.set_ylabel(f"relative difference\nto {next(iter(curves))}")
    below.set_xlabel("step")
    below.grid(alpha=0.3)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
