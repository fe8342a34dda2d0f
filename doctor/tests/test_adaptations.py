"""Padding without a name (F15), states that are their own next ones (F39), adapted weights that are cut off (N51),
averages that grow (N27) and heads that were drawn too wide (F4)."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import train_doctor as doctor

from .bench import batches, quiet
from .test_labels import padded, train
from .test_loss import Small
from .test_turned import said


# ------------------------------------------------------------------------------------------------ F15
def full(count: int):
    return [(ids, torch.ones_like(ids)) for ids in batches(count, 4, 32)]


def ends(count: int, token: int, lengths=(9, 20, 13, 27)):
    """Texts of which some end in a run of one token, that stands nowhere else."""
    made = full(count)
    for ids, _ in made:
        ids[ids == token] += 1
        for row, n in enumerate(lengths):
            ids[row, n:] = token
    return made


def goes_on(data):
    """The text goes on behind such a run."""
    for ids, _ in data:
        ids[:, 3:6] = ids[0, -1]
    return data


def begins(data):
    for ids, _ in data:
        ids[:, 0] = ids[0, -1]
    return data


NAMELESS = {
    "in all batches": (lambda: padded(count=6), True),
    "one batch is full": (lambda: ends(5, 40) + full(1), True),
    "it also begins the texts": (lambda: begins(ends(6, 40)), True),
    "in one of six": (lambda: ends(1, 40) + full(5), False),
    "each time another": (lambda: [ends(1, 40 + n)[0] for n in range(6)], False),
    "the text goes on": (lambda: goes_on(ends(6, 40)), False),
    "all of one length": (lambda: ends(6, 40, (9, 9, 9, 9)), False),
}


@pytest.mark.parametrize("how", NAMELESS)
def test_padding_without_a_name(how):
    data, wrong = NAMELESS[how]
    report = quiet(lambda: train(lambda m, i, a: m(i[:, :-1], i[:, 1:])[1], data(), Small))
    assert not report.faults and ("F15" in said(report)) is wrong, f"\n{report}"


# ------------------------------------------------------------------------------------------------ F39
PICKS = {
    "double": True,
    "indexed": True,
    "one target": True,
    "next states": False,
    "episodes of one step": False,
    "one state": False,
    "few rows": False,
    "as it is": False,
    "no reward": False,
    "rows are moved": False,
    "next states as well": False,
    "one answer": False,
    "acts greedily": False,
}


def pick(how: str, values, best, rows: int):
    if how == "rows are moved":
        return values[(torch.arange(rows) + 1) % rows, best]
    return values[range(rows), best] if how == "indexed" else values.gather(1, best[:, None]).squeeze(1)


@pytest.mark.parametrize("how", PICKS)
def test_states_that_are_their_own_next_ones(how):
    torch.manual_seed(0)
    rows, actions = 8 if how == "few rows" else 32, 1 if how == "one answer" else 4
    net = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, actions))
    target_net = net if how == "one target" else copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    with doctor.watch(net, optimizer=optimizer, say=False) as report:
        for _ in range(10):
            s = torch.ones(rows, 3) if how == "one state" else torch.randn(rows, 3)
            s2 = torch.randn(rows, 3) if how in ("next states", "acts greedily") else s.clone()
            r, done = torch.randn(rows), torch.rand(rows) < (1 if how == "episodes of one step" else 0.1)
            with torch.no_grad():
                best = net(s2 / 2).argmax(1)
                after = pick(how, target_net(s2 / 2), best, rows)
                if how == "next states as well":
                    after = after + 0.1 * target_net(torch.randn(rows, 3)).logsumexp(1)
                wanted = (0 if how == "no reward" else r) + 0.9 * ~done * after
                if how == "as it is":
                    wanted = r + after
            q = net(s / 2).gather(1, torch.randint(0, actions, (rows, 1))).squeeze(1)
            if how == "acts greedily":
                q = net(s / 2).max(1).values
            loss = F.smooth_l1_loss(q, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert not report.faults and ("F39" in said(report)) is PICKS[how], f"\n{report}"
    assert not said(report) & {"F28", "F116"}, "who picks the action is not asked there"


@pytest.mark.parametrize("one_step", (True, False))
def test_largest_values_where_the_next_state_is_any(one_step):
    """Episodes of one step store the state as its next one, and nothing follows."""
    net = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    with doctor.watch(net, optimizer=optimizer, say=False) as report:
        for _ in range(10):
            s, r = torch.randn(32, 3), torch.randn(32)
            with torch.no_grad():
                wanted = r + 0.9 * (0 if one_step else 1) * net(s.clone()).max(1).values
            optimizer.zero_grad()
            F.mse_loss(net(s).gather(1, torch.randint(0, 4, (32, 1))).squeeze(1), wanted).backward()
            optimizer.step()
    assert ("F39" in said(report)) is not one_step, f"\n{report}"


# ------------------------------------------------------------------------------------------------ N51
ADAPTED = {
    "data": True,
    "detach": True,
    "alpha": True,
    "copies": True,
    "two steps": True,
    "weights": False,
    "first order": False,
    "shares of rows": False,
    "rates": False,
    "both losses": False,
    "both losses, one by one": False,
    "of other weights": False,
}


@pytest.mark.parametrize("how", ADAPTED)
def test_adapted_weights_without_the_weights(how):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    other = copy.deepcopy(net)
    optimizer = torch.optim.Adam([*net.parameters(), *other.parameters()], lr=1e-3)
    rates = [nn.Parameter(torch.tensor(0.1)) for _ in net.parameters()]
    of_rates = torch.optim.Adam(rates, lr=1e-3)

    def base(p):
        with torch.no_grad():
            copied = p.clone()
        if how == "of other weights":
            return next(mine for mine, o in zip(net.parameters(), other.parameters()) if o is p).data
        wrong = {"weights": p, "detach": p.detach(), "copies": copied}
        return wrong.get(how, p.data)

    def adapt(params, x, y, of):
        each = F.mse_loss(functional_call(net, params, (x,)), y, reduction="none")
        share = torch.ones_like(each).requires_grad_() if how == "shares of rows" else 1
        grads = torch.autograd.grad((share * each).mean(), list(params.values()), create_graph=how != "first order")
        fast = {}
        for (name, p), g, rate in zip(params.items(), grads, rates):
            rate = rate if how == "rates" else 0.1
            fast[name] = torch.sub(of(p), g, alpha=0.1) if how == "alpha" else of(p) - rate * g
        return {n: p if p.requires_grad else p.requires_grad_() for n, p in fast.items()}, share

    with doctor.watch(net, optimizer=optimizer, say=False) as report:
        for _ in range(10):
            x, xq = torch.randn(2, 20, 2).unbind()
            y, yq = x.prod(1, keepdim=True), xq.prod(1, keepdim=True)
            params = dict((other if how == "of other weights" else net).named_parameters())
            fast, share = adapt(params, x, y, base)
            if how == "two steps":
                fast, share = adapt(fast, x, y, lambda p: p)
            loss = F.mse_loss(functional_call(net, fast, (xq,)), yq)
            optimizer.zero_grad()
            if how == "both losses":
                loss = loss + F.mse_loss(net(x), y)
            elif how == "both losses, one by one":
                F.mse_loss(net(x), y).backward()
            loss.backward()
            optimizer.step()
            if how == "rates":
                of_rates.step()
                of_rates.zero_grad()
    assert not report.faults and ("N51" in said(report)) is ADAPTED[how], f"\n{report}"


def test_a_graph_that_is_too_large_is_left_alone(monkeypatch):
    """What else it reaches is not known."""
    monkeypatch.setattr("train_doctor.watchers.cut_adaptations.NODES", 10)
    with pytest.raises(AssertionError):
        test_adapted_weights_without_the_weights("data")


# ------------------------------------------------------------------------------------------------ N27
GROWING = {
    "sum": "average of the weights",
    "in place": "average of the weights",
    "difference": "average of the weights",
    "under no_grad": "",
    "detached": "",
    "losses": "collects losses",
    "losses, and weights twice in a step": "collects losses",
    "losses, and something made once": "collects losses",
    "losses, and a state": "collects losses",
    "losses, and a state without rows": "collects losses",
}


@pytest.mark.parametrize("how", GROWING)
def test_averages_that_grow(how):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    ema, losses, once = {n: p.detach().clone() for n, p in net.named_parameters()}, [], []
    states, frozen = [torch.zeros(16)], nn.Parameter(torch.ones(16), requires_grad=False)

    def update():
        for n, p in net.named_parameters():
            p = p.detach() if how == "detached" else p
            if how == "in place":
                ema[n].mul_(0.9).add_(p, alpha=0.1)
            elif how == "difference":
                ema[n] = ema[n] - 0.1 * (ema[n] - p)
            elif "losses" not in how:
                ema[n] = 0.9 * ema[n] + 0.1 * p
            elif "twice" in how:
                assert (0.5 * p + 0.5 * p + p).requires_grad
            elif "once" in how:
                once.append(once[len(once) % 4] + 1.0 if len(once) > 3 else p + 1.0)

    with doctor.watch(net, optimizer=optimizer, say=False) as report:
        for _ in range(10):
            x = torch.randn(32, 6)
            rows = net[0](x)
            aim = functional_call(net, ema, (x + 0.1,))
            loss = F.mse_loss(net(x), x.sum(1, keepdim=True) + 0.5 * aim)
            losses.append(loss if "losses" in how else loss.item())
            optimizer.zero_grad()
            loss.backward(retain_graph="average" in GROWING[how])
            optimizer.step()
            if how == "under no_grad":
                with torch.no_grad():
                    update()
            else:
                update()
            if "without" in how:
                states.append(states[-1] + frozen + rows.mean(0))
            elif "state" in how:
                states.append(states[-1] + net[0].bias + rows.detach())
    found = next((f.diagnosis for f in report.findings if f.check == "N27"), "")
    assert not report.faults and bool(found) is bool(GROWING[how]) and GROWING[how] in found, f"\n{report}"


# ------------------------------------------------------------------------------------------------ F4
WORDS = 60


class Reader(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, width = how, 4 if how == "few features" else 128
        self.table, self.body = nn.Embedding(WORDS, width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), None
        if how in ("narrow", "scaled table"):
            nn.init.normal_(self.table.weight, std=0.02)
        if how == "between":
            nn.init.normal_(self.table.weight, std=0.3)
        if "own head" in how:
            self.head = nn.Linear(width, WORDS)
            if "wide" in how:
                nn.init.normal_(self.head.weight)
        if how == "own head, wide":  # what is read are numbers of another kind
            self.table = nn.Embedding(2 * WORDS, width)
        if how == "raw head":
            self.out = nn.Parameter(torch.randn(width, WORDS) / 7)

    def forward(self, ids):
        x = self.norm(self.table(ids) + self.body(self.table(ids)))
        if self.how in ("own head", "raw head", "scaled table", "between", "few features"):
            x = 100 * x
        if self.how == "by its width":
            x = x / 128**0.5
        if self.how == "raw head":
            return x @ self.out
        return self.head(x) if self.head is not None else F.linear(x, self.table.weight)


HEADS = {
    "tied": "The weights of table",
    "own head, wide": "The weights of head",
    "own head, both wide": "its logits are far too large",
    "own head": "its logits are far too large",
    "raw head": "its logits are far too large",
    "scaled table": "its logits are far too large",
    "between": "its logits are far too large",
    "few features": "its logits are far too large",
    "narrow": "",
    "by its width": "",
}


@pytest.mark.parametrize("how", HEADS)
def test_heads_that_are_too_wide(how):
    torch.manual_seed(0)
    model = Reader(how)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for _ in range(10):
            ids = torch.randint(0, WORDS, (16, 12))
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), ((ids + 7) % WORDS).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = next((f.diagnosis for f in report.findings if f.check == "F4"), "")
    assert not report.faults and bool(found) is bool(HEADS[how]) and HEADS[how] in found, f"\n{report}"
