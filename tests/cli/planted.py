"""What runs of the command line carry: callbacks that tell what their rank sees or fail, and a data set of a user's own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from disttrain.texts import write_json
from disttrain.train.hooks import Callback
from tests.launch.processes import sign_in

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer


class Witness(Callback):
    """Writes what its rank sees of the run into the folder `into`, one file a rank and job."""

    def __init__(self, into: str) -> None:
        self.into = Path(into)

    def on_fit_start(self, trainer: Trainer) -> None:
        config, folder = trainer.config, trainer.folder
        assert config is not None
        assert folder is not None
        seen = {
            "rank": trainer.mesh.rank,
            "folder": str(folder.path),
            "lr": config.optimizer["lr"],
            "run_name": config.run_name,
            "tags": config.tags,
            "dataset": config.dataset,
        }
        write_json(self.into / f"{folder.path.name}-{trainer.mesh.rank}.json", seen)
        sign_in(self.into)

    def on_fit_end(self, trainer: Trainer) -> None:
        write_json(self.into / f"modules-{trainer.mesh.rank}.json", sorted({name.partition(".")[0] for name in sys.modules}))


class Fails(Callback):
    """Raises in step `step` on `rank`, in the job whose base rate is `lr`, as soon as rank 0's W&B run is open."""

    def __init__(self, rank: int, step: int, lr: float) -> None:
        self.rank, self.step, self.lr = rank, step, lr

    def on_train_step_start(self, trainer: Trainer) -> None:
        assert trainer.config is not None
        here = trainer.mesh.rank == self.rank and trainer.progress.step + 1 == self.step
        if here and trainer.config.optimizer["lr"] == self.lr:
            self.wait_for_wandb(trainer)
            raise ArithmeticError("planted")

    def wait_for_wandb(self, trainer: Trainer) -> None:
        """Importing and opening it takes seconds on a busy machine; its file then holds more than its seven bytes of header."""
        assert trainer.folder is not None
        deadline = time.monotonic() + 30
        while not any(file.stat().st_size > 7 for file in trainer.folder.path.glob("wandb/*/*.wandb")):
            assert time.monotonic() < deadline, "W&B has not opened its file"
            time.sleep(0.05)


class Sequences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What a user may bring: samples with a length and an index."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = (torch.arange(9) * (1 + index)) % 32
        return tokens[:-1], tokens[1:]
