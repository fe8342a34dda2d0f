"""One batch by heart: batches that are drawn and batches of a DataLoader are held, others are
noticed.
"""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from loopdoctor import overfit, script

HEAD = """
import random, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0); random.seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
def train(x, y):
    optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()
x, y = torch.randn(512, 8), torch.randint(0, 4, (512,))
"""
LOADER = """
from torch.utils.data import DataLoader, TensorDataset
for epoch in range(50):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
        train(a, b)
"""
ONE_LOADER = LOADER.replace(
    "for epoch", "loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)\nfor epoch"
).replace("in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)", "in loader")
DRAWN = "for n in range(500):\n    at = torch.randint(0, 512, (8,)); train(x[at], y[at])\n"
BY_PYTHON = "for n in range(500):\n    at = random.sample(range(512), 8); train(x[at], y[at])\n"
IN_ORDER = "for n in range(60):\n    train(x[8 * n : 8 * n + 8], y[8 * n : 8 * n + 8])\n"
FROZEN = DRAWN.replace(
    "for n", "for p in model[0].parameters(): p.data.zero_()\nmodel[0].requires_grad_(False)\nfor n"
)
CASES = {
    "a loader": (ONE_LOADER, 0, "by heart"),
    "drawn": (DRAWN, 0, "by heart"),
    "drawn by Python": (BY_PYTHON, 0, "by heart"),
    "in order": (IN_ORDER, 2, "not given the same batch"),
    "inputs are lost": (FROZEN, 1, "NOT by heart"),
    "too short": ("train(x, y)", 2, "too few"),
}


@pytest.mark.parametrize("name", CASES)
def test_by_heart(tmp_path, capsys, name):
    program, code, said = CASES[name]
    (tmp_path / "train.py").write_text(HEAD + program)
    assert script.command(["--overfit", str(tmp_path / "train.py")]) == code
    out = capsys.readouterr().out
    assert (
        said in out
        and ("cannot prove" in out) == (code == 0)
        and ("Possible causes" in out) == (code == 1)
    )


def test_everything_is_put_back():
    before = DataLoader.__iter__, torch.autograd.backward, random.getstate()
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), 8)

    def run():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for (x,) in loader:
            F.mse_loss(model(x), x).backward()
            optimizer.step()

    held = overfit.learn(run, 5)
    assert (
        held.steps == 5
        and held.same
        and (DataLoader.__iter__, torch.autograd.backward) == before[:2]
    )
    assert not torch.equal(*[batch[0] for batch in loader][:2])
