"""The store that the ranks of a launched world meet at, and what they tell each other there before a group exists."""

from __future__ import annotations

import contextlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain.config.schema import Config
from disttrain.errors import LaunchError, UserError
from disttrain.launch.environment import Environment
from disttrain.launch.outcome import Failure
from disttrain.launch.rank import load_function

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

FOLLOW_SECONDS = 600.0
"""How long a rank waits for rank 0's word: the config with its `launch.timeout_seconds` comes with it."""
READ_SECONDS = 5.0
"""For the others to read rank 0's last word before it leaves with the store."""


class Meeting:
    """The store that the ranks of a launched world meet at: torchrun's own, else one that rank 0 hosts."""

    def __init__(self, environment: Environment, timeout_seconds: float) -> None:
        """Reach the store. Raises LaunchError if rank 0 does not open it within the timeout."""
        from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

        self.environment = environment
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.is_host = environment.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._where = f"{environment.address}:{environment.port}"
        try:
            store = TCPStore(
                environment.address,
                environment.port,
                is_master=self.is_host,
                timeout=timedelta(seconds=timeout_seconds),
                wait_for_workers=False,
            )
        except DistError as error:
            raise LaunchError(
                f"rank {environment.rank} of {environment.world_size} could not reach rank 0 at {self._where} "
                f"within {timeout_seconds:g} s: {str(error).splitlines()[0]}",
                "check MASTER_ADDR, MASTER_PORT and the firewall, and that rank 0 runs",
            ) from error
        self._all_attempts: Store = PrefixStore("disttrain", store)
        self._store: Store = PrefixStore(str(self.attempt), self._all_attempts)
        self._store.add("came", 1)

    def group_store(self, timeout: timedelta) -> Store:
        """The store for the process group."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        store: Store = PrefixStore("group", self._store)
        store.set_timeout(timeout)
        return store

    def wait_for_all(self, timeout_seconds: float) -> None:
        """Rank 0 waits here for the others, so that a missing one is named before anything waits for it in vain."""
        deadline = time.monotonic() + timeout_seconds
        while (num_came := self._store.add("came", 0)) < self.environment.world_size:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{num_came} of {self.environment.world_size} ranks came to {self._where} within {timeout_seconds:g} s",
                    "see why the others did not start, or set launch.timeout_seconds higher",
                )
            time.sleep(0.02)

    def say(self, word: dict[str, Any]) -> None:
        """Rank 0's word to all others."""
        self._store.set("word", json.dumps(word))

    def hear(self) -> dict[str, Any]:
        """Rank 0's word."""
        word: dict[str, Any] = json.loads(self._wait("word", FOLLOW_SECONDS))
        self._store.add("heard", 1)
        return word

    def prepare_once(self, prepare: str | None, config: Config) -> None:
        """Let one rank a node fetch the data while the others there wait. Its mistake is raised by all of them."""
        if prepare is None:
            return
        key = f"prepared/{self.environment.rank - self.environment.local_rank}"
        if self.environment.local_rank == 0:
            try:
                load_function(prepare)(config)
            except Exception as error:
                self._store.set(key, str(error) or type(error).__name__)
                raise
            self._store.set(key, "")
        elif message := self._wait(key, config.launch.timeout_seconds).decode():
            raise UserError(message)

    def claim(self, failure: Failure) -> bool:
        """Whether this rank's failure is the first of all: the cause, which is shown; consequences are not."""
        is_first = bool(self._store.add("failures", 1) == 1)
        if is_first:
            self._store.set("failure", json.dumps({"rank": failure.rank, "kind": failure.kind, "message": failure.message}))
        return is_first

    def first_failure(self) -> str | None:
        """The failure that was claimed, in words; None if there is none or the store is gone with its host."""
        with contextlib.suppress(Exception):
            if self._store.check(["failure"]):
                return "rank {rank}: {kind}: {message}".format(**json.loads(self._store.get("failure")))
        return None

    @property
    def folder(self) -> Path | None:
        """The run folder of the attempt before this one."""
        return Path(self._all_attempts.get("folder").decode()) if self._all_attempts.check(["folder"]) else None

    @folder.setter
    def folder(self, path: Path) -> None:
        self._all_attempts.set("folder", str(path))

    def close(self) -> None:
        """Rank 0, if it hosts the store, lets the others hear its word first."""
        deadline = time.monotonic() + READ_SECONDS
        while self.is_host and self._store.add("heard", 0) < self.environment.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.02)

    def _wait(self, key: str, seconds: float) -> bytes:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except Exception as error:
            raise LaunchError(
                f"rank {self.environment.rank} waited at {self._where} for '{key}' from another rank, in vain: {str(error).splitlines()[0]}"
            ) from error
        value: bytes = self._store.get(key)
        return value
