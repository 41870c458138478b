"""Bytes as tokens, without any text: for a model that writes and has nothing to learn any more."""

from __future__ import annotations

from disttrain.data.synthetic import RandomSamples, Synthetic
from disttrain.data.text import TextFiles


class BytesAlone(TextFiles):
    """Tells a model's bytes, wherever the text is by now."""

    def __init__(self) -> None:
        """Needs no file."""
        super().__init__(paths=[], data_dir="", context=1, validation_fraction=0)

    def prepare(self) -> None:
        """Nothing is to be done."""

    def train(self) -> RandomSamples:  # type: ignore[override]
        """One sample, of nothing in particular."""
        return Synthetic(kind="tokens", num_samples=1, context=1).train()
