"""A layout in characters: who holds what, and what a step looks like on the clock."""

from __future__ import annotations

import textwrap
from itertools import pairwise

from disttrain.plan import pipeline
from disttrain.plan.case import SPLIT_BACKWARD, Case, Layout
from disttrain.plan.planned import Plan
from disttrain.plan.schedule import BACKWARD, FORWARD, Clock
from disttrain.plan.table import columns, facts

ROWS = 16
"""Ranks that are listed one by one."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CLOCKED = 8
"""Ranks and, beside as many again, micro-batches that a timeline is played for."""


def coordinate(layout: Layout, rank: int) -> dict[str, int]:
    """Where a rank stands on each axis: tp innermost, then cp, then the data axes, pp outermost."""
    at = {}
    for name in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        rank, at[name] = divmod(rank, getattr(layout, name))
    return at


def mesh(case: Case, per_node: int) -> list[str]:
    """The ranks with their layers, heads, rows of the vocabulary, tokens and samples; the axes alone where there are many."""
    layout = case.layout
    rows = [("axis", "size", "what it cuts")]
    told = {
        "tp": "heads, feed-forward columns, rows of the vocabulary",
        "cp": "tokens of each sequence",
        "dp_shard": "samples"
        + {0: "", 1: "; optimizer states", 2: "; optimizer states, gradients", 3: "; states, gradients, weights"}[layout.zero],
        "dp_replicate": "samples",
        "pp": "layers",
    }
    rows += [(name, str(getattr(layout, name)), what) for name, what in told.items() if getattr(layout, name) > 1]
    lines = [] if len(rows) == 1 else facts([(f"{name:<14}{size:>5}", what) for name, size, what in rows])
    lines += ["", *_ranks(case, per_node)] if lines else _ranks(case, per_node)
    return lines


def _ranks(case: Case, per_node: int) -> list[str]:
    world = case.layout.world
    shown = list(range(world)) if world <= ROWS else [*range(ROWS // 2), *range(world - ROWS // 2, world)]
    head = ("rank", "node", "layers", "heads", "vocabulary", "tokens", "samples of a step")
    rows = [_holds(case, rank, per_node) for rank in shown]
    if world > ROWS:
        rows.insert(ROWS // 2, ("...", *("" for _ in head[1:])))
    return columns(rows, head)


def _holds(case: Case, rank: int, per_node: int) -> tuple[str, ...]:
    layout, shape = case.layout, case.shape
    at = coordinate(layout, rank)
    local = case.global_batch // layout.data
    first = (at["dp_replicate"] * layout.dp_shard + at["dp_shard"]) * local
    heads, rows, tokens = shape.heads // layout.tp, shape.vocab // layout.tp, case.length // layout.cp
    return (
        str(rank),
        str(rank // per_node),
        _layers(case, at["pp"]),
        span(at["tp"] * heads, heads),
        span(at["tp"] * rows, rows),
        span(at["cp"] * tokens, tokens) if layout.cp == 1 else f"part {at['cp']} of {layout.cp}",
        span(first, local),
    )


def _layers(case: Case, stage: int) -> str:
    """Layers of a pipeline rank, in its chunks, with E and H for embedding and head."""
    layers = pipeline.blocks_of(case)[stage]
    starts = [place for place, layer in enumerate(layers) if place == 0 or layers[place - 1] != layer - 1]
    text = ",".join(span(layers[low], high - low) for low, high in pairwise([*starts, len(layers)])) or "-"
    return ("E " if stage == 0 else "") + text + (" H" if pipeline.holds_head(case, stage) else "")


def span(start: int, count: int) -> str:
    """`count` numbers from `start`."""
    return "-" if count <= 0 else str(start) if count == 1 else f"{start}-{start + count - 1}"


def timeline(plan: Plan, width: int) -> list[str]:
    """One step of every pipeline rank: digits forward, letters backward (capital: for weights alone), dots waiting, = data, o optimizer."""
    case, own = plan.case, plan.seconds
    assert own is not None
    layout, m = case.layout, case.micro_batches
    closing = [("=", own.exposed.get("data", 0.0)), ("o", own.optimizer)]
    if layout.pp == 1:
        return _flat(plan, width)
    ranks, micro = min(layout.pp, CLOCKED), min(m, 2 * CLOCKED)
    micro = max(ranks, micro // ranks * ranks) if layout.virtual > 1 else micro
    busy = (own.step - own.bubble - own.optimizer - own.exposed.get("data", 0.0) - own.overhead) / m
    clock = Clock(layout.schedule, ranks, layout.virtual, micro, pipeline.Times(busy / 3, busy / 3, busy / 3))
    scale = (width - 8) / (clock.length + sum(time for _, time in closing))
    lines = []
    for rank, actions in enumerate(clock.done):
        line = ["."] * round(clock.length * scale)
        for action in actions:
            sign = str(action.micro % 10) if action.kind == FORWARD else LETTERS[action.micro % 26]
            sign = sign if action.kind in (FORWARD, BACKWARD) else sign.upper()
            for place in range(int(action.start * scale), max(int(action.start * scale) + 1, int(action.end * scale))):
                if place < len(line):
                    line[place] = sign
        lines.append((f"pp {rank:<4} " + "".join(line) + "".join(sign * round(time * scale) for sign, time in closing))[:width])
    drawn = "" if (ranks, micro) == (layout.pp, m) else f" (drawn: {ranks} of {layout.pp} ranks, {micro} of {m} micro-batches)"
    weights = ", capitals weights' backward" if layout.schedule in SPLIT_BACKWARD else ""
    legend = f"digits forward, letters backward{weights}, . waits, = data axes, o optimizer{drawn}"
    return [*lines, *textwrap.wrap(legend, width)]


def _flat(plan: Plan, width: int) -> list[str]:
    """A step without a pipeline: kinds of work in the order of a step, as long as their shares."""
    own = plan.seconds
    assert own is not None
    parts = [
        ("f", (own.products + own.attention + own.memory) / 3, "forward"),
        ("b", 2 * (own.products + own.attention + own.memory) / 3, "backward"),
        ("r", own.recompute, "recomputed"),
        ("t", own.exposed.get("tp", 0.0), "tp"),
        ("c", own.exposed.get("cp", 0.0), "cp"),
        ("e", own.exposed.get("ep", 0.0), "ep"),
        ("=", own.exposed.get("data", 0.0), "data axes"),
        ("o", own.optimizer, "optimizer"),
        (".", own.overhead, "overhead"),
    ]
    line = "".join(sign * round((width - 2) * time / own.step) for sign, time, _ in parts)
    legend = ", ".join(f"{sign} {name}" for sign, time, name in parts if time > 0)
    return [line, *textwrap.wrap(f"{legend}; {plan.case.micro_batches} micro-batches one after the other", width)]
