"""Folders by name: on a file system, or in an object store (`s3://`, `gs://`, `memory://`: whatever fsspec knows).

A place in a store behaves as a `pathlib.Path` does, as far as it can (universal-pathlib); it has no rename and no fsync.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import string
from datetime import datetime
from pathlib import Path
from typing import cast

from disttrain.errors import ConfigError, MissingExtraError

_ID_LETTERS = string.ascii_lowercase + string.digits


def is_remote(path: Path | str) -> bool:
    """Whether this names a place in an object store."""
    return "://" in str(path)


def current_folder() -> str:
    """Where the command was typed. ConfigError if it has been deleted since one went there."""
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the current folder does not exist any more", "cd <a folder that does>") from error


def shown(folder: Path) -> str:
    """A folder as one names it: from where one is, or whole if it isn't below, as when the process works in it (hydra.job.chdir)."""
    below = os.path.relpath(folder)
    return os.path.abspath(folder) if below.startswith(".") else below


def expanded(path: str | Path, remedy: str = "the whole path, without ~") -> Path:
    """`path` with its ~ as a folder. ConfigError where nobody says which: no HOME, and a user of whom the system knows nothing."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path} names a home folder, and this user has none (HOME is not set)", remedy) from error


def place_of(text: str | Path) -> Path:
    """The place that `text` names. MissingExtraError without the packages for a remote one."""
    if not is_remote(text):
        return expanded(text)
    try:
        from upath import UPath
    except ImportError as error:
        raise MissingExtraError("universal-pathlib", "remote", str(text)) from error
    try:
        # Listings that were kept would hide what other ranks have written.
        return cast(Path, UPath(str(text), use_listings_cache=False))
    except ImportError as error:
        raise MissingExtraError(str(error), "remote", str(text)) from error


def not_made(error: OSError) -> ConfigError:
    """What is told where the system does not make a run's folder."""
    is_long = error.errno == errno.ENAMETOOLONG
    remedy = (
        "hydra.run.dir=<a shorter name>, or in a sweep hydra.sweep.subdir=<one>"
        if is_long
        else "paths.outputs=<a folder that you may write to>"
    )
    return ConfigError(f"the run folder can't be made: {error}", remedy)


def new_folder(outputs: Path, now: datetime | None = None) -> Path:
    """Make `outputs/<date>/<time>-<short id>/`, for a run or for a sweep's jobs, which then lie in it by number."""
    now = now or datetime.now()
    while True:
        short_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(4))
        path = outputs / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-{short_id}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
