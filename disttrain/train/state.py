"""The state of a run: gathered for a checkpoint, and taken up again from one, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from disttrain.checkpoint.load import load
from disttrain.checkpoint.state import State
from disttrain.train.rows import Sums

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer


def state_of(trainer: Trainer) -> State:
    """The run as it stands, after a step: this rank's parts and the values that all ranks share."""
    state = State()
    state.tensors |= {f"model/{name}": held for name, held in trainer.strategy.weights().items()}
    moments = trainer.update.state_tensors(trainer.parameters, trainer.layouts)
    state.tensors |= {f"optimizer/{name}": held for name, held in moments.items()}
    for key, callback in trainer.callbacks.items():
        for name, tensor in callback.state_tensors(trainer).items():
            state.tensors[f"callbacks/{key}/{name}"] = (tensor, trainer.layouts[name.split("/", 1)[1]])
    state.values = {
        "progress": trainer.progress.state_dict(),
        "update": trainer.update.state_dict(),
        "sums": None if trainer.sums is None else trainer.sums.state(),
        "callbacks": {key: callback.state_dict() for key, callback in trainer.callbacks.items()},
    }
    return state


def restore(trainer: Trainer, folder: Path) -> list[str]:
    """Take up the checkpoint `folder`, whatever layout wrote it, before `fit`. Returns what a person should know."""
    trainer.update.make_state()
    state = state_of(trainer)
    notes = load(state, folder, trainer.mesh)
    trainer.progress.load_state_dict(state.values["progress"])
    trainer.update.load_state_dict(state.values["update"])
    if state.values["sums"] is not None:
        trainer.sums = Sums.restored(state.values["sums"], trainer.device)
    for key, callback in trainer.callbacks.items():
        if key in state.values["callbacks"]:  # one that was added for this start begins anew
            callback.load_state_dict(state.values["callbacks"][key])
    trainer.call("on_load_checkpoint", state)
    return notes


def load_weights(trainer: Trainer, folder: Path) -> list[str]:
    """Take the weights of the checkpoint `folder` and nothing else."""
    return load(state_of(trainer), folder, trainer.mesh, {"model"})
