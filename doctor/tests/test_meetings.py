"""The faults of judge19, 20 and 22 that got a rule, in other words, and healthy programs that look like them."""

import collections
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.nn import functional as F

import train_doctor as doctor
from train_doctor.eye import Op
from train_doctor.watchers import kept_halves, own_samples, same_support, taken_gradients

from .bench import quiet
from .test_arithmetic import said
from .test_turned import ROWS, net, numbers, watched


def reported(model: nn.Module, loss_of) -> doctor.Report:
    """Of a few steps from one seed, in which no watcher may fail."""
    torch.manual_seed(0)
    report = quiet(lambda: watched(model, loss_of))
    assert not report.faults, report.faults
    return report


def blamed(check: str, model: nn.Module, loss_of) -> bool:
    return check in said(reported(model, loss_of))


def named(check: str, model: nn.Module, loss_of, cause: str = "") -> bool:
    """Whether it is found; it must be the root then, with these words in its cause."""
    report = reported(model, loss_of)
    if check not in said(report):
        return False
    assert report.root.check == check, f"\n{report}"
    assert cause in report.root.diagnosis, report.root.diagnosis
    return True


# ------------------------------------------------------------------------------------------------ F95
def mixture(weights):
    """A loss of three normal components; `weights` makes what is added to their log-densities."""

    def loss(model):
        x, y = numbers()
        pi, mean, raw = model(x).chunk(3, 1)  # (B, 3) each
        return weights(pi, Normal(mean, F.softplus(raw) + 0.1).log_prob(y[:, :1]))

    return loss


MIXTURES = {
    "as they are": (lambda pi, of: -(pi + of).logsumexp(1).mean(), True),
    "the other way round": (lambda pi, of: -torch.logsumexp(of + pi, dim=-1).mean(), True),
    "sigmoids of densities": (lambda pi, of: -(pi.sigmoid() * of.exp()).sum(1).log().mean(), True),
    "shares": (lambda pi, of: -(pi.log_softmax(1) + of).logsumexp(1).mean(), False),
    "subtracted afterwards": (lambda pi, of: -((pi + of).logsumexp(1) - pi.logsumexp(1)).mean(), False),
    "shares of densities": (lambda pi, of: -(pi.softmax(1) * of.exp()).sum(1).log().mean(), False),
    "all alike": (lambda pi, of: -of.logsumexp(1).mean() + 0 * pi.mean(), False),
    "a bound of several draws": (lambda pi, of: -(of + Normal(0.0, 1.0).log_prob(pi)).logsumexp(1).mean(), False),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_weights_of_a_mixture_are_shares(name):
    weights, wrong = MIXTURES[name]
    assert blamed("F95", net(6, 9), mixture(weights)) is wrong


def test_a_mixture_of_torch_normalises_by_itself():
    def loss(pi, mean, raw, y):
        spread = F.softplus(raw) + 0.1
        return -MixtureSameFamily(Categorical(logits=pi), Normal(mean, spread)).log_prob(y).mean()

    def of(model):
        x, y = numbers()
        return loss(*model(x).chunk(3, 1), y[:, 0])

    assert not blamed("F95", net(6, 9), of)


# ------------------------------------------------------------------------------------------------ F96
def episode(order: str):
    """A policy gradient with the rewards of a torch environment, over six steps of all rows."""

    def loss(model):
        state, logs, rewards = torch.randn(ROWS, 6), [], []
        for _ in range(6):
            of = Categorical(logits=model(state))
            action = of.sample()
            logs.append(of.log_prob(action))
            state = state.roll(1, 1) + 0.1 * action[:, None]
            rewards.append(state[:, 0].detach())
        returns, running = [], 0.0
        for r in rewards if "past" in order else reversed(rewards):
            running = r + 0.9 * running
            returns.append(running)
        if order.startswith("right"):
            returns.reverse()
        if order.startswith("both"):
            logs.reverse()
        if "one by one" in order:
            return sum(-(log * far).mean() for log, far in zip(logs, returns))
        far = torch.stack(returns)
        return -(torch.stack(logs) * ((far - far.mean()) / far.std())).mean()

    return loss


@pytest.mark.parametrize(
    "order, wrong",
    [
        ("past", True),
        ("past, one by one", True),
        ("right", False),
        ("right, one by one", False),
        ("both turned", False),
        ("both turned, one by one", False),
    ],
)
def test_returns_are_of_what_comes(order, wrong):
    assert blamed("F96", net(6, 3), episode(order)) is wrong


# ------------------------------------------------------------------------------------------------ S40
class Flow(nn.Module):
    """Two couplings of four columns, by halves or by a mask."""

    def __init__(self, turned: bool, masked: bool):
        super().__init__()
        self.nets = nn.ModuleList(net(4 if masked else 2, 8 if masked else 4) for _ in range(2))
        self.turned, self.masked = turned, masked

    def forward(self, x):
        total = 0.0
        for n, part in enumerate(self.nets):
            if self.masked:
                keep = torch.tensor([1.0, 1.0, 0.0, 0.0]).roll(2 * n if self.turned else 0)
                s, t = ((1 - keep) * h for h in part(x * keep).chunk(2, 1))
                x = keep * x + (1 - keep) * (x * s.tanh().exp() + t)
            else:
                a, b = x.chunk(2, 1)
                s, t = part(a).chunk(2, 1)
                b = b * s.tanh().exp() + t
                x = torch.cat([b, a] if self.turned else [a, b], 1)
            total = total + s.tanh().sum(1)
        return x, total


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("of", ["square", "log_prob"])
def test_each_half_of_a_flow_is_changed(masked, turned, of):
    def loss(model):
        z, total = model(torch.randn(ROWS, 4))
        known = 0.5 * z.square().sum(1) if of == "square" else -Normal(0.0, 1.0).log_prob(z).sum(1)
        return (known - total).mean()

    assert blamed("S40", Flow(turned, masked), loss) is not turned


def test_a_flow_that_begins_with_nothing_changed_keeps_no_half():
    def loss(model):
        x = torch.randn(ROWS, 4)
        a, b = x.chunk(2, 1)
        s, t = model(x).chunk(2, 1)
        z = torch.cat([a + s.exp() * t * 0, b + t.exp() * s * 0], 1)
        return z.square().sum(1).mean()

    assert not blamed("S40", net(4, 4), loss)


def test_a_cost_of_state_and_action_is_no_flow():
    def loss(model):
        state = torch.randn(ROWS, 4)[:, :2]
        return torch.cat([state, model(state)], 1).square().sum(1).mean()

    assert not blamed("S40", net(2, 2), loss)


# ------------------------------------------------------------------------------------------------ D24
def transitions(kind: str):
    memory = torch.Generator().manual_seed(0)

    def loss(model):
        starts = torch.randn(4, 6, generator=memory)
        later = torch.randn(ROWS, 6, generator=memory)
        state = {"still": starts[torch.arange(ROWS) % 4], "moved": torch.randn(ROWS, 6, generator=memory)}.get(kind)
        if kind == "few states":
            state, later = starts[torch.arange(ROWS) % 4], starts.roll(1, 0)[torch.arange(ROWS) % 4]
        if kind == "one beginning":
            state = torch.zeros(ROWS, 6)
        with torch.no_grad():
            far = torch.randn(ROWS) + 0.9 * model(later).max(1).values
        return F.smooth_l1_loss(model(state)[:, 0], far)

    return loss


@pytest.mark.parametrize(
    "kind, wrong", [("still", True), ("moved", False), ("few states", False), ("one beginning", False)]
)
def test_states_move_on(kind, wrong):
    assert ROWS >= 16
    assert blamed("D24", net(6, 3), transitions(kind)) is wrong


# ------------------------------------------------------------------------------------------------ D25
def task_loss(outer: str):
    def loss(model):
        xs, ys, xq, yq = (torch.randn(ROWS, n) for n in (6, 2, 6, 2))
        weights = dict(model.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(model, weights, (xs,)), ys)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        if outer.startswith("penalty"):
            plain = F.mse_loss(model(xs), ys) if "beside" in outer else inner
            return plain + 0.1 * sum(g.square().sum() for g in slopes)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes)}
        x, y = (xs, ys) if outer == "support" else (xq, yq)
        answer = torch.func.functional_call(model, fast, (x,))
        return F.mse_loss(answer, y) + (
            F.mse_loss(torch.func.functional_call(model, fast, (xs,)), ys) * (outer == "both")
        )

    return loss


@pytest.mark.parametrize(
    "outer, wrong",
    [("support", True), ("query", False), ("penalty", False), ("penalty beside", False), ("both", False)],
)
def test_the_outer_loss_has_targets_of_its_own(outer, wrong):
    if outer == "query":

        def loss(model):
            xs, ys, xq, yq = (torch.randn(ROWS, n) for n in (6, 2, 6, 2))
            slopes = torch.autograd.grad(F.mse_loss(model(xs), ys), list(model.parameters()), create_graph=True)
            fast = {n: w - 0.1 * g for (n, w), g in zip(model.named_parameters(), slopes)}
            return F.mse_loss(torch.func.functional_call(model, fast, (xq,)), yq)

    else:
        loss = task_loss(outer)
    assert blamed("D25", net(6, 2), loss) is wrong


def test_a_second_derivative_of_inputs_is_no_inner_step():
    def loss(model):
        x, y = numbers()
        x = x.requires_grad_()
        u = model(x)
        slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        return F.mse_loss(u, y) + F.mse_loss(slope[:, :2], y)

    assert not blamed("D25", net(6, 2), loss)


# ------------------------------------------------------------------------------------------------ F97
ACTIONS = {
    "rsample, with an advantage": (lambda of, r: -(of.log_prob(of.rsample()).sum(1) * r).mean(), True),
    "summed afterwards": (lambda of, r: -(r[:, None] * of.log_prob(of.rsample())).sum(1).mean(), True),
    "sample": (lambda of, r: -(of.log_prob(of.sample()).sum(1) * r).mean(), False),
    "detached": (lambda of, r: -(of.log_prob(of.rsample().detach()).sum(1) * r).mean(), False),
    "a temperature for all": (lambda of, r: _soft(of, 0.2), False),
    "a temperature as a tensor": (lambda of, r: _soft(of, torch.tensor(0.2)), False),
    "a posterior and its prior": (lambda of, r: _bound(of), False),
    "scored by another": (lambda of, r: -(Normal(of.mean, 2.0).log_prob(of.rsample()).sum(1) * r).mean(), False),
}


def _soft(of, alpha):
    action = of.rsample()
    return (alpha * of.log_prob(action).sum(1) + action.square().sum(1)).mean()


def _bound(of):
    z = of.rsample()
    return (of.log_prob(z) - Normal(0.0, 1.0).log_prob(z)).sum(1).mean() + (z - 1).square().mean()


@pytest.mark.parametrize("name", ACTIONS)
def test_a_score_is_of_a_fixed_sample(name):
    of_loss, wrong = ACTIONS[name]

    def loss(model):
        mean, raw = model(torch.randn(ROWS, 6)).chunk(2, 1)
        return of_loss(Normal(mean, F.softplus(raw) + 0.1), torch.randn(ROWS))

    assert blamed("F97", net(6, 4), loss) is wrong


# ------------------------------------------------------------------------------------------------ F98
def tags(kind: str):
    def loss(model):
        labels = torch.randint(1, 5, (8, 12))
        if kind != "labels from 1":
            labels[:, ::2] = 0
        if kind != "no padding":
            labels[torch.arange(12)[None] >= torch.randint(6, 12, (8, 1))] = 0
        logits = model(torch.randn(8, 12, 6)).transpose(1, 2)  # (B, C, T)
        if kind == "masked words":
            logits = torch.cat([logits] + [logits[:, :1]] * 90, 1)
        if kind == "flattened":
            return F.cross_entropy(logits.transpose(1, 2).reshape(-1, 5), labels.reshape(-1), ignore_index=0)
        return F.cross_entropy(logits, labels, ignore_index=-100 if kind == "nothing left out" else 0)

    return loss


@pytest.mark.parametrize(
    "kind, wrong",
    [
        ("in rows", True),
        ("flattened", True),
        ("labels from 1", False),
        ("no padding", False),
        ("masked words", False),
        ("nothing left out", False),
    ],
)
def test_padding_is_no_class(kind, wrong):
    assert blamed("F98", net(6, 5), tags(kind)) is wrong


# ------------------------------------------------------------------------------------------------ F99
@pytest.mark.parametrize(
    "least, wrong",
    [
        (lambda d, mask: (d * mask).min(dim=1).values, True),
        (lambda d, mask: (mask * d).amin(1), True),
        (lambda d, mask: (d * mask).max(dim=1).values, False),
        (lambda d, mask: (d + 1e3 * (1 - mask)).min(dim=1).values, False),
        (lambda d, mask: d.masked_fill(mask == 0, float("inf")).min(dim=1).values, False),
        (lambda d, mask: ((d - 5) * mask).min(dim=1).values, False),
    ],
)
def test_the_least_is_of_what_is_left(least, wrong):
    def loss(model):
        z, labels = model(torch.randn(ROWS, 6)), torch.arange(ROWS) % 3
        mask = (labels[:, None] != labels[None]).float()
        return F.relu(1 - least(torch.cdist(z, z + 0.1), mask)).mean() + z.square().mean()

    assert blamed("F99", net(6, 4), loss) is wrong


# ------------------------------------------------------------------------------------------------ D26
@pytest.mark.parametrize(
    "kind, wrong", [("series", True), ("both", False), ("one label", False), ("not fed", False), ("mixed", False)]
)
def test_labels_go_with_their_times(kind, wrong):
    def loss(model):
        x, y = torch.randn(ROWS, 12, 6), torch.randint(0, 3, (ROWS, 12))
        shifted = x.roll(int(torch.randint(0, 6, ())), 1)
        if kind == "both":
            y = y.roll(2, 1)
        fed = {"not fed": x, "mixed": 0.5 * (shifted + x)}.get(kind, shifted)
        answer = model(fed)
        if kind == "one label":
            return F.cross_entropy(answer.mean(1), y[:, 0])
        return F.cross_entropy(answer.transpose(1, 2), y)

    assert blamed("D26", net(6, 3), loss) is wrong


# ------------------------------------------------------------------------------------------------ F85
@pytest.mark.parametrize(
    "pinball, wrong",
    [
        (lambda q, e: torch.maximum(q * e, (q - 1) * e), True),
        (lambda q, e: torch.where(e >= 0, q * e, (q - 1) * e), True),
        (lambda q, e: torch.maximum(q * -e, (q - 1) * -e), False),
        (lambda q, e: torch.maximum((1 - q) * e, -q * e), False),
        (lambda q, e: torch.where(e >= 0, (1 - q) * e, -q * e), False),
        (lambda q, e: torch.maximum((q + 1) * e, (q - 1) * e), False),  # costs of either side, and no quantile
    ],
)
def test_rising_quantiles_are_learned_as_they_stand(pinball, wrong):
    q = torch.tensor([0.1, 0.5, 0.9])

    def loss(model):
        x, y = numbers()
        return pinball(q, model(x) - y[:, :1]).mean()

    assert blamed("F85", net(6, 3), loss) is wrong


# ------------------------------------------------------------------------------------------------ N2, S41, D27, F30
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 1) for _ in range(3))


def _trained(model, optimizer, step):
    with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
        for i in range(6):
            step(i)
    assert not report.faults, report.faults
    return report


@pytest.mark.parametrize(
    "cleared, none, wrong", [("between", True, True), ("between", False, True), ("once", True, False)]
)
def test_gradients_of_several_losses_add_up(cleared, none, wrong):
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i):
        x = torch.randn(ROWS, 6)
        optimizer.zero_grad(set_to_none=none)
        for head in model.heads:
            if cleared == "between":
                optimizer.zero_grad(set_to_none=none)
            F.mse_loss(head(model.body(x).relu()), x[:, :1]).backward()
        optimizer.step()

    report = quiet(lambda: _trained(model, optimizer, step))
    assert ("N2" in said(report)) is wrong, f"\n{report}"
    assert not wrong or report.root.check == "N2"


def test_gradients_that_are_put_back_are_not_lost():
    """Each loss has its gradient taken out and cleared, and the step has their mean."""
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i):
        x, parts = torch.randn(ROWS, 6), []
        for head in model.heads:
            optimizer.zero_grad()
            F.mse_loss(head(model.body(x).relu()), x[:, :1]).backward()
            parts.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for p, *grads in zip(model.parameters(), *parts):
            p.grad = sum(g for g in grads if g is not None)
        optimizer.step()

    report = quiet(lambda: _trained(model, optimizer, step))
    assert "N2" not in said(report), f"\n{report}"


@pytest.mark.parametrize("frozen, own_group, wrong", [(True, True, True), (True, False, False), (False, True, False)])
def test_a_table_in_a_group_of_its_own_learns(frozen, own_group, wrong):
    torch.manual_seed(0)
    table, out = nn.Embedding.from_pretrained(torch.randn(20, 6), freeze=frozen), nn.Linear(6, 1)
    model = nn.ModuleList([table, out])
    groups = [{"params": table.parameters()}, {"params": out.parameters()}] if own_group else model.parameters()
    optimizer = torch.optim.SGD(groups, 1e-2)

    def step(i):
        ids = torch.randint(0, 20, (ROWS,))
        optimizer.zero_grad()
        F.mse_loss(out(table(ids))[:, 0], ids / 20).backward()
        optimizer.step()

    report = quiet(lambda: _trained(model, optimizer, step))
    assert ("S41" in said(report)) is wrong, f"\n{report}"


@pytest.mark.parametrize(
    "order, wrong", [("sorted", True), ("shuffled", False), ("tasks", False), ("no loader", False)]
)
def test_labels_come_in_any_order(order, wrong):
    torch.manual_seed(0)
    labels = torch.arange(4).repeat_interleave(40)
    data = torch.utils.data.TensorDataset(F.one_hot(labels, 6).float() + 0.5 * torch.randn(160, 6), labels)
    loader = torch.utils.data.DataLoader(data, 16, shuffle=order == "shuffled")
    model = net(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    batches = iter([data[16 * i : 16 * i + 16] for i in range(10)])

    def step(i):
        nonlocal batches
        if i == 0 and order != "no loader":
            batches = iter(loader)
        x, y = next(batches)
        if order == "tasks":  # eight of two classes, in each step anew
            y = torch.arange(2).repeat_interleave(8)
            x = F.one_hot(y, 6).float() + 0.5 * torch.randn(16, 6)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    report = quiet(lambda: _trained(model, optimizer, step))
    assert ("D27" in said(report)) is wrong, f"\n{report}"


@pytest.mark.parametrize("rows, wrong", [
    (lambda z: z.view(-1, 3), True), (lambda z: z.permute(0, 2, 3, 1).reshape(-1, 3), False),
    (lambda z: z.mean((2, 3)), False),
])  # fmt: skip
def test_classes_of_a_map_go_last_by_a_change_of_places(rows, wrong):
    def loss(model):
        z = rows(model(torch.randn(4, 2, 6, 6)))
        return F.cross_entropy(z, torch.randint(0, 3, (len(z),)))

    assert blamed("F30", nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)), loss) is wrong


# ------------------------------------------------------------------------------------------------ S42
@pytest.mark.parametrize("released, wrong", [(False, True), (True, False)])
def test_what_was_frozen_for_another_step_is_released(released, wrong):
    torch.manual_seed(0)
    maker, judge = net(4, 2), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    makes, judges = (torch.optim.Adam(m.parameters(), 1e-3) for m in (maker, judge))

    def step(i):
        judge.requires_grad_(True) if released else None
        fake, real = maker(torch.randn(ROWS, 4)), torch.randn(ROWS, 2)
        judges.zero_grad()
        (F.softplus(judge(fake.detach())) + F.softplus(-judge(real))).mean().backward()
        judges.step()
        judge[0].requires_grad_(False)
        makes.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        makes.step()

    def trained():
        with doctor.watch(optimizer=[makes, judges], steps=10, say=False) as report:
            for i in range(10):
                step(i)
        assert not report.faults, report.faults
        return report

    report = quiet(trained)
    assert ("S42" in said(report)) is wrong, f"\n{report}"


# ------------------------------------------------------------------------------------------------ no harm
@pytest.mark.parametrize(
    "loss",
    [
        lambda m: F.cross_entropy(m(torch.randn(6)), torch.tensor(1), ignore_index=0),  # no rows
        lambda m: F.l1_loss(m(torch.randn(0, 6)), torch.zeros(0, 5), reduction="sum") + m(torch.randn(6)).sum(),
        lambda m: F.cross_entropy(m(torch.randn(4, 6)), torch.softmax(torch.randn(4, 5), 1)),  # shares
        lambda m: (m(torch.randn(ROWS, 6)) * (torch.rand(ROWS, 5) > 0.5)).min(),  # over all
        lambda m: torch.min(m(torch.randn(ROWS, 6)) * torch.ones(ROWS, 5), torch.zeros(ROWS, 5)).mean(),
        lambda m: torch.logsumexp(m(torch.randn(ROWS, 6)), (0, 1)),
        lambda m: (m(torch.randn(ROWS, 6).roll((1, 2), (0, 1))) ** 2).mean(),
        lambda m: Normal(m(torch.randn(6)), 1.0).rsample().square().sum(),
    ],
)
def test_shapes_of_other_kinds_are_passed_over(loss):
    torch.manual_seed(0)
    report = quiet(lambda: watched(net(6, 5), loss))
    assert not report.faults, report.faults


@pytest.mark.parametrize("watcher", [own_samples.OwnSamples, kept_halves.KeptHalves, same_support.SameSupport])
def test_what_fails_after_a_function_does_not_reach_the_program(watcher, monkeypatch):
    """log_prob, rsample and grad give what they give; the fault is noted."""
    name = "graded" if watcher is same_support.SameSupport else "score"

    def failing(self, *args, **kwargs):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(watcher, name, failing)

    def loss(model):
        mean = model(torch.randn(ROWS, 6))
        of = Normal(mean, 1.0)
        slope = torch.autograd.grad(mean.square().mean(), list(model.parameters()), create_graph=True)[0]
        return of.log_prob(of.rsample()).mean() + slope.square().sum()

    report = quiet(lambda: watched(net(6, 5), loss))
    assert report.done and "a fault of ours" in str(report.faults)


def test_an_id_that_is_free_again_is_no_gradient():
    """Gradients that are gone leave their ids to other tensors, of which views are taken then."""
    torch.manual_seed(0)
    model = net(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    watcher = taken_gradients.TakenGradients(SimpleNamespace(numbers=itertools.count(), e=SimpleNamespace(), turn=0))
    watcher.e.optimizers, watcher.e.habits = [SimpleNamespace(object=optimizer)], collections.defaultdict(dict)
    model(torch.randn(4, 6)).sum().backward()
    watcher.saw(Op("view", [torch.zeros(1)], [], (), {}, None))
    first = next(model.parameters()).grad
    other = torch.zeros(1)
    watcher.gradients[id(other)] = watcher.gradients[id(first)]  # as if its id had been that of a gradient
    watcher.saw(Op("view", [other], [], (), {}, None))
    assert not watcher.e.habits["N2"]
    watcher.saw(Op("view", [first], [], (), {}, None))
    assert watcher.e.habits["N2"]


@pytest.mark.parametrize("share, wrong", [(0.8, True), (0.3, False), (1.0, False)])
def test_a_background_is_a_class(share, wrong):
    def loss(model):
        labels = torch.where(torch.rand(4, 6, 6) < share, 0, torch.randint(1, 3, (4, 6, 6)))
        answer = model(torch.randn(4, 2, 6, 6))
        if share == 1:
            return F.cross_entropy(answer, labels, ignore_index=0, reduction="sum") + answer.square().mean()
        return F.cross_entropy(answer, labels, ignore_index=0)

    assert blamed("F98", nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)), loss) is wrong


def test_labels_that_were_sorted_by_chance():
    """Twice in two steps, and not in the third."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(160, 6), torch.zeros(160).long())
    model = net(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    batches = []

    def step(i):
        batches[:] = batches or [iter(torch.utils.data.DataLoader(data, 16))]
        x, _ = next(batches[0])
        optimizer.zero_grad()
        labels = torch.arange(4).repeat(4) if i == 3 else torch.full((16,), i).clamp(max=3)
        (F.cross_entropy(model(x), labels) + F.cross_entropy(model(x), labels)).backward()
        optimizer.step()

    assert "D27" not in said(quiet(lambda: _trained(model, optimizer, step)))


def test_an_attack_on_the_inputs_clears_what_it_left():
    """It goes through one head, and the training after it through the other."""
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i):
        x = torch.randn(ROWS, 6, requires_grad=True)
        F.mse_loss(model.heads[0](model.body(x).relu()), x.detach()[:, :1]).backward()
        found = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        for head in model.heads[1:]:
            F.mse_loss(head(model.body(found).relu()), found[:, :1]).backward()
        optimizer.step()

    assert "N2" not in said(quiet(lambda: _trained(model, optimizer, step)))


@pytest.mark.parametrize("whole, wrong", [(True, False), (False, True)])
def test_a_rate_that_is_soon_gone_without_a_loader(whole, wrong):
    """All data in each step make it an epoch."""
    torch.manual_seed(0)
    model, data = net(6, 2), torch.randn(64, 6)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(i):
        x = data if whole else data[torch.randperm(64)[:16]]
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :2]).backward()
        optimizer.step()
        schedule.step()

    report = quiet(lambda: _trained(model, optimizer, step))
    assert ("N9" in said(report)) is wrong, f"\n{report}"


def test_rows_of_a_map_may_be_as_wide_as_it_has_classes():
    def loss(model):
        z = model(torch.randn(4, 2, 6, 3)).view(-1, 3)  # (4, 3, 6, 3): the width goes last
        return z.square().mean()

    assert not blamed("F30", nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)), loss)


def test_states_that_are_drawn_again_meet_other_actions():
    """A small memory: equal rows of states with their actions, and next states with an action drawn for each row."""
    critic = net(9, 1)

    def loss(model):
        rows = torch.randint(0, 4, (ROWS,))
        state, later = torch.randn(4, 6)[rows], torch.randn(4, 6)[rows]
        with torch.no_grad():
            far = critic(torch.cat([later, torch.randn(ROWS, 3)], 1))
        return F.mse_loss(model(torch.cat([state, torch.randn(4, 3)[rows]], 1)), far)

    assert not blamed("D24", net(9, 1), loss)


# ------------------------------------------------------------------------------------------------ S43
MESSAGES = {
    "at their own end": (lambda x, e, f, far: (f(x[far[0]]), far[0]), True),
    "selected": (lambda x, e, f, far: (f(x.index_select(0, far[0])).relu(), far[0]), True),
    "at the other end": (lambda x, e, f, far: (f(x[far[0]]), far[1]), False),
    "of both ends": (lambda x, e, f, far: (f(x[far[0]] - x[far[1]]), far[0]), False),
    "of an edge": (lambda x, e, f, far: (f(x[far[0]] * e), far[0]), False),
    "of an edge, later": (lambda x, e, f, far: ((f(x[far[0]]) + e).tanh(), far[0]), False),
}


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("name", MESSAGES)
def test_messages_go_to_another_node(name, scattered):
    message_of, wrong = MESSAGES[name]

    def loss(model):
        x, edges, of_edges = torch.randn(30, 6), torch.randint(0, 30, (2, 90)), torch.randn(90, 1)
        message, at = message_of(x, of_edges, model, edges)
        if scattered:
            sums = torch.zeros(30, 6).scatter_add(0, at[:, None].expand_as(message), message)
        else:
            sums = torch.zeros(30, 6)
            sums.index_add_(0, at, message)
        return (sums - x).square().mean()

    assert blamed("S43", net(6, 6), loss) is wrong


def test_shares_of_a_group_are_of_that_group():
    """A softmax in groups takes the largest of each group at the index at which it sums."""

    def loss(model):
        x, at = torch.randn(60, 6), torch.arange(60) % 7
        score = model(x)[:, 0]
        largest = torch.zeros(7).scatter_reduce(0, at, score, "amax")
        sums = torch.zeros(7).index_add(0, at, (score - largest[at]).exp())
        return (score - largest[at] - sums.log()[at]).square().mean()

    assert not blamed("S43", net(6, 1), loss)


# ------------------------------------------------------------------------------------------------ F20
def yes(kind: str):
    def loss(model):
        x = torch.randn(ROWS, 6)
        scores, ones = model(x)[:, 0], torch.ones(ROWS)
        if kind == "too few to say":
            return F.binary_cross_entropy_with_logits(scores[:8], ones[:8])
        if kind == "compared":
            return F.binary_cross_entropy_with_logits(scores - model(x.flip(1))[:, 0], ones)
        if kind == "with zeros":
            scores, ones = torch.cat([scores, model(-x)[:, 0]]), torch.cat([ones, 0 * ones])
        if kind == "zeros apart":
            return F.binary_cross_entropy_with_logits(scores, ones) + F.softplus(model(-x)).mean()
        if kind == "probabilities":
            return F.binary_cross_entropy(scores.sigmoid(), ones)
        return F.binary_cross_entropy_with_logits(scores, ones)

    return loss


@pytest.mark.parametrize("kind", ["alone", "probabilities", "compared", "with zeros", "zeros apart", "too few to say"])
def test_somebody_must_be_told_no(kind):
    assert blamed("F20", net(6, 1), yes(kind)) is (kind in ("alone", "probabilities"))


def test_a_generator_asks_for_yes_alone():
    """Its judge has a loss of another kind, and a backward of its own."""
    judge = net(6, 1)

    def loss(model):
        x = torch.randn(ROWS, 6)
        (F.relu(1 - judge(x)) + F.relu(1 + judge(model(x).detach()))).mean().backward()
        return F.binary_cross_entropy_with_logits(judge(model(x))[:, 0], torch.ones(ROWS))

    assert not blamed("F20", net(6, 6), loss)


# ------------------------------------------------------------------------------------------------ F21
LAID = {
    "taken": (lambda t, x: torch.linspace(1, 0.1, 50)[t].sqrt() * x, True),
    "drawn": (lambda t, x: (1 - torch.rand(ROWS)) * x, True),
    "a column": (lambda t, x: torch.linspace(1, 0.1, 50)[t].view(-1, 1, 1, 1) * x, False),
    "a window": (lambda t, x: torch.hann_window(ROWS) * x, False),
    "hidden columns": (lambda t, x: (torch.rand(ROWS) < 0.5) * x, False),
}


@pytest.mark.parametrize("name", LAID)
def test_a_number_for_each_row_is_not_laid_along_columns(name):
    shares, wrong = LAID[name]

    def loss(model):
        x = torch.randn(ROWS, 1, 4, ROWS)
        return (model(shares(torch.randint(0, 50, (ROWS,)), x)) - x).square().mean()

    assert blamed("F21", nn.Conv2d(1, 1, 3, padding=1), loss) is wrong


# ------------------------------------------------------------------------------------------------ F86
def corners(kind: str):
    """Boxes of pictures of which a half is flipped."""

    def loss(model):
        low = 0.5 * torch.rand(ROWS, 2)
        boxes = torch.cat([low, low + 0.1 + 0.3 * torch.rand(ROWS, 2)], 1)
        half = torch.arange(ROWS) % 2 == 0
        if kind == "sizes":
            boxes[:, 2:] -= boxes[:, :2]
        elif kind != "left":
            boxes[half] = torch.tensor([1.0, 0, 1, 0]) + torch.tensor([-1.0, 1, -1, 1]) * boxes[half]
            boxes = torch.where((half & (kind == "right"))[:, None], boxes[:, [2, 1, 0, 3]], boxes)
        return F.smooth_l1_loss(model(torch.randn(ROWS, 1, 8, 8)), boxes)

    return loss


@pytest.mark.parametrize("kind", ["turned", "right", "left", "sizes"])
def test_a_flip_exchanges_the_corners(kind):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 4))
    assert blamed("F86", model, corners(kind)) is (kind == "turned")


# ------------------------------------------------------------------------------------------------ D28
def spots(turn, shared: bool = False):
    def loss(model):
        places = torch.arange(16.0)
        across, down = torch.randint(2, 14, (2, ROWS, 1))
        if shared:  # all in one place, which differs from batch to batch
            across, down = across[:1].expand(ROWS, 1), down[:1].expand(ROWS, 1)
        spot = (-((places - down) ** 2)[:, :, None] / 6 - ((places - across) ** 2)[:, None] / 6).exp()
        x = (spot + 0.2 * torch.randn_like(spot))[:, None]
        return F.mse_loss(model(x)[:, 0], turn(spot))

    return loss


@pytest.mark.parametrize(
    "turn, wrong",
    [
        (lambda m: m, False),
        (lambda m: -m, False),
        (lambda m: m.transpose(1, 2), True),
        (lambda m: m.flip(2), True),
        (lambda m: torch.randn_like(m), False),
    ],
)
def test_maps_lie_as_their_pictures_do(turn, wrong):
    assert blamed("D28", nn.Conv2d(1, 1, 3, padding=1), spots(turn)) is wrong


def test_what_all_pictures_share_says_nothing_of_how_maps_lie():
    assert not blamed("D28", nn.Conv2d(1, 1, 3, padding=1), spots(lambda m: m.flip(2), shared=True))


# ------------------------------------------------------------------------------------------------ F74
@pytest.mark.parametrize("turned", [True, False])
def test_pictures_of_one_kind_are_told_by_their_pixels_too(turned):
    """Their frequencies are as strong in all of them."""
    of = torch.fft.irfft2(torch.polar(torch.ones(20, 12, 7), 6.3 * torch.rand(20, 12, 7)), s=(12, 12))[:, None] * 12

    def loss(model):
        one = torch.randint(0, 20, (ROWS,))
        same = (torch.arange(ROWS) % 2).float()
        two = torch.where(same == 1, one, (one + torch.randint(1, 20, (ROWS,))) % 20)
        a, b = (model(of[n] + 0.3 * torch.randn(ROWS, 1, 12, 12)) for n in (one, two))
        d, wanted = F.pairwise_distance(a, b), 1 - same if turned else same
        return (wanted * d**2 + (1 - wanted) * F.relu(1.5 - d) ** 2).mean()

    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 8))
    assert blamed("F74", model, loss) is turned
