"""torchmetrics over ranks give the single process's value, however the samples lie on them."""

import pytest
import torch
from torchmetrics import ClasswiseWrapper, MeanMetric, MetricCollection, MinMaxMetric, PearsonCorrCoef, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score, MulticlassStatScores
from torchmetrics.regression import SpearmanCorrCoef

from disttrain.launch.world import run_world
from disttrain.parallel.mesh import Mesh
from disttrain.train.metrics import MetricSet

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics.*")

GENERATOR = torch.Generator().manual_seed(1)
SCORES = torch.rand(8, generator=GENERATOR)
LABELS = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
LOGITS = torch.randn(8, 3, generator=GENERATOR)
CLASSES = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0])


class NoTask:
    def metrics(self):
        return {}


class MeanOfRow(MeanMetric):
    """A plain mean of the targets."""

    def update(self, outputs, targets):
        super().update(targets.double())


def binary():
    return {"auroc": BinaryAUROC(), "rank": SpearmanCorrCoef(), "pearson": PearsonCorrCoef(), "mean": MeanOfRow()}


def multiclass():
    parts = MetricCollection({"accuracy": MulticlassAccuracy(3, average="none"), "f1": MulticlassF1Score(3)})
    return {"of": parts}


class Seen(SumMetric):
    """How many samples there are."""

    def update(self, outputs, targets):
        super().update(torch.ones(len(targets)))


def nested():
    return {"by": ClasswiseWrapper(MulticlassStatScores(3, average=None)), "more": Seen() + 0.0, "range": MinMaxMetric(Seen())}


def measure(mesh, make, outputs, targets, batches):
    """Feed this rank's `batches` (index lists); values, and values of a second, equal round."""
    metrics = MetricSet(NoTask(), make(), mesh.axis("data"), torch.device("cpu"))
    rounds = []
    for _ in range(2):
        for batch in batches[mesh.axis("data").index]:
            index = torch.tensor(batch, dtype=torch.int64)
            void = index < 0
            metrics.update(outputs[index], targets[index], ~void if void.any() else None)
        rounds.append(metrics.compute())
    return rounds


def alone(make, outputs, targets):
    (first, second) = measure(Mesh(), make, outputs, targets, [[list(range(8))]])
    assert first == second
    return first


SHARES = {
    "5 + 3 samples (G01)": [[[0, 1, 2, 3, 4]], [[5, 6, 7]]],
    "nothing on rank 1 (G02)": [[[0, 1, 2, 3, 4, 5, 6, 7]], []],
    "one update against three (G02)": [[[0, 1]], [[2, 3], [4, 5, 6], [7]]],
    "void samples": [[[0, 1, 2, 3]], [[4, 5, 6, 7], [-1, -1, -1, -1]]],
    "void rows in a batch": [[[0, 1, -1, -1]], [[2, 3, 4, 5], [6, 7, -1, -1]]],
}


def world(place, shares):
    mesh = Mesh({"dp_replicate": place.world_size}, place.rank)
    found = {}
    for name, batches in shares.items():
        target = SCORES * 0.5 + LABELS * 0.3
        found[name] = {
            "binary": measure(mesh, lambda: {"auroc": BinaryAUROC()}, SCORES, LABELS, batches),
            "regression": measure(mesh, lambda: {name: one for name, one in binary().items() if name != "auroc"}, SCORES, target, batches),
            "multiclass": measure(mesh, multiclass, LOGITS, CLASSES, batches),
        }
    return found


@pytest.mark.world(2)
def test_any_share_of_samples_gives_the_single_processs_value():
    target = SCORES * 0.5 + LABELS * 0.3
    expected = {
        "binary": alone(lambda: {"auroc": BinaryAUROC()}, SCORES, LABELS),
        "regression": alone(lambda: {name: one for name, one in binary().items() if name != "auroc"}, SCORES, target),
        "multiclass": alone(multiclass, LOGITS, CLASSES),
    }
    assert set(expected["multiclass"]) == {"of_accuracy_0", "of_accuracy_1", "of_accuracy_2", "of_f1"}
    ranks = run_world(world, 2, (SHARES,), timeout_seconds=30)
    assert ranks[0] == ranks[1]
    for name, found in ranks[0].items():
        for kind, (first, second) in found.items():
            assert first == second, f"{name}: the second evaluation is not the first"
            assert first == pytest.approx(expected[kind], rel=1e-6), f"{name}, {kind}"


@pytest.mark.world(3)
def test_a_mean_state_weighs_ranks_by_their_samples():
    """A state that is reduced by a mean, as a user may write it: 6 samples here, 2 there, none on the third."""
    from torchmetrics import Metric

    class Running(Metric):
        def __init__(self):
            super().__init__()
            self.add_state("value", torch.zeros(()), dist_reduce_fx="mean")
            self.add_state("seen", torch.zeros(()), dist_reduce_fx="sum")
            self.add_state("largest", torch.tensor(-torch.inf), dist_reduce_fx="max")

        def update(self, outputs, targets):
            self.value = (self.value * self.seen + targets.sum()) / (self.seen + len(targets))
            self.seen = self.seen + len(targets)
            self.largest = torch.maximum(self.largest, targets.max())

        def compute(self):
            return {"value": self.value, "seen": self.seen, "largest": self.largest}

    def entry(place):
        mesh = Mesh({"dp_replicate": 3}, place.rank)
        numbers = torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0])
        return measure(mesh, lambda: {"own": Running()}, numbers, numbers, [[[0, 1, 2], [3, 4, 5]], [[6, 7]], []])[0]

    for found in run_world(entry, 3, timeout_seconds=30):
        assert found == pytest.approx({"own_value": 38 / 8, "own_seen": 8, "own_largest": 9.0})


@pytest.mark.world(2)
def test_metrics_inside_others_are_made_whole_once():
    """A wrapper and a sum of metrics keep their states in metrics of their own, which would sum over ranks again."""
    expected = alone(nested, LOGITS, CLASSES)

    def entry(place):
        mesh = Mesh({"dp_replicate": 2}, place.rank)
        return measure(mesh, nested, LOGITS, CLASSES, [[[0, 1, 2, 3, 4]], [[5, 6, 7]]])

    for first, second in run_world(entry, 2, timeout_seconds=30):
        assert first == second == expected


@pytest.mark.world(2)
def test_nobody_saw_anything():
    def entry(place):
        mesh = Mesh({"dp_replicate": 2}, place.rank)
        return measure(mesh, lambda: {"accuracy": MulticlassAccuracy(3)}, LOGITS, CLASSES, [[], []])[0]

    first, second = run_world(entry, 2, timeout_seconds=30)
    assert str(first) == str(second)


def test_a_tasks_metrics_are_made_at_the_first_evaluation_only():
    made = []

    class Task:
        def metrics(self):
            made.append(1)
            return {}

    metrics = MetricSet(Task(), {}, Mesh().axis("data"), torch.device("cpu"))
    assert made == []
    metrics.update(LOGITS, CLASSES, None)
    assert metrics.compute() == {}
    assert made == [1]
