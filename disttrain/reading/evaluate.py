"""`evaluate RUN`: a checkpoint measured on its validation split, or on another by `dataset.<key>=...`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from disttrain import build
from disttrain.errors import DataError
from disttrain.reading.run import open_run, restored


def main(run: Path, words: Sequence[str]) -> int:
    """Print the metrics as JSON."""
    config, checkpoint = open_run(run, words, "")
    build.prepare_data(config)
    strategy = restored(config, checkpoint)
    fixed = build.declared(build.build_callbacks(config))
    evaluator = build.build_evaluator(config, strategy, build.build_splits(config), fixed.micro_batch_size)
    if evaluator is None:
        raise DataError("this data has no validation split", "dataset.validation_fraction=0.1")
    print(json.dumps({"checkpoint": checkpoint.name} | evaluator.run("val"), indent=2))
    return 0
