"""What a choice of the config group `dataset` offers. No torch here: config checks read class attributes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from disttrain.errors import DataError

if TYPE_CHECKING:
    from disttrain.data.dataset import Dataset

Kind = Literal["tokens", "images", "vectors"]

DEFAULT_FOLDER = "~/.cache/disttrain"
OTHER_FOLDER = "paths.data=<a folder that you may write to>"
"""What mends a folder for data that can't be had."""


@dataclass(frozen=True)
class Loading:
    """How batches are made ready ahead of the step."""

    num_workers: int = 0
    """Processes a rank that build batches; 0 builds them in the rank itself."""
    prefetch: int = 4
    """Batches made ready ahead (by each worker, if there are any)."""
    pin_memory: bool = True
    """Page-locked host memory, from which copies to a GPU need no waiting; without a GPU it means nothing."""

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        if self.num_workers < 0:
            raise DataError(f"dataset.num_workers={self.num_workers} is negative", "dataset.num_workers=0")
        if self.prefetch < 1:
            raise DataError(f"dataset.prefetch={self.prefetch}, but at least one batch is made ready", "dataset.prefetch=2")


class DataModule(ABC):
    """Where data comes from, and its splits. A user's own subclass needs `train` only."""

    kind: Kind = "vectors"
    """What the inputs are: token numbers [n, t], images [n, c, h, w], or anything else."""
    needs_prepare: ClassVar[bool] = False
    shuffle: bool = True
    """Whether the training samples come in a new order each epoch; a stream's can't."""
    loading: Loading = Loading()

    def prepare(self) -> None:  # noqa: B027  (not every data set has something to prepare)
        """Fetch or convert, once a node, in the parent before any rank starts, without torch operations. May raise DataError."""

    @abstractmethod
    def train(self) -> Dataset:
        """The training split, read-only, memory-mapped where it is large. Opens and computes nothing."""

    def validation(self) -> Dataset | None:
        """The validation split, apart from the training one; None if there is none."""
        return None

    @property
    def vocab_size(self) -> int | None:
        """Number of different tokens, where inputs are tokens."""
        return None

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text that a token stands for on average, if known: from it the loop has bits per byte."""
        return None

    @property
    def num_classes(self) -> int | None:
        """Number of different labels, where targets are labels."""
        return None

    @property
    def sample_shape(self) -> tuple[int, ...] | None:
        """Shape of one sample's inputs, where it is known and all have the same."""
        return None

    def encode(self, text: str) -> list[int]:
        """Token numbers of `text`."""
        raise DataError(f"{type(self).__name__} has no text: only language models can go on from a prompt")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token numbers; that of more of them goes on from that of fewer, a last character that is not whole left aside."""
        raise DataError(f"{type(self).__name__} has no text: only language models can go on from a prompt")
