"""What holds for every test: it leaves the process as it found it, and it ends.

Ranks are forked from this process, warm, so torch has one thread here (a thread pool does not survive a fork)
and nothing below starts one.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from disttrain.launch import world
from tests.leaks import untouched

torch.set_num_threads(1)

LIMIT_SECONDS = 120
LONG_LIMIT_SECONDS = 1200


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaks, and put things back, so that one leak fails one test."""
    with untouched():
        yield


@pytest.fixture(autouse=True)
def ends_in_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Raise in a test that hangs, so that the others still run."""
    seconds = LONG_LIMIT_SECONDS if request.node.get_closest_marker("long") else LIMIT_SECONDS

    def too_long(number: int, frame: object) -> None:
        raise TimeoutError(f"this test has not ended within {seconds} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run_world(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """`run_world(entry, *args, **options)`: results by rank of `entry(place, *args)` on as many ranks as the marker `world` says."""
    marker = request.node.get_closest_marker("world")
    assert marker is not None, "a test that starts ranks says how many: @pytest.mark.world(2)"
    (size,) = marker.args

    def run(entry: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return world.run_world(entry, size, args, **options)

    return run
