"""Gradients that add up where they should not (N1), an epsilon that decides (N25), one batch of a stream (D12), pairs
with one score (N14), and rows in two orders (F3)."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import train_doctor as doctor

from .test_turned import watched

STEPS, ROWS, CLASSES = 8, 48, 4


def net(features=6, out=CLASSES):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, out))


def named(report) -> str:
    assert not report.faults, report.faults
    found = [f for f in report.findings if f.severity != doctor.NOTE]
    return found[0].check if found else ""


def steps(model, optimizer, step):
    with doctor.watch(model, optimizer=optimizer, steps=STEPS, say=False) as report:
        for _ in range(STEPS):
            step()
    return report


CLOSURES = {"cleared inside": "", "cleared outside": "N1", "by hand": "", "in pieces": "", "one evaluation": ""}


@pytest.mark.parametrize("how", CLOSURES)
def test_closures(how):
    """LBFGS asks again and again; what one evaluation leaves is not to be there at the next."""
    model, x = net(out=1), torch.randn(64, 6)
    y = x[:, :1].sin() + x[:, 1:2] * x[:, 2:3]
    once = {"max_iter": 1} if how == "one evaluation" else {"max_iter": 6, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, **once)

    def closure():
        if how in ("cleared inside", "in pieces"):
            optimizer.zero_grad()
        if how == "by hand":
            for p in model.parameters():
                p.grad = None
        pieces = 2 if how in ("in pieces", "one evaluation") else 1
        total = torch.zeros(())
        for part, wanted in zip(x.chunk(pieces), y.chunk(pieces)):
            loss = F.mse_loss(model(part), wanted) / pieces
            loss.backward()
            total += loss.detach()
        return total

    def step():
        if how in ("cleared outside", "one evaluation"):
            optimizer.zero_grad()
        optimizer.step(closure)

    report = steps(model, optimizer, step)
    assert named(report) == CLOSURES[how], f"\n{report}"


ATTACKS = {
    "cleared after": "",
    "left": "N1",
    "left, towards another class": "N1",
    "by a derivative": "",
    "weights at rest": "",
    "free": "",
    "points of an equation": "",
    "read for a clear": "",
    "weights read for a log": "",
}


@pytest.mark.parametrize("how", ATTACKS)
def test_attacks(how):
    """A backward that looks for a worse input also fills the gradients of the weights."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def worse(x, y):
        x = x.clone().requires_grad_()
        if how == "weights at rest":
            model.requires_grad_(False)
        loss = F.cross_entropy(model(x), (y + 1) % CLASSES if "another" in how else y)
        if how == "by a derivative":
            (slope,) = torch.autograd.grad(loss, x)
        else:
            loss.backward()
            slope = x.grad
        model.requires_grad_(True)
        away = slope / slope.flatten(1).norm(dim=1, keepdim=True)
        return x.detach() + 0.1 * (-away if "another" in how else away)

    def step():
        x = torch.randn(ROWS, 6)
        y = x[:, :CLASSES].argmax(1)
        optimizer.zero_grad()
        if how in ("free", "points of an equation", "read for a clear", "weights read for a log"):
            x.requires_grad_()
            (F.cross_entropy(model(x), y) + x.sum() * 0).backward()
            if how == "free":
                x = x.detach() + 0.1 * x.grad.sign()
            else:
                if how == "read for a clear":
                    x.grad.zero_()
                if how == "weights read for a log":
                    sum(p.grad.norm() for p in model.parameters())
                F.cross_entropy(model(torch.randn(ROWS, 6).abs()), torch.zeros(ROWS, dtype=torch.long)).backward()
        else:
            x = worse(x, y)
            if how == "cleared after":
                optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()

    report = steps(model, optimizer, step)
    assert named(report) == ATTACKS[how], f"\n{report}"


EPSILONS = {  # what Adam is made with, size of the loss
    "as usual": ("", {}, 1),
    "at the place of the decay": ("N25", {"eps": 0.1}, 0.1),
    "larger than usual": ("", {"eps": 1e-3}, 0.1),
    "by their places, next to smaller ones": ("N25", {"eps": 0.2, "betas": (0.9, 0.98)}, 1),
    "next to smaller ones": ("", {"eps": 0.2}, 1),
    "with a decay of its own": ("", {"eps": 0.2, "betas": (0.9, 0.98), "weight_decay": 0.1}, 1),
    "next to large gradients": ("", {"eps": 0.1}, 1e4),
}


@pytest.mark.parametrize("how", EPSILONS)
def test_epsilons(how):
    check, given, size = EPSILONS[how]
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **given)

    def step():
        x = torch.randn(ROWS, 6)
        optimizer.zero_grad()
        (size * F.cross_entropy(model(x), x[:, :CLASSES].argmax(1))).backward()
        optimizer.step()

    report = steps(model, optimizer, step)
    assert named(report) == check, f"\n{report}"


class Stream(IterableDataset):
    """Rows without an end, or one batch."""

    def __init__(self, whole: bool):
        self.whole = whole

    def __iter__(self):
        drawn = torch.Generator().manual_seed(0)
        for _ in range(1 if self.whole else 1000):
            x = torch.randn(*((ROWS, 6) if self.whole else (6,)), generator=drawn)
            yield x, x[..., :CLASSES].argmax(-1)


STREAMS = {"begun anew": "D12", "begun once": "", "one batch": ""}


@pytest.mark.parametrize("how", STREAMS)
def test_streams(how):
    model, whole = net(), how == "one batch"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Stream(whole), batch_size=None if whole else ROWS)
    batches = iter(loader)

    def step():
        x, y = next(batches if how == "begun once" else iter(loader))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    report = steps(model, optimizer, step)
    assert named(report) == STREAMS[how], f"\n{report}"


class Scores(nn.Module):
    """A number for each text, read at a place of it."""

    def __init__(self):
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, ids, place):
        return self.head(self.mix(self.table(ids))[0][:, place]).squeeze(1)


PAIRS = {
    "at the end": False,
    "before they differ": True,
    "before they differ, as labels": True,
    "of a reference": False,
    "of a reference without a graph": False,
    "with a factor of 0": False,
}


@pytest.mark.parametrize("how", PAIRS)
def test_pairs_with_one_score(how):
    torch.manual_seed(0)
    model = Scores()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    def loss():
        asked = torch.randint(20, (ROWS, 4))
        chosen, rejected = (torch.cat([asked, torch.randint(low, low + 10, (ROWS, 3))], 1) for low in (0, 10))
        place = 3 if how.startswith("before") else -1
        difference = model(chosen, place) - model(rejected, place)
        if how == "of a reference without a graph":  # one text each (KTO)
            return -F.logsigmoid(model(chosen, place) - model(chosen, place).detach()).mean()
        if how == "with a factor of 0":
            difference = 0.0 * difference
        if how == "of a reference":  # which is the policy, and has a graph
            difference = difference - (model(chosen, place) - model(rejected, place))
        if "labels" in how:
            return F.binary_cross_entropy_with_logits(0.5 * difference, torch.ones(ROWS))
        return -F.logsigmoid(difference).mean()

    report = steps(model, optimizer, step)
    said = [f.diagnosis for f in report.findings if f.check == "N14"]
    assert not report.faults and bool(said) == (how != "at the end"), f"\n{report}"
    assert any("one and the same score" in words for words in said) == PAIRS[how], f"\n{report}"


LISTS = {"where the texts are alike": True, "at the end": False, "all lists alike": False, "columns": False}


@pytest.mark.parametrize("how", LISTS)
def test_lists_with_one_score(how):
    """Columns are classes and no texts, and of a layer whose units began alike."""
    torch.manual_seed(0)
    model = Scores()
    columns = nn.Linear(4, 3)
    nn.init.constant_(columns.weight, 0.5)
    nn.init.zeros_(columns.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        asked = torch.randint(20, (1 if how == "all lists alike" else ROWS, 4)).expand(ROWS, 4)
        ids = torch.cat([asked.repeat_interleave(3, 0), torch.randint(20, (3 * ROWS, 3))], 1)
        score = model(ids, -1 if how == "at the end" else 3)
        scores = score.view(ROWS, 3)
        if how == "columns":
            scores = columns(score.view(ROWS, 3)[:, :1].expand(ROWS, 4))
        F.cross_entropy(scores, torch.randint(3, (ROWS,))).backward()
        optimizer.step()

    report = steps(model, optimizer, step)
    said = [f.diagnosis for f in report.findings if f.check == "N14"]
    assert not report.faults and any("candidates" in words for words in said) is LISTS[how], f"\n{report}"


ORDERS = {
    "rows first": "",
    "places first": "F3",
    "places first, and the labels": "",
    "as shares": "F3",
    "place by place": "F3",
    "one place": "",
}


@pytest.mark.parametrize("how", ORDERS)
def test_orders_of_rows(how):
    places = 1 if how == "one place" else 5

    def loss(model):
        x = torch.randn(ROWS, places, 6)
        y = x[..., :CLASSES].argmax(-1)  # (B, T)
        if how == "rows first":
            return F.cross_entropy(model(x).view(-1, CLASSES), y.view(-1))
        z = model(x.transpose(0, 1))  # (T, B, C)
        if how == "place by place":
            z = torch.stack([model(place) for place in x.transpose(0, 1)])
        if how == "as shares":
            return F.nll_loss(F.log_softmax(z.flatten(0, 1), 1), y.flatten())
        y = y.t() if "labels" in how else y
        return F.cross_entropy(z.reshape(-1, CLASSES), y.reshape(-1))

    report = watched(net(), loss)
    assert named(report) == ORDERS[how], f"\n{report}"


@pytest.mark.parametrize("how", ("across", "along", "filled elsewhere"))
def test_labels_across_texts_that_stand_in_columns(how):
    """Nothing was transposed on the side of the scores; the padding of the ids tells how they lie."""

    def loss(model):
        ids = torch.randint(1, 20, (9, 6))  # (T, B)
        labels = (ids % CLASSES).t()  # (B, T)
        pads = (torch.arange(9)[:, None] >= torch.randint(4, 10, (6,))).index_fill(1, torch.tensor([0]), True)
        ids = ids.masked_fill(pads, 0)
        left = pads.t() if how != "filled elsewhere" else torch.rand(6, 9) < 0.3
        labels = labels.masked_fill(left, -100)
        labels = labels.t() if how == "along" else labels
        return F.cross_entropy(model(ids).reshape(-1, CLASSES), labels.reshape(-1))

    report = watched(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, CLASSES)), loss)
    assert named(report) == ("F3" if how == "across" else ""), f"\n{report}"
