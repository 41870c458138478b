"""Curves for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from disttrain.errors import MissingExtraError
from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer


class TensorBoard(Callback):
    """Writes every logged metric as a scalar into the run folder's `tensorboard/`, from rank 0."""

    def __init__(self) -> None:
        """Raises MissingExtraError where tensorboard is not installed, without importing it."""
        if find_spec("tensorboard") is None:
            raise MissingExtraError("tensorboard", "tensorboard", "callbacks.tensorboard")
        self._writer: Any = None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Open the event file; what an earlier start wrote after this step is hidden."""
        if not trainer.is_lead or trainer.folder is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        step = trainer.progress.step
        self._writer = SummaryWriter(str(trainer.folder.subfolder("tensorboard")), purge_step=step + 1 if step else None)

    def on_log(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        """One scalar a metric; its slash makes the group."""
        if self._writer is not None:
            for name, value in row.items():
                self._writer.add_scalar(name, value, trainer.progress.step)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Keep what was logged."""
        self._close()

    def on_fit_end(self, trainer: Trainer) -> None:
        """Flush and close the event file."""
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
