"""Synthetic samples: functions of their number."""

from __future__ import annotations

import pytest
import torch

from disttrain.data.synthetic import IGNORED, Synthetic
from disttrain.errors import DataError
from disttrain.models import task


def batch(data, *indices):
    rows = torch.tensor(indices)
    return data.train().batch(rows, torch.zeros_like(rows))


KINDS = [
    {"kind": "vectors", "shape": (6, 16)},
    {"kind": "images", "shape": (1, 8, 8)},
    {"kind": "tokens", "context": 24},
    {"kind": "tokens", "context": 24, "uneven": True},
]


@pytest.mark.parametrize("fields", KINDS)
def test_a_sample_is_its_number(fields):
    data = Synthetic(**fields)
    together = batch(data, 7, 3, 1000)
    for row, index in enumerate((7, 3, 1000)):
        alone = batch(Synthetic(**fields), index)
        for whole, one in zip(together, alone, strict=True):
            assert torch.equal(whole[row], one[0])
    assert not torch.equal(together[0][0], together[0][1])
    assert not torch.equal(batch(Synthetic(seed=1, **fields), 7)[0], together[0][:1])
    rows = torch.tensor([7])
    assert not torch.equal(data.validation().batch(rows, rows)[0], together[0][:1])


def test_vectors_have_vectors_for_targets():
    inputs, targets = batch(Synthetic(), *range(4))
    assert inputs.shape == targets.shape == (4, 32, 512)
    assert inputs.dtype == targets.dtype == torch.float32
    assert abs(float((inputs * targets).mean())) < 0.02
    assert float(inputs.std()) == pytest.approx(1.0, abs=0.02)


def test_images_have_labels_below_the_number_of_classes():
    data = Synthetic(kind="images", shape=[1, 28, 28], num_classes=3)
    inputs, labels = batch(data, *range(100))
    assert inputs.shape == (100, 1, 28, 28)
    assert set(labels.tolist()) == {0, 1, 2}
    assert data.num_classes == 3
    assert data.vocab_size is None


def test_targets_of_tokens_are_the_next_ones():
    data = Synthetic(kind="tokens", context=24, vocab_size=50)
    inputs, targets = batch(data, 0, 1)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.dtype == torch.int64
    assert 0 <= int(inputs.min()) <= int(inputs.max()) < 50
    assert data.vocab_size == 50


def test_uneven_samples_count_between_one_and_all_targets():
    _, targets = batch(Synthetic(kind="tokens", context=24, uneven=True), *range(300))
    counts = task.LanguageModelling().counts(targets)["loss"]
    assert (int(counts.min()), int(counts.max())) == (1, 24)
    assert counts.unique().numel() == 24
    for row, count in zip(targets, counts, strict=True):
        assert bool((row[count:] == IGNORED).all())
    assert IGNORED == task.IGNORED


def test_any_size_needs_no_storage():
    data = Synthetic(num_samples=10**12)
    assert len(data.train()) == 10**12
    assert batch(data, 10**12 - 1)[0].shape == (1, 32, 512)
    assert Synthetic(num_validation=0).validation() is None


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"kind": "sounds"}, "kind"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_validation": -1}, "num_validation"),
        ({"uneven": True}, "uneven"),
    ],
)
def test_mistakes_are_named(fields, key):
    with pytest.raises(DataError, match=rf"dataset\.{key}"):
        Synthetic(**fields)


def test_fingerprints_tell_data_apart():
    prints = {Synthetic(**fields).train().fingerprint for fields in KINDS} | {Synthetic(seed=1, **KINDS[0]).train().fingerprint}
    assert len(prints) == 5
