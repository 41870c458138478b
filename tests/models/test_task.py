"""Losses are sums by sample; counts are of the targets that count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from disttrain.errors import ConfigError
from disttrain.models.task import IGNORED, Classification, LanguageModelling, Regression, Task, task_of


def test_token_losses_sum_over_valid_targets():
    logits = torch.randn(3, 5, 7, dtype=torch.float64)
    targets = torch.randint(7, (3, 5))
    targets[0, 2:] = IGNORED
    targets[2] = IGNORED
    task = LanguageModelling()
    wanted = [
        sum(math.log(sum(math.exp(z) for z in logits[n, t])) - float(logits[n, t, targets[n, t]]) for t in range(5) if targets[n, t] >= 0)
        for n in range(3)
    ]
    torch.testing.assert_close(task.losses(logits, targets)["loss"], torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)
    assert task.counts(targets)["loss"].tolist() == [2, 5, 0]
    assert task.unit == "tokens"


def test_targets_may_be_a_view():
    """Inputs and targets are often two views of one window."""
    window = torch.randint(7, (3, 6))
    targets = window[:, 1:]
    logits = torch.randn(3, 5, 7)
    task = LanguageModelling()
    assert torch.equal(task.losses(logits, targets)["loss"], task.losses(logits, targets.clone())["loss"])
    assert task.counts(targets)["loss"].tolist() == [5, 5, 5]


def test_image_losses_are_one_a_sample():
    scores, labels = torch.randn(4, 10), torch.tensor([1, 2, 3, 4])
    loss = Classification().losses(scores, labels)["loss"]
    torch.testing.assert_close(loss, -scores.log_softmax(-1)[range(4), labels])
    assert Classification().counts(labels)["loss"].tolist() == [1, 1, 1, 1]


def test_half_precision_scores_are_summed_in_float32():
    for task, outputs, targets in (
        (Classification(), torch.randn(2, 3).bfloat16(), torch.tensor([0, 1])),
        (Regression(), torch.randn(2, 3).bfloat16(), torch.randn(2, 3).bfloat16()),
    ):
        assert task.losses(outputs, targets)["loss"].dtype == torch.float32


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 2)])
def test_regression_sums_squares(shape):
    outputs, targets = torch.randn(shape), torch.randn(shape)
    task = Regression()
    loss, count = task.losses(outputs, targets)["loss"], task.counts(targets)["loss"]
    assert loss.shape == count.shape == (4,)
    torch.testing.assert_close(loss.sum() / count.sum(), nn.functional.mse_loss(outputs, targets))


def test_regression_does_not_broadcast():
    with pytest.raises(ValueError, match=r"\(4, 1\), targets \(4,\)"):
        Regression().losses(torch.zeros(4, 1), torch.zeros(4))


def test_accuracy_counts_valid_targets_of_any_shape():
    metric = Classification().metrics()["accuracy"]
    outputs = torch.eye(4)[torch.tensor([[0, 1, 2], [3, 3, 3]])]
    metric.update(outputs, torch.tensor([[0, 1, 0], [3, IGNORED, IGNORED]]))
    metric.update(torch.eye(4)[:1], torch.tensor([1]))
    assert float(metric.compute()) == pytest.approx(3 / 5)


def test_language_models_have_no_accuracy_unless_asked():
    assert LanguageModelling().metrics() == {}
    assert set(LanguageModelling(accuracy=True).metrics()) == {"accuracy"}


def test_a_model_without_a_task_is_told_how_to_state_one():
    with pytest.raises(ConfigError, match=r"model\.task\._target_"):
        task_of(nn.Linear(1, 1))
    for task in (Classification(), LanguageModelling(), Regression()):
        assert isinstance(task, Task)
