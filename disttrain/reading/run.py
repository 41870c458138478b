"""A finished run opened again: its frozen config, with what was typed over it, and its newest good checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from disttrain import build
from disttrain.checkpoint.files import latest_good
from disttrain.checkpoint.load import load
from disttrain.checkpoint.state import State
from disttrain.config import typed
from disttrain.config.check import anchored
from disttrain.config.frozen import plain
from disttrain.config.schema import Config, StrategyConfig
from disttrain.errors import CheckpointError, ConfigError
from disttrain.models.task import task_of
from disttrain.parallel.strategy import Strategy
from disttrain.record import RunFolder


def open_run(run: Path, words: Sequence[str], section: str) -> tuple[Config, Path]:
    """(config for one rank, checkpoint) of the run folder, or checkpoint in one, `run`.

    `words` are key=value; a key without a dot belongs to `section`. Raises ConfigError or CheckpointError.
    """
    checkpoint = run if run.parent.name == "checkpoints" else None
    folder = RunFolder(run.parent.parent if checkpoint is not None else run)
    values = yaml.safe_load(folder.config_text())
    for word in words:
        _set(values, word, section)
    config = anchored(typed.build(Config, values), str(Path.cwd()))
    if checkpoint is None:
        found = latest_good(folder.path)
        for note in found.passed_over:
            print(note, file=sys.stderr)
        if found.folder is None:
            raise CheckpointError(f"{run} holds no good checkpoint", "callbacks=default, whose checkpoint saves at the end")
        checkpoint = found.folder
    launch = replace(config.launch, world_size=1)
    return replace(config, strategy=StrategyConfig(name="single"), launch=launch), checkpoint


def _set(values: dict[str, object], word: str, section: str) -> None:
    """Set one key=value; texts are taken as they are, the rest as YAML."""
    key, equals, text = word.partition("=")
    if not equals:
        raise ConfigError(f"'{word}' is not key=value", f"{section}.<key>=<value>")
    *path, last = (key if "." in key or not section else f"{section}.{key}").split(".")
    place: object = values
    for name in path:
        place = place.get(name) if isinstance(place, dict) else None
    if not isinstance(place, dict) or last not in place:
        known = list(place) if isinstance(place, dict) else list(plain(Config()))
        near = typed.nearest(last, known)
        raise ConfigError(f"{word}: there is no key '{'.'.join([*path, last])}'", f"{'.'.join([*path, near])}=..." if near else None)
    place[last] = text if isinstance(place[last], str) else yaml.safe_load(text)


def restored(config: Config, checkpoint: Path) -> Strategy:
    """The model, on one rank, with the weights of `checkpoint`."""
    from disttrain.launch.place import alone

    place = alone()
    model = build.build_model(config)
    strategy = build.build_strategy(config, build.build_mesh(config, place), build.device_of(config, place), model, task_of(model), None)
    state = State({f"model/{name}": (parameter.detach(), strategy.layouts[name]) for name, parameter in strategy.parameters.items()})
    state.tensors |= {f"model/{name}": held for name, held in strategy.buffers().items()}
    load(state, checkpoint, strategy.mesh, {"model"})
    strategy.model.eval()
    return strategy
