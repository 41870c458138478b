"""Reading a checkpoint into any layout, whatever layout wrote it.

A rank opens only files that hold something of its own and reads only the overlap of a saved piece with a piece
that it holds. Files are safetensors and JSON: nothing in them can run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disttrain.checkpoint.files import problems, read_manifest, read_values
from disttrain.checkpoint.save import HEADER
from disttrain.checkpoint.state import State
from disttrain.errors import CheckpointError
from disttrain.parallel.collectives import gather_json
from disttrain.parallel.layout import Layout, Slices
from disttrain.parallel.mesh import Mesh

STRICT = frozenset({"model", "optimizer"})
"""Kinds whose names must be the same in the checkpoint and in the run. A callback may come or go at a resume."""
_SHOWN = 6


@dataclass(frozen=True)
class Piece:
    """One block of a tensor in a file."""

    file: Path
    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass
class Saved:
    """One tensor of a checkpoint: its whole shape and where its pieces lie."""

    shape: tuple[int, ...]
    pieces: list[Piece]


def load(state: State, folder: Path, mesh: Mesh, kinds: Collection[str] | None = None) -> list[str]:
    """Fill the local tensors of `state` in place from the checkpoint `folder`, and its `values`. Every rank calls it.

    `kinds` limits what is read ({'model'}: weights only, no values); all by default. Returns what a person
    should know (tensors of callbacks on one side only, states by rank that do not fit this world). Raises
    CheckpointError, on all ranks alike, if the manifest finds damage or names or shapes differ.
    """
    world = mesh.axis("world")
    wrong = gather_json(problems(folder, slice(mesh.rank, None, mesh.size)), world)
    if damage := sorted({text for part in wrong for text in part}):
        raise CheckpointError(f"{folder} is damaged: {'; '.join(damage)}", "resume=<an earlier checkpoint>")
    index = index_of(folder)
    wanted = {name: held for name, held in state.tensors.items() if kinds is None or _kind(name) in kinds}
    offered = {name for name in index if kinds is None or _kind(name) in kinds}
    # A stage of a pipeline knows only its own names: what is unknown is unknown to all ranks together.
    known = {name for part in gather_json(sorted(wanted), world) for name in part}
    notes = _compare(known, offered, folder)
    errors = gather_json(_fill({name: held for name, held in wanted.items() if name in index}, index, mesh), world)
    if first := next((error for error in errors if error), None):
        raise CheckpointError(f"{folder} does not fit this run: {first}")
    if kinds is None:
        state.values, note = _values_for(read_values(folder), mesh)
        notes += note
    return notes


def index_of(folder: Path) -> dict[str, Saved]:
    """Every tensor of the checkpoint `folder` by '<kind>/<name>', from the headers of its files alone."""
    from safetensors import safe_open

    index: dict[str, Saved] = {}
    for entry in read_manifest(folder):
        if not entry.path.endswith(".safetensors"):
            continue
        file = folder / entry.path
        kind = Path(entry.path).parent.as_posix()
        with safe_open(file, "pt") as opened:
            places = json.loads((opened.metadata() or {}).get(HEADER, "{}"))
            for key, place in places.items():
                saved = index.setdefault(f"{kind}/{place['name']}", Saved(tuple(place["shape"]), []))
                offsets = tuple(place["offsets"])
                if all(piece.offsets != offsets for piece in saved.pieces):  # a weight that two stages hold lies in both's files
                    saved.pieces.append(Piece(file, key, tuple(opened.get_slice(key).get_shape()), offsets))
    return index


def _kind(name: str) -> str:
    return name.split("/", 1)[0]


def _compare(known: set[str], offered: set[str], folder: Path) -> list[str]:
    """Names that only one side has: an error for the strict kinds, else told."""
    missing, extra = sorted(known - offered), sorted(offered - known)
    hard = [
        f"{text}: {_listed(found)}"
        for text, names in (("not in the checkpoint", missing), ("not in this run", extra))
        if (found := [name for name in names if _kind(name) in STRICT])
    ]
    if hard:
        raise CheckpointError(f"{folder} is of another model or optimizer; {'; '.join(hard)}")
    soft = {"is not in the checkpoint and starts anew": missing, "is in the checkpoint and not used by this run": extra}
    return [f"{_listed(names)} {text}" for text, names in soft.items() if names]


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _fill(wanted: dict[str, tuple[Tensor, Layout]], index: dict[str, Saved], mesh: Mesh) -> str | None:
    """Copy every overlap into place, file by file; what does not fit, if anything."""
    from safetensors import safe_open

    at = mesh.coordinate()
    reads: dict[Path, list[tuple[str, Slices, Tensor]]] = defaultdict(list)
    wrong = []
    for name, (tensor, layout) in wanted.items():
        saved = index[name]
        if saved.shape != layout.shape:
            wrong.append(f"{name} has shape {list(layout.shape)} here and {list(saved.shape)} in the checkpoint")
            continue
        filled = 0
        for whole, local in layout.pieces(at):
            for piece in saved.pieces:
                if (overlap := _overlap(whole, local, piece)) is not None:
                    part, into = overlap
                    target = tensor.detach()[into]
                    reads[piece.file].append((piece.key, part, target))
                    filled += target.numel()
        if filled != tensor.numel():
            wrong.append(f"{name}: only {filled} of {tensor.numel()} elements are in the checkpoint")
    if wrong:
        return "; ".join(wrong[:_SHOWN])
    with torch.no_grad():
        for file, parts in reads.items():
            with safe_open(file, "pt") as opened:
                for key, part, target in parts:
                    # A scalar has no slices.
                    target.copy_(opened.get_slice(key)[part] if part else opened.get_tensor(key))
    return None


def _overlap(whole: Slices, local: Slices, piece: Piece) -> tuple[Slices, Slices] | None:
    """(slices within `piece`, slices of the local tensor) of what a held block and a saved piece share."""
    part, into = [], []
    for held, mine, offset, size in zip(whole, local, piece.offsets, piece.shape, strict=True):
        low, high = max(held.start, offset), min(held.stop, offset + size)
        if low >= high:
            return None
        part.append(slice(low - offset, high - offset))
        into.append(slice(mine.start + low - held.start, mine.start + high - held.start))
    return tuple(part), tuple(into)


def _values_for(values: dict[str, Any], mesh: Mesh) -> tuple[dict[str, Any], list[str]]:
    """The values with this rank's own 'by_rank', left out where the world has another size."""
    by_rank = values.pop("by_rank", None)
    if by_rank is None:
        return values, []
    if len(by_rank) == mesh.size:
        return values | {"by_rank": by_rank[mesh.rank]}, []
    return values, [f"the checkpoint is of {len(by_rank)} ranks and this run has {mesh.size}: random states of each rank start anew"]
