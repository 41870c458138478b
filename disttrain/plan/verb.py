"""`plan`: what a config costs, before it is run. Nothing is started, no GPU and no torch is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from disttrain.config.callbacks import key_of
from disttrain.config.check import check_layout, check_numbers
from disttrain.config.local_sgd import AMP
from disttrain.config.schema import Config, HardwareConfig
from disttrain.config.world import nearest_multiple
from disttrain.errors import ConfigError
from disttrain.plan import beside, draw, table, walls
from disttrain.plan.closed import lacking
from disttrain.plan.constants import Constants
from disttrain.plan.devices import AUTO, CPU, preset, resolve
from disttrain.plan.memory import GIB
from disttrain.plan.planned import Plan, allows, make, overrides
from disttrain.plan.search import Search, layouts, search
from disttrain.plan.settle import GPT, laid_out, precision_of, settle, unknown_shape

if TYPE_CHECKING:
    from disttrain.plan.rehearsal import Rehearsal

PARAMETERS = "model.parameters"
MOST_PARAMETERS, MOST_TOKENS = 1e18, 1e30
USUAL = "h100"
"""The hardware of large models, where none is there or asked for."""


def take_parameters(words: Sequence[str]) -> tuple[list[str], float | None]:
    """Overrides without `model.parameters`, which no model takes, and its value; beside it model and data take no part.

    ConfigError for no such number, and for a class that was typed whose shape is not known.
    """
    rest, found, target = [], None, GPT
    for word in words:
        name, _, value = word.lstrip("+").partition("=")
        target = value if name == "model._target_" else target
        if name != PARAMETERS:
            rest.append(word)
            continue
        try:
            found = float(value)
        except ValueError:
            found = -1.0
        if not 0 < found <= MOST_PARAMETERS:
            raise ConfigError(f"{PARAMETERS}={value} is no number of parameters", f"{PARAMETERS}=100e9")
    if found is not None:
        return [word for word in rest if re.match(r"[+~]*(model|dataset)[.=]", word) is None], found
    if target != GPT:
        raise unknown_shape(target)
    return rest, None


def main(config: Config, parameters: float | None, typed: Sequence[str]) -> int:
    """Print the plan of a config; `typed` are the overrides, `parameters` a size instead of a shape."""
    check_numbers(config)
    hardware = resolve(config.hardware)
    _check_wanted(config, parameters)
    if parameters is not None:
        rows = walls.of_parameters(parameters, *_large(config, hardware), config.plan.tokens)
        print(json.dumps(dict(rows), indent=2) if config.plan.json else "\n".join(table.facts(rows)))
        return 0
    constants = Constants()
    precision, said = _precision(config, hardware, typed)
    settled = settle(config, precision)
    hardware = resolve(config.hardware, settled.case.layout.world // settled.nodes)
    plan = make(settled.case, hardware, constants, [*said, *settled.notes])
    if config.plan.search:
        return _search(config, plan, constants)
    if not plan.fits and not config.plan.force:
        plan = nearest(plan, config, constants)
    counted = _rehearsed(config, plan)
    if config.plan.json:
        print(json.dumps(plan.to_json(config.plan.tokens) | ({} if counted is None else {"dry_run": counted.to_json()}), indent=2))
    else:
        print("\n".join(text(plan, constants, config.plan.tokens, counted)))
    return 0


def _check_wanted(config: Config, parameters: float | None) -> None:
    """ConfigError where two answers are asked for, of which only one can be given, or for more tokens than can be reckoned with."""
    if (config.plan.tokens or 0.0) > MOST_TOKENS:
        raise ConfigError(f"plan.tokens={config.plan.tokens:g} is more than any training sees", "plan.tokens=15e12")
    asked = [key for key, is_asked in (("plan.search", config.plan.search), ("plan.dry", config.plan.dry)) if is_asked]
    if parameters is not None and asked:
        raise ConfigError(
            f"{asked[0]}=true needs a model's shape, and {PARAMETERS} is its size alone", f"{asked[0]}=false, or model=llama3_8b"
        )
    if len(asked) == 2:
        raise ConfigError("plan.search=true compares many layouts, and plan.dry=true runs one of them", "plan.search=false")


def _rehearsed(config: Config, plan: Plan) -> Rehearsal | None:
    """The dry run, if it is asked for."""
    if not config.plan.dry:
        return None
    from disttrain.plan.rehearsal import rehearse

    return rehearse(config, plan.case)


def _large(config: Config, hardware: HardwareConfig) -> tuple[HardwareConfig, str]:
    """The hardware to reckon a model of some size with, and a word on it: where there is no GPU and none was asked for, the usual one."""
    if config.hardware.name == AUTO and hardware.name == CPU:
        return preset(USUAL), f"{USUAL}, as there is no GPU here; hardware=b200 and the like for another"
    return hardware, hardware.name


def _precision(config: Config, hardware: HardwareConfig, typed: Sequence[str]) -> tuple[str, list[str]]:
    """Type of products: the config's, but bf16 on a GPU where nobody asked for another."""
    found = precision_of(config)
    asked = any("amp.precision" in word or word.startswith("train.dtype") for word in typed)
    if (
        found == "fp32"
        and not asked
        and hardware.device
        and hardware.matmul_tflops.get("bf16", 0.0) > 1.5 * hardware.matmul_tflops.get("fp32", 0.0)
    ):
        return "bf16", [f"planned with {_in_half(config, typed)}, as one trains on {hardware.name}; fp32 is planned if asked for"]
    return found, []


def _in_half(config: Config, typed: Sequence[str]) -> str:
    """The overrides that give products in bf16."""
    if (key := key_of(config, AMP)) is not None:
        return f"callbacks.{key}.precision=bf16"
    chosen = next((word.partition("=")[2].strip("[]") for word in reversed(typed) if word.startswith("callbacks=")), "none")
    return f"callbacks=[{chosen},amp] callbacks.amp.precision=bf16"


def text(plan: Plan, constants: Constants, tokens: float | None, counted: Rehearsal | None = None) -> list[str]:
    """The whole page."""
    lines = table.summary(plan, tokens)
    notes = [*plan.notes, *plan.crossings()]
    if notes:
        lines += [*table.title("Notes"), *table.facts([("-", note) for note in notes])]
    lines += [*table.title("Time of a step"), *table.time_table(plan)]
    lines += [*table.title("Memory of the fullest rank"), *table.memory_table(plan)]
    lines += [*table.title("Sent by a rank in a step"), *table.traffic_table(plan)]
    if counted is not None:
        lines += [*table.title("Dry run: counted beside the formulas"), *beside.page(plan, counted)]
    rows = [(name, f"{met}. This layout: {pays}.") for name, met, pays in walls.walls(plan, constants, tokens)]
    lines += [*table.title(f"Walls: this layout stands at the {walls.hit(plan)} wall"), *table.facts(rows)]
    lines += [*table.title("Who holds what"), *draw.mesh(plan.case, plan.hardware.devices_per_node)]
    if plan.seconds is not None:
        lines += [*table.title("One step"), *draw.timeline(plan, table.width())]
    return [*lines, *table.title("Assumed"), *table.assumptions(plan, constants)]


def nearest(plan: Plan, config: Config, constants: Constants) -> Plan:
    """The layout that fits and keeps most of what was asked for; the plan itself, with a word, where none fits."""
    found = search(plan.case, plan.case.layout.world, plan.hardware, constants, 10_000, partial(allows, config))
    needs = f"{table.layout_words(plan.case)} needs {walls.show_bytes(plan.peak_bytes)} a rank"
    before = f"{needs} and a device has {walls.show_bytes(plan.hardware.memory_gib * GIB)}"
    if not found.num_tried:
        return replace(plan, notes=[*plan.notes, f"{before}; {_untried(plan)}: {_dividing(plan)} does"])
    if not found.best:
        fewest = (
            f"of all {found.num_tried} layouts on {plan.case.layout.world} ranks the smallest needs {walls.show_bytes(found.least_bytes)}"
        )
        return replace(plan, notes=[*plan.notes, f"{before}; {fewest}: more ranks, a larger device or shorter samples"])
    asked = plan.case.layout
    degrees = ("tp", "pp", "cp", "zero", "dp_shard", "dp_replicate")
    kept = max(found.best, key=lambda one: (sum(getattr(one.case.layout, name) == getattr(asked, name) for name in degrees), -one.seconds))
    word = f"{before}; planned is the nearest that fits: {' '.join(overrides(config, kept.case))}"
    return make(kept.case, plan.hardware, constants, [*plan.notes, word])


def _untried(plan: Plan) -> str:
    """What is said where a search has nothing to try."""
    return f"no layout on {plan.case.layout.world} ranks divides model, tokens and train.global_batch_size={plan.case.global_batch}"


def _dividing(plan: Plan) -> str:
    """A batch with which there is a layout: samples for each rank, if they are but data ranks."""
    return f"train.global_batch_size={nearest_multiple(plan.case.global_batch, plan.case.layout.world)}"


def _search(config: Config, plan: Plan, constants: Constants) -> int:
    hardware, world = plan.hardware, plan.case.layout.world
    missing = lacking(plan.case, hardware)
    if missing is not None:
        raise ConfigError(f"a search needs rates, and hardware.{missing} of {hardware.name} is not known", "hardware=h100")
    found = search(plan.case, world, hardware, constants, config.plan.top, partial(allows, config))
    if not found.num_tried:
        if next(layouts(plan.case, world), None) is not None:  # there are some, and none goes with what else is asked for
            check_layout(laid_out(config, plan.case))
        raise ConfigError(_untried(plan), _dividing(plan))
    if not found.best:
        raise ConfigError(
            f"no layout of this model on {world} x {hardware.name} fits: the smallest of {found.num_tried} "
            f"needs {walls.show_bytes(found.least_bytes)} a rank",
            f"launch.world_size={2 * world}",
        )
    if config.plan.json:
        plans = [make(one.case, hardware, constants, plan.notes) for one in found.best]
        print(json.dumps([one.to_json(config.plan.tokens) | {"overrides": overrides(config, one.case)} for one in plans], indent=2))
        return 0
    print("\n".join(_search_text(config, plan, found, constants)))
    return 0


def _search_text(config: Config, plan: Plan, found: Search, constants: Constants) -> list[str]:
    best = make(found.best[0].case, plan.hardware, constants, plan.notes)
    lines = [
        f"{found.num_fitting} of {found.num_tried} layouts fit {plan.case.layout.world} x {plan.hardware.name}; the best of each kind:",
        "",
    ]
    lines += table.search_table(found, overrides(config, found.best[0].case))
    lines += [
        *table.title("The first"),
        *table.summary(best, config.plan.tokens),
        "",
        *table.time_table(best),
        "",
        *table.memory_table(best),
    ]
    if best.notes:
        lines += [*table.title("Notes"), *table.facts([("-", note) for note in best.notes])]
    return [*lines, *table.title("Assumed"), *table.assumptions(best, constants)]
