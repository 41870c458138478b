"""What a run shows: lines and tables as it goes, and at its end what its language model writes."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from disttrain.checkpoint.files import steps_in
from disttrain.config.schema import Config, GenerateConfig
from disttrain.data.adapt import numbered
from disttrain.errors import DataError
from disttrain.models.sampling import pieces, sample
from disttrain.places import shown
from disttrain.record import RunFolder
from disttrain.train.trainer import Trainer

SAMPLE_LENGTH, SAMPLE_FROM = 160, 50
"""Tokens shown at the end of a run, and the steps from which on they are more than noise."""

PROPOSED, BEGINNING = "class ", 8
"""The prompt that is proposed at the end of a run, and tokens of the training text that stand in where it can't be told to the model."""

DEFAULT_CONTEXT = 128
"""Tokens shown to a model that does not say how many it can see."""


def say(trainer: Trainer, what: Any) -> None:
    """Show a line or a table once."""
    if trainer.is_lead:
        from rich.console import Console

        with contextlib.suppress(BrokenPipeError, SystemExit):  # who read along has gone, and the run goes on
            Console(highlight=False, markup=False).print(what, soft_wrap=isinstance(what, str))


def write_text(trainer: Trainer, wanted: GenerateConfig, seed: int) -> Iterator[str]:
    """The prompt and what the model makes of it, piece by piece; the same on every rank of a tensor group, all of which must call."""
    prompt_ids = trainer.data.encode(wanted.prompt)
    drawn = sample(
        trainer.strategy.outputs,
        prompt_ids,
        wanted.length,
        wanted.temperature,
        wanted.top_k,
        torch.Generator().manual_seed(seed),
        int(getattr(trainer.model, "max_seq_len", DEFAULT_CONTEXT)),
        trainer.device,
        trainer.data.vocab_size,
    )
    yield from pieces(trainer.data.decode, prompt_ids, drawn)


def show_sample(trainer: Trainer, config: Config, folder: RunFolder) -> None:
    """What a language model now writes, and what to do next. Every rank of the first replica takes part."""
    writes = trainer.data.kind == "tokens" and trainer.data.bytes_per_token is not None
    if writes and trainer.progress.step < SAMPLE_FROM:
        say(trainer, f"no sample of what it writes: before step {SAMPLE_FROM} that is noise")
    elif writes and trainer.mesh.axis("dp_replicate").index == 0:
        trainer.model.eval()
        wanted = replace(config.generate, prompt=_told(trainer, config.generate.prompt), length=SAMPLE_LENGTH)
        text = "".join(write_text(trainer, wanted, config.seed))
        say(trainer, f"what it writes now\n\n{text}\n")
    where = shown(folder.path)
    say(trainer, f"run folder: {where}")
    if steps_in(folder.checkpoints) and (writes or trainer.evaluator is not None):
        verb = f"evaluate {shlex.quote(where)}"
        if writes:
            verb = f"generate {shlex.quote(where)} prompt={shlex.quote(_told(trainer, PROPOSED))}"
        say(trainer, f"try next:   python -m disttrain {verb}")


def _told(trainer: Trainer, prompt: str) -> str:
    """`prompt`; where the vocabulary lacks its characters, or it has none, how the training text begins."""
    try:
        if trainer.data.encode(prompt):
            return prompt
    except DataError:
        pass
    first = torch.tensor([0])
    inputs, _ = numbered(trainer.data.train()).batch(first, first)
    text = trainer.data.decode(inputs[0, :BEGINNING].tolist())
    return next(filter(None, text.splitlines()), text)
