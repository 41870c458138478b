"""What the proofs share: the records of one device, written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from disttrain.config.schema import Config
from disttrain.verify import verb


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Config], str]:
    """`recorded(name, config)`: the folder of one device's record of that experiment."""
    folders: dict[str, Path] = {}

    def record(name: str, config: Config) -> str:
        if name not in folders:
            folder = tmp_path_factory.mktemp(name)
            verb.record(config, str(folder))
            folders[name] = folder
        return str(folders[name])

    return record
