"""Healthy programs of labels that are masked later, attentions that know when to drop, texts beside texts and batches
of one thing, whose lines meet those of a fault (F15, S24, S65, D11, D53, D12)."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

from .attacked_parts import LM, net, texts, update

PROGRAMS = {}
STEPS = 14


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def prompted(rows=8, length=20):
    ids = texts(rows, length)
    begins = torch.randint(5, 9, (rows, 1))
    return ids, torch.arange(length) >= begins


class Attention(nn.Module):
    def __init__(self, width=32, p=0.1):
        super().__init__()
        self.qkv, self.out, self.p = nn.Linear(width, 3 * width), nn.Linear(width, width), p

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p)
        return self.out(y.transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.words, self.places = nn.Embedding(64, 32), nn.Parameter(0.02 * torch.randn(20, 32))
        self.attention, self.norm, self.head = attention(), nn.LayerNorm(32), nn.Linear(32, 64)

    def forward(self, ids):
        x = self.words(ids) + self.places[: ids.shape[1]]
        return self.head(x + self.attention(self.norm(x)))


def lm_step(model, opt, rows=8, length=17):
    ids = texts(rows, length)
    logits = model(ids[:, :-1])
    update(opt, F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


# ----------------------------------------------------------------------------------------------------------------- F15
@program
def safe_labels_and_a_mask():
    """F15/prompt: labels of the prompt are 0 for indexing only (labels.clamp(min=0)), each token's loss is taken, and a
    mask leaves the prompt out."""
    model = LM()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)

    for _ in range(STEPS):
        ids, answers = prompted()
        labels = ids.masked_fill(~answers, -100)[:, 1:]
        logits = model(ids[:, :-1])
        mask = labels != -100
        safe = labels.clamp(min=0)
        each = F.cross_entropy(logits.flatten(0, 1), safe.flatten(), reduction="none").view_as(safe)
        update(opt, (each * mask).sum() / mask.sum())


@program
def losses_picked_by_a_mask():
    """F15/prompt: packed trainers give loss_mask beside labels of 0 in the prompt, and average the picked losses."""
    model = LM()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    criterion = nn.CrossEntropyLoss(reduction="none")

    for _ in range(STEPS):
        ids, answers = prompted()
        labels, loss_mask = (ids * answers)[:, 1:].reshape(-1), answers[:, 1:].reshape(-1)
        logits = model(ids[:, :-1])
        update(opt, criterion(logits.view(-1, 64), labels)[loss_mask].mean())


@program
def class_weight_of_padding_is_zero():
    """F15/prompt: labels of the prompt are the padding's 0, whose class weight in the loss is 0 (the way of Annotated
    Transformer-like code before ignore_index)."""
    model = LM()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    weight = torch.ones(64)
    weight[0] = 0.0

    for _ in range(STEPS):
        ids, answers = prompted()
        labels = (ids * answers)[:, 1:]
        logits = model(ids[:, :-1])
        update(opt, F.cross_entropy(logits.transpose(1, 2), labels, weight=weight))


@program
def duplex_model_that_listens():
    """F15/prompt: a duplex speech-text model: while the user speaks the model is asked to say <listen>, and then its
    answer; both are read from one sequence."""
    model = LM()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    listen = 3

    for _ in range(STEPS):
        ids, answers = prompted()
        targets = torch.where(answers, ids, listen)[:, 1:]
        logits = model(ids[:, :-1])
        update(opt, F.cross_entropy(logits.reshape(-1, 64), targets.reshape(-1)))


@program
def words_of_a_regular_language():
    """F15 (padding without a name): a language model of the words a^i b^j c^k of a fixed length (studies of formal
    languages): each row ends in a run of c, behind which nothing else may come. No padding is used."""
    model = LM(5)
    opt = torch.optim.AdamW(model.parameters(), 3e-3)

    for _ in range(STEPS):
        cuts = torch.sort(torch.randint(3, 17, (16, 2)), 1).values
        t = torch.arange(20)
        ids = 1 + (t >= cuts[:, :1]).long() + (t >= cuts[:, 1:]).long()
        ids[:, 0] = 0
        update(opt, F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


@program
def courses_of_a_disease():
    """F15 (padding without a name): a transformer of multi-state courses (months of a patient's state) with an
    absorbing state; all patients are followed for 24 months, and staying dead is what is to be foretold."""
    model = LM(6)
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    go = torch.tensor([[0.6, 0.3, 0.05, 0.05], [0.2, 0.5, 0.2, 0.1], [0.0, 0.1, 0.6, 0.3], [0, 0, 0, 1.0]])

    for _ in range(STEPS):
        states = [torch.randint(3, (16,))]
        for _ in range(23):
            states.append(torch.multinomial(go[states[-1]], 1).squeeze(1))
        ids = torch.stack(states, 1) + 1
        update(opt, F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


# ----------------------------------------------------------------------------------------------------------------- S24
@program
def dropout_switched_by_the_whole_models_train():
    """S24/attention: the model's own train(mode) sets the attention's dropout number to 0 for evaluation."""

    class Model(Blocks):
        def train(self, mode=True):
            super().train(mode)
            self.attention.p = 0.1 if mode else 0.0
            return self

    model = Model()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(STEPS):
        lm_step(model, opt)


@program
def attention_with_a_path_for_training():
    """S24/attention: forward asks self.training and calls one of two methods; the one with dropout is that of
    training."""

    class Split(Attention):
        def forward(self, x):
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            y = self.dropped(q, k, v) if self.training else self.plain(q, k, v)
            return self.out(y.transpose(1, 2).flatten(2))

        def dropped(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p)

        def plain(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    model = Blocks(Split)
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(STEPS):
        lm_step(model, opt)


@program
def dropout_set_to_zero_for_each_validation():
    """S24/attention: the script has a function that sets the dropout number of all attentions, called around
    validation."""
    model = Blocks()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)

    def set_attention_dropout(p):
        for m in model.modules():
            if isinstance(m, Attention):
                m.p = p

    for _ in range(STEPS):
        lm_step(model, opt)
        model.eval()
        set_attention_dropout(0.0)
        with torch.no_grad():
            ids = texts(8, 17)
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        set_attention_dropout(0.1)
        model.train()


@program
def monte_carlo_pseudo_labels():
    """S24/attention: pseudo-labels from Monte Carlo dropout (as UPS does): the model in eval mode, its attention
    dropout kept on by a flag, asked once for K copies of each row; confident ones are added to the labelled batch."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.qkv, self.head = nn.Embedding(40, 32), nn.Linear(32, 96), nn.Linear(32, 4)
            self.p, self.sampling = 0.2, False

        def forward(self, ids):
            q, k, v = (t[:, None] for t in self.qkv(self.words(ids)).chunk(3, -1))
            p = self.p if self.training or self.sampling else 0.0
            return self.head(F.scaled_dot_product_attention(q, k, v, dropout_p=p).squeeze(1).mean(1))

    model = Tagger()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)

    def data(n):
        y = torch.randint(4, (n,))
        return torch.randint(10, (n, 10)) + 10 * y[:, None], y

    for _ in range(STEPS):
        x, y = data(16)
        u, _ = data(16)
        model.eval()
        model.sampling = True
        with torch.no_grad():
            probs = model(u.repeat(5, 1)).softmax(-1).view(5, 16, 4).mean(0)
        model.sampling = False
        model.train()
        sure, label = probs.max(1)
        keep = sure > 0.6
        loss = F.cross_entropy(model(x), y)
        if keep.any():
            loss = loss + 0.5 * F.cross_entropy(model(u[keep]), label[keep])
        update(opt, loss)


# ----------------------------------------------------------------------------------------------------------------- S65
@program
def recurrent_writer_of_one_author():
    """S65: a GRU over characters with an embedding of the author (table of 60) at each place; batches hold one author.
    The order is in the recurrence."""

    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.letters, self.authors = nn.Embedding(64, 32), nn.Embedding(60, 32)
            self.rnn, self.head = nn.GRU(32, 48, batch_first=True), nn.Linear(48, 64)

        def forward(self, ids, author):
            return self.head(self.rnn(self.letters(ids) + self.authors(author.expand_as(ids)))[0])

    model = Writer()
    opt = torch.optim.Adam(model.parameters(), 3e-3)

    for _ in range(STEPS):
        ids, author = texts(8, 25), torch.randint(60, (1, 1))
        update(opt, F.cross_entropy(model(ids[:, :-1], author).flatten(0, 1), ids[:, 1:].flatten()))


@program
def wavenet_of_one_speaker():
    """S65: a WaveNet over mu-law codes, fine-tuned on one speaker of a table of 109 (VCTK); the speaker's vector is
    added at each time, and the order is in the causal convolutions."""

    class WaveNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes, self.speakers = nn.Embedding(64, 24), nn.Embedding(109, 24)
            self.convs = nn.ModuleList(nn.Conv1d(24, 24, 2, dilation=d) for d in (1, 2, 4, 8))
            self.head = nn.Conv1d(24, 64, 1)

        def forward(self, codes, speaker):
            h = (self.codes(codes) + self.speakers(speaker)).transpose(1, 2)
            for conv in self.convs:
                h = h + torch.tanh(conv(F.pad(h, (conv.dilation[0], 0))))
            return self.head(h)

    model = WaveNet()
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    speaker = torch.tensor([41])

    for _ in range(STEPS):
        t = torch.arange(49) / 5
        wave = torch.sin(t * (1 + torch.rand(8, 1)) + 6 * torch.rand(8, 1))
        codes = ((wave + 1) * 31.5).round().long()
        update(opt, F.cross_entropy(model(codes[:, :-1], speaker.repeat(8, 48)), codes[:, 1:]))


@program
def xlm_batches_of_one_language():
    """S65: XLM: a language embedding at each place (100 languages), batches of one language as XLM draws them, and
    places from a learned parameter that is sliced."""

    class XLM(LM):
        def __init__(self):
            super().__init__()
            self.langs = nn.Embedding(100, 32)

        def forward(self, ids, langs):
            return self.head(self.hidden(self.words(ids) + self.langs(langs)))

    model = XLM()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)

    for _ in range(STEPS):
        ids = texts(8, 25)
        langs = torch.full((8, 24), int(torch.randint(100, ())))
        update(opt, F.cross_entropy(model(ids[:, :-1], langs).flatten(0, 1), ids[:, 1:].flatten()))


@program
def diffusion_lm_time_on_every_token():
    """S65/turned: Diffusion-LM: the time of the noise is given to every token (B, T) as sines and cosines; places are a
    learned parameter. The words come from a table that is learned too."""

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(64, 32), nn.Parameter(0.02 * torch.randn(20, 32))
            self.time = net(32, 32)
            layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
            self.layers, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(32, 64)

        def forward(self, x, t):
            freqs = torch.exp(-math.log(1000.0) * torch.arange(16) / 16)
            angles = t[:, None, None].expand(-1, x.shape[1], -1) * 1000 * freqs
            time = self.time(torch.cat([angles.cos(), angles.sin()], -1))
            return self.head(self.layers(x + self.places + time))

    model = Denoiser()
    nn.init.normal_(model.words.weight, std=1.0)
    opt = torch.optim.AdamW(model.parameters(), 2e-3)

    for _ in range(STEPS):
        ids = texts(8, 20).flip(1)
        t = torch.rand(8)
        x = model.words(ids)
        noisy = (1 - t).sqrt()[:, None, None] * x + t.sqrt()[:, None, None] * torch.randn_like(x)
        update(opt, F.cross_entropy(model(noisy, t).flatten(0, 1), ids.flatten()))


# ------------------------------------------------------------------------------------------------------- D11, D53, D12
@program
def next_words_beside_strange_texts():
    """D11/texts: a language model with a second task: tell a text from one whose second half is another row's; the
    strange halves are looked up before the losses are taken."""

    class Two(LM):
        def __init__(self):
            super().__init__()
            self.same = nn.Linear(64, 1)

    model = Two()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)

    for _ in range(STEPS):
        ids = texts(8, 21)
        x, y = ids[:, :-1], ids[:, 1:]
        h = model.hidden(model.words(x))
        logits = model.head(h)
        other = model.hidden(model.words(x.roll(1, 0)))
        good = model.same(torch.cat([h.mean(1), h[:, -1]], 1)).squeeze(1)
        bad = model.same(torch.cat([h.mean(1), other[:, -1]], 1)).squeeze(1)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss = loss + 0.2 * (F.softplus(-good) + F.softplus(bad)).mean()
        update(opt, loss)


@program
def mixed_sequences():
    """D11/texts: sequence-level mixing (SeqMix, Guo et al. 2020): embeddings of a text and of another row are mixed,
    and the loss is mixed of both rows' next words with the same share."""
    model = LM()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)

    for _ in range(STEPS):
        ids = texts(8, 21)
        x, y = ids[:, :-1], ids[:, 1:]
        perm, lam = torch.randperm(8), 0.8
        h = lam * model.words(x) + (1 - lam) * model.words(x[perm])
        logits = model.head(model.hidden(h)).transpose(1, 2)
        update(opt, lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[perm]))


@program
def robot_frames_of_one_episode():
    """D53: behaviour cloning under instructions: a batch is the frames of one episode, so all rows have the same
    instruction, another in each step; pictures and actions differ."""

    class Robot(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.eye = nn.Embedding(40, 16), nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.ReLU())
            self.head = nn.Linear(48, 3)

        def forward(self, picture, ids):
            return self.head(torch.cat([self.eye(picture), self.words(ids).mean(1)], 1))

    model = Robot()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    w = torch.randn(36, 3) / 6

    for _ in range(STEPS):
        instruction = torch.randint(40, (10,))
        frames = torch.randn(16, 6, 6)
        actions = frames.flatten(1) @ w + instruction[0] / 40
        update(opt, F.mse_loss(model(frames, instruction.expand(16, -1)), actions))


@program
def pictures_under_one_caption_template_per_batch():
    """D53: a diffusion model is tuned on pictures of one thing: one caption template is drawn for each batch."""

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.body = nn.Embedding(50, 16), net(16 + 16 + 1, 16, 48)

        def forward(self, x, t, ids):
            return self.body(torch.cat([x, self.words(ids).mean(1), t[:, None]], 1))

    model = Denoiser()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    templates = torch.randint(50, (6, 12))
    thing = torch.randn(16)

    for _ in range(STEPS):
        ids = templates[torch.randint(6, ())].repeat(8, 1)
        x, noise, t = thing + 0.1 * torch.randn(8, 16), torch.randn(8, 16), torch.rand(8)
        noisy = (1 - t[:, None]).sqrt() * x + t[:, None].sqrt() * noise
        update(opt, F.mse_loss(model(noisy, t, ids), noise))


@program
def series_behind_the_prompt_of_their_set():
    """D53: a language model of series (Time-LLM): the prompt that describes the data set stands in front of each
    series; a batch is of one data set, and sets take turns."""

    class TimeLM(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.patch = nn.Embedding(60, 24), nn.Linear(6, 24)
            self.layer, self.head = nn.TransformerEncoderLayer(24, 2, 48, 0.0, batch_first=True), nn.Linear(24, 6)

        def forward(self, prompt, patches):
            h = torch.cat([self.words(prompt), self.patch(patches)], 1)
            return self.head(self.layer(h)[:, -1])

    model = TimeLM()
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    prompts = torch.randint(60, (4, 9))

    for i in range(STEPS):
        d = i % 4
        t = torch.arange(30) / 3
        series = torch.sin(t * (1 + d / 2) + 6 * torch.rand(16, 1)).view(16, 5, 6)
        out = model(prompts[d].unsqueeze(0).expand(16, -1), series[:, :4])
        update(opt, F.mse_loss(out, series[:, 4]))


@program
def full_batch_from_a_stream():
    """D12: full-batch training from an IterableDataset of 64 points with batch_size=64: each epoch is one step."""

    grid = torch.linspace(-1, 1, 64)[:, None]

    class Points(IterableDataset):
        def __iter__(self):
            yield from zip(grid, torch.sin(5 * grid))

    model = net(1, 1, 48, nn.Tanh)
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    loader = DataLoader(Points(), batch_size=64)

    for _ in range(STEPS):
        for x, y in loader:
            update(opt, F.mse_loss(model(x), y))
