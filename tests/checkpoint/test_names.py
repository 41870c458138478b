"""Names on disk are the model's own, whatever wrapped or compiled it; both ways, strictly (E07)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from disttrain.checkpoint.save import save
from disttrain.errors import CheckpointError
from disttrain.launch.place import Place, alone
from disttrain.models.gpt import GPT
from disttrain.train.state import restore, state_of
from tests import tiny
from tests.train.runs import WARM, copy_of, trainer_of

MODEL = tiny.GPT | {"num_layers": 1, "tie_embeddings": False}
PLAIN = {"model": MODEL, "steps": 1}
COMPILED = PLAIN | {"dp": 2, "strategy": {"compile": True, "compile_backend": "eager"}}


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's compiler looks at activations' .grad
@pytest.mark.world(2)
def test_a_compiled_replica_and_a_plain_model_read_each_others_files(run_world: Callable[..., list[Any]], tmp_path: Path) -> None:
    alone_again = trainer_of(alone(), **PLAIN)
    alone_again.fit()
    save(state_of(alone_again), tmp_path / "plain/step-1", alone_again.mesh)

    def entry(place: Place) -> Any:
        trainer = trainer_of(place, **COMPILED)
        trainer.fit()
        save(state_of(trainer), tmp_path / "compiled/step-1", trainer.mesh)
        trained = copy_of(trainer)
        fresh = trainer_of(place, **COMPILED)
        restore(fresh, tmp_path / "plain/step-1")
        return trained, copy_of(fresh)

    trained, taken_up = run_world(entry, warm=WARM)[0]
    files = (tmp_path / "compiled/step-1/model").glob("*.safetensors")
    on_disk = {name: tensor for file in files for name, tensor in load_file(file).items()}
    model = GPT(**{name: value for name, value in MODEL.items() if name != "_target_"})
    model.load_state_dict(on_disk, strict=True)
    assert all(torch.equal(parameter, trained[name]) for name, parameter in model.named_parameters())
    plain = copy_of(alone_again)
    assert taken_up.keys() == plain.keys()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in taken_up.items())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_wrappers_names_are_an_error_and_no_random_start(prefix: str, tmp_path: Path) -> None:
    trainer = trainer_of(alone())
    state = state_of(trainer)
    state.tensors = {name.replace("model/", f"model/{prefix}", 1): found for name, found in state.tensors.items()}
    save(state, tmp_path / "step-1", trainer.mesh)
    with pytest.raises(CheckpointError, match=r"embed|blocks"):
        restore(trainer_of(alone()), tmp_path / "step-1")
