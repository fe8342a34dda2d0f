"""Losses that are written by hand: each slip, its mended twin, and what may be meant."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .test_turned import ROWS, kinds, net, numbers, told

SMALL = 1e-7


def flags():
    x, y = numbers()
    return x, (y > 0).float().squeeze(1)


def half(model, bad):
    x, y = flags()
    p = model(x).squeeze(1).sigmoid()
    one = y * torch.log(p + SMALL)
    return -(one if bad else one + (1 - y) * torch.log(1 - p + SMALL)).mean()


def crossed(model, bad):
    x, y = flags()
    z = model(x).squeeze(1)
    one, other = F.logsigmoid(z), F.logsigmoid(-z)
    return -((1 - y) * one + y * other).mean() if bad else -(y * one + (1 - y) * other).mean()


def hinge(model, bad):
    x, y = flags()
    t, s = 2 * y - 1, model(x).squeeze(1)
    return F.relu(1 + t * s if bad else 1 - t * s).mean()


def no_square(model, bad):
    x, y = numbers()
    gap = model(x) - y
    return gap.mean() if bad else gap.abs().mean()


def mean_first(model, bad):
    x, y = numbers()
    gap = model(x) - y
    return gap.mean() ** 2 if bad else (gap**2).mean()


def no_logarithm(model, bad):
    x, y = flags()
    p = model(x).softmax(1).gather(1, y.long()[:, None]).squeeze(1)
    return -(p if bad else p.log()).mean()


def own_choice(model, bad):
    x, y = flags()
    z = model(x)
    return F.cross_entropy(z, z.argmax(1) if bad else y.long())


def per_class(model, bad):
    x, _ = numbers()
    shares = torch.softmax(x[:, :4], 1)
    return F.kl_div(F.log_softmax(model(x), 1), shares, reduction="mean" if bad else "batchmean")


def margin(model, bad):
    one = torch.randint(3, (ROWS,))
    a, p, n = (model(kinds(k)) for k in (one, one, (one + 1) % 3))
    gap = F.pairwise_distance(a, p) - F.pairwise_distance(a, n)
    return F.relu(gap - 0.5 if bad else gap + 0.5).mean()


def quantiles(model, bad):
    x, y = numbers()
    answers, loss = model(x), 0.0
    for k, q in enumerate((0.1, 0.5, 0.9)):
        e = answers[:, k] - y[:, 0] if bad else y[:, 0] - answers[:, k]
        loss = loss + torch.max((q - 1) * e, q * e).mean()
    return loss


def boxes(model, bad):
    """Targets are corners, or places and sizes."""
    x, _ = numbers()
    low, size = torch.rand(ROWS, 2), 0.1 + 0.4 * torch.rand(ROWS, 2)
    b = torch.cat([low, size if bad else low + size], 1)
    low, size = model(x).sigmoid().chunk(2, 1)
    a = torch.cat([low, low + size], 1)
    area = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    inside = (torch.min(a[:, 2:], b[:, 2:]) - torch.max(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
    return (1 - inside / (size.prod(1) + area - inside + 1e-6)).mean() + 0.1 * (a - b).abs().mean()


SLIPS = {
    "half": ("F87", 1, half),
    "crossed": ("F87", 1, crossed),
    "hinge": ("F87", 1, hinge),
    "no square": ("F88", 1, no_square),
    "mean first": ("F88", 1, mean_first),
    "no logarithm": ("F88", 2, no_logarithm),
    "own choice": ("F88", 2, own_choice),
    "per class": ("F89", 4, per_class),
    "margin": ("F90", 8, margin),
    "quantiles": ("F85", 3, quantiles),
    "boxes": ("F86", 4, boxes),
}


@pytest.mark.parametrize("bad", [True, False])
@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_in_a_formula(name, bad):
    torch.manual_seed(0)
    check, out, loss = SLIPS[name]
    assert told(check, net(6, out), lambda m: loss(m, bad)) is bad


def scale_invariant(model):
    """The mean of squares, less a part of the square of the mean (Eigen et al. 2014)."""
    x, y = numbers()
    gap = model(x) - y
    return (gap**2).mean() - 0.5 * gap.mean() ** 2


def scale_invariant_turned(model):
    x, y = numbers()
    gap = model(x) - y
    return -0.5 * gap.mean() ** 2 + (gap**2).mean()


def masked(model):
    """Flags are a mask here: an error counts where there is something."""
    x, y = numbers()
    return ((model(x) - y).pow(2) * (torch.rand(ROWS, 1) < 0.5)).sum() / ROWS


def pseudo_labels(model):
    """Labels of the data for some rows, the model's own for others."""
    x, y = flags()
    z, more = model(x), model(torch.randn(ROWS, 6))
    return F.cross_entropy(z, y.long()) + 0.1 * F.cross_entropy(more, more.argmax(1))


def robust(model):
    """The mean absolute error of probabilities, for noisy labels (Ghosh et al. 2017)."""
    x, y = flags()
    return (1 - model(x).softmax(1).gather(1, y.long()[:, None])).mean()


def one_quantile(model):
    """The quantile 0.9, of answer minus target: (1 - q) and -q."""
    x, y = numbers()
    e = model(x)[:, :1] - y
    return torch.max(0.1 * e, -0.9 * e).mean()


@pytest.mark.parametrize(
    "loss",
    [scale_invariant, scale_invariant_turned, masked, pseudo_labels, robust, one_quantile],
    ids=lambda f: f.__name__,
)
def test_it_is_another_formula(loss):
    torch.manual_seed(0)
    out = 2 if loss in (pseudo_labels, robust) else 1
    assert not told("F88", net(6, out), loss)


def test_flags_that_say_which_row_is_a_mask():
    """Two heads: each learns from the rows of its own kind (TARNet)."""
    torch.manual_seed(0)
    model = nn.ModuleList([net(6, 1), net(6, 1)])

    def loss(m):
        x, y = numbers()
        first = (torch.rand(ROWS, 1) < 0.5).float()
        return (first * (m[0](x) - y) ** 2 + (1 - first) * (m[1](x) - y) ** 2).mean()

    assert not told("F87", model, loss)
