"""Which ranks draw the same dropout masks: what the plan promises, against what happened.

Without sequence parallelism the residual stream is the same on all ranks of a tensor group, so its masks must
be; what works on a rank's own heads, or on its own tokens under sequence parallelism, must draw its own. Ranks of
the view `grad` hold other samples, or, under context parallelism, other tokens: all of them draw their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from disttrain.parallel import collectives
from disttrain.parallel.mesh import Axis
from disttrain.parallel.plan import draws, rates
from disttrain.parallel.strategy import Strategy
from disttrain.parallel.tensor import OwnRandom, inner_name
from disttrain.verify.compare import Error

Drawn = dict[str, list[int]]
"""State of the random generator, as a checksum, at each call of each module that draws."""


def silenced(model: nn.Module) -> dict[str, float]:
    """Set every rate of dropout to zero: masks are drawn per rank, so equality is proved without them. Returns the rates."""
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        for attribute, rate in rates(module).items():
            found[f"{name}.{attribute}".lstrip(".")] = rate
            setattr(module, attribute, 0.0)
    return found


@contextmanager
def recorded(strategy: Strategy) -> Iterator[Drawn]:
    """Note from where every module that draws does so, while the block runs."""
    drawn: Drawn = {}
    handles = []
    for name, module in strategy.model.named_modules():
        if isinstance(module, OwnRandom) or not draws(module) or any(draws(child) for child in module.children()):
            continue

        def note(module: nn.Module, inputs: Any, key: str = name) -> None:
            drawn.setdefault(inner_name(key), []).append(zlib.crc32(strategy.streams.state().numpy().tobytes()))

        handles.append(module.register_forward_pre_hook(note))
    try:
        yield drawn
    finally:
        for handle in handles:
            handle.remove()


def violations(drawn: Drawn, strategy: Strategy) -> list[Error]:
    """Modules whose masks are shared though they are to differ, or, in a tensor group, the other way round."""
    own = {inner_name(name) for name, module in strategy.model.named_modules() if isinstance(module, OwnRandom)}
    in_tensor_group, elsewhere = _of_others(drawn, strategy.mesh.axis("tp")), _of_others(drawn, strategy.mesh.axis("grad"))
    errors = []
    for name, states in drawn.items():
        must_differ = [part.get(name) for part in (elsewhere + in_tensor_group if name in own else elsewhere)]
        must_agree = [] if name in own else [part.get(name) for part in in_tensor_group]
        if any(other == states for other in must_differ) or any(other != states for other in must_agree):
            errors.append(Error("mask", name, 0, strategy.mesh.rank, torch.inf))
    return errors


def _of_others(drawn: Drawn, axis: Axis) -> list[Drawn]:
    """What the axis's other ranks noted."""
    return [part for index, part in enumerate(collectives.gather_json(drawn, axis)) if index != axis.index]
