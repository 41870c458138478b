"""`generate RUN prompt='def '`: text from a checkpoint, which is how a person sees that a model learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from disttrain import build
from disttrain.reading.run import open_run, restored


def main(run: Path, words: Sequence[str]) -> int:
    """Print the prompt and what the model makes of it."""
    config, checkpoint = open_run(run, words, "generate")
    print(build.write_text(restored(config, checkpoint), config.generate, config.seed))
    return 0
