"""Checkpoints in an object store, where nothing is renamed: files get their final names at once, and the manifest comes last.

Without its manifest a folder is no checkpoint, so one that is being written, or was given up, is none.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from disttrain.checkpoint.files import Blocks

MANIFEST = "manifest.json"


def write(path: Path, blocks: Blocks) -> None:
    """Write an object; it exists when this returns, and does not if this raises. A store keeps a few blocks in memory."""
    file: Any = path.open("wb")
    try:
        for block in blocks:
            file.write(block)
    except BaseException:
        with contextlib.suppress(AttributeError):
            file.discard()
            file.closed = True  # it would complete itself when it is forgotten
        raise
    file.close()


def delete(folder: Path) -> None:
    """Delete a checkpoint, its manifest first."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in files_in(folder):
        path.unlink(missing_ok=True)


def move(folder: Path, to: Path) -> None:
    """Move a checkpoint: without its manifest first and last, so that half of it is none at either place."""
    manifest = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).unlink()
    for path in files_in(folder):
        target = to / path.relative_to(folder).as_posix()
        fs: Any = path.fs  # type: ignore[attr-defined]
        fs.cp_file(path.path, target.path)  # type: ignore[attr-defined]
        path.unlink()
    write(to / MANIFEST, [manifest])


def files_in(folder: Path) -> list[Path]:
    """Every object below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]
