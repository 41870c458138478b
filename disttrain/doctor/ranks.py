"""What the ranks of `doctor` run: the training itself for a few steps under `callbacks.breakdown`, then two that are counted."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from disttrain import build
from disttrain.callbacks.breakdown import Breakdown
from disttrain.config.schema import Config
from disttrain.data.dataset import Position
from disttrain.doctor.bench import seconds_of, wait_for
from disttrain.launch.place import Place
from disttrain.parallel import collectives
from disttrain.train.batch import train_positions
from disttrain.train.trainer import Trainer

KEY = "breakdown"
LEFT_OUT = ("wandb", "tensorboard", "checkpoint", "jsonl", "progress", "profile", "early_stopping")
"""Callbacks of ours that write, show or end something; a doctor's run leaves no trace, and is not evaluated."""
PRODUCT = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the matrix product that says what a device can do, by its kind."""
TINY_OPERATIONS = 200
"""Asked for in a row, within a moment in which nobody else gets the processor."""


def windowed(config: Config) -> Config:
    """The config with the window in it, as long as that needs, without what writes."""
    kept = {key: value for key, value in config.callbacks.items() if str(value["_target_"]).split(".")[:3][-1] not in LEFT_OUT}
    kept = {key: value for key, value in kept.items() if not str(value["_target_"]).startswith("disttrain.callbacks.breakdown.")}
    wanted = config.doctor
    window = {"_target_": "disttrain.callbacks.breakdown.Breakdown", "start": wanted.warmup, "steps": wanted.steps}
    run = config.train
    if run.steps is not None:
        run = replace(run, steps=max(run.steps, wanted.warmup + wanted.steps + 3))
    return replace(config, callbacks={**kept, KEY: window}, train=replace(run, eval_every=None), resume=None, init_from=None)


def measure(place: Place, config: Config) -> dict[str, Any]:
    """The window of all ranks, as JSON values: what `Breakdown` found, with what the devices can do at their best."""
    window: list[Breakdown] = []
    stop = place.stop_requested
    trainer = build.build_trainer(config, None, replace(place, stop_requested=lambda: stop() or _over(window)))
    trainer.evaluator = None
    found = trainer.callbacks[KEY]
    assert isinstance(found, Breakdown)
    window.append(found)
    before = device_rates(trainer)
    trainer.fit()
    assert found.found is not None
    after = device_rates(trainer)
    rates = {"product": max(before["product"], after["product"]), "operation": min(before["operation"], after["operation"])}
    rates |= operations(trainer)
    by_rank = collectives.gather_json(rates, trainer.mesh.axis("world"), trainer.device)
    for rate in by_rank:  # devices are alike, and what else a machine does makes them look slower
        rate |= {"product": max(one["product"] for one in by_rank), "operation": min(one["operation"] for one in by_rank)}
    flops = getattr(trainer.model, "flops", None)
    sample = float(flops()) if callable(flops) else 0.0
    return found.found | {"rates": by_rank, "flops": sample * trainer.feed.order.global_batch_size}


def _over(window: list[Breakdown]) -> str | None:
    return "the end of the window" if window and window[0].found is not None else None


def device_rates(trainer: Trainer) -> dict[str, float]:
    """`product`: flops a second of a large matrix product while all ranks make one; `operation`: seconds of the smallest operation."""
    device = trainer.device
    dtype = next(iter(trainer.parameters.values())).dtype
    size = PRODUCT[device.type]
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    collectives.barrier(trainer.mesh.axis("world"))
    seconds = min(seconds_of(lambda: torch.mm(a, b), device) for _ in range(8))
    x = torch.zeros(1, device=device)
    with torch.no_grad():
        tiny = min(seconds_of(lambda: [x.add_(1.0) for _ in range(TINY_OPERATIONS)], device) for _ in range(20)) / TINY_OPERATIONS
    return {"product": 2.0 * size**3 / seconds, "operation": tiny}


def operations(trainer: Trainer) -> dict[str, float]:
    """Of more steps: how many operations torch was asked for; on a GPU, how long kernels ran, and those alone that send."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if trainer.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    steps = trainer.feed.steps(train_positions(trainer.feed.order, 0, Position(), 2))
    first, second = next(steps), next(steps)
    for step in (first, second):
        trainer.strategy.count(step)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it says on stderr when it starts, and that there is no GPU
    with torch.profiler.profile(activities=kinds) as profiler:
        for step in (first, second):
            report = trainer.strategy.finish(trainer.strategy.forward_backward(step), step)
            trainer.update(report)
        wait_for(trainer.device)
    trainer.feed.close()
    events = profiler.events() or []
    asked = sum(event.name.startswith("aten::") for event in events)
    return {"operations": asked / 2.0, **_kernels(events)}


def _kernels(events: Any) -> dict[str, float]:
    """Seconds a step in which the GPU computed, and in which it did nothing but send."""
    spans = [
        ("nccl" in event.name.lower(), event.time_range.start, event.time_range.end) for event in events if event.device_type.name == "CUDA"
    ]
    if not spans:
        return {}
    computed = covered([(begin, end) for sends, begin, end in spans if not sends])
    either = covered([(begin, end) for _, begin, end in spans])
    return {"computed": computed / 2e6, "sent_alone": (either - computed) / 2e6}


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
