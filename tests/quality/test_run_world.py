"""The fixture that starts ranks does what the marker says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from disttrain.launch.place import Place


@pytest.mark.world(3)
def test_each_rank_computes_and_answers(run_world: Callable[..., list[Any]]) -> None:
    def add(place: Place, offset: int) -> float:
        total = torch.tensor([float(place.rank + offset)])
        dist.all_reduce(total)
        return total.item()

    assert run_world(add, 10) == [33.0, 33.0, 33.0]
