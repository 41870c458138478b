"""The leak check itself: each kind of leak is noticed, named and put back."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import leaks

LEAKS: dict[str, Callable[[], object]] = {
    "process": lambda: subprocess.Popen(["sleep", "30"]),
    "environment: LEAKED": lambda: os.environ.update(LEAKED="1"),
    "environment: PATH": lambda: os.environ.pop("PATH"),
    "working folder": lambda: os.chdir("/"),
    "signal handlers: SIGUSR1": lambda: signal.signal(signal.SIGUSR1, lambda *_: None),
    "process group": lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1),
    "torch threads": lambda: torch.set_num_threads(2),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
}


@pytest.mark.parametrize("kind", LEAKS)
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_each_leak_is_noticed_named_and_put_back(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leaks, "GRACE_SECONDS", 0.1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.chdir(tmp_path)
    before = leaks.in_process_state()
    with pytest.raises(pytest.fail.Exception, match=kind), leaks.untouched():
        LEAKS[kind]()
    assert leaks.difference(before, leaks.in_process_state()) == ""


def test_what_ends_within_the_grace_time_is_no_leak() -> None:
    with leaks.untouched():
        process = subprocess.Popen(["sleep", "0.2"])
    process.wait()
