"""Small labelled images, whole sets as bytes: handwritten digits, Fashion-MNIST."""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from disttrain.data import prepared
from disttrain.data.module import DEFAULT_FOLDER, OTHER_FOLDER, DataModule, Kind, Loading
from disttrain.errors import DataError, MissingExtraError
from disttrain.places import expanded

if TYPE_CHECKING:
    from torch import Tensor

MEAN, STD = 0.5, 0.5
"""Of pixels in [0, 1], for normalisation: inputs lie in [-1, 1]."""


class Images:
    """Grey images and labels: float32 [n, 1, h, w] in [-1, 1] and int64 [n]."""

    def __init__(self, source: prepared.Prepared, split: str) -> None:
        """Maps uint8 images [n, h, w] and labels [n]."""
        self.source = source
        self.split = split
        self.fingerprint = f"{split}-{source.fingerprint}"
        self._images, self._labels = self._map()

    def __len__(self) -> int:
        """Number of images."""
        return len(self._labels)

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images and their labels; nothing is drawn."""
        import torch

        rows = indices.numpy()
        images = torch.from_numpy(self._images[rows]).float().div_(255).sub_(MEAN).div_(STD)
        return images[:, None], torch.from_numpy(self._labels[rows].astype(np.int64))

    def _map(self) -> tuple[NDArray[Any], NDArray[Any]]:
        return self.source.array(f"{self.split}_images"), self.source.array(f"{self.split}_labels")

    def __getstate__(self) -> dict[str, Any]:
        """A process that gets a copy maps the file itself."""
        return self.__dict__ | {"_images": None, "_labels": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map again."""
        self.__dict__.update(state)
        self._images, self._labels = self._map()


class _ImageSet(DataModule):
    """What the image sets share: prepared once, mapped by all."""

    kind: Kind = "images"
    needs_prepare: ClassVar[bool] = True
    name: ClassVar[str]
    size: int = 28
    """Pixels a side."""

    def __init__(self, data_dir: str, key: str, loading: Loading) -> None:
        self.folder = expanded(data_dir, OTHER_FOLDER)
        self.key = key
        self.loading = loading

    def prepare(self) -> None:
        """Write the images as bytes, once."""
        if prepared.find(self.folder, self.name, self.key) is None:
            arrays = self._read()
            prepared.store(self.folder, self.name, self.key, {name: [array] for name, array in arrays.items()}, {})

    def train(self) -> Images:
        """The training images."""
        return Images(self._prepared(), "train")

    def validation(self) -> Images:
        """The validation images."""
        return Images(self._prepared(), "validation")

    @property
    def num_classes(self) -> int:
        """Ten."""
        return 10

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """One channel, height and width."""
        return (1, self.size, self.size)

    def _prepared(self) -> prepared.Prepared:
        found = prepared.find(self.folder, self.name, self.key)
        if found is None:
            raise DataError(f"{self.name} is not prepared under {self.folder}: prepare() comes first, once a node")
        return found

    @abstractmethod
    def _read(self) -> dict[str, NDArray[Any]]:
        """{train,validation}_images uint8 [n, h, w] and {train,validation}_labels uint8 [n]."""


class Digits(_ImageSet):
    """scikit-learn's 1,797 handwritten digits, which come with the package: 8 x 8 pixels, scaled to `size`."""

    name: ClassVar[str] = "digits"

    def __init__(
        self,
        *,
        data_dir: str = DEFAULT_FOLDER,
        size: int = 28,
        validation_fraction: float = 0.2,
        num_workers: int = 0,
        prefetch: int = 4,
        pin_memory: bool = True,
    ) -> None:
        """`size`: pixels a side that images are scaled to; the last `validation_fraction` (other writers) is for validation."""
        if size < 1:
            raise DataError(f"dataset.size={size} is not positive", "dataset.size=28")
        if not 0 < validation_fraction < 1:
            raise DataError(f"dataset.validation_fraction={validation_fraction} is not in (0, 1)", "dataset.validation_fraction=0.2")
        super().__init__(data_dir, prepared.digest(1, size, validation_fraction), Loading(num_workers, prefetch, pin_memory))
        self.size = size
        self.validation_fraction = validation_fraction

    def prepare(self) -> None:
        """As for all image sets; DataError if nothing is left to validate on."""
        super().prepare()
        if len(self.validation()) == 0:
            found = f"dataset.validation_fraction={self.validation_fraction} of {len(self.train())} images is less than one"
            raise DataError(found, "dataset.validation_fraction=0.2")

    def _read(self) -> dict[str, NDArray[Any]]:
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as error:
            raise MissingExtraError("scikit-learn", "vision", "dataset=digits") from error
        digits = load_digits()
        images = np.rint(resize(digits.images / 16.0, self.size) * 255.0).astype(np.uint8)
        labels = digits.target.astype(np.uint8)
        cut = len(labels) - int(len(labels) * self.validation_fraction)
        return {
            "train_images": images[:cut],
            "train_labels": labels[:cut],
            "validation_images": images[cut:],
            "validation_labels": labels[cut:],
        }


class FashionMNIST(_ImageSet):
    """Zalando's 70,000 pictures of clothes (Xiao et al. 2017, arXiv:1708.07747), 28 x 28 pixels, by torchvision's own class."""

    name: ClassVar[str] = "fashion_mnist"
    files: ClassVar[tuple[str, ...]] = tuple(
        f"{split}-{what}-ubyte" for split in ("train", "t10k") for what in ("images-idx3", "labels-idx1")
    )

    def __init__(self, *, data_dir: str = DEFAULT_FOLDER, num_workers: int = 0, prefetch: int = 4, pin_memory: bool = True) -> None:
        """The files are looked for under `data_dir`/FashionMNIST/raw, and downloaded there if they are missing."""
        super().__init__(data_dir, "1", Loading(num_workers, prefetch, pin_memory))

    def _read(self) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        for split, train in (("train", True), ("validation", False)):
            images, labels = self._read_split(train)
            arrays |= {f"{split}_images": images, f"{split}_labels": labels}
        return arrays

    def _read_split(self, train: bool) -> tuple[NDArray[Any], NDArray[Any]]:
        try:
            from torchvision import datasets
        except ModuleNotFoundError as error:
            raise MissingExtraError("torchvision", "vision", "dataset=fashion_mnist") from error
        try:
            with _socket_timeout(10.0):
                split = datasets.FashionMNIST(str(self.folder), train=train, download=True)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"Fashion-MNIST is not under {self.folder} and can't be downloaded ({error}). "
                f"On a machine with a network, fetch {', '.join(f'{name}.gz' for name in self.files)} from "
                f"https://github.com/zalandoresearch/fashion-mnist, and put them into {self.folder / 'FashionMNIST' / 'raw'}",
                "dataset=digits (needs no download), or paths.data=FOLDER",
            ) from error
        return split.data.numpy(), split.targets.numpy().astype(np.uint8)


def resize(images: NDArray[Any], size: int) -> NDArray[Any]:
    """Bilinear scaling of [n, h, w] to [n, size, size], pixels' centres as in `F.interpolate(..., align_corners=False)`."""
    for axis in (1, 2):
        length = images.shape[axis]
        centre = np.clip((np.arange(size) + 0.5) * length / size - 0.5, 0, length - 1)
        low = np.floor(centre).astype(np.int64)
        part = (centre - low).reshape((-1, 1) if axis == 1 else (-1,))
        images = images.take(low, axis) * (1 - part) + images.take(np.minimum(low + 1, length - 1), axis) * part
    return images


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """torchvision downloads without a time limit, and a network that swallows packets would hold a run for minutes."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
