"""Which ranks of a tensor group draw the same dropout masks: what the plan promises, against what happened.

Without sequence parallelism the residual stream is the same on all ranks of a tensor group, so its masks must
be; what works on a rank's own heads, or on its own tokens under sequence parallelism, must draw its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from disttrain.parallel import collectives
from disttrain.parallel.plan import draws
from disttrain.parallel.strategy import Strategy
from disttrain.parallel.tensor import OwnRandom
from disttrain.verify.compare import Error

Drawn = dict[str, list[int]]
"""State of the random generator, as a checksum, at each call of each module that draws."""


@contextmanager
def recorded(strategy: Strategy) -> Iterator[Drawn]:
    """Note from where every module that draws does so, while the block runs."""
    drawn: Drawn = {}
    handles = []
    for name, module in strategy.model.named_modules():
        if isinstance(module, OwnRandom) or not draws(module) or any(draws(child) for child in module.children()):
            continue

        def note(module: nn.Module, inputs: Any, key: str = name) -> None:
            drawn.setdefault(key.removesuffix(".module"), []).append(zlib.crc32(strategy.streams.state().numpy().tobytes()))

        handles.append(module.register_forward_pre_hook(note))
    try:
        yield drawn
    finally:
        for handle in handles:
            handle.remove()


def violations(drawn: Drawn, strategy: Strategy) -> list[Error]:
    """Modules whose masks are shared over the tensor group though they are to differ, or the other way round."""
    axis = strategy.mesh.axis("tp")
    every = collectives.gather_json(drawn, axis)
    own = strategy.own_random_modules()
    errors = []
    for name, states in drawn.items():
        others = [part.get(name) for index, part in enumerate(every) if index != axis.index]
        wrong = any(other == states for other in others) if name in own else any(other != states for other in others)
        if wrong:
            errors.append(Error("mask", name, 0, strategy.mesh.rank, torch.inf))
    return errors
