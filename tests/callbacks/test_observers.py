"""Observers: stopping early, averaging weights, measuring, recording."""

import json
import math

import pytest
import torch

from disttrain import build
from disttrain.callbacks import monitor as monitor_module
from disttrain.callbacks.checkpoint import Checkpoint
from disttrain.callbacks.early_stopping import EarlyStopping
from disttrain.callbacks.jsonl import JSONL
from disttrain.callbacks.monitor import Monitor
from disttrain.callbacks.peaks import peak_of
from disttrain.callbacks.profile import Profile
from disttrain.callbacks.progress import ProgressBar
from disttrain.callbacks.tensorboard import TensorBoard
from disttrain.callbacks.wandb import WandB
from disttrain.errors import ConfigError, MissingExtraError
from disttrain.train.hooks import defined
from tests import tiny
from tests.callbacks.fakes import FakeTrainer, report

# --- early stopping ------------------------------------------------------------------------------------------------


def evaluations(callback, values, name="val/loss", trainer=None):
    """The evaluation, counted from one, after which a stop was asked for first."""
    trainer = trainer or FakeTrainer()
    for number, value in enumerate(values, 1):
        callback.on_validation_end(trainer, {name: value})
        if trainer.progress.reasons:
            return number
    return None


def test_stops_after_patience_without_improvement():
    trainer = FakeTrainer()
    assert evaluations(EarlyStopping(patience=2), [3.0, 2.0, 2.1, 2.05, 1.0], trainer=trainer) == 4
    assert trainer.progress.reasons == ["STOP: val/loss has not improved on 2 in 2 evaluations (now 2.05)"]
    assert trainer.progress.flags() is not None


def test_an_improvement_begins_the_patience_anew_and_must_be_worth_it():
    assert evaluations(EarlyStopping(patience=2), [3.0, 3.1, 2.9, 3.0, 2.8]) is None
    assert evaluations(EarlyStopping(patience=2, min_delta=0.2), [3.0, 2.9, 2.85]) == 3
    assert evaluations(EarlyStopping(patience=1, mode="max", monitor="val/accuracy"), [0.5, 0.6, 0.55], "val/accuracy") == 3
    assert evaluations(EarlyStopping(patience=2), [math.nan, math.nan]) == 2


def test_patience_outlives_a_resume():
    first = EarlyStopping(patience=3)
    evaluations(first, [2.0, 2.1, 2.2])
    again = EarlyStopping(patience=3)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert evaluations(again, [2.3]) == 1
    fresh = EarlyStopping()
    fresh.load_state_dict(json.loads(json.dumps(EarlyStopping().state_dict())))
    assert fresh.best == math.inf


def test_a_stop_is_asked_for_once():
    """By the time that it takes hold, at the next step, another evaluation may have been made."""
    trainer = FakeTrainer()
    early = EarlyStopping(patience=2)
    for value in (1.0, 2.0, 3.0, 4.0):
        early.on_validation_end(trainer, {"val/loss": value})
    assert trainer.progress.reasons == ["STOP: val/loss has not improved on 1 in 2 evaluations (now 3)"]


def test_an_unknown_metric_is_named_with_what_there_is():
    with pytest.raises(ConfigError, match=r"'val/los', which no evaluation gives; there are val/loss, val/perplexity") as error:
        EarlyStopping("val/los").on_validation_end(FakeTrainer(), {"val/loss": 1.0, "val/perplexity": 2.0})
    assert error.value.remedy == "callbacks.early_stopping.monitor=val/loss"


def test_nothing_to_go_by_is_refused():
    for owner in (EarlyStopping(), Checkpoint(keep_best=1)):
        trainer = FakeTrainer()
        with pytest.raises(ConfigError, match="goes by val/loss, which is measured at the end only"):
            owner.on_fit_start(trainer)
        trainer.eval_every = 5
        owner.on_fit_start(trainer)
        trainer.evaluator = None
        with pytest.raises(ConfigError, match="no validation split"):
            owner.on_fit_start(trainer)


def test_data_that_can_not_be_evaluated_is_refused_before_ranks_start():
    early = {"_target_": "disttrain.callbacks.early_stopping.EarlyStopping"}
    config = tiny.config(dataset=tiny.TOKENS | {"num_validation": 0}, callbacks={"early": early}, eval_every=2)
    with pytest.raises(ConfigError, match=r"callbacks.early goes by evaluations, and the data has no validation split") as error:
        build.prepare(config)
    assert error.value.remedy == "~callbacks.early"


# --- monitor ---------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


def test_step_seconds_are_whole_steps(monkeypatch):
    """A step is 2 s of forward and backward and 1 s of update; the log point falls between both."""
    clock = Clock()
    monkeypatch.setattr(monitor_module, "time", clock)
    trainer, monitor = FakeTrainer(), Monitor()
    monitor.on_fit_start(trainer)
    found, counted = [], 0
    window_start = clock.now
    seconds = property(lambda self: clock.now - window_start)
    trainer.window = type("Window", (), {"steps": 0, "data_wait_seconds": 0.5, "seconds": seconds})()
    for step in range(1, 10):
        clock.now += 2.0
        logged = step in (1, 5, 9)
        row = dict(monitor.measure(trainer)) if logged else {}
        clock.now += 1.0
        trainer.progress.step = step
        trainer.window.steps += 1
        if logged:
            row |= {"train/targets": 64.0 * (step - counted)}
            counted = step
            found.append(row | monitor.derive(trainer, row))
            window_start, trainer.window.steps = clock.now, 0
    assert [row["perf/step_seconds"] for row in found] == pytest.approx([2.0, 3.0, 3.0])  # the first step's update is not over
    assert [row["perf/tokens_per_second"] for row in found[1:]] == pytest.approx([64 / 3] * 2)
    assert [row["perf/samples_per_second"] for row in found[1:]] == pytest.approx([32 / 3] * 2)
    assert found[1]["perf/data_wait_seconds"] == pytest.approx(0.125)


def test_memory_and_processor_are_plausible():
    trainer, monitor = FakeTrainer(), Monitor()
    monitor.on_fit_start(trainer)
    kept = torch.ones(1 << 22)
    row = monitor.measure(trainer)
    assert 50e6 < row["memory/peak_bytes"] < 100e9
    assert 0.0 <= row["system/cpu_utilisation"] <= 1.0
    assert set(row) == {"perf/step_seconds", "perf/data_wait_seconds", "memory/peak_bytes", "system/cpu_utilisation"}
    del kept


def test_mfu_is_flops_over_peak(monkeypatch):
    monkeypatch.setattr(monitor_module, "peak_flops", lambda device, dtype: 1e6)
    trainer, monitor = FakeTrainer(), Monitor()
    trainer.model.flops = lambda shape=None: 1000.0
    trainer.task.unit = "samples"
    monitor.on_fit_start(trainer)
    trainer.progress.step = 5
    row = monitor.derive(trainer, {"perf/step_seconds": 0.1, "train/targets": 1.0})
    assert row == pytest.approx({"perf/samples_per_second": 320.0, "perf/mfu": 0.32})


def test_peaks_are_found_by_name():
    assert peak_of("NVIDIA H200", torch.bfloat16, False) == 989e12
    assert peak_of("NVIDIA H100 PCIe", torch.float16, False) == 756e12
    assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32, False) == 19.5e12
    assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32, True) == 156e12
    assert peak_of("NVIDIA RTX A1000", torch.bfloat16, False) is None
    assert peak_of("NVIDIA H200", torch.float64, False) is None


# --- records -----------------------------------------------------------------------------------------------------------


def test_jsonl_has_the_step_first_and_rank_0_only(tmp_path):
    for rank in (0, 1):
        trainer = FakeTrainer(tmp_path, rank=rank)
        trainer.progress.step = 20
        JSONL().on_log(trainer, {"train/loss": 2.0, "val/loss": math.nan})
        JSONL().on_fit_end(trainer)
    (row,) = FakeTrainer(tmp_path).folder.read()
    assert list(row) == ["step", "train/loss", "val/loss", "perf/elapsed_seconds"]
    assert row["step"] == 20
    assert math.isnan(row["val/loss"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_events_are_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start in (0, 2):  # crashed after step 3, resumed at 2: the events of step 3 are replaced
        trainer, callback = FakeTrainer(tmp_path), TensorBoard()
        trainer.progress.step = start
        callback.on_fit_start(trainer)
        for step in range(start + 1, start + 4):
            trainer.progress.step = step
            callback.on_log(trainer, {"train/loss": float(step + 10 * start)})
        callback.on_fit_end(trainer)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0), (5, 25.0)]


def test_a_missing_tensorboard_names_the_extra(monkeypatch):
    monkeypatch.setattr("disttrain.callbacks.tensorboard.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'disttrain\[tensorboard\]'"):
        TensorBoard()


def test_plain_lines_without_a_terminal(capsys):
    trainer, callback = FakeTrainer(num_steps=400), ProgressBar()
    callback.on_fit_start(trainer)
    trainer.progress.step = 20
    row = {"train/loss": 2.34567, "perf/step_seconds": 0.5, "perf/samples_per_second": 64.0, "perf/tokens_per_second": 8192.0}
    callback.on_log(trainer, row)
    callback.on_fit_end(trainer)
    assert capsys.readouterr().out == "step  20/400  loss 2.346  8.19k tokens/s  3:10 left\n"
    callback.on_log(FakeTrainer(rank=1), row)
    assert capsys.readouterr().out == ""


def test_a_bar_on_a_terminal_follows_the_step_by_itself(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    trainer, callback = FakeTrainer(num_steps=50), ProgressBar()
    callback.on_fit_start(trainer)
    callback.on_log(trainer, {"train/loss": 1.5})
    trainer.progress.step = 37  # no hook is called
    callback.on_fit_end(trainer)
    shown = capsys.readouterr().err
    assert "step 37/50" in shown
    assert "loss 1.5" in shown


def test_a_trace_lies_in_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    trainer, callback = FakeTrainer(tmp_path), Profile(start=1, steps=2)
    callback.on_fit_start(trainer)
    for step in range(5):
        trainer.progress.step = step
        callback.on_train_step_start(trainer)
        if step in (1, 2):
            torch.ones(8, 8) @ torch.ones(8, 8)
        trainer.progress.step = step + 1
        callback.on_train_step_end(trainer, report())
    callback.on_fit_end(trainer)
    import gzip

    trace = json.loads(gzip.decompress((tmp_path / "profile" / "rank-0.trace.json.gz").read_bytes()))
    assert sum(event.get("name") == "aten::mm" for event in trace["traceEvents"]) == 2
    assert "aten::mm" in (tmp_path / "profile" / "rank-0.txt").read_text()


@pytest.mark.parametrize("kind", [JSONL, ProgressBar, Monitor, EarlyStopping, TensorBoard, WandB])
def test_who_acts_at_log_points_costs_a_step_nothing(kind):
    for hook in ("on_train_step_start", "on_before_optimizer_step", "on_train_step_end", "due"):
        assert not defined(kind(), hook), hook
