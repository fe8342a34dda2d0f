"""Terms without a slope (F2), ranges of real and made (D35), shares along edges (F48), members that are copies (S49),
exchanged states (S45), and healthy programs like them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor

from .bench import quiet
from .test_meetings import reported
from .test_turned import net

ROWS, STEPS = 32, 10


def root(report) -> str | None:
    return report.root.check if report.findings else None


def named(check: str, report) -> bool:
    """As the root, or not at all."""
    found = check in {f.check for f in report.findings}
    assert not found or root(report) == check, f"\n{report}"
    return found


# ------------------------------------------------------------------------------------------------ F2
class Round(torch.autograd.Function):
    """Straight through, and called as torch's own is."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def dice(p, y):
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def of_terms(how: str):
    def loss(model):
        x = torch.randn(ROWS, 4)
        y = (x[:, :1] > 0).float()
        out = model(x)
        p, bce = out.sigmoid(), F.binary_cross_entropy_with_logits(out, y)
        each = F.binary_cross_entropy_with_logits(out, y, reduction="none")
        return {
            "rounded": lambda: bce + dice(p.round(), y),
            "weighted": lambda: 0.5 * bce + 0.5 * dice(torch.round(p), y),
            "signs": lambda: bce + 0.1 * F.mse_loss(torch.sign(out), 2 * y - 1),
            "floors, first": lambda: (dice((p + 0.5).floor(), y) + bce) / 2,
            "stacked": lambda: torch.stack([bce, dice(p.round(), y)]).mean(),
            "for each row": lambda: (each + (p.round() - y) ** 2).mean(),
            "soft": lambda: bce + dice(p, y),
            "straight through": lambda: bce + dice(p + (p.round() - p).detach(), y),
            "a function of one's own": lambda: bce + dice(Round.apply(p), y),
            "sign times": lambda: bce + 0.1 * (out.sign() * out).mean(),
            "a fraction": lambda: bce + 0.1 * (out - out.floor()).mean(),
            "a fraction, squared": lambda: bce + 0.1 * ((out - out.round()) ** 2).mean(),
            "a wrap": lambda: bce + 0.1 * (out - 2 * torch.round(out / 2)).mean(),
            "an accuracy in the log": lambda: bce + 0.0 * float((p.round() == y).float().mean()),
            "targets": lambda: bce + 0.1 * F.mse_loss(out, p.round().detach()),
        }[how]()

    return loss


DEAD = ["rounded", "weighted", "signs", "floors, first", "stacked", "for each row"]
ALIVE = ["soft", "straight through", "a function of one's own", "sign times", "a fraction", "a fraction, squared"]
ALIVE += ["a wrap", "an accuracy in the log", "targets"]


@pytest.mark.parametrize("how", DEAD + ALIVE)
def test_a_term_needs_a_way_with_a_slope(how):
    assert named("F2", reported(net(4, 1), of_terms(how))) is (how in DEAD)


def test_a_loss_of_decisions_alone_has_other_names():
    assert not named(
        "F2",
        reported(
            net(4, 1), lambda model: dice(model(torch.randn(ROWS, 4)).sigmoid().round(), 0.5 * torch.ones(ROWS, 1))
        ),
    )


# ------------------------------------------------------------------------------------------------ D35
def adversaries(how: str):
    torch.manual_seed(0)
    last = nn.Sigmoid() if how == "sigmoid" else nn.Identity() if how == "by hand" else nn.Tanh()
    made = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), last)
    judge = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    pictured = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1))
    judge = pictured if how == "pictures" else judge
    optimizers = [torch.optim.Adam(m.parameters(), 2e-4, betas=(0.5, 0.999)) for m in (judge, made)]
    data = torch.rand(256, 64)
    one, loss_of = torch.ones(ROWS, 1), F.binary_cross_entropy_with_logits
    if how in ("negatives", "moved real"):
        data = data * 2 - 1

    def fake():
        x = made(torch.randn(ROWS, 8))
        x = torch.tanh(x) if how == "by hand" else (x + 1) / 2 if how == "moved" else x
        return x.view(-1, 1, 8, 8) if how == "pictures" else x

    def step():
        real, x = data[torch.randint(256, (ROWS,))], fake()
        if how == "moved real":
            real = real.clamp(-1, 1)
        if how == "pictures":
            real = real.view(-1, 1, 8, 8)
        optimizers[0].zero_grad()
        if how == "two backwards":
            loss_of(judge(real), one).backward()
            loss_of(judge(x.detach()), 0 * one).backward()
        elif how == "hinge":
            (F.relu(1 - judge(real)).mean() + F.relu(1 + judge(x.detach())).mean()).backward()
        else:
            (loss_of(judge(real), one) + loss_of(judge(x.detach()), 0 * one)).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        (-judge(x).mean() if how == "hinge" else loss_of(judge(x), one)).backward()
        optimizers[1].step()

    def run():
        with doctor.watch(None, optimizer=optimizers, steps=STEPS, say=False) as report:
            for _ in range(STEPS):
                step()
        return report

    report = quiet(run)
    assert not report.faults, report.faults
    return report


RANGES = {"as they are": True, "pictures": True, "by hand": True, "two backwards": True, "hinge": True}
RANGES |= {"sigmoid": False, "moved": False, "negatives": False, "moved real": False, "dark": True}


@pytest.mark.parametrize("how, wrong", RANGES.items())
def test_what_is_made_lies_where_the_data_do(how, wrong):
    assert named("D35", adversaries(how)) is wrong


class Cell(nn.Module):
    """A recurrent network by hand: zeros, and then what a tanh gave, go into one layer."""

    def __init__(self, start):
        super().__init__()
        self.start, self.w, self.u, self.out = start, nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        h = self.start(len(x))
        for t in range(5):
            h = torch.tanh(self.w(x[:, t]) + self.u(h))
        return self.out(h)


def test_states_that_begin_with_zeros_are_no_data():
    def loss(model):
        x = torch.randn(ROWS, 5, 4)
        return F.mse_loss(model(x), x.mean((1, 2))[:, None])

    assert not named("D35", reported(Cell(lambda rows: torch.zeros(rows, 16)), loss))


@pytest.mark.parametrize("calls", [3, 5])
def test_a_layer_that_is_called_again_with_its_own_answer(calls):
    def loss(model):
        h = x = torch.rand(ROWS, 16)
        for _ in range(calls):
            h = torch.tanh(model[0](h))
        return F.mse_loss(model[1](h), x.mean(1, keepdim=True))

    assert not named("D35", reported(nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 1)]), loss))


def test_a_tanh_that_is_asked_for_the_data_learns_where_they_lie():
    def loss(model):
        x = torch.rand(ROWS, 64)
        again = model[1](model[0](x))
        return F.mse_loss(again, x) + F.mse_loss(model[0](again), model[0](x).detach())

    coder = nn.ModuleList([nn.Linear(64, 16), nn.Sequential(nn.Linear(16, 64), nn.Tanh())])
    assert not named("D35", reported(coder, loss))


# ------------------------------------------------------------------------------------------------ F48
NODES, EDGES = 40, 200


class Attention(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(6, 16), nn.Linear(16, 3)
        self.a, self.b = nn.Linear(16, 1, bias=False), nn.Linear(16, 1, bias=False)

    def forward(self, x, edges):
        src, dst = edges
        h, how, n = self.first(x), self.how, len(x)
        score = F.leaky_relu(self.a(h)[src] + self.b(h)[dst], 0.2).squeeze(-1)
        e = torch.exp(score - score.detach().max())
        if how == "degrees":
            e = torch.ones(len(src))
        if how == "walk of degrees":
            return self.last(
                h
                + torch.zeros_like(h).index_add(
                    0, dst, h[src] / torch.bincount(src, minlength=n).clamp(min=1)[src][:, None]
                )
            )
        end = dst if how.startswith("right") else src
        if how == "numbers":  # a learned walk: shares of one number are sent out
            share = e / torch.zeros(n).index_add(0, end, e)[end]
            mass = torch.zeros(n).index_add(0, dst, share * h.mean(1)[src])
            return self.last(h + mass[:, None])
        if how == "pool":  # each node is shared out among a few places
            places = dst % 5
            share = e / torch.zeros(n).index_add(0, src, e)[src]
            pooled = torch.zeros(5, 16).index_add(0, places, share[:, None] * h[src])
            return self.last(h + pooled.mean(0))
        if how in ("scattered", "right, scattered"):
            total = torch.zeros(n).scatter_add(0, end, e)
            share = (e / (total.index_select(0, end) + 1e-9)).unsqueeze(-1)
            messages = share * h.index_select(0, src)
            out = torch.zeros(n, 16).scatter_add_(0, dst[:, None].expand_as(messages), messages)
        elif how == "in place":
            total = torch.zeros(n)
            total.index_add_(0, end, e)
            out = torch.zeros(n, 16)
            out.index_add_(0, dst, h[src] * (e / total[end].clamp(min=1e-9)).view(-1, 1))
        elif how == "again":
            share = e / torch.zeros(n).index_add(0, src, e)[src]
            share = share / (torch.zeros(n).index_add(0, dst, share)[dst] + 1e-9)
            out = torch.zeros(n, 16).index_add(0, dst, share[:, None] * h[src])
        else:
            share = e / (torch.zeros(n).index_add(0, end, e)[end] + 1e-12)
            if how == "right, a copy":
                dst = dst.clone()
            out = torch.zeros_like(h).index_add(0, dst, share[:, None] * h[src])
        return self.last(F.elu(out))


WRONG = ["by the source", "scattered", "in place"]
RIGHT = ["right", "right, scattered", "right, a copy", "degrees", "walk of degrees", "numbers", "pool", "again"]


@pytest.mark.parametrize("how", WRONG + RIGHT)
def test_shares_of_edges_sum_to_one_where_they_are_summed(how):
    torch.manual_seed(1)
    x, loops = torch.randn(NODES, 6), torch.arange(NODES).expand(2, -1)
    edges = torch.cat([torch.randint(NODES, (2, EDGES)), loops], 1)
    y = x[:, :3].argmax(1)
    report = reported(Attention(how), lambda model: F.cross_entropy(model(x, edges), y))
    assert named("F48", report) is (how in WRONG)


# ------------------------------------------------------------------------------------------------ S49
class Members(nn.Module):
    def __init__(self, members):
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x):
        return torch.stack([m(x) for m in self.members])


class Twins(nn.Module):
    """Two critics with names of their own."""

    def __init__(self, one, two):
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x):
        return torch.stack([self.one(x), self.two(x)])


class Dropping(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1))


def ensemble(how: str) -> nn.Module:
    torch.manual_seed(3)
    base = net(4, 1)
    if how == "copies":
        return Members([copy.deepcopy(base) for _ in range(4)])
    if how == "loaded":
        members = [net(4, 1) for _ in range(3)]
        for m in members:
            m.load_state_dict(base.state_dict())
        return Members(members)
    if how == "two critics":
        return Twins(base, copy.deepcopy(base))
    if how == "two of four":
        return Members([net(4, 1), base, copy.deepcopy(base), net(4, 1)])
    if how == "one object":
        return Members([base, base])
    if how == "dropout":
        one = Dropping()
        return Members([one, copy.deepcopy(one)])
    if how == "a frozen copy":
        return Twins(base, copy.deepcopy(base).requires_grad_(False))
    if how == "zeros":
        made = Members([nn.Linear(4, 1) for _ in range(3)])
        for p in made.parameters():
            nn.init.zeros_(p)
        return made
    return Members([net(4, 1) for _ in range(4)])


@pytest.mark.parametrize("how", ["copies", "loaded", "two critics", "two of four"])
def test_members_are_made_anew(how):
    assert named("S49", reported(ensemble(how), asked))


@pytest.mark.parametrize("how", ["made anew", "one object", "dropout", "a frozen copy", "zeros"])
def test_members_that_are_no_copies_of_each_other(how):
    assert not named("S49", reported(ensemble(how), asked))


def asked(model):
    x = torch.randn(ROWS, 4)
    out = model(x)
    return F.mse_loss(out, x.sum(1, keepdim=True).expand_as(out))


def test_towers_that_are_given_other_things_drift_apart():
    def loss(model):
        x = torch.randn(ROWS, 4)
        return F.mse_loss(model.one(x) * model.two(x + torch.randn(ROWS, 4)), x[:, :1])

    base = net(4, 1)
    assert not named("S49", reported(Twins(base, copy.deepcopy(base)), loss))


def test_layers_that_torch_copies():
    model = nn.Sequential(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 3), nn.Linear(8, 1)
    )

    def loss(model):
        x = torch.randn(ROWS, 5, 8)
        return F.mse_loss(model(x), x.cumsum(1)[..., :1])

    assert not named("S49", reported(model, loss))


def replicas(how: str):
    torch.manual_seed(0)
    base = net(4, 1)
    models = [base, copy.deepcopy(base)]
    optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in models]

    def run():
        with doctor.watch(None, optimizer=optimizers, steps=STEPS, say=False) as report:
            for _ in range(STEPS):
                x = torch.randn(2, ROWS, 4)
                y = x.sum(2, keepdim=True)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                if how == "critics":
                    (F.mse_loss(models[0](x[0]), y[0]) + F.mse_loss(models[1](x[0]), y[0])).backward()
                else:
                    for m, part, wanted in zip(models, x, y):
                        F.mse_loss(m(part if how == "parts" else x[0]), wanted if how == "parts" else y[0]).backward()
                    for p, q in zip(*(m.parameters() for m in models)):
                        mean = (p.grad + q.grad) / 2
                        p.grad.copy_(mean)
                        q.grad.copy_(mean)
                for optimizer in optimizers:
                    optimizer.step()
        return report

    report = quiet(run)
    assert not report.faults, report.faults
    return report


@pytest.mark.parametrize("how, wrong", [("critics", True), ("parts", False), ("side by side", False)])
def test_models_of_their_own(how, wrong):
    assert named("S49", replicas(how)) is wrong


# ------------------------------------------------------------------------------------------------ S45
class Writer(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, layers = how, 2 if how == "layers" else 1
        self.first, self.second = (nn.LSTM(2, 12, layers, batch_first=True) for _ in range(2))
        self.cell, self.out = nn.LSTMCell(2, 12), nn.Linear(12, 1)

    def forward(self, x, y):
        how = self.how
        _, (h, c) = self.first(x)
        if how == "cells":
            c, h = h[-1], c[-1]
            out = []
            for t in range(y.shape[1]):
                h, c = self.cell(y[:, t], (h, c))
                out.append(h)
            return self.out(torch.stack(out, 1))
        if how == "cells in a loop":
            h, c = h[-1], c[-1]
            out = []
            for t in range(y.shape[1]):
                c, h = self.cell(y[:, t], (h, c))
                out.append(h)
            return self.out(torch.stack(out, 1))
        state = {
            "exchanged": (c, h),
            "layers": (c, h),
            "joined": (c.contiguous().unsqueeze(0).squeeze(0), h.clone()),
            "in order": (h, c),
            "the hidden one alone": (h, torch.zeros_like(h)),
            "the cell alone": (c, torch.zeros_like(c)),
            "twice the same": (h, h),
        }[how]
        return self.out(self.second(y, state)[0])


EXCHANGED = ["exchanged", "layers", "joined", "cells", "cells in a loop"]


@pytest.mark.parametrize("how", [*EXCHANGED, "in order", "the hidden one alone", "the cell alone", "twice the same"])
def test_the_hidden_state_comes_first(how):
    def loss(model):
        x = torch.randn(ROWS, 10, 2).cumsum(1)
        return F.mse_loss(model(x[:, :6], x[:, 5:9]), x[:, 6:, :1])

    assert named("S45", reported(Writer(how), loss)) is (how in EXCHANGED)
