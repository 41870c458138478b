"""Cases and hardware that several tests plan with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from disttrain.config import typed
from disttrain.config.schema import HardwareConfig
from disttrain.plan.case import Case, Layout
from disttrain.plan.shape import Shape
from tests.quality.source import ROOT

LLAMA_70B = Shape(80, 8192, 64, 8, 28672, 128256, gated=True, vectors=2 * 8192)


def hardware(name: str) -> HardwareConfig:
    values: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/hardware" / f"{name}.yaml"))
    return typed.build(HardwareConfig, values, "hardware")


@pytest.fixture(scope="session")
def h100() -> HardwareConfig:
    return hardware("h100")


def case(layout: Layout, shape: Shape = LLAMA_70B, length: int = 8192, batch: int = 512) -> Case:
    return Case(shape, layout, length, batch)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """experiments/planner/fit.py, its folder on the path as if it were run there."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments/planner"))
    yield importlib.import_module("fit")
    for name in ("fit", "rows", "judge"):
        sys.modules.pop(name, None)
