"""One step of tiny_gpt under DDP, written by hand: what `torchrun --nproc-per-node 2` needs at least."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from disttrain.models.gpt import GPT


def main() -> None:
    """Join the group, build, take one step on half of a batch of 32 sequences, leave."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(vocab_size=256, num_layers=4, num_heads=4, hidden_size=128, max_seq_len=128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(256, (32 // dist.get_world_size(), 129))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}, threads {torch.get_num_threads()}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}")
    dist.barrier()  # who leaves while its peer still talks makes gloo abort there, now and then
    del model  # its reducer goes before the group that it uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
