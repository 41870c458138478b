"""debug=collectives: sound runs pass, and what does not fit is told by rank and call site instead of a hang."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from disttrain.errors import UserError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.parallel import collectives
from disttrain.parallel.mesh import Mesh
from disttrain.train.hooks import Callback
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.train.runs import WARM, trainer_of, world_size

CHECK = {"collective_check": {"_target_": "disttrain.callbacks.collective_check.CollectiveCheck", "seconds": 60.0}}

LAYOUTS: dict[str, dict[str, Any]] = {
    "hsdp": {"dp": 2, "shard": 2},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "zero bubble": {"pp": 2, "micro_batch_size": 1, "strategy": {"schedule": "zbv"}, "model": tiny.GPT | {"num_layers": 4}},
    "ring": {"cp": 2, "model": tiny.LLAMA, "strategy": {"attention": "ring"}},
    "experts": {"shard": 2, "ep": 2, "model": tiny.MOE, "strategy": {"zero": 0}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sound_run_passes_and_draws_the_same_curve(layout: str) -> None:
    config = LAYOUTS[layout]

    def entry(place: Place, callbacks: dict[str, Any]) -> float:
        trainer = trainer_of(place, callbacks, steps=2, **config)
        return trainer.fit().metrics["train/loss"]

    warm = (*WARM, "torch.distributed.pipelining")
    checked, plain = (run_world(lambda place, c=c: entry(place, c), world_size(config), warm=warm) for c in (CHECK, {}))
    assert checked == plain


class Calls(Callback):
    """Does something on its own after step 1."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_step_start(self, trainer: Trainer) -> None:
        if trainer.progress.step == 1:
            FAULTS[self.what](trainer.mesh, trainer.mesh.rank)


def shape(mesh: Mesh, rank: int) -> None:
    collectives.all_reduce(torch.ones(4, 3 + rank), mesh.axis("world"))


def kind(mesh: Mesh, rank: int) -> None:
    axis = mesh.axis("world")
    collectives.all_reduce(torch.ones(4), axis) if rank else collectives.all_gather(torch.ones(4), axis)


def reduction(mesh: Mesh, rank: int) -> None:
    collectives.all_reduce(torch.ones(4), mesh.axis("world"), "max" if rank else "sum")


def dtype(mesh: Mesh, rank: int) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))


def strided(mesh: Mesh, rank: int) -> None:
    dist.all_reduce(torch.ones(4, 4)[:, 0] if rank else torch.ones(4))


def root(mesh: Mesh, rank: int) -> None:
    dist.broadcast(torch.ones(4), src=rank)


def parts(mesh: Mesh, rank: int) -> None:
    sent = [1, 3] if rank else [2, 2]
    collectives.all_to_all(torch.ones(4, 2), mesh.axis("world"), sent=sent, received=[2, 2])


def border(mesh: Mesh, rank: int) -> None:
    if rank:
        time.sleep(0.3)  # so that this end comes second, and knows
        collectives.receive((5,), torch.float32, torch.device("cpu"), mesh.axis("world"), 0)
    else:
        collectives.send(torch.ones(4), mesh.axis("world"), 1)


def crossed(mesh: Mesh, rank: int) -> None:
    """0 and 1 are a tensor group, 0 and 2 a data group, and so on: each waits for another, all round."""
    for name in ("tp", "grad") if rank in (0, 3) else ("grad", "tp"):
        collectives.all_reduce(torch.ones(4), mesh.axis(name))


def asleep(mesh: Mesh, rank: int) -> None:
    if rank:
        time.sleep(30)


FAULTS: dict[str, Callable[[Mesh, int], None]] = {
    one.__name__: one for one in (shape, kind, reduction, dtype, strided, root, parts, border, crossed, asleep)
}


def ends_with(what: str, seconds: float = 60.0, **config: Any) -> str:
    """The message with which a run ends whose ranks do this after a step."""
    check = {"collective_check": CHECK["collective_check"] | {"seconds": seconds}}
    calls = {"calls": {"_target_": "tests.callbacks.test_collective_check.Calls", "what": what}}
    with pytest.raises(UserError) as caught:
        run_world(lambda place: trainer_of(place, check | calls, steps=3, **config).fit(), world_size(config))
    found = str(caught.value)
    assert ("it has made no other" in found) == (what == "asleep"), "known at once"
    return found


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", r"ranks differ in shape in collective \d+ over dp_replicate \(ranks 0, 1\)"),
        ("kind", r"ranks differ in the collective in"),
        ("reduction", r"ranks differ in the reduction in"),
        ("dtype", r"ranks differ in type in"),
        ("root", r"ranks differ in the root in"),
        ("parts", r"ranks differ in the parts sent and received in"),
    ],
)
def test_what_does_not_fit_is_told_by_rank_and_call_site(what: str, words: str) -> None:
    found = ends_with(what, dp=2)
    assert re.search(words, found)
    line = FAULTS[what].__code__.co_firstlineno
    for rank in (0, 1):
        assert re.search(rf"  rank {rank}: \w+.* called at test_collective_check.py:\d+ in {what}, from", found)
    assert all(line < int(number) <= line + 3 for number in re.findall(r"called at test_collective_check.py:(\d+)", found))


def test_details_of_a_shape_and_of_strides() -> None:
    found = ends_with("shape", dp=2)
    assert "rank 0: all_reduce (sum) of [4, 3] float32 on cpu, called at" in found
    assert "rank 1: all_reduce (sum) of [4, 4] float32 on cpu, called at" in found
    found = ends_with("strided", dp=2)
    assert "rank 1 hands all_reduce over dp_replicate (ranks 0, 1) a tensor that is not contiguous: shape [4], strides [4]" in found
    assert "x.contiguous()" in found


def test_both_ends_of_a_border_agree() -> None:
    found = ends_with("border", dp=2)
    assert "what rank 0 sends to rank 1 is not what that receives (size)" in found
    assert "send of [4] float32" in found
    assert "receive of [5] float32" in found


def test_ranks_that_wait_for_each_other_are_known_at_once() -> None:
    found = ends_with("crossed", dp=2, tp=2)
    assert re.search(
        r"rank \d is in collective \d+ over \w+ \(ranks \d, \d\), and rank \d does not come: it waits for rank \d, which waits", found
    )
    assert found.count("called at test_collective_check.py") == 4


def test_who_does_not_come_is_named_with_what_it_is_at() -> None:
    found = ends_with("asleep", seconds=2.0, dp=2)
    assert re.search(
        r"rank \d is in collective \d+ over \w+ \(ranks 0, 1\), and rank \d does not come: for \d+ s it has made no other", found
    )
    assert "its last was" in found
