"""A save that is cut off, or fails, at each of its writes, fsyncs, renames and new folders: what is left still loads.

    python experiments/crash_safety/inject.py [--ranks 1 2]

A run has a good checkpoint. It saves another one (a later step, or the same step again), and one operation on the disk
goes wrong on one rank: the process dies before it, or in the middle of a write; the disk is full; the folder can only
be read. Then the newest good checkpoint is looked for, as a resume does, and loaded: it must be the earlier state or
the later one, whole, and the next save must succeed. Prints a table by kind of fault and writes `table.md`.
"""

from __future__ import annotations

import argparse
import errno
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from disttrain.checkpoint.load import latest_good, load
from disttrain.checkpoint.save import Saver, save
from disttrain.checkpoint.state import State
from disttrain.launch.place import Place, alone
from disttrain.launch.world import supervise
from disttrain.parallel.layout import Cut, Layout
from disttrain.parallel.mesh import Mesh

HERE = Path(__file__).resolve().parent
OPERATIONS = ("open", "write", "fsync", "rename", "mkdir")
FAULTS = ("death", "death in the middle", "disk full", "read-only")
ERRORS = {"disk full": errno.ENOSPC, "read-only": errno.EROFS}
EARLIER, LATER = 1.0, 2.0
DIED = 77
ROWS = 64


@dataclass(frozen=True)
class Case:
    """What goes wrong at which operation of which rank, in a save of which step."""

    fault: str
    operation: int
    """Number of the operation, from 1."""
    rank: int
    step: int
    """1: the good checkpoint's own, which is replaced."""


def state_of(mesh: Mesh, value: float) -> State:
    """Two tensors: one that ranks of `tp` hold in halves, one that all hold."""
    degrees = {"tp": mesh.degrees["tp"]}
    cut = Layout((ROWS, 4), {"tp": Cut(0)} if degrees["tp"] > 1 else {}, degrees)
    tensors = {
        "model/cut": (torch.full(cut.local_shape(mesh.coordinate()), value), cut),
        "optimizer/whole": (torch.full((ROWS,), value), Layout((ROWS,))),
    }
    return State(tensors, {"value": value, "by_rank": mesh.rank, "by_name": {"optimizer": {f"rank {mesh.rank}": {"value": value}}}})


def mesh_of(place: Place) -> Mesh:
    """All ranks on `tp`."""
    return Mesh({"tp": place.world_size}, place.rank)


class Injector:
    """Counts operations on the disk, and lets one go wrong."""

    def __init__(self, fault: str | None, operation: int) -> None:
        self.fault, self.operation = fault, operation
        self.count = 0
        self.last = ""

    def call(self, name: str, plain: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The operation, or its fault. One that is possible no longer stays so: a full disk does not empty itself."""
        self.count += 1
        if self.fault is None or self.count < self.operation or (self.fault.startswith("death") and self.count > self.operation):
            return plain(*arguments, **options)
        if self.fault == "death in the middle" and name == "write":
            file, data = arguments
            plain(file, data[: len(data) // 2])
        if self.fault.startswith("death"):
            os._exit(DIED)
        creates = name in ("open", "write", "mkdir", "rename", "fsync") if self.fault == "disk full" else name != "fsync"
        if creates and not (name == "open" and not arguments[1] & os.O_CREAT):
            number = ERRORS[self.fault]
            raise OSError(number, os.strerror(number))
        return plain(*arguments, **options)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place of the operating system's own, in this process."""
        before = {name: getattr(os, name) for name in OPERATIONS}
        for name, plain in before.items():
            setattr(os, name, partial(self.call, name, plain))
        try:
            yield
        finally:
            for name, plain in before.items():
                setattr(os, name, plain)


def save_once(place: Place, run: Path, case: Case | None) -> tuple[int, list[str | None]]:
    """Save the later state with the fault; (operations, errors)."""
    mesh = mesh_of(place)
    saver = Saver(run / "checkpoints", mesh)
    here = case is not None and case.rank == place.rank
    injector = Injector(case.fault if case is not None and here else None, case.operation if case is not None else 0)
    with injector.installed():
        saver.save(state_of(mesh, LATER), case.step if case is not None else 2)
        ended = saver.drain()
    saver.close()
    return injector.count, [saved.error for saved in ended]


def prepare(place: Place, run: Path) -> None:
    """The good checkpoint."""
    mesh = mesh_of(place)
    save(state_of(mesh, EARLIER), run / "checkpoints" / "step-1", mesh)


def read_back(place: Place, run: Path) -> float:
    """The value that every tensor and every plain value of the newest good checkpoint has; then save once more."""
    mesh = mesh_of(place)
    found = latest_good(run, mesh.axis("world"))
    assert found.folder is not None, found.passed_over
    state = state_of(mesh, -1.0)
    load(state, found.folder, mesh, checked=True)
    value = float(state.values["value"])
    assert all(bool((tensor == value).all()) for tensor, _ in state.tensors.values())
    assert state.values["by_rank"] == place.rank
    assert len(state.values["by_name"]["optimizer"]) == place.world_size
    save(state_of(mesh, LATER), run / "checkpoints" / "step-3", mesh)
    assert latest_good(run, mesh.axis("world")) == type(found)(run / "checkpoints" / "step-3", [])
    assert not [left.name for left in (run / "checkpoints").iterdir() if left.name.endswith(".partial")]
    return value


def in_world(ranks: int, entry: Callable[..., Any], *arguments: Any) -> list[Any] | None:
    """Results by rank, or None where one died of its fault. One rank that has none to die of needs no process of its own."""
    if ranks == 1 and entry is not save_once:
        return [entry(alone(), *arguments)]
    outcome = supervise(entry, ranks, arguments, timeout_seconds=30)
    if outcome.exit_code != 0:
        assert outcome.failure is not None
        assert outcome.failure.message.startswith(f"the process left with exit status {DIED}"), str(outcome.failure)
        return None
    return outcome.results


def run_case(case: Case, ranks: int) -> str:
    """One fault; which state was found afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        in_world(ranks, prepare, run)
        saved = in_world(ranks, save_once, run, case)
        values = in_world(ranks, read_back, run)
    assert values is not None
    assert len(set(values)) == 1
    assert values[0] == LATER or saved is None or all(errors[0] for _, errors in saved), "a failure that was not reported"
    return {EARLIER: "earlier", LATER: "later"}[values[0]]


def cases_of(ranks: int, faults: tuple[str, ...] = FAULTS, steps: tuple[int, ...] = (1, 2)) -> list[Case]:
    """Every operation of a save, by rank, with every fault."""
    with tempfile.TemporaryDirectory() as folder:
        counts = in_world(ranks, save_once, Path(folder), None)
    assert counts is not None
    reach = [count for count, _ in counts]
    return [
        Case(fault, operation, rank, step)
        for step in steps
        for fault in faults
        for rank in range(ranks)
        for operation in range(1, reach[rank] + 1)
    ]


def main() -> None:
    """Every case, a table, and an exit code that tells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--table", type=Path, default=HERE / "table.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so that ranks can be forked
    lines = ["| ranks | save of | fault | places | earlier state found | later state found |", "|---|---|---|---|---|---|"]
    for ranks in arguments.ranks:
        found: Counter[tuple[int, str, str]] = Counter()
        for case in cases_of(ranks):
            found[case.step, case.fault, run_case(case, ranks)] += 1
        for step, words in ((2, "a later step"), (1, "the same step")):
            for fault in FAULTS:
                earlier, later = found[step, fault, "earlier"], found[step, fault, "later"]
                lines.append(f"| {ranks} | {words} | {fault} | {earlier + later} | {earlier} | {later} |")
    print("\n".join(lines))
    about = f"Written by `inject.py` on {date.today().isoformat()}. Every case ended with a whole state, and the next save succeeded.\n"
    arguments.table.write_text(about + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
