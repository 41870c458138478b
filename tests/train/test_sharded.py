"""Whole runs on shares of the weights: curves, evaluation, other weights, text, skips and resumes are those of any other layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from disttrain import build
from disttrain.checkpoint.save import save
from disttrain.config.schema import GenerateConfig
from disttrain.errors import UserError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as run_ranks
from disttrain.models.task import Regression
from disttrain.train import writing
from disttrain.train.hooks import Callback
from disttrain.train.state import restore, state_of
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.train.runs import EVERY_STEP, WARM, copy_of, notes_of, rows, trainer_of, world_size

RunWorld = Callable[..., list[Any]]
SHARDED: list[dict[str, Any]] = [
    {"shard": 2, "strategy": {"zero": 1}},
    {"shard": 2, "strategy": {"zero": 2}},
    {"shard": 2},
    {"shard": 2, "tp": 2, "sequence_parallel": True},
]
NAMES = ["zero 1", "zero 2", "zero 3", "with tensor parallel"]
EMA = {"ema": {"_target_": "disttrain.callbacks.ema.EMA", "decay": 0.5}}
FP16 = {"amp": {"_target_": "disttrain.callbacks.amp.AMP", "precision": "fp16", "init_scale": 1024.0, "growth_interval": 3}}


def amp(precision: str) -> dict[str, Any]:
    return {"amp": {"_target_": "disttrain.callbacks.amp.AMP", "precision": precision}}


# --- evaluation and text -----------------------------------------------------------------------------------------------------


@pytest.mark.world(4)
@pytest.mark.parametrize("layout", SHARDED, ids=NAMES)
def test_a_run_with_evaluation_of_an_average_is_that_of_one_rank(layout: dict[str, Any]) -> None:
    """Between the steps other weights are read from the shards' memory, and the run's own are back for the next step."""
    config: dict[str, Any] = {"steps": 4, "eval_every": 1, "dtype": "float64", "callbacks": EMA, "micro_batch_size": 2} | EVERY_STEP
    alone = rows(**config)[0]
    assert {"val/loss", "val/loss_ema"} <= alone[-1].keys()
    assert alone[-1]["val/loss"] != alone[-1]["val/loss_ema"]
    for part in rows(**config, **layout):
        for row, wanted in zip(part, alone, strict=True):
            assert row == pytest.approx(wanted, rel=1e-11)


@pytest.mark.world(2)
@pytest.mark.parametrize("layout", SHARDED[1:3], ids=NAMES[1:3])
def test_every_rank_writes_the_same_text_and_trains_on(layout: dict[str, Any], run_world: RunWorld) -> None:
    def write(place: Place, **config: Any) -> tuple[str, str, list[float]]:
        trainer = trainer_of(place, steps=2, dtype="float64", **config)
        trainer.data.encode = lambda text: [1, 2, 3]  # type: ignore[method-assign]
        trainer.data.decode = lambda ids: " ".join(map(str, ids))  # type: ignore[method-assign]
        wanted = GenerateConfig(length=6)
        trainer.model.eval()
        before = "".join(writing.write_text(trainer, wanted, 0))
        trainer.fit()
        trainer.model.eval()
        return before, "".join(writing.write_text(trainer, wanted, 0)), [row["train/loss"] for row in notes_of(trainer).rows]

    (alone,) = run_ranks(write, 1)
    for before, after, losses in run_world(lambda place: write(place, **layout), warm=WARM):
        assert (before, after) == alone[:2]
        assert losses == pytest.approx(alone[2], rel=1e-11)


# --- precision ---------------------------------------------------------------------------------------------------------------


@pytest.mark.world(2)
def test_gathering_in_bf16_stays_near_and_bf16_weights_do_not() -> None:
    config: dict[str, Any] = {"steps": 30, "optimizer": tiny.ADAMW | {"lr": 3e-3}} | EVERY_STEP
    alone = [row["train/loss"] for row in rows(**config)[0]]
    gathered = [row["train/loss"] for row in rows(**config, callbacks=amp("bf16"), shard=2, strategy={"gather_dtype": "bf16"})[0]]
    pure = [row["train/loss"] for row in rows(**config, dtype="bfloat16", shard=2)[0]]
    assert gathered == pytest.approx(alone, rel=5e-3)
    furthest = [max(abs(a - b) for a, b in zip(curve, alone, strict=True)) for curve in (gathered, pure)]
    assert furthest[1] > 2 * furthest[0]


class Plant(Callback):
    """Makes the gradients of a block infinite at step 2 on one rank, before they are summed."""

    def on_fit_start(self, trainer: Trainer) -> None:
        def spoil(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if output.requires_grad and trainer.mesh.rank == 1 and trainer.progress.step == 1:
                output.register_hook(lambda gradient: gradient * torch.inf)

        trainer.model.blocks[1].register_forward_hook(spoil)  # type: ignore[index]


@pytest.mark.world(2)
def test_an_overflow_on_one_rank_is_skipped_by_all_and_the_scale_is_saved(tmp_path: Path, run_world: RunWorld) -> None:
    """D05, D08: same steps and scales; a load leaves the scale as it was saved, in a fresh process and in a used one."""
    folder = tmp_path / "step-4"
    plant = {"plant": {"_target_": "tests.train.test_sharded.Plant"}}

    def run(place: Place) -> dict[str, Any]:
        trainer = trainer_of(place, FP16 | plant, steps=4, shard=2, **EVERY_STEP)
        trainer.fit()
        scale = trainer.update.loss_scale
        assert scale is not None
        saved = [float(scale.value), int(scale.streak)]
        save(state_of(trainer), folder, trainer.mesh)
        scale.value.fill_(7.0)
        restore(trainer, folder)
        again = [float(scale.value), int(scale.streak)]
        fresh = trainer_of(place, FP16, steps=8, shard=2)
        restore(fresh, folder)
        assert fresh.update.loss_scale is not None
        anew = [float(fresh.update.loss_scale.value), int(fresh.update.loss_scale.streak)]
        return {"skipped": notes_of(trainer).skipped, "scales": [saved, again, anew], "updates": int(trainer.update.updates)}

    first, second = run_world(run, warm=WARM)
    assert first == second
    assert first["skipped"] == [0, 1, 0, 0]
    assert first["updates"] == 3
    assert first["scales"] == [[512.0, 2]] * 3


# --- resume -------------------------------------------------------------------------------------------------------------------

COMMON: dict[str, Any] = {
    "steps": 6,
    "dtype": "float64",
    "model": tiny.LLAMA | {"num_kv_heads": 4, "num_heads": 4},
    "global_batch_size": 12,
    "callbacks": EMA,
    **EVERY_STEP,
}


@pytest.mark.world(4)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"shard": 2}, {"shard": 2}),
        ({"shard": 2}, {"shard": 4, "strategy": {"zero": 1}}),
        ({"shard": 3, "strategy": {"zero": 2}}, {}),
        ({"dp": 2, "tp": 2}, {"dp": 2, "shard": 2}),
        ({"shard": 2, "tp": 2}, {"shard": 3}),
    ],
    ids=["same", "two to four", "three to one", "ddp and tp to hsdp", "fsdp and tp to three"],
)
def test_a_checkpoint_goes_into_and_out_of_shards(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    """E05: weights, moments and an average of the weights, whatever layout wrote them."""
    folder = tmp_path / "step-3"

    def first_half(place: Place) -> None:
        trainer = trainer_of(place, **COMMON | before | {"callbacks": EMA})
        trainer._on["due"].append(lambda t, step: frozenset({"save"} if step == 3 else ()))
        trainer._on["on_save_checkpoint"].append(lambda t, state: save(state, folder, t.mesh) if t.progress.step == 3 else None)
        trainer.fit()

    def second_half(place: Place) -> list[dict[str, float]]:
        trainer = trainer_of(place, **COMMON | after | {"callbacks": EMA})
        assert restore(trainer, folder) == []
        trainer.fit()
        return notes_of(trainer).rows

    run_ranks(first_half, world_size(before), warm=WARM)
    whole = rows(**COMMON, **after)[0]
    for part in run_ranks(second_half, world_size(after), warm=WARM):
        for row, wanted in zip(part, whole[3:], strict=True):
            assert row == (wanted if before == after else pytest.approx(wanted, rel=1e-11))


# --- parameters that take no part -----------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """`sometimes` is used where the first number of the batch is positive, `never` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.task = Regression()
        self.always, self.sometimes, self.never = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.sometimes(x) if float(x.flatten()[0]) > 0 else y


BRANCHES: dict[str, Any] = {"model": {"_target_": "tests.train.test_sharded.Branches"}, "dataset": tiny.VECTORS, "dtype": "float64"}


@pytest.mark.world(2)
def test_by_default_parameters_that_no_rank_used_are_named(run_world: RunWorld) -> None:
    """C11."""
    with pytest.raises(UserError, match=r"took no part in the loss of a step.*never.bias, never.weight.*\n.*find_unused_parameters=true"):
        run_world(lambda place: trainer_of(place, steps=1, shard=2, **BRANCHES).fit(), warm=WARM)


@pytest.mark.world(2)
@pytest.mark.parametrize("zero", [1, 3])
def test_parameters_may_be_left_out_on_some_ranks_or_on_all(zero: int, run_world: RunWorld) -> None:
    """As on one rank: what nobody used has no gradient, so that not even weight decay moves it."""

    def run(place: Place, **config: Any) -> tuple[list[float], dict[str, Any]]:
        trainer = trainer_of(place, steps=4, micro_batch_size=1, **BRANCHES, **EVERY_STEP, **config)
        before = copy_of(trainer)
        trainer.fit()
        moved = {name: not torch.equal(before[name], parameter) for name, parameter in trainer.parameters.items()}
        return [row["train/grad_norm"] for row in notes_of(trainer).rows], moved

    (alone,) = run_ranks(run, 1)
    parts = run_world(lambda place: run(place, shard=2, strategy={"zero": zero, "find_unused_parameters": True}), warm=WARM)
    for norms, moved in parts:
        assert norms == pytest.approx(alone[0], rel=1e-11)
        assert moved == alone[1]
        assert moved["sometimes.weight"]
        assert not moved["never.weight"]


# --- on a GPU -------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_two_gpus_train_as_one_cpu_rank(offload: bool) -> None:
    """Weights and their update on the device, or both in host memory."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    config: dict[str, Any] = {"steps": 5, "callbacks": EMA} | EVERY_STEP
    alone = [row["train/loss"] for row in rows(**config)[0]]

    def run(place: Place) -> tuple[list[float], str]:
        tuned = tiny.config(**config, shard=2, strategy={"offload": offload})
        tuned.launch.device = "cuda"
        trainer = build.build_trainer(tuned, None, place)
        seen: list[float] = []
        trainer._on["on_log"].append(lambda t, row: seen.append(row["train/loss"]) if "train/loss" in row else None)
        trainer.fit()
        return seen, next(iter(trainer.parameters.values())).device.type

    for losses, device in run_ranks(run, 2, device="cuda", start_method="spawn"):
        assert losses == pytest.approx(alone, rel=1e-4)
        assert device == ("cpu" if offload else "cuda")


@pytest.mark.world(2)
def test_weights_in_host_memory_are_updated_there_as_elsewhere() -> None:
    """On a CPU both are the same memory; the path is the one that GPUs take."""
    config: dict[str, Any] = {"steps": 3, "dtype": "float64", "callbacks": EMA} | EVERY_STEP
    offloaded, plain = (rows(**config, shard=2, strategy={"offload": offload})[0] for offload in (True, False))
    assert offloaded == plain
