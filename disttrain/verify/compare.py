"""Errors of one layout against one device, and what they say about the cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

FLOOR = 1e-4
"""Of the global norm: a gradient that is zero in truth (a bias before BatchNorm, a key bias under softmax) is rounding noise,
about 1e-16 of that norm, and must not be called wrong at 1e-10; an error of 1e-14 of it still is."""

Quantity = str
"""'start', 'batch', 'gradient', 'norm', 'loss', 'update', 'replica', 'buffer' or 'mask'."""


@dataclass(frozen=True)
class Error:
    """The largest relative error of one thing on one rank at one step."""

    quantity: Quantity
    name: str
    """Parameter, or what else was compared."""
    step: int
    rank: int
    error: float
    """Infinite where a value is missing or not finite."""
    ratio: float | None = None
    """What the reference must be multiplied by to come closest, where such a factor fits."""

    def as_json(self) -> dict[str, Any]:
        """For the exchange between ranks; infinity and NaN as text."""
        return asdict(self) | {"error": repr(self.error), "ratio": None if self.ratio is None else repr(self.ratio)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Error:
        """The error that `as_json` wrote."""
        return cls(**value | {"error": float(value["error"]), "ratio": None if value["ratio"] is None else float(value["ratio"])})


def relative_error(found: Tensor, wanted: Tensor, largest: float, norm: float) -> float:
    """max|found - wanted| / max(largest, FLOOR x norm); infinite for a value that is not finite on one side only.

    `largest`: max|wanted| over the whole tensor, of which `found` may be a part.
    """
    if not bool(torch.isfinite(found).all()):
        return math.inf
    difference = float((found.double() - wanted.double()).abs().max()) if found.numel() else 0.0
    scale = max(largest, FLOOR * norm)
    return difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)


def ratio(found: Tensor, wanted: Tensor) -> float | None:
    """The factor f with found = f wanted to a millionth, if there is one that is not 1."""
    a, b = found.double().flatten(), wanted.double().flatten()
    square = float(b @ b)
    if square == 0 or not bool(torch.isfinite(a).all()):
        return None
    factor = float(a @ b) / square
    fits = float((a - factor * b).norm()) <= 1e-6 * float(a.norm()) if float(a.norm()) else False
    return factor if fits and abs(factor - 1) > 1e-6 else None


def worst_by_name(errors: Sequence[Error]) -> list[Error]:
    """The worst of each (quantity, name), over steps and ranks, in the order of first appearance."""
    worst: dict[tuple[str, str], Error] = {}
    for error in errors:
        key = (error.quantity, error.name)
        if key not in worst or error.error > worst[key].error:
            worst[key] = error
    return list(worst.values())


def worst_by_step(errors: Sequence[Error]) -> list[Error]:
    """The worst of each (step, quantity, name) over ranks: steps and quantities in time order, names as they first appeared.

    Stages of a pipeline compare other names, so what one found last may come before what another found first.
    """
    kinds = list(dict.fromkeys(error.quantity for error in errors))
    times = sorted({(error.step, kinds.index(error.quantity)) for error in errors})
    return [one for step, kind in times for one in worst_by_name([e for e in errors if e.step == step and e.quantity == kinds[kind]])]


def likely_cause(failed: Sequence[Error], degrees: dict[str, int], num_micro: int) -> str:
    """What such errors usually mean. The first kind of error in time order speaks: later ones follow from it."""
    kinds = {error.quantity for error in failed}
    first = failed[0]
    if "batch" in kinds:
        return "ranks do not see the samples that they should: check who takes which slice, and that a tensor group shares one batch"
    if "start" in kinds:
        return "weights start different from one device's: drawn per rank, or scaled by a shard's width"
    if "mask" in kinds:
        return "dropout masks are shared where they must differ, or differ where they must be shared"
    gradients = [error for error in failed if error.quantity == "gradient"]
    if gradients:
        return _gradient_cause(gradients, "loss" in kinds, degrees, num_micro)
    if "replica" in kinds:
        return f"ranks that hold the same '{first.name}' got different gradients: a sum over an axis is missing or was taken too early"
    if kinds == {"buffer"}:
        return f"gradients are right but the running statistics of '{first.name}' are not: each rank's own, or moved too often"
    if "loss" in kinds:
        return "gradients are right but the reported loss is not: a mean of means, or one rank's own"
    if "norm" in kinds:
        return "gradients are right but their norm is not: replicated parameters counted once per rank, or a shard's own norm"
    return "same gradients, different update: clipping, weight decay groups or the rate differ by rank"


def _gradient_cause(gradients: Sequence[Error], loss_is_off: bool, degrees: dict[str, int], num_micro: int) -> str:
    factors = {round(error.ratio, 6) for error in gradients if error.ratio is not None}
    if len(factors) == 1 and all(error.ratio is not None for error in gradients):
        factor = factors.pop()
        if factor == 0:
            return "these gradients are lost: nothing flows back, as through a collective without a backward"
        known = {"the number of micro-batches": num_micro} | {f"the ranks of axis {axis}": n for axis, n in degrees.items() if n > 1}
        fits = [what for what, number in known.items() if abs(factor - number) < 1e-6 or abs(factor * number - 1) < 1e-6]
        if fits:
            return f"gradients are {factor:g} times what they should be: {' or '.join(fits)} enters once too often or too seldom"
        return f"gradients are off by one factor, {factor:g}: the number they are divided by is wrong"
    if not loss_is_off:
        return "the loss is right but gradients are not: a backward reduction is missing, doubled or on the wrong group"
    return "already the loss is wrong: a forward reduction, a bias, a cut or a rank's data is wrong"
