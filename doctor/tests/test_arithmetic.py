"""What the eye sees of plain arithmetic: a fault, its mended twin, and the healthy lines it could be mistaken for."""

import copy

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import quiet
from train_doctor import NOTE


def net(into: int = 4, out: int = 4, hidden: int = 16):
    return nn.Sequential(nn.Linear(into, hidden), nn.Tanh(), nn.Linear(hidden, out))


def train(loss_of, model=None, *, after=lambda model: None, before=lambda model: None, steps: int = 6, out: int = 4):
    """Steps of a small network; `before` comes between the backward and the optimizer, `after` behind it."""
    model = model or net(out=out)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with doctor.watch(model, optimizer=optimizer, steps=steps, say=False) as report:
        for _ in range(steps):
            loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            before(model)
            optimizer.step()
            after(model)
    return report


def said(report) -> set[str]:
    assert report.done and not report.faults, report.faults
    return {f.check for f in report.findings if f.severity != NOTE}


def regression(model):
    x = torch.randn(16, 4)
    return F.mse_loss(model(x), x.flip(1))


# ------------------------------------------------------------------------------------------------ N28
class Lines:
    """What a program may do with its weights and gradients between two forwards."""

    def __init__(self):
        self.average, self.stats, self.slot = [], {}, None

    @torch.no_grad()
    def clipped_copy(self, model):
        for p in model.parameters():
            p = p.data.clamp(-0.1, 0.1)

    @torch.no_grad()
    def clipped_by_function(self, model):
        for p in model.parameters():
            torch.clamp(p, -0.1, 0.1)

    @torch.no_grad()
    def average_rebound(self, model):
        self.average = self.average or [p.clone() for p in model.parameters()]
        for mean, p in zip(self.average, model.parameters()):
            mean = 0.9 * mean + 0.1 * p

    def average_with_graph(self, model):
        self.average = self.average or [p.detach().clone() for p in model.parameters()]
        for mean, p in zip(self.average, model.parameters()):
            mean = mean.lerp(p, 0.1)

    def gradient_divided(self, model):
        for p in model.parameters():
            p.grad / 8

    def gradient_clamped(self, model):
        [p.grad.clamp(-1, 1) for p in model.parameters()]

    @torch.no_grad()
    def decayed(self, model):
        for p in model.parameters():
            p.mul(0.999)

    @torch.no_grad()
    def in_place(self, model):
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)
            p.data.mul_(0.999)
            p.grad.clamp_(-1, 1)

    @torch.no_grad()
    def assigned(self, model):
        for p in model.parameters():
            p.data = p.data.clamp(-0.5, 0.5)
            p.grad = p.grad.clamp(-1, 1)
            p.copy_(p * 0.999)

    def as_a_new_parameter(self, model):
        """Its numbers live on in another tensor. The optimizer knows nothing of it, which is another fault."""
        self.slot = [nn.Parameter(p.detach().mul(0.5)) for p in model.parameters()]

    @torch.no_grad()
    def measured(self, model):
        for name, p in model.named_parameters():
            self.stats[name] = p.norm(), p.grad.abs().max(), (p.grad / (p.abs() + 1e-6)).mean()

    @torch.no_grad()
    def compared_now_and_then(self, model):
        before, self.average = self.average, [p.clone() for p in model.parameters()]
        moved = [p - old for p, old in zip(model.parameters(), before)]
        if len(self.stats) > 100:
            print(moved)

    @torch.no_grad()
    def average_kept(self, model):
        """Looked at when the run is over."""
        for name, p in model.named_parameters():
            self.stats[name] = 0.9 * self.stats.get(name, p) + 0.1 * p

    @torch.no_grad()
    def kept_in_a_list(self, model):
        self.average.append([p * 1.0 for p in model.parameters()])


FAULTY = ("clipped_copy", "clipped_by_function", "average_rebound", "average_with_graph", "decayed")
HEALTHY = ("in_place", "assigned", "as_a_new_parameter", "measured", "compared_now_and_then", "average_kept")


@pytest.mark.parametrize("line", FAULTY)
def test_a_weight_that_was_to_change_and_does_not(line):
    report = quiet(lambda: train(regression, after=getattr(Lines(), line)))
    assert report.root is not None and report.root.check == "N28", f"\n{report}"
    assert "test_arithmetic.py" in report.root.observed


@pytest.mark.parametrize("line", ("gradient_divided", "gradient_clamped"))
def test_a_gradient_that_was_to_change_and_does_not(line):
    report = quiet(lambda: train(regression, before=getattr(Lines(), line)))
    assert report.root.check == "N28" and "gradients" in report.root.diagnosis, f"\n{report}"


@pytest.mark.parametrize("line", (*HEALTHY, "kept_in_a_list"))
def test_what_somebody_takes(line):
    assert "N28" not in said(quiet(lambda: train(regression, before=getattr(Lines(), line))))


def test_steps_by_hand_that_give_new_tensors():
    def program(in_place: bool):
        model = net()
        with doctor.watch(model, say=False) as report:
            for _ in range(8):
                regression(model).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        if in_place:
                            p -= 0.01 * p.grad
                        else:
                            p = p - 0.01 * p.grad
                model.zero_grad()
        return report

    assert "N28" in said(quiet(lambda: program(False)))
    assert "N28" not in said(quiet(lambda: program(True)))


# ------------------------------------------------------------------------------------------------ F23
def diffusion(how: str):
    def loss_of(model):
        x0, t = torch.rand(16, 4).round(), torch.rand(16, 1)
        noise = torch.randn_like(x0)
        into = torch.randn_like(x0) if how.startswith("twice") else noise
        xt = (1 - t).sqrt() * x0 + t.sqrt() * into
        if how.endswith("by hand"):
            return (noise - model(xt)).pow(2).mean()
        if how.endswith("score"):
            return ((model(xt) * t + noise) ** 2).sum(1).mean()
        return F.mse_loss(model(xt), noise)

    return loss_of


@pytest.mark.parametrize("how", ("", " by hand", " score"))
def test_noise_that_is_drawn_twice(how):
    report = quiet(lambda: train(diffusion("twice" + how)))
    assert report.root is not None and report.root.check == "F23", f"\n{report}"
    assert "F23" not in said(quiet(lambda: train(diffusion("once" + how))))


def random_targets(model):
    return F.mse_loss(model(torch.randn(16, 4)), torch.randn(16, 4))


def denoising(model):
    x = torch.rand(16, 4)
    return F.mse_loss(model(x + 0.1 * torch.randn_like(x)), x)


def noise_to_noise(model):
    x = torch.rand(16, 4)
    return F.mse_loss(model(x + 0.1 * torch.randn_like(x)), x + 0.1 * torch.randn_like(x))


def noisy_labels(model):
    x = torch.rand(16, 4)
    return F.mse_loss(model(x + 0.1 * torch.randn_like(x)), x.flip(1) + 0.1 * torch.randn(16, 4))


def auto_encoder(model):
    mean, spread = torch.rand(16, 4), model(torch.rand(16, 4)).exp()
    z = mean + spread * torch.randn(16, 4)
    return F.mse_loss(z, torch.rand(16, 4)) + z.pow(2).mean()


def flow(model):
    x1, x0, t = torch.rand(16, 4), torch.randn(16, 4), torch.rand(16, 1)
    return F.mse_loss(model(t * x1 + (1 - t) * x0), x1 - x0)


@pytest.mark.parametrize("loss_of", (random_targets, denoising, noise_to_noise, noisy_labels, auto_encoder, flow))
def test_noise_that_is_where_it_belongs(loss_of):
    assert "F23" not in said(quiet(lambda: train(loss_of)))


# ------------------------------------------------------------------------------------------------ F24
def policy(how: str, kind=Categorical):
    def loss_of(model):
        state = torch.rand(32, 4)
        answer = model(state)
        dist = Categorical(logits=answer) if kind is Categorical else Normal(answer, torch.ones(4))
        action = dist.sample()
        reward = (action == 1).float() if kind is Categorical else -action.abs().sum(1, keepdim=True)
        if how == "twice":
            scored = dist.sample()
        elif how == "twice, called again":
            scored = Categorical(logits=model(state)).sample()
        else:
            scored = action
        loss = -(dist.log_prob(scored) * (reward - reward.mean())).mean()
        if how == "entropy":
            loss = loss - 0.01 * -dist.log_prob(dist.sample()).mean()
        return loss

    return loss_of


@pytest.mark.parametrize("how", ("twice", "twice, called again"))
def test_an_action_that_is_drawn_again_to_be_scored(how):
    report = quiet(lambda: train(policy(how)))
    assert report.root is not None and report.root.check == "F24", f"\n{report}"


@pytest.mark.parametrize("how", ("once", "entropy"))
@pytest.mark.parametrize("kind", (Categorical, Normal))
def test_an_action_that_is_taken_and_scored(how, kind):
    assert "F24" not in said(quiet(lambda: train(policy(how, kind))))


def test_a_normal_action_that_is_drawn_again():
    assert "F24" in said(quiet(lambda: train(policy("twice", Normal))))


# ------------------------------------------------------------------------------------------------ F25
def physics(graph: bool, how: str = "residual"):
    def loss_of(model):
        x = torch.rand(16, 4, requires_grad=True)
        u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=graph, retain_graph=True)
        if how == "residual":
            return (du - u).pow(2).mean()
        if how == "penalty":
            return F.mse_loss(u, x.detach()) + 10 * (du.norm(2, dim=1) - 1).pow(2).mean()
        if how == "forces":
            return F.mse_loss(u, x.detach()) + F.mse_loss(-du, torch.rand(16, 4))
        if how == "detached":
            return (du.detach() - u).pow(2).mean()
        if how == "weight":
            return (u.pow(2) * (du.abs() / du.abs().mean())).mean()
        return F.mse_loss(model(x.detach() + 0.1 * (du if how == "langevin" else du.sign())), x.detach())

    return loss_of


@pytest.mark.parametrize("how", ("residual", "penalty", "forces"))
def test_a_derivative_without_a_graph_in_the_loss(how):
    report = quiet(lambda: train(physics(False, how)))
    assert report.root is not None and report.root.check == "F25", f"\n{report}"
    assert "F25" not in said(quiet(lambda: train(physics(True, how))))


@pytest.mark.parametrize("how", ("detached", "weight", "langevin", "adversarial"))
def test_derivatives_that_need_no_graph(how):
    assert "F25" not in said(quiet(lambda: train(physics(False, how))))


def test_the_inner_loop_of_first_order_meta_learning():
    def loss_of(model):
        fast = [p.detach().clone().requires_grad_() for p in model.parameters()]
        w, b, v, c = fast

        def inner(ws):
            return F.mse_loss(F.linear(F.linear(torch.ones(8, 4), ws[0], ws[1]).tanh(), ws[2], ws[3]), data)

        data = torch.rand(8, 4)
        slopes = torch.autograd.grad(inner(fast), fast)
        moved = [p - 0.1 * g for p, g in zip(fast, slopes)]
        near = sum((p - m).pow(2).sum() for p, m in zip(model.parameters(), moved))
        return inner(list(model.parameters())) + 0.1 * near

    assert "F25" not in said(quiet(lambda: train(loss_of)))


def test_targets_that_are_derivatives_of_a_known_function():
    def loss_of(model):
        x = torch.rand(16, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(x.sin().sum(), x)
        return F.mse_loss(model(x.detach()), slope)

    assert "F25" not in said(quiet(lambda: train(loss_of)))


# ------------------------------------------------------------------------------------------------ F26
def returns(flag):
    def loss_of(model):
        x, done = torch.rand(16, 4), (torch.rand(16) < 0.3)
        return F.mse_loss(model(x)[:, 0], x[:, 0] + 0.9 * x[:, 1] * flag(done))

    return loss_of


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int64))
def test_bits_of_a_flag(dtype):
    report = quiet(lambda: train(returns(lambda done: ~done.to(dtype))))
    assert report.root is not None and report.root.check == "F26", f"\n{report}"
    made = quiet(lambda: train(returns(lambda done: (~done.to(dtype)).bool())))
    assert "F26" in said(made)


FLAGS = {
    "a bool": lambda done: ~done,
    "one less": lambda done: 1 - done.int(),
    "one bit of it": lambda done: ~done.byte() & 1,
    "an index from the end": lambda done: torch.arange(16.0)[~done.long()],
}


@pytest.mark.parametrize("how", FLAGS)
def test_bits_that_are_meant(how):
    assert "F26" not in said(quiet(lambda: train(returns(FLAGS[how]))))


# ------------------------------------------------------------------------------------------------ F27
class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0, zero: bool = False):
        super().__init__()
        self.body = nn.Sequential(net(out=8), nn.Dropout(dropout))
        if zero:
            nn.init.zeros_(self.body[0][2].weight)

    def forward(self, x):
        return F.normalize(self.body(x) + 0.1, dim=1)


def contrast(how: str, same: bool = True):
    def loss_of(model):
        x = torch.rand(16, 4)
        one = model(x)
        two = model(x if same else x + 0.1 * torch.randn_like(x))
        if how == "cat":
            both = torch.cat([one, two])
            near = (both @ both.T).masked_fill(torch.eye(32, dtype=torch.bool), float("-inf"))
            return F.cross_entropy(near / 0.2, (torch.arange(32) + 16) % 32)
        if how == "product":
            return F.cross_entropy(one @ two.T / 0.2, torch.arange(16))
        if how == "triplet":
            return F.triplet_margin_loss(one, two, model(torch.rand(16, 4)))
        if how == "two losses":
            return F.mse_loss(one, torch.rand(16, 8)) + 0.1 * two.abs().mean()
        return -F.cosine_similarity(one, two).mean()

    return loss_of


@pytest.mark.parametrize("how", ("cat", "product", "triplet", "cosine"))
def test_one_view_twice(how):
    report = quiet(lambda: train(contrast(how), Encoder()))
    assert report.root is not None and report.root.check == "F27", f"\n{report}"
    assert "F27" not in said(quiet(lambda: train(contrast(how, same=False), Encoder())))


def test_equal_answers_that_are_no_one_view():
    assert "F27" not in said(quiet(lambda: train(contrast("product"), Encoder(dropout=0.2))))
    assert "F27" not in said(quiet(lambda: train(contrast("two losses"), Encoder())))

    def twins(model):
        x = torch.rand(16, 4)
        return F.mse_loss(torch.stack([model[0](x), model[1](x)]), torch.rand(2, 16, 4))

    one = net()
    assert "F27" not in said(quiet(lambda: train(twins, nn.ModuleList([one, copy.deepcopy(one)]))))
    assert "F27" not in said(quiet(lambda: train(contrast("cosine", same=False), Encoder(zero=True))))


# ------------------------------------------------------------------------------------------------ F29
def actor_critic(factor):
    def loss_of(model):
        state = torch.rand(32, 4)
        answer = model(state)
        dist, value = Categorical(logits=answer[:, :3]), answer[:, 3]
        action = dist.sample()
        advantage = (action == 1).float() - value
        logp = dist.log_prob(action)
        return -(torch.stack([logp, logp]) * factor(advantage, logp, model)).mean() + advantage.pow(2).mean()

    return loss_of


FACTORS = {
    "detached": lambda a, logp, model: torch.stack([a, a]).detach(),
    "entropy": lambda a, logp, model: torch.stack([logp, logp]).exp(),
    "temperature": lambda a, logp, model: model[0].bias[0].exp(),
}


def test_an_advantage_with_a_gradient():
    report = quiet(lambda: train(actor_critic(lambda a, logp, model: torch.stack([a, a]))))
    assert report.root is not None and report.root.check == "F29", f"\n{report}"


@pytest.mark.parametrize("how", FACTORS)
def test_factors_of_a_score_that_are_right(how):
    assert "F29" not in said(quiet(lambda: train(actor_critic(FACTORS[how]))))


# ------------------------------------------------------------------------------------------------ D11
DATA = torch.rand(48, 4, generator=torch.Generator().manual_seed(0))
WANTED = DATA.flip(1)
GRAPH = torch.eye(48).to_sparse()


def batch(how: str):
    """Sixteen rows, and the rows that belong to them, or do not."""

    def loss_of(model):
        index = torch.randperm(48)[:16]
        x, y = DATA[index], WANTED[index]
        order = torch.argsort(x[:, 0])
        if how == "sorted inputs":
            x = x[order]
        if how == "sorted both":
            x, y = x[order], y[order]
        if how == "two selections":
            y = WANTED[torch.randperm(48)[:16]]
        if how == "shuffled targets":
            x, y = torch.rand(16, 4), torch.rand(16, 4)[torch.randperm(16)] * 1
            y = WANTED[:16][torch.randperm(16)]
            x = DATA[:16]
        if how == "sorted back":
            return F.mse_loss(model(x[order])[torch.argsort(order)], y)
        if how == "scattered back":
            out = torch.zeros_like(y)
            out[order] = model(x[order])
            return F.mse_loss(out, y)
        if how == "mixup":
            perm, share = torch.randperm(16), 0.7
            answer = model(share * x + (1 - share) * x[perm])
            return share * F.mse_loss(answer, y) + (1 - share) * F.mse_loss(answer, y[perm])
        if how == "mixup in place":
            perm = torch.randperm(16)
            z = x.clone()
            z.mul_(0.7).add_(x[perm], alpha=0.3)
            return F.mse_loss(model(z), y[perm])
        if how == "negatives":
            perm, answer = torch.randperm(16), model(x)
            return (1 + (answer - y).pow(2).sum(1) - (answer - y[perm]).pow(2).sum(1)).relu().mean()
        if how == "by numpy":
            perm = torch.randperm(16)
            return F.mse_loss(model(x[perm]), torch.from_numpy(y.numpy()[perm.numpy()]))
        if how == "by a sparse product":
            order = torch.argsort(DATA[:, 0])
            return F.mse_loss(model(torch.sparse.mm(GRAPH, DATA[order])), WANTED[order])
        if how == "by hand":
            return ((model(x[order]) - y) ** 2).mean()
        return F.mse_loss(model(x), y)

    return loss_of


@pytest.mark.parametrize("how", ("sorted inputs", "two selections", "shuffled targets", "by hand"))
def test_rows_that_went_apart(how):
    report = quiet(lambda: train(batch(how)))
    assert report.root is not None and report.root.check == "D11", f"\n{report}"


TOGETHER = ("as they are", "sorted both", "sorted back", "scattered back", "mixup", "mixup in place", "negatives")


@pytest.mark.parametrize("how", (*TOGETHER, "by numpy", "by a sparse product"))
def test_rows_that_belong_together(how):
    assert "D11" not in said(quiet(lambda: train(batch(how))))
