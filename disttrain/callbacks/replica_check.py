"""Is what should be equal over ranks equal?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from disttrain.callbacks import replicas
from disttrain.config.limits import check_limits
from disttrain.errors import ConfigError
from disttrain.parallel.step import Report
from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer

WHAT = ("batches", "random", "gradients", "weights")
KEY = "callbacks.replica_check"


class ReplicaCheck(Callback):
    """Every so many steps, hashes of what ranks hold are compared over all that should hold the same.

    Which those are, the layout says (`replicas.py`). The first difference ends the run on all ranks and is named, with the
    ranks that are off; the checkpoints stay. A check costs one host read and a few bytes over the world a tensor.
    """

    def __init__(self, every: int = 100, what: Sequence[str] = ("weights",)) -> None:
        """`every` in steps; `what` of batches, random, gradients, weights, each compared as soon as the step has it."""
        check_limits("replica_check", {"every": every})
        if not what or set(what) - set(WHAT):
            raise ConfigError(f"{KEY}.what is {list(what)}; it may hold {', '.join(WHAT)}", f"{KEY}.what=[gradients,weights]")
        self.every, self.what = every, frozenset(what)

    def on_train_step_start(self, trainer: Trainer) -> None:
        """Batches, before they are used."""
        if trainer.step is not None and self._is_due(trainer, trainer.progress.step + 1, "batches"):
            replicas.check_batch(trainer, KEY, trainer.step)

    def on_before_optimizer_step(self, trainer: Trainer, report: Report) -> None:
        """What forward and backward have left: random streams, gradients."""
        if self._is_due(trainer, trainer.progress.step + 1, "random"):
            replicas.check_random(trainer, KEY)
        if self._is_due(trainer, trainer.progress.step + 1, "gradients"):
            replicas.check_gradients(trainer, KEY)

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        """Weights. DivergedError on all ranks alike."""
        if self._is_due(trainer, trainer.progress.step, "weights"):
            replicas.check_weights(trainer, KEY)

    def _is_due(self, trainer: Trainer, step: int, what: str) -> bool:
        return what in self.what and step % self.every == 0 and trainer.mesh.size > 1
