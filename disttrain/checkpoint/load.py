"""Reading a checkpoint into any layout, whatever layout wrote it.

A rank opens only files that hold something of its own and reads only the overlap of a saved piece with a piece
that it holds. Files are tensors and JSON: nothing in them can run.
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

from disttrain.checkpoint.files import found_in, problems, read_manifest, read_values
from disttrain.checkpoint.memory import HEADER
from disttrain.checkpoint.state import State
from disttrain.checkpoint.tensors import TensorFile, overlap
from disttrain.errors import CheckpointError
from disttrain.parallel.collectives import gather_json
from disttrain.parallel.layout import Layout, Slices
from disttrain.parallel.mesh import Axis, Mesh
from disttrain.places import place_of
from disttrain.record import RunFolder

STRICT = frozenset({"model", "optimizer"})
"""Kinds whose names must be the same in the checkpoint and in the run. A callback may come or go at a resume."""
ALONE = Axis("world", 1, 0, (0,))
"""The world of a program that reads a checkpoint by itself."""
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
    dtype: torch.dtype
    pieces: list[Piece]


@dataclass(frozen=True)
class Found:
    """The checkpoint to go on from, if there is one, and newer ones that were passed over, with the reason."""

    folder: Path | None
    passed_over: list[str]


def latest_good(run_folder: Path, world: Axis = ALONE) -> Found:
    """The newest checkpoint of a run that its manifest finds whole. Every rank of `world` calls it; each reads its share."""
    folders = [str(folder) for folder in reversed(found_in(RunFolder(run_folder).checkpoints).values())]
    passed_over: list[str] = []
    for name in gather_json(folders, world)[0]:  # as rank 0 sees them
        folder = place_of(name)
        wrong = damage(folder, world)
        if not wrong:
            return Found(folder, passed_over)
        passed_over.append(f"{folder.name} is passed over: {'; '.join(wrong)}")
    return Found(None, passed_over)


def damage(folder: Path, world: Axis = ALONE) -> list[str]:
    """What is wrong with the checkpoint `folder`, the same on every rank of `world`; each reads its share of the files."""
    parts = gather_json(problems(folder, slice(world.index, None, world.size)), world)
    return sorted({text for part in parts for text in part})


def load(state: State, folder: Path, mesh: Mesh, kinds: Collection[str] | None = None, checked: bool = False) -> list[str]:
    """Fill the local tensors of `state` in place from the checkpoint `folder`, and its `values`. Every rank calls it.

    `kinds` limits what is read ({'model'}: weights only, no values); all by default. `checked`: `latest_good` has read
    every file already. Returns what a person should know (tensors of callbacks on one side only, states by rank that do
    not fit this world). Raises CheckpointError, on all ranks alike, if a file is damaged or names or shapes differ.
    """
    world = mesh.axis("world")
    if wrong := [] if checked else damage(folder, world):
        raise CheckpointError(f"{folder} is damaged: {'; '.join(wrong)}", "resume=<the run's folder> takes its newest good checkpoint")
    index = index_of(folder)
    wanted = {name: held for name, held in state.tensors.items() if kinds is None or _kind(name) in kinds}
    offered = {name for name in index if kinds is None or _kind(name) in kinds}
    # A stage of a pipeline knows only its own names: what is unknown is unknown to all ranks together.
    known = {name for part in gather_json(sorted(wanted), world) for name in part}
    notes = _compare(known, offered, folder)
    wanted = {name: held for name, held in wanted.items() if name in index}
    notes += _rounded(wanted, index)
    errors = gather_json(_fill(wanted, index, mesh), world)
    if first := next((error for error in errors if error), None):
        raise CheckpointError(f"{folder} does not fit this run: {first}")
    if kinds is None:
        state.values, note = _values_for(read_values(folder), mesh)
        notes += note
    return notes


def index_of(folder: Path) -> dict[str, Saved]:
    """Every tensor of the checkpoint `folder` by '<kind>/<name>', from its files' headers alone. CheckpointError if one is unsound."""
    index: dict[str, Saved] = {}
    for entry in read_manifest(folder):
        if entry.path.endswith(".safetensors"):
            _add(index, Path(entry.path).parent.as_posix(), folder / entry.path)
    return index


def _add(index: dict[str, Saved], kind: str, path: Path) -> None:
    """Put the pieces of one file into `index`."""
    with path.open("rb") as opened:
        file = TensorFile(opened, path.stat().st_size, str(path))
    try:
        for key, place in json.loads(file.metadata.get(HEADER, "{}")).items():
            shape, offsets, span = tuple(place["shape"]), tuple(place["offsets"]), file.entries[key]
            saved = index.setdefault(f"{kind}/{place['name']}", Saved(shape, span.dtype, []))
            inside = all(low >= 0 and low + size <= whole for low, size, whole in zip(offsets, span.shape, shape, strict=True))
            if (shape, span.dtype) != (saved.shape, saved.dtype) or not inside:
                raise ValueError(f"{key} is no part of a {saved.dtype} of shape {list(saved.shape)}")
            if all(piece.offsets != offsets for piece in saved.pieces):  # a weight that two stages hold may lie in both's files
                saved.pieces.append(Piece(path, key, span.shape, offsets))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no sound file of tensors: {error}") from None


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
                if (shared := overlap(whole, local, piece.offsets, piece.shape)) is not None:
                    part, into = shared
                    target = tensor.detach()[into]
                    reads[piece.file].append((piece.key, part, target))
                    filled += target.numel()
        if filled != tensor.numel():
            wrong.append(f"{name}: only {filled} of {tensor.numel()} elements are in the checkpoint")
    if wrong:
        return "; ".join(wrong[:_SHOWN])
    try:
        with torch.no_grad():
            for path, parts in reads.items():
                _read(path, parts)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _read(path: Path, parts: list[tuple[str, Slices, Tensor]]) -> None:
    """Fill targets from one file."""
    with path.open("rb") as opened:
        file = TensorFile(opened, path.stat().st_size, str(path))
        for key, part, target in parts:
            file.read(key, part, target)


def _rounded(wanted: dict[str, tuple[Tensor, Layout]], index: dict[str, Saved]) -> list[str]:
    """What another type of numbers means."""
    types = {(index[name].dtype, tensor.dtype) for name, (tensor, _) in wanted.items()}
    changed = {(saved, here) for saved, here in types if saved != here}
    return [
        f"the checkpoint holds {saved} where this run has {here}: its numbers are converted" for saved, here in sorted(changed, key=str)
    ]


def _values_for(values: dict[str, Any], mesh: Mesh) -> tuple[dict[str, Any], list[str]]:
    """The values with this rank's own 'by_rank', left out where the world has another size."""
    by_rank = values.pop("by_rank", None)
    if by_rank is None:
        return values, []
    if len(by_rank) == mesh.size:
        return values | {"by_rank": by_rank[mesh.rank]}, []
    return values, [f"the checkpoint is of {len(by_rank)} ranks and this run has {mesh.size}: random states of each rank start anew"]
