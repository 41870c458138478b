"""Writing a checkpoint: every rank its own pieces, the name given last.

Two halves, so that the second may one day run beside the training: `snapshot` copies to host memory and is all
that the loop must wait for; `Snapshot.write` and `commit` touch only files and the copy.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from disttrain.checkpoint.files import VALUES, Entry, flush, old_path, partial_path, write_json, write_manifest
from disttrain.checkpoint.state import State
from disttrain.parallel.collectives import gather_json
from disttrain.parallel.layout import Cut, Layout
from disttrain.parallel.mesh import AXES, VIEWS, Mesh

HEADER = "disttrain"
"""Key of a safetensors file's metadata that holds {key in the file: {name, shape, offsets}} as JSON."""


@dataclass
class Snapshot:
    """This rank's part of a checkpoint, in host memory and its own."""

    rank: int
    tensors: dict[str, dict[str, Tensor]]
    """By kind, then by key in the file."""
    places: dict[str, dict[str, dict[str, Any]]]
    """Of each of them: `name` and whole `shape` of the tensor, `offsets` of the piece in it."""
    values: dict[str, Any]

    def write(self, folder: Path) -> list[Entry]:
        """Write this rank's tensors into `folder` and flush them to the disk."""
        from safetensors.torch import save_file

        entries = []
        for kind, tensors in self.tensors.items():
            (folder / kind).mkdir(parents=True, exist_ok=True)
            file = folder / kind / f"rank-{self.rank}.safetensors"
            save_file(tensors, file, {"format": "pt", HEADER: json.dumps(self.places[kind])})
            flush(file)
            entries.append(Entry.of(file, folder))
        return entries


def snapshot(state: State, mesh: Mesh) -> Snapshot:
    """Copy to host memory what this rank has to write: the pieces that it is the first replica of. No communication."""
    at = mesh.coordinate()
    tensors: dict[str, dict[str, Tensor]] = defaultdict(dict)
    places: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for full_name, (tensor, layout) in state.tensors.items():
        if not _is_writer(layout, at):
            continue
        kind, name = full_name.split("/", 1)
        for whole, local in layout.pieces(at):
            piece = tensor.detach()[local]
            key = name if piece.shape == layout.shape else f"{name}[{','.join(f'{cut.start}:{cut.stop}' for cut in whole)}]"
            tensors[kind][key] = piece.to("cpu", copy=True).contiguous()
            places[kind][key] = {"name": name, "shape": list(layout.shape), "offsets": [cut.start for cut in whole]}
    values = json.loads(json.dumps(state.values))
    return Snapshot(mesh.rank, dict(tensors), dict(places), values)


def save(state: State, folder: Path, mesh: Mesh) -> None:
    """Write `state` as the checkpoint `folder`; when this returns, it is complete on every rank.

    Every rank calls it. Values under 'by_rank' are gathered into a list. A rank that cannot write makes all of
    them raise OSError, and what lay under the final name before stays.
    """
    world = mesh.axis("world")
    partial = partial_path(folder)
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    gather_json(None, world)
    part = snapshot(state, mesh)
    error: str | None = None
    entries: list[Entry] = []
    try:
        entries = part.write(partial)
    except OSError as failure:
        error = str(failure)
    sent = {"error": error, "entries": [vars(entry) for entry in entries], "by_rank": part.values.pop("by_rank", None)}
    parts = gather_json(sent, world)
    _raise_first([sent["error"] for sent in parts], folder)
    if mesh.rank == 0:
        try:
            by_rank = [sent["by_rank"] for sent in parts]
            commit(partial, folder, part.values if by_rank[0] is None else part.values | {"by_rank": by_rank}, _entries(parts))
        except OSError as failure:
            error = str(failure)
    _raise_first(gather_json(error, world), folder)


def commit(partial: Path, folder: Path, values: dict[str, Any], entries: list[Entry]) -> None:
    """Make the written folder `partial` the checkpoint `folder`: values, manifest, flush, rename. Rank 0 alone."""
    for entry in entries:
        file = partial / entry.path
        if not file.is_file() or file.stat().st_size != entry.size:
            raise OSError(f"rank 0 does not see {entry.path} whole: do all machines share the run folder?")
    write_json(partial / VALUES, values)
    write_manifest(partial, [*entries, Entry.of(partial / VALUES, partial)])
    for kind in {Path(entry.path).parent for entry in entries}:
        flush(partial / kind)
    flush(partial)
    old = old_path(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _is_writer(layout: Layout, at: Mapping[str, int]) -> bool:
    """First replica on every axis that does not cut the tensor. Stages (`pp`) hold different tensors under different names."""
    cut = {part for axis, placement in layout.placements.items() if isinstance(placement, Cut) for part in VIEWS.get(axis, (axis,))}
    return all(at[axis] == 0 for axis in AXES if axis not in cut and axis != "pp")


def _entries(parts: list[dict[str, Any]]) -> list[Entry]:
    return [Entry(**line) for part in parts for line in part["entries"]]


def _raise_first(errors: list[str | None], folder: Path) -> None:
    for rank, error in enumerate(errors):
        if error is not None:
            raise OSError(f"{folder.name} was not saved: rank {rank}: {error}")
