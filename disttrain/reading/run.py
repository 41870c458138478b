"""A finished run opened again: its frozen config, with what was typed over it, and its newest good checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from disttrain import build
from disttrain.checkpoint.load import latest_good
from disttrain.config import typed
from disttrain.config.check import ACCUMULATION, check_numbers
from disttrain.config.devices import num_gpus
from disttrain.config.frozen import plain
from disttrain.config.local_sgd import AMP
from disttrain.config.overrides import key_of
from disttrain.config.paths import anchored
from disttrain.config.schema import Config, StrategyConfig
from disttrain.config.trust import check_stored
from disttrain.config.world import Device, device_here
from disttrain.errors import CheckpointError, ConfigError
from disttrain.launch.place import alone
from disttrain.record import RunFolder
from disttrain.secrecy import REDACTED
from disttrain.texts import flat, typed_value
from disttrain.train.state import load_weights
from disttrain.train.trainer import Trainer

_NUMERIC = (ACCUMULATION, AMP)
"""Callbacks that take part in what a forward computes; the others watch a training."""


def open_run(run: Path, words: Sequence[str], section: str) -> tuple[Config, Path]:
    """(config for one rank, checkpoint) of the run folder, or checkpoint in one, `run`.

    `words` are key=value; a key without a dot belongs to `section`. Raises ConfigError or CheckpointError.
    """
    checkpoint = run if run.parent.name == "checkpoints" else None
    folder = RunFolder(run.parent.parent if checkpoint is not None else run)
    if not (folder.path / "config.yaml").is_file():
        jobs = sorted(str(file.parent) for file in folder.path.glob("*/config.yaml"))
        remedy = f"a job of this sweep: {', '.join(jobs[:4])}" if jobs else "the folder of one run: outputs/<date>/<time>-<id>"
        raise ConfigError(f"{run} is no run folder: it holds no config.yaml", remedy)
    values = folder.config_values()
    check_stored(values, words, folder.path)
    for word in words:
        _set(values, word, section)
    config = anchored(typed.build(Config, values), str(Path.cwd()))
    for key, value in flat({"model": config.model, "dataset": config.dataset, "metrics": config.metrics}):
        if value == REDACTED:
            raise ConfigError(f"{key} was taken for a secret and is not stored with the run", f"{key}=<value>")
    check_numbers(config)
    if checkpoint is None:
        found = latest_good(folder.path)
        for note in found.passed_over:
            print(note, file=sys.stderr)
        if found.folder is None:
            raise CheckpointError(f"{run} holds no good checkpoint", "callbacks=default, whose checkpoint saves at the end")
        checkpoint = found.folder
    launch = replace(config.launch, world_size=1, device=_device(config, any(key_of(word) == "launch.device" for word in words)))
    policies = {key: value for key, value in config.callbacks.items() if value["_target_"] in _NUMERIC}
    return replace(config, strategy=StrategyConfig(name="single"), launch=launch, callbacks=policies), checkpoint


def _device(config: Config, is_typed: bool) -> Device:
    """The run's device, or the CPU where that isn't here; ConfigError for one that was typed now and isn't."""
    if config.launch.device == "cuda" and not is_typed and not num_gpus():
        print("the run was trained on a GPU, and this machine shows none: read on the CPU", file=sys.stderr)
        return "cpu"
    return device_here(config.launch)


def _set(values: dict[str, object], word: str, section: str) -> None:
    """Set one key=value; texts are taken as they are, the rest as YAML."""
    key, equals, text = word.partition("=")
    if not equals:
        raise ConfigError(f"'{word}' is not key=value", f"{section}.<key>=<value>")
    if (readable := word.encode(errors="replace").decode()) != word:
        raise ConfigError(f"{readable!r} has bytes that are no UTF-8", f"{readable.partition('=')[0]}=<text in UTF-8>")
    *path, last = (key if "." in key or not section else f"{section}.{key}").split(".")
    place: object = values
    for name in path:
        place = place.get(name) if isinstance(place, dict) else None
    if not isinstance(place, dict) or last not in place:
        known = list(place) if isinstance(place, dict) else list(plain(Config()))
        near = typed.nearest(last, known)
        message = f"{word}: there is no key '{'.'.join([*path, last])}'; there are {', '.join(map(str, known))}"
        raise ConfigError(message, f"{'.'.join([*path, near])}=..." if near else None)
    place[last] = text if isinstance(place[last], str) else typed_value(text)


def restored(config: Config, checkpoint: Path) -> Trainer:
    """The run on one rank, with the weights of `checkpoint`."""
    build.prepare(config)
    trainer = build.build_trainer(config, None, alone())
    load_weights(trainer, checkpoint)
    trainer.model.eval()
    return trainer
