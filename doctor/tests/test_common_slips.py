"""Slips of everyday code: a name that was copied, a parameter left out, a mask over the target, one answer for all.

Each fault stands beside healthy forms of the same code.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import train_doctor as doctor

B = 32


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def said(model, optimizer, step, steps: int = 6) -> list[str]:
    """Names of all findings but notes, and the ids."""
    with doctor.watch(model if isinstance(model, nn.Module) else None, optimizer=optimizer, say=False) as report:
        for i in range(steps):
            step(i)
    assert not report.faults, report.faults
    return [f"{f.check} {f.name}" for f in report.findings if f.severity != doctor.NOTE]


def update(optimizer, loss) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# ------------------------------------------------------------------ one layer for two
class Encoder(nn.Module):
    """Means and logarithms of variances of two numbers."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.body = how, nn.Linear(6, 16)
        self.mean, self.log = nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        if self.how == "copied":
            return self.mean(h), self.mean(h)
        if self.how == "printed":  # the second one is for a log
            return self.mean(h), self.mean(h).detach()
        if self.how == "nothing idle":
            return self.mean(h), self.mean(h) + self.log(h)
        if self.how == "other input":
            return self.mean(h), self.mean(h + 1)
        return self.mean(h), self.log(h)


@pytest.mark.parametrize(
    "how, wrong", [("copied", 1), ("right", 0), ("printed", 0), ("other input", 0), ("nothing idle", 0)]
)
def test_one_layer_for_two(how, wrong):
    model = Encoder(how)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        x = torch.randn(B, 6)
        mean, log = model(x)
        update(optimizer, (0.5 * (x[:, :2] - mean).square() * (-log).exp() + 0.5 * log).mean())

    assert ("S67 asked-twice" in said(model, optimizer, step)) == bool(wrong)


def test_one_layer_for_two_beside_one_that_learns_in_turn():
    """Two tasks of which one is drawn: the other head rests, and none is asked twice."""
    model = nn.ModuleDict({"body": nn.Linear(6, 16), "a": nn.Linear(16, 1), "b": nn.Linear(16, 1)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        h = torch.relu(model["body"](x := torch.randn(B, 6)))
        head = model["ab"[i % 2]]
        update(optimizer, F.mse_loss(head(h), x[:, :1]))

    assert not [name for name in said(model, optimizer, step) if name.startswith("S67")]


# ------------------------------------------------------------------ terms that were cut off
@pytest.mark.parametrize(
    "term, wrong",
    [
        (lambda h, p: (h.detach() - 0.1).pow(2).mean(), True),
        (lambda h, p: (h.detach() - 0.1).pow(2).sum(1).mean(), True),
        (lambda h, p: 0.1 * h.detach().abs().sum() / 10, True),
        (lambda h, p: (h - 0.1).pow(2).mean(), False),
        (lambda h, p: ((h.detach().mean(0) - h) ** 2).mean(), False),  # a centre that stands still
        (lambda h, p: (h.mean() - 1).abs().detach() * h.mean(), False),  # a weight
        # the divergence of a target that was cut off, in its two parts
        (lambda h, p: (p * p.log()).sum(1).mean() + -(p * h[:, :3].log_softmax(1)).sum(1).mean(), False),
        (lambda h, p: (h.mean() - h.std()).detach(), False),  # another number to show, of numbers
    ],
)
def test_terms_that_were_cut_off(term, wrong):
    body, head = nn.Linear(6, 16), nn.Linear(16, 3)
    model = nn.Sequential(body, nn.Tanh(), head)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        x = torch.randn(B, 6)
        h = torch.tanh(body(x))
        z = head(h)
        loss = F.cross_entropy(z, (x[:, 0] > 0).long()) + term(h, (z * 2).softmax(1).detach())
        update(optimizer, loss)

    assert ("F2 dead-loss-term" in said(model, optimizer, step)) == wrong


# ------------------------------------------------------------------ recurrent networks
READ = {
    "first": (True, lambda out, last: out[:, 0]),
    "last": (False, lambda out, last: out[:, -1]),
    "state": (False, lambda out, last: last[-1]),
    "mean": (False, lambda out, last: out.mean(1)),
    "first and last": (False, lambda out, last: out[:, 0] + out[:, -1]),
}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_the_place_that_is_read(kind, read):
    wrong, how = READ[read]
    model = nn.ModuleDict({"body": kind(3, 16, batch_first=True), "head": nn.Linear(16, 1)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        x = torch.randn(B, 8, 3)
        out, last = model["body"](x)
        z = model["head"](how(out, last[0] if kind is nn.LSTM else last))
        update(optimizer, F.mse_loss(z.squeeze(1), x[:, -1, 0]))

    assert ("S66 first-state-read" in said(model, optimizer, step)) == wrong


@pytest.mark.parametrize("both, steps", [(True, 8), (False, 1)])
def test_the_first_place_of_two_directions_or_of_one_step(both, steps):
    model = nn.ModuleDict({"body": nn.GRU(3, 16, batch_first=True, bidirectional=both), "head": nn.Linear(16, 1)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        x = torch.randn(B, steps, 3)
        z = model["head"](model["body"](x)[0][:, 0, -16:])
        update(optimizer, F.mse_loss(z.squeeze(1), x[:, -1, 0]))

    assert not [name for name in said(model, optimizer, step) if name.startswith("S66")]


# ------------------------------------------------------------------ latents
class Variational(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.body, self.mean, self.log = nn.Linear(20, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.back = nn.Linear(8, 20)
        self.kept = torch.randn(B, 8)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        mean, log = self.mean(h), self.log(h)
        noise = self.kept if self.how == "kept" else torch.randn_like(mean)
        z = mean + (log if self.how == "logarithm" else (0.5 * log).exp()) * noise
        return self.back(z), mean, log


@pytest.mark.parametrize(
    "how, wrong", [("logarithm", "F43 variance-as-spread"), ("kept", "D20 same-draw-each-step"), ("right", "")]
)
def test_draws_of_a_latent(how, wrong):
    model = Variational(how)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        x = torch.randn(B, 4) @ torch.ones(4, 20).tril()
        answer, mean, log = model(x)
        divergence = -0.5 * (1 + log - mean**2 - log.exp()).sum(1).mean()
        update(optimizer, (answer - x).square().sum(1).mean() + divergence)

    found = said(model, optimizer, step)
    assert found == ([wrong] if wrong else [])


# ------------------------------------------------------------------ judges
def fought(real: float, made: float, turns: bool = False, shared: bool = False, steps: int = 8) -> list[str]:
    """A GAN whose discriminator is taught these targets, in one step or in two."""
    g = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 10))
    d = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    mine, theirs = torch.optim.Adam([*g.parameters(), *shared * [*d.parameters()]]), torch.optim.Adam(d.parameters())
    judge = F.binary_cross_entropy_with_logits

    def step(i):
        x, fake = torch.randn(B, 10) + 2, g(torch.randn(B, 8))
        sides = [
            lambda: judge(d(x), torch.full((B, 1), real)),
            lambda: judge(d(fake.detach()), torch.full((B, 1), made)),
        ]
        for losses in [sides[:1], sides[1:]] if turns else [sides]:
            update(theirs, sum(loss() for loss in losses))
        update(mine, judge(d(fake), torch.ones(B, 1)) + shared * judge(d(fake), torch.ones(B, 1)))

    return said((g, d), (mine, theirs), step, steps)


@pytest.mark.parametrize(
    "real, made, turns, wrong", [(1, 1, 0, 1), (0, 0, 0, 1), (1, 0, 0, 0), (0.9, 0, 0, 0), (1, 0, 1, 0)]
)
def test_what_a_discriminator_is_taught(real, made, turns, wrong):
    found = fought(float(real), float(made), bool(turns))
    assert ("F20 wrong-targets" in found) == bool(wrong), found


def test_who_holds_the_other_network_is_no_discriminator():
    found = fought(1.0, 0.0, shared=True)
    assert "S36 holds-its-adversary" in found and "F20 wrong-targets" not in found


# ------------------------------------------------------------------ targets behind a mask
@pytest.mark.parametrize("asked, wrong", [("itself", True), ("the other view", False), ("some", False)])
def test_targets_behind_a_mask(asked, wrong):
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        x = torch.randn(B, 6)
        z = F.normalize(model(torch.cat([x, x + 0.1 * torch.randn_like(x)])), dim=1)
        similar = (z @ z.T / 0.2).masked_fill(torch.eye(2 * B, dtype=torch.bool), -1e9)
        own, other = torch.arange(2 * B), torch.cat([torch.arange(B, 2 * B), torch.arange(B)])
        some = torch.where(torch.arange(2 * B) < 8, own, other)
        update(optimizer, F.cross_entropy(similar, {"itself": own, "the other view": other, "some": some}[asked]))

    assert ("F20 wrong-targets" in said(model, optimizer, step)) == wrong


# ------------------------------------------------------------------ modes
class Functional(nn.Module):
    def __init__(self, share: float):
        super().__init__()
        self.share, self.a, self.b = share, nn.Linear(6, 32), nn.Linear(32, 2)

    def forward(self, x):
        return self.b(F.dropout(torch.relu(self.a(x)), self.share, training=self.training))


@pytest.mark.parametrize("share, evaluating, wrong", [(0.3, True, True), (0.0, True, False), (0.3, False, False)])
def test_a_functional_dropout_in_eval_mode(share, evaluating, wrong):
    model = Functional(share).train(not evaluating)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        x = torch.randn(B, 6)
        if not evaluating:  # a validation in each step
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        update(optimizer, F.cross_entropy(model(x), (x[:, 0] > 0).long()))

    assert ("S11 eval-mode-training" in said(model, optimizer, step)) == wrong


def test_a_part_that_rests_in_eval_mode():
    """Its functional dropout is off on purpose, and the model trains."""
    model = nn.Sequential(Functional(0.3), nn.Linear(2, 2))
    model[0].eval()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        x = torch.randn(B, 6)
        update(optimizer, F.cross_entropy(model(x), (x[:, 0] > 0).long()))

    assert not [name for name in said(model, optimizer, step) if name.startswith("S11")]


# ------------------------------------------------------------------ parameters of nobody
@pytest.mark.parametrize(
    "held", ["nobody", "optimizer", "late optimizer", "by hand", "data by hand", "module", "frozen"]
)
def test_a_parameter_of_its_own(held):
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    scale = nn.Parameter(torch.zeros(2), requires_grad=held != "frozen")
    keeper = nn.Module()
    if held == "module":
        keeper.scale = scale
    optimizer = torch.optim.Adam([*model.parameters(), *([scale] if held == "optimizer" else [])], 1e-3)
    late = torch.optim.SGD([scale], 0.1) if held == "late optimizer" else None

    def step(i):
        x = torch.randn(B, 6)
        z = model(x)
        losses = torch.stack([F.mse_loss(z[:, n], x[:, n]) for n in range(2)])
        scale.grad = None
        update(optimizer, ((-scale).exp() * losses + scale).sum())
        if late is not None and i == 7:  # in turns
            late.step()
        if held == "by hand":
            with torch.no_grad():
                scale.sub_(0.1 * scale.grad)
        if held == "data by hand":
            scale.data -= 0.1 * scale.grad

    found = said(model, optimizer, step, steps=10)
    assert ("S3 optimizer-misses-trainables" in found) == (held == "nobody"), found


# ------------------------------------------------------------------ pairs
def paired(how: str) -> list[str]:
    x = torch.randn(256, 6)
    y = x @ torch.randn(6, 3)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loader(*ts, **more):
        return DataLoader(TensorDataset(*ts), batch_size=B, **{"shuffle": True} | more)

    def seed():
        return {"generator": torch.Generator().manual_seed(3)} if how == "one seed" else {}

    if how in ("two", "one seed", "in order"):
        order = {"shuffle": False} if how == "in order" else {}
        a, b = loader(x, **seed(), **order), loader(y, **seed(), **order)
        batches = ((i, t) for (i,), (t,) in zip(a, b))
    elif how == "labelled and not":  # the second loader teaches its own rows
        batches = ((torch.cat([i, j]), torch.cat([t, u])) for (i, t), (j, u) in zip(loader(x, y), loader(x, y)))
    else:
        batches = ((i, t) for i, t in loader(x, y))
    batches = iter(list(batches) if how == "kept" else batches)

    def step(i):
        given, asked = next(batches)
        update(optimizer, F.mse_loss(model((given - 0.1) / 1.1), asked))

    return said(model, optimizer, step)


@pytest.mark.parametrize(
    "how, wrong", [("two", 1), ("one", 0), ("one seed", 0), ("in order", 0), ("labelled and not", 0), ("kept", 0)]
)
def test_pairs_of_two_loaders(how, wrong):
    assert ("D54 pairs-of-two-loaders" in paired(how)) == bool(wrong)


# ------------------------------------------------------------------ policies
class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.value = nn.Linear(5, 2), nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
        self.log = nn.Parameter(torch.zeros(2))

    def play(self, s):
        return torch.distributions.Normal(self.mean(s), self.log.exp())


@pytest.mark.parametrize(
    "how, wrong",
    [("learns", "F29 factor-learns"), ("graph", "F35 ratio-of-itself"), ("right", ""), ("a number learns", "")],
)
def test_ratios_of_a_policy(how, wrong):
    model = Actor()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        s, states, actions, old, rewards = torch.randn(8, 5), [], [], [], []
        for _ in range(6):
            with torch.set_grad_enabled(how == "graph"):
                d = model.play(s)
                a = d.sample()
                score = d.log_prob(a).sum(1)
            states.append(s), actions.append(a), old.append(score), rewards.append(-(a - s[:, :2]).square().sum(1))
            s = 0.8 * s + 0.2 * torch.randn(8, 5) + 0.1 * a.repeat(1, 3)[:, :5]
        s, a, old, r = torch.cat(states), torch.cat(actions), torch.cat(old), torch.cat(rewards)
        d, v = model.play(s), model.value(s).squeeze(1)
        gain = r - (v if how == "learns" else v.detach())
        ratio = (d.log_prob(a).sum(1) - old).exp()
        cut = ratio.clamp(0.8, 1.2) * (model.log[0].exp() if how == "a number learns" else 1)
        won = torch.min(ratio * gain, cut * gain).mean()
        update(optimizer, F.mse_loss(v, r) - won - 0.01 * d.entropy().sum(1).mean())

    found = [name for name in said(model, optimizer, step) if name[0] == "F"]
    assert found == ([wrong] if wrong else [])


@pytest.mark.parametrize("flags, wrong", [(lambda d: d, True), (lambda d: 1 - d, False)])
def test_ends_that_a_discount_was_put_to_first(flags, wrong):
    """reward + (0.95 * done) * next_value"""
    net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))
    late = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def step(i):
        s, after, done = torch.randn(B, 5), torch.randn(B, 5), torch.tensor([float(n % 9 == 0) for n in range(B)])
        a, r = torch.randint(0, 3, (B, 1)), torch.randn(B)
        with torch.no_grad():
            ahead = late(after).max(1).values
        target = r + 0.95 * flags(done) * ahead
        update(optimizer, F.smooth_l1_loss(net(s).gather(1, a).squeeze(1), target))

    assert ("F64 ends-inverted" in said((net, late), optimizer, step)) == wrong


def test_a_softmax_by_hand_of_scores_that_are_all_0():
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))
    nn.init.zeros_(model[2].weight), nn.init.zeros_(model[2].bias)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def step(i):
        z = model(x := torch.randn(B, 6))
        likely = (z - z.max(1, keepdim=True).values).exp()
        update(optimizer, F.nll_loss((likely / likely.sum(1, keepdim=True)).log(), (x[:, 0] > 0).long()))

    assert not [name for name in said(model, optimizer, step) if name.startswith("F35")]
