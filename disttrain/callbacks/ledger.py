"""What ranks say to each other in a step: bytes sent, by axis and collective, counted in every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from disttrain.parallel import collectives
from disttrain.parallel.ledger import Books
from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer


class Ledger(Callback):
    """Logs `comm/<axis>/<collective>_bytes`: what a rank has sent in a step, in the mean since the last log point, from the second on.

    As all that is measured it has `_min` and `_max` over ranks beside it; `comm/<axis>/bytes` and `comm/bytes` are sums of the means.
    Evaluations and saves are left out. What it costs a step is measured in experiments/doctor.
    """

    def __init__(self) -> None:
        """Nothing is counted before the first step."""
        self._books: Books | None = None
        self._opened_at = self._pages = 0
        self._sent: dict[str, float] = {}
        self._names: list[str] = []

    def on_train_step_start(self, trainer: Trainer) -> None:
        """Before a step with a row: what the steps before it have sent; with local SGD, of each round up to where replicas meet."""
        step, every = trainer.progress.step, trainer.strategy.options.sync_every
        if self._books is None:
            self._books, self._opened_at = Books(trainer.mesh), step
        elif trainer.is_log_point(step + 1) if every == 1 else (step - self._opened_at) % every == 0:
            steps, self._opened_at = step - self._opened_at, step
            self._pages += 1
            self._sent = {name: moved / steps for name, moved in self._books.turn().items()}

    def measure(self, trainer: Trainer) -> Mapping[str, float]:
        """This rank's bytes a step. Names are those of all ranks, agreed upon once: a pipeline's stages say different things."""
        if not self._pages:
            return {}
        if not self._names:
            with trainer.mesh.uncounted():
                by_rank = collectives.gather_json(sorted(self._sent), trainer.mesh.axis("world"), trainer.device)
            self._names = sorted({name for names in by_rank for name in names})
        return {f"comm/{name}_bytes": self._sent.get(name, 0.0) for name in self._names}

    def derive(self, trainer: Trainer, row: Mapping[str, float]) -> Mapping[str, float]:
        """Sums by axis, and over all; none in a row without measurements, as that of a stop between two log points."""
        found: dict[str, float] = {}
        measured = [name for name in self._names if f"comm/{name}_bytes" in row]
        for name in measured:
            axis, num_bytes = f"comm/{name.partition('/')[0]}/bytes", row[f"comm/{name}_bytes"]
            found |= {axis: found.get(axis, 0.0) + num_bytes, "comm/bytes": found.get("comm/bytes", 0.0) + num_bytes}
        return found
