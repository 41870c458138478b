"""Steps handed to DeepSpeed's engine are those of one device; what it needs and has not is told once."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from disttrain.errors import UserError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as run_ranks
from disttrain.parallel.step import Local, Report, Verdict, vote
from disttrain.train.hooks import Callback, StepPolicy
from disttrain.train.trainer import Trainer
from disttrain.verify.verb import prove
from tests import tiny
from tests.parallel.ranks import prepared, run_step
from tests.parallel.test_counted import Dispatched, ledger
from tests.train.runs import EVERY_STEP, copy_of, notes_of, trainer_of

RunWorld = Callable[..., list[Any]]
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'disttrain[deepspeed]'"
)
PATIENT = {"timeout_seconds": 300.0}
"""The engine's imports take ten seconds and more."""
UNEVEN = tiny.TOKENS | {"uneven": True}
EMA = {"ema": {"_target_": "disttrain.callbacks.ema.EMA", "decay": 0.5}}
COMMON: dict[str, Any] = {"dataset": UNEVEN, "callbacks": EMA, "micro_batch_size": 2, "global_batch_size": 8} | EVERY_STEP
"""Ignored targets, as many as a sample's number says; the norm is clipped at 0.1, about a tenth of what it is."""


def engine(zero: int, **said: Any) -> dict[str, Any]:
    """Two data ranks under the engine."""
    return {"dp": 2, "strategy": {"zero": zero, "deepspeed": said}}


def run(place: Place, **config: Any) -> list[dict[str, float]]:
    trainer = trainer_of(place, **COMMON | config)
    trainer.fit()
    return notes_of(trainer).rows


def alone(**config: Any) -> list[dict[str, float]]:
    """One rank's rows, in as many micro-batches as two ranks'."""
    micro = config.get("micro_batch_size", COMMON["micro_batch_size"])
    (found,) = run_ranks(lambda place: run(place, **config | {"micro_batch_size": 2 * micro}), 1)
    return found


@pytest.mark.long
@needs_deepspeed
@pytest.mark.world(2)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_fifty_steps_are_those_of_one_device(zero: int, run_world: RunWorld) -> None:
    """Losses, norms and evaluations, of an average of the weights too; one micro-batch a step and two."""
    for micro in (4, 2):
        config = {"steps": 50, "eval_every": 25, "micro_batch_size": micro}
        whole = alone(**config)
        assert min(row["train/grad_norm"] for row in whole if "train/grad_norm" in row) > 0.1
        for part in run_world(lambda place, config=config: run(place, **config | engine(zero)), **PATIENT):
            for row, wanted in zip(part, whole, strict=True):
                assert row == pytest.approx(wanted, rel=1e-6)


@pytest.mark.long
@needs_deepspeed
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("model", [tiny.LLAMA, tiny.MOE], ids=["llama", "experts"])
def test_verify_compares_what_the_engine_keeps(zero: int, model: dict[str, Any]) -> None:
    """Gradients that ranks share out are put together, and the reference's are taken apart."""
    config = tiny.config(**engine(zero), model=model, micro_batch_size=2, global_batch_size=16)
    config.launch.timeout_seconds = 300.0
    proof = prove(config)
    assert proof.equal, proof.cause
    assert proof.tolerance == 1e-4
    assert max(error.error for error in proof.errors) < 1e-5
    assert any("float32" in note for note in proof.notes)
    assert {"gradient", "norm", "loss", "update"} <= {error.quantity for error in proof.errors}


@pytest.mark.long
@needs_deepspeed
def test_verify_notices_a_mean_where_a_sum_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's mean over ranks, not undone."""
    monkeypatch.setattr(
        "disttrain.parallel.deepspeed.EngineLoop._num_ranks", property(lambda loop: 1, lambda loop, number: None), raising=False
    )
    config = tiny.config(**engine(1), micro_batch_size=2, global_batch_size=16)
    config.launch.timeout_seconds = 300.0
    proof = prove(config)
    assert not proof.equal
    assert "0.5 times what they should be" in proof.cause


class Skipping(StepPolicy):
    """Asks on rank 1 to leave the second update out."""

    def judge(self, trainer: Trainer, local: Local) -> Tensor:
        return vote(Verdict.SKIP if (trainer.mesh.rank, trainer.progress.step) == (trainer.mesh.size - 1, 1) else Verdict.GO)


class Spoiling(Callback):
    """Makes a gradient infinite in the fourth step, on the last rank."""

    def on_fit_start(self, trainer: Trainer) -> None:
        def spoil(gradient: Tensor) -> Tensor:
            return gradient * torch.inf if (trainer.mesh.rank, trainer.progress.step) == (trainer.mesh.size - 1, 3) else gradient

        trainer.parameters["blocks.0.mlp.up.weight"].register_hook(spoil)

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        if trainer.progress.step in (1, 3):
            self.before = copy_of(trainer)
        elif trainer.progress.step in (2, 4):
            assert all(torch.equal(value, trainer.parameters[name]) for name, value in self.before.items())


@pytest.mark.long
@needs_deepspeed
@pytest.mark.world(2)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_an_update_that_is_left_out_leaves_no_trace(zero: int, run_world: RunWorld) -> None:
    """Asked for by one rank, or not finite on one: both leave it out, and the next ones are what they would be on one device."""
    planted = {name: {"_target_": f"tests.parallel.test_deepspeed.{name}"} for name in ("Skipping", "Spoiling")}
    config: dict[str, Any] = {"steps": 6, "callbacks": planted}
    wanted = alone(**config)
    assert wanted[-1]["train/skipped_updates"] == 2
    for part in run_world(lambda place: run(place, **config | engine(zero)), **PATIENT):
        for row, one in zip(part, wanted, strict=True):
            assert row == pytest.approx(one, rel=1e-6, nan_ok=True)


@pytest.mark.long
@needs_deepspeed
@pytest.mark.world(2)
def test_its_norm_is_ours_and_bf16_is_autocast(run_world: RunWorld) -> None:
    amp = {"amp": {"_target_": "disttrain.callbacks.amp.AMP", "precision": "bf16"}}
    json = {"zero_optimization": {"overlap_comm": True, "round_robin_gradients": True, "reduce_bucket_size": 500}}

    def norms(place: Place) -> tuple[list[float], list[float], list[float]]:
        trainer = trainer_of(place, **COMMON | engine(2, **json) | {"steps": 5, "callbacks": amp})
        theirs: list[float] = []
        found = trainer.strategy.runner.engine  # type: ignore[attr-defined]
        trainer._on["on_train_step_end"].append(lambda t, report: theirs.append(float(found.get_global_grad_norm())))
        trainer.fit()
        return theirs, notes_of(trainer).column("train/grad_norm"), notes_of(trainer).column("train/loss")

    wanted = [row["train/loss"] for row in alone(steps=5, callbacks=amp) if "train/loss" in row]
    for theirs, ours, losses in run_world(norms, **PATIENT):
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert losses == pytest.approx(wanted, rel=1e-3)


@pytest.mark.long
@needs_deepspeed
@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("zero", "multi", "gradients", "weights"),
    [(0, True, {"all_reduce": 1}, 0), (1, True, {"all_reduce": 1}, 1), (2, False, {"reduce": 2}, 1)],
)
def test_the_ledger_has_what_the_engine_sends(zero: int, multi: bool, gradients: dict[str, int], weights: int, run_world: RunWorld) -> None:
    """As torch dispatches it; two micro-batches a step. Its own norm is a few bytes more."""

    def entry(place: Place) -> tuple[Any, ...]:
        trainer = prepared(place, micro_batch_size=2, **engine(zero, zero_optimization={"use_multi_rank_bucket_allreduce": multi}))
        trainer.update(run_step(trainer, 0))
        axes = {name: trainer.mesh.axis(name) for name in ("grad", "data", "world")}
        for axis in axes.values():
            axis.traffic.clear()
        with Dispatched() as dispatched:
            trainer.update(run_step(trainer, 1))
        size = sum(parameter.nbytes for parameter in trainer.parameters.values())
        return *ledger(axes), dispatched.calls, dispatched.bytes, {kind: entry[1] / size for kind, entry in axes["grad"].traffic.items()}

    for calls, sizes, dispatched_calls, dispatched_sizes, times in run_world(entry, **PATIENT):
        assert calls == dispatched_calls
        assert sizes == dispatched_sizes
        for kind, wanted in (gradients | {"all_gather": weights}).items():
            assert times.get(kind, 0.0) == pytest.approx(wanted, abs=1e-3)


@pytest.mark.long
@needs_deepspeed
@pytest.mark.world(2)
def test_a_parameter_that_takes_no_part_is_named(run_world: RunWorld) -> None:
    model = {"_target_": "tests.train.test_unused.TwoHeads"}
    config: dict[str, Any] = {"model": model, "dataset": tiny.VECTORS, "steps": 1, "callbacks": {}}
    with pytest.raises(UserError, match=r"as if their gradient were zero: unused\.bias, unused\.weight"):
        run_world(lambda place: run(place, **config | engine(1)), **PATIENT)


# --- without it -----------------------------------------------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize("text", ["raise OSError('no compiler for its ops\\nand more')", "initialize = None"], ids=["import", "start"])
def test_an_engine_that_can_not_run_is_one_message(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_world: RunWorld) -> None:
    """Whatever it raises: what a rank of a package without a fault of ours in it can find out only by starting it."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/__init__.py").write_text(text, encoding="utf-8")
    (tmp_path / "deepspeed/ops.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UserError, match=r"DeepSpeed's engine can't run here: \w+Error: .*\n  try: strategy=fsdp strategy.zero=1"
    ) as refused:
        run_world(lambda place: run(place, **engine(1) | {"steps": 1}))
    assert "and more" not in str(refused.value)


@pytest.mark.world(2)
def test_a_trainer_of_ones_own_is_refused_what_the_engine_can_not_do(run_world: RunWorld) -> None:
    fp16 = {"amp": {"_target_": "disttrain.callbacks.amp.AMP", "precision": "fp16"}}
    cases = [({"callbacks": fp16}, "loss scale"), ({"dtype": "float64"}, "master weights"), ({"dp": 1, "shard": 2}, "dp_replicate")]
    for config, said in cases:
        with pytest.raises(UserError, match=said):
            run_world(lambda place, config=config: run(place, **engine(1) | {"steps": 1} | config))
