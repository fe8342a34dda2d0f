"""Axes of shares (S33 picked), places of a teacher (D46 places), positions (S65), labels of prompts (F15 prompt), texts
of other rows (D11 texts), one text in a batch (D53), and answers that are picked as they are (F88 no-softmax)."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from train_doctor.watchers.texts_apart import _text

from .test_added_gradients import named
from .test_turned import watched

ROWS, PLACES, WORDS, SIZE = 12, 16, 24, 16


class Model(nn.Module):
    """Words and places, a recurrent layer, a head."""

    def __init__(self, positions="rising"):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, SIZE), nn.Embedding(32, SIZE)
        self.types = nn.Embedding(32 if positions == "many types" else 2, SIZE)
        self.mix, self.head = nn.GRU(SIZE, SIZE, batch_first=True), nn.Linear(SIZE, WORDS)
        self.positions = positions

    def forward(self, ids):
        h = self.words(ids)
        if self.positions not in ("none", "types alone"):
            zeros = torch.zeros(ids.shape[1], dtype=torch.long)
            h = h + self.places(zeros if self.positions == "zeros" else torch.arange(ids.shape[1]))
        if "types" in self.positions:
            h = h + self.types(torch.zeros_like(ids))
        return self.head(self.mix(h)[0])


def model(positions="rising"):
    torch.manual_seed(0)
    return Model(positions)


def texts(rows=ROWS):
    """Texts in which a word tells the next one, mostly."""
    ids = [torch.randint(WORDS, (rows,))]
    for _ in range(PLACES):
        ids.append(torch.where(torch.rand(rows) < 0.8, (5 * ids[-1] + 3) % WORDS, torch.randint(WORDS, (rows,))))
    return torch.stack(ids, 1)


def next_words(m, ids):
    return F.cross_entropy(m(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def picked(z, y, how):
    if how == "one axis":
        return -z.log_softmax(2).gather(2, y[..., None]).mean()
    if how == "of a layer's features":  # an attention over places, from which a place is taken
        read = (z.softmax(1) * z).sum(1).gather(1, y[:, :1])
        return read.square().mean() + F.cross_entropy(z.flatten(0, 1), y.flatten())
    if how == "several of each":
        return -z.log_softmax(2).gather(1, y[:, :2, None].clamp(max=PLACES - 1).expand(-1, -1, WORDS)).mean()
    return -z.log_softmax({"along the places": 1, "along the rows": 0}[how]).gather(2, y[..., None]).mean()


PICKED = {
    "one axis": "",
    "along the places": "S33",
    "along the rows": "S33",
    "of a layer's features": "",
    "several of each": "",
}


@pytest.mark.parametrize("how", PICKED)
def test_axes_of_shares(how):
    def loss(m):
        ids = texts()
        return picked(m(ids[:, :-1]), ids[:, 1:], how)

    report = watched(model(), loss)
    assert named(report) == PICKED[how], f"\n{report}"


TEACHERS = {
    "the same places": "",
    "a place later": "D46",
    "features of a later place": "",
    "a text with more in front": "",
    "along the places": "S33",
    "classes first": "",
}


@pytest.mark.parametrize("how", TEACHERS)
def test_what_a_teacher_says(how):
    m = model()
    teacher = copy.deepcopy(m).requires_grad_(False)
    nn.init.normal_(teacher.head.weight)

    def loss(m):
        ids = texts()
        z, t = m(ids), teacher(ids).detach()
        if how == "features of a later place":
            return F.mse_loss(z[:, :-1], t[:, 1:])
        if how == "along the places":
            return F.kl_div(z.log_softmax(1), t.softmax(1), reduction="sum") / z[..., 0].numel()
        if how == "classes first":
            z, t = z.transpose(1, 2), t.transpose(1, 2)
            return F.kl_div(z.log_softmax(1), t.softmax(1), reduction="sum") / z[:, 0].numel()
        if how == "a text with more in front":
            t = teacher(torch.cat([texts()[:, :4], ids], 1))[:, 4:]
        z, t = z[:, :-1], t[:, 1:] if how == "a place later" else t[:, :-1]
        return F.kl_div((z / 2).log_softmax(-1).flatten(0, 1), (t / 2).softmax(-1).flatten(0, 1), reduction="batchmean")

    report = watched(m, loss)
    assert named(report) == TEACHERS[how], f"\n{report}"


class Attends(nn.Module):
    """In place of the recurrent layer: nothing but the places tells the order."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(SIZE, 2, 32, 0.0, batch_first=True)

    def forward(self, h):
        ahead = torch.triu(torch.ones(h.shape[1], h.shape[1], dtype=torch.bool), 1)
        return (self.layer(h, src_mask=ahead),)


@pytest.mark.parametrize("how", ["rising", "none", "types", "types alone", "many types", "zeros", "zeros, recurrent"])
def test_positions(how):
    m = model(how.removesuffix(", recurrent"))
    if how == "zeros":
        m.mix = Attends()
    report = watched(m, lambda m: next_words(m, texts()))
    assert named(report) == ("S65" if how == "zeros" else ""), f"\n{report}"


@pytest.mark.parametrize("counted", [True, False])
def test_angles(counted):
    torch.manual_seed(0)
    m = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=SIZE, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )

    def loss(m):
        ids = texts()
        return m(ids, position_ids=None if counted else torch.zeros_like(ids), labels=ids).loss

    report = watched(m, loss)
    assert named(report) == ("" if counted else "S65"), f"\n{report}"


def shuffled(ids):
    return ids[torch.randperm(len(ids))]


BATCHES = {
    "as they are": ("", lambda ids: (ids, ids)),
    "both shuffled": ("", lambda ids: (shuffled(ids),) * 2),
    "one side shuffled": ("D11", lambda ids: (ids, shuffled(ids.clone()))),
    "a few mixed up": ("", lambda ids: (ids, torch.cat([ids[1:2], ids[:1], ids[2:]]))),
    "one text": ("D53", lambda ids: (ids[:1].expand(ROWS, -1),) * 2),
    "one text in pairs": ("", lambda ids: (ids[:2].repeat(ROWS // 2, 1),) * 2),
    "one text twice": ("", lambda ids: (ids[:1].expand(2, -1),) * 2),  # R-Drop of a batch of one
}


@pytest.mark.parametrize("how", BATCHES)
def test_texts_of_other_rows(how):
    check, made = BATCHES[how]

    def loss(m):
        given, asked = made(texts())
        return F.cross_entropy(m(given[:, :-1]).flatten(0, 1), asked[:, 1:].flatten())

    report = watched(model("types"), loss)
    assert named(report) == check, f"\n{report}"


PROMPTS = {  # what the labels are where the prompt is
    "ignored": ("", lambda ids, y: y.index_fill(1, torch.arange(5), -100)),
    "a token": ("F15", lambda ids, y: y.index_fill(1, torch.arange(5), 0)),
    "a token that is ignored": ("", lambda ids, y: y.index_fill(1, torch.arange(5), 0)),
    "asked for": ("", lambda ids, y: y),
    "one token": ("", lambda ids, y: y.index_fill(1, torch.arange(1), 0)),
    "a token in front and behind": ("", lambda ids, y: y.index_fill(1, torch.tensor([0, 1, 2, 9, 12, 14]), 0)),
    "a token here and there": ("", lambda ids, y: y.index_fill(1, torch.arange(2, 16, 5), 0)),
    "tags": ("", lambda ids, y: (y > 12).long()),
}


@pytest.mark.parametrize("how", PROMPTS)
def test_labels_of_prompts(how):
    check, labels = PROMPTS[how]

    def loss(m):
        ids = texts()
        y = labels(ids, ids[:, 1:])
        ignored = 0 if how == "a token that is ignored" else -100
        return F.cross_entropy(m(ids[:, :-1]).flatten(0, 1), y.flatten(), ignore_index=ignored)

    report = watched(model(), loss)
    assert named(report) == check, f"\n{report}"


ANSWERS = {
    "log-shares": ("", lambda z, y: -z.log_softmax(1).gather(1, y[:, None]).mean()),
    "as they are": ("F88", lambda z, y: -z.gather(1, y[:, None]).squeeze(1).mean()),
    "as they are, by rows": ("F88", lambda z, y: -z[torch.arange(len(y)), y].mean()),
    "with what they cost": ("", lambda z, y: (z.logsumexp(1) - z.gather(1, y[:, None]).squeeze(1)).mean()),
    "of a value": ("", lambda z, y: (z.gather(1, y[:, None]).squeeze(1) - 1).square().mean()),
}


@pytest.mark.parametrize("how", ANSWERS)
def test_answers_that_are_picked(how):
    check, of = ANSWERS[how]

    def loss(m):
        ids = texts()
        return of(m(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    report = watched(model(), loss)
    assert named(report) == check, f"\n{report}"


def test_an_attack_on_the_answer():
    """The picked answer itself is a common loss of an attack, which is a gradient of the input."""
    m = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def loss(m):
        x, y = torch.randn(ROWS, 6).requires_grad_(), torch.randint(4, (ROWS,))
        return -m(x).gather(1, y[:, None]).mean()

    assert named(watched(m, loss)) != "F88"


def test_a_critic_of_a_place():
    """The last answer of a critic is to grow: a place is picked, and no class."""
    m = model()
    m.head = nn.Linear(SIZE, 1)
    assert named(watched(m, lambda m: -m(texts())[torch.arange(ROWS), PLACES].mean())) != "F88"


@pytest.mark.parametrize("ids", [torch.zeros(ROWS, PLACES, dtype=torch.long), torch.arange(PLACES).expand(ROWS, -1)])
def test_numbers_beside_a_table(ids):
    """Series of numbers, with the table of their station, or of their places: no words are looked up."""
    torch.manual_seed(0)
    m = nn.ModuleDict({"into": nn.Linear(3, SIZE), "table": nn.Embedding(32, SIZE), "mix": nn.GRU(SIZE, SIZE)})
    m["head"] = nn.Linear(SIZE, 1)

    def loss(m):
        x = torch.randn(ROWS, PLACES, 3)
        h = (m["into"](x) + m["table"](ids)).transpose(0, 1)
        return F.mse_loss(m["head"](m["mix"](h)[0]), x.transpose(0, 1)[..., :1])

    report = watched(m, loss)
    assert not {"S65", "D53"} & {f.check for f in report.findings}, f"\n{report}"


def test_large_batches_are_not_compared_row_by_row():
    ids = torch.randint(WORDS, (4, PLACES))
    assert _text(ids) and not _text(ids.repeat(1024, 1))


# ------------------------------------------------------------------------------------------------ pairs of answers
PAIRS = {"of other rows": "D46", "of the same rows": "", "rewards": "", "padding counts": "F15"}


@pytest.mark.parametrize("how", PAIRS)
def test_two_answers_and_what_was_kept_of_them(how):
    """The costs of both are multiplied with a mask; the reference's difference was kept before the watch."""
    m = model()
    end, rows = torch.arange(PLACES + 1), 64
    pairs = [torch.randint(1, WORDS, (rows, PLACES + 1)) for _ in range(2)]
    there = [end < torch.randint(5, PLACES + 2, (rows, 1)) for _ in pairs]
    pairs = [ids.masked_fill(~mask, 0) for ids, mask in zip(pairs, there)]

    def difference(m, at):
        sums = []
        for number, (ids, mask) in enumerate(zip(pairs, there)):
            ids, mask = ids[at, : PLACES - 4 * number], mask[at, 1 : PLACES - 4 * number]
            costs = m(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            mask = torch.ones_like(mask) if how == "padding counts" else mask
            sums.append((costs * mask.float()).sum(1))
        return sums[0] - sums[1]

    with torch.no_grad():
        kept = torch.randn(rows) if how == "rewards" else difference(m, torch.arange(rows))
    kept, steps = kept.clone(), iter(range(1000))

    def loss(m):
        at, n = torch.stack(list(torch.randperm(rows)[:8])), next(steps) % 8
        reference = kept[8 * n : 8 * n + 8] if how in ("of other rows", "rewards") else kept[at]
        return (difference(m, at) - reference - 2.0).square().mean()

    report = watched(m, loss)
    said = {f.check for f in report.findings} & {"D46", "F15"}
    assert said == ({PAIRS[how]} - {""}), f"\n{report}"
