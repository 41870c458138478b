"""What ranks of a launched world tell each other before a group exists: rounds, hosts, silence."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from disttrain.errors import LaunchError
from disttrain.launch import meeting
from disttrain.launch.environment import Environment
from disttrain.launch.meeting import Meeting
from disttrain.launch.outcome import Failure
from disttrain.launch.place import Place

RunWorld = Callable[..., list[Any]]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.world(1)
def test_a_word_to_an_earlier_start_is_none_to_this_one(run_world: RunWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store outlives a start, and a rank of the next one may come before its rank 0."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def entry(place: Place) -> list[Any]:
        from torch.distributed import TCPStore

        agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        lead, follower = (Environment("torchrun", rank, 2, 0, 1, "127.0.0.1", agent.port, node=rank) for rank in range(2))
        heard: list[Any] = []

        def follow() -> None:
            one = Meeting(follower, 20)
            heard.append((one.hear()["start"], one.attempt, one.hosts))

        for start in range(2):
            early = threading.Thread(target=follow)
            early.start()
            time.sleep(0.3)
            first = Meeting(lead, 20)
            first.wait_for_all(20)
            first.say({"start": start})
            early.join(20)
        return heard

    found = run_world(entry)[0]
    assert [(start, attempt) for start, attempt, _ in found] == [(0, 0), (1, 1)]
    assert all(len(hosts) == 2 for _, _, hosts in found)


@pytest.mark.world(1)
def test_a_store_that_does_not_answer_is_told_by_its_host_and_holds_nobody_up(run_world: RunWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 0.5)

    def entry(place: Place) -> tuple[Any, ...]:
        one = Meeting(Environment("slurm", 0, 2, 0, 1, "127.0.0.1", free_port()), 5)
        one.say({})
        one.hosts = ["far", "near"]
        assert one.claim(Failure(0, "Error", "x")) is True
        assert one.absent() == [1]
        stuck = threading.Event()
        one._store = type("Silent", (), {name: lambda *_: stuck.wait(60) for name in ("set", "add", "check", "get")})()
        before = time.monotonic()
        return one.claim(Failure(0, "Error", "x")), one.first_failure(), one.absent(), one.lost(), time.monotonic() - before

    first, failure, absent, words, seconds = run_world(entry)[0]
    assert (first, failure, absent) == (None, None, [])
    assert words.startswith("far can't be reached any longer from ")
    assert seconds < 5


@pytest.mark.world(1)
def test_who_waits_for_another_size_notices_a_rank_that_has_gone(run_world: RunWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(meeting, "GONE_SECONDS", 0.5)

    def entry(place: Place) -> tuple[str, float]:
        one = Meeting(Environment("torchrun", 0, 2, 0, 1, "127.0.0.1", free_port()), 5)
        one.hosts = ["a", "b"]
        until = time.monotonic() + 1.0

        def beat() -> None:
            while time.monotonic() < until:
                one._store.add("idle/1", 1)
                time.sleep(0.05)

        threading.Thread(target=beat).start()
        with pytest.raises(LaunchError) as raised:
            one.idle()
        return str(raised.value), time.monotonic() - until

    words, after = run_world(entry)[0]
    assert "rank 1 on b has gone while all waited for another size of the world" in words
    assert 0.3 < after < 5
