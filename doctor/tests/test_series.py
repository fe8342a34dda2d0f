"""Series whose target stands in the input: who sees it, and who only could."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import loopdoctor as doctor
from loopdoctor import NOTE
from tests.loops import quiet

LENGTH = 16


class Attention(nn.Module):
    def __init__(self, causal: bool):
        super().__init__()
        self.into, self.out, self.causal = nn.Linear(1, 16), nn.Linear(16, 1), causal
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, 16))
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        return self.out(self.mix(self.into(x) + self.place[: x.shape[1]], src_mask=mask))


class Recurrent(nn.Module):
    def __init__(self, causal: bool):
        super().__init__()
        self.rnn = nn.GRU(1, 8, batch_first=True, bidirectional=not causal)
        self.out = nn.Linear(8 if causal else 16, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


class Convolution(nn.Module):
    """(rows, channels, times), with statistics of the batch."""

    def __init__(self, causal: bool):
        super().__init__()
        self.one, self.two, self.causal = nn.Conv1d(1, 8, 3), nn.Conv1d(8, 1, 1), causal
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.two(self.norm(self.one(F.pad(x, (2, 0) if self.causal else (1, 1)))).relu())


def waves(rows: int = 12):
    t = torch.arange(LENGTH + 1).float()
    return torch.sin(t * (0.3 + torch.rand(rows, 1)) + 6 * torch.rand(rows, 1)).unsqueeze(2)


def train(model, pair, steps: int = 4, loss_of=lambda *pair: F.mse_loss(*pair)):
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=steps, say=False) as report:
        for _ in range(steps):
            x, y = pair(waves())
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert not report.faults, report.faults
    return report


def next_one(s):
    return s[:, :-1], s[:, 1:]


def channels_first(s):
    return s[:, :-1].transpose(1, 2), s[:, 1:].transpose(1, 2)


KINDS = {
    "attention": (Attention, next_one),
    "rnn": (Recurrent, next_one),
    "convolution": (Convolution, channels_first),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_forecaster_that_reads_its_answer_off(kind):
    model, pair = KINDS[kind]
    report = quiet(lambda: train(model(causal=False), pair))
    assert (
        report.root is not None
        and report.root.check == "F11"
        and "1 later" in report.root.diagnosis
    ), f"\n{report}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_forecaster_that_does_not(kind):
    model, pair = KINDS[kind]
    report = quiet(lambda: train(model(causal=True), pair))
    assert not [f for f in report.findings if f.severity != NOTE], f"\n{report}"
    assert report.verdicts["F11"].state == "OK"


OTHER_TARGETS = {
    "itself": lambda s: (s[:, :-1], s[:, :-1]),
    "of another row": lambda s: (s[:, :-1], s.roll(1, 0)[:, 1:]),
    "round in a circle": lambda s: (s[:, :-1], s[:, :-1].roll(-1, 1)),
    "masked": lambda s: (s[:, :-1] * (torch.rand(len(s), LENGTH, 1) < 0.8), s[:, :-1]),
    "constant": lambda s: (torch.ones(12, LENGTH, 1), torch.ones(12, LENGTH, 1)),
}


@pytest.mark.parametrize("how", OTHER_TARGETS)
def test_targets_that_are_not_the_input_later_on(how):
    report = quiet(lambda: train(Attention(causal=False), OTHER_TARGETS[how]))
    assert "F11" not in {f.check for f in report.findings}, f"\n{report}"


BY_HAND = {
    "answer first": lambda a, y: (a - y).pow(2).mean(),
    "target first": lambda a, y: (y - a).abs().mean(),
}
BY_HAND["a product"] = lambda a, y: ((d := a - y) * d).sum()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("loss", BY_HAND)
def test_a_loss_by_hand_tells_its_target(loss, causal):
    report = quiet(lambda: train(Recurrent(causal), next_one, loss_of=BY_HAND[loss]))
    assert ("F11" in {f.check for f in report.findings}) is not causal, f"\n{report}"


class Rows(nn.Module):
    """Series of plain numbers, (rows, times)."""

    def __init__(self, causal: bool):
        super().__init__()
        self.inside = Recurrent(causal)

    def forward(self, x):
        return self.inside(x[:, :, None])[:, :, 0]


@pytest.mark.parametrize("causal", [False, True])
def test_series_of_plain_numbers(causal):
    report = quiet(lambda: train(Rows(causal), lambda s: (s[:, :-1, 0], s[:, 1:, 0])))
    assert ("F11" in {f.check for f in report.findings}) is not causal, f"\n{report}"


def test_a_table_with_one_target_for_each_row():
    report = quiet(lambda: train(nn.Linear(LENGTH, 3), lambda s: (s[:, :-1, 0], s[:, -3:, 0])))
    assert not report.faults and "F11" not in {f.check for f in report.findings}, f"\n{report}"
