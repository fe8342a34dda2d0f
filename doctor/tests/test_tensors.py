"""Tensors that do not learn, one by one: a fault, its mended twin, and what a healthy program could be mistaken for."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import quiet
from train_doctor import ERROR, NOTE, WARN


def train(model, *, optimizer=None, steps: int = 6, data=None, kind=torch.optim.SGD, **options):
    """Six steps of a classifier with three classes, watched as it is."""
    optimizer = optimizer or kind(model.parameters(), **({"lr": 0.1} | options))
    dtype = next(model.parameters()).dtype
    with doctor.watch(steps=steps, say=False) as report:
        for _ in range(steps):
            x = torch.randn(16, 8) if data is None else data()
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(dtype)).float(), torch.randint(0, 3, (16,))).backward()
            optimizer.step()
    return report


def mlp(width: int = 16):
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


class Two(nn.Module):
    """A body with a second branch, whose share is `scale`."""

    def __init__(self, scale: float = 0.0, gate: bool = False):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.tensor(scale)) if gate else scale

    def forward(self, x):
        return self.head(torch.tanh(self.a(x)) + self.scale * torch.tanh(self.b(x)))


def dead_units(bias: float):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        model[0].bias.fill_(bias)
    return model


class Rounded(nn.Module):
    def __init__(self, through: bool):
        super().__init__()
        self.code, self.side, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 3)
        self.through = through

    def forward(self, x):
        code = 3 * self.code(x)
        hard = code + (code.round() - code).detach() if self.through else code.round()
        return self.head(hard + self.side(x))


class Memory(nn.Module):
    """Cross-attention to a memory that is always zero, or not."""

    def __init__(self, empty: bool):
        super().__init__()
        self.own, self.other, self.head, self.empty = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 3), empty

    def forward(self, x):
        return self.head(self.own(x) + self.other(torch.zeros_like(x) if self.empty else x.flip(1)))


class Listed(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.into, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        layers = [nn.Linear(16, 16) for _ in range(2)]
        self.layers = {"list": layers, "dict": {"a": layers[0], "b": [layers[1]]}, "right": nn.ModuleList(layers)}[how]

    def forward(self, x):
        x = self.into(x)
        layers = [self.layers["a"], *self.layers["b"]] if isinstance(self.layers, dict) else self.layers
        for layer in layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    def everything(self):
        return [*self.parameters(), *(p for layer in self.layers for p in layer.parameters())]


class Plain(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.body, start = nn.Linear(8, 3), torch.ones(3)
        if how == "buffer":
            self.register_buffer("gain", start.requires_grad_())
        else:
            self.gain = nn.Parameter(start) if how == "right" else start.requires_grad_(how == "tensor")

    def forward(self, x):
        return self.body(x) * self.gain


def constant(value: float | None):
    model = mlp()
    if value is not None:
        for p in (*model[0].parameters(), *model[2].parameters()):
            nn.init.constant_(p, value)
    return model


def last_layer_of_zeros():
    model = mlp()
    nn.init.zeros_(model[4].weight)
    return model


def half(**options):
    """In fp16, with an input that is always zero, as padded features are."""

    def data():
        x = torch.randn(16, 8)
        x[:, 0] = 0
        return x

    return train(mlp().half(), data=data, kind=torch.optim.Adam, lr=1e-3, **options)


FAULTS = {
    "a branch times zero": ("B7", "b.weight, b.bias", lambda: train(Two(0.0))),
    "dead units": ("B7", "nothing comes back", lambda: train(dead_units(-100.0))),
    "rounded": ("B7", "code.weight", lambda: train(Rounded(False))),
    "an empty memory": ("B7", "what goes into them is zero", lambda: train(Memory(True))),
    "a list of layers": ("S19", "layers[0].weight, layers[0].bias", lambda: train(Listed("list"))),
    "a dict of layers": ("S19", "layers['a'].weight", lambda: train(Listed("dict"))),
    "a plain tensor": ("S19", "gain", lambda: train(Plain("tensor"))),
    "a buffer": ("S19", "a buffer is no parameter", lambda: train(Plain("buffer"))),
    "trained and not saved": ("S19", "a saved model loses it", lambda: saved_nowhere()),
    "constant": ("S20", "all 16 rows of 0.weight", lambda: train(constant(0.1))),
    "epsilon in fp16": ("N25", "where a gradient is 0 it divides 0 by 0", half),
}
MENDED = {
    "a branch with a share": lambda: train(Two(0.5)),
    "a gate that begins at zero": lambda: train(Two(0.0, gate=True)),
    "units alive": lambda: train(dead_units(0.1)),
    "straight through": lambda: train(Rounded(True)),
    "a memory": lambda: train(Memory(False)),
    "a ModuleList": lambda: train(Listed("right")),
    "a parameter": lambda: train(Plain("right")),
    "a constant tensor": lambda: train(Plain("frozen")),
    "random": lambda: train(constant(None)),
    "a last layer of zeros": lambda: train(last_layer_of_zeros()),
    "in bf16": lambda: train(mlp().bfloat16(), kind=torch.optim.Adam, lr=1e-2),
    "a normalisation behind a bias": lambda: train(normalised()),
    "experts": lambda: train(Experts()),
    "a teacher in a list": lambda: train(Student()),
}


def saved_nowhere():
    model = Listed("list")
    return train(model, optimizer=torch.optim.SGD(model.everything(), 0.1))


def normalised():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


class Experts(nn.Module):
    """The second expert gets no row: its gradients are zeros, not None."""

    def __init__(self):
        super().__init__()
        self.experts, self.head = nn.ModuleList(nn.Linear(8, 16) for _ in range(2)), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.tanh(torch.cat([self.experts[0](x), self.experts[1](x[:0])])))


class Student(nn.Module):
    """Keeps its teacher in a list, so that it is not saved; the teacher is frozen."""

    def __init__(self):
        super().__init__()
        self.body, self.teacher = nn.Linear(8, 3), [nn.Linear(8, 3).requires_grad_(False)]

    def forward(self, x):
        return self.body(x) + 0.1 * self.teacher[0](x)


@pytest.mark.parametrize("name", FAULTS)
def test_each_is_named_with_its_reason(name):
    check, said, program = FAULTS[name]
    report = quiet(program)
    found = {f.check: f for f in report.findings}
    assert report.root is not None and report.root.check == check and not report.faults, f"\n{report}"
    assert said in f"{found[check].observed} {found[check].diagnosis} {found[check].fix}", f"\n{report}"
    assert found[check].severity in (WARN, ERROR)


@pytest.mark.parametrize("name", MENDED)
def test_the_mended_and_the_healthy_are_left_alone(name):
    report = quiet(MENDED[name])
    assert report.done and not report.faults
    assert not [f for f in report.findings if f.severity != NOTE], f"\n{report}"


def test_a_larger_epsilon_leaves_the_other_trouble_of_fp16():
    report = quiet(lambda: half(eps=1e-4))
    assert {f.check for f in report.findings} == {"B5"} and report.verdicts["N25"].state == "OK", f"\n{report}"


def test_zeros_are_nothing_before_three_steps():
    report = quiet(lambda: train(Two(0.0), steps=2))
    assert report.verdicts["B7"].state == report.verdicts["S20"].state == "UNKNOWN"
