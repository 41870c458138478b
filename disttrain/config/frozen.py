"""The frozen config: one text, written once, read by every rank and by every tool."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from disttrain.config import typed
from disttrain.config.schema import Config

_BREAKS = set("\x85\u2028\u2029")


def freeze(config: Config) -> str:
    """A checked config as YAML. `thaw` gives back an equal one, every text byte by byte."""
    values = dataclasses.asdict(config)
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=2**16)
    if _BREAKS & set(text):  # written as they are, these would be read back as line breaks
        text = yaml.safe_dump(values, sort_keys=False, width=2**16)
    return text


def thaw(text: str) -> Config:
    """The config that was frozen."""
    return typed.build(Config, yaml.safe_load(text))


def plain(config: Config) -> dict[str, Any]:
    """A config as nested dicts, for loggers."""
    return dataclasses.asdict(config)
