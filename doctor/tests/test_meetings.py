"""F95, F96, S40, D24 and D25 in other words than judge19's, and healthy programs that look like them."""

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.nn import functional as F

from .bench import quiet
from .test_arithmetic import said
from .test_turned import ROWS, net, numbers, watched


def blamed(check: str, model: nn.Module, loss_of) -> bool:
    torch.manual_seed(0)
    report = quiet(lambda: watched(model, loss_of))
    assert not report.faults, report.faults
    return check in said(report)


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
        state = {"still": starts.repeat(ROWS // 4, 1), "moved": torch.randn(ROWS, 6, generator=memory)}.get(kind)
        if kind == "few states":
            state, later = starts.repeat(ROWS // 4, 1), starts.roll(1, 0).repeat(ROWS // 4, 1)
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
        if outer == "penalty":
            return inner + 0.1 * sum(g.square().sum() for g in slopes)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes)}
        x, y = (xs, ys) if outer == "support" else (xq, yq)
        answer = torch.func.functional_call(model, fast, (x,))
        return F.mse_loss(answer, y) + (
            F.mse_loss(torch.func.functional_call(model, fast, (xs,)), ys) * (outer == "both")
        )

    return loss


@pytest.mark.parametrize("outer, wrong", [("support", True), ("query", False), ("penalty", False), ("both", False)])
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
