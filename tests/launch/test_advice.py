"""Errors that a user can do something about say what."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain import build
from disttrain.errors import LaunchError
from disttrain.launch.advice import advice_for
from disttrain.launch.environment import Environment, rank_environment
from disttrain.launch.meeting import Meeting
from disttrain.launch.outcome import WorldError
from disttrain.launch.place import Place
from disttrain.launch.rank import describe
from disttrain.launch.world import run_world as run_world_of
from disttrain.train.hooks import Callback
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.train.runs import WARM


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            ["micro_batch_size=", "strategy.recompute=full", "fsdp"],
        ),
        (
            RuntimeError("DataLoader worker is killed by signal: Bus error. insufficient shared memory (shm)"),
            ["num_workers=0", "shm-size", "MiB"],
        ),
        (torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp"), ["NCCL_DEBUG=INFO", "launch.interface"]),
        (RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu"), ["device=x.device", "register_buffer"]),
        (RuntimeError("Tensors must be contiguous"), ["contiguous()", "debug=collectives"]),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), ["callbacks=[default,watchdog]"]),
        (OSError(98, "Address already in use"), ["MASTER_PORT="]),
    ],
    ids=["memory", "shared memory", "nccl", "device", "strided", "timeout", "address"],
)
def test_an_error_says_what_helps(error: Exception, words: list[str]) -> None:
    shown = describe(error, 0, None).words
    assert str(error) in shown
    for word in words:
        assert word in shown


def test_others_say_nothing_more(tmp_path: Path) -> None:
    assert advice_for(ValueError("a wrong value")) == ""
    assert describe(ValueError("a wrong value"), 1, None).words == "rank 1 failed: ValueError: a wrong value"


@pytest.mark.world(2)
def test_what_gloo_dies_of_is_explained(run_world: Callable[..., Any]) -> None:
    """It throws in a thread of its own, where nobody can catch."""

    def entry(place: Place) -> None:
        torch.distributed.all_reduce(torch.ones(4 + 1000 * place.rank))

    with pytest.raises(WorldError, match=r"(?s)SIGABRT: the process was killed; .*tensors of different sizes.*debug=collectives"):
        run_world(entry)


class Hoards(Callback):
    """Asks for more memory than there is, in step 3."""

    def on_train_step_start(self, trainer: Trainer) -> None:
        if trainer.progress.step == 2:
            torch.empty(1 << 50)


def test_memory_that_runs_out_is_told_by_kind() -> None:
    config = tiny.config(shard=2, micro_batch_size=2, callbacks={"hoards": {"_target_": "tests.launch.test_advice.Hoards"}})
    with pytest.raises(WorldError) as caught:
        run_world_of(lambda place: build.train(config, None, place), 2, warm=WARM)
    found = str(caught.value)
    assert found.count("of this rank, in step 3: weights ") == 1
    assert re.search(
        r"weights \d[^,]*, gradients [^,]*, optimizer state \d[^,]* KiB, activations and what a step makes on the way \d", found
    )
    assert "try: callbacks.grad_accumulation.micro_batch_size=1, or strategy.offload=true, or strategy.recompute=full" in found
    assert found.count("try:") == 1


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"port {port} of this machine is taken.*\n.*MASTER_PORT=") as caught:
            Meeting(Environment("torchrun", 0, 2, address="127.0.0.1", port=port), timeout_seconds=5.0)
    assert "MASTER_PORT" in str(caught.value)


def test_nccls_flight_recorder_is_on_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    assert int(rank_environment({}, 1)["TORCH_FR_BUFFER_SIZE"]) > 0
    assert rank_environment({"TORCH_FR_BUFFER_SIZE": "0"}, 1)["TORCH_FR_BUFFER_SIZE"] == "0"
