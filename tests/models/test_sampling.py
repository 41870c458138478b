"""Sampling: one shape, one generator, and the right row of the logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from disttrain.errors import ConfigError
from disttrain.models.gpt import GPT
from disttrain.models.sampling import draw, pieces, sample


class Successor(nn.Module):
    """Says that the next token is one more than the last; notes the shapes it sees."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def forward(self, tokens):
        self.shapes.add(tuple(tokens.shape))
        return nn.functional.one_hot((tokens + 1) % 50, 50).float() * 100


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_goes_on_from_the_last_token_past_the_context_in_one_shape():
    model = Successor()
    ids = list(sample(model, [3, 4], 20, 1.0, None, generator(), max_seq_len=8))
    assert ids == list(range(5, 25))
    assert model.shapes == {(1, 8)}


def test_tokens_that_the_data_has_no_text_for_are_never_drawn():
    ids = list(sample(Successor(), [3], 20, 0.0, None, generator(), max_seq_len=8, vocab_size=6))
    assert ids[:2] == [4, 5]
    assert max(ids) == 5
    assert max(sample(Successor(), [3], 50, 9.0, None, generator(), max_seq_len=8, vocab_size=6)) < 6


def test_padding_is_not_seen():
    model = GPT(num_layers=1, hidden_size=16, num_heads=2, vocab_size=20, max_seq_len=12).double().eval()
    ids = list(sample(model, [1, 2, 3], 6, 0.0, None, generator(), max_seq_len=12))
    plain = [1, 2, 3]
    for _ in range(6):  # no padding, no fixed shape
        plain.append(int(model(torch.tensor([plain]))[0, -1].argmax()))
    assert [1, 2, 3, *ids] == plain


def test_same_seed_same_text_and_mode_is_put_back():
    model = GPT(num_layers=1, hidden_size=16, num_heads=2, vocab_size=20, max_seq_len=12, dropout=0.5).train()
    texts = [list(sample(model, [1], 30, 1.0, 10, generator(seed), 12)) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    assert model.training
    next(left := sample(model, [1], 30, 1.0, 10, generator(), 12))
    left.close()
    assert model.training


def test_text_comes_piece_by_piece_and_no_character_in_parts():
    drawn = "é€x".encode() + b"\xff!" + "é".encode()[:1]
    read = []
    for piece in pieces(lambda ids: bytes(ids).decode(errors="replace"), list(b"ab"), (read.append(byte) or byte for byte in drawn)):
        read.append(piece)
    assert [one for one in read if isinstance(one, str)] == ["ab", "é", "€", "x", "\N{REPLACEMENT CHARACTER}!", "\N{REPLACEMENT CHARACTER}"]
    assert read.index("é") == 3  # behind its second byte, before the third is asked for


def test_draws_follow_softmax_over_the_top_k():
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    rng = generator()
    drawn = torch.tensor([draw(logits, 0.5, 2, rng) for _ in range(4000)])
    wanted = torch.softmax(torch.tensor([2.0, 1.0]) / 0.5, 0)
    assert set(drawn.tolist()) == {1, 2}
    assert float((drawn == 1).float().mean()) == pytest.approx(float(wanted[0]), abs=0.02)
    assert draw(logits, 0.0, None, rng) == 1


def test_an_empty_prompt_is_the_users_mistake():
    with pytest.raises(ConfigError, match=r"generate\.prompt"):
        list(sample(Successor(), [], 1, 1.0, None, generator(), 8))
