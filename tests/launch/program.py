"""What `python -m disttrain` will do, on an entry of the tests': joins the world it finds, or launches one."""

from __future__ import annotations

import sys
from pathlib import Path

from disttrain.config.schema import Config, LaunchConfig
from disttrain.launch.environment import detect
from disttrain.launch.job import Job, run
from disttrain.launch.rank import leave


def main(entry: str, world_size: int, outputs: str) -> int:
    environment = detect()
    if environment.rank > 0:
        from disttrain.launch.join import follow

        return follow(environment).exit_code
    config = Config(launch=LaunchConfig(world_size=world_size, device="cpu", backend="gloo", timeout_seconds=20))
    return run(Job(config, f"tests.launch.entries:{entry}", outputs=Path(outputs)), environment).exit_code


if __name__ == "__main__":
    leave(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
