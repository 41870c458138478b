from __future__ import annotations

from collections.abc import Callable

import pytest

from disttrain.config.check import check
from disttrain.config.compose import compose, composer, parse
from disttrain.config.schema import Config


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disttrain.config.world.num_gpus", lambda: 0)


@pytest.fixture
def settled() -> Callable[..., Config]:
    """Compose these words; the config before cross-field checks."""

    def make(*words: str) -> Config:
        request = parse(words)
        with composer(request) as app:
            return compose(app, request)[1]

    return make


@pytest.fixture
def checked(settled: Callable[..., Config], no_gpus: None) -> Callable[..., Config]:
    """Compose and check these words, on a machine without GPUs."""

    def make(*words: str, launched: int | None = None) -> Config:
        return check(settled(*words), launched)

    return make
