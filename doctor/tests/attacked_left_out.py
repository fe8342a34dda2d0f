"""Healthy programs that leave something out on purpose, or only seem to: times, places, levels, positions, orders."""

import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

PROGRAMS = {}
STEPS = 14


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def net(i, o, h=32, act=nn.Tanh):
    return nn.Sequential(nn.Linear(i, h), act(), nn.Linear(h, o))


def adam_of(*ms, lr=1e-3):
    return torch.optim.Adam([p for m in ms for p in (m.parameters() if isinstance(m, nn.Module) else [m])], lr)


def step(opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()


def walks(rows, places, columns=1):
    """Smooth series (rows, places, columns) with a spread of about 1."""
    return torch.randn(rows, places, columns).cumsum(1) / (places / 2) ** 0.5


class Attends(nn.Module):
    """A layer for each place, two blocks of attention, and the mean over places."""

    def __init__(self, i, o, d=32, pool=True):
        super().__init__()
        self.embed = nn.Linear(i, d)
        block = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True)
        self.blocks, self.head, self.pool = nn.TransformerEncoder(block, 2), nn.Linear(d, o), pool

    def forward(self, x):
        h = self.blocks(self.embed(x))
        return self.head(h.mean(1) if self.pool else h)


# --------------------------------------------------------------------------------------------------------- F106
@program
def critic_with_a_penalty_between_real_and_made():
    """F106: WGAN-GP. The fakes of the critic's turn are made under no_grad, and the penalty is asked for between real
    and fake rows, in shares drawn for each row. A critic is not to know the share: it is one function of the data."""
    maker, critic = net(8, 64), net(64, 1)
    makers, critics = adam_of(maker, lr=1e-4), adam_of(critic, lr=1e-4)
    for real in (torch.randn(STEPS * 32, 4) @ torch.randn(4, 64) + 1).split(32):
        with torch.no_grad():
            fake = maker(torch.randn(32, 8))
        alpha = torch.rand(32, 1)
        between = (alpha * real + (1 - alpha) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        step(critics, critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean())
        step(makers, -critic(maker(torch.randn(32, 8))).mean())


@program
def modulation_told_at_any_signal_to_noise_ratio():
    """F106: automatic modulation classification (RadioML). Bursts are received at an SNR drawn for each one and scaled
    to unit power, as a receiver's gain control does. It isn't told the SNR, and the class is all that is asked."""
    model = nn.Sequential(nn.Conv1d(2, 16, 7, padding=3), nn.ReLU(), nn.Conv1d(16, 16, 7, padding=3), nn.ReLU(),
                          nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 3))  # fmt: skip
    opt, kinds = adam_of(model), torch.randint(3, (STEPS * 32,))
    phase = torch.randint(16, (len(kinds), 64)) % (2 ** (kinds + 1))[:, None] * 2 * math.pi / 2 ** (kinds[:, None] + 1)
    bursts = 2**0.5 * torch.stack([phase.cos(), phase.sin()], 1)  # each of both channels has a power of 1
    for sent, y in zip(bursts.split(32), kinds.split(32)):
        snr = 10 ** (torch.rand(32, 1, 1) * 3 - 1)  # -10 to 20 dB
        received = (snr / (1 + snr)).sqrt() * sent + (1 / (1 + snr)).sqrt() * torch.randn_like(sent)
        step(opt, F.cross_entropy(model(received), y))


@program
def equilibrium_matching():
    """F106: Equilibrium Matching (Wang and Du, 2025): a generative model without a time on purpose. It learns one field
    of slopes, which vanishes at the data, and samples are found by descent on it."""
    model = net(2, 2, 64, nn.SiLU)
    opt, points = adam_of(model), torch.randint(2, (STEPS * 64, 1)) * 4.0 - 2 + 0.2 * torch.randn(STEPS * 64, 2)
    for data in points.split(64):
        noise, gamma = torch.randn_like(data), torch.rand(64, 1)
        x = gamma * data + (1 - gamma) * noise
        wanted = (noise - data) * ((1 - gamma) / 0.2).clamp(max=1)
        step(opt, F.mse_loss(model(x), wanted))


@program
def noise_unconditional_flow():
    """F106: Sun et al., 2025 (Is noise conditioning necessary for denoising generative models?): flow matching without
    the time works nearly as well on pictures, where the noise level can be read from the many pixels themselves."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(),
                          nn.Conv2d(16, 1, 3, padding=1))  # fmt: skip
    opt = adam_of(model)
    for x1 in walks(STEPS * 32, 12, 12)[:, None].split(32):
        x0, t = torch.randn_like(x1), torch.rand(32, 1, 1, 1)
        step(opt, F.mse_loss(model((1 - t) * x0 + t * x1), x1 - x0))


@program
def sounds_with_random_gain_and_noise():
    """F106: a classifier of sounds with the two usual augmentations of waveforms: a random gain for each clip, and
    white noise of a random level for each clip. The label is the same at any loudness."""
    model = nn.Sequential(nn.Conv1d(1, 16, 9, stride=4), nn.ReLU(), nn.Conv1d(16, 16, 9, stride=4), nn.ReLU(),
                          nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 4))  # fmt: skip
    opt, labels, t = adam_of(model), torch.randint(4, (STEPS * 32,)), torch.arange(256) / 256
    clips = torch.sin(2 * math.pi * (8 * (labels[:, None] + 1) * t + torch.rand(STEPS * 32, 1)))
    for clip, y in zip(clips.split(32), labels.split(32)):
        gain, level = 0.5 + torch.rand(32, 1), torch.rand(32, 1)
        step(opt, F.cross_entropy(model((gain * clip + level * torch.randn_like(clip))[:, None]), y))


# ---------------------------------------------------------------------------------------------------------- S48
@program
def light_curves_whose_times_are_a_column():
    """S48: a transformer on irregular series (light curves; SeFT, Horn et al. 2020): each row has its own times, which
    are a column of the input beside the value. So each place is told where it is, and no positions are to be added."""
    model = Attends(2, 2)
    opt = adam_of(model)
    for _ in range(STEPS):
        y = torch.randint(2, (32,))
        times = torch.rand(32, 24).sort(1).values
        value = torch.sin(2 * math.pi * (1 + y[:, None]) * (times + torch.rand(32, 1))) + 0.05 * torch.randn(32, 24)
        step(opt, F.cross_entropy(model(torch.stack([times, value], 2)), y))


@program
def particles_of_a_jet():
    """S48: a transformer on the particles of a jet (Particle Transformer, Qu et al. 2022), which has no positions on
    purpose: particles are a set. They are stored by falling momentum, which is a column of the input itself."""
    model = Attends(4, 2)
    opt = adam_of(model)
    for _ in range(STEPS):
        y = torch.randint(2, (32,))
        pt = torch.randn(32, 24).mul(0.8 + 0.4 * y[:, None]).exp().sort(1, descending=True).values
        log_e = pt.log() + 0.2 * torch.randn(32, 24).abs()
        angles = 0.3 * torch.randn(32, 24, 2) / (1 + pt[..., None]).sqrt()
        step(opt, F.cross_entropy(model(torch.cat([pt.log()[..., None], log_e[..., None], angles], 2)), y))


@program
def neural_process_with_a_sorted_context():
    """S48: an attentive neural process (Kim et al. 2019). The context is a set of pairs (x, y), of which x is an input
    as well; the points of each function were sorted by x when they were made, as for a plot."""
    context, target = Attends(2, 32), net(33, 1)
    opt = adam_of(context, target)
    for _ in range(STEPS):
        x = (torch.rand(16, 30, 1) * 4 - 2).sort(1).values
        y = torch.sin(x * (0.5 + torch.rand(16, 1, 1)) + 6 * torch.rand(16, 1, 1))
        told = context(torch.cat([x[:, ::2], y[:, ::2]], 2))[:, None].expand(-1, 15, -1)
        step(opt, F.mse_loss(target(torch.cat([told, x[:, 1::2]], 2)), y[:, 1::2]))


@program
def attention_in_front_of_a_recurrent_layer():
    """S48: self-attention over the series, with a residual, and a GRU after it (as in attention-LSTM classifiers). The
    recurrent layer reads the places in their order, so positions need not be added."""
    embed, gru, head = nn.Linear(1, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 1)
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    opt = adam_of(embed, attention, gru, head)
    for _ in range(STEPS):
        x = walks(32, 24)
        h = embed(x[:, :-4])
        h = h + attention(h, h, h, need_weights=False)[0]
        step(opt, F.mse_loss(head(gru(h)[0][:, -1]), x[:, -4:].mean(1)))


@program
def flattened_places_in_the_head():
    """S48: attention over 16 patches of a series and a head on the flattened places (the flatten head of PatchTST),
    which has weights of its own for each place. The order counts there."""
    embed, head = nn.Linear(4, 32), nn.Linear(16 * 32, 4)
    block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    opt = adam_of(embed, block, head)
    for _ in range(STEPS):
        x = walks(32, 68)[..., 0]
        step(opt, F.mse_loss(head(block(embed(x[:, :64].unflatten(1, (16, 4)))).flatten(1)), x[:, 64:]))


@program
def inverted_transformer_on_a_sounding():
    """S48: iTransformer (Liu et al. 2024): a token is the whole history of one variable, and attention goes over
    variables without positions, as published. Here the variables are temperatures at 12 heights, so neighbours are
    alike."""
    model = Attends(24, 4, pool=False)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = walks(32, 28, 1) + 0.5 * torch.randn(32, 28, 12).cumsum(2)
        step(opt, F.mse_loss(model(x[:, :24].transpose(1, 2)), x[:, 24:].transpose(1, 2)))


@program
def outlines_of_a_map():
    """S48: attention over the points of an outline (buildings, lanes of a map), each with its x and y. The points are
    in the order in which they were drawn, and the area's side is told from where they lie; the places are columns."""
    model, t = Attends(2, 1), torch.arange(24) / 24 * 2 * math.pi
    opt = adam_of(model)
    for _ in range(STEPS):
        radius, turn = 0.5 + torch.rand(32, 1, 2), 6.3 * torch.rand(32, 1)
        points = torch.stack([(t + turn).cos(), (t + turn).sin()], 2) * radius + 0.3 * torch.randn(32, 1, 2)
        step(opt, F.mse_loss(model(points), radius.prod(2)))


# ---------------------------------------------------------------------------------------------------------- D33
@program
def stocks_of_one_day():
    """D33: cross-sectional returns (the default of Qlib, CSZScoreNorm on the label): a batch is one day, and the
    returns of its stocks are standardised across that day, for only the order of the stocks within a day is traded."""
    model = net(12, 1)
    opt = adam_of(model)
    for _ in range(STEPS):
        x, market, size = torch.randn(64, 12), 0.01 * torch.randn(()), 0.01 + 0.02 * torch.rand(())
        returns = market + size * (0.3 * x[:, 0] + torch.randn(64))
        label = (returns - returns.mean()) / returns.std()
        step(opt, F.mse_loss(model(x).squeeze(1), label))


@program
def correlation_as_a_loss():
    """D33: the information coefficient as a loss: answers and targets are both standardised over the batch, and the
    mean square of what is left is 2 (1 - correlation). The scale of both cancels on purpose."""
    model = net(12, 1)
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(64, 12)
        y = 3 + 2 * torch.randn(()) + x[:, 0] - x[:, 1] + 0.5 * torch.randn(64)
        answer = model(x).squeeze(1)
        answer = (answer - answer.mean()) / answer.std()
        step(opt, F.mse_loss(answer, (y - y.mean()) / y.std()))


@program
def slices_of_one_scan():
    """D33: MRI has no unit, so each scan is standardised by its own mean and spread (z-score, the default of nnU-Net
    for MR). A batch holds the slices of one scan, and a network is to take noise from them."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))
    opt = adam_of(model)
    for _ in range(STEPS):
        scan = (300 + 500 * torch.rand(())) * (2 + walks(24, 16, 16)).clamp(min=0)[:, None]
        clean = (scan - scan.mean()) / scan.std()
        step(opt, F.mse_loss(model(clean + 0.2 * torch.randn_like(clean)), clean))


# ---------------------------------------------------------------------------------------------------------- D34
@program
def cells_counted_in_standardised_pictures():
    """D34: cells are counted in microscope pictures, each standardised by its own mean and spread
    (per_image_standardization). More cells make a brighter picture, but what is counted are spots, which stay to be
    seen; the exposure does not."""
    model = nn.Sequential(nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 12, 5, padding=2), nn.ReLU(),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 1))  # fmt: skip
    opt = adam_of(model)
    for _ in range(STEPS):
        count = torch.randint(1, 10, (32,))
        order = torch.rand(32, 256).argsort(1) < count[:, None]
        x = F.avg_pool2d(order.float().view(32, 1, 16, 16), 3, 1, 1) * 9 + 0.05 * torch.randn(32, 1, 16, 16)
        x = x * (0.9 + 0.2 * torch.rand(32, 1, 1, 1))
        x = (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)
        step(opt, F.mse_loss(model(x).squeeze(1), count / 5 - 1))


@program
def shape_and_level_by_two_branches():
    """D34: a forecast with two inputs: the standardised window (its shape), and features of the day that the table has
    anyway (the last value, the sum of yesterday), scaled over the training data. So the level is known to the model."""
    shape, level, head = nn.Linear(24, 16), nn.Linear(2, 16), nn.Linear(32, 1)
    opt = adam_of(shape, level, head)
    for _ in range(STEPS):
        x = 20 + 5 * torch.randn(32, 1) + 0.5 * torch.randn(32, 25).cumsum(1)
        window, table = x[:, :24], (torch.stack([x[:, 23], x[:, :24].sum(1) / 24], 1) - 20) / 5
        window = (window - window.mean(1, keepdim=True)) / window.std(1, keepdim=True)
        h = torch.cat([torch.tanh(shape(window)), torch.tanh(level(table))], 1)
        step(opt, F.mse_loss(head(h), (x[:, 24:] - 20) / 5))


@program
def spectra_after_standard_normal_variate():
    """D34: near infrared spectra are standardised one by one (SNV, Barnes 1989, the usual first step) against scatter.
    A wetter sample absorbs more at all wavelengths, so water hangs on the mean too; its band tells it all the same."""
    model, at = net(64, 1), torch.linspace(-1, 1, 64)
    opt = adam_of(model)
    band, base = (-((at - 0.3) ** 2) / 0.02).exp(), 0.3 + 0.2 * at
    for _ in range(STEPS):
        water = torch.rand(32, 1)
        x = base + water * (0.3 + band) + 0.05 * torch.randn(32, 1) + 0.005 * torch.randn(32, 64)
        x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
        step(opt, F.mse_loss(model(x), water))


# --------------------------------------------------------------------------------------------------------- F107
@program
def camera_teaches_radar():
    """F107: distillation across modalities (Gupta 2016; radar from cameras): a teacher that knows grey pictures tells
    the class, and the student is asked for that class of the radar map of the same scene, of the same size. Row i is
    one scene; the two pictures of it have nothing in common but the class."""
    camera = torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
    radar = torch.randn(10, 64, generator=torch.Generator().manual_seed(3))
    teacher, student = nn.Linear(64, 10), net(64, 10)
    with torch.no_grad():
        teacher.weight.copy_(camera), teacher.bias.copy_(-camera.square().sum(1) / 2)
    opt = adam_of(student)
    for _ in range(STEPS):
        scene = torch.randint(10, (32,))
        seen, echo = camera[scene] + 0.5 * torch.randn(32, 64), radar[scene] + 0.5 * torch.randn(32, 64)
        with torch.no_grad():
            asked = teacher(seen).argmax(1)
        step(opt, F.cross_entropy(student(echo), asked))


@program
def co_training_of_two_views():
    """F107: co-training (Blum and Mitchell 1998): two networks see two views of each row (the words of a page, the
    words of links to it), which are independent given the class, and each learns from the other's labels where that is
    sure."""
    one, two = net(20, 2), net(20, 2)
    opt, way = adam_of(one, two), torch.randn(2, 2, 20, generator=torch.Generator().manual_seed(3))
    for _ in range(STEPS):
        y = torch.randint(2, (64,))
        a, b = way[0, y] + torch.randn(64, 20), way[1, y] + torch.randn(64, 20)
        loss = F.cross_entropy(one(a[:16]), y[:16]) + F.cross_entropy(two(b[:16]), y[:16])
        with torch.no_grad():
            by_one, by_two = one(a[16:]).argmax(1), two(b[16:]).argmax(1)
        step(opt, loss + F.cross_entropy(two(b[16:]), by_one) + F.cross_entropy(one(a[16:]), by_two))


@program
def verdict_of_the_whole_night_from_its_first_half():
    """F107: early classification with a teacher that sees later: the teacher reads the second half of a record, where
    the event is, and the student is to foresee its answer from the first half of the same record."""
    teacher, student = net(32, 3), net(32, 3)
    opt, sign = adam_of(student, teacher), torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(8))
    for _ in range(STEPS):
        y = torch.randint(3, (48,))
        before, after = 0.5 * sign[0, y] + torch.randn(48, 32), sign[1, y] + torch.randn(48, 32)
        known = F.cross_entropy(teacher(after[:24]), y[:24])
        with torch.no_grad():
            asked = teacher(after).argmax(1)
        step(opt, known + F.cross_entropy(student(before), asked))


# --------------------------------------------------------------------------------------------------------- F108
@program
def value_of_a_fixed_greedy_policy():
    """F108: fitted evaluation of a policy (off-policy evaluation): an old Q-network, which is frozen, is the policy
    that is judged; it chooses the next action, and the network that learns says what that is worth. That is SARSA, not
    double Q-learning."""
    old, q = net(4, 3).requires_grad_(False), net(4, 3)
    opt = adam_of(q)
    for _ in range(STEPS):
        s, a = torch.randn(64, 4), torch.randint(3, (64,))
        after, r = 0.8 * s + 0.3 * torch.randn(64, 4), (a == (s[:, 0] > 0).long()).float()
        with torch.no_grad():
            choice = old(after).argmax(1, keepdim=True)
            wanted = r + 0.9 * q(after).gather(1, choice).squeeze(1)
        step(opt, F.mse_loss(q(s).gather(1, a[:, None]).squeeze(1), wanted))


@program
def margins_of_pseudo_labels():
    """F108: pseudo-labels with margins (MarginMatch, Sosea and Caragea 2023): the averaged teacher chooses a label, and
    the student's own logit of it, less its best other one, says whether the row is counted. Nothing is a value here."""
    student = net(8, 4)
    teacher, opt = copy.deepcopy(student).requires_grad_(False), adam_of(student)
    for _ in range(STEPS):
        y = torch.randint(4, (64,))
        x = F.one_hot(y, 8) * 2 + torch.randn(64, 8)
        with torch.no_grad():
            label = teacher(x).argmax(1, keepdim=True)
            logits = student(x)
            own = logits.gather(1, label)
            counts = (own > logits.scatter(1, label, -1e9).max(1, keepdim=True).values - 0.2).float().squeeze(1)
        strong = F.cross_entropy(student(x + 0.3 * torch.randn_like(x)), label.squeeze(1), reduction="none")
        step(opt, F.cross_entropy(student(x[:16]), y[:16]) + (counts * strong).mean())
        with torch.no_grad():
            for t, p in zip(teacher.parameters(), student.parameters()):
                t.lerp_(p, 0.01)


# --------------------------------------------------------------------------------------------------------- F109
@program
def history_put_in_the_order_of_its_times():
    """F109: a recommender's history comes as a bag with times. It is sorted by time, the last 8 events are kept, the
    candidate is put at its end (as in BST, Chen 2019), and positions are added: recency, which is right in that
    order."""
    items, positions = nn.Embedding(50, 16), nn.Parameter(0.02 * torch.randn(9, 16))
    block, head = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, 1)
    opt = adam_of(items, positions, block, head)
    for _ in range(STEPS):
        history, times, candidate = torch.randint(50, (32, 12)), torch.rand(32, 12), torch.randint(50, (32, 1))
        latest = times.argsort(1)[:, -8:]
        clicked = (history.gather(1, latest)[:, -3:] % 5 == candidate % 5).any(1, keepdim=True).float()
        events = items(history).gather(1, latest[..., None].expand(-1, -1, 16))
        h = torch.cat([events, items(candidate)], 1) + positions
        step(opt, F.binary_cross_entropy_with_logits(head(block(h)[:, -1]), clicked))


@program
def best_proposals_and_learned_queries():
    """F109: a two-stage detector (mixed query selection, as in DINO-DETR): the features of the best proposals, by rank,
    are followed by learned queries, and each of the slots has an embedding of its own. The slots are ranks, no
    places."""
    embed, score, head = nn.Linear(6, 16), nn.Linear(16, 1), nn.Linear(16, 2)
    queries, slots = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(10, 16))
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    opt = adam_of(embed, score, head, queries, slots, attention)
    for _ in range(STEPS):
        x = torch.randn(16, 20, 6)
        there = (x[..., 0] > 1).float()
        memory = embed(x)
        found = score(memory).squeeze(-1)
        best = found.detach().topk(6, 1).indices
        h = torch.cat([memory.gather(1, best[..., None].expand(-1, -1, 16)), queries.expand(16, -1, -1)], 1) + slots
        h = h + attention(h, memory, memory, need_weights=False)[0]
        count = torch.stack([there.sum(1), (x[..., 1] > 1).float().sum(1)], 1) / 4
        step(opt, F.binary_cross_entropy_with_logits(found, there) + F.mse_loss(head(h.mean(1)), count))


@program
def seen_and_hidden_pieces_have_a_kind():
    """F109: a masked autoencoder whose decoder works in the shuffled order: the positions are gathered in that order,
    the wanted pieces too, and on top each slot is told by a learned kind whether it was seen (the first ones) or
    hidden."""
    embed, head, hidden = nn.Linear(4, 16), nn.Linear(16, 4), nn.Parameter(torch.zeros(1, 1, 16))
    where, kinds = nn.Parameter(0.1 * torch.randn(1, 12, 16)), nn.Parameter(0.1 * torch.randn(2, 16))
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    opt, which = adam_of(embed, head, hidden, where, kinds, block), torch.tensor([0] * 4 + [1] * 8)
    for _ in range(STEPS):
        x = walks(32, 48)[..., 0].unflatten(1, (12, 4))
        order = torch.rand(32, 12).argsort(1)[..., None].expand(-1, -1, 16)
        seen = embed(x).gather(1, order[:, :4])
        h = torch.cat([seen, hidden.expand(32, 8, -1)], 1) + kinds[which]
        h = block(h + where.expand(32, -1, -1).gather(1, order))
        step(opt, F.mse_loss(head(h[:, 4:]), x.gather(1, order[:, 4:, :4])))


# ---------------------------------------------------------------------------------------------------------- S38
@program
def stochastic_value_gradients_of_one_step():
    """S38: SVG(1) / heuristic dynamic programming: the model is differentiated for one step, and a critic says what
    later turns cost. States come from a rollout, and are detached, because the critic stands for all that follows."""
    policy, critic = net(4, 1), net(4, 1)
    actors, critics = adam_of(policy), adam_of(critic)
    force = torch.tensor([[0.0, 0.1, 0.0, 0.05]])
    for _ in range(STEPS):
        s, loss, told = torch.randn(32, 4), 0.0, []
        for _ in range(5):
            cost = s.square().mean(1)
            after = 0.95 * s + policy(s) * force + 0.02 * s.roll(1, 1)
            loss = loss + (after.square().mean(1) + 0.9 * critic(after).squeeze(1)).mean()
            told.append((s, cost, after.detach()))
            s = after.detach()
        step(actors, loss / 5)
        s, cost, after = (torch.cat(each) for each in zip(*told))
        with torch.no_grad():
            wanted = cost + 0.9 * critic(after).squeeze(1)
        step(critics, F.mse_loss(critic(s).squeeze(1), wanted))


@program
def unrolled_without_slopes_through_time():
    """S38: a learned force in a simulator is trained on its own rollouts without slopes through time (List et al. 2024,
    'non-differentiable unrolling'; the states that it will meet, each corrected by itself). Each step is compared with
    the reference, and long gradients of a chaotic system are avoided on purpose."""
    force = net(4, 2)
    opt = adam_of(force)
    for _ in range(STEPS):
        place, speed = torch.randn(32, 2), torch.randn(32, 2)
        true = torch.cat([place, speed], 1)
        s, loss = true, 0.0
        for _ in range(5):
            true = torch.cat([true[:, :2] + 0.1 * true[:, 2:], true[:, 2:] - 0.1 * true[:, :2].sin()], 1)
            s = torch.cat([s[:, :2] + 0.1 * s[:, 2:], s[:, 2:] + 0.1 * force(s)], 1)
            loss = loss + F.mse_loss(s, true)
            s = s.detach()
        step(opt, loss)


# ---------------------------------------------------------------------------------------------------------- S33
@program
def pieces_of_a_jigsaw():
    """S33: an assignment (jigsaw, sorting, matching): of the scores (B, pieces, places) the softmax goes over the
    places, and the target is a permutation matrix, whose rows and columns both have one 1."""
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 6))
    opt = adam_of(model)
    for _ in range(STEPS):
        order = torch.rand(32, 6).argsort(1)
        pieces = order[..., None] / 6 + 0.1 * torch.randn(32, 6, 4)
        target = F.one_hot(order, 6).float()
        step(opt, -(target * model(pieces).log_softmax(-1)).sum(-1).mean())


@program
def squares_of_latin():
    """S33: a solver of Latin squares (or sudoku) answers (B, rows, columns, digits), with the softmax over digits. In
    the one-hot solution each digit is once in each column, so it sums to 1 along dim 1 too."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(80, 64), nn.ReLU(), nn.Linear(64, 64), nn.Unflatten(1, (4, 4, 4)))
    opt, base = adam_of(model), (torch.arange(4)[:, None] + torch.arange(4)) % 4
    for _ in range(STEPS):
        rows, columns = torch.rand(32, 4).argsort(1), torch.rand(32, 4).argsort(1)
        square = F.one_hot(base[rows[:, :, None], columns[:, None]], 4).float()
        given = (torch.rand(32, 4, 4, 1) < 0.6).float()
        answer = model(torch.cat([square * given, given], -1)).softmax(-1)
        step(opt, -(square * (answer + 1e-8).log()).sum(-1).mean())


# ---------------------------------------------------------------------------------------------------------- F33
@program
def three_factors_of_forty_neurons():
    """F33: the state of 40 neurons in each bin of time is to be told by 3 factors: a GRU, a narrow layer for each
    place, and a linear readout, asked for what went in. The 3 numbers are the narrow place; that is how such factors
    are found."""
    gru, narrow, wide = nn.GRU(40, 32, batch_first=True, bidirectional=True), nn.Linear(64, 3), nn.Linear(3, 40)
    opt, mixing = adam_of(gru, narrow, wide), torch.randn(3, 40, generator=torch.Generator().manual_seed(5))
    for _ in range(STEPS):
        x = walks(16, 20, 3) @ mixing + 0.5 * torch.randn(16, 20, 40)
        step(opt, F.mse_loss(wide(narrow(gru(x)[0])), x))


@program
def strange_machines_are_those_that_do_not_fit():
    """F33: an LSTM autoencoder for anomalies in 30 sensors of a machine, with 4 hidden numbers for each time (an
    undercomplete one). What it can't put together again is strange."""
    lstm, out = nn.LSTM(30, 4, batch_first=True), nn.Linear(4, 30)
    opt, mixing = adam_of(lstm, out), torch.randn(4, 30, generator=torch.Generator().manual_seed(6))
    for _ in range(STEPS):
        x = walks(16, 25, 4) @ mixing + 0.1 * torch.randn(16, 25, 30)
        step(opt, F.mse_loss(out(lstm(x)[0]), x))


# --------------------------------------------------------------------------------------------------------- F110
@program
def lines_of_writing_on_white_paper():
    """F110: CRNN (Shi et al. 2015) for lines of writing. Pictures are filled up with white to one width, and all have
    the full length, as in the authors' code: white paper is read as blank, in use too, where no one tells the
    length."""
    conv, gru, head = nn.Conv2d(1, 8, (12, 3), padding=(0, 1)), nn.GRU(8, 16, batch_first=True), nn.Linear(16, 5)
    opt, forms = adam_of(conv, gru, head), torch.rand(5, 12, 4, generator=torch.Generator().manual_seed(7))
    for _ in range(STEPS):
        count = torch.randint(2, 7, (16,))
        text = torch.randint(1, 5, (16, 6))
        x = torch.ones(16, 1, 12, 32)
        for n in range(16):
            for k in range(int(count[n])):
                x[n, 0, :, 5 * k : 5 * k + 4] = forms[text[n, k]]
        h = torch.relu(conv(x)).squeeze(2).transpose(1, 2)
        logs = head(gru(h)[0]).log_softmax(-1).transpose(0, 1)
        step(opt, F.ctc_loss(logs, text, torch.full((16,), len(logs)), count, zero_infinity=True))


# ---------------------------------------------------------------------------------------------------------- F42
@program
def sharper_pictures_in_grey_levels():
    """F42: super-resolution that takes 0 to 1 in and multiplies by 255 itself at its end, so that the error and the
    PSNR are in grey levels, as papers report them. No layer has to learn the factor."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1), nn.PixelShuffle(2))
    opt = adam_of(model)
    for _ in range(STEPS):
        high = ((walks(16, 16, 16)[:, None] * 60 + 128).clamp(0, 255)).round()
        low = F.avg_pool2d(high, 2)
        answer = 255 * (F.interpolate(low / 255, scale_factor=2) + model(low / 255))
        step(opt, F.l1_loss(answer, high))


@program
def metres_of_a_range_finder():
    """F42: depth in metres up to 250 (a lidar outdoors) from pictures of 0 to 1. The model's last step is 250 *
    sigmoid, the reach of the device, so the answers are in metres by themselves."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1), nn.Sigmoid())
    opt = adam_of(model)
    for _ in range(STEPS):
        depth = 250 * torch.rand(16, 1, 12, 12)
        x = ((1 - depth / 250) + 0.05 * torch.randn(16, 3, 12, 12)).clamp(0, 1)
        step(opt, F.l1_loss(250 * model(x), depth))


# ---------------------------------------------------------------------------------------------------------- F20
@program
def plants_that_may_be_out():
    """F20: two-stage stochastic programming: capacities are decided for places with a need of 1 each, plants are out in
    some scenarios (0 or 1 for each), and what is not met costs. relu(1 - capacity * up) is the shortfall itself."""
    model = nn.Sequential(net(5, 8), nn.Softplus())
    opt = adam_of(model)
    for _ in range(STEPS):
        x = torch.randn(32, 5)
        up = (torch.rand(32, 8) < torch.sigmoid(1 + x[:, :1])).float()
        capacity = model(x) + 0.5
        step(opt, (0.2 * capacity).mean() + torch.relu(1 - capacity * up).mean())


# ---------------------------------------------------------------------------------------------------------- F34
@program
def two_speakers_who_take_turns():
    """F34: features of two speakers who never speak at once, zeros where one is silent. Attention goes from one to the
    other, and key_padding_mask hides the silent frames of the other: what is shown is where the first one is silent."""
    attention, head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 1)
    opt = adam_of(attention, head)
    for _ in range(STEPS):
        first = torch.rand(16, 20) < 0.5
        a, b = torch.randn(16, 20, 8) * first[..., None], torch.randn(16, 20, 8) * ~first[..., None]
        h = a + attention(a, b, b, key_padding_mask=first, need_weights=False)[0]
        step(opt, F.mse_loss(head(h.mean(1)), (a + b).mean((1, 2))[:, None]))


# ---------------------------------------------------------------------------------------------------------- F96
@program
def reinforce_as_in_the_textbook():
    """F96: REINFORCE of Sutton and Barto (13.3), with the factor gamma^t that the start state's value has: the
    discounts fall along the episode, and the returns are summed from its end."""
    policy, gamma = net(4, 2), 0.95
    opt = adam_of(policy)
    for _ in range(STEPS):
        s, logs, rewards = torch.randn(4), [], []
        for _ in range(12):
            dist = Categorical(logits=policy(s))
            a = dist.sample()
            logs.append(dist.log_prob(a)), rewards.append(float(a == (s[0] > 0)))
            s = 0.8 * s + 0.5 * torch.randn(4)
        returns, g = [], 0.0
        for r in reversed(rewards):
            g = r + gamma * g
            returns.insert(0, g)
        discounts = torch.tensor([gamma**t for t in range(12)])
        step(opt, -(discounts * torch.tensor(returns) * torch.stack(logs)).sum())


@program
def bandit_with_a_running_baseline():
    """F96: a gradient bandit (Sutton and Barto 2.8; the controller of ENAS) with a running mean of the rewards so far
    as the baseline of each draw. The past is right in a baseline: it does not hang on the action."""
    scores = nn.Parameter(torch.zeros(5))
    opt, baseline = adam_of(scores, lr=0.05), 0.0
    for _ in range(STEPS):
        logs, rewards, expected = [], [], []
        for _ in range(16):
            dist = Categorical(logits=scores)
            a = dist.sample()
            logs.append(dist.log_prob(a)), expected.append(baseline)
            rewards.append(float(torch.rand(()) < 0.1 + 0.2 * a))
            baseline = 0.9 * baseline + 0.1 * rewards[-1]
        advantage = torch.tensor(rewards) - torch.tensor(expected)
        step(opt, -(advantage * torch.stack(logs)).mean())


# ---------------------------------------------------------------------------------------------------------- F56
@program
def swings_that_end_by_the_clock():
    """F56: a pendulum never ends; its episodes are cut by the clock after 20 steps. The memory keeps the flags, as it
    does for all games, and the target leaves them out on purpose: the value goes on after the cut (Pardo 2018)."""
    q = net(3, 3)
    target, opt, rng = copy.deepcopy(q).requires_grad_(False), adam_of(q), np.random.default_rng(0)
    states = rng.normal(size=(500, 3)).astype(np.float32)
    actions, after = rng.integers(3, size=500), (0.9 * states + 0.1).astype(np.float32)
    rewards, cut = -np.abs(states[:, 0]), (np.arange(500) % 20 == 19).astype(np.float32)
    for _ in range(STEPS):
        at = rng.integers(500, size=64)
        s, a, r, s2, _ = (torch.from_numpy(x[at]) for x in (states, actions, rewards, after, cut))
        with torch.no_grad():
            wanted = r + 0.95 * target(s2).max(1).values
        step(opt, F.smooth_l1_loss(q(s).gather(1, a[:, None]).squeeze(1), wanted))
        with torch.no_grad():
            for t, p in zip(target.parameters(), q.parameters()):
                t.lerp_(p, 0.01)


# ---------------------------------------------------------------------------------------------------------- S40
@program
def flow_that_carries_its_condition():
    """S40: a conditional flow (simulation-based inference) whose rows are [condition, parameters]: masks keep the
    condition in all couplings and turn round within the parameters. The condition is in the density as a constant."""
    masks = [torch.tensor([1.0, 1, 1, 0, 0]), torch.tensor([1.0, 1, 0, 1, 1])] * 2
    nets = nn.ModuleList(net(5, 10) for _ in masks)
    opt = adam_of(nets)
    for _ in range(STEPS):
        c = torch.randn(64, 2)
        z, logdet = torch.cat([c, c @ torch.ones(2, 3) + 0.3 * torch.randn(64, 3)], 1), 0.0
        for mask, each in zip(masks, nets):
            s, t = each(mask * z).chunk(2, 1)
            s, t = torch.tanh(s) * (1 - mask), t * (1 - mask)
            z, logdet = mask * z + (1 - mask) * (z * s.exp() + t), logdet + s.sum(1)
        step(opt, (0.5 * z.square().sum(1) - logdet).mean())


# ---------------------------------------------------------------------------------------------------------- F82
@program
def gains_in_front_of_a_quantiser():
    """F82: transform coding with learned gains exp(s) in front of the noise of rounding. The rate is about the
    logarithm of the spread in steps, which grows by s. Rate plus distortion: the sign of s is a plus."""
    gains, back = nn.Parameter(torch.zeros(8)), nn.Linear(8, 8)
    opt = adam_of(gains, back)
    for _ in range(STEPS):
        x = torch.randn(64, 8) * torch.arange(1, 9)
        y = x * gains.exp() + torch.rand(64, 8) - 0.5
        rate = gains.sum() + x.std(0).log().sum()
        step(opt, 0.1 * rate + F.mse_loss(back(y), x))


# ---------------------------------------------------------------------------------------------------------- D20
@program
def memory_of_an_earlier_task():
    """D20: rehearsal: 32 whitened feature rows of the first task are kept, and all of them are learned again in each
    step beside the new batch. They look like draws of a normal density because features are whitened."""
    model = net(16, 4)
    opt, kept = adam_of(model), torch.randn(32, 16)
    labels = (kept[:, 0] > 0).long()
    for _ in range(STEPS):
        x = torch.randn(64, 16) + 0.5
        y = 2 + (x[:, 1] > 0.5).long()
        step(opt, F.cross_entropy(model(x), y) + F.cross_entropy(model(kept), labels))


# ----------------------------------------------------------------------------------------------------------- N1
@program
def what_is_to_be_forgotten_moves_the_body_alone():
    """N1: unlearning (NegGrad+): rows to keep are learned by body and head; the head steps, and then rows to forget are
    pushed up. The body steps with both, as is meant, and the head's share of the second is cleared before the next."""
    body, head = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 3)
    bodies, heads = adam_of(body), adam_of(head)
    for _ in range(STEPS):
        x = torch.randn(64, 8)
        y = (x[:, 0] > 0.5).long() + (x[:, 0] > -0.5).long()
        bodies.zero_grad(), heads.zero_grad()
        F.cross_entropy(head(body(x[:48])), y[:48]).backward()
        heads.step()
        (-0.5 * F.cross_entropy(head(body(x[48:])), y[48:])).backward()
        bodies.step()


# ---------------------------------------------------------------------------------------------------------- F68
@program
def both_halves_of_each_mixture():
    """F68: mixup in which both complements are used, lam and 1 - lam, so that each row of a pair is seen whole in sum.
    The two batches are made first, and their losses are summed from the last one on."""
    model = net(8, 3)
    opt = adam_of(model)
    for _ in range(STEPS):
        x, y, order, lam = torch.randn(32, 8), torch.randint(3, (32,)), torch.randperm(32), 0.3
        shares = (1 - lam, lam)
        mixed = [s * x + (1 - s) * x[order] for s in shares]
        losses = [s * F.cross_entropy(model(m), y) + (1 - s) * F.cross_entropy(model(m), y[order])
                  for s, m in zip(reversed(shares), reversed(mixed))]  # fmt: skip
        step(opt, sum(losses))


# ---------------------------------------------------------------------------------------------------- more of them
@program
def actor_and_critic_of_one_file():
    """D33: pytorch/examples' actor_critic.py with logits: returns of an episode are standardised, weigh the picked
    log-softmax (less the critic's value), and are what the critic is asked for, as in that file."""
    body, actor, critic = nn.Sequential(nn.Linear(4, 32), nn.ReLU()), nn.Linear(32, 2), nn.Linear(32, 1)
    opt = adam_of(body, actor, critic)
    for _ in range(STEPS):
        s = torch.randn(24, 4)
        h = body(s)
        logs, value = F.log_softmax(actor(h), 1), critic(h).squeeze(1)
        actions = logs.detach().exp().multinomial(1)
        rewards = [1.5 * (a == (x[0] > 0)) - abs(x[1]) for a, x in zip(actions[:, 0].tolist(), s.tolist())]
        returns = torch.tensor(np.cumsum(rewards[::-1])[::-1].copy(), dtype=torch.float32)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        actors = -(logs.gather(1, actions).squeeze(1) * (returns - value.detach())).sum()
        step(opt, actors + F.smooth_l1_loss(value, returns, reduction="sum"))




@program
def patients_with_their_own_days():
    """S48: visits of patients as tokens (age at the visit and three lab values that drift), as in STraTS: the age is a
    column of each token, and differs between patients, so it tells the order."""
    model = Attends(4, 1)
    opt = adam_of(model)
    for _ in range(STEPS):
        age = 0.5 + torch.rand(32, 1) + torch.rand(32, 20).cumsum(1) / 10
        labs = walks(32, 20, 3)
        risk = (labs[:, -1, :1] - labs[:, 0, :1]) / (age[:, -1:] - age[:, :1])
        step(opt, F.mse_loss(model(torch.cat([age[..., None], labs], 2)), risk))


@program
def boundaries_pushed_by_the_body_alone():
    """N1: entropy minimisation for unlabelled rows of another domain: the head learns from labelled rows alone and
    steps; the body then adds the slope of the entropy, through the head as it is, to its own of the labelled rows, and
    steps with the sum. What this leaves on the head is cleared before its next loss."""
    body, head = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 3)
    bodies, heads = adam_of(body), adam_of(head)
    for _ in range(STEPS):
        x = torch.randn(64, 8)
        y = (x[:, 0] > 0.5).long() + (x[:, 0] > -0.5).long()
        bodies.zero_grad(), heads.zero_grad()
        F.cross_entropy(head(body(x)), y).backward()
        heads.step()
        p = head(body(torch.randn(64, 8) + 0.5)).softmax(1)
        (-0.1 * (p * p.log()).sum(1).mean()).backward()
        bodies.step()


@program
def teacher_of_the_last_few_steps():
    """F28: temporal ensembling of weights with a short memory: the average has a decay of 0.4, because the data drift
    from batch to batch (test-time training on a stream), and smooths the last two or three steps on purpose. Its
    weights are those of a plain copy, which no optimizer holds."""
    model = net(6, 1)
    average, opt = copy.deepcopy(model), adam_of(model)
    for n in range(STEPS):
        x = torch.randn(32, 6) + 0.05 * n
        with torch.no_grad():
            before = average(x)
        answer = model(x)
        step(opt, F.mse_loss(answer, x[:, :1].sin() + x[:, 1:2]) + 0.1 * F.mse_loss(answer, before))
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters()):
                a.mul_(0.4).add_(0.6 * p)


@program
def likeness_to_a_forbidden_picture():
    """F75: an answer is kept from a given picture while it is drawn to another one: mse to what is wanted, and a
    bounded push from what must not be shown. Most of the slope leads to the first."""
    model = net(4, 16)
    opt, forbidden = adam_of(model), torch.randn(32, 16)
    for _ in range(STEPS):
        x = torch.randn(32, 4)
        answer = model(x)
        push = torch.relu(2 - (answer - forbidden).square().mean(1)).mean()
        step(opt, F.mse_loss(answer, x.repeat(1, 4)) + push)
