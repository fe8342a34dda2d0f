"""The faults beside the healthy programs of attacked_panels and attacked_passes, which must still be named: F3, F82,
S3, S11, S61, B1 and D12."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

import train_doctor as doctor

from .attacked_panels import GPT, STEPS, cnn, spots
from .attacked_parts import net, texts, update


def said(program, *args):
    torch.manual_seed(0)
    with doctor.watch(say=False, steps=STEPS) as report:
        program(*args)
    assert not report.faults, report.faults
    return {f.check for f in report.findings if f.severity != doctor.NOTE}


def distil(factor, tokens):
    teacher, student = GPT().eval().requires_grad_(False), GPT(layers=1)
    opt = torch.optim.AdamW(student.parameters(), 1e-3)
    for _ in range(STEPS):
        ids = texts(8, tokens + 1)
        with torch.no_grad():
            wanted = teacher(ids[:, :-1]).softmax(-1)
        logits = student(ids[:, :-1])
        kl = F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean")
        update(opt, factor * kl + 0.5 * F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


@pytest.mark.parametrize("factor, wrong", [(2.0, True), (0.4, True), (0.1, True), (1 / 16, False)])
def test_a_divergence_of_rows_of_tokens(factor, wrong):
    assert ("F3" in said(distil, factor, 16)) is wrong


def sought(mode, held):
    """A picture in front of a network, which may be in the optimizer as well."""
    model, picture = cnn(0.3).train(mode), nn.Parameter(torch.zeros(1, 1, 12, 12))
    opt = torch.optim.Adam([picture, *model.parameters()] if held else [picture], 0.01)
    for _ in range(STEPS):
        x, y = spots()
        update(opt, F.cross_entropy(model(x + picture), y))


@pytest.mark.parametrize("mode, held, told", [(True, False, {"S3"}), (False, True, {"S11"}), (False, False, set())])
def test_a_picture_in_front_of_a_network(mode, held, told):
    assert said(sought, mode, held) & {"S3", "S11"} == told


def reinforced():
    """Put into eval mode to play, and never back, by a method that compares nothing with what was said before."""
    pi = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    opt = torch.optim.Adam(pi.parameters(), 1e-3)
    for _ in range(STEPS):
        s = torch.randn(32, 4)
        with torch.no_grad():
            a = torch.multinomial(pi.eval()(s).softmax(-1), 1)
        good = (a[:, 0] == (s[:, 0] > 0)).float()
        update(opt, -((good - good.mean()) * pi(s).log_softmax(-1).gather(1, a)[:, 0]).mean())


def test_a_policy_that_is_left_in_eval_mode():
    assert "S11" in said(reinforced)


def neighbours(size, prompts):
    model = net(7, 1)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x = torch.cat([torch.randn(prompts, 5).repeat_interleave(size, 0), torch.randn(prompts * size, 2)], 1)
        answers = Normal(model(x)[:, 0], 1.0)
        a = answers.sample()
        rewards = -(a - x[:, 0]).abs()
        r = rewards.view(size, prompts)
        update(opt, -(answers.log_prob(a) * (r - r.mean(0)).view(-1)).mean())


@pytest.mark.parametrize("size, prompts", [(4, 6), (4, 8), (8, 4), (8, 8), (4, 16)])
def test_answers_side_by_side_that_are_cut_the_other_way(size, prompts):
    assert "S61" in said(neighbours, size, prompts)


def stretched(density, share):
    scale = nn.Linear(1, 6)  # a bias and a slope for each number, the same in all rows
    opt = torch.optim.Adam(scale.parameters(), 1e-2)
    for _ in range(STEPS):
        s = scale(torch.ones(1, 1))
        z = (3 * torch.randn(32, 6) + 1) * s.exp()
        update(opt, -(density(Normal(0.0, 1.0).log_prob(z)) + s.sum() * share))


@pytest.mark.parametrize(
    "density, share, wrong",
    [(torch.mean, 1, True), (torch.mean, 1 / 6, False), (lambda p: p.sum(1).mean(), 1, False)],
)
def test_one_scale_for_all_rows(density, share, wrong):
    assert ("F82" in said(stretched, density, share)) is wrong


def of_another_instance():
    """The optimizer was given the weights of a network that is no longer asked."""
    model, old = cnn(0.3).eval(), cnn(0.3)
    opt = torch.optim.Adam(old.parameters(), 0.01)
    for _ in range(STEPS):
        x, y = spots()
        update(opt, F.cross_entropy(model(x), y))


def test_weights_of_another_network_in_the_optimizer():
    assert "S3" in said(of_another_instance)


def of_slopes(lost):
    """The loss of the values is lost behind that of the slopes, or never asked."""
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x = torch.randn(32, 2, requires_grad=True)
        loss = F.mse_loss(model(x.detach())[:, 0], x.detach().sin().sum(1)) if lost else None
        slopes = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        loss = F.mse_loss(slopes, x.detach().cos())
        update(opt, loss)


@pytest.mark.parametrize("lost", [True, False])
def test_a_bias_that_only_the_values_would_train(lost):
    assert ("B1" in said(of_slopes, lost)) is lost


def restarted(looked):
    """The first batch for ever, and a look at all of them between the steps."""
    data = TensorDataset(torch.randn(64, 5), torch.randn(64, 1))
    model, loader = net(5, 1), DataLoader(data, batch_size=8)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x, y = next(iter(loader))
        update(opt, F.mse_loss(model(x), y))
        with torch.no_grad():
            looked(model, loader)


@pytest.mark.parametrize("looked", [lambda m, d: None, lambda m, d: [F.mse_loss(m(x), y).item() for x, y in d]])
def test_a_loader_that_is_restarted_and_looked_through(looked):
    assert "D12" in said(restarted, looked)
