"""Healthy programs of texts in columns, of windows as long as a batch is large, and others whose lines meet theirs."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

PROGRAMS = {}
STEPS = 12


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def step(opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()


def adam_of(model):
    return torch.optim.Adam(model.parameters(), 3e-3)


def texts(rows, length, vocab=64, low=4):
    """Ids (B, T) with a rule in them: each token is the one before plus 1 to 3."""
    first = torch.randint(low, vocab, (rows, 1))
    return (first + torch.randint(1, 4, (rows, length)).cumsum(1) - low) % (vocab - low) + low


def flat_loss(scores, targets):
    return F.cross_entropy(scores.reshape(-1, 64), targets.reshape(-1))


def causal(n):
    return nn.Transformer.generate_square_subsequent_mask(n)


# ---------------------------------------------------------------------------------------------------------- F3
@program
def lm_turns_inside_and_back():
    """F3/crossed: batches are (B, T); the model turns ids to (T, B) for nn.LSTM and turns the answer back."""

    class LM(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.rnn, self.head = nn.Embedding(64, 32), nn.LSTM(32, 48), nn.Linear(48, 64)

        def forward(self, x):
            out, _ = self.rnn(self.table(x.t()))
            return self.head(out.transpose(0, 1))

    model = LM()
    opt = adam_of(model)
    for _ in range(STEPS):
        ids = texts(8, 17)
        step(opt, flat_loss(model(ids[:, :-1]), ids[:, 1:]))


@program
def lm_turns_with_a_transformer():
    """F3/crossed: nn.TransformerEncoder without batch_first: ids (B, T) are turned first, the answer back."""

    class LM(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.places = nn.Embedding(64, 32), nn.Parameter(0.02 * torch.randn(32, 1, 32))
            self.layer, self.head = nn.TransformerEncoderLayer(32, 2, 64, 0.1), nn.Linear(32, 64)

        def forward(self, x):
            x = x.permute(1, 0)
            h = self.layer(self.table(x) + self.places[: len(x)], src_mask=causal(len(x)))
            return self.head(h).permute(1, 0, 2)

    model = LM()
    opt = adam_of(model)
    for _ in range(STEPS):
        ids = texts(8, 13)
        step(opt, flat_loss(model(ids[:, :-1]), ids[:, 1:]))


@program
def backward_lm_by_hand():
    """F3/backwards: the backward half of a model of both directions (ELMo): a cell runs from the last word to the
    first."""

    class Back(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.cell, self.head = nn.Embedding(64, 32), nn.LSTMCell(32, 48), nn.Linear(48, 64)

        def forward(self, x):
            e = self.table(x)
            h = c = e.new_zeros(x.shape[1], 48)
            out = []
            for t in reversed(range(len(x))):
                h, c = self.cell(e[t], (h, c))
                out.insert(0, h)
            return self.head(torch.stack(out))

    model = Back()
    opt = adam_of(model)
    for _ in range(STEPS):
        ids = texts(8, 13).t()
        step(opt, flat_loss(model(ids[1:]), ids[:-1]))


# ---------------------------------------------------------------------------------------------------------- F11
@program
def translation_in_columns():
    """F11: an encoder that runs both ways, a decoder that is given the target, attention; all in columns (T, B)."""

    class Translator(nn.Module):
        def __init__(self, w=32):
            super().__init__()
            self.src, self.tgt = nn.Embedding(64, w, padding_idx=0), nn.Embedding(64, w, padding_idx=0)
            self.enc, self.bridge = nn.GRU(w, w, bidirectional=True), nn.Linear(2 * w, w)
            self.dec, self.keys, self.head = nn.GRU(w, w), nn.Linear(2 * w, w), nn.Linear(2 * w, 64)

        def forward(self, src, tgt):
            m, h = self.enc(self.src(src))
            h = torch.tanh(self.bridge(torch.cat([h[0], h[1]], -1)))[None]
            out = self.dec(self.tgt(tgt), h)[0].transpose(0, 1)
            k = self.keys(m).transpose(0, 1)
            a = (out @ k.transpose(1, 2)).softmax(-1) @ k
            return self.head(torch.cat([out, a], -1)).transpose(0, 1)

    model = Translator()
    opt = adam_of(model)
    for _ in range(STEPS):
        src = texts(8, 11).t()
        tgt = torch.cat([torch.full((1, 8), 1), src.flip(0), torch.full((1, 8), 2)])
        step(opt, flat_loss(model(src, tgt[:-1]), tgt[1:]))


@program
def two_texts_in_columns():
    """F11: the mean of a GRU that runs both ways over one text is a condition of a model of another."""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(64, 24)
            self.enc, self.dec, self.head = nn.GRU(24, 12, bidirectional=True), nn.GRU(48, 32), nn.Linear(32, 64)

        def forward(self, s, t):
            c = self.enc(self.table(s))[0].mean(0)
            return self.head(self.dec(torch.cat([self.table(t), c.expand(len(t), -1, -1)], -1))[0])

    model = M()
    opt = adam_of(model)
    for _ in range(STEPS):
        s, t = texts(8, 9).t(), texts(8, 14).t()
        step(opt, flat_loss(model(s, t[:-1]), t[1:]))


@program
def columns_with_a_tagger_and_a_model():
    """F11: an LSTM that runs both ways tags the words, another one foretells the next word (Rei 2017)."""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(64, 24)
            self.both, self.one = nn.LSTM(24, 24, bidirectional=True), nn.LSTM(24, 24)
            self.tags, self.words = nn.Linear(48, 5), nn.Linear(24, 64)

        def forward(self, x):
            e = self.table(x)
            return self.tags(self.both(e)[0]), self.words(self.one(e)[0])

    model = M()
    opt = adam_of(model)
    for _ in range(STEPS):
        ids = texts(8, 15).t()
        x, y = ids[:-1], ids[1:]
        tags, words = model(x)
        step(opt, F.cross_entropy(tags.reshape(-1, 5), (x % 5).reshape(-1)) + 0.1 * flat_loss(words, y))


# ---------------------------------------------------------------------------------------------------------- S21
@program
def columns_turned_for_batch_first():
    """S21/columns: windows (T, B) of long texts; what the table gives is turned for a batch_first LSTM, and back."""

    class LM(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(64, 32), nn.Linear(48, 64)
            self.rnn = nn.LSTM(32, 48, batch_first=True)

        def forward(self, x):
            out, _ = self.rnn(self.table(x).transpose(0, 1))
            return self.head(out).transpose(0, 1)

    model = LM()
    opt = adam_of(model)
    data = texts(8, 500).t().contiguous()
    for i in range(0, 16 * STEPS, 16):
        step(opt, flat_loss(model(data[i : i + 16]), data[i + 1 : i + 17]))


@program
def letters_to_words_in_columns():
    """S21/columns: a batch_first LSTM runs both ways over the letters of each word, another one over words in columns
    (Ling 2015)."""

    class C2W(nn.Module):
        def __init__(self):
            super().__init__()
            self.letters, self.words = nn.Embedding(20, 12), nn.Embedding(64, 24)
            self.spell = nn.LSTM(12, 12, bidirectional=True, batch_first=True)
            self.rnn, self.head = nn.LSTM(48, 48), nn.Linear(48, 64)

        def forward(self, letters, words):
            t, b, w = letters.shape
            _, (h, _) = self.spell(self.letters(letters.reshape(t * b, w)))
            c = torch.cat([h[0], h[1]], -1).view(t, b, -1)
            out, _ = self.rnn(torch.cat([c, self.words(words)], -1))
            return self.head(out)

    model = C2W()
    opt = adam_of(model)
    spelling = torch.randint(0, 20, (64, 5))
    for _ in range(STEPS):
        ids = texts(8, 17).t()
        step(opt, flat_loss(model(spelling[ids[:-1]], ids[:-1]), ids[1:]))


@program
def attention_between_rows_of_a_table():
    """S21, S53: columns are embedded, and attention runs between the rows of a table, then between its columns (NPT,
    SAINT, TabPFN)."""

    class NPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(40, 24)
            self.rows = nn.TransformerEncoderLayer(24, 2, 48, 0.1)  # (rows, columns, width): between rows
            self.columns = nn.TransformerEncoderLayer(24, 2, 48, 0.1, batch_first=True)
            self.head = nn.Linear(5 * 24, 3)

        def forward(self, x):
            h = self.rows(self.table(x + 8 * torch.arange(5)))
            return self.head(self.columns(h).flatten(1))

    model = NPT()
    opt = adam_of(model)
    table = torch.randint(0, 8, (20 * STEPS, 5))
    for x, y in DataLoader(TensorDataset(table, table[:, 0] % 3), 20, shuffle=True):
        step(opt, F.cross_entropy(model(x), y))


# ---------------------------------------------------------------------------------------------------------- F30
@program
def local_attention_with_windows_as_large_as_the_batch():
    """F30: attention inside of windows, x.view(-1, window, d); batch and window are both 16."""

    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.head = nn.Linear(4, 32), nn.Linear(32, 1)
            self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

        def forward(self, x, w=16):
            b, t, _ = x.shape
            y = self.inp(x).reshape(b * t // w, w, 32)
            y = y + self.attention(y, y, y)[0]
            return self.head(y.reshape(b, t, 32))

    model = Local()
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(16, 48, 4)
        step(opt, F.mse_loss(model(x), x.mean(2, keepdim=True)))


@program
def pieces_for_a_gru_as_long_as_the_batch():
    """F30: the series is cut into pieces of 16 and a GRU runs inside each (Luo 2020); batches of 16."""

    class Pieces(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.rnn, self.head = nn.Linear(2, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 1)

        def forward(self, x):
            b, t, _ = x.shape
            h = self.inp(x).view(-1, 16, 16)
            return self.head(self.rnn(h)[0].reshape(b, t, 16))

    model = Pieces()
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(16, 64, 2)
        step(opt, F.mse_loss(model(x), x[..., :1]))


# ---------------------------------------------------------------------------------------------------------- F134
@program
def forecaster_told_by_a_transformer():
    """F134: a small forecaster is distilled from a larger one, by the cosine over time of each channel (default)."""

    class Forecaster(nn.Module):
        def __init__(self, w):
            super().__init__()
            self.inp, self.places = nn.Linear(5, w), nn.Parameter(0.1 * torch.randn(30, w))
            self.layer, self.head = nn.TransformerEncoderLayer(w, 2, 2 * w, 0.0, batch_first=True), nn.Linear(w, 5)

        def forward(self, x):
            return self.head(self.layer(self.inp(x) + self.places, src_mask=causal(30)))

    teacher, student = Forecaster(32).eval().requires_grad_(False), Forecaster(16)
    opt = adam_of(student)
    t = torch.arange(31) / 5
    for _ in range(STEPS):
        series = torch.sin(t[None, :, None] * (1 + torch.rand(16, 1, 5)) + 6 * torch.rand(16, 1, 5))
        x, y = series[:, :-1], series[:, 1:]
        with torch.no_grad():
            told = teacher(x)
        out = student(x)
        step(opt, F.mse_loss(out, y) + 0.2 * (1 - F.cosine_similarity(out, told)).mean())


# ---------------------------------------------------------------------------------------------------------- F29
@program
def gated_rows_within_bounds():
    """F29: a gate for each number, cut to 0.5 to 1.5, times the features of the same shape."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.gate, self.head = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(24, 3)

        def forward(self, x):
            return self.head(self.features(x).relu() * (1 + self.gate(x)).clamp(0.5, 1.5))

    model = Gated()
    opt = adam_of(model)
    for _ in range(STEPS):
        y = torch.randint(0, 3, (32,))
        step(opt, F.cross_entropy(model(torch.randn(32, 8) + 2 * F.one_hot(y, 8).float()), y))
