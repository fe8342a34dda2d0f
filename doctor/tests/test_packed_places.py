"""Places of packed documents that run on (F12), texts of one item that are compared with others' (S61), and a decoder
whose first answers are cut off (F33): each beside what it could be taken for."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import train_doctor as doctor

WORDS, WIDE, LONG, ROWS = 24, 16, 24, 8


def said(model, loss_of, steps=6) -> dict[str, str]:
    """The causes by check."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=steps, say=False) as report:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    assert not report.faults, report.faults
    return {f.check: f.diagnosis for f in report.findings if f.severity != doctor.NOTE}


# ------------------------------------------------------------------------------------------------ places (F12)
def packs(generator, alike=False):
    """Words, number of the document, and place in it, of rows that are packed whole."""
    document, place = torch.zeros(2, ROWS, LONG, dtype=torch.long)
    for row in range(ROWS):
        at, number = 0, 0
        while at < LONG:
            size = 6 if alike else int(torch.randint(4, 8, (1,), generator=generator))
            document[row, at : at + size], place[row, at : at + size] = number, torch.arange(size)[: LONG - at]
            at, number = at + size, number + 1
    return torch.randint(2, WORDS, (ROWS, LONG), generator=generator), document, place


def fused(q, k, v, sees):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees)


def added(q, k, v, sees):
    hidden = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + hidden).softmax(-1) @ v


def filled(q, k, v, sees):
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~sees, float("-inf")).softmax(-1) @ v


def chosen(q, k, v, sees):
    return torch.where(sees, q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1e9).softmax(-1) @ v


def fused_and_then_all(q, k, v, sees):
    """A layer that keeps documents apart, and one that sees the row."""
    return F.scaled_dot_product_attention(q, k, fused(q, k, v, sees), is_causal=True)


def filled_and_then_all(q, k, v, sees):
    later = torch.ones(LONG, LONG, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ filled(q, k, v, sees)


class Packed(nn.Module):
    """One layer; `places` are "run on", "begin anew", "both", "waves" or "none"."""

    def __init__(self, attend=fused, places="run on", numbered=False):
        super().__init__()
        self.attend, self.places, self.numbered = attend, places, numbered
        self.words, self.at, self.number = nn.Embedding(WORDS, WIDE), nn.Embedding(LONG, WIDE), nn.Embedding(LONG, WIDE)
        self.qkv, self.out, self.head = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WORDS)
        self.register_buffer("waves", torch.outer(torch.arange(LONG), torch.linspace(0.1, 1, WIDE)).sin())

    def forward(self, ids, sees, document, place):
        x, counted = self.words(ids), torch.arange(LONG)
        if self.places in ("run on", "both"):
            x = x + self.at(counted)
        if self.places in ("begin anew", "both"):
            x = x + self.number(place)
        if self.places == "waves":
            x = x + self.waves
        if self.numbered:
            x = x + self.number(document)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.head(x + self.out(self.attend(q, k, v, sees[:, None]).transpose(1, 2).flatten(2)))


def told_of_places(blocks="documents", **options):
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    causal = torch.ones(LONG, LONG, dtype=torch.bool).tril()

    def loss_of(model):
        ids, document, place = packs(draw, alike=blocks == "alike")
        same = document[:, :, None] == document[:, None, :]
        sees = {"rows": causal.expand_as(same), "both ways": same}.get(blocks, same & causal)
        logits = model(ids, sees, document, place)
        inside = (place[:, 1:] > 0).flatten()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1)[inside], ids[:, 1:].flatten()[inside])

    return "few of them stand where a text alone" in said(Packed(**options), loss_of).get("F12", "")


@pytest.mark.parametrize("attend", [fused, added, filled, chosen])
def test_places_that_run_on_over_documents(attend):
    assert told_of_places(attend=attend)


@pytest.mark.parametrize("attend", [fused_and_then_all, filled_and_then_all])
def test_a_layer_that_sees_all_of_the_row(attend):
    assert not told_of_places(attend=attend)


@pytest.mark.parametrize("places", ["begin anew", "both", "waves", "none"])
def test_other_places(places):
    assert not told_of_places(places=places)


@pytest.mark.parametrize("blocks", ["rows", "alike", "both ways"])
def test_other_masks(blocks):
    assert not told_of_places(blocks=blocks)


def test_documents_that_have_a_number():
    assert not told_of_places(numbered=True)


@pytest.mark.parametrize("anew", [False, True])
def test_a_model_of_transformers_with_a_mask_in_blocks(anew):
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    config = GPT2Config(vocab_size=WORDS, n_positions=LONG, n_embd=WIDE, n_layer=1, n_head=2, use_cache=False)

    def loss_of(model):
        ids, document, place = packs(draw)
        sees = (document[:, :, None] == document[:, None, :]).tril()[:, None]
        hidden = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
        labels = ids.masked_fill(place == 0, -100)
        return model(ids, attention_mask=hidden, labels=labels, position_ids=place if anew else None).loss

    cause = said(GPT2LMHeadModel(config), loss_of).get("F12", "")
    assert ("few of them stand where a text alone" in cause) is not anew


def test_a_text_behind_padding():
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)

    def loss_of(model):
        ids, document, place = packs(draw)
        first = torch.randint(0, 6, (ROWS, 1), generator=draw)
        text = torch.arange(LONG) >= first
        sees = torch.ones(LONG, LONG, dtype=torch.bool).tril() & (text[:, None] | torch.eye(LONG, dtype=torch.bool))
        return F.cross_entropy(model(ids, sees, document, place)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    assert "F12" not in said(Packed(), loss_of)


# ------------------------------------------------------------------------------------------------ items (S61)
class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, 1)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1)).squeeze(-1)


def answers(number=64):
    draw = torch.Generator().manual_seed(2)
    sizes = torch.randint(5, 9, (number, 2), generator=draw).tolist()
    return [tuple(torch.randint(1, WORDS, (n,), generator=draw) for n in pair) for pair in sizes]


class Named(Dataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, n):
        one, two = self.pairs[n]
        return {"weight": 1.0, "chosen": one.tolist(), "rejected": two.tolist(), "mask": [1] * len(one)}


def padded(rows, left=False):
    width = max(map(len, rows)) + 2 * left
    fill = [[0] * (width - len(row)) for row in rows]
    return torch.tensor([f + [*map(int, r)] if left else [*map(int, r)] + f for f, r in zip(fill, rows)])


def beside(pairs):
    return padded([text for pair in pairs for text in pair])


def behind(pairs):
    return padded([one for one, _ in pairs] + [two for _, two in pairs])


def on_the_left(pairs):
    return padded([text for pair in pairs for text in pair], left=True)


def by_name(items):
    return beside([(item["chosen"], item["rejected"]) for item in items])


def halves(scores):
    return scores.chunk(2)


def neighbours(scores):
    return scores[0::2], scores[1::2]


def told_of_items(data, collate, cut, **options) -> str:
    torch.manual_seed(0)
    loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate, **options)
    batches = iter([ids for _ in range(2) for ids in loader] if options else loader)

    def loss_of(model):
        one, two = cut(model(next(batches)))
        return -F.logsigmoid(one - two).mean()

    return said(Scores(), loss_of).get("S61", "")


@pytest.mark.parametrize("collate", [beside, behind, on_the_left])
@pytest.mark.parametrize("cut", [halves, neighbours])
def test_answers_without_a_prompt(collate, cut):
    cause = told_of_items(answers(), collate, cut)
    if (collate is behind) == (cut is halves):
        assert not cause
    else:
        assert ("first half of the scores" if cut is halves else "Scores that stand side by side") in cause


def test_answers_by_name():
    assert "first half of the scores" in told_of_items(Named(answers()), by_name, halves)
    assert not told_of_items(Named(answers()), by_name, neighbours)


def test_two_copies_of_a_text_and_workers():
    twice = [(one, one) for one, _ in answers()]
    assert not told_of_items(twice, beside, halves)
    assert not told_of_items(answers(), beside, halves, num_workers=1)


def test_a_collate_function_that_fails_is_the_users_matter():
    def collate(pairs):
        raise KeyError("label")

    loader, model = DataLoader(answers(), batch_size=8, collate_fn=collate), Scores()
    with doctor.watch(model, steps=4, say=False), pytest.raises(KeyError, match="label"):
        next(iter(loader))
    batches = iter(loader)
    assert batches._dataset_fetcher.collate_fn is collate


# ------------------------------------------------------------------------------------------------ a decoder (F33)
class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDE), nn.Embedding(WORDS, WIDE)
        self.layers = nn.Transformer(WIDE, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDE, WORDS)

    def forward(self, source, target):
        later = torch.ones(target.size(1), target.size(1), dtype=torch.bool).triu(1)
        return self.head(self.layers(self.source(source), self.target(target), tgt_mask=later))


CUTS = {
    "all": (lambda model, s, t: (model(s, t), t), True),
    "without the first": (lambda model, s, t: (model(s, t)[:, 1:], t[:, 1:]), True),
    "the last ones": (lambda model, s, t: (model(s, t)[:, -5:], t[:, -5:]), True),
    "without both ends": (lambda model, s, t: (model(s, t)[:, 1:-1], t[:, 1:-1]), True),
    "by narrow": (lambda model, s, t: (model(s, t).narrow(1, 1, LONG - 1).contiguous(), t[:, 1:]), True),
    "the next": (lambda model, s, t: (model(s, t)[:, :-1], t[:, 1:]), False),
    "the next but one": (lambda model, s, t: (model(s, t)[:, 1:-1], t[:, 2:]), False),
    "moved on": (lambda model, s, t: (model(s, t[:, :-1]), t[:, 1:]), False),
    "every second": (lambda model, s, t: (model(s, t)[:, 1::2], t[:, 2::2].roll(1, 1)), False),
}


@pytest.mark.parametrize("cut", CUTS)
def test_answers_of_a_decoder_that_are_cut(cut):
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(3)
    parts, copies = CUTS[cut]

    def loss_of(model):
        source = torch.randint(2, WORDS, (ROWS, LONG), generator=draw)
        target = torch.randint(2, WORDS, (ROWS, LONG), generator=draw)
        logits, asked = parts(model, source, target)
        width = min(logits.shape[1], asked.shape[1])
        return F.cross_entropy(logits[:, :width].reshape(-1, WORDS), asked[:, :width].reshape(-1))

    assert ("F33" in said(Translator(), loss_of)) is copies
