"""A verdict is known one step late, or at once where it is drained; SKIP never comes back to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from disttrain.callbacks.grad_accumulation import GradAccumulation
from disttrain.data.adapt import Adapted
from disttrain.data.synthetic import Synthetic
from disttrain.errors import ConfigError, DataError
from disttrain.models.gpt import GPT
from disttrain.models.task import IGNORED, Classification
from disttrain.parallel.step import Verdict
from disttrain.train.hooks import Callback
from disttrain.train.progress import Progress
from disttrain.train.trainer import Trainer


def counters(*asked: Verdict) -> Tensor:
    found = torch.zeros(len(Verdict))
    for verdict in asked:
        found[verdict] += 1
    return found


def test_a_verdict_comes_one_step_late() -> None:
    progress = Progress()
    asked = [counters(), counters(Verdict.SAVE), counters(Verdict.STOP, Verdict.SAVE), counters()]
    assert [progress.settle(one, drain=False) for one in asked] == [Verdict.GO, Verdict.GO, Verdict.SAVE, Verdict.STOP]


def test_draining_gives_the_larger_of_both_and_leaves_nothing() -> None:
    progress = Progress()
    progress.settle(counters(Verdict.STOP), drain=False)
    assert progress.settle(counters(Verdict.SAVE), drain=True) is Verdict.STOP
    assert progress.settle(counters(), drain=False) is Verdict.GO


def test_a_skip_was_settled_on_the_device() -> None:
    progress = Progress()
    assert progress.settle(counters(Verdict.SKIP), drain=True) is Verdict.GO


def test_a_request_travels_once() -> None:
    progress = Progress()
    assert progress.flags() is None
    progress.request(Verdict.SAVE, "why not")
    assert progress.flags() == counters(Verdict.SAVE).tolist()
    assert progress.flags() is None
    assert progress.reasons == ["SAVE: why not"]


def test_position_and_its_state() -> None:
    progress = Progress()
    progress.step = 3
    progress.finish_step(epoch_ends=False)
    progress.finish_step(epoch_ends=True)
    progress.finish_step(epoch_ends=False)
    assert (progress.epoch, progress.step_in_epoch) == (1, 1)
    other = Progress()
    other.load_state_dict(progress.state_dict())
    assert (other.step, other.epoch, other.step_in_epoch) == (3, 1, 1)


# --- what a trainer refuses ---------------------------------------------------------------------------------------------


def small(
    num_samples: int = 16, callbacks: Mapping[str, Callback] | Sequence[Callback] = (), num_validation: int = 0, **settings: Any
) -> Trainer:
    model = GPT(num_layers=1, num_heads=2, hidden_size=8, vocab_size=8, max_seq_len=4)
    data = Synthetic(kind="tokens", context=4, vocab_size=8, num_samples=num_samples, num_validation=num_validation)
    return Trainer(model, data, steps=2, global_batch_size=8, callbacks=callbacks, **settings)


def test_a_metric_that_is_called_as_a_number_of_the_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"metrics.loss: val/loss is the name"):
        small(metrics={"loss": object()})
    trainer = small(num_validation=8)
    assert trainer.evaluator is not None
    monkeypatch.setattr(trainer.evaluator.metrics, "compute", lambda: {"perplexity": 2.0})  # of the task's own
    with pytest.raises(ConfigError, match="a metric is called 'perplexity'"):
        trainer.evaluate()


def test_an_evaluation_takes_the_place_of_the_one_before() -> None:
    """A run that goes on without an average of its weights has no value of it at the end."""
    trainer = small(num_validation=8)
    trainer.metrics = {"val/loss": 9.0, "val/loss_ema": 9.0, "perf/mfu": 0.5}
    metrics = trainer.fit().metrics
    assert metrics["val/loss"] < 9.0
    assert "val/loss_ema" not in metrics
    assert metrics["perf/mfu"] == 0.5


def test_less_data_than_one_global_batch_is_refused() -> None:
    """M32."""
    with pytest.raises(DataError, match=r"7 samples, fewer than one global batch \(train.global_batch_size=8\)"):
        small(num_samples=7)


class Labelled(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A few vectors and the label that all have."""

    def __init__(self, length: int, label: int = 1) -> None:
        self.length, self.label = length, label

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), float(index)), torch.tensor(self.label)


@pytest.mark.parametrize(
    ("validation", "message"),
    [(Labelled(0), "the validation split has no samples"), (Labelled(3, label=IGNORED), "no target of the val split counts")],
)
def test_a_split_with_nothing_to_measure_on_is_refused(validation: Labelled, message: str) -> None:
    data = Adapted(train=Labelled(8), validation=validation)
    with pytest.raises(DataError, match=message):
        Trainer(torch.nn.Linear(4, 2), data, task=Classification(accuracy=False), steps=1, global_batch_size=4).fit()


def test_callbacks_of_one_class_are_all_there() -> None:
    first, second, third = Callback(), GradAccumulation(8), Callback()
    assert small(callbacks=[first, second, third]).callbacks == {"Callback": first, "GradAccumulation": second, "Callback_2": third}


def test_two_policies_that_fix_the_same_thing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.one and callbacks\.two both fix the micro batch size") as caught:
        small(callbacks={"one": GradAccumulation(2), "two": GradAccumulation(4)})
    assert caught.value.remedy == "~callbacks.two"


def test_a_trainer_of_plain_objects_trains_in_this_process() -> None:
    trainer = small()
    result = trainer.fit()
    assert (result.status, result.step) == ("done", 2)
    assert result.metrics["train/targets"] == 8 * 4
