"""Relative paths of a config made whole: against the folder that the command was typed in, or as a run that goes on had them."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from disttrain.config.schema import Config
from disttrain.places import is_remote

DATA_PATHS = {"data_dir", "paths"}
"""Arguments of our datasets that are paths."""
PATHS = ("paths.data", "init_from", "strategy.deepspeed", *(f"dataset.{name}" for name in sorted(DATA_PATHS)))
"""Keys that `anchored` makes whole, but for resume."""


@dataclass(frozen=True)
class Before:
    """A run that goes on."""

    run: Path
    paths: Mapping[str, Sequence[str]]
    """Those that its stored words meant, whole, by key."""

    def find(self, key: str, path: str, cwd: str) -> str:
        """What the relative `path` means: that in the current folder, or the same as before, of which only one may be there.

        Where both are, it is the first if the run lies in that folder, as it does in its own project, moved or not.
        """
        here = os.path.join(cwd, path)
        then = [one for one in self.paths.get(key, ()) if one.endswith(f"{os.sep}{path}")]
        places = [here, *then] if self.run.resolve().is_relative_to(cwd) else [*then, here]
        return next(filter(os.path.exists, places), here)


def anchored(config: Config, cwd: str, before: Before | None = None) -> Config:
    """The config with relative paths taken against `cwd`, the folder the command was typed in, whatever the ranks' is."""

    def absolute(path: str, key: str) -> str:
        if path.startswith("~") or is_remote(path) or os.path.isabs(path):
            return path
        return os.path.join(cwd, path) if before is None else before.find(key, path, cwd)

    config = copy.copy(config)
    config.paths = replace(config.paths, data=absolute(config.paths.data, "paths.data"))
    if config.resume not in (None, "auto"):
        config.resume = absolute(str(config.resume), "resume")
    if config.init_from is not None:
        config.init_from = absolute(config.init_from, "init_from")
    if isinstance(config.strategy.deepspeed, str):
        config.strategy = replace(config.strategy, deepspeed=absolute(config.strategy.deepspeed, "strategy.deepspeed"))
    if str(config.dataset.get("_target_")).startswith("disttrain."):
        for name in DATA_PATHS & config.dataset.keys():
            value, key = config.dataset[name], f"dataset.{name}"
            whole = [absolute(one, key) for one in value] if isinstance(value, list) else absolute(value, key)
            config.dataset = config.dataset | {name: whole}
    return config
