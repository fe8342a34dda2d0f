"""Slips of a line: a dropout at the end, nothing between layers, a state of strangers, a batch of two, and formulas
with one letter missing; each with its mended twin and what looks like it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import train_doctor as doctor

from .bench import quiet
from .test_arithmetic import said, train

ROWS = 32


def net(*extra, out: int = 3):
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, out), *extra)


def told(check: str, loss_of, model=None, **options) -> bool:
    report = quiet(lambda: train(loss_of, model or net(), **options))
    found = check in said(report)
    assert not found or report.root.check == check, f"\n{report}"
    return found


def classified(model):
    x = torch.randn(ROWS, 6)
    return F.cross_entropy(model(x), x[:, :3].argmax(1))


# ------------------------------------------------------------------------------------------------ F47
def test_a_dropout_at_the_end():
    assert told("F47", classified, net(nn.Dropout(0.5)))
    assert not told("F47", classified, net(nn.Dropout(0.0)))
    assert not told("F47", classified, nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)))


def test_a_dropout_before_a_cosine_is_no_answer():
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        return F.cross_entropy(F.normalize(model(x), dim=1) @ torch.eye(16)[:, :3] * 5, x[:, :3].argmax(1))

    assert not told("F47", loss_of, net(nn.Dropout(0.1), out=16))


# ------------------------------------------------------------------------------------------------ F49, F20
def overlap(probabilities: bool, masked_only: bool = False):
    def loss_of(model):
        x = torch.randn(8, 1, 8, 8)
        mask = (x > 0.3).float()
        answers = model(x)
        if probabilities:
            answers = answers.sigmoid()
        if masked_only:  # a mean over chosen places
            return ((answers - x) ** 2 * mask).sum() / mask.sum()
        return 1 - (2 * (answers * mask).sum() + 1) / (answers.sum() + mask.sum() + 1)

    return loss_of


def pictures():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))


def test_an_overlap_of_logits():
    assert told("F49", overlap(probabilities=False), pictures())
    assert not told("F49", overlap(probabilities=True), pictures())
    assert not told("F49", overlap(probabilities=False, masked_only=True), pictures())


@pytest.mark.parametrize("low, wrong", [(0.0, True), (-1.0, False)])
def test_a_hinge_by_hand(low, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        y = torch.where(x[:, 0] > 0, 1.0, low)
        return (1 - y * model(x).squeeze(1)).clamp(min=0).mean()

    assert told("F20", loss_of, net(out=1)) is wrong


@pytest.mark.parametrize("divided, wrong", [(1, True), (3, False)])
def test_soft_targets_that_do_not_sum_to_one(divided, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        hard = F.one_hot(x[:, :3].argmax(1), 3).float()
        return F.cross_entropy(model(x), hard * 0.9 + 0.1 / divided)

    assert told("F20", loss_of) is wrong


# ------------------------------------------------------------------------------------------------ F3
@pytest.mark.parametrize("how, wrong", [("exp", True), ("softplus", True), ("", False), ("exp, told", False)])
def test_a_rate_or_its_logarithm(how, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        answer = model(x).squeeze(1)
        answer = answer.exp() if how.startswith("exp") else F.softplus(answer) if how else answer
        return F.poisson_nll_loss(answer, torch.poisson(x[:, 0].exp()), log_input="told" not in how)

    assert told("F3", loss_of, net(out=1)) is wrong


@pytest.mark.parametrize("dim, wrong", [(0, True), (1, False)])
@pytest.mark.parametrize("loss", ["mse_loss", "binary_cross_entropy"])
def test_a_softmax_over_the_batch(loss, dim, wrong):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        return getattr(F, loss)(model(x).softmax(dim), F.one_hot(x[:, :3].argmax(1), 3).float())

    assert told("F3", loss_of) is wrong


# ------------------------------------------------------------------------------------------------ F35
@pytest.mark.parametrize("raised", [True, False])
def test_a_ratio_without_its_exponential(raised):
    def loss_of(model):
        x = torch.randn(ROWS, 6)
        action = torch.randint(0, 3, (ROWS,))
        logp = model(x).log_softmax(1)[torch.arange(ROWS), action]
        gain, old = torch.randn(ROWS), logp.detach() + 0.01 * torch.randn(ROWS)
        ratio = (logp - old).exp() if raised else logp - old
        return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()

    assert told("F35", loss_of) is not raised


# ------------------------------------------------------------------------------------------------ D9
@pytest.mark.parametrize("scale, wrong", [(1 / 255, True), (1.0, False)])
def test_pixels_that_are_divided_twice(scale, wrong):
    def loss_of(model):
        x = torch.rand(ROWS, 6)
        return F.cross_entropy(model(x * scale), x[:, :3].argmax(1))

    assert told("D9", loss_of) is wrong


def test_counts_of_words_are_small_and_mostly_zero():
    def loss_of(model):
        x = (torch.rand(ROWS, 6) < 0.1) * 0.01
        return F.cross_entropy(model(x), x[:, :3].argmax(1))

    assert not told("D9", loss_of)


# ------------------------------------------------------------------------------------------------ S27
def layers(*parts):
    return nn.Sequential(*parts)


BARE = {
    "no activation": (nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)),
    "a dropout alone": (nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 16), nn.Linear(16, 3)),
    "a batch norm alone": (nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 3)),
    "one pair": (nn.Linear(6, 16), nn.Linear(16, 3)),
}
BENT = {
    "activations": (nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)),
    "a narrow waist": (nn.Linear(6, 2), nn.Linear(2, 3)),
    "one pair beside a bend": (nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3)),
    "a layer norm": (nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3)),
    "one layer": (nn.Linear(6, 3),),
}


@pytest.mark.parametrize("how", BARE)
def test_nothing_between_layers(how):
    assert told("S27", classified, layers(*BARE[how]))


@pytest.mark.parametrize("how", BENT)
def test_something_between_layers(how):
    assert not told("S27", classified, layers(*BENT[how]))


def test_convolutions_with_nothing_between_them():
    def loss_of(model):
        x = torch.randn(8, 1, 8, 8)
        return F.mse_loss(model(x), x.relu())

    parts = [nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)]
    assert told("S27", loss_of, layers(*parts))
    assert not told("S27", loss_of, layers(parts[0], nn.ReLU(), parts[1], nn.ReLU(), parts[2]))


def test_a_residual_path_and_a_second_call():
    class Siblings(nn.Module):
        """One pair, called twice, in a network that bends."""

        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16))
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            return self.head(self.body(x)) + self.head(self.body(-x))

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            x = x + self.first(x)
            return self.head(x + self.second(x))

    assert not told("S27", classified, Siblings())
    assert not told("S27", classified, Residual())


# ------------------------------------------------------------------------------------------------ S28
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x, state=None):
        out, state = self.lstm(x, state)
        return self.head(out[:, -1]), state


@pytest.mark.parametrize("kept, shuffle, wrong", [(True, True, True), (True, False, False), (False, True, False)])
def test_the_state_of_the_batch_before(kept, shuffle, wrong):
    def program():
        x = torch.randn(160, 5, 4)
        loader = DataLoader(TensorDataset(x, x[:, -1, :3].argmax(1)), 16, shuffle=shuffle)
        model, state = Recurrent(), None
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        with doctor.watch(model, optimizer=optimizer, say=False) as report:
            for x, y in loader:
                answer, left = model(x, state)
                state = tuple(s.detach() for s in left) if kept else None
                optimizer.zero_grad()
                F.cross_entropy(answer, y).backward()
                optimizer.step()
        return report

    assert ("S28" in said(quiet(program))) is wrong


# ------------------------------------------------------------------------------------------------ S29
@pytest.mark.parametrize("rows, wrong", [(2, True), (4, True), (32, False)])
def test_statistics_of_a_few_rows(rows, wrong):
    def loss_of(model):
        x = torch.randn(rows, 6)
        return F.cross_entropy(model(x), x[:, :3].argmax(1))

    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    assert told("S29", loss_of, model) is wrong


def test_statistics_that_are_frozen_or_of_pictures():
    def loss_of(model):
        x = torch.randn(2, 3, 8, 8)
        return F.mse_loss(model(x), x.relu())

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))
    assert not told("S29", loss_of, model)

    def frozen(model):
        model[1].eval()
        x = torch.randn(2, 6)
        return F.cross_entropy(model(x), x[:, :3].argmax(1))

    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    assert not told("S29", frozen, model)
