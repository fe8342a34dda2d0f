"""Programs around nn.Transformer and texts in columns: masks that hide the wrong side, decoders that see what they are
asked for, padding that counts or is read, rows first where time was meant, heads that never learn. Each beside healthy
forms."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import train_doctor as doctor
from train_doctor.watchers.masks import _of_ones

from .test_common_slips import said, update

PAD, BOS, EOS, WORDS, LONGEST, B = 0, 1, 2, 24, 12, 32
SQUARE = nn.Transformer.generate_square_subsequent_mask


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def pairs(rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts, and the same words under other names: (B, T) both, filled up with PAD."""
    source, target = torch.zeros(rows, LONGEST, dtype=torch.long), torch.zeros(rows, LONGEST, dtype=torch.long)
    for n in range(rows):
        words = torch.randint(3, WORDS, (int(torch.randint(3, LONGEST - 2, (1,))),))
        source[n, : len(words)], source[n, len(words)] = words, EOS
        target[n, 0], target[n, 1 : len(words) + 1], target[n, len(words) + 1] = BOS, 26 - words, EOS
    return source, target


class Translator(nn.Module):
    def __init__(self, mask=SQUARE, padding=lambda ids: ids == PAD):
        super().__init__()
        self.mask, self.padding = mask, padding
        self.words, self.names, self.places = (nn.Embedding(n, 32) for n in (WORDS, WORDS, LONGEST))
        self.core = nn.Transformer(32, 2, 1, 1, 64, dropout=0.0, batch_first=True)
        self.scores = nn.Linear(32, WORDS)

    def forward(self, source, target):
        at = [self.places(torch.arange(ids.size(1))) for ids in (source, target)]
        x, y = self.words(source) + at[0], self.names(target) + at[1]
        mask = self.mask(target.size(1)) if self.mask else None
        hidden = self.padding(source)
        return self.scores(self.core(x, y, tgt_mask=mask, src_key_padding_mask=hidden, memory_key_padding_mask=hidden))


def translated(model, ignored: int = PAD) -> list[str]:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        source, target = pairs()
        z = model(source, target[:, :-1])
        update(optimizer, F.cross_entropy(z.flatten(0, 1), target[:, 1:].flatten(), ignore_index=ignored))

    return said(model, optimizer, step)


MASKS = {
    "right": (SQUARE, ""),
    "of bools": (lambda n: torch.ones(n, n).triu(1).bool(), ""),
    "none": (None, "F11 sees-the-future"),
    "one too wide": (lambda n: torch.ones(n, n).triu(2).bool(), "F11 sees-the-future"),
    "numbers": (lambda n: torch.ones(n, n).tril(), "F34 mask-inverted"),
    "turned round": (lambda n: torch.ones(n, n).tril().bool(), "F34 mask-inverted"),
}


@pytest.mark.parametrize("mask", MASKS)
def test_the_mask_of_a_decoder(mask):
    how, wrong = MASKS[mask]
    found = translated(Translator(mask=how))
    assert found[:1] == ([wrong] if wrong else []), found


@pytest.mark.parametrize("mask", ["right", "none", "one too wide"])
def test_the_mask_of_a_decoder_whose_padding_is_left_out_behind_the_loss(mask):
    how, wrong = MASKS[mask]
    model = Translator(mask=how)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        source, target = pairs()
        asked = target[:, 1:]
        each = F.cross_entropy(model(source, target[:, :-1]).transpose(1, 2), asked, reduction="none")
        update(optimizer, each[asked != PAD].mean())

    assert said(model, optimizer, step) == ([wrong] if wrong else [])


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]])
TOGETHER = DOCUMENTS[:, :, None] == DOCUMENTS[:, None]
OF_ONES = {
    "documents": TOGETHER,
    "other documents": ~TOGETHER,
    "documents and padding": TOGETHER & (DOCUMENTS < 2)[:, None] & (DOCUMENTS < 2)[:, :, None],
    "documents, and the past": TOGETHER.tril(),
    "a window": torch.ones(10, 10).tril(2).triu(-2).bool(),
}


@pytest.mark.parametrize("how", OF_ONES)
def test_what_numbers_are_to_hide(how):
    assert _of_ones(OF_ONES[how].float())


class Experts(nn.Module):
    """What the tokens of a row say to each other, as room for so many tokens does."""

    def forward(self, h):
        return h + 0.05 * h.mean(1, keepdim=True)


def test_tokens_that_meet_in_experts():
    class Mixed(Translator):
        def __init__(self):
            super().__init__()
            self.experts = Experts()

        def forward(self, source, target):
            return self.experts(super().forward(source, target))

    assert "F11 sees-the-future" not in translated(Mixed())


HIDDEN = {
    "padding": (lambda ids: ids == PAD, ""),
    "text": (lambda ids: ids != PAD, "F34 mask-inverted"),
    "numbers": (lambda ids: (ids != PAD).float(), "F34 mask-inverted"),
    "numbers that hide": (lambda ids: torch.zeros(ids.shape).masked_fill(ids == PAD, float("-inf")), ""),
}


@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_padding_of_an_encoder(hidden):
    how, wrong = HIDDEN[hidden]
    assert translated(Translator(padding=how)) == ([wrong] if wrong else [])


@pytest.mark.parametrize("ignored, wrong", [(PAD, False), (-100, True), (BOS, True)])
def test_what_fills_up_a_decoder_s_targets(ignored, wrong):
    assert ("F15 padding-supervised" in translated(Translator(), ignored)) == wrong


FILLED = {
    "by PAD": (lambda ids, i: ids, True),
    "by another in each step": (lambda ids, i: torch.where(ids == PAD, i % 3, ids.clamp(min=3)), False),
    "in one step": (lambda ids, i: ids if i == 0 else full(ids), False),
    "by a word of the text": (lambda ids, i: torch.where(ids == PAD, 5, ids), False),
    "not at all": (lambda ids, i: full(ids), False),
    "as the source is, behind no end": (lambda ids, i: torch.where(ids == EOS, PAD, ids), True),
}


def full(ids):
    """All of one length."""
    words = torch.randint(3, WORDS, (len(ids), ids.shape[1] - 2))
    return torch.cat([torch.full((len(ids), 1), BOS), words, torch.full((len(ids), 1), EOS)], 1)


@pytest.mark.parametrize("how", FILLED)
def test_when_targets_are_filled_up(how):
    fill, wrong = FILLED[how]
    model = Translator()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        source, target = pairs()
        target = fill(target, i)
        z = model(source, target[:, :-1])
        update(optimizer, F.cross_entropy(z.flatten(0, 1), target[:, 1:].flatten()))

    assert ("F15 padding-supervised" in said(model, optimizer, step)) == wrong


class Prefixed(nn.Module):
    """Places of a prefix see each other, and nothing is asked of them; a text goes with its kinds of tokens."""

    def __init__(self, prefix: int):
        super().__init__()
        self.words, self.kinds, self.places = (nn.Embedding(n, 32) for n in (WORDS, 4, 2 * LONGEST))
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.core, self.scores = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(32, WORDS)
        self.prefix = prefix

    def forward(self, ids, kinds):
        hidden = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        hidden[: self.prefix, : self.prefix] = False
        h = self.words(ids) + self.kinds(kinds) + self.places(torch.arange(ids.shape[1]))
        return self.scores(self.core(h, mask=hidden))


@pytest.mark.parametrize("asked, wrong", [(12, False), (0, True)])
def test_a_prefix_that_sees_itself(asked, wrong):
    model = Prefixed(12)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        ids, kinds = torch.randint(0, WORDS, (B, 17)), torch.randint(0, 4, (B, 16))
        targets = ids[:, 1:].clone()
        targets[:, :asked] = -100
        update(optimizer, F.cross_entropy(model(ids[:, :-1], kinds).flatten(0, 1), targets.flatten()))

    assert ("F11 sees-the-future" in said(model, optimizer, step)) == wrong


@pytest.mark.parametrize("rows", [11, 12])
def test_a_decoder_that_answers_in_columns(rows):
    """As many rows as places tell nothing of which is which."""

    class Turned(Translator):
        def forward(self, source, target):
            return super().forward(source, target).transpose(0, 1)

    model = Turned()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        source, target = pairs(rows)
        z = model(source, target[:, :-1]).transpose(0, 1)
        update(optimizer, F.cross_entropy(z.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD))

    assert "F11 sees-the-future" not in said(model, optimizer, step)


# ------------------------------------------------------------------ an encoder
class Tagger(nn.Module):
    """A tag for each word, or one class for each text."""

    def __init__(self, out: int, batch_first: bool = True, read: str = "each"):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Parameter(0.1 * torch.randn(1, LONGEST, 32))
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=batch_first)
        self.core, self.scores = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(32, out)
        self.first, self.read = batch_first, read

    def forward(self, ids):
        h = self.words(ids) + self.places[:, : ids.size(1)]
        if self.read == "turned":
            return self.scores(self.core(h.transpose(0, 1)).transpose(0, 1))
        pads = ids == PAD
        h = self.core(h, src_key_padding_mask=pads if self.first and self.read != "each" else None)
        z = self.scores(h)
        if self.read == "last score":
            return z.squeeze(-1)[:, -1]
        if self.read == "last of the first":  # as many numbers as places
            return z[:, 0][:, -1]
        if self.read == "own last score":
            return z.squeeze(-1)[torch.arange(len(ids)), (~pads).sum(1) - 1]
        return z


@pytest.mark.parametrize(
    "batch_first, read, wrong", [(False, "each", True), (True, "each", False), (False, "turned", False)]
)
def test_rows_of_a_loader_come_first(batch_first, read, wrong):
    ids = torch.randint(0, WORDS, (512, LONGEST))
    loader = iter(DataLoader(TensorDataset(ids, ids.roll(1, 1) % 5), batch_size=B, shuffle=True))
    model = Tagger(5, batch_first, read)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        ids, tags = next(loader)
        update(optimizer, F.cross_entropy(model(ids).reshape(-1, 5), tags.reshape(-1)))

    assert ("S21 batch-as-time" in said(model, optimizer, step)) == wrong


@pytest.mark.parametrize("read, wrong", [("last score", True), ("own last score", False), ("last of the first", False)])
def test_the_score_at_the_last_place(read, wrong):
    model = Tagger(LONGEST if read == "last of the first" else 1, read=read)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i):
        (better, _), (worse, _) = pairs(), pairs()
        update(optimizer, -F.logsigmoid(model(better) - model(worse)).mean())

    assert ("S25 state-after-padding" in said(model, optimizer, step)) == wrong


# ------------------------------------------------------------------ heads
FROZEN = {  # layers, those of them that hold other numbers than torch drew, and whether it is a fault
    "head": (["1"], [], True),
    "nothing": ([], [], False),
    "body": (["0.0"], [], False),
    "trained head": (["1"], ["1"], False),
    "head and trained body": (["0.0", "1"], ["0.0"], False),
}


@pytest.mark.parametrize("frozen", FROZEN)
def test_a_head_that_is_frozen(frozen):
    layers, trained, wrong = FROZEN[frozen]
    body, head = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 128)), nn.Linear(128, 3)
    model = nn.Sequential(body, head)
    for name in layers:
        layer = model.get_submodule(name).requires_grad_(False)
        layer.weight.add_(torch.randn_like(layer.weight) * (name in trained))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)

    def step(i):
        x = torch.randn(B, 6)
        update(optimizer, F.cross_entropy(model(x), x[:, :3].argmax(1)))

    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for i in range(6):
            step(i)
    told = [f.severity for f in report.findings if f.check == "S22"]
    assert told == [doctor.NOTE] * wrong


@pytest.mark.parametrize("task, trained, wrong", [(None, False, True), ("SEQ_CLS", False, False), (None, True, False)])
def test_a_head_under_adapters(task, trained, wrong):
    """One that was drawn with another spread than the configuration's, and whose biases are 0."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=WORDS)
    base = BertForSequenceClassification(BertConfig(**sizes, num_labels=3, initializer_range=0.1))
    nn.init.normal_(base.classifier.weight, std=0.02)
    if trained:
        nn.init.normal_(base.classifier.bias)
    model = get_peft_model(base, LoraConfig(task_type=task, r=4, target_modules=["query", "value"]))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)

    def step(i):
        ids = torch.randint(3, WORDS, (B, 8))
        update(optimizer, model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids[:, 0] % 3).loss)

    assert ("S22 frozen-at-start" in said(model, optimizer, step)) == wrong


# ------------------------------------------------------------------ texts in columns
class Columns(nn.Module):
    """A recurrent language model of texts (T, B)."""

    def __init__(self, both: bool = False, batch_first: bool = False, backwards: bool = False, flat: bool = False):
        super().__init__()
        self.backwards, self.flat = backwards, flat
        self.words = nn.Embedding(WORDS, 32)
        self.core = nn.GRU(32, 32, batch_first=batch_first, bidirectional=both)
        self.scores = nn.Linear(64 if both else 32, WORDS)

    def forward(self, ids):
        if self.backwards:
            return self.scores(self.core(self.words(ids).flip(0))[0].flip(0))
        h = self.core(self.words(ids))[0]
        return self.scores(h.flatten(0, 1) if self.flat else h)


NEXT, CROSSED = (0, 1), "crossed"
COLUMNS = {
    "right": ({}, NEXT, ""),
    "too far": ({}, (0, 2), "F3 wrong-loss"),
    "back": ({}, (1, 0), "F3 wrong-loss"),
    "back, by a model that reads so": ({"backwards": True}, (1, 0), ""),
    "next, and the one after": ({}, "two", ""),
    "turned": ({}, CROSSED, "F3 wrong-loss"),
    "turned, scored when flat": ({"flat": True}, CROSSED, "F3 wrong-loss"),
    "both ways": ({"both": True}, NEXT, "F11 sees-the-future"),
    "both ways, and tags": ({"both": True}, "tags", ""),
    "rows first": ({"batch_first": True}, NEXT, "S21 batch-as-time"),
    "rows in order": ({"batch_first": True}, "rows", ""),
}


@pytest.mark.parametrize("how", COLUMNS)
def test_texts_in_columns(how):
    options, kind, wrong = COLUMNS[how]
    model, further = Columns(**options), nn.Linear(WORDS, WORDS)
    more = further.parameters() if kind == "two" else ()
    optimizer = torch.optim.Adam([*model.parameters(), *more], 1e-3)
    texts = torch.randint(0, WORDS, (400, 16))  # (T, B)

    def step(i):
        piece = texts[20 * i : 20 * i + 24]
        first, second = kind if isinstance(kind, tuple) else NEXT
        x, y = piece[first : first + 20], piece[second : second + 20]
        if kind == "tags":
            y = x.roll(3, 1) % 7
        if kind == "rows":
            x, y = x.t(), y.t()
        targets = y.t().reshape(-1) if kind == CROSSED else y.reshape(-1)
        z = model(x)
        loss = F.cross_entropy(z.reshape(-1, WORDS), targets)
        if kind == "two":
            loss = loss + F.cross_entropy(further(z).reshape(-1, WORDS), piece[2:22].reshape(-1))
        update(optimizer, loss)

    found = said(model, optimizer, step)
    assert found[:1] == ([wrong] if wrong else []), found
