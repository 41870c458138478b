"""The smallest runs, as they are typed."""

from __future__ import annotations

TINY = [
    "model.num_layers=1", "model.num_heads=2", "model.hidden_size=16", "model.vocab_size=32", "model.max_seq_len=8", "dataset=synthetic",
    "dataset.kind=tokens", "dataset.context=8", "dataset.vocab_size=32", "dataset.num_samples=64", "dataset.num_validation=8",
    "train.steps=4", "train.global_batch_size=8", "train.log_every=1", "train.eval_every=2", "launch.device=cpu",
    "callbacks=[minimal,wandb]", "callbacks.wandb.mode=offline", "callbacks.grad_accumulation.micro_batch_size=2",
]  # fmt: skip
"""A language model on made-up tokens, with W&B."""

BARE = [*TINY[:-3], "callbacks=none", "train.steps=2"]
"""The same for two steps, without a callback."""

SMALL = [
    "model=transformer_block", "model.hidden_size=16", "model.num_heads=2", "model.max_seq_len=4", "dataset=synthetic",
    "dataset.shape=[4,16]", "dataset.num_samples=64", "dataset.num_validation=8", "callbacks=none", "train.steps=2", "launch.device=cpu",
]  # fmt: skip
"""The smallest model, which is no language model, on two ranks."""
