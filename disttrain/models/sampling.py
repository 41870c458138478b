"""Text from a language model, one token after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from disttrain.errors import ConfigError

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What bytes decode to that are no character, or not yet."""


@torch.no_grad()
def sample(
    model: nn.Module | Callable[[Tensor], Tensor],
    prompt_ids: Sequence[int],
    length: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
    max_seq_len: int,
    device: torch.device | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """The `length` tokens after `prompt_ids`, as each is drawn from `model` (numbers [1, max_seq_len] to logits [1, max_seq_len, v]).

    Every call of the model has that one shape: what is not there yet is padding to the right, which a causal model doesn't
    see, and of a longer text it sees the end. `temperature` 0 takes the likeliest token; `top_k` draws from the k likeliest.
    Tokens from `vocab_size` on stand for no text (a model may have more, to come out even) and are never drawn.
    Draws come from `generator` (on the CPU) alone, so all ranks that see the same logits and seed draw the same.
    """
    if not prompt_ids:
        raise ConfigError("generate.prompt is empty, and a model goes on from at least one token", "generate.prompt='def '")
    was_training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module):
        model.eval()
    ids = list(prompt_ids)
    try:
        for _ in range(length):
            window = ids[-max_seq_len:]
            padded = torch.zeros(1, max_seq_len, dtype=torch.int64)
            padded[0, : len(window)] = torch.tensor(window)
            logits = model(padded.to(device))[0, len(window) - 1]
            ids.append(draw(logits[:vocab_size].float().cpu(), temperature, top_k, generator))
            yield ids[-1]
    finally:
        if isinstance(model, nn.Module):
            model.train(was_training)


def pieces(decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int], drawn: Iterable[int]) -> Iterator[str]:
    """The text of the prompt, then what each token adds to it; a character waits for its last byte."""
    ids, text = list(prompt_ids), decode(prompt_ids)
    yield text
    for token in drawn:
        ids.append(token)
        longer = decode(ids)
        if longer.startswith(text) and not longer.endswith(UNFINISHED):
            yield longer[len(text) :]
            text = longer
    yield decode(ids).removeprefix(text)


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token from logits [v]: softmax(logits / temperature) over the `top_k` largest."""
    if temperature == 0:
        return int(logits.argmax())
    candidates, numbers = logits.topk(min(top_k or logits.numel(), logits.numel()))
    chosen = torch.multinomial((candidates / temperature).softmax(-1), 1, generator=generator)
    return int(numbers[chosen])
