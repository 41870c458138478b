"""Law 8: between two log points nothing on the device is read on the host but the verdict, one step late."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from tests.train.runs import trainer_of

READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "numpy", "cpu", "__format__", "__repr__")
BATCHES = {"batch.py", "seeds.py", "synthetic.py", "dataset.py", "workers.py"}
"""Files that build a batch on the host, from tensors that were never anywhere else."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Reads of tensors on the host, by file and kind, of what torch itself does not call."""
    reads: Counter[str] = Counter()

    def spy(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            caller = Path(sys._getframe(1).f_code.co_filename)
            if caller.name not in BATCHES and "torch" not in caller.parts:
                reads[f"{caller.name} {name}"] += 1
            return original(self, *arguments, **keywords)

        return patch.object(torch.Tensor, name, read)

    patches = [spy(name) for name in READS]
    for one in patches:
        one.start()
    try:
        yield reads
    finally:
        for one in patches:
            one.stop()


def reads_of_a_run(place: Place, steps: int, callbacks: dict[str, Any], **config: Any) -> dict[str, int]:
    trainer = trainer_of(place, callbacks, steps=steps, log_every=50, clip_norm=1.0, **config)
    trainer._on["on_train_step_end"].clear()  # the notes of the tests themselves read
    trainer._on["on_train_epoch_end"].clear()
    trainer.evaluator = None
    logging.getLogger().setLevel(logging.INFO)
    with counted() as reads:
        trainer.fit()
    return dict(reads)


AMP = {"amp": {"_target_": "disttrain.callbacks.amp.AMP", "precision": "fp16"}}


def test_one_late_verdict_a_step_and_a_few_reads_a_log_point() -> None:
    """M19, J01, J02: clipping and fp16 on; one epoch is longer than the run, so none ends."""
    data = {"_target_": "disttrain.data.synthetic.Synthetic", "kind": "tokens", "context": 16, "vocab_size": 32, "num_samples": 2000}
    for callbacks in ({}, AMP):
        (reads,) = run_world(lambda place, c=callbacks: reads_of_a_run(place, 100, c, dataset=data), 1)
        verdicts = reads.pop("progress.py tolist")
        assert verdicts <= 100
        assert sum(reads.values()) <= 3, reads  # log points are the steps 1, 50 and 100


def test_the_spy_sees_every_kind_of_read() -> None:
    x = torch.ones(())
    with counted() as reads:
        x.item(), x.tolist(), float(x), int(x), bool(x), x.numpy(), x.cpu(), f"{x:.1f}", [1, 2][x.long()]
    assert {key.split()[1] for key in reads} >= {"item", "tolist", "__float__", "__int__", "__bool__", "numpy", "cpu", "__format__"}
