"""A world of ranks for a function: what tests, `verify` and `doctor` compute in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from disttrain.config.schema import Config
from disttrain.config.world import heavy_modules
from disttrain.launch.environment import environ, rank_environment
from disttrain.launch.local import Supervisor, choose_start_method, import_warm
from disttrain.launch.outcome import Outcome


def run_world(entry: Callable[..., Any], world_size: int, args: tuple[Any, ...] = (), **options: Any) -> list[Any]:
    """Run `entry(place, *args)` on `world_size` ranks in a process group and return their results by rank.

    Forked ranks see this process as it is, so `entry` may be a closure; results must be picklable. Options are those
    of `supervise`. A stop signal ends it. Raises UserError as a rank raised it, WorldError if a rank failed or the world was stopped.
    """
    outcome = supervise(entry, world_size, args, ends_at_once=True, **options)
    outcome.raise_failure()
    return outcome.results


def run_world_of(config: Config, entry: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """`run_world` with the ranks that a config asks for, as its `launch` says."""
    launch = config.launch
    return run_world(
        entry,
        int(launch.world_size),
        args,
        device=launch.device,
        threads=int(launch.threads),
        start_method=launch.start_method,
        timeout_seconds=launch.timeout_seconds,
        env=launch.env,
        interface=launch.interface,
        warm=heavy_modules(config.strategy),
    )


def supervise(
    entry: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...] = (),
    *,
    device: str = "cpu",
    threads: int = 1,
    start_method: str = "auto",
    timeout_seconds: float = 60.0,
    grace_seconds: float = 10.0,
    ends_at_once: bool = False,
    max_restarts: int = 0,
    env: Mapping[str, str] | None = None,
    interface: str = "auto",
    log_file: Callable[[int], Path] | None = None,
    warm: Iterable[str] = (),
) -> Outcome:
    """`run_world` that tells how it ended instead of raising. `warm`: modules that ranks will import, for their parent to import once."""
    method = choose_start_method(start_method)
    with environ(rank_environment(env or {}, threads, interface)):
        if method == "fork":
            import_warm(warm)
        from disttrain.launch.worker import run_in_group

        supervisor = Supervisor(world_size, method, threads, max_restarts, grace_seconds, ends_at_once, log_file)
        return supervisor.run(partial(run_in_group, entry=entry, args=args, device=device, timeout_seconds=timeout_seconds))
