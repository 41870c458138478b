"""What `python -m disttrain` will do, on an entry of the tests': joins the world it finds, or launches one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from disttrain.config.schema import Config, LaunchConfig, PathsConfig
from disttrain.errors import ConfigError
from disttrain.launch.environment import detect
from disttrain.launch.job import Job, run
from disttrain.launch.rank import leave


def main(entry: str, world_size: int, outputs: str, timeout_seconds: float = 30.0) -> int:
    environment = detect()
    if environment.rank > 0:
        from disttrain.launch.join import follow

        return follow(environment).exit_code
    times = {"timeout_seconds": timeout_seconds, "grace_seconds": 5.0}
    config = config_of(world_size, data=f"{outputs}-prepared", env={"PLANTED": "asked for"}, **times)
    if entry == "wrong":
        from disttrain.launch.join import share_error

        share_error(environment, ConfigError("a wrong override"))
        return 2
    job = Job(config, f"tests.launch.entries:{entry}", prepare="tests.launch.entries:count_call", outputs=Path(outputs))
    return run(job, environment).exit_code


def config_of(world_size: int, data: str = "", **launch: Any) -> Config:
    """A checked config of that many ranks on the CPU."""
    launched = {"world_size": world_size, "device": "cpu", "backend": "gloo", "timeout_seconds": 10.0, "threads": 1, **launch}
    return Config(launch=LaunchConfig(**launched), paths=PathsConfig(data=data))


if __name__ == "__main__":
    leave(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(float, sys.argv[4:])))
