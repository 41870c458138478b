"""Arrays on disk that are written once and memory-mapped by every rank.

`<name>-<content hash>.bin` holds the arrays one after the other; `<name>-<key>.json` says where, with facts about
them. The key stands for how they were made, so that a second run finds them without reading the sources again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain.errors import DataError

_ALIGNMENT = 64


@dataclass(frozen=True)
class Prepared:
    """What `store` wrote and `find` found."""

    file: Path
    arrays: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, Any]
    fingerprint: str
    """Hash of the arrays' content: the same on every host that holds the same data."""

    def array(self, name: str) -> NDArray[Any]:
        """Array `name`, read-only, its pages shared by all processes that map it."""
        where = self.arrays[name]
        shape = tuple(where["shape"])
        if 0 in shape:
            return np.empty(shape, where["dtype"])
        return np.memmap(self.file, where["dtype"], "r", where["offset"], shape)


def digest(*parts: object) -> str:
    """16 hexadecimal digits that stand for `parts`, by their repr."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def find(folder: Path, name: str, key: str) -> Prepared | None:
    """What was stored under (name, key), or None."""
    try:
        index = json.loads((folder / f"{name}-{key}.json").read_text())
        file = folder / index["file"]
        complete = file.stat().st_size == index["num_bytes"]
    except (OSError, ValueError, KeyError):
        return None
    return Prepared(file, index["arrays"], index["facts"], index["fingerprint"]) if complete else None


def store(folder: Path, name: str, key: str, arrays: Mapping[str, Iterable[NDArray[Any]]], facts: Mapping[str, Any]) -> Prepared:
    """Write `arrays`, each given in chunks that follow one another along the first dimension, and index them.

    Both files are renamed into place when complete, so a run beside this one sees all or nothing.
    """
    written: dict[str, dict[str, Any]] = {}
    content = hashlib.blake2b(digest_size=8)
    part = folder / f"{name}-{key}.{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            for array, chunks in arrays.items():
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                offset, rows, like = file.tell(), 0, np.empty(0, np.uint8)
                for like in chunks:
                    chunk = np.ascontiguousarray(like).data.cast("B") if like.size else b""
                    file.write(chunk)
                    content.update(chunk)
                    rows += len(like)
                written[array] = {"dtype": like.dtype.name, "shape": [rows, *like.shape[1:]], "offset": offset}
                content.update(repr(written[array]).encode())
            num_bytes = file.tell()
        fingerprint = content.hexdigest()
        bin_name = f"{name}-{fingerprint}.bin"
        part.replace(folder / bin_name)
        index = {"file": bin_name, "num_bytes": num_bytes, "arrays": written, "facts": dict(facts), "fingerprint": fingerprint}
        part.write_text(json.dumps(index, indent=1))
        part.replace(folder / f"{name}-{key}.json")
    except OSError as error:
        raise DataError(f"prepared data can't be written under {folder}: {error}", "paths.data=FOLDER") from error
    finally:
        part.unlink(missing_ok=True)
    return Prepared(folder / bin_name, written, facts, fingerprint)
