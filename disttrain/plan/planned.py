"""A plan: one case on one hardware, with its time, memory, traffic and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from disttrain.config.callbacks import key_of
from disttrain.config.check import ACCUMULATION, check_layout, micro_batch_of
from disttrain.config.schema import Config, HardwareConfig
from disttrain.config.typed import show
from disttrain.errors import ConfigError
from disttrain.plan import pipeline
from disttrain.plan.case import Case
from disttrain.plan.closed import Closed, Seconds, lacking
from disttrain.plan.constants import Constants
from disttrain.plan.memory import GIB, Memory, memory
from disttrain.plan.network import WIRE, Span
from disttrain.plan.settle import laid_out
from disttrain.plan.traffic import Traffic, traffic

USABLE = 0.94
"""Share of a device's memory that tensors get: the rest is the context, libraries, fragments."""


@dataclass
class Plan:
    """What a case costs."""

    case: Case
    hardware: HardwareConfig
    seconds: Seconds | None
    """None where the hardware's rates are not known."""
    memories: dict[int, Memory]
    """Bytes by pipeline rank."""
    traffic: dict[int, Traffic]
    """By pipeline rank: what it calls in a step, in bytes of the whole tensors."""
    spans: Mapping[str, Span] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def peak_bytes(self) -> float:
        """Of the fullest rank."""
        return max(one.total for one in self.memories.values())

    def sent(self, stage: int) -> Traffic:
        """{axis: {collective: (calls, bytes that the rank puts on the wire)}} of pipeline rank `stage`."""
        return {
            axis: {kind: (calls, moved * WIRE[kind](self.spans[axis].size)) for kind, (calls, moved) in kinds.items()}
            for axis, kinds in self.traffic[stage].items()
        }

    @property
    def loudest(self) -> int:
        """The pipeline rank that sends most."""
        return max(self.traffic, key=lambda stage: sum(moved for kinds in self.sent(stage).values() for _, moved in kinds.values()))

    @property
    def usable_bytes(self) -> float | None:
        """What a device offers to tensors; None where its memory is not known."""
        return self.hardware.memory_gib * GIB * USABLE if self.hardware.memory_gib else None

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits its device."""
        return self.usable_bytes is None or self.peak_bytes <= self.usable_bytes

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks together."""
        return None if self.seconds is None else self.case.step_tokens / self.seconds.step

    @property
    def mfu(self) -> float | None:
        """Model flops over the peak of all devices; attention counted as causal."""
        peak = self.hardware.peak_tflops.get(self.case.software.precision)
        rate = self.tokens_per_second
        if peak is None or rate is None:
            return None
        return rate * self.case.shape.flops(self.case.length) / (peak * 1e12 * self.case.layout.world)

    @property
    def bubble(self) -> float | None:
        """Share of the step in which a rank waits for the pipeline."""
        return None if self.seconds is None else self.seconds.bubble / self.seconds.step

    def days(self, tokens: float) -> float | None:
        """Of training on so many tokens."""
        return None if self.tokens_per_second is None else tokens / self.tokens_per_second / 86400

    def price(self, tokens: float) -> float | None:
        """USD of training on so many tokens."""
        days, hour = self.days(tokens), self.hardware.price_per_hour
        return None if days is None or hour is None else days * 24 * hour * self.case.layout.world

    def crossings(self) -> list[str]:
        """Axes that talk inside every layer and yet leave the node, though a smaller degree would not."""
        found = []
        for axis in ("tp", "cp"):
            span = self.spans.get(axis)
            if span is not None and span.size > 1 and span.nodes > 1:
                inside = span.per_node if axis == "cp" else self.hardware.devices_per_node
                found.append(
                    f"strategy.{axis}={span.size} leaves the node ({self.hardware.devices_per_node} devices): "
                    f"every layer waits for the network; strategy.{axis}={inside} would stay inside"
                )
        return found

    def to_json(self, tokens: float | None = None) -> dict[str, Any]:
        """Plain values."""
        layout, recompute = asdict(self.case.layout), asdict(self.case.layout.recompute)
        layout["stages"] = pipeline.layers_of(self.case) if layout.pop("blocks") else ()
        found: dict[str, Any] = {
            "model": asdict(self.case.shape) | {"parameters": self.case.shape.parameters},
            "layout": layout | {"recompute": recompute, "world": self.case.layout.world, "micro_batches": self.case.micro_batches},
            "tokens_per_step": self.case.step_tokens,
            "hardware": self.hardware.name,
            "memory_bytes": {str(stage): asdict(one) | {"total": one.total} for stage, one in self.memories.items()},
            "usable_bytes": self.usable_bytes,
            "fits": self.fits,
            "traffic": {
                str(stage): {
                    axis: {
                        kind: {"calls": calls, "bytes": self.traffic[stage][axis][kind][1], "sent_bytes": sent}
                        for kind, (calls, sent) in kinds.items()
                    }
                    for axis, kinds in self.sent(stage).items()
                }
                for stage in self.traffic
            },
            "notes": [*self.notes, *self.crossings()],
        }
        if self.seconds is not None:
            found["seconds"] = asdict(self.seconds) | {"step": self.seconds.step}
            found |= {"tokens_per_second": self.tokens_per_second, "mfu": self.mfu, "bubble": self.bubble}
            if tokens is not None:
                found |= {"days": self.days(tokens), "usd": self.price(tokens)}
        return found


def make(case: Case, hardware: HardwareConfig, constants: Constants, notes: list[str] | None = None) -> Plan:
    """Plan a case."""
    precision, notes = case.software.precision, list(notes or [])
    if precision not in hardware.matmul_tflops and "fp32" in hardware.matmul_tflops:
        notes.append(f"{hardware.name} has no rate for {precision}; reckoned with fp32's")
        case = replace(case, software=replace(case.software, precision="fp32"))
    closed, missing = Closed(case, hardware), lacking(case, hardware)
    if missing is not None:
        notes.append(f"no times: hardware.{missing} of {hardware.name} is not known")
    notes = list(dict.fromkeys(notes))  # a plan of a plan says all of them again
    seconds = closed.seconds(constants) if missing is None else None
    stages = range(case.layout.pp)
    memories = {stage: memory(case, stage) for stage in stages}
    return Plan(case, hardware, seconds, memories, {stage: traffic(case, stage) for stage in stages}, closed.spans, notes)


def predicted(plan: Plan) -> dict[str, float]:
    """The numbers that a run can be measured against, by the names of its metrics."""
    found = {"memory/peak_bytes": plan.peak_bytes}
    for stage in plan.traffic:  # a metric is the mean over ranks
        for axis, kinds in plan.sent(stage).items():
            for kind, (_, sent) in kinds.items():
                name = f"comm/{axis}/{kind}_bytes"
                if sent:
                    found[name] = found.get(name, 0.0) + sent / len(plan.traffic)
    if plan.seconds is not None:
        found["perf/step_seconds"] = plan.seconds.step
        found["perf/tokens_per_second"] = plan.tokens_per_second or 0.0
        if plan.mfu is not None:
            found["perf/mfu"] = plan.mfu
    return found


def allows(config: Config, case: Case) -> bool:
    """Whether a training of this config may be laid out so."""
    if micro_batch_of(config) is None and case.micro_batches > 1:
        return False
    try:
        check_layout(laid_out(config, case))
    except ConfigError:
        return False
    return True


def overrides(config: Config, case: Case) -> list[str]:
    """The words that ask for this layout and batch behind a command that made this config."""
    wanted = laid_out(config, case)
    found = [f"strategy.{name}={show(value)}" for name, value in vars(wanted.strategy).items() if value != getattr(config.strategy, name)]
    found += [f"model.{name}={value}" for name, value in wanted.model.items() if value != config.model[name]]
    if micro_batch_of(config) not in (None, case.layout.micro_batch):
        found.append(f"callbacks.{key_of(config, ACCUMULATION)}.micro_batch_size={case.layout.micro_batch}")
    if config.train.global_batch_size != case.global_batch:
        found.append(f"train.global_batch_size={case.global_batch}")
    if config.launch.world_size not in ("auto", case.layout.world):
        found.append(f"launch.world_size={case.layout.world}")
    return found
