"""Settings that are taken for their opposite: each fault, its mended twin, and what may be meant."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

import train_doctor as doctor

from .bench import quiet
from .test_arithmetic import said

ROWS = 32


def net(*extra, out: int = 3):
    return nn.Sequential(nn.Linear(6, 16), *extra, nn.ReLU(), nn.Linear(16, out))


def rows(classes: int = 3, rare: float = 0.0):
    """Numbers and a class that they tell; of two classes, `rare` is the share of the second one."""
    x = torch.randn(ROWS, 6)
    y = (x[:, 0] > torch.quantile(x[:, 0], 1 - rare)).long() if rare else x[:, :classes].argmax(1)
    return x, y


def train(loss_of, model=None, *, groups=None, make=None, each=lambda optimizer, loss: None, steps: int = 8):
    model = model or net()
    optimizer = make(model) if make else torch.optim.Adam(groups(model) if groups else model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=steps, say=False) as report:
        for _ in range(steps):
            loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            each(optimizer, loss)
    return report


def classified(model, **options):
    x, y = rows()
    return F.cross_entropy(model(x), y, **options)


def told(check: str, *args, **kwargs) -> bool:
    report = quiet(lambda: train(*args, **kwargs))
    found = check in said(report)
    assert not found or report.root.check == check, f"\n{report}"
    return found


# ------------------------------------------------------------------------------------------------ S26
@pytest.mark.parametrize("momentum, wrong", [(0.99, True), (0.9, True), (0.1, False), (1.0, False), (None, False)])
def test_the_momentum_of_a_batch_normalisation(momentum, wrong):
    assert told("S26", classified, net(nn.BatchNorm1d(16, momentum=momentum))) is wrong


def test_a_normalisation_without_statistics_has_no_momentum():
    assert not told("S26", classified, net(nn.BatchNorm1d(16, momentum=0.9, track_running_stats=False)))


@pytest.mark.parametrize("p, wrong", [(0.9, True), (0.8, True), (0.5, False)])
def test_the_share_of_a_dropout(p, wrong):
    assert told("S26", classified, net(nn.Dropout(p))) is wrong


@pytest.mark.parametrize("betas, wrong", [((0.999, 0.9), True), ((0.9, 0.999), False), ((0.0, 0.9), False)])
def test_the_betas(betas, wrong):
    assert told("S26", classified, make=lambda m: torch.optim.Adam(m.parameters(), 1e-3, betas)) is wrong


@pytest.mark.parametrize("share, wrong", [(0.9, True), (0.1, False)])
def test_the_smoothing(share, wrong):
    assert told("S26", lambda m: classified(m, label_smoothing=share)) is wrong


# ------------------------------------------------------------------------------------------------ F45
def weighed(weights, rare: float = 0.12):
    def loss_of(model):
        x, y = rows(rare=rare)
        return F.cross_entropy(model(x), y, weight=torch.tensor(weights))

    return loss_of


@pytest.mark.parametrize("weights, wrong", [([0.88, 0.12], True), ([0.12, 0.88], False), ([1.0, 1.2], False)])
def test_weights_of_classes(weights, wrong):
    assert told("F45", weighed(weights), net(out=2)) is wrong


def test_weights_beside_balanced_batches():
    assert not told("F45", weighed([0.88, 0.12], rare=0.5), net(out=2))


@pytest.mark.parametrize("weight, wrong", [(0.14, True), (7.0, False), (1.0, False)])
def test_the_weight_of_what_is_there(weight, wrong):
    def loss_of(model):
        x, y = rows(rare=0.12)
        wanted = y[:, None].float()
        return F.binary_cross_entropy_with_logits(model(x), wanted, pos_weight=torch.tensor(weight))

    assert told("F45", loss_of, net(out=1)) is wrong


# ------------------------------------------------------------------------------------------------ F46
def contrastive(masked: bool):
    def loss_of(model):
        x = torch.randn(16, 6)
        z = F.normalize(model(torch.cat([x, x + 0.1 * torch.randn_like(x)])), dim=1)
        alike = z @ z.T / 0.5
        if masked:
            alike = alike.masked_fill(torch.eye(32, dtype=torch.bool), float("-inf"))
        return F.cross_entropy(alike, torch.arange(32).roll(16))

    return loss_of


def test_a_row_compared_with_itself():
    assert told("F46", contrastive(masked=False), net(out=8))
    assert not told("F46", contrastive(masked=True), net(out=8))


def test_pictures_against_texts_have_their_own_row_as_target():
    def loss_of(model):
        x = torch.randn(16, 6)
        a, b = (F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        return F.cross_entropy(a @ b.T / 0.5, torch.arange(16))

    assert not told("F46", loss_of, net(out=8))


@pytest.mark.parametrize("how", ["the loss first", "enqueued first", "constant numbers", "one class of many"])
def test_the_positive_among_the_negatives(how):
    queue = F.normalize(torch.randn(64, 8), dim=1)

    def loss_of(model):
        nonlocal queue
        x = torch.randn(16, 6)
        q = F.normalize(model(x), dim=1)
        with torch.no_grad():
            k = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        if how == "enqueued first":
            queue = torch.cat([k, queue])[:64]
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.1
        if how == "the loss first":
            queue = torch.cat([k, queue])[:64]
        if how == "constant numbers":
            scores = 0 * scores
        return F.cross_entropy(scores, torch.full((16,), 3 if how == "one class of many" else 0))

    assert told("F46", loss_of, net(out=8)) is (how == "enqueued first")


# ------------------------------------------------------------------------------------------------ F50
@pytest.mark.parametrize("leaks", [True, False])
@pytest.mark.parametrize("factor", [1.0, -3.0])
def test_the_target_among_the_inputs(leaks, factor):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        y = (x[:, :2].sin().sum(1) * 2).detach()
        if leaks:
            x[:, 4] = factor * y + 1
        return F.mse_loss(model(x).squeeze(1), y)

    assert told("F50", loss_of, net(out=1)) is leaks


def test_a_class_among_the_inputs():
    def loss_of(model):
        x, y = rows(rare=0.5)
        x[:, 5] = y.float()
        return F.cross_entropy(model(x), y)

    assert told("F50", loss_of, net(out=2))


def test_what_is_rebuilt_is_no_leak():
    assert not told("F50", lambda m: F.mse_loss(m(x := torch.randn(ROWS, 6)), x), net(out=6))


# ------------------------------------------------------------------------------------------------ F51
@pytest.mark.parametrize("ignored, wrong", [(0, True), (2, True), (-100, False), (7, False)])
def test_a_class_that_is_ignored(ignored, wrong):
    assert told("F51", lambda m: classified(m, ignore_index=ignored)) is wrong


def test_background_in_pictures_is_ignored_on_purpose():
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))

    def loss_of(model):
        x = torch.randn(4, 1, 8, 8)
        return F.cross_entropy(model(x), (x[:, 0] > 0).long() + (x[:, 0] > 1).long(), ignore_index=0)

    assert not told("F51", loss_of, model)


# ------------------------------------------------------------------------------------------------ F52
@pytest.mark.parametrize("scale, wrong", [(5.0, True), (0.05, False)])
def test_answers_that_are_cut(scale, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        return F.mse_loss((model(x) * scale).clamp(-0.5, 0.5), x[:, :3].tanh() / 2)

    assert told("F52", loss_of) is wrong


# ------------------------------------------------------------------------------------------------ N31
def two_groups(model):
    return [{"params": model[0].parameters(), "lr": 1e-5}, {"params": model[2].parameters(), "lr": 1e-3}]


def one_rate(optimizer, loss):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3


def one_factor(optimizer, loss):
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def test_one_rate_for_all_groups():
    def early(model):
        x, y = rows()
        one_rate(optimizers[0], None)
        return F.cross_entropy(model(x), y)

    optimizers = []

    def make(model):
        optimizers.append(torch.optim.SGD(two_groups(model), 1e-3))
        return optimizers[0]

    assert told("N31", early, make=make)
    assert not told("N31", classified, groups=two_groups, each=one_factor)
    assert not told("N31", classified, groups=two_groups)


def test_a_scheduler_that_keeps_the_ratio():
    made = []

    def each(optimizer, loss):
        made or made.append(LambdaLR(optimizer, lambda n: 0.9**n))
        made[0].step()

    assert not told("N31", classified, groups=two_groups, each=each)


def test_one_cycle_with_a_largest_rate_for_each():
    def make(model):
        optimizer = torch.optim.SGD(two_groups(model), 1e-3)
        schedulers.append(OneCycleLR(optimizer, [1e-4, 1e-2], total_steps=20))
        return optimizer

    schedulers = []
    assert not told("N31", classified, make=make, each=lambda o, l: schedulers[0].step())


# ------------------------------------------------------------------------------------------------ N32
@pytest.mark.parametrize("mode, metric, wrong", [("max", 1.0, True), ("min", 1.0, False), ("max", None, False)])
def test_a_plateau(mode, metric, wrong):
    made = []

    def each(optimizer, loss):
        made or made.append(ReduceLROnPlateau(optimizer, mode=mode, patience=50))
        made[0].step(loss.detach() if metric else 0.4 + 0.01 * torch.rand(()).item())  # an accuracy

    assert told("N32", classified, each=each) is wrong


# ------------------------------------------------------------------------------------------------ N33
@pytest.mark.parametrize("inside, kind, wrong", [(True, "Adam", True), (False, "Adam", False), (True, "SGD", False)])
def test_an_optimizer_in_the_loop(inside, kind, wrong):
    def program():
        model = net()
        optimizer = getattr(torch.optim, kind)(model.parameters(), 1e-3)
        with doctor.watch(model, say=False) as report:
            for _ in range(8):
                if inside:
                    optimizer = getattr(torch.optim, kind)(model.parameters(), 1e-3)
                loss = classified(model)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return report

    assert ("N33" in said(quiet(program))) is wrong


def test_a_copy_for_each_task_has_an_optimizer_of_its_own():
    def program():
        model = net()
        outer = torch.optim.SGD(model.parameters(), 1e-2)
        with doctor.watch(model, say=False) as report:
            for _ in range(8):
                inner = copy.deepcopy(model)
                optimizer = torch.optim.Adam(inner.parameters(), 1e-3)
                for _ in range(2):
                    optimizer.zero_grad()
                    classified(inner).backward()
                    optimizer.step()
                for p, q in zip(model.parameters(), inner.parameters()):
                    p.grad = p.detach() - q.detach()
                outer.step()
        return report

    assert "N33" not in said(quiet(program))


# ------------------------------------------------------------------------------------------------ S30
class Deep(nn.Module):
    def __init__(self, repeated: bool):
        super().__init__()
        one = nn.Linear(6, 6)
        self.layers = nn.ModuleList([one] * 4 if repeated else [nn.Linear(6, 6) for _ in range(4)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


@pytest.mark.parametrize("repeated", [True, False])
def test_a_layer_that_is_repeated(repeated):
    assert told("S30", classified, Deep(repeated)) is repeated
