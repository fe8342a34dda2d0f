"""S23: answers that hang on a row's place in the batch, and the healthy models that are like it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import quiet
from tests.test_arithmetic import said

B, T, D = 8, 5, 16


class Positions(nn.Module):
    """Adds a vector for each position, along the batch or along the time, before or without attention."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.register_buffer("pe", torch.randn(32, 1, D))
        self.body = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Dropout(0.1))
        self.attention = nn.MultiheadAttention(D, 2, batch_first="batch_first" in how, dropout=0.1)
        self.norm, self.head = nn.BatchNorm1d(D), nn.Linear(D, 3)

    def forward(self, x):
        if "along the batch" in self.how:
            x = x + self.pe[: x.size(0)]
        else:
            x = x + self.pe[: x.size(1)].transpose(0, 1)
        x = self.attention(x, x, x)[0] if "attention" in self.how else x
        return self.head(self.norm(self.body(x).mean(1)))


class Graph(nn.Module):
    """Nodes that see their neighbours, along a list of edges that stands elsewhere."""

    def __init__(self):
        super().__init__()
        self.edges = torch.randint(B, (2, 40))
        self.first, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x):
        h = self.first(x)
        return self.head(torch.zeros_like(h).index_add(0, self.edges[1], h[self.edges[0]]))


class Streams(nn.Module):
    """Keeps a state for each row from call to call."""

    def __init__(self):
        super().__init__()
        self.cell, self.head, self.state = nn.GRUCell(D, D), nn.Linear(D, 3), torch.randn(B, D)

    def forward(self, x):
        self.state = self.cell(x, self.state.detach())
        return self.head(self.state)


class Along(nn.Module):
    """A recurrent layer that runs along the first dimension."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(D, D), nn.Linear(D, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def run(model: nn.Module, *, sequence: bool = True):
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=4, say=False) as report:
        for _ in range(4):
            x = torch.randn(B, T, D) if sequence else torch.randn(B, D)
            F.cross_entropy(model(x).flatten(0, -2), torch.randint(3, (B,))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(m.training for m in model.modules())
    return report


@pytest.mark.parametrize("how", ["along the batch", "along the batch, attention batch_first"])
def test_positions_along_the_batch_are_named(how):
    report = quiet(lambda: run(Positions(how)))
    assert report.root is not None and report.root.check == "S23", f"\n{report}"


def test_a_table_with_as_many_columns_as_rows_in_the_batch_is_no_state():
    model = Positions("along the batch")
    x = torch.randn(D, T, D)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=3, say=False) as report:
        for _ in range(3):
            F.cross_entropy(model(x), torch.randint(3, (D,))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "S23" in said(report), f"\n{report}"


@pytest.mark.parametrize("how", ["along the time", "along the time, attention batch_first"])
def test_positions_along_the_time_are_right(how):
    report = quiet(lambda: run(Positions(how)))
    assert "S23" not in said(report) and report.verdicts["S23"].state == "OK"


@pytest.mark.parametrize("kind", [Graph, Streams, Along])
def test_rows_that_see_each_other_or_are_kept_are_left_alone(kind):
    assert "S23" not in said(quiet(lambda: run(kind(), sequence=False)))
