"""The search beside what was published: the best layouts for 64 and 1,024 H100, and where the published ones stand among them.

    python experiments/planner/search.py          # writes search.md

A published layout is planned as disttrain would run it (its own bytes, kernels and overlap), so that ranks compare alike;
the measured time is the publisher's program's.
"""

from __future__ import annotations

import time
from dataclasses import replace

from judge import table
from rows import HERE, Row, read

from disttrain.plan.case import Case, Layout, Numbers, Software
from disttrain.plan.closed import estimate
from disttrain.plan.constants import Constants
from disttrain.plan.devices import preset
from disttrain.plan.memory import GIB, fullest
from disttrain.plan.planned import USABLE
from disttrain.plan.search import Search, search, with_layout
from disttrain.plan.table import layout_words

SIZES = (64, 1024)
OURS = Numbers(4.0, 4.0, 8.0, 2.0, 4.0, gathered=2.0, wire_weight=4.0, wire_gradient=4.0, logit=6.0)
SOFTWARE = Software(scattered=False)

PAGE = """# The search beside published layouts

H100 runs of 64 or 1,024 GPUs in the table of published runs with a dense model, a layout and a time (of each model the four best,
16-bit ones first): the published layout as the planner prices it for disttrain, in bf16, and the best that `plan.search=true` finds
for the same model, batch and length.
Made by `python experiments/planner/search.py`; all searches together took {seconds:.0f} s.

{table}

## The first five of each

{best}

## Where they disagree, and why

{why}
"""

CLEARLY = 0.15
"""Share of a step from which on the planner would leave a published layout."""

WHY = """- **Clearly left** (by more than 15%): {left}.
- **Precision and bytes.** The publishers hold bf16 weights (2 bytes) with float32 gradients and states; disttrain holds
  float32 weights and casts (autocast), 18 bytes a parameter before sharding. So a layout that the publisher fits by sharing out
  the optimizer alone (ZeRO-1) may not fit here, and the search shares out more, cuts deeper or recomputes.
- **Gathering.** FSDP elsewhere gathers weights in bf16; disttrain gathers them as they are (float32) unless
  `strategy.gather_dtype=bf16`, and keeps autocast's copies until backward. ZeRO-3 over a network therefore costs twice the bytes:
  that is why `am-010` and `lf-030`, ZeRO-3 over eight nodes, are priced far above the best here, although where weights travel in
  bf16 both were measured about as fast as it.
- **Tensor axis.** NVIDIA's recipes overlap the tensor axis with products inside Transformer Engine; disttrain hides a quarter. The
  planner therefore prices a tensor axis dearer and prefers fewer tensor ranks with more pipeline or context ranks.
- **Context axis.** It looks cheap (keys and values of grouped-query models are an eighth of the stream, half of it hidden), so the
  search likes cp 2 to 4 where publishers of short sequences use none. Only a few published runs use cp at all, so this is the part
  of the ranking that the data support least.
- **Pipelines.** The search prefers interleaved schedules with four chunks; publishers use five to eight where layers divide so.
- **Flat tops.** The first ten usually lie within a tenth of each other, which is more than the planner can tell apart (6% in the
  median): read the list as a set of candidates to measure, not as an order."""


def planned_as_ours(row: Row) -> Case:
    """The row's model and batch, as disttrain would hold and compute it."""
    software = replace(SOFTWARE, precision="bf16")
    return Case(row.case.shape, Layout(), row.case.length, row.case.global_batch, OURS, software)


def ours(case: Case, layout: Layout) -> Case:
    """A published layout in disttrain's hands."""
    return with_layout(case, replace(layout, share_context=False))


def _rank(row: Row) -> tuple[bool, float]:
    """16-bit runs before fp8 ones, then the faster."""
    return "fp8" in row.precision, row.seconds


def _fastest(seen: dict[tuple[str, int, Layout], Row], key: tuple[str, int, Layout], count: int = 4) -> list[Row]:
    """The few best published layouts of the same model on as many GPUs."""
    alike = [row for other, row in seen.items() if other[:2] == key[:2]]
    return sorted(alike, key=_rank)[:count]


def main() -> None:
    """Search, compare, write."""
    constants, hardware = Constants(), preset("h100")
    limit = hardware.memory_gib * GIB * USABLE
    seen: dict[tuple[str, int, Layout], Row] = {}
    for row in read():
        if row.gpu == "H100-80GB-SXM" and row.gpus in SIZES and "fp4" not in row.precision:
            key = (row.family[1], row.gpus, row.case.layout)
            if key not in seen or _rank(row) < _rank(seen[key]):
                seen[key] = row
    seen = {key: row for key, row in seen.items() if row in _fastest(seen, key)}
    started, lines, best, done = time.monotonic(), [], [], {}
    for (model, gpus, layout), row in sorted(seen.items(), key=lambda one: (one[0][1], one[0][0])):
        case = planned_as_ours(row)
        key = (model, gpus, row.case.global_batch, row.case.length)
        if key not in done:
            done[key] = search(case, gpus, hardware, constants, top=5)
            best += [f"**{model}, {gpus} GPUs, {row.case.global_batch} x {row.case.length} tokens**\n", _top(done[key]), ""]
        found = done[key]
        own = ours(case, layout)
        seconds, peak = estimate(own, hardware, constants).step, fullest(own)[1].total
        first = found.best[0].seconds if found.best else float("nan")
        precision = "fp8" if "fp8" in row.precision else "16 bit"
        fits = "yes" if peak <= limit else f"no, {peak / GIB:.0f} GiB"
        layout_text = f"{layout_words(row.case)}, micro {layout.micro_batch}"
        over = f"{100 * (seconds / first - 1):+.0f}%"
        lines.append(
            [model, gpus, f"{row.name} ({precision})", layout_text, f"{row.seconds:.2f}", f"{seconds:.2f}", fits, f"{first:.2f}", over]
        )
    head = [
        "model",
        "GPUs",
        "row",
        "published layout",
        "measured s",
        "planned for us s",
        "fits us",
        "search's best s",
        "published over best",
    ]
    left = ", ".join(f"`{line[2].split()[0]}` ({line[-1]})" for line in lines if float(line[-1].rstrip("%")) > 100 * CLEARLY)
    why = WHY.format(left=left or "none")
    text = PAGE.format(seconds=time.monotonic() - started, table=table(head, lines), best="\n".join(best), why=why)
    (HERE / "search.md").write_text(text, encoding="utf-8")
    print(table(head, lines))


def _top(found: Search) -> str:
    rows = [
        [layout_words(one.case), one.case.layout.micro_batch, f"{one.seconds:.2f}", f"{one.peak_bytes / GIB:.0f}"] for one in found.best
    ]
    return table(["layout", "micro-batch", "step s", "GiB"], rows)


if __name__ == "__main__":
    main()
