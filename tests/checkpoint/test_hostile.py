"""A checkpoint that somebody else made: nothing in it runs, leads elsewhere or takes more memory than it has bytes."""

from __future__ import annotations

import json
import os
import resource
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain.checkpoint.files import MANIFEST, checksum, problems
from disttrain.checkpoint.load import index_of, latest_good, load
from disttrain.checkpoint.save import save
from disttrain.checkpoint.state import State
from disttrain.errors import CheckpointError
from disttrain.launch.world import run_world
from disttrain.parallel.layout import Layout
from disttrain.parallel.mesh import Mesh

GB = 10**9
TENSORS = "model/rank-0.safetensors"


def state() -> State:
    return State({"model/w": (torch.zeros(4), Layout((4,)))}, {"value": 1})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints" / "step-1"
    save(state(), folder, Mesh())
    return folder


def seal(folder: Path, **changes: Any) -> None:
    """What an attacker can do as well as we: a manifest whose checksums are right."""
    files = [
        {"path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "crc32": checksum(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    ]
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "files": files} | changes))


def write(path: Path, header: Any, body: bytes = b"", length: int | None = None) -> None:
    text = json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)


def in_little_memory(body: Callable[[], Any], limit: int = 256 << 20) -> Any:
    """`body` on a rank of its own that may not take much more memory than it has."""

    def entry(place: object) -> Any:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + limit, resource.RLIM_INFINITY))
        return body()

    return run_world(entry, 1)[0]


PLACE = {"disttrain": json.dumps({"w": {"name": "w", "shape": [4], "offsets": [0]}})}
BAD_HEADERS: dict[str, tuple[Any, bytes, int | None]] = {
    "a header of 100 GB": ({}, b"", 100 * GB),
    "a header longer than the file": ({}, b"", 1000),
    "no mapping": ([1, 2], b"", None),
    "an unknown type": ({"w": {"dtype": "PICKLE", "shape": [4], "data_offsets": [0, 16]}}, bytes(16), None),
    "a shape of 100 GB": ({"w": {"dtype": "F32", "shape": [25 * GB], "data_offsets": [0, 16]}}, bytes(16), None),
    "offsets of 100 GB": ({"w": {"dtype": "F32", "shape": [25 * GB], "data_offsets": [0, 100 * GB]}}, bytes(16), None),
    "negative sizes": ({"w": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}, bytes(16), None),
    "a size that is text": ({"w": {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]}}, bytes(16), None),
    "a gap": ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, bytes(24), None),
    "bytes that belong to nobody": ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(17), None),
    "nested too deeply": ({"w": json.loads("[" * 900 + "]" * 900)}, b"", None),
    "another piece's place": (
        {"__metadata__": {"disttrain": json.dumps({"x": {"name": "w", "shape": [4], "offsets": [0]}})}},
        b"",
        None,
    ),
    "a place outside the tensor": (
        {
            "__metadata__": {"disttrain": json.dumps({"w": {"name": "w", "shape": [4], "offsets": [2]}})},
            "w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        },
        bytes(16),
        None,
    ),
}


@pytest.mark.parametrize("what", BAD_HEADERS)
def test_a_header_that_does_not_add_up_is_refused(checkpoint: Path, what: str) -> None:
    header, body, length = BAD_HEADERS[what]
    write(checkpoint / TENSORS, header, body, length)
    seal(checkpoint)
    assert problems(checkpoint) == [], "the manifest is of no help here"

    def refused() -> str:
        with pytest.raises(CheckpointError, match="no sound file of tensors") as caught:
            load(state(), checkpoint, Mesh())
        return caught.value.message

    assert TENSORS in in_little_memory(refused)


def test_a_sparse_file_of_100_gb_is_not_read_into_memory(checkpoint: Path) -> None:
    """Its header says 90 GB and the file is that long, at least by its name."""
    with (checkpoint / TENSORS).open("wb") as file:
        file.write((90 * GB).to_bytes(8, "little"))
        file.truncate(100 * GB)

    def refused() -> bool:
        with pytest.raises(CheckpointError, match="90,000,000,000 bytes; the file has 100,000,000,000"):
            index_of(checkpoint)
        return True

    assert in_little_memory(refused)


@pytest.mark.parametrize("name", [MANIFEST, "state.json"])
def test_json_of_an_implausible_size_is_not_read(checkpoint: Path, name: str) -> None:
    os.truncate(checkpoint / name, 100 * GB)

    def refused() -> bool:
        with pytest.raises(CheckpointError):
            load(state(), checkpoint, Mesh(), checked=True)
        return latest_good(checkpoint.parents[1]).folder is None if name == MANIFEST else True

    assert in_little_memory(refused)


def test_a_deeply_nested_manifest_is_refused(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text("[" * 200_000)
    assert "nested too deeply" in problems(checkpoint)[0]


@pytest.mark.parametrize("path", ["../../outside.safetensors", "/etc/hostname", "model/../../../outside", "..\\outside", ""])
def test_a_path_that_climbs_out_is_refused(checkpoint: Path, path: str) -> None:
    (checkpoint.parents[1] / "outside.safetensors").write_bytes(b"x")
    seal(checkpoint, files=[{"path": path, "size": 1, "crc32": f"{zlib.crc32(b'x'):08x}"}])
    (found,) = problems(checkpoint)
    assert "outside the checkpoint" in found
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        load(state(), checkpoint, Mesh(), checked=True)


def test_a_link_that_leads_out_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    (checkpoint / TENSORS).rename(outside)
    (checkpoint / TENSORS).symlink_to(outside)
    assert problems(checkpoint) == [f"{TENSORS} lies outside the checkpoint"]


class Payload:
    """Runs when unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("name", [TENSORS, "state.json", MANIFEST, "model/rank-1.safetensors", "extra.pt"])
def test_a_pickle_in_any_files_place_is_refused_or_ignored_and_never_run(
    checkpoint: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E08: whatever bears the name, nothing here unpickles."""
    monkeypatch.chdir(tmp_path)
    torch.save(Payload(), checkpoint / name)
    if name != MANIFEST:
        seal(checkpoint)
    if name == "extra.pt":
        load(state(), checkpoint, Mesh())
    else:
        with pytest.raises(CheckpointError):
            load(state(), checkpoint, Mesh())
    assert not (tmp_path / "pwned").exists()


def test_torchs_own_safe_reader_finds_nothing_to_run_in_ours(checkpoint: Path) -> None:
    """E08, the other way: no file of ours is a pickle, so there is none that torch.load would have to be trusted with."""
    from safetensors.torch import load_file

    assert torch.equal(load_file(checkpoint / TENSORS)["w"], torch.zeros(4))
    for path in checkpoint.rglob("*"):
        if path.is_file():
            assert path.suffix in {".json", ".safetensors"}
            assert not path.read_bytes().startswith((b"\x80", b"PK"))
