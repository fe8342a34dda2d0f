"""The density of a flow beside the logarithms of its scales (F82): summed in the one and averaged in the other."""

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F

from .bench import quiet
from .test_arithmetic import said
from .test_turned import watched

ROWS, WIDE = 32, 6


class Flow(nn.Module):
    """Couplings: half of the numbers tell how the others are stretched and moved."""

    def __init__(self, inverse: bool = False):
        super().__init__()
        self.couplings, self.inverse = nn.ModuleList(nn.Linear(WIDE // 2, WIDE) for _ in range(4)), inverse

    def forward(self, x):
        logs = torch.zeros(len(x))
        for layer in self.couplings:
            a, b = x.chunk(2, 1)
            s, t = layer(a).tanh().chunk(2, 1)
            s = 0.5 * s
            b = (b - t) * (-s).exp() if self.inverse else b * s.exp() + t
            logs = logs - s.sum(1) if self.inverse else logs + s.sum(1)
            x = torch.cat([b, a], 1)
        return x, logs


prior = Normal(0.0, 1.0)
DENSITIES = {  # of what comes out and the logarithms -> loss, and whether a density is a mean where they are a sum
    "means of both": (lambda z, logs: -(prior.log_prob(z).mean() + logs.mean()), True),
    "mean of each row": (lambda z, logs: -(prior.log_prob(z).mean(1) + logs).mean(), True),
    "mean of all": (lambda z, logs: -(prior.log_prob(z).mean() + logs.sum() / len(z)), True),
    "laid out": (lambda z, logs: -(prior.log_prob(z) + logs[:, None]).mean(), True),
    "squares": (lambda z, logs: 0.5 * z.pow(2).mean() - logs.mean(), True),
    "sum": (lambda z, logs: -(prior.log_prob(z).sum(1) + logs).mean(), False),
    "sum of squares": (lambda z, logs: 0.5 * z.pow(2).sum(1).mean() - logs.mean(), False),
    "bits for each number": (lambda z, logs: -(prior.log_prob(z).sum(1) + logs).mean() / WIDE, False),
    "means over the numbers": (lambda z, logs: -(prior.log_prob(z).mean() + logs.mean() / WIDE), False),
    "sum over all": (lambda z, logs: -(prior.log_prob(z).sum() + logs.sum()), False),
    "of rows": (lambda z, logs: -(Independent(Normal(torch.zeros(WIDE), 1.0), 1).log_prob(z) + logs).mean(), False),
    "weighed": (lambda z, logs: -(0.3 * prior.log_prob(z).mean() + logs.mean()), False),
}


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("how", DENSITIES)
def test_a_density_beside_logarithms(how, inverse):
    torch.manual_seed(0)
    loss, wrong = DENSITIES[how]
    report = quiet(lambda: watched(Flow(inverse), lambda flow: loss(*flow(torch.randn(ROWS, WIDE)))))
    assert not report.faults and ("F82" in said(report)) is wrong, f"\n{report}"
    assert not wrong or "weighs 6 times too little" in report.root.diagnosis


@pytest.mark.parametrize("mean", [False, True])
def test_a_spread_that_is_a_mean_as_its_errors_are(mean):
    """A likelihood with a learned spread divides by an exp as a flow does, and nothing comes out of it."""
    torch.manual_seed(0)
    model = nn.Linear(WIDE, 2 * WIDE)

    def loss(m):
        x = torch.randn(ROWS, WIDE)
        mean_, s = m(x).chunk(2, 1)
        each = 0.5 * (x - mean_).square() * (-2 * s).exp() + s
        return (each.mean() if mean else each.sum(1).mean()) + 0.01 * F.mse_loss(mean_, x)

    assert "F82" not in said(quiet(lambda: watched(model, loss)))
