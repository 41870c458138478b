"""Folders by name: on a file system, or in an object store (`s3://`, `gs://`, `memory://`: whatever fsspec knows).

A place in a store behaves as a `pathlib.Path` does, as far as it can (universal-pathlib); it has no rename and no fsync.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from disttrain.errors import MissingExtraError


def is_remote(path: Path | str) -> bool:
    """Whether this names a place in an object store."""
    return "://" in str(path)


def shown(folder: Path) -> str:
    """A folder as one names it: from where one is, or whole if it isn't below, as when the process works in it (hydra.job.chdir)."""
    below = os.path.relpath(folder)
    return os.path.abspath(folder) if below.startswith(".") else below


def place_of(text: str | Path) -> Path:
    """The place that `text` names. MissingExtraError without the packages for a remote one."""
    if not is_remote(text):
        return Path(text).expanduser()
    try:
        from upath import UPath
    except ImportError as error:
        raise MissingExtraError("universal-pathlib", "remote", str(text)) from error
    try:
        # Listings that were kept would hide what other ranks have written.
        return cast(Path, UPath(str(text), use_listings_cache=False))
    except ImportError as error:
        raise MissingExtraError(str(error), "remote", str(text)) from error
