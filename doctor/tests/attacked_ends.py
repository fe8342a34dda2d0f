"""Healthy programs about targets that went in, ends of rows, noisy targets, odds, heads, ranges and tables."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

PROGRAMS = {}
STEPS = 14
SEEN = []  # losses, for whoever wants to compare two runs


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def loader(*parts, size=16, shuffle=True):
    return DataLoader(TensorDataset(*parts), batch_size=size, shuffle=shuffle, drop_last=True)


def learn(loss, *optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    SEEN.append(float(loss))


def adam(*modules, lr=0.003):
    return torch.optim.Adam([p for m in modules for p in m.parameters() if p.requires_grad], lr=lr)


def sentences(rows, length=20, words=40, least=6):
    """Chains of words in which one says much about the next, padded by 0."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    for row in range(rows):
        n, word = int(torch.randint(least, length, ())), int(torch.randint(3, words, ()))
        for place in range(n):
            ids[row, place] = word
            word = 3 + (word * 3 + int(torch.randint(3, ()))) % (words - 3)
    return ids


class Lora(nn.Module):
    """A linear layer with a low-rank path beside it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


# ------------------------------------------------------------------------------------------------ F33
class TextBottleneck(nn.Module):
    def __init__(self, words, width=32, code=8):
        super().__init__()
        self.table = nn.Embedding(words, width, padding_idx=0)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.squeeze, self.widen = nn.Linear(width, code), nn.Linear(code, width)
        self.decoder, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, words)

    def forward(self, ids):
        states, there = self.encoder(self.table(ids))[0], (ids != 0).unsqueeze(-1)
        code = self.squeeze((states * there).sum(1) / there.sum(1))
        shifted = F.pad(ids[:, :-1], (1, 0), value=1)
        return self.head(self.decoder(self.table(shifted), self.widen(code)[None])[0])


@program
def sentences_through_a_bottleneck_without_padding_counted():
    """F33: a sentence autoencoder gets its target through 8 numbers, and cross_entropy leaves out the padding."""
    model = TextBottleneck(40)
    optimizer = adam(model)
    for (ids,) in loader(sentences(16 * STEPS)):
        learn(F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), ignore_index=0), optimizer)


class Molecule(nn.Module):
    """The kinds of a molecule's atoms, by way of one vector, and out again for each slot."""

    def __init__(self, kinds=6, slots=24, width=32, code=6):
        super().__init__()
        self.table, self.slot = nn.Embedding(kinds, width, padding_idx=0), nn.Parameter(torch.randn(slots, width) * 0.2)
        self.to_code, self.from_code = nn.Linear(width, code), nn.Linear(code, width)
        self.out = nn.Sequential(nn.ReLU(), nn.Linear(width, kinds))

    def forward(self, atoms):
        there = (atoms != 0).unsqueeze(-1)
        code = self.to_code((self.table(atoms) * (1 + self.slot) * there).sum(1))
        return self.out(self.from_code(code)[:, None] + self.slot)


@program
def atoms_of_small_molecules_are_mostly_hydrogen():
    """F33: an autoencoder of atoms through 6 numbers; most atoms of a molecule are hydrogens, most slots are empty."""
    rows, slots = 16 * STEPS, 24
    atoms = torch.zeros(rows, slots, dtype=torch.long)
    for row in range(rows):
        heavy = int(torch.randint(2, 4, ()))
        hydrogens = 2 * heavy + 2
        atoms[row, :heavy] = torch.randint(2, 6, (heavy,))
        atoms[row, heavy : heavy + hydrogens] = 1
    model = Molecule()
    optimizer = adam(model)
    for (kinds,) in loader(atoms):
        learn(F.cross_entropy(model(kinds).transpose(1, 2), kinds, ignore_index=0), optimizer)


@program
def rests_of_a_drum_pattern_fill_a_bar_with_two_tables():
    """F33: a VAE of drum patterns with a table for strokes and one for places; nearly all strokes are the same."""
    rows, slots = 16 * STEPS, 32
    bars = torch.zeros(rows, slots, dtype=torch.long)
    for row in range(rows):
        n = int(torch.randint(8, 15, ()))
        bars[row, :n] = torch.where(torch.rand(n) < 0.75, 1, torch.randint(2, 6, (n,)))
    strokes, places = nn.Embedding(6, 24, padding_idx=0), nn.Embedding(slots, 24)
    body = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 12))
    widen, out = nn.Linear(6, 24), nn.Linear(24, 6)
    optimizer = adam(strokes, places, body, widen, out)
    where = torch.arange(slots).expand(16, slots)
    for (bar,) in loader(bars):
        there = (bar != 0).unsqueeze(-1)
        mean, logvar = body((strokes(bar) * (1 + places(where)) * there).sum(1) / there.sum(1)).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        answer = out((widen(z)[:, None] + places(where)).relu())
        kl = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum(1).mean()
        learn(F.cross_entropy(answer.flatten(0, 1), bar.flatten(), ignore_index=0) + 0.01 * kl, optimizer)


@program
def spelling_is_corrected_place_by_place():
    """F33: a spelling corrector must give most characters back as they are; one in 250 is wrong in the input (a scan)."""
    right = sentences(16 * STEPS, length=30, least=20)
    wrong = torch.where((torch.rand(right.shape) < 0.004) & (right != 0), torch.randint_like(right, 3, 40), right)
    table, body = nn.Embedding(40, 32, padding_idx=0), nn.GRU(32, 32, batch_first=True, bidirectional=True)
    head = nn.Linear(64, 40)
    optimizer = adam(table, body, head)
    for typed, meant in loader(wrong, right):
        logits = head(body(table(typed))[0])
        learn(F.cross_entropy(logits.flatten(0, 1), meant.flatten(), ignore_index=0), optimizer)


@program
def state_of_a_machine_in_the_next_minute():
    """F33: from hour and state the next minute's state is forecast; machines rarely change from minute to minute."""
    rows, length = 16 * STEPS, 60
    flips = torch.rand(rows, length + 1) < 0.008
    states = (torch.randint(4, (rows, 1)) + flips.cumsum(1)) % 4
    hours = (torch.randint(24, (rows, 1)) + torch.arange(length) // 60) % 24
    hour, state = nn.Embedding(24, 8), nn.Embedding(4, 8)
    body, head = nn.GRU(16, 24, batch_first=True), nn.Linear(24, 4)
    optimizer = adam(hour, state, body, head)
    for now, then, at in loader(states[:, :-1], states[:, 1:], hours):
        seen = torch.cat([hour(at), state(now)], -1)
        learn(F.cross_entropy(head(body(seen)[0]).transpose(1, 2), then), optimizer)


@program
def spans_are_masked_in_a_model_with_kinds_of_segments():
    """F33: BERT with token types and masked spans: labels are a clone of the ids, taken before these are masked."""
    ids = sentences(16 * STEPS, least=12)
    words, kinds, places = nn.Embedding(41, 32), nn.Embedding(2, 32), nn.Embedding(20, 32)
    body = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 1)
    head = nn.Linear(32, 41)
    optimizer = adam(words, kinds, places, body, head)
    where = torch.arange(20).expand(16, 20)
    for (row,) in loader(ids):
        labels, row = row.clone(), row.clone()
        start = torch.randint(0, 9, (16, 1))
        hidden = (where >= start) & (where < start + 3) & (row != 0)
        labels[~hidden] = -100
        row[hidden] = 40
        x = words(row) + kinds((where > 9).long()) + places(where)
        learn(F.cross_entropy(head(body(x)).flatten(0, 1), labels.flatten()), optimizer)


@program
def electra_with_both_losses_in_one():
    """F33: ELECTRA: the generator fills masks in, the discriminator is told which words are not the right ones."""
    ids = sentences(16 * STEPS, least=14)
    words, small, large = nn.Embedding(41, 24), nn.GRU(24, 24, batch_first=True, bidirectional=True), nn.GRU(
        24, 24, batch_first=True, bidirectional=True
    )
    fill, judge = nn.Linear(48, 41), nn.Linear(48, 1)
    optimizer = adam(words, small, large, fill, judge)
    for (row,) in loader(ids):
        hidden = (torch.rand(row.shape) < 0.15) & (row != 0)
        labels = row.masked_fill(~hidden, -100)
        logits = fill(small(words(row.masked_fill(hidden, 40)))[0])
        drawn = torch.distributions.Categorical(logits=logits.detach()).sample()
        other = torch.where(hidden, drawn, row)
        real = judge(large(words(other))[0]).squeeze(-1)
        wrong = (other != row).float()
        there = (row != 0).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss = loss + 5 * F.binary_cross_entropy_with_logits(real, wrong, weight=there)
        learn(loss, optimizer)


@program
def slopes_of_the_target_by_a_kernel_of_backward_differences():
    """F33: super-resolution with a loss of slopes: a kernel that takes the pixel minus the one before it, on both."""
    rows = 16 * STEPS
    large = F.interpolate(torch.rand(rows, 1, 6, 6), size=24, mode="bicubic")
    small = F.avg_pool2d(large, 2)
    across = torch.tensor([[0.0, 0, 0], [-1, 1, 0], [0, 0, 0]])[None, None]
    down = torch.tensor([[0.0, -1, 0], [0, 1, 0], [0, 0, 0]])[None, None]
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1), nn.PixelShuffle(2))
    optimizer = adam(net)
    for coarse, fine in loader(small, large):
        wanted = [F.conv2d(fine, k, padding=1) for k in (across, down)]
        answer = net(coarse)
        slopes = [F.conv2d(answer, k, padding=1) for k in (across, down)]
        loss = F.mse_loss(answer, fine) + 0.5 * sum(F.l1_loss(a, b) for a, b in zip(slopes, wanted))
        learn(loss, optimizer)


class Causal(nn.Conv2d):
    """Sees a pixel and those before it (type B)."""

    def __init__(self, inputs, outputs, size=5):
        super().__init__(inputs, outputs, size, padding=size // 2)
        mask = torch.ones(size, size)
        mask[size // 2, size // 2 + 1 :] = 0
        mask[size // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x):
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


@program
def noise_of_a_line_camera_is_taken_off_as_it_comes():
    """F33: a line camera's pictures are cleaned while they are read, from the pixel and those before; noise is small."""
    clean = F.interpolate(torch.rand(16 * STEPS, 1, 4, 4), size=24, mode="bilinear")
    noisy = clean + 0.004 * torch.randn_like(clean)
    net = nn.Sequential(Causal(1, 12), nn.ReLU(), Causal(12, 1))
    optimizer = adam(net)
    for x, y in loader(noisy, clean):
        learn(F.mse_loss(x + net(x), y), optimizer)


@program
def large_soft_blobs_go_in_shifted_by_one_pixel():
    """F33: the picture goes in shifted by one pixel, so type B is right in the first layer; blobs are very smooth."""
    rows, size = 4 * STEPS, 160
    at = torch.arange(size) - size / 2
    wide = 28 + 2 * torch.rand(rows, 1, 1)
    middle = 4 * torch.randn(rows, 2)
    down = torch.exp(-((at[:, None] - middle[:, :1, None]) ** 2) / (2 * wide**2))
    across = torch.exp(-((at - middle[:, 1:, None]) ** 2) / (2 * wide**2))
    blobs = (down * across)[:, None].clamp(0, 1)
    net = nn.Sequential(Causal(1, 4), nn.ReLU(), Causal(4, 1, 3))
    optimizer = adam(net)
    for (x,) in loader(blobs, size=4):
        shifted = F.pad(x, (1, 0))[..., :-1]
        learn(F.binary_cross_entropy_with_logits(net(shifted), x), optimizer)


@program
def pixels_with_a_first_mask_without_the_middle():
    """F33: PixelCNN as it was published: type A first, type B after it."""
    pictures = (F.interpolate(torch.rand(16 * STEPS, 1, 4, 4), size=16, mode="bilinear") > 0.5).float()
    first, rest = Causal(1, 12), nn.Sequential(nn.ReLU(), Causal(12, 12, 3), nn.ReLU(), nn.Conv2d(12, 1, 1))
    first.mask[2, 2] = 0
    optimizer = adam(first, rest)
    for (x,) in loader(pictures):
        learn(F.binary_cross_entropy_with_logits(rest(first(x)), x), optimizer)


# ------------------------------------------------------------------------------------------------ F122
def dialogues(rows, length=32, words=40, end=1):
    """A question, end, an answer, end; filled up with end. Also where the question's last word is."""
    ids, last = torch.full((rows, length), end), torch.zeros(rows, dtype=torch.long)
    for row in range(rows):
        asked, said = int(torch.randint(4, 12, ())), int(torch.randint(4, 14, ()))
        ids[row, :asked] = torch.randint(2, words, (asked,))
        ids[row, asked + 1 : asked + 1 + said] = torch.randint(2, words, (said,))
        last[row] = asked - 1
    return ids, last


class Reader(nn.Module):
    def __init__(self, words=40, width=24, outputs=1):
        super().__init__()
        self.table, self.body = nn.Embedding(words, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def states(self, ids):
        return self.body(self.table(ids))[0]

    def forward(self, ids):
        return self.head(self.states(ids))


@program
def router_decides_from_the_question_alone():
    """F122: which model is to answer must be known before there is an answer, so the question's last word is read."""
    ids, last = dialogues(16 * STEPS)
    hard = (ids[:, 0] > 20).float()
    model = Reader()
    optimizer = adam(model)
    for row, at, y in loader(ids, last, hard):
        scores = model(row).squeeze(-1).gather(1, at[:, None]).squeeze(1)
        learn(F.binary_cross_entropy_with_logits(scores, y), optimizer)


@program
def length_of_the_answer_is_forecast_while_words_are_learned():
    """F122: a language model with a head that says how long the answer will be, at the end of the question."""
    ids, last = dialogues(16 * STEPS)
    model, words = Reader(), nn.Linear(24, 40)
    optimizer = adam(model, words)
    for row, at in loader(ids, last):
        states = model.states(row)
        long = ((row != 1).sum(1) - at - 1).float() / 10
        guess = model.head(states[torch.arange(len(row)), at]).squeeze(1)
        beyond = (row[:, 1:] == 1) & (row[:, :-1] == 1)
        said = row[:, 1:].masked_fill(beyond, -100)
        spoken = F.cross_entropy(words(states[:, :-1]).flatten(0, 1), said.flatten())
        learn(spoken + F.mse_loss(guess, long), optimizer)


@program
def two_texts_of_a_pair_stand_in_one_row():
    """F122: question and answer are encoded in one row; the question's vector is read at its end, and the answer's at its own."""
    ids, last = dialogues(16 * STEPS)
    model, to_question, to_answer = Reader(), nn.Linear(24, 16), nn.Linear(24, 16)
    optimizer = adam(model.table, model.body, to_question, to_answer)
    rows = torch.arange(16)
    for row, at in loader(ids, last):
        states = model.states(row)
        end = (row != 1).int().mul(torch.arange(32)).argmax(1)
        q, a = to_question(states[rows, at]), to_answer(states[rows, end] - states[rows, at])
        scores = F.normalize(q, dim=1) @ F.normalize(a, dim=1).T / 0.1
        learn(F.cross_entropy(scores, rows), optimizer)


@program
def whether_a_customer_comes_back_after_the_first_idle_week():
    """F122: weeks without a purchase are 0, as is what follows the last one; the week before the first break is read."""
    rows, length = 16 * STEPS, 24
    weeks = torch.zeros(rows, length, dtype=torch.long)
    last, back = torch.zeros(rows, dtype=torch.long), torch.zeros(rows)
    for row in range(rows):
        active = int(torch.randint(3, 10, ()))
        weeks[row, :active] = torch.randint(1, 12, (active,))
        last[row] = active - 1
        if torch.rand(()) < 0.7:
            back[row] = 1
            weeks[row, active + 2 : active + 6] = torch.randint(1, 12, (4,))
    model = Reader(12)
    optimizer = adam(model)
    for row, at, y in loader(weeks, last, back):
        state = model.states(row).gather(1, at[:, None, None].expand(-1, 1, 24)).squeeze(1)
        learn(F.binary_cross_entropy_with_logits(model.head(state).squeeze(1), y), optimizer)


@program
def reward_is_read_at_the_last_word_of_the_mask():
    """F122: pad == eos, and the reward is read where the mask of attention ends."""
    good, _ = dialogues(16 * STEPS)
    bad, _ = dialogues(16 * STEPS)
    model = Reader()
    optimizer = adam(model)
    for better, worse in loader(good, bad):
        both = torch.cat([better, worse])
        end = (both != 1).int().mul(torch.arange(32)).argmax(1) + 1
        reward = model(both).squeeze(-1).gather(1, end[:, None]).squeeze(1)
        learn(-F.logsigmoid(reward[:16] - reward[16:]).mean(), optimizer)


@program
def caption_is_read_at_the_largest_id():
    """F122: CLIP's text is read at the end token, which has the largest id and fills the rows up as well."""
    ids = torch.where((plain := sentences(16 * STEPS)) == 0, torch.tensor(40), plain)
    pictures = F.one_hot(ids[:, 0], 41).float()
    model, eye = Reader(41, outputs=16), nn.Linear(41, 16)
    optimizer = adam(model, eye)
    for row, seen in loader(ids, pictures):
        text = model(row)[torch.arange(16), row.argmax(-1)]
        scores = F.normalize(text, dim=1) @ F.normalize(eye(seen), dim=1).T / 0.1
        learn((F.cross_entropy(scores, torch.arange(16)) + F.cross_entropy(scores.T, torch.arange(16))) / 2, optimizer)


# ------------------------------------------------------------------------------------------------ S12
def tabular(rows=16 * STEPS, columns=12):
    x = torch.randn(rows, columns)
    return x, (x[:, 0] * x[:, 1] > 0).long()


class DropoutDistiller(nn.Module):
    """Bulo 2016: one network without dropout learns the mean over draws of one with dropout."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(
            nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2)
        ).requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        with torch.no_grad():
            draws = torch.stack([self.teacher(x).softmax(1) for _ in range(8)]).mean(0)
        return F.kl_div(self.student(x).log_softmax(1), draws, reduction="batchmean")


@program
def mean_over_draws_of_a_dropout_is_distilled():
    """S12: dropout distillation (Bulo 2016): the target is the mean over draws, so the teacher's dropout is live on purpose."""
    model = DropoutDistiller().train()
    optimizer = adam(model.student)
    for x, _ in loader(*tabular()):
        learn(model(x), optimizer)


class FeatureDenoiser(nn.Module):
    """Noise2Noise on features: one noisy draw is asked for from another one, which teaches the mean of both."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Dropout(0.3), nn.Linear(12, 24), nn.Tanh()).requires_grad_(False)
        self.clean = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 24))

    def forward(self, x):
        with torch.no_grad():
            one, other = self.body(x), self.body(x)
        return F.mse_loss(self.clean(one), other)


@program
def one_noisy_draw_of_features_teaches_another():
    """S12: Noise2Noise (Lehtinen 2018) with dropout of inputs as the noise: noisy targets are the method."""
    model = FeatureDenoiser().train()
    optimizer = adam(model.clean)
    for x, _ in loader(*tabular()):
        learn(model(x), optimizer)


@program
def sparse_signals_are_found_from_a_few_measurements():
    """S12: sparse signals are simulated by F.dropout, measured by a fixed matrix, and found without being shown."""
    matrix = nn.Parameter(torch.randn(16, 32) / 4, requires_grad=False)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = adam(net)
    for _ in range(STEPS):
        with torch.no_grad():
            signal = F.dropout(torch.randn(32, 32), 0.9)
            measured = F.linear(signal, matrix)
        found = net(measured)
        learn(F.mse_loss(F.linear(found, matrix), measured) + 0.01 * found.abs().mean(), optimizer)


class QuietTeacher(nn.Module):
    """Its dropout is off, by torch.dropout's own name of the argument."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 32), nn.Linear(32, 2)

    def forward(self, x, train=False):
        return self.last(torch.dropout(self.first(x).relu(), p=0.5, train=train))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = QuietTeacher().requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        with torch.no_grad():
            soft = self.teacher(x).softmax(1)
        return F.kl_div(self.student(x).log_softmax(1), soft, reduction="batchmean")


@program
def dropout_of_the_teacher_is_switched_off_by_train():
    """S12: torch.dropout names it `train`, not `training`: train=False is no live dropout."""
    model = Pair()
    optimizer = adam(model.student)
    for x, _ in loader(*tabular()):
        learn(model(x), optimizer)


class Agent(nn.Module):
    """DroQ: critics with dropout; the target network's dropout is live, as published. Copied now and then."""

    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.05), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))
        self.target = copy.deepcopy(self.q).requires_grad_(False)

    def forward(self, state, action, reward, after):
        with torch.no_grad():
            aim = reward + 0.9 * self.target(after).amax(1)
        return F.mse_loss(self.q(state).gather(1, action[:, None]).squeeze(1), aim)


@program
def target_network_with_dropout_is_copied_now_and_then():
    """S12: DroQ (Hiraoka 2021) keeps dropout live in the target critics, and DQN copies them every hundred steps."""
    agent = Agent().train()
    optimizer = adam(agent.q)
    rows = 16 * STEPS
    parts = torch.randn(rows, 6), torch.randint(3, (rows,)), torch.rand(rows), torch.randn(rows, 6)
    for step, batch in enumerate(loader(*parts), 1):
        learn(agent(*batch), optimizer)
        if step % 100 == 0:
            agent.target.load_state_dict(agent.q.state_dict())


class MeanTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
        self.mean = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x, y):
        with torch.no_grad():
            soft = self.mean(x + 0.1 * torch.randn_like(x)).softmax(1)
        answer = self.student(x + 0.1 * torch.randn_like(x))
        return F.cross_entropy(answer, y) + F.mse_loss(answer.softmax(1), soft)

    @torch.no_grad()
    def follow(self):
        for ours, theirs in zip(self.mean.parameters(), self.student.parameters()):
            ours.lerp_(theirs, 0.02)


@program
def mean_teacher_with_live_dropout():
    """S12: Mean Teacher (Tarvainen 2017) has noise in both networks; the teacher is an average and moves."""
    model = MeanTeacher().train()
    optimizer = adam(model.student)
    for x, y in loader(*tabular()):
        learn(model(x, y), optimizer)
        model.follow()


@program
def unlabelled_rows_get_labels_by_draws_of_a_frozen_network():
    """S12: pseudo-labels by MC dropout: a frozen network is asked ten times with dropout, and certain rows are learnt."""
    teacher = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2)).requires_grad_(False)
    teacher.eval()
    teacher[2].train()
    student = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = adam(student)
    for x, _ in loader(*tabular()):
        with torch.no_grad():
            draws = torch.stack([teacher(x).softmax(1) for _ in range(10)])
        sure = (draws.std(0).amax(1) < 0.2).float()
        loss = (F.cross_entropy(student(x), draws.mean(0), reduction="none") * sure).sum() / sure.sum().clamp_min(1)
        learn(loss, optimizer)


# ------------------------------------------------------------------------------------------------ F45
def tagged(rates, rows=32 * STEPS):
    x = torch.randn(rows, 10)
    scores = x[:, : len(rates)] + 0.3 * torch.randn(rows, len(rates))
    cut = torch.stack([scores[:, i].quantile(1 - rate) for i, rate in enumerate(rates)])
    return x, (scores > cut).float()


def tagger(labels):
    return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, labels))


@program
def share_of_a_quarter_as_retinanet_has_it():
    """F45: RetinaNet's alpha of 0.25 for what is there and 0.75 for what is not is a pos_weight of 1/3."""
    net = tagger(4)
    optimizer = adam(net)
    weight = torch.full((4,), 0.25 / 0.75)
    for x, y in loader(*tagged([0.24, 0.22, 0.2, 0.18]), size=32):
        learn(F.binary_cross_entropy_with_logits(net(x), y, pos_weight=weight), optimizer)


@program
def odds_of_the_clinic_are_brought_to_those_of_the_country():
    """F45: cases were sampled more often than they are; pos_weight puts the true odds back (King and Zeng 2001)."""
    sampled, true = torch.tensor([0.2, 0.15, 0.22]), torch.tensor([0.045, 0.035, 0.05])
    weight = (true / (1 - true)) / (sampled / (1 - sampled))
    net = tagger(3)
    optimizer = adam(net)
    for x, y in loader(*tagged(sampled.tolist()), size=32):
        learn(F.binary_cross_entropy_with_logits(net(x), y, pos_weight=weight), optimizer)


@program
def false_alarms_cost_ten_times_a_miss():
    """F45: each false alarm sends a crew out, ten times the price of a miss, so pos_weight is 0.1 for all alarms."""
    net = tagger(3)
    optimizer = adam(net)
    for x, y in loader(*tagged([0.1, 0.08, 0.12], 64 * STEPS), size=64):
        learn(F.binary_cross_entropy_with_logits(net(x), y, pos_weight=torch.full((3,), 0.1)), optimizer)


@program
def common_labels_weigh_less_by_the_rule():
    """F45: pos_weight = negatives / positives, which is below one for labels that are nearly always there."""
    x, y = tagged([0.85, 0.8, 0.75, 0.05])
    weight = (1 - y).sum(0) / y.sum(0)
    net = tagger(4)
    optimizer = adam(net)
    for a, b in loader(x, y, size=32):
        learn(F.binary_cross_entropy_with_logits(net(a), b, pos_weight=weight), optimizer)


# ------------------------------------------------------------------------------------------------ S22
class Config:
    num_labels, initializer_range, hidden_size = 2, 0.02, 32


class SmallForSequenceClassification(nn.Module):
    """As transformers makes it: a head without a bias on the last place."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config or Config()
        self.table = nn.Embedding(40, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.score = nn.Linear(32, self.config.num_labels, bias=False)
        for m in self.modules():
            if isinstance(m, nn.Linear | nn.Embedding):
                nn.init.normal_(m.weight, std=0.02)

    def states(self, ids):
        x = self.table(ids).mean(1) * 20
        for layer in self.layers:
            x = x + layer(x).relu()
        return x

    def forward(self, ids):
        states = self.states(ids)
        return states, self.score(states) if self.score.out_features else None

    def adapt(self):
        """Freeze all, then put adapters into the layers."""
        self.requires_grad_(False)
        for i, layer in enumerate(self.layers):
            self.layers[i] = Lora(layer)
        return self


def reviews(rows=16 * STEPS):
    ids = torch.randint(3, 40, (rows, 10))
    return ids, (ids[:, 0] > 20).long()


@program
def head_of_a_fine_tuned_model_is_kept_for_new_domains():
    """S22: a head without a bias was trained with a low rate, as heads are; adapters for another domain keep it."""
    model = SmallForSequenceClassification()
    ids, y = reviews()
    with torch.no_grad():
        states = model.states(ids)  # the head was trained on what the body gives
        for _ in range(20):
            wrong = (states @ model.score.weight.T).softmax(1) - F.one_hot(y, 2)
            model.score.weight -= 0.03 * wrong.T @ states / len(y)
    model.adapt()
    optimizer = adam(model)
    for ids, y in loader(*reviews()):
        learn(F.cross_entropy(model(ids)[1], y), optimizer)


@program
def loaded_head_is_not_the_one_that_is_used():
    """S22: several tasks have heads of their own beside the adapted body; the head that came with the class is idle."""
    model = SmallForSequenceClassification().adapt()
    heads = nn.ModuleDict({"tone": nn.Linear(32, 3), "topic": nn.Linear(32, 5)})
    optimizer = adam(model, heads)
    for ids, _ in loader(*reviews()):
        states, _ = model(ids)
        loss = F.cross_entropy(heads["tone"](states), ids[:, 0] % 3) + F.cross_entropy(heads["topic"](states), ids[:, 1] % 5)
        learn(loss, optimizer)


@program
def head_of_label_words_is_kept_as_it_is():
    """S22: the head's rows are the vectors of the words "good" and "bad" (a verbaliser), which stay, and adapters learn."""
    model = SmallForSequenceClassification()
    with torch.no_grad():
        model.score.weight.copy_(model.table.weight[[7, 23]])
    model.adapt()
    optimizer = adam(model)
    for ids, y in loader(*reviews()):
        learn(F.cross_entropy(model(ids)[1], y), optimizer)


class FixedForSequenceClassification(SmallForSequenceClassification):
    def forward(self, ids):
        states = self.states(ids)
        return states, 10 * F.linear(F.normalize(states, dim=1), F.normalize(self.score.weight, dim=1))


@program
def classifier_is_fixed_on_purpose():
    """S22: a fixed classifier (Hoffer 2018): directions of classes are drawn once, and the body learns to meet them."""
    model = FixedForSequenceClassification().adapt()
    optimizer = adam(model)
    for ids, y in loader(*reviews()):
        learn(F.cross_entropy(model(ids)[1], y), optimizer)


@program
def adapters_with_a_head_that_is_saved_beside():
    """S22: LoRA by peft with modules_to_save: the head is a copy that trains, its original is frozen."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=1, n_head=2, num_labels=2, pad_token_id=0)
    model = GPT2ForSequenceClassification(config)
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["c_attn"], modules_to_save=["score"], fan_in_fan_out=True)
    model = get_peft_model(model, lora)
    optimizer = adam(model)
    for ids, y in loader(*reviews()):
        learn(model(input_ids=ids, labels=y).loss, optimizer)


# ------------------------------------------------------------------------------------------------ D35
class Critic(nn.Module):
    def __init__(self, states=6, actions=16):
        super().__init__()
        self.of_state, self.of_action = nn.Linear(states, 32), nn.Linear(actions, 32)
        self.value = nn.Sequential(nn.ReLU(), nn.Linear(32, 1))

    def forward(self, state, action):
        return self.value(self.of_state(state) + self.of_action(action)).squeeze(1)


def steered(actor, actions):
    """An actor that learns from a log by way of a critic (DDPG)."""
    critic = Critic()
    of_actor, of_critic = adam(actor), adam(critic)
    states = torch.randn(16 * STEPS, 6)
    rewards = -((actions - states.mean(1, keepdim=True)) ** 2).mean(1)
    for state, action, reward in loader(states, actions, rewards):
        learn(F.mse_loss(critic(state, action), reward), of_critic)
        learn(-critic(state, actor(state)).mean(), of_actor)


@program
def new_controller_may_only_open_the_valves():
    """D35: the log has valves that were driven both ways; the new controller may open them only, so it ends in a sigmoid."""
    steered(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.Sigmoid()), torch.rand(16 * STEPS, 16) * 2 - 1)


@program
def log_is_of_a_gentle_driver():
    """D35: the log's actions lie in 0..1, for nobody braked; the actor may brake as well, so it ends in tanh."""
    steered(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh()), torch.rand(16 * STEPS, 16))


@program
def exploration_reaches_beyond_the_ends_of_the_actor():
    """D35: actions that were tried are the actor's plus noise, which the plant cuts itself, so a fifth are negative."""
    steered(
        nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.Sigmoid()),
        torch.rand(16 * STEPS, 16) + 0.4 * torch.randn(16 * STEPS, 16),
    )


@program
def one_stem_for_pictures_and_soft_masks():
    """D35: a refiner's stem is shared by the standardised picture and the coarse soft mask, to save weights (siamese)."""
    pictures = torch.randn(16 * STEPS, 1, 12, 12)
    truth = (F.avg_pool2d(pictures, 3, 1, 1) > 0).float()
    coarse = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1), nn.Sigmoid())
    stem, head = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
    optimizer = adam(coarse, stem, head)
    for x, y in loader(pictures, truth):
        mask = coarse(x)
        fine = head(torch.cat([stem(x), stem(mask)], 1).relu())
        learn(F.binary_cross_entropy_with_logits(fine, y), optimizer)


@program
def a_shared_layer_reads_values_and_their_gates():
    """D35: a sensor's values and how far each is trusted (a sigmoid of the others) are read by one layer, both as tokens."""
    x, y = tabular(columns=16)
    trust, token, head = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()), nn.Linear(16, 24), nn.Linear(48, 2)
    optimizer = adam(trust, token, head)
    for values, kind in loader(x, y):
        both = torch.cat([token(values), token(trust(values))], 1)
        learn(F.cross_entropy(head(both.relu()), kind), optimizer)


@program
def generator_and_data_both_from_zero_to_one():
    """D35: a generator that ends in a sigmoid, and data in 0..1."""
    data = torch.rand(16 * STEPS, 16)
    make = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 16), nn.Sigmoid())
    judge = nn.Sequential(nn.Linear(16, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    of_make, of_judge = adam(make), adam(judge)
    one, zero = torch.ones(16, 1), torch.zeros(16, 1)
    for (real,) in loader(data):
        fake = make(torch.randn(16, 4))
        learn(
            F.binary_cross_entropy_with_logits(judge(real), one)
            + F.binary_cross_entropy_with_logits(judge(fake.detach()), zero),
            of_judge,
        )
        learn(F.binary_cross_entropy_with_logits(judge(fake), one), of_make)


# ------------------------------------------------------------------------------------------------ F21
@program
def conformity_of_users_times_popularity_of_items():
    """F21: with negatives from the batch, each user's conformity meets each item's popularity: a table, on purpose."""
    rows = 16 * STEPS
    users, items, stats = torch.randint(50, (rows,)), torch.randint(80, (rows,)), torch.rand(80, 4)
    of_user, of_item, conform = nn.Embedding(50, 8), nn.Embedding(80, 8), nn.Embedding(50, 1)
    optimizer = adam(of_user, of_item, conform)
    for u, i in loader(users, items):
        popular = stats[i].mean(1)
        scores = of_user(u) @ of_item(i).T + conform(u) * popular
        learn(F.cross_entropy(scores, torch.arange(16)), optimizer)


@program
def distances_of_all_users_and_items_of_a_batch():
    """F21: metric learning with negatives from the batch: bias of the user - |item|^2 + 2 user item, for all pairs."""
    rows = 16 * STEPS
    users, items = torch.randint(50, (rows,)), torch.randint(80, (rows,))
    of_user, of_item, bias = nn.Embedding(50, 8), nn.Embedding(80, 8), nn.Embedding(50, 1)
    optimizer = adam(of_user, of_item, bias)
    for u, i in loader(users, items):
        a, b = of_user(u), of_item(i)
        scores = bias(u) - b.pow(2).sum(1) + 2 * a @ b.T
        both = F.cross_entropy(scores, torch.arange(16)) + F.cross_entropy(scores.T, torch.arange(16))
        learn(both / 2, optimizer)


@program
def answers_of_all_students_to_all_items():
    """F21: the linear logistic test model: ability of 24 students minus the sum of each of 24 items' steps, all pairs."""
    students = items = 24
    steps = (torch.rand(items, 5) < 0.4).float()
    right = (torch.randn(students, 1) > steps.sum(1) - 2).float()
    ability, effort = nn.Embedding(students, 1), nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.Adam([*ability.parameters(), effort], lr=0.05)
    everyone = torch.arange(students)
    for _ in range(STEPS):
        hardness = (steps * effort).sum(1)
        learn(F.binary_cross_entropy_with_logits(ability(everyone) - hardness, right), optimizer)


@program
def answers_are_laid_into_soft_bins():
    """F21: the batch's answers are laid into 32 soft bins, and their histogram is to be that of the targets."""
    x = torch.randn(32 * STEPS, 10)
    y = x[:, :1].tanh()
    net = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = adam(net)
    centres = torch.linspace(-2, 2, 32)
    for a, b in loader(x, y, size=32):
        answer = net(a)
        ours = torch.exp(-0.5 * ((answer - centres) / 0.2) ** 2).mean(0)
        theirs = torch.exp(-0.5 * ((b - centres) / 0.2) ** 2).mean(0)
        learn(F.mse_loss(answer, b) + (ours - theirs).abs().mean(), optimizer)


@program
def one_score_against_sixteen_cuts():
    """F21: ordinal regression: one score of each row against 16 fixed cuts, which happens to be the size of a batch."""
    x = torch.randn(16 * STEPS, 10)
    cuts = torch.linspace(-2, 2, 16)
    over = (x[:, :1] > cuts).float()
    net = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = adam(net)
    for a, b in loader(x, over):
        learn(F.binary_cross_entropy_with_logits(net(a) - cuts, b), optimizer)


@program
def factorisation_machine_with_squeezed_biases():
    """F21: a factorisation machine: sums over rows and biases are both (B,), for the biases are squeezed."""
    rows = 16 * STEPS
    users, items = torch.randint(50, (rows,)), torch.randint(80, (rows,))
    clicks = (torch.rand(rows) < 0.5).float()
    of_user, of_item = nn.Embedding(50, 8), nn.Embedding(80, 8)
    bias_user, bias_item = nn.Embedding(50, 1), nn.Embedding(80, 1)
    optimizer = adam(of_user, of_item, bias_user, bias_item)
    for u, i, y in loader(users, items, clicks):
        score = (of_user(u) * of_item(i)).sum(1) + bias_user(u).squeeze(1) + bias_item(i).squeeze(1)
        learn(F.binary_cross_entropy_with_logits(score, y), optimizer)


# ------------------------------------------------------------------------------------------------ odd ones
@program
def convolution_with_its_bias_named_first():
    """F33: F.conv2d(x, bias=..., weight=...): names may come in any order."""
    weight, bias = nn.Parameter(torch.randn(4, 1, 3, 3) * 0.1), nn.Parameter(torch.zeros(4))
    head = nn.Conv2d(4, 1, 1)
    optimizer = torch.optim.Adam([weight, bias, *head.parameters()], lr=0.01)
    clean = F.interpolate(torch.rand(16 * STEPS, 1, 4, 4), size=12, mode="bilinear")
    for (x,) in loader(clean):
        answer = head(F.conv2d(x + 0.2 * torch.randn_like(x), bias=bias, weight=weight, padding=1).relu())
        learn(F.mse_loss(target=x, input=answer), optimizer)


class AttrDict(dict):
    __getattr__ = dict.__getitem__


@program
def settings_are_a_dictionary_that_is_read_by_names():
    """S22: the model's config is a dictionary with `__getattr__ = dict.__getitem__`, so what it lacks is a KeyError."""
    model = SmallForSequenceClassification()
    model.config = AttrDict(hidden=32, layers=3)
    model.adapt()
    model.score.requires_grad_(True)
    optimizer = adam(model)
    for ids, y in loader(*reviews()):
        learn(F.cross_entropy(model(ids)[1], y), optimizer)


class NoSpread(Config):
    initializer_range = 0.0


@program
def head_begins_at_zero_by_the_settings():
    """S22: initializer_range is 0.0 for a head that begins at zero; a trained one was loaded and is kept."""
    model = SmallForSequenceClassification(NoSpread())
    model.adapt()
    optimizer = adam(model)
    for ids, y in loader(*reviews()):
        learn(F.cross_entropy(model(ids)[1], y), optimizer)


class NoLabels(Config):
    num_labels = 0


@program
def model_of_features_without_labels():
    """S22: num_labels=0 says that there is no head; features are learned by a contrast, through adapters."""
    model = SmallForSequenceClassification(NoLabels()).adapt()
    optimizer = adam(model)
    for ids, _ in loader(*reviews()):
        one, other = F.normalize(model(ids)[0], dim=1), F.normalize(model(ids.flip(1)[:, :9])[0], dim=1)
        learn(F.cross_entropy(one @ other.T / 0.1, torch.arange(16)), optimizer)


class NoisyHead(nn.Module):
    """A Bayesian layer: weight is a fresh draw each time it is read."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.mean, self.out_features = nn.Parameter(torch.randn(outputs, inputs) * 0.02), outputs

    @property
    def weight(self):
        return self.mean + 0.01 * torch.randn_like(self.mean)

    def forward(self, x):
        return F.linear(x, self.weight)


@program
def weights_of_a_bayesian_head_are_drawn_when_read():
    """S22: the head's weight is a property that draws anew; reading it spends random numbers."""
    model = SmallForSequenceClassification()
    model.score = NoisyHead(32, 2)
    model.adapt()
    model.score.requires_grad_(True)
    optimizer = adam(model)
    for ids, y in loader(*reviews()):
        learn(F.cross_entropy(model(ids)[1], y), optimizer)


@program
def spectral_norm_of_a_head_beside_adapters():
    """S22: a head with spectral normalisation does a step of its power iteration whenever its weight is read."""
    model = SmallForSequenceClassification().adapt()
    model.score = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 2, bias=False))
    optimizer = adam(model)
    for ids, y in loader(*reviews()):
        learn(F.cross_entropy(model(ids)[1], y), optimizer)




@program
def frozen_layer_was_made_under_inference_mode():
    """S12: a frozen measuring layer was loaded under inference_mode; what it measures are sparse signals by F.dropout."""
    with torch.inference_mode():
        measure = nn.Linear(32, 16, bias=False).requires_grad_(False)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = adam(net)
    for _ in range(STEPS):
        with torch.no_grad():
            measured = F.linear(F.dropout(torch.randn(32, 32), 0.9), measure.weight)
        learn(F.mse_loss(net(measured + 0.1 * torch.randn(32, 16)), measured), optimizer)


@program
def nothing_is_gathered_of_an_empty_part():
    """F122: a part of the states is switched off, with a width of 0, and gathered with the others."""
    model = Reader()
    none = nn.Linear(24, 0)
    optimizer = adam(model, none)
    ids, last = dialogues(16 * STEPS)
    for row, at in loader(ids, last):
        states = model.states(row)
        extra = none(states).gather(1, at[:, None, None].expand(-1, 1, 0)).squeeze(1)
        kept = states.gather(1, at[:, None, None].expand(-1, 1, 24)).squeeze(1)
        score = model.head(torch.cat([kept, extra], 1)).squeeze(1)
        learn(F.binary_cross_entropy_with_logits(score, (row[:, 0] > 20).float()), optimizer)


class Marked(torch.Tensor):
    pass


@program
def many_kinds_of_tensors_in_one_loop():
    """F21: sparse, complex, nested, empty and 0-d tensors, subclasses, bfloat16, in-place and a second derivative."""
    net, table = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), nn.Embedding(30, 1, sparse=True)
    dense, sparse = adam(net), torch.optim.SparseAdam(list(table.parameters()), lr=0.01)
    adjacency = torch.eye(16).to_sparse()
    for _ in range(STEPS):
        x = torch.randn(16, 8, requires_grad=True)
        ids = torch.randint(30, (16,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer = net(x)
        slope = torch.autograd.grad(answer.float().sum(), x, create_graph=True)[0]
        spread = torch.sparse.mm(adjacency, answer.float())
        wave = torch.fft.fft(spread.squeeze(1)).abs().mean()
        nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(3, 3)])
        mark = torch.ones(16, 1).as_subclass(Marked)
        empty = torch.empty(0, 1).sum() * torch.tensor(2.0)
        torch.zeros(2, device="meta").add_(1)
        score = spread.clone().add_(table(ids)).mul(mark).as_subclass(torch.Tensor)
        loss = (score**2).mean() + 0.1 * (slope.pow(2).sum(1) - 1).pow(2).mean() + 0.01 * wave + empty
        loss = loss + 0 * nested.to_padded_tensor(0.0).sum()
        learn(loss, dense, sparse)


@program
def second_order_method_with_a_closure():
    """S12: LBFGS asks its closure several times; targets are a frozen layer's, through a dropout that is off."""
    x = torch.randn(64, 8)
    teacher = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)).requires_grad_(False).eval()
    net = nn.Linear(8, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)
    with torch.no_grad():
        wanted = teacher(x)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), wanted)
        loss.backward()
        return loss

    for _ in range(STEPS):
        SEEN.append(float(optimizer.step(closure)))


@program
def compiled_part_in_a_loop():
    """F21: torch.compile with the eager backend for one part."""
    body = nn.Sequential(nn.Linear(10, 24), nn.ReLU())
    fast, head = torch.compile(body, backend="eager"), nn.Linear(24, 1)
    optimizer = adam(body, head)
    x = torch.randn(16 * STEPS, 10)
    for a, b in loader(x, x[:, :1] * x[:, 1:2]):
        learn(F.mse_loss(head(fast(a)), b), optimizer)


@program
def everything_by_keywords():
    """F45: functions are called with keyword arguments only."""
    weight, bias = nn.Parameter(torch.randn(3, 10) * 0.1), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam(params=[weight, bias], lr=0.01)
    pos = torch.tensor([9.0, 4.0, 2.0])
    for x, y in loader(*tagged([0.1, 0.2, 0.33]), size=32):
        logits = F.linear(bias=bias, weight=weight, input=F.dropout(input=x, p=0.1, training=True))
        picked = torch.gather(dim=1, index=torch.zeros(32, 1, dtype=torch.long), input=logits)
        loss = F.binary_cross_entropy_with_logits(pos_weight=pos, target=y, input=logits)
        learn(torch.add(other=0 * torch.sum(input=picked), input=loss), optimizer)


@program
def discriminator_with_spectral_normalisation():
    """D35: a GAN with spectral normalisation (Miyato 2018), generator in -1..1 as the data are."""
    norm = nn.utils.parametrizations.spectral_norm
    judge = nn.Sequential(norm(nn.Linear(16, 24)), nn.LeakyReLU(0.2), norm(nn.Linear(24, 1, bias=False)))
    make = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 16), nn.Tanh())
    of_make, of_judge = adam(make), adam(judge)
    for (real,) in loader(torch.rand(16 * STEPS, 16) * 2 - 1):
        fake = make(torch.randn(16, 4))
        learn((1 - judge(real)).relu().mean() + (1 + judge(fake.detach())).relu().mean(), of_judge)
        learn(-judge(fake).mean(), of_make)


class NormedTagger(nn.Module):
    """A table of words, and a head that is bounded by spectral normalisation."""

    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(40, 24), nn.GRU(24, 24, batch_first=True)
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(24, 2, bias=False))

    def forward(self, ids):
        return self.head(self.body(self.table(ids))[0].mean(1))


@program
def classifier_with_a_bounded_head():
    """S22: a classifier of text whose head is under spectral normalisation (SNGP), without any adapter."""
    model = NormedTagger()
    optimizer = adam(model)
    for ids, y in loader(*reviews()):
        learn(F.cross_entropy(model(ids), y), optimizer)
