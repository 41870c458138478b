"""A dry run of every kind of rank: which ranks, how many micro-batches, on how many of this machine's cores."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from disttrain.config.callbacks import key_of
from disttrain.config.check import ACCUMULATION
from disttrain.config.local_sgd import AMP
from disttrain.config.schedules import takes
from disttrain.config.schema import Config
from disttrain.errors import ConfigError
from disttrain.launch.local import Supervisor, choose_start_method, import_warm
from disttrain.launch.place import Place
from disttrain.plan import pipeline
from disttrain.plan.case import Case
from disttrain.plan.settle import laid_out

if TYPE_CHECKING:
    from disttrain.plan.dry import Counts

WARM = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.testing._internal.distributed.fake_pg")
ROUNDS = {"interleaved_1f1b": 2, "interleaved_zero_bubble": 2, "zbv": 2, "dualpipev": 2}
"""Micro-batches a pipeline rank with which as many are in flight at once as ever are."""


@dataclass(frozen=True)
class Rehearsal:
    """What was counted."""

    counts: dict[int, Counts]
    """By pipeline rank: of rank 0 of each, but for those between that are like another (same layers, fewer micro-batches in flight)."""
    seconds: float
    """How long it took."""
    processor_seconds: float
    """Of all processes."""
    host_bytes: int
    """Largest process that took part."""
    micro_batches: tuple[int, ...]
    """How many were run; two numbers: a step of more was reckoned from their difference."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "seconds": self.seconds,
            "processor_seconds": self.processor_seconds,
            "host_bytes": self.host_bytes,
            "micro_batches_run": list(self.micro_batches),
            "stages": {str(stage): asdict(one) for stage, one in self.counts.items()},
        }


def rehearse(config: Config, case: Case) -> Rehearsal:
    """Dry runs of `config` laid out as `case`. ConfigError for what can't be run without values."""
    if case.shape.experts:
        raise ConfigError("a dry run has no values, and a router of experts sends each token where its values say", "plan.dry=false")
    if config.strategy.deepspeed is not None:
        raise ConfigError("DeepSpeed's engine allocates and talks by itself, out of sight of a dry run", "plan.dry=false, or strategy=fsdp")
    started = time.monotonic()
    config, layout = prepared(config, case), case.layout
    numbers = tuple(micro_batches_run(layout.schedule if layout.pp > 1 else "", layout.pp, case.micro_batches))
    tasks = [(stage * (layout.world // layout.pp), number) for stage in kinds(case) for number in numbers]
    method = choose_start_method("auto")
    if method == "fork":
        import_warm(WARM)
    workers = max(1, min(len(tasks), os.cpu_count() or 1))
    outcome = Supervisor(workers, method, ends_at_once=True).run(partial(_share, config=config, tasks=tasks, workers=workers))
    outcome.raise_failure()
    done = [one for results, *_ in outcome.results for one in results]
    counts = {}
    for stage in kinds(case):
        own = sorted((one for one in done if one.rank == stage * (layout.world // layout.pp)), key=lambda one: one.micro_batches)
        counts[stage] = own[0] if len(own) == 1 else further(own[0], own[1], case.micro_batches)
    processor, sizes = sum(one[1] for one in outcome.results), [one[2] for one in outcome.results]
    return Rehearsal(counts, time.monotonic() - started, processor, max(sizes), numbers)


def _share(place: Place, config: Config, tasks: list[tuple[int, int]], workers: int) -> tuple[list[Counts], float, int]:
    """One worker's tasks, the processor's time and the most memory that they took."""
    import resource

    from disttrain.plan import dry

    entering = dry.leaving(config) if config.strategy.pp > 1 else None
    found = [dry.run(config, rank, number, entering) for rank, number in tasks[place.rank :: workers]]
    return found, time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def kinds(case: Case) -> list[int]:
    """Pipeline ranks that differ: the first, the last, and of those between the first with each number of layers."""
    layers = pipeline.layers_of(case)
    between = {count: stage for stage, count in reversed(list(enumerate(layers))) if 0 < stage < len(layers) - 1}
    return sorted({0, len(layers) - 1, *between.values()})


def micro_batches_run(schedule: str, stages: int, wanted: int) -> list[int]:
    """The numbers of micro-batches to run: `wanted`, or two smaller ones that it lies on a line with. `schedule`: none, ""."""
    if schedule == "" or stages == 1:
        least, more = 2, 1
    else:
        in_rounds = schedule.startswith("interleaved")
        least = ROUNDS.get(schedule, 1) * stages + (not in_rounds)  # one more: the first gradients are there too, then
        more = stages if in_rounds else 1
    if wanted <= least + more:
        return [wanted]
    assert all(takes(schedule, number, stages) for number in (least, least + more))
    return [least, least + more]


def further(few: Counts, more: Counts, number: int) -> Counts:
    """The counts of `number` micro-batches, each of which adds what one of `more` adds to those of `few`."""
    steps = (number - more.micro_batches) / (more.micro_batches - few.micro_batches)

    def at(below: float, above: float) -> float:
        return above + (above - below) * steps

    def line(below: Mapping[str, int], above: Mapping[str, int]) -> dict[str, int]:
        return {name: round(at(below.get(name, 0), value)) for name, value in above.items()}

    traffic = {
        axis: {kind: [at(x, y) for x, y in zip(few.traffic[axis][kind], entry, strict=True)] for kind, entry in by_kind.items()}
        for axis, by_kind in more.traffic.items()
    }
    return replace(
        more,
        micro_batches=number,
        traffic=traffic,
        peak=line(few.peak, more.peak),
        rest=line(few.rest, more.rest),
        allocations=round(at(few.allocations, more.allocations)),
    )


def prepared(config: Config, case: Case) -> Config:
    """The config with the case's layout, batch and precision, on processors."""
    config = laid_out(config, case)
    callbacks = {key: value for key, value in config.callbacks.items() if value.get("_target_") != AMP}
    if key_of(config, ACCUMULATION) is None:
        callbacks["grad_accumulation"] = {"_target_": ACCUMULATION, "micro_batch_size": case.layout.micro_batch}
    if case.software.precision == "bf16":
        asked = next((value for value in config.callbacks.values() if value.get("_target_") == AMP), {"_target_": AMP})
        callbacks["amp"] = asked | {"precision": "fp16" if asked.get("precision") == "fp16" else "bf16"}
    return replace(config, callbacks=callbacks, launch=replace(config.launch, device="cpu"))
