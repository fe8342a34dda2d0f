"""Penalties, weights and margins of losses that do not what they are for, and healthy programs that look like them."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor

from .bench import quiet
from .test_meetings import named
from .test_turned import net, watched

ROWS = 32


def smooth(inputs: int, out: int):
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, out))


def slope(out, x, weights=None):
    return torch.autograd.grad(out, x, weights, create_graph=True)[0]


# ------------------------------------------------------------------------------------------------ F25
def equation(how: str):
    """u' = -u, with u(0) = 1."""

    def loss(model):
        x = torch.rand(ROWS, 1, requires_grad=True)
        u = model(x)
        du = {
            "mean": lambda: slope(u.mean(), x),
            "function": lambda: slope(torch.mean(u.squeeze(1)), x),
            "by hand": lambda: slope(u.sum() / len(u), x),
            "by name": lambda: torch.autograd.grad(outputs=u.mean(), inputs=[x], create_graph=True)[0],
            "sum": lambda: slope(u.sum(), x),
            "ones": lambda: slope(u, x, torch.ones_like(u)),
            "taken back": lambda: slope(u.mean(), x) * len(x),
            "taken back by weights": lambda: slope(u.mean(), x, torch.tensor(float(ROWS))),
        }[how]()
        return (du + u).pow(2).mean() + (model(torch.zeros(1, 1)) - 1).pow(2).mean()

    return loss


MEANS = {"mean": True, "function": True, "by hand": True, "by name": True}
MEANS |= {"sum": False, "ones": False, "taken back": False, "taken back by weights": False}


@pytest.mark.parametrize("how, wrong", MEANS.items())
def test_the_slope_of_each_row(how, wrong):
    assert named("F25", smooth(1, 1), equation(how)) is wrong


@pytest.mark.parametrize("mean", (True, False))
def test_the_slope_of_one_column(mean):
    def loss(model):
        x = torch.rand(ROWS, 1, requires_grad=True)
        out = model(x)
        u, v = out[:, 0], out[:, 1:]
        du, dv = (slope(part.mean() if mean else part.sum(), x) for part in (u, v))
        return (du - v).pow(2).mean() + (dv + u[:, None]).pow(2).mean() + (model(torch.zeros(1, 1)) - 1).pow(2).mean()

    assert named("F25", smooth(1, 2), loss) is mean


@pytest.mark.parametrize("mean", (True, False))
def test_a_penalty_of_slopes(mean):
    def loss(model):
        real, fake, share = torch.randn(ROWS, 6) + 2, torch.randn(ROWS, 6), torch.rand(ROWS, 1)
        x = (share * real + (1 - share) * fake).requires_grad_()
        out = model(x)
        g = slope(out.mean() if mean else out.sum(), x)
        return model(fake).mean() - model(real).mean() + 10 * ((g.norm(2, dim=1) - 1) ** 2).mean()

    assert named("F25", net(6, 1), loss) is mean


def energy_of_a_set(model):
    """Atoms that see each other, and a force on each."""
    x = torch.randn(ROWS, 3, requires_grad=True)
    near = torch.softmax(-torch.cdist(x, x), 1) @ x
    return F.mse_loss(-slope(model(torch.cat([x, near], 1)).mean(), x), torch.randn(ROWS, 3))


def energy_and_forces(model):
    """The energy of all is their mean, and is asked for as well."""
    x = torch.randn(ROWS, 6, requires_grad=True)
    energy = model(x).mean()
    return (energy - 1).pow(2) + F.mse_loss(-slope(energy, x), torch.randn(ROWS, 6))


def direction(model):
    x = torch.randn(ROWS, 6, requires_grad=True)
    g = slope(model(x).mean(), x)
    return ((g / g.norm(dim=1, keepdim=True)) - torch.randn(ROWS, 6)).pow(2).mean()


def slope_of_a_loss(model):
    """Double backpropagation: the loss shall not hang on the input."""
    x, y = torch.randn(ROWS, 6, requires_grad=True), torch.randn(ROWS, 1)
    error = (model(x) - y).pow(2).mean()
    return error + 0.1 * slope(error, x).pow(2).sum()


def made_up_for(model):
    """The penalty is multiplied by what the mean has taken from it."""
    x = torch.randn(ROWS, 6, requires_grad=True)
    return model(x).pow(2).mean() + ROWS**2 * slope(model(x).mean(), x).pow(2).sum(1).mean()


def patches(model):
    x = torch.randn(ROWS, 3, 6, requires_grad=True)  # a critic of three patches each
    return model(x).mean() + ((slope(model(x).mean(), x).flatten(1).norm(dim=1) - 1) ** 2).mean()


def inner_loop(model):
    fast = model[2].weight - 0.1 * slope(model(torch.randn(ROWS, 6)).mean(), model[2].weight)
    x = torch.randn(ROWS, 6)
    return (F.linear(model[:2](x), fast) - x[:, :1]).pow(2).mean()


def ascent(model):
    """An attack: an input that is moved along its slope, whatever its length."""
    x = torch.randn(ROWS, 6, requires_grad=True)
    g = slope(model(x).mean(), x)
    return (model(x + 0.1 * g.sign()) - x[:, :1].detach()).pow(2).mean()


SLOPES = [energy_of_a_set, energy_and_forces, direction, slope_of_a_loss, made_up_for, patches, inner_loop, ascent]


@pytest.mark.parametrize("loss", SLOPES, ids=lambda f: f.__name__)
def test_slopes_of_means_that_are_meant(loss):
    assert not named("F25", smooth(6, 1), loss)


def system(how: str):
    """u' = v, v' = -u."""

    def loss(model):
        t = (3 * torch.rand(ROWS, 1)).requires_grad_()
        y = model(t)
        u, v = y[:, :1], y[:, 1:]
        asked = torch.cat([v, -u], 1)
        if how == "apart":
            both = torch.cat([slope(y[:, k].sum(), t) for k in range(2)], 1)
        elif how == "whole sum":
            both = slope(y.sum(), t)
        elif how == "a total":
            return (slope(y.sum(), t) + 0.1 * u).pow(2).mean()
        elif how == "forces":
            return F.mse_loss(slope(y.sum(), t), torch.randn(ROWS, 1)) + y.pow(2).mean()
        else:
            both = slope(y, t, torch.ones_like(y))
        return (both - asked).pow(2).mean()

    return loss


SYSTEMS = {"ones": True, "whole sum": True, "apart": False, "a total": False, "forces": False}


@pytest.mark.parametrize("how, wrong", SYSTEMS.items())
def test_the_slope_of_each_column(how, wrong):
    assert named("F25", smooth(1, 2), system(how)) is wrong


@pytest.mark.parametrize("apart", (True, False))
def test_slopes_in_two_directions(apart):
    def loss(model):
        x = torch.rand(ROWS, 2, requires_grad=True)
        y = model(x)
        u, v = y[:, :1], y[:, 1:]
        if apart:
            du, dv = slope(u.sum(), x), slope(v.sum(), x)
        else:
            du = dv = slope(y, x, torch.ones_like(y))
        return (du[:, :1] + v).pow(2).mean() + (dv[:, 1:] - u).pow(2).mean() + (y.mean() - 1).pow(2)

    assert named("F25", smooth(2, 2), loss) is not apart


# ------------------------------------------------------------------------------------------------ F94
def partners(how: str):
    def loss(model):
        x = torch.randn(ROWS, 6)
        a, b = (F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        zeros, own = torch.zeros(ROWS, dtype=torch.long), torch.arange(ROWS)
        both = a @ b.T / 0.1
        if how == "moco":
            first = (a * b).sum(1, keepdim=True) / 0.1
            return F.cross_entropy(torch.cat([first, both[:, 1:]], 1), zeros)
        if how == "moco of a square":  # the partner's place is taken by the last column
            first = both.diagonal()[:, None]
            return F.cross_entropy(torch.cat([first, both.masked_fill(torch.eye(ROWS) > 0, -9)], 1)[:, :ROWS], zeros)
        return {
            "": lambda: F.cross_entropy(both, zeros),
            "both ways": lambda: (F.cross_entropy(both, zeros) + F.cross_entropy(both.T, zeros)) / 2,
            "module": lambda: nn.CrossEntropyLoss()(torch.einsum("nd,md->nm", a, b).div_(0.2), zeros),
            "in two steps": lambda: F.nll_loss(F.log_softmax(both, 1), zeros),
            "mm": lambda: F.cross_entropy(torch.mm(a, b.t()) * 5, zeros),
            "right": lambda: F.cross_entropy(both, own),
        }[how]()

    return loss


PARTNERS = {"": True, "both ways": True, "module": True, "in two steps": True, "mm": True}
PARTNERS |= {"right": False, "moco": False, "moco of a square": False}


@pytest.mark.parametrize("how, wrong", PARTNERS.items())
def test_partners_of_rows(how, wrong):
    assert named("F94", net(6, 8), partners(how)) is wrong


@pytest.mark.parametrize("unit", (True, False))
def test_a_classifier_of_as_many_classes_as_rows(unit):
    """Its data come in the order of their classes."""
    model = nn.ModuleList([net(6, 8), nn.Linear(8, ROWS, bias=False)])

    def loss(model):
        weight, z = model[1].weight, model[0](torch.randn(ROWS, 6))
        if unit:
            weight, z = F.normalize(weight, dim=1), 10 * F.normalize(z, dim=1)
        return F.cross_entropy(z @ weight.T, torch.zeros(ROWS, dtype=torch.long))

    assert not named("F94", model, loss)


# ------------------------------------------------------------------------------------------------ F58
class Weighed(nn.Module):
    def __init__(self, start: float = 0.0):
        super().__init__()
        self.net, self.s = net(6, 2), nn.Parameter(torch.full((2,), start))
        self.one, self.two = nn.Parameter(torch.tensor(start)), nn.Parameter(torch.tensor(start))

    def errors(self):
        x = torch.randn(ROWS, 6)
        return (self.net(x) - x[:, :2] * torch.tensor([1.0, 3.0])).pow(2).mean(0)


FREE = {
    "exp": lambda m, e: (torch.exp(-m.s) * e).sum(),
    "spread": lambda m, e: (e / (2 * (m.s + 1) ** 2)).sum(),
    "apart": lambda m, e: torch.exp(-m.s[0]) * e[0] + 0.5 * torch.exp(-m.s[1]) * e[1],
    "two parameters": lambda m, e: (-m.one).exp() * e[0] + (-m.two).exp() * e[1],
    "as they are": lambda m, e: torch.stack([m.s[k] * e[k] for k in range(2)]).mean(),
    "softplus": lambda m, e: F.softplus(m.s).mul(e).mean(),
}
PRICED = {
    "price": lambda m, e: (torch.exp(-m.s) * e + m.s).sum(),
    "price of a spread": lambda m, e: (e / (2 * (m.s + 1) ** 2) + (1 + (m.s + 1) ** 2).log()).sum(),
    "price elsewhere": lambda m, e: (torch.exp(-m.s) * e).sum() + 0.5 * m.s.sum(),
    "softmax": lambda m, e: (m.s.softmax(0) * e).sum(),
    "temperature": lambda m, e: F.cross_entropy(m.net(torch.randn(ROWS, 6)) * m.one.exp(), torch.arange(ROWS) % 2),
    "frozen": lambda m, e: (torch.exp(-m.s.detach()) * e).sum(),
    "a dual variable": lambda m, e: e.sum() - (m.s * (0.1 - e.detach())).sum(),
    "a gate": lambda m, e: F.mse_loss(m.net(x := torch.randn(ROWS, 6)) * m.s, x[:, :2]),
    "rewards": lambda m, e: (torch.exp(-m.s) * (e - 5)).sum(),
    "bent": lambda m, e: (1 + (torch.exp(-m.s) * e).sum()).log() + 0 * m.one,
}


@pytest.mark.parametrize("how", FREE)
def test_weights_that_cost_nothing(how):
    assert named("F58", Weighed(1.0 if how == "as they are" else 0.0), lambda m: FREE[how](m, m.errors()))


@pytest.mark.parametrize("how", PRICED)
def test_weights_that_have_a_price(how):
    assert not named("F58", Weighed(), lambda m: PRICED[how](m, m.errors()))


def test_weights_whose_gradient_is_turned_round():
    """Points with large errors shall count more."""
    model = Weighed(1.0)
    model.s.register_hook(lambda g: -g)
    assert not named("F58", model, lambda m: (m.s * m.errors()).sum())


def test_weights_that_are_shared_out_anew():
    """Of two tasks; their sum stays the same."""
    model = Weighed(1.0)

    def loss(model):
        with torch.no_grad():
            model.s.mul_(2 / model.s.sum())
        return (model.s * model.errors()).sum()

    assert not named("F58", model, loss)


# ------------------------------------------------------------------------------------------------ F90
def angles(how: str):
    def loss(model):
        x = torch.randn(ROWS, 6)
        y = x[:, :5].argmax(1)
        z, weight, one = model[0](x), model[1].weight, F.one_hot(y, 5).float()
        if "by hand" in how:
            c = z / z.norm(dim=1, keepdim=True) @ (weight / weight.norm(dim=1, keepdim=True)).t()
        elif "pairs" in how:
            c = F.cosine_similarity(z[:, None], weight[None], dim=-1)
        else:
            c = F.linear(F.normalize(z), F.normalize(weight))
        theta, rows = c.clamp(-0.9999, 0.9999).acos(), torch.arange(ROWS)
        if "in place" in how:
            c[rows, y] += 0.3 if "right" not in how else -0.3
            return F.cross_entropy(16 * c, y)
        made = {
            "added": lambda: c + 0.3 * one,
            "added, by hand": lambda: torch.add(c, one, alpha=0.3),
            "added, pairs": lambda: torch.where(one.bool(), c + 0.3, c),
            "angle less": lambda: torch.where(one.bool(), torch.cos(theta - 0.2), c),
            "all": lambda: torch.cos(theta + 0.3),
            "all, by hand": lambda: c * 0.955 - (1 - c**2).clamp_min(0).sqrt() * 0.2955,
            "right": lambda: c - 0.3 * one,
            "right, by hand": lambda: torch.cos(theta + 0.3 * one),
            "right, pairs": lambda: torch.where(one.bool(), torch.cos(theta + 0.3), c),
            "none": lambda: c,
            "a negative margin": lambda: c - -0.3 * one,
            "a bias": lambda: c + torch.linspace(0, 0.3, 5),
        }[how]()
        return nn.CrossEntropyLoss()(made * 16, y)

    return loss


MARGINS = ("added", "added, by hand", "added, pairs", "added in place", "angle less", "all", "all, by hand")
HEALTHY = ("right", "right, by hand", "right, pairs", "right in place", "none", "a negative margin", "a bias")


@pytest.mark.parametrize("how", MARGINS + HEALTHY)
def test_margins_of_cosines(how):
    model = nn.ModuleList([net(6, 8), nn.Linear(8, 5, bias=False)])
    assert named("F90", model, angles(how)) is (how in MARGINS)


# ------------------------------------------------------------------------------------------------ F75, F88
def error(model):
    x = torch.randn(ROWS, 6)
    return F.cross_entropy(model(x), (x[:, 0] > 0).long())


def size(model, of, matrices: bool = False):
    return sum(of(p) for p in model.parameters() if p.dim() > 1 or not matrices)


def two_norms(model):
    return torch.stack([p.norm() for p in model.parameters() if p.dim() > 1]).sum()


def together(model):
    return torch.cat([p.flatten() for p in model.parameters()])


REWARDS = {
    "squares": lambda m: error(m) - 1e-3 * size(m, lambda p: (p**2).sum()),
    "norms": lambda m: error(m) - 1e-3 * two_norms(m),
    "absolute": lambda m: error(m) + -1e-3 * size(m, lambda p: p.abs().sum(), True),
    "in turns": lambda m: error(m).sub(size(m, lambda p: p.mul(p).mean()), alpha=0.01),
    "together": lambda m: -1e-2 * torch.linalg.norm(together(m)) + error(m),
    "norm squared": lambda m: error(m) - 0.5e-3 * m[0].weight.norm(2) ** 2,
}
COSTS = {
    "squares": lambda m: error(m) + 1e-3 * size(m, lambda p: (p**2).sum()),
    "both negated": lambda m: -(-error(m) - 1e-3 * size(m, lambda p: p.abs().sum())),
    "none": lambda m: error(m) - 0.0 * size(m, lambda p: p.sum()),
    "all used": lambda m: error(m) + 0 * size(m, lambda p: p.sum()),
    "centred": lambda m: error(m) + 1e-2 * m[0].weight.sum() ** 2,
    "orthogonal": lambda m: error(m) - 1e-2 * (m[0].weight @ m[0].weight.T).diagonal().log().sum(),
    "of a matrix and its wish": lambda m: error(m) + (m[0].weight - 1).abs().mean(),
}
PLAIN_SUMS = {
    "sums": lambda m: error(m) + 1e-3 * size(m, lambda p: p.sum()),
    "means": lambda m: error(m) + 0.1 * torch.stack([p.mean() for p in m.parameters()]).sum(),
    "together": lambda m: error(m).add(together(m).sum(), alpha=1e-3),
    "matrices": lambda m: error(m) + 1e-3 * (torch.sum(m[0].weight) + torch.sum(m[2].weight)),
}


@pytest.mark.parametrize("how", REWARDS)
def test_penalties_that_reward(how):
    assert named("F75", net(6, 2), REWARDS[how])


@pytest.mark.parametrize("how", PLAIN_SUMS)
def test_penalties_without_a_size(how):
    assert named("F88", net(6, 2), PLAIN_SUMS[how])


@pytest.mark.parametrize("check", ("F75", "F88"))
@pytest.mark.parametrize("how", COSTS)
def test_penalties_that_cost(how, check):
    assert not named(check, net(6, 2), COSTS[how])


class Noisy(nn.Module):
    """Noise of a learned size, and a matrix whose numbers are spread by a learned spread."""

    def __init__(self):
        super().__init__()
        self.head, self.noise = nn.Linear(6, 2), nn.Parameter(torch.randn(ROWS, 6))
        self.mean, self.log_spread = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.full((6, 6), -3.0))

    def forward(self, x):
        weight = self.mean + self.log_spread.exp() * torch.randn(6, 6)
        return self.head((x + self.noise) @ weight)


@pytest.mark.parametrize("check", ("F75", "F88"))
def test_noise_that_is_to_be_large(check):
    def loss(m):
        spread = m.log_spread.exp()
        cost = (0.5 * (spread**2 + m.mean**2) - m.log_spread).mean()
        return error(m) - 1e-2 * m.noise.abs().mean() + 1e-2 * cost

    assert not named(check, Noisy(), loss)


def test_weights_above_zero():
    model = net(6, 2)
    for p in model.parameters():
        p.data.abs_()
    assert not named("F88", model, lambda m: error(m) + 1e-3 * size(m, lambda p: p.sum()))


# ------------------------------------------------------------------------------------------------ F100
def shares(how: str):
    def loss(model):
        x = torch.randn(ROWS, 6)
        y = torch.poisson(2 * x[:, :1].exp()) if how != "no zeros" else 0.1 + x[:, :1].exp()
        y[0] = 0 if how != "no zeros" else 0.1
        out, there = model(x), (y > 0).float()
        gap = out - y
        return {
            "percentage": lambda: (gap.abs() / (y + 1e-6)).mean(),
            "divided first": lambda: torch.abs((y - out) / (y.abs() + 1e-8)).mean() * 100,
            "bounded below": lambda: ((y - out).abs() / y.clamp(min=1e-6)).sum() / ROWS,
            "function": lambda: torch.div(F.l1_loss(out, y, reduction="none"), torch.clamp_min(y, 1e-5)).mean(),
            "squares": lambda: (gap / (y + 1e-5)).pow(2).mean(),
            "no zeros": lambda: (gap.abs() / (y + 1e-6)).mean(),
            "masked": lambda: (gap.abs() / (y + 1e-6) * there).sum() / there.sum(),
            "left out": lambda: (gap.abs() / (y + 1e-6))[y > 0].mean(),
            "bounded above": lambda: (gap.abs() / (y + 1e-6)).clamp(max=10).mean(),
            "of all": lambda: gap.abs().sum() / (y.sum() + 1e-6),
            "more than a trace": lambda: (gap.abs() / (y + 1)).mean(),
            "symmetric": lambda: (gap.abs() / (out.abs() + y + 1e-6)).mean(),
            "spreads": lambda: ((gap / (torch.rand(ROWS, 1) ** 8 + 1e-6)) ** 2).mean(),
        }[how]()

    return loss


PERCENTS = ("percentage", "divided first", "bounded below", "function", "squares")
BOUNDED = ("no zeros", "masked", "left out", "bounded above", "of all", "more than a trace", "symmetric", "spreads")


@pytest.mark.parametrize("how", PERCENTS + BOUNDED)
def test_shares_of_targets(how):
    model = net(6, 1)
    assert named("F100", model, lambda m: 1e-6 * shares(how)(m)) is (how in PERCENTS)


# ------------------------------------------------------------------------------------------------ F105
def players(how: str):
    """The findings on a generator and a critic that take turns."""
    torch.manual_seed(0)
    ends = [] if how in ("unbounded", "classes of logits") else [nn.Sigmoid()]
    generator, critic = net(4, 2), nn.Sequential(*net(2, 1), *(ends if how != "function" else []))
    answer = (lambda x: torch.sigmoid(critic(x))) if how == "function" else critic
    steps = [torch.optim.Adam(m.parameters(), 1e-3) for m in (generator, critic)]
    ones, zeros = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)

    def critics(real, fake):
        return {
            "as it is": lambda: answer(fake).mean() - answer(real).mean(),
            "function": lambda: -(answer(real).mean() - answer(fake).mean()),
            "one mean": lambda: torch.mean(answer(fake) - answer(real)),
            "squeezed": lambda: answer(fake).squeeze(1).mean() + answer(real).squeeze(1).neg().mean(),
            "unbounded": lambda: answer(fake).mean() - answer(real).mean(),
            "binary": lambda: F.binary_cross_entropy(answer(real), ones) + F.binary_cross_entropy(answer(fake), zeros),
            "logarithms": lambda: -(answer(real).log() + (1 - answer(fake)).log()).mean(),
            "squares": lambda: (answer(real) - 1).pow(2).mean() + answer(fake).pow(2).mean(),
            "a mean beside": lambda: (
                answer(fake).mean() - answer(real).mean() + F.binary_cross_entropy(answer(real), ones)
            ),
            "hinge": lambda: F.relu(1 - answer(real)).mean() + F.relu(1 + answer(fake)).mean(),
        }[how]()

    def program():
        with doctor.watch(nn.ModuleList([generator, critic]), optimizer=steps, steps=8, say=False) as report:
            for _ in range(5):
                fake, real = generator(torch.randn(ROWS, 4)), torch.randn(ROWS, 2)
                for step in (1, 0):
                    for optimizer in steps:
                        optimizer.zero_grad()
                    (critics(real, fake.detach()) if step else mine(fake)).backward()
                    steps[step].step()
        return report

    def mine(fake):
        return F.binary_cross_entropy(answer(fake), ones) if how == "binary" else -answer(fake).mean()

    report = quiet(program)
    assert not report.faults, report.faults
    return report


CRITICS = ("as it is", "function", "one mean", "squeezed")
DISCRIMINATORS = ("unbounded", "binary", "logarithms", "squares", "a mean beside", "hinge")


@pytest.mark.parametrize("how", CRITICS + DISCRIMINATORS)
def test_answers_of_critics(how):
    report = players(how)
    assert ("F105" in {f.check for f in report.findings}) is (how in CRITICS)
    assert how not in CRITICS or report.root.check == "F105"


def test_a_difference_of_two_classes():
    """Shares of two classes, by a classifier whose features have an optimizer of their own."""
    torch.manual_seed(0)
    features, head = net(6, 8), nn.Sequential(nn.Linear(8, 1), nn.Sigmoid())
    steps = [torch.optim.Adam(m.parameters(), 1e-3) for m in (features, head)]

    def program():
        with doctor.watch(nn.ModuleList([features, head]), optimizer=steps, steps=8, say=False) as report:
            for _ in range(5):
                x = torch.randn(ROWS, 6)
                (head(features(x - 1)).mean() - head(features(x + 1)).mean()).backward()
                for optimizer in steps:
                    optimizer.step()
                    optimizer.zero_grad()
        return report

    assert "F105" not in {f.check for f in quiet(program).findings}


# ------------------------------------------------------------------------------------------------ F103
class Taught(nn.Module):
    """A student, and a teacher that knows the classes by other numbers."""

    def __init__(self, names, sure: float = 8.0):
        super().__init__()
        self.student, self.names, self.sure = net(6, len(names)), torch.tensor(names), sure

    def teach(self, y):
        with torch.no_grad():
            return self.sure * F.one_hot(self.names[y], len(self.names)) + torch.randn(len(y), len(self.names))


ORDERS = ([2, 0, 1, 3, 5, 4], [1, 2, 3, 4, 5, 0], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0], [1, 0, 2, 3, 4, 5])
FEW_CLASSES = {"sure": 8.0, "new": 1.5}


def taught(how: str = ""):
    def loss(model):
        x = torch.randn(2 * ROWS, 6)
        y = x.argmax(1)
        teacher, out = model.teach(y), model.student(x)
        if how == "rows without labels":
            y, labelled = y.roll(1), model.student(x.roll(1, 0))
        soft, asked = (out / 2).log_softmax(1), F.softmax(teacher / 2, dim=1)
        distance = {
            "log target": lambda: F.kl_div(soft, (teacher / 2).log_softmax(1), reduction="batchmean", log_target=True),
            "soft labels": lambda: F.cross_entropy(out / 2, asked),
            "by hand": lambda: -(asked * soft).sum(1).mean(),
            "module": lambda: nn.KLDivLoss(reduction="batchmean")(soft, asked),
        }.get(how, lambda: F.kl_div(soft, asked, reduction="batchmean"))()
        out = labelled if how == "rows without labels" else out
        return 4 * distance + (F.cross_entropy(out, y) if how != "no labels" else 0)

    return loss


@pytest.mark.parametrize("how", ("", "log target", "soft labels", "by hand", "module"))
def test_a_teacher_of_other_classes(how):
    assert named("F103", Taught(ORDERS[0]), taught(how))
    assert not named("F103", Taught(ORDERS[2]), taught(how))


@pytest.mark.parametrize("names", ORDERS[1:])
def test_orders_of_classes(names):
    assert named("F103", Taught(names), taught()) is (names == ORDERS[1])


@pytest.mark.parametrize("how", FEW_CLASSES)
def test_an_order_of_few_classes(how):
    """A new teacher may happen to tell three kinds apart."""

    def loss(model):
        y = torch.randint(3, (2 * ROWS,))
        x, teacher = F.one_hot(y, 6).float(), FEW_CLASSES[how] * F.one_hot((y + 1) % 3, 3).float()
        out = model(x)
        return F.kl_div(out.log_softmax(1), teacher.softmax(1), reduction="batchmean") + F.cross_entropy(out, y)

    assert named("F103", net(6, 3), loss) is (how == "sure")


@pytest.mark.parametrize("how", ("no labels", "rows without labels"))
def test_a_teacher_beside_labels(how):
    assert not named("F103", Taught(ORDERS[2]), taught(how))


@pytest.mark.parametrize("how", ("", "log target", "soft labels", "by hand", "module"))
def test_a_teacher_that_is_asked_about_other_rows(how):
    model = Taught(ORDERS[2])
    right, model.teach = model.teach, lambda y: right(y).roll(1, 0)
    assert named("F103", model, taught(how))


@pytest.mark.parametrize("sure", (20.0, 5.0))
def test_a_few_rows_tell_of_a_teacher_without_a_doubt(sure):
    """72 rows in three steps."""

    def loss(model):
        x = torch.randn(24, 6)
        y = x.argmax(1)
        teacher, out = model.teach(y).roll(1, 0), model.student(x)
        soft = F.kl_div((out / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean")
        return soft + F.cross_entropy(out, y)

    assert named("F103", Taught(ORDERS[2], sure), loss) is (sure == 20.0)


@pytest.mark.parametrize("names", (ORDERS[0], ORDERS[2]))
def test_a_teacher_that_knows_little(names):
    assert not named("F103", Taught(names, 0.5), taught())


def test_two_students_that_teach_each_other():
    def loss(model):
        x = torch.randn(2 * ROWS, 6)
        one, two = model[0](x), model[1](x)
        return F.cross_entropy(one, x.argmax(1)) + F.kl_div(one.log_softmax(1), two.detach().softmax(1))

    assert not named("F103", nn.ModuleList([net(6, 6), net(6, 6)]), loss)


# ------------------------------------------------------------------------------------------------ D32
class Conditional(nn.Module):
    """A network that is given labels beside its input."""

    def __init__(self, inputs: int, out: int, how: str):
        super().__init__()
        self.how, self.table, self.net = how, nn.Embedding(4, 4), net(inputs + 4, out)

    def forward(self, x, y):
        label = {
            "table": lambda: self.table(y),
            "one-hot": lambda: F.one_hot(y, 4).float(),
            "rows of eye": lambda: torch.eye(4)[y],
        }[self.how]()
        return self.net(torch.cat([x, label], 1) if self.how != "one-hot" else torch.cat((label, x), dim=-1))


def conditioned(how: str, labels: str = "table"):
    torch.manual_seed(0)
    made, judge = Conditional(2, 2, labels), Conditional(2, 1, labels)
    steps = [torch.optim.Adam(m.parameters(), 1e-3) for m in (made, judge)]
    middles = 2 * torch.randn(4, 2)
    yes, no = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)

    def says(x, y, asked):
        return F.binary_cross_entropy_with_logits(judge(x, y), asked)

    def step():
        y, other = torch.randint(4, (ROWS,)), torch.randint(4, (ROWS,))
        real = middles[y] + 0.1 * torch.randn(ROWS, 2)
        given = real if how == "translator" else torch.randn(ROWS, 2)
        fake = made(given, other)
        shown = y if how in ("wrong", "translator", "pairs of both kinds") else other
        steps[1].zero_grad()
        loss = says(real, y, yes) + says(fake.detach(), shown, no)
        if how in ("mismatched", "pairs of both kinds"):
            loss = loss + says(real, other, no) + says(fake.detach(), other, no)
        loss.backward()
        steps[1].step()
        steps[0].zero_grad()
        loss = says(fake, other if how == "pairs of both kinds" else shown, yes)
        if how == "back again":
            loss = loss + F.l1_loss(made(fake, y), real)
        loss.backward()
        steps[0].step()

    def program():
        with doctor.watch(nn.ModuleList([made, judge]), optimizer=steps, steps=8, say=False) as report:
            for _ in range(5):
                step()
        return report

    report = quiet(program)
    assert not report.faults, report.faults
    return report


@pytest.mark.parametrize("labels", ("table", "one-hot", "rows of eye"))
def test_fakes_judged_under_other_labels(labels):
    assert conditioned("wrong", labels).root.check == "D32"
    assert "D32" not in {f.check for f in conditioned("right", labels).findings}


@pytest.mark.parametrize("how", ("mismatched", "pairs of both kinds", "back again", "translator"))
def test_labels_that_are_not_those_of_what_is_judged(how):
    assert "D32" not in {f.check for f in conditioned(how).findings}


# ------------------------------------------------------------------------------------------------ S35
def trained(model, after) -> bool:
    """Whether S35 is the root, where `after` is called after each step."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def program():
        with doctor.watch(model, optimizer=optimizer, steps=8, say=False) as report:
            for step in range(8):
                optimizer.zero_grad()
                error(model).backward()
                optimizer.step()
                after(model, step)
        return report

    report = quiet(program)
    assert not report.faults, report.faults
    root = report.root is not None and report.root.check == "S35"
    assert root or "S35" not in {f.check for f in report.findings}
    return root


class Keeper:
    def __init__(self):
        self.best, self.best_state, self.last = {}, None, None
        self.other = net(6, 2)

    def one(self, model, step):
        self.best_state = model.state_dict()

    def entry(self, model, step):
        if step < 2:
            self.best["weights"] = model.state_dict()

    def tensors(self, model, step):
        self.best_state = {k: v for k, v in model.state_dict().items()}  # noqa: C416

    def on_the_processor(self, model, step):
        best_weights = {k: v.detach() if step > 99 else v for k, v in model.state_dict().items()}
        self.best = best_weights

    def copied(self, model, step):
        self.best_state = copy.deepcopy(model.state_dict())

    def cloned(self, model, step):
        self.best_state = {k: v.clone() for k, v in model.state_dict().items()}

    def cloned_later(self, model, step):
        self.best_state = model.state_dict()
        self.best_state = {k: v.clone() for k, v in self.best_state.items()}

    def saved(self, model, step):
        self.best_state = model.state_dict()
        torch.save({"model": self.best_state, "step": step}, io.BytesIO())

    def saved_at_once(self, model, step):
        for best in (io.BytesIO(),):
            torch.save(model.state_dict(), best)

    def loaded(self, model, step):
        self.best_state = model.state_dict()
        self.other.load_state_dict(self.best_state)

    def read(self, model, step):
        self.last = model.state_dict()

    def forgotten(self, model, step):
        best_state = model.state_dict()
        assert best_state


KEPT = ("one", "entry", "tensors", "on_the_processor")
LEFT = ("copied", "cloned", "cloned_later", "saved", "saved_at_once", "loaded", "read", "forgotten")


@pytest.mark.parametrize("how", KEPT + LEFT)
def test_the_best_weights_are_copied(how):
    assert trained(net(6, 2), getattr(Keeper(), how)) is (how in KEPT)


# ------------------------------------------------------------------------------------------------ other kinds
def test_complex_targets_are_no_angles():
    def loss(model):
        wanted = torch.randn(ROWS, 1, dtype=torch.cfloat)
        return (torch.view_as_complex(model(torch.randn(ROWS, 6)).view(ROWS, 1, 2)) - wanted).abs().square().mean()

    report = watched(net(6, 2), loss)
    assert not report.faults and "F102" not in {f.check for f in report.findings}


def test_labels_of_one_byte_beside_cosines():
    classes = nn.Parameter(torch.randn(5, 8))

    def loss(model):
        y = torch.randint(5, (ROWS,), dtype=torch.uint8)
        x = torch.randn(ROWS, 6) + y[:, None]
        return F.cross_entropy(10 * F.normalize(model(x), dim=1) @ F.normalize(classes, dim=1).T, y)

    report = watched(net(6, 8), loss)
    assert not report.faults and "F90" not in {f.check for f in report.findings}
