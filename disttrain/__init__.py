"""Distributed training that you can see into, and that proves itself.

`run(["strategy=ddp"])` trains as the command line does; `Trainer` is the loop for those who build its parts. Both
are imported when asked for, so that `import disttrain` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from disttrain.cli import Result, run
    from disttrain.train.trainer import Trainer

    __version__: str

__all__ = ["Result", "Trainer", "__version__", "run"]

_HOMES = {"run": "disttrain.cli", "Result": "disttrain.cli", "Trainer": "disttrain.train.trainer"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'disttrain' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def _version() -> str:
    """Of the clone, if this is one, else of the installed package."""
    import tomllib
    from importlib.metadata import version
    from pathlib import Path

    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    if project.is_file():
        described = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if described.get("name") == "disttrain":
            return str(described["version"])
    return version("disttrain")
