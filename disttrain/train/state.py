"""The state of a run: gathered for a checkpoint, and taken up again from one, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain.checkpoint.load import index_of, load
from disttrain.checkpoint.state import State
from disttrain.errors import CheckpointError
from disttrain.train.rows import Sums

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer


def state_of(trainer: Trainer) -> State:
    """The run as it stands, after a step: this rank's parts and the values that all ranks share."""
    trainer.strategy.share_buffers()
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
        "data": {"fingerprint": trainer.feed.fingerprint, "global_batch_size": trainer.feed.order.global_batch_size},
        "metrics": trainer.metrics,
        "sums": None if trainer.sums is None else trainer.sums.state(),
        "callbacks": {key: callback.state_dict() for key, callback in trainer.callbacks.items()},
    }
    return state


def restore(trainer: Trainer, folder: Path) -> list[str]:
    """Take up the checkpoint `folder`, whatever layout wrote it, before `fit`. Returns what a person should know."""
    had_state = {name.split("/")[1] for name in index_of(folder) if name.startswith("optimizer/")}
    trainer.update.make_state([parameter for name, parameter in trainer.parameters.items() if name in had_state])
    state = state_of(trainer)
    notes = load(state, folder, trainer.mesh)
    _check_data(trainer, state.values["data"], folder)
    trainer.progress.load_state_dict(state.values["progress"])
    trainer.update.load_state_dict(state.values["update"])
    trainer.metrics |= state.values["metrics"]
    if state.values["sums"] is not None:
        trainer.sums = Sums.restored(state.values["sums"], trainer.device)
    for key, callback in trainer.callbacks.items():
        if key in state.values["callbacks"]:  # one that was added for this start begins anew
            callback.load_state_dict(state.values["callbacks"][key])
    trainer.call("on_load_checkpoint", state)
    return notes


def _check_data(trainer: Trainer, saved: dict[str, Any], folder: Path) -> None:
    """A position means something in the data and the batches it was made in only."""
    order = trainer.feed.order
    if saved["fingerprint"] != trainer.feed.fingerprint:
        raise CheckpointError(
            f"{folder.name} was written while training on other data (dataset.*)", f"init_from={folder} takes its weights and starts anew"
        )
    if saved["global_batch_size"] != order.global_batch_size:
        raise CheckpointError(
            f"{folder.name} was written in batches of {saved['global_batch_size']}, not of {order.global_batch_size} samples",
            f"train.global_batch_size={saved['global_batch_size']}, or init_from={folder} to start anew from its weights",
        )


def load_weights(trainer: Trainer, folder: Path) -> list[str]:
    """Take the weights of the checkpoint `folder` and nothing else."""
    return load(state_of(trainer), folder, trainer.mesh, {"model"})
