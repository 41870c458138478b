"""What holds for every test: it leaves the process as it found it, and it ends.

Ranks are forked from this process, warm, so torch has one thread here (a thread pool does not survive a fork)
and nothing below starts one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

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
