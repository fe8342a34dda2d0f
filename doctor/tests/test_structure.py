"""Wired wrongly though every part is sound: B8, S21, N26, N27, D9, F22, D10, and healthy programs that look like it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import assert_root
from train_doctor import ERROR, NOTE


def loop(model, loss, optimizer=None, steps: int = 8, after=None):
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for _ in range(steps):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            optimizer.step()
            if after is not None:
                after(value)
    return report


def clean(report):
    assert not report.faults, report.faults
    assert not [f for f in report.findings if f.severity != NOTE], f"\n{report}"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ------------------------------------------------------------------------------------------------ time and batch
class Recurrent(nn.Module):
    def __init__(self, first: bool):
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 16, batch_first=first), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def test_time_and_batch():
    x = torch.randn(12, 7, 4)
    wrong, right = Recurrent(False), Recurrent(True)
    assert_root(loop(wrong, lambda: F.mse_loss(wrong(x)[:, -1, 0], x[:, 0, 0])), "S21")
    clean(loop(right, lambda: F.mse_loss(right(x)[:, -1, 0], x[:, 0, 0])))


@pytest.mark.parametrize("take", [lambda y: y[-1, :, 0], lambda y: y[..., 0], lambda y: y, lambda y: y.flatten()])
def test_time_first_on_purpose(take):
    x = torch.randn(12, 7, 4)
    model = Recurrent(False)
    clean(loop(model, lambda: F.mse_loss(take(model(x)), take(x[..., :1]))))


def test_one_long_series():
    x = torch.randn(12, 1, 4)
    model = Recurrent(False)
    clean(loop(model, lambda: F.mse_loss(model(x)[:, 0, 0], x[:, 0, 0])))


# ------------------------------------------------------------------------------------------------ decay
def classifier():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    return model, lambda: F.cross_entropy(model(x := torch.randn(32, 8)), x[:, :3].argmax(1))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_decay_that_outweighs(kind):
    model, loss = classifier()
    assert_root(loop(model, loss, kind(model.parameters(), lr=1e-2, weight_decay=0.9)), "N26")
    clean(loop(model, loss, kind(model.parameters(), lr=1e-2, weight_decay=1e-2)))


def test_decay_apart_from_the_gradient():
    model, loss = classifier()
    clean(loop(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.5)))


# ------------------------------------------------------------------------------------------------ graphs
def test_a_sum_of_losses():
    model, loss = classifier()
    kept = []
    report = loop(model, loss, after=kept.append)
    assert_root(report, "N27")
    assert "sums or collects" in report.root.diagnosis


def test_numbers_and_the_last_losses():
    model, loss = classifier()
    numbers, last = [], []

    def after(value):
        numbers.append(value.detach())
        last[:] = [*last[-1:], value]

    clean(loop(model, loss, after=after))


def test_a_graph_that_is_computed_once():
    """Part of the graph is older than the step, and is no sum over steps."""
    model, loss = classifier()
    scale = nn.Parameter(torch.ones(()))
    prior = scale * 2 + 1  # its graph lives on
    optimizer = torch.optim.SGD([*model.parameters()], 1e-2)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for _ in range(8):
            optimizer.zero_grad()
            (loss() * prior).backward(retain_graph=True)
            optimizer.step()
    assert "N27" not in {f.check for f in report.findings}, f"\n{report}"


# ------------------------------------------------------------------------------------------------ inputs
def test_inputs_as_they_are():
    def program(norm: bool, scale: float):
        first = [nn.BatchNorm1d(8)] if norm else []
        model = nn.Sequential(*first, nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        return loop(
            model, lambda: F.cross_entropy(model(x := scale * torch.randn(32, 8)), x[:, :3].argmax(1)), optimizer
        )

    assert_root(program(False, 1000.0), "D9")
    clean(program(True, 1000.0))
    clean(program(False, 1.0))


# ------------------------------------------------------------------------------------------------ gradients elsewhere
def test_gradients_on_a_copy():
    model, _ = classifier()
    twin = copy.deepcopy(model)
    report = loop(model, lambda: F.cross_entropy(twin(x := torch.randn(32, 8)), x[:, :3].argmax(1)))
    assert not report.faults and report.root.severity == ERROR and report.root.check in ("B8", "S3"), f"\n{report}"


def actor_and_critic(clears: bool, freezes: bool = False):
    actor, critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    first, second = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)
    with doctor.watch(optimizer=[first, second], say=False) as report:
        for _ in range(12):
            s = torch.randn(32, 4)
            first.zero_grad()
            second.zero_grad()
            critic.requires_grad_(not freezes)
            (-critic(torch.cat([s, actor(s)], 1)).mean()).backward()
            critic.requires_grad_(True)
            first.step()
            if clears:
                second.zero_grad()
            F.mse_loss(critic(torch.cat([s, actor(s).detach()], 1))[:, 0], s.sum(1)).backward()
            second.step()
    return report


def test_gradients_of_another_loss():
    report = actor_and_critic(clears=False)
    assert_root(report, "N1")
    assert "One loss also pushes" in report.root.diagnosis
    clean(actor_and_critic(clears=True))
    clean(actor_and_critic(clears=False, freezes=True))


def test_two_optimizers_of_one_loss():
    """Both step after one backward, one of them more rarely."""
    model, loss = classifier()
    first, second = torch.optim.SGD(model[0].parameters(), 1e-2), torch.optim.SGD(model[2].parameters(), 1e-2)
    with doctor.watch(model, optimizer=[first, second], say=False) as report:
        for step in range(12):
            first.zero_grad()
            loss().backward()
            first.step()
            if step % 2:
                second.step()
                second.zero_grad()
    assert not [f for f in report.findings if f.severity == ERROR or "One loss" in f.diagnosis], f"\n{report}"


# ------------------------------------------------------------------------------------------------ NaN and schedules
def test_what_made_the_loss_nan():
    model, _ = classifier()
    report = loop(model, lambda: -model(torch.randn(32, 8)).relu().log().mean())
    assert_root(report, "N17")
    assert "a logarithm was given" in report.root.diagnosis


@pytest.mark.parametrize("every, wrong", [(1, True), (5, False)])
def test_a_schedule_of_epochs_stepped_at_each_batch(every, wrong):
    model, loss = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    count = []

    def after(value):
        count.append(0)
        if len(count) % every == 0:
            schedule.step()

    report = loop(model, loss, optimizer, after=after)
    assert_root(report, "N9") if wrong else clean(report)


# ------------------------------------------------------------------------------------------------ samples
class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.width, self.back = nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(2, 6)

    def forward(self, x, way):
        q = torch.distributions.Normal(self.mean(x), F.softplus(self.width(x)))
        z = getattr(q, way)()
        return self.back(z), q, z


def bound(model, x, way):
    rebuilt, q, _ = model(x, way)
    prior = torch.distributions.Normal(0.0, 1.0)
    return F.mse_loss(rebuilt, x) + 1e-3 * torch.distributions.kl_divergence(q, prior).mean()


def test_a_sample_without_a_gradient():
    x, model = torch.randn(16, 6), Coder()
    assert_root(loop(model, lambda: bound(model, x, "sample")), "F22")
    clean(loop(model, lambda: bound(model, x, "rsample")))


def test_a_sample_that_is_scored():
    """An action of a policy, which a critic judges too."""
    x, policy, critic = torch.randn(16, 6), Coder(), nn.Linear(2, 1)

    def loss():
        _, q, action = policy(x, "sample")
        advantage = 1.0 - critic(action).squeeze(1)
        return advantage.square().mean() - (q.log_prob(action).sum(1) * advantage.detach()).mean()

    both = nn.ModuleList([policy, critic])
    report = loop(both, loss)
    assert not report.faults and not [f for f in report.findings if f.check == "F22"], report


def test_a_sample_that_only_leaves_the_program():
    """Noise of a policy that explores; the critic's gradient takes another way."""
    x, policy = torch.randn(16, 6), Coder()

    def loss():
        _, q, action = policy(x, "rsample")
        q.sample().numpy()
        return (action - 1).square().mean() + q.scale.square().mean()

    report = loop(policy, loss)
    assert not report.faults and not [f for f in report.findings if f.check == "F22"], report


def test_sampling_is_put_back():
    kinds = (torch.distributions.Distribution, torch.distributions.Normal, torch.distributions.Categorical)
    before = [(vars(k).get("sample"), vars(k).get("log_prob")) for k in kinds]
    x, model = torch.randn(16, 6), Coder()
    loop(model, lambda: bound(model, x, "rsample"))
    assert before == [(vars(k).get("sample"), vars(k).get("log_prob")) for k in kinds]


# ------------------------------------------------------------------------------------------------ padding
@pytest.mark.parametrize(
    ("ids", "padding", "named"),
    [
        (torch.arange(12), 0, True),
        (torch.arange(12), None, False),
        (torch.arange(1, 13), 0, False),  # numbered from 1
        (torch.tensor([[3, 4, 5, 0], [6, 7, 0, 0]]), 0, False),  # rows that are padded
    ],
)
def test_padding_that_is_an_item(ids, padding, named):
    table, target = nn.Embedding(16, 4, padding_idx=padding), torch.randn(*ids.shape, 4)
    report = loop(table, lambda: F.mse_loss(table(ids), target))
    assert not report.faults and ("D10" in [f.check for f in report.findings]) == named, report
