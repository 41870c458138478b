"""How long messages take: over links inside a node, over the network between nodes.

Bytes are those of the whole tensor; what a rank sends of them is `WIRE` (Chan et al. 2007; NCCL's bus bandwidth).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from disttrain.config.schema import HardwareConfig
from disttrain.plan.case import Layout
from disttrain.plan.constants import Constants

WIRE: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2.0 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send": lambda n: 1.0,
    "shift": lambda n: 1.0,
    "receive": lambda n: 0.0,
}
"""Bytes a rank sends for one byte of the whole tensor (of its own part, for all_to_all)."""
WIRE_FORMULA: Mapping[str, str] = {
    "all_reduce": "2(n-1)/n",
    "all_gather": "(n-1)/n",
    "reduce_scatter": "(n-1)/n",
    "all_to_all": "(n-1)/n",
    "broadcast": "1",
    "send": "1",
}
"""The same of n ranks, for a person."""


@dataclass(frozen=True, slots=True)
class Span:
    """A group of ranks as the cables see it."""

    size: int
    per_node: int
    """Ranks of the group in one node."""

    @property
    def nodes(self) -> int:
        """Nodes that the group reaches over."""
        return -(-self.size // self.per_node)


def spans(layout: Layout, per_node: int) -> dict[str, Span]:
    """The groups of each axis, by the ledger's names: tp innermost, then cp, then data, pp outermost.

    Of a program that shares out states over the context axis too (`share_context`), `dp_shard` is both together.
    """
    tp, inside, data = layout.tp, layout.tp * layout.cp, layout.cp * layout.data
    apart = layout.cp > 1 and not layout.share_context
    sizes = {  # by axis: how far its neighbours are from each other, in ranks; its size
        "tp": (1, tp),
        "cp": (tp, layout.cp),
        "ep": (tp, layout.ep),
        "dp_shard": (inside if apart else tp, layout.sharing),
        "replicate": (tp if apart else tp * layout.sharing, layout.replicas),
        "dp_replicate": (inside * layout.dp_shard, layout.dp_replicate),
        "grad": (tp, data),
        "grad_beside_ep": (tp * layout.ep, data // layout.ep),
        "pp": (inside * layout.data, layout.pp),
        "world": (1, layout.world),
    }
    found = {name: _span(stride, size, per_node) for name, (stride, size) in sizes.items()}
    return found | {"ends": Span(min(2, layout.pp), 1 if found["pp"].nodes > 1 else 2)}


def _span(stride: int, size: int, per_node: int) -> Span:
    return Span(size, max(1, min(size, per_node // stride if stride <= per_node else 1)))


@dataclass(frozen=True, slots=True)
class Message:
    """`calls` collectives of one kind over one axis, each of a tensor of `num_bytes`."""

    axis: str
    kind: str
    num_bytes: float
    calls: float = 1.0


def bandwidth(span: Span, hardware: HardwareConfig, constants: Constants) -> float:
    """Bytes a second that a rank of this group gets through, its links or its share of the node's network cards."""
    inside = hardware.link_bandwidth * 1e9 * constants.link
    if span.nodes == 1:
        return inside
    return min(inside, span.per_node * card(span.nodes, hardware, constants))


def card(nodes: int, hardware: HardwareConfig, constants: Constants) -> float:
    """Bytes a second of one device's network card in a group over so many nodes."""
    curve = sorted((int(count), rate) for count, rate in hardware.network_by_nodes.items())
    if not curve:
        return hardware.network_bandwidth * 1e9 * constants.network
    below = max((point for point in curve if point[0] <= nodes), default=curve[0])
    above = min((point for point in curve if point[0] >= nodes), default=curve[-1])
    if below[0] == above[0]:
        return below[1] * 1e9
    share = math.log(nodes / below[0]) / math.log(above[0] / below[0])
    return float(below[1] * (above[1] / below[1]) ** share) * 1e9


def latency(span: Span, hardware: HardwareConfig) -> float:
    """Seconds before the first byte has been everywhere: one hop inside, one for each node of a ring outside."""
    inside = hardware.link_latency * 1e-6 if span.per_node > 1 else 0.0
    return inside + (span.nodes * hardware.network_latency * 1e-6 if span.nodes > 1 else 0.0)


def seconds(message: Message, span: Span, hardware: HardwareConfig, constants: Constants) -> float:
    """Time of all calls, nothing hidden."""
    if span.size == 1:
        return 0.0
    sent, rate, wait = WIRE[message.kind](span.size), bandwidth(span, hardware, constants), latency(span, hardware)
    half = 0.0 if message.kind in ("all_to_all", "send") else hardware.link_half_message
    if span.nodes == 1 and message.kind in hardware.collectives:
        peak, half, micro = hardware.collectives[message.kind]
        rate, wait = peak * 1e9 * constants.link, micro * 1e-6
    ramp = half * 1e6 * min(1.0, span.size / hardware.devices_per_node) if span.per_node > 1 else 0.0
    if message.kind == "all_to_all" and span.nodes > 1:
        return message.calls * (_scattered(message.num_bytes, span, hardware, constants) + wait)
    return message.calls * (sent * (message.num_bytes + ramp) / rate + wait)


def _scattered(num_bytes: float, span: Span, hardware: HardwareConfig, constants: Constants) -> float:
    """All-to-all over nodes: what stays inside goes over links, the rest over each rank's own network card."""
    outside = num_bytes * (span.size - span.per_node) / span.size
    inside = num_bytes * (span.per_node - 1) / span.size
    links, cards = hardware.link_bandwidth * 1e9 * constants.link, card(span.nodes, hardware, constants)
    return max(inside / links, outside / cards)
