"""S22 and S11: layers frozen at the numbers they began with, and batch norm that trains in eval mode."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import quiet
from tests.test_arithmetic import said


class Backbone(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
        self.proj, self.fc = nn.Linear(16, 32), nn.Linear(32, classes)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x)))).mean((2, 3))
        return self.fc(F.relu(self.proj(x)))


def pretrained() -> Backbone:
    """As after an epoch: all weights have moved a little."""
    model = Backbone(10)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(20):
        F.cross_entropy(model(torch.randn(16, 3, 8, 8)), torch.randint(10, (16,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def fine_tuned(model: nn.Module, *, loss_of=None):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=5, say=False) as report:
        for _ in range(5):
            x, y = torch.randn(16, 3, 8, 8), torch.randint(4, (16,))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def transfer(prefix: str, frozen: bool = True):
    saved = {prefix + n: p for n, p in pretrained().state_dict().items() if not n.startswith("fc")}
    model = Backbone(4)
    model.load_state_dict(saved, strict=False)
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or name.startswith("fc"))
    return fine_tuned(model)


def test_a_checkpoint_of_which_nothing_was_loaded_is_named():
    report = quiet(lambda: transfer("module."))
    assert report.root is not None and report.root.check == "S51", f"\n{report}"
    assert [f.because for f in report.findings if f.check == "S22"] == ["S51"]


def test_random_weights_into_which_nothing_was_loaded_are_named():
    def run():
        model = Backbone(4).requires_grad_(False)
        model.fc.requires_grad_(True)
        return fine_tuned(model)

    report = quiet(run)
    assert report.root is not None and report.root.check == "S22", f"\n{report}"


def test_loaded_weights_are_left_alone():
    assert "S22" not in said(quiet(lambda: transfer("")))


def test_random_weights_that_train_are_left_alone():
    assert "S22" not in said(quiet(lambda: transfer("module.", frozen=False)))


class WithTarget(nn.Module):
    """A network and a frozen copy of it, which is no backbone."""

    def __init__(self):
        super().__init__()
        self.online = Backbone(4)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            aim = self.target(x)
        return self.online(x) + aim


def test_a_target_network_is_left_alone():
    assert "S22" not in said(quiet(lambda: fine_tuned(WithTarget())))


class Low(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.A = base, nn.Parameter(torch.randn(4, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x):
        return self.base(x) + x @ self.A.T @ self.B.T


@pytest.mark.parametrize("late", [True, False])
def test_adapters_frozen_with_their_base_are_named(late):
    def run():
        model = pretrained()
        model.fc = nn.Linear(32, 4)
        model.requires_grad_(False)
        model.proj = Low(model.proj)
        if late:
            model.requires_grad_(False)
        model.fc.requires_grad_(True)
        return fine_tuned(model)

    report = quiet(run)
    assert ("S22" in said(report)) == late
    assert not late or report.root.check == "S22"


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


@pytest.mark.parametrize("how", ["eval", "train", "statistics frozen on purpose", "head alone"])
def test_batch_norm_in_eval_mode(how):
    def run():
        model = Normed()
        model.train(how in ("train", "statistics frozen on purpose"))
        if how == "statistics frozen on purpose":
            model.body[1].eval()
        if how == "head alone":
            model.body.requires_grad_(False)
        return fine_tuned(model)

    assert ("S11" in said(quiet(run))) == (how == "eval")


class Named(nn.Module):
    """Adapters of a table by name, of which one is active, as those of peft."""

    def __init__(self):
        super().__init__()
        self.A = nn.ParameterDict({name: nn.Parameter(torch.zeros(4, 32)) for name in ("old", "new")})
        self.B = nn.ParameterDict({name: nn.Parameter(torch.randn(32, 4)) for name in ("old", "new")})

    def forward(self, x):
        return x + x @ self.A["new"].T @ self.B["new"].T


@pytest.mark.parametrize("both", [True, False])
def test_an_adapter_that_rests_is_left_alone(both):
    def run():
        model = pretrained()
        model.fc = nn.Linear(32, 4)
        model.requires_grad_(False)
        model.proj = nn.Sequential(model.proj, Named())
        for name, p in model.named_parameters():
            p.requires_grad_("fc" in name or ".B" in name or "new" in name and not both)
        return fine_tuned(model)

    assert ("S22" in said(quiet(run))) is both
