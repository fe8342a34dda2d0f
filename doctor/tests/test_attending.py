"""Attention over the wrong axis, with scores made larger, and with masks that hide nothing."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor

from .bench import quiet
from .test_arithmetic import said

PLACES, WIDTH = 6, 16


class Attention(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, keep):  # (B, T, D), (B, T)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.how == "einsum":
            weights = (torch.einsum("btd,bsd->bts", q, k) / math.sqrt(WIDTH)).softmax(-1)
            return self.head(torch.einsum("bts,bsd->btd", weights, v).mean(1))
        if self.how == "einsum, wrong axis":
            weights = (torch.einsum("btd,bsd->bts", q, k) / math.sqrt(WIDTH)).softmax(1)
            return self.head(torch.einsum("bts,bsd->btd", weights, v).mean(1))
        scores = q @ k.transpose(1, 2)  # (B, T, T)
        scores = scores * math.sqrt(WIDTH) if self.how == "sharpened" else scores * WIDTH**-0.5
        there = keep[:, None, :]
        if self.how == "filled with -inf":
            scores = scores.masked_fill(there == 0, float("-inf"))
        if self.how == "filled with -1e9":
            scores = scores.masked_fill(there == 0, -1e9)
        if self.how == "filled with 0":
            scores = scores.masked_fill(there == 0, 0)
        if self.how == "multiplied":
            scores = scores * there
        if self.how == "added":
            scores = scores + there
        if self.how == "added, in logarithms":
            scores = scores + (1 - there) * -1e4
        if self.how == "a bias that is learned":
            scores = scores + self.q.bias[:PLACES]
        weights = scores.softmax(1 if self.how == "wrong axis" else -1)
        if self.how == "masked afterwards":
            weights = weights * there
        if self.how == "masked afterwards, and normalised":
            weights = weights * there
            weights = weights / weights.sum(-1, keepdim=True)
        if self.how == "slots compete":
            weights = scores.softmax(1)
            weights = weights / weights.sum(-1, keepdim=True)
        return self.head((weights @ v).mean(1))


def program(how: str):
    model = Attention(how)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for _ in range(6):
            x = torch.randn(8, PLACES, WIDTH)
            keep = (torch.arange(PLACES) < torch.randint(2, PLACES, (8, 1))).float()
            loss = F.cross_entropy(model(x, keep), x[:, 0, :3].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return report


NAMED = {
    "wrong axis": ("F48", "attention-over-askers"),
    "einsum, wrong axis": ("F48", "attention-over-askers"),
    "sharpened": ("F48", "attention-sharpened"),
    "filled with 0": ("F53", "mask-without-effect"),
    "multiplied": ("F53", "mask-without-effect"),
    "added": ("F53", "mask-without-effect"),
    "masked afterwards": ("F53", "mask-without-effect"),
}
HEALTHY = ("", "einsum", "filled with -inf", "filled with -1e9", "added, in logarithms", "a bias that is learned")
HEALTHY += ("masked afterwards, and normalised", "slots compete")


@pytest.mark.parametrize("how", NAMED)
def test_what_is_wrong_with_attention_is_named(how):
    report = quiet(lambda: program(how))
    assert (report.root.check, report.root.name) == NAMED[how], f"\n{report}"


@pytest.mark.parametrize("how", HEALTHY)
def test_attention_that_is_right(how):
    assert not said(quiet(lambda: program(how)))


def test_a_gate_of_experts_may_leave_some_out_after_its_softmax():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.randn(WIDTH, 4) * 0.1)
            self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)
            self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x):  # (B, D)
            x = self.first(x).relu()
            shares = (x @ self.gate).softmax(-1)  # (B, E)
            shares = shares * F.one_hot(shares.argmax(-1), 4)
            answers = torch.einsum("bd,edf->bef", x, self.experts)
            return self.head((shares[:, None] @ answers).squeeze(1))

    def train():
        model = Experts()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        with doctor.watch(model, optimizer=optimizer, say=False) as report:
            for _ in range(6):
                x = torch.randn(64, WIDTH)
                optimizer.zero_grad()
                F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
                optimizer.step()
        return report

    assert "F53" not in said(quiet(train))
