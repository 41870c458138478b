"""The run's own record of its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer


class JSONL(Callback):
    """A row of `metrics.jsonl` at every log point, from rank 0. `report` and `doctor` read nothing else."""

    def on_log(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        """Append the row, with its step first."""
        if trainer.is_lead and trainer.folder is not None:
            trainer.folder.append({"step": trainer.progress.step, **row})

    def on_fit_end(self, trainer: Trainer) -> None:
        """Close the file."""
        if trainer.folder is not None:
            trainer.folder.close()
