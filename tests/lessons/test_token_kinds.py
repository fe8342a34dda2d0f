"""Kinds of tokens, and what they tell about a token's expert."""

import pytest
import torch
from torch.nn import functional as F

from lessons import token_kinds
from nblib import text
from nblib.methods import moe

E = 8


def _routed(logits, k):
    return moe.Routed("a", logits, logits.topk(k, dim=1).indices)


def test_the_map_by_kind():
    kind_of = torch.tensor([0] * 100 + [3] * 156)
    tokens = torch.randint(256, (10, 50))
    logits = F.one_hot((tokens.flatten() >= 100).long() * 3, E).float() * 10
    table = token_kinds.routing_map(_routed(logits, 1), tokens, kind_of)
    assert table[0, 0] == table[3, 3] == 1 and table[1].isnan().all()
    counts = torch.bincount(kind_of[tokens.flatten()], minlength=len(token_kinds.KINDS)).float()
    assert token_kinds.told_by_kind(table, counts) == pytest.approx(1)
    same = torch.full((len(token_kinds.KINDS), E), 1 / E)
    assert token_kinds.told_by_kind(same, counts) == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match="given are 10"):
        token_kinds.routing_map(_routed(logits, 1), tokens[0, :10], kind_of)


def test_kinds_of_a_byte_level_tokenizer():
    tokenizer = text.train_tokenizer(
        ["the 7 things the king is singing in the ring.\n"] * 20, vocab_size=300
    )
    kind_of = token_kinds.kinds(tokenizer)
    assert len(kind_of) == len(tokenizer)

    def kind(piece):
        (token,) = tokenizer.encode(piece, add_special_tokens=False)
        return token_kinds.KINDS[int(kind_of[token])]

    assert [kind(p) for p in (" the", "ing", "7", ".", "\n")] == [
        "word",
        "inside a word",
        "number",
        "punctuation",
        "space",
    ]
    assert token_kinds.KINDS[int(kind_of[tokenizer.eos_token_id])] == "special"
