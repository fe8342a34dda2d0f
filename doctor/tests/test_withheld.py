"""What a program leaves out (F106 to F109, D33, D34, S48), other gaps of judge25, and healthy programs like them."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor

from .bench import quiet
from .test_meetings import blamed, reported
from .test_turned import net, said

ROWS, STEPS = 32, 10
KEPT = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 40), 0)  # of the data, after each of 40 steps


# ------------------------------------------------------------------------------------------------ F106
class Timed(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.table = how, nn.Embedding(40, 16)
        self.first, self.last = nn.Linear(5 if how == "column" else 4, 16), nn.Linear(16, 4)

    def forward(self, x, t):
        if self.how == "column":
            x = torch.cat([x, t.float()[:, None] / 40], 1)
        h = torch.relu(self.first(x))
        if self.how == "table":
            h = h + self.table(t)
        if self.how == "sines":
            h = h * torch.sin(t[:, None] * torch.arange(1, 17) / 16)
        return self.last(h)


def diffusion(model):
    x, t, noise = torch.randn(ROWS, 4), torch.randint(0, 40, (ROWS,)), torch.randn(ROWS, 4)
    a = KEPT[t].view(-1, 1)
    return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


@pytest.mark.parametrize("how, wrong", [("not at all", True), ("column", False), ("table", False), ("sines", False)])
def test_a_network_is_told_how_noisy_its_input_is(how, wrong):
    assert blamed("F106", Timed(how), diffusion) is wrong


def mixture(how: str):
    def loss(model):
        x, other, noise = torch.rand(ROWS, 4), torch.rand(ROWS, 4), torch.randn(ROWS, 4)
        t = torch.rand(ROWS, 1)
        if how == "flow":  # from noise to data, on a straight line
            return F.mse_loss(model((1 - t) * noise + t * x), x - noise)
        if how == "flow from the noise":
            return F.mse_loss(model(noise + t * (x - noise)), x - noise)
        if how == "lerp":
            return F.mse_loss(model(torch.lerp(noise, x, t)), x - noise)
        if how == "flow with its time":
            return F.mse_loss(model(torch.cat([((1 - t) * noise + t * x)[:, :3], t], 1)), x - noise)
        if how == "blind denoiser":  # any strength, and the data stay as they are
            return F.mse_loss(model(x + t * noise), x)
        if how == "mixup of each row":
            return F.mse_loss(model(t * x + (1 - t) * other), t * x + (1 - t) * other)
        return F.mse_loss(model(0.7 * x + 0.3 * noise), x)

    return loss


MIXTURES = {"flow": True, "flow from the noise": True, "lerp": True, "flow with its time": False}
MIXTURES |= {"blind denoiser": False, "mixup of each row": False, "one strength": False}


@pytest.mark.parametrize("how, wrong", MIXTURES.items())
def test_times_of_other_mixtures(how, wrong):
    assert blamed("F106", net(4, 4), mixture(how)) is wrong


class FromTable(nn.Module):
    """A fixed table of sines, by rows, beside the input."""

    def __init__(self, told: bool):
        super().__init__()
        self.told, self.table = told, torch.sin(torch.arange(40)[:, None] * torch.arange(1, 5) / 8)
        self.body = net(8 if told else 4, 4)

    def forward(self, x, t):
        return self.body(torch.cat([x, self.table[t]], 1) if self.told else x)


@pytest.mark.parametrize("told", [True, False])
def test_rows_that_a_draw_picked_from_the_data_tell_nothing_of_the_time(told):
    data, classes = torch.randn(200, 4), torch.randint(3, (200,))

    def loss(model):
        rows = torch.randint(0, 200, (ROWS,))
        x, t = data[rows], torch.randint(0, 40, (ROWS,))
        noise, a = torch.randn_like(x), KEPT[t].view(-1, 1)
        assert classes[rows].shape == t.shape
        return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)

    assert blamed("F106", FromTable(told), loss) is not told


def mixtures_of_rows(how: str):
    def loss(model):
        x, noise, t, u = torch.rand(ROWS, 4), torch.randn(ROWS, 4), torch.rand(ROWS, 1), torch.rand(ROWS, 1)
        if how == "a class":
            return F.cross_entropy(model((1 - t) * noise + t * x), (x[:, 0] > 0.5).long())
        if how == "a gain and a level":
            return F.mse_loss(model((0.5 + t) * x + u * noise), x)
        if how == "a field without a time":
            return F.mse_loss(model((1 - t) * noise + t * x), (noise - x) * (1 - t))
        return F.mse_loss(model((1 - t) * noise + t * x), x if how == "the data" else noise - x)

    return loss


MEANT = {"a class": False, "a gain and a level": False, "a field without a time": False, "the data": True, "gap": True}


@pytest.mark.parametrize("how, wrong", MEANT.items())
def test_only_who_is_asked_for_noise_or_data_needs_the_time(how, wrong):
    assert blamed("F106", net(4, 4), mixtures_of_rows(how)) is wrong


# ------------------------------------------------------------------------------------------------ F107
def pseudo(how: str):
    def loss(model):
        x = torch.randn(ROWS, 6)
        weak = x + 0.05 * torch.randn_like(x)
        strong = x + 0.6 * torch.randn_like(x)
        if how == "strangers":
            strong = torch.randn(ROWS, 6)
        elif how == "reversed columns":
            strong = strong.flip(1)
        elif how == "a few columns":
            strong = strong * (torch.rand_like(x) < 0.5)
        if how == "soft strangers":
            with torch.no_grad():
                target = model(torch.randn(ROWS, 6)).softmax(1)
            return F.kl_div(model(x).log_softmax(1), target, reduction="batchmean")
        if how == "labels":
            return F.cross_entropy(model(strong), torch.randint(3, (ROWS,)))
        with torch.no_grad():
            sure, target = model(weak).softmax(1).max(1)
        each = F.cross_entropy(model(strong), target, reduction="none")
        return (each * (sure > 0.3).float()).mean()

    return loss


PSEUDO = {"strangers": True, "soft strangers": True, "views": False, "reversed columns": False}
PSEUDO |= {"a few columns": False, "labels": False}


@pytest.mark.parametrize("how, wrong", PSEUDO.items())
def test_targets_are_made_of_the_same_rows(how, wrong):
    assert blamed("F107", net(6, 3), pseudo(how)) is wrong


# ------------------------------------------------------------------------------------------------ F108
@pytest.mark.parametrize("how, wrong", [("swapped", True), ("right", False), ("plain", False), ("both learn", False)])
def test_the_network_that_learns_chooses(how, wrong):
    q = net(4, 3)
    other = net(4, 3) if how == "both learn" else copy.deepcopy(q)
    model = nn.ModuleList([q, other]) if how == "both learn" else q

    def loss(_):
        s, following, reward = torch.randn(ROWS, 4), torch.randn(ROWS, 4), torch.rand(ROWS)
        action, done = torch.randint(3, (ROWS, 1)), (torch.rand(ROWS) < 0.2).float()
        with torch.no_grad():
            chooses, says = (other, q) if how in ("swapped", "both learn") else (q, other)
            best = chooses(following).argmax(1, keepdim=True)
            value = says(following).gather(1, best).squeeze(1)
            if how == "plain":
                value = other(following).max(1).values
            target = reward + 0.9 * (1 - done) * value
        asked = F.smooth_l1_loss(q(s).gather(1, action).squeeze(1), target)
        return asked + 0 * other(s).sum() if how == "both learn" else asked

    assert ("F108" in said(reported(model, loss))) is wrong


# ------------------------------------------------------------------------------------------------ F109
class Masked(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.embed, self.block, self.head = how, nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.positions, self.token = nn.Parameter(torch.randn(1, 9, 8)), nn.Parameter(torch.zeros(1, 1, 8))
        self.decoder = nn.Parameter(torch.randn(1, 9, 8))

    def forward(self, x):  # (B, 9, 6)
        rows = len(x)
        shuffled = torch.rand(rows, 9).argsort(1)
        restore = shuffled.argsort(1)
        h = self.embed(x) + self.positions
        h = self.block(h.gather(1, shuffled[:, :4, None].expand(-1, -1, 8)))
        h = torch.cat([h, self.token.expand(rows, 5, -1)], 1)
        places = self.decoder
        if self.how == "put back":
            h = torch.gather(h, 1, restore.unsqueeze(-1).repeat(1, 1, 8))
        elif self.how == "positions shuffled":
            places = places.expand(rows, -1, -1).gather(1, shuffled[:, :, None].expand(-1, -1, 8))
        out = self.head(torch.relu(h + places))
        if self.how == "positions shuffled":
            x = x.gather(1, shuffled[:, :, None].expand(-1, -1, 6))
        return F.mse_loss(out, x)


@pytest.mark.parametrize("how, wrong", [("left", True), ("put back", False), ("positions shuffled", False)])
def test_pieces_go_back_to_their_places(how, wrong):
    assert blamed("F109", Masked(how), lambda m: m(torch.randn(16, 9, 6))) is wrong


# ------------------------------------------------------------------------------------------------ D33, D34
def regression(how: str):
    everything = torch.randn(ROWS, 5), torch.randn(ROWS)

    def loss(model):
        x, noise = everything if how == "all data" else (torch.randn(ROWS, 5), torch.randn(ROWS))
        y = 20 * x[:, 0] + 100 + noise
        if how in ("batch", "all data"):
            return F.mse_loss(model(x).squeeze(1), (y - y.mean()) / (y.std() + 1e-8))
        if how == "batch, by column":
            y = y[:, None]
            return F.mse_loss(model(x), (y - y.mean(0)) / y.std(0))
        if how == "a teacher's":
            with torch.no_grad():
                y = net(5, 1)(x).squeeze(1)
            return F.mse_loss(model(x).squeeze(1), (y - y.mean()) / y.std())
        if how == "returns":
            value = model(x).squeeze(1)
            returns = (y - y.mean()) / y.std()
            return F.mse_loss(value, returns) - (value.tanh() * returns).mean()
        return F.mse_loss(model(x).squeeze(1), (y - 100) / 20)

    return loss


SCALES = {"batch": True, "batch, by column": True, "all data": False, "a teacher's": False, "returns": False}
SCALES |= {"fixed": False}


@pytest.mark.parametrize("how, wrong", SCALES.items())
def test_one_scale_for_all_batches(how, wrong):
    assert blamed("D33", net(5, 1), regression(how)) is wrong


def windows(how: str):
    def loss(model):
        level, slope = 5 * torch.randn(ROWS, 1), torch.randn(ROWS, 1)
        series = level + slope * torch.arange(12) / 12 + 0.1 * torch.randn(ROWS, 12)
        x, y = series[:, :10], series[:, 10:]
        mean, spread = x.mean(1, keepdim=True), x.std(1, keepdim=True)
        z = (x - mean) / (spread + 1e-5)
        if how == "undone":
            return F.mse_loss(model(z) * spread + mean, y)
        if how == "both":
            return F.mse_loss(model(z), (y - mean) / (spread + 1e-5))
        if how == "level given":
            return F.mse_loss(model(torch.cat([z[:, 1:], mean], 1)), y)
        if how == "other targets":
            return F.mse_loss(model(z), slope.expand(-1, 2))
        return F.mse_loss(model(z), y)

    return loss


@pytest.mark.parametrize(
    "how, wrong",
    [("left", True), ("undone", False), ("both", False), ("level given", False), ("other targets", False)],
)
def test_a_window_keeps_its_level(how, wrong):
    assert blamed("D34", net(10, 2), windows(how)) is wrong


# ------------------------------------------------------------------------------------------------ S48
class Series(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.embed, self.head = how, nn.Linear(2, 16), nn.Linear(16, 1)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.positions = nn.Parameter(torch.randn(1, 12, 16)) if how == "positions" else None
        self.before = nn.Conv1d(2, 2, 3, padding=1) if how == "convolution" else None

    def forward(self, x):  # (B, 12, 2)
        if self.before is not None:
            x = self.before(x.transpose(1, 2)).transpose(1, 2)
        h = self.embed(x)
        if self.positions is not None:
            h = h + self.positions
        if self.how == "by hand":
            h = F.scaled_dot_product_attention(h, h, h)
        elif self.how == "masked":
            h = self.encoder(h, mask=torch.ones(12, 12).triu(1).bool())
        else:
            h = self.encoder(h)
        return self.head(h.mean(1)).squeeze(1)


def of_series(how: str):
    def loss(model):
        phase = 6 * torch.rand(ROWS, 1)
        x = torch.stack([(torch.arange(12) / 2 + phase).sin(), (torch.arange(12) / 3 + phase).cos()], 2)
        if how == "points":
            x = torch.randn(ROWS, 12, 2)
        if how == "counted":
            x = torch.cat([x[..., :1], (torch.arange(12) / 12).expand(ROWS, 12)[..., None]], 2)
        return F.mse_loss(model(x), phase.squeeze(1) / 6)

    return loss


ORDERS = {"left out": True, "by hand": True, "positions": False, "convolution": False, "masked": False}
ORDERS |= {"points": False, "counted": False}


@pytest.mark.parametrize("how, wrong", ORDERS.items())
def test_attention_is_told_the_places_of_a_series(how, wrong):
    assert blamed("S48", Series(how), of_series(how)) is wrong


# ------------------------------------------------------------------------------------------------ S38
def rollout(how: str):
    def loss(policy):
        state, cost = torch.randn(ROWS, 2), 0.0
        for _ in range(6):
            push = policy(state)
            if how == "refined":
                state = state + policy(state)[:, :1] * 0 + torch.cat([push, push], 1)
            else:
                speed = state[:, 1] + 0.1 * push[:, 0]
                state = torch.stack([state[:, 0] + 0.1 * speed, speed], 1)
            cost = cost + state.pow(2).sum(1).mean() + 0.01 * push.pow(2).mean()
            if how == "cut":
                state = state.detach()
        if how == "cut once":
            cost = cost + policy(state.detach()).pow(2).mean()
        return cost

    return loss


@pytest.mark.parametrize("how, wrong", [("cut", True), ("whole", False), ("cut once", False)])
def test_a_rollout_is_not_cut_in_each_turn(how, wrong):
    assert blamed("S38", net(2, 1), rollout(how)) is wrong


def test_an_answer_that_is_refined_may_be_cut_in_each_turn():
    def loss(model):
        x = torch.randn(ROWS, 2)
        guess, whole = torch.zeros(ROWS, 2), 0.0
        for _ in range(4):
            guess = guess.detach() + model(torch.cat([guess.detach(), x], 1))
            whole = whole + F.mse_loss(guess, x.flip(1))
        return whole

    assert not blamed("S38", net(4, 2), loss)


# ------------------------------------------------------------------------------------------------ others of judge25
def test_a_hinge_of_zeros_and_ones_is_seen_where_all_answers_have_one_sign():
    def loss(model):
        x = torch.randn(ROWS, 4)
        return torch.clamp(1 - (x[:, 0] > 0).float() * (model(x).squeeze(1) + 3), min=0).mean()

    assert blamed("F20", net(4, 1), loss)


@pytest.mark.parametrize("forward", [True, False])
def test_returns_of_plain_numbers(forward):
    policy = net(4, 2)

    def loss(model):
        states, actions, rewards = [], [], []
        for _ in range(12):
            states.append(torch.randn(1, 4))
            with torch.no_grad():
                actions.append(torch.multinomial(model(states[-1]).softmax(1), 1).squeeze(1))
            rewards.append(1.0)
        returns, running = [], 0.0
        for r in rewards if forward else rewards[::-1]:
            running = r + 0.98 * running
            returns.append(running) if forward else returns.insert(0, running)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        of = model(torch.cat(states)).log_softmax(1).gather(1, torch.cat(actions)[:, None]).squeeze(1)
        return -(of * returns).sum()

    assert blamed("F96", policy, loss) is forward


@pytest.mark.parametrize("used", [True, False])
def test_flags_that_come_from_numpy(used):
    q, target = net(4, 3), net(4, 3)

    def loss(model):
        s, following, r = torch.randn(ROWS, 4), torch.randn(ROWS, 4), torch.rand(ROWS)
        done = torch.from_numpy((np.arange(ROWS) % 5 == 0).astype(np.float64))
        with torch.no_grad():
            value = target(following).max(1).values
            wanted = r + 0.9 * value * (1 - done.float()) if used else r + 0.9 * value
        return F.smooth_l1_loss(model(s).gather(1, torch.randint(3, (ROWS, 1))).squeeze(1), wanted)

    assert blamed("F56", q, loss) is not used


@pytest.mark.parametrize("same", [True, False])
def test_halves_that_a_mask_keeps(same):
    masks = torch.tensor([[1.0, 0.0], [1.0, 0.0] if same else [0.0, 1.0]])

    def loss(model):
        z, log_det = torch.randn(ROWS, 2), 0.0
        for m, layer in zip(masks, (model[0], model[1])):
            s, t = layer(m * z).chunk(2, 1)
            s, t = s.tanh() * (1 - m), t * (1 - m)
            z, log_det = (1 - m) * (z - t) * torch.exp(-s) + m * z, log_det - s.sum(1)
        return (0.5 * (z**2).sum(1) - log_det).mean()

    assert blamed("S40", nn.ModuleList([net(2, 4), net(2, 4)]), loss) is same


FLOWS = {
    "by its distribution": False,
    "by hand": False,
    "without the logarithms": True,
    "by hand, without": True,
    "by another loss": False,
    "without a sum": False,
}


@pytest.mark.parametrize("how", FLOWS)
def test_logarithms_of_scales_in_no_loss(how):
    prior = torch.distributions.Normal(0.0, 1.0)

    def loss(model):
        z, log_det, target = torch.randn(ROWS, 4), 0.0, torch.randn(ROWS, 4)
        for layer in model:
            a, b = z.chunk(2, 1)
            s, t = layer(a).chunk(2, 1)
            s = s.tanh()
            z = torch.cat([b * s.exp() + t, a], 1)
            if how != "without a sum":
                log_det = log_det + s.sum(1)
        return {
            "by its distribution": lambda: -(prior.log_prob(z).sum(1) + log_det).mean(),
            "by hand": lambda: (0.5 * z.pow(2).sum(1) - log_det).mean(),
            "without the logarithms": lambda: -prior.log_prob(z).sum(1).mean(),
            "by hand, without": lambda: 0.5 * (z**2).sum(1).mean(),
            "by another loss": lambda: F.mse_loss(z, target),
            "without a sum": lambda: -prior.log_prob(z).sum(1).mean(),
        }[how]()

    assert blamed("F82", nn.ModuleList([net(2, 4), net(2, 4)]), loss) is FLOWS[how]


def test_cutmix_in_every_second_step():
    turns = iter(range(100))

    def loss(model):
        x, y = torch.randn(16, 1, 8, 8), torch.randint(3, (16,))
        if next(turns) % 2:
            return F.cross_entropy(model(x), y)
        order, mixed = torch.randperm(16), x.clone()
        mixed[:, :, :, :2] = x[order, :, :, :2]
        out = model(mixed)
        return 0.25 * F.cross_entropy(out, y) + 0.75 * F.cross_entropy(out, y[order])

    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3))
    assert blamed("F68", model, loss)


def test_what_was_computed_for_a_log_does_not_speak_for_the_loss():
    """Two errors of one answer, of which only one is in the loss: separation with and without the right order."""

    def loss(model):
        x = torch.randn(ROWS, 4)
        answer, wanted = model(x), torch.stack([x[:, 0], -x[:, 0] + 3], 1)
        direct, crossed = ((answer - wanted) ** 2).mean(1), ((answer - wanted.flip(1)) ** 2).mean(1)
        assert crossed.isfinite().all()
        return direct.mean()

    assert not blamed("F75", net(4, 2), loss)


@pytest.mark.parametrize("how, wrong", [("left", True), ("detached", False), ("cleared", False)])
def test_gradients_that_a_discriminator_leaves_on_its_generator(how, wrong):
    torch.manual_seed(0)
    maker, judge = net(4, 2), net(2, 1)
    makers, judges = (torch.optim.Adam(m.parameters(), 1e-3) for m in (maker, judge))

    def run():
        with doctor.watch(optimizer=[makers, judges], steps=2 * STEPS, say=False) as report:
            for _ in range(STEPS):
                real, fake = torch.randn(ROWS, 2) + 2, maker(torch.randn(ROWS, 4))
                makers.zero_grad(), judges.zero_grad()
                seen = judge(fake.detach() if how == "detached" else fake)
                loss = F.softplus(-judge(real)).mean() + F.softplus(seen).mean()
                loss.backward()
                judges.step()
                if how == "cleared":
                    makers.zero_grad()
                F.softplus(-judge(maker(torch.randn(ROWS, 4)))).mean().backward()
                makers.step()
        return report

    report = quiet(run)
    assert not report.faults and ("N1" in said(report)) is wrong, f"\n{report}"


# ------------------------------------------------------------------------------------------------ forms
@pytest.mark.parametrize("swapped", [True, False])
def test_an_average_whose_weights_may_learn_and_are_in_no_optimizer(swapped):
    """copy.deepcopy(model) without requires_grad_(False), called under no_grad."""
    model, head = net(6, 8), net(8, 8)
    average, turns = copy.deepcopy(model), iter(range(100))

    def loss(_):
        with torch.no_grad():
            for p, q in zip(model.parameters(), average.parameters()) if next(turns) else ():
                q.mul_(0.01 if swapped else 0.99).add_((0.99 if swapped else 0.01) * p)
        x = torch.randn(ROWS, 6)
        with torch.no_grad():
            wanted = F.normalize(average(x + 0.1 * torch.randn_like(x)), dim=1)
        return 2 - 2 * (F.normalize(head(model(x)), dim=1) * wanted).sum(1).mean()

    assert ("F28" in said(reported(nn.ModuleList([model, head]), loss))) is swapped


@pytest.mark.parametrize("shown", [True, False])
def test_a_mask_over_data_that_no_layer_was_given_before(shown):
    layer, head = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 1)

    def loss(_):
        there = torch.arange(10)[None] < torch.randint(2, 9, (ROWS, 1))
        x = torch.randn(ROWS, 10, 8) * there[..., None]
        h = layer(x, src_key_padding_mask=there if shown else ~there)
        return F.mse_loss(head((h * there[..., None]).sum(1)).squeeze(1), x.sum((1, 2)))

    assert ("F34" in said(reported(nn.ModuleList([layer, head]), loss))) is shown


@pytest.mark.parametrize("form", ["twice the variance", "half of it", "a reciprocal"])
def test_a_density_with_twice_its_variance(form):
    def loss(model):
        x = torch.randn(ROWS, 4)
        mean, log = model(x).chunk(2, 1)
        error = (x[:, :1] - mean) ** 2
        if form == "twice the variance":
            return (error / (2 * log.exp()) + 0.5 * log).mean()
        if form == "half of it":
            return (0.5 * error / log.exp() + log / 2).mean()
        return (error * (1 / (2 * log.exp())) + 0.5 * log).mean()

    assert not blamed("F82", net(4, 2), loss)


def test_all_of_the_data_may_be_asked_for_an_accuracy_in_each_step():
    everything = torch.randn(512, 8)

    def loss(model):
        rows = torch.randint(512, (ROWS,))
        assert model(everything).isfinite().all()
        return F.mse_loss(model(everything[rows]), everything[rows].sum(1, keepdim=True))

    assert not blamed("D20", net(8, 1), loss)


def of_maps(how: str):
    def loss(model):
        x = torch.randn(8, 1, 6, 6)
        y = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
        ones, out = F.one_hot(y, 3).permute(0, 3, 1, 2).float(), model(x)
        if how.startswith("nll"):
            return F.nll_loss(F.log_softmax(out, -1 if how == "nll" else 1), y)
        if how == "heat maps":
            return F.mse_loss(out.softmax(-1), x.softmax(-1).expand(-1, 3, -1, -1))
        p = out.softmax({"width": -1, "height": 2, "classes": 1}[how])
        return 1 - ((2 * (p * ones).sum((2, 3)) + 1) / (p.sum((2, 3)) + ones.sum((2, 3)) + 1)).mean()

    return loss


@pytest.mark.parametrize(
    "how, wrong",
    [
        ("width", True),
        ("height", True),
        ("classes", False),
        ("nll", True),
        ("nll of classes", False),
        ("heat maps", False),
    ],
)
def test_shares_of_classes_are_taken_along_the_classes(how, wrong):
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    assert blamed("S33", model, of_maps(how)) is wrong


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = (
            nn.GRU(1, 8, batch_first=True),
            nn.GRU(1, 8, batch_first=True),
            nn.Linear(8, 1),
        )

    def forward(self, x, y):
        return self.out(self.second(y, self.first(x)[1])[0])


def series_to_series(how: str):
    def loss(model):
        z = torch.sin(torch.arange(20) / 3 + 6 * torch.rand(ROWS, 1))[..., None]
        x, y = z[:, :12], z[:, 12:]
        given = {
            "echo": y,
            "shifted": torch.cat([x[:, -1:], y[:, :-1]], 1),
            "noisy": y + 0.1 * torch.randn_like(y),
            "start": torch.zeros_like(y),
        }
        return F.mse_loss(model(x, given[how]), y)

    return loss


@pytest.mark.parametrize("how, wrong", [("echo", True), ("shifted", False), ("noisy", False), ("start", False)])
def test_a_decoder_of_numbers_is_not_given_what_it_is_asked_for(how, wrong):
    assert blamed("F33", Decoder(), series_to_series(how)) is wrong


@pytest.mark.parametrize("how, wrong", [("bytes", True), ("unit", False), ("depth", False)])
def test_pictures_are_asked_for_in_the_scale_in_which_they_go_in(how, wrong):
    def loss(model):
        x = torch.rand(4, 1, 6, 6)
        return F.l1_loss(model(x), {"bytes": 255 * x, "unit": x, "depth": 10 * x}[how])

    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    assert blamed("F42", model, loss) is wrong


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.GRU(6, 12, batch_first=True, bidirectional=True), nn.Linear(24, 5)

    def forward(self, x):
        return self.out(self.layer(x)[0]).log_softmax(-1).transpose(0, 1)


@pytest.mark.parametrize("how, wrong", [("full", True), ("a tuple", True), ("own", False), ("cut alike", False)])
def test_ctc_is_told_the_length_of_each_row(how, wrong):
    def loss(model):
        lengths = torch.randint(4, 13, (8,)) if how != "cut alike" else torch.full((8,), 12)
        x = torch.randn(8, 12, 6) * (torch.arange(12)[None, :, None] < lengths[:, None, None])
        told = {"full": torch.full((8,), 12), "a tuple": (12,) * 8}.get(how, lengths)
        labels = torch.randint(1, 5, (8, 2))
        wanted = (2,) * 8 if how == "a tuple" else torch.full((8,), 2)
        return F.ctc_loss(model(x), labels, told, wanted, zero_infinity=True)

    assert blamed("F110", Listener(), loss) is wrong


def survival(how: str):
    def loss(model):
        x = torch.randn(ROWS, 4)
        time, event = torch.rand(ROWS) + 0.1, (torch.rand(ROWS) < 0.6).float()
        risk = model(x).squeeze(1)
        if how == "ranked lists":  # ListMLE: each against all that are ranked lower
            lower = (time[None, :] <= time[:, None]).float()
            return -(risk - torch.log((risk.exp()[None, :] * lower).sum(1))).mean()
        if how == "masked":
            gone = time[None, :] > time[:, None]
            total = risk[None, :].expand(ROWS, ROWS).masked_fill(gone, -1e9).logsumexp(1)
        elif how == "product":
            total = torch.log((time[:, None] >= time[None, :]).float() @ risk.exp())
        else:
            at_risk = time[None, :] >= time[:, None] if how == "right" else time[None, :] <= time[:, None]
            total = torch.log((at_risk.float() * risk.exp()[None, :]).sum(1) + 1e-8)
        return -((risk - total) * event).sum() / event.sum()

    return loss


SETS = {"wrong": True, "product": True, "masked": True, "right": False, "ranked lists": False}


@pytest.mark.parametrize("how, wrong", SETS.items())
def test_risk_sets_as_a_matrix(how, wrong):
    assert blamed("F69", net(4, 1), survival(how)) is wrong


def implicit(how: str):
    def loss(model):
        user, item, other = torch.randint(30, (64,)), torch.randint(40, (64,)), torch.randint(40, (64,))

        def of(things):
            return (model[0](user) * model[1](things)).sum(1)

        return {
            "log-sigmoids": lambda: -F.logsigmoid(of(item)).mean(),
            "softplus": lambda: F.softplus(-of(item)).mean(),
            "logarithm": lambda: -torch.log(torch.sigmoid(of(item))).mean(),
            "ones": lambda: F.mse_loss(of(item), torch.ones(64)),
            "both": lambda: -F.logsigmoid(of(item)).mean() - F.logsigmoid(-of(other)).mean(),
            "ranks": lambda: -F.logsigmoid(of(item) - of(other)).mean(),
            "with a price": lambda: -F.logsigmoid(of(item)).mean() + 0.01 * model[0](user).pow(2).sum(1).mean(),
        }[how]()

    return loss


@pytest.mark.parametrize("how", ["log-sigmoids", "softplus", "logarithm", "ones", "both", "ranks", "with a price"])
def test_scores_that_are_only_to_rise(how):
    model = nn.ModuleList([nn.Embedding(30, 8), nn.Embedding(40, 8)])
    assert blamed("F20", model, implicit(how)) is (how in ("log-sigmoids", "softplus", "logarithm", "ones"))


def test_the_places_of_a_random_mask():
    """torch.where with one argument."""

    def loss(model):
        x, mask = torch.randn(ROWS, 4), torch.rand(ROWS) < 0.5
        (rows,) = torch.where(mask)
        return F.mse_loss(model(x[rows]), x[rows, :1])

    assert not blamed("D21", net(4, 1), loss)
