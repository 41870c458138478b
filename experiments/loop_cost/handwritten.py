"""The loops that disttrain is measured against, as one writes them by hand. `measure.py` starts this file."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from disttrain.data.seeds import derive
from experiments.loop_cost.mlp import MLP, RandomRows
from experiments.loop_cost.stopwatch import Clock

SEED = 0
LOG_EVERY = 20


class EpochSampler(RandomSampler):
    """torch's own shuffle, seeded anew for every epoch as disttrain's order is."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        """The epoch's rows."""
        self.generator = torch.Generator().manual_seed(derive(SEED, self.epoch))
        self.epoch += 1
        return super().__iter__()


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with the hyperparameters of `conf/optimizer/adamw.yaml`: matrices decay, biases do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)


def one_process(width: int, hidden: int, outputs: int, batch_size: int, warmup: int, steps: int) -> str:
    """What a step takes of the plain loop: DataLoader, cross-entropy, clip, fused AdamW; the loss is read now and then."""
    torch.manual_seed(SEED)
    model = MLP(width, hidden, outputs)
    optimizer = optimizer_for(model)
    rows = TensorDataset(*RandomRows(width, outputs).tensors())
    loader = DataLoader(rows, batch_size=batch_size, sampler=EpochSampler(rows), drop_last=True)
    clock, done, losses = Clock(), 0, []
    while done < warmup + steps:
        for x, y in loader:
            if done == warmup:
                clock = Clock()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done += 1
            if done % LOG_EVERY == 0:
                losses.append(loss.item())
            if done == warmup + steps:
                break
    return f"{clock.per_step(steps)} {losses[0]}"


def tensor_parallel(width: int, hidden: int, outputs: int, batch_size: int, warmup: int, steps: int) -> str:
    """What a step takes of the same loop on a block cut by `parallelize_module`; batches are rows already in memory."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(SEED)
    model = parallelize_module(MLP(width, hidden, outputs, classes=False), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = optimizer_for(model)
    inputs, targets = RandomRows(width, outputs, classes=False).tensors()
    num_batches = len(inputs) // batch_size
    clock, losses = Clock(), []
    for step in range(warmup + steps):
        if step == warmup:
            clock = Clock()
        rows = slice(step % num_batches * batch_size, (step % num_batches + 1) * batch_size)
        loss = F.mse_loss(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % LOG_EVERY == 0:
            losses.append(loss.item())
    return f"{clock.per_step(steps)} {losses[0]}"


def two_ranks(sizes: list[int], file: Path) -> None:
    """Fork a second rank, meet over a file on loopback, one thread each; rank 0 writes the time."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0 if child else 1, world_size=2)
        taken = tensor_parallel(*sizes)
        dist.barrier()
        dist.destroy_process_group()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    file.write_text(taken)


if __name__ == "__main__":
    kind, path, *numbers = sys.argv[1:]
    arguments = [int(number) for number in numbers]
    if kind == "one_process":
        Path(path).write_text(one_process(*arguments))
    else:
        two_ranks(arguments, Path(path))
