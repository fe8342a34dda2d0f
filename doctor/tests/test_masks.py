"""F34: attention masks that hide the text, in torch's layers and by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import quiet
from tests.test_arithmetic import said

V, D, PAD = 20, 16, 0
TYPED = {"exchanged": True, "each in its place": False, "a table of padding": False}


class Reader(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.tokens = how, nn.Embedding(V, D, padding_idx=PAD)
        self.layer = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True)
        self.query, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, ids):
        pad, x = ids == PAD, self.tokens(ids)
        hidden = ~pad if "inverted" in self.how else pad
        if "some words" in self.how:  # what is hidden and what is shown are several, and none is both
            hidden = ids > V // 2
        if "torch" in self.how:
            x = self.layer(x, src_key_padding_mask=hidden)
        else:
            scores = (self.query(x) @ x.transpose(1, 2)).masked_fill(hidden[:, None], float("-inf"))
            x = scores.softmax(-1) @ x
        return self.head(x[:, 0])


class Typed(nn.Module):
    """An encoder that is given ids, a mask and types; one of them in the place of another."""

    def __init__(self, how):
        super().__init__()
        self.how, self.tokens, self.types = how, nn.Embedding(V, D, padding_idx=PAD), nn.Embedding(2, D)
        self.query, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, ids):
        there, second = (ids != PAD).long(), ((torch.arange(ids.shape[1]) > 3) & (ids != PAD)).long()
        mask, types = (second, there) if self.how == "exchanged" else (there, second)
        types = there if self.how == "a table of padding" else types
        x = self.tokens(ids) + self.types(types)
        seen = (mask[:, None, None] != 0).expand(-1, 1, ids.shape[1], -1)
        q, k = self.query(x)[:, None], x[:, None]
        return self.head(F.scaled_dot_product_attention(q, k, k, attn_mask=seen)[:, 0, 0])


def run(how: str):
    torch.manual_seed(0)
    model = Typed(how) if how in TYPED else Reader(how)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=5, say=False) as report:
        for _ in range(5):
            ids = torch.randint(1, V, (16, 10))
            ids[torch.arange(10) >= torch.randint(4, 9, (16, 1))] = PAD
            F.cross_entropy(model(ids), torch.randint(3, (16,))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


@pytest.mark.parametrize("how", ["inverted, of torch", "inverted, by hand"])
def test_inverted_masks_are_named(how):
    report = quiet(lambda: run(how))
    assert report.root is not None and report.root.check == "F34", f"\n{report}"


@pytest.mark.parametrize("how", ["of torch", "by hand", "by hand, some words"])
def test_right_masks_are_left_alone(how):
    report = quiet(lambda: run(how))
    assert "F34" not in said(report) and report.verdicts["F34"].state == "OK"


@pytest.mark.parametrize("how", TYPED)
def test_types_in_the_place_of_the_mask(how):
    assert ("F34" in said(quiet(lambda: run(how)))) is TYPED[how]
