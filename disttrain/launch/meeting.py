"""The store that the ranks of a launched world meet at, and what they tell each other there before a group exists.

A launcher may keep the store while it starts ranks again, in another number and on other machines, and not all of its
agents count the starts alike. So rank 0 opens a round, and the others take its word only if it names them: a word
that was said to ranks of an earlier start is none to those of this one.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from disttrain.config.schema import Config
from disttrain.errors import LaunchError, UserError
from disttrain.launch.environment import Environment, host_name, uses_agent_store
from disttrain.launch.network import resolve
from disttrain.launch.outcome import Failure
from disttrain.launch.preflight import Preflight
from disttrain.launch.rank import load_function

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Value = TypeVar("Value")

FOLLOW_SECONDS = 600.0
"""How long a rank waits for rank 0's word: the config with its `launch.timeout_seconds` comes with it."""
RESOLVE_SECONDS = 60.0
"""For the name of the meeting place to be known here; that of a pod comes up with it."""
READ_SECONDS = 5.0
"""For the others to read rank 0's last word before it leaves with the store."""
POLL_SECONDS = 0.3
"""Between a rank's looks for rank 0's word, after the first few: waits of the store's own that run out are warnings in the log."""
ANSWER_SECONDS = 3.0
"""For the store to answer when something has gone wrong: its host may be gone, or cut off, without a word."""
BEAT_SECONDS, GONE_SECONDS = 1.0, 10.0
"""Ranks that have nothing to do say that they are there so often, and are taken for gone after so long."""


class Meeting:
    """The store that the ranks of a launched world meet at: torchrun's own, else one that rank 0 hosts."""

    def __init__(self, environment: Environment, timeout_seconds: float) -> None:
        """Reach the store; rank 0 opens a round. Raises LaunchError if rank 0 can't be reached within the timeout."""
        from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

        self.environment, self.host = environment, host_name()
        self.hosts: list[str] = []
        """Names of the machines, by rank; empty before rank 0 has said its word."""
        self.attempt = -1
        """Starts of this world before this one, as far as its store remembers: the same on all ranks. -1 before it is known."""
        self.is_host = environment.rank == 0 and not uses_agent_store()
        self._where = f"{environment.address}:{environment.port}"
        self._nonce = secrets.token_hex(4)
        resolve(environment.address, min(timeout_seconds, RESOLVE_SECONDS), self.host)
        try:
            store = TCPStore(
                environment.address,
                environment.port,
                is_master=self.is_host,
                timeout=timedelta(seconds=timeout_seconds),
                wait_for_workers=False,
            )
        except DistError as error:
            if self.is_host and "EADDRINUSE" in str(error):
                raise LaunchError(
                    f"port {environment.port} of this machine is taken, where rank 0 was to meet the others ({self._where})",
                    "MASTER_PORT=<a free port>, the same on all ranks; torchrun takes --master-port or --rdzv-endpoint",
                ) from error
            raise LaunchError(
                f"rank {environment.rank} of {environment.world_size}, on {self.host}, could not reach rank 0 at {self._where} "
                f"within {timeout_seconds:g} s: {str(error).splitlines()[0]}",
                "check MASTER_ADDR, MASTER_PORT and the firewall, and that rank 0 runs",
            ) from error
        self._all_rounds: Store = PrefixStore("disttrain", store)
        if environment.rank == 0:
            self._enter(int(self._all_rounds.add("rounds", 1)))

    def _enter(self, number: int) -> None:
        """Come to the round of that number, which is the first for 1."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.attempt = number - 1
        self._store: Store = PrefixStore(str(self.attempt), self._all_rounds)
        self._store.set(f"came/{self.environment.rank}", json.dumps([self._nonce, self.host]))

    def group_store(self, timeout: timedelta) -> Store:
        """The store for the process group."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        store: Store = PrefixStore("group", self._store)
        store.set_timeout(timeout)
        return store

    def wait_for_all(self, timeout_seconds: float) -> None:
        """Rank 0 waits here for the others, so that a missing one is named before anything waits for it in vain."""
        deadline = time.monotonic() + timeout_seconds
        while missing := self._without("came"):
            if time.monotonic() > deadline:
                size, who = self.environment.world_size, ", ".join(map(str, missing))
                raise LaunchError(
                    f"{size - len(missing)} of {size} ranks came to {self._where} within {timeout_seconds:g} s; missing: {who}",
                    "see why the others did not start, or set launch.timeout_seconds higher",
                )
            time.sleep(0.02)

    def say(self, word: dict[str, Any]) -> None:
        """Rank 0's word to the others that have come."""
        size = self.environment.world_size
        came = {rank: json.loads(self._store.get(f"came/{rank}")) for rank in range(size) if self._store.check([f"came/{rank}"])}
        self.hosts = [came[rank][1] if rank in came else "?" for rank in range(size)]
        self._store.set("word", json.dumps(word | {"to": {rank: nonce for rank, (nonce, _) in came.items()}, "hosts": self.hosts}))

    def say_last(self, word: dict[str, Any]) -> None:
        """The same, before rank 0 leaves: also to those that come a moment later."""
        deadline = time.monotonic() + READ_SECONDS
        self.say(word)
        while self._store.add("heard", 0) < self.environment.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
            self.say(word)

    def hear(self) -> dict[str, Any]:
        """Rank 0's word to this start of this rank."""
        deadline, pause = time.monotonic() + FOLLOW_SECONDS, 0.02
        try:
            while time.monotonic() < deadline:
                if (word := self._word()) is not None:
                    return word
                time.sleep(pause)
                pause = min(1.5 * pause, POLL_SECONDS)
        except Exception as error:
            raise LaunchError(self.lost(), "see why rank 0 has gone, in its log") from error
        raise self._in_vain("word", "rank 0", FOLLOW_SECONDS)

    def _word(self) -> dict[str, Any] | None:
        """Rank 0's word, if there is one to this start of this rank by now."""
        opened = int(self._all_rounds.add("rounds", 0))
        if opened > self.attempt + 1:
            self._enter(opened)
        if not opened or not self._store.check(["word"]):
            return None
        word: dict[str, Any] = json.loads(self._store.get("word"))
        if word["to"].get(str(self.environment.rank)) != self._nonce:
            return None
        self.hosts = word["hosts"]
        self._store.add("heard", 1)
        return word

    def preflight(self, timeout_seconds: float, device: str) -> None:
        """Every rank, before anything waits for another host: LaunchError on all for one that is cut off; rank 0 tells of a slow one."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        if self.environment.on_several_machines:
            check = Preflight(PrefixStore("preflight", self._store), self.environment, self.host, timeout_seconds, device)
            if (words := check.run()) and self.environment.rank == 0:
                print(f"disttrain: {words}", file=sys.stderr, flush=True)

    def prepare_once(self, prepare: str | None, config: Config) -> None:
        """Let one rank a node fetch the data while the others there wait. Its mistake is raised by all of them."""
        if prepare is None:
            return
        key = f"prepared/{self.environment.node}"
        if self.environment.local_rank == 0:
            try:
                load_function(prepare)(config)
            except Exception as error:
                self._store.set(key, str(error) or type(error).__name__)
                raise
            self._store.set(key, "")
        elif message := self._wait(key, "the first rank of this machine", config.launch.timeout_seconds).decode():
            raise UserError(message)

    # --- when something has gone wrong ------------------------------------------------------------------------

    def claim(self, failure: Failure) -> bool | None:
        """Whether this rank's failure is the first of all: the cause, which is shown; consequences are not. None: the store is lost."""

        def ask() -> bool:
            self._store.set(f"failed/{self.environment.rank}", "")
            is_first = bool(self._store.add("failures", 1) == 1)
            if is_first:
                self._store.set("failure", json.dumps({"rank": failure.rank, "kind": failure.kind, "message": failure.message}))
            return is_first

        return _in_time(ask)

    def absent(self) -> list[int]:
        """Ranks that have not failed a moment after the first one did: stuck elsewhere, or gone without a word."""
        deadline = time.monotonic() + READ_SECONDS / 2
        missing: list[int] = []
        while (missing := _in_time(lambda: self._without("failed")) or []) and time.monotonic() < deadline:
            time.sleep(0.1)
        return missing

    def _without(self, mark: str) -> list[int]:
        """Ranks that have not set `mark`."""
        return [rank for rank in range(self.environment.world_size) if not self._store.check([f"{mark}/{rank}"])]

    def first_failure(self) -> str | None:
        """The failure that was claimed, in words; None if there is none or the store is gone with its host."""

        def ask() -> str | None:
            if not self._store.check(["failure"]):
                return None
            return "rank {rank}: {kind}: {message}".format(**json.loads(self._store.get("failure")))

        return _in_time(ask)

    def lost(self) -> str:
        """What to say when the store does not answer."""
        lead = self.hosts[0] if self.hosts else "rank 0's machine"
        return f"{lead} can't be reached any longer from {self.host} (the store at {self._where}): it is gone, or cut off"

    def idle(self) -> NoReturn:
        """Every rank of a world that has nothing to do: stay until the launcher ends it. LaunchError when a rank has gone."""
        me, others = self.environment.rank, range(1, self.environment.world_size) if self.environment.rank == 0 else [0]
        seen = {rank: (-1, time.monotonic()) for rank in others}
        while True:
            self._store.add(f"idle/{me}", 1)
            for rank, (count, since) in seen.items():
                now = int(self._store.add(f"idle/{rank}", 0))
                if now != count:
                    seen[rank] = now, time.monotonic()
                elif time.monotonic() - since > GONE_SECONDS:
                    raise LaunchError(f"rank {rank} on {self.hosts[rank]} has gone while all waited for another size of the world")
            time.sleep(BEAT_SECONDS)

    # --- what outlives a start --------------------------------------------------------------------------------

    @property
    def folder(self) -> Path | None:
        """The run folder of the attempt before this one."""
        return Path(self._all_rounds.get("folder").decode()) if self._all_rounds.check(["folder"]) else None

    @folder.setter
    def folder(self, path: Path) -> None:
        self._all_rounds.set("folder", str(path))

    def close(self) -> None:
        """Rank 0, if it hosts the store, lets the others hear its word first."""
        deadline = time.monotonic() + READ_SECONDS
        while self.is_host and self._store.add("heard", 0) < self.environment.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.02)

    def _wait(self, key: str, source: str, seconds: float) -> bytes:
        """What `source` says under `key`."""
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except Exception as error:
            raise self._in_vain(key, source, seconds) from error
        value: bytes = self._store.get(key)
        return value

    def _in_vain(self, key: str, source: str, seconds: float) -> LaunchError:
        who = f"rank {self.environment.rank} on {self.host} waited {seconds:g} s at {self._where} for {source}"
        return LaunchError(f"{who}, which did not say '{key}'", "see its log; launch.timeout_seconds allows more time")


def _in_time(ask: Callable[[], Value]) -> Value | None:
    """What the store answers; None if it does not. A call to a host that is cut off would wait for a quarter of an hour."""
    answers: list[Value] = []

    def take() -> None:
        with contextlib.suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return answers[0] if answers else None
