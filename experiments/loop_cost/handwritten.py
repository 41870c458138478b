"""The loops that disttrain is measured against, as one writes them by hand."""

from __future__ import annotations

import time
from itertools import count

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def one_process(model: nn.Module, inputs: Tensor, targets: Tensor, batch_size: int, warmup: int, steps: int) -> float:
    """Seconds a step of the plain loop: DataLoader, cross-entropy, clip, fused AdamW; nothing is logged."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=batch_size, shuffle=True, drop_last=True)
    done = 0
    for _ in count():
        for x, y in loader:
            if done == warmup:
                start = time.perf_counter()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done += 1
            if done == warmup + steps:
                return (time.perf_counter() - start) / steps
    raise AssertionError("unreachable")


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, inputs: Tensor, targets: Tensor, batch_size: int, warmup: int, steps: int) -> float:
    """Seconds a step of the same loop on a model cut by `parallelize_module`; batches are consecutive rows."""
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    num_batches = len(inputs) // batch_size
    for step in range(warmup + steps):
        if step == warmup:
            start = time.perf_counter()
        rows = slice(step % num_batches * batch_size, (step % num_batches + 1) * batch_size)
        loss = F.mse_loss(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return (time.perf_counter() - start) / steps
