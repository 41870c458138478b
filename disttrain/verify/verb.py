"""`verify`: does this layout compute what one device computes? The parent's part: two worlds, one table, one verdict."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from disttrain.config.schema import Config
from disttrain.config.world import DEGREES
from disttrain.launch.place import Place
from disttrain.launch.world import run_world_of
from disttrain.verify import ranks, shrink
from disttrain.verify.compare import Error, likely_cause, worst_by_name, worst_by_step

Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Proof:
    """What a comparison found."""

    errors: list[Error]
    """The worst of each (quantity, name) over steps and ranks."""
    first: Error | None
    """The first in time that is off."""
    tolerance: float
    cause: str
    notes: list[str]

    @property
    def failed(self) -> list[Error]:
        """What is off at its worst, in the order of a step."""
        return [error for error in self.errors if not error.error <= self.tolerance]

    @property
    def equal(self) -> bool:
        """Whether the layout computes what one device computes."""
        return not self.failed

    def worst(self, quantity: str) -> float:
        """Largest error of a quantity; 0 where it was not compared."""
        return max((error.error for error in self.errors if error.quantity == quantity), default=0.0)


def prove(config: Config) -> Proof:
    """Run one device, then the layout beside its record."""
    with tempfile.TemporaryDirectory(prefix="disttrain-verify-") as folder:
        record(config, folder)
        return compare(config, folder)


def record(config: Config, folder: str) -> None:
    """Write what one device computes into `folder`."""
    small, _ = shrink.shrunk(config)
    _world(ranks.reference, shrink.one_device(small), folder)


def compare(config: Config, folder: str, around: Around = nullcontext) -> Proof:
    """Run the layout beside the record in `folder`. `around()` is entered on each of its ranks: tests plant faults by it."""
    small, notes = shrink.shrunk(config)
    found = _world(ranks.layout, small, folder, around)
    drawn = json.loads((Path(folder) / ranks.DRAWN).read_text(encoding="utf-8"))
    if drawn["rates"]:
        shown = ", ".join(f"{rate:g}" for rate in sorted(set(drawn["rates"].values())))
        notes.append(f"dropout {shown}: equality shown at 0, masks compared over the tensor group at {shown}")
        found += _world(ranks.mask_law, small, folder, around)
    if drawn["still_draws"]:
        notes.append("the model draws random numbers by more than the dropout that its modules name (drop..., p): this can't be equal")
    by_step = worst_by_step([Error.from_json(error) for error in found])
    errors, limit = worst_by_name(by_step), shrink.tolerance(config)
    first = next((error for error in by_step if not error.error <= limit), None)
    failed = [error for error in errors if not error.error <= limit]
    degrees = {name: getattr(small.strategy, name) for name in DEGREES}
    cause = likely_cause(failed, degrees, shrink.micro_batches(small)[1]) if failed else ""
    return Proof(errors, first, limit, cause, notes)


def _world(entry: Callable[..., Any], config: Config, folder: str, around: Around = nullcontext) -> list[Any]:
    """`entry(config, folder, place)` on every rank; what the first returned."""
    return run_world_of(config, partial(_call, entry, around), (config, folder))[0] or []


def _call(entry: Callable[..., Any], around: Around, place: Place, config: Config, folder: str) -> Any:
    with around():
        return entry(config, folder, place)


def main(config: Config, overrides: Sequence[str] = ()) -> int:
    """Prove, print the table, return the exit code: 0 equal, 1 not, or not by design."""
    from disttrain import build

    build.prepare(config)
    proof = prove(config)
    _print(config, proof)
    return 0 if proof.equal and not shrink.lossy_by_design(config) else 1


def _print(config: Config, proof: Proof) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    strategy = config.strategy
    degrees = [f"{name} {getattr(strategy, name)}" for name in (*DEGREES, "ep") if getattr(strategy, name) > 1]
    layout = f"{strategy.name} ({' x '.join(degrees) or 'one rank'})"
    title = f"{layout} against one device, {shrink.dtype_of(config)}, steps: {config.verify.steps}"
    console.print(title, soft_wrap=True)
    table = Table(box=box.SIMPLE)
    for column in ("compared", "worst", "largest relative error", ""):
        table.add_column(column, justify="right" if "error" in column else "left", overflow="fold")
    for quantity in dict.fromkeys(error.quantity for error in proof.errors):
        worst = max((error for error in proof.errors if error.quantity == quantity), key=lambda error: error.error)
        table.add_row(quantity, worst.name, f"{worst.error:.2e}", "ok" if worst.error <= proof.tolerance else "[bold red]off[/]")
    off = [error for error in proof.failed if error.quantity in ("gradient", "update")]
    for error in off:
        factor = "" if error.ratio is None else f"{error.ratio:.6g} x the reference"
        table.add_row(f"  {error.quantity}", error.name, f"{error.error:.2e}", f"step {error.step}, rank {error.rank} {factor}")
    console.print(table)
    for note in proof.notes:
        console.print(f"  made small: {note}" if "->" in note else f"  {note}")
    first = proof.first
    if reasons := shrink.lossy_by_design(config):
        drift = ", ".join(f"{quantity} {proof.worst(quantity):.2g}" for quantity in ("gradient", "norm", "loss", "update"))
        console.print(f"[bold yellow]Not the same training, by design[/]: {' and '.join(reasons)}. Largest relative drift: {drift}.")
        return
    if first is None:
        console.print(f"[bold green]The same training[/]: every error is at most {proof.tolerance:g}.")
        return
    where = f"{first.quantity} '{first.name}' at step {first.step} on rank {first.rank}"
    console.print(f"[bold red]Not the same training.[/] First off: {where}.")
    console.print(f"Likely cause: {proof.cause}.")
