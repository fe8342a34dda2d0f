"""An average of the weights in 16 bits that cannot move (N4/average), in the ways people write it, and what arrives."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import train_doctor as doctor

RATE = 0.002


def added(s, p, rate):
    s.mul_(1 - rate).add_(p.to(s.dtype), alpha=rate)


def added_by_data(s, p, rate):
    s.data.mul_(1 - rate).add_(p.data.type_as(s), alpha=rate)


def added_as_part(s, p, rate):
    s.copy_((1 - rate) * s + rate * p.to(s.dtype))


def by_lerp(s, p, rate):
    s.lerp_(p.to(s.dtype), rate)


def the_way_back(s, p, rate):
    s.sub_(rate * (s - p.to(s.dtype)))


def the_way(s, p, rate):
    s += rate * (p.to(s.dtype) - s)


def in_fp32(s, p, rate):
    s.copy_(s.float().lerp_(p, rate))  # rounded once, which is not looked at


def copied(s, p, rate):
    s.copy_(p)


def gradients(s, p, rate):
    s.mul_(1 - rate).add_(p.grad.to(s.dtype), alpha=rate)


def not_whole(s, p, rate):
    s.mul_(0.9).add_(p.to(s.dtype), alpha=rate)  # no average


COARSE = (added, added_by_data, added_as_part, by_lerp, the_way_back, the_way)


def said(update, dtype=torch.bfloat16, rate=RATE, named="N4"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    shadow = copy.deepcopy(model).to(dtype).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with doctor.watch(model, optimizer=optimizer, steps=5, say=False) as report:
        for _ in range(5):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            F.mse_loss(model(x)[:, 0], x.sum(1)).backward()
            optimizer.step()
            with torch.no_grad():
                for s, p in zip(shadow.parameters(), model.parameters()):
                    update(s, p, rate)
    assert not report.faults, report.faults
    return {f.check for f in report.findings if f.severity != doctor.NOTE}


@pytest.mark.parametrize("update", COARSE)
def test_an_average_that_cannot_move_is_named(update):
    assert said(update) == {"N4"}


@pytest.mark.parametrize("update", COARSE)
@pytest.mark.parametrize("how", [{"dtype": torch.float32}, {"rate": 0.05}, {"dtype": torch.float16}])
def test_one_that_moves_is_not(update, how):
    assert not said(update, **how)


@pytest.mark.parametrize("update", [in_fp32, copied, gradients, not_whole])
def test_what_is_no_average_in_16_bits(update):
    assert not said(update)


def test_half_precision_is_finer():
    assert said(added, torch.float16, 0.0005) == {"N4"}


@pytest.mark.parametrize(("dtype", "rate"), [(torch.bfloat16, RATE), (torch.bfloat16, 0.1), (torch.float32, RATE)])
def test_torchs_own_averages(dtype, rate):
    """They take a model of one dtype, which here is trained in it with steps that arrive."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(dtype)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(1 - rate))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with doctor.watch(model, optimizer=optimizer, steps=5, say=False) as report:
        for _ in range(5):
            x = torch.randn(16, 8, dtype=dtype)
            optimizer.zero_grad()
            F.mse_loss(model(x)[:, 0], x.sum(1)).backward()
            optimizer.step()
            average.update_parameters(model)
    assert ("N4" in {f.check for f in report.findings}) == (dtype == torch.bfloat16 and rate == RATE), f"\n{report}"
