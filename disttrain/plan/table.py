"""A plan as text that fits a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from itertools import accumulate, chain, repeat

from disttrain.plan.case import Case
from disttrain.plan.closed import CONTEXT_HIDDEN, OPERANDS, STEP_OVERHEAD
from disttrain.plan.constants import Constants
from disttrain.plan.devices import CPU
from disttrain.plan.memory import GIB
from disttrain.plan.planned import USABLE, Plan
from disttrain.plan.search import Found, Search
from disttrain.plan.walls import budget, show_bytes, show_count, show_days

WIDTH = 100
NARROWEST = 20
"""Columns that a table's first one is wrapped to at least."""
BAR = 40
"""Letters of a bar for the whole."""
ACCURACY = "on published runs 6% (median) and 11% (mean) of a step's time, 1.3% of memory; worse over many nodes of slow networks"

KORTHIKANTI = "as Korthikanti et al. 2022 count them (arXiv:2205.05198)"
AXES = {
    "tp": "activations of layers that are cut",
    "cp": "keys and values of the other tokens",
    "pp": "the stream between stages",
    "ep": "tokens to their experts and back",
    "grad": "gradients of whole weights",
    "grad_beside_ep": "gradients of experts",
    "dp_shard": "weights that are shared out, and their gradients",
    "replicate": "gradients of shares, over their copies",
    "dp_replicate": "weights, when replicas are averaged",
    "ends": "the gradient of an embedding that two stages hold",
    "world": "losses, norm and verdict",
}
"""What goes over each axis of the ledger."""


def width() -> int:
    """Columns to write in."""
    return max(60, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def columns(rows: Sequence[Sequence[str]], head: Sequence[str] = (), bars: Sequence[float] = ()) -> list[str]:
    """Rows in columns: the first to the left, the others to the right; behind them bars, of so many letters where there is room.

    Where they are too wide, the first is wrapped; columns that leave it no room stand under a head of their own below.
    """
    whole = [list(head), *map(list, rows)] if head else [list(row) for row in rows]
    widths = [max(len(row[i]) for row in whole) for i in range(len(whole[0]))]
    room = width() - min(widths[0], NARROWEST)
    fit = max(1, sum(taken <= room for taken in accumulate(wide + 2 for wide in widths[1:])))
    if head and fit < len(widths) - 1:
        left, right = [row[: fit + 1] for row in whole], [[row[0], *row[fit + 1 :]] for row in whole]
        return [*columns(left[1:], left[0], bars), "", *columns(right[1:], right[0])]
    others = sum(wide + 2 for wide in widths[1:])
    widths[0] = min(widths[0], max(1, width() - others))
    shrunk = min(1.0, max(0, width() - widths[0] - others - 2) / max([1.0, *bars]))
    lines = []
    for row, letters in zip(whole, chain([0.0] if head else [], bars, repeat(0.0)), strict=False):
        first, *more = textwrap.wrap(row[0], widths[0], subsequent_indent="    ") or [""]
        cells = [first.ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]), "#" * round(shrunk * letters)]
        lines += ["  ".join(cells), *more]
        if row is whole[0] and head:
            lines.append("  ".join("-" * wide for wide in widths))
    return [line.rstrip() for line in lines]


def facts(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Names and wrapped texts."""
    wide = max(len(name) for name, _ in rows) + 2
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, width() - wide) or [""]
        lines += [name.ljust(wide) + wrapped[0], *(" " * wide + line for line in wrapped[1:])]
    return lines


def title(text: str) -> list[str]:
    """A heading with a blank line before."""
    return ["", text, "=" * len(text)]


def layout_words(case: Case) -> str:
    """The layout in a line."""
    layout = case.layout
    degrees = [f"{name} {degree}" for name, degree in _degrees(case) if degree > 1] or ["one device"]
    if layout.zero:
        degrees.append(f"ZeRO-{layout.zero}")
    if layout.sync_every > 1:
        degrees.append(f"average every {layout.sync_every} steps")
    if layout.sequence_parallel:
        degrees.append("sequence parallel")
    if layout.pp > 1:
        degrees.append(layout.schedule + (f" x {layout.virtual}" if layout.virtual > 1 else ""))
    again = layout.recompute
    if again.memory:
        degrees.append("recompute " + ("full" if again.gemm >= 1 else f"{again.gemm:.0%} of layers" if again.gemm else "selective"))
    return ", ".join(degrees)


def _degrees(case: Case) -> list[tuple[str, int]]:
    layout = case.layout
    return [
        ("dp_replicate", layout.dp_replicate),
        ("dp_shard", layout.dp_shard),
        ("cp", layout.cp),
        ("tp", layout.tp),
        ("pp", layout.pp),
        ("ep", layout.ep),
    ]


def summary(plan: Plan, tokens: float | None) -> list[str]:
    """What is planned, and what it costs in all."""
    case, shape, layout = plan.case, plan.case.shape, plan.case.layout
    size = f"{show_count(shape.parameters)} parameters ({shape.layers} layers, {shape.hidden} wide, {shape.heads} heads"
    size += f", {shape.kv_heads} of keys and values)" if shape.kv_heads != shape.heads else ")"
    batch = f"{case.global_batch} samples x {case.length} tokens = {show_count(case.step_tokens)} tokens; "
    batch += f"{case.micro_batches} micro-batch{'es' if case.micro_batches > 1 else ''} of {layout.micro_batch} a data rank"
    rows = [("model", size), ("layout", f"{layout.world} x {plan.hardware.name}: {layout_words(case)}"), ("step", batch)]
    if plan.seconds is not None:
        rate, total = plan.tokens_per_second or 0.0, budget(case, tokens)
        speed = f"{show_seconds(plan.seconds.step)} a step, {show_count(rate)} tokens/s ({show_count(rate / layout.world)} a device)"
        rows.append(("time", speed + (f", MFU {100 * plan.mfu:.1f}%" if plan.mfu is not None else "")))
        price = plan.price(total)
        whole = f"{show_count(total)} tokens{'' if tokens else ' (20 a parameter)'} in {show_days(plan.days(total) or 0.0)}"
        whole += (
            f", {show_count(price) if price >= 10 else f'{price:.2g}'} USD at {plan.hardware.price_per_hour:g} a device hour"
            if price is not None
            else ""
        )
        rows.append(("training", whole))
    fit = "the device's memory is not known"
    if plan.usable_bytes is not None:
        fit = f"{'fits' if plan.fits else 'DOES NOT FIT'} {show_bytes(plan.hardware.memory_gib * GIB)}, of which tensors get {USABLE:.0%}"
    rows.append(("memory", f"{show_bytes(plan.peak_bytes)} on the fullest rank: {fit}"))
    return facts(rows)


def show_seconds(seconds: float) -> str:
    """A short time for a person."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def time_table(plan: Plan) -> list[str]:
    """Where a step's time goes."""
    own = plan.seconds
    if own is None:
        return ["No rates are known for this hardware, so nothing is said of time."]
    rows = [("matrix products", own.products), ("attention", own.attention), ("through memory", own.memory), ("recomputed", own.recompute)]
    rows += [(f"waits for {axis}", time) for axis, time in sorted(own.exposed.items())]
    rows += [("pipeline bubble", own.bubble), ("optimizer", own.optimizer), ("overhead", own.overhead)]
    shown = [(name, time) for name, time in rows if time > 0]
    told = [(name, show_seconds(time), f"{100 * time / own.step:.1f}%") for name, time in shown]
    return columns(told, ("", "time", "share"), [BAR * time / own.step for _, time in shown])


def memory_table(plan: Plan) -> list[str]:
    """Memory by kind on the pipeline's ranks; those in the middle that are alike are left out."""
    kinds = ("weights", "gradients", "optimizer", "activations", "head", "workspace")
    stages = sorted(plan.memories)
    shown = stages if len(stages) <= 4 else [stages[0], stages[1], stages[-2], stages[-1]]
    unit, name = (GIB, "GiB") if plan.peak_bytes >= GIB else (GIB / 1024, "MiB")
    rows = []
    for stage in shown:
        one = plan.memories[stage]
        label = "every rank" if len(stages) == 1 else f"pp {stage}"
        rows.append([label, *(f"{getattr(one, kind) / unit:.2f}" for kind in kinds), f"{one.total / unit:.2f}"])
    return columns(rows, (name, *kinds, "total"))


def traffic_table(plan: Plan) -> list[str]:
    """Bytes that the rank which sends most puts on the wire in a step, by axis."""
    rows = []
    for axis, kinds in plan.sent(plan.loudest).items():
        span = plan.spans[axis]
        place = "inside a node" if span.nodes == 1 else f"over {span.nodes} nodes"
        for kind, (calls, sent) in kinds.items():
            if kind != "receive":
                rows.append([f"{axis} ({span.size}, {place})", kind, f"{calls:.4g}", show_bytes(sent)])
    if not rows:
        return ["One rank sends nothing."]
    told = [f"{axis}: {AXES[axis]}" for axis in plan.traffic[plan.loudest]]
    return [*columns(rows, ("axis", "collective", "calls", "sent")), *textwrap.wrap("; ".join(told) + ".", width())]


def assumptions(plan: Plan, constants: Constants) -> list[str]:
    """Everything that was taken for granted, with its source."""
    software = plan.case.software
    numbers, peaks = plan.case.numbers, ("products", "attention", "memory", "links", "network")
    values = (constants.matmul, constants.attention, constants.memory, constants.link, constants.network)
    shares = ", ".join(f"{name} {value:.2f}" for name, value in zip(peaks, values, strict=True))
    kernels = f"attention {software.kernel}, pointwise kernels {'fused' if software.fused else 'not fused'}, {software.precision} products"
    hidden = f"tp {100 * (1 - software.tensor_exposed):.0f}% hidden, cp {CONTEXT_HIDDEN:.0%}, data axes beside work as (w^q + c^q)^(1/q)"
    held = f"{numbers.weight:g} weight, {numbers.gradient:g} gradient, {numbers.state:g} optimizer, {numbers.gathered:g} working copy"
    rows = [
        ("hardware", f"{plan.hardware.name}: {plan.hardware.source}"),
        ("shares", f"of the measured peaks: {shares}; products and links fitted on published runs (experiments/planner/page.md)"),
        ("overlap", f"{hidden}, q = {constants.overlap:g}"),
        ("program", f"{kernels}; {OPERANDS:.0%} of the operands' traffic exposed; {STEP_OVERHEAD * 1e3:.0f} ms a step"),
        ("bytes", f"a parameter: {held}; activations {'tensor by tensor, as plan.dry=true counts them' if software.own else KORTHIKANTI}"),
        ("accuracy", "not known: this hardware was not measured" if plan.hardware.name == CPU else ACCURACY),
    ]
    return facts(rows)


def search_table(found: Search, words: Sequence[str]) -> list[str]:
    """The best layouts, and how to ask for the best."""
    rows = [_search_row(number, one) for number, one in enumerate(found.best, 1)]
    return [
        *columns(rows, (" #  layout", "micro", "step", "tokens/s", "memory")),
        "",
        "The first is asked for with:",
        *textwrap.wrap(" ".join(words), width(), break_long_words=False, break_on_hyphens=False),
    ]


def _search_row(number: int, one: Found) -> list[str]:
    case = one.case
    short = layout_words(case).replace("dp_replicate", "rep").replace("dp_shard", "shard").replace("sequence parallel", "sp")
    short = short.replace("interleaved_1f1b", "interleaved").replace("recompute", "rc")
    return [
        f"{number:>2}  {short}",
        str(case.layout.micro_batch),
        show_seconds(one.seconds),
        show_count(case.step_tokens / one.seconds),
        show_bytes(one.peak_bytes),
    ]
