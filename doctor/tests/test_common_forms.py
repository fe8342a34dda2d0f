"""Faults of practice sets that were missed, in the forms in which they are written, and healthy programs like them."""

import copy

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import train_doctor as doctor

from .bench import quiet
from .test_meetings import blamed
from .test_turned import net, said, watched

ROWS, STEPS = 32, 10


# ------------------------------------------------------------------------------------------------ S3
@pytest.mark.parametrize("how, wrong", [("left out", True), ("held", False), ("frozen", False), ("by hand", False)])
def test_a_layer_that_stands_by_itself(how, wrong):
    torch.manual_seed(0)
    model, layer = net(6, 4), nn.Linear(4, 3)
    if how == "frozen":
        layer.requires_grad_(False)
    held = [*model.parameters(), *(layer.parameters() if how == "held" else ())]
    optimizers = [torch.optim.Adam(held, 1e-3)]
    if how == "by hand":
        optimizers.append(torch.optim.SGD(layer.parameters(), 1e-2))

    def run():
        with doctor.watch(optimizer=optimizers, steps=STEPS, say=False) as report:
            for _ in range(STEPS):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                layer.zero_grad()
                x = torch.randn(ROWS, 6)
                F.mse_loss(layer(model(x)), x[:, :3]).backward()
                for optimizer in optimizers:
                    optimizer.step()
        return report

    report = quiet(run)
    assert not report.faults and ("S3" in said(report)) is wrong, f"\n{report}"


# ------------------------------------------------------------------------------------------------ S50
@pytest.mark.parametrize("how, wrong", [("attribute", True), ("layer", False), ("pruned", False)])
def test_a_size_that_is_set_by_name_only(how, wrong):
    model = net(6, 10)
    if how == "attribute":
        model[2].out_features = 3
    elif how == "layer":
        model[2] = nn.Linear(16, 3)
    else:
        model[2].weight, model[2].bias = (
            nn.Parameter(t[:3].detach().clone()) for t in (model[2].weight, model[2].bias)
        )
    assert blamed("S50", model, lambda m: F.cross_entropy(m(torch.randn(ROWS, 6)), torch.randint(3, (ROWS,)))) is wrong


# ------------------------------------------------------------------------------------------------ F20
def smoothed(how: str):
    def loss(model):
        y = torch.randint(5, (ROWS,))
        ones, p = F.one_hot(y, 5).float(), model(torch.randn(ROWS, 6)).log_softmax(1)
        target = {
            "whole share for each": lambda: 0.9 * ones + 0.1,
            "zero for the true one": lambda: 0.9 * ones + 0.1 * (1 - ones),
            "divided": lambda: 0.9 * ones + 0.1 / 5,
            "weights of classes": lambda: ones * torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0]),
            "half of it": lambda: 0.5 * ones,
            "a teacher's": lambda: torch.randn(ROWS, 5).softmax(1),
        }[how]()
        return -(target * p).sum(1).mean() if how != "zero for the true one" else (target * -p).sum(dim=1).mean()

    return loss


SMOOTHED = {"whole share for each": True, "zero for the true one": True, "divided": False, "weights of classes": False}
SMOOTHED |= {"half of it": False, "a teacher's": False}


@pytest.mark.parametrize("how, wrong", SMOOTHED.items())
def test_rows_of_soft_targets_by_hand_sum_to_one(how, wrong):
    assert blamed("F20", net(6, 5), smoothed(how)) is wrong


# ------------------------------------------------------------------------------------------------ F112
def trusted(how: str):
    def loss(model):
        weak = torch.randn(ROWS, 6)
        strong = weak + 0.3 * torch.randn_like(weak)
        if how == "of one pass":
            both = model(torch.cat([weak, strong]))
            sure, label = both[:ROWS].detach().max(1)
            out = both[ROWS:]
        else:
            with torch.no_grad():
                answer = 4 * model(weak) if how == "scaled" else model(weak)
            answer = answer.softmax(1) if how == "softmax" else answer.sigmoid() if how == "sigmoid" else answer
            sure, label = answer.max(1)
            out = model(strong)
        mask = sure > 0.5 if how != "a margin of scores" else sure > 3.0
        return (F.cross_entropy(out, label, reduction="none") * mask.float()).mean() + 0 * out.sum()

    return loss


TRUSTED = {"logits": True, "of one pass": True, "softmax": False, "sigmoid": False, "a margin of scores": False}


@pytest.mark.parametrize("how, wrong", TRUSTED.items())
def test_confidence_is_a_probability(how, wrong):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        model[2].weight.mul_(4)
    assert blamed("F112", model, trusted(how)) is wrong


# ------------------------------------------------------------------------------------------------ F92
@pytest.mark.parametrize("how, wrong", [("same", True), ("made anew", True), ("transposed", False), ("once", False)])
def test_pairs_are_asked_for_from_both_sides(how, wrong):
    def loss(model):
        x = torch.randn(ROWS, 6)
        one, two = (F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        table, own = one @ two.T / 0.1, torch.arange(ROWS)
        other = {"same": table, "made anew": one @ two.T / 0.1, "transposed": table.T, "once": None}[how]
        if other is None:
            return F.cross_entropy(table, own)
        return (F.cross_entropy(table, own) + F.cross_entropy(other, own)) / 2

    assert blamed("F92", net(6, 8), loss) is wrong


# ------------------------------------------------------------------------------------------------ F30
class Channels(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.layer = how, nn.Linear(24, 1)

    def forward(self, x):  # (B, 24, 5)
        rows, places, channels = x.shape
        if self.how == "folded":
            x = x.reshape(rows * channels, places)
        elif self.how == "folded, one more":
            x = x.reshape(rows * channels, 1, places)
        else:
            x = x.permute(0, 2, 1).reshape(rows * channels, places)
        return self.layer(x).reshape(rows, channels)


@pytest.mark.parametrize("how, wrong", [("folded", True), ("folded, one more", True), ("permuted", False)])
def test_channels_of_series_go_first(how, wrong):
    def loss(model):
        at = torch.arange(25)[None, :, None] / 4 + 6 * torch.rand(ROWS, 1, 5)
        return F.mse_loss(model(at[:, :24].sin()), at[:, 24].sin())

    assert blamed("F30", Channels(how), loss) is wrong


# ------------------------------------------------------------------------------------------------ F113
class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log_std = net(4, 3), nn.Parameter(torch.zeros(3))


def proximal(how: str):
    def loss(model):
        x, gain = torch.randn(ROWS, 4), torch.randn(ROWS)
        of = Normal(model.mean(x), model.log_std.exp())
        if how == "classes":
            of = Categorical(logits=model.mean(x)[:, None].expand(-1, 3, -1))
        if how == "independent":
            of = Independent(of, 1)
        action = of.sample()
        score = of.log_prob(action)
        old = score.detach() + 0.01 * torch.randn_like(score)
        if how == "summed":
            score, old = score.sum(-1), old.sum(-1)
        ratio = (score - old).exp()
        gain = gain if ratio.dim() == 1 else gain[:, None]
        if how == "one for each":
            gain = torch.randn(ROWS, 3)
        return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()

    return loss


RATIOS = {"apart": True, "summed": False, "independent": False, "classes": False, "one for each": False}


@pytest.mark.parametrize("how, wrong", RATIOS.items())
def test_an_action_has_one_probability(how, wrong):
    report = quiet(lambda: watched(Actor(), proximal(how)))
    assert not report.faults and ("F113" in said(report)) is wrong, f"\n{report}"


# ------------------------------------------------------------------------------------------------ D11
def replayed(how: str):
    states, actions, rewards = torch.randn(200, 4), torch.randint(3, (200,)), torch.randn(200)
    inside, border = torch.randn(200, 4), torch.randn(200, 4)

    def loss(model):
        draw = lambda: torch.randint(200, (ROWS,))  # noqa: E731
        one = draw()
        s, a, r = (t[one if how != "apart" else draw()] for t in (states, actions, rewards))
        asked = F.mse_loss(model(s).gather(1, a[:, None]).squeeze(1), r)
        if how == "points":  # each with a draw of its own, and none meets another
            asked = model(inside[draw()]).pow(2).mean() + model(border[draw()]).mean().pow(2)
            asked = asked + (model(states[draw()]) - 1).pow(2).mean()
        if how == "two batches":
            two = draw()
            asked = asked + (model(states[two]) * rewards[two][:, None]).mean().pow(2)
        return asked

    return loss


@pytest.mark.parametrize(
    "how, wrong", [("apart", True), ("together", False), ("points", False), ("two batches", False)]
)
def test_fields_of_a_memory_are_drawn_together(how, wrong):
    assert blamed("D11", net(4, 3), replayed(how)) is wrong


# ------------------------------------------------------------------------------------------------ F114
def wasserstein(how: str):
    torch.manual_seed(0)
    maker, critic = net(4, 2), net(2, 1)
    if how == "spectral norm":
        critic = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 16)), nn.ReLU(), nn.Linear(16, 1))
    makers, critics = (torch.optim.RMSprop(m.parameters(), 5e-4) for m in (maker, critic))
    with doctor.watch(optimizer=[makers, critics], steps=2 * STEPS, say=False) as report:
        for _ in range(STEPS):
            real, fake = torch.randn(ROWS, 2) + 2, maker(torch.randn(ROWS, 4))
            if how == "hinge":
                loss = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake.detach())).mean()
            else:
                loss = critic(fake.detach()).mean() - critic(real).mean()
            if how == "penalty":
                share = torch.rand(ROWS, 1)
                mixed = (share * real + (1 - share) * fake.detach()).requires_grad_()
                (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
                loss = loss + 10 * (slope.norm(dim=1) - 1).pow(2).mean()
            if how == "drift":
                loss = loss + 1e-3 * critic(real).pow(2).mean()
            critics.zero_grad()
            loss.backward()
            critics.step()
            if how == "clipped":
                for p in critic.parameters():
                    p.data.clamp_(-0.1, 0.1)
            makers.zero_grad()
            (-critic(fake).mean()).backward()
            makers.step()
    return report


@pytest.mark.parametrize("how", ["free", "clipped", "penalty", "spectral norm", "hinge", "drift"])
def test_something_bounds_a_critic(how):
    report = quiet(lambda: wasserstein(how))
    assert not report.faults and ("F114" in said(report)) is (how == "free"), f"\n{report}"


# ------------------------------------------------------------------------------------------------ F68
def reordered(how: str):
    def loss(model):
        x, y, lam = torch.randn(ROWS, 6), torch.randint(3, (ROWS,)), 0.3
        order = torch.randperm(ROWS)
        other = torch.randperm(ROWS) if how in ("soft, two", "two") else order
        mixed = lam * x + (1 - lam) * x[order]
        if how.startswith("soft"):
            ones = F.one_hot(y, 3).float()
            return F.cross_entropy(model(mixed), lam * ones + (1 - lam) * ones[other])
        out = model(mixed)
        return lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[other])

    return loss


@pytest.mark.parametrize("how, wrong", [("two", True), ("soft, two", True), ("one", False), ("soft, one", False)])
def test_rows_and_their_labels_are_mixed_in_one_order(how, wrong):
    assert blamed("F68", net(6, 3), reordered(how)) is wrong


# ------------------------------------------------------------------------------------------------ F85
def forecast(how: str):
    quantiles = (0.1, 0.5, 0.9) if how != "falling" else (0.9, 0.5, 0.1)

    def loss(model):
        x = torch.randn(ROWS, 4)
        y, out = x[:, :1] + torch.randn(ROWS, 1), model(x)
        if how == "falling":  # rightly, of answers minus targets
            e = out - y
            return sum(torch.max((1 - q) * e[:, k], -q * e[:, k]).mean() for k, q in enumerate(quantiles))
        e = out - y if how == "turned" else y - out
        return sum(torch.max(q * e[:, k], (q - 1) * e[:, k]).mean() for k, q in enumerate(quantiles))

    return loss


@pytest.mark.parametrize("how, wrong", [("turned", True), ("right", False), ("falling", False)])
def test_quantiles_of_columns(how, wrong):
    assert blamed("F85", net(4, 3), forecast(how)) is wrong


# ------------------------------------------------------------------------------------------------ F28, F96
@pytest.mark.parametrize("swapped", [True, False])
def test_targets_that_follow_where_two_optimizers_take_turns(swapped):
    torch.manual_seed(0)
    actor, critic = net(3, 1), net(4, 1)
    targets = [copy.deepcopy(m) for m in (actor, critic)]
    optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (actor, critic)]

    def run():
        with doctor.watch(optimizer=optimizers, steps=2 * STEPS, say=False) as report:
            for _ in range(STEPS):
                s, a, r, after = torch.randn(ROWS, 3), torch.randn(ROWS, 1), torch.rand(ROWS, 1), torch.randn(ROWS, 3)
                with torch.no_grad():
                    wanted = r + 0.9 * targets[1](torch.cat([after, targets[0](after)], 1))
                optimizers[1].zero_grad()
                F.mse_loss(critic(torch.cat([s, a], 1)), wanted).backward()
                optimizers[1].step()
                optimizers[0].zero_grad()
                (-critic(torch.cat([s, actor(s)], 1)).mean()).backward()
                optimizers[0].step()
                for mine, follows in zip((actor, critic), targets):
                    for p, q in zip(mine.parameters(), follows.parameters()):
                        tau = 0.99 if swapped else 0.01
                        q.data.copy_(tau * p.data + (1 - tau) * q.data)
        return report

    report = quiet(run)
    assert not report.faults and ("F28" in said(report)) is swapped, f"\n{report}"


@pytest.mark.parametrize("forward", [True, False])
def test_returns_of_actions_that_are_put_together(forward):
    def loss(policy):
        states, actions = [], []
        for _ in range(12):
            states.append(torch.randn(4))
            with torch.no_grad():
                actions.append(torch.bernoulli(policy(states[-1]).softmax(-1)[1]).long())
        returns, running = [], 0.0
        for _ in range(12):
            running = 1.0 + 0.99 * running
            returns.append(running) if forward else returns.insert(0, running)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        return -(Categorical(logits=policy(torch.stack(states))).log_prob(torch.stack(actions)) * returns).sum()

    assert blamed("F96", net(4, 2), loss) is forward


# ------------------------------------------------------------------------------------------------ D11, packed
class Packed(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.layer, self.out = how, nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.how != "by torch")
        return self.out(self.layer(packed)[1][-1])


def by_length(how: str):
    data = TensorDataset(torch.randn(200, 9, 4), torch.randint(2, 10, (200,)), torch.randint(3, (200,)))
    loader = iter(DataLoader(data, batch_size=16, shuffle=True))

    def loss(model):
        x, lengths, y = next(loader)
        if how == "by torch":
            return F.cross_entropy(model(x, lengths), y)
        lengths, order = lengths.sort(descending=True)
        out = model(x[order], lengths)
        if how == "sorted back":
            return F.cross_entropy(out[order.argsort()], y)
        return F.cross_entropy(out, y if how == "left" else y[order])

    return loss


@pytest.mark.parametrize("how, wrong", [("left", True), ("sorted", False), ("by torch", False), ("sorted back", False)])
def test_labels_are_sorted_with_what_is_packed(how, wrong):
    assert blamed("D11", Packed(how), by_length(how)) is wrong


@pytest.mark.parametrize("together", [True, False])
def test_rows_of_a_loader_are_shuffled_with_their_labels(together):
    loader = iter(DataLoader(TensorDataset(torch.randn(200, 4), torch.randint(3, (200,))), batch_size=16))

    def loss(model):
        x, y = next(loader)
        order = torch.randperm(len(x))
        return F.cross_entropy(model(x[order]), y[order] if together else y)

    assert blamed("D11", net(4, 3), loss) is not together


# ------------------------------------------------------------------------------------------------ F115
def contrasted(how: str):
    scale = torch.nn.Parameter(torch.tensor(2.66))

    def loss(model):
        x = torch.randn(ROWS, 6)
        one, two = (5 * model(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        if how == "normalised":
            one, two = F.normalize(one, dim=-1), F.normalize(two, dim=-1)
        table = {
            "divided": lambda: one @ two.T / 0.07,
            "learned": lambda: scale.exp() * (one @ two.T),
            "learned, first": lambda: scale.exp() * one @ two.t(),
            "einsum": lambda: torch.einsum("id,jd->ij", one, two) * 14.0,
            "normalised": lambda: one @ two.T / 0.07,
            "normalised, first": lambda: scale.exp() * F.normalize(one, dim=-1) @ F.normalize(two, dim=-1).t(),
            "no temperature": lambda: one @ two.T,
            "width": lambda: one @ two.T / 8**0.5,
        }[how]()
        return F.cross_entropy(table, torch.arange(ROWS))

    return loss


LENGTHS = {"divided": True, "learned": True, "einsum": True, "normalised": False, "no temperature": False}
LENGTHS |= {"learned, first": True, "normalised, first": False}


@pytest.mark.parametrize("how, wrong", [*LENGTHS.items(), ("width", False)])
def test_a_temperature_is_for_cosines(how, wrong):
    assert blamed("F115", net(6, 8), contrasted(how)) is wrong
