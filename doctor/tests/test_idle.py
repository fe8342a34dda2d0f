"""Flags that do nothing and groups that rest: S18, N24."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import assert_root
from train_doctor import ERROR, NOTE, WARN


def train(prepare, groups=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    prepare(model)
    optimizer = torch.optim.Adam(groups(model) if groups else [p for p in model.parameters() if p.requires_grad], 1e-3)
    with doctor.watch(model, say=False) as report:
        for _ in range(5):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
    return report


def flag(name, value):
    def prepare(model):
        for p in model[0].parameters():
            setattr(p, name, value)

    return prepare


@pytest.mark.parametrize("name", ["require_grad", "requires_grads", "required_grad", "requiresgrad", "requires_gard"])
def test_a_misspelt_flag(name):
    report = train(flag(name, False))
    assert_root(report, "S18")
    assert report.root.severity == ERROR and name in report.root.diagnosis


def test_a_flag_on_the_module():
    def wrong(model):
        model[0].requires_grad = False

    assert_root(train(wrong), "S18")


def test_flags_that_say_what_is_so():
    def right(model):
        model[0].requires_grad_(False)
        model[0].requires_grad = False

    for prepare in (right, flag("requires_grad", False), flag("require_grad", True)):
        assert not [f for f in train(prepare).findings if f.severity != NOTE]


def test_an_option_of_the_modules_own():
    """Its code reads the flag, so it means what its author says."""

    class Gate(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.requires_grads = False

        def forward(self, x):
            return super().forward(x.detach() if not self.requires_grads else x)

    def prepare(model):
        model[0] = Gate(8, 16)

    assert not [f for f in train(prepare).findings if f.severity != NOTE]


def two_groups(rate):
    return lambda m: [{"params": m[0].parameters(), "lr": rate}, {"params": m[2].parameters()}]


def test_a_group_whose_rate_is_zero():
    report = train(lambda m: None, two_groups(0.0))
    assert_root(report, "N24")
    assert report.root.severity == WARN
    assert not [f for f in train(lambda m: None, two_groups(1e-5)).findings if f.severity != NOTE]
