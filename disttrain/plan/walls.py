"""The three walls: memory, compute, network. What one device could not do, and what a layout pays instead."""

from __future__ import annotations

import math
from dataclasses import replace

from disttrain.config.schema import HardwareConfig
from disttrain.plan.case import Case, Layout
from disttrain.plan.closed import Closed
from disttrain.plan.constants import Constants
from disttrain.plan.memory import GIB, memory
from disttrain.plan.planned import USABLE, Plan

TOKENS_A_PARAMETER = 20
"""Training tokens a parameter where no budget is given (Hoffmann et al. 2022, arXiv:2203.15556)."""
PATIENCE_DAYS = 30.0
"""What counts as a training that one waits for."""
LOUD = 0.25
"""Share of a step spent on communication from which the network is the wall."""


def budget(case: Case, tokens: float | None) -> float:
    """Tokens of the whole training."""
    return tokens or TOKENS_A_PARAMETER * case.shape.active_parameters


def alone(case: Case) -> Case:
    """The same model and batch on one device, a sample at a time."""
    layout = Layout(micro_batch=1)
    return replace(case, layout=layout)


def walls(plan: Plan, constants: Constants, tokens: float | None) -> list[tuple[str, str, str]]:
    """(wall, what one device meets, what this layout pays) of each of the three."""
    case, hardware = plan.case, plan.hardware
    single = alone(case)
    needs = memory(single, 0)
    state = needs.weights + needs.gradients + needs.optimizer
    found = []
    if hardware.memory_gib:
        share = needs.total / (hardware.memory_gib * GIB * USABLE)
        met = f"{show_bytes(state)} of weights, gradients and optimizer, {show_bytes(needs.total)} in all: {share:.2g} x a device"
        found.append(
            (
                "memory",
                met,
                f"{show_bytes(plan.peak_bytes)} on the fullest rank, {_percent(plan.peak_bytes / (plan.usable_bytes or 1))} of a device",
            )
        )
    if plan.seconds is None:
        return found
    total = budget(case, tokens)
    one = Closed(single, hardware).seconds(constants).step
    days = total / case.step_tokens * one / 86400
    own = plan.seconds
    met = f"{show_count(total)} tokens take {show_days(days)} on one device, had it the memory"
    idle = own.recompute + own.bubble
    pays = f"{show_days(plan.days(total) or 0.0)}; {_percent(idle / own.step)} of a step recomputes or waits in the pipeline"
    found.append(("compute", met, pays))
    exposed = sum(own.exposed.values())
    loudest = max(own.exposed, key=lambda axis: own.exposed[axis], default="")
    pays = f"{_percent(exposed / own.step)} of a step waits for messages" + (f", most for {loudest}" if exposed else "")
    found.append(("network", "one device sends nothing", pays))
    return found


def hit(plan: Plan) -> str:
    """The wall that this layout stands at."""
    if not plan.fits:
        return "memory"
    if plan.seconds is None:
        return "memory"
    exposed = sum(plan.seconds.exposed.values())
    return "network" if exposed > LOUD * plan.seconds.step else "compute"


def of_parameters(parameters: float, hardware: HardwareConfig, called: str, tokens: float | None) -> list[tuple[str, str]]:
    """(what, how much) for a model of which only the size is known, on a hardware, and what to call that."""
    weights, state = 2.0 * parameters, 16.0 * parameters
    rows = [
        ("hardware", called),
        ("16-bit weights", f"{show_bytes(weights, 1000)} (2 bytes a parameter)"),
        (
            "training state",
            f"{show_bytes(state, 1000)} to {show_bytes(18.0 * parameters, 1000)}: weights, gradients, float32 copies, two moments",
        ),
        ("activations", "not counted: they depend on tokens, layers and recomputation, not on the size alone"),
    ]
    if hardware.memory_gib:
        usable = hardware.memory_gib * GIB * USABLE
        rows.append(
            (
                "fewest devices",
                f"{math.ceil(state / usable)} of {hardware.name} ({hardware.memory_gib:.0f} GiB) for the state shared out over all",
            )
        )
        rows.append(("to run it only", f"{math.ceil(weights / usable)} for the weights"))
    rate = hardware.matmul_tflops.get("bf16", 0.0) * 1e12 * Constants().matmul
    if rate:
        total = tokens or TOKENS_A_PARAMETER * parameters
        seconds = 6.0 * parameters * total / rate
        rows.append(
            ("compute", f"{show_count(total)} tokens are {6.0 * parameters * total:.2g} flops: {show_days(seconds / 86400)} on one device")
        )
        rows.append(
            (f"in {PATIENCE_DAYS:.0f} days", f"{math.ceil(seconds / 86400 / PATIENCE_DAYS):,} devices that neither wait nor recompute")
        )
    return rows


def show_bytes(number: float, base: int = 1024) -> str:
    """Bytes for a person."""
    names = ("B", "KiB", "MiB", "GiB", "TiB", "PiB") if base == 1024 else ("B", "KB", "MB", "GB", "TB", "PB")
    power = min(int(math.log(max(number, 1.0), base)), len(names) - 1)
    return f"{number / base**power:.4g} {names[power]}" if number < 1e3 * base**power else f"{number / base**power:.0f} {names[power]}"


def show_count(number: float) -> str:
    """A large number for a person."""
    for size, name in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{name}"
    return f"{number:.0f}"


def show_days(days: float) -> str:
    """A time for a person."""
    if days >= 730:
        return f"{show_count(days / 365.25)} years" if days > 365250 else f"{days / 365.25:.3g} years"
    return f"{days:.3g} days" if days >= 1 else f"{days * 24:.2g} hours" if days >= 1 / 24 else f"{days * 1440:.2g} minutes"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
