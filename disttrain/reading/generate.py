"""`generate RUN prompt='def '`: text from a checkpoint, which is how a person sees that a model learned."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from disttrain.config.schema import Config
from disttrain.reading.run import open_run, restored
from disttrain.train.writing import write_text

OF_TEXT = ("disttrain.data.text.TextFiles", "disttrain.data.text.PythonStdlib")


def main(run: Path, words: Sequence[str]) -> int:
    """Print the prompt and what the model makes of it, as it is made."""
    config, checkpoint = open_run(run, words, "generate")
    with contextlib.suppress(BrokenPipeError):  # who read along has seen enough
        for piece in write_text(restored(_without_text(config), checkpoint), config.generate, config.seed):
            print(piece, end="", flush=True)
        print(flush=True)
    return 0


def _without_text(config: Config) -> Config:
    """The config of a model of bytes without the text it was trained on, which may be gone. Characters are numbered by the text."""
    if config.dataset["_target_"] not in OF_TEXT or config.dataset.get("vocabulary", "bytes") != "bytes":
        return config
    return replace(
        config,
        dataset={"_target_": "disttrain.data.bytes_alone.BytesAlone"},
        train=replace(config.train, global_batch_size=1),
        scheduler={"_target_": "disttrain.train.optimizer.Constant"},  # another may not fit the one step of an epoch
    )
