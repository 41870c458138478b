"""`evaluate RUN`: a checkpoint measured on its validation split, or on another by `dataset.<key>=...`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from disttrain.reading.run import open_run, restored


def main(run: Path, words: Sequence[str]) -> int:
    """Print the metrics as JSON."""
    config, checkpoint = open_run(run, words, "")
    print(json.dumps({"checkpoint": checkpoint.name} | restored(config, checkpoint).evaluate(), indent=2))
    return 0
