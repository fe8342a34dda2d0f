"""What a method asks for, turned round or left in half: each fault, its twin, and lines it could be mistaken for."""

import copy

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import train_doctor as doctor

from .bench import quiet
from .test_arithmetic import said
from .test_formulas import ROWS, net, told, train


def of(report: doctor.Report, check: str) -> bool:
    found = check in said(report)
    assert not found or report.root.check == check, f"\n{report}"
    return found


# ------------------------------------------------------------------------------------------------ F63
POLICIES = {
    "reinforce without its minus": True,
    "reinforce": False,
    "weights negated first": False,
    "ppo without its minus": True,
    "ppo": False,
    "cleanrl": False,
    "likelihood": False,
    "weighted likelihood": False,
    "score function of a bound": False,
}


@pytest.mark.parametrize("how", POLICIES)
def test_the_sign_of_a_score(how):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        policy = Categorical(logits=model(x))
        actions = policy.sample()
        advantages = torch.randn(ROWS)[actions.argsort()]  # what they earned
        scores = policy.log_prob(actions)
        with torch.no_grad():
            old = Categorical(logits=model(x) + 0.1 * torch.randn(ROWS, 3)).log_prob(actions)
        ratio = (scores - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        return {
            "reinforce without its minus": lambda: (scores * advantages).mean(),
            "reinforce": lambda: -(scores * advantages).mean(),
            "weights negated first": lambda: (scores * -advantages).sum(),
            "ppo without its minus": lambda: torch.min(ratio * advantages, clipped * advantages).mean(),
            "ppo": lambda: -torch.min(ratio * advantages, clipped * advantages).mean() - 0.01 * policy.entropy().mean(),
            "cleanrl": lambda: torch.max(-advantages * ratio, -advantages * clipped).mean(),
            "likelihood": lambda: -scores.mean(),
            "weighted likelihood": lambda: -(scores * advantages.abs()).sum() / ROWS,
            "score function of a bound": lambda: (scores * (scores - old).detach()).mean() - policy.entropy().mean(),
        }[how]()

    assert told("F63", loss_of) is POLICIES[how]


REGRETS = {
    "what came minus the value": False,
    "the value minus what came": True,
    "detached first": True,
    "of a rollout": True,
    "of a rollout, rightly": False,
    "normalised": True,
    "clipped": True,
    "without a critic that learns": False,
    "a critic minus its mean": False,
    "one critic minus another": False,
    "by what follows": True,
    "negated": False,
    "with a sign of its own": False,
    "added": False,
}


@pytest.mark.parametrize("how", REGRETS)
def test_the_sign_of_an_advantage(how):
    critic = net(out=1)

    def loss_of(model):
        x = torch.randn(ROWS, 6)
        policy, values = Categorical(logits=model(x)), critic(x).squeeze(-1)
        actions = policy.sample()
        returns, scores = torch.randn(ROWS)[actions.argsort()], policy.log_prob(actions)
        with torch.no_grad():
            asked = torch.stack([critic(row)[0] for row in x])
        regret = (values - returns).detach()
        normal = (regret - regret.mean()) / (regret.std() + 1e-8)
        ratio = (scores - scores.detach()).exp()
        clipped = torch.min(ratio * regret, ratio.clamp(0.8, 1.2) * regret)
        learned = 0 if how == "without a critic that learns" else F.mse_loss(values, returns)
        following = returns + 0.9 * asked.roll(1)
        return learned + {
            "what came minus the value": lambda: -(scores * (returns - values.detach())).mean(),
            "the value minus what came": lambda: -(scores * regret).mean(),
            "detached first": lambda: -(scores * (values.detach() - returns)).mean(),
            "of a rollout": lambda: -(scores * (asked - returns)).mean(),
            "of a rollout, rightly": lambda: -(scores * (returns - asked)).mean(),
            "normalised": lambda: -(scores * normal).mean(),
            "clipped": lambda: -clipped.mean(),
            "without a critic that learns": lambda: -(scores * (asked - returns)).mean(),
            "a critic minus its mean": lambda: -(scores * (asked - asked.mean())).mean(),
            "one critic minus another": lambda: -(scores * (asked - values.detach())).mean(),
            "by what follows": lambda: -(scores * (asked - following)).mean(),
            "negated": lambda: -(scores * -regret).mean(),
            "with a sign of its own": lambda: (scores * regret).mean(),
            "added": lambda: (-scores * (returns - regret)).mean(),
        }[how]()

    assert told("F63", loss_of) is REGRETS[how]


# ------------------------------------------------------------------------------------------------ F71
@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("minus", [True, False])
def test_the_sign_of_a_partial_likelihood(minus, by_hand):
    def loss_of(model):
        x, event = torch.randn(ROWS, 6), (torch.rand(ROWS) < 0.7).float()
        risk = model(x).squeeze(1)
        at_risk = risk.exp().cumsum(0).log() if by_hand else torch.logcumsumexp(risk, 0)
        score = ((risk - at_risk) * event).sum() / event.sum()
        return -score if minus else score

    assert told("F71", loss_of, net(out=1)) is not minus


# ------------------------------------------------------------------------------------------------ F116
ASKED = {"itself": True, "the copy": False, "itself, without a copy": False, "both": False}


@pytest.mark.parametrize("how", ASKED)
def test_a_copy_that_makes_no_targets(how):
    class Values(nn.Sequential):
        """A class of its own, so that networks of other tests are none of its copies."""

    model = Values(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    target_net = copy.deepcopy(model).requires_grad_(False) if how != "itself, without a copy" else None

    def loss_of(model):
        state, following, reward = torch.randn(ROWS, 6), torch.randn(ROWS, 6), torch.randn(ROWS)
        with torch.no_grad():
            asked = target_net if how == "the copy" else model
            ahead = asked(following).max(1).values
            if how == "both":  # double Q-learning
                ahead = target_net(following).gather(1, model(following).argmax(1, keepdim=True)).squeeze(1)
        taken = model(state).gather(1, torch.randint(3, (ROWS, 1))).squeeze(1)
        return F.smooth_l1_loss(taken, reward + 0.9 * ahead)

    assert told("F116", loss_of, model) is ASKED[how]


# ------------------------------------------------------------------------------------------------ F119
DRAWN = {"by row": False, "the mean": True, "once": True, "once, of two dimensions": True, "no price": False}
DRAWN |= {"once, by a spread of all rows": False}


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("how", DRAWN)
def test_what_a_decoder_is_given(how, split):
    class Auto(nn.Module):
        def __init__(self):
            super().__init__()
            self.both, self.mean, self.spread, self.decoder = net(6, 8), net(6, 4), net(6, 4), net(4, 6)

        def forward(self, x):
            mu, logvar = self.both(x).chunk(2, 1) if split else (self.mean(x), self.spread(x))
            if how == "once, by a spread of all rows":
                logvar = self.spread(torch.ones(1, 6)).expand_as(mu)
            once = {"once": torch.randn(4), "once, of two dimensions": torch.randn(1, 4)}
            once["once, by a spread of all rows"] = once["once"]
            noise = once.get(how, torch.randn_like(mu))
            z = mu if how in ("the mean", "no price") else mu + (0.5 * logvar).exp() * noise
            return self.decoder(z), mu, logvar

    def loss_of(model):
        x = torch.randn(ROWS, 6)
        answer, mu, logvar = model(x)
        price = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        return F.mse_loss(answer, x, reduction="sum") / ROWS + (0 if how == "no price" else price)

    report = quiet(lambda: train(loss_of, Auto()))
    assert not report.faults and ("F119" in said(report)) is DRAWN[how], f"\n{report}"


# ------------------------------------------------------------------------------------------------ F117
SLOPES = {"of the answer again": True, "of the slope": False, "another input": False, "once": False, "anew": False}


@pytest.mark.parametrize("how", SLOPES)
def test_a_second_derivative_is_of_the_first(how):
    def slope(of, by):
        return torch.autograd.grad(of.sum(), by, create_graph=True)[0]

    def loss_of(model):
        x, t = (torch.rand(ROWS, 1).requires_grad_() for _ in range(2))
        u = model(torch.cat([x, t], 1))
        first = slope(u, x)
        if how == "anew":
            return (first + slope(model(torch.cat([x, t], 1)), x)).pow(2).mean()
        second = {"of the answer again": lambda: slope(u, x), "of the slope": lambda: slope(first, x)}
        second |= {"another input": lambda: slope(u, t), "once": lambda: 0}
        return (first - second[how]() + u).pow(2).mean()

    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    assert told("F117", loss_of, model) is SLOPES[how]


# ------------------------------------------------------------------------------------------------ F64
@pytest.mark.parametrize("flags, wrong", [("done", True), ("1 - done", False), ("goes on", False), ("both", False)])
def test_which_flags_meet_the_next_value(flags, wrong):
    """Both: what is beyond an end by time alone is added, beside what goes on."""
    target_net = net()

    def loss_of(model):
        state, following, reward = torch.randn(ROWS, 6), torch.randn(ROWS, 6), torch.randn(ROWS)
        done = torch.tensor([float(n % 8 == 0) for n in range(ROWS)])
        goes_on = torch.tensor([float(n % 8 > 0) for n in range(ROWS)])
        with torch.no_grad():
            later = target_net(following).max(1)[0]
            kept = {"1 - done": lambda: 1 - done, "goes on": lambda: goes_on}.get(flags, lambda: done)()
            target = reward + 0.9 * later * kept
            if flags == "both":
                target = target + 0.9 * later * (1 - done)
        return F.mse_loss(model(state)[:, 0], target)

    assert told("F64", loss_of) is wrong


# ------------------------------------------------------------------------------------------------ F65
def adversaries(how: str, again: bool = False) -> doctor.Report:
    """A generator and a discriminator, whose losses are named."""
    g, d = net(8, 2), net(2, 1)
    of_g, of_d = (torch.optim.Adam(m.parameters(), 2e-4, betas=(0.5, 0.999)) for m in (g, d))

    def bce(answer, label):
        return F.binary_cross_entropy_with_logits(answer, torch.full_like(answer, label))

    losses = {
        "labels": (lambda r, f: bce(r, 1.0) + bce(f, 0.0), lambda f: bce(f, 1.0)),
        "labels, smooth": (lambda r, f: bce(r, 0.9) + bce(f, 0.1), lambda f: bce(f, 0.9)),
        "labels, the wrong one": (lambda r, f: bce(r, 1.0) + bce(f, 0.0), lambda f: bce(f, 0.0)),
        "saturating": (lambda r, f: bce(r, 1.0) + bce(f, 0.0), lambda f: -bce(f, 0.0)),
        "swapped": (lambda r, f: bce(r, 0.0) + bce(f, 1.0), lambda f: bce(f, 0.0)),
        "squares": (lambda r, f: ((r - 1) ** 2).mean() + (f**2).mean(), lambda f: ((f - 1) ** 2).mean()),
        "wasserstein": (lambda r, f: f.mean() - r.mean(), lambda f: -f.mean()),
        "wasserstein, the wrong sign": (lambda r, f: r.mean() - f.mean(), lambda f: -f.mean()),
        "hinge": (lambda r, f: F.relu(1 - r).mean() + F.relu(1 + f).mean(), lambda f: -f.mean()),
        "hinge, the wrong sign": (lambda r, f: F.relu(1 - r).mean() + F.relu(1 + f).mean(), lambda f: f.mean()),
    }
    d_loss, g_loss = losses[how]

    def program():
        for _ in range(10):
            fake = g(torch.randn(ROWS, 8))
            of_d.zero_grad()
            d_loss(d(torch.randn(ROWS, 2)), d(fake.detach())).backward()
            of_d.step()
            of_g.zero_grad()
            g_loss(d(g(torch.randn(ROWS, 8)) if again else fake)).backward()
            of_g.step()

    return quiet(watched(program))


def watched(program):
    def run() -> doctor.Report:
        with doctor.watch(say=False) as report:
            program()
        return report

    return run


WRONG = {"labels, the wrong one", "wasserstein, the wrong sign", "hinge, the wrong sign"}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "how",
    ["labels", "labels, smooth", "saturating", "swapped", "squares", "wasserstein", "hinge", *sorted(WRONG)],
)
def test_two_that_should_disagree(how, again):
    assert of(adversaries(how, again), "F65") is (how in WRONG)


def test_an_actor_and_its_critic_are_no_such_two():
    actor, critic = net(6, 2), net(8, 1)
    of_a, of_c = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)

    def program():
        for _ in range(10):
            state = torch.randn(ROWS, 6)
            of_c.zero_grad()
            ((critic(torch.cat([state, torch.randn(ROWS, 2)], 1)) - torch.randn(ROWS, 1)) ** 2).mean().backward()
            of_c.step()
            of_a.zero_grad()
            (-critic(torch.cat([state, actor(state)], 1)).mean()).backward()
            of_a.step()

    assert not of(quiet(watched(program)), "F65")


@pytest.mark.parametrize("together", [True, False])
def test_parts_that_learn_one_thing(together):
    """An encoder and a decoder, an optimizer each, that step after one backward or in turns."""
    encoder, decoder = net(6, 4), net(4, 1)
    optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (encoder, decoder)]

    def program():
        for n in range(10):
            x = torch.randn(ROWS, 6)
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(decoder(encoder(x)), (x[:, :1] > 0).float()).backward()
            for optimizer in optimizers if together else optimizers[n % 2 :: 2]:
                optimizer.step()

    assert not of(quiet(watched(program)), "F65")


# ------------------------------------------------------------------------------------------------ F66
@pytest.mark.parametrize(
    "first, blank, wide, wrong", [(0, 0, False, True), (1, 0, False, False), (0, 5, False, False), (1, 0, True, False)]
)
def test_the_blank_among_labels(first, blank, wide, wrong):
    def loss_of(model):
        logs = model(torch.randn(12, 4, 6)).log_softmax(-1)
        lengths = torch.tensor([3, 2, 3, 1])
        labels = torch.randint(first, first + 5, (4, 3))
        labels[0, 0] = first
        if wide:  # filled up with the blank, as the lengths say
            labels[torch.arange(3) >= lengths[:, None]] = 0
        else:
            labels = torch.cat([row[:n] for row, n in zip(labels, lengths)])
        return F.ctc_loss(logs, labels, torch.full((4,), 12), lengths, blank=blank, zero_infinity=True)

    assert told("F66", loss_of, net(out=6)) is wrong


# ------------------------------------------------------------------------------------------------ F67
MIXTURES = {
    "roots": (lambda a: a.sqrt(), lambda a: (1 - a).sqrt(), "noise", False),
    "none": (lambda a: a, lambda a: 1 - a, "noise", True),
    "none of the noise": (lambda a: a.sqrt(), lambda a: 1 - a, "noise", True),
    "none of the data": (lambda a: a, lambda a: (1 - a).sqrt(), "noise", True),
    "flow matching": (lambda a: a, lambda a: 1 - a, "difference", False),
    "variance exploding": (lambda a: torch.ones_like(a), lambda a: 1 - a, "noise", False),
    "a straight path": (lambda a: a, lambda a: 1 - a, "noise", False),
    "asks for the data": (lambda a: a.sqrt(), lambda a: (1 - a).sqrt(), "data", False),
}


@pytest.mark.parametrize("how", MIXTURES)
def test_shares_of_data_and_noise(how):
    of_data, of_noise, wanted, wrong = MIXTURES[how]
    kept = torch.linspace(0.99, 0.9, 50).cumprod(0)

    def loss_of(model):
        x0, a = torch.randn(ROWS, 6) * 0.5, kept[torch.randint(50, (ROWS,))][:, None]
        if how == "a straight path":
            a = torch.rand(ROWS, 1) * 0.9 + 0.05
        noise = torch.randn_like(x0)
        xt = of_data(a) * x0 + of_noise(a) * noise
        return F.mse_loss(model(xt), {"noise": noise, "data": x0, "difference": noise - x0}[wanted])

    assert told("F67", loss_of, net(out=6)) is wrong


# ------------------------------------------------------------------------------------------------ F68
@pytest.mark.parametrize("order", ["randperm", "flip"])
@pytest.mark.parametrize(
    "targets, wrong",
    [("one half", True), ("both", False), ("soft", False), ("of another loader", False), ("of noise", False)],
)
def test_mixup_asks_for_both_halves(order, targets, wrong):
    def loss_of(model):
        x, lam = torch.randn(ROWS, 6), 0.7
        y, perm = x[:, :3].argmax(1), torch.randperm(ROWS)

        def other(t):
            return t[perm] if order == "randperm" else t.flip(0)

        partner = {"of another loader": torch.randn(ROWS, 6), "of noise": torch.randn(ROWS, 6)}.get(targets)
        out = model(lam * x + (1 - lam) * (other(x) if partner is None else partner))
        if targets == "both":
            return lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, other(y))
        if targets == "soft":
            soft = F.one_hot(y, 3).float()
            return F.cross_entropy(out, lam * soft + (1 - lam) * other(soft))
        return F.cross_entropy(out, y)

    assert told("F68", loss_of) is wrong


# ------------------------------------------------------------------------------------------------ F69
RISKS = {
    "rising": True,
    "rising, by hand": True,
    "falling": False,
    "negated": False,
    "turned round": False,
    "sorted for a plot": False,
}


@pytest.mark.parametrize("how", RISKS)
def test_who_is_still_at_risk(how):
    def loss_of(model):
        x, durations, events = torch.randn(ROWS, 6), torch.rand(ROWS), torch.ones(ROWS)
        answers = model(x).squeeze(1)
        if how == "sorted for a plot":
            order = answers.detach().argsort()
            return (answers[order] - durations[order]).pow(2).mean()
        order = (-durations).argsort() if how == "negated" else durations.argsort(descending=how == "falling")
        answers, events = answers[order], events[order]
        if how == "turned round":
            answers = answers.flip(0)
        risk = answers.exp().cumsum(0).log() if how == "rising, by hand" else answers.logcumsumexp(0)
        return -((answers - risk) * events).mean()

    assert told("F69", loss_of, net(out=1)) is RISKS[how]


# ------------------------------------------------------------------------------------------------ F70
@pytest.mark.parametrize("distance", ["pairwise", "squares", "norm"])
@pytest.mark.parametrize(
    "floor, wrong", [("none", True), ("relu", False), ("clamp", False), ("softplus", False), ("sphere", False)]
)
def test_a_loss_of_triplets_has_a_floor(distance, floor, wrong):
    def apart(a, b):
        if distance == "pairwise":
            return F.pairwise_distance(a, b)
        return (a - b).pow(2).sum(1) if distance == "squares" else (a - b).norm(dim=1)

    def loss_of(model):
        x = torch.randn(ROWS, 6)
        a, p, n = (model(y) for y in (x, x + 0.1 * torch.randn(ROWS, 6), torch.randn(ROWS, 6)))
        if floor == "sphere":
            a, p, n = (F.normalize(y, dim=1) for y in (a, p, n))
        gap = apart(a, p) - apart(a, n) + 0.2
        floors = {"relu": F.relu, "clamp": lambda t: t.clamp(min=0), "softplus": F.softplus}
        return floors.get(floor, lambda t: t)(gap).mean()

    assert told("F70", loss_of) is wrong


# ------------------------------------------------------------------------------------------------ D16
@pytest.mark.parametrize("weights, wrong", [("of classes", True), ("of rows", False)])
def test_a_weight_for_each_row(weights, wrong):
    x = torch.randn(200, 6)
    y = x[:, :3].argmax(1)
    of_classes = 1 / torch.bincount(y).float()
    sampler = WeightedRandomSampler(of_classes if weights == "of classes" else of_classes[y], 200)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def program():
        for a, b in DataLoader(TensorDataset(x, y), 20, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            optimizer.step()

    report = quiet(watched(program))
    assert ("D16" in said(report)) is wrong


# ------------------------------------------------------------------------------------------------ D17
@pytest.mark.parametrize(
    "cast, wrong",
    [("long", True), ("row by row", True), ("none", False), ("classes", False), ("whole", False), ("drawn", False)],
)
def test_targets_keep_their_fractions(cast, wrong):
    shares = torch.rand(200)

    def loss_of(model):
        x = torch.randn(ROWS, 6)
        wanted = shares[torch.randint(200, (ROWS,))]
        if cast == "classes":
            return F.cross_entropy(model(x), (wanted * 3).long())
        if cast == "long":
            wanted = wanted.long().float()
        if cast == "row by row":
            wanted = torch.stack([torch.tensor(value, dtype=torch.long) for value in wanted.tolist()]).float()
        if cast == "whole":
            wanted = (wanted * 5).round().long().float()
        if cast == "drawn":
            wanted = (torch.rand(ROWS) * 50).long().float()
        return F.mse_loss(model(x)[:, 0], wanted)

    assert told("D17", loss_of) is wrong


# ------------------------------------------------------------------------------------------------ D18
@pytest.mark.parametrize("loss", ["by hand", "of torch"])
@pytest.mark.parametrize(
    "what, wrong",
    [
        *[("depths", True), ("masked", False), ("rain", False), ("counts", False), ("flags", False)],
        *[("no gaps", False), ("what is likely", False)],
    ],
)
def test_zeros_apart_from_all_others(loss, what, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        shape = (ROWS, 1, 2, 2)
        target = 2 + torch.rand(shape)
        known = torch.rand(shape) < 0.7
        if what == "rain":
            target = 5 * torch.rand(shape)
        if what == "what is likely":
            target = 0.5 + 0.5 * torch.rand(shape)
        if what in ("counts", "flags"):
            target = torch.randint(1, 6 if what == "counts" else 2, shape).float()
        if what != "no gaps":
            target = target * known
        answer = model(x).view(shape)
        if what == "masked":
            answer, target = answer[known], target[known]
        return (answer - target).abs().mean() if loss == "by hand" else F.l1_loss(answer, target)

    assert told("D18", loss_of, net(out=4)) is wrong


# ------------------------------------------------------------------------------------------------ S32
class Anew(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.first, self.last, self.how = nn.Linear(6, 16), nn.Linear(16, 3), how
        self.middle = nn.Linear(16, 16)

    def forward(self, x):
        h = F.relu(self.first(x))
        h = F.relu(nn.Linear(16, 16)(h) if self.how == "in forward" else self.middle(h))
        return self.last(h)


@pytest.mark.parametrize("how, wrong", [("in forward", True), ("in __init__", False)])
def test_a_layer_is_made_once(how, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        return F.cross_entropy(model(x), x[:, :3].argmax(1))

    assert told("S32", loss_of, Anew(how)) is wrong


def test_a_copy_that_learns_a_task_is_no_such_layer():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def program():
        for _ in range(10):
            learner = copy.deepcopy(model)
            inner = torch.optim.SGD(learner.parameters(), 0.1)
            x = torch.randn(ROWS, 6)
            for _ in range(2):
                inner.zero_grad()
                F.cross_entropy(learner(x), x[:, :3].argmax(1)).backward()
                inner.step()
            optimizer.zero_grad()
            for p, q in zip(model.parameters(), learner.parameters()):
                p.grad = (p - q).detach()
            optimizer.step()

    assert "S32" not in said(quiet(watched(program)))


# ------------------------------------------------------------------------------------------------ N34
@pytest.mark.parametrize(
    "clipped, wrong", [("the other", True), ("each", False), ("both", False), ("one alone", False)]
)
def test_whose_gradients_are_clipped(clipped, wrong):
    actor, critic = net(), net(out=1)
    of_a, of_c = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)

    def clip(*models):
        nn.utils.clip_grad_norm_([p for m in models for p in m.parameters()], 0.5)

    def program():
        for _ in range(10):
            x = torch.randn(ROWS, 6)
            of_c.zero_grad()
            F.mse_loss(critic(x).squeeze(1), x[:, 0]).backward()
            if clipped != "one alone":
                clip(*{"the other": [actor], "each": [critic], "both": [actor, critic]}[clipped])
            of_c.step()
            of_a.zero_grad()
            F.cross_entropy(actor(x), x[:, :3].argmax(1)).backward()
            clip(*([actor, critic] if clipped == "both" else [actor]))
            of_a.step()

    assert of(quiet(watched(program)), "N34") is wrong


# ------------------------------------------------------------------------------------------------ more of F4, F30, F53
@pytest.mark.parametrize("spread, wrong", [(1.0, True), (None, False)])
def test_first_answers_far_beyond_the_targets(spread, wrong):
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    for layer in model[::2] if spread else ():
        nn.init.normal_(layer.weight)

    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def program():
        for _ in range(10):
            x = torch.randn(ROWS, 6)
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :1].tanh()).backward()
            optimizer.step()

    assert of(quiet(watched(program)), "F4") is wrong


@pytest.mark.parametrize("boxes", [1, 2])
@pytest.mark.parametrize("how, wrong", [("view", True), ("permuted", False), ("flattened", False)])
def test_channels_of_a_cell(boxes, how, wrong):
    def loss_of(model):
        x = model(torch.randn(ROWS, 3, 6, 4))  # (B, 5 * boxes, 6, 4)
        if how == "flattened":
            x = x.flatten(2).transpose(1, 2)  # (B, 24, 5 * boxes)
        elif how == "permuted":
            x = x.permute(0, 2, 3, 1).reshape(ROWS, -1, 5)
        else:
            x = x.reshape(ROWS, -1, 5)
        return (x - torch.randn(x.shape)).pow(2).mean()

    assert told("F30", loss_of, nn.Conv2d(3, 5 * boxes, 3, padding=1)) is wrong


@pytest.mark.parametrize("fill, wrong", [(1e-9, True), (-1e9, False)])
def test_additive_scores_are_hidden_by_large_numbers(fill, wrong):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 1)
            self.last = nn.Linear(8, 3)

        def forward(self, x, edges):
            h = self.first(x)
            scores = F.leaky_relu(h @ self.one.weight.T + (h @ self.two.weight.T).T, 0.2)
            return self.last(F.elu(F.softmax(scores.masked_fill(~edges, fill), 1) @ h))

    def loss_of(model):
        x, edges = torch.randn(ROWS, 6), torch.rand(ROWS, ROWS) < 0.2
        return F.cross_entropy(model(x, edges | torch.eye(ROWS, dtype=torch.bool)), x[:, :3].argmax(1))

    assert told("F53", loss_of, Graph()) is wrong


# ------------------------------------------------------------------------------------------------ F22 and B8
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("draw, wrong", [("sample", True), ("rsample", False)])
def test_the_value_of_an_action_that_was_drawn(frozen, draw, wrong):
    policy, critic = nn.Linear(6, 4), net(8, 1)
    of_p, of_c = torch.optim.Adam(policy.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)

    def program():
        for _ in range(10):
            x = torch.randn(ROWS, 6)
            of_c.zero_grad()
            F.mse_loss(critic(torch.cat([x, torch.randn(ROWS, 2)], 1)), x[:, :1]).backward()
            of_c.step()
            critic.requires_grad_(not frozen)
            mean, log_spread = policy(x).chunk(2, 1)
            action = getattr(of_action := Normal(mean, log_spread.exp()), draw)()
            score = of_action.log_prob(action).sum(1, keepdim=True)
            of_p.zero_grad()
            (0.1 * score - critic(torch.cat([x, action.tanh()], 1))).mean().backward()
            of_p.step()
            critic.requires_grad_(True)

    report = quiet(watched(program))
    assert ("F22" in said(report)) is wrong, f"\n{report}"


def test_a_named_optimizer_is_waited_for_while_others_step():
    """Each of its steps comes after twelve of copies that learn a task each, and its gradients stay on the copies."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, say=False, steps=10) as report:
        for _ in range(8):
            optimizer.zero_grad()
            for _ in range(4):
                x, learner = torch.randn(ROWS, 6), copy.deepcopy(model)
                inner = torch.optim.SGD(learner.parameters(), 0.1)
                for _ in range(3):
                    inner.zero_grad()
                    F.cross_entropy(learner(x), x[:, :3].argmax(1)).backward()
                    inner.step()
                F.cross_entropy(learner(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
    assert report.root is not None and report.root.check == "B8" and report.done


# ------------------------------------------------------------------------------------------------ F71
SCORES = {
    "likelihood, no minus": True,
    "likelihood": False,
    "cross-entropy by hand, no minus": True,
    "cross-entropy by hand": False,
    "nll_loss": False,
    "divergence by hand": False,
    "ranking, no minus": True,
    "ranking": False,
    "saturating generator": False,
    "entropy of the answers": False,
    "cosine": True,
    "one minus cosine": False,
    "cosine beside another term": False,
    "dice": True,
    "one minus dice": False,
    "dice beside another term": True,
    "minus dice": False,
}


@pytest.mark.parametrize("how", SCORES)
def test_what_should_grow_has_a_minus(how):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        out = model(x)
        y = x[:, :3].argmax(1)
        hard, logs = F.one_hot(y, 3).float(), F.log_softmax(out, 1)
        spread = Normal(out[:, 0], out[:, 1].exp())
        cosine = F.cosine_similarity(out, x[:, :3])
        masks, shares = (x[:, :3] > 0).float(), torch.sigmoid(out)
        dice = ((2 * (shares * masks).sum(1) + 1) / (shares.sum(1) + masks.sum(1) + 1)).mean()
        soft = torch.softmax(x[:, :3], 1)
        return {
            "likelihood, no minus": lambda: spread.log_prob(x[:, 0]).mean(),
            "likelihood": lambda: -spread.log_prob(x[:, 0]).mean(),
            "cross-entropy by hand, no minus": lambda: (hard * logs).sum(1).mean(),
            "cross-entropy by hand": lambda: -(hard * logs).sum(1).mean(),
            "nll_loss": lambda: F.nll_loss(logs, y),
            "divergence by hand": lambda: (soft * (soft.log() - logs)).sum(1).mean(),
            "ranking, no minus": lambda: F.logsigmoid(out[:, 0] - out[:, 1]).mean(),
            "ranking": lambda: -F.logsigmoid(out[:, 0] - out[:, 1]).mean(),
            "saturating generator": lambda: F.logsigmoid(-out).mean(),
            "entropy of the answers": lambda: F.cross_entropy(out, y) + 0.1 * (logs.exp() * logs).sum(1).mean(),
            "cosine": lambda: cosine.mean(),
            "one minus cosine": lambda: (1 - cosine).mean(),
            "cosine beside another term": lambda: F.cross_entropy(out, y) + 0.1 * cosine.mean(),
            "dice": lambda: dice,
            "one minus dice": lambda: 1 - dice,
            "dice beside another term": lambda: F.binary_cross_entropy(shares, masks) + dice,
            "minus dice": lambda: F.binary_cross_entropy(shares, masks) - dice,
        }[how]()

    assert told("F71", loss_of) is SCORES[how]


# ------------------------------------------------------------------------------------------------ F72
TEMPERATURES = [(1, 4, True), (4, 1, True), (4, 4, False), (1, 1, False), (2, 2, False)]


@pytest.mark.parametrize("of_student, of_teacher, wrong", TEMPERATURES)
def test_one_temperature_for_both(of_student, of_teacher, wrong):
    teacher = net().eval()

    def loss_of(model):
        x = torch.randn(ROWS, 6)
        with torch.no_grad():
            logits = teacher(x)
        student = model(x) / of_student if of_student > 1 else model(x)
        soft = F.softmax(logits / of_teacher if of_teacher > 1 else logits, 1)
        hard = F.cross_entropy(model(x), x[:, :3].argmax(1))
        return hard + F.kl_div(F.log_softmax(student, 1), soft, reduction="batchmean") * of_teacher**2

    assert told("F72", loss_of) is wrong


def test_a_temperature_that_is_a_tensor_may_be_any():
    teacher, four = net().eval(), torch.tensor(4.0)

    def loss_of(model):
        x = torch.randn(ROWS, 6)
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 4, 1)
        return F.kl_div(F.log_softmax(model(x) / four, 1), soft, reduction="batchmean")

    assert not told("F72", loss_of)


# ------------------------------------------------------------------------------------------------ N35
@pytest.mark.parametrize("how, wrong", [("no step", True), ("a step", False), ("by hand", False), ("a look", False)])
def test_an_optimizer_steps(how, wrong):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def program():
        for _ in range(12):
            x = torch.randn(ROWS, 6)
            (model if how == "a look" else optimizer).zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            if how == "a step":
                optimizer.step()
            if how == "by hand":
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad

    with doctor.watch(say=False) as report:
        quiet(program)
    assert ("N35" in {f.check for f in report.findings}) is wrong


# ------------------------------------------------------------------------------------------------ losses that grow
@pytest.mark.parametrize("how", ["maximize", "a gradient of -1"])
def test_a_loss_that_is_to_grow_needs_no_minus(how):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, maximize=how == "maximize")

    def program():
        for _ in range(10):
            x = torch.randn(ROWS, 6)
            policy = Categorical(logits=model(x))
            gain = (policy.log_prob(policy.sample()) * torch.randn(ROWS)).mean() + policy.entropy().mean()
            optimizer.zero_grad()
            gain.backward(*([torch.tensor(-1.0)] if how != "maximize" else []))
            optimizer.step()

    assert not said(quiet(watched(program))) & {"F62", "F63", "F71"}


# ------------------------------------------------------------------------------------------------ F73
@pytest.mark.parametrize("how, wrong", [("its input", True), ("in place", True), ("clean", False), ("data", False)])
def test_a_denoiser_is_asked_for_what_is_clean(how, wrong):
    """Data: what was drawn with noise in it is what the model is to learn."""

    def loss_of(model):
        clean = torch.randn(ROWS, 6)
        if how == "data":
            clean = clean + 0.1 * torch.randn(ROWS, 6)
        target = clean
        if how == "in place":
            clean += 0.5 * torch.randn_like(clean)
        noisy = clean if how in ("in place", "data") else clean + 0.5 * torch.randn_like(clean)
        return F.mse_loss(model(noisy), noisy if how == "its input" else target)

    assert told("F73", loss_of, net(out=6)) is wrong


# ------------------------------------------------------------------------------------------------ more of N28, F2, N3
@pytest.mark.parametrize("used, wrong", [(False, True), (True, False)])
def test_adapted_weights_are_used(used, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        y = x[:, :3].argmax(1)
        weights = dict(model.named_parameters())
        derivatives = torch.autograd.grad(F.cross_entropy(model(x), y), weights.values(), create_graph=True)
        fast = {name: p - 0.1 * d for (name, p), d in zip(weights.items(), derivatives)}
        return F.cross_entropy(torch.func.functional_call(model, fast, (x,)) if used else model(x), y)

    assert told("N28", loss_of) is wrong


@pytest.mark.parametrize("gradients, wrong", [(False, True), (True, False)])
def test_a_term_of_frozen_features_has_a_gradient(gradients, wrong):
    features = net(3, 8).requires_grad_(False).eval()

    def loss_of(model):
        x = torch.randn(ROWS, 6)
        out = model(x)
        with torch.set_grad_enabled(gradients):
            made = features(out)
        with torch.no_grad():
            wanted = features(x[:, :3])
        return F.mse_loss(made, wanted) + 0.001 * out.abs().mean()

    assert told("F2", loss_of) is wrong


@pytest.mark.parametrize("taken", [True, False])
def test_the_clients_of_federated_learning_begin_anew(taken):
    """One net is every client in turn: it is put back, but what it had learned was kept."""
    whole, local = net(), net()
    optimizer = torch.optim.SGD(local.parameters(), 0.1)
    kept = []

    def program():
        for _ in range(10):
            local.load_state_dict(dict(whole.named_parameters()))
            x = torch.randn(ROWS, 6)
            optimizer.zero_grad()
            F.cross_entropy(local(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            if taken:
                kept.append(copy.deepcopy(local.state_dict()))

    with doctor.watch(local, optimizer=optimizer, say=False) as report:
        program()
    assert ("N3" in said(report)) is not taken
