"""F30 to F32: axes regrouped, sums into repeated places, derivatives that are zero everywhere."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.bench import quiet
from tests.test_arithmetic import net, said, train


# ------------------------------------------------------------------------------------------------ F30
def laid_out(how: str):
    """Rows of 6 times and 4 features, of which a network is to learn the mean of each feature."""

    def loss_of(model):
        x = torch.randn(16, 6, 4)
        if how == "reshape":
            z = x.reshape(16, 4, 6)
        elif how == "view":
            z = x.view(16, 4, 6)
        elif how == "view_as":
            z = x.view_as(torch.empty(16, 4, 6))
        elif how == "heads":  # (batch, time, heads, size) to (batch, heads, time, size)
            z = x.view(16, 6, 2, 2).reshape(16, 2, 6, 2).sum(-1).mean(-1).repeat(1, 2).view(16, 4, 1)
        elif how == "transposed":
            z = x.transpose(1, 2)
        elif how == "transposed and laid out anew":
            z = x.permute(0, 2, 1).contiguous().view(16, 4, 6)
        elif how == "heads taken apart":
            z = x.view(16, 6, 2, 2).transpose(1, 2).reshape(16, 2, 12)[:, :, :8].reshape(16, 4, 4)
        elif how == "one more axis":
            z = x[:, :, :1].reshape(16, 1, 6).expand(16, 4, 6)
        return F.mse_loss(model(z.mean(-1)), x.mean(1))

    return loss_of


@pytest.mark.parametrize("how", ["reshape", "view", "view_as", "heads"])
def test_regrouped_axes_are_named(how):
    report = quiet(lambda: train(laid_out(how)))
    assert report.root is not None and report.root.check == "F30", f"\n{report}"


@pytest.mark.parametrize("how", ["transposed", "transposed and laid out anew", "heads taken apart", "one more axis"])
def test_axes_that_change_places_are_left_alone(how):
    assert "F30" not in said(quiet(lambda: train(laid_out(how))))


class Windows(nn.Module):
    """Series (16, 48, 4), cut into windows that are as long as the batch is large, or with their axes mixed up."""

    def __init__(self, batch_first: bool, back: bool):
        super().__init__()
        self.core, self.head = nn.GRU(4, 8, batch_first=batch_first), nn.Linear(8, 4)
        self.back = back

    def forward(self, x):
        h = self.core(x.reshape(48, 16, 4))[0]
        return self.head(h.reshape(16, 48, 8).mean(1) if self.back else h[-1])


@pytest.mark.parametrize("batch_first, back, wrong", [(True, True, False), (False, True, True), (False, False, True)])
def test_windows_as_long_as_the_batch_is_large(batch_first, back, wrong):
    def loss_of(model):
        x = torch.randn(16, 48, 4)
        return F.mse_loss(model(x), x.mean(1))

    assert ("F30" in said(quiet(lambda: train(loss_of, Windows(batch_first, back))))) is wrong


# ------------------------------------------------------------------------------------------------ F31
def summed(how: str):
    """A graph of 16 nodes and 64 edges, whose neighbours are summed."""

    def loss_of(model):
        x, source, target = torch.randn(16, 4), torch.randint(16, (64,)), torch.randint(16, (64,))
        h, total = model(x), torch.zeros(16, 4)
        if how == "+=":
            total[target] += h[source]
        elif how == "-=":
            total[target] -= h[source]
        elif how == "read, add, write":
            total[target] = total[target] + h[source]
        elif how == "two indices":
            total[target, target % 4] += h[source, source % 4]
        elif how == "index_add":
            total = total.index_add(0, target, h[source])
        elif how == "scatter_add":
            total = total.scatter_add(0, target[:, None].expand(-1, 4), h[source])
        elif how == "each once":
            places = torch.randperm(16)[:8]
            total[places] += h[:8]
        elif how == "written":  # the last one counts, as in a table that is kept up to date
            total[target] = h[source]
        elif how == "a slice":
            total[2:5] += h[2:5]
        elif how == "a mask":
            total[x[:, 0] > 0] += h[x[:, 0] > 0]
        return F.mse_loss(total, torch.ones(16, 4))

    return loss_of


@pytest.mark.parametrize("how", ["+=", "-=", "read, add, write", "two indices"])
def test_sums_that_overwrite_are_named(how):
    report = quiet(lambda: train(summed(how)))
    assert report.root is not None and report.root.check == "F31", f"\n{report}"


@pytest.mark.parametrize("how", ["index_add", "scatter_add", "each once", "written", "a slice", "a mask"])
def test_sums_that_keep_all_are_left_alone(how):
    assert "F31" not in said(quiet(lambda: train(summed(how))))


# ------------------------------------------------------------------------------------------------ F32
def derived(order: int):
    def loss_of(model):
        x = torch.rand(32, 1).requires_grad_()
        u = model(x)
        for _ in range(order):
            u = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        return (u - 1).pow(2).mean() + model(torch.zeros(1, 1)).pow(2).mean()

    return loss_of


def straight() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def test_a_second_derivative_of_straight_pieces_is_named():
    report = quiet(lambda: train(derived(2), straight()))
    assert report.root is not None and report.root.check == "F32", f"\n{report}"


@pytest.mark.parametrize("order, model", [(2, net(1, 1)), (1, net(1, 1)), (1, straight())])
def test_derivatives_that_are_not_zero_are_left_alone(order, model):
    assert "F32" not in said(quiet(lambda: train(derived(order), model)))
