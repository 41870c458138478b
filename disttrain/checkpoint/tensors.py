"""One file of tensors: the safetensors format, written from memory that exists already and read in parts.

    8 bytes      length n of the header, little-endian
    n bytes      JSON {key: {"dtype", "shape", "data_offsets": [from, to]}, "__metadata__": {text: text}}
    the rest     the tensors' bytes, without gaps, in the header's order

(https://github.com/huggingface/safetensors, format 0.x.) The package itself writes a file in one go and reads local
files only; a checkpoint is written in blocks, slowly on purpose, and may lie in an object store. Every number of a
header is checked against the file's size before anything is allocated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from disttrain.errors import CheckpointError
from disttrain.parallel.layout import Slices

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000
"""Bytes, as in the reference implementation: a million tensors' worth."""
READ_AT_ONCE = 1 << 24
"""Bytes, or one row of a tensor if that is more."""
_ALIGNED = 8


@dataclass(frozen=True)
class Span:
    """One tensor of a file: where its bytes lie, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def header_of(entries: Mapping[str, Span], metadata: Mapping[str, str]) -> bytes:
    """What stands before the bytes of `entries`, which lie behind each other in this order."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    for key, entry in entries.items():
        table[key] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [entry.start, entry.stop]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


class TensorFile:
    """A file of tensors, open for reading in parts."""

    def __init__(self, file: BinaryIO, size: int, name: str) -> None:
        """Read the header of `file`, which has `size` bytes; `name` is for messages. CheckpointError for anything but a sound one."""
        self._file, self._name = file, name
        try:
            self.entries, self.metadata, self._begin = _read_header(file, size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{name} is no sound file of tensors: {error}") from None

    def read(self, key: str, part: Slices, target: Tensor) -> None:
        """Copy the slices `part` of the tensor `key` into `target`, of that shape, at most `READ_AT_ONCE` bytes at a time."""
        entry = self.entries[key]
        if not entry.shape:
            target.copy_(self._rows(entry, 0, 1).reshape(()))
            return
        rows, rest = part[0], part[1:]
        row_bytes = max(1, (entry.stop - entry.start) // max(1, entry.shape[0]))
        together = max(1, READ_AT_ONCE // row_bytes)
        for first in range(rows.start, rows.stop, together):
            last = min(first + together, rows.stop)
            block = self._rows(entry, first, last).reshape(last - first, *entry.shape[1:])
            target[first - rows.start : last - rows.start].copy_(block[(slice(None), *rest)])

    def _rows(self, entry: Span, first: int, last: int) -> Tensor:
        """Rows [first, last) of the first dimension, flat."""
        count = entry.shape[0] if entry.shape else 1
        row_bytes = (entry.stop - entry.start) // max(1, count)
        buffer = torch.empty((last - first) * row_bytes, dtype=torch.uint8)
        self._file.seek(self._begin + entry.start + first * row_bytes)
        view = buffer.numpy().data
        filled = 0
        while filled < len(view):
            read = self._file.readinto(view[filled:])  # type: ignore[attr-defined]
            if not read:
                raise CheckpointError(f"{self._name} ends before its last tensor")
            filled += read
        return buffer.view(entry.dtype)


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, Span], dict[str, str], int]:
    """(entries, metadata, where the bytes begin); ValueError and its like for what does not add up."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, LARGEST_HEADER):
        raise ValueError(f"it says that its header has {length:,} bytes; the file has {size:,}, and {LARGEST_HEADER:,} is the limit")
    table = json.loads(file.read(length))
    metadata = {str(key): str(value) for key, value in table.pop("__metadata__", {}).items()}
    entries = {}
    for key, line in table.items():
        shape = tuple(_natural(extent) for extent in line["shape"])
        entries[key] = Span(DTYPES[line["dtype"]], shape, *(_natural(offset) for offset in line["data_offsets"]))
    _check(entries, size - 8 - length)
    return entries, metadata, 8 + length


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size or offset")
    return value


def _check(entries: Mapping[str, Span], num_bytes: int) -> None:
    """The tensors lie behind each other and fill the file."""
    at = 0
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        wanted = math.prod(entry.shape) * entry.dtype.itemsize
        if entry.start != at or entry.stop - entry.start != wanted:
            raise ValueError(f"{key} should have {wanted:,} bytes from {at:,} on and has [{entry.start:,}, {entry.stop:,})")
        at = entry.stop
    if at != num_bytes:
        raise ValueError(f"its tensors have {at:,} bytes and the file holds {num_bytes:,}")


def overlap(whole: Slices, local: Slices, offsets: Sequence[int], shape: Sequence[int]) -> tuple[Slices, Slices] | None:
    """(slices within a saved piece of `shape` at `offsets`, slices of the local tensor) of what it shares with a held block."""
    part, into = [], []
    for held, mine, offset, size in zip(whole, local, offsets, shape, strict=True):
        low, high = max(held.start, offset), min(held.stop, offset + size)
        if low >= high:
            return None
        part.append(slice(low - offset, high - offset))
        into.append(slice(mine.start + low - held.start, mine.start + high - held.start))
    return tuple(part), tuple(into)
