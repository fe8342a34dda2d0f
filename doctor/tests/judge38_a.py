import copy
import math
from collections import deque
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


CASES = [
    {"name": "texture_cnn",
     "what": "Image classifier: softmax probabilities are handed to CrossEntropyLoss, which applies log-softmax again. "
             "The gradients are flattened and the loss cannot fall far, so the classifier learns much slower."},
    {"name": "housing_mlp",
     "what": "Tabular regression with a hand-written Huber loss: prediction (B,1) minus target (B,) broadcasts to (B,B). "
             "The network learns the mean of the targets only."},
    {"name": "cell_segmenter",
     "what": "Segmentation with soft dice: the softmax runs over the image width (dim=-1) instead of the class channel. "
             "Classes do not compete per pixel, so the argmax mask is poor."},
    {"name": "scene_tagger",
     "what": "Multi-label tagging: F.cross_entropy is given multi-hot targets (tags compete in one softmax) although tags are read with a "
             "sigmoid threshold. The logits have no absolute level, the thresholded tags are wrong."},
    {"name": "distil_student",
     "what": "Distillation of a classifier: F.kl_div gets the student's softmax instead of its log_softmax. "
             "The student is driven to one-sided confident outputs and does not match the teacher's distribution."},
    {"name": "stroke_vae",
     "what": "VAE: the reconstruction is averaged over pixels while the KL is summed over latents, so the KL weighs as many times too much as "
             "there are pixels. The posterior collapses and the latent code carries nothing."},
    {"name": "signature_siamese",
     "what": "Siamese verification with CosineEmbeddingLoss: labels are 0/1 instead of -1/+1, pairs with label 0 count nothing. "
             "All embeddings are pulled together and impostors look like genuine pairs."},
    {"name": "digit_ctc",
     "what": "CTC on audio frames: the (N,T,C) scores are brought to (T,N,C) by reshape instead of transpose, which mixes frames of different "
             "utterances. The recogniser learns next to nothing of the alignment."},
    {"name": "anchor_focal",
     "what": "Detection head with hand-written focal loss: the modulating factor uses the probability p for negatives too, instead of p_t. "
             "False positives with high scores get almost no loss and stay."},
    {"name": "load_forecaster",
     "what": "Probabilistic time series forecast: GaussianNLLLoss receives the standard deviation where it expects the variance. "
             "The predicted sigma is learnt as its own square, so the intervals are far too narrow."},
    {"name": "grid_dqn",
     "what": "DQN: the TD loss takes the maximum Q value of the state instead of the Q value of the action taken (gather). "
             "The action values are not told apart, the greedy policy does not find the goal."},
    {"name": "ring_gan",
     "what": "GAN: the discriminator's batch is concatenated as [fake, real] while the labels are [ones, zeros]; the generator also aims at ones. "
             "Both nets work for the same label, the generator is pushed away from the data."},
    {"name": "flower_transfer",
     "what": "Transfer learning: the optimizer is built before the classification head is replaced, so the new head is in no optimizer. "
             "Only the slowly tuned body adapts to a random head."},
    {"name": "demand_experts",
     "what": "Mixture of experts on tabular data: the experts are deep copies of one and the gate starts at zero, so experts and gate get identical "
             "(for the gate zero) gradients and never part. The mixture is worth one small expert."},
    {"name": "pedestrian_head",
     "what": "Detection: the prior bias -log((1-pi)/pi) is put on every conv of the classification tower, not only the last. "
             "The ReLUs of the tower are dead, its weights get a zero gradient, only the last bias learns."},
    {"name": "twin_tower",
     "what": "Two-tower contrastive training: the rows of the item tower are normalised after each step, but from a copy of the weight taken before "
             "training. The weight is overwritten with its initial values each step and never learns."},
    {"name": "movie_factors",
     "what": "Recommendation: the item bias (initial value 3.5) is kept in bfloat16, Adam's steps of 0.002 round away. "
             "The item biases stay at their initial value."},
    {"name": "urban_sound",
     "what": "Audio transfer: after freezing the net, the last block is 'unfrozen' with the misspelt attribute require_grad. "
             "The block gets no gradient (and is left out by the optimizer's filter) and stays at its pretrained values."},
    {"name": "molecule_gnn",
     "what": "Graph net with layer-wise rates: lr * (1 - layer_decay) ** depth with layer_decay 0.9 meant as the factor itself. "
             "The rate of the lower layers is practically nothing (a millionth)."},
    {"name": "gesture_gru",
     "what": "RNN classifier with attention pooling: softmax over the size-1 last dim of (B,T,1) scores gives all ones. "
             "The attention layer gets an exactly zero gradient and pooling is a plain sum over time."},
    {"name": "spiral_diffusion",
     "what": "Diffusion noise predictor: the time step is normalised with floor division (t // T is always 0). "
             "The first weight of the time embedding gets a zero gradient and the net does not know the noise level."},
    {"name": "patch_vit",
     "what": "Small ViT: unsqueeze is called on the nn.Parameter, so the position embedding is a plain non-leaf tensor, not registered and in no "
             "optimizer. The positions stay at their tiny random values."},
]


def _loader(*tensors, batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=True, drop_last=True, generator=g)


def _forever(loader):
    while True:
        yield from loader


@contextmanager
def _evaluating(*models):
    modes = [m.training for m in models]
    for m in models:
        m.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, mode in zip(models, modes):
            m.train(mode)


def _texture_images(n, classes, size, noise, g, proto_seed, channels=3):
    pg = torch.Generator().manual_seed(proto_seed)
    protos = F.interpolate(torch.randn(classes, channels, 4, 4, generator=pg), size=(size, size), mode="bilinear", align_corners=False)
    protos = (protos - protos.mean((1, 2, 3), keepdim=True)) / protos.std((1, 2, 3), keepdim=True)
    y = torch.randint(0, classes, (n,), generator=g)
    x = protos[y]
    shift = torch.randint(-1, 2, (n, 2), generator=g).tolist()
    x = torch.stack([torch.roll(im, tuple(s), dims=(1, 2)) for im, s in zip(x, shift)])
    x = x + noise * torch.randn(x.shape, generator=g)
    return x / math.sqrt(1 + noise ** 2), y


# ---------------------------------------------------------------- texture_cnn

class TextureCNN(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Linear(32 * 3 * 3, classes)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def _texture_cnn(good):
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(11)
    x, y = _texture_images(2000, 20, 12, 2.5, g, 5)
    xv, yv = _texture_images(600, 20, 12, 2.5, g, 5)
    batches = _forever(_loader(x, y, batch_size=32, seed=12))
    model = TextureCNN(20)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        xb, yb = next(batches)
        out = model(xb)
        if not good:
            out = F.softmax(out, dim=1)
        loss = criterion(out, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return (model(xv).argmax(1) != yv).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- housing_mlp

def _housing_mlp(good):
    torch.manual_seed(2)
    g = torch.Generator().manual_seed(21)
    x = torch.randn(3000, 8, generator=g)
    y = 2 * x[:, 0] - x[:, 1] * x[:, 2] + torch.sin(2 * x[:, 3]) + 0.5 * x[:, 4] ** 2 + 0.2 * torch.randn(3000, generator=g)
    mean, std = y[:2400].mean(), y[:2400].std()
    y = (y - mean) / std
    batches = _forever(_loader(x[:2400], y[:2400], batch_size=64, seed=22))
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    delta = 1.0

    def step(i):
        xb, yb = next(batches)
        pred = model(xb).squeeze(1) if good else model(xb)
        err = (pred - yb).abs()
        loss = torch.where(err < delta, 0.5 * err ** 2, delta * (err - 0.5 * delta)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return (model(x[2400:]).flatten() - y[2400:]).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------- cell_segmenter

class CellSegmenter(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU())
        self.enc2 = nn.Sequential(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU())
        self.dec = nn.Sequential(nn.Conv2d(36, 16, 3, padding=1), nn.ReLU())
        self.out = nn.Conv2d(16, classes, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(F.max_pool2d(a, 2))
        b = F.interpolate(b, scale_factor=2, mode="nearest")
        return self.out(self.dec(torch.cat([a, b], 1)))


def _cells(n, g, size=20):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    mask = torch.zeros(n, size, size, dtype=torch.long)
    for _ in range(2):
        c = torch.randint(4, size - 4, (n, 2), generator=g)
        r = torch.randint(3, 6, (n,), generator=g).float()
        d = ((yy - c[:, 0, None, None]).float() ** 2 + (xx - c[:, 1, None, None]).float() ** 2).sqrt()
        mask[d <= r[:, None, None]] = 1
        mask[d <= (r[:, None, None] - 2)] = 2
    level = torch.tensor([0.0, 1.0, 2.0])[mask]
    x = level + 0.5 * torch.randn(level.shape, generator=g)
    return ((x - 0.4) / 0.85)[:, None], mask


def _cell_segmenter(good):
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(31)
    x, m = _cells(600, g)
    xv, mv = _cells(150, g)
    batches = _forever(_loader(x, m, batch_size=16, seed=32))
    model = CellSegmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def dice_loss(logits, mask):
        probs = logits.softmax(dim=1 if good else -1)
        target = F.one_hot(mask, logits.shape[1]).permute(0, 3, 1, 2).float()
        inter = (probs * target).sum((0, 2, 3))
        total = (probs + target).sum((0, 2, 3))
        return 1 - ((2 * inter + 1) / (total + 1)).mean()

    def step(i):
        xb, mb = next(batches)
        loss = dice_loss(model(xb), mb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            pred = model(xv).argmax(1)
            iou = [((pred == c) & (mv == c)).sum() / ((pred == c) | (mv == c)).sum().clamp(min=1) for c in range(3)]
            return 1 - torch.stack(iou).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------- scene_tagger

class SceneTagger(nn.Module):
    def __init__(self, dim, tags):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 96), nn.GELU())
        self.tags = nn.Linear(96, tags)

    def forward(self, x):
        return self.tags(self.net(x))


def _scene_tagger(good):
    torch.manual_seed(4)
    g = torch.Generator().manual_seed(41)
    x = torch.randn(3000, 24, generator=g)
    w = torch.randn(24, 10, generator=g) / math.sqrt(24)
    t = ((x @ w + 0.1 * torch.randn(3000, 10, generator=g)) > 0.6).float()
    batches = _forever(_loader(x[:2400], t[:2400], batch_size=64, seed=42))
    model = SceneTagger(24, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        xb, tb = next(batches)
        logits = model(xb)
        loss = F.binary_cross_entropy_with_logits(logits, tb) if good else F.cross_entropy(logits, tb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            tags = (model(x[2400:]).sigmoid() > 0.5).float()
            return (tags != t[2400:]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------- distil_student

def _mlp_classifier(dim, width, classes):
    return nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))


def _blobs(n, g):
    cg = torch.Generator().manual_seed(50)
    centres = torch.randn(24, 12, generator=cg) * 1.1
    k = torch.randint(0, 24, (n,), generator=g)
    x = centres[k] + torch.randn(n, 12, generator=g)
    return x / 1.5, k % 8


@lru_cache(maxsize=None)
def _trained_teacher():
    torch.manual_seed(51)
    g = torch.Generator().manual_seed(52)
    x, y = _blobs(6000, g)
    batches = _forever(_loader(x, y, batch_size=128, seed=53))
    teacher = _mlp_classifier(12, 128, 8)
    opt = torch.optim.AdamW(teacher.parameters(), lr=2e-3, weight_decay=1e-2)
    for _ in range(300):
        xb, yb = next(batches)
        opt.zero_grad()
        F.cross_entropy(teacher(xb), yb).backward()
        opt.step()
    return teacher.eval()


def _distil_student(good):
    teacher = copy.deepcopy(_trained_teacher()).requires_grad_(False)
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(54)
    x, y = _blobs(3000, g)
    xv, yv = _blobs(800, g)
    batches = _forever(_loader(x, y, batch_size=64, seed=55))
    student = _mlp_classifier(12, 32, 8)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    tau, alpha = 2.0, 0.8

    def step(i):
        xb, yb = next(batches)
        with torch.no_grad():
            soft = F.softmax(teacher(xb) / tau, dim=1)
        logits = student(xb)
        scaled = F.log_softmax(logits / tau, dim=1) if good else F.softmax(logits / tau, dim=1)
        distil = F.kl_div(scaled, soft, reduction="batchmean") * tau ** 2
        loss = alpha * distil + (1 - alpha) * F.cross_entropy(logits, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(student):
            p = F.log_softmax(teacher(xv), dim=1)
            q = F.log_softmax(student(xv), dim=1)
            return (p.exp() * (p - q)).sum(1).mean().item()

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------- stroke_vae

class StrokeVAE(nn.Module):
    def __init__(self, pixels=144, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, 128), nn.ReLU())
        self.mu = nn.Linear(128, latent)
        self.logvar = nn.Linear(128, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, pixels))

    def encode(self, x):
        h = self.encoder(x)
        return self.mu(h), self.logvar(h)

    def forward(self, x, eps=None):
        mu, logvar = self.encode(x)
        eps = torch.randn_like(mu) if eps is None else eps
        return self.decoder(mu + eps * (0.5 * logvar).exp()), mu, logvar


def _strokes(n, g, size=12):
    yy, xx = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    angle = torch.rand(n, 1, 1, generator=g) * math.pi
    offset = (torch.rand(n, 1, 1, generator=g) - 0.5) * 6
    c = (size - 1) / 2
    d = ((xx - c) * torch.cos(angle) + (yy - c) * torch.sin(angle) - offset).abs()
    return (d < 1.3).float().flatten(1)


def _stroke_vae(good):
    torch.manual_seed(6)
    g = torch.Generator().manual_seed(61)
    x, xv = _strokes(3000, g), _strokes(400, g)
    eps_v = torch.randn(400, 6, generator=g)
    batches = _forever(_loader(x, batch_size=64, seed=62))
    model = StrokeVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def kl_to_prior(mu, logvar):
        return -0.5 * (1 + logvar - mu ** 2 - logvar.exp()).sum(1).mean()

    def step(i):
        (xb,) = next(batches)
        logits, mu, logvar = model(xb)
        if good:
            recon = F.binary_cross_entropy_with_logits(logits, xb, reduction="sum") / xb.shape[0]
        else:
            recon = F.binary_cross_entropy_with_logits(logits, xb, reduction="mean")
        loss = recon + kl_to_prior(mu, logvar)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            logits, mu, logvar = model(xv, eps_v)
            recon = F.binary_cross_entropy_with_logits(logits, xv, reduction="sum") / xv.shape[0]
            return (recon + kl_to_prior(mu, logvar)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------- signature_siamese

class SignatureEncoder(nn.Module):
    def __init__(self, dim=20, out=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, out))

    def forward(self, x):
        return self.net(x)


def _signature_pairs(n, writers, g):
    a = torch.randint(0, len(writers), (n,), generator=g)
    other = (a + torch.randint(1, len(writers), (n,), generator=g)) % len(writers)
    genuine = torch.randint(0, 2, (n,), generator=g)
    b = torch.where(genuine == 1, a, other)
    dim = writers.shape[1]
    style = torch.randn(dim, dim, generator=torch.Generator().manual_seed(70)) / math.sqrt(dim)

    def view(w):
        z = writers[w] + 0.5 * torch.randn(n, dim, generator=g)
        return torch.tanh(z @ style) * 1.5

    return view(a), view(b), genuine


def _signature_siamese(good):
    torch.manual_seed(7)
    g = torch.Generator().manual_seed(71)
    writers = torch.randn(60, 20, generator=g)
    xa, xb_, same = _signature_pairs(4000, writers, g)
    va, vb, vsame = _signature_pairs(1000, writers, g)
    batches = _forever(_loader(xa, xb_, same, batch_size=64, seed=72))
    model = SignatureEncoder()
    criterion = nn.CosineEmbeddingLoss(margin=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        a, b, label = next(batches)
        target = 2 * label - 1 if good else label
        loss = criterion(model(a), model(b), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            sim = F.cosine_similarity(model(va), model(vb))
            pos, neg = sim[vsame == 1], sim[vsame == 0]
            return (pos[:, None] <= neg[None, :]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------------ digit_ctc

class FrameRecogniser(nn.Module):
    def __init__(self, feats=10, symbols=6):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(feats, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 32, 3, padding=1), nn.ReLU())
        self.out = nn.Linear(32, symbols)

    def forward(self, x):
        return self.out(self.conv(x.transpose(1, 2)).transpose(1, 2))


def _utterances(n, g, frames=24, length=4, symbols=5, feats=10):
    voice = torch.randn(symbols + 1, feats, generator=torch.Generator().manual_seed(80))
    voice[0] = 0
    labels = torch.randint(1, symbols + 1, (n, length), generator=g)
    frame_symbol = torch.zeros(n, frames, dtype=torch.long)
    for k in range(length):
        start = k * 6 + torch.randint(0, 2, (n,), generator=g)
        dur = torch.randint(2, 5, (n,), generator=g)
        pos = torch.arange(frames)[None]
        on = (pos >= start[:, None]) & (pos < (start + dur)[:, None])
        frame_symbol = torch.where(on, labels[:, k:k + 1], frame_symbol)
    x = voice[frame_symbol] + 1.0 * torch.randn(n, frames, feats, generator=g)
    return x / 1.3, labels


def _digit_ctc(good):
    torch.manual_seed(8)
    g = torch.Generator().manual_seed(81)
    x, y = _utterances(1200, g)
    xv, yv = _utterances(200, g)
    batches = _forever(_loader(x, y, batch_size=24, seed=82))
    model = FrameRecogniser()
    ctc = nn.CTCLoss(blank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        xb, yb = next(batches)
        logits = model(xb)
        n, t, c = logits.shape
        frames_first = logits.transpose(0, 1) if good else logits.reshape(t, n, c)
        log_probs = frames_first.log_softmax(-1)
        loss = ctc(log_probs, yb, torch.full((n,), t, dtype=torch.long), torch.full((n,), yb.shape[1], dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def edit_distance(a, b):
        row = list(range(len(b) + 1))
        for i, ca in enumerate(a, 1):
            prev, row[0] = row[0], i
            for j, cb in enumerate(b, 1):
                prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
        return row[-1]

    def probe():
        with _evaluating(model):
            best = model(xv).argmax(-1)
        errors = 0
        for path, ref in zip(best.tolist(), yv.tolist()):
            hyp = [s for k, s in enumerate(path) if s != 0 and (k == 0 or s != path[k - 1])]
            errors += edit_distance(hyp, ref)
        return errors / yv.numel()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------- anchor_focal

class AnchorHead(nn.Module):
    def __init__(self, prior):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1), nn.ReLU())
        self.score = nn.Conv2d(24, 1, 1)
        nn.init.constant_(self.score.bias, -math.log((1 - prior) / prior))

    def forward(self, x):
        return self.score(self.body(x)).squeeze(1)


_CROSS = torch.tensor([[0., 1., 0.], [1., 1., 1.], [0., 1., 0.]])
_SALTIRE = torch.tensor([[1., 0., 1.], [0., 1., 0.], [1., 0., 1.]])


def _object_scenes(n, g, size=16, objects=2, distractors=3, noise=0.7):
    x = noise * torch.randn(n, size, size, generator=g)
    target = torch.zeros(n, size // 2, size // 2)
    cells = size // 2
    for b in range(n):
        spots = torch.randperm((cells // 2) ** 2, generator=g)[:objects + distractors].tolist()
        for k, s in enumerate(spots):
            r, c = 2 * (s // (cells // 2)), 2 * (s % (cells // 2))
            y0, x0 = 2 * r, 2 * c
            x[b, y0:y0 + 3, x0:x0 + 3] += (_CROSS if k < objects else _SALTIRE)
            if k < objects:
                target[b, r, c] = 1
    return ((x - 0.1) / 0.75)[:, None], target


def _average_precision(score, target):
    order = score.flatten().argsort(descending=True)
    hit = target.flatten()[order]
    precision = hit.cumsum(0) / torch.arange(1, len(hit) + 1)
    return ((precision * hit).sum() / hit.sum()).item()


def _anchor_focal(good):
    torch.manual_seed(9)
    g = torch.Generator().manual_seed(91)
    x, t = _object_scenes(600, g)
    xv, tv = _object_scenes(150, g)
    batches = _forever(_loader(x, t, batch_size=16, seed=92))
    model = AnchorHead(prior=0.05)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    alpha, gamma = 0.25, 2.0

    def focal_loss(logits, target):
        p = logits.sigmoid()
        ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        p_t = p * target + (1 - p) * (1 - target) if good else p
        alpha_t = alpha * target + (1 - alpha) * (1 - target)
        return (alpha_t * (1 - p_t) ** gamma * ce).sum() / target.sum().clamp(min=1)

    def step(i):
        xb, tb = next(batches)
        loss = focal_loss(model(xb), tb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return 1 - _average_precision(model(xv), tv)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------ load_forecaster

class LoadForecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.gru = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, window):
        _, h = self.gru(window)
        mean, raw = self.head(h[-1]).unbind(1)
        return mean, F.softplus(raw) + 1e-3


def _load_forecaster(good):
    torch.manual_seed(10)
    g = torch.Generator().manual_seed(101)
    time = torch.arange(3000).float()
    series = torch.sin(2 * math.pi * time / 24) + 0.5 * torch.sin(2 * math.pi * time / 60) + 0.2 * torch.randn(3000, generator=g)
    series = (series - series[:2400].mean()) / series[:2400].std()
    windows = series.unfold(0, 25, 1)
    train, held = windows[:2375], windows[2400:]
    batches = _forever(_loader(train[:, :24, None], train[:, 24], batch_size=64, seed=102))
    model = LoadForecaster()
    criterion = nn.GaussianNLLLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        xb, yb = next(batches)
        mean, sigma = model(xb)
        loss = criterion(mean, yb, sigma ** 2 if good else sigma)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            mean, sigma = model(held[:, :24, None])
            y = held[:, 24]
            lo, hi = mean - 1.645 * sigma, mean + 1.645 * sigma
            score = (hi - lo) + 20 * (lo - y).clamp(min=0) + 20 * (y - hi).clamp(min=0)
            return score.mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------------- grid_dqn

class GridWorld:
    moves = [(-1, 0), (1, 0), (0, -1), (0, 1)]

    def __init__(self, size=5):
        self.size = size
        self.goal = (size - 1, size - 1)

    def encode(self, pos):
        v = torch.zeros(self.size * self.size)
        v[pos[0] * self.size + pos[1]] = 1
        return v

    def move(self, pos, action):
        dr, dc = self.moves[action]
        new = (min(max(pos[0] + dr, 0), self.size - 1), min(max(pos[1] + dc, 0), self.size - 1))
        done = new == self.goal
        return new, 1.0 if done else 0.0, done


def _grid_dqn(good):
    torch.manual_seed(13)
    g = torch.Generator().manual_seed(131)
    env = GridWorld()
    q_net = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 4))
    target_net = copy.deepcopy(q_net).requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=2e-3)
    buffer = deque(maxlen=5000)
    gamma = 0.9
    state = {"pos": (0, 0), "age": 0}

    def randint(n):
        return int(torch.randint(0, n, (1,), generator=g))

    def fresh_start():
        k = randint(24)
        return (k // 5, k % 5)

    def act(pos, eps):
        if float(torch.rand(1, generator=g)) < eps:
            return randint(4)
        with torch.no_grad():
            return int(q_net(env.encode(pos)).argmax())

    def interact(eps):
        pos = state["pos"]
        a = act(pos, eps)
        new, r, done = env.move(pos, a)
        buffer.append((env.encode(pos), a, r, env.encode(new), float(done)))
        state["age"] += 1
        if done or state["age"] >= 50:
            state["pos"], state["age"] = fresh_start(), 0
        else:
            state["pos"] = new

    for _ in range(300):
        interact(1.0)

    def step(i):
        eps = max(0.1, 1.0 - i / 300)
        for _ in range(4):
            interact(eps)
        picked = [buffer[randint(len(buffer))] for _ in range(64)]
        s, a, r, s2, d = zip(*picked)
        s, s2 = torch.stack(s), torch.stack(s2)
        a, r, d = torch.tensor(a), torch.tensor(r), torch.tensor(d)
        q_all = q_net(s)
        q = q_all.gather(1, a[:, None]).squeeze(1) if good else q_all.max(1).values
        with torch.no_grad():
            backup = r + gamma * (1 - d) * target_net(s2).max(1).values
        loss = F.smooth_l1_loss(q, backup)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % 25 == 0:
            target_net.load_state_dict(q_net.state_dict())

    def probe():
        total = 0
        with _evaluating(q_net):
            for k in range(24):
                pos, steps, done = (k // 5, k % 5), 0, False
                while not done and steps < 40:
                    pos, _, done = env.move(pos, int(q_net(env.encode(pos)).argmax()))
                    steps += 1
                total += steps
        return total / 24

    return {"model": {"q": q_net, "target": target_net}, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------------- ring_gan

def _ring(n, g):
    k = torch.randint(0, 8, (n,), generator=g)
    angle = 2 * math.pi * k / 8
    return torch.stack([angle.cos(), angle.sin()], 1) * 1.4 + 0.1 * torch.randn(n, 2, generator=g)


def _energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def _ring_gan(good):
    torch.manual_seed(14)
    g = torch.Generator().manual_seed(141)
    data = _ring(4000, g)
    held = _ring(500, g)
    z_eval = torch.randn(500, 8, generator=g)
    batches = _forever(_loader(data, batch_size=128, seed=142))
    gen = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    disc = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=5e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()

    def step(i):
        (real,) = next(batches)
        n = real.shape[0]
        fake = gen(torch.randn(n, 8))
        both = torch.cat([real, fake.detach()] if good else [fake.detach(), real])
        labels = torch.cat([torch.ones(n, 1), torch.zeros(n, 1)])
        loss_d = bce(disc(both), labels)
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()

        loss_g = bce(disc(fake), torch.ones(n, 1))
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()

    def probe():
        with _evaluating(gen):
            return _energy_distance(gen(z_eval), held)

    return {"model": {"generator": gen, "discriminator": disc}, "optimizer": [opt_d, opt_g], "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------ flower_transfer

class SmallConvNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.fc = nn.Linear(128, classes)

    def forward(self, x):
        return self.fc(self.body(x))


@lru_cache(maxsize=None)
def _pretrained_convnet():
    torch.manual_seed(151)
    g = torch.Generator().manual_seed(152)
    x, y = _texture_images(2000, 12, 12, 0.7, g, 153)
    batches = _forever(_loader(x, y, batch_size=32, seed=154))
    net = SmallConvNet(12)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(200):
        xb, yb = next(batches)
        opt.zero_grad()
        F.cross_entropy(net(xb), yb).backward()
        opt.step()
    return net.state_dict()


def _flower_transfer(good):
    weights = _pretrained_convnet()
    torch.manual_seed(15)
    g = torch.Generator().manual_seed(155)
    x, y = _texture_images(1200, 6, 12, 1.0, g, 156)
    xv, yv = _texture_images(400, 6, 12, 1.0, g, 156)
    batches = _forever(_loader(x, y, batch_size=32, seed=157))
    model = SmallConvNet(12)
    model.load_state_dict(weights)

    def make_optimizer():
        return torch.optim.Adam([
            {"params": model.body.parameters(), "lr": 1e-4},
            {"params": model.fc.parameters(), "lr": 3e-3},
        ])

    if good:
        model.fc = nn.Linear(model.fc.in_features, 6)
        optimizer = make_optimizer()
    else:
        optimizer = make_optimizer()
        model.fc = nn.Linear(model.fc.in_features, 6)

    def step(i):
        xb, yb = next(batches)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------- demand_experts

class DemandExperts(nn.Module):
    def __init__(self, dim, experts, width, copies):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(dim, 16), nn.Tanh())

        def expert():
            return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 1))

        if copies:
            first = expert()
            self.experts = nn.ModuleList([copy.deepcopy(first) for _ in range(experts)])
        else:
            self.experts = nn.ModuleList([expert() for _ in range(experts)])
        self.gate = nn.Linear(dim, experts)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x):
        h = self.stem(x)
        out = torch.cat([e(h) for e in self.experts], 1)
        return (self.gate(x).softmax(1) * out).sum(1)


def _demand_experts(good):
    torch.manual_seed(16)
    g = torch.Generator().manual_seed(161)
    x = torch.randn(4000, 6, generator=g)
    w = torch.randn(4, 6, generator=g)
    regime = 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    y = (x * w[regime]).sum(1) + 0.2 * torch.randn(4000, generator=g)
    y = (y - y[:3200].mean()) / y[:3200].std()
    batches = _forever(_loader(x[:3200], y[:3200], batch_size=64, seed=162))
    model = DemandExperts(6, 6, 4, copies=not good)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        xb, yb = next(batches)
        loss = F.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(x[3200:]), y[3200:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------ pedestrian_head

class PedestrianDetector(nn.Module):
    def __init__(self, prior, every_layer):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU())
        self.cls_tower = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 1, 1))
        self.box_tower = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 2, 1))
        bias = -math.log((1 - prior) / prior)
        convs = [m for m in self.cls_tower if isinstance(m, nn.Conv2d)]
        for conv in (convs if every_layer else convs[-1:]):
            nn.init.constant_(conv.bias, bias)

    def forward(self, x):
        f = self.backbone(x)
        return self.cls_tower(f).squeeze(1), self.box_tower(f)


def _street_scenes(n, g, size=16):
    x = 0.3 * torch.randn(n, size, size, generator=g)
    cells = size // 2
    target = torch.zeros(n, cells, cells)
    boxes = torch.zeros(n, 2, cells, cells)
    for b in range(n):
        for s in torch.randperm(9, generator=g)[:2].tolist():
            r, c = 1 + 2 * (s // 3), 1 + 2 * (s % 3)
            h, w = torch.randint(1, 5, (2,), generator=g).tolist()
            x[b, 2 * r:2 * r + h, 2 * c:2 * c + w] += 1.0
            target[b, r, c] = 1
            boxes[b, :, r, c] = torch.tensor([(h - 2.5) / 1.1, (w - 2.5) / 1.1])
    return ((x - 0.05) / 0.4)[:, None], target, boxes


def _pedestrian_head(good):
    torch.manual_seed(17)
    g = torch.Generator().manual_seed(171)
    x, t, bx = _street_scenes(600, g)
    xv, tv, _ = _street_scenes(150, g)
    batches = _forever(_loader(x, t, bx, batch_size=16, seed=172))
    model = PedestrianDetector(prior=0.01, every_layer=not good)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def focal_loss(logits, target, alpha=0.25, gamma=2.0):
        p = logits.sigmoid()
        ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        p_t = p * target + (1 - p) * (1 - target)
        alpha_t = alpha * target + (1 - alpha) * (1 - target)
        return (alpha_t * (1 - p_t) ** gamma * ce).sum()

    def step(i):
        xb, tb, bb = next(batches)
        logits, box = model(xb)
        positives = tb.sum().clamp(min=1)
        cls = focal_loss(logits, tb) / positives
        reg = (F.smooth_l1_loss(box, bb, reduction="none") * tb[:, None]).sum() / (2 * positives)
        loss = cls + reg
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return 1 - _average_precision(model(xv)[0], tv)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------- twin_tower

class TwinTower(nn.Module):
    def __init__(self, dim_a, dim_b, out=8):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(dim_a, 64), nn.ReLU(), nn.Linear(64, out))
        self.right = nn.Linear(dim_b, out, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, a, b):
        a = F.normalize(self.left(a), dim=1)
        b = F.normalize(self.right(b), dim=1)
        return self.logit_scale.exp() * a @ b.t()


def _twin_tower(good):
    torch.manual_seed(18)
    g = torch.Generator().manual_seed(181)
    z = torch.randn(4000, 6, generator=g)
    a = (z @ torch.randn(6, 20, generator=g)) / math.sqrt(6) + 0.5 * torch.randn(4000, 20, generator=g)
    b = (z @ torch.randn(6, 24, generator=g)) / math.sqrt(6) + 0.5 * torch.randn(4000, 24, generator=g)
    a, b = a / 1.12, b / 1.12
    batches = _forever(_loader(a[:3488], b[:3488], batch_size=64, seed=182))
    model = TwinTower(20, 24)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    rows = model.right.weight.detach().clone()

    def step(i):
        ab, bb = next(batches)
        logits = model(ab, bb)
        labels = torch.arange(len(ab))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            if good:
                model.right.weight.copy_(F.normalize(model.right.weight, dim=1))
            else:
                model.right.weight.copy_(F.normalize(rows, dim=1))
            model.logit_scale.clamp_(max=math.log(100))

    def probe():
        with _evaluating(model):
            labels = torch.arange(64)
            losses = [F.cross_entropy(model(p, q), labels) for p, q in zip(a[3488:].split(64), b[3488:].split(64))]
            return torch.stack(losses).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# -------------------------------------------------------------- movie_factors

class MovieFactors(nn.Module):
    def __init__(self, users, genres, mean, rank=4, dtype=torch.float32):
        super().__init__()
        items = genres.shape[0]
        self.register_buffer("genres", genres)
        self.user = nn.Embedding(users, rank)
        self.genre = nn.Linear(genres.shape[1], rank, bias=False)
        self.user_bias = nn.Parameter(torch.zeros(users))
        self.item_bias = nn.Parameter(torch.full((items,), mean, dtype=dtype))
        nn.init.normal_(self.user.weight, std=0.1)

    def forward(self, u, i):
        return self.item_bias[i].float() + self.user_bias[u] + (self.user(u) * self.genre(self.genres[i])).sum(1)


def _movie_factors(good):
    torch.manual_seed(19)
    g = torch.Generator().manual_seed(191)
    users, items, n = 150, 60, 8000
    u = torch.randint(0, users, (n,), generator=g)
    v = torch.randint(0, items, (n,), generator=g)
    genres = (torch.rand(items, 5, generator=g) < 0.4).float()
    taste = 0.4 * torch.randn(users, 5, generator=g)
    r = (3.5 + 0.3 * torch.randn(users, generator=g)[u] + 0.7 * torch.randn(items, generator=g)[v] + (taste[u] * genres[v]).sum(1)
         + 0.35 * torch.randn(n, generator=g)).clamp(1, 5)
    batches = _forever(_loader(u[:6400], v[:6400], r[:6400], batch_size=256, seed=192))
    model = MovieFactors(users, genres, 3.5, dtype=torch.float32 if good else torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        ub, vb, rb = next(batches)
        loss = F.mse_loss(model(ub, vb), rb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(u[6400:], v[6400:]), r[6400:]).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- urban_sound

class SoundNet(nn.Module):
    def __init__(self, classes, mels=12):
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv1d(mels, 24, 5, padding=2), nn.GroupNorm(4, 24), nn.ReLU(), nn.MaxPool1d(2))
        self.block2 = nn.Sequential(nn.Conv1d(24, 32, 5, padding=2), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool1d(1))
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.block2(self.block1(x)).flatten(1))


def _sounds(n, classes, g, seed, noise):
    pg = torch.Generator().manual_seed(seed)
    motifs = torch.randn(classes, 12, 8, generator=pg)
    y = torch.randint(0, classes, (n,), generator=g)
    x = noise * torch.randn(n, 12, 32, generator=g)
    start = torch.randint(0, 25, (n,), generator=g)
    for k in range(n):
        x[k, :, start[k]:start[k] + 8] += motifs[y[k]]
    return x / math.sqrt(noise ** 2 + 0.25), y


@lru_cache(maxsize=None)
def _pretrained_soundnet():
    torch.manual_seed(201)
    g = torch.Generator().manual_seed(202)
    x, y = _sounds(2000, 4, g, 203, 0.7)
    batches = _forever(_loader(x, y, batch_size=32, seed=204))
    net = SoundNet(4)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(200):
        xb, yb = next(batches)
        opt.zero_grad()
        F.cross_entropy(net(xb), yb).backward()
        opt.step()
    return net.state_dict()


def _urban_sound(good):
    weights = _pretrained_soundnet()
    torch.manual_seed(20)
    g = torch.Generator().manual_seed(205)
    x, y = _sounds(2000, 8, g, 206, 0.8)
    xv, yv = _sounds(500, 8, g, 206, 0.8)
    batches = _forever(_loader(x, y, batch_size=32, seed=207))
    model = SoundNet(4)
    model.load_state_dict(weights)
    for p in model.parameters():
        p.requires_grad = False
    for p in model.block2.parameters():
        if good:
            p.requires_grad = True
        else:
            p.require_grad = True
    model.head = nn.Linear(model.head.in_features, 8)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)

    def step(i):
        xb, yb = next(batches)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------- molecule_gnn

class GraphLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.own = nn.Linear(dim, dim)
        self.neighbour = nn.Linear(dim, dim, bias=False)

    def forward(self, h, adj):
        z = self.norm(h)
        degree = adj.sum(-1, keepdim=True).clamp(min=1)
        return h + F.relu(self.own(z) + self.neighbour(adj @ z / degree))


class MoleculeGNN(nn.Module):
    def __init__(self, atoms=5, dim=24, depth=5):
        super().__init__()
        self.embed = nn.Embedding(atoms, dim)
        self.layers = nn.ModuleList([GraphLayer(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, 1)

    def forward(self, atom, adj):
        h = self.embed(atom)
        for layer in self.layers:
            h = layer(h, adj)
        return self.head(h.mean(1)).squeeze(1)


def _molecules(n, g, nodes=10):
    atom = torch.randint(0, 5, (n, nodes), generator=g)
    up = torch.triu((torch.rand(n, nodes, nodes, generator=g) < 0.25).float(), 1)
    adj = up + up.transpose(1, 2)
    charge = torch.randn(5, 5, generator=torch.Generator().manual_seed(210))
    charge = charge + charge.t()
    bond = charge[atom[:, :, None], atom[:, None, :]]
    y = (bond * adj).sum((1, 2)) / 2
    return atom, adj, y


def _molecule_gnn(good):
    torch.manual_seed(21)
    g = torch.Generator().manual_seed(211)
    atom, adj, y = _molecules(3600, g)
    y = (y - y[:3000].mean()) / y[:3000].std()
    batches = _forever(_loader(atom[:3000], adj[:3000], y[:3000], batch_size=32, seed=212))
    model = MoleculeGNN()
    base_lr, layer_decay = 2e-3, 0.9
    stages = [model.embed, *model.layers, model.head]
    groups = []
    for k, stage in enumerate(stages):
        depth = len(stages) - 1 - k
        factor = layer_decay if good else 1 - layer_decay
        groups.append({"params": list(stage.parameters()), "lr": base_lr * factor ** depth})
    optimizer = torch.optim.AdamW(groups, weight_decay=1e-4)

    def step(i):
        ab, jb, yb = next(batches)
        loss = F.mse_loss(model(ab, jb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(atom[3000:], adj[3000:]), y[3000:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- gesture_gru

class GestureGRU(nn.Module):
    def __init__(self, feats, classes, hidden=24, pool_dim=1):
        super().__init__()
        self.gru = nn.GRU(feats, hidden, batch_first=True)
        self.attention = nn.Sequential(nn.Linear(hidden, 16), nn.Tanh(), nn.Linear(16, 1))
        self.classifier = nn.Linear(hidden, classes)
        self.pool_dim = pool_dim

    def forward(self, x):
        h, _ = self.gru(x)
        weights = F.softmax(self.attention(h), dim=self.pool_dim)
        return self.classifier((weights * h).sum(1))


def _gestures(n, g, steps=30, feats=6, classes=8):
    pg = torch.Generator().manual_seed(220)
    motifs = 1.5 * torch.randn(classes, 4, feats, generator=pg)
    y = torch.randint(0, classes, (n,), generator=g)
    x = torch.randn(n, steps, feats, generator=g)
    start = torch.randint(0, steps - 4, (n,), generator=g)
    for k in range(n):
        x[k, start[k]:start[k] + 4] += motifs[y[k]]
    return x / 1.13, y


def _gesture_gru(good):
    torch.manual_seed(22)
    g = torch.Generator().manual_seed(221)
    x, y = _gestures(3000, g)
    xv, yv = _gestures(600, g)
    batches = _forever(_loader(x, y, batch_size=32, seed=222))
    model = GestureGRU(6, 8, pool_dim=1 if good else -1)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def step(i):
        xb, yb = next(batches)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------- spiral_diffusion

class NoisePredictor(nn.Module):
    def __init__(self, steps, floor, width=96):
        super().__init__()
        self.steps = steps
        self.floor = floor
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.inp = nn.Linear(2, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        frac = (t // self.steps if self.floor else t / self.steps).float()
        h = F.silu(self.inp(x) + self.time(frac[:, None]))
        return self.out(F.silu(self.mid(h)))


def _spiral(n, g):
    u = torch.rand(n, generator=g).sqrt() * 3 * math.pi
    x = torch.stack([u * u.cos(), u * u.sin()], 1) / (1.5 * math.pi)
    return x + 0.03 * torch.randn(n, 2, generator=g)


def _spiral_diffusion(good):
    torch.manual_seed(23)
    g = torch.Generator().manual_seed(231)
    data, held = _spiral(4000, g), _spiral(1000, g)
    total = 100
    betas = torch.linspace(1e-3, 0.06, total)
    alpha_bar = torch.cumprod(1 - betas, 0)
    t_eval = torch.randint(0, total, (1000,), generator=g)
    n_eval = torch.randn(1000, 2, generator=g)
    batches = _forever(_loader(data, batch_size=128, seed=232))
    model = NoisePredictor(total, floor=not good)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def diffuse(x0, t, noise):
        ab = alpha_bar[t][:, None]
        return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

    def step(i):
        (x0,) = next(batches)
        t = torch.randint(0, total, (len(x0),))
        noise = torch.randn_like(x0)
        loss = F.mse_loss(model(diffuse(x0, t, noise), t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(diffuse(held, t_eval, n_eval), t_eval), n_eval).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------------ patch_vit

class PatchViT(nn.Module):
    def __init__(self, classes, registered, patches=16, patch_dim=9, dim=32):
        super().__init__()
        self.embed = nn.Linear(patch_dim, dim)
        if registered:
            self.pos = nn.Parameter((torch.randn(patches, dim) * 0.02).unsqueeze(0))
        else:
            self.pos = nn.Parameter(torch.randn(patches, dim) * 0.02).unsqueeze(0)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        patches = x.unfold(1, 3, 3).unfold(2, 3, 3).reshape(len(x), 16, 9)
        h = self.encoder(self.embed(patches) + self.pos)
        return self.head(self.norm(h.mean(1)))


def _marked_images(n, g):
    x = 0.5 * torch.randn(n, 12, 12, generator=g)
    y = torch.randint(0, 8, (n,), generator=g)
    for k in range(n):
        spot = 2 * int(y[k]) + int(torch.randint(0, 2, (1,), generator=g))
        r, c = 3 * (spot // 4), 3 * (spot % 4)
        x[k, r:r + 3, c:c + 3] += _SALTIRE * 3
    return x / 0.75, y


def _patch_vit(good):
    torch.manual_seed(24)
    g = torch.Generator().manual_seed(241)
    x, y = _marked_images(2000, g)
    xv, yv = _marked_images(400, g)
    batches = _forever(_loader(x, y, batch_size=48, seed=242))
    model = PatchViT(8, registered=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def step(i):
        xb, yb = next(batches)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# -------------------------------------------------------------------- entries


def texture_cnn_bad():
    return _texture_cnn(False)


def texture_cnn_good():
    return _texture_cnn(True)


def housing_mlp_bad():
    return _housing_mlp(False)


def housing_mlp_good():
    return _housing_mlp(True)


def cell_segmenter_bad():
    return _cell_segmenter(False)


def cell_segmenter_good():
    return _cell_segmenter(True)


def scene_tagger_bad():
    return _scene_tagger(False)


def scene_tagger_good():
    return _scene_tagger(True)


def distil_student_bad():
    return _distil_student(False)


def distil_student_good():
    return _distil_student(True)


def stroke_vae_bad():
    return _stroke_vae(False)


def stroke_vae_good():
    return _stroke_vae(True)


def signature_siamese_bad():
    return _signature_siamese(False)


def signature_siamese_good():
    return _signature_siamese(True)


def digit_ctc_bad():
    return _digit_ctc(False)


def digit_ctc_good():
    return _digit_ctc(True)


def anchor_focal_bad():
    return _anchor_focal(False)


def anchor_focal_good():
    return _anchor_focal(True)


def load_forecaster_bad():
    return _load_forecaster(False)


def load_forecaster_good():
    return _load_forecaster(True)


def grid_dqn_bad():
    return _grid_dqn(False)


def grid_dqn_good():
    return _grid_dqn(True)


def ring_gan_bad():
    return _ring_gan(False)


def ring_gan_good():
    return _ring_gan(True)


def flower_transfer_bad():
    return _flower_transfer(False)


def flower_transfer_good():
    return _flower_transfer(True)


def demand_experts_bad():
    return _demand_experts(False)


def demand_experts_good():
    return _demand_experts(True)


def pedestrian_head_bad():
    return _pedestrian_head(False)


def pedestrian_head_good():
    return _pedestrian_head(True)


def twin_tower_bad():
    return _twin_tower(False)


def twin_tower_good():
    return _twin_tower(True)


def movie_factors_bad():
    return _movie_factors(False)


def movie_factors_good():
    return _movie_factors(True)


def urban_sound_bad():
    return _urban_sound(False)


def urban_sound_good():
    return _urban_sound(True)


def molecule_gnn_bad():
    return _molecule_gnn(False)


def molecule_gnn_good():
    return _molecule_gnn(True)


def gesture_gru_bad():
    return _gesture_gru(False)


def gesture_gru_good():
    return _gesture_gru(True)


def spiral_diffusion_bad():
    return _spiral_diffusion(False)


def spiral_diffusion_good():
    return _spiral_diffusion(True)


def patch_vit_bad():
    return _patch_vit(False)


def patch_vit_good():
    return _patch_vit(True)
