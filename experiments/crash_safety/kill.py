"""Runs that are killed at random moments end with the weights of the unbroken run, bit for bit.

    python experiments/crash_safety/kill.py [--kills 200] [--seed 0] [--only fsdp]

For each layout one run is left alone. Then runs of the same config are killed by SIGKILL, and go on: by a restart in
place (`launch.max_restarts=1`) where the victim was a rank, by `resume=` where it was the parent. Every second kill
falls inside a save: the n-th operation on the disk (open, write, fsync, rename, mkdir) of the writer's thread of some
rank, n drawn at random, ends that rank or the parent. The other half comes from outside, after a time drawn at random.

Asked of each: exit code 0; the last checkpoint's tensors and the losses of all steps equal to the unbroken run's;
every checkpoint of the run there and whole; none passed over and none thrown away; no file of a save left over; no
process left. Prints a table by layout and victim and writes `kills.md`. Exits 1 if anything was otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import psutil
import torch

torch.set_num_threads(1)  # before anything computes: ranks are forked from this process

HERE = Path(__file__).resolve().parent
sys.path[:0] = [root for root in [str(HERE.parents[1])] if root not in sys.path]  # ranks import `killer` by its name

from disttrain import build  # noqa: E402
from disttrain.checkpoint.files import read_manifest, steps_in  # noqa: E402
from disttrain.checkpoint.load import damage  # noqa: E402
from disttrain.cli import ready  # noqa: E402
from disttrain.config.compose import compose, composer, parse  # noqa: E402
from disttrain.config.schema import Config  # noqa: E402
from disttrain.launch import job  # noqa: E402
from disttrain.launch.environment import Environment  # noqa: E402
from disttrain.record import RunFolder  # noqa: E402

NUM_STEPS, EVERY = 9, 2
LIMIT_SECONDS = 600.0
LAYOUTS: dict[str, list[str]] = {
    "ddp 2": ["strategy=ddp", "launch.world_size=2"],
    "ddp 4": ["strategy=ddp", "launch.world_size=4"],
    "fsdp 2": ["strategy=fsdp", "launch.world_size=2"],
    "tensor 2": ["strategy=tensor_parallel", "launch.world_size=2"],
    "pipeline 2": ["strategy=pipeline_parallel", "launch.world_size=2"],
    "hybrid 8": ["strategy=hybrid_3d", "launch.world_size=8"],
}
TINY = [
    *("model=tiny_gpt", "model.num_layers=2", "model.hidden_size=32", "model.vocab_size=32", "model.max_seq_len=16"),
    *("dataset=synthetic", "+dataset.kind=tokens", "+dataset.context=16", "+dataset.vocab_size=32", "+dataset.num_samples=64"),
    *("dataset.shape=[16]", "callbacks=[grad_accumulation,checkpoint,jsonl]", "callbacks.grad_accumulation.micro_batch_size=2"),
    *("train.global_batch_size=8", f"train.steps={NUM_STEPS}", "train.log_every=1", "train.eval_every=null", "launch.device=cpu"),
    *("launch.threads=1", f"callbacks.checkpoint.every={EVERY}", "callbacks.checkpoint.keep_last=null", "launch.max_restarts=1"),
]


@dataclass(frozen=True)
class Case:
    """Who is killed when."""

    layout: str
    victim: str
    """'rank' or 'parent'."""
    rank: int
    """The victim, or in whose save the parent is killed."""
    operation: int | None
    """Of that rank's writer, from 1; None: after a time."""
    seconds: float = 0.0

    @property
    def place(self) -> str:
        """Where the kill falls, for the table."""
        return "any time" if self.operation is None else "inside a save"


@dataclass(frozen=True)
class Unbroken:
    """The run that nobody disturbed."""

    config: Config
    weights: dict[int, dict[str, str]]
    losses: list[float]
    seconds: float
    operations: list[int]
    """By rank."""


def config_of(layout: str) -> Config:
    """The checked config, as the command line makes it."""
    request = parse([*LAYOUTS[layout], *TINY])
    with composer(request) as app:
        _, config = compose(app, request)
        return ready(config, Environment("alone"), os.getcwd())


def killing(config: Config, case: Case | None, once: Path) -> Config:
    """The config with the callback that counts, and kills if the case says so."""
    how = {} if case is None else {"rank": case.rank, "operation": case.operation, "victim": case.victim}
    kill = {"_target_": "experiments.crash_safety.killer.Kill", "once": str(once), **how}
    return replace(config, callbacks=config.callbacks | {"kill": kill})


def start(config: Config, outputs: Path, log: Path, folder: Path | None = None) -> int:
    """Fork the owner of a run, which makes its folder in `outputs` or goes on in `folder`. Returns its process id."""
    owner = os.fork()
    if owner == 0:
        status = 99
        try:
            os.setpgid(0, 0)
            written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(written, 1)
            os.dup2(written, 2)
            if folder is not None:
                config = replace(config, resume=str(folder))
            made = {"outputs": outputs} if folder is None else {"resume": folder}
            status = job.run(job.Job(config, "disttrain.build:train", **made), Environment("alone")).exit_code
        finally:
            os._exit(status)
    return owner


def below(owner: int) -> list[psutil.Process]:
    """What the owner has started and not yet buried."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(owner).children(recursive=True)
    return []


def wait(owner: int, seen: dict[int, psutil.Process]) -> int:
    """Its exit code, or minus the signal that ended it; `seen` gets every process that was below it."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        seen |= {process.pid: process for process in below(owner)}
        pid, status = os.waitpid(owner, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(owner, signal.SIGKILL)
            raise TimeoutError(f"the run has not ended within {LIMIT_SECONDS:g} s")
        time.sleep(0.02)


def kill_after(owner: int, case: Case) -> None:
    """Kill the victim after the case's time, if the run is still there."""
    time.sleep(case.seconds)
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        children = sorted(psutil.Process(owner).children(), key=lambda process: process.pid)
        if case.victim == "parent" or len(children) > case.rank:
            os.kill(owner if case.victim == "parent" else children[case.rank].pid, signal.SIGKILL)


def weights_of(folder: Path) -> dict[int, dict[str, str]]:
    """By step, the checksum of every file of tensors."""
    steps = steps_in(folder / "checkpoints")
    manifests = {step: read_manifest(folder / "checkpoints" / f"step-{step}") for step in steps}
    return {step: {line.path: line.crc32 for line in lines if line.path.endswith(".safetensors")} for step, lines in manifests.items()}


def losses_of(folder: Path) -> list[float]:
    """The loss of every row, in order."""
    return [row["train/loss"] for row in RunFolder(folder).read() if "train/loss" in row]


def leave_alone(layout: str, outputs: Path) -> Unbroken:
    """Run it to the end."""
    config = config_of(layout)
    build.prepare(config)
    outputs.mkdir()
    began = time.monotonic()
    code = wait(start(killing(config, None, outputs / "once"), outputs, outputs / "log"), {})
    assert code == 0, (outputs / "log").read_text()
    (folder,) = outputs.glob("*/*-*-*-*")
    operations = [int((outputs / f"operations-{rank}").read_text()) for rank in range(int(config.launch.world_size))]
    return Unbroken(config, weights_of(folder), losses_of(folder), time.monotonic() - began, operations)


def draw(layout: str, unbroken: Unbroken, number: int, seed: int) -> Case:
    """The `number`-th kill of a layout: every third the parent, every second inside a save."""
    dice = random.Random(f"{seed} {layout} {number}")
    rank = dice.randrange(len(unbroken.operations))
    victim = "parent" if dice.random() < 1 / 3 else "rank"
    if number % 2 == 0:
        return Case(layout, victim, rank, dice.randint(1, unbroken.operations[rank]))
    return Case(layout, victim, rank, None, dice.uniform(0.0, unbroken.seconds))


def run_case(case: Case, unbroken: Unbroken, outputs: Path) -> list[str]:
    """Kill, go on, and look: what is not as it should be."""
    outputs.mkdir()
    log, config, seen = outputs / "log", killing(unbroken.config, case, outputs / "once"), dict[int, psutil.Process]()
    owner = start(config, outputs, log)
    if case.operation is None:
        threading.Thread(target=kill_after, args=(owner, case)).start()
    code = wait(owner, seen)
    folders = list(outputs.glob("*/*-*-*-*"))
    wrong = [f"process {process.pid} is left" for process in _left(seen)]
    if code == -signal.SIGKILL:
        for folder in folders:
            wrong += [text for step in steps_in(folder / "checkpoints") for text in damage(folder / "checkpoints" / f"step-{step}")]
        code = wait(start(config, outputs, log, folders[0] if folders else None), seen)
        folders = list(outputs.glob("*/*-*-*-*"))
    if code != 0:
        return [*wrong, f"exit code {code}: {log.read_text()[-2000:]}"]
    (folder,) = folders
    wrong += [f"process {process.pid} is left" for process in _left(seen)]
    wrong += [text for step in steps_in(folder / "checkpoints") for text in damage(folder / "checkpoints" / f"step-{step}")]
    if weights_of(folder) != unbroken.weights:
        wrong.append(f"other weights than the unbroken run's: steps {sorted(weights_of(folder))}")
    if losses_of(folder) != unbroken.losses:
        wrong.append(f"other losses: {losses_of(folder)} instead of {unbroken.losses}")
    if "passed over" in log.read_text() or (folder / "superseded").exists():
        wrong.append("a checkpoint was passed over or thrown away")
    wrong += [f"{left.name} is left" for left in (folder / "checkpoints").iterdir() if left.name.startswith(".step")]
    return wrong


def _left(seen: dict[int, psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended a moment later."""
    return [process for process in psutil.wait_procs(list(seen.values()), timeout=5.0)[1] if process.status() != psutil.STATUS_ZOMBIE]


def matrix(layouts: list[str], kills: int, seed: int) -> Iterator[tuple[Case, list[str]]]:
    """The kills, dealt out over the layouts in turn, and what was wrong after each."""
    with tempfile.TemporaryDirectory() as folder:
        unbroken = {layout: leave_alone(layout, Path(folder) / f"unbroken-{number}") for number, layout in enumerate(layouts)}
        for number in range(kills):
            layout = layouts[number % len(layouts)]
            case = draw(layout, unbroken[layout], number // len(layouts), seed)
            try:
                wrong = run_case(case, unbroken[layout], Path(folder) / f"kill-{number}")
            except TimeoutError as error:
                wrong = [str(error)]
            yield case, wrong


def main() -> int:
    """Every kill, a table, and an exit code that tells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    parser.add_argument("--table", type=Path, default=HERE / "kills.md")
    options = parser.parse_args()
    found: Counter[tuple[str, str, str, bool]] = Counter()
    num_wrong = 0
    layouts = [layout for layout in LAYOUTS if options.only in layout]
    for number, (case, wrong) in enumerate(matrix(layouts, options.kills, options.seed), start=1):
        print(f"{number} of {options.kills}: {case}: {'; '.join(wrong) or 'as unbroken'}", flush=True)
        found[case.layout, case.victim, case.place, not wrong] += 1
        num_wrong += bool(wrong)
        options.table.write_text(table(found, layouts, options.seed))
    print(table(found, layouts, options.seed))
    return 1 if num_wrong else 0


def table(found: Counter[tuple[str, str, str, bool]], layouts: list[str], seed: int) -> str:
    """What has been found so far."""
    right = sum(count for (*_, as_unbroken), count in found.items() if as_unbroken)
    lines = [
        f"Written by `kill.py --seed {seed}` on {date.today().isoformat()}: {sum(found.values())} kills, {right} ended as unbroken.",
        "",
        "| layout | victim | moment | kills | as unbroken |",
        "|---|---|---|---|---|",
    ]
    for layout in layouts:
        for victim in ("rank", "parent"):
            for place in ("any time", "inside a save"):
                counts = [found[layout, victim, place, as_unbroken] for as_unbroken in (True, False)]
                lines += [f"| {layout} | {victim} | {place} | {sum(counts)} | {counts[0]} |"] if any(counts) else []
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
