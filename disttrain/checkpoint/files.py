"""What lies where in a checkpoint, how it gets to the disk, and what makes it complete.

    checkpoints/step-40/
      model/rank-0.safetensors ...      tensors, each unique piece once; its place in the whole in the file's header
      optimizer/rank-0.safetensors ...
      callbacks/rank-0.safetensors ...
      state.json                        plain values; what differs by rank as a list, what is known by name as a mapping
      manifest.json                     every other file, its size and its CRC-32 (zlib)

A folder with its final name is complete: it is written under another name, flushed to the disk and renamed.
The checksums tell what happened to it afterwards. What is read is data, and no more of it than is plausible.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from disttrain.checkpoint import remote
from disttrain.errors import CheckpointError
from disttrain.places import is_remote

MANIFEST = remote.MANIFEST
VALUES = "state.json"
FORMAT = 1
LARGEST_JSON = 1 << 28
"""Bytes of a JSON file that is read at all."""
MODE = 0o664
"""Of a new file, less what the umask takes away."""
_FINAL = re.compile(r"step-(\d{1,18})")
_CHUNK = 1 << 22
Blocks = Iterable[bytes | memoryview]


def step_name(step: int) -> str:
    """Folder name of the checkpoint of `step`."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder name; None for another name."""
    match = _FINAL.fullmatch(name)
    return int(match[1]) if match else None


def partial_path(folder: Path, token: str) -> Path:
    """Where the checkpoint `folder` is written until it is complete; `token` tells this run's from those of runs before."""
    if is_remote(folder):
        return folder
    return folder.with_name(f".{folder.name}.{token}.partial")


def old_path(folder: Path) -> Path:
    """Where the checkpoint `folder` is moved before it is deleted or replaced."""
    return folder.with_name(f".{folder.name}.old")


# --- writing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A line of the manifest: `path` within the checkpoint, `size` in bytes, `crc32`."""

    path: str
    size: int
    crc32: str

    def problem(self, folder: Path) -> str | None:
        """What is wrong with this file in `folder`; None if nothing is."""
        file = folder / self.path
        try:
            if not is_remote(file) and not file.resolve().is_relative_to(folder.resolve()):
                return f"{self.path} lies outside the checkpoint"
            if not file.is_file():
                return f"{self.path} is missing"
            size = file.stat().st_size
            if size != self.size:
                return f"{self.path} has {size} bytes instead of {self.size}"
            found = checksum(file)
        except OSError as error:
            return f"{self.path} cannot be read: {error.strerror}"
        return None if found == self.crc32 else f"{self.path} is damaged (CRC-32 {found} instead of {self.crc32})"


def write_blocks(path: Path, folder: Path, blocks: Blocks) -> Entry:
    """Write a new file of the checkpoint `folder` block by block and wait until it is on the disk. Returns its line of the manifest."""
    size, checksum_so_far = 0, 0

    def counted() -> Iterator[bytes | memoryview]:
        nonlocal size, checksum_so_far
        for block in blocks:
            checksum_so_far = zlib.crc32(block, checksum_so_far)
            size += len(block)
            yield block

    (remote.write if is_remote(path) else _write)(path, counted())
    return Entry(path.relative_to(folder).as_posix(), size, f"{checksum_so_far:08x}")


def _write(path: Path, blocks: Blocks) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, MODE)
    try:
        for block in blocks:
            view = memoryview(block)
            while view:
                view = view[os.write(file, view) :]
        os.fsync(file)
    finally:
        os.close(file)


def write_json(path: Path, value: Any) -> Entry:
    """Write `value` and wait until it is on the disk."""
    return write_blocks(path, path.parent, [json.dumps(value, indent=1, allow_nan=True).encode()])


def flush(folder: Path) -> None:
    """Wait until a folder's names are on the disk."""
    if is_remote(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_space(folder: Path, num_bytes: int) -> None:
    """OSError if `num_bytes` more do not fit where `folder` lies: better none of a file than half of it on a full disk."""
    if (free := free_bytes(folder)) is not None and free < num_bytes:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {num_bytes:,} bytes are to be written and {free:,} are free")


def free_bytes(folder: Path) -> int | None:
    """What the disk of `folder` has left; None for a store, which has no end."""
    return None if is_remote(folder) else shutil.disk_usage(folder).free


def commit(partial: Path, folder: Path, values: dict[str, Any], entries: list[Entry]) -> None:
    """Make the written folder `partial` the checkpoint `folder`: values, manifest, flush, rename. Rank 0 alone.

    One that has the name already is moved aside first, and counts as long as no other has the name.
    """
    for entry in entries:
        file = partial / entry.path
        if not file.is_file() or file.stat().st_size != entry.size:
            raise OSError(f"rank 0 does not see {entry.path} whole: do all machines share the run folder?")
    lines = [*entries, write_json(partial / VALUES, values)]
    write_json(partial / MANIFEST, {"format": FORMAT, "files": [vars(entry) for entry in sorted(lines, key=lambda entry: entry.path)]})
    for kind in {Path(entry.path).parent for entry in entries}:
        flush(partial / kind)
    flush(partial)
    if partial == folder:
        return
    old = old_path(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(partial, folder)
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


# --- reading ------------------------------------------------------------------------------------------------------


def checksum(path: Path) -> str:
    """CRC-32 of a file as eight hexadecimal digits."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def read_json(path: Path) -> Any:
    """The value of a JSON file. OSError if it cannot be read, ValueError if it is none or implausibly large."""
    size = path.stat().st_size
    if size > LARGEST_JSON:
        raise ValueError(f"it has {size:,} bytes, and {LARGEST_JSON:,} is the limit")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def read_manifest(folder: Path) -> list[Entry]:
    """The files that the checkpoint `folder` should hold. CheckpointError if it is none or of another format."""
    try:
        manifest = read_json(folder / MANIFEST)
        found = manifest["format"]
        if found == FORMAT:
            return [Entry(_inside(line["path"]), int(line["size"]), str(line["crc32"])) for line in manifest["files"]]
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the {MANIFEST} of {folder} cannot be read: {error}") from None
    raise CheckpointError(f"{folder} has format {found}, and this version reads format {FORMAT}")


def _inside(path: Any) -> str:
    """A path of a manifest, if it is one that stays in its checkpoint."""
    parts = PurePosixPath(str(path)).parts
    if not parts or parts[0] == "/" or ".." in parts or "\\" in str(path):
        raise ValueError(f"it names the path {path!r}, which lies outside the checkpoint")
    return str(path)


def read_values(folder: Path) -> dict[str, Any]:
    """The plain values of the checkpoint `folder`; 'by_rank' is a list, one element a rank."""
    try:
        values = read_json(folder / VALUES)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the {VALUES} of {folder} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"the {VALUES} of {folder} holds no mapping")
    return values


def problems(folder: Path, share: slice = slice(None)) -> list[str]:
    """What the manifest finds wrong with the checkpoint `folder`, reading every file (or this `share` of them) once."""
    try:
        entries = read_manifest(folder)
    except CheckpointError as error:
        return [error.message]
    wrong = [found for entry in entries[share] if (found := entry.problem(folder))]
    return wrong if any(entry.path == VALUES for entry in entries) else [*wrong, f"its {MANIFEST} names no {VALUES}"]


# --- which there are ----------------------------------------------------------------------------------------------


def found_in(checkpoints: Path) -> dict[int, Path]:
    """{step: folder} of the checkpoints in the folder `checkpoints`, oldest first.

    One that was moved aside to be replaced counts, if the other never got its name.
    """
    found: dict[int, Path] = {}
    for folder in _folders(checkpoints):
        if (step := step_of(folder.name)) is not None:
            found[step] = folder
    for folder in _folders(checkpoints):
        step = step_of(folder.name.removeprefix(".").removesuffix(".old"))
        if step is not None and folder == old_path(checkpoints / step_name(step)):
            found.setdefault(step, folder)
    return dict(sorted(found.items()))


def steps_in(checkpoints: Path) -> list[int]:
    """Steps of the checkpoints in the folder `checkpoints`, oldest first."""
    return list(found_in(checkpoints))


def remove_tree(folder: Path) -> None:
    """Delete a folder, as far as that can be done."""
    if is_remote(folder):
        remote.delete(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def clear_partial(checkpoints: Path) -> None:
    """Delete what runs before have left unfinished; rank 0 alone, while the run folder is its own."""
    for folder in _folders(checkpoints):
        if re.fullmatch(r"\.step-\d+\.([0-9a-f]+\.partial|gone)", folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def supersede(checkpoints: Path, step: int) -> bool:
    """Put checkpoints after `step` aside, into `superseded/`, beside those that lie there already. Whether there were any."""
    beyond = {later: folder for later, folder in found_in(checkpoints).items() if later > step}
    for later, folder in beyond.items():
        place = (checkpoints.parent if checkpoints.name == "checkpoints" else checkpoints) / "superseded"
        names = (f"{step_name(later)}.{number}".removesuffix(".0") for number in itertools.count())
        aside = next(one for name in names if not (one := place / name).exists())
        if not is_remote(folder):
            place.mkdir(parents=True, exist_ok=True)
            shutil.move(folder, aside)  # `checkpoints` may be a link to another file system
        elif (folder / MANIFEST).is_file():
            remote.move(folder, aside)
        else:
            remote.delete(folder)
    return bool(beyond)


def _folders(checkpoints: Path) -> Iterator[Path]:
    if checkpoints.is_dir():
        yield from (entry for entry in checkpoints.iterdir() if entry.is_dir())
