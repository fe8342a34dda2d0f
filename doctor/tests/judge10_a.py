"""Twenty-two small supervised programs, each with one bug that people often make, and a mended twin, by somebody who had
not seen the checks. Only torch and the standard library. Every program is deterministic on one thread.

See step_programs.py. They are kept as they were written.
"""
# ruff: noqa

import copy
import functools
import math
import random
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

CASES = [
    {
        "name": "softmax_before_cross_entropy",
        "what": "The network ends with a softmax and its probabilities are fed to nn.CrossEntropyLoss, which applies log-softmax again, so the loss is squashed and the gradients are weak.",
        "steps": 160,
    },
    {
        "name": "size_head_broadcasts",
        "what": "The regression head of the two-task network returns (B, 1) and the targets are (B,), so MSELoss broadcasts to a (B, B) table and the head is trained towards the mean of the batch.",
        "steps": 300,
    },
    {
        "name": "lstm_not_batch_first",
        "what": "The windows are (batch, time, channels) but nn.LSTM is built without batch_first=True, so it runs along the batch and out[:, -1] is one time step mixed with other people's windows.",
        "steps": 400,
    },
    {
        "name": "sample_weights_after_mean",
        "what": "The per-row weights multiply a criterion that has already been averaged over the batch (default reduction='mean'), so they cancel and the unreliable rows count as much as the gold rows.",
        "steps": 400,
    },
    {
        "name": "autorec_loss_over_unrated",
        "what": "The rating autoencoder's squared error is averaged over the whole user row, including movies the user never rated (filled with 0), so every prediction is pulled to the fill value.",
        "steps": 400,
    },
    {
        "name": "constant_weight_init",
        "what": "init_weights fills every weight matrix with one constant, so all units of a layer are copies of each other and get the same gradient for ever (symmetry is never broken).",
        "steps": 400,
    },
    {
        "name": "head_replaced_after_optimizer",
        "what": "The optimizer is built from model.parameters() before model.fc is replaced by the head of the new task, so the new head is in no parameter group and stays random.",
        "steps": 200,
    },
    {
        "name": "conv_blocks_in_python_list",
        "what": "The convolution blocks of the audio tagger are kept in a plain Python list, not nn.ModuleList, so they are not registered, never reach the optimizer and stay at their random initial values.",
        "steps": 400,
    },
    {
        "name": "eval_left_on_after_validation",
        "what": "validate() switches the model to eval mode after each epoch and nothing switches it back, so from the second epoch on it trains without dropout and with frozen batch-norm statistics.",
        "steps": 480,
    },
    {
        "name": "ema_skips_batchnorm_buffers",
        "what": "The moving-average copy of the network averages only the parameters; its batch-norm running means and variances are never updated and stay at 0 and 1, while that copy is the one evaluated and shipped.",
        "steps": 300,
    },
    {
        "name": "frame_features_detached",
        "what": "The per-frame CNN features are detached before they go into the GRU (to save memory), so no gradient reaches the CNN and its own optimizer has nothing to apply.",
        "steps": 300,
    },
    {
        "name": "amp_clip_before_unscale",
        "what": "clip_grad_norm_ runs on gradients still multiplied by the GradScaler's factor (no scaler.unscale_ first), so the true gradient norm is cut to 10 / 65536 and the weights hardly move.",
        "steps": 300,
    },
    {
        "name": "accumulation_zeroed_every_microbatch",
        "what": "Gradient accumulation over four micro-batches, but optimizer.zero_grad() is called at the top of every micro-batch, so only the last one (a quarter of the loss) reaches the update.",
        "steps": 480,
    },
    {
        "name": "epoch_scheduler_stepped_per_batch",
        "what": "StepLR is configured in epochs (halve every 4) but scheduler.step() is called after every batch, so the learning rate has collapsed within the first epoch.",
        "steps": 300,
    },
    {
        "name": "padding_mask_inverted",
        "what": "src_key_padding_mask must be True at padding, but the mask is built as True at real points, so attention sees only padding and the class token learns nothing about the track.",
        "steps": 300,
    },
    {
        "name": "flip_image_but_not_mask",
        "what": "The random horizontal flip of the segmentation dataset is applied to the image only; the mask is returned unflipped, so half of the training masks are in the wrong place.",
        "steps": 300,
    },
    {
        "name": "fake_quant_without_straight_through",
        "what": "The weight fake-quantisation of the QAT layers uses torch.round with no straight-through estimator; round has zero gradient, so the quantised weights never learn.",
        "steps": 300,
    },
    {
        "name": "distillation_kl_without_log",
        "what": "The student's side of F.kl_div is given softmax probabilities although the function expects log-probabilities, so the distillation term is not a KL divergence and drives the student to overconfidence.",
        "steps": 300,
    },
    {
        "name": "table_columns_not_standardised",
        "what": "The house table is fed to the network in raw units (square feet, years, dollars): columns differ by four orders of magnitude and the large ones swamp the rest and make training unstable.",
        "steps": 400,
    },
    {
        "name": "forecast_target_inside_window",
        "what": "The window dataset takes series[k + window - 1] as the target, which is the last value of the input window itself, so the network learns to copy its last input rather than to forecast the next hour.",
        "steps": 400,
    },
    {
        "name": "box_loss_on_background_cells",
        "what": "The box regression loss of the grid detector is averaged over all cells, including empty ones whose box target is a filler 0, so the boxes of the few object cells are drowned and pulled to the filler.",
        "steps": 400,
    },
    {
        "name": "contrastive_label_convention_swapped",
        "what": "The contrastive loss is the version for 'label 1 = different', but the pair dataset gives 1 for same, so equal pairs are pushed apart and different pairs are pulled together.",
        "steps": 300,
    },
]


# --------------------------------------------------------------------------------------
# shared helpers: synthetic data, an endless loader, a held-out context
# --------------------------------------------------------------------------------------


def endless(loader):
    while True:
        for batch in loader:
            yield batch


@contextmanager
def held_out(*models):
    """Evaluate without leaving a trace: modes and random state come back as they were."""
    modes = [(m, m.training) for model in models for m in model.modules()]
    rng, py_rng = torch.get_rng_state(), random.getstate()
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, training in modes:
            m.training = training
        torch.set_rng_state(rng)
        random.setstate(py_rng)


SHAPES = ["square", "disc", "ring", "plus", "ex", "hbars", "vbars", "diamond", "frame", "triangle", "ell", "checker"]


def draw_shape(kind, dx, dy, r):
    a, b = dx.abs(), dy.abs()
    m, d = torch.maximum(a, b), (dx**2 + dy**2).sqrt()
    if kind == "square":
        s = m <= r
    elif kind == "disc":
        s = d <= r * 1.1
    elif kind == "ring":
        s = (d <= r * 1.1) & (d > r * 0.6)
    elif kind == "plus":
        s = (torch.minimum(a, b) <= 1.1) & (m <= r)
    elif kind == "ex":
        s = ((a - b).abs() <= 1.1) & (m <= r)
    elif kind == "hbars":
        s = (m <= r) & (torch.remainder(dy, 4) < 2)
    elif kind == "vbars":
        s = (m <= r) & (torch.remainder(dx, 4) < 2)
    elif kind == "diamond":
        s = a + b <= r * 1.25
    elif kind == "frame":
        s = (m <= r) & (m > r - 1.5)
    elif kind == "triangle":
        s = (dy <= r) & (dy >= -r) & (a <= (dy + r) / 2)
    elif kind == "ell":
        s = (m <= r) & ((dx < -r + 2.5) | (dy > r - 2.5))
    else:  # checker
        s = (m <= r) & ((torch.floor(dx / 2) + torch.floor(dy / 2)) % 2 == 0)
    return s.float()


def shape_images(n, kinds, seed, size=16, noise=0.25, colour=False, jitter=1.5):
    """n pictures of one shape each: (n, C, size, size) floats, labels, radii in pixels."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, len(kinds), (n,), generator=g)
    half = size / 2
    r = half * (0.45 + 0.3 * torch.rand(n, generator=g))
    cx = half - 0.5 + jitter * (2 * torch.rand(n, generator=g) - 1)
    cy = half - 0.5 + jitter * (2 * torch.rand(n, generator=g) - 1)
    grid = torch.arange(size).float()
    dx = grid.view(1, 1, size) - cx.view(n, 1, 1)
    dy = grid.view(1, size, 1) - cy.view(n, 1, 1)
    dx, dy = dx.expand(n, size, size), dy.expand(n, size, size)
    masks = torch.stack([draw_shape(k, dx, dy, r.view(n, 1, 1)) for k in kinds])
    mask = masks[y, torch.arange(n)].unsqueeze(1)
    c = 3 if colour else 1
    fore = 0.6 + 0.4 * torch.rand(n, c, 1, 1, generator=g)
    back = 0.3 * torch.rand(n, c, 1, 1, generator=g)
    x = back + (fore - back) * mask
    x = x + noise * torch.randn(n, c, size, size, generator=g)
    return x, y, r


def mel_clips(n, seed, n_mels=24, frames=32):
    """Log-mel pictures (n, 1, mels, frames) of overlapping sound events, and six 0/1 tags."""
    g = torch.Generator().manual_seed(seed)
    tags = (torch.rand(n, 6, generator=g) < 0.4).float()
    f = torch.arange(n_mels).float().view(1, n_mels, 1)
    t = torch.arange(frames).float().view(1, 1, frames)

    def u(lo, hi):
        return lo + (hi - lo) * torch.rand(n, 1, 1, generator=g)

    def line(centre, width=1.0):
        return torch.exp(-0.5 * ((f - centre) / width) ** 2)

    start, length = u(0, 12), u(12, 20)
    on = ((t >= start) & (t <= start + length)).float()
    events = [
        line(u(3, 20)) * on,  # steady tone
        line(u(2, 6) + 0.6 * (t - u(0, 8)), 1.0),  # rising chirp
        line(u(18, 22) - 0.6 * (t - u(0, 8)), 1.0),  # falling chirp
        (torch.remainder(t - u(0, 6), 6) < 1.0).float().expand(n, n_mels, frames) * 0.8,  # clicks
        line(u(8, 16) + 2.5 * torch.sin(2 * math.pi * t / u(6, 9)), 0.9),  # vibrato
        torch.exp(-0.5 * ((f - u(6, 18)) / 3.0) ** 2) * ((t > u(4, 12)) & (t < u(18, 28))).float(),  # hiss
    ]
    spec = sum(tags[:, k].view(n, 1, 1) * u(0.7, 1.2) * e for k, e in enumerate(events))
    spec = torch.log(spec + 0.08 * torch.exp(0.5 * torch.randn(n, n_mels, frames, generator=g)))
    return spec.unsqueeze(1), tags


def wearable_windows(n, seed, length=32, channels=6):
    """Accelerometer and gyroscope windows (n, length, channels); six activities."""
    g = torch.Generator().manual_seed(seed)
    base = torch.Generator().manual_seed(1234)
    amp = 0.5 + torch.rand(6, channels, generator=base)
    lag = 2 * math.pi * torch.rand(6, channels, generator=base)
    period = torch.tensor([5.0, 7.0, 9.0, 11.0, 14.0, 18.0])
    y = torch.randint(0, 6, (n,), generator=g)
    t = torch.arange(length).float().view(1, length, 1)
    phase = math.pi * torch.rand(n, 1, 1, generator=g)
    speed = 1 + 0.05 * torch.randn(n, 1, 1, generator=g)
    x = amp[y].unsqueeze(1) * torch.sin(2 * math.pi * speed * t / period[y].view(n, 1, 1) + phase + lag[y].unsqueeze(1))
    x = x + 1.2 * torch.randn(n, length, channels, generator=g)
    return x, y


def hourly_load(hours, seed):
    """An electricity-load series with daily and weekly seasons and autocorrelated noise."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(hours).float()
    e = torch.randn(hours, generator=g)
    ar = torch.zeros(hours)
    for i in range(1, hours):
        ar[i] = 0.7 * ar[i - 1] + 0.12 * e[i]
    return 50 + 10 * (
        torch.sin(2 * math.pi * t / 24)
        + 0.6 * torch.sin(2 * math.pi * t / 8 + 1.0)
        + 0.3 * torch.sin(2 * math.pi * t / 168)
        + ar
    )


def voice_commands(n, seed, length=640):
    """Short waveforms (n, 1, length) in [-1, 1]; six spoken-command-like pitch contours."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    t = torch.arange(length).float().view(1, length) / length
    f0 = 30 + 8 * torch.rand(n, 1, generator=g)
    contours = torch.stack(
        [
            f0.expand(n, length),
            2.2 * f0.expand(n, length),
            f0 * (1 + 1.2 * t),
            f0 * (2.2 - 1.2 * t),
            f0 * (1.6 + 0.5 * torch.sin(2 * math.pi * 3 * t)),
            torch.where(t < 0.5, f0, 2.0 * f0),
        ]
    )
    freq = contours[y, torch.arange(n)]
    phase = 2 * math.pi * (torch.cumsum(freq, 1) / length + torch.rand(n, 1, generator=g))
    loud = 0.2 + 0.2 * torch.rand(n, 1, generator=g)
    wave = loud * (torch.sin(phase) + 0.4 * torch.sin(2 * phase)) / 1.4
    wave = wave + 0.3 * torch.randn(n, length, generator=g)
    return wave.clamp(-1, 1).unsqueeze(1), y


def heartbeats(n, seed, length=96):
    """Single-lead beats (n, 1, length), five rhythm classes."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    t = torch.arange(length).float().view(1, length)

    def u(lo, hi):
        return lo + (hi - lo) * torch.rand(n, 1, generator=g)

    def bump(c, w, h):
        return h * torch.exp(-0.5 * ((t - c) / w) ** 2)

    c = u(40, 52)
    k = y.view(n, 1)
    width = torch.where(k == 1, u(5.0, 7.0), u(2.0, 3.0))  # wide QRS
    p_wave = torch.where(k == 2, torch.zeros(n, 1), u(0.2, 0.35))  # no P wave
    t_wave = torch.where(k == 3, u(-0.5, -0.3), u(0.3, 0.5))  # inverted T wave
    st = torch.where(k == 4, u(0.25, 0.4), torch.zeros(n, 1))  # raised ST segment
    x = (
        bump(c, width, u(1.0, 1.4))
        + bump(c - 16, 3.5, p_wave)
        + bump(c + 24, 5.0, t_wave)
        - bump(c + 6, 2.0, 0.25)
        + bump(c + 13, 5.0, st)
    )
    x = x + u(-0.2, 0.2) + 0.12 * torch.randn(n, length, generator=g)
    return x.unsqueeze(1), y


def gps_tracks(n, seed, max_len=32):
    """Padded trajectories: (n, max_len, 3) speed, turn, acceleration; lengths; four modes."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    lengths = torch.randint(10, 29, (n,), generator=g)
    t = torch.arange(max_len).float().view(1, max_len)
    k = y.view(n, 1)
    level = 4 + 2 * torch.rand(n, 1, generator=g)
    speed = level.expand(n, max_len).clone()
    stops = (torch.remainder(t + 10 * torch.rand(n, 1, generator=g), 10) < 3).float()
    speed = torch.where(k == 1, level * (1 - stops) + 0.5, speed)
    speed = torch.where(
        k == 2, level * (1 + 0.5 * torch.sin(2 * math.pi * (t / 9 + torch.rand(n, 1, generator=g)))), speed
    )
    speed = speed + 0.9 * torch.randn(n, max_len, generator=g)
    turn = torch.where(k == 3, torch.tensor(0.9), torch.tensor(0.35)) * torch.randn(n, max_len, generator=g)
    acc = torch.diff(speed, dim=1, prepend=speed[:, :1])
    x = torch.stack([speed, turn, acc], dim=-1)
    return x, lengths, y


def street_scenes(n, seed, size=24):
    """Grey pictures with one or two discs (the object) and a square (a distractor), and disc masks."""
    g = torch.Generator().manual_seed(seed)
    grid = torch.arange(size).float()

    def place():
        r = 2.5 + 2.0 * torch.rand(n, 1, 1, generator=g)
        cx = 4 + (size - 8) * torch.rand(n, 1, 1, generator=g)
        cy = 4 + (size - 8) * torch.rand(n, 1, 1, generator=g)
        return grid.view(1, 1, size) - cx, grid.view(1, size, 1) - cy, r

    dx, dy, r = place()
    square = (torch.maximum(dx.abs(), dy.abs()) <= r).float()
    mask = torch.zeros(n, size, size)
    for j in range(2):
        dx, dy, r = place()
        disc = ((dx**2 + dy**2).sqrt() <= r * 1.1).float()
        there = (torch.rand(n, 1, 1, generator=g) < (1.0 if j == 0 else 0.5)).float()
        mask = torch.maximum(mask, disc * there)
    x = 0.7 * square * (1 - mask) + 0.9 * mask + 0.15 * torch.randn(n, size, size, generator=g)
    return x.unsqueeze(1), mask.unsqueeze(1)


def parking_lots(n, seed, size=24, cells=4):
    """Pictures with two rectangles in different cells of a 4x4 grid; objectness and box targets.

    Box target in an object cell: centre offset from the cell centre (in cells) and log size (in cells).
    """
    g = torch.Generator().manual_seed(seed)
    cell = size / cells
    x = 0.15 * torch.randn(n, 1, size, size, generator=g)
    obj = torch.zeros(n, cells, cells)
    box = torch.zeros(n, cells, cells, 4)
    grid = torch.arange(size).float()
    picks = torch.rand(n, cells * cells, generator=g).argsort(1)[:, :2]
    idx = torch.arange(n)
    for j in range(2):
        row, col = picks[:, j] // cells, picks[:, j] % cells
        off = 0.8 * torch.rand(n, 2, generator=g) - 0.4
        wh = 4 + 5 * torch.rand(n, 2, generator=g)
        cx = (col + 0.5 + off[:, 0]) * cell - 0.5
        cy = (row + 0.5 + off[:, 1]) * cell - 0.5
        inside = ((grid.view(1, 1, size) - cx.view(n, 1, 1)).abs() <= wh[:, 0].view(n, 1, 1) / 2) & (
            (grid.view(1, size, 1) - cy.view(n, 1, 1)).abs() <= wh[:, 1].view(n, 1, 1) / 2
        )
        shade = 0.6 + 0.4 * torch.rand(n, 1, 1, generator=g)
        x[:, 0] = torch.where(inside, shade + 0.1 * torch.randn(n, size, size, generator=g), x[:, 0])
        obj[idx, row, col] = 1.0
        box[idx, row, col] = torch.cat([off, torch.log(wh / cell)], dim=1)
    return x, obj, box


def moving_shapes(n, seed, frames=8, size=16):
    """Clips (n, frames, 1, size, size): three shapes moving left or right, six classes."""
    g = torch.Generator().manual_seed(seed)
    kinds = ["disc", "plus", "frame"]
    y = torch.randint(0, 6, (n,), generator=g)
    direction = (y // 3).float() * 2 - 1
    v = direction * (0.6 + 0.5 * torch.rand(n, generator=g))
    x0 = size / 2 + 2 * (2 * torch.rand(n, generator=g) - 1) - v * (frames - 1) / 2
    cy = size / 2 + 2 * (2 * torch.rand(n, generator=g) - 1)
    r = 2.8 + 1.0 * torch.rand(n, generator=g)
    t = torch.arange(frames).float()
    cx = x0.view(n, 1) + v.view(n, 1) * t.view(1, frames)
    grid = torch.arange(size).float()
    dx = (grid.view(1, 1, 1, size) - cx.view(n, frames, 1, 1)).expand(n, frames, size, size)
    dy = (grid.view(1, 1, size, 1) - cy.view(n, 1, 1, 1)).expand(n, frames, size, size)
    masks = torch.stack([draw_shape(k, dx, dy, r.view(n, 1, 1, 1)) for k in kinds])
    clip = 0.9 * masks[y % 3, torch.arange(n)]
    clip = clip + 0.2 * torch.randn(n, frames, size, size, generator=g)
    return clip.unsqueeze(2), y


def house_sales(n, seed):
    """Raw house table (area sq ft, rooms, year built, metres to centre, lot area, median income) and log prices."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 6, generator=g)
    area = (1500 + 500 * z[:, 0]).clamp(min=400)
    rooms = (3 + 0.7 * z[:, 0] + 0.7 * z[:, 1]).round().clamp(1, 8)
    year = (1975 + 20 * z[:, 2]).round().clamp(1900, 2024)
    metres = (8000 + 3500 * z[:, 3]).clamp(min=200)
    lot = (6000 + 2000 * z[:, 4]).clamp(min=800)
    income = (60000 + 18000 * z[:, 5]).clamp(min=15000)
    x = torch.stack([area, rooms, year, metres, lot, income], dim=1)
    s = torch.stack(
        [
            (area - 1500) / 500,
            (rooms - 3),
            (year - 1975) / 20,
            (metres - 8000) / 3500,
            (lot - 6000) / 2000,
            (income - 60000) / 18000,
        ],
        dim=1,
    )
    logp = (
        12.4
        + 0.25 * s[:, 0]
        + 0.05 * s[:, 1]
        + 0.1 * torch.tanh(2 * s[:, 2])
        - 0.2 * s[:, 3]
        + 0.1 * s[:, 4] * s[:, 0]
        + 0.18 * s[:, 5] * (1 - 0.4 * s[:, 3])
        + 0.05 * torch.randn(n, generator=g)
    )
    return x, logp


def churn_table(n, seed, gold):
    """Customer table; gold labels, or labels guessed by a support script that is wrong for one group."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    score = 1.5 * x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3] + 0.8 * x[:, 4] + 0.3 * torch.randn(n, generator=g)
    y = (score > 0).float()
    if not gold:
        guess = (1.2 * x[:, 5] + 0.5 * x[:, 0] + 0.3 * torch.randn(n, generator=g) > 0).float()
        y = torch.where(x[:, 1] > -0.6, guess, y)
    return x, y


def patient_table(n, seed):
    """Many measurements, few informative, three outcome classes with honest label noise."""
    g = torch.Generator().manual_seed(seed)
    base = torch.Generator().manual_seed(77)
    w = 1.4 * torch.randn(8, 3, generator=base)
    x = torch.randn(n, 40, generator=g)
    logits = x[:, :8] @ w * 0.9
    y = torch.distributions.Categorical(logits=logits)
    u = torch.rand(n, 1, generator=g)
    y = (y.probs.cumsum(1) < u).sum(1).clamp(max=2)
    return x, y


def movie_ratings(seed, users=600, movies=120):
    """Ratings 1..5 of a low-rank taste model; three in ten known for training, one in twenty held out."""
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(users, 4, generator=g)
    v = torch.randn(movies, 4, generator=g)
    quality = 0.5 * torch.randn(1, movies, generator=g)
    mood = 0.3 * torch.randn(users, 1, generator=g)
    r = 3.4 + quality + mood + 0.45 * u @ v.t() + 0.3 * torch.randn(users, movies, generator=g)
    r = r.round().clamp(1, 5)
    pick = torch.rand(users, movies, generator=g)
    return r, (pick < 0.3).float(), (pick > 0.95).float()


class PhotoCNN(nn.Module):
    """The small backbone that the fine-tuning and distillation programs load as 'pretrained'."""

    def __init__(self, n_classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 48, 3, padding=1, bias=False),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.fc = nn.Linear(48 * 4, n_classes)

    def forward(self, x):
        return self.fc(self.features(x))


@functools.lru_cache(maxsize=None)
def pretrained_weights():
    """Weights of PhotoCNN after a short training on eight shape classes (mean 0, std 1 inputs)."""
    with torch.random.fork_rng():
        torch.manual_seed(99)
        x, y, _ = shape_images(3000, SHAPES[:8], seed=900)
        x = (x - x.mean()) / x.std()
        net = PhotoCNN(8)
        opt = torch.optim.Adam(net.parameters(), lr=2e-3)
        for i in range(280):
            idx = torch.randint(0, len(x), (64,))
            loss = F.cross_entropy(net(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
    return {k: v.detach().clone() for k, v in net.state_dict().items()}


# --------------------------------------------------------------------------------------
# 1. softmax_before_cross_entropy
# --------------------------------------------------------------------------------------


def softmax_before_cross_entropy_bad():
    torch.manual_seed(0)
    x_train, y_train, _ = shape_images(2048, SHAPES[:8], seed=1)
    x_val, y_val, _ = shape_images(800, SHAPES[:8], seed=2)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.fc1 = nn.Linear(32 * 4 * 4, 64)
            self.fc2 = nn.Linear(64, 8)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv1(x)), 2)
            x = F.max_pool2d(F.relu(self.conv2(x)), 2)
            x = F.relu(self.fc1(x.flatten(1)))
            x = self.fc2(x)
            return F.softmax(x, dim=1)

    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, drop_last=True)
    batches = endless(loader)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def softmax_before_cross_entropy_good():
    torch.manual_seed(0)
    x_train, y_train, _ = shape_images(2048, SHAPES[:8], seed=1)
    x_val, y_val, _ = shape_images(800, SHAPES[:8], seed=2)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.fc1 = nn.Linear(32 * 4 * 4, 64)
            self.fc2 = nn.Linear(64, 8)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv1(x)), 2)
            x = F.max_pool2d(F.relu(self.conv2(x)), 2)
            x = F.relu(self.fc1(x.flatten(1)))
            x = self.fc2(x)
            return x

    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, drop_last=True)
    batches = endless(loader)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 2. size_head_broadcasts
# --------------------------------------------------------------------------------------


def size_head_broadcasts_bad():
    torch.manual_seed(0)
    kinds = ["square", "disc", "ring", "plus", "diamond"]
    x_train, y_train, r_train = shape_images(2048, kinds, seed=3)
    x_val, y_val, r_val = shape_images(800, kinds, seed=4)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std
    r_mean, r_std = r_train.mean(), r_train.std()
    r_train, r_val = (r_train - r_mean) / r_std, (r_val - r_mean) / r_std

    class TwoTaskNet(nn.Module):
        def __init__(self, n_kinds):
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(32 * 16, 64, bias=False),
                nn.BatchNorm1d(64),
                nn.ReLU(),
            )
            self.kind_head = nn.Linear(64, n_kinds)
            self.size_head = nn.Linear(64, 1)

        def forward(self, x):
            h = self.trunk(x)
            return self.kind_head(h), self.size_head(h)

    model = TwoTaskNet(len(kinds))
    ce, mse = nn.CrossEntropyLoss(), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_set = TensorDataset(x_train, y_train, r_train)
    batches = endless(DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True))

    def step(i):
        model.train()
        images, kind, size = next(batches)
        kind_logits, size_pred = model(images)
        loss_kind = ce(kind_logits, kind)
        loss_size = mse(size_pred, size)
        loss = loss_kind + loss_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            _, size_pred = model(x_val)
            return (size_pred.squeeze(1) - r_val).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def size_head_broadcasts_good():
    torch.manual_seed(0)
    kinds = ["square", "disc", "ring", "plus", "diamond"]
    x_train, y_train, r_train = shape_images(2048, kinds, seed=3)
    x_val, y_val, r_val = shape_images(800, kinds, seed=4)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std
    r_mean, r_std = r_train.mean(), r_train.std()
    r_train, r_val = (r_train - r_mean) / r_std, (r_val - r_mean) / r_std

    class TwoTaskNet(nn.Module):
        def __init__(self, n_kinds):
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(32 * 16, 64, bias=False),
                nn.BatchNorm1d(64),
                nn.ReLU(),
            )
            self.kind_head = nn.Linear(64, n_kinds)
            self.size_head = nn.Linear(64, 1)

        def forward(self, x):
            h = self.trunk(x)
            return self.kind_head(h), self.size_head(h)

    model = TwoTaskNet(len(kinds))
    ce, mse = nn.CrossEntropyLoss(), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_set = TensorDataset(x_train, y_train, r_train)
    batches = endless(DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True))

    def step(i):
        model.train()
        images, kind, size = next(batches)
        kind_logits, size_pred = model(images)
        loss_kind = ce(kind_logits, kind)
        loss_size = mse(size_pred.squeeze(1), size)
        loss = loss_kind + loss_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            _, size_pred = model(x_val)
            return (size_pred.squeeze(1) - r_val).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 3. lstm_not_batch_first
# --------------------------------------------------------------------------------------


def lstm_not_batch_first_bad():
    torch.manual_seed(0)
    x_train, y_train = wearable_windows(2400, seed=5)
    x_val, y_val = wearable_windows(600, seed=6)
    mean, std = x_train.mean((0, 1)), x_train.std((0, 1))
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    class ActivityLSTM(nn.Module):
        def __init__(self, n_channels=6, hidden=48, n_classes=6):
            super().__init__()
            self.lstm = nn.LSTM(n_channels, hidden, num_layers=1)
            self.fc = nn.Linear(hidden, n_classes)

        def forward(self, x):  # x: (batch, time, channels)
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    model = ActivityLSTM()
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train_loader = DataLoader(TensorDataset(x_train, y_train), batch_size=48, shuffle=True)
    batches = endless(train_loader)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = loss_fn(model(xb), yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_not_batch_first_good():
    torch.manual_seed(0)
    x_train, y_train = wearable_windows(2400, seed=5)
    x_val, y_val = wearable_windows(600, seed=6)
    mean, std = x_train.mean((0, 1)), x_train.std((0, 1))
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    class ActivityLSTM(nn.Module):
        def __init__(self, n_channels=6, hidden=48, n_classes=6):
            super().__init__()
            self.lstm = nn.LSTM(n_channels, hidden, num_layers=1, batch_first=True)
            self.fc = nn.Linear(hidden, n_classes)

        def forward(self, x):  # x: (batch, time, channels)
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    model = ActivityLSTM()
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train_loader = DataLoader(TensorDataset(x_train, y_train), batch_size=48, shuffle=True)
    batches = endless(train_loader)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = loss_fn(model(xb), yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 4. sample_weights_after_mean
# --------------------------------------------------------------------------------------


def sample_weights_after_mean_bad():
    torch.manual_seed(0)
    x_gold, y_gold = churn_table(1200, seed=7, gold=True)
    x_weak, y_weak = churn_table(2400, seed=8, gold=False)
    x_val, y_val = churn_table(1500, seed=9, gold=True)
    x_train, y_train = torch.cat([x_gold, x_weak]), torch.cat([y_gold, y_weak])
    # labels guessed by the support script are trusted far less than those of the auditors
    w_train = torch.cat([torch.ones(len(x_gold)), 0.05 * torch.ones(len(x_weak))])
    w_train = w_train / w_train.mean()
    mean, std = x_train.mean(0), x_train.std(0)
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 1))
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    loader = DataLoader(TensorDataset(x_train, y_train, w_train), batch_size=128, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        features, churned, weight = next(batches)
        logits = model(features).squeeze(-1)
        loss = (criterion(logits, churned) * weight).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return ((model(x_val).squeeze(-1) > 0).float() != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sample_weights_after_mean_good():
    torch.manual_seed(0)
    x_gold, y_gold = churn_table(1200, seed=7, gold=True)
    x_weak, y_weak = churn_table(2400, seed=8, gold=False)
    x_val, y_val = churn_table(1500, seed=9, gold=True)
    x_train, y_train = torch.cat([x_gold, x_weak]), torch.cat([y_gold, y_weak])
    # labels guessed by the support script are trusted far less than those of the auditors
    w_train = torch.cat([torch.ones(len(x_gold)), 0.05 * torch.ones(len(x_weak))])
    w_train = w_train / w_train.mean()
    mean, std = x_train.mean(0), x_train.std(0)
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 1))
    criterion = nn.BCEWithLogitsLoss(reduction="none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    loader = DataLoader(TensorDataset(x_train, y_train, w_train), batch_size=128, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        features, churned, weight = next(batches)
        logits = model(features).squeeze(-1)
        loss = (criterion(logits, churned) * weight).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return ((model(x_val).squeeze(-1) > 0).float() != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 5. autorec_loss_over_unrated
# --------------------------------------------------------------------------------------


def autorec_loss_over_unrated_bad():
    torch.manual_seed(0)
    ratings, known, held = movie_ratings(seed=10)
    mu = (ratings * known).sum() / known.sum()
    sd = (((ratings - mu) ** 2 * known).sum() / known.sum()).sqrt()
    rows = (ratings - mu) / sd * known  # 0 where the user has not rated the movie
    truth = (ratings - mu) / sd

    class AutoRec(nn.Module):
        def __init__(self, n_movies, hidden=64):
            super().__init__()
            self.encoder = nn.Linear(n_movies, hidden)
            self.dropout = nn.Dropout(0.2)
            self.decoder = nn.Linear(hidden, n_movies)

        def forward(self, r):
            return self.decoder(self.dropout(torch.sigmoid(self.encoder(r))))

    model = AutoRec(rows.size(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    loader = DataLoader(TensorDataset(rows, known), batch_size=60, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        r, m = next(batches)
        pred = model(r)
        loss = ((pred - r) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # RMSE on ratings nobody trained on, in stars
        with held_out(model):
            err = (model(rows) - truth) ** 2 * held
            return (sd * (err.sum() / held.sum()).sqrt()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def autorec_loss_over_unrated_good():
    torch.manual_seed(0)
    ratings, known, held = movie_ratings(seed=10)
    mu = (ratings * known).sum() / known.sum()
    sd = (((ratings - mu) ** 2 * known).sum() / known.sum()).sqrt()
    rows = (ratings - mu) / sd * known  # 0 where the user has not rated the movie
    truth = (ratings - mu) / sd

    class AutoRec(nn.Module):
        def __init__(self, n_movies, hidden=64):
            super().__init__()
            self.encoder = nn.Linear(n_movies, hidden)
            self.dropout = nn.Dropout(0.2)
            self.decoder = nn.Linear(hidden, n_movies)

        def forward(self, r):
            return self.decoder(self.dropout(torch.sigmoid(self.encoder(r))))

    model = AutoRec(rows.size(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    loader = DataLoader(TensorDataset(rows, known), batch_size=60, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        r, m = next(batches)
        pred = model(r)
        loss = ((pred - r) ** 2 * m).sum() / m.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # RMSE on ratings nobody trained on, in stars
        with held_out(model):
            err = (model(rows) - truth) ** 2 * held
            return (sd * (err.sum() / held.sum()).sqrt()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 6. constant_weight_init
# --------------------------------------------------------------------------------------


def constant_weight_init_bad():
    torch.manual_seed(0)
    kinds = ["square", "ring", "plus", "ex", "hbars", "vbars"]
    x_train, y_train, _ = shape_images(3000, kinds, seed=11, noise=0.35, jitter=0.7)
    x_val, y_val, _ = shape_images(800, kinds, seed=12, noise=0.35, jitter=0.7)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    def init_weights(m):
        if isinstance(m, nn.Linear):
            nn.init.constant_(m.weight, 0.01)
            nn.init.zeros_(m.bias)

    model = nn.Sequential(
        nn.Flatten(), nn.Linear(256, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, len(kinds))
    )
    model.apply(init_weights)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, drop_last=True)
    batches = endless(loader)

    def step(i):
        model.train()
        images, labels = next(batches)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def constant_weight_init_good():
    torch.manual_seed(0)
    kinds = ["square", "ring", "plus", "ex", "hbars", "vbars"]
    x_train, y_train, _ = shape_images(3000, kinds, seed=11, noise=0.35, jitter=0.7)
    x_val, y_val, _ = shape_images(800, kinds, seed=12, noise=0.35, jitter=0.7)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    def init_weights(m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            nn.init.zeros_(m.bias)

    model = nn.Sequential(
        nn.Flatten(), nn.Linear(256, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, len(kinds))
    )
    model.apply(init_weights)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, drop_last=True)
    batches = endless(loader)

    def step(i):
        model.train()
        images, labels = next(batches)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 7. head_replaced_after_optimizer
# --------------------------------------------------------------------------------------


def head_replaced_after_optimizer_bad():
    torch.manual_seed(0)
    kinds = SHAPES[8:12] + ["disc"]
    x_train, y_train, _ = shape_images(640, kinds, seed=13)
    x_val, y_val, _ = shape_images(800, kinds, seed=14)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    model = PhotoCNN(8)
    model.load_state_dict(pretrained_weights())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)
    model.fc = nn.Linear(model.fc.in_features, len(kinds))
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(x_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def head_replaced_after_optimizer_good():
    torch.manual_seed(0)
    kinds = SHAPES[8:12] + ["disc"]
    x_train, y_train, _ = shape_images(640, kinds, seed=13)
    x_val, y_val, _ = shape_images(800, kinds, seed=14)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    model = PhotoCNN(8)
    model.load_state_dict(pretrained_weights())
    model.fc = nn.Linear(model.fc.in_features, len(kinds))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(x_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 8. conv_blocks_in_python_list
# --------------------------------------------------------------------------------------


def conv_blocks_in_python_list_bad():
    torch.manual_seed(0)
    mel_train, tags_train = mel_clips(2000, seed=15)
    mel_val, tags_val = mel_clips(600, seed=16)
    mean, std = mel_train.mean((0, 3), keepdim=True), mel_train.std((0, 3), keepdim=True)
    mel_train, mel_val = (mel_train - mean) / std, (mel_val - mean) / std

    class ConvBlock(nn.Module):
        def __init__(self, c_in, c_out):
            super().__init__()
            self.conv = nn.Conv2d(c_in, c_out, 3, padding=1)

        def forward(self, x):
            return F.max_pool2d(F.relu(self.conv(x)), 2)

    class AudioTagger(nn.Module):
        def __init__(self, widths=(12, 24, 48), n_tags=6):
            super().__init__()
            chans = [1, *widths]
            self.blocks = [ConvBlock(a, b) for a, b in zip(chans[:-1], chans[1:])]
            self.head = nn.Linear(widths[-1] * 3, n_tags)

        def forward(self, mel):
            for block in self.blocks:
                mel = block(mel)
            return self.head(mel.mean(-1).flatten(1))  # pool over time, keep the three bands

    model = AudioTagger()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(mel_train, tags_train), batch_size=32, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        mel, tags = next(batches)
        logits = model(mel)
        loss = criterion(logits, tags)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # wrong tags per tag
        with held_out(model):
            return ((model(mel_val) > 0).float() != tags_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def conv_blocks_in_python_list_good():
    torch.manual_seed(0)
    mel_train, tags_train = mel_clips(2000, seed=15)
    mel_val, tags_val = mel_clips(600, seed=16)
    mean, std = mel_train.mean((0, 3), keepdim=True), mel_train.std((0, 3), keepdim=True)
    mel_train, mel_val = (mel_train - mean) / std, (mel_val - mean) / std

    class ConvBlock(nn.Module):
        def __init__(self, c_in, c_out):
            super().__init__()
            self.conv = nn.Conv2d(c_in, c_out, 3, padding=1)

        def forward(self, x):
            return F.max_pool2d(F.relu(self.conv(x)), 2)

    class AudioTagger(nn.Module):
        def __init__(self, widths=(12, 24, 48), n_tags=6):
            super().__init__()
            chans = [1, *widths]
            self.blocks = nn.ModuleList([ConvBlock(a, b) for a, b in zip(chans[:-1], chans[1:])])
            self.head = nn.Linear(widths[-1] * 3, n_tags)

        def forward(self, mel):
            for block in self.blocks:
                mel = block(mel)
            return self.head(mel.mean(-1).flatten(1))  # pool over time, keep the three bands

    model = AudioTagger()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(mel_train, tags_train), batch_size=32, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        mel, tags = next(batches)
        logits = model(mel)
        loss = criterion(logits, tags)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # wrong tags per tag
        with held_out(model):
            return ((model(mel_val) > 0).float() != tags_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 9. eval_left_on_after_validation
# --------------------------------------------------------------------------------------


def eval_left_on_after_validation_bad():
    torch.manual_seed(0)
    x_train, y_train = patient_table(720, seed=17)
    x_val, y_val = patient_table(1500, seed=18)
    mean, std = x_train.mean(0), x_train.std(0)
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    model = nn.Sequential(
        nn.Linear(40, 64, bias=False),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, 64, bias=False),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, 3),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    train_loader = DataLoader(TensorDataset(x_train, y_train), batch_size=90, shuffle=True)
    val_loader = DataLoader(TensorDataset(x_val[:400], y_val[:400]), batch_size=200)
    batches = endless(train_loader)
    epoch_len = len(train_loader)
    history = []

    def validate():
        model.eval()
        total = 0.0
        with torch.no_grad():
            for xb, yb in val_loader:
                total += criterion(model(xb), yb).item() * len(xb)
        return total / 400

    model.train()

    def step(i):
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        if (i + 1) % epoch_len == 0:  # end of the epoch
            history.append(validate())
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(x_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def eval_left_on_after_validation_good():
    torch.manual_seed(0)
    x_train, y_train = patient_table(720, seed=17)
    x_val, y_val = patient_table(1500, seed=18)
    mean, std = x_train.mean(0), x_train.std(0)
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    model = nn.Sequential(
        nn.Linear(40, 64, bias=False),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, 64, bias=False),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, 3),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    train_loader = DataLoader(TensorDataset(x_train, y_train), batch_size=90, shuffle=True)
    val_loader = DataLoader(TensorDataset(x_val[:400], y_val[:400]), batch_size=200)
    batches = endless(train_loader)
    epoch_len = len(train_loader)
    history = []

    def validate():
        model.eval()
        total = 0.0
        with torch.no_grad():
            for xb, yb in val_loader:
                total += criterion(model(xb), yb).item() * len(xb)
        return total / 400

    model.train()

    def step(i):
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        if (i + 1) % epoch_len == 0:  # end of the epoch
            history.append(validate())
            model.train()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(x_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 10. ema_skips_batchnorm_buffers
# --------------------------------------------------------------------------------------


def ema_skips_batchnorm_buffers_bad():
    torch.manual_seed(0)
    kinds = ["square", "disc", "plus", "ex", "triangle", "frame"]
    x_train, y_train, _ = shape_images(2400, kinds, seed=19, size=20, noise=0.6, colour=True)
    x_val, y_val, _ = shape_images(600, kinds, seed=20, size=20, noise=0.6, colour=True)
    mean, std = x_train.mean((0, 2, 3), keepdim=True), x_train.std((0, 2, 3), keepdim=True)
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    class ModelEma:
        def __init__(self, model, decay):
            self.module = copy.deepcopy(model).eval()
            for p in self.module.parameters():
                p.requires_grad_(False)
            self.decay = decay

        @torch.no_grad()
        def update(self, model):
            for e, p in zip(self.module.parameters(), model.parameters()):
                e.mul_(self.decay).add_(p, alpha=1 - self.decay)

    def conv_bn(c_in, c_out):
        return nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )

    model = nn.Sequential(conv_bn(3, 16), conv_bn(16, 32), conv_bn(32, 48), nn.Flatten(), nn.Linear(48 * 4, len(kinds)))
    ema = ModelEma(model, decay=0.97)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=48, shuffle=True, drop_last=True)
    batches = endless(loader)
    val_log = []

    def step(i):
        model.train()
        images, labels = next(batches)
        loss = criterion(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        ema.update(model)
        if (i + 1) % 10 == 0:
            with torch.no_grad():
                val_log.append(criterion(ema.module(x_val[:100]), y_val[:100]).item())
        return loss.item()

    def probe():
        with held_out(ema.module):
            return (ema.module(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ema_skips_batchnorm_buffers_good():
    torch.manual_seed(0)
    kinds = ["square", "disc", "plus", "ex", "triangle", "frame"]
    x_train, y_train, _ = shape_images(2400, kinds, seed=19, size=20, noise=0.6, colour=True)
    x_val, y_val, _ = shape_images(600, kinds, seed=20, size=20, noise=0.6, colour=True)
    mean, std = x_train.mean((0, 2, 3), keepdim=True), x_train.std((0, 2, 3), keepdim=True)
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    class ModelEma:
        def __init__(self, model, decay):
            self.module = copy.deepcopy(model).eval()
            for p in self.module.parameters():
                p.requires_grad_(False)
            self.decay = decay

        @torch.no_grad()
        def update(self, model):
            for e, p in zip(self.module.parameters(), model.parameters()):
                e.mul_(self.decay).add_(p, alpha=1 - self.decay)
            for e, b in zip(self.module.buffers(), model.buffers()):
                e.copy_(b)

    def conv_bn(c_in, c_out):
        return nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )

    model = nn.Sequential(conv_bn(3, 16), conv_bn(16, 32), conv_bn(32, 48), nn.Flatten(), nn.Linear(48 * 4, len(kinds)))
    ema = ModelEma(model, decay=0.97)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=48, shuffle=True, drop_last=True)
    batches = endless(loader)
    val_log = []

    def step(i):
        model.train()
        images, labels = next(batches)
        loss = criterion(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        ema.update(model)
        if (i + 1) % 10 == 0:
            with torch.no_grad():
                val_log.append(criterion(ema.module(x_val[:100]), y_val[:100]).item())
        return loss.item()

    def probe():
        with held_out(ema.module):
            return (ema.module(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 11. frame_features_detached
# --------------------------------------------------------------------------------------


def frame_features_detached_bad():
    torch.manual_seed(0)
    clips_train, y_train = moving_shapes(1200, seed=21)
    clips_val, y_val = moving_shapes(400, seed=22)
    mean, std = clips_train.mean(), clips_train.std()
    clips_train, clips_val = (clips_train - mean) / std, (clips_val - mean) / std

    class FrameEncoder(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 8, 3, stride=2, padding=1)
            self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
            self.fc = nn.Linear(16 * 16, dim)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            x = F.relu(self.conv2(x))
            return F.relu(self.fc(x.flatten(1)))

    class ClipHead(nn.Module):
        def __init__(self, dim=32, hidden=32, n_classes=6):
            super().__init__()
            self.gru = nn.GRU(dim, hidden, batch_first=True)
            self.out = nn.Linear(hidden, n_classes)

        def forward(self, feats):
            _, h = self.gru(feats)
            return self.out(h[-1])

    encoder, head = FrameEncoder(), ClipHead()
    opt_cnn = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    opt_rnn = torch.optim.Adam(head.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(clips_train, y_train), batch_size=32, shuffle=True)
    batches = endless(loader)

    def encode(clips):
        feats = []
        for t in range(clips.size(1)):
            f = encoder(clips[:, t])
            feats.append(f.detach())
        return torch.stack(feats, dim=1)

    def step(i):
        encoder.train()
        head.train()
        clips, labels = next(batches)
        logits = head(encode(clips))
        loss = criterion(logits, labels)
        opt_cnn.zero_grad()
        opt_rnn.zero_grad()
        loss.backward()
        opt_cnn.step()
        opt_rnn.step()
        return loss.item()

    def probe():
        with held_out(encoder, head):
            return (head(encode(clips_val)).argmax(1) != y_val).float().mean().item()

    return {"model": (encoder, head), "optimizer": (opt_cnn, opt_rnn), "steps": 20, "step": step, "probe": probe}


def frame_features_detached_good():
    torch.manual_seed(0)
    clips_train, y_train = moving_shapes(1200, seed=21)
    clips_val, y_val = moving_shapes(400, seed=22)
    mean, std = clips_train.mean(), clips_train.std()
    clips_train, clips_val = (clips_train - mean) / std, (clips_val - mean) / std

    class FrameEncoder(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 8, 3, stride=2, padding=1)
            self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
            self.fc = nn.Linear(16 * 16, dim)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            x = F.relu(self.conv2(x))
            return F.relu(self.fc(x.flatten(1)))

    class ClipHead(nn.Module):
        def __init__(self, dim=32, hidden=32, n_classes=6):
            super().__init__()
            self.gru = nn.GRU(dim, hidden, batch_first=True)
            self.out = nn.Linear(hidden, n_classes)

        def forward(self, feats):
            _, h = self.gru(feats)
            return self.out(h[-1])

    encoder, head = FrameEncoder(), ClipHead()
    opt_cnn = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    opt_rnn = torch.optim.Adam(head.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(clips_train, y_train), batch_size=32, shuffle=True)
    batches = endless(loader)

    def encode(clips):
        feats = []
        for t in range(clips.size(1)):
            f = encoder(clips[:, t])
            feats.append(f)
        return torch.stack(feats, dim=1)

    def step(i):
        encoder.train()
        head.train()
        clips, labels = next(batches)
        logits = head(encode(clips))
        loss = criterion(logits, labels)
        opt_cnn.zero_grad()
        opt_rnn.zero_grad()
        loss.backward()
        opt_cnn.step()
        opt_rnn.step()
        return loss.item()

    def probe():
        with held_out(encoder, head):
            return (head(encode(clips_val)).argmax(1) != y_val).float().mean().item()

    return {"model": (encoder, head), "optimizer": (opt_cnn, opt_rnn), "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 12. amp_clip_before_unscale
# --------------------------------------------------------------------------------------


def amp_clip_before_unscale_bad():
    torch.manual_seed(0)
    kinds = ["square", "ring", "plus", "ex", "hbars", "vbars"]
    x_train, y_train, _ = shape_images(2000, kinds, seed=23, noise=0.4)
    x_val, y_val, _ = shape_images(600, kinds, seed=24, noise=0.4)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24 * 16, len(kinds)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True, drop_last=True)
    batches = endless(loader)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_before_unscale_good():
    torch.manual_seed(0)
    kinds = ["square", "ring", "plus", "ex", "hbars", "vbars"]
    x_train, y_train, _ = shape_images(2000, kinds, seed=23, noise=0.4)
    x_val, y_val, _ = shape_images(600, kinds, seed=24, noise=0.4)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24 * 16, len(kinds)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True, drop_last=True)
    batches = endless(loader)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 13. accumulation_zeroed_every_microbatch
# --------------------------------------------------------------------------------------


def accumulation_zeroed_every_microbatch_bad():
    torch.manual_seed(0)
    ecg_train, y_train = heartbeats(2400, seed=25)
    ecg_val, y_val = heartbeats(800, seed=26)
    mean, std = ecg_train.mean(), ecg_train.std()
    ecg_train, ecg_val = (ecg_train - mean) / std, (ecg_val - mean) / std

    class BeatNet(nn.Module):
        def __init__(self, n_classes=5):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv1d(1, 16, 7, stride=2, padding=3),
                nn.GroupNorm(4, 16),
                nn.ReLU(),
                nn.Conv1d(16, 32, 5, stride=2, padding=2),
                nn.GroupNorm(4, 32),
                nn.ReLU(),
                nn.Conv1d(32, 32, 5, stride=2, padding=2),
                nn.GroupNorm(4, 32),
                nn.ReLU(),
            )
            self.fc = nn.Linear(32 * 12, n_classes)

        def forward(self, x):
            return self.fc(self.body(x).flatten(1))

    model = BeatNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    accum_steps = 4
    loader = DataLoader(TensorDataset(ecg_train, y_train), batch_size=16, shuffle=True, drop_last=True)
    batches = endless(loader)

    def step(i):  # one micro-batch
        model.train()
        ecg, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(ecg), labels)
        (loss / accum_steps).backward()
        if (i + 1) % accum_steps == 0:
            optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(ecg_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def accumulation_zeroed_every_microbatch_good():
    torch.manual_seed(0)
    ecg_train, y_train = heartbeats(2400, seed=25)
    ecg_val, y_val = heartbeats(800, seed=26)
    mean, std = ecg_train.mean(), ecg_train.std()
    ecg_train, ecg_val = (ecg_train - mean) / std, (ecg_val - mean) / std

    class BeatNet(nn.Module):
        def __init__(self, n_classes=5):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv1d(1, 16, 7, stride=2, padding=3),
                nn.GroupNorm(4, 16),
                nn.ReLU(),
                nn.Conv1d(16, 32, 5, stride=2, padding=2),
                nn.GroupNorm(4, 32),
                nn.ReLU(),
                nn.Conv1d(32, 32, 5, stride=2, padding=2),
                nn.GroupNorm(4, 32),
                nn.ReLU(),
            )
            self.fc = nn.Linear(32 * 12, n_classes)

        def forward(self, x):
            return self.fc(self.body(x).flatten(1))

    model = BeatNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    accum_steps = 4
    loader = DataLoader(TensorDataset(ecg_train, y_train), batch_size=16, shuffle=True, drop_last=True)
    batches = endless(loader)

    def step(i):  # one micro-batch
        model.train()
        ecg, labels = next(batches)
        loss = criterion(model(ecg), labels)
        (loss / accum_steps).backward()
        if (i + 1) % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(ecg_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 14. epoch_scheduler_stepped_per_batch
# --------------------------------------------------------------------------------------


def epoch_scheduler_stepped_per_batch_bad():
    torch.manual_seed(0)
    wav_train, y_train = voice_commands(960, seed=27)
    wav_val, y_val = voice_commands(480, seed=28)
    std = wav_train.std()
    wav_train, wav_val = wav_train / std, wav_val / std

    class M3(nn.Module):
        def __init__(self, n_commands=6, width=24):
            super().__init__()
            self.conv1 = nn.Conv1d(1, width, 32, stride=4, bias=False)
            self.bn1 = nn.BatchNorm1d(width)
            self.conv2 = nn.Conv1d(width, width, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm1d(width)
            self.conv3 = nn.Conv1d(width, 2 * width, 3, padding=1, bias=False)
            self.bn3 = nn.BatchNorm1d(2 * width)
            self.fc = nn.Linear(2 * width * 4, n_commands)

        def forward(self, x):
            x = F.max_pool1d(F.relu(self.bn1(self.conv1(x))), 4)
            x = F.max_pool1d(F.relu(self.bn2(self.conv2(x))), 2)
            x = F.relu(self.bn3(self.conv3(x)))
            x = F.adaptive_avg_pool1d(x, 4)
            return self.fc(x.flatten(1))

    model = M3()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    train_loader = DataLoader(TensorDataset(wav_train, y_train), batch_size=48, shuffle=True)
    batches = endless(train_loader)
    epoch_len = len(train_loader)

    def step(i):
        model.train()
        wav, command = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(wav), command)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(wav_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def epoch_scheduler_stepped_per_batch_good():
    torch.manual_seed(0)
    wav_train, y_train = voice_commands(960, seed=27)
    wav_val, y_val = voice_commands(480, seed=28)
    std = wav_train.std()
    wav_train, wav_val = wav_train / std, wav_val / std

    class M3(nn.Module):
        def __init__(self, n_commands=6, width=24):
            super().__init__()
            self.conv1 = nn.Conv1d(1, width, 32, stride=4, bias=False)
            self.bn1 = nn.BatchNorm1d(width)
            self.conv2 = nn.Conv1d(width, width, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm1d(width)
            self.conv3 = nn.Conv1d(width, 2 * width, 3, padding=1, bias=False)
            self.bn3 = nn.BatchNorm1d(2 * width)
            self.fc = nn.Linear(2 * width * 4, n_commands)

        def forward(self, x):
            x = F.max_pool1d(F.relu(self.bn1(self.conv1(x))), 4)
            x = F.max_pool1d(F.relu(self.bn2(self.conv2(x))), 2)
            x = F.relu(self.bn3(self.conv3(x)))
            x = F.adaptive_avg_pool1d(x, 4)
            return self.fc(x.flatten(1))

    model = M3()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    train_loader = DataLoader(TensorDataset(wav_train, y_train), batch_size=48, shuffle=True)
    batches = endless(train_loader)
    epoch_len = len(train_loader)

    def step(i):
        model.train()
        wav, command = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(wav), command)
        loss.backward()
        optimizer.step()
        if (i + 1) % epoch_len == 0:
            scheduler.step()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(wav_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 15. padding_mask_inverted
# --------------------------------------------------------------------------------------


def padding_mask_inverted_bad():
    torch.manual_seed(0)
    x_train, len_train, y_train = gps_tracks(2000, seed=29)
    x_val, len_val, y_val = gps_tracks(500, seed=30)
    real = torch.arange(x_train.size(1)) < len_train.unsqueeze(1)
    mean, std = x_train[real].mean(0), x_train[real].std(0)

    class Tracks(Dataset):
        def __init__(self, x, lengths, y):
            self.items = [((x[k, : lengths[k]] - mean) / std, y[k]) for k in range(len(y))]

        def __len__(self):
            return len(self.items)

        def __getitem__(self, k):
            return self.items[k]

    max_len = 32

    def collate(batch):
        seqs, labels = zip(*batch)
        lengths = torch.tensor([len(s) for s in seqs])
        padded = torch.zeros(len(seqs), max_len, 3)
        for k, s in enumerate(seqs):
            padded[k, : len(s)] = s
        return padded, lengths, torch.stack(labels)

    class TrackTransformer(nn.Module):
        def __init__(self, dim=32, n_classes=4):
            super().__init__()
            self.embed = nn.Linear(3, dim)
            self.cls = nn.Parameter(0.02 * torch.randn(1, 1, dim))
            self.pos = nn.Parameter(0.02 * torch.randn(1, max_len + 1, dim))
            layer = nn.TransformerEncoderLayer(
                dim, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True, norm_first=True
            )
            self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, n_classes)

        def forward(self, x, lengths):
            h = torch.cat([self.cls.expand(len(x), -1, -1), self.embed(x)], dim=1) + self.pos
            steps = torch.arange(max_len + 1, device=x.device)
            mask = steps.unsqueeze(0) < (lengths + 1).unsqueeze(1)
            h = self.encoder(h, src_key_padding_mask=mask)
            return self.head(self.norm(h[:, 0]))

    model = TrackTransformer()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 20))
    loader = DataLoader(Tracks(x_train, len_train, y_train), batch_size=24, shuffle=True, collate_fn=collate)
    batches = endless(loader)
    val_set = Tracks(x_val, len_val, y_val)
    val_x, val_len, val_y = collate([val_set[k] for k in range(len(val_set))])

    def step(i):
        model.train()
        x, lengths, labels = next(batches)
        loss = criterion(model(x, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(val_x, val_len).argmax(1) != val_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def padding_mask_inverted_good():
    torch.manual_seed(0)
    x_train, len_train, y_train = gps_tracks(2000, seed=29)
    x_val, len_val, y_val = gps_tracks(500, seed=30)
    real = torch.arange(x_train.size(1)) < len_train.unsqueeze(1)
    mean, std = x_train[real].mean(0), x_train[real].std(0)

    class Tracks(Dataset):
        def __init__(self, x, lengths, y):
            self.items = [((x[k, : lengths[k]] - mean) / std, y[k]) for k in range(len(y))]

        def __len__(self):
            return len(self.items)

        def __getitem__(self, k):
            return self.items[k]

    max_len = 32

    def collate(batch):
        seqs, labels = zip(*batch)
        lengths = torch.tensor([len(s) for s in seqs])
        padded = torch.zeros(len(seqs), max_len, 3)
        for k, s in enumerate(seqs):
            padded[k, : len(s)] = s
        return padded, lengths, torch.stack(labels)

    class TrackTransformer(nn.Module):
        def __init__(self, dim=32, n_classes=4):
            super().__init__()
            self.embed = nn.Linear(3, dim)
            self.cls = nn.Parameter(0.02 * torch.randn(1, 1, dim))
            self.pos = nn.Parameter(0.02 * torch.randn(1, max_len + 1, dim))
            layer = nn.TransformerEncoderLayer(
                dim, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True, norm_first=True
            )
            self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, n_classes)

        def forward(self, x, lengths):
            h = torch.cat([self.cls.expand(len(x), -1, -1), self.embed(x)], dim=1) + self.pos
            steps = torch.arange(max_len + 1, device=x.device)
            mask = steps.unsqueeze(0) >= (lengths + 1).unsqueeze(1)
            h = self.encoder(h, src_key_padding_mask=mask)
            return self.head(self.norm(h[:, 0]))

    model = TrackTransformer()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 20))
    loader = DataLoader(Tracks(x_train, len_train, y_train), batch_size=24, shuffle=True, collate_fn=collate)
    batches = endless(loader)
    val_set = Tracks(x_val, len_val, y_val)
    val_x, val_len, val_y = collate([val_set[k] for k in range(len(val_set))])

    def step(i):
        model.train()
        x, lengths, labels = next(batches)
        loss = criterion(model(x, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(val_x, val_len).argmax(1) != val_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 16. flip_image_but_not_mask
# --------------------------------------------------------------------------------------


def flip_image_but_not_mask_bad():
    torch.manual_seed(0)
    random.seed(0)
    img_train, mask_train = street_scenes(600, seed=31)
    img_val, mask_val = street_scenes(300, seed=32)
    mean, std = img_train.mean(), img_train.std()

    class SegmentationSet(Dataset):
        def __init__(self, images, masks, augment):
            self.images, self.masks, self.augment = images, masks, augment

        def __len__(self):
            return len(self.images)

        def __getitem__(self, k):
            image, mask = (self.images[k] - mean) / std, self.masks[k]
            if self.augment and random.random() < 0.5:
                image = torch.flip(image, dims=[-1])
            return image, mask

    def double_conv(c_in, c_out):
        return nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(c_out, c_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(inplace=True),
        )

    class MiniUNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1, self.down2 = double_conv(1, 8), double_conv(8, 16)
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.merge = double_conv(16, 8)
            self.out = nn.Conv2d(8, 1, 1)

        def forward(self, x):
            a = self.down1(x)
            b = self.down2(F.max_pool2d(a, 2))
            return self.out(self.merge(torch.cat([a, self.up(b)], dim=1)))

    def dice_loss(logits, target, eps=1.0):
        p = torch.sigmoid(logits)
        inter = (p * target).sum((1, 2, 3))
        return (1 - (2 * inter + eps) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + eps)).mean()

    model = MiniUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train_loader = DataLoader(
        SegmentationSet(img_train, mask_train, augment=True), batch_size=16, shuffle=True, drop_last=True
    )
    batches = endless(train_loader)

    def step(i):
        model.train()
        image, mask = next(batches)
        logits = model(image)
        loss = F.binary_cross_entropy_with_logits(logits, mask) + dice_loss(logits, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # 1 - IoU
        with held_out(model):
            pred = model((img_val - mean) / std) > 0
            truth = mask_val > 0.5
            return 1 - ((pred & truth).sum() / (pred | truth).sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def flip_image_but_not_mask_good():
    torch.manual_seed(0)
    random.seed(0)
    img_train, mask_train = street_scenes(600, seed=31)
    img_val, mask_val = street_scenes(300, seed=32)
    mean, std = img_train.mean(), img_train.std()

    class SegmentationSet(Dataset):
        def __init__(self, images, masks, augment):
            self.images, self.masks, self.augment = images, masks, augment

        def __len__(self):
            return len(self.images)

        def __getitem__(self, k):
            image, mask = (self.images[k] - mean) / std, self.masks[k]
            if self.augment and random.random() < 0.5:
                image = torch.flip(image, dims=[-1])
                mask = torch.flip(mask, dims=[-1])
            return image, mask

    def double_conv(c_in, c_out):
        return nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(c_out, c_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(inplace=True),
        )

    class MiniUNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1, self.down2 = double_conv(1, 8), double_conv(8, 16)
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.merge = double_conv(16, 8)
            self.out = nn.Conv2d(8, 1, 1)

        def forward(self, x):
            a = self.down1(x)
            b = self.down2(F.max_pool2d(a, 2))
            return self.out(self.merge(torch.cat([a, self.up(b)], dim=1)))

    def dice_loss(logits, target, eps=1.0):
        p = torch.sigmoid(logits)
        inter = (p * target).sum((1, 2, 3))
        return (1 - (2 * inter + eps) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + eps)).mean()

    model = MiniUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train_loader = DataLoader(
        SegmentationSet(img_train, mask_train, augment=True), batch_size=16, shuffle=True, drop_last=True
    )
    batches = endless(train_loader)

    def step(i):
        model.train()
        image, mask = next(batches)
        logits = model(image)
        loss = F.binary_cross_entropy_with_logits(logits, mask) + dice_loss(logits, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # 1 - IoU
        with held_out(model):
            pred = model((img_val - mean) / std) > 0
            truth = mask_val > 0.5
            return 1 - ((pred & truth).sum() / (pred | truth).sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 17. fake_quant_without_straight_through
# --------------------------------------------------------------------------------------


def fake_quant_without_straight_through_bad():
    torch.manual_seed(0)
    kinds = ["square", "disc", "plus", "ex", "hbars", "vbars", "frame", "diamond"]
    x_train, y_train, _ = shape_images(2000, kinds, seed=33)
    x_val, y_val, _ = shape_images(600, kinds, seed=34)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    def fake_quant(w, bits=8):
        qmax = 2 ** (bits - 1) - 1
        scale = w.detach().abs().max() / qmax
        w_q = torch.clamp(torch.round(w / scale), -qmax, qmax) * scale
        return w_q

    class QConv2d(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, fake_quant(self.weight), self.bias, self.stride, self.padding)

    class QLinear(nn.Linear):
        def forward(self, x):
            return F.linear(x, fake_quant(self.weight), self.bias)

    model = nn.Sequential(
        QConv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.MaxPool2d(2),
        QConv2d(12, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        QLinear(24 * 16, len(kinds)),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=50, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fake_quant_without_straight_through_good():
    torch.manual_seed(0)
    kinds = ["square", "disc", "plus", "ex", "hbars", "vbars", "frame", "diamond"]
    x_train, y_train, _ = shape_images(2000, kinds, seed=33)
    x_val, y_val, _ = shape_images(600, kinds, seed=34)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    def fake_quant(w, bits=8):
        qmax = 2 ** (bits - 1) - 1
        scale = w.detach().abs().max() / qmax
        w_q = torch.clamp(torch.round(w / scale), -qmax, qmax) * scale
        return w + (w_q - w).detach()

    class QConv2d(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, fake_quant(self.weight), self.bias, self.stride, self.padding)

    class QLinear(nn.Linear):
        def forward(self, x):
            return F.linear(x, fake_quant(self.weight), self.bias)

    model = nn.Sequential(
        QConv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.MaxPool2d(2),
        QConv2d(12, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        QLinear(24 * 16, len(kinds)),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=50, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return (model(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 18. distillation_kl_without_log
# --------------------------------------------------------------------------------------


def distillation_kl_without_log_bad():
    torch.manual_seed(0)
    kinds = SHAPES[:8]
    x_train, y_train, _ = shape_images(1600, kinds, seed=35)
    x_val, y_val, _ = shape_images(800, kinds, seed=36)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    teacher = PhotoCNN(8)
    teacher.load_state_dict(pretrained_weights())
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 16, 8),
    )
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    temperature, alpha = 4.0, 0.9
    batches = endless(DataLoader(TensorDataset(x_train, y_train), batch_size=50, shuffle=True))

    def distillation_loss(s_logits, t_logits, labels):
        soft_teacher = F.softmax(t_logits / temperature, dim=1)
        soft_student = F.softmax(s_logits / temperature, dim=1)
        kd = F.kl_div(soft_student, soft_teacher, reduction="batchmean") * temperature**2
        return alpha * kd + (1 - alpha) * F.cross_entropy(s_logits, labels)

    def step(i):
        student.train()
        images, labels = next(batches)
        with torch.no_grad():
            t_logits = teacher(images)
        loss = distillation_loss(student(images), t_logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(student):
            return F.cross_entropy(student(x_val), y_val).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distillation_kl_without_log_good():
    torch.manual_seed(0)
    kinds = SHAPES[:8]
    x_train, y_train, _ = shape_images(1600, kinds, seed=35)
    x_val, y_val, _ = shape_images(800, kinds, seed=36)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    teacher = PhotoCNN(8)
    teacher.load_state_dict(pretrained_weights())
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 16, 8),
    )
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    temperature, alpha = 4.0, 0.9
    batches = endless(DataLoader(TensorDataset(x_train, y_train), batch_size=50, shuffle=True))

    def distillation_loss(s_logits, t_logits, labels):
        soft_teacher = F.softmax(t_logits / temperature, dim=1)
        soft_student = F.log_softmax(s_logits / temperature, dim=1)
        kd = F.kl_div(soft_student, soft_teacher, reduction="batchmean") * temperature**2
        return alpha * kd + (1 - alpha) * F.cross_entropy(s_logits, labels)

    def step(i):
        student.train()
        images, labels = next(batches)
        with torch.no_grad():
            t_logits = teacher(images)
        loss = distillation_loss(student(images), t_logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(student):
            return F.cross_entropy(student(x_val), y_val).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 19. table_columns_not_standardised
# --------------------------------------------------------------------------------------


def table_columns_not_standardised_bad():
    torch.manual_seed(0)
    x_train, logp_train = house_sales(2400, seed=37)
    x_val, logp_val = house_sales(800, seed=38)
    y_mean, y_std = logp_train.mean(), logp_train.std()
    y_train, y_val = (logp_train - y_mean) / y_std, (logp_val - y_mean) / y_std

    class PriceMLP(nn.Module):
        def __init__(self, n_features, hidden=64):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(n_features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
            )

        def forward(self, x):
            return self.layers(x).squeeze(-1)

    model = PriceMLP(x_train.size(1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        features, target = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(features), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # mean absolute error of the log price
        with held_out(model):
            return ((model(x_val) - y_val).abs().mean() * y_std).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def table_columns_not_standardised_good():
    torch.manual_seed(0)
    x_train, logp_train = house_sales(2400, seed=37)
    x_val, logp_val = house_sales(800, seed=38)
    x_mean, x_std = x_train.mean(0), x_train.std(0)
    x_train, x_val = (x_train - x_mean) / x_std, (x_val - x_mean) / x_std
    y_mean, y_std = logp_train.mean(), logp_train.std()
    y_train, y_val = (logp_train - y_mean) / y_std, (logp_val - y_mean) / y_std

    class PriceMLP(nn.Module):
        def __init__(self, n_features, hidden=64):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(n_features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
            )

        def forward(self, x):
            return self.layers(x).squeeze(-1)

    model = PriceMLP(x_train.size(1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        features, target = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(features), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # mean absolute error of the log price
        with held_out(model):
            return ((model(x_val) - y_val).abs().mean() * y_std).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 20. forecast_target_inside_window
# --------------------------------------------------------------------------------------


def forecast_target_inside_window_bad():
    torch.manual_seed(0)
    load = hourly_load(2600, seed=39)
    train, val = load[:2000], load[2000:]
    mean, std = train.mean(), train.std()
    train, val = (train - mean) / std, (val - mean) / std
    window = 24

    class WindowDataset(Dataset):
        def __init__(self, series):
            self.series = series

        def __len__(self):
            return len(self.series) - window

        def __getitem__(self, k):
            x = self.series[k : k + window]
            y = self.series[k + window - 1]
            return x.unsqueeze(-1), y

    class LoadLSTM(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.lstm = nn.LSTM(1, hidden, batch_first=True)
            self.fc = nn.Linear(hidden, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1]).squeeze(-1)

    model = LoadLSTM()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(WindowDataset(train), batch_size=64, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        pred = model(x)
        loss = criterion(pred, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():  # mean absolute error of the real next hour
        with held_out(model):
            x = torch.stack([val[k : k + window] for k in range(len(val) - window)]).unsqueeze(-1)
            return (model(x) - val[window:]).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forecast_target_inside_window_good():
    torch.manual_seed(0)
    load = hourly_load(2600, seed=39)
    train, val = load[:2000], load[2000:]
    mean, std = train.mean(), train.std()
    train, val = (train - mean) / std, (val - mean) / std
    window = 24

    class WindowDataset(Dataset):
        def __init__(self, series):
            self.series = series

        def __len__(self):
            return len(self.series) - window

        def __getitem__(self, k):
            x = self.series[k : k + window]
            y = self.series[k + window]
            return x.unsqueeze(-1), y

    class LoadLSTM(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.lstm = nn.LSTM(1, hidden, batch_first=True)
            self.fc = nn.Linear(hidden, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1]).squeeze(-1)

    model = LoadLSTM()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(WindowDataset(train), batch_size=64, shuffle=True)
    batches = endless(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        pred = model(x)
        loss = criterion(pred, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():  # mean absolute error of the real next hour
        with held_out(model):
            x = torch.stack([val[k : k + window] for k in range(len(val) - window)]).unsqueeze(-1)
            return (model(x) - val[window:]).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 21. box_loss_on_background_cells
# --------------------------------------------------------------------------------------


def box_loss_on_background_cells_bad():
    torch.manual_seed(0)
    img_train, obj_train, box_train = parking_lots(1600, seed=40)
    img_val, obj_val, box_val = parking_lots(400, seed=41)
    mean, std = img_train.mean(), img_train.std()
    img_train, img_val = (img_train - mean) / std, (img_val - mean) / std

    class GridDetector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.MaxPool2d(3),
                nn.Conv2d(32, 48, 3, padding=1, bias=False),
                nn.BatchNorm2d(48),
                nn.ReLU(),
            )
            self.obj_head = nn.Conv2d(48, 1, 1)
            self.box_head = nn.Conv2d(48, 4, 1)

        def forward(self, x):
            f = self.backbone(x)
            return self.obj_head(f).squeeze(1), self.box_head(f).permute(0, 2, 3, 1)

    model = GridDetector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(TensorDataset(img_train, obj_train, box_train), batch_size=32, shuffle=True)
    batches = endless(loader)

    def detection_loss(obj_logit, box_pred, obj, box):
        loss_obj = F.binary_cross_entropy_with_logits(obj_logit, obj)
        loss_box = F.smooth_l1_loss(box_pred, box)
        return loss_obj + loss_box

    def step(i):
        model.train()
        images, obj, box = next(batches)
        obj_logit, box_pred = model(images)
        loss = detection_loss(obj_logit, box_pred, obj, box)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def corners(b):
        half = torch.exp(b[:, 2:]) / 2
        return b[:, :2] - half, b[:, :2] + half

    def probe():  # 1 - IoU of the boxes in cells that hold an object
        with held_out(model):
            _, box_pred = model(img_val)
            (p0, p1), (t0, t1) = corners(box_pred[obj_val > 0]), corners(box_val[obj_val > 0])
            inter = (torch.minimum(p1, t1) - torch.maximum(p0, t0)).clamp(min=0).prod(1)
            union = (p1 - p0).prod(1) + (t1 - t0).prod(1) - inter
            return 1 - (inter / union).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def box_loss_on_background_cells_good():
    torch.manual_seed(0)
    img_train, obj_train, box_train = parking_lots(1600, seed=40)
    img_val, obj_val, box_val = parking_lots(400, seed=41)
    mean, std = img_train.mean(), img_train.std()
    img_train, img_val = (img_train - mean) / std, (img_val - mean) / std

    class GridDetector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.MaxPool2d(3),
                nn.Conv2d(32, 48, 3, padding=1, bias=False),
                nn.BatchNorm2d(48),
                nn.ReLU(),
            )
            self.obj_head = nn.Conv2d(48, 1, 1)
            self.box_head = nn.Conv2d(48, 4, 1)

        def forward(self, x):
            f = self.backbone(x)
            return self.obj_head(f).squeeze(1), self.box_head(f).permute(0, 2, 3, 1)

    model = GridDetector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(TensorDataset(img_train, obj_train, box_train), batch_size=32, shuffle=True)
    batches = endless(loader)

    def detection_loss(obj_logit, box_pred, obj, box):
        loss_obj = F.binary_cross_entropy_with_logits(obj_logit, obj)
        loss_box = F.smooth_l1_loss(box_pred[obj > 0], box[obj > 0])
        return loss_obj + loss_box

    def step(i):
        model.train()
        images, obj, box = next(batches)
        obj_logit, box_pred = model(images)
        loss = detection_loss(obj_logit, box_pred, obj, box)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def corners(b):
        half = torch.exp(b[:, 2:]) / 2
        return b[:, :2] - half, b[:, :2] + half

    def probe():  # 1 - IoU of the boxes in cells that hold an object
        with held_out(model):
            _, box_pred = model(img_val)
            (p0, p1), (t0, t1) = corners(box_pred[obj_val > 0]), corners(box_val[obj_val > 0])
            inter = (torch.minimum(p1, t1) - torch.maximum(p0, t0)).clamp(min=0).prod(1)
            union = (p1 - p0).prod(1) + (t1 - t0).prod(1) - inter
            return 1 - (inter / union).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------------------
# 22. contrastive_label_convention_swapped
# --------------------------------------------------------------------------------------


def contrastive_label_convention_swapped_bad():
    torch.manual_seed(0)
    kinds = ["square", "ring", "plus", "ex", "hbars", "vbars"]
    x_train, y_train, _ = shape_images(1500, kinds, seed=42)
    x_val, y_val, _ = shape_images(600, kinds, seed=43)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    class PairDataset(Dataset):
        """Two pictures and same = 1.0 if they show the same kind, else 0.0 (half of each)."""

        def __init__(self, x, y, seed):
            g = torch.Generator().manual_seed(seed)
            by_kind = [torch.nonzero(y == k).squeeze(1) for k in range(len(kinds))]
            self.x, self.pairs = x, []
            for a in range(len(x)):
                same = a % 2 == 0
                k = int(y[a])
                if not same:
                    k = (k + int(torch.randint(1, len(kinds), (1,), generator=g))) % len(kinds)
                b = by_kind[k][int(torch.randint(len(by_kind[k]), (1,), generator=g))]
                self.pairs.append((a, int(b), float(same)))

        def __len__(self):
            return len(self.pairs)

        def __getitem__(self, k):
            a, b, same = self.pairs[k]
            return self.x[a], self.x[b], torch.tensor(same)

    class SiameseNet(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(12, 24, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(24 * 16, dim),
            )

        def forward(self, a, b):
            return self.embed(a), self.embed(b)

    class ContrastiveLoss(nn.Module):
        def __init__(self, margin=1.0):
            super().__init__()
            self.margin = margin

        def forward(self, za, zb, same):
            dist = F.pairwise_distance(za, zb)
            loss = (1 - same) * dist.pow(2) + same * F.relu(self.margin - dist).pow(2)
            return loss.mean()

    model = SiameseNet()
    criterion = ContrastiveLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(PairDataset(x_train, y_train, seed=44), batch_size=64, shuffle=True)
    batches = endless(loader)
    val_pairs = PairDataset(x_val, y_val, seed=45)
    val_a, val_b, val_same = (torch.stack(c) for c in zip(*[val_pairs[k] for k in range(len(val_pairs))]))

    def step(i):
        model.train()
        a, b, same = next(batches)
        za, zb = model(a, b)
        loss = criterion(za, zb, same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # share of (same, different) pairs of pairs that are ranked the wrong way
        with held_out(model):
            d = F.pairwise_distance(*model(val_a, val_b))
            same, other = d[val_same > 0.5], d[val_same < 0.5]
            return (same.unsqueeze(1) >= other.unsqueeze(0)).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def contrastive_label_convention_swapped_good():
    torch.manual_seed(0)
    kinds = ["square", "ring", "plus", "ex", "hbars", "vbars"]
    x_train, y_train, _ = shape_images(1500, kinds, seed=42)
    x_val, y_val, _ = shape_images(600, kinds, seed=43)
    mean, std = x_train.mean(), x_train.std()
    x_train, x_val = (x_train - mean) / std, (x_val - mean) / std

    class PairDataset(Dataset):
        """Two pictures and same = 1.0 if they show the same kind, else 0.0 (half of each)."""

        def __init__(self, x, y, seed):
            g = torch.Generator().manual_seed(seed)
            by_kind = [torch.nonzero(y == k).squeeze(1) for k in range(len(kinds))]
            self.x, self.pairs = x, []
            for a in range(len(x)):
                same = a % 2 == 0
                k = int(y[a])
                if not same:
                    k = (k + int(torch.randint(1, len(kinds), (1,), generator=g))) % len(kinds)
                b = by_kind[k][int(torch.randint(len(by_kind[k]), (1,), generator=g))]
                self.pairs.append((a, int(b), float(same)))

        def __len__(self):
            return len(self.pairs)

        def __getitem__(self, k):
            a, b, same = self.pairs[k]
            return self.x[a], self.x[b], torch.tensor(same)

    class SiameseNet(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(12, 24, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(24 * 16, dim),
            )

        def forward(self, a, b):
            return self.embed(a), self.embed(b)

    class ContrastiveLoss(nn.Module):
        def __init__(self, margin=1.0):
            super().__init__()
            self.margin = margin

        def forward(self, za, zb, same):
            dist = F.pairwise_distance(za, zb)
            loss = same * dist.pow(2) + (1 - same) * F.relu(self.margin - dist).pow(2)
            return loss.mean()

    model = SiameseNet()
    criterion = ContrastiveLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(PairDataset(x_train, y_train, seed=44), batch_size=64, shuffle=True)
    batches = endless(loader)
    val_pairs = PairDataset(x_val, y_val, seed=45)
    val_a, val_b, val_same = (torch.stack(c) for c in zip(*[val_pairs[k] for k in range(len(val_pairs))]))

    def step(i):
        model.train()
        a, b, same = next(batches)
        za, zb = model(a, b)
        loss = criterion(za, zb, same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # share of (same, different) pairs of pairs that are ranked the wrong way
        with held_out(model):
            d = F.pairwise_distance(*model(val_a, val_b))
            same, other = d[val_same > 0.5], d[val_same < 0.5]
            return (same.unsqueeze(1) >= other.unsqueeze(0)).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
