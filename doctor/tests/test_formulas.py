"""Formulas with a piece missing: each fault, its mended twin, and the healthy lines it could be mistaken for."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import train_doctor as doctor

from .bench import quiet
from .test_arithmetic import said, train

ROWS = 32


def net(into: int = 6, out: int = 3):
    return nn.Sequential(nn.Linear(into, 16), nn.ReLU(), nn.Linear(16, out))


def told(check: str, loss_of, model=None, **options) -> bool:
    report = quiet(lambda: train(loss_of, model or net(), **options))
    found = check in said(report)
    assert not found or report.root.check == check, f"\n{report}"
    return found


# ------------------------------------------------------------------------------------------------ F54
@pytest.mark.parametrize(
    "reduction, weights, wrong", [("mean", ROWS, True), ("none", ROWS, False), ("mean", 1, False), ("sum", ROWS, True)]
)
def test_weights_of_rows(reduction, weights, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1), reduction=reduction)
        return (loss * torch.rand(weights)).mean() / (ROWS if reduction == "sum" else 1)

    assert told("F54", loss_of) is wrong


# ------------------------------------------------------------------------------------------------ F55
def rebuilt(how: str):
    def loss_of(model):
        known = (torch.rand(ROWS, 6) < 0.3).float()
        values = torch.randn(ROWS, 6)
        if how == "stars":
            values = torch.randint(1, 6, (ROWS, 6)).float()
        if how == "counts":
            values = torch.poisson(torch.full((ROWS, 6), 0.5)) + 1
        if how == "full":
            known = torch.ones(ROWS, 6)
        row = values * known
        error = (model(row) - row) ** 2
        return (error * known).sum() / known.sum() if how == "masked" else error.mean()

    return loss_of


@pytest.mark.parametrize(
    "how, wrong", [("both signs", True), ("stars", True), ("masked", False), ("counts", False), ("full", False)]
)
def test_rows_with_gaps(how, wrong):
    assert told("F55", rebuilt(how), net(out=6)) is wrong


# ------------------------------------------------------------------------------------------------ F56
@pytest.mark.parametrize("how, wrong", [("ignored", True), ("used", False), ("none", False), ("as an index", False)])
def test_ends_of_episodes(how, wrong):
    target_net = net()

    def loss_of(model):
        state, following = torch.randn(ROWS, 6), torch.randn(ROWS, 6)
        actions = torch.randint(0, 2, (ROWS,))
        done = torch.tensor([float(n % 5 == 0) for n in range(ROWS)]) if how != "none" else None
        with torch.no_grad():
            later = target_net(following).max(1)[0]
            if how == "as an index":
                later[done.bool()] = 0
        later = later * (1 - done) if how == "used" else later
        q = model(state).gather(1, actions[:, None]).squeeze(1)
        return F.smooth_l1_loss(q, torch.randn(ROWS) + 0.9 * later)

    assert told("F56", loss_of) is wrong


@pytest.mark.parametrize("factor", [0.9, 0.3])
def test_a_small_factor_is_no_discount(factor):
    critic = net(out=1)

    def loss_of(model):
        state, following = torch.randn(ROWS, 6), torch.randn(ROWS, 6)
        torch.tensor([float(n % 5 == 0) for n in range(ROWS)])  # ends, of which nothing is made
        with torch.no_grad():
            later = critic(following).squeeze(1)
        return F.mse_loss(model(state).squeeze(1), torch.randn(ROWS) + factor * later)

    assert told("F56", loss_of, net(out=1)) is (factor == 0.9)


# ------------------------------------------------------------------------------------------------ F57
def pulled(how: str):
    head = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))

    def loss_of(model):
        x = torch.randn(ROWS, 6)
        a, b = (model[0](x + 0.1 * torch.randn_like(x)) for _ in range(2))
        p = model[1](a)
        if how == "by hand":
            return -(F.normalize(p, dim=1) * F.normalize(b, dim=1)).sum(1).mean()
        if how == "byol":
            return (2 - 2 * F.cosine_similarity(p, b, dim=1)).mean()
        if how == "stopped":
            b = b.detach()
        alike = F.cosine_similarity(p, b, dim=1)
        if how == "pushed as well":
            return -alike.mean() + F.cosine_similarity(p, b.roll(1, 0), dim=1).mean()
        if how == "another term":
            return -alike.mean() - a.std(0).mean()
        if how == "targets":
            return F.mse_loss(alike, torch.rand(ROWS))
        a = a.detach() if how == "stopped" else a
        return -(alike.mean() + F.cosine_similarity(model[1](b), a, dim=1).mean()) / 2

    return loss_of, nn.Sequential(net(out=8), head)


@pytest.mark.parametrize("how", ["simsiam", "by hand", "byol"])
def test_both_sides_learn(how):
    assert told("F57", *pulled(how))


TAUGHT = {"both learn": True, "halved": True, "detached": False, "frozen": False, "beside labels": False}
TAUGHT |= {"two distances": True, "two that are no divergence": True, "two, and labels for both": False}


@pytest.mark.parametrize("how", TAUGHT)
def test_a_teacher_that_learns_from_its_student(how):
    pair = nn.ModuleDict({"student": net(), "teacher": net()})
    pair["teacher"].requires_grad_(how != "frozen")

    def loss_of(model):
        x = torch.randn(ROWS, 6)
        answer, wanted = model["student"](x), model["teacher"](x)
        wanted = wanted.detach() if how == "detached" else wanted
        if how == "halved":
            return 0.5 * F.mse_loss(answer, wanted, reduction="none").mean()
        labels = F.cross_entropy(answer, x.argmax(1) % 3) if how == "beside labels" else 0
        if "two" in how:
            logs = answer.log_softmax(1), wanted.log_softmax(1)
            labels = F.l1_loss(*logs) if "no" in how else F.kl_div(*logs, reduction="batchmean", log_target=True)
        if how == "two, and labels for both":
            labels = labels + F.nll_loss(logs[0], x.argmax(1) % 3) + F.nll_loss(logs[1], x.argmax(1) % 3)
        return F.mse_loss(answer, wanted) + labels

    report = quiet(lambda: train(loss_of, pair))
    assert not report.faults and ("F57" in said(report)) is TAUGHT[how], f"\n{report}"


@pytest.mark.parametrize("how", ["stopped", "pushed as well", "another term", "targets"])
def test_something_keeps_them_apart(how):
    assert not told("F57", *pulled(how))


# ------------------------------------------------------------------------------------------------ F58
def density(how: str):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        y = x[:, :1] + 0.1 * torch.randn(ROWS, 1)
        mean, free = model(x).chunk(2, 1)
        spread = F.softplus(free) + 1e-3 if "softplus" in how else free.exp()
        z = (y - mean) / spread if "exp(-" not in how else (y - mean) * torch.exp(-free)
        if how.startswith("priced"):
            return (0.5 * z**2 + spread.log()).mean()
        if how.startswith("variance"):
            return ((y - mean) ** 2 / spread).mean()
        if how.startswith("log of it"):
            return (0.5 * z**2 + free).mean()
        return (0.5 * z**2).mean()

    return loss_of


@pytest.mark.parametrize("how", ["exp", "softplus", "exp(-s)", "variance"])
def test_a_spread_that_costs_nothing(how):
    assert told("F58", density(how), net(out=2))


@pytest.mark.parametrize("how", ["priced", "priced softplus", "log of it", "log of it, exp(-s)"])
def test_a_spread_that_is_priced(how):
    assert not told("F58", density(how), net(out=2))


def test_a_radial_function_has_a_width():
    class Radial(nn.Module):
        def __init__(self):
            super().__init__()
            self.centres, self.widths = nn.Parameter(torch.randn(1, 8)), nn.Parameter(torch.zeros(8))
            self.head = nn.Linear(8, 1)

        def forward(self, x):
            return self.head(torch.exp(-(((x - self.centres) * self.widths.exp()) ** 2)))

    def loss_of(model):
        x = torch.randn(ROWS, 1)
        return F.mse_loss(model(x), x.sin())

    assert not told("F58", loss_of, Radial())


# ------------------------------------------------------------------------------------------------ F59
class Reversal(torch.autograd.Function):
    sign = -1

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @classmethod
    def backward(cls, ctx, grad):
        return 0.3 * cls.sign * grad


class WrongReversal(Reversal):
    sign = 1


@pytest.mark.parametrize("function, wrong", [(WrongReversal, True), (Reversal, False)])
def test_the_sign_of_a_reversal(function, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        features = model[0](x)
        domain = F.cross_entropy(model[1](function.apply(features)), (x[:, 5] > 0).long())
        return domain + F.mse_loss(features[:, 0], x[:, 0])

    assert told("F59", loss_of, nn.Sequential(net(out=8), nn.Linear(8, 2))) is wrong


# ------------------------------------------------------------------------------------------------ S31
class Siren(nn.Module):
    def __init__(self, drawn: bool):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 64), nn.Linear(64, 64)])
        self.head = nn.Linear(64, 1)
        if drawn:
            nn.init.uniform_(self.layers[1].weight, -((6 / 64) ** 0.5) / 30, (6 / 64) ** 0.5 / 30)

    def forward(self, x):
        for layer in self.layers:
            x = torch.sin(30 * layer(x))
        return self.head(x)


@pytest.mark.parametrize("drawn", [False, True])
def test_sines_of_sines(drawn):
    def loss_of(model):
        x = torch.rand(256, 2) * 2 - 1
        return F.mse_loss(model(x), x.prod(1, keepdim=True))

    assert told("S31", loss_of, Siren(drawn)) is not drawn


def test_frequencies_that_are_fixed():
    def loss_of(model):
        x = torch.rand(256, 2) * 2 - 1
        features = torch.cat([torch.sin(2**n * 3.1 * x) for n in range(3)], 1)
        return F.mse_loss(model(features), x.prod(1, keepdim=True))

    assert not told("S31", loss_of, net(6, 1))


# ------------------------------------------------------------------------------------------------ D14
class Pictures(Dataset):
    def __init__(self, how: str):
        self.how, self.images = how, torch.randn(160, 1, 8, 8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, n):
        image = self.images[n]
        mask = (image > 0).float()
        if "finer" in self.how:  # the picture is the coarse one
            image, mask = F.avg_pool2d(image, 2), image
        turn = random.random() < 0.5 and self.how != "never"
        if turn:
            image = torch.flip(image, [-1]) * 1.0
        if random.random() < 0.5 if self.how == "finer, drawn twice" else turn and self.how in ("both", "finer, both"):
            mask = mask.flip(-1).float()
        return image, image.abs().sum() if self.how == "one number" else image if self.how == "itself" else mask


@pytest.mark.parametrize(
    "how, wrong",
    [("image", True), ("both", False), ("never", False), ("one number", False), ("itself", False)]
    + [("finer", True), ("finer, drawn twice", True), ("finer, both", False)],
)
def test_pictures_that_are_flipped(how, wrong):
    def program():
        random.seed(0)
        loader = DataLoader(Pictures(how), 16, shuffle=True)
        finer = [nn.Upsample(scale_factor=2)] if "finer" in how else []
        model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), *finer, nn.Conv2d(8, 1, 1))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        with doctor.watch(model, optimizer=optimizer, say=False) as report:
            for image, target in loader:
                answer = model(image)
                loss = F.mse_loss(answer.sum((1, 2, 3)), target) / 64 if target.dim() == 1 else None
                loss = F.mse_loss(answer, target) if loss is None else loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return report

    assert ("D14" in said(quiet(program))) is wrong


# ------------------------------------------------------------------------------------------------ B7, F21, F27
@pytest.mark.parametrize("straight", [False, True])
def test_a_flat_function_is_named(straight):
    class Rounded(nn.Linear):
        def forward(self, x):
            w = (self.weight * 8).round() / 8
            return F.linear(x, self.weight + (w - self.weight).detach() if straight else w, self.bias)

    def loss_of(model):
        x = torch.randn(ROWS, 6)
        return F.cross_entropy(model(x), x[:, :3].argmax(1))

    report = quiet(lambda: train(loss_of, nn.Sequential(Rounded(6, 16), nn.ReLU(), nn.Linear(16, 3))))
    assert ("B7" in said(report)) is not straight
    assert straight or "because round stands between them" in report.root.diagnosis


@pytest.mark.parametrize("how, wrong", [("column", True), ("row", False), ("on purpose", False)])
def test_a_column_meets_a_row(how, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        logp = model(x).log_softmax(1)[:, 0]
        gain = torch.randn(ROWS, 1)
        if how == "row":
            gain = gain.squeeze(1)
        if how == "on purpose":
            return ((logp[:, None] - logp) * (x[:, 0, None] > x[:, 0])).mean() + (logp.unsqueeze(1) * x[:, 1]).mean()
        return -(logp.exp() * gain).mean()

    assert told("F21", loss_of) is wrong


@pytest.mark.parametrize("views, wrong", [("one", True), ("two", False)])
def test_a_dataset_that_gives_one_view_twice(views, wrong):
    def program():
        x = torch.randn(160, 6)
        loader = DataLoader(TensorDataset(x, x if views == "one" else x + 0.1 * torch.randn_like(x)), 16)
        model = net(out=8)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        with doctor.watch(model, optimizer=optimizer, say=False) as report:
            for a, b in loader:
                z = F.normalize(model(torch.cat([a, b])), dim=1)
                alike = (z @ z.T / 0.5).masked_fill(torch.eye(32, dtype=torch.bool), float("-inf"))
                optimizer.zero_grad()
                F.cross_entropy(alike, torch.arange(32).roll(16)).backward()
                optimizer.step()
        return report

    assert ("F27" in said(quiet(program))) is wrong


# ------------------------------------------------------------------------------------------------ F22
def policies(how: str):
    def program():
        actor, critic = net(6, 4), net(8, 1)
        frozen = copy.deepcopy(critic).requires_grad_(False)
        optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (actor, critic)]
        with doctor.watch(say=False) as report:
            for _ in range(8):
                state = torch.randn(ROWS, 6)
                mean, spread = actor(state).chunk(2, 1)
                of = Normal(mean, spread.clamp(-3, 1).exp())
                u = of.rsample() if how == "with a gradient" else of.sample()
                logp = of.log_prob(u).sum(1)
                value = critic(torch.cat([state, u.tanh()], 1)).squeeze(1)
                if how == "a policy gradient":
                    loss = -(logp * value.detach()).mean()
                else:
                    loss = (0.1 * logp - value).mean()
                optimizers[0].zero_grad()
                loss.backward()
                optimizers[0].step()
                q = critic(torch.cat([state, u.detach().tanh()], 1)).squeeze(1)
                optimizers[1].zero_grad()
                F.mse_loss(q, frozen(torch.cat([state, u.detach()], 1)).squeeze(1) + 1).backward()
                optimizers[1].step()
        return report

    return program


@pytest.mark.parametrize("how, wrong", [("without", True), ("with a gradient", False), ("a policy gradient", False)])
def test_actions_that_are_drawn(how, wrong):
    assert ("F22" in said(quiet(policies(how)))) is wrong


# ------------------------------------------------------------------------------------------------ F34, S3
class Pooled(nn.Module):
    def __init__(self, token: bool):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 16), nn.Linear(16, 2)
        self.token = nn.Parameter(torch.randn(1, 1, 16)) if token else None
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

    def forward(self, x, hidden):
        h = self.embed(x)
        if self.token is not None:
            h = torch.cat([self.token.expand(len(x), -1, -1), h], 1)
            hidden = F.pad(hidden, (1, 0), value=bool(hidden[:, :1].all()))
        return self.head(self.mix(h, src_key_padding_mask=hidden)[:, 0])


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("inverted", [False, True])
def test_padding_of_rows_of_numbers(token, inverted):
    def loss_of(model):
        there = torch.arange(10) < torch.randint(3, 9, (ROWS, 1))
        x = torch.randn(ROWS, 10, 3) * there[..., None]
        return F.cross_entropy(model(x, there if inverted else ~there), (x[:, 0, 0] > 0).long())

    assert ("F34" in said(quiet(lambda: train(loss_of, Pooled(token))))) is inverted


class Centres(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        return F.linear(F.normalize(x, dim=1), F.normalize(self.weight, dim=1)) * 10


@pytest.mark.parametrize("held", [False, True])
def test_a_head_that_no_optimizer_holds(held):
    def program():
        body, head = net(out=8), Centres()
        optimizer = torch.optim.Adam([*body.parameters(), *(head.parameters() if held else ())], 1e-3)
        with doctor.watch(say=False, optimizer=optimizer) as report:
            for _ in range(8):
                x = torch.randn(ROWS, 6)
                optimizer.zero_grad()
                F.cross_entropy(head(body(x)), x[:, :3].argmax(1)).backward()
                optimizer.step()
        return report

    report = quiet(program)
    assert ("S3" in said(report)) is not held
    assert held or "Centres.weight" in report.root.observed


# ------------------------------------------------------------------------------------------------ S19
@pytest.mark.parametrize("registered", [False, True])
def test_layers_of_a_model_that_is_not_called_by_its_name(registered):
    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(6))
            layers = [net(6, 6) for _ in range(3)]
            self.layers = nn.ModuleList(layers) if registered else layers

        def log_prob(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return -((x - self.mean) ** 2).sum(1)

    def loss_of(model):
        return -model.log_prob(torch.randn(ROWS, 6)).mean()

    assert told("S19", loss_of, Flow()) is not registered


@pytest.mark.parametrize("filled", [False, True])
def test_zeros_that_a_model_fills_later(filled):
    """What was zero when it was added, and holds numbers in the end: a memory, or another tensor of the same id."""

    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.kept = net(6, 6), torch.zeros(4, 6)

        def forward(self, x):
            self.kept.zero_()
            out = self.read(x) + self.kept
            if filled:
                self.kept.copy_(out.detach())
            return out

    def loss_of(model):
        return (model(torch.randn(4, 6)) - 1).square().mean()

    assert told("S19", loss_of, Remembers()) is not filled


# ------------------------------------------------------------------------------------------------ F60
@pytest.mark.parametrize("draw, wrong", [("rand", True), ("randn", False), ("centred", False), ("not asked", False)])
def test_noise_that_is_uniform(draw, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        noise = torch.randn_like(x) if draw == "randn" else torch.rand_like(x)
        noise = noise * 2 - 1 if draw == "centred" else noise
        answer = model(0.7 * x + 0.7 * noise)
        return F.mse_loss(answer, x if draw == "not asked" else noise)

    assert told("F60", loss_of, net(out=6)) is wrong


def test_a_uniform_draw_does_not_hide_or_feign_another_draw():
    def loss_of(model):
        x, noise = torch.randn(ROWS, 6), torch.randn(ROWS, 6)
        return F.mse_loss(model(x + noise + 0.01 * torch.rand_like(x)), noise)

    assert not said(quiet(lambda: train(loss_of, net(out=6))))


# ------------------------------------------------------------------------------------------------ F61
@pytest.mark.parametrize("spread, wrong", [(1.0, True), (0.1, False)])
def test_dot_products_of_tables(spread, wrong):
    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items, self.bias = nn.Embedding(40, 16), nn.Embedding(30, 16), nn.Embedding(30, 1)
            for table in (self.users, self.items, self.bias):
                nn.init.normal_(table.weight, std=spread)

        def forward(self, u, i):
            return (self.users(u) * self.items(i)).sum(1) + self.bias(i).squeeze(1)

    def loss_of(model):
        u, i = torch.randint(0, 40, (64,)), torch.randint(0, 30, (64,))
        return F.mse_loss(model(u, i), torch.randint(1, 6, (64,)).float() - 3)

    assert told("F61", loss_of, Factors()) is wrong


# ------------------------------------------------------------------------------------------------ D15
@pytest.mark.parametrize(
    "how, wrong", [("bytes", True), ("floats", False), ("nothing wraps", False), ("codes", False), ("whole", False)]
)
def test_bytes_that_wrap_around(how, wrong):
    def loss_of(model):
        pixels = torch.randint(0, 256, (ROWS, 6), dtype=torch.uint8)
        y = (pixels[:, 0] > 128).long()
        if how == "bytes":
            x = (pixels - 128).float() / 128
        elif how == "nothing wraps":
            x = (pixels // 2 + 100).float() / 255
        elif how == "codes":
            x = (pixels % 3 - 1).view(torch.int8).float()
        elif how == "whole":
            x = (pixels.int() - 128).float() / 128
        else:
            x = (pixels.float() - 128) / 128
        return F.cross_entropy(model(x), y)

    assert told("D15", loss_of, net(out=2)) is wrong


# ------------------------------------------------------------------------------------------------ F50, F40, F4
@pytest.mark.parametrize("begins, wrong", [(11, True), (12, False), (1, False)])
def test_the_window_of_a_forecast(begins, wrong):
    """(1): each place is asked for the next one, so windows overlap on purpose."""

    def loss_of(model):
        series = torch.randn(ROWS, 30).cumsum(1) / 5
        return F.mse_loss(model(series[:, :12]), series[:, begins : begins + 3])

    assert told("F50", loss_of, net(12, 3)) is wrong


@pytest.mark.parametrize("reduction, wrong", [("mean", True), ("sum", False)])
def test_a_reconstruction_that_is_divided_twice(reduction, wrong):
    class Auto(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(100, 8), nn.Linear(4, 100)

        def forward(self, x):
            mean, logvar = self.into(x).chunk(2, 1)
            return self.out(mean + (0.5 * logvar).exp() * torch.randn_like(mean)).sigmoid(), mean, logvar

    def loss_of(model):
        x = torch.rand(ROWS, 100)
        answer, mean, logvar = model(x)
        recon = F.binary_cross_entropy(answer, x, reduction=reduction)
        return (recon - 0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())) / ROWS

    assert told("F40", loss_of, Auto()) is wrong


@pytest.mark.parametrize("size, weight, wrong", [(40.0, None, True), (1.0, None, False), (1.0, 20.0, False)])
def test_the_first_binary_loss(size, weight, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        asked = (x[:, :1] > 0).float()
        weights = None if weight is None else torch.tensor(weight)
        return F.binary_cross_entropy_with_logits(model(x) * size, asked, pos_weight=weights)

    assert ("F4" in said(quiet(lambda: train(loss_of, net(out=1))))) is wrong


# ------------------------------------------------------------------------------------------------ F62, F54
@pytest.mark.parametrize("kind", ["categorical", "normal"])
@pytest.mark.parametrize(
    "how, wrong", [("added", True), ("taken away", False), ("negated before", False), ("no policy", False)]
)
def test_the_sign_of_an_entropy(kind, how, wrong):
    def loss_of(model):
        answers = model(torch.randn(ROWS, 6))
        of = Categorical(logits=answers) if kind == "categorical" else Normal(answers[:, 0], answers[:, 1].exp())
        entropy = of.entropy().mean()
        if how == "no policy":
            return F.mse_loss(answers[:, 2], torch.randn(ROWS)) + 0.01 * entropy
        action = of.sample()
        earned = torch.randn(ROWS) * action
        policy = -(of.log_prob(action) * earned).mean() + F.mse_loss(answers[:, 2], torch.randn(ROWS))
        if how == "negated before":
            return policy + 0.01 * (-entropy)
        return policy + 0.01 * entropy if how == "added" else policy - 0.01 * entropy

    assert told("F62", loss_of) is wrong


class Mixed(nn.Module):
    """All experts answer, and the shares of a router mix their answers; or each of them reads a variable of its own."""

    def __init__(self, apart):
        super().__init__()
        self.router, self.apart = nn.Linear(6, 3), apart
        self.first, self.second = (nn.Parameter(torch.randn(3, size, 4) / 3) for size in (2 if apart else 6, 4))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        x = x.view(len(x), 3, 2) if self.apart else x
        h = F.relu(torch.einsum("bkd,kdh->bkh" if self.apart else "bd,kdh->bkh", x, self.first))
        return torch.einsum("bk,bkh,khc->bc", shares, h, self.second), shares


@pytest.mark.parametrize("sign, apart, wrong", [(1, False, True), (-1, False, False), (1, True, False)])
def test_the_entropy_of_shares_that_mix(sign, apart, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        answers, shares = model(x)
        usage = shares.mean(0)
        return F.cross_entropy(answers, x[:, :4].argmax(1)) - sign * 0.5 * (usage * (usage + 1e-9).log()).sum()

    assert told("F62", loss_of, Mixed(apart)) is wrong


@pytest.mark.parametrize("reduction, wrong", [("mean", True), ("none", False)])
def test_a_focal_loss(reduction, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1), reduction=reduction)
        return ((1 - torch.exp(-loss)) ** 2 * loss).mean()

    assert told("F54", loss_of) is wrong
