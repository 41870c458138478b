"""`generate RUN prompt='def '`: text from a checkpoint, which is how a person sees that a model learned."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from disttrain.reading.run import open_run, restored
from disttrain.train.writing import write_text


def main(run: Path, words: Sequence[str]) -> int:
    """Print the prompt and what the model makes of it, as it is made."""
    config, checkpoint = open_run(run, words, "generate")
    with contextlib.suppress(BrokenPipeError):  # who read along has seen enough
        for piece in write_text(restored(config, checkpoint), config.generate, config.seed):
            print(piece, end="", flush=True)
        print(flush=True)
    return 0
