"""R1: an error that ended the program is led to the lines that are to blame, with the sizes."""

import re
import textwrap

import pytest
import torch

from loopdoctor.script import command

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
"""
STEP = """
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
GAN = """
G = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 15))
D = nn.Sequential(nn.Linear(15, 32), nn.ReLU(), nn.Linear(32, 1))
opt_d, opt_g = torch.optim.Adam(D.parameters()), torch.optim.Adam(G.parameters())
for step in range(3):
    fake = G(torch.randn(16, 5))
    judged = D(fake)  # needed
    opt_d.zero_grad()
    F.softplus(judged).mean().backward(retain_graph=True)
    opt_d.step()  # changed
    opt_g.zero_grad()
    F.softplus(-judged).mean().backward()
    opt_g.step()
"""
CARRIED = """
cell, head = nn.LSTMCell(4, 8), nn.Linear(8, 4)
optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
state = torch.zeros(2, 8), torch.zeros(2, 8)
for step in range(5):
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    state = cell(x, state)  # changed
    loss = F.mse_loss(head(state[0]), y)
"""
GATE = """
layer = nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for step in range(3):
    x = torch.randn(8, 4)
    gate = layer(x).sigmoid()  # needed
    gate[:, 0] = 1.0  # changed
    loss = (gate * x).pow(2).mean()
"""
INPUT = """
layer = nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for step in range(3):
    x = layer(torch.randn(8, 4))
    y = x * x.detach().cos() * x  # needed
    x.mul_(2.0)  # changed
    loss = y.mean()
"""
INSIDE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.one(x).tanh()
        h += self.two(h)  # changed
        return h

net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    loss = net(torch.randn(8, 4)).pow(2).mean()
"""
SEEN = """
with torch.inference_mode():
    seen = torch.zeros(8, 4)  # has the shape of the tensor that was changed, and counts no changes
"""
TABLE = """
net = nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(40, 3))
optimizer = torch.optim.Adam(net.parameters())
for step in range(20):
    ids = torch.randint(0, 10, (4, 5))
    ids[0, 0] = 12 if step == 15 else 1
    loss = F.cross_entropy(net(ids), torch.randint(0, 3, (4,)))  # changed
"""
LABEL = """
net = nn.Linear(8, 5)
optimizer = torch.optim.Adam(net.parameters())
for step in range(3):
    labels = torch.randint(1, 6, (64,))
    loss = F.cross_entropy(net(torch.randn(64, 8)), labels)  # changed
"""
SIZES = """
body, head = nn.Conv2d(3, 6, 3), nn.Linear(600, 5)
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
for step in range(3):
    features = body(torch.randn(4, 3, 12, 14)).flatten(1)
    loss = F.cross_entropy(head(features), torch.randint(0, 5, (4,)))  # changed
"""
DTYPE = """
net = nn.Linear(8, 5)
optimizer = torch.optim.Adam(net.parameters())
for step in range(3):
    x = torch.ones(16, 8, dtype=torch.float64)
    loss = net(x).pow(2).mean()  # changed
"""
ANOMALY = """
torch.autograd.set_detect_anomaly(True)
net = nn.Linear(8, 4)
optimizer = torch.optim.Adam(net.parameters())
for step in range(3):
    y = net(torch.randn(16, 8))
    length = (y - y.detach()).norm(dim=1).sqrt()  # changed
    loss = length.mean()
"""
CASES = {
    "stepped-before-backward": (GAN, []),
    "graph-carried-on": (CARRIED + STEP, ["state = state.detach()"]),
    "changed-in-place": (GATE + STEP, ["gate was changed in place"]),
    "changed-in-place, beside a tensor of inference_mode": (
        SEEN + GATE + STEP,
        ["gate was changed in place"],
    ),
    "changed-in-place, an input": (INPUT + STEP, ["x was changed in place"]),
    "changed-in-place/somewhere": (INSIDE + STEP, []),
    "id-outside-table, after the watched steps": (TABLE + STEP, ["12", "10 rows"]),
    "label-outside-classes": (LABEL + STEP, ["label is 5", "5 classes"]),
    "sizes-differ": (SIZES + STEP, ["600", "720", "the layer head"]),
    "dtypes-differ": (DTYPE + STEP, ["double"]),
    "derivative-is-nan": (ANOMALY + STEP, []),
}


@pytest.fixture(autouse=True)
def no_anomaly_mode():
    yield
    torch.autograd.set_detect_anomaly(False)  # one of the programs has switched it on


@pytest.mark.parametrize("name", CASES)
def test_an_error_is_led_to_its_lines(name, tmp_path, monkeypatch, capsys):
    source, words = CASES[name]
    monkeypatch.chdir(tmp_path)
    text = HEAD + textwrap.dedent(source)
    (tmp_path / "train.py").write_text(text)
    assert command(["train.py"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "ERROR R1 " + re.split("[,/]", name)[0] in said
    for number, line in enumerate(text.splitlines(), 1):
        if line.endswith(("# changed", "# needed")):
            assert f"train.py, line {number} " in said
    assert [word for word in words if word.lower() not in said.lower()] == []


def test_an_error_of_another_kind_is_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\nraise ValueError('no such folder')\n")
    assert command(["train.py"]) == 1
    assert "R1" not in capsys.readouterr().out
