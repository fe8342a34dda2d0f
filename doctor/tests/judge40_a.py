import contextlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

CASES = [
    {
        "name": "image_sigmoid_before_cross_entropy",
        "what": "The image classifier's forward ends in a Sigmoid and nn.CrossEntropyLoss takes its outputs as logits, so the classes' logits lie in (0, 1); the loss can't fall below a high floor and training is slow and less accurate.",
    },
    {
        "name": "tagging_cross_entropy_multi_hot",
        "what": "Multi-label tags (0/1 rows with any number of ones) go into F.cross_entropy as if they were class probabilities, so tags compete in a softmax and no absolute threshold is learned.",
    },
    {
        "name": "forecast_poisson_rate_read_as_log",
        "what": "The count forecaster returns a rate (softplus), but PoissonNLLLoss is left at log_input=True, so the model learns the log of the rate and its forecasts are far too low.",
    },
    {
        "name": "segmentation_dice_batch_broadcast",
        "what": "Dice loss multiplies probabilities (B,1,H,W) with masks (B,H,W); they broadcast to (B,B,H,W), so each prediction is compared with every mask of the batch and the loss goes negative.",
    },
    {
        "name": "distill_kl_on_probabilities",
        "what": "F.kl_div gets the student's softmax rather than its log_softmax, so the loss is linear in the probabilities and the student doesn't match the teacher's distribution.",
    },
    {
        "name": "detection_box_loss_mean_over_all_cells",
        "what": "The box loss, masked to the positive cells, is averaged over all 36 cells of each image rather than over the positives, so it weighs 1/36 of what is meant and boxes are hardly learned.",
    },
    {
        "name": "vae_reconstruction_mean_kl_sum",
        "what": "The VAE's reconstruction term is averaged over pixels while the KL term is summed over latents, so the KL dominates and the posterior collapses.",
    },
    {
        "name": "siamese_cosine_targets_zero_one",
        "what": "CosineEmbeddingLoss is given targets 0/1 rather than -1/1; pairs with target 0 add nothing, so nothing pushes unlike pairs apart and the embedding collapses.",
    },
    {
        "name": "speech_ctc_blank_is_a_letter",
        "what": "The blank is the last class, but CTCLoss is left at blank=0, which is a real letter that occurs in the targets; the letter 0 serves as blank and the true blank is never trained.",
    },
    {
        "name": "frame_tagger_view_for_transpose",
        "what": "Frame logits (B,T,C) are brought to (B,C,T) by view rather than transpose, so classes and frames are scrambled before cross-entropy.",
    },
    {
        "name": "fraud_focal_factor_on_easy",
        "what": "The hand-written focal loss uses p_t**gamma rather than (1-p_t)**gamma, so hard examples (the rare class) are weighted down and easy ones kept.",
    },
    {
        "name": "gan_generator_asks_for_fake_label",
        "what": "The generator's loss uses the label 'fake' (zeros) for its samples, so it learns to be recognised and drifts away from the data.",
    },
    {
        "name": "policy_log_std_plain_tensor",
        "what": "The Gaussian policy's log_std is a plain tensor with requires_grad, not a Parameter; it is not in the optimizer, so the exploration noise never shrinks.",
    },
    {
        "name": "transfer_head_replaced_after_optimizer",
        "what": "The new classification head replaces the old one after the optimizer was built, so the new head is in no optimizer and stays at its random start.",
    },
    {
        "name": "mil_attention_weights_detached",
        "what": "The attention-pooling weights are used in their detached copy (kept for logging), so the attention scorer gets no gradient and doesn't learn to pick the telling instance.",
    },
    {
        "name": "image_adapters_both_factors_zero",
        "what": "Low-rank adapters on a frozen trunk have both factors at zero, so both gradients are exactly zero and the adapters never leave zero; only the new head learns.",
    },
    {
        "name": "wide_deep_constant_init_tower",
        "what": "All linear layers of the deep tower start from one constant, so the hidden units of each layer stay identical for ever and the tower acts as one unit wide.",
    },
    {
        "name": "gnn_node_embedding_reloaded_each_forward",
        "what": "The pre-trained node vectors are copied into the embedding in every forward rather than once, so each update of the embedding is thrown away.",
    },
    {
        "name": "keyword_unfreeze_misspelt_attribute",
        "what": "After freezing everything, the last block is to be unfrozen by p.require_grad = True (misspelt), which has no effect; only the new head learns.",
    },
    {
        "name": "diffusion_condition_rate_integer_division",
        "what": "The conditioning group's rate is to grow linearly with the run, but the lambda uses step // total_steps, so it is zero during the whole run and the zero-initialised conditioning never acts.",
    },
    {
        "name": "recommender_bf16_tables_small_rate",
        "what": "The user and item tables of size about 1 are kept in bfloat16 and trained by Adam at 5e-4; most updates are below half a unit in the last place and are rounded away.",
    },
    {
        "name": "keypoint_prior_bias_on_hidden_relu",
        "what": "The prior bias of -4.6 meant for the output convolution is also set on the hidden one ahead of the ReLU; with weights of 0.01 all its units are dead, so everything before the last bias gets zero gradient.",
    },
]


def _stream(*tensors, batch, seed=0):
    loader = DataLoader(
        TensorDataset(*tensors),
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(seed),
    )

    def forever():
        while True:
            yield from loader

    return forever()


@contextlib.contextmanager
def _evaluating(*models):
    modes = [(m, m.training) for model in models for m in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, mode in modes:
            m.training = mode


def _gen(seed):
    return torch.Generator().manual_seed(seed)


def _glyphs(n, classes, height, width, noise, template_seed, sample_seed):
    """Images of `classes` smooth templates, shifted by a few pixels, with noise."""
    g = _gen(template_seed)
    templates = torch.randn(classes, 1, 5, 5, generator=g)
    templates = F.interpolate(templates, size=(height, width), mode="bicubic", align_corners=False)
    templates = (templates - templates.mean((2, 3), keepdim=True)) / templates.std((2, 3), keepdim=True)
    g = _gen(sample_seed)
    labels = torch.randint(classes, (n,), generator=g)
    images = templates[labels].clone()
    shifts = torch.randint(-2, 3, (n, 2), generator=g)
    for k in range(n):
        images[k] = torch.roll(images[k], (int(shifts[k, 0]), int(shifts[k, 1])), dims=(1, 2))
    images = (images + noise * torch.randn(images.shape, generator=g)) / math.sqrt(1 + noise**2)
    return images, labels


def _auc(scores, labels):
    pos = scores[labels > 0.5]
    neg = scores[labels < 0.5]
    diff = pos[:, None] - neg[None, :]
    return ((diff > 0).float().mean() + 0.5 * (diff == 0).float().mean()).item()


def _pretrain(model, x, y, steps, lr=3e-3, batch=64):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    batches = _stream(x, y, batch=batch, seed=99)
    model.train()
    for _ in range(steps):
        inputs, labels = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    optimizer.zero_grad()


class _GlyphNet(nn.Module):
    def __init__(self, classes, activation):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(3),
        )
        self.classifier = nn.Linear(24 * 9, classes)
        self.activation = activation

    def forward(self, x):
        x = self.features(x).flatten(1)
        return self.activation(self.classifier(x))


def _image_output_activation(faulty):
    torch.manual_seed(0)
    x, y = _glyphs(2000, 20, 12, 12, 1.2, 1, 2)
    xv, yv = _glyphs(1000, 20, 12, 12, 1.2, 1, 3)
    model = _GlyphNet(20, nn.Sigmoid() if faulty else nn.Identity())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batches = _stream(x, y, batch=64)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return (model(xv).argmax(1) != yv).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def image_sigmoid_before_cross_entropy_bad():
    return _image_output_activation(True)


def image_sigmoid_before_cross_entropy_good():
    return _image_output_activation(False)


def _tagging(faulty):
    torch.manual_seed(0)
    g = _gen(5)
    mix = torch.randn(24, 12, generator=g) / math.sqrt(24)
    offset = torch.linspace(-1.0, 0.4, 12)

    def make(n, seed):
        gg = _gen(seed)
        x = torch.randn(n, 24, generator=gg)
        score = torch.tanh(x) @ mix * 2 + offset + 0.2 * torch.randn(n, 12, generator=gg)
        return x, (score > 0).float()

    x, y = make(3000, 6)
    xv, yv = make(1000, 7)
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
    batches = _stream(x, y, batch=64)
    loss_fn = F.cross_entropy if faulty else F.binary_cross_entropy_with_logits

    def step(i):
        model.train()
        features, tags = next(batches)
        logits = model(features)
        loss = loss_fn(logits, tags)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            pred = (model(xv) > 0).float()
        tp = (pred * yv).sum()
        return 1.0 - (2 * tp / (pred.sum() + yv.sum())).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tagging_cross_entropy_multi_hot_bad():
    return _tagging(True)


def tagging_cross_entropy_multi_hot_good():
    return _tagging(False)


class _CountForecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(2, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.rnn(x)
        return F.softplus(self.head(out[:, -1])).squeeze(-1)


def _count_forecast(faulty):
    torch.manual_seed(0)

    def make(n, seed):
        g = _gen(seed)
        t = torch.arange(17).float()
        phase = torch.rand(n, 1, generator=g) * 2 * math.pi
        level = 1.0 + 3.0 * torch.rand(n, 1, generator=g)
        rate = level * (1 + 0.8 * torch.sin(2 * math.pi * t / 8 + phase))
        counts = torch.poisson(rate, generator=g)
        clock = torch.sin(2 * math.pi * t / 8 + phase)
        x = torch.stack([torch.log1p(counts[:, :16]), clock[:, 1:]], dim=-1)
        return x, counts[:, 16]

    x, y = make(3000, 1)
    xv, yv = make(1000, 2)
    model = _CountForecaster()
    criterion = nn.PoissonNLLLoss() if faulty else nn.PoissonNLLLoss(log_input=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = _stream(x, y, batch=64)

    def step(i):
        model.train()
        history, target = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(history), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return (model(xv) - yv).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forecast_poisson_rate_read_as_log_bad():
    return _count_forecast(True)


def forecast_poisson_rate_read_as_log_good():
    return _count_forecast(False)


class _SegNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
        )
        self.mid = nn.Sequential(nn.Conv2d(width, width * 2, 3, padding=1), nn.ReLU())
        self.out = nn.Sequential(nn.Conv2d(width * 3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1))

    def forward(self, x):
        a = self.enc(x)
        b = F.interpolate(self.mid(F.max_pool2d(a, 2)), scale_factor=2, mode="nearest")
        return self.out(torch.cat([a, b], 1))


def _blobs(n, size, seed):
    g = _gen(seed)
    yy, xx = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    cy = 3 + (size - 6) * torch.rand(n, 1, 1, generator=g)
    cx = 3 + (size - 6) * torch.rand(n, 1, 1, generator=g)
    r = 2 + 2.5 * torch.rand(n, 1, 1, generator=g)
    mask = ((yy - cy) ** 2 + (xx - cx) ** 2 < r**2).float()
    image = 1.5 * mask + 0.7 * torch.randn(n, size, size, generator=g)
    image = (image - image.mean()) / image.std()
    return image[:, None], mask


def _dice_segmentation(faulty):
    torch.manual_seed(0)
    x, m = _blobs(800, 16, 1)
    xv, mv = _blobs(300, 16, 2)
    model = _SegNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = _stream(x, m, batch=16)

    def dice_loss(prob, mask, eps=1.0):
        inter = (prob * mask).flatten(1).sum(1)
        total = prob.flatten(1).sum(1) + mask.flatten(1).sum(1)
        return (1 - (2 * inter + eps) / (total + eps)).mean()

    def step(i):
        model.train()
        images, masks = next(batches)
        prob = torch.sigmoid(model(images))
        if not faulty:
            prob = prob.squeeze(1)
        loss = dice_loss(prob, masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            pred = model(xv).squeeze(1) > 0
        truth = mv > 0.5
        iou = (pred & truth).flatten(1).sum(1) / (pred | truth).flatten(1).sum(1).clamp(min=1)
        return 1.0 - iou.mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def segmentation_dice_batch_broadcast_bad():
    return _dice_segmentation(True)


def segmentation_dice_batch_broadcast_good():
    return _dice_segmentation(False)


def _distill(faulty):
    torch.manual_seed(0)
    x, y = _glyphs(1500, 10, 10, 10, 1.5, 11, 12)
    xv, yv = _glyphs(1000, 10, 10, 10, 1.5, 11, 13)
    x, xv = x.flatten(1), xv.flatten(1)
    teacher = nn.Sequential(nn.Linear(100, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))
    _pretrain(teacher, x, y, steps=300, lr=2e-3)
    teacher.eval().requires_grad_(False)

    student = nn.Sequential(nn.Linear(100, 24), nn.ReLU(), nn.Linear(24, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    batches = _stream(x, batch=64)
    temperature = 2.0
    squash = F.softmax if faulty else F.log_softmax

    def step(i):
        student.train()
        (images,) = next(batches)
        with torch.no_grad():
            target = F.softmax(teacher(images) / temperature, dim=-1)
        pred = squash(student(images) / temperature, dim=-1)
        loss = F.kl_div(pred, target, reduction="batchmean") * temperature**2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(student):
            want = F.softmax(teacher(xv), dim=-1)
            got = F.log_softmax(student(xv), dim=-1)
            return F.kl_div(got, want, reduction="batchmean").item()

    return {
        "model": {"student": student, "teacher": teacher},
        "optimizer": optimizer,
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def distill_kl_on_probabilities_bad():
    return _distill(True)


def distill_kl_on_probabilities_good():
    return _distill(False)


class _CellDetector(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
        )
        self.objectness = nn.Conv2d(2 * width, 1, 1)
        self.box = nn.Conv2d(2 * width, 4, 1)
        nn.init.constant_(self.objectness.bias, -math.log(35))

    def forward(self, x):
        f = self.backbone(x)
        return self.objectness(f).squeeze(1), self.box(f).permute(0, 2, 3, 1)


def _boxes(n, seed, size=24, stride=4):
    g = _gen(seed)
    cells = size // stride
    cy = 4 + (size - 8) * torch.rand(n, generator=g)
    cx = 4 + (size - 8) * torch.rand(n, generator=g)
    h = 4 + 5 * torch.rand(n, generator=g)
    w = 4 + 5 * torch.rand(n, generator=g)
    yy, xx = torch.meshgrid(torch.arange(size) + 0.5, torch.arange(size) + 0.5, indexing="ij")
    inside = ((yy - cy[:, None, None]).abs() < h[:, None, None] / 2) & (
        (xx - cx[:, None, None]).abs() < w[:, None, None] / 2
    )
    image = inside.float() * 2 + 0.4 * torch.randn(n, size, size, generator=g)
    image = (image - image.mean()) / image.std()
    row, col = (cy // stride).long(), (cx // stride).long()
    positive = torch.zeros(n, cells, cells)
    target = torch.zeros(n, cells, cells, 4)
    k = torch.arange(n)
    positive[k, row, col] = 1
    target[k, row, col] = torch.stack(
        [cy / stride - row - 0.5, cx / stride - col - 0.5, torch.log(h / 6) * 2, torch.log(w / 6) * 2], 1
    )
    return image[:, None], positive, target


def _detection(faulty):
    torch.manual_seed(0)
    x, pos, box = _boxes(1500, 1)
    xv, posv, boxv = _boxes(400, 2)
    model = _CellDetector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    batches = _stream(x, pos, box, batch=16)

    def step(i):
        model.train()
        images, positive, target = next(batches)
        score, pred = model(images)
        obj_loss = F.binary_cross_entropy_with_logits(score, positive, reduction="sum") / positive.sum()
        per_cell = F.smooth_l1_loss(pred, target, reduction="none").sum(-1) * positive
        box_loss = per_cell.mean() if faulty else per_cell.sum() / positive.sum()
        loss = obj_loss + box_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            _, pred = model(xv)
        hit = posv > 0.5
        return (pred[hit] - boxv[hit]).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def detection_box_loss_mean_over_all_cells_bad():
    return _detection(True)


def detection_box_loss_mean_over_all_cells_good():
    return _detection(False)


class _VAE(nn.Module):
    def __init__(self, pixels, latent=6, hidden=96):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def encode(self, x):
        h = self.encoder(x)
        return self.mu(h), self.logvar(h)

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decoder(z), mu, logvar


def _vae(faulty):
    torch.manual_seed(0)
    x = (_glyphs(2000, 8, 12, 12, 0.2, 21, 22)[0].flatten(1) > 0).float()
    xv = (_glyphs(500, 8, 12, 12, 0.2, 21, 23)[0].flatten(1) > 0).float()
    model = _VAE(144)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = _stream(x, batch=64)

    def step(i):
        model.train()
        (images,) = next(batches)
        recon, mu, logvar = model(images)
        if faulty:
            rec = F.binary_cross_entropy_with_logits(recon, images)
        else:
            rec = F.binary_cross_entropy_with_logits(recon, images, reduction="sum") / images.size(0)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        loss = rec + kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    noise = torch.randn(500, 6, generator=_gen(24))

    def probe():
        with _evaluating(model):
            mu, logvar = model.encode(xv)
            recon = model.decoder(mu + noise * torch.exp(0.5 * logvar))
            rec = F.binary_cross_entropy_with_logits(recon, xv, reduction="sum") / xv.size(0)
            kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
            return (rec + kl).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_reconstruction_mean_kl_sum_bad():
    return _vae(True)


def vae_reconstruction_mean_kl_sum_good():
    return _vae(False)


class _Embedder(nn.Module):
    def __init__(self, dim_in, dim_out=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim_in, 64), nn.ReLU(), nn.Linear(64, dim_out))

    def forward(self, x):
        return self.net(x)


def _siamese(faulty):
    torch.manual_seed(0)
    x, y = _glyphs(1500, 12, 10, 10, 1.0, 31, 32)
    xv, yv = _glyphs(600, 12, 10, 10, 1.0, 31, 33)
    x, xv = x.flatten(1), xv.flatten(1)
    g = _gen(34)
    left = torch.randint(1500, (6000,), generator=g)
    right = torch.randint(1500, (6000,), generator=g)
    order = torch.argsort(y + 0.5 * torch.rand(1500, generator=g))
    rank = torch.randint(0, 1499, (3000,), generator=g)
    left[:3000], right[:3000] = order[rank], order[rank + 1]
    same = (y[left] == y[right]).float()
    model = _Embedder(100)
    criterion = nn.CosineEmbeddingLoss(margin=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _stream(left, right, same, batch=64)

    def step(i):
        model.train()
        a, b, target = next(batches)
        if not faulty:
            target = 2 * target - 1
        loss = criterion(model(x[a]), model(x[b]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            z = F.normalize(model(xv), dim=1)
        sim = z @ z.T
        upper = torch.triu_indices(600, 600, offset=1)
        sim = sim[upper[0], upper[1]][::17]
        match = (yv[upper[0]] == yv[upper[1]]).float()[::17]
        return 1.0 - _auc(sim, match)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def siamese_cosine_targets_zero_one_bad():
    return _siamese(True)


def siamese_cosine_targets_zero_one_good():
    return _siamese(False)


class _SpeechNet(nn.Module):
    def __init__(self, bands, symbols, hidden=24):
        super().__init__()
        self.conv = nn.Conv1d(bands, hidden, 3, padding=1)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, symbols)

    def forward(self, x):
        h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        h, _ = self.rnn(h)
        return self.head(h)


def _edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, u in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, v in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (u != v))
    return row[-1]


def _ctc(faulty):
    torch.manual_seed(0)
    letters, bands, frames = 6, 10, 24
    blank = letters
    proto = torch.randn(letters, bands, generator=_gen(41))

    def make(n, seed):
        g = _gen(seed)
        x = torch.zeros(n, frames, bands)
        y = torch.zeros(n, 5, dtype=torch.long)
        lengths = torch.randint(3, 6, (n,), generator=g)
        for k in range(n):
            labels = torch.randint(0, letters, (int(lengths[k]),), generator=g)
            y[k, : len(labels)] = labels
            t = int(torch.randint(0, 3, (1,), generator=g))
            for s in labels:
                span = int(torch.randint(2, 4, (1,), generator=g))
                x[k, t : t + span] = proto[s]
                t += span + 1
        x = x + 0.7 * torch.randn(x.shape, generator=g)
        return x, y, lengths

    x, y, n = make(1000, 42)
    xv, yv, nv = make(150, 43)
    model = _SpeechNet(bands, letters + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CTCLoss() if faulty else nn.CTCLoss(blank=blank)
    batches = _stream(x, y, n, batch=16)

    def step(i):
        model.train()
        audio, labels, lengths = next(batches)
        log_probs = model(audio).log_softmax(-1)
        input_lengths = torch.full((audio.size(0),), audio.size(1), dtype=torch.long)
        loss = criterion(log_probs.transpose(0, 1), labels, input_lengths, lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            best = model(xv).argmax(-1)
        errors = 0
        for k in range(len(best)):
            path = torch.unique_consecutive(best[k])
            hyp = path[path != blank].tolist()
            errors += _edit_distance(yv[k, : nv[k]].tolist(), hyp)
        return errors / nv.sum().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def speech_ctc_blank_is_a_letter_bad():
    return _ctc(True)


def speech_ctc_blank_is_a_letter_good():
    return _ctc(False)


class _FrameTagger(nn.Module):
    def __init__(self, channels, classes, hidden=32):
        super().__init__()
        self.rnn = nn.LSTM(channels, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out)


def _frame_tagging(faulty):
    torch.manual_seed(0)
    classes, channels, frames = 4, 6, 20
    proto = torch.randn(classes, channels, generator=_gen(51))

    def make(n, seed):
        g = _gen(seed)
        y = torch.randint(classes, (n, frames // 5), generator=g).repeat_interleave(5, dim=1)
        x = proto[y] + 1.0 * torch.randn(n, frames, channels, generator=g)
        return x, y

    x, y = make(1500, 52)
    xv, yv = make(400, 53)
    model = _FrameTagger(channels, classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    batches = _stream(x, y, batch=32)

    def step(i):
        model.train()
        signal, labels = next(batches)
        logits = model(signal)
        b, t, c = logits.shape
        logits = logits.view(b, c, t) if faulty else logits.transpose(1, 2)
        loss = criterion(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return (model(xv).argmax(-1) != yv).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def frame_tagger_view_for_transpose_bad():
    return _frame_tagging(True)


def frame_tagger_view_for_transpose_good():
    return _frame_tagging(False)


def _focal(faulty):
    torch.manual_seed(0)

    def make(n, seed):
        g = _gen(seed)
        x = torch.randn(n, 16, generator=g)
        score = x[:, 0] * x[:, 1] + x[:, 2] + 0.5 * x[:, 3] ** 2 - 3.1 + 0.3 * torch.randn(n, generator=g)
        return x, (score > 0).float()

    x, y = make(6000, 61)
    xv, yv = make(4000, 62)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _stream(x, y, batch=128)
    alpha, gamma = 0.75, 2.0

    def focal_loss(logits, target):
        ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        p_t = torch.exp(-ce)
        alpha_t = alpha * target + (1 - alpha) * (1 - target)
        factor = p_t if faulty else 1 - p_t
        return (alpha_t * factor**gamma * ce).mean()

    def step(i):
        model.train()
        features, target = next(batches)
        loss = focal_loss(model(features).squeeze(1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            pred = (model(xv).squeeze(1) > 0).float()
        tp = (pred * yv).sum()
        return 1.0 - (2 * tp / (pred.sum() + yv.sum())).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fraud_focal_factor_on_easy_bad():
    return _focal(True)


def fraud_focal_factor_on_easy_good():
    return _focal(False)


def _gan(faulty):
    torch.manual_seed(0)

    def ring(n, g):
        k = torch.randint(8, (n,), generator=g).float() * (2 * math.pi / 8)
        return torch.stack([torch.cos(k), torch.sin(k)], 1) * 1.5 + 0.1 * torch.randn(n, 2, generator=g)

    data = ring(4000, _gen(71))
    held = ring(1000, _gen(72))
    gen = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    disc = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    batches = _stream(data, batch=128)

    def step(i):
        gen.train()
        disc.train()
        (real,) = next(batches)
        ones, zeros = torch.ones(real.size(0), 1), torch.zeros(real.size(0), 1)

        fake = gen(torch.randn(real.size(0), 8))
        loss_d = criterion(disc(real), ones) + criterion(disc(fake.detach()), zeros)
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()

        loss_g = criterion(disc(fake), zeros if faulty else ones)
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        return loss_g.item()

    noise = torch.randn(1000, 8, generator=_gen(73))
    angles = torch.arange(16) * (math.pi / 16)
    directions = torch.stack([torch.cos(angles), torch.sin(angles)])

    def probe():
        with _evaluating(gen):
            a = (gen(noise) @ directions).sort(0).values
        b = (held @ directions).sort(0).values
        return (a - b).abs().mean().item()

    return {
        "model": {"generator": gen, "discriminator": disc},
        "optimizer": [opt_g, opt_d],
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def gan_generator_asks_for_fake_label_bad():
    return _gan(True)


def gan_generator_asks_for_fake_label_good():
    return _gan(False)


class _GaussianPolicy(nn.Module):
    def __init__(self, obs, act, learn_std):
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(obs, 32), nn.Tanh(), nn.Linear(32, act))
        log_std = torch.zeros(act)
        self.log_std = nn.Parameter(log_std) if learn_std else log_std.requires_grad_()

    def forward(self, obs):
        mean = self.mean(obs)
        return torch.distributions.Normal(mean, self.log_std.exp().expand_as(mean))


def _policy_gradient(faulty):
    torch.manual_seed(0)
    g = _gen(81)
    dyn = 0.9 * torch.linalg.qr(torch.randn(4, 4, generator=g))[0]
    ctrl = 0.5 * torch.randn(2, 4, generator=g)
    policy = _GaussianPolicy(4, 2, learn_std=not faulty)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    horizon = 6

    def rollout(n, gen=None):
        s = torch.randn(n, 4, generator=gen)
        logps, rewards = [], []
        for _ in range(horizon):
            dist = policy(s)
            a = dist.mean.detach() + dist.stddev.detach() * torch.randn(n, 2, generator=gen)
            logps.append(dist.log_prob(a).sum(-1))
            s = s @ dyn + a @ ctrl + 0.05 * torch.randn(n, 4, generator=gen)
            rewards.append(-(s.pow(2).sum(-1) + 0.1 * a.pow(2).sum(-1)))
        return torch.stack(logps), torch.stack(rewards)

    def step(i):
        policy.train()
        logps, rewards = rollout(128)
        returns = rewards.flip(0).cumsum(0).flip(0)
        adv = (returns - returns.mean(1, keepdim=True)) / (returns.std(1, keepdim=True) + 1e-6)
        loss = -(logps * adv).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return -rewards.sum(0).mean().item()

    def probe():
        with _evaluating(policy):
            _, rewards = rollout(1000, _gen(82))
        return -rewards.sum(0).mean().item()

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def policy_log_std_plain_tensor_bad():
    return _policy_gradient(True)


def policy_log_std_plain_tensor_good():
    return _policy_gradient(False)


class _SmallConv(nn.Module):
    def __init__(self, classes, width=12):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(3, width), nn.ReLU(), nn.MaxPool2d(2))
        self.block = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(3, 2 * width), nn.ReLU(), nn.AdaptiveAvgPool2d(3)
        )
        self.fc = nn.Linear(2 * width * 9, classes)

    def forward(self, x):
        return self.fc(self.block(self.stem(x)).flatten(1))


def _transfer(faulty):
    torch.manual_seed(0)
    model = _SmallConv(10)
    _pretrain(model, *_glyphs(1500, 10, 12, 12, 1.0, 91, 92), steps=150)
    x, y = _glyphs(1000, 15, 12, 12, 1.2, 94, 95)
    xv, yv = _glyphs(1000, 15, 12, 12, 1.2, 94, 96)

    def make_optimizer():
        backbone = [*model.stem.parameters(), *model.block.parameters()]
        return torch.optim.AdamW(
            [{"params": backbone, "lr": 1e-4}, {"params": model.fc.parameters(), "lr": 3e-3}], weight_decay=1e-2
        )

    if faulty:
        optimizer = make_optimizer()
        model.fc = nn.Linear(model.fc.in_features, 15)
    else:
        model.fc = nn.Linear(model.fc.in_features, 15)
        optimizer = make_optimizer()
    batches = _stream(x, y, batch=32)

    def step(i):
        model.train()
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return (model(xv).argmax(1) != yv).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def transfer_head_replaced_after_optimizer_bad():
    return _transfer(True)


def transfer_head_replaced_after_optimizer_good():
    return _transfer(False)


class _AttentionMIL(nn.Module):
    def __init__(self, dim, hidden, detach):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU())
        self.scorer = nn.Sequential(nn.Linear(hidden, 16), nn.Tanh(), nn.Linear(16, 1))
        self.head = nn.Linear(hidden, 1)
        self.detach = detach
        self.last_attention = None

    def forward(self, bags):
        h = self.encoder(bags)
        attention = torch.softmax(self.scorer(h).squeeze(-1), dim=1)
        self.last_attention = attention.detach()
        weights = self.last_attention if self.detach else attention
        pooled = (weights.unsqueeze(-1) * h).sum(1)
        return self.head(pooled).squeeze(-1)


def _mil(faulty):
    torch.manual_seed(0)
    marker = torch.randn(12, generator=_gen(101))

    def make(n, seed):
        g = _gen(seed)
        bags = torch.randn(n, 40, 12, generator=g)
        y = torch.randint(0, 2, (n,), generator=g).float()
        where = torch.randint(0, 40, (n,), generator=g)
        bags[torch.arange(n), where] += y[:, None] * marker
        return bags, y

    x, y = make(3000, 102)
    xv, yv = make(1000, 103)
    model = _AttentionMIL(12, 24, detach=faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    batches = _stream(x, y, batch=64)

    def step(i):
        model.train()
        bags, labels = next(batches)
        loss = F.binary_cross_entropy_with_logits(model(bags), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return ((model(xv) > 0).float() != yv).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mil_attention_weights_detached_bad():
    return _mil(True)


def mil_attention_weights_detached_good():
    return _mil(False)


class _Adapted(nn.Module):
    def __init__(self, base, rank, zero_down):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        if zero_down:
            nn.init.zeros_(self.down)

    def forward(self, x):
        return self.base(x) + (x @ self.down.T) @ self.up.T


def _adapters(faulty):
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
    xs, ys = _glyphs(1500, 6, 10, 10, 0.8, 111, 112)
    _pretrain(trunk, xs.flatten(1), ys, steps=200)
    x, y = _glyphs(1500, 12, 10, 10, 0.8, 113, 114)
    xv, yv = _glyphs(1000, 12, 10, 10, 0.8, 113, 115)
    x, xv = x.flatten(1), xv.flatten(1)
    trunk.requires_grad_(False)
    model = nn.Sequential(
        _Adapted(trunk[0], 8, faulty), nn.ReLU(), _Adapted(trunk[2], 8, faulty), nn.ReLU(), nn.Linear(64, 12)
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=1e-2)
    batches = _stream(x, y, batch=64)

    def step(i):
        model.train()
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return (model(xv).argmax(1) != yv).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def image_adapters_both_factors_zero_bad():
    return _adapters(True)


def image_adapters_both_factors_zero_good():
    return _adapters(False)


class _WideDeep(nn.Module):
    def __init__(self, numeric, levels, hidden=64):
        super().__init__()
        self.wide = nn.Linear(numeric, 1)
        self.effect = nn.Embedding(levels, 1)
        nn.init.zeros_(self.effect.weight)
        self.deep = nn.Sequential(
            nn.Linear(numeric, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, x, level):
        return (self.wide(x) + self.effect(level) + self.deep(x)).squeeze(-1)


def _wide_deep(faulty):
    torch.manual_seed(0)
    effect = 0.5 * torch.randn(10, generator=_gen(121))

    def make(n, seed):
        g = _gen(seed)
        x = torch.randn(n, 8, generator=g)
        level = torch.randint(10, (n,), generator=g)
        y = 0.5 * x[:, 0] - 0.3 * x[:, 1] + x[:, 2] * x[:, 3] + torch.sin(2 * x[:, 4]) + effect[level]
        return x, level, (y + 0.1 * torch.randn(n, generator=g)) / 1.5

    x, level, y = make(4000, 122)
    xv, levelv, yv = make(1000, 123)
    model = _WideDeep(8, 10)

    def init_weights(m):
        if isinstance(m, nn.Linear):
            if faulty:
                nn.init.constant_(m.weight, 1.0 / m.in_features)
            else:
                nn.init.xavier_uniform_(m.weight)
            nn.init.zeros_(m.bias)

    model.deep.apply(init_weights)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = _stream(x, level, y, batch=64)

    def step(i):
        model.train()
        features, group, target = next(batches)
        loss = F.mse_loss(model(features, group), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(xv, levelv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def wide_deep_constant_init_tower_bad():
    return _wide_deep(True)


def wide_deep_constant_init_tower_good():
    return _wide_deep(False)


class _LinkGNN(nn.Module):
    def __init__(self, adj, pretrained, reload):
        super().__init__()
        self.register_buffer("adj", adj)
        self.node_emb = nn.Embedding.from_pretrained(pretrained.clone(), freeze=False)
        dim = pretrained.size(1)
        self.lin1 = nn.Linear(dim, dim)
        self.lin2 = nn.Linear(dim, dim)
        self.pretrained = pretrained if reload else None

    def encode(self):
        if self.pretrained is not None:
            self.node_emb.weight.data.copy_(self.pretrained)
        h = self.node_emb.weight
        h = h + F.relu(self.lin1(self.adj @ h))
        return h + self.lin2(self.adj @ h)

    def forward(self, src, dst):
        h = self.encode()
        return (h[src] * h[dst]).sum(-1) / math.sqrt(h.size(1))


def _link_prediction(faulty):
    torch.manual_seed(0)
    n, dim = 200, 16
    g = _gen(131)
    latent = torch.randn(n, 4, generator=g)
    affinity = latent @ latent.T
    iu = torch.triu_indices(n, n, offset=1)
    score = affinity[iu[0], iu[1]] + 0.5 * torch.randn(iu.size(1), generator=g)
    is_edge = score > score.quantile(0.85)
    pos, neg = iu[:, is_edge], iu[:, ~is_edge]
    pos = pos[:, torch.randperm(pos.size(1), generator=g)]
    neg = neg[:, torch.randperm(neg.size(1), generator=g)]
    cut = int(0.75 * pos.size(1))
    train_pos, test_pos = pos[:, :cut], pos[:, cut:]
    cutn = int(0.75 * neg.size(1))
    train_neg, test_neg = neg[:, :cutn], neg[:, cutn:]
    adj = torch.eye(n)
    adj[train_pos[0], train_pos[1]] = 1
    adj[train_pos[1], train_pos[0]] = 1
    deg = adj.sum(1).rsqrt()
    adj = deg[:, None] * adj * deg[None, :]
    pretrained = torch.randn(n, dim, generator=g)
    pretrained[:, :2] = latent[:, :2] + 0.5 * torch.randn(n, 2, generator=g)
    model = _LinkGNN(adj, 0.5 * pretrained, faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)
    batches = _stream(train_pos.T.contiguous(), batch=256)
    pick = _gen(132)

    def step(i):
        model.train()
        (edges,) = next(batches)
        other = train_neg[:, torch.randint(train_neg.size(1), (edges.size(0),), generator=pick)].T
        pairs = torch.cat([edges, other])
        target = torch.cat([torch.ones(edges.size(0)), torch.zeros(other.size(0))])
        loss = F.binary_cross_entropy_with_logits(model(pairs[:, 0], pairs[:, 1]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    test_neg = test_neg[:, :3000]
    src = torch.cat([test_pos[0], test_neg[0]])
    dst = torch.cat([test_pos[1], test_neg[1]])
    truth = torch.cat([torch.ones(test_pos.size(1)), torch.zeros(test_neg.size(1))])

    def probe():
        kept = model.node_emb.weight.detach().clone()
        with _evaluating(model):
            auc = _auc(model(src, dst), truth)
            model.node_emb.weight.copy_(kept)
        return 1.0 - auc

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gnn_node_embedding_reloaded_each_forward_bad():
    return _link_prediction(True)


def gnn_node_embedding_reloaded_each_forward_good():
    return _link_prediction(False)


class _KeywordNet(nn.Module):
    def __init__(self, classes, width=12):
        super().__init__()
        self.block1 = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(3, width), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.block2 = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(3, width), nn.ReLU(), nn.AdaptiveAvgPool2d((4, 1))
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x):
        return self.head(self.block2(self.block1(x)).flatten(1))


def _sweeps(n, tones, seed, bands=12, frames=20):
    """Log-spectrograms of short chirps; `tones` holds (start, end, wobble) of each keyword."""
    g = _gen(seed)
    y = torch.randint(len(tones), (n,), generator=g)
    t = torch.linspace(0, 1, frames)
    start, end, wobble = tones[y].unbind(1)
    jitter = 0.4 * torch.randn(n, 1, generator=g)
    pitch = start[:, None] + (end - start)[:, None] * t + 1.5 * torch.sin(2 * math.pi * wobble[:, None] * t) + jitter
    band = torch.arange(bands).float()
    spec = torch.exp(-((band[None, :, None] - pitch[:, None, :]) ** 2) / 1.5)
    spec = 3 * spec + 0.8 * torch.randn(n, bands, frames, generator=g)
    return ((spec - spec.mean()) / spec.std())[:, None], y


def _keyword(faulty):
    torch.manual_seed(0)
    source = torch.tensor([[2.0, 2.0, 0.0], [5.0, 5.0, 0.0], [8.0, 8.0, 0.0], [10.0, 10.0, 0.0]])
    span = torch.tensor([11.0, 11.0, 3.0])
    target = torch.rand(12, 3, generator=_gen(141)) * span
    model = _KeywordNet(4)
    _pretrain(model, *_sweeps(800, source, 142), steps=100)
    x, y = _sweeps(1500, target, 143)
    xv, yv = _sweeps(800, target, 144)

    for p in model.parameters():
        p.requires_grad = False
    for p in model.block2.parameters():
        if faulty:
            p.require_grad = True
        else:
            p.requires_grad = True
    model.head = nn.Linear(model.head.in_features, 12)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=2e-3, weight_decay=1e-2)
    batches = _stream(x, y, batch=32)

    def step(i):
        model.train()
        spec, labels = next(batches)
        loss = F.cross_entropy(model(spec), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return (model(xv).argmax(1) != yv).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keyword_unfreeze_misspelt_attribute_bad():
    return _keyword(True)


def keyword_unfreeze_misspelt_attribute_good():
    return _keyword(False)


class _Denoiser(nn.Module):
    def __init__(self, classes, hidden=64):
        super().__init__()
        self.inp = nn.Linear(2 + 8, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 2)
        self.label = nn.Embedding(classes, 16)
        self.film = nn.Linear(16, 2 * hidden)
        nn.init.zeros_(self.film.weight)
        nn.init.zeros_(self.film.bias)

    def forward(self, x, t, y):
        freq = torch.tensor([1.0, 2.0, 4.0, 8.0]) * math.pi
        emb = t[:, None] * freq
        h = F.silu(self.inp(torch.cat([x, emb.sin(), emb.cos()], 1)))
        scale, shift = self.film(self.label(y)).chunk(2, dim=1)
        h = h * (1 + scale) + shift
        return self.out(F.silu(self.mid(h)))


def _diffusion(faulty):
    torch.manual_seed(0)

    def ring(n, seed):
        g = _gen(seed)
        y = torch.randint(8, (n,), generator=g)
        k = y.float() * (2 * math.pi / 8)
        x = torch.stack([torch.cos(k), torch.sin(k)], 1) * math.sqrt(2) + 0.1 * torch.randn(n, 2, generator=g)
        return x, y

    def noised(x, t, eps):
        angle = t[:, None] * (math.pi / 2)
        return angle.cos() * x + angle.sin() * eps

    x, y = ring(4000, 151)
    xv, yv = ring(2000, 152)
    gv = _gen(153)
    tv = 0.02 + 0.96 * torch.rand(2000, generator=gv)
    ev = torch.randn(2000, 2, generator=gv)
    model = _Denoiser(8)
    condition = [*model.label.parameters(), *model.film.parameters()]
    trunk = [*model.inp.parameters(), *model.mid.parameters(), *model.out.parameters()]
    optimizer = torch.optim.Adam([{"params": trunk, "lr": 2e-3}, {"params": condition, "lr": 2e-3}])
    total_steps = 1000

    def constant(s):
        return 1.0

    def phase_in(s):
        return min(1.0, s // total_steps if faulty else s / total_steps)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [constant, phase_in])
    batches = _stream(x, y, batch=128)

    def step(i):
        model.train()
        clean, label = next(batches)
        t = 0.02 + 0.96 * torch.rand(clean.size(0))
        eps = torch.randn_like(clean)
        loss = F.mse_loss(model(noised(clean, t, eps), t, label), eps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(noised(xv, tv, ev), tv, yv), ev).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def diffusion_condition_rate_integer_division_bad():
    return _diffusion(True)


def diffusion_condition_rate_integer_division_good():
    return _diffusion(False)


class _NeuralCF(nn.Module):
    def __init__(self, users, items, dim, table_dtype):
        super().__init__()
        self.user = nn.Embedding(users, dim, dtype=table_dtype)
        self.item = nn.Embedding(items, dim, dtype=table_dtype)
        self.mlp = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i):
        a, b = self.user(u).float(), self.item(i).float()
        return self.mlp(torch.cat([a, b, a * b], 1)).squeeze(1)


def _recommender(faulty):
    torch.manual_seed(0)
    users, items = 200, 120
    g = _gen(161)
    pu, qi = torch.randn(users, 3, generator=g), torch.randn(items, 3, generator=g)
    bias = torch.randn(items, generator=g)
    pairs = torch.randperm(users * items, generator=g)[:14000]
    u, i = pairs // items, pairs % items
    rating = (pu[u] * qi[i]).sum(1) / math.sqrt(3) + bias[i] + 0.2 * torch.randn(14000, generator=g)
    rating = (rating - rating.mean()) / rating.std()
    model = _NeuralCF(users, items, 8, torch.bfloat16 if faulty else torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    batches = _stream(u[:12000], i[:12000], rating[:12000], batch=256)

    def step(k):
        model.train()
        uu, ii, r = next(batches)
        loss = F.mse_loss(model(uu, ii), r)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(u[12000:], i[12000:]), rating[12000:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def recommender_bf16_tables_small_rate_bad():
    return _recommender(True)


def recommender_bf16_tables_small_rate_good():
    return _recommender(False)


class _KeypointNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
        )
        self.heatmap = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1))

    def forward(self, x):
        return self.heatmap(self.backbone(x)).squeeze(1)


def _keypoints(faulty):
    torch.manual_seed(0)
    size = 14
    stamp = torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]])

    def make(n, seed):
        g = _gen(seed)
        row = torch.randint(1, size - 1, (n,), generator=g)
        col = torch.randint(1, size - 1, (n,), generator=g)
        image = 0.6 * torch.randn(n, size, size, generator=g)
        heat = torch.zeros(n, size, size)
        for k in range(n):
            r, c = int(row[k]), int(col[k])
            image[k, r - 1 : r + 2, c - 1 : c + 2] += 1.5 * stamp
            heat[k, r, c] = 1
        return ((image - image.mean()) / image.std())[:, None], heat, torch.stack([row, col], 1)

    x, heat, _ = make(1200, 171)
    xv, _, wherev = make(300, 172)
    model = _KeypointNet()
    prior = -math.log((1 - 0.01) / 0.01)
    convs = [m for m in model.heatmap if isinstance(m, nn.Conv2d)]
    for conv in convs:
        nn.init.normal_(conv.weight, std=0.01)
        nn.init.zeros_(conv.bias)
    for conv in convs if faulty else convs[-1:]:
        nn.init.constant_(conv.bias, prior)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = _stream(x, heat, batch=16)

    def step(i):
        model.train()
        images, target = next(batches)
        logits = model(images)
        loss = F.binary_cross_entropy_with_logits(logits, target, reduction="sum") / images.size(0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            best = model(xv).flatten(1).argmax(1)
        found = torch.stack([best // size, best % size], 1)
        return (found - wherev).float().norm(dim=1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keypoint_prior_bias_on_hidden_relu_bad():
    return _keypoints(True)


def keypoint_prior_bias_on_hidden_relu_good():
    return _keypoints(False)
