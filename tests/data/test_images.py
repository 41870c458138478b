"""Digits and Fashion-MNIST."""

from __future__ import annotations

import gzip
import pickle
import struct
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from disttrain.data.images import Digits, FashionMNIST, resize
from disttrain.errors import DataError, MissingExtraError


def test_digits_are_scikit_learns_scaled_and_normalised(tmp_path):
    data = Digits(data_dir=str(tmp_path))
    data.prepare()
    train, validation = data.train(), data.validation()
    assert (len(train), len(validation), data.num_classes, data.kind) == (1438, 359, 10, "images")
    images, labels = train.batch(torch.tensor([3, 0, 3]), torch.zeros(3))
    assert images.shape == (3, 1, 28, 28)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert labels.tolist() == [3, 0, 3]  # the set begins 0, 1, 2, ...
    from sklearn.datasets import load_digits

    pixels = torch.from_numpy(load_digits().images[:1] / 16)[None]
    wanted = (F.interpolate(pixels, (28, 28), mode="bilinear", align_corners=False).float() - 0.5) / 0.5
    torch.testing.assert_close(images[1:2], wanted, rtol=0, atol=1.01 / 255)  # stored as bytes
    whole = train.batch(torch.arange(len(train)), torch.zeros(len(train)))[0]
    assert (whole.min(), whole.max()) == (-1.0, 1.0)


def test_digits_of_another_size_are_another_set(tmp_path):
    small, large = Digits(data_dir=str(tmp_path), size=8), Digits(data_dir=str(tmp_path))
    small.prepare(), large.prepare()
    images, _ = small.train().batch(torch.tensor([0]), torch.zeros(1))
    assert images.shape == (1, 1, 8, 8)
    assert small.train().fingerprint != large.train().fingerprint


@pytest.mark.parametrize("size", [5, 8, 28, 31])
def test_resize_is_torchs_bilinear(size):
    images = np.random.default_rng(0).random((3, 8, 8))
    wanted = F.interpolate(torch.from_numpy(images)[None], (size, size), mode="bilinear", align_corners=False)[0]
    np.testing.assert_allclose(resize(images, size), wanted.numpy(), rtol=0, atol=1e-12)


def test_digits_need_scikit_learn_only_once(tmp_path, monkeypatch):
    Digits(data_dir=str(tmp_path)).prepare()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    Digits(data_dir=str(tmp_path)).prepare()
    with pytest.raises(MissingExtraError, match="scikit-learn") as error:
        Digits(data_dir=str(tmp_path / "elsewhere")).prepare()
    assert error.value.remedy == "pip install 'disttrain[vision]'"


def write_idx(path, array):
    """The MNIST format: 0, 0, type 8 (bytes), number of dimensions, sizes, bytes; all big-endian."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


def write_fashion(folder):
    random = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 12), ("t10k", 5)):
        arrays[split] = random.integers(0, 256, (count, 28, 28), np.uint8), random.integers(0, 10, count, np.uint8)
        write_idx(folder / "FashionMNIST" / "raw" / f"{split}-images-idx3-ubyte", arrays[split][0])
        write_idx(folder / "FashionMNIST" / "raw" / f"{split}-labels-idx1-ubyte", arrays[split][1])
    return arrays


def test_fashion_mnist_reads_the_published_files(tmp_path):
    arrays = write_fashion(tmp_path)
    data = FashionMNIST(data_dir=str(tmp_path))
    data.prepare()
    for split, name in ((data.train(), "train"), (data.validation(), "t10k")):
        pixels, classes = arrays[name]
        images, labels = split.batch(torch.arange(len(split)), torch.zeros(len(split)))
        wanted = (torch.from_numpy(pixels).float()[:, None] / 255 - 0.5) / 0.5
        torch.testing.assert_close(images, wanted, rtol=0, atol=1e-6)
        assert labels.tolist() == classes.tolist()
    copy = pickle.loads(pickle.dumps(data.train()))
    assert len(copy) == 12


def test_fashion_mnist_without_network_says_which_files_go_where(tmp_path, monkeypatch):
    from torchvision import datasets

    monkeypatch.setattr(datasets.FashionMNIST, "mirrors", ["http://127.0.0.1:9/"])  # nobody listens there
    with pytest.raises(DataError) as error:
        FashionMNIST(data_dir=str(tmp_path)).prepare()
    message = error.value.message
    for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"):
        assert name in message
    assert str(tmp_path / "FashionMNIST" / "raw") in message
    assert "dataset=digits" in error.value.remedy


def test_fashion_mnist_takes_the_compressed_files_that_the_message_names(tmp_path, monkeypatch):
    from torchvision import datasets

    monkeypatch.setattr(datasets.FashionMNIST, "mirrors", ["http://127.0.0.1:9/"])
    write_fashion(tmp_path)
    for path in list((tmp_path / "FashionMNIST" / "raw").iterdir()):
        with gzip.open(path.with_name(path.name + ".gz"), "wb") as file:
            file.write(path.read_bytes())
        path.unlink()
    resources = [
        (path.name, None) for path in sorted((tmp_path / "FashionMNIST" / "raw").iterdir())
    ]  # the published checksums are of the published files
    monkeypatch.setattr(datasets.FashionMNIST, "resources", resources)
    data = FashionMNIST(data_dir=str(tmp_path))
    data.prepare()
    assert len(data.train()) == 12


def test_digits_with_nothing_to_validate_on_are_refused(tmp_path):
    data = Digits(data_dir=str(tmp_path), validation_fraction=0.0005)
    for _ in range(2):  # when they are first prepared, and when they are found
        with pytest.raises(DataError, match=r"validation_fraction=0\.0005 of 1797 images is less than one"):
            data.prepare()


@pytest.mark.parametrize(("fields", "key"), [({"size": 0}, "dataset.size"), ({"validation_fraction": 0}, "dataset.validation_fraction")])
def test_mistakes_are_named(tmp_path, fields, key):
    with pytest.raises(DataError, match=key):
        Digits(data_dir=str(tmp_path), **fields)
