"""The state of a run: gathered for a checkpoint, and taken up again from one, in any layout."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain.checkpoint.files import read_values
from disttrain.checkpoint.load import Found, index_of, latest_good, load
from disttrain.checkpoint.state import State
from disttrain.errors import CheckpointError, DivergedError
from disttrain.parallel.materialise import share_buffers
from disttrain.train.rows import Sums

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer

_log = logging.getLogger(__name__)


def state_of(trainer: Trainer) -> State:
    """The run as it stands, after a step: this rank's parts and the values that all ranks share."""
    share_buffers(trainer.model, trainer.mesh.axis("data"))
    state = State()
    state.tensors |= {f"model/{name}": held for name, held in trainer.strategy.weights().items()}
    moments = trainer.update.state_tensors(trainer.parameters, trainer.layouts)
    state.tensors |= {f"optimizer/{name}": held for name, held in moments.items()}
    state.tensors |= {f"compression/{name}": held for name, held in trainer.strategy.kept().items()}
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
        "by_name": {"optimizer": trainer.update.state_by_name(trainer.parameters)},
    }
    return state


def restore(trainer: Trainer, folder: Path, checked: bool = False) -> list[str]:
    """Take up the checkpoint `folder`, whatever layout wrote it, before `fit`. Returns what a person should know.

    `checked`: every file was compared with its checksum already.
    """
    trainer.update.check_saved(read_values(folder).get("update", {}))
    had_state = {name.split("/")[1] for name in index_of(folder) if name.startswith("optimizer/")}
    trainer.update.make_state([parameter for name, parameter in trainer.parameters.items() if name in had_state])
    state = state_of(trainer)
    notes = load(state, folder, trainer.mesh, checked=checked)
    _check_data(trainer, state.values["data"], folder)
    trainer.progress.load_state_dict(state.values["progress"])
    _take_moments(trainer, state)
    trainer.metrics |= state.values["metrics"]
    if state.values["sums"] is not None:
        trainer.sums = Sums.restored(state.values["sums"], trainer.device, trainer.strategy.apart)
    for key, callback in trainer.callbacks.items():
        if key in state.values["callbacks"]:  # one that was added for this start begins anew
            callback.load_state_dict(state.values["callbacks"][key])
    trainer.call("on_load_checkpoint", state)
    return notes


def _take_moments(trainer: Trainer, state: State) -> None:
    """Give the update what `load` has filled."""
    kept = {name: tensor for name, (tensor, _) in state.tensors.items()}
    trainer.update.load_tensors({name.removeprefix("optimizer/"): x for name, x in kept.items() if name.startswith("optimizer/")})
    trainer.update.load_state_dict(state.values["update"])
    trainer.update.load_by_name(trainer.parameters, state.values["by_name"]["optimizer"])


def roll_back(trainer: Trainer) -> None:
    """Take weights, moments, loss scale and count of updates of the newest good checkpoint; the run goes on with its next batch.

    The position stays, so the batches that led here are behind and can't do so again (as PaLM was trained past its spikes:
    Chowdhery et al. 2022, arXiv:2204.02311, section 5.1). Every rank calls it. DivergedError on all where there is none.
    """
    trainer.call("on_roll_back")
    found = latest_good(trainer.folder.path, trainer.mesh.axis("world")) if trainer.folder is not None else Found(None, [])
    step = trainer.progress.step
    if found.folder is None:
        remedy = "callbacks.checkpoint.every=<steps>" if trainer.folder is not None else "Trainer(..., folder=RunFolder.make(<place>))"
        raise DivergedError(f"at step {step} the run was to roll back, and there is no good checkpoint yet\n  try: {remedy}")
    state = state_of(trainer)
    load(state, found.folder, trainer.mesh, checked=True)
    _take_moments(trainer, state)
    if trainer.is_lead:
        for passed_over in found.passed_over:
            _log.warning("%s", passed_over)
        _log.warning("step %d: rolled back to the weights of %s; goes on with the next batch", step, found.folder.name)


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
