"""What a person sees before the first step and after the last: the arithmetic of the run, and how it went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from disttrain.parallel.layout import Cut
from disttrain.train.progress import Result
from disttrain.train.trainer import Trainer

if TYPE_CHECKING:
    from rich.table import Table

MOMENTS = {"AdamW": 2, "Adam": 2, "SGD": 0}
SHOWN = (
    ("train/loss", "training loss, last step"),
    ("train/epoch_loss", "training loss, last epoch"),
    ("val/loss", "validation loss"),
    ("val/perplexity", "validation perplexity"),
    ("val/bits_per_byte", "validation bits per byte"),
    ("val/accuracy", "validation accuracy"),
    ("train/grad_norm", "gradient norm"),
    ("train/skipped_updates", "updates skipped"),
    ("perf/step_seconds", "seconds a step"),
    ("perf/tokens_per_second", "tokens a second"),
    ("perf/samples_per_second", "samples a second"),
    ("perf/mfu", "model FLOPs utilisation"),
    ("memory/peak_bytes_max", "peak memory of a rank"),
)


def start_table(trainer: Trainer) -> Table:
    """Parameters and bytes a rank, degrees, and the batch's arithmetic."""
    whole = sum(torch.Size(layout.shape).numel() for layout in trainer.layouts.values())
    local = sum(parameter.numel() for parameter in trainer.parameters.values())
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trainer.parameters.values())
    optimizer = trainer.update.optimizer
    moments = MOMENTS.get(type(optimizer).__name__, 0) + (1 if optimizer.defaults.get("momentum") else 0)
    part, order = trainer.feed.part, trainer.feed.order
    degrees = {name: size for name, size in trainer.mesh.degrees.items() if size > 1}
    size, state = _bytes(num_bytes), _bytes(moments * num_bytes)
    arithmetic = f"{part.num_micro} micro-batches x {part.micro_batch_size} x {part.axis.size} data ranks"
    skips = "" if trainer.update.honours_skip else ": does not skip on the device, one host read a step"
    rows = {
        "model": f"{type(trainer.model).__name__}, {whole:,} parameters",
        "a rank holds": f"{local:,} parameters: weights {size}, gradients {size}, moments {state}",
        "ranks": f"{trainer.mesh.size} on {trainer.device.type}" + "".join(f", {name} {size}" for name, size in degrees.items()),
        "a step": f"{part.global_batch_size} samples = {arithmetic}",
        "training": f"{trainer.num_steps} steps; an epoch is {order.length:,} samples = {order.steps_per_epoch:,} steps",
        "optimizer": f"{type(optimizer).__name__}{skips}",
    }
    return _table(rows)


def warnings_of(trainer: Trainer) -> list[str]:
    """What this layout does not compute as one device would, and is not refused."""
    found = []
    if trainer.mesh.axis("tp").size > 1 and not any(isinstance(p, Cut) for at in trainer.layouts.values() for p in at.placements.values()):
        found.append("warning: the model has no tensor plan, so nothing is cut and every rank computes the same (strategy.plan)")
    normalised = [name for name, module in trainer.model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if normalised and trainer.mesh.axis("data").size > 1:
        names = ", ".join(normalised[:4])
        what = f"warning: batch statistics ({names}) are each data rank's own, which is not the training of one device"
        found.append(f"{what}; evaluation and checkpoints have rank 0's")
    return found


def end_table(trainer: Trainer, result: Result) -> Table:
    """How the run went, by its last metrics."""
    rows = {"run": f"{result.status} after step {result.step}" + (f": {result.reason}" if result.reason else "")}
    for key, words in SHOWN:
        if key in result.metrics:
            rows[words] = _number(key, result.metrics[key])
    return _table(rows)


def _table(rows: Mapping[str, str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False)
    for key, value in rows.items():
        table.add_row(key, value)
    return table


def _number(key: str, value: float) -> str:
    if key.startswith("memory/"):
        return _bytes(value)
    if key.endswith(("per_second", "skipped_updates")):
        return f"{value:,.0f}"
    return f"{value:.2%}" if key.endswith(("accuracy", "mfu")) else f"{value:.4g}"


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.1f} {unit}" if unit != "B" else f"{number:.0f} B"
        number /= 1024
    return f"{number:.2f} GiB"
