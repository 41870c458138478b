"""Callbacks in real runs of a small GPT on random tokens, on one rank and on several."""

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch._dynamo  # DDP imports it, for seconds; here once, for all forked ranks

from disttrain.build import build_trainer
from disttrain.checkpoint.files import read_values
from disttrain.checkpoint.load import latest_good
from disttrain.config.schema import Config, StrategyConfig, TrainConfig
from disttrain.errors import DivergedError
from disttrain.launch.place import alone
from disttrain.launch.world import run_world
from disttrain.parallel.step import Verdict
from disttrain.record import RunFolder
from disttrain.train import batch
from disttrain.train.hooks import Callback
from disttrain.train.state import restore, state_of
from tests.callbacks.wandb_file import runs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PARTS = {
    "grad_accumulation": {"_target_": "disttrain.callbacks.grad_accumulation.GradAccumulation", "micro_batch_size": 2},
    "amp": {"_target_": "disttrain.callbacks.amp.AMP"},
    "checkpoint": {"_target_": "disttrain.callbacks.checkpoint.Checkpoint"},
    "jsonl": {"_target_": "disttrain.callbacks.jsonl.JSONL"},
    "progress": {"_target_": "disttrain.callbacks.progress.ProgressBar"},
    "monitor": {"_target_": "disttrain.callbacks.monitor.Monitor"},
    "ledger": {"_target_": "disttrain.callbacks.ledger.Ledger"},
    "wandb": {"_target_": "disttrain.callbacks.wandb.WandB", "mode": "offline"},
    "ema": {"_target_": "disttrain.callbacks.ema.EMA", "decay": 0.5},
    "nan_guard": {"_target_": "disttrain.callbacks.nan_guard.NaNGuard"},
    "early_stopping": {"_target_": "disttrain.callbacks.early_stopping.EarlyStopping", "patience": 1},
}
DEFAULT = ("grad_accumulation", "amp", "checkpoint", "jsonl", "progress", "monitor", "ledger", "wandb")


def config(keys, steps=6, strategy=None, lr=1e-2, log_every=2, eval_every=3, **changes):
    """A run with the callbacks `keys`; `changes`: arguments by callback."""
    return Config(
        strategy=StrategyConfig(**(strategy or {})),
        model={
            "_target_": "disttrain.models.gpt.GPT",
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 2,
            "hidden_size": 16,
            "vocab_size": 32,
            "max_seq_len": 8,
        },
        dataset={
            "_target_": "disttrain.data.synthetic.Synthetic",
            "kind": "tokens",
            "num_samples": 48,
            "num_validation": 13,
            "context": 8,
            "vocab_size": 32,
        },
        optimizer={"_target_": "torch.optim.AdamW", "lr": lr, "weight_decay": 0.1},
        scheduler={"_target_": "disttrain.train.optimizer.Constant", "warmup_steps": 3},
        callbacks={key: PARTS[key] | changes.get(key, {}) for key in keys},
        train=TrainConfig(steps=steps, global_batch_size=8, log_every=log_every, eval_every=eval_every),
    )


def trainer_of(made, folder, place, resume=None):
    made.launch.device = "cpu"
    trainer = build_trainer(made, RunFolder(folder) if folder else None, place)
    if resume is not None:
        restore(trainer, resume)
    return trainer


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}


def scale(trainer):
    return trainer.update.state_dict()


# --- the default callbacks ------------------------------------------------------------------------------------------


@pytest.mark.world(4)
def test_one_run_leaves_one_record_whatever_the_number_of_ranks(tmp_path):
    """G04, G05, G10: four ranks, tp 2 x dp 2; one W&B run, every row in it, train and validation on one axis."""

    def entry(place):
        trainer = trainer_of(config((*DEFAULT, "ema"), strategy={"dp_replicate": 2, "tp": 2}), tmp_path, place)
        return trainer.fit().step

    assert run_world(entry, 4) == [6] * 4
    rows = RunFolder(tmp_path).read()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 6]
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 6]
    assert all("val/loss_ema" in row for row in rows if "val/loss" in row)
    assert all(row["perf/step_seconds"] > 0 for row in rows if "train/loss" in row)
    assert rows[-1]["perf/step_seconds_max"] >= rows[-1]["perf/step_seconds"] >= rows[-1]["perf/step_seconds_min"]
    assert {"perf/tokens_per_second", "perf/samples_per_second", "memory/peak_bytes", "system/cpu_utilisation"} <= rows[-1].keys()
    (run,) = runs(tmp_path)
    assert [row["step"] for row in run.history] == [1, 2, 3, 4, 6]
    assert [row["val/loss"] for row in run.history if "val/loss" in row] == [row["val/loss"] for row in rows if "val/loss" in row]
    assert run.exit_codes == [0]
    assert latest_good(tmp_path).folder == tmp_path / "checkpoints" / "step-6"


def test_a_run_that_raises_is_marked_failed(tmp_path):
    class Boom(Callback):
        def on_train_step_end(self, trainer, report):
            raise RuntimeError("boom")

    def entry(place):
        trainer = trainer_of(config(("wandb", "jsonl")), tmp_path, place)
        trainer._on["on_train_step_end"].append(Boom().on_train_step_end)
        with pytest.raises(RuntimeError, match="boom"):
            trainer.fit()

    run_world(entry, 1)
    (run,) = runs(tmp_path)
    assert run.exit_codes == [1]


# --- resume ----------------------------------------------------------------------------------------------------------


RESUMED = ("grad_accumulation", "amp", "checkpoint", "ema", "nan_guard")
FP16 = {"amp": {"precision": "fp16", "init_scale": 2.0**20, "growth_interval": 2}, "checkpoint": {"every": 4}}


@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", [{"dp_replicate": 2}, {"tp": 2}], ids=["ddp", "tp"])
def test_a_resume_is_the_unbroken_run(tmp_path, strategy):
    """D04, D05, D07, D11, E13, E14: weights, averages, moments, loss scale, rate, position, bit for bit, under fp16."""

    def entry(place):
        whole = trainer_of(config(RESUMED, steps=8, strategy=strategy, **FP16), tmp_path, place)
        whole.fit()
        callbacks = tuple(reversed(RESUMED))  # order changes nothing
        again = trainer_of(config(callbacks, steps=8, strategy=strategy, **FP16), None, place, tmp_path / "checkpoints" / "step-4")
        before = scale(again)
        again.fit()
        different = [
            name for name, (tensor, _) in state_of(whole).tensors.items() if not torch.equal(tensor, state_of(again).tensors[name][0])
        ]
        same = whole.progress.state_dict() == again.progress.state_dict() and whole.metrics["train/lr"] == again.metrics["train/lr"]
        return different, same, before, scale(whole), scale(again), whole.metrics["train/skipped_updates"]

    results = run_world(entry, 2)
    for different, same, before, end, end_again, skipped in results:
        assert different == []
        assert same
        assert end == end_again == results[0][3]
        assert before == read_values(tmp_path / "checkpoints" / "step-4")["update"]
        assert "loss_scale" in before
        assert skipped > 0  # the first scale overflows


@pytest.mark.world(2)
def test_another_layout_goes_on(tmp_path):
    """E05: saved by data parallelism, resumed under tensor parallelism and on one rank; the curve is the same."""
    keys = ("grad_accumulation", "checkpoint", "ema")

    def run(place, strategy, resume=None):
        trainer = trainer_of(
            config(keys, steps=8, strategy=strategy, checkpoint={"every": 4, "keep_last": None}),
            None if resume else tmp_path,
            place,
            resume,
        )
        trainer.fit()
        return {name: value for name, value in trainer.metrics.items() if name.startswith(("val/", "train/loss", "train/lr"))}

    resume = tmp_path / "checkpoints" / "step-4"
    expected, _ = run_world(lambda place: run(place, {"dp_replicate": 2}), 2)
    assert "val/loss_ema" in expected
    for found in (*run_world(lambda place: run(place, {"tp": 2}, resume), 2), *run_world(lambda place: run(place, {}, resume), 1)):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_callback_added_at_a_resume_begins_anew(tmp_path):
    trainer_of(config(("checkpoint",), steps=3), tmp_path, alone()).fit()
    again = trainer_of(config(("checkpoint", "ema"), steps=3), None, alone())
    notes = restore(again, tmp_path / "checkpoints" / "step-3")
    assert any("callbacks/ema/shadow" in note and "starts anew" in note for note in notes)
    again.call("on_fit_start")
    for name, average in again.callbacks["ema"].weight_sets()["ema"].items():
        assert torch.equal(average, again.parameters[name])


# --- verdicts ----------------------------------------------------------------------------------------------------------


@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", [{"dp_replicate": 2}, {"tp": 2}], ids=["ddp", "tp"])
def test_a_bad_loss_on_one_rank_is_skipped_by_all(tmp_path, strategy):
    """I07: rank 1's loss is NaN at step 3 alone."""

    def entry(place):
        trainer = trainer_of(config(("grad_accumulation", "nan_guard", "jsonl", "ema"), strategy=strategy), tmp_path, place)
        real, seen = trainer.strategy.forward_backward, []

        def poisoned(step):
            seen.append(weights(trainer))
            local = real(step)
            if len(seen) == 3 and place.rank == 1:
                local.sums[0] = local.sums[0] * math.nan
            return local

        trainer.strategy.forward_backward = poisoned
        trainer.fit()
        seen.append(weights(trainer))
        moved = [any(not torch.equal(before[name], after[name]) for name in before) for before, after in pairwise(seen)]
        finite = all(bool(value.isfinite().all()) for value in trainer.parameters.values())
        return moved, finite, trainer.progress.step, int(trainer.update.updates), trainer.metrics["train/skipped_updates"], weights(trainer)

    results = run_world(entry, 2)
    for moved, finite, step, updates, skipped, _ in results:
        assert moved == [True, True, False, True, True, True]
        assert finite
        assert (step, updates, skipped) == (6, 5, 1.0)
    if "dp_replicate" in strategy:
        assert all(torch.equal(results[0][-1][name], results[1][-1][name]) for name in results[0][-1])


@pytest.mark.world(2)
def test_nan_stops_all_ranks_with_one_reason(tmp_path):
    def entry(place):
        made = config(("nan_guard",), steps=20, lr=math.inf, strategy={"dp_replicate": 2}, nan_guard={"max_consecutive": 3})
        trainer = trainer_of(made, tmp_path, place)
        with pytest.raises(DivergedError) as caught:
            trainer.fit()
        return trainer.progress.step, str(caught.value)

    results = run_world(entry, 2)
    assert results[0] == results[1]
    step, reason = results[0]
    assert step < 8
    assert "updates in a row were skipped (callbacks.nan_guard.max_consecutive)" in reason


@pytest.mark.world(2)
def test_all_ranks_stop_early_at_one_step_and_name_the_same_best(tmp_path):
    """G11 and A02: nothing is learned at a rate of zero, so the second evaluation is no improvement."""

    def entry(place):
        made = config(
            ("checkpoint", "early_stopping"), steps=30, lr=0.0, strategy={"dp_replicate": 2}, checkpoint={"keep_best": 1, "keep_last": 1}
        )
        trainer = trainer_of(made, tmp_path, place)
        result = trainer.fit()
        return result.status, result.step, result.reason, str(trainer.callbacks["checkpoint"].best(trainer))

    results = run_world(entry, 2)
    assert results[0] == results[1]
    status, step, reason, best = results[0]
    assert status == "stopped"
    assert 6 <= step <= 8
    assert "val/loss has not improved" in reason
    assert Path(best) == tmp_path / "checkpoints" / "step-3"
    assert latest_good(tmp_path).folder == tmp_path / "checkpoints" / f"step-{step}"


# --- what the loop pays --------------------------------------------------------------------------------------------------


def test_few_reads_of_the_device(tmp_path, monkeypatch):
    """J01: 100 steps with the default callbacks, a NaN guard and EMA, two log intervals: the late verdict, and a few more."""
    keys = [key for key in (*DEFAULT, "nan_guard", "ema") if key != "wandb"]
    trainer = trainer_of(config(keys, steps=100, log_every=50, eval_every=None), tmp_path, alone())
    trainer.evaluator = None
    reads = []
    for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, counting(reads, name, getattr(torch.Tensor, name)))
    trainer._on["on_save_checkpoint"] = []
    trainer.fit()
    log_points, epochs = 3, 100 // 6
    assert reads.count(("tolist", len(Verdict))) <= 102
    assert len(reads) - 100 <= 3 * log_points + epochs, reads


def counting(reads, name, real):
    """`real`, noting its calls; but not those that count samples, which lie on the host whatever the device."""

    def read(tensor, *args):
        if sys._getframe(1).f_code.co_filename != batch.__file__:
            reads.append((name, tensor.numel()))
        return real(tensor, *args)

    return read
