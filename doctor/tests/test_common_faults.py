"""What people often get wrong: numbers out of scale, noise of a wrong spread, a dropout that stays on, padding that is
read to the end, schedules and decays that take everything; each with its mended twin and what looks like it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, ExponentialLR, MultiStepLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import train_doctor as doctor
from train_doctor.observe import _hundredth
from train_doctor.watchers import dropouts

from .bench import quiet
from .test_arithmetic import net, said, train


def named(report, check: str) -> bool:
    found = check in said(report)
    assert not found or report.root.check == check, f"\n{report}"
    return found


# ------------------------------------------------------------------------------------------------ D9
def pixels(how: str):
    def loss_of(model):
        x = torch.randint(0, 256, (16, 4)).float()
        y = (x[:, 0] > 128).long()
        return F.cross_entropy(model(x / 255 if how == "scaled" else x), y)

    return loss_of


def test_numbers_as_they_were_measured():
    assert "D9" in said(quiet(lambda: train(pixels(""), net())))


@pytest.mark.parametrize("how", ("scaled", "normalised", "normalised behind", "frozen"))
def test_numbers_that_were_scaled(how):
    model = net()
    if how == "normalised":
        model = nn.Sequential(nn.BatchNorm1d(4), net())
    if how == "normalised behind":
        model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    if how == "frozen":  # another network's features, of its size
        model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.LayerNorm(4), net())
    assert "D9" not in said(quiet(lambda: train(pixels(how), model)))


# ------------------------------------------------------------------------------------------------ F42
def prices(scale: float, answers: float = 1.0):
    def loss_of(model):
        x = torch.randn(16, 4)
        return F.l1_loss(model(x) * answers, (x.flip(1) + 4) * scale) / scale

    return loss_of


def test_targets_unscaled():
    assert named(quiet(lambda: train(prices(50_000.0), net())), "F42")


@pytest.mark.parametrize("scale, answers", ((1.0, 1.0), (100.0, 1.0), (50_000.0, 50_000.0)))
def test_targets_of_the_answers_size(scale, answers):
    assert "F42" not in said(quiet(lambda: train(prices(scale, answers), net())))


# ------------------------------------------------------------------------------------------------ F4
def classified(times: float, reduction: str = "mean"):
    def loss_of(model):
        x = torch.randn(16, 4)
        loss = F.cross_entropy(model(x) * times, x.argmax(1), reduction=reduction)
        return loss.sum() if reduction == "none" else loss

    return loss_of


def test_sure_of_wrong_answers():
    torch.manual_seed(0)
    assert "F4" in said(quiet(lambda: train(classified(300.0), net())))


@pytest.mark.parametrize("times, reduction", ((1.0, "mean"), (5.0, "mean"), (1.0, "sum"), (1.0, "none")))
def test_a_first_loss_near_guessing(times, reduction):
    assert "F4" not in said(quiet(lambda: train(classified(times, reduction), net())))


# ------------------------------------------------------------------------------------------------ F43, F40
class Auto(nn.Module):
    def __init__(self, wide: int = 4):
        super().__init__()
        self.mean, self.log, self.back = nn.Linear(wide, 3), nn.Linear(wide, 3), nn.Linear(3, wide)


def sampled(how: str, wide: int = 4):
    def loss_of(model):
        x = torch.rand(16, wide)
        mean, log = model.mean(x), model.log(x)
        if how == "logarithm of the spread":
            z = mean + torch.exp(log) * torch.randn_like(mean)
            each = 1 + 2 * log - mean.pow(2) - torch.exp(2 * log)
        else:
            spread = torch.exp(log) if how == "variance" else torch.exp(log / 2 if how == "halved" else 0.5 * log)
            noise = torch.rand_like(mean) if how == "uniform" else torch.randn_like(mean)
            z = mean + (noise * spread if how == "turned" else spread * noise)
            each = 1 + log - mean.pow(2) - log.exp()
        kl = {
            "rows": -0.5 * each.sum(1).mean(),
            "numbers": -0.5 * each.mean(),
            "weighted": 0.01 * (-0.5 * each.sum(1).mean()),
            "divided": -0.5 * torch.sum(each) / x.size(0),
        }.get(how, -0.5 * each.sum() / len(x))
        answer = model.back(z)
        if how in ("rows", "divided", "weighted", "numbers"):
            return F.mse_loss(answer, x) + kl
        return F.mse_loss(answer, x, reduction="sum") / len(x) + kl

    return loss_of


@pytest.mark.parametrize("how", ("variance", "uniform"))
def test_noise_of_a_wrong_spread(how):
    report = quiet(lambda: train(sampled(how), Auto()))
    assert named(report, "F43") and ("rand" in report.root.diagnosis) == (how == "uniform")


@pytest.mark.parametrize("how", ("", "turned", "halved", "logarithm of the spread"))
def test_noise_of_the_right_spread(how):
    assert "F43" not in said(quiet(lambda: train(sampled(how), Auto())))


@pytest.mark.parametrize("how", ("rows", "divided"))
def test_a_mean_over_the_numbers_beside_a_sum_in_each_row(how):
    report = quiet(lambda: train(sampled(how, 100), Auto(100)))
    assert named(report, "F40") and "100 numbers" in report.root.diagnosis


@pytest.mark.parametrize("how, wide", (("weighted", 100), ("numbers", 100), ("", 100), ("rows", 4)))
def test_terms_of_one_size(how, wide):
    assert "F40" not in said(quiet(lambda: train(sampled(how, wide), Auto(wide))))


def signed(how: str):
    def loss_of(model):
        x = torch.rand(16, 4)
        mean, log = model.mean(x), model.log(x)
        answer = model.back(mean + torch.exp(0.5 * log) * torch.randn_like(mean))
        each = 1 + log - mean.pow(2) - log.exp()
        cost = {
            "": 0.5 * torch.sum(each),
            "rows": 0.5 * each.sum(1).mean(),
            "taken": torch.sum(each) * 0.5,
            "turned": 0.5 * torch.sum(log.exp() + mean * mean - 1 - log),
            "minus": -0.5 * torch.sum(each),
            "minus rows": (-0.5 * each.sum(1)).mean(),
            "subtracted": -(0.5 * torch.sum(each)),
            "inside": torch.sum(-0.5 * each),
        }[how]
        rest = F.mse_loss(answer, x, reduction="sum")
        return rest - 0.5 * torch.sum(each) if how == "subtracted" else rest + cost

    return loss_of


@pytest.mark.parametrize("how", ("", "rows", "taken"))
def test_a_divergence_that_is_taken_away(how):
    assert named(quiet(lambda: train(signed(how), Auto())), "F44")


@pytest.mark.parametrize("how", ("turned", "minus", "minus rows", "subtracted", "inside"))
def test_a_divergence_that_costs(how):
    assert "F44" not in said(quiet(lambda: train(signed(how), Auto())))


# ------------------------------------------------------------------------------------------------ N30
@pytest.mark.parametrize("how", ("bypassed", "by the scaler", "unscaled by hand", "off"))
def test_a_scaler_whose_step_is_not_called(how):
    def program():
        model = net()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-6), torch.amp.GradScaler("cpu", enabled=how != "off")
        with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
            for _ in range(6):
                optimizer.zero_grad()
                scaler.scale(regress(model)).backward()
                if how == "unscaled by hand":
                    scaler.unscale_(optimizer)
                if how == "by the scaler":
                    scaler.step(optimizer)
                else:
                    optimizer.step()
                scaler.update() if how in ("by the scaler", "unscaled by hand") else None
        return report

    assert ("N30" in said(quiet(program))) == (how == "bypassed")


# ------------------------------------------------------------------------------------------------ S24
class Dropping(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.one, self.two, self.drop = how, nn.Linear(4, 16), nn.Linear(16, 4), nn.Dropout(0.5)

    def forward(self, x):
        return getattr(self, self.how)(x)

    def unaware(self, x):
        return self.two(F.dropout(F.relu(self.one(x)), 0.5))

    def over_lines(self, x):
        x = F.dropout(
            F.relu(self.one(x)),
            p=0.5,
        )
        return self.two(x)

    def told(self, x):
        return self.two(F.dropout(F.relu(self.one(x)), 0.5, self.training))

    def told_by_name(self, x, on=True):
        return self.two(F.dropout(F.relu(self.one(x)), 0.5, on))

    def guarded(self, x):
        x = F.relu(self.one(x))
        return self.two(F.dropout(x, 0.5) if self.training else x)

    def module(self, x):
        return self.two(self.drop(F.relu(self.one(x))))

    def one_of_two(self, x):
        x = F.dropout(x, 0.1, training=self.training)
        return self.two(F.dropout(F.relu(self.one(x)), 0.5))

    def other_of_a_line(self, x):
        x = F.relu(self.one(x))
        return self.two(F.dropout(x, 0.5, self.training) if self.drop is None else F.dropout(x, 0.5))

    def first_of_a_line(self, x):
        x = F.relu(self.one(x))
        return self.two(F.dropout(x, 0.5, self.training) if self.drop is not None else F.dropout(x, 0.5))

    def ends_before(self, x):
        if not self.training:
            return self.two(F.relu(self.one(x)))
        return self.two(F.dropout(F.relu(self.one(x)), 0.5))


def regress(model):
    x = torch.randn(16, 4)
    return F.mse_loss(model(x), x.flip(1))


@pytest.mark.parametrize("how", ("unaware", "over_lines", "one_of_two", "other_of_a_line"))
def test_a_dropout_that_stays_on(how):
    model = Dropping(how)
    report = quiet(lambda: train(regress, model))
    assert named(report, "S24") and how in report.root.observed
    x = torch.randn(8, 4)
    assert not torch.equal(model.eval()(x), model(x))  # so it is


@pytest.mark.parametrize("how", ("told", "told_by_name", "guarded", "module", "ends_before", "first_of_a_line"))
def test_a_dropout_that_knows(how):
    assert "S24" not in said(quiet(lambda: train(regress, Dropping(how))))


def test_a_line_that_cannot_be_read_is_not_judged():
    made: dict = {}
    exec("def f(x):\n    return F.dropout(x, 0.5)", {"F": F}, made)
    assert not dropouts.unaware(made["f"].__code__, 2, "dropout")


# ------------------------------------------------------------------------------------------------ S25
class Reader(nn.Module):
    def __init__(self, how: str, kind=nn.GRU):
        super().__init__()
        self.how, self.table = how, nn.Embedding(20, 8, padding_idx=0)
        self.reads, self.head = kind(8, 8, batch_first=how != "time first"), nn.Linear(8, 2)

    def forward(self, ids):
        lengths, x = (ids != 0).sum(1), self.table(ids)
        if self.how == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            last = self.reads(packed)[1]
        elif self.how == "time first":
            return self.head(self.reads(x.transpose(0, 1))[0][-1])
        else:
            out, last = self.reads(x)
            if self.how == "own ends":
                return self.head(out[torch.arange(len(ids)), lengths - 1])
            if self.how == "output":
                return self.head(out[:, -1])
            if self.how == "every place":
                return self.head(out).mean(1)
            if self.how == "own places":
                mask = (ids != 0)[..., None].float()
                return self.head((out * mask).sum(1) / mask.sum(1))
        return self.head((last[0] if isinstance(last, tuple) else last)[-1])


def rows_of(how: str):
    def loss_of(model):
        ids = torch.randint(1, 20, (16, 12))
        lengths = torch.full((16, 1), 12) if how == "full" else torch.randint(3, 13, (16, 1))
        ids = ids.masked_fill(torch.arange(12) >= lengths, 0)
        ids = ids.flip(1) if how == "in front" else ids
        return F.cross_entropy(model(ids), ids[:, 0] % 2)

    return loss_of


@pytest.mark.parametrize("kind", (nn.GRU, nn.LSTM, nn.RNN))
@pytest.mark.parametrize("how", ("state", "output", "time first", "every place"))
def test_a_state_after_padding(how, kind):
    assert named(quiet(lambda: train(rows_of(how), Reader(how, kind))), "S25")


@pytest.mark.parametrize(
    "how, rows", (("packed", ""), ("own ends", ""), ("own places", ""), ("every place", "full"), ("state", "full"))
)
def test_states_at_the_ends_of_rows(how, rows):
    assert "S25" not in said(quiet(lambda: train(rows_of(rows), Reader(how))))


def test_padding_in_front_is_read_first():
    assert "S25" not in said(quiet(lambda: train(rows_of("in front"), Reader("state"))))


# ------------------------------------------------------------------------------------------------ N9, D12
def epochs(schedule, *, every: int = 1, steps: int = 12, size: int = 512, anew=None):
    """Batches of 16 from a loader; the schedule is stepped after every so many."""
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))

    def loader():
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(x, x.flip(1)), batch_size=16, shuffle=True, generator=generator)

    def program():
        model, one = net(), loader()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        scheduler, batches = schedule(optimizer), None
        with doctor.watch(model, optimizer=optimizer, steps=10, say=False) as report:
            for step in range(steps):
                if batches is None or anew is not None:
                    batches = iter(loader() if anew == "loader" else one)
                batch, wanted = next(batches)
                optimizer.zero_grad()
                F.mse_loss(model(batch), wanted).backward()
                optimizer.step()
                if step % every == every - 1:
                    scheduler.step()
        return report

    return quiet(program)


KINDS = (
    lambda o: StepLR(o, 10, gamma=0.1),
    lambda o: MultiStepLR(o, [15, 30], gamma=0.1),
    lambda o: ExponentialLR(o, gamma=0.9),
)
LONG = (
    lambda o: StepLR(o, 100, gamma=0.1),
    lambda o: ExponentialLR(o, gamma=0.999),
    lambda o: CosineAnnealingLR(o, 500),
)


@pytest.mark.parametrize("schedule", KINDS)
def test_a_schedule_of_epochs_at_every_batch(schedule):
    report = epochs(schedule)
    assert report.root is not None and report.root.check == "N9" and report.root.name == "schedule-falls-fast"


@pytest.mark.parametrize("schedule", LONG)
def test_a_schedule_that_lasts(schedule):
    assert "N9" not in said(epochs(schedule))


@pytest.mark.parametrize("schedule", KINDS)
def test_a_schedule_of_epochs_by_epoch(schedule):
    assert "N9" not in said(epochs(schedule, every=11))


@pytest.mark.parametrize("how, wrong", [("watched", True), ("after", True), ("whole run", False), ("restarts", False)])
def test_a_cosine_that_comes_back(how, wrong):
    def schedule(optimizer):
        if how == "restarts":
            return CosineAnnealingWarmRestarts(optimizer, 5)
        return CosineAnnealingLR(optimizer, {"watched": 5, "after": 16, "whole run": 40}[how])

    report = epochs(schedule, steps=12 if how == "watched" else 32)
    assert ("N9" in said(report)) is wrong, f"\n{report}"
    assert not wrong or report.root.name == "schedule-comes-back"


def test_a_second_cosine_that_begins_anew():
    """After the watched steps; the first one is kept, and has made its steps and no more."""
    torch.manual_seed(0)
    model = net()
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.05), []
    with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
        for step in range(32):
            if step % 16 == 0:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] = 0.05
                kept.append(CosineAnnealingLR(optimizer, 16))
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            F.mse_loss(model(x), x.flip(1)).backward()
            optimizer.step()
            kept[-1].step()
    assert "N9" not in said(report), f"\n{report}"


# ------------------------------------------------------------------------------------------------ F15
def tagged(how: str):
    """A tagger of rows that are padded with id 0. Tag 0 is a tag."""

    def loss_of(model):
        ids, lengths = torch.randint(1, 30, (16, 12)), torch.randint(3, 13, (16,))
        pads = torch.arange(12) >= lengths[:, None]
        tags = (ids % 5).masked_fill(pads, {"ignored": 5, "out": -100}.get(how, 0))
        logits = model(ids.masked_fill(pads, 0))
        if how == "weighted":
            return (F.cross_entropy(logits.transpose(1, 2), tags, reduction="none") * ~pads).sum() / (~pads).sum()
        if how == "classes first":
            return F.cross_entropy(logits.transpose(1, 2), tags)
        if how == "picked":
            return F.cross_entropy(logits[~pads], tags[~pads])
        ignored = {"ignore_index": 5} if how == "ignored" else {}
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), tags.view(-1), **ignored)

    return loss_of


class Tagger(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.table, self.reader = nn.Embedding(30, 8, padding_idx=0), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, classes)

    def forward(self, ids):
        return self.head(self.reader(self.table(ids))[0])


@pytest.mark.parametrize("how", ("", "classes first"))
def test_padding_that_counts_as_a_tag(how):
    report = quiet(lambda: train(tagged(how), Tagger(5)))
    assert named(report, "F15") and "stand at padding" in report.root.diagnosis


@pytest.mark.parametrize(
    "how, classes", [*((how, 5) for how in ("out", "weighted", "picked")), ("ignored", 6), ("", 30)]
)
def test_padding_that_does_not_count_or_is_written(how, classes):
    assert "F15" not in said(quiet(lambda: train(tagged(how), Tagger(classes))))


def test_when_the_rate_is_a_hundredth():
    for make, expected in zip((*KINDS, LONG[2]), (20, 30, 44, None), strict=True):
        scheduler = make(torch.optim.SGD([torch.zeros(1)], 1.0))
        assert _hundredth(scheduler) == expected
        if expected is not None:
            twin = copy.deepcopy(scheduler)
            for step in range(expected):
                assert twin.get_last_lr()[0] > 0.01 + 1e-9, step
                twin.optimizer.step()
                twin.step()
            assert twin.get_last_lr()[0] <= 0.01 + 1e-9


@pytest.mark.parametrize("anew", ("loader", "iterator", None))
def test_a_shuffled_loader_that_is_begun_anew(anew):
    """A new loader with a generator of the same seed gives the same batch; one whose generator goes on does not."""
    assert ("D12" in said(epochs(LONG[2], anew=anew))) == (anew == "loader")


# ------------------------------------------------------------------------------------------------ N26, B7, F20
@pytest.mark.parametrize("kind, decay, found", (("AdamW", 2.0, True), ("AdamW", 0.1, False), ("AdamW", 0.01, False)))
def test_a_decay_of_its_own(kind, decay, found):
    def program():
        model = net()
        optimizer = getattr(torch.optim, kind)(model.parameters(), 1e-2, weight_decay=decay)
        with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
            for _ in range(6):
                optimizer.zero_grad()
                regress(model).backward()
                optimizer.step()
        return report

    assert ("N26" in said(quiet(program))) == found


class Factors(nn.Module):
    def __init__(self, begin: float):
        super().__init__()
        self.one, self.two, self.bias = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Embedding(9, 1)
        for table in (self.one, self.two, self.bias):
            nn.init.normal_(table.weight, std=begin)

    def forward(self, i, j):
        return (self.one(i) * self.two(j)).sum(1) + self.bias(i).squeeze(1)


@pytest.mark.parametrize("begin, found", ((0.0, True), (0.1, False)))
def test_factors_that_are_both_zero(begin, found):
    def loss_of(model):
        i, j = torch.randint(0, 9, (2, 32))
        return F.mse_loss(model(i, j), torch.randn(32))

    report = quiet(lambda: train(loss_of, Factors(begin)))
    assert named(report, "B7") == found
    assert not found or "multiplied with each other" in report.root.diagnosis


@pytest.mark.parametrize("shift, found", ((0.0, True), (5.0, False)))
def test_a_relu_in_front_of_a_regression(shift, found):
    def loss_of(model):
        x = torch.randn(64, 4)
        return F.mse_loss(model(x), x.flip(1) + shift)

    assert ("F20" in said(quiet(lambda: train(loss_of, nn.Sequential(net(), nn.ReLU()))))) == found
