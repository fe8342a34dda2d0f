"""One line of a usual program is wrong, and is named: losses by hand, layers that are wired wrongly, loops,
distillation.

Each program is a classifier or a regression of a few numbers. `""` stands for a line that is right, or that may be
meant.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor

from .test_turned import said

ROWS, IN, CLASSES = 512, 12, 5
fixed = torch.Generator().manual_seed(5)
X, W = torch.randn(ROWS, IN, generator=fixed), torch.randn(IN, CLASSES, generator=fixed)
SCORES = X @ W
TARGETS = {
    "classes": SCORES.argmax(1),
    "two": (SCORES[:, 0] > 0).float(),
    "several": (SCORES > 0).float(),
    "number": SCORES[:, 0] / 3.5,
    "scores": SCORES,
}


def net(out: int = CLASSES, drop: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(IN, 32), nn.ReLU(), nn.Dropout(drop), nn.Linear(32, out))


def watched(model, loss, target="classes", optimizer=None, before=None):
    """The report of ten steps of a loop that is right but for what it is given."""
    y = TARGETS[target]
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-3)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for _ in range(12):
            rows = torch.randperm(ROWS)[:64]
            if before is not None:
                before(model)
            value = loss(model(X[rows]), y[rows])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    assert not report.faults, report.faults
    return report


def named(report) -> str:
    root = report.root
    return "" if root is None or root.severity == doctor.NOTE else root.check


def hot(y):
    return F.one_hot(y, CLASSES).float()


def likely(p, y):
    return -p[range(len(y)), y].log().mean()


def binary(p, y):
    return -(y * torch.log(p + 1e-8) + (1 - y) * torch.log(1 - p + 1e-8)).mean()


def focal(z, y, gamma=2.0, of=lambda p, y: p * y + (1 - p) * (1 - y)):
    z, p = z.squeeze(1), torch.sigmoid(z.squeeze(1))
    return ((1 - of(p, y)) ** gamma * F.binary_cross_entropy_with_logits(z, y, reduction="none")).mean()


def found_and_placed(z, y, there):
    """Whether something is there, of each thing; and where it is, by mistake of each place."""
    found = F.binary_cross_entropy_with_logits(z, there, reduction="sum") / there.sum()
    return found + ((z - y) ** 2 * there).mean()


LOSSES = {  # check, target, outputs, loss
    "right": ("", "classes", 5, lambda z, y: likely(F.softmax(z, 1), y)),
    "softmax over rows": ("S33", "classes", 5, lambda z, y: -(hot(y) * F.softmax(z, 0).log()).sum(1).mean()),
    "log-softmax over rows, picked": ("S33", "classes", 5, lambda z, y: -F.log_softmax(z, 0)[range(64), y].mean()),
    "softmax twice": ("F126", "classes", 5, lambda z, y: likely(F.softmax(F.softmax(z, 1), 1), y)),
    "softmax with a temperature": ("", "classes", 5, lambda z, y: likely(F.softmax(F.softmax(z, 1) / 0.05, 1), y)),
    "softmax over places and over classes": (
        "",
        "classes",
        20,
        lambda z, y: likely(F.softmax(F.softmax(z.view(-1, 4, 5), 1), 2).mean(1), y),
    ),
    "few that count, and all": ("F41", "scores", 5, lambda z, y: found_and_placed(z, y, (y > 5).float())),
    "half that count, and all": ("", "scores", 5, lambda z, y: found_and_placed(z, y, (y > 0).float())),
    "sigmoid twice": ("F126", "two", 1, lambda z, y: binary(torch.sigmoid(torch.sigmoid(z)).squeeze(1), y)),
    "logarithm of a sigmoid's sigmoid": (
        "F126",
        "two",
        1,
        lambda z, y: -(y * F.logsigmoid(torch.sigmoid(z[:, 0])) + (1 - y) * F.logsigmoid(-z[:, 0])).mean(),
    ),
    "sigmoid once": ("", "two", 1, lambda z, y: binary(torch.sigmoid(z).squeeze(1), y)),
    "relu in front": ("F3", "two", 1, lambda z, y: F.binary_cross_entropy_with_logits(F.relu(z).squeeze(1), y)),
    "shares of several": ("F20", "several", 5, lambda z, y: F.binary_cross_entropy(F.softmax(z, 1), y)),
    "squares of shares of several": ("F20", "several", 5, lambda z, y: F.mse_loss(F.softmax(z, 1), y)),
    "shares of one": ("", "classes", 5, lambda z, y: F.binary_cross_entropy(F.softmax(z, 1), hot(y))),
    "minus": ("F75", "classes", 5, lambda z, y: -F.cross_entropy(z, y)),
    "minus, and more": ("", "classes", 5, lambda z, y: F.cross_entropy(z, y) - 0.1 * F.cross_entropy(z, (y + 1) % 5)),
    "focal": ("", "two", 1, focal),
    "focal of one class": ("F80", "two", 1, lambda z, y: focal(z, y, of=lambda p, y: p)),
    "focal, turned": ("F80", "two", 1, lambda z, y: focal(z, y, of=lambda p, y: 1 - (p * y + (1 - p) * (1 - y)))),
    "far from zero": ("F42", "number", 1, lambda z, y: F.mse_loss(z.squeeze(1), y + 500)),
    "near zero": ("", "number", 1, lambda z, y: F.mse_loss(z.squeeze(1), y + 2)),
    "signs of whole numbers": (
        "F20",
        "classes",
        5,
        lambda z, y: F.cosine_embedding_loss(z[::2], z[1::2], (y[::2] == y[1::2]).long()),
    ),
    "signs": (
        "",
        "classes",
        5,
        lambda z, y: F.cosine_embedding_loss(z[::2], z[1::2], 2 * (y[::2] == y[1::2]).long() - 1, margin=0.3),
    ),
}


@pytest.mark.parametrize("what", LOSSES)
def test_losses(what):
    torch.manual_seed(0)
    check, target, out, loss = LOSSES[what]
    assert named(report := watched(net(out), loss, target)) == check, f"\n{report}"


MASKS = {  # check, what becomes of maps (B, 1, 2, 2) and of masks (B, 2, 2) before they meet
    "with a channel and without": ("F21", lambda p, m: (p, m)),
    "both with": ("", lambda p, m: (p, m[:, None])),
    "each with all, on purpose": ("", lambda p, m: (p.squeeze(1)[:, None], m)),
}


@pytest.mark.parametrize("what", MASKS)
def test_maps_and_masks(what):
    torch.manual_seed(0)
    check, shaped = MASKS[what]
    model = nn.Sequential(nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, (2, 3)))

    def overlap(z, y):
        p, m = shaped(torch.sigmoid(z), (y[:, :4] > 0).float().view(-1, 2, 2))
        return 1 - 2 * (p * m).sum() / (p.sum() + m.sum())

    assert named(report := watched(model, overlap, "scores")) == check, f"\n{report}"


class Body(nn.Module):
    """Three layers; `mix` is what is wrong between the second and the third."""

    def __init__(self, mix=lambda self, h: h, more=lambda self: None):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(IN, 32), nn.Linear(32, 32), nn.Linear(32, CLASSES)
        self.mix, _ = mix, more(self)

    def forward(self, x):
        return self.c(self.mix(self, F.relu(self.b(F.relu(self.a(x))))))


def give(self, **more):
    for name, value in more.items():
        setattr(self, name, value)


def attend(self, h):
    return self.attention(h[:, None], h[:, None], h[:, None])[0][:, 0]


def pass_on(h, layer, index):
    return h + torch.zeros_like(h).index_add(0, index, layer(h[index]))


WIRES = {  # check, what happens in the middle, what there is more
    "right": ("", lambda self, h: h, lambda self: None),
    "mean over rows": ("S53", lambda self, h: h - h.mean(0) + h.mean(0).relu() * 3, lambda self: None),
    "lengths over rows": ("S53", lambda self, h: F.normalize(h, dim=0), lambda self: None),
    "lengths of rows": ("", lambda self, h: F.normalize(h, dim=1), lambda self: None),
    "attention over rows": ("S53", attend, lambda self: give(self, attention=nn.MultiheadAttention(32, 4))),
    "attention in rows": (
        "",
        attend,
        lambda self: give(self, attention=nn.MultiheadAttention(32, 4, batch_first=True)),
    ),
    "batch normalisation": ("", lambda self, h: self.n(h), lambda self: give(self, n=nn.BatchNorm1d(32))),
    "statistics of the batch": ("", lambda self, h: (h - h.mean(0)) / (h.std(0) + 1e-5), lambda self: None),
    "one scale": ("", lambda self, h: h / h.abs().max(), lambda self: None),
    "statistics that stand still": (
        "S26",
        lambda self, h: self.n(h),
        lambda self: give(self, n=nn.BatchNorm1d(32, momentum=1e-4)),
    ),
    "groups of one": ("S29", lambda self, h: self.n(h) + h, lambda self: give(self, n=nn.GroupNorm(32, 32))),
    "groups of four": ("", lambda self, h: self.n(h), lambda self: give(self, n=nn.GroupNorm(8, 32))),
    "a weight as a number": (
        "B1",
        lambda self, h: h * self.scale.item(),
        lambda self: give(self, scale=nn.Parameter(torch.ones(1))),
    ),
    "a weight": ("", lambda self, h: h * self.scale, lambda self: give(self, scale=nn.Parameter(torch.ones(1)))),
    "drawn anew": (
        "N3",
        lambda self, h: self.d(h) if nn.init.xavier_uniform_(self.d.weight.data) is not None else h,
        lambda self: give(self, d=nn.Linear(32, 32)),
    ),
    "a part drawn anew": (
        "",
        lambda self, h: self.d(h) if nn.init.normal_(self.d.weight.data[:4], std=0.1) is not None else h,
        lambda self: give(self, d=nn.Linear(32, 32)),
    ),
    "messages to themselves": (
        "S43",
        lambda self, h: pass_on(h, self.d, torch.randint(0, len(h), (256,))),
        lambda self: give(self, d=nn.Linear(32, 32)),
    ),
    "rows sent to an expert, and back": (
        "",
        lambda self, h: pass_on(h, self.d, torch.randperm(len(h))[:24]),
        lambda self: give(self, d=nn.Linear(32, 32)),
    ),
    "at its ends": (
        "B9",
        lambda self, h: torch.tanh(self.d(h)),
        lambda self: give(self, d=nn.Linear(32, 32)) or nn.init.normal_(self.d.weight, std=400.0),
    ),
    "a steep one, on purpose": ("", lambda self, h: torch.tanh(400 * h - 200), lambda self: None),
    "in its middle": ("", lambda self, h: torch.tanh(h), lambda self: None),
}


@pytest.mark.parametrize("what", WIRES)
def test_wires(what):
    torch.manual_seed(0)
    check, mix, more = WIRES[what]
    report = watched(Body(mix, more), F.cross_entropy)
    assert named(report) == check, f"\n{report}"


def test_a_layer_that_is_never_called():
    torch.manual_seed(0)
    model = Body(more=lambda self: give(self, left=nn.Linear(32, 32)))
    report = watched(model, F.cross_entropy)
    assert [(f.check, f.severity) for f in report.findings] == [("S54", doctor.NOTE)], f"\n{report}"
    report = watched(Body(more=lambda self: give(self, left=nn.ModuleList([nn.Linear(32, 32)]))), F.cross_entropy)
    assert not report.findings, f"\n{report}"


LOOPS = {  # check, keywords
    "right": ("", {}),
    "seeded anew": ("D20", {"drop": 0.3, "before": lambda model: torch.manual_seed(0)}),
    "dropout": ("", {"drop": 0.3}),
    "tiny rate of SGD": ("N5", {"rate": (torch.optim.SGD, {"lr": 1e-6})}),
    "momentum of one": ("S26", {"rate": (torch.optim.SGD, {"lr": 1e-3, "momentum": 1.0})}),
    "maximize": ("F75", {"rate": (torch.optim.Adam, {"lr": 1e-3, "maximize": True})}),
}


@pytest.mark.parametrize("what", LOOPS)
def test_loops(what):
    torch.manual_seed(0)
    check, given = LOOPS[what]
    kind, how = given.get("rate", (torch.optim.Adam, {"lr": 1e-3}))
    model = net(drop=given.get("drop", 0.0))
    report = watched(model, F.cross_entropy, optimizer=kind(model.parameters(), **how), before=given.get("before"))
    assert named(report) == check, f"\n{report}"


@pytest.mark.parametrize("limit, wrong", [(1e-5, True), (1.0, False)])
def test_numbers_of_a_gradient_that_are_cut(limit, wrong):
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for _ in range(10):
            rows = torch.randperm(ROWS)[:64]
            optimizer.zero_grad()
            F.cross_entropy(model(X[rows]), TARGETS["classes"][rows]).backward()
            nn.utils.clip_grad_value_(model.parameters(), limit)
            optimizer.step()
    assert (named(report) == "B6") is wrong, f"\n{report}"


@pytest.mark.parametrize("how", ["a list", "an iterator that was used up"])
def test_clips_of_nothing(how):
    torch.manual_seed(0)
    model = net()
    weights = (p for p in model.parameters())
    weights = list(weights) if how == "a list" else weights
    optimizer = torch.optim.SGD(weights, lr=0.1)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for _ in range(10):
            rows = torch.randperm(ROWS)[:64]
            optimizer.zero_grad()
            F.cross_entropy(model(X[rows]), TARGETS["classes"][rows]).backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
    assert ("N8" in said(report)) is (how != "a list"), f"\n{report}"


@pytest.mark.parametrize("every, wrong", [(2, True), (20, False)])
def test_losses_that_are_passed_over(every, wrong):
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for step in range(30):
            rows = torch.randperm(ROWS)[:64]
            loss = F.cross_entropy(model(X[rows]), TARGETS["classes"][rows]) * (
                float("nan") if step % every == 1 else 1
            )
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert (named(report) == "N17") is wrong, f"\n{report}"
    assert not report.faults


STUDENTS = {  # check, loss of the student's and the teacher's answers
    "right": ("", lambda s, t: F.kl_div(F.log_softmax(s, 1), F.softmax(t, 1), reduction="batchmean")),
    "exchanged": ("F20", lambda s, t: F.kl_div(F.log_softmax(t, 1), F.softmax(s, 1), reduction="batchmean")),
    "reverse, of logarithms": (
        "",
        lambda s, t: (
            F.kl_div(F.log_softmax(t, 1), F.log_softmax(s, 1), reduction="none", log_target=True).sum(1).mean()
        ),
    ),
    "taken away": (
        "",
        lambda s, t: (
            F.cross_entropy(s, t.argmax(1)) - F.kl_div(F.log_softmax(s, 1), F.softmax(t, 1), reduction="batchmean")
        ),
    ),
}


@pytest.mark.parametrize("what", STUDENTS)
def test_students(what):
    torch.manual_seed(0)
    check, loss = STUDENTS[what]
    assert named(report := watched(net(), loss, "scores")) == check, f"\n{report}"


class Rounded(nn.Linear):
    """Ternary weights (BitNet b1.58), whose scale is made of the weight."""

    how = "straight through"

    def forward(self, x):
        scale = self.weight.abs().mean()
        q = (self.weight / scale).round().clamp(-1, 1) * scale
        if self.how == "in place":
            self.weight.data = q.detach()
        if self.how == "straight through":
            q = self.weight + (q - self.weight).detach()
        if self.how == "the wrong way":
            q = q + (self.weight - q).detach()
        return F.linear(x, self.weight if self.how == "in place" else q, self.bias)


ROUNDED = {"straight through": "", "the wrong way": "F93", "in place": "N3", "as it is": "B7"}


@pytest.mark.parametrize("how", ROUNDED)
def test_rounded_weights(how):
    torch.manual_seed(0)
    kind = type("Ternary", (Rounded,), {"how": how})
    model = nn.Sequential(nn.Linear(IN, 32), nn.ReLU(), kind(32, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    assert named(report := watched(model, F.cross_entropy)) == ROUNDED[how], f"\n{report}"


@pytest.mark.parametrize(
    "whose, wrong", [("its own", False), ("another's", True), ("nobody's", False), ("its own, softened", False)]
)
def test_the_texts_of_a_teacher(whose, wrong):
    torch.manual_seed(0)
    words, rule = 24, torch.randn(24, 24) * 4
    student = nn.Sequential(nn.Embedding(words, 32), nn.Linear(32, words))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    with doctor.watch(student, optimizer=optimizer, say=False) as report:
        for _ in range(10):
            ids = torch.randint(0, words, (16, 1))
            for _ in range(19):
                ids = torch.cat([ids, torch.multinomial(F.softmax(rule[ids[:, -1]], -1), 1)], 1)
            answers = rule[ids] / (2 if "softened" in whose else 1)  # (B, T, V)
            answers = answers.roll(1, 0) if whose == "another's" else 0 * answers if whose == "nobody's" else answers
            mine, goal = F.log_softmax(student(ids), -1), F.softmax(answers, -1)
            loss = F.kl_div(mine.flatten(0, 1), goal.flatten(0, 1), reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert (named(report) == "D46") is wrong, f"\n{report}"
