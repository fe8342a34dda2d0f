import copy
import math
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

CASES = [
    {"name": "simsiam_target_gradient",
     "what": "SimSiam without stop-gradient on the target branch: both branches are pulled towards each other, "
             "the representation collapses and a nearest-neighbour classifier on it fails."},
    {"name": "distill_teacher_mode",
     "what": "The frozen teacher of a classifier distillation is left in train mode: dropout makes its soft targets "
             "noisy and its BatchNorm statistics keep moving, so the student learns a blurred teacher."},
    {"name": "gru_sequence_axis",
     "what": "nn.GRU is built without batch_first but fed (batch, time, feature): it recurs over the rows of the "
             "batch and never over time, so order in the sequence cannot be learnt."},
    {"name": "mil_attention_axis",
     "what": "Attention pooling in multiple-instance learning takes the softmax over the batch (dim 0) instead of "
             "over the instances of a bag: bags compete with each other and bag features depend on the batch."},
    {"name": "segmentation_logit_layout",
     "what": "Segmentation logits (B,C,H,W) are reshaped to (-1,C) without moving the channel axis last: logits "
             "and pixel labels no longer belong together and pixel accuracy stays near chance."},
    {"name": "audio_padding_mask",
     "what": "The padding mask of an attention-pooled audio classifier is inverted: valid frames get -1e9 and the "
             "clip is summarised from its padding."},
    {"name": "multitask_heads_list",
     "what": "ModuleList([head] * n) makes all task heads one and the same module, so all tasks share weights "
             "by accident and get the same prediction."},
    {"name": "recsys_embedding_lookup",
     "what": "The two-tower recommender looks up items in the user table; the item table is never used and "
             "unrelated users and items share vectors."},
    {"name": "ema_model_statistics",
     "what": "The weight average (EMA) that is used for evaluation averages parameters only; BatchNorm running "
             "statistics of the averaged model stay at their initial values."},
    {"name": "vqvae_codebook_loss",
     "what": "In the VQ-VAE the codebook loss detaches the codes rather than the encoder output, so the codebook "
             "never gets a gradient and stays at its initial values."},
    {"name": "dqn_target_network",
     "what": "The soft update of the DQN target network rebinds a loop variable instead of writing in place: the "
             "target network stays at its random initialisation and values never propagate."},
    {"name": "gan_generator_grads",
     "what": "Of the two optimizers of a GAN only the discriminator's clears its gradients; the generator's gradients "
             "pile up from step to step and its updates follow the sum of all past ones."},
    {"name": "amp_clip_order",
     "what": "With a GradScaler the gradients are clipped to norm 1 before they are unscaled; the real update is "
             "smaller by the scale (65536) and the network hardly learns."},
    {"name": "forecast_scheduler_unit",
     "what": "StepLR is configured in epochs but stepped every batch: the rate is halved every 10 batches and "
             "the forecaster stops learning early."},
    {"name": "gnn_accumulation_scale",
     "what": "Gradient accumulation over 8 micro-batches without dividing the loss: with SGD and momentum the "
             "effective rate is eight times the intended one and training becomes unstable."},
    {"name": "transfer_group_rates",
     "what": "The two parameter groups of fine-tuning have their rates interchanged: the pretrained backbone gets "
             "the large rate meant for the new head and the head the tiny one; pretraining is destroyed."},
    {"name": "field_grid_upsampling",
     "what": "A neural field's feature grid is replaced by an upsampled parameter during training, but the "
             "optimizer still holds the old one: the grid is no longer trained after the first upsampling."},
    {"name": "tabular_bf16_weights",
     "what": "The whole model is cast to bfloat16 and trained with Adam at a small rate: most updates are smaller "
             "than the rounding of the weights and are lost."},
    {"name": "triplet_distance_sqrt",
     "what": "Pairwise distances take sqrt of an exact zero on the diagonal, so all gradients are NaN; the guard "
             "against non-finite gradients silently skips every update."},
    {"name": "diffusion_noise_seed",
     "what": "The noising helper seeds its generator anew at each call: every step uses the same time steps and "
             "the same noise, which the denoiser memorises."},
    {"name": "detection_flip_boxes",
     "what": "Random horizontal flipping is applied to the images of a detection head but not to the boxes: half "
             "of the box targets are mirrored and the horizontal position cannot be learnt."},
    {"name": "keyword_loader_order",
     "what": "The loader runs unshuffled through a set sorted by class: long runs of single-class batches drive "
             "the classifier to the class seen last."},
]


def _endless(loader):
    while True:
        yield from loader


def _loader(*tensors, batch_size, seed, shuffle=True):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=shuffle, drop_last=True,
                      generator=torch.Generator().manual_seed(seed))


@contextmanager
def _evaluation(*modules):
    flags = [(m, m.training) for mod in modules for m in mod.modules()]
    for mod in modules:
        mod.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, flag in flags:
            m.training = flag


def _gen(seed):
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------- self-supervised: SimSiam

class SimSiam(nn.Module):
    def __init__(self, d_in=48, d=64, d_proj=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(d_in, d, bias=False), nn.BatchNorm1d(d), nn.ReLU(),
            nn.Linear(d, d, bias=False), nn.BatchNorm1d(d), nn.ReLU())
        self.projector = nn.Sequential(
            nn.Linear(d, d, bias=False), nn.BatchNorm1d(d), nn.ReLU(),
            nn.Linear(d, d_proj, bias=False), nn.BatchNorm1d(d_proj, affine=False))
        self.predictor = nn.Sequential(
            nn.Linear(d_proj, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, d_proj))

    def forward(self, a, b):
        za, zb = self.projector(self.encoder(a)), self.projector(self.encoder(b))
        return self.predictor(za), self.predictor(zb), za, zb


def _simsiam(sound):
    torch.manual_seed(11)
    g = _gen(101)
    classes, d, k = 10, 48, 12
    protos = torch.randn(classes, d, generator=g)
    nuisance = torch.linalg.qr(torch.randn(d, k, generator=g))[0].T

    def draw(n):
        y = torch.randint(0, classes, (n,), generator=g)
        x = protos[y] * 0.45 + 0.6 * torch.randn(n, d, generator=g)
        x = x + 2.0 * torch.randn(n, k, generator=g) @ nuisance
        return x, y

    x_train, y_train = draw(2000)
    x_test, y_test = draw(600)
    mean, std = x_train.mean(0), x_train.std(0)

    def augment(x):
        x = x + 2.0 * torch.randn(len(x), k) @ nuisance + 0.2 * torch.randn_like(x)
        return (x - mean) / std

    model = SimSiam(d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batches = _endless(_loader(x_train, batch_size=128, seed=1))

    def step(i):
        (x,) = next(batches)
        pa, pb, za, zb = model(augment(x), augment(x))
        if sound:
            za, zb = za.detach(), zb.detach()
        loss = -0.5 * (F.cosine_similarity(pa, zb, dim=1).mean() + F.cosine_similarity(pb, za, dim=1).mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(model):
            bank = F.normalize(model.encoder((x_train - mean) / std), dim=1)
            query = F.normalize(model.encoder((x_test - mean) / std), dim=1)
            near = (query @ bank.T).topk(10, dim=1).indices
            votes = F.one_hot(y_train[near], classes).sum(1)
            return (votes.argmax(1) != y_test).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_target_gradient_bad():
    return _simsiam(False)


def simsiam_target_gradient_good():
    return _simsiam(True)


# ---------------------------------------------------------------- distillation of a classifier

def _distill(sound):
    torch.manual_seed(12)
    g = _gen(102)
    classes, d = 8, 32
    rule = nn.Sequential(nn.Linear(d, 48), nn.Tanh(), nn.Linear(48, classes))

    def draw(n):
        x = torch.randn(n, d, generator=g)
        with torch.no_grad():
            y = (6.0 * rule(x)).argmax(1)
        return x, y

    x_train, y_train = draw(3000)
    x_test, _ = draw(1000)

    teacher = nn.Sequential(
        nn.Linear(d, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.4),
        nn.Linear(128, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.4),
        nn.Linear(128, classes))
    pretrain = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    labelled = _endless(_loader(x_train, y_train, batch_size=128, seed=2))
    for _ in range(500):
        x, y = next(labelled)
        pretrain.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        pretrain.step()
    pretrain.zero_grad()
    teacher.requires_grad_(False)
    if sound:
        teacher.eval()
    reference = copy.deepcopy(teacher).eval()

    student = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    batches = _endless(_loader(x_train, batch_size=128, seed=3))
    temperature = 2.0

    def step(i):
        (x,) = next(batches)
        with torch.no_grad():
            soft = F.softmax(teacher(x) / temperature, dim=1)
        log_p = F.log_softmax(student(x) / temperature, dim=1)
        loss = F.kl_div(log_p, soft, reduction="batchmean") * temperature ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(student):
            target = F.softmax(reference(x_test), dim=1)
            return F.kl_div(F.log_softmax(student(x_test), dim=1), target, reduction="batchmean").item()

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": probe}


def distill_teacher_mode_bad():
    return _distill(False)


def distill_teacher_mode_good():
    return _distill(True)


# ---------------------------------------------------------------- RNN classifier

class GestureClassifier(nn.Module):
    def __init__(self, n_features, hidden, n_classes, sound):
        super().__init__()
        if sound:
            self.rnn = nn.GRU(n_features, hidden, batch_first=True)
        else:
            self.rnn = nn.GRU(n_features, hidden)
        self.head = nn.Linear(hidden, n_classes)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


def _gru(sound):
    torch.manual_seed(13)
    g = _gen(103)
    n_classes, n_features, length = 5, 6, 18
    motifs = torch.randn(n_classes, 6, n_features, generator=g)

    def draw(n):
        y = torch.randint(0, n_classes, (n,), generator=g)
        x = 0.6 * torch.randn(n, length, n_features, generator=g)
        start = torch.randint(0, length - 6, (n,), generator=g)
        for r in range(n):
            x[r, start[r]:start[r] + 6] += motifs[y[r]]
        return x, y

    x_train, y_train = draw(2000)
    x_test, y_test = draw(600)
    model = GestureClassifier(n_features, 32, n_classes, sound)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = _endless(_loader(x_train, y_train, batch_size=32, seed=4))

    def step(i):
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluation(model):
            wrong = sum((model(x).argmax(1) != y).sum().item()
                        for x, y in zip(x_test.split(30), y_test.split(30)))
        return wrong / len(y_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gru_sequence_axis_bad():
    return _gru(False)


def gru_sequence_axis_good():
    return _gru(True)


# ---------------------------------------------------------------- multiple-instance learning

class AttentionMIL(nn.Module):
    def __init__(self, d, hidden, sound):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.score = nn.Sequential(nn.Linear(hidden, 16), nn.Tanh(), nn.Linear(16, 1, bias=False))
        self.head = nn.Linear(hidden, 1)
        self.axis = 1 if sound else 0

    def forward(self, bags):
        h = self.embed(bags)
        weights = F.softmax(self.score(h), dim=self.axis)
        return self.head((weights * h).sum(dim=1)).squeeze(-1)


def _mil(sound):
    torch.manual_seed(14)
    g = _gen(104)
    d, size = 10, 16
    sign = torch.randn(d, generator=g)
    sign = 4.5 * sign / sign.norm()

    def draw(n):
        y = torch.randint(0, 2, (n,), generator=g).float()
        x = torch.randn(n, size, d, generator=g)
        where = torch.randint(0, size, (n,), generator=g)
        x[torch.arange(n), where] += y[:, None] * sign
        return x, y

    x_train, y_train = draw(3000)
    x_test, y_test = draw(960)
    model = AttentionMIL(d, 32, sound)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    batches = _endless(_loader(x_train, y_train, batch_size=32, seed=5))

    def step(i):
        x, y = next(batches)
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(model):
            losses = [F.binary_cross_entropy_with_logits(model(x), y).item()
                      for x, y in zip(x_test.split(1), y_test.split(1))]
        return sum(losses) / len(losses)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mil_attention_axis_bad():
    return _mil(False)


def mil_attention_axis_good():
    return _mil(True)


# ---------------------------------------------------------------- segmentation

def _segmentation(sound):
    torch.manual_seed(15)
    g = _gen(105)
    n_classes, side = 3, 20
    colours = torch.tensor([[-0.4, -0.3, 0.0], [0.9, 0.2, -0.5], [0.0, 0.8, 0.9]])
    rows, cols = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")

    def draw(n):
        mask = torch.zeros(n, side, side, dtype=torch.long)
        for kind in (1, 2):
            cy = torch.randint(3, side - 3, (n, 1, 1), generator=g)
            cx = torch.randint(3, side - 3, (n, 1, 1), generator=g)
            r = torch.randint(3, 6, (n, 1, 1), generator=g)
            if kind == 1:
                inside = ((rows - cy).abs() <= r) & ((cols - cx).abs() <= r)
            else:
                inside = (rows - cy) ** 2 + (cols - cx) ** 2 <= r ** 2
            mask[inside] = kind
        image = colours[mask].permute(0, 3, 1, 2) + 0.8 * torch.randn(n, 3, side, side, generator=g)
        return image.contiguous(), mask

    x_train, y_train = draw(600)
    x_test, y_test = draw(150)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, n_classes, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    batches = _endless(_loader(x_train, y_train, batch_size=16, seed=6))

    def step(i):
        x, y = next(batches)
        logits = model(x)
        if sound:
            logits = logits.permute(0, 2, 3, 1)
        loss = F.cross_entropy(logits.reshape(-1, n_classes), y.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(model):
            return (model(x_test).argmax(1) != y_test).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def segmentation_logit_layout_bad():
    return _segmentation(False)


def segmentation_logit_layout_good():
    return _segmentation(True)


# ---------------------------------------------------------------- audio with padding

class ClipClassifier(nn.Module):
    def __init__(self, n_mels, width, n_classes, sound):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(n_mels, width, 3, padding=1), nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=1), nn.ReLU())
        self.score = nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(width, n_classes)
        self.sound = sound

    def forward(self, mel, lengths):
        h = self.conv(mel.transpose(1, 2)).transpose(1, 2)
        frames = torch.arange(mel.shape[1], device=mel.device)
        valid = frames[None, :] < lengths[:, None]
        hidden = ~valid if self.sound else valid
        score = self.score(h).squeeze(-1).masked_fill(hidden, -1e9)
        weights = F.softmax(score, dim=1)
        return self.head(torch.einsum("bt,btd->bd", weights, h))


def _audio_mask(sound):
    torch.manual_seed(16)
    g = _gen(106)
    n_classes, n_mels, longest = 6, 12, 48
    spectra = torch.randn(n_classes, 5, n_mels, generator=g)

    def draw(n):
        y = torch.randint(0, n_classes, (n,), generator=g)
        lengths = torch.randint(14, longest - 4, (n,), generator=g)
        x = torch.randn(n, longest, n_mels, generator=g)
        for r in range(n):
            at = int(torch.randint(0, int(lengths[r]) - 5, (1,), generator=g))
            x[r, at:at + 5] += 0.8 * spectra[y[r]]
            x[r, lengths[r]:] = 0.0
        return x, lengths, y

    x_train, l_train, y_train = draw(1800)
    x_test, l_test, y_test = draw(500)
    model = ClipClassifier(n_mels, 32, n_classes, sound)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = _endless(_loader(x_train, l_train, y_train, batch_size=32, seed=7))

    def step(i):
        x, lengths, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, lengths), y)
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(model):
            return (model(x_test, l_test).argmax(1) != y_test).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_padding_mask_bad():
    return _audio_mask(False)


def audio_padding_mask_good():
    return _audio_mask(True)


# ---------------------------------------------------------------- multi-task tabular regression

class MultiTaskNet(nn.Module):
    def __init__(self, d, hidden, n_tasks, sound):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())

        def head():
            return nn.Sequential(nn.Linear(hidden, 16), nn.ReLU(), nn.Linear(16, 1))

        if sound:
            self.heads = nn.ModuleList([head() for _ in range(n_tasks)])
        else:
            self.heads = nn.ModuleList([head()] * n_tasks)

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat([head(h) for head in self.heads], dim=1)


def _multitask(sound):
    torch.manual_seed(17)
    g = _gen(107)
    d, n_tasks = 16, 4
    w1 = torch.randn(d, 24, generator=g) / 4
    w2 = torch.randn(24, n_tasks, generator=g)

    def draw(n):
        x = torch.randn(n, d, generator=g)
        y = torch.tanh(x @ w1) @ w2
        return x, y + 0.1 * torch.randn(n, n_tasks, generator=g)

    x_train, y_train = draw(3000)
    x_test, y_test = draw(800)
    mean, std = y_train.mean(0), y_train.std(0)
    y_train, y_test = (y_train - mean) / std, (y_test - mean) / std
    model = MultiTaskNet(d, 64, n_tasks, sound)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _endless(_loader(x_train, y_train, batch_size=64, seed=8))

    def step(i):
        x, y = next(batches)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(model):
            return F.mse_loss(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def multitask_heads_list_bad():
    return _multitask(False)


def multitask_heads_list_good():
    return _multitask(True)


# ---------------------------------------------------------------- recommendation

class Recommender(nn.Module):
    def __init__(self, n_users, n_items, dim, sound):
        super().__init__()
        self.user_table = nn.Embedding(n_users, dim)
        self.item_table = nn.Embedding(n_items, dim)
        self.user_bias = nn.Embedding(n_users, 1)
        self.item_bias = nn.Embedding(n_items, 1)
        for table in (self.user_table, self.item_table):
            nn.init.normal_(table.weight, std=0.1)
        for bias in (self.user_bias, self.item_bias):
            nn.init.zeros_(bias.weight)
        self.sound = sound

    def forward(self, users, items):
        u = self.user_table(users)
        v = self.item_table(items) if self.sound else self.user_table(items)
        return (u * v).sum(1) + self.user_bias(users).squeeze(1) + self.item_bias(items).squeeze(1)


def _recsys(sound):
    torch.manual_seed(18)
    g = _gen(108)
    n_users, n_items, rank = 150, 120, 4
    u = torch.randn(n_users, rank, generator=g)
    v = torch.randn(n_items, rank, generator=g)
    bias = 0.3 * torch.randn(n_items, generator=g)
    users = torch.arange(n_users).repeat_interleave(n_items)
    items = torch.arange(n_items).repeat(n_users)
    scores = (u[users] * v[items]).sum(1) / math.sqrt(rank) + bias[items]
    scores = scores + 0.2 * torch.randn(len(scores), generator=g)
    order = torch.randperm(len(scores), generator=g)
    users, items, scores = users[order], items[order], scores[order]
    cut = 9000
    mean, std = scores[:cut].mean(), scores[:cut].std()
    scores = (scores - mean) / std

    model = Recommender(n_users, n_items, 8, sound)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2)
    batches = _endless(_loader(users[:cut], items[:cut], scores[:cut], batch_size=256, seed=9))

    def step(i):
        b_users, b_items, b_scores = next(batches)
        loss = F.mse_loss(model(b_users, b_items), b_scores)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(model):
            return F.mse_loss(model(users[cut:], items[cut:]), scores[cut:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def recsys_embedding_lookup_bad():
    return _recsys(False)


def recsys_embedding_lookup_good():
    return _recsys(True)


# ---------------------------------------------------------------- image classification

def _pictures(g, n_train, n_test, n_classes, side, noise):
    coarse = torch.randn(n_classes, 1, side // 3, side // 3, generator=g)
    templates = F.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=False)
    templates = templates / templates.std(dim=(1, 2, 3), keepdim=True)

    def draw(n):
        y = torch.randint(0, n_classes, (n,), generator=g)
        x = templates[y]
        shift = torch.randint(-2, 3, (n, 2), generator=g)
        x = torch.stack([torch.roll(p, (int(a), int(b)), dims=(1, 2)) for p, (a, b) in zip(x, shift)])
        return x + noise * torch.randn(x.shape, generator=g), y

    x_train, y_train = draw(n_train)
    x_test, y_test = draw(n_test)
    mean, std = x_train.mean(), x_train.std()
    return (x_train - mean) / std, y_train, (x_test - mean) / std, y_test


class ParameterAverage:
    def __init__(self, model, decay):
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model, sound):
        for mine, theirs in zip(self.model.parameters(), model.parameters()):
            mine.lerp_(theirs, 1.0 - self.decay)
        if sound:
            for mine, theirs in zip(self.model.buffers(), model.buffers()):
                mine.copy_(theirs)


def _ema(sound):
    torch.manual_seed(19)
    x_train, y_train, x_test, y_test = _pictures(_gen(109), 1600, 500, 6, 12, 1.2)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 9, 6))
    average = ParameterAverage(model, decay=0.98)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    batches = _endless(_loader(x_train, y_train, batch_size=64, seed=10))

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        average.update(model, sound)

    def probe():
        with _evaluation(average.model):
            return F.cross_entropy(average.model(x_test), y_test).item()

    return {"model": {"model": model, "ema": average.model}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": probe}


def ema_model_statistics_bad():
    return _ema(False)


def ema_model_statistics_good():
    return _ema(True)


# ---------------------------------------------------------------- VQ-VAE

class VQVAE(nn.Module):
    def __init__(self, d_in, slots, dim, n_codes):
        super().__init__()
        self.slots, self.dim = slots, dim
        self.encoder = nn.Sequential(nn.Linear(d_in, 64), nn.ReLU(), nn.Linear(64, slots * dim))
        self.codebook = nn.Embedding(n_codes, dim)
        nn.init.uniform_(self.codebook.weight, -1.0 / n_codes, 1.0 / n_codes)
        self.decoder = nn.Sequential(nn.Linear(slots * dim, 64), nn.ReLU(), nn.Linear(64, d_in))

    def forward(self, x):
        z = self.encoder(x).view(-1, self.slots, self.dim)
        codes = torch.cdist(z.detach().flatten(0, 1), self.codebook.weight.detach()).argmin(1)
        zq = self.codebook(codes).view_as(z)
        through = z + (zq - z).detach()
        return self.decoder(through.flatten(1)), z, zq


def _vqvae(sound):
    torch.manual_seed(20)
    g = _gen(110)
    d = 32
    mix = torch.randn(6, d, generator=g)

    def draw(n):
        return torch.tanh(torch.randn(n, 6, generator=g) @ mix / 2) + 0.05 * torch.randn(n, d, generator=g)

    x_train, x_test = draw(3000), draw(800)
    mean, std = x_train.mean(0), x_train.std(0)
    x_train, x_test = (x_train - mean) / std, (x_test - mean) / std
    model = VQVAE(d, slots=4, dim=4, n_codes=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = _endless(_loader(x_train, batch_size=128, seed=11))

    def step(i):
        (x,) = next(batches)
        recon, z, zq = model(x)
        if sound:
            codebook_loss = F.mse_loss(zq, z.detach())
        else:
            codebook_loss = F.mse_loss(zq.detach(), z)
        commitment = F.mse_loss(z, zq.detach())
        loss = F.mse_loss(recon, x) + codebook_loss + 0.25 * commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(model):
            return F.mse_loss(model(x_test)[0], x_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vqvae_codebook_loss_bad():
    return _vqvae(False)


def vqvae_codebook_loss_good():
    return _vqvae(True)


# ---------------------------------------------------------------- reinforcement learning: DQN

class GridWorld:
    moves = torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])

    def __init__(self, side, n_envs, g):
        self.side, self.n_envs, self.g = side, n_envs, g
        self.cell = self.fresh()

    def fresh(self):
        start = torch.randint(0, self.side ** 2 - 1, (self.n_envs,), generator=self.g)
        return torch.stack([start // self.side, start % self.side], 1)

    @classmethod
    def move(cls, cell, action, side):
        nxt = (cell + cls.moves[action]).clamp(0, side - 1)
        done = (nxt == side - 1).all(1)
        return nxt, done.float(), done

    def step(self, action):
        before = self.cell
        nxt, reward, done = self.move(before, action, self.side)
        self.cell = torch.where(done[:, None], self.fresh(), nxt)
        return before, reward, nxt, done


def _dqn(sound):
    torch.manual_seed(21)
    g = _gen(111)
    side, gamma, tau, n_envs, capacity = 5, 0.95, 0.02, 8, 4000
    env = GridWorld(side, n_envs, g)

    def observe(cell):
        return F.one_hot(cell[:, 0] * side + cell[:, 1], side ** 2).float()

    online = nn.Sequential(nn.Linear(side ** 2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    memory = {"s": torch.zeros(capacity, 2, dtype=torch.long), "a": torch.zeros(capacity, dtype=torch.long),
              "r": torch.zeros(capacity), "n": torch.zeros(capacity, 2, dtype=torch.long),
              "d": torch.zeros(capacity)}
    fill = {"next": 0, "size": 0}

    def interact(epsilon):
        with torch.no_grad():
            action = online(observe(env.cell)).argmax(1)
        other = torch.randint(0, 4, (n_envs,), generator=g)
        action = torch.where(torch.rand(n_envs, generator=g) < epsilon, other, action)
        s, r, n, d = env.step(action)
        at = (fill["next"] + torch.arange(n_envs)) % capacity
        for key, value in zip("sarnd", (s, action, r, n, d.float())):
            memory[key][at] = value
        fill["next"] = (fill["next"] + n_envs) % capacity
        fill["size"] = min(fill["size"] + n_envs, capacity)

    for _ in range(60):
        interact(1.0)

    def soft_update():
        with torch.no_grad():
            for tp, p in zip(target.parameters(), online.parameters()):
                if sound:
                    tp.mul_(1.0 - tau).add_(p, alpha=tau)
                else:
                    tp = (1.0 - tau) * tp + tau * p

    def step(i):
        interact(max(0.2, 1.0 - i / 500))
        rows = torch.randint(0, fill["size"], (64,), generator=g)
        s, a, r, n, d = (memory[key][rows] for key in "sarnd")
        with torch.no_grad():
            y = r + gamma * (1.0 - d) * target(observe(n)).max(1).values
        q = online(observe(s)).gather(1, a[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        optimizer.step()
        soft_update()

    cells = torch.stack([torch.arange(side ** 2) // side, torch.arange(side ** 2) % side], 1)[:-1]
    best = torch.zeros(side ** 2)
    table = torch.zeros(len(cells), 4)
    for _ in range(200):
        for a in range(4):
            n, r, d = GridWorld.move(cells, torch.full((len(cells),), a), side)
            table[:, a] = r + gamma * (~d).float() * best[n[:, 0] * side + n[:, 1]]
        best[:-1] = table.max(1).values

    def probe():
        with _evaluation(online):
            return (online(observe(cells)) - table).abs().mean().item()

    return {"model": {"online": online, "target": target}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": probe}


def dqn_target_network_bad():
    return _dqn(False)


def dqn_target_network_good():
    return _dqn(True)


# ---------------------------------------------------------------- GAN

def _energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def _gan(sound):
    torch.manual_seed(22)
    g = _gen(112)
    d_noise = 8
    centres = torch.tensor([[math.cos(a), math.sin(a)] for a in torch.arange(6) * math.pi / 3])

    def draw(n):
        pick = torch.randint(0, 6, (n,), generator=g)
        return 1.4 * centres[pick] + 0.15 * torch.randn(n, 2, generator=g)

    x_train, x_test = draw(4000), draw(800)
    z_test = torch.randn(800, d_noise, generator=g)
    generator = nn.Sequential(nn.Linear(d_noise, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 96), nn.LeakyReLU(0.2), nn.Linear(96, 64), nn.LeakyReLU(0.2),
                           nn.Linear(64, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.0, 0.99))
    opt_d = torch.optim.Adam(critic.parameters(), lr=5e-4, betas=(0.0, 0.99))
    batches = _endless(_loader(x_train, batch_size=128, seed=12))
    ones, zeros = torch.ones(128, 1), torch.zeros(128, 1)

    def step(i):
        (real,) = next(batches)
        fake = generator(torch.randn(len(real), d_noise))

        opt_d.zero_grad()
        loss_d = (F.binary_cross_entropy_with_logits(critic(real), ones)
                  + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros))
        loss_d.backward()
        opt_d.step()

        if sound:
            opt_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(critic(fake), ones)
        loss_g.backward()
        opt_g.step()

    def probe():
        with _evaluation(generator):
            return _energy_distance(generator(z_test), x_test)

    return {"model": {"generator": generator, "discriminator": critic}, "optimizer": [opt_g, opt_d], "steps": 20,
            "step": step, "probe": probe}


def gan_generator_grads_bad():
    return _gan(False)


def gan_generator_grads_good():
    return _gan(True)


# ---------------------------------------------------------------- image classification, mixed precision

def _amp(sound):
    torch.manual_seed(23)
    x_train, y_train, x_test, y_test = _pictures(_gen(113), 2000, 600, 8, 12, 1.0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(),
                          nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    batches = _endless(_loader(x_train, y_train, batch_size=64, seed=13))

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        if sound:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    def probe():
        with _evaluation(model):
            return (model(x_test).argmax(1) != y_test).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_order_bad():
    return _amp(False)


def amp_clip_order_good():
    return _amp(True)


# ---------------------------------------------------------------- time series forecasting

class Forecaster(nn.Module):
    def __init__(self, horizon, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, horizon)

    def forward(self, past):
        _, h = self.rnn(past.unsqueeze(-1))
        return self.head(h[-1])


def _forecast(sound):
    torch.manual_seed(24)
    g = _gen(114)
    past, horizon, length = 24, 6, 1600
    t = torch.arange(length, dtype=torch.float32)
    series = (torch.sin(2 * math.pi * t / 12) + 0.6 * torch.sin(2 * math.pi * t / 31 + 1.0)
              + 0.4 * torch.sin(2 * math.pi * t / 7.3) + 0.1 * torch.randn(length, generator=g))
    cut = 1300
    series = (series - series[:cut].mean()) / series[:cut].std()
    train = series[:cut].unfold(0, past + horizon, 1)
    test = series[cut:].unfold(0, past + horizon, 1)
    x_train, y_train = train[:, :past].contiguous(), train[:, past:].contiguous()
    x_test, y_test = test[:, :past], test[:, past:]

    model = Forecaster(horizon)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    loader = _loader(x_train, y_train, batch_size=32, seed=14)
    batches = _endless(loader)

    def step(i):
        x, y = next(batches)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if sound:
            if (i + 1) % len(loader) == 0:
                scheduler.step()
        else:
            scheduler.step()

    def probe():
        with _evaluation(model):
            return F.mse_loss(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forecast_scheduler_unit_bad():
    return _forecast(False)


def forecast_scheduler_unit_good():
    return _forecast(True)


# ---------------------------------------------------------------- graph network

class GraphNet(nn.Module):
    def __init__(self, d, hidden, n_classes):
        super().__init__()
        self.own1, self.near1 = nn.Linear(d, hidden), nn.Linear(d, hidden, bias=False)
        self.own2, self.near2 = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden, bias=False)
        self.head = nn.Linear(hidden, n_classes)

    def forward(self, x, adj):
        h = F.relu(self.own1(x) + self.near1(adj @ x))
        h = F.relu(self.own2(h) + self.near2(adj @ h))
        return self.head(h.mean(dim=1))


def _gnn(sound):
    torch.manual_seed(25)
    g = _gen(115)
    n_nodes, d, n_classes, micro = 12, 6, 3, 8
    protos = torch.randn(n_classes, 2, d, generator=g)

    def draw(n):
        y = torch.randint(0, n_classes, (n,), generator=g)
        side = (torch.rand(n, n_nodes, generator=g) < 0.5).long()
        x = 0.7 * protos[y[:, None], side] + torch.randn(n, n_nodes, d, generator=g)
        same = side[:, :, None] == side[:, None, :]
        prob = torch.where(same, 0.5, 0.1)
        upper = torch.triu((torch.rand(n, n_nodes, n_nodes, generator=g) < prob).float(), 1)
        adj = upper + upper.transpose(1, 2)
        adj = adj / adj.sum(2, keepdim=True).clamp(min=1.0)
        return x, adj, y

    x_train, a_train, y_train = draw(2400)
    x_test, a_test, y_test = draw(600)
    model = GraphNet(d, 32, n_classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = _endless(_loader(x_train, a_train, y_train, batch_size=8, seed=15))

    def step(i):
        optimizer.zero_grad()
        for _ in range(micro):
            x, adj, y = next(batches)
            loss = F.cross_entropy(model(x, adj), y)
            if sound:
                loss = loss / micro
            loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(model):
            return F.cross_entropy(model(x_test, a_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gnn_accumulation_scale_bad():
    return _gnn(False)


def gnn_accumulation_scale_good():
    return _gnn(True)


# ---------------------------------------------------------------- transfer learning

class Backboned(nn.Module):
    def __init__(self, backbone, width, n_classes):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(width, n_classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def _transfer(sound):
    torch.manual_seed(26)
    g = _gen(116)
    d, latent, source_classes, target_classes = 40, 6, 12, 4
    lift = torch.randn(latent, d, generator=g) / 2
    source = torch.randn(source_classes, latent, generator=g)
    target = torch.randn(target_classes, latent, generator=g)

    def draw(n, protos):
        y = torch.randint(0, len(protos), (n,), generator=g)
        z = 1.5 * protos[y] + 0.8 * torch.randn(n, latent, generator=g)
        return torch.tanh(z @ lift) + 0.6 * torch.randn(n, d, generator=g), y

    xs, ys = draw(4000, source)
    x_train, y_train = draw(160, target)
    x_test, y_test = draw(1000, target)
    mean, std = xs.mean(0), xs.std(0)
    xs, x_train, x_test = (xs - mean) / std, (x_train - mean) / std, (x_test - mean) / std

    backbone = nn.Sequential(nn.Linear(d, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
    pretrained = Backboned(backbone, 64, source_classes)
    pretrain = torch.optim.Adam(pretrained.parameters(), lr=1e-3)
    source_batches = _endless(_loader(xs, ys, batch_size=128, seed=16))
    for _ in range(300):
        x, y = next(source_batches)
        pretrain.zero_grad()
        F.cross_entropy(pretrained(x), y).backward()
        pretrain.step()

    model = Backboned(copy.deepcopy(backbone), 64, target_classes)
    model.zero_grad()
    low, high = 1e-5, 5e-3
    optimizer = torch.optim.AdamW([
        {"params": model.backbone.parameters(), "lr": low if sound else high},
        {"params": model.head.parameters(), "lr": high if sound else low},
    ], weight_decay=1e-2)
    batches = _endless(_loader(x_train, y_train, batch_size=32, seed=17))

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def transfer_group_rates_bad():
    return _transfer(False)


def transfer_group_rates_good():
    return _transfer(True)


# ---------------------------------------------------------------- neural field

class GridField(nn.Module):
    def __init__(self, channels=4, side=8):
        super().__init__()
        self.grid = nn.Parameter(0.1 * torch.randn(1, channels, side, side))
        self.decoder = nn.Sequential(nn.Linear(channels, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, xy):
        feats = F.grid_sample(self.grid, xy.view(1, -1, 1, 2), align_corners=True)
        return self.decoder(feats[0, :, :, 0].T).squeeze(1)

    @torch.no_grad()
    def upsample(self, side):
        finer = F.interpolate(self.grid, size=(side, side), mode="bilinear", align_corners=True)
        self.grid = nn.Parameter(finer)


def _field(sound):
    torch.manual_seed(27)
    g = _gen(117)

    def image(xy):
        x, y = xy[:, 0], xy[:, 1]
        return torch.sin(7 * x + 3 * y ** 2) * torch.cos(9 * y) + 0.5 * torch.sign(torch.sin(5 * x * y + 1))

    xy_train = torch.rand(8000, 2, generator=g) * 2 - 1
    xy_test = torch.rand(2000, 2, generator=g) * 2 - 1
    v_train, v_test = image(xy_train), image(xy_test)
    model = GridField()
    optimizer = torch.optim.Adam([
        {"params": [model.grid], "lr": 2e-2},
        {"params": model.decoder.parameters(), "lr": 2e-3},
    ])
    batches = _endless(_loader(xy_train, v_train, batch_size=512, seed=18))
    upsample_at = {12: 16, 150: 32}

    def step(i):
        if i in upsample_at:
            old = model.grid
            model.upsample(upsample_at[i])
            if sound:
                optimizer.state.pop(old, None)
                optimizer.param_groups[0]["params"] = [model.grid]
        xy, v = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(xy), v)
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(model):
            return F.mse_loss(model(xy_test), v_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def field_grid_upsampling_bad():
    return _field(False)


def field_grid_upsampling_good():
    return _field(True)


# ---------------------------------------------------------------- tabular, low precision

def _tabular(sound):
    torch.manual_seed(28)
    g = _gen(118)
    d = 20
    w1 = torch.randn(d, 16, generator=g) / 3
    w2 = torch.randn(16, generator=g)

    def draw(n):
        x = torch.randn(n, d, generator=g)
        return x, torch.tanh(x @ w1) @ w2 + 0.1 * torch.randn(n, generator=g)

    x_train, y_train = draw(4000)
    x_test, y_test = draw(1000)
    mean, std = y_train.mean(), y_train.std()
    y_train, y_test = (y_train - mean) / std, (y_test - mean) / std
    model = nn.Sequential(nn.Linear(d, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    if not sound:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    batches = _endless(_loader(x_train, y_train, batch_size=64, seed=19))

    def predict(x):
        if sound:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
        else:
            out = model(x.to(torch.bfloat16))
        return out.float().squeeze(1)

    def step(i):
        x, y = next(batches)
        loss = F.mse_loss(predict(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(model):
            return F.mse_loss(predict(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tabular_bf16_weights_bad():
    return _tabular(False)


def tabular_bf16_weights_good():
    return _tabular(True)


# ---------------------------------------------------------------- metric learning

def _triplet(sound):
    torch.manual_seed(29)
    g = _gen(119)
    classes, d, k = 12, 32, 10
    protos = torch.randn(classes, d, generator=g)
    spread = torch.randn(k, d, generator=g) / math.sqrt(d) * 2.0

    def draw(n):
        y = torch.randint(0, classes, (n,), generator=g)
        x = 0.6 * protos[y] + 0.4 * torch.randn(n, d, generator=g) + 1.5 * torch.randn(n, k, generator=g) @ spread
        return x, y

    x_train, y_train = draw(2400)
    x_test, y_test = draw(600)
    mean, std = x_train.mean(0), x_train.std(0)
    x_train, x_test = (x_train - mean) / std, (x_test - mean) / std
    model = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _endless(_loader(x_train, y_train, batch_size=96, seed=20))
    eye = torch.eye(96, dtype=torch.bool)

    def distances(e):
        square = (e[:, None, :] - e[None, :, :]).pow(2).sum(2)
        if sound:
            return square.clamp(min=1e-12).sqrt()
        return square.sqrt()

    def step(i):
        x, y = next(batches)
        dist = distances(F.normalize(model(x), dim=1))
        same = y[:, None] == y[None, :]
        positive = dist.masked_fill(~same | eye, 0.0).max(1).values
        negative = dist.masked_fill(same, 10.0).min(1).values
        loss = F.softplus(4.0 * (positive - negative)).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if torch.isfinite(norm):
            optimizer.step()

    def probe():
        with _evaluation(model):
            bank, query = F.normalize(model(x_train), dim=1), F.normalize(model(x_test), dim=1)
            nearest = (query @ bank.T).argmax(1)
            return (y_train[nearest] != y_test).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def triplet_distance_sqrt_bad():
    return _triplet(False)


def triplet_distance_sqrt_good():
    return _triplet(True)


# ---------------------------------------------------------------- diffusion

class Denoiser(nn.Module):
    def __init__(self, d, n_steps, hidden=96):
        super().__init__()
        self.time = nn.Embedding(n_steps, 16)
        self.net = nn.Sequential(nn.Linear(d + 16, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
                                 nn.Linear(hidden, d))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], dim=1))


def _diffusion(sound):
    torch.manual_seed(30)
    g = _gen(120)
    d, n_steps, seed = 8, 50, 7
    mix = torch.randn(2, d, generator=g)

    def draw(n):
        a = 2 * math.pi * torch.rand(n, 1, generator=g)
        return torch.cat([a.cos(), a.sin()], 1) @ mix + 0.05 * torch.randn(n, d, generator=g)

    x_train, x_test = draw(4000), draw(1000)
    mean, std = x_train.mean(0), x_train.std(0)
    x_train, x_test = (x_train - mean) / std, (x_test - mean) / std
    keep = torch.cumprod(1.0 - torch.linspace(1e-3, 0.2, n_steps), 0)

    def corrupt(x, rng):
        t = torch.randint(0, n_steps, (len(x),), generator=rng)
        noise = torch.randn(x.shape, generator=rng)
        a = keep[t][:, None]
        return a.sqrt() * x + (1 - a).sqrt() * noise, t, noise

    model = Denoiser(d, n_steps)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _endless(_loader(x_train, batch_size=128, seed=21))
    stream = torch.Generator().manual_seed(seed)

    def step(i):
        (x,) = next(batches)
        rng = stream if sound else torch.Generator().manual_seed(seed)
        noisy, t, noise = corrupt(x, rng)
        loss = F.mse_loss(model(noisy, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        rng = torch.Generator().manual_seed(4321)
        with _evaluation(model):
            total = 0.0
            for _ in range(4):
                noisy, t, noise = corrupt(x_test, rng)
                total += F.mse_loss(model(noisy, t), noise).item()
            return total / 4

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def diffusion_noise_seed_bad():
    return _diffusion(False)


def diffusion_noise_seed_good():
    return _diffusion(True)


# ---------------------------------------------------------------- detection head

class BoxHead(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(24 * 25, 64), nn.ReLU())
        self.box = nn.Linear(64, 4)
        self.label = nn.Linear(64, n_classes)

    def forward(self, x):
        h = self.features(x)
        return self.box(h).sigmoid(), self.label(h)


def _detection(sound):
    torch.manual_seed(31)
    g = _gen(121)
    side, n_classes = 20, 3
    colours = torch.tensor([[1.5, -0.5, 0.0], [-0.5, 1.5, 0.5], [0.5, 0.0, 1.6]])
    pixel = (torch.arange(side) + 0.5) / side

    def draw(n):
        y = torch.randint(0, n_classes, (n,), generator=g)
        size = 0.2 + 0.3 * torch.rand(n, 2, generator=g)
        centre = size / 2 + (1 - size) * torch.rand(n, 2, generator=g)
        in_x = (pixel[None, :] - centre[:, :1]).abs() <= size[:, :1] / 2
        in_y = (pixel[None, :] - centre[:, 1:]).abs() <= size[:, 1:] / 2
        inside = (in_y[:, :, None] & in_x[:, None, :]).float()
        x = colours[y][:, :, None, None] * inside[:, None] + 0.4 * torch.randn(n, 3, side, side, generator=g)
        return x, torch.cat([centre, size], 1), y

    x_train, b_train, y_train = draw(2000)
    x_test, b_test, y_test = draw(500)
    mean, std = x_train.mean((0, 2, 3), keepdim=True), x_train.std((0, 2, 3), keepdim=True)
    x_train, x_test = (x_train - mean) / std, (x_test - mean) / std
    model = BoxHead(n_classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    batches = _endless(_loader(x_train, b_train, y_train, batch_size=32, seed=22))

    def random_flip(x, boxes):
        chosen = torch.rand(len(x)) < 0.5
        x = torch.where(chosen[:, None, None, None], x.flip(3), x)
        if sound:
            boxes = boxes.clone()
            boxes[chosen, 0] = 1.0 - boxes[chosen, 0]
        return x, boxes

    def step(i):
        x, boxes, y = next(batches)
        x, boxes = random_flip(x, boxes)
        box, label = model(x)
        loss = 5.0 * F.l1_loss(box, boxes) + F.cross_entropy(label, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(model):
            box, _ = model(x_test)
            return F.l1_loss(box, b_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def detection_flip_boxes_bad():
    return _detection(False)


def detection_flip_boxes_good():
    return _detection(True)


# ---------------------------------------------------------------- audio keywords

def _keyword(sound):
    torch.manual_seed(32)
    g = _gen(122)
    n_classes, per_class, n_mels, frames = 8, 400, 10, 20
    patterns = torch.randn(n_classes, n_mels, frames, generator=g)
    patterns = F.avg_pool1d(patterns, 5, stride=1, padding=2)

    def draw(y):
        gain = 0.7 + 0.6 * torch.rand(len(y), 1, 1, generator=g)
        return 0.8 * gain * patterns[y] + torch.randn(len(y), n_mels, frames, generator=g)

    y_train = torch.arange(n_classes).repeat_interleave(per_class)
    y_test = torch.arange(n_classes).repeat_interleave(60)
    x_train, x_test = draw(y_train), draw(y_test)
    mean, std = x_train.mean((0, 2), keepdim=True), x_train.std((0, 2), keepdim=True)
    x_train, x_test = (x_train - mean) / std, (x_test - mean) / std
    model = nn.Sequential(
        nn.Conv1d(n_mels, 24, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(24, 24, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(240, n_classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _endless(_loader(x_train, y_train, batch_size=32, seed=23, shuffle=sound))

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluation(model):
            return (model(x_test).argmax(1) != y_test).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keyword_loader_order_bad():
    return _keyword(False)


def keyword_loader_order_good():
    return _keyword(True)
