"""Rates that came with an optimizer's state (S52), a term that drowns another one (F125), one view below itself (F27),
data beyond a tanh (D35), one batch for the parts of a model (D12), and a decay that Adam divides (N26)."""

import gc
import io
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import train_doctor as doctor

from .test_meetings import named
from .test_turned import net, said


# ------------------------------------------------------------------------------------------------ S52
def finished(rate: float, end: float) -> dict:
    """The state of an optimizer at the end of a run."""
    model = net(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    scheduler = LambdaLR(optimizer, lambda step: max(end, 1 - step / 4))
    for _ in range(6):
        model(torch.randn(8, 4)).mean().backward()
        optimizer.step()
        scheduler.step()
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    return torch.load(file)


class EpochScheduler:
    """As timm's: no scheduler of torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


RESUMED = {
    "as it is": True,
    "set again": False,
    "set at each step": False,
    "with its scheduler": False,
    "with a scheduler of epochs": False,
    "with a scheduler of one's own": False,
    "with one that is out of sight": False,
    "by a half": False,
    "without a past": False,
}


@pytest.mark.parametrize("how", RESUMED)
def test_rates_that_a_state_brought(how):
    model, schedulers = net(4, 1), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if how == "by a half" else 1e-3)
    state = finished(1e-2, 0.5 if how == "by a half" else 0.01)
    if how == "without a past":
        state["param_groups"][0].pop("initial_lr")
    optimizer.load_state_dict(state)
    if how == "set again":
        optimizer.param_groups[0]["lr"] = 1e-3
    if how == "with its scheduler":
        schedulers.append(LambdaLR(optimizer, lambda step: 0.01, last_epoch=6))
    if how == "with a scheduler of epochs":
        schedulers.append(ReduceLROnPlateau(optimizer))
    if how == "with a scheduler of one's own":
        schedulers.append(EpochScheduler(optimizer))
    if how == "with one that is out of sight":
        schedulers.append(MultiStepLR(optimizer, [100]))
        gc.freeze()
    with doctor.watch(model, optimizer=optimizer, steps=8, say=False) as report:
        for step in range(8):
            if how == "set at each step":
                optimizer.param_groups[0]["lr"] = 1e-4 * (1 - step / 100)
            F.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not report.faults and ("S52" in said(report)) is RESUMED[how]


class Unhashable(torch.optim.SGD):
    def __eq__(self, other):
        return self is other


def test_an_optimizer_need_not_be_hashable():
    model = net(4, 1)
    optimizer = Unhashable(model.parameters(), lr=0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
        for _ in range(6):
            F.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not report.faults and "S52" not in said(report)


# ------------------------------------------------------------------------------------------------ F125
TERMS = {
    "in years": True,
    "in years, weighted": True,
    "in years, by a small weight": False,
    "in spreads": False,
    "two networks": False,
    "one task": False,
    "learned": False,
    "by a loss of bounded slope": False,
    "guesses that are wild": False,
    "classes that are known": False,
    "classes to ignore": True,
}


@pytest.mark.parametrize("how", TERMS)
def test_a_term_that_drowns_another(how):
    trunk, heads = net(6, 8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 3)])
    trunk.append(nn.ReLU())
    other = nn.Sequential(net(6, 8), nn.ReLU()) if how == "two networks" else trunk

    def loss(_):
        x = torch.randn(32, 6)
        years, kinds = 40 + 14 * torch.randn(32), torch.randint(3, (32,))
        if how in ("in spreads", "guesses that are wild"):
            years = (years - 40) / 14
        guess = heads[0](trunk(x)).squeeze(1)
        if how == "guesses that are wild":
            guess = 200 * guess
        if how == "learned":
            years = years * 20
            guess = guess + years
        age = (F.smooth_l1_loss if how == "by a loss of bounded slope" else F.mse_loss)(guess, years)
        age = age * 200 if how == "learned" else age
        guess_of_kind = heads[1](other(x))
        if how == "classes that are known":
            guess_of_kind = guess_of_kind + 20 * F.one_hot(kinds, 3)
        if how == "classes to ignore":
            kinds = kinds.where(kinds > 0, 255)
        kind = F.cross_entropy(guess_of_kind, kinds, ignore_index=255)
        if how == "one task":
            return age
        return age * {"in years, weighted": 0.5, "in years, by a small weight": 1e-3}.get(how, 1.0) + kind

    assert named("F125", nn.ModuleList([trunk, other, heads]), loss) is TERMS[how]


# ------------------------------------------------------------------------------------------------ F27
TWICE = {"laid out twice": True, "drawn twice": False, "with dropout": False, "an odd row more": False}
TWICE |= {"of any length": False, "as a mask": False, "by itself, not turned": False}


@pytest.mark.parametrize("how", TWICE)
def test_a_view_below_itself(how):
    model = nn.Sequential(net(6, 16), nn.Dropout(0.2 if how == "with dropout" else 0.0), nn.Linear(16, 8))

    def loss(model):
        x = torch.randn(16, 6)
        views = x.repeat(2, 1) if how != "drawn twice" else x.repeat(2, 1) + 0.1 * torch.randn(32, 6)
        if how == "an odd row more":
            views = torch.cat([views, torch.randn(1, 6)])
        z = model(views) if how == "of any length" else F.normalize(model(views), dim=1)
        if how == "as a mask":
            alike = z @ z.T > 0.9
            return F.mse_loss(z, torch.randn(32, 8), reduction="none")[alike.any(1)].mean()
        if how == "by itself, not turned":
            z = F.normalize(z.repeat(1, 4), dim=1)  # (32, 32)
            return F.cross_entropy(z @ z, torch.arange(32).roll(16))
        scores = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(scores[:32, :32], torch.arange(32).roll(16))

    assert named("F27", model, loss) is TWICE[how]


# ------------------------------------------------------------------------------------------------ D12
class Towers(nn.ModuleList):
    def forward(self, user, item):
        return self[0](user) @ self[1](item).T


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("how", ["first for ever", "shuffled", "by heart", "positions alone", "many parts", "to look"])
def test_parts_that_are_given_one_batch(how, whole):
    towers = Towers([nn.Embedding(50, 8), nn.Embedding(40, 8)])
    pairs = TensorDataset(torch.randint(50, (320,)), torch.randint(40, (320,)))
    loader, kept = DataLoader(pairs, 32, shuffle=how == "shuffled"), []

    def loss(model):
        if how == "by heart":
            kept[:] = kept or next(iter(loader))
        with torch.set_grad_enabled(how != "to look"):
            user, item = kept or next(iter(loader))
        if how == "many parts":
            for _ in range(6):
                model[0](torch.arange(4))
            user = torch.randint(50, (32,))
        if how == "positions alone":
            user, item = torch.arange(32), torch.randint(40, (32,))
        return F.cross_entropy(model(user, item) if whole else Towers.forward(model, user, item), torch.arange(32))

    assert named("D12", towers, loss) is (how == "first for ever")


# ------------------------------------------------------------------------------------------------ N26
@pytest.mark.parametrize("kind, decay", [("Adam", 0.1), ("Adam", 1e-4), ("AdamW", 0.1), ("one layer", 0.1)])
def test_a_decay_that_adam_divides(kind, decay):
    model, weights = nn.Linear(8, 4) if kind == "one layer" else net(8, 4), torch.randn(8, 4)
    if kind == "one layer":  # near the end, where decay and gradient hold each other
        model.weight.data = 0.7 * weights.T / 3
    optimizer = getattr(torch.optim, kind, torch.optim.Adam)(model.parameters(), lr=1e-3, weight_decay=decay)
    with doctor.watch(model, optimizer=optimizer, steps=8, say=False) as report:
        for _ in range(8):
            x = torch.randn(64, 8)
            F.mse_loss(model(x), x @ weights / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ("N26" in said(report)) is ((kind, decay) == ("Adam", 0.1)), report


# ------------------------------------------------------------------------------------------------ D35
BEYOND = {"a ring": True, "within": False, "a few beyond": False, "one optimizer": False}


@pytest.mark.parametrize("how", BEYOND)
def test_data_beyond_a_tanh(how):
    made, judge = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2), nn.Tanh()), net(2, 1)
    parts = [[*made.parameters(), *judge.parameters()]] if how == "one optimizer" else [made.parameters()]
    parts += [] if how == "one optimizer" else [judge.parameters()]
    optimizers = [torch.optim.Adam(part, lr=1e-3) for part in parts]
    both = nn.ModuleList([made, judge])
    with doctor.watch(both, optimizer=optimizers, steps=8, say=False) as report:
        for _ in range(8):
            real = (2.0 if how in ("a ring", "one optimizer") else 0.6) * (2 * torch.rand(64, 2) - 1)
            if how == "a few beyond":
                real = torch.cat([real[:-6], 4 * real[-6:]])
            for turn, optimizer in enumerate(optimizers[::-1]):
                fake = made(torch.randn(64, 4))
                loss = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()
                if turn or len(optimizers) == 1:
                    loss = loss + F.softplus(-judge(fake)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    assert not report.faults and ("D35" in said(report)) is BEYOND[how], report


# ------------------------------------------------------------------------------------------------ S21
WINDOWS = {"of a stream": True, "in order of time": False, "of actions": False}


@pytest.mark.parametrize("how", WINDOWS)
def test_windows_for_a_network_that_takes_time_first(how):
    table, lstm, head = nn.Embedding(20, 8), nn.LSTM(8, 16), nn.Linear(16, 20)
    stream, columns, steps = torch.randint(20, (2000,)), torch.randint(20, (400, 8)), itertools.count(0, 12)

    def loss(_):
        if how == "of a stream":
            ids = stream.unfold(0, 13, 1)[torch.randint(1900, (16,))]
        elif how == "in order of time":
            ids = columns[torch.arange(start := next(steps), start + 13)]
        else:
            drawn = [torch.multinomial(torch.ones(8, 20), 1).squeeze(1) for _ in range(13)]
            return F.cross_entropy(head(lstm(table(torch.stack(drawn[:-1])))[0]).flatten(0, 1), torch.cat(drawn[1:]))
        given, asked = (ids[:, :-1], ids[:, 1:]) if how == "of a stream" else (ids[:-1], ids[1:])
        return F.cross_entropy(head(lstm(table(given))[0]).flatten(0, 1), asked.flatten())

    assert named("S21", nn.ModuleList([table, lstm, head]), loss) is WINDOWS[how]
