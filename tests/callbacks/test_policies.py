"""Policies: what they declare, in which type the forward runs, and who skips or stops."""

import math

import pytest
import torch

from disttrain.callbacks.amp import AMP
from disttrain.callbacks.checkpoint import Checkpoint
from disttrain.callbacks.grad_accumulation import GradAccumulation
from disttrain.callbacks.nan_guard import NaNGuard
from disttrain.errors import ConfigError
from disttrain.parallel.step import Declaration, Precision, ScaleRule, Verdict
from tests.callbacks.fakes import FakeTrainer, report


def test_accumulation_declares_the_micro_batch():
    assert GradAccumulation(4).declare() == Declaration(micro_batch_size=4)
    with pytest.raises(ConfigError, match="micro_batch_size is 0"):
        GradAccumulation(0)


def test_amp_declares_type_and_scale():
    assert AMP().declare() == Declaration()
    assert AMP("bf16").declare() == Declaration(precision=Precision(torch.bfloat16))
    fp16 = AMP("fp16", init_scale=8.0, growth_interval=2).declare()
    assert fp16 == Declaration(precision=Precision(torch.float16), loss_scale=ScaleRule(8.0, 2.0, 0.5, 2))
    with pytest.raises(ConfigError, match="'half'; it may be fp32, bf16, fp16"):
        AMP("half")


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_products_run_in_the_type_and_weights_stay(precision, dtype):
    layer = torch.nn.Linear(4, 4)
    with AMP(precision).forward_context():
        outputs = layer(torch.ones(2, 4))
    assert outputs.dtype == dtype
    assert not torch.is_autocast_enabled("cpu")
    outputs.sum().backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32


# --- NaN guard ---------------------------------------------------------------------------------------------------


def drive(guard, losses, skipped=(), trainer=None):
    """Steps with these losses; `skipped`: steps that others skip. (stops, skips) by step."""
    trainer = trainer or FakeTrainer()
    guard.on_fit_start(trainer)
    found = []
    for step, loss in enumerate(losses):
        agreed = report(loss)
        asked = guard.judge_global(trainer, agreed)
        agreed.skip = torch.maximum(asked[Verdict.SKIP], torch.tensor(float(step in skipped)))
        guard.after_update(trainer, agreed)
        trainer.progress.step = step + 1
        found.append((float(asked[Verdict.STOP]), float(asked[Verdict.SKIP])))
    return found


GO, STOP = 0.0, 1.0


def test_a_bad_loss_is_skipped_and_the_run_goes_on():
    assert drive(NaNGuard(), [1.0, math.nan, math.inf, 2.0]) == [(GO, 0.0), (GO, 1.0), (GO, 1.0), (GO, 0.0)]


def test_too_many_in_a_row_stop_the_run_with_a_reason():
    trainer, guard = FakeTrainer(), NaNGuard(max_consecutive=2)
    found = drive(guard, [math.nan, 1.0, math.nan, math.nan], trainer=trainer)
    assert [asked for asked, _ in found] == [GO, GO, GO, STOP]
    guard.on_log(trainer, {"train/loss": 1.0})
    assert trainer.progress.reasons == ["FAILED: 2 updates in a row were skipped (callbacks.nan_guard.max_consecutive)"]


def test_skips_of_the_loss_scale_count_in_a_row_but_do_not_skip_here():
    """The scaler owns inf gradients: a guard that refused them too would be no news, one that never stops would hide a dead run."""
    found = drive(NaNGuard(max_consecutive=3), [1.0] * 5, skipped=range(5))
    assert [skip for _, skip in found] == [0.0] * 5
    assert [asked for asked, _ in found] == [GO, GO, GO, STOP, STOP]


def test_a_gradient_is_judged_too_unless_a_loss_scale_owns_it():
    trainer, guard = FakeTrainer(), NaNGuard()
    guard.on_fit_start(trainer)
    agreed = report(1.0)
    agreed.grad_norm = torch.tensor(math.inf, dtype=torch.float64)
    assert guard.judge_global(trainer, agreed)[Verdict.SKIP] == 1
    trainer.strategy.loss_scale = object()
    assert guard.judge_global(trainer, agreed)[Verdict.SKIP] == 0


def test_roll_backs_have_an_end():
    trainer, guard = FakeTrainer(), NaNGuard(on_nan="roll_back", max_roll_backs=1)
    with pytest.raises(ConfigError, match="on_nan=roll_back goes back to the newest checkpoint, and none is made"):
        guard.on_fit_start(trainer)
    trainer.callbacks["saver"] = Checkpoint(every=10)
    guard.on_fit_start(trainer)
    asked = [guard.judge_global(trainer, report(loss)) for loss in (math.nan, 1.0, math.nan)]
    assert [(float(one[Verdict.ROLL_BACK]), float(one[Verdict.STOP])) for one in asked] == [(1, 0), (0, 0), (0, 1)]
    guard.on_log(trainer, {"train/loss": 1.0})
    assert trainer.progress.reasons == ["FAILED: a loss or gradient was not finite 2 times (callbacks.nan_guard.max_roll_backs)"]


def test_stop_at_the_first(caplog):
    trainer, guard = FakeTrainer(), NaNGuard(on_nan="stop")
    assert drive(guard, [1.0, math.nan, 1.0], trainer=trainer) == [(GO, 0.0), (STOP, 1.0), (GO, 0.0)]
    guard.on_log(trainer, {"train/loss": 1.0})
    assert trainer.progress.reasons == ["FAILED: a loss or gradient was not finite (callbacks.nan_guard.on_nan=stop)"]
    assert "1 steps since the last log point had a loss or a gradient that is not finite" in caplog.text
    again = NaNGuard(on_nan="stop")
    again.load_state_dict(guard.state_dict())
    assert drive(again, [1.0, 1.0]) == [(GO, 0.0), (GO, 0.0)]


def test_nothing_is_read_on_the_host_between_log_points(monkeypatch):
    """J01: a guard costs no wait for the device."""
    guard, trainer = NaNGuard(), FakeTrainer()
    guard.on_fit_start(trainer)
    agreed = report(1.0)
    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    guard.judge_global(trainer, agreed)
    guard.after_update(trainer, agreed)


def forbidden(*args, **kwargs):
    raise AssertionError("a read of the device")


def test_wrong_values_are_named():
    with pytest.raises(ConfigError, match="'ignore'; it may be skip, stop, roll_back"):
        NaNGuard("ignore")
    with pytest.raises(ConfigError, match="max_consecutive is 0"):
        NaNGuard(max_consecutive=0)
