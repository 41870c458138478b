"""Batches are copied to the device without waiting, from page-locked memory, one step before they are used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from disttrain.data.dataset import Order, Position
from disttrain.data.module import Loading
from disttrain.data.synthetic import Synthetic
from disttrain.data.workers import BatchSource
from disttrain.models.task import Regression
from disttrain.parallel.mesh import Mesh
from disttrain.train import batch
from disttrain.train.batch import Feed, Slice, train_positions

NUM_STEPS = 3


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the feed asks of a GPU that is not there, in order."""
    noted: list[str] = []
    to, cpu = Tensor.to, torch.device("cpu")

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.name = "copies"

        def __enter__(self) -> None:
            noted.append("on the copies' stream")

        def __exit__(self, *_: object) -> None:
            noted.append("off it")

        def wait_stream(self, other: Any) -> None:
            noted.append("compute waits for copies")

    def copied(self: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        if arguments[:1] == (torch.device("cuda", 0),):
            noted.append(f"copy {keywords}")
            return to(self, cpu)
        return to(self, *arguments, **keywords)

    def pinned(self: Tensor) -> Tensor:
        noted.append("pin")
        return self

    monkeypatch.setattr(Tensor, "to", copied)
    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: noted.append("kept"))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return noted


def steps(pin_memory: bool) -> Iterator[Any]:
    data = Synthetic(kind="vectors", shape=(4,), num_samples=32, num_validation=0)
    feed = Feed(
        BatchSource(data.train(), Loading()), Order(32, 8, 0), Slice(Mesh().axis("data"), 8, 8), Regression(), torch.device("cuda", 0),
        pin_memory=pin_memory,
    )  # fmt: skip
    assert batch.__name__ == Feed.__module__
    return feed.steps(train_positions(feed.order, 0, Position(), NUM_STEPS))


def test_copies_do_not_wait_and_run_one_step_ahead(events: list[str]) -> None:
    """M30."""
    taken = steps(pin_memory=True)
    next(taken)
    copies = [event for event in events if event.startswith("copy")]
    assert copies == ["copy {'non_blocking': True}"] * 4, "inputs and targets of this step and of the next"
    assert events.index("compute waits for copies") > max(number for number, event in enumerate(events) if event.startswith("copy"))
    assert events.count("pin") == 4
    assert events.count("kept") == 2
    assert len(list(taken)) == NUM_STEPS - 1
    inside = False
    for event in events:
        inside = event == "on the copies' stream" or (inside and event != "off it")
        assert inside or not event.startswith("copy")


def test_pinning_can_be_left_out(events: list[str]) -> None:
    list(steps(pin_memory=False))
    assert "pin" not in events
