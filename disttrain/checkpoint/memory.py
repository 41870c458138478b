"""Host memory that a save copies into: laid out as the files will be, and used again by the next save.

A save's cost to the loop is this copy. The plan (which block goes where) is made once and kept as long as names, shapes
and types stay; memory is page-locked on CUDA, where the copies are queued behind the step and nobody waits for them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from disttrain.checkpoint.share import parts_to_write
from disttrain.checkpoint.state import State
from disttrain.checkpoint.tensors import Span, header_of
from disttrain.errors import CheckpointError
from disttrain.parallel.layout import Layout, Slices
from disttrain.parallel.mesh import Mesh

HEADER = "disttrain"
"""Key of a file's metadata that holds {key in the file: {name, shape, offsets}} as JSON."""
_ALIGNED = 64
Shape = list[tuple[str, torch.dtype, tuple[int, ...], Layout]]


@dataclass(frozen=True)
class Block:
    """One block of one tensor: `local` slices of it go to the bytes [start, stop) of the memory."""

    name: str
    local: Slices
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class FilePlan:
    """One file: its path in the checkpoint, what stands before its tensors, and which bytes of the memory they are."""

    path: str
    header: bytes
    start: int
    stop: int


class Plan:
    """What this rank writes of a state, and where it lies in memory."""

    def __init__(self, state: State, mesh: Mesh) -> None:
        self._shape = _shape(state)
        self.blocks: list[Block] = []
        self.files: list[FilePlan] = []
        by_kind: dict[str, dict[str, tuple[Block, dict[str, Any]]]] = defaultdict(dict)
        at = mesh.coordinate()
        for full_name, (tensor, layout) in state.tensors.items():
            kind, name = full_name.split("/", 1)
            for whole, local in parts_to_write(full_name, layout, tensor.nbytes, at, mesh.degrees):
                shape = tuple(cut.stop - cut.start for cut in whole)
                key = name if shape == layout.shape else f"{name}[{','.join(f'{cut.start}:{cut.stop}' for cut in whole)}]"
                place = {"name": name, "shape": list(layout.shape), "offsets": [cut.start for cut in whole]}
                by_kind[kind][key] = Block(full_name, local, tensor.dtype, shape, 0, 0), place
        self.num_bytes = 0
        for kind, blocks in by_kind.items():
            self._add_file(f"{kind}/rank-{mesh.rank}.safetensors", blocks)

    def fits(self, state: State) -> bool:
        """Whether `state` has the names, types and shapes that this plan was made for."""
        return self._shape == _shape(state)

    def _add_file(self, path: str, blocks: Mapping[str, tuple[Block, dict[str, Any]]]) -> None:
        """Lay the blocks of one file behind each other, widest types first, so that each is aligned to its own."""
        begin = at = -(-self.num_bytes // _ALIGNED) * _ALIGNED
        entries: dict[str, Span] = {}
        for key in sorted(blocks, key=lambda key: (-blocks[key][0].dtype.itemsize, key)):
            block = blocks[key][0]
            stop = at + torch.Size(block.shape).numel() * block.dtype.itemsize
            entries[key] = Span(block.dtype, block.shape, at - begin, stop - begin)
            self.blocks.append(Block(block.name, block.local, block.dtype, block.shape, at, stop))
            at = stop
        places = {key: place for key, (_, place) in blocks.items()}
        self.files.append(FilePlan(path, header_of(entries, {"format": "pt", HEADER: json.dumps(places)}), begin, at))
        self.num_bytes = at


class HostCopy:
    """One copy of this rank's part in host memory."""

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._copied: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self._memory.numel()

    @torch.no_grad()
    def take(self, state: State, plan: Plan) -> None:
        """Copy the blocks of `plan` out of `state`: on a CPU at once; on CUDA behind what is queued, before what comes."""
        for block in plan.blocks:
            piece = state.tensors[block.name][0].detach()[block.local]
            self._memory[block.start : block.stop].view(block.dtype).view(block.shape).copy_(piece, non_blocking=True)
        if self._memory.is_pinned():
            self._copied = torch.cuda.Event()
            self._copied.record()

    def bytes_of(self, file: FilePlan) -> memoryview:
        """The tensors of one file; waits for the copy to have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._memory.numpy().data[file.start : file.stop]


def _shape(state: State) -> Shape:
    for name, (tensor, _) in state.tensors.items():
        if tensor.is_complex():
            raise CheckpointError(f"{name} is complex, which no file of tensors holds; keep its real and imaginary parts")
    return [(name, tensor.dtype, tuple(tensor.shape), layout) for name, (tensor, layout) in state.tensors.items()]
