"""A world whose size may change: `torchrun --nnodes min:max`.

torchrun starts all ranks again when a machine is lost or joins, and the run goes on from its newest checkpoint with
the data degree that the new size gives. Not every size can share out the global batch: then the ranks wait for torchrun to
make a world of another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from disttrain.errors import UserError
from disttrain.launch.environment import Environment, uses_agent_store
from disttrain.launch.join import wait_for_another_world
from disttrain.launch.outcome import Outcome


def other_sizes(world: Environment, env: Mapping[str, str] | None = None, commands: Sequence[Sequence[str]] | None = None) -> list[int]:
    """Numbers of ranks, smallest first, that torchrun may come to besides the present one; empty if it can't change.

    torchrun tells its ranks nothing of this, so its own command line is read, or its variable PET_NNODES.
    """
    if world.launcher != "torchrun":
        return []
    env = os.environ if env is None else env
    given = [value for command in (_ancestors() if commands is None else commands) for value in _nnodes(command)]
    fewest, _, most = (given[0] if given else env.get("PET_NNODES", "")).partition(":")
    if not (fewest.isdigit() and most.isdigit()):
        return []
    sizes = [number * world.local_world_size for number in range(int(fewest), int(most) + 1)]
    return [size for size in sizes if size != world.world_size]


def warning(world: Environment) -> str | None:
    """What a person should know who lets machines join: with torch 2.14 the agents wait for each other's addresses in vain (tried)."""
    if not (uses_agent_store() and other_sizes(world)):
        return None
    why = "when a machine joins, torchrun's agents may time out and all end, unless they share no store"
    return f"warning: {why}: start each with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def _nnodes(command: Sequence[str]) -> Iterator[str]:
    """What this command line says of --nnodes."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--nnodes":
            yield value if equals else following


def _ancestors() -> list[list[str]]:
    """Command lines of the processes above this one, the nearest first."""
    import psutil

    try:
        return [process.cmdline() for process in psutil.Process().parents()]
    except psutil.Error:
        return []


def wait_if_another_fits(world: Environment, error: UserError, check: Callable[[Environment], object]) -> Outcome | None:
    """Rank 0 finds that its config does not fit this world (`error`): if it fits another that may come, all ranks wait for that one.

    `check` raises UserError for a world that does not fit. None, at once, if none does; else how the wait ended.
    """
    fitting = []
    for size in other_sizes(world):
        with suppress(UserError):
            check(replace(world, world_size=size, num_nodes=size // world.local_world_size))
            fitting.append(size)
    if not fitting:
        return None
    sizes = " or ".join(map(str, fitting))
    return wait_for_another_world(world, f"{error.message}\n  waiting for a world of {sizes} ranks, until a machine joins or leaves")
