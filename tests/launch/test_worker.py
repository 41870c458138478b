"""The device of a rank goes by its number on its machine, never by the one in the world."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from disttrain import build
from disttrain.errors import LaunchError
from disttrain.launch.place import alone
from disttrain.launch.worker import rank_device
from disttrain.parallel.mesh import found_device
from tests import tiny


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two GPUs; the devices that were made current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_rank_5_that_is_the_second_on_its_machine_takes_device_1(two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    """M22: for the process group, for the trainer of a config and for one made by hand under torchrun."""
    wanted = torch.device("cuda", 1)
    assert rank_device("auto", 1) == rank_device("cuda", 1) == wanted
    assert two_gpus == [wanted, wanted]
    config = tiny.config()
    config.launch.device = "cuda"
    assert build.device_of(config, replace(alone(), rank=5, world_size=8, local_rank=1, local_world_size=2)) == wanted
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert found_device() == wanted


def test_a_rank_without_a_gpu_of_its_own_says_so(two_gpus: list[torch.device]) -> None:
    with pytest.raises(LaunchError, match="local rank 2 has no GPU of its own: 2 are visible here"):
        rank_device("cuda", 2)
    assert rank_device("cpu", 2) == torch.device("cpu")
