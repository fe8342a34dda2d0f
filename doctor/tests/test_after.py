"""What only shows after the watched steps: a fault, its mended twin, what is healthy, and what it costs."""

import copy
import math
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as torch_optimizer

import train_doctor as doctor
from train_doctor import NOTE, WARN


def net(dropout: float = 0.2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))


def train(
    model, *, before=lambda n, model, optimizer: None, steps: int = 30, watched: int = 4, schedule=None, **options
):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    scheduler = None if schedule is None else torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    with doctor.watch(model, optimizer=optimizer, steps=watched, say=False, **options) as report:
        for n in range(steps):
            before(n, model, optimizer)
            x = torch.randn(16, 4)
            loss = F.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        assert n < watched or report.done
    assert not report.faults, report.faults
    return report


def said(report):
    return {f.check for f in report.findings if f.severity != NOTE}


def evaluated(put_back: bool):
    """An evaluation every fifth step; the first ones come after the watched steps."""

    def before(n, model, optimizer):
        if n and n % 5 == 0:
            model.eval()
            with torch.no_grad():
                model(torch.randn(16, 4))
            if put_back:
                model.train()

    return before


def test_a_model_left_in_eval_after_the_watched_steps():
    report = train(net(), before=evaluated(put_back=False))
    assert report.root.check == "N16" and "from step 6 on" in report.root.observed, str(report)
    assert "N16" not in report.verdicts
    assert not said(train(net(), before=evaluated(put_back=True)))


def test_what_is_ignored_stays_ignored():
    report = train(net(), before=evaluated(put_back=False), ignore={"N16": "for speed"})
    assert not said(report) and [f.check for f, _ in report.ignored] == ["N16"]


def frozen_late(n, model, optimizer):
    """Statistics only, as recipes of detection do."""
    if n == 20:
        model[1].eval()


def for_a_while(n, model, optimizer):
    model.train(not 8 <= n < 20)


def test_what_is_put_in_eval_on_purpose():
    assert not said(train(net(), before=frozen_late))
    assert not said(train(net(), before=for_a_while))
    assert not said(train(net(0.0)[:1] + nn.Sequential(nn.ReLU(), nn.Linear(8, 4)), before=evaluated(put_back=False)))


@pytest.mark.parametrize("schedule", [lambda n: max(0.0, 1 - n / 15), lambda n: 0.2**n], ids=["zero", "tiny"])
def test_a_rate_that_is_gone_after_the_watched_steps(schedule):
    report = train(net(), schedule=schedule)
    assert "N11" in said(report) and report.root.severity == WARN, str(report)


SCHEDULES = {
    "to zero in the end": lambda n: max(0.0, 1 - n / 30),
    "cosine": lambda n: 0.5 * (1 + math.cos(math.pi * n / 30)),
    "warm restarts": lambda n: 0.5 * (1 + math.cos(math.pi * (n % 10) / 9)),
    "a thousandth": lambda n: 1.0 if n < 10 else 1e-3,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_as_schedules_have_them(name):
    assert not said(train(net(), schedule=SCHEDULES[name]))


def unfreeze(told: bool):
    def before(n, model, optimizer):
        if n == 10:
            model[0].requires_grad_(True)
            if told:
                optimizer.add_param_group({"params": list(model[0].parameters())})

    return before


def half_frozen():
    model = net()
    model[0].requires_grad_(False)
    return model


def test_a_layer_unfrozen_without_the_optimizer():
    report = train(half_frozen(), before=unfreeze(told=False))
    assert report.root.check == "S3" and "0.weight" in report.root.observed, str(report)
    assert not said(train(half_frozen(), before=unfreeze(told=True)))


def test_a_part_that_is_replaced_after_the_watched_steps():
    def replaced(n, model, optimizer):
        if n == 10:
            model[4] = copy.deepcopy(model[4])

    assert "S3" in said(train(net(), before=replaced))


def test_bits_and_hooks():
    def bits(watched):
        torch.manual_seed(1)
        model = net()
        if watched:
            train(model, before=evaluated(put_back=True))
        else:
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            for n in range(30):
                evaluated(put_back=True)(n, model, optimizer)
                x = torch.randn(16, 4)
                loss = F.mse_loss(model(x), x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return model.state_dict()

    before = len(torch_optimizer._global_optimizer_post_hooks)
    plain, watched = bits(False), bits(True)
    assert all(map(torch.equal, plain.values(), watched.values()))
    assert len(torch_optimizer._global_optimizer_post_hooks) == before


@pytest.mark.slow
def test_it_costs_next_to_nothing():
    """The hook alone against a tiny step, the least of many: other programs make a mean uncertain by more."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    step, hook = math.inf, math.inf

    def one():
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()

    with doctor.watch(model, optimizer=optimizer, steps=2, say=False) as report:
        for _ in range(100):
            one()
        assert report.done
        (stepped,) = torch_optimizer._global_optimizer_post_hooks.values()
        for _ in range(300):
            begun = time.perf_counter()
            one()
            step = min(step, time.perf_counter() - begun)
            begun = time.perf_counter()
            stepped(optimizer, (), {})
            hook = min(hook, time.perf_counter() - begun)
    assert hook < 0.01 * step, (hook, step)
