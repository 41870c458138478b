"""What lies where in a checkpoint, what makes it complete, and which one to go on from.

    checkpoints/step-40/
      model/rank-0.safetensors ...      tensors, each unique piece once; its place in the whole in the file's header
      optimizer/rank-0.safetensors ...
      callbacks/rank-0.safetensors ...
      state.json                        plain values; what differs by rank as a list
      manifest.json                     every other file, its size and its CRC-32 (zlib)

A folder with its final name is complete: it is written under another name, flushed to the disk and renamed.
The checksums tell what happened to it afterwards.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disttrain.errors import CheckpointError

MANIFEST = "manifest.json"
VALUES = "state.json"
FORMAT = 1
_FINAL = re.compile(r"step-(\d+)")
_CHUNK = 1 << 22


def step_name(step: int) -> str:
    """Folder name of the checkpoint of `step`."""
    return f"step-{step}"


def partial_path(folder: Path) -> Path:
    """Where the checkpoint `folder` is written until it is complete."""
    return folder.with_name(f".{folder.name}.partial")


def old_path(folder: Path) -> Path:
    """Where the checkpoint `folder` is moved before it is deleted."""
    return folder.with_name(f".{folder.name}.old")


def steps_in(checkpoints: Path) -> list[int]:
    """Steps of the checkpoints with a final name in the folder `checkpoints`, oldest first."""
    if not checkpoints.is_dir():
        return []
    matches = (_FINAL.fullmatch(entry.name) for entry in checkpoints.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def checksum(path: Path) -> str:
    """CRC-32 of a file as eight hexadecimal digits."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


@dataclass(frozen=True)
class Entry:
    """A line of the manifest: `path` within the checkpoint, `size` in bytes, `crc32`."""

    path: str
    size: int
    crc32: str

    @classmethod
    def of(cls, file: Path, folder: Path) -> Entry:
        """The line of `file`, which lies in the checkpoint `folder`."""
        return cls(file.relative_to(folder).as_posix(), file.stat().st_size, checksum(file))

    def problem(self, folder: Path) -> str | None:
        """What is wrong with this file in `folder`; None if nothing is."""
        file = folder / self.path
        if not file.is_file():
            return f"{self.path} is missing"
        size = file.stat().st_size
        if size != self.size:
            return f"{self.path} has {size} bytes instead of {self.size}"
        found = checksum(file)
        return None if found == self.crc32 else f"{self.path} is damaged (CRC-32 {found} instead of {self.crc32})"


def write_json(path: Path, value: Any) -> None:
    """Write `value` and flush it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, allow_nan=True)
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, entries: list[Entry]) -> None:
    """Write the manifest of the checkpoint `folder`."""
    write_json(folder / MANIFEST, {"format": FORMAT, "files": [vars(entry) for entry in sorted(entries, key=lambda entry: entry.path)]})


def read_manifest(folder: Path) -> list[Entry]:
    """The files that the checkpoint `folder` should hold. CheckpointError if it is none or of another format."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        found = manifest["format"]
        if found == FORMAT:
            return [Entry(str(line["path"]), int(line["size"]), str(line["crc32"])) for line in manifest["files"]]
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the {MANIFEST} of {folder} cannot be read: {error}") from None
    raise CheckpointError(f"{folder} has format {found}, and this version reads format {FORMAT}")


def read_values(folder: Path) -> dict[str, Any]:
    """The plain values of the checkpoint `folder`; 'by_rank' is a list, one element a rank."""
    try:
        values = json.loads((folder / VALUES).read_text(encoding="utf-8"))
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
    return [found for entry in entries[share] if (found := entry.problem(folder))]


@dataclass(frozen=True)
class Found:
    """The checkpoint to go on from, if there is one, and newer ones that were passed over, with the reason."""

    folder: Path | None
    passed_over: list[str]


def latest_good(run_folder: Path) -> Found:
    """The newest checkpoint of a run that its manifest finds whole."""
    checkpoints = run_folder / "checkpoints"
    passed_over: list[str] = []
    for step in reversed(steps_in(checkpoints)):
        folder = checkpoints / step_name(step)
        wrong = problems(folder)
        if not wrong:
            return Found(folder, passed_over)
        passed_over.append(f"{folder.name}: {'; '.join(wrong)}")
    return Found(None, passed_over)


def supersede(run_folder: Path, step: int) -> None:
    """Put checkpoints after `step` aside, into `superseded/`: the run goes on from `step` and will write its own."""
    for later in steps_in(run_folder / "checkpoints"):
        if later > step:
            aside = run_folder / "superseded" / step_name(later)
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            (run_folder / "checkpoints" / step_name(later)).rename(aside)
