"""What an optimizer is given: parameter groups, and the rate as a table over updates."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from disttrain.errors import ConfigError
from disttrain.parallel.tensor import SequencePart
from disttrain.parallel.vocabulary import VocabEmbedding

EMBEDDINGS = (nn.Embedding, VocabEmbedding, SequencePart)
"""Modules whose weights get no weight decay."""


class Schedule(Protocol):
    """Factor on the base rate, by number of updates already made."""

    def __call__(self, update: int) -> float:
        """Factor for the update after `update` others."""


class _WithWarmup:
    """Linear warm-up over `warmup_steps`, by default a twentieth of the run (the first update already moves), then `after`."""

    def __init__(self, num_steps: int, warmup_steps: int | None = None) -> None:
        if warmup_steps is None:
            warmup_steps = num_steps // 20
        if not 0 <= warmup_steps <= num_steps:
            raise ConfigError(
                f"scheduler.warmup_steps={warmup_steps} does not lie within the run's {num_steps} steps",
                f"scheduler.warmup_steps={max(0, num_steps // 10)}",
            )
        self.num_steps = num_steps
        self.warmup_steps = warmup_steps

    def __call__(self, update: int) -> float:
        if update < self.warmup_steps:
            return (update + 1) / self.warmup_steps
        return self.after(update - self.warmup_steps, max(1, self.num_steps - self.warmup_steps))

    def after(self, update: int, length: int) -> float:
        """Factor `update` updates after warm-up, of `length`."""
        raise NotImplementedError


class Constant(_WithWarmup):
    """The base rate."""

    def after(self, update: int, length: int) -> float:
        """One."""
        return 1.0


class Cosine(_WithWarmup):
    """Half a cosine from one down to `min_factor` (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5)."""

    def __init__(self, num_steps: int, warmup_steps: int | None = None, min_factor: float = 0.1) -> None:
        super().__init__(num_steps, warmup_steps)
        self.min_factor = min_factor

    def after(self, update: int, length: int) -> float:
        """The cosine, flat at `min_factor` behind its end."""
        done = min(1.0, update / length)
        return self.min_factor + (1 - self.min_factor) * 0.5 * (1 + math.cos(math.pi * done))


class WarmupStableDecay(_WithWarmup):
    """Flat, then linear down to `min_factor` over the last `decay_steps` (Hu et al. 2024, arXiv:2404.06395, section 4)."""

    def __init__(self, num_steps: int, warmup_steps: int | None = None, decay_steps: int | None = None, min_factor: float = 0.0) -> None:
        super().__init__(num_steps, warmup_steps)
        self.decay_steps = max(1, num_steps // 5) if decay_steps is None else decay_steps
        self.min_factor = min_factor
        if self.warmup_steps + self.decay_steps > num_steps:
            raise ConfigError(
                f"scheduler.warmup_steps={self.warmup_steps} and scheduler.decay_steps={self.decay_steps} "
                f"exceed the run's {num_steps} steps",
                f"scheduler.decay_steps={max(1, num_steps - self.warmup_steps)}",
            )

    def after(self, update: int, length: int) -> float:
        """One, until the decay begins."""
        left = length - update
        if left >= self.decay_steps:
            return 1.0
        return self.min_factor + (1 - self.min_factor) * max(0, left) / self.decay_steps


def from_torch(make: Callable[..., LRScheduler], rate: float) -> Callable[[int], Schedule]:
    """A schedule that walks as one of torch's learning-rate schedulers does: `make(optimizer)` is stepped beside an empty one.

    `rate`: the base rate, for those that set rates instead of scaling them. ConfigError for one that follows a metric,
    or that moves momentum too (a table of rates can't).
    """

    def schedule(num_steps: int) -> Schedule:
        parameter = nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([parameter], lr=rate, momentum=0.5)
        scheduler = make(optimizer)
        name = type(scheduler).__name__
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(f"{name} follows a metric, and a schedule is a function of the number of updates", "scheduler=wsd")
        group, momentum = optimizer.param_groups[0], optimizer.param_groups[0]["momentum"]
        rates = [float(group["lr"])]

        def factor(update: int) -> float:
            while len(rates) <= update:
                optimizer.step()
                try:
                    scheduler.step()
                except ValueError as error:
                    raise ConfigError(f"{name} ends before the run's {num_steps} steps: {error}", "scheduler=cosine") from error
                rates.append(float(group["lr"]))
                if group["momentum"] != momentum:
                    raise ConfigError(f"{name} moves momentum too, which a schedule can't", "scheduler.cycle_momentum=false")
            return rates[update] / rate if rate else 0.0

        return factor

    return schedule


def tabulate(schedule: Schedule, num_steps: int, device: torch.device) -> Tensor:
    """The schedule as a table [num_steps + 1], float64 on the device: reading it there needs no host. ConfigError if it is none."""
    if not callable(schedule):
        raise ConfigError(f"a schedule is called with the number of updates, and a {type(schedule).__name__} can't be", "scheduler=cosine")
    try:
        factors = [float(schedule(update)) for update in range(num_steps + 1)]
    except TypeError as error:
        raise ConfigError(f"the schedule can't be asked for a factor by number of updates: {error}", "scheduler=cosine") from error
    wrong = next((at for at, factor in enumerate(factors) if not math.isfinite(factor)), None)
    if wrong is not None:
        raise ConfigError(f"the schedule's factor on the rate after {wrong} updates is {factors[wrong]}", "scheduler=cosine")
    return torch.tensor(factors, dtype=torch.float64, device=device)


def parameter_groups(model: nn.Module, parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay; vectors (norms, biases) and embeddings, tied heads included, without.

    `parameters` may be local parts: a cut never changes a parameter's number of dimensions.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embeddings = {names[id(module.weight)] for module in model.modules() if isinstance(module, EMBEDDINGS)}
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not weight_decay:
        return [{"params": list(trained.values()), "weight_decay": 0.0}]
    decayed = [p for name, p in trained.items() if p.dim() >= 2 and name not in embeddings]
    kept = {id(p) for p in decayed}
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": [p for p in trained.values() if id(p) not in kept], "weight_decay": 0.0},
    ]
    return groups  # both, also where a pipeline's stage has nothing for one: a group's state is known by its place


def build_optimizer(make: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """`make(groups)`, fused where it offers that and every parameter allows it."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    offers_fused = "fused" in inspect.signature(make).parameters
    fusable = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    with _without_compiler():
        try:
            optimizer = make(groups, fused=True) if offers_fused and fusable else make(groups)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{_name(make)} can't be made with these arguments: {error}", "optimizer=adamw") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{_name(make)} is no optimizer: it makes a {type(optimizer).__name__}", "optimizer=adamw")
    if isinstance(optimizer, torch.optim.SGD):
        if any(group["momentum"] and group["dampening"] for group in optimizer.param_groups):
            return make(groups)  # the first step of fused momentum with dampening can't be skipped on the device
        _start_momentum(optimizer)
    return optimizer


def _name(make: Callable[..., Any]) -> str:
    kind = getattr(make, "func", make)
    return str(getattr(kind, "__name__", kind))


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Keep an optimizer's constructor from importing torch's compiler: more than a second on every rank, to mark one method for it."""
    method = torch.optim.Optimizer.add_param_group
    torch.optim.Optimizer.add_param_group = getattr(method, "__wrapped__", method)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.Optimizer.add_param_group = method  # type: ignore[method-assign]


def _start_momentum(optimizer: torch.optim.SGD) -> None:
    """Momentum of zero before the first step: torch's fused kernel leaves it unset if that step is skipped."""
    for group in optimizer.param_groups:
        if group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
