"""A model cut into pipeline stages: which modules each holds, how one runs, and what that means for parameters.

A model is a chain of units, by its own statement `parts()`: what it does before its blocks, each block, what it does
behind them. A stage is a run of consecutive units. Cuts are balanced by cost, head and embedding counted, or stand in the config.
Modules of other stages leave the model, so what stays keeps its names, and nothing of them is ever materialised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from disttrain.config import split as splitting
from disttrain.config.schedules import SCHEDULES, holders, stages_a_rank
from disttrain.errors import ConfigError
from disttrain.models.model import Parts
from disttrain.parallel.layout import Held
from disttrain.parallel.loop import LossModule
from disttrain.parallel.mesh import Axis
from disttrain.parallel.options import Options
from disttrain.parallel.tensor import unfuse


@dataclass(frozen=True)
class Unit:
    """What is never cut: one block, or all before or behind them."""

    modules: tuple[str, ...]
    run: Callable[[Any], Any] | None
    """None: one module after the other."""
    cost: float
    is_block: bool


@dataclass(frozen=True)
class Stages:
    """The units of each stage, and which index on the axis `pp` holds it."""

    units: tuple[tuple[Unit, ...], ...]
    holders: tuple[int, ...]

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return len(self.units) - 1

    def of(self, index: int) -> list[int]:
        """Stages of the rank with this index on `pp`, in the order of forward."""
        return [stage for stage, holder in enumerate(self.holders) if holder == index]


class Absent(nn.Module):
    """Stands where another stage's module stood."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """RuntimeError: only the rank that holds it can call it."""
        raise RuntimeError("this module belongs to another pipeline stage")


class StageModule(nn.Module):
    """One stage as a module: units in order, under the contexts of the policies."""

    def __init__(self, whole: LossModule, units: Sequence[Unit]) -> None:
        """`whole` holds the contexts and the model that is left on this rank."""
        super().__init__()
        self.held = nn.ModuleList(whole.model.get_submodule(name) for unit in units for name in unit.modules)
        self._units = [unit.run or _chain([whole.model.get_submodule(name) for name in unit.modules]) for unit in units]
        self._within = whole.within

    def forward(self, x: Any) -> Any:
        """The next stage's input, or the model's outputs."""
        return self._within(self._run, x)

    def _run(self, x: Any) -> Any:
        for unit in self._units:
            x = unit(x)
        return x


def stage_modules(whole: LossModule, stages: Stages, index: int) -> dict[int, StageModule]:
    """The stages of the rank with this index on `pp`, by number."""
    return {number: StageModule(whole, stages.units[number]) for number in stages.of(index)}


def _chain(modules: Sequence[nn.Module]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        for module in modules:
            x = module(x)
        return x

    return run


def cut_stages(model: nn.Module, axis: Axis, options: Options) -> tuple[Stages | None, dict[str, Held]]:
    """Leave of `model` what this rank of the axis `pp` holds. The stages, and where each parameter lives, those of all ranks."""
    if axis.size == 1:
        return None, {}
    schedule = options.schedule
    where = holders(schedule, axis.size, axis.size * stages_a_rank(schedule, options.virtual_stages))
    stages = make_stages(model, where, options.stage_split)
    held = held_by(model, stages)
    keep_own(model, stages, axis.index, held)
    if SCHEDULES[schedule].splits_backward:
        unfuse(model)
    return stages, held


def make_stages(model: nn.Module, holders: tuple[int, ...], split: Sequence[str]) -> Stages:
    """Cut `model` into as many stages as there are `holders`. `split`: first module of each later stage; empty: balanced."""
    units = units_of(model)
    starts = _named_starts(units, split, len(holders)) if split else balanced_starts(units, len(holders))
    edges = [0, *starts, len(units)]
    return Stages(tuple(tuple(units[low:high]) for low, high in pairwise(edges)), holders)


def units_of(model: nn.Module) -> list[Unit]:
    """The chain that `model` is. ConfigError for one that doesn't say."""
    parts: Parts
    if callable(stated := getattr(model, "parts", None)):
        parts = stated()
    elif isinstance(model, nn.Sequential):
        parts = Parts(first=(), repeated=tuple(name for name, _ in model.named_children()), last=())
    else:
        raise ConfigError(
            f"strategy.pp cuts a model by its layers, and {type(model).__name__} does not say what they are: it has no parts() "
            "(disttrain.models.model.Parts), nor is it an nn.Sequential",
            "strategy=ddp",
        )
    cost = parts.cost or {name: float(sum(p.numel() for p in model.get_submodule(name).parameters())) for name in _all(parts)}
    units = [Unit((name,), None, cost.get(name, 0.0), True) for name in parts.repeated]
    if parts.first:
        units.insert(0, Unit(parts.first, parts.begin, sum(cost.get(name, 0.0) for name in parts.first), False))
    if parts.last:
        units.append(Unit(parts.last, parts.end, sum(cost.get(name, 0.0) for name in parts.last), False))
    return units


def _all(parts: Parts) -> tuple[str, ...]:
    return (*parts.first, *parts.repeated, *parts.last)


def balanced_starts(units: Sequence[Unit], num_stages: int) -> list[int]:
    """First unit of each later stage, so that the dearest stage is as cheap as can be, and the others as even as that leaves them.

    Each stage has at least one block. ConfigError for fewer blocks than stages.
    """
    num_blocks = sum(unit.is_block for unit in units) or len(units)  # a model without blocks is cut between what comes first and last
    if num_blocks < num_stages:
        raise ConfigError(
            f"the model has {num_blocks} layers for {num_stages} pipeline stages (strategy.pp times the stages a rank), "
            "and each stage needs one",
            f"strategy.pp={num_blocks} with strategy.schedule=1f1b, or model.num_layers={num_stages}",
        )
    return splitting.balanced_starts([unit.cost for unit in units], [unit.is_block for unit in units], num_stages)


def _named_starts(units: Sequence[Unit], split: Sequence[str], num_stages: int) -> list[int]:
    names = [unit.modules[0] for unit in units]
    if len(split) != num_stages - 1:
        raise ConfigError(
            f"strategy.stage_split names the first module of {len(split)} stages, but there are {num_stages - 1} behind the first",
            "strategy.stage_split=[]",
        )
    if unknown := [name for name in split if name not in names[1:]]:
        raise ConfigError(
            f"strategy.stage_split: no stage can begin at {', '.join(unknown)}; it can at {', '.join(names[1:])}", "strategy.stage_split=[]"
        )
    starts = [names.index(name) for name in split]
    if starts != sorted(set(starts)):
        raise ConfigError(f"strategy.stage_split={list(split)} is not in the order of forward", "strategy.stage_split=[]")
    return starts


def held_by(model: nn.Module, stages: Stages) -> dict[str, Held]:
    """Where on the axis `pp` each parameter lives. One that the first stage and the last share (tied embeddings) has two places."""
    stage_of = {name: stage for stage, units in enumerate(stages.units) for unit in units for name in unit.modules}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {}
    for first, *others in names.values():
        homes = {stage for module, stage in stage_of.items() for name in (first, *others) if name.startswith(f"{module}.")}
        if not homes:
            raise ConfigError(f"'{first}' is in none of the modules that the model's parts() names, so no pipeline stage can hold it")
        places = tuple(sorted({stages.holders[stage] for stage in homes}))
        if len(places) > 1 and homes != {0, stages.last}:
            raise ConfigError(
                f"{' and '.join((first, *others))} are one parameter, of pipeline stages {sorted(homes)}; only first and last can share",
                "strategy=ddp",
            )
        found[first] = Held(places)
    return found


def keep_own(model: nn.Module, stages: Stages, index: int, held: Mapping[str, Held]) -> None:
    """Take out of `model` what the rank `index` doesn't hold. A module that shares its parameter with one that stays, stays."""
    mine = {name for stage in stages.of(index) for unit in stages.units[stage] for name in unit.modules}
    shared = {id(parameter) for name in mine for parameter in model.get_submodule(name).parameters()}
    for name in [name for units in stages.units for unit in units for name in unit.modules if name not in mine]:
        if shared & {id(parameter) for parameter in model.get_submodule(name).parameters()}:
            continue
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent)._modules[child] = Absent()
    left = {name for name, _ in model.named_parameters()}
    wanted = {name for name, at in held.items() if index in at.at}
    if left != wanted:
        names = ", ".join(sorted(left ^ wanted))
        raise ConfigError(f"pipeline stages can't be told apart at {names}: their modules have other names in the model too")
