"""The experiment of a finished run again, as one page of plain PyTorch in one process: are the two losses the same?

    python experiments/reference_loop/train.py outputs/<date>/<run>

Reads the run's resolved config and takes its hyperparameters, its start and its order of samples, which are the
experiment. Everything else is written out here: the loop, the loss, clipping, weight-decay groups, AdamW, the
schedule, evaluation. Prints both validation losses and how far they lie apart, and exits 1 past 1%.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from disttrain.data.dataset import Order, Position, sample_seeds
from disttrain.parallel.layout import Layout
from disttrain.parallel.materialise import materialise


def make(component: dict[str, Any]) -> Any:
    """The object that a config's `_target_` and arguments describe."""
    module, _, name = component["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**{key: value for key, value in component.items() if key != "_target_"})


def start(config: dict[str, Any]) -> nn.Module:
    """The model with the start that the seed fixes."""
    with torch.device("meta"):
        model: nn.Module = make(config["model"])
    layouts = {name: Layout(tuple(parameter.shape)) for name, parameter in model.named_parameters()}
    materialise(model, layouts, {}, config["seed"], torch.device("cpu"), torch.float32)
    return model


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy a token."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: nn.Module, split: Any, batch_size: int) -> float:
    """Mean loss a token over the whole split, each sample once."""
    model.eval()
    total, tokens = 0.0, 0
    for rows in torch.arange(len(split)).split(batch_size):
        inputs, targets = split.batch(rows, sample_seeds(0, 0, rows))
        total += loss_of(model, inputs, targets).item() * targets.numel()
        tokens += targets.numel()
    return total / tokens


def rate(config: dict[str, Any], update: int, num_steps: int) -> float:
    """Learning rate of an update: linear warm-up (a twentieth of the run unless told), then half a cosine down to `min_factor` of it."""
    base, schedule = config["optimizer"]["lr"], config["scheduler"]
    warmup = num_steps // 20 if schedule["warmup_steps"] is None else schedule["warmup_steps"]
    if update < warmup:
        return float(base * (update + 1) / warmup)
    if schedule["_target_"].endswith("Constant"):
        return float(base)
    done = (update - warmup) / max(1, num_steps - warmup)
    low = schedule.get("min_factor", 0.1)
    return float(base * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))))


def train(config: dict[str, Any]) -> tuple[nn.Module, float]:
    """All steps of the run; the model and the seconds they took."""
    model, data, knobs = start(config), make(config["dataset"]).train(), config["train"]
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed = [p for p in model.parameters() if p.dim() >= 2 and id(p) not in embeddings]
    kept = [p for p in model.parameters() if p.dim() < 2 or id(p) in embeddings]
    groups = [{"params": decayed, "weight_decay": config["optimizer"]["weight_decay"]}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, betas=tuple(config["optimizer"].get("betas", (0.9, 0.999))), eps=config["optimizer"].get("eps", 1e-8)
    )
    order = Order(len(data), knobs["global_batch_size"], config["seed"])
    num_steps = knobs["steps"] or knobs["epochs"] * order.steps_per_epoch
    began = time.perf_counter()
    model.train()
    for step in range(num_steps):
        epoch, within = divmod(step, order.steps_per_epoch)
        rows = order.global_batch(Position(epoch, within))
        rows = rows[rows >= 0]
        loss = loss_of(model, *data.batch(rows, sample_seeds(config["seed"], epoch, rows)))
        optimizer.zero_grad()
        loss.backward()
        if knobs["clip_norm"] is not None:
            nn.utils.clip_grad_norm_(model.parameters(), knobs["clip_norm"])
        for group in optimizer.param_groups:
            group["lr"] = rate(config, step, num_steps)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    return model, time.perf_counter() - began


def main() -> None:
    """Train by hand what the run trained, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    run = parser.parse_args().run
    config = yaml.safe_load((run / "config.yaml").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    theirs = [row["val/loss"] for row in rows if "val/loss" in row][-1]
    model, seconds = train(config)
    ours = validate(model, make(config["dataset"]).validation(), config["train"]["global_batch_size"])
    apart = abs(theirs - ours) / ours
    print(f"validation loss: by hand {ours:.6f} ({seconds:.0f} s of steps), the run {theirs:.6f}; {apart:.2e} apart")
    raise SystemExit(apart > 0.01)


if __name__ == "__main__":
    main()
