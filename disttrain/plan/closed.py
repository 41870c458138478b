"""The closed form: seconds of one step, from counts, rates and six fitted shares.

    step = m (slowest stage) + bubble + sends + what of the data axes' communication no work hides + optimizer

A micro-batch's time in a layer is the sum of its products, its attention, what passes through memory and what the
tensor, context and expert axes say meanwhile. ZeRO-3 gathers weights behind all of the work, ZeRO-1 and 2 and plain
replication sum gradients behind the last micro-batch's backward; neither hides wholly (`Constants.overlap`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from disttrain.config.schema import HardwareConfig
from disttrain.plan import compute, pipeline, tensors
from disttrain.plan.case import V_SHAPED, Case
from disttrain.plan.compute import Work
from disttrain.plan.constants import Constants
from disttrain.plan.network import Message, Span, seconds, spans

STEP_OVERHEAD = 0.010
"""Seconds a step outside of all this: launching, the clock, the loader's hand-over."""
SMALL_HEADS = 64, 0.8
"""Attention kernels reach four fifths of their rate with heads of 64 elements or fewer (FlashAttention-2 paper, figure 4)."""
OPERANDS = 0.65
"""Share of the operands' traffic that products do not hide."""
CONTEXT_HIDDEN = 0.5
"""Share of the context axis' traffic that attention hides."""


@dataclass
class Seconds:
    """Where one step's time goes on the slowest rank."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    recompute: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    """Communication that nothing hides, by axis."""
    bubble: float = 0.0
    optimizer: float = 0.0
    overhead: float = STEP_OVERHEAD

    @property
    def step(self) -> float:
        """The whole step."""
        parts = (self.products, self.attention, self.memory, self.recompute, self.bubble, self.optimizer, self.overhead)
        return sum(parts) + sum(self.exposed.values())


def lacking(case: Case, hardware: HardwareConfig) -> str | None:
    """The first key of the hardware without which this case's time can't be reckoned, on as many ranks; None if it has them all."""
    software, ranks = case.software, case.layout.world
    needed = {
        f"matmul_tflops.{software.precision}": hardware.matmul_tflops.get(software.precision),
        f"attention_tflops.{software.kernel}": software.kernel == "unfused" or hardware.attention_tflops.get(software.kernel),
        "memory_bandwidth": hardware.memory_bandwidth,
        "link_bandwidth": ranks == 1 or hardware.devices_per_node == 1 or hardware.link_bandwidth,
        "network_bandwidth": ranks <= hardware.devices_per_node or hardware.network_by_nodes or hardware.network_bandwidth,
    }
    return next((name for name, rate in needed.items() if not rate), None)


class Closed:
    """One case on one hardware, counted once; `seconds` of given constants."""

    def __init__(self, case: Case, hardware: HardwareConfig) -> None:
        """Count work and messages."""
        self.case, self.hardware = case, hardware
        self.spans = spans(case.layout, hardware.devices_per_node)
        self.forward, self.backward = compute.layer_forward(case), compute.layer_backward(case)
        again = case.layout.recompute
        self.repeated = self.forward.scaled(again.gemm, again.attention, again.memory)
        self.head = compute.head(case)
        self.layers = pipeline.layers_of(case)
        self.said_forward, self.said_backward = layer_messages(case, False), layer_messages(case, True)
        self.parameters = max(rank_parameters(case, stage) for stage in {0, case.layout.pp - 1})
        self.data = data_messages(case, self.parameters, max(self.layers))
        self.optimizer_bytes = optimizer_bytes(case, self.parameters)

    def seconds(self, constants: Constants) -> Seconds:
        """Where the time of one step goes."""
        constants = constants.on(self.hardware)
        layout, m = self.case.layout, self.case.micro_batches
        ahead, back, head = (self._work(work, constants) for work in (self.forward, self.backward, self.head))
        said_ahead, said_back = self._said(self.said_forward, constants), self._said(self.said_backward, constants)
        layer_ahead, layer_back = sum(ahead) + sum(said_ahead.values()), sum(back) + sum(said_back.values())
        layer = layer_ahead + layer_back
        times = [
            count * layer + (3 * sum(head) if pipeline.holds_head(self.case, stage) else 0.0) for stage, count in enumerate(self.layers)
        ]
        slowest = max(range(layout.pp), key=times.__getitem__)
        heads = 3.0 * m if pipeline.holds_head(self.case, slowest) else 0.0
        runs = m * self.layers[slowest]
        products, attention, memory = (runs * (a + b) + heads * c for a, b, c in zip(ahead, back, head, strict=True))
        found = Seconds(products, attention, memory)
        found.exposed = {axis: runs * (said_ahead.get(axis, 0.0) + time) for axis, time in said_back.items()}
        if layout.recompute.memory or layout.recompute.attention:
            _show_apart(found, runs * sum(self._work(self.repeated, constants)))
        if layout.pp > 1:
            share = sum(times) / layout.pp / layer  # a mean stage, in layers
            weight = share * self._work(self.forward, constants)[0]
            stage = pipeline.Times(share * layer_ahead, share * layer_back - weight, weight)
            found.bubble = pipeline.bubble(layout.schedule, layout.pp, layout.virtual, stage)
            found.exposed["pp"] = self._sends(constants)
        if self.data:
            beside = times[slowest] - self.layers[slowest] * layer_ahead  # the last micro-batch's backward
            if layout.zero >= 2:
                beside = m * (times[slowest] if layout.zero == 3 else beside) + found.bubble + found.exposed.get("pp", 0.0)
            said = sum(seconds(message, self.spans[message.axis], self.hardware, constants) for message in self.data)
            found.exposed["data"] = said if layout.sync_every > 1 else overlapped(beside, said, constants.overlap)  # after the update
        found.optimizer = self.optimizer_bytes / (self.hardware.memory_bandwidth * 1e9 * constants.memory)
        return found

    def _work(self, work: Work, constants: Constants) -> tuple[float, float, float]:
        """Seconds of (products, attention, memory)."""
        hardware, software = self.hardware, self.case.software
        stream = hardware.memory_bandwidth * 1e9
        products = (
            work.flops / (hardware.matmul_tflops[software.precision] * 1e12 * constants.matmul) + OPERANDS * work.operand_bytes / stream
        )
        attended = 0.0
        if work.attention_flops:
            small, share = SMALL_HEADS
            rate = hardware.matmul_tflops["fp32"] if software.kernel == "unfused" else hardware.attention_tflops[software.kernel]
            rate *= share if self.case.shape.head_dim <= small else 1.0
            attended = work.attention_flops / (rate * 1e12 * constants.attention)
        return products, attended, work.memory_bytes / (stream * constants.memory)

    def _said(self, messages: list[Message], constants: Constants) -> dict[str, float]:
        """Exposed seconds of messages inside a layer, by axis."""
        exposed = {"tp": self.case.software.tensor_exposed, "cp": 1.0 - CONTEXT_HIDDEN}
        return {
            message.axis: seconds(message, self.spans[message.axis], self.hardware, constants) * exposed.get(message.axis, 1.0)
            for message in messages
        }

    def _sends(self, constants: Constants) -> float:
        """Sends between stages: m both ways at once, and the two ways through the pipe; half as exposed when chunks interleave."""
        case, layout = self.case, self.case.layout
        cut = layout.tp if (layout.sequence_parallel or case.software.scattered) else 1
        beside = Span(2, 1 if self.spans["pp"].nodes > 1 else 2)
        chunks = 2 if layout.schedule in V_SHAPED else layout.virtual
        calls = (case.micro_batches + 2 * (layout.pp - 1)) * chunks * (0.5 if chunks > 1 else 1.0)
        message = Message("pp", "send", case.numbers.compute * case.tokens * case.shape.hidden / cut, calls)
        return seconds(message, beside, self.hardware, constants)


def estimate(case: Case, hardware: HardwareConfig, constants: Constants) -> Seconds:
    """Where the time of one step goes."""
    return Closed(case, hardware).seconds(constants)


def layer_messages(case: Case, backward: bool) -> list[Message]:
    """What one layer says in one pass over one micro-batch, what it recomputes included.

    Tensor axis: two all-reduces of the stream each way, or as many pairs of gather and scatter (Shoeybi et al. 2019;
    Korthikanti et al. 2022). Context axis: keys and values gathered, once forward and twice backward (Llama 3,
    arXiv:2407.21783, section 3.3.2). Expert axis: out and back.
    """
    layout, shape = case.layout, case.shape
    passes = 1.0 + (layout.recompute.layers if backward else 0.0)
    size, n, found = case.numbers.compute, case.tokens, []
    if layout.tp > 1:
        found.append(Message("tp", "all_reduce", size * n * shape.hidden, 2 * passes))
    if layout.cp > 1:
        whole = size * n * layout.cp * 2 * shape.kv_width / layout.tp
        found.append(Message("cp", "all_gather", whole, 1 + passes if backward else 1.0))
    if layout.ep > 1 and shape.experts:
        found.append(Message("ep", "all_to_all", size * n * shape.hidden * shape.top_k, 2 * passes * shape.sparse_share))
    return found


def data_messages(case: Case, parameters: float, layers: int) -> list[Message]:
    """What the data axes say in a step about `parameters` of one rank, in `layers` pieces under ZeRO-3."""
    layout, numbers, m = case.layout, case.numbers, case.micro_batches
    if layout.data * layout.cp == 1:
        return []
    weights, gradients = numbers.wire_weight * parameters, numbers.wire_gradient * parameters
    if layout.sync_every > 1:  # local SGD: the weights themselves, every so many steps
        return [Message("grad", "all_reduce", numbers.gradient * parameters, 1 / layout.sync_every)]
    if not layout.zero or layout.sharing == 1:
        return [Message("grad", "all_reduce", gradients * tensors.sent_share(case))]
    if layout.zero == 3:
        blocks = layers * layer_share(case) * numbers.wire_weight
        twice = m * layers * (2.0 if layout.reshard else 1.0)  # the ends, gathered once, stay for the backward
        found = [
            Message("dp_shard", "all_gather", blocks / layers, twice),
            Message("dp_shard", "all_gather", weights - blocks, float(m)),
            Message("dp_shard", "reduce_scatter", gradients / layers, m * layers),
        ]
    else:
        scatters = m if layout.zero == 2 else 1
        found = [Message("dp_shard", "reduce_scatter", gradients, scatters), Message("dp_shard", "all_gather", weights)]
    if layout.replicas > 1:
        found.append(Message("replicate", "all_reduce", gradients / layout.sharing))
    return found


def layer_share(case: Case) -> float:
    """Parameters of a layer that one rank holds before the data axes cut them."""
    layout, shape = case.layout, case.shape
    return (shape.layer_parameters - shape.expert_parameters) / layout.tp + shape.expert_parameters / (layout.tp * layout.ep)


def rank_parameters(case: Case, stage: int) -> float:
    """Parameters of pipeline rank `stage` before the data axes cut them."""
    layout, shape = case.layout, case.shape
    found = pipeline.layers_of(case)[stage] * layer_share(case)
    is_first, is_last = stage == 0, pipeline.holds_head(case, stage)
    if is_first:
        found += shape.embedding_parameters / layout.tp
    if is_last and not (shape.tied and is_first):
        found += shape.head_parameters / layout.tp
    return found


def optimizer_bytes(case: Case, parameters: float) -> float:
    """States, weights and gradients read and written once; the weight products of each further micro-batch add to gradients they read."""
    layout = case.layout
    sharing = layout.sharing if layout.zero else 1
    accumulated = case.numbers.gradient * (case.micro_batches - 1) / (layout.sharing if layout.zero >= 2 else 1)
    return parameters * (28.0 / sharing + 6.0 + accumulated)


def overlapped(work: float, said: float, q: float) -> float:
    """What communication adds to work that it runs beside: (w^q + c^q)^(1/q) - w."""
    if said <= 0.0:
        return 0.0
    larger, smaller = max(work, said), min(work, said)
    return float(larger * (1.0 + (smaller / larger) ** q) ** (1.0 / q) - work)


def _show_apart(found: Seconds, repeated: float) -> None:
    """Take recomputation out of the kinds of work that it repeats."""
    whole = found.products + found.attention + found.memory
    keep = 1 - repeated / whole
    found.recompute = repeated
    found.products, found.attention, found.memory = found.products * keep, found.attention * keep, found.memory * keep
