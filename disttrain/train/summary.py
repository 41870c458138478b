"""What a person sees before the first step and after the last: the arithmetic of the run, and how it went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from disttrain.config.schedules import bubble
from disttrain.config.world import DEGREES
from disttrain.parallel.blocks import class_name
from disttrain.parallel.layout import Cut
from disttrain.parallel.pipeline import Pipeline
from disttrain.parallel.shard import repeated_blocks
from disttrain.train.hooks import declared
from disttrain.train.progress import Result
from disttrain.train.trainer import Trainer

if TYPE_CHECKING:
    from rich.table import Table

MOMENTS = {"AdamW": 2, "Adam": 2, "SGD": 0}
MOST_OWN = 12
"""Most metrics of the user's own in the final table; a metric by class has many numbers."""

MEASURED_AS = {"memory/peak_bytes": "memory/peak_bytes_max"}
"""Predictions are of the fullest rank."""

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
    ("comm/bytes", "sent by a rank in a step"),
)


def start_table(trainer: Trainer) -> Table:
    """Parameters and bytes a rank, degrees, and the batch's arithmetic."""
    whole = sum(torch.Size(layout.shape).numel() for layout in trainer.layouts.values())
    local = sum(parameter.numel() for parameter in trainer.parameters.values())
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trainer.parameters.values())
    optimizer = trainer.update.optimizer
    moments = MOMENTS.get(type(optimizer).__name__, 0) + (1 if optimizer.defaults.get("momentum") else 0)
    part, order = trainer.feed.part, trainer.feed.order
    degrees = {name: trainer.mesh.axis(name).size for name in (*DEGREES, "ep")}
    size, state = size_in_words(num_bytes), size_in_words(moments * num_bytes / trainer.update.sharing)
    micro, ranks = count(part.num_micro, "micro-batch", "micro-batches"), count(part.axis.size, "data rank")
    arithmetic = f"{micro} x {part.micro_batch_size} x {ranks}"
    epoch = f"{count(order.length, 'sample')} = {count(order.steps_per_epoch, 'step')}"
    skips = "" if trainer.update.honours_skip else ": does not skip on the device, one host read a step"
    rows = {
        "model": f"{class_name(trainer.model)}, {whole:,} parameters",
        "a rank holds": f"{local:,} parameters: weights {size}, gradients {size}, moments {state}",
        "ranks": f"{trainer.mesh.size} on {trainer.device.type}"
        + "".join(f", {name} {degree}" for name, degree in degrees.items() if degree > 1),
        **_stages(trainer),
        "a step": f"{count(part.global_batch_size, 'sample')} = {arithmetic}",
        "training": f"{count(trainer.num_steps, 'step')}; an epoch is {epoch}",
        "optimizer": f"{type(optimizer).__name__}{skips}",
    }
    return _table(rows)


def _stages(trainer: Trainer) -> dict[str, str]:
    """Schedule, cuts and predicted bubble of a pipeline; nothing without one."""
    runner = trainer.strategy.runner
    if not isinstance(runner, Pipeline):
        return {}
    stages, size = runner.stages, runner.axis.size
    firsts = ", ".join(units[0].modules[0] for units in stages.units)
    share = bubble(runner.schedule, trainer.feed.part.num_micro, size, len(stages.units) // size)
    return {"pipeline": f"{runner.schedule}, ranks wait {share:.1%} of a step (equal stages); stages begin at {firsts}"}


def _computes_in(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU multiplies numbers of a half type; False where torch doesn't tell."""
    probe = "_is_avx512_bf16_supported" if dtype == torch.bfloat16 else "_is_amx_fp16_supported"
    return bool(getattr(torch.cpu, probe, lambda: False)())


def warnings_of(trainer: Trainer) -> list[str]:
    """What this layout does not compute as one device would, and is not refused."""
    found = []
    if trainer.mesh.axis("tp").size > 1 and not any(isinstance(at.placements.get("tp"), Cut) for at in trainer.layouts.values()):
        found.append("warning: the model has no tensor plan, so nothing is cut and every rank computes the same (strategy.plan)")
    half = declared(trainer.callbacks).precision
    if half is not None and trainer.device.type == "cpu" and not _computes_in(half.dtype):
        name = str(half.dtype).removeprefix("torch.")
        found.append(f"warning: this CPU has no instructions for {name} and is many times slower in it (callbacks.amp.precision=fp32)")
    if trainer.strategy.shares_rows and not repeated_blocks(trainer.model):
        found.append(f"{class_name(trainer.model)} states no repeated blocks (`parts`), so its weights are gathered all at once")
    if trainer.strategy.dtype == torch.bfloat16:
        found.append("warning: weights and moments in bf16 (train.dtype) lose small updates; callbacks.amp.precision=bf16 does not")
    if trainer.strategy.options.gather_dtype != "weights" and trainer.strategy.shares_rows:
        found.append("weights are rounded to bf16 before they are gathered (strategy.gather_dtype): norms and embeddings too")
    if trainer.mesh.axis("data").size > 1:
        found += _batch_statistics(trainer)
    return found


def _batch_statistics(trainer: Trainer) -> list[str]:
    """Layers whose batch is each data rank's own."""
    normalised = {name for name, module in trainer.model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    shared = normalised - set(trainer.strategy.unshared) if trainer.strategy.options.sync_batch_norm else set()
    if not (own := sorted(normalised - shared)):
        return []
    names = ", ".join(own[:4]) + (", ..." if len(own) > 4 else "")
    why = "a BatchNorm of your own class" if trainer.strategy.options.sync_batch_norm else "strategy.sync_batch_norm=false"
    what = f"warning: batch statistics of {names} are each data rank's own ({why})"
    return [f"{what}: not the training of one device, as verify will say; evaluation and checkpoints have rank 0's"]


def end_table(trainer: Trainer, result: Result, predicted: Mapping[str, float] | None = None) -> Table:
    """How the run went, by its last metrics, with what was planned beside them.

    On the CPU no memory is compared: the process's own size is measured there, and tensors are planned.
    """
    planned = {MEASURED_AS.get(key, key): value for key, value in (predicted or {}).items()}
    said = [value for key, value in planned.items() if key.startswith("comm/")]
    planned |= {"comm/bytes": sum(said)} if said else {}
    if trainer.device.type == "cpu":
        planned.pop(MEASURED_AS["memory/peak_bytes"], None)
    rows = {"run": f"{result.status} after step {result.step}" + (f": {result.reason}" if result.reason else "")}
    for key, words in SHOWN:
        if key in result.metrics:
            beside = f" (planned {_number(key, planned[key])})" if key in planned else ""
            rows[words] = _number(key, result.metrics[key]) + beside
    shown = {key for key, _ in SHOWN}
    own = [key for key in result.metrics if key.startswith("val/") and key not in shown]
    rows |= {f"validation {key.removeprefix('val/')}": _number(key, result.metrics[key]) for key in own[:MOST_OWN]}
    return _table(rows)


def measured(predicted: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """What the run measured of what was predicted, by the same names: memory of the fullest rank, traffic in the mean over ranks."""
    names = {key: MEASURED_AS.get(key, key) for key in predicted}
    return {key: metrics[name] for key, name in names.items() if name in metrics}


def count(number: int, what: str, many: str = "") -> str:
    """'1 step', '2 steps'."""
    return f"{number:,} {what if number == 1 else many or what + 's'}"


def _table(rows: Mapping[str, str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False)
    for key, value in rows.items():
        table.add_row(key, value)
    return table


def _number(key: str, value: float) -> str:
    if key.startswith(("memory/", "comm/")):
        return size_in_words(value)
    if key.endswith(("per_second", "skipped_updates")):
        return f"{value:,.0f}"
    return f"{value:.2%}" if key.endswith(("accuracy", "mfu")) else f"{value:.4g}"


def size_in_words(number: float) -> str:
    """Bytes, with the unit that makes them short."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.1f} {unit}" if unit != "B" else f"{number:.0f} B"
        number /= 1024
    return f"{number:.2f} GiB"
