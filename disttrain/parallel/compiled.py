"""torch.compile, one block at a time.

A model of equal blocks is compiled once for all of them, and names stay plain: a block's `forward` is swapped and
nothing is wrapped. What talks to other ranks is left as it is written: the compiler would freeze what it counts, and
can't see into it; a tensor-parallel block is compiled between its collectives.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def compile_blocks(blocks: Iterable[nn.Module], backend: str) -> None:
    """Compile each block with torch's `backend`; parallel layers inside, and what a layout has put into layers, run as they are."""
    for block in blocks:
        for part in block.modules():
            put_in = [name for name, value in vars(part).items() if callable(value) and _is_ours(value)]
            for name in {*put_in, *(["forward"] if _is_ours(part) else [])}:
                setattr(part, name, torch.compiler.disable(getattr(part, name).__call__))
        block.forward = torch.compile(block.forward, backend=backend)


def _is_ours(value: object) -> bool:
    """Whether this package has made it, and not the model."""
    return type(value).__module__.startswith("disttrain.parallel")
