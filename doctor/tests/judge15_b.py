"""Twenty-two small programs of losses and what they are fed, each with one bug that people often make, and a
mended twin, by somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""

import contextlib
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Normal
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)

CASES = [
    {"name": "digit_cnn_softmax_then_ce", "what": "The network ends in nn.Softmax and its probabilities are fed to nn.CrossEntropyLoss, which applies log-softmax again; it needs raw logits.", "steps": 250},
    {"name": "activity_nll_on_logits", "what": "F.nll_loss is given the raw output of the last linear layer; it expects log-probabilities, so the loss is just minus the target logit and runs off to minus infinity.", "steps": 200},
    {"name": "audio_tags_sigmoid_then_bce_with_logits", "what": "The tagger's forward already applies a sigmoid and the result goes into BCEWithLogitsLoss, which applies it a second time.", "steps": 300},
    {"name": "gcn_log_softmax_over_nodes", "what": "The GCN normalises its output with log_softmax(dim=0), over the nodes of the graph, where the classes (dim=1) should be normalised before nll_loss.", "steps": 150},
    {"name": "house_price_mse_broadcast", "what": "Predictions of shape (N, 1) minus targets of shape (N,) broadcast to (N, N), so the squared error compares every prediction with every target and the net learns the mean.", "steps": 300},
    {"name": "distill_kl_student_probabilities", "what": "F.kl_div is given softmax probabilities of the student as its first argument; it needs log-probabilities (log_softmax), so the term minimised is not a KL divergence.", "steps": 300},
    {"name": "segmenter_background_ignored", "what": "The loss is built with ignore_index=0 although 0 is the genuine background class, so background pixels are never trained and everything becomes an object.", "steps": 150},
    {"name": "ecg_logits_flattened_without_permute", "what": "Logits of shape (N, C, T) are flattened by view(-1, C) without moving the class axis last, so the rows handed to cross_entropy mix times and classes and do not line up with the labels.", "steps": 200},
    {"name": "lesion_dice_on_raw_logits", "what": "The hand-written Dice loss works on the raw logits; the sigmoid that turns them into probabilities is missing, so the overlap ratio is not bounded by 0 and 1.", "steps": 200},
    {"name": "vae_mean_reconstruction_summed_kl", "what": "The reconstruction term is averaged over every pixel of the batch while the KL term is summed over the latent and divided only by the batch size, so the KL is hundreds of times too strong and the posterior collapses.", "steps": 400},
    {"name": "face_multitask_age_term_item", "what": "The age term is added to the total with .item(), so it is a plain number without a gradient and the age head is never trained.", "steps": 300},
    {"name": "signature_cosine_loss_zero_one_targets", "what": "CosineEmbeddingLoss gets 0/1 labels; it expects 1 and -1, so the pairs of two writers contribute nothing and all embeddings may fall together.", "steps": 250},
    {"name": "moisture_targets_collated_as_long", "what": "The collate function, copied from a classifier, builds the continuous targets with dtype=torch.long, so every value is truncated towards zero before the regression loss.", "steps": 300},
    {"name": "recommender_bpr_arguments_swapped", "what": "The BPR loss takes (positive scores, negative scores) and is called with the two swapped, so the items the user did not touch are ranked above the liked ones.", "steps": 300},
    {"name": "fraud_pos_weight_inverted", "what": "pos_weight is computed as positives / negatives instead of negatives / positives, so the rare fraud class is weighted down still further where it should be weighted up.", "steps": 300},
    {"name": "ppo_ratio_inverted", "what": "The PPO probability ratio is exp(old_log_prob - new_log_prob), the inverse of what the surrogate needs, so the policy climbs down its advantage.", "steps": 80},
    {"name": "gaussian_head_variance_passed_as_scale", "what": "torch.distributions.Normal is built with the predicted variance as its scale, which must be the standard deviation, so the predicted spread is trained to a wrong value.", "steps": 500},
    {"name": "dqn_bootstraps_from_terminal_states", "what": "The TD target adds the discounted value of the next state for every transition; the mask (1 - done) is missing, so ended episodes are credited with a future.", "steps": 400},
    {"name": "load_forecast_pinball_error_sign", "what": "The hand-written pinball loss takes the error as prediction - target instead of target - prediction, so every quantile q is trained towards 1 - q.", "steps": 400},
    {"name": "assay_mask_applied_after_mean", "what": "smooth_l1_loss is reduced to a scalar before the mask of measured values is multiplied in, so the missing values (filled with 0) are trained on as if they had been measured.", "steps": 400},
    {"name": "localiser_giou_on_xywh_targets", "what": "The GIoU loss expects corner boxes (x1, y1, x2, y2), but the annotations are passed as they are stored (x, y, w, h), so the overlap is computed with boxes that do not exist.", "steps": 300},
    {"name": "bike_counts_poisson_log_input", "what": "The model outputs the rate (softplus), but PoissonNLLLoss is left at its default log_input=True and takes it for the log of the rate.", "steps": 300},
]

PROBES = {
    "digit_cnn_softmax_then_ce": "error rate on held-out pictures",
    "activity_nll_on_logits": "error rate on held-out windows",
    "audio_tags_sigmoid_then_bce_with_logits": "1 - micro F1 of the tags on held-out clips",
    "gcn_log_softmax_over_nodes": "error rate on the unlabelled nodes",
    "house_price_mse_broadcast": "mean squared error on held-out houses (standardised price)",
    "distill_kl_student_probabilities": "cross-entropy of the student on held-out rows",
    "segmenter_background_ignored": "1 - mean IoU over the three classes on held-out pictures",
    "ecg_logits_flattened_without_permute": "error rate of the labels for each sample of held-out series",
    "lesion_dice_on_raw_logits": "1 - Dice of the thresholded mask on held-out pictures",
    "vae_mean_reconstruction_summed_kl": "reconstruction error (mean squared, pixels in 0..1) on held-out pictures",
    "face_multitask_age_term_item": "mean squared age error (standardised) on held-out faces",
    "signature_cosine_loss_zero_one_targets": "error rate of 'same writer' at a cosine threshold of 0.5 on held-out pairs",
    "moisture_targets_collated_as_long": "mean squared error on held-out series (standardised target)",
    "recommender_bpr_arguments_swapped": "1 - AUC of held-out liked items against items never liked",
    "fraud_pos_weight_inverted": "balanced error rate at probability 0.5 on held-out transactions",
    "ppo_ratio_inverted": "mean distance to the goal under the greedy policy (from fixed starts)",
    "gaussian_head_variance_passed_as_scale": "interval (Winkler) score of the 90 % interval on held-out points",
    "dqn_bootstraps_from_terminal_states": "mean absolute error of Q against the exact values",
    "load_forecast_pinball_error_sign": "mean pinball loss on held-out windows",
    "assay_mask_applied_after_mean": "mean squared error over all assay values of held-out molecules",
    "localiser_giou_on_xywh_targets": "1 - mean IoU with the true boxes on held-out pictures",
    "bike_counts_poisson_log_input": "mean Poisson deviance on held-out hours",
}


# ---------------------------------------------------------------- shared helpers

def rng(seed):
    return torch.Generator().manual_seed(seed)


def cycle(loader):
    while True:
        for batch in loader:
            yield batch


@contextlib.contextmanager
def evaluating(*models):
    modes = [m.training for m in models]
    for m in models:
        m.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, mode in zip(models, modes):
            m.train(mode)


def glyph_images(n, classes, seed, size=16, noise=0.6, shift=2):
    """Small grey pictures: a smooth prototype for each class, shifted, with noise; standardised."""
    g0, g = rng(1234), rng(seed)
    proto = F.interpolate((torch.rand(classes, 1, 5, 5, generator=g0) > 0.5).float(), size=(size, size), mode="bilinear")
    y = torch.randint(0, classes, (n,), generator=g)
    x = proto[y]
    sh = torch.randint(-shift, shift + 1, (n, 2), generator=g)
    x = torch.stack([torch.roll(a, (int(s[0]), int(s[1])), (1, 2)) for a, s in zip(x, sh)])
    x = x * (0.7 + 0.6 * torch.rand(n, 1, 1, 1, generator=g)) + noise * torch.randn(x.shape, generator=g)
    return (x - 0.5) / 0.8, y


def activity_windows(n, seed, channels=6, length=64, probs=(0.34, 0.24, 0.16, 0.12, 0.08, 0.06)):
    """Inertial-sensor windows: for each activity its own frequency and axis pattern."""
    g0, g = rng(77), rng(seed)
    k = len(probs)
    freq = 1.0 + 0.7 * torch.arange(k).float()
    axis = torch.randn(k, channels, generator=g0) * 0.6
    y = torch.multinomial(torch.tensor(probs), n, replacement=True, generator=g)
    t = torch.linspace(0, 1, length)
    f = freq[y] * (1 + 0.08 * torch.randn(n, generator=g))
    ph = 2 * math.pi * torch.rand(n, 1, 1, generator=g)
    wave = torch.sin(2 * math.pi * f[:, None, None] * t + ph + 0.5 * torch.arange(channels)[None, :, None])
    x = wave * axis[y][:, :, None] + 1.6 * torch.randn(n, channels, length, generator=g)
    return x / 1.65, y


def tag_spectrograms(n, seed, tags=12, mels=24, frames=24):
    """Mel patches in which each present tag puts a short event in its own band."""
    g0, g = rng(55), rng(seed)
    pattern = torch.randn(tags, 8, 6, generator=g0)
    pos = torch.randint(0, mels - 8, (tags,), generator=g0)
    y = (torch.rand(n, tags, generator=g) < 0.2).float()
    x = 0.7 * torch.randn(n, 1, mels, frames, generator=g)
    at = torch.randint(0, frames - 6, (n, tags), generator=g)
    for i in range(n):
        for k in y[i].nonzero().flatten().tolist():
            p, a = int(pos[k]), int(at[i, k])
            x[i, 0, p:p + 8, a:a + 6] += pattern[k]
    return x, y


def community_graph(seed, n=300, k=5, d=24):
    """A stochastic block model with unequal communities; features carry a weak class signal."""
    g = rng(seed)
    y = torch.multinomial(torch.tensor([0.38, 0.26, 0.17, 0.11, 0.08]), n, replacement=True, generator=g)
    same = (y[:, None] == y[None, :]).float()
    adj = (torch.rand(n, n, generator=g) < same * 0.05 + (1 - same) * 0.012).float().triu(1)
    adj = adj + adj.t() + torch.eye(n)
    dinv = adj.sum(1).rsqrt()
    a_hat = dinv[:, None] * adj * dinv[None, :]
    x = torch.randn(k, d, generator=g)[y] * 0.5 + torch.randn(n, d, generator=g)
    perm = torch.randperm(n, generator=g)
    return a_hat, x, y, perm[:150], perm[150:]


def table(n, seed, d=8, noise=0.3):
    """Standardised features and a standardised non-linear response."""
    g0, g = rng(91), rng(seed)
    x = torch.randn(n, d, generator=g)
    w = torch.randn(d, generator=g0) / d ** 0.5
    v = torch.randn(d, generator=g0) / d ** 0.5
    y = 0.9 * (x @ w) + 0.7 * torch.tanh(2 * (x @ v)) + 0.3 * x[:, 0] * x[:, 1] + noise * torch.randn(n, generator=g)
    return x, y


def scenes(n, seed, size=20):
    """Pictures 3 x size x size with discs (1) and boxes (2) on a cluttered background (0), and their masks."""
    g = rng(seed)
    colour = torch.tensor([[0.0, 0.0, 0.0], [0.9, -0.3, 0.2], [-0.2, 0.8, -0.5]])
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    mask = torch.zeros(n, size, size, dtype=torch.long)
    for i in range(n):
        for cls in (1, 2):
            if torch.rand(1, generator=g) < 0.85:
                cx, cy = torch.randint(3, size - 3, (2,), generator=g).tolist()
                r = int(torch.randint(2, 5, (1,), generator=g))
                if cls == 1:
                    mask[i][(xx - cx) ** 2 + (yy - cy) ** 2 <= r * r] = 1
                else:
                    mask[i][((xx - cx).abs() <= r) & ((yy - cy).abs() <= r)] = 2
    x = colour[mask].permute(0, 3, 1, 2) + 0.7 * torch.randn(n, 3, size, size, generator=g)
    return x.contiguous(), mask


def ecg_like(n, seed, length=128):
    """Two-lead series with a label for every sample: 0 baseline, 1 P wave, 2 QRS, 3 T wave."""
    g = rng(seed)
    t = torch.arange(length).float()
    x = 0.25 * torch.randn(n, 2, length, generator=g)
    y = torch.zeros(n, length, dtype=torch.long)
    for i in range(n):
        at = float(torch.randint(0, 30, (1,), generator=g))
        while at < length:
            for cls, off, w, a in ((1, 8, 3.0, 0.5), (2, 18, 1.6, 1.5), (3, 32, 4.5, 0.7)):
                c = at + off + float(torch.randn(1, generator=g))
                bump = a * torch.exp(-0.5 * ((t - c) / w) ** 2)
                x[i, 0] += bump
                x[i, 1] += (-0.6 if cls == 2 else 0.8) * bump
                y[i][(t - c).abs() <= 1.6 * w] = cls
            at += 44 + 4 * float(torch.randn(1, generator=g))
    x = (x - torch.tensor([[0.36], [0.11]])) / torch.tensor([[0.42], [0.40]])
    return x, y


def faces(n, seed, size=20):
    """Grey pictures of a blob 'face': its stripe pattern says the group, its width and brightness the age."""
    g = rng(seed)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    group = torch.randint(0, 2, (n,), generator=g)
    age = torch.randn(n, generator=g)
    w = (0.55 + 0.15 * age.clamp(-2, 2))[:, None, None]
    ph = 6.28 * torch.rand(n, 1, 1, generator=g)
    blob = torch.exp(-(xx ** 2 / (2 * w ** 2) + yy ** 2 / 0.6))
    stripes = torch.where(group[:, None, None] == 1, torch.sin(9 * xx + ph), torch.sin(9 * yy + ph))
    x = blob * (1 + 0.6 * stripes) + 0.35 * torch.randn(n, size, size, generator=g)
    x = (x - 0.37) / 0.48
    return x.unsqueeze(1), group, age


def signature_pairs(n, seed, writers=24, length=48):
    """Pairs of pen traces (2 x length) and 1 for the same writer, 0 for two writers."""
    g0, g = rng(63), rng(seed)
    t = torch.linspace(0, 1, length)
    amp = torch.randn(writers, 2, 4, generator=g0) * 0.7
    ph = 6.28 * torch.rand(writers, 2, 4, generator=g0)

    def trace(w):
        k = torch.arange(1, 5).float()
        a = amp[w] + 0.15 * torch.randn(len(w), 2, 4, generator=g)
        s = torch.sin(6.28 * k[:, None] * t[None, :] + (ph[w] + 0.2 * torch.randn(len(w), 2, 4, generator=g))[..., None])
        return (a[..., None] * s).sum(2) + 0.25 * torch.randn(len(w), 2, length, generator=g)

    same = torch.rand(n, generator=g) < 0.5
    w1 = torch.randint(0, writers, (n,), generator=g)
    other = (w1 + torch.randint(1, writers, (n,), generator=g)) % writers
    return trace(w1), trace(torch.where(same, w1, other)), same.long()


def greenhouse(n, seed, length=24, channels=5):
    """Sensor series and the (standardised) change of soil moisture that follows."""
    g0, g = rng(41), rng(seed)
    steps = torch.randn(n, channels, length, generator=g)
    x = torch.zeros(n, channels, length)
    for t in range(length):
        x[:, :, t] = (0.85 * x[:, :, t - 1] if t else 0) + 0.53 * steps[:, :, t]
    w = torch.randn(channels, generator=g0)
    decay = torch.exp(-torch.arange(length).flip(0) / 4.0)
    s = torch.einsum("nct,c,t->n", x, w, decay) / 6
    y = s + 0.4 * torch.tanh(2 * x[:, 0, -1] * x[:, 1, -1]) + 0.2 * torch.randn(n, generator=g)
    return x.transpose(1, 2).contiguous(), y / 1.1


def interactions(seed, users=150, items=200, rank=4):
    """Implicit feedback: the items every user liked (train) and one held-out liked item for each."""
    g = rng(seed)
    u, v = torch.randn(users, rank, generator=g), torch.randn(items, rank, generator=g)
    score = u @ v.t() + 0.5 * torch.randn(users, items, generator=g)
    top = score.topk(30, dim=1).indices
    top = torch.stack([row[torch.randperm(30, generator=g)] for row in top])
    liked = torch.zeros(users, items, dtype=torch.bool)
    liked.scatter_(1, top, True)
    train_pairs = torch.stack([torch.arange(users).repeat_interleave(24), top[:, :24].flatten()], 1)
    return train_pairs, top[:, 24:], liked


def transactions(n, seed, d=12, rate=0.06):
    """Standardised transaction features; about 6 % are fraud, shifted and of another covariance."""
    g0, g = rng(17), rng(seed)
    y = (torch.rand(n, generator=g) < rate).float()
    shift = torch.randn(d, generator=g0) * 0.55
    x = torch.randn(n, d, generator=g)
    x = torch.where(y[:, None] == 1, shift + 1.2 * x, x)
    return x, y


class PointEnv:
    """A batch of points on a line that push left, not at all or right, and should come to rest at their goal."""

    def __init__(self, n, generator):
        self.n, self.g = n, generator

    def reset(self):
        self.pos = 2 * torch.rand(self.n, generator=self.g) - 1
        self.vel = 0.3 * torch.randn(self.n, generator=self.g)
        self.goal = 2 * torch.rand(self.n, generator=self.g) - 1
        return self.obs()

    def obs(self):
        return torch.stack([self.pos - self.goal, self.vel], 1)

    def step(self, action):
        self.vel = 0.7 * self.vel + 0.2 * (action.float() - 1)
        self.pos = (self.pos + self.vel).clamp(-2, 2)
        return self.obs(), -0.2 * (self.pos - self.goal).abs()


def noisy_curve(n, seed, d=3):
    """A response whose spread depends on the first feature."""
    g = rng(seed)
    x = torch.rand(n, d, generator=g) * 2 - 1
    std = 0.1 + 0.5 * (x[:, 0] + 1) / 2
    y = torch.sin(3 * x[:, 1]) + 0.5 * x[:, 2] + std * torch.randn(n, generator=g)
    return x * 1.7, y


def corridor_replay(n, seed, length=8, gamma=0.9):
    """Random transitions of a corridor walk (left / stay / right; -0.1 a move, +1 at the right end, which ends it)."""
    g = rng(seed)
    s = torch.randint(0, length - 1, (n,), generator=g)
    a = torch.randint(0, 3, (n,), generator=g)
    s2 = (s + a - 1).clamp(0, length - 1)
    done = (s2 == length - 1).float()
    r = torch.where(done == 1, torch.tensor(1.0), torch.tensor(-0.1))
    q = torch.zeros(length, 3)
    states = torch.arange(length - 1)
    for _ in range(200):
        for act in range(3):
            nxt = (states + act - 1).clamp(0, length - 1)
            end = nxt == length - 1
            q[:-1, act] = torch.where(end, torch.tensor(1.0), -0.1 + gamma * q[nxt].max(1).values)
    obs = lambda k: F.one_hot(k, length).float()
    return obs(s), a, r, obs(s2), done, obs(states), q[:-1]


def load_windows(n, seed, lags=12):
    """The last lags of a noisy daily load curve (standardised) and the next value, with skewed noise."""
    g = rng(seed)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    level = 0.4 * torch.randn(n, 1, generator=g)
    t = torch.arange(lags + 1).float()
    clean = level + torch.sin(2 * math.pi * t / 12 + phase)
    x = clean[:, :lags] + 0.15 * torch.randn(n, lags, generator=g)
    e = torch.randn(n, generator=g)
    y = clean[:, lags] + (0.2 + 0.2 * (x[:, -1] > 0).float()) * torch.where(e > 0, 1.5 * e, e)
    return x, y


def assays(n, seed, d=16, tasks=6, missing=0.6):
    """Molecular descriptors, standardised assay values, and a mask of the values that were measured."""
    g0, g = rng(29), rng(seed)
    w1, w2 = torch.randn(d, 12, generator=g0) / d ** 0.5, torch.randn(12, tasks, generator=g0) / 12 ** 0.5
    x = torch.randn(n, d, generator=g)
    y = 1.6 * torch.tanh(1.5 * x @ w1) @ w2 + 0.3 * torch.randn(n, tasks, generator=g)
    y = y / torch.tensor([1.42, 1.63, 1.43, 1.62, 0.86, 1.03])[:tasks]
    mask = (torch.rand(n, tasks, generator=g) > missing).float()
    return x, y, mask


def one_box_pictures(n, seed, size=24):
    """Pictures with one bright box on clutter; boxes as COCO has them: x, y, w, h (here divided by the side)."""
    g = rng(seed)
    x = 0.5 * torch.randn(n, 1, size, size, generator=g)
    w = torch.randint(5, 12, (n, 2), generator=g)
    at = (torch.rand(n, 2, generator=g) * (size - w + 1)).long()
    for i in range(n):
        (cx, cy), (bw, bh) = at[i].tolist(), w[i].tolist()
        x[i, 0, cy:cy + bh, cx:cx + bw] += 1.5
    x = (x - 0.17) / 0.69
    return x, torch.cat([at, w], 1).float() / size


def bike_hours(n, seed, d=6):
    """Standardised weather and calendar features and the number of bikes hired in the hour at a small station."""
    g0, g = rng(37), rng(seed)
    x = torch.randn(n, d, generator=g)
    w = torch.randn(d, generator=g0) * 0.45
    lograte = -0.2 + x @ w + 0.3 * torch.sin(2 * x[:, 0])
    return x, torch.poisson(lograte.exp().clamp(max=25), generator=g)


def digit_cnn_softmax_then_ce_bad():
    torch.manual_seed(0)
    x, y = glyph_images(2560, 10, seed=1, noise=0.9, shift=2)
    x_test, y_test = glyph_images(500, 10, seed=2, noise=0.9, shift=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            )
            self.classifier = nn.Sequential(
                nn.Flatten(),
                nn.Linear(32 * 4 * 4, 64), nn.ReLU(),
                nn.Linear(64, 10),
                nn.Softmax(dim=1),
            )

        def forward(self, x):
            return self.classifier(self.features(x))

    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batches = cycle(loader)

    def step(i):
        images, labels = next(batches)
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test).argmax(1) != y_test).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def digit_cnn_softmax_then_ce_good():
    torch.manual_seed(0)
    x, y = glyph_images(2560, 10, seed=1, noise=0.9, shift=2)
    x_test, y_test = glyph_images(500, 10, seed=2, noise=0.9, shift=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            )
            self.classifier = nn.Sequential(
                nn.Flatten(),
                nn.Linear(32 * 4 * 4, 64), nn.ReLU(),
                nn.Linear(64, 10),
            )

        def forward(self, x):
            return self.classifier(self.features(x))

    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batches = cycle(loader)

    def step(i):
        images, labels = next(batches)
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test).argmax(1) != y_test).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def activity_nll_on_logits_bad():
    torch.manual_seed(0)
    x, y = activity_windows(2048, seed=1)
    x_test, y_test = activity_windows(512, seed=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class HARNet(nn.Module):
        def __init__(self, n_classes=6):
            super().__init__()
            self.conv1 = nn.Conv1d(6, 32, 5, padding=2)
            self.bn1 = nn.BatchNorm1d(32)
            self.conv2 = nn.Conv1d(32, 32, 5, stride=2, padding=2)
            self.bn2 = nn.BatchNorm1d(32)
            self.fc = nn.Linear(32, n_classes)

        def forward(self, x):
            x = F.relu(self.bn1(self.conv1(x)))
            x = F.relu(self.bn2(self.conv2(x)))
            x = x.mean(dim=2)
            return self.fc(x)

    model = HARNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    batches = cycle(loader)

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = F.nll_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test).argmax(1) != y_test).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def activity_nll_on_logits_good():
    torch.manual_seed(0)
    x, y = activity_windows(2048, seed=1)
    x_test, y_test = activity_windows(512, seed=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class HARNet(nn.Module):
        def __init__(self, n_classes=6):
            super().__init__()
            self.conv1 = nn.Conv1d(6, 32, 5, padding=2)
            self.bn1 = nn.BatchNorm1d(32)
            self.conv2 = nn.Conv1d(32, 32, 5, stride=2, padding=2)
            self.bn2 = nn.BatchNorm1d(32)
            self.fc = nn.Linear(32, n_classes)

        def forward(self, x):
            x = F.relu(self.bn1(self.conv1(x)))
            x = F.relu(self.bn2(self.conv2(x)))
            x = x.mean(dim=2)
            return F.log_softmax(self.fc(x), dim=1)

    model = HARNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    batches = cycle(loader)

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = F.nll_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test).argmax(1) != y_test).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_tags_sigmoid_then_bce_with_logits_bad():
    torch.manual_seed(0)
    x, y = tag_spectrograms(1536, seed=1)
    x_val, y_val = tag_spectrograms(384, seed=2)
    train_loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True, generator=rng(3))

    class Tagger(nn.Module):
        def __init__(self, n_tags=12):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d((1, 2)),
                nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveMaxPool2d((12, 1)),
            )
            self.head = nn.Linear(32 * 12, n_tags)

        def forward(self, spec):
            h = self.net(spec).flatten(1)
            return torch.sigmoid(self.head(h))

    model = Tagger()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(train_loader)

    def step(i):
        model.train()
        spec, tags = next(batches)
        out = model(spec)
        loss = criterion(out, tags)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = (torch.sigmoid(model(x_val)) > 0.5).float()
            tp = (pred * y_val).sum()
            return (1 - 2 * tp / (pred.sum() + y_val.sum()).clamp(min=1)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_tags_sigmoid_then_bce_with_logits_good():
    torch.manual_seed(0)
    x, y = tag_spectrograms(1536, seed=1)
    x_val, y_val = tag_spectrograms(384, seed=2)
    train_loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True, generator=rng(3))

    class Tagger(nn.Module):
        def __init__(self, n_tags=12):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d((1, 2)),
                nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveMaxPool2d((12, 1)),
            )
            self.head = nn.Linear(32 * 12, n_tags)

        def forward(self, spec):
            h = self.net(spec).flatten(1)
            return self.head(h)

    model = Tagger()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(train_loader)

    def step(i):
        model.train()
        spec, tags = next(batches)
        out = model(spec)
        loss = criterion(out, tags)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = (torch.sigmoid(model(x_val)) > 0.5).float()
            tp = (pred * y_val).sum()
            return (1 - 2 * tp / (pred.sum() + y_val.sum()).clamp(min=1)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gcn_log_softmax_over_nodes_bad():
    torch.manual_seed(0)
    adj, features, labels, idx_train, idx_test = community_graph(seed=4)

    class GraphConvolution(nn.Module):
        def __init__(self, n_in, n_out):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(n_in, n_out))
            self.bias = nn.Parameter(torch.zeros(n_out))
            nn.init.xavier_uniform_(self.weight)

        def forward(self, x, adj):
            return adj @ (x @ self.weight) + self.bias

    class GCN(nn.Module):
        def __init__(self, nfeat, nhid, nclass, dropout=0.3):
            super().__init__()
            self.gc1 = GraphConvolution(nfeat, nhid)
            self.gc2 = GraphConvolution(nhid, nclass)
            self.dropout = dropout

        def forward(self, x, adj):
            x = F.relu(self.gc1(x, adj))
            x = F.dropout(x, self.dropout, training=self.training)
            x = self.gc2(x, adj)
            return F.log_softmax(x, dim=0)

    model = GCN(features.size(1), 32, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(epoch):
        model.train()
        optimizer.zero_grad()
        output = model(features, adj)
        loss_train = F.nll_loss(output[idx_train], labels[idx_train])
        loss_train.backward()
        optimizer.step()
        return loss_train.item()

    def probe():
        with evaluating(model):
            output = model(features, adj)
            return (output[idx_test].argmax(1) != labels[idx_test]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gcn_log_softmax_over_nodes_good():
    torch.manual_seed(0)
    adj, features, labels, idx_train, idx_test = community_graph(seed=4)

    class GraphConvolution(nn.Module):
        def __init__(self, n_in, n_out):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(n_in, n_out))
            self.bias = nn.Parameter(torch.zeros(n_out))
            nn.init.xavier_uniform_(self.weight)

        def forward(self, x, adj):
            return adj @ (x @ self.weight) + self.bias

    class GCN(nn.Module):
        def __init__(self, nfeat, nhid, nclass, dropout=0.3):
            super().__init__()
            self.gc1 = GraphConvolution(nfeat, nhid)
            self.gc2 = GraphConvolution(nhid, nclass)
            self.dropout = dropout

        def forward(self, x, adj):
            x = F.relu(self.gc1(x, adj))
            x = F.dropout(x, self.dropout, training=self.training)
            x = self.gc2(x, adj)
            return F.log_softmax(x, dim=1)

    model = GCN(features.size(1), 32, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(epoch):
        model.train()
        optimizer.zero_grad()
        output = model(features, adj)
        loss_train = F.nll_loss(output[idx_train], labels[idx_train])
        loss_train.backward()
        optimizer.step()
        return loss_train.item()

    def probe():
        with evaluating(model):
            output = model(features, adj)
            return (output[idx_test].argmax(1) != labels[idx_test]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def house_price_mse_broadcast_bad():
    torch.manual_seed(0)
    x, y = table(2048, seed=1)
    x_test, y_test = table(512, seed=2)
    mu, sd = y.mean(), y.std()
    y, y_test = (y - mu) / sd, (y_test - mu) / sd

    class PriceNet(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.fc1 = nn.Linear(d, 64)
            self.fc2 = nn.Linear(64, 64)
            self.out = nn.Linear(64, 1)

        def forward(self, x):
            x = torch.relu(self.fc1(x))
            x = torch.relu(self.fc2(x))
            return self.out(x)

    model = PriceNet(x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    g = rng(3)

    def step(i):
        idx = torch.randint(0, len(x), (64,), generator=g)
        y_pred = model(x[idx])
        loss = ((y_pred - y[idx]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return ((model(x_test).flatten() - y_test) ** 2).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def house_price_mse_broadcast_good():
    torch.manual_seed(0)
    x, y = table(2048, seed=1)
    x_test, y_test = table(512, seed=2)
    mu, sd = y.mean(), y.std()
    y, y_test = (y - mu) / sd, (y_test - mu) / sd

    class PriceNet(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.fc1 = nn.Linear(d, 64)
            self.fc2 = nn.Linear(64, 64)
            self.out = nn.Linear(64, 1)

        def forward(self, x):
            x = torch.relu(self.fc1(x))
            x = torch.relu(self.fc2(x))
            return self.out(x)

    model = PriceNet(x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    g = rng(3)

    def step(i):
        idx = torch.randint(0, len(x), (64,), generator=g)
        y_pred = model(x[idx]).squeeze(1)
        loss = ((y_pred - y[idx]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return ((model(x_test).flatten() - y_test) ** 2).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kl_student_probabilities_bad():
    torch.manual_seed(0)
    g0, g = rng(11), rng(12)
    centres = torch.randn(6, 10, generator=g0)
    y_all = torch.randint(0, 6, (3000,), generator=g)
    x_all = 0.75 * centres[y_all] + torch.randn(3000, 10, generator=g)
    x_all = (x_all - x_all[:2400].mean(0)) / x_all[:2400].std(0)
    x, y, x_val, y_val = x_all[:2400], y_all[:2400], x_all[2400:], y_all[2400:]

    def mlp(width):
        return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 6))

    # the teacher, trained beforehand on the labels
    teacher = mlp(128)
    t_opt = torch.optim.Adam(teacher.parameters(), lr=1e-3, weight_decay=1e-3)
    for _ in range(200):
        idx = torch.randint(0, len(x), (128,), generator=g)
        t_loss = F.cross_entropy(teacher(x[idx]), y[idx])
        t_opt.zero_grad()
        t_loss.backward()
        t_opt.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = mlp(24)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    T = 2.0

    def step(i):
        student.train()
        xb = x[torch.randint(0, len(x), (64,), generator=g)]
        with torch.no_grad():
            teacher_logits = teacher(xb)
        student_logits = student(xb)
        loss = F.kl_div(
            F.softmax(student_logits / T, dim=1),
            F.softmax(teacher_logits / T, dim=1),
            reduction="batchmean",
        ) * T * T
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(student):
            return F.cross_entropy(student(x_val), y_val).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kl_student_probabilities_good():
    torch.manual_seed(0)
    g0, g = rng(11), rng(12)
    centres = torch.randn(6, 10, generator=g0)
    y_all = torch.randint(0, 6, (3000,), generator=g)
    x_all = 0.75 * centres[y_all] + torch.randn(3000, 10, generator=g)
    x_all = (x_all - x_all[:2400].mean(0)) / x_all[:2400].std(0)
    x, y, x_val, y_val = x_all[:2400], y_all[:2400], x_all[2400:], y_all[2400:]

    def mlp(width):
        return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 6))

    # the teacher, trained beforehand on the labels
    teacher = mlp(128)
    t_opt = torch.optim.Adam(teacher.parameters(), lr=1e-3, weight_decay=1e-3)
    for _ in range(200):
        idx = torch.randint(0, len(x), (128,), generator=g)
        t_loss = F.cross_entropy(teacher(x[idx]), y[idx])
        t_opt.zero_grad()
        t_loss.backward()
        t_opt.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = mlp(24)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    T = 2.0

    def step(i):
        student.train()
        xb = x[torch.randint(0, len(x), (64,), generator=g)]
        with torch.no_grad():
            teacher_logits = teacher(xb)
        student_logits = student(xb)
        loss = F.kl_div(
            F.log_softmax(student_logits / T, dim=1),
            F.softmax(teacher_logits / T, dim=1),
            reduction="batchmean",
        ) * T * T
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(student):
            return F.cross_entropy(student(x_val), y_val).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def segmenter_background_ignored_bad():
    torch.manual_seed(0)
    x, mask = scenes(480, seed=1)
    x_val, mask_val = scenes(96, seed=2)
    loader = DataLoader(TensorDataset(x, mask), batch_size=16, shuffle=True, drop_last=True, generator=rng(3))

    def conv_block(c_in, c_out):
        return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True))

    class TinyUNet(nn.Module):
        def __init__(self, n_classes=3):
            super().__init__()
            self.enc1 = conv_block(3, 16)
            self.enc2 = conv_block(16, 32)
            self.dec = conv_block(48, 16)
            self.pool = nn.MaxPool2d(2)
            self.up = nn.Upsample(scale_factor=2, mode="nearest")
            self.out = nn.Conv2d(16, n_classes, 1)

        def forward(self, x):
            a = self.enc1(x)
            b = self.enc2(self.pool(a))
            return self.out(self.dec(torch.cat([a, self.up(b)], dim=1)))

    model = TinyUNet()
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        images, masks = next(batches)
        optimizer.zero_grad()
        logits = model(images)
        loss = criterion(logits, masks)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = model(x_val).argmax(1)
            iou = [((pred == c) & (mask_val == c)).sum() / ((pred == c) | (mask_val == c)).sum().clamp(min=1) for c in range(3)]
            return 1 - torch.stack(iou).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def segmenter_background_ignored_good():
    torch.manual_seed(0)
    x, mask = scenes(480, seed=1)
    x_val, mask_val = scenes(96, seed=2)
    loader = DataLoader(TensorDataset(x, mask), batch_size=16, shuffle=True, drop_last=True, generator=rng(3))

    def conv_block(c_in, c_out):
        return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True))

    class TinyUNet(nn.Module):
        def __init__(self, n_classes=3):
            super().__init__()
            self.enc1 = conv_block(3, 16)
            self.enc2 = conv_block(16, 32)
            self.dec = conv_block(48, 16)
            self.pool = nn.MaxPool2d(2)
            self.up = nn.Upsample(scale_factor=2, mode="nearest")
            self.out = nn.Conv2d(16, n_classes, 1)

        def forward(self, x):
            a = self.enc1(x)
            b = self.enc2(self.pool(a))
            return self.out(self.dec(torch.cat([a, self.up(b)], dim=1)))

    model = TinyUNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        images, masks = next(batches)
        optimizer.zero_grad()
        logits = model(images)
        loss = criterion(logits, masks)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = model(x_val).argmax(1)
            iou = [((pred == c) & (mask_val == c)).sum() / ((pred == c) | (mask_val == c)).sum().clamp(min=1) for c in range(3)]
            return 1 - torch.stack(iou).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ecg_logits_flattened_without_permute_bad():
    torch.manual_seed(0)
    x, y = ecg_like(512, seed=1)
    x_val, y_val = ecg_like(96, seed=2)
    train_dl = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True, generator=rng(3))

    class Delineator(nn.Module):
        def __init__(self, num_classes=4):
            super().__init__()
            self.num_classes = num_classes
            self.stem = nn.Conv1d(2, 24, 7, padding=3)
            self.mid = nn.Conv1d(24, 24, 7, padding=6, dilation=2)
            self.norm = nn.GroupNorm(4, 24)
            self.head = nn.Conv1d(24, num_classes, 1)

        def forward(self, x):
            h = F.gelu(self.stem(x))
            h = h + F.gelu(self.norm(self.mid(h)))
            return self.head(h)

    net = Delineator()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-4)
    it = cycle(train_dl)

    def step(i):
        net.train()
        sig, lab = next(it)
        logits = net(sig)
        loss = F.cross_entropy(logits.view(-1, net.num_classes), lab.view(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(net):
            return (net(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ecg_logits_flattened_without_permute_good():
    torch.manual_seed(0)
    x, y = ecg_like(512, seed=1)
    x_val, y_val = ecg_like(96, seed=2)
    train_dl = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True, generator=rng(3))

    class Delineator(nn.Module):
        def __init__(self, num_classes=4):
            super().__init__()
            self.num_classes = num_classes
            self.stem = nn.Conv1d(2, 24, 7, padding=3)
            self.mid = nn.Conv1d(24, 24, 7, padding=6, dilation=2)
            self.norm = nn.GroupNorm(4, 24)
            self.head = nn.Conv1d(24, num_classes, 1)

        def forward(self, x):
            h = F.gelu(self.stem(x))
            h = h + F.gelu(self.norm(self.mid(h)))
            return self.head(h)

    net = Delineator()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-4)
    it = cycle(train_dl)

    def step(i):
        net.train()
        sig, lab = next(it)
        logits = net(sig)
        loss = F.cross_entropy(logits.permute(0, 2, 1).reshape(-1, net.num_classes), lab.view(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(net):
            return (net(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lesion_dice_on_raw_logits_bad():
    torch.manual_seed(0)
    x, m = scenes(480, seed=5)
    x_val, m_val = scenes(96, seed=6)
    m, m_val = (m > 0).float().unsqueeze(1), (m_val > 0).float().unsqueeze(1)
    loader = DataLoader(TensorDataset(x, m), batch_size=16, shuffle=True, drop_last=True, generator=rng(7))

    class DiceLoss(nn.Module):
        def __init__(self, smooth=1.0):
            super().__init__()
            self.smooth = smooth

        def forward(self, logits, targets):
            inputs = logits
            inputs = inputs.view(-1)
            targets = targets.view(-1)
            intersection = (inputs * targets).sum()
            dice = (2.0 * intersection + self.smooth) / (inputs.sum() + targets.sum() + self.smooth)
            return 1 - dice

    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 1, 1),
    )
    criterion = DiceLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        image, mask = next(batches)
        pred = model(image)
        loss = criterion(pred, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = (torch.sigmoid(model(x_val)) > 0.5).float()
            return (1 - 2 * (pred * m_val).sum() / (pred.sum() + m_val.sum())).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lesion_dice_on_raw_logits_good():
    torch.manual_seed(0)
    x, m = scenes(480, seed=5)
    x_val, m_val = scenes(96, seed=6)
    m, m_val = (m > 0).float().unsqueeze(1), (m_val > 0).float().unsqueeze(1)
    loader = DataLoader(TensorDataset(x, m), batch_size=16, shuffle=True, drop_last=True, generator=rng(7))

    class DiceLoss(nn.Module):
        def __init__(self, smooth=1.0):
            super().__init__()
            self.smooth = smooth

        def forward(self, logits, targets):
            inputs = torch.sigmoid(logits)
            inputs = inputs.view(-1)
            targets = targets.view(-1)
            intersection = (inputs * targets).sum()
            dice = (2.0 * intersection + self.smooth) / (inputs.sum() + targets.sum() + self.smooth)
            return 1 - dice

    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 1, 1),
    )
    criterion = DiceLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        image, mask = next(batches)
        pred = model(image)
        loss = criterion(pred, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = (torch.sigmoid(model(x_val)) > 0.5).float()
            return (1 - 2 * (pred * m_val).sum() / (pred.sum() + m_val.sum())).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_mean_reconstruction_summed_kl_bad():
    torch.manual_seed(0)

    def pictures(n, seed):
        x, _ = glyph_images(n, 10, seed, noise=0.05, shift=1)
        return (x * 0.8 + 0.5).clamp(0, 1).flatten(1)

    x, x_val = pictures(2048, 1), pictures(256, 2)
    loader = DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class VAE(nn.Module):
        def __init__(self, d=256, h=128, z=8):
            super().__init__()
            self.fc1 = nn.Linear(d, h)
            self.fc21 = nn.Linear(h, z)
            self.fc22 = nn.Linear(h, z)
            self.fc3 = nn.Linear(z, h)
            self.fc4 = nn.Linear(h, d)

        def encode(self, x):
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + torch.randn_like(std) * std

        def decode(self, z):
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

        def forward(self, x):
            mu, logvar = self.encode(x)
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        BCE = F.binary_cross_entropy(recon_x, x, reduction="mean")
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return BCE + KLD

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        (data,) = next(batches)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            mu, _ = model.encode(x_val)
            return F.mse_loss(model.decode(mu), x_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_mean_reconstruction_summed_kl_good():
    torch.manual_seed(0)

    def pictures(n, seed):
        x, _ = glyph_images(n, 10, seed, noise=0.05, shift=1)
        return (x * 0.8 + 0.5).clamp(0, 1).flatten(1)

    x, x_val = pictures(2048, 1), pictures(256, 2)
    loader = DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class VAE(nn.Module):
        def __init__(self, d=256, h=128, z=8):
            super().__init__()
            self.fc1 = nn.Linear(d, h)
            self.fc21 = nn.Linear(h, z)
            self.fc22 = nn.Linear(h, z)
            self.fc3 = nn.Linear(z, h)
            self.fc4 = nn.Linear(h, d)

        def encode(self, x):
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + torch.randn_like(std) * std

        def decode(self, z):
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

        def forward(self, x):
            mu, logvar = self.encode(x)
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        BCE = F.binary_cross_entropy(recon_x, x, reduction="sum") / x.size(0)
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return BCE + KLD

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        (data,) = next(batches)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            mu, _ = model.encode(x_val)
            return F.mse_loss(model.decode(mu), x_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def face_multitask_age_term_item_bad():
    torch.manual_seed(0)
    x, group, age = faces(2048, seed=1)
    x_val, group_val, age_val = faces(384, seed=2)

    class FaceDataset(Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            return {"image": x[i], "group": group[i], "age": age[i]}

    loader = DataLoader(FaceDataset(), batch_size=32, shuffle=True, drop_last=True, generator=rng(3))

    class MultiTaskNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
                nn.Flatten(), nn.Linear(32 * 25, 64), nn.ReLU(),
            )
            self.group_head = nn.Linear(64, 2)
            self.age_head = nn.Linear(64, 1)

        def forward(self, x):
            h = self.trunk(x)
            return self.group_head(h), self.age_head(h).squeeze(-1)

    model = MultiTaskNet()
    ce = nn.CrossEntropyLoss()
    mse = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        batch = next(batches)
        group_logits, age_pred = model(batch["image"])
        loss = ce(group_logits, batch["group"])
        age_loss = mse(age_pred, batch["age"])
        total_loss = loss + age_loss.item()
        optimizer.zero_grad()
        total_loss.backward()
        optimizer.step()
        return total_loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(x_val)[1], age_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def face_multitask_age_term_item_good():
    torch.manual_seed(0)
    x, group, age = faces(2048, seed=1)
    x_val, group_val, age_val = faces(384, seed=2)

    class FaceDataset(Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            return {"image": x[i], "group": group[i], "age": age[i]}

    loader = DataLoader(FaceDataset(), batch_size=32, shuffle=True, drop_last=True, generator=rng(3))

    class MultiTaskNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
                nn.Flatten(), nn.Linear(32 * 25, 64), nn.ReLU(),
            )
            self.group_head = nn.Linear(64, 2)
            self.age_head = nn.Linear(64, 1)

        def forward(self, x):
            h = self.trunk(x)
            return self.group_head(h), self.age_head(h).squeeze(-1)

    model = MultiTaskNet()
    ce = nn.CrossEntropyLoss()
    mse = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        batch = next(batches)
        group_logits, age_pred = model(batch["image"])
        loss = ce(group_logits, batch["group"])
        age_loss = mse(age_pred, batch["age"])
        total_loss = loss + age_loss
        optimizer.zero_grad()
        total_loss.backward()
        optimizer.step()
        return total_loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(x_val)[1], age_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def signature_cosine_loss_zero_one_targets_bad():
    torch.manual_seed(0)
    a, b, same = signature_pairs(2048, seed=1)
    a_val, b_val, same_val = signature_pairs(512, seed=2)
    loader = DataLoader(TensorDataset(a, b, same), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class SiameseEncoder(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(2, 32, 5, stride=2, padding=2), nn.ReLU(),
                nn.Conv1d(32, 32, 5, stride=2, padding=2), nn.ReLU(),
            )
            self.fc = nn.Linear(32 * 12, dim)

        def forward_once(self, x):
            return self.fc(self.conv(x).flatten(1))

        def forward(self, x1, x2):
            return self.forward_once(x1), self.forward_once(x2)

    model = SiameseEncoder()
    criterion = nn.CosineEmbeddingLoss(margin=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        x1, x2, label = next(batches)
        e1, e2 = model(x1, x2)
        target = label.float()
        loss = criterion(e1, e2, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            e1, e2 = model(a_val, b_val)
            pred = (F.cosine_similarity(e1, e2) > 0.5).long()
            return (pred != same_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def signature_cosine_loss_zero_one_targets_good():
    torch.manual_seed(0)
    a, b, same = signature_pairs(2048, seed=1)
    a_val, b_val, same_val = signature_pairs(512, seed=2)
    loader = DataLoader(TensorDataset(a, b, same), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class SiameseEncoder(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(2, 32, 5, stride=2, padding=2), nn.ReLU(),
                nn.Conv1d(32, 32, 5, stride=2, padding=2), nn.ReLU(),
            )
            self.fc = nn.Linear(32 * 12, dim)

        def forward_once(self, x):
            return self.fc(self.conv(x).flatten(1))

        def forward(self, x1, x2):
            return self.forward_once(x1), self.forward_once(x2)

    model = SiameseEncoder()
    criterion = nn.CosineEmbeddingLoss(margin=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        x1, x2, label = next(batches)
        e1, e2 = model(x1, x2)
        target = 2 * label.float() - 1
        loss = criterion(e1, e2, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            e1, e2 = model(a_val, b_val)
            pred = (F.cosine_similarity(e1, e2) > 0.5).long()
            return (pred != same_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def moisture_targets_collated_as_long_bad():
    torch.manual_seed(0)
    x, y = greenhouse(1536, seed=1)
    x_val, y_val = greenhouse(384, seed=2)

    class SensorDataset(Dataset):
        def __init__(self, series, targets):
            self.series, self.targets = series, targets.tolist()

        def __len__(self):
            return len(self.series)

        def __getitem__(self, i):
            return self.series[i], self.targets[i]

    def collate(batch):
        series, targets = zip(*batch)
        return torch.stack(series), torch.tensor(targets, dtype=torch.long)

    loader = DataLoader(SensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True, collate_fn=collate, generator=rng(3))

    class MoistureGRU(nn.Module):
        def __init__(self, channels=5, hidden=32):
            super().__init__()
            self.gru = nn.GRU(channels, hidden, batch_first=True)
            self.head = nn.Linear(hidden, 1)

        def forward(self, x):
            _, h = self.gru(x)
            return self.head(h[-1]).squeeze(-1)

    model = MoistureGRU()
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        series, target = next(batches)
        pred = model(series)
        loss = loss_fn(pred, target.float())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(x_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def moisture_targets_collated_as_long_good():
    torch.manual_seed(0)
    x, y = greenhouse(1536, seed=1)
    x_val, y_val = greenhouse(384, seed=2)

    class SensorDataset(Dataset):
        def __init__(self, series, targets):
            self.series, self.targets = series, targets.tolist()

        def __len__(self):
            return len(self.series)

        def __getitem__(self, i):
            return self.series[i], self.targets[i]

    def collate(batch):
        series, targets = zip(*batch)
        return torch.stack(series), torch.tensor(targets, dtype=torch.float32)

    loader = DataLoader(SensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True, collate_fn=collate, generator=rng(3))

    class MoistureGRU(nn.Module):
        def __init__(self, channels=5, hidden=32):
            super().__init__()
            self.gru = nn.GRU(channels, hidden, batch_first=True)
            self.head = nn.Linear(hidden, 1)

        def forward(self, x):
            _, h = self.gru(x)
            return self.head(h[-1]).squeeze(-1)

    model = MoistureGRU()
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        series, target = next(batches)
        pred = model(series)
        loss = loss_fn(pred, target.float())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(x_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def recommender_bpr_arguments_swapped_bad():
    torch.manual_seed(0)
    train_pairs, held_out, liked = interactions(seed=1)
    n_users, n_items = liked.shape
    seen = torch.zeros_like(liked)
    seen[train_pairs[:, 0], train_pairs[:, 1]] = True

    class MF(nn.Module):
        def __init__(self, n_users, n_items, dim=16):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            self.item = nn.Embedding(n_items, dim)
            self.item_bias = nn.Embedding(n_items, 1)
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)
            nn.init.zeros_(self.item_bias.weight)

        def forward(self, u, i):
            return (self.user(u) * self.item(i)).sum(-1) + self.item_bias(i).squeeze(-1)

    class BPRLoss(nn.Module):
        def forward(self, pos_scores, neg_scores):
            return -F.logsigmoid(pos_scores - neg_scores).mean()

    model = MF(n_users, n_items)
    bpr = BPRLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
    g = rng(3)

    def step(i):
        model.train()
        batch = train_pairs[torch.randint(0, len(train_pairs), (512,), generator=g)]
        users, pos_items = batch[:, 0], batch[:, 1]
        # uniform negatives among the items this user has not touched
        neg_items = torch.multinomial((~seen[users]).float(), 1, generator=g).squeeze(1)
        pos_scores = model(users, pos_items)
        neg_scores = model(users, neg_items)
        loss = bpr(neg_scores, pos_scores)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            scores = model.user.weight @ model.item.weight.t() + model.item_bias.weight.t()
            auc = [(scores[u, held_out[u]][:, None] > scores[u, ~liked[u]][None, :]).float().mean() for u in range(n_users)]
            return 1 - torch.stack(auc).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def recommender_bpr_arguments_swapped_good():
    torch.manual_seed(0)
    train_pairs, held_out, liked = interactions(seed=1)
    n_users, n_items = liked.shape
    seen = torch.zeros_like(liked)
    seen[train_pairs[:, 0], train_pairs[:, 1]] = True

    class MF(nn.Module):
        def __init__(self, n_users, n_items, dim=16):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            self.item = nn.Embedding(n_items, dim)
            self.item_bias = nn.Embedding(n_items, 1)
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)
            nn.init.zeros_(self.item_bias.weight)

        def forward(self, u, i):
            return (self.user(u) * self.item(i)).sum(-1) + self.item_bias(i).squeeze(-1)

    class BPRLoss(nn.Module):
        def forward(self, pos_scores, neg_scores):
            return -F.logsigmoid(pos_scores - neg_scores).mean()

    model = MF(n_users, n_items)
    bpr = BPRLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
    g = rng(3)

    def step(i):
        model.train()
        batch = train_pairs[torch.randint(0, len(train_pairs), (512,), generator=g)]
        users, pos_items = batch[:, 0], batch[:, 1]
        # uniform negatives among the items this user has not touched
        neg_items = torch.multinomial((~seen[users]).float(), 1, generator=g).squeeze(1)
        pos_scores = model(users, pos_items)
        neg_scores = model(users, neg_items)
        loss = bpr(pos_scores, neg_scores)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            scores = model.user.weight @ model.item.weight.t() + model.item_bias.weight.t()
            auc = [(scores[u, held_out[u]][:, None] > scores[u, ~liked[u]][None, :]).float().mean() for u in range(n_users)]
            return 1 - torch.stack(auc).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fraud_pos_weight_inverted_bad():
    torch.manual_seed(0)
    x, y = transactions(6000, seed=1)
    x_val, y_val = transactions(2000, seed=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True, drop_last=True, generator=rng(3))

    n_pos = y.sum()
    n_neg = len(y) - n_pos
    pos_weight = n_pos / n_neg

    class FraudNet(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(d, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1),
                nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(),
                nn.Linear(32, 1),
            )

        def forward(self, x):
            return self.layers(x).squeeze(1)

    model = FraudNet(x.shape[1])
    criterion = nn.BCEWithLogitsLoss(pos_weight=pos_weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    batches = cycle(loader)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = (torch.sigmoid(model(x_val)) > 0.5).float()
            fn = (pred[y_val == 1] == 0).float().mean()
            fp = (pred[y_val == 0] == 1).float().mean()
            return (0.5 * (fn + fp)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fraud_pos_weight_inverted_good():
    torch.manual_seed(0)
    x, y = transactions(6000, seed=1)
    x_val, y_val = transactions(2000, seed=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True, drop_last=True, generator=rng(3))

    n_pos = y.sum()
    n_neg = len(y) - n_pos
    pos_weight = n_neg / n_pos

    class FraudNet(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(d, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1),
                nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(),
                nn.Linear(32, 1),
            )

        def forward(self, x):
            return self.layers(x).squeeze(1)

    model = FraudNet(x.shape[1])
    criterion = nn.BCEWithLogitsLoss(pos_weight=pos_weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    batches = cycle(loader)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = (torch.sigmoid(model(x_val)) > 0.5).float()
            fn = (pred[y_val == 1] == 0).float().mean()
            fp = (pred[y_val == 0] == 1).float().mean()
            return (0.5 * (fn + fp)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ppo_ratio_inverted_bad():
    torch.manual_seed(0)
    env = PointEnv(32, rng(1))
    horizon, gamma, lam, clip_eps = 16, 0.95, 0.95, 0.2

    def mlp(n_out, gain):
        net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, n_out))
        for m in net:
            if isinstance(m, nn.Linear):
                nn.init.orthogonal_(m.weight, math.sqrt(2))
                nn.init.zeros_(m.bias)
        nn.init.orthogonal_(net[-1].weight, gain)
        return net

    actor, critic = mlp(3, 0.01), mlp(1, 1.0)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=2e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=3e-3)
    g = rng(2)

    def step(i):
        # collect one batch of episodes
        obs_buf, act_buf, logp_buf, rew_buf, val_buf = [], [], [], [], []
        with torch.no_grad():
            obs = env.reset()
            for _ in range(horizon):
                dist = Categorical(logits=actor(obs))
                action = dist.sample()
                obs_buf.append(obs)
                act_buf.append(action)
                logp_buf.append(dist.log_prob(action))
                val_buf.append(critic(obs).squeeze(-1))
                obs, reward = env.step(action)
                rew_buf.append(reward)
            next_value = critic(obs).squeeze(-1)  # the episodes are cut by time, so bootstrap
            adv, gae = [], torch.zeros(env.n)
            for t in reversed(range(horizon)):
                delta = rew_buf[t] + gamma * next_value - val_buf[t]
                gae = delta + gamma * lam * gae
                adv.insert(0, gae)
                next_value = val_buf[t]
            adv = torch.stack(adv)
            returns = (adv + torch.stack(val_buf)).flatten()
            obs_all, act_all, logp_old = torch.cat(obs_buf), torch.cat(act_buf), torch.cat(logp_buf)
            adv = adv.flatten()

        total = 0.0
        for epoch in range(2):
            perm = torch.randperm(len(obs_all), generator=g)
            for idx in perm.split(256):
                dist = Categorical(logits=actor(obs_all[idx]))
                logp = dist.log_prob(act_all[idx])
                ratio = torch.exp(logp_old[idx] - logp)
                a = adv[idx]
                a = (a - a.mean()) / (a.std() + 1e-8)
                surr = torch.min(ratio * a, ratio.clamp(1 - clip_eps, 1 + clip_eps) * a)
                actor_loss = -surr.mean() - 0.01 * dist.entropy().mean()
                actor_opt.zero_grad()
                actor_loss.backward()
                nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
                actor_opt.step()

                critic_loss = F.mse_loss(critic(obs_all[idx]).squeeze(-1), returns[idx])
                critic_opt.zero_grad()
                critic_loss.backward()
                nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
                critic_opt.step()
                total += actor_loss.item() + critic_loss.item()
        return total / 4

    def probe():
        test_env = PointEnv(256, rng(99))
        dist = 0.0
        with evaluating(actor):
            obs = test_env.reset()
            for _ in range(16):
                obs, _ = test_env.step(actor(obs).argmax(1))
                dist += obs[:, 0].abs().mean().item() / 16
        return dist

    return {"model": (actor, critic), "optimizer": (actor_opt, critic_opt), "steps": 20, "step": step, "probe": probe}


def ppo_ratio_inverted_good():
    torch.manual_seed(0)
    env = PointEnv(32, rng(1))
    horizon, gamma, lam, clip_eps = 16, 0.95, 0.95, 0.2

    def mlp(n_out, gain):
        net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, n_out))
        for m in net:
            if isinstance(m, nn.Linear):
                nn.init.orthogonal_(m.weight, math.sqrt(2))
                nn.init.zeros_(m.bias)
        nn.init.orthogonal_(net[-1].weight, gain)
        return net

    actor, critic = mlp(3, 0.01), mlp(1, 1.0)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=2e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=3e-3)
    g = rng(2)

    def step(i):
        # collect one batch of episodes
        obs_buf, act_buf, logp_buf, rew_buf, val_buf = [], [], [], [], []
        with torch.no_grad():
            obs = env.reset()
            for _ in range(horizon):
                dist = Categorical(logits=actor(obs))
                action = dist.sample()
                obs_buf.append(obs)
                act_buf.append(action)
                logp_buf.append(dist.log_prob(action))
                val_buf.append(critic(obs).squeeze(-1))
                obs, reward = env.step(action)
                rew_buf.append(reward)
            next_value = critic(obs).squeeze(-1)  # the episodes are cut by time, so bootstrap
            adv, gae = [], torch.zeros(env.n)
            for t in reversed(range(horizon)):
                delta = rew_buf[t] + gamma * next_value - val_buf[t]
                gae = delta + gamma * lam * gae
                adv.insert(0, gae)
                next_value = val_buf[t]
            adv = torch.stack(adv)
            returns = (adv + torch.stack(val_buf)).flatten()
            obs_all, act_all, logp_old = torch.cat(obs_buf), torch.cat(act_buf), torch.cat(logp_buf)
            adv = adv.flatten()

        total = 0.0
        for epoch in range(2):
            perm = torch.randperm(len(obs_all), generator=g)
            for idx in perm.split(256):
                dist = Categorical(logits=actor(obs_all[idx]))
                logp = dist.log_prob(act_all[idx])
                ratio = torch.exp(logp - logp_old[idx])
                a = adv[idx]
                a = (a - a.mean()) / (a.std() + 1e-8)
                surr = torch.min(ratio * a, ratio.clamp(1 - clip_eps, 1 + clip_eps) * a)
                actor_loss = -surr.mean() - 0.01 * dist.entropy().mean()
                actor_opt.zero_grad()
                actor_loss.backward()
                nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
                actor_opt.step()

                critic_loss = F.mse_loss(critic(obs_all[idx]).squeeze(-1), returns[idx])
                critic_opt.zero_grad()
                critic_loss.backward()
                nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
                critic_opt.step()
                total += actor_loss.item() + critic_loss.item()
        return total / 4

    def probe():
        test_env = PointEnv(256, rng(99))
        dist = 0.0
        with evaluating(actor):
            obs = test_env.reset()
            for _ in range(16):
                obs, _ = test_env.step(actor(obs).argmax(1))
                dist += obs[:, 0].abs().mean().item() / 16
        return dist

    return {"model": (actor, critic), "optimizer": (actor_opt, critic_opt), "steps": 20, "step": step, "probe": probe}


def gaussian_head_variance_passed_as_scale_bad():
    torch.manual_seed(0)
    x, y = noisy_curve(2048, seed=1)
    x_val, y_val = noisy_curve(512, seed=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class MeanVarianceNet(nn.Module):
        def __init__(self, d=3):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(d, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
            self.mean = nn.Linear(64, 1)
            self.raw_var = nn.Linear(64, 1)

        def forward(self, x):
            h = self.body(x)
            var = F.softplus(self.raw_var(h)) + 1e-4
            return self.mean(h).squeeze(-1), var.squeeze(-1)

    model = MeanVarianceNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        xb, yb = next(batches)
        mean, var = model(xb)
        likelihood = Normal(mean, var)
        loss = -likelihood.log_prob(yb).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            mean, var = model(x_val)
            lo, hi = mean - 1.645 * var.sqrt(), mean + 1.645 * var.sqrt()
            miss = (lo - y_val).clamp(min=0) + (y_val - hi).clamp(min=0)
            return ((hi - lo) + 20 * miss).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gaussian_head_variance_passed_as_scale_good():
    torch.manual_seed(0)
    x, y = noisy_curve(2048, seed=1)
    x_val, y_val = noisy_curve(512, seed=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class MeanVarianceNet(nn.Module):
        def __init__(self, d=3):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(d, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
            self.mean = nn.Linear(64, 1)
            self.raw_var = nn.Linear(64, 1)

        def forward(self, x):
            h = self.body(x)
            var = F.softplus(self.raw_var(h)) + 1e-4
            return self.mean(h).squeeze(-1), var.squeeze(-1)

    model = MeanVarianceNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        xb, yb = next(batches)
        mean, var = model(xb)
        likelihood = Normal(mean, var.sqrt())
        loss = -likelihood.log_prob(yb).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            mean, var = model(x_val)
            lo, hi = mean - 1.645 * var.sqrt(), mean + 1.645 * var.sqrt()
            miss = (lo - y_val).clamp(min=0) + (y_val - hi).clamp(min=0)
            return ((hi - lo) + 20 * miss).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_bootstraps_from_terminal_states_bad():
    torch.manual_seed(0)
    gamma, tau = 0.9, 0.05
    obs, action, reward, next_obs, done, all_states, q_exact = corridor_replay(4000, seed=1, gamma=gamma)

    class QNetwork(nn.Module):
        def __init__(self, n_obs=8, n_actions=3):
            super().__init__()
            self.layer1 = nn.Linear(n_obs, 64)
            self.layer2 = nn.Linear(64, 64)
            self.layer3 = nn.Linear(64, n_actions)

        def forward(self, x):
            x = F.relu(self.layer1(x))
            x = F.relu(self.layer2(x))
            return self.layer3(x)

    policy_net = QNetwork()
    target_net = copy.deepcopy(policy_net)
    for p in target_net.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(policy_net.parameters(), lr=1e-3)
    g = rng(3)

    def step(i):
        idx = torch.randint(0, len(obs), (128,), generator=g)
        q = policy_net(obs[idx]).gather(1, action[idx].unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_q = target_net(next_obs[idx]).max(1).values
            target = reward[idx] + gamma * next_q
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy_net.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            for p, tp in zip(policy_net.parameters(), target_net.parameters()):
                tp.lerp_(p, tau)
        return loss.item()

    def probe():
        with evaluating(policy_net):
            return (policy_net(all_states) - q_exact).abs().mean().item()

    return {"model": policy_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_bootstraps_from_terminal_states_good():
    torch.manual_seed(0)
    gamma, tau = 0.9, 0.05
    obs, action, reward, next_obs, done, all_states, q_exact = corridor_replay(4000, seed=1, gamma=gamma)

    class QNetwork(nn.Module):
        def __init__(self, n_obs=8, n_actions=3):
            super().__init__()
            self.layer1 = nn.Linear(n_obs, 64)
            self.layer2 = nn.Linear(64, 64)
            self.layer3 = nn.Linear(64, n_actions)

        def forward(self, x):
            x = F.relu(self.layer1(x))
            x = F.relu(self.layer2(x))
            return self.layer3(x)

    policy_net = QNetwork()
    target_net = copy.deepcopy(policy_net)
    for p in target_net.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(policy_net.parameters(), lr=1e-3)
    g = rng(3)

    def step(i):
        idx = torch.randint(0, len(obs), (128,), generator=g)
        q = policy_net(obs[idx]).gather(1, action[idx].unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_q = target_net(next_obs[idx]).max(1).values
            target = reward[idx] + gamma * next_q * (1 - done[idx])
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy_net.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            for p, tp in zip(policy_net.parameters(), target_net.parameters()):
                tp.lerp_(p, tau)
        return loss.item()

    def probe():
        with evaluating(policy_net):
            return (policy_net(all_states) - q_exact).abs().mean().item()

    return {"model": policy_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def load_forecast_pinball_error_sign_bad():
    torch.manual_seed(0)
    x, y = load_windows(2048, seed=1)
    x_val, y_val = load_windows(512, seed=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))
    quantiles = (0.1, 0.5, 0.9)

    class QuantileLoss(nn.Module):
        def __init__(self, quantiles):
            super().__init__()
            self.quantiles = quantiles

        def forward(self, preds, target):
            losses = []
            for k, q in enumerate(self.quantiles):
                errors = preds[:, k] - target
                losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(1))
            return torch.cat(losses, dim=1).sum(dim=1).mean()

    model = nn.Sequential(
        nn.Linear(12, 64), nn.ReLU(),
        nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, len(quantiles)),
    )
    criterion = QuantileLoss(quantiles)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        window, nxt = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(window), nxt)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            e = y_val[:, None] - model(x_val)
            q = torch.tensor(quantiles)
            return torch.maximum(q * e, (q - 1) * e).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def load_forecast_pinball_error_sign_good():
    torch.manual_seed(0)
    x, y = load_windows(2048, seed=1)
    x_val, y_val = load_windows(512, seed=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))
    quantiles = (0.1, 0.5, 0.9)

    class QuantileLoss(nn.Module):
        def __init__(self, quantiles):
            super().__init__()
            self.quantiles = quantiles

        def forward(self, preds, target):
            losses = []
            for k, q in enumerate(self.quantiles):
                errors = target - preds[:, k]
                losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(1))
            return torch.cat(losses, dim=1).sum(dim=1).mean()

    model = nn.Sequential(
        nn.Linear(12, 64), nn.ReLU(),
        nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, len(quantiles)),
    )
    criterion = QuantileLoss(quantiles)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        window, nxt = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(window), nxt)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            e = y_val[:, None] - model(x_val)
            q = torch.tensor(quantiles)
            return torch.maximum(q * e, (q - 1) * e).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def assay_mask_applied_after_mean_bad():
    torch.manual_seed(0)
    x, y, mask = assays(2048, seed=1)
    x_val, y_val, _ = assays(512, seed=2)
    y = torch.where(mask == 1, y, torch.zeros_like(y))  # not measured: stored as 0
    loader = DataLoader(TensorDataset(x, y, mask), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class MultiAssayNet(nn.Module):
        def __init__(self, d=16, tasks=6):
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(d, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.heads = nn.ModuleList(nn.Linear(64, 1) for _ in range(tasks))

        def forward(self, x):
            h = self.shared(x)
            return torch.cat([head(h) for head in self.heads], dim=1)

    model = MultiAssayNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        desc, values, measured = next(batches)
        pred = model(desc)
        loss = F.smooth_l1_loss(pred, values)
        loss = (loss * measured).sum() / measured.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(x_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def assay_mask_applied_after_mean_good():
    torch.manual_seed(0)
    x, y, mask = assays(2048, seed=1)
    x_val, y_val, _ = assays(512, seed=2)
    y = torch.where(mask == 1, y, torch.zeros_like(y))  # not measured: stored as 0
    loader = DataLoader(TensorDataset(x, y, mask), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class MultiAssayNet(nn.Module):
        def __init__(self, d=16, tasks=6):
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(d, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.heads = nn.ModuleList(nn.Linear(64, 1) for _ in range(tasks))

        def forward(self, x):
            h = self.shared(x)
            return torch.cat([head(h) for head in self.heads], dim=1)

    model = MultiAssayNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        desc, values, measured = next(batches)
        pred = model(desc)
        loss = F.smooth_l1_loss(pred, values, reduction="none")
        loss = (loss * measured).sum() / measured.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(x_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def localiser_giou_on_xywh_targets_bad():
    torch.manual_seed(0)
    images, boxes = one_box_pictures(2048, seed=1)
    images_val, boxes_val = one_box_pictures(256, seed=2)
    loader = DataLoader(TensorDataset(images, boxes), batch_size=32, shuffle=True, drop_last=True, generator=rng(3))

    def xywh_to_xyxy(b):
        return torch.cat([b[:, :2], b[:, :2] + b[:, 2:]], dim=1)

    def cxcywh_to_xyxy(b):
        return torch.cat([b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2], dim=1)

    def iou_and_giou(a, b):
        area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
        area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
        wh = (torch.min(a[:, 2:], b[:, 2:]) - torch.max(a[:, :2], b[:, :2])).clamp(min=0)
        inter = wh[:, 0] * wh[:, 1]
        union = area_a + area_b - inter
        hull = (torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])).clamp(min=0)
        hull = hull[:, 0] * hull[:, 1]
        iou = inter / (union + 1e-7)
        return iou, iou - (hull - union) / (hull + 1e-7)

    class Localiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            )
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 36, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, x):
            return cxcywh_to_xyxy(torch.sigmoid(self.head(self.backbone(x))))

    model = Localiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        img, gt = next(batches)
        pred = model(img)
        _, giou = iou_and_giou(pred, gt)
        loss = (1 - giou).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            iou, _ = iou_and_giou(model(images_val), xywh_to_xyxy(boxes_val))
            return 1 - iou.mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def localiser_giou_on_xywh_targets_good():
    torch.manual_seed(0)
    images, boxes = one_box_pictures(2048, seed=1)
    images_val, boxes_val = one_box_pictures(256, seed=2)
    loader = DataLoader(TensorDataset(images, boxes), batch_size=32, shuffle=True, drop_last=True, generator=rng(3))

    def xywh_to_xyxy(b):
        return torch.cat([b[:, :2], b[:, :2] + b[:, 2:]], dim=1)

    def cxcywh_to_xyxy(b):
        return torch.cat([b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2], dim=1)

    def iou_and_giou(a, b):
        area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
        area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
        wh = (torch.min(a[:, 2:], b[:, 2:]) - torch.max(a[:, :2], b[:, :2])).clamp(min=0)
        inter = wh[:, 0] * wh[:, 1]
        union = area_a + area_b - inter
        hull = (torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])).clamp(min=0)
        hull = hull[:, 0] * hull[:, 1]
        iou = inter / (union + 1e-7)
        return iou, iou - (hull - union) / (hull + 1e-7)

    class Localiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            )
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 36, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, x):
            return cxcywh_to_xyxy(torch.sigmoid(self.head(self.backbone(x))))

    model = Localiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        img, gt = next(batches)
        pred = model(img)
        _, giou = iou_and_giou(pred, xywh_to_xyxy(gt))
        loss = (1 - giou).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            iou, _ = iou_and_giou(model(images_val), xywh_to_xyxy(boxes_val))
            return 1 - iou.mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bike_counts_poisson_log_input_bad():
    torch.manual_seed(0)
    x, y = bike_hours(3000, seed=1)
    x_val, y_val = bike_hours(1000, seed=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class RateNet(nn.Module):
        def __init__(self, d=6):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(d, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1), nn.Softplus())

        def forward(self, x):
            return self.net(x).squeeze(-1)

    model = RateNet()
    criterion = nn.PoissonNLLLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        features, counts = next(batches)
        optimizer.zero_grad()
        rate = model(features)
        loss = criterion(rate, counts)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            rate = model(x_val).clamp(min=1e-6)
            return (2 * (torch.xlogy(y_val, y_val / rate) - (y_val - rate))).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bike_counts_poisson_log_input_good():
    torch.manual_seed(0)
    x, y = bike_hours(3000, seed=1)
    x_val, y_val = bike_hours(1000, seed=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True, generator=rng(3))

    class RateNet(nn.Module):
        def __init__(self, d=6):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(d, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1), nn.Softplus())

        def forward(self, x):
            return self.net(x).squeeze(-1)

    model = RateNet()
    criterion = nn.PoissonNLLLoss(log_input=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        features, counts = next(batches)
        optimizer.zero_grad()
        rate = model(features)
        loss = criterion(rate, counts)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            rate = model(x_val).clamp(min=1e-6)
            return (2 * (torch.xlogy(y_val, y_val / rate) - (y_val - rate))).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
