"""`generate RUN prompt='def '`: text from a checkpoint, which is how a person sees that a model learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from disttrain import build
from disttrain.models.sampling import sample
from disttrain.reading.run import open_run, restored


def main(run: Path, words: Sequence[str]) -> int:
    """Print the prompt and what the model makes of it."""
    config, checkpoint = open_run(run, words, "generate")
    build.prepare_data(config)
    module = build.data_module(config)
    prompt = module.encode(config.generate.prompt)
    strategy = restored(config, checkpoint)
    wanted = config.generate
    generator = torch.Generator().manual_seed(config.seed)
    length = build.longest_input(config, module)
    ids = sample(strategy.outputs, prompt, wanted.length, wanted.temperature, wanted.top_k, generator, length, strategy.device)
    print(module.decode(ids))
    return 0
