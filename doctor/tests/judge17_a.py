"""Twenty-two programs of pictures, sound, tables, graphs, recommenders, point clouds and video, each with one bug and a mended
twin, by somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""

import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)

CASES = [
    {"name": 'seg_logits_view', "what": 'The (B, C, H, W) logits are flattened with .view(-1, C) without moving the class axis last, so each row of the cross-entropy holds C neighbouring pixels of one channel instead of the C scores of one pixel. Logits and labels do not belong together and the net learns little more than the class frequencies.', "steps": 350},
    {"name": 'det_giou_center_boxes', "what": "Boxes are kept as (cx, cy, w, h), as in YOLO label files, but the GIoU loss reads the four numbers as corners (x1, y1, x2, y2). Most 'boxes' then have negative width or height, the overlap is zero or meaningless, and the regressor is not pulled to the objects.", "steps": 300},
    {"name": 'siamese_cosine_zero_one', "what": "nn.CosineEmbeddingLoss wants +1 for same and -1 for different, but gets the 0/1 'same' flag. Pairs with 0 fall into neither branch and count as zero loss, so nothing pushes different identities apart and the embedding collapses into one direction.", "steps": 300},
    {"name": 'ctc_default_blank', "what": "The vocabulary uses ids 0..K-1 for phones and reserves id K for the blank, but nn.CTCLoss is left at its default blank=0. Phone 0 is trained as the blank (and the real blank never), so the decoder's alignment breaks and phone 0 is lost.", "steps": 250},
    {"name": 'autorec_unobserved_zeros', "what": "The rating autoencoder's squared error runs over the whole user row, and the zeros that only stand for 'not rated' count as true ratings. Predictions for unseen items shrink toward zero.", "steps": 300},
    {"name": 'gaussian_nll_gets_sigma', "what": 'The network predicts a standard deviation, but nn.GaussianNLLLoss takes a variance as third argument and gets the standard deviation as it is. The learned sigma settles at the true variance, so the uncertainty is several times too small and the errors are weighted wrongly.', "steps": 300},
    {"name": 'distill_kl_needs_log', "what": "F.kl_div gets the student's softmax probabilities, but its first argument must be log-probabilities. The gradient no longer matches the teacher's distribution (it pushes all mass to the teacher's top class), so the soft knowledge is not transferred.", "steps": 300},
    {"name": 'pointnet_layers_in_list', "what": 'The shared per-point layers sit in a plain Python list, so nn.Module does not register them: model.parameters() misses them, the optimizer never sees them and the point features stay at their random start.', "steps": 300},
    {"name": 'unfreeze_without_param_group', "what": 'The optimizer is built from the parameters that require gradients while the backbone is frozen. After the warm-up of the head the backbone is unfrozen, but nobody hands its parameters to the optimizer, so it gets gradients and never moves: the fine-tuning never happens.', "steps": 500},
    {"name": 'gnn_gate_and_branch_zero', "what": 'Each residual message-passing branch ends in a layer that starts at zero and is multiplied by a gate that also starts at zero. The gradient of each of the two factors is proportional to the other one, so both stay zero for ever and the net never uses its neighbours.', "steps": 250},
    {"name": 'video_state_detached_every_frame', "what": 'Inside the loop over frames the recurrent state is detached before each update, as one would do between chunks. The loss at the end of the clip reaches only the last frame: nothing trains the encoder or the cell to keep what was shown earlier.', "steps": 350},
    {"name": 'tabular_weights_in_bfloat16', "what": 'To save memory the model itself is cast to bfloat16 and trained there without a float32 master copy. An update of lr size is smaller than the spacing of bfloat16 numbers around most weights and is rounded away, so most weights stand still.', "steps": 800},
    {"name": 'lambda_lr_returns_absolute_rate', "what": 'LambdaLR multiplies the base rate by what the function returns, but the warm-up function returns the learning rate itself. The effective rate is base_lr squared (4e-6 instead of 2e-3) and the keyword model hardly moves.', "steps": 300},
    {"name": 'graph_batch_without_offset', "what": 'The collate function joins the edge lists of several molecules without adding the running node offset, so all edges of the batch land on the first dozen nodes (the first graph or two). The other graphs get no messages, and the first gets those of strangers.', "steps": 400},
    {"name": 'video_transformer_not_batch_first', "what": "The encoder layer is left at batch_first=False but gets (batch, time, dim) tokens. Attention then runs over the clips of a batch instead of over the frames of a clip: the class token sees only other clips' class tokens and never a frame.", "steps": 400},
    {"name": 'simsiam_without_stop_gradient', "what": 'In the SimSiam loss the projection of the other view should be a fixed target, but it keeps its gradient. Both branches then run toward each other: the representation collapses onto one or two directions.', "steps": 300},
    {"name": 'multitask_heads_are_one_module', "what": 'The per-target heads are made with [nn.Linear(...)] * n, which puts the same module into the list n times. All targets share one weight vector and get the same prediction, so the net can only fit their mean.', "steps": 300},
    {"name": 'cloud_max_over_channels', "what": 'The symmetric max of the point net is taken over the feature axis instead of the point axis. As there are as many points as channels the next layer still fits, but it gets one number per point in arbitrary order instead of one descriptor of the cloud.', "steps": 300},
    {"name": 'flip_drawn_twice', "what": 'The random horizontal flip of the picture and of its mask are drawn separately, so in half of the samples picture and mask do not belong together. The net learns to smear each object to both sides.', "steps": 600},
    {"name": 'denoise_target_aliases_input', "what": "'noisy = clean' makes no copy and the noise is then added in place, so the target carries the very same noise as the input. The denoiser is taught the identity and removes nothing.", "steps": 200},
    {"name": 'mean_teacher_ema_rebinds_name', "what": "The EMA loop writes 't = decay * t + ...', which only rebinds the loop variable; the teacher's parameters keep their random start. The student is held to the guesses of a random net, and the teacher, the model one would ship, is worth nothing.", "steps": 400},
    {"name": 'bpr_negatives_from_user_range', "what": 'The negative items of the BPR loss are drawn with randint(n_users) instead of randint(n_items). There are fewer users than items, so the later items never occur as negatives; they are only ever pushed up and crowd the rankings.', "steps": 500},
]

PROBES = {
    'seg_logits_view': '1 - mean IoU over the three classes on held-out pictures',
    'det_giou_center_boxes': '1 - mean IoU of predicted and true box on held-out pictures',
    'siamese_cosine_zero_one': 'verification error (false accepts + false rejects, threshold 0.5 on the cosine, averaged) on held-out identities',
    'ctc_default_blank': 'phone error rate of greedy decoding on held-out utterances',
    'autorec_unobserved_zeros': 'RMSE on held-out ratings',
    'gaussian_nll_gets_sigma': 'distance of the mean squared standardised residual from 1 on held-out rows (0 = calibrated)',
    'distill_kl_needs_log': 'KL(teacher || student) on held-out pictures',
    'pointnet_layers_in_list': 'classification error on held-out clouds',
    'unfreeze_without_param_group': 'classification error on held-out pictures of the new task',
    'gnn_gate_and_branch_zero': 'error on held-out nodes',
    'video_state_detached_every_frame': 'classification error on held-out clips',
    'tabular_weights_in_bfloat16': 'mean squared error on held-out rows',
    'lambda_lr_returns_absolute_rate': 'classification error on held-out sounds',
    'graph_batch_without_offset': 'mean squared error on held-out graphs, run one graph at a time',
    'video_transformer_not_batch_first': 'classification error on held-out clips',
    'simsiam_without_stop_gradient': '1 / effective rank of the normalised embeddings of held-out pictures',
    'multitask_heads_are_one_module': 'mean squared error over all targets on held-out rows',
    'cloud_max_over_channels': 'classification error on held-out clouds',
    'flip_drawn_twice': '1 - mean IoU over the three classes on held-out pictures',
    'denoise_target_aliases_input': 'mean squared error of the restored held-out pictures, relative to that of the noisy ones',
    'mean_teacher_ema_rebinds_name': 'held-out error, mean of teacher and student',
    'bpr_negatives_from_user_range': '1 - AUC of held-out liked items against all items not liked',
}


def shapes(n, size=24, seed=0, noise=0.3):
    """n pictures with one disc (class 1) or one square (class 2) each: image, mask, class, box (cx, cy, w, h)."""
    g = torch.Generator().manual_seed(seed)
    r = torch.rand(n, 1, 1, generator=g) * 0.14 + 0.12
    cx = torch.rand(n, 1, 1, generator=g) * 0.5 + 0.25
    cy = torch.rand(n, 1, 1, generator=g) * 0.5 + 0.25
    cls = torch.randint(0, 2, (n,), generator=g)
    ax = (torch.arange(size).float() + 0.5) / size
    dx, dy = ax.view(1, 1, -1) - cx, ax.view(1, -1, 1) - cy
    disc = dx ** 2 + dy ** 2 < r ** 2
    square = torch.maximum(dx.abs(), dy.abs()) < r * 0.9
    inside = torch.where(cls.view(-1, 1, 1) == 0, disc, square)
    mask = inside.long() * (cls.view(-1, 1, 1) + 1)
    colour = torch.rand(n, 3, 1, 1, generator=g) * 0.8 + 0.4
    img = inside.unsqueeze(1) * colour * 2 - 0.5 + noise * torch.randn(n, 3, size, size, generator=g)
    half = torch.where(cls.view(-1, 1, 1) == 0, r, r * 0.9)
    box = torch.cat([cx, cy, 2 * half, 2 * half], 1).squeeze(-1)
    return img, mask, cls, box


def clouds(n, points=64, seed=0):
    """n unordered point clouds of four kinds: sphere, cube, cylinder, two plates."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    p = torch.randn(n, points, 3, generator=g)
    sphere = F.normalize(p, dim=-1)
    u = torch.rand(n, points, 3, generator=g) * 2 - 1
    cube = u / u.abs().amax(-1, keepdim=True) * 0.8
    cyl = torch.cat([F.normalize(p[..., :2], dim=-1) * 0.8, u[..., 2:]], -1)
    plates = torch.cat([u[..., :2], u[..., 2:].sign() * 0.6], -1)
    allk = torch.stack([sphere, cube, cyl, plates], 1)
    x = allk[torch.arange(n), y]
    scale = 0.8 + 0.4 * torch.rand(n, 1, 1, generator=g)
    return x * scale + 0.05 * torch.randn(n, points, 3, generator=g), y


def cycle(loader):
    while True:
        yield from loader


def seg_logits_view_bad():
    torch.manual_seed(0)
    class TinyUNet(nn.Module):
        def __init__(self, n_classes):
            super().__init__()
            self.enc1 = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU())
            self.enc2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU())
            self.mid = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU())
            self.dec2 = nn.Sequential(nn.Conv2d(48, 16, 3, padding=1), nn.ReLU())
            self.dec1 = nn.Sequential(nn.Conv2d(28, 16, 3, padding=1), nn.ReLU())
            self.out = nn.Conv2d(16, n_classes, 1)

        def forward(self, x):
            a = self.enc1(x)
            b = self.enc2(a)
            c = F.interpolate(self.mid(b), scale_factor=2, mode="nearest")
            d = self.dec2(torch.cat([b, c], 1))
            d = F.interpolate(d, scale_factor=2, mode="nearest")
            return self.out(self.dec1(torch.cat([a, d], 1)))

    n_classes = 3
    x, m, _, _ = shapes(512, seed=1)
    xv, mv, _, _ = shapes(128, seed=2)
    loader = cycle(DataLoader(TensorDataset(x, m), batch_size=16, shuffle=True, drop_last=True))
    model = TinyUNet(n_classes)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        img, mask = next(loader)
        logits = model(img)
        logits = logits.view(-1, n_classes)
        loss = criterion(logits, mask.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            pred = model(xv).argmax(1)
        model.train()
        ious = [((pred == k) & (mv == k)).sum() / ((pred == k) | (mv == k)).sum().clamp(min=1) for k in range(n_classes)]
        return 1 - float(torch.stack(ious).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seg_logits_view_good():
    torch.manual_seed(0)
    class TinyUNet(nn.Module):
        def __init__(self, n_classes):
            super().__init__()
            self.enc1 = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU())
            self.enc2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU())
            self.mid = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU())
            self.dec2 = nn.Sequential(nn.Conv2d(48, 16, 3, padding=1), nn.ReLU())
            self.dec1 = nn.Sequential(nn.Conv2d(28, 16, 3, padding=1), nn.ReLU())
            self.out = nn.Conv2d(16, n_classes, 1)

        def forward(self, x):
            a = self.enc1(x)
            b = self.enc2(a)
            c = F.interpolate(self.mid(b), scale_factor=2, mode="nearest")
            d = self.dec2(torch.cat([b, c], 1))
            d = F.interpolate(d, scale_factor=2, mode="nearest")
            return self.out(self.dec1(torch.cat([a, d], 1)))

    n_classes = 3
    x, m, _, _ = shapes(512, seed=1)
    xv, mv, _, _ = shapes(128, seed=2)
    loader = cycle(DataLoader(TensorDataset(x, m), batch_size=16, shuffle=True, drop_last=True))
    model = TinyUNet(n_classes)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        img, mask = next(loader)
        logits = model(img)
        logits = logits.permute(0, 2, 3, 1).reshape(-1, n_classes)
        loss = criterion(logits, mask.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            pred = model(xv).argmax(1)
        model.train()
        ious = [((pred == k) & (mv == k)).sum() / ((pred == k) | (mv == k)).sum().clamp(min=1) for k in range(n_classes)]
        return 1 - float(torch.stack(ious).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def det_giou_center_boxes_bad():
    torch.manual_seed(0)
    class BoxNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
            )
            self.fc = nn.Sequential(nn.Flatten(), nn.Linear(32 * 36, 64), nn.ReLU())
            self.box = nn.Linear(64, 4)
            self.cls = nn.Linear(64, 2)

        def forward(self, x):
            h = self.fc(self.features(x))
            return self.box(h).sigmoid(), self.cls(h)

    def to_corners(b):
        cx, cy, w, h = b.unbind(-1)
        return torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], -1)

    def giou(a, b, eps=1e-6):
        area_a = (a[:, 2] - a[:, 0]).clamp(min=0) * (a[:, 3] - a[:, 1]).clamp(min=0)
        area_b = (b[:, 2] - b[:, 0]).clamp(min=0) * (b[:, 3] - b[:, 1]).clamp(min=0)
        lt, rb = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
        wh = (rb - lt).clamp(min=0)
        inter = wh[:, 0] * wh[:, 1]
        union = area_a + area_b - inter
        hull = (torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
        return inter / (union + eps) - (hull - union) / (hull + eps), inter / (union + eps)

    x, _, c, b = shapes(768, seed=3)
    xv, _, _, bv = shapes(200, seed=4)
    loader = cycle(DataLoader(TensorDataset(x, c, b), batch_size=32, shuffle=True, drop_last=True))
    net = BoxNet()
    decay = [p for p in net.parameters() if p.ndim > 1]
    no_decay = [p for p in net.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([
        {"params": decay, "weight_decay": 1e-2},
        {"params": no_decay, "weight_decay": 0.0},
    ], lr=1e-3)

    def step(i):
        net.train()
        img, label, target = next(loader)
        pred, logits = net(img)
        loss_box = (1 - giou(pred, target)[0]).mean()
        loss = 2.0 * loss_box + F.cross_entropy(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            pred, _ = net(xv)
        net.train()
        return 1 - float(giou(to_corners(pred), to_corners(bv))[1].mean())

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def det_giou_center_boxes_good():
    torch.manual_seed(0)
    class BoxNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
            )
            self.fc = nn.Sequential(nn.Flatten(), nn.Linear(32 * 36, 64), nn.ReLU())
            self.box = nn.Linear(64, 4)
            self.cls = nn.Linear(64, 2)

        def forward(self, x):
            h = self.fc(self.features(x))
            return self.box(h).sigmoid(), self.cls(h)

    def to_corners(b):
        cx, cy, w, h = b.unbind(-1)
        return torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], -1)

    def giou(a, b, eps=1e-6):
        area_a = (a[:, 2] - a[:, 0]).clamp(min=0) * (a[:, 3] - a[:, 1]).clamp(min=0)
        area_b = (b[:, 2] - b[:, 0]).clamp(min=0) * (b[:, 3] - b[:, 1]).clamp(min=0)
        lt, rb = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
        wh = (rb - lt).clamp(min=0)
        inter = wh[:, 0] * wh[:, 1]
        union = area_a + area_b - inter
        hull = (torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
        return inter / (union + eps) - (hull - union) / (hull + eps), inter / (union + eps)

    x, _, c, b = shapes(768, seed=3)
    xv, _, _, bv = shapes(200, seed=4)
    loader = cycle(DataLoader(TensorDataset(x, c, b), batch_size=32, shuffle=True, drop_last=True))
    net = BoxNet()
    decay = [p for p in net.parameters() if p.ndim > 1]
    no_decay = [p for p in net.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([
        {"params": decay, "weight_decay": 1e-2},
        {"params": no_decay, "weight_decay": 0.0},
    ], lr=1e-3)

    def step(i):
        net.train()
        img, label, target = next(loader)
        pred, logits = net(img)
        loss_box = (1 - giou(to_corners(pred), to_corners(target))[0]).mean()
        loss = 2.0 * loss_box + F.cross_entropy(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            pred, _ = net(xv)
        net.train()
        return 1 - float(giou(to_corners(pred), to_corners(bv))[1].mean())

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def siamese_cosine_zero_one_bad():
    torch.manual_seed(0)
    class Embedder(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, dim))

        def forward(self, x):
            return self.net(x)

    g = torch.Generator().manual_seed(5)
    mixing = torch.randn(40, 40, generator=g) / math.sqrt(40)

    def faces(ids, centres):
        ident = centres[ids]
        nuisance = 1.0 * torch.randn(len(ids), 30, generator=g)
        return torch.cat([ident + 0.2 * torch.randn(len(ids), 10, generator=g), nuisance], 1) @ mixing

    train_centres = 2 * torch.randn(60, 10, generator=g)
    test_centres = 2 * torch.randn(30, 10, generator=g)
    ta = torch.arange(30).repeat(10)
    tx = faces(ta, test_centres)

    model = Embedder()
    criterion = nn.CosineEmbeddingLoss(margin=0.0)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)

    def step(i):
        model.train()
        ids_a = torch.randint(0, 60, (64,), generator=g)
        same = torch.rand(64, generator=g) < 0.5
        ids_b = torch.where(same, ids_a, torch.randint(0, 60, (64,), generator=g))
        same = ids_a == ids_b
        xa, xb = faces(ids_a, train_centres), faces(ids_b, train_centres)
        target = same.float()
        opt.zero_grad()
        loss = criterion(model(xa), model(xb), target)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            z = F.normalize(model(tx), dim=1)
        model.train()
        sim = z @ z.t()
        same = ta[:, None] == ta[None, :]
        off = ~torch.eye(len(ta), dtype=torch.bool)
        return float(((sim[same & off] < 0.5).float().mean() + (sim[~same] >= 0.5).float().mean()) / 2)

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def siamese_cosine_zero_one_good():
    torch.manual_seed(0)
    class Embedder(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, dim))

        def forward(self, x):
            return self.net(x)

    g = torch.Generator().manual_seed(5)
    mixing = torch.randn(40, 40, generator=g) / math.sqrt(40)

    def faces(ids, centres):
        ident = centres[ids]
        nuisance = 1.0 * torch.randn(len(ids), 30, generator=g)
        return torch.cat([ident + 0.2 * torch.randn(len(ids), 10, generator=g), nuisance], 1) @ mixing

    train_centres = 2 * torch.randn(60, 10, generator=g)
    test_centres = 2 * torch.randn(30, 10, generator=g)
    ta = torch.arange(30).repeat(10)
    tx = faces(ta, test_centres)

    model = Embedder()
    criterion = nn.CosineEmbeddingLoss(margin=0.0)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)

    def step(i):
        model.train()
        ids_a = torch.randint(0, 60, (64,), generator=g)
        same = torch.rand(64, generator=g) < 0.5
        ids_b = torch.where(same, ids_a, torch.randint(0, 60, (64,), generator=g))
        same = ids_a == ids_b
        xa, xb = faces(ids_a, train_centres), faces(ids_b, train_centres)
        target = same.float() * 2 - 1
        opt.zero_grad()
        loss = criterion(model(xa), model(xb), target)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            z = F.normalize(model(tx), dim=1)
        model.train()
        sim = z @ z.t()
        same = ta[:, None] == ta[None, :]
        off = ~torch.eye(len(ta), dtype=torch.bool)
        return float(((sim[same & off] < 0.5).float().mean() + (sim[~same] >= 0.5).float().mean()) / 2)

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def ctc_default_blank_bad():
    torch.manual_seed(0)
    K = 6

    class PhoneNet(nn.Module):
        def __init__(self, n_mels=16, hidden=48):
            super().__init__()
            self.conv = nn.Sequential(nn.Conv1d(n_mels, 32, 3, padding=1), nn.ReLU())
            self.rnn = nn.GRU(32, hidden, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(2 * hidden, K + 1)

        def forward(self, x):
            h = self.conv(x.transpose(1, 2)).transpose(1, 2)
            return self.fc(self.rnn(h)[0])

    g = torch.Generator().manual_seed(6)
    proto = torch.randn(K + 1, 16, generator=g)
    proto[K] = 0

    def utterances(n, T=28, L=5):
        phones = torch.randint(0, K, (n, L), generator=g)
        x = torch.zeros(n, T, 16)
        for b in range(n):
            t = 1
            for p in phones[b].tolist():
                d = int(torch.randint(2, 5, (1,), generator=g))
                x[b, t:t + d] = proto[p]
                t += d + 1
        return x + 0.4 * torch.randn(n, T, 16, generator=g), phones

    x, y = utterances(400)
    xv, yv = utterances(80)
    loader = cycle(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True))
    model = PhoneNet()
    ctc = nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        feats, labels = next(loader)
        log_probs = model(feats).log_softmax(-1).transpose(0, 1)
        in_len = torch.full((feats.size(0),), feats.size(1), dtype=torch.long)
        out_len = torch.full((feats.size(0),), labels.size(1), dtype=torch.long)
        loss = ctc(log_probs, labels, in_len, out_len)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def edit(a, b):
        row = list(range(len(b) + 1))
        for i, p in enumerate(a, 1):
            prev, row[0] = row[0], i
            for j, q in enumerate(b, 1):
                prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (p != q))
        return row[-1]

    def probe():
        model.eval()
        with torch.no_grad():
            best = model(xv).argmax(-1)
        model.train()
        errors = 0
        for seq, ref in zip(best, yv.tolist()):
            hyp = [k for k in torch.unique_consecutive(seq).tolist() if k != K]
            errors += edit(hyp, ref)
        return errors / yv.numel()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ctc_default_blank_good():
    torch.manual_seed(0)
    K = 6

    class PhoneNet(nn.Module):
        def __init__(self, n_mels=16, hidden=48):
            super().__init__()
            self.conv = nn.Sequential(nn.Conv1d(n_mels, 32, 3, padding=1), nn.ReLU())
            self.rnn = nn.GRU(32, hidden, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(2 * hidden, K + 1)

        def forward(self, x):
            h = self.conv(x.transpose(1, 2)).transpose(1, 2)
            return self.fc(self.rnn(h)[0])

    g = torch.Generator().manual_seed(6)
    proto = torch.randn(K + 1, 16, generator=g)
    proto[K] = 0

    def utterances(n, T=28, L=5):
        phones = torch.randint(0, K, (n, L), generator=g)
        x = torch.zeros(n, T, 16)
        for b in range(n):
            t = 1
            for p in phones[b].tolist():
                d = int(torch.randint(2, 5, (1,), generator=g))
                x[b, t:t + d] = proto[p]
                t += d + 1
        return x + 0.4 * torch.randn(n, T, 16, generator=g), phones

    x, y = utterances(400)
    xv, yv = utterances(80)
    loader = cycle(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True))
    model = PhoneNet()
    ctc = nn.CTCLoss(blank=K, zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        feats, labels = next(loader)
        log_probs = model(feats).log_softmax(-1).transpose(0, 1)
        in_len = torch.full((feats.size(0),), feats.size(1), dtype=torch.long)
        out_len = torch.full((feats.size(0),), labels.size(1), dtype=torch.long)
        loss = ctc(log_probs, labels, in_len, out_len)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def edit(a, b):
        row = list(range(len(b) + 1))
        for i, p in enumerate(a, 1):
            prev, row[0] = row[0], i
            for j, q in enumerate(b, 1):
                prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (p != q))
        return row[-1]

    def probe():
        model.eval()
        with torch.no_grad():
            best = model(xv).argmax(-1)
        model.train()
        errors = 0
        for seq, ref in zip(best, yv.tolist()):
            hyp = [k for k in torch.unique_consecutive(seq).tolist() if k != K]
            errors += edit(hyp, ref)
        return errors / yv.numel()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def autorec_unobserved_zeros_bad():
    torch.manual_seed(0)
    class AutoRec(nn.Module):
        def __init__(self, n_items, hidden=32):
            super().__init__()
            self.encode = nn.Linear(n_items, hidden)
            self.decode = nn.Linear(hidden, n_items)
            self.drop = nn.Dropout(0.1)

        def forward(self, r):
            return self.decode(self.drop(torch.sigmoid(self.encode(r))))

    rng = np.random.RandomState(7)
    n_users, n_items = 500, 120
    U, V = rng.randn(n_users, 3), rng.randn(n_items, 3)
    full = np.clip(3.4 + 0.7 * (U @ V.T) / np.sqrt(3) + 0.4 * rng.randn(n_items) + 0.2 * rng.randn(n_users, n_items), 1, 5)
    seen = rng.rand(n_users, n_items) < 0.3
    test = seen & (rng.rand(n_users, n_items) < 0.15)
    train = seen & ~test
    R = torch.tensor(full * train, dtype=torch.float32)
    truth, test_mask = torch.tensor(full, dtype=torch.float32), torch.tensor(test)

    model = AutoRec(n_items)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-5)
    loader = cycle(DataLoader(R, batch_size=50, shuffle=True))

    def step(i):
        model.train()
        r = next(loader)

        def closure():
            optimizer.zero_grad()
            pred = model(r)
            loss = ((pred - r) ** 2).mean()
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    def probe():
        model.eval()
        with torch.no_grad():
            pred = model(R)
        model.train()
        return float(((pred - truth)[test_mask] ** 2).mean().sqrt())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def autorec_unobserved_zeros_good():
    torch.manual_seed(0)
    class AutoRec(nn.Module):
        def __init__(self, n_items, hidden=32):
            super().__init__()
            self.encode = nn.Linear(n_items, hidden)
            self.decode = nn.Linear(hidden, n_items)
            self.drop = nn.Dropout(0.1)

        def forward(self, r):
            return self.decode(self.drop(torch.sigmoid(self.encode(r))))

    rng = np.random.RandomState(7)
    n_users, n_items = 500, 120
    U, V = rng.randn(n_users, 3), rng.randn(n_items, 3)
    full = np.clip(3.4 + 0.7 * (U @ V.T) / np.sqrt(3) + 0.4 * rng.randn(n_items) + 0.2 * rng.randn(n_users, n_items), 1, 5)
    seen = rng.rand(n_users, n_items) < 0.3
    test = seen & (rng.rand(n_users, n_items) < 0.15)
    train = seen & ~test
    R = torch.tensor(full * train, dtype=torch.float32)
    truth, test_mask = torch.tensor(full, dtype=torch.float32), torch.tensor(test)

    model = AutoRec(n_items)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-5)
    loader = cycle(DataLoader(R, batch_size=50, shuffle=True))

    def step(i):
        model.train()
        r = next(loader)

        def closure():
            optimizer.zero_grad()
            pred = model(r)
            observed = (r > 0).float()
            loss = (observed * (pred - r) ** 2).sum() / observed.sum()
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    def probe():
        model.eval()
        with torch.no_grad():
            pred = model(R)
        model.train()
        return float(((pred - truth)[test_mask] ** 2).mean().sqrt())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gaussian_nll_gets_sigma_bad():
    torch.manual_seed(0)
    class UncertainRegressor(nn.Module):
        def __init__(self, n_in):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(n_in, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
            self.mean = nn.Linear(64, 1)
            self.scale = nn.Linear(64, 1)

        def forward(self, x):
            h = self.trunk(x)
            return self.mean(h).squeeze(-1), F.softplus(self.scale(h)).squeeze(-1) + 1e-3

    g = torch.Generator().manual_seed(8)
    X = torch.randn(6000, 8, generator=g)
    std = 0.1 + 0.25 * torch.sigmoid(2 * X[:, 1])
    Y = 0.6 * torch.sin(X[:, 0]) + 0.5 * X[:, 2] * 0.8 + std * torch.randn(6000, generator=g)
    Xt, Yt, Xv, Yv = X[:5000], Y[:5000], X[5000:], Y[5000:]
    loader = cycle(DataLoader(TensorDataset(Xt, Yt), batch_size=128, shuffle=True, drop_last=True))
    model = UncertainRegressor(8)
    criterion = nn.GaussianNLLLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def step(i):
        model.train()
        xb, yb = next(loader)
        mu, sigma = model(xb)
        loss = criterion(mu, yb, sigma)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            mu, sigma = model(Xv)
        model.train()
        return abs(float((((Yv - mu) / sigma) ** 2).mean()) - 1)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gaussian_nll_gets_sigma_good():
    torch.manual_seed(0)
    class UncertainRegressor(nn.Module):
        def __init__(self, n_in):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(n_in, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
            self.mean = nn.Linear(64, 1)
            self.scale = nn.Linear(64, 1)

        def forward(self, x):
            h = self.trunk(x)
            return self.mean(h).squeeze(-1), F.softplus(self.scale(h)).squeeze(-1) + 1e-3

    g = torch.Generator().manual_seed(8)
    X = torch.randn(6000, 8, generator=g)
    std = 0.1 + 0.25 * torch.sigmoid(2 * X[:, 1])
    Y = 0.6 * torch.sin(X[:, 0]) + 0.5 * X[:, 2] * 0.8 + std * torch.randn(6000, generator=g)
    Xt, Yt, Xv, Yv = X[:5000], Y[:5000], X[5000:], Y[5000:]
    loader = cycle(DataLoader(TensorDataset(Xt, Yt), batch_size=128, shuffle=True, drop_last=True))
    model = UncertainRegressor(8)
    criterion = nn.GaussianNLLLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def step(i):
        model.train()
        xb, yb = next(loader)
        mu, sigma = model(xb)
        loss = criterion(mu, yb, sigma ** 2)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            mu, sigma = model(Xv)
        model.train()
        return abs(float((((Yv - mu) / sigma) ** 2).mean()) - 1)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kl_needs_log_bad():
    torch.manual_seed(0)
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(144, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
            self.head = nn.Linear(128, 6)

        def forward(self, x):
            return self.head(self.body(x))

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1)
            self.fc1 = nn.Linear(8 * 36, 32)
            self.fc2 = nn.Linear(32, 6)

        def forward(self, x):
            h = F.relu(self.conv(x)).flatten(1)
            return self.fc2(F.relu(self.fc1(h)))

    g = torch.Generator().manual_seed(9)
    pattern = torch.randn(6, 1, 12, 12, generator=g)

    def draw(n):
        y = torch.randint(0, 6, (n,), generator=g)
        return 0.25 * pattern[y] + torch.randn(n, 1, 12, 12, generator=g), y

    xv, yv = draw(500)
    teacher, student = Teacher(), Student()
    t_opt = torch.optim.Adam(teacher.parameters(), lr=1e-3)
    for _ in range(150):
        xb, yb = draw(64)
        t_opt.zero_grad()
        F.cross_entropy(teacher(xb), yb).backward()
        t_opt.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    T, alpha = 2.0, 0.8
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)

    def step(i):
        student.train()
        xb, yb = draw(64)
        with torch.no_grad():
            t = teacher(xb)
        s = student(xb)
        soft = F.kl_div(F.softmax(s / T, dim=1), F.softmax(t / T, dim=1), reduction="batchmean") * T * T
        loss = alpha * soft + (1 - alpha) * F.cross_entropy(s, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        student.eval()
        with torch.no_grad():
            kl = F.kl_div(student(xv).log_softmax(1), teacher(xv).softmax(1), reduction="batchmean")
        student.train()
        return float(kl)

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kl_needs_log_good():
    torch.manual_seed(0)
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(144, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
            self.head = nn.Linear(128, 6)

        def forward(self, x):
            return self.head(self.body(x))

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1)
            self.fc1 = nn.Linear(8 * 36, 32)
            self.fc2 = nn.Linear(32, 6)

        def forward(self, x):
            h = F.relu(self.conv(x)).flatten(1)
            return self.fc2(F.relu(self.fc1(h)))

    g = torch.Generator().manual_seed(9)
    pattern = torch.randn(6, 1, 12, 12, generator=g)

    def draw(n):
        y = torch.randint(0, 6, (n,), generator=g)
        return 0.25 * pattern[y] + torch.randn(n, 1, 12, 12, generator=g), y

    xv, yv = draw(500)
    teacher, student = Teacher(), Student()
    t_opt = torch.optim.Adam(teacher.parameters(), lr=1e-3)
    for _ in range(150):
        xb, yb = draw(64)
        t_opt.zero_grad()
        F.cross_entropy(teacher(xb), yb).backward()
        t_opt.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    T, alpha = 2.0, 0.8
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)

    def step(i):
        student.train()
        xb, yb = draw(64)
        with torch.no_grad():
            t = teacher(xb)
        s = student(xb)
        soft = F.kl_div(F.log_softmax(s / T, dim=1), F.softmax(t / T, dim=1), reduction="batchmean") * T * T
        loss = alpha * soft + (1 - alpha) * F.cross_entropy(s, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        student.eval()
        with torch.no_grad():
            kl = F.kl_div(student(xv).log_softmax(1), teacher(xv).softmax(1), reduction="batchmean")
        student.train()
        return float(kl)

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pointnet_layers_in_list_bad():
    torch.manual_seed(0)
    class PointNet(nn.Module):
        def __init__(self, widths=(3, 32, 32, 64), n_classes=4):
            super().__init__()
            self.layers = []
            for a, b in zip(widths[:-1], widths[1:]):
                self.layers.append(nn.Conv1d(a, b, 1))
            self.fc1 = nn.Linear(widths[-1], 32)
            self.fc2 = nn.Linear(32, n_classes)

        def forward(self, pts):
            x = pts.transpose(1, 2)
            for layer in self.layers:
                x = F.relu(layer(x))
            x = x.max(dim=2).values
            return self.fc2(F.relu(self.fc1(x)))

    x, y = clouds(1500, seed=11)
    xv, yv = clouds(400, seed=12)
    loader = cycle(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        pts, label = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pts), label)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(xv).argmax(1) != yv).float().mean()
        model.train()
        return float(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pointnet_layers_in_list_good():
    torch.manual_seed(0)
    class PointNet(nn.Module):
        def __init__(self, widths=(3, 32, 32, 64), n_classes=4):
            super().__init__()
            self.layers = nn.ModuleList()
            for a, b in zip(widths[:-1], widths[1:]):
                self.layers.append(nn.Conv1d(a, b, 1))
            self.fc1 = nn.Linear(widths[-1], 32)
            self.fc2 = nn.Linear(32, n_classes)

        def forward(self, pts):
            x = pts.transpose(1, 2)
            for layer in self.layers:
                x = F.relu(layer(x))
            x = x.max(dim=2).values
            return self.fc2(F.relu(self.fc1(x)))

    x, y = clouds(1500, seed=11)
    xv, yv = clouds(400, seed=12)
    loader = cycle(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        pts, label = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pts), label)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(xv).argmax(1) != yv).float().mean()
        model.train()
        return float(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def unfreeze_without_param_group_bad():
    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self, n_out):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(),
                nn.AdaptiveAvgPool2d(3), nn.Flatten(),
            )
            self.head = nn.Linear(288, n_out)

        def forward(self, x):
            return self.head(self.backbone(x))

    x, _, cls, box = shapes(2048, seed=13, noise=0.1)
    xv, _, cv, _ = shapes(400, seed=14, noise=0.1)
    side = (box[:, 0] > 0.5).long()
    model = Net(2)
    pre = torch.optim.Adam(model.parameters(), lr=2e-3)
    for k in range(40):
        j = torch.arange(32 * (k % 32), 32 * (k % 32) + 32)
        pre.zero_grad()
        F.cross_entropy(model(x[j]), side[j]).backward()
        pre.step()

    model.head = nn.Linear(288, 2)
    for p in model.backbone.parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    loader = cycle(DataLoader(TensorDataset(x, cls), batch_size=32, shuffle=True, drop_last=True))
    warmup_steps = 5

    def step(i):
        model.train()
        if i == warmup_steps:
            for p in model.backbone.parameters():
                p.requires_grad = True
        img, label = next(loader)
        loss = F.cross_entropy(model(img), label)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(xv).argmax(1) != cv).float().mean()
        model.train()
        return float(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def unfreeze_without_param_group_good():
    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self, n_out):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(),
                nn.AdaptiveAvgPool2d(3), nn.Flatten(),
            )
            self.head = nn.Linear(288, n_out)

        def forward(self, x):
            return self.head(self.backbone(x))

    x, _, cls, box = shapes(2048, seed=13, noise=0.1)
    xv, _, cv, _ = shapes(400, seed=14, noise=0.1)
    side = (box[:, 0] > 0.5).long()
    model = Net(2)
    pre = torch.optim.Adam(model.parameters(), lr=2e-3)
    for k in range(40):
        j = torch.arange(32 * (k % 32), 32 * (k % 32) + 32)
        pre.zero_grad()
        F.cross_entropy(model(x[j]), side[j]).backward()
        pre.step()

    model.head = nn.Linear(288, 2)
    for p in model.backbone.parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    loader = cycle(DataLoader(TensorDataset(x, cls), batch_size=32, shuffle=True, drop_last=True))
    warmup_steps = 5

    def step(i):
        model.train()
        if i == warmup_steps:
            for p in model.backbone.parameters():
                p.requires_grad = True
            optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": 2e-3})
        img, label = next(loader)
        loss = F.cross_entropy(model(img), label)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(xv).argmax(1) != cv).float().mean()
        model.train()
        return float(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gnn_gate_and_branch_zero_bad():
    torch.manual_seed(0)
    class ResGraphBlock(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.lin1 = nn.Linear(2 * dim, dim)
            self.lin2 = nn.Linear(dim, dim)
            nn.init.zeros_(self.lin2.weight)
            nn.init.zeros_(self.lin2.bias)
            self.gate = nn.Parameter(torch.zeros(dim))

        def forward(self, x, adj):
            h = torch.cat([x, adj @ x], -1)
            return x + self.gate * self.lin2(F.relu(self.lin1(h)))

    class GraphNet(nn.Module):
        def __init__(self, n_in, dim=32, n_classes=3):
            super().__init__()
            self.embed = nn.Linear(n_in, dim)
            self.blocks = nn.ModuleList(ResGraphBlock(dim) for _ in range(2))
            self.out = nn.Linear(dim, n_classes)

        def forward(self, x, adj):
            x = F.relu(self.embed(x))
            for block in self.blocks:
                x = block(x, adj)
            return self.out(x)

    g = torch.Generator().manual_seed(15)
    n = 900
    y = torch.randint(0, 3, (n,), generator=g)
    link = torch.where(y[:, None] == y[None, :], 0.03, 0.006)
    A = (torch.rand(n, n, generator=g) < link).float().triu(1)
    A = A + A.t()
    adj = A / A.sum(1, keepdim=True).clamp(min=1)
    x = 0.5 * F.one_hot(y, 3).float() @ torch.randn(3, 12, generator=g) + torch.randn(n, 12, generator=g)
    is_train = torch.arange(n) < 600

    net = GraphNet(12)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, weight_decay=5e-4)

    def step(i):
        net.train()
        optimizer.zero_grad()
        logits = net(x, adj)
        loss = F.cross_entropy(logits[is_train], y[is_train])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            err = (net(x, adj).argmax(1) != y)[~is_train].float().mean()
        net.train()
        return float(err)

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gnn_gate_and_branch_zero_good():
    torch.manual_seed(0)
    class ResGraphBlock(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.lin1 = nn.Linear(2 * dim, dim)
            self.lin2 = nn.Linear(dim, dim)
            nn.init.zeros_(self.lin2.weight)
            nn.init.zeros_(self.lin2.bias)
            self.gate = nn.Parameter(torch.ones(dim))

        def forward(self, x, adj):
            h = torch.cat([x, adj @ x], -1)
            return x + self.gate * self.lin2(F.relu(self.lin1(h)))

    class GraphNet(nn.Module):
        def __init__(self, n_in, dim=32, n_classes=3):
            super().__init__()
            self.embed = nn.Linear(n_in, dim)
            self.blocks = nn.ModuleList(ResGraphBlock(dim) for _ in range(2))
            self.out = nn.Linear(dim, n_classes)

        def forward(self, x, adj):
            x = F.relu(self.embed(x))
            for block in self.blocks:
                x = block(x, adj)
            return self.out(x)

    g = torch.Generator().manual_seed(15)
    n = 900
    y = torch.randint(0, 3, (n,), generator=g)
    link = torch.where(y[:, None] == y[None, :], 0.03, 0.006)
    A = (torch.rand(n, n, generator=g) < link).float().triu(1)
    A = A + A.t()
    adj = A / A.sum(1, keepdim=True).clamp(min=1)
    x = 0.5 * F.one_hot(y, 3).float() @ torch.randn(3, 12, generator=g) + torch.randn(n, 12, generator=g)
    is_train = torch.arange(n) < 600

    net = GraphNet(12)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, weight_decay=5e-4)

    def step(i):
        net.train()
        optimizer.zero_grad()
        logits = net(x, adj)
        loss = F.cross_entropy(logits[is_train], y[is_train])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            err = (net(x, adj).argmax(1) != y)[~is_train].float().mean()
        net.train()
        return float(err)

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def video_state_detached_every_frame_bad():
    torch.manual_seed(0)
    class ClipRNN(nn.Module):
        def __init__(self, hidden=48, n_classes=4):
            super().__init__()
            self.cnn = nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
                nn.Linear(16 * 9, 32), nn.ReLU(),
            )
            self.cell = nn.GRUCell(32, hidden)
            self.fc = nn.Linear(hidden, n_classes)
            self.hidden = hidden

        def forward(self, clip):
            h = clip.new_zeros(clip.size(0), self.hidden)
            for t in range(clip.size(1)):
                feat = self.cnn(clip[:, t])
                h = self.cell(feat, h.detach())
            return self.fc(h)

    g = torch.Generator().manual_seed(16)

    def clips(n, T=6, size=12):
        y = torch.randint(0, 4, (n,), generator=g)
        v = 0.4 * torch.randn(n, T, 1, size, size, generator=g)
        for b in range(n):
            r, c = 6 * (int(y[b]) // 2), 6 * (int(y[b]) % 2)
            v[b, :2, 0, r + 1:r + 5, c + 1:c + 5] += 1.0
            for t in range(2, T):
                k = int(torch.randint(0, 4, (1,), generator=g))
                v[b, t, 0, 6 * (k // 2) + 2:6 * (k // 2) + 4, 6 * (k % 2):6 * (k % 2) + 6] -= 1.0
        return v, y

    x, y = clips(800)
    xv, yv = clips(300)
    loader = cycle(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = ClipRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        clip, label = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(clip), label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(xv).argmax(1) != yv).float().mean()
        model.train()
        return float(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def video_state_detached_every_frame_good():
    torch.manual_seed(0)
    class ClipRNN(nn.Module):
        def __init__(self, hidden=48, n_classes=4):
            super().__init__()
            self.cnn = nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
                nn.Linear(16 * 9, 32), nn.ReLU(),
            )
            self.cell = nn.GRUCell(32, hidden)
            self.fc = nn.Linear(hidden, n_classes)
            self.hidden = hidden

        def forward(self, clip):
            h = clip.new_zeros(clip.size(0), self.hidden)
            for t in range(clip.size(1)):
                feat = self.cnn(clip[:, t])
                h = self.cell(feat, h)
            return self.fc(h)

    g = torch.Generator().manual_seed(16)

    def clips(n, T=6, size=12):
        y = torch.randint(0, 4, (n,), generator=g)
        v = 0.4 * torch.randn(n, T, 1, size, size, generator=g)
        for b in range(n):
            r, c = 6 * (int(y[b]) // 2), 6 * (int(y[b]) % 2)
            v[b, :2, 0, r + 1:r + 5, c + 1:c + 5] += 1.0
            for t in range(2, T):
                k = int(torch.randint(0, 4, (1,), generator=g))
                v[b, t, 0, 6 * (k // 2) + 2:6 * (k // 2) + 4, 6 * (k % 2):6 * (k % 2) + 6] -= 1.0
        return v, y

    x, y = clips(800)
    xv, yv = clips(300)
    loader = cycle(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = ClipRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        clip, label = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(clip), label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(xv).argmax(1) != yv).float().mean()
        model.train()
        return float(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tabular_weights_in_bfloat16_bad():
    torch.manual_seed(0)
    class TabMLP(nn.Module):
        def __init__(self, n_num, cards, emb=4, hidden=96):
            super().__init__()
            self.embs = nn.ModuleList(nn.Embedding(c, emb) for c in cards)
            self.net = nn.Sequential(
                nn.Linear(n_num + emb * len(cards), hidden), nn.ReLU(),
                nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1),
            )

        def forward(self, num, cat):
            e = [emb(cat[:, k]) for k, emb in enumerate(self.embs)]
            return self.net(torch.cat([num.to(e[0].dtype)] + e, 1)).squeeze(1)

    g = torch.Generator().manual_seed(17)
    N, cards = 5000, (6, 10)
    num = torch.randn(N, 6, generator=g)
    cat = torch.stack([torch.randint(0, c, (N,), generator=g) for c in cards], 1)
    eff = [torch.randn(c, generator=g) for c in cards]
    price = num[:, 0] * eff[0][cat[:, 0]] + eff[1][cat[:, 1]] + torch.sin(2 * num[:, 1]) + 0.3 * torch.randn(N, generator=g)
    price = (price - price.mean()) / price.std()
    tr, va = slice(0, 4200), slice(4200, N)
    loader = cycle(DataLoader(TensorDataset(num[tr], cat[tr], price[tr]), batch_size=128, shuffle=True))
    model = TabMLP(6, cards).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-4)

    def step(i):
        model.train()
        xb, cb, yb = next(loader)
        pred = model(xb, cb)
        loss = F.mse_loss(pred.float(), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            mse = F.mse_loss(model(num[va], cat[va]).float(), price[va])
        model.train()
        return float(mse)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tabular_weights_in_bfloat16_good():
    torch.manual_seed(0)
    class TabMLP(nn.Module):
        def __init__(self, n_num, cards, emb=4, hidden=96):
            super().__init__()
            self.embs = nn.ModuleList(nn.Embedding(c, emb) for c in cards)
            self.net = nn.Sequential(
                nn.Linear(n_num + emb * len(cards), hidden), nn.ReLU(),
                nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1),
            )

        def forward(self, num, cat):
            e = [emb(cat[:, k]) for k, emb in enumerate(self.embs)]
            return self.net(torch.cat([num.to(e[0].dtype)] + e, 1)).squeeze(1)

    g = torch.Generator().manual_seed(17)
    N, cards = 5000, (6, 10)
    num = torch.randn(N, 6, generator=g)
    cat = torch.stack([torch.randint(0, c, (N,), generator=g) for c in cards], 1)
    eff = [torch.randn(c, generator=g) for c in cards]
    price = num[:, 0] * eff[0][cat[:, 0]] + eff[1][cat[:, 1]] + torch.sin(2 * num[:, 1]) + 0.3 * torch.randn(N, generator=g)
    price = (price - price.mean()) / price.std()
    tr, va = slice(0, 4200), slice(4200, N)
    loader = cycle(DataLoader(TensorDataset(num[tr], cat[tr], price[tr]), batch_size=128, shuffle=True))
    model = TabMLP(6, cards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-4)

    def step(i):
        model.train()
        xb, cb, yb = next(loader)
        pred = model(xb, cb)
        loss = F.mse_loss(pred.float(), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            mse = F.mse_loss(model(num[va], cat[va]).float(), price[va])
        model.train()
        return float(mse)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lambda_lr_returns_absolute_rate_bad():
    torch.manual_seed(0)
    class KeywordNet(nn.Module):
        def __init__(self, n_classes=5):
            super().__init__()
            self.conv1 = nn.Conv1d(1, 16, 16, stride=4, padding=6)
            self.conv2 = nn.Conv1d(16, 32, 8, stride=4, padding=2)
            self.conv3 = nn.Conv1d(32, 32, 3, padding=1)
            self.fc = nn.Linear(32, n_classes)

        def forward(self, wav):
            h = F.relu(self.conv1(wav.unsqueeze(1)))
            h = F.relu(self.conv2(h))
            h = F.relu(self.conv3(h))
            return self.fc(h.mean(-1))

    g = torch.Generator().manual_seed(18)
    freqs = torch.tensor([0.12, 0.2, 0.31, 0.45, 0.62])

    def tones(n, length=320):
        y = torch.randint(0, 5, (n,), generator=g)
        t = torch.arange(length).float()
        phase = 6.28 * torch.rand(n, 1, generator=g)
        w = torch.sin(freqs[y][:, None] * t * (1 + 0.05 * torch.randn(n, 1, generator=g)) + phase)
        return w + 0.7 * torch.randn(n, length, generator=g), y

    x, y = tones(1200)
    xv, yv = tones(400)
    loader = cycle(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = KeywordNet()
    base_lr, warmup, total = 2e-3, 10, 400
    optimizer = torch.optim.Adam(model.parameters(), lr=base_lr)

    def schedule(it):
        if it < warmup:
            return base_lr * (it + 1) / warmup
        return base_lr * 0.5 * (1 + math.cos(math.pi * min(1.0, (it - warmup) / (total - warmup))))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    def step(i):
        model.train()
        wav, label = next(loader)
        loss = F.cross_entropy(model(wav), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(xv).argmax(1) != yv).float().mean()
        model.train()
        return float(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lambda_lr_returns_absolute_rate_good():
    torch.manual_seed(0)
    class KeywordNet(nn.Module):
        def __init__(self, n_classes=5):
            super().__init__()
            self.conv1 = nn.Conv1d(1, 16, 16, stride=4, padding=6)
            self.conv2 = nn.Conv1d(16, 32, 8, stride=4, padding=2)
            self.conv3 = nn.Conv1d(32, 32, 3, padding=1)
            self.fc = nn.Linear(32, n_classes)

        def forward(self, wav):
            h = F.relu(self.conv1(wav.unsqueeze(1)))
            h = F.relu(self.conv2(h))
            h = F.relu(self.conv3(h))
            return self.fc(h.mean(-1))

    g = torch.Generator().manual_seed(18)
    freqs = torch.tensor([0.12, 0.2, 0.31, 0.45, 0.62])

    def tones(n, length=320):
        y = torch.randint(0, 5, (n,), generator=g)
        t = torch.arange(length).float()
        phase = 6.28 * torch.rand(n, 1, generator=g)
        w = torch.sin(freqs[y][:, None] * t * (1 + 0.05 * torch.randn(n, 1, generator=g)) + phase)
        return w + 0.7 * torch.randn(n, length, generator=g), y

    x, y = tones(1200)
    xv, yv = tones(400)
    loader = cycle(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = KeywordNet()
    base_lr, warmup, total = 2e-3, 10, 400
    optimizer = torch.optim.Adam(model.parameters(), lr=base_lr)

    def schedule(it):
        if it < warmup:
            return (it + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (it - warmup) / (total - warmup))))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    def step(i):
        model.train()
        wav, label = next(loader)
        loss = F.cross_entropy(model(wav), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(xv).argmax(1) != yv).float().mean()
        model.train()
        return float(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def graph_batch_without_offset_bad():
    torch.manual_seed(0)
    class MolNet(nn.Module):
        def __init__(self, n_in=5, dim=32):
            super().__init__()
            self.inp = nn.Linear(n_in, dim)
            self.msg = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
            self.upd = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(2))
            self.out = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 1))

        def forward(self, x, edge_index, batch, n_graphs):
            h = F.relu(self.inp(x))
            src, dst = edge_index
            for msg, upd in zip(self.msg, self.upd):
                agg = torch.zeros_like(h).index_add(0, dst, msg(h)[src])
                h = h + F.relu(upd(torch.cat([h, agg], 1)))
            pooled = h.new_zeros(n_graphs, h.size(1)).index_add(0, batch, h)
            count = torch.bincount(batch, minlength=n_graphs).unsqueeze(1)
            return self.out(pooled / count).squeeze(1)

    g = torch.Generator().manual_seed(21)
    charge = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])

    def molecule():
        n = int(torch.randint(6, 12, (1,), generator=g))
        kind = torch.randint(0, 5, (n,), generator=g)
        a = (torch.rand(n, n, generator=g) < 0.3).triu(1)
        a = a | a.t()
        q = charge[kind]
        energy = (a * q[:, None] * q[None, :]).sum() / n
        return F.one_hot(kind, 5).float(), a.nonzero().t(), energy * 2

    def collate(mols):
        xs, edges, batch, targets, offset = [], [], [], [], 0
        for k, (x, e, t) in enumerate(mols):
            xs.append(x)
            edges.append(e)
            batch.append(torch.full((len(x),), k))
            targets.append(t)
            offset += len(x)
        return torch.cat(xs), torch.cat(edges, 1), torch.cat(batch), torch.stack(targets)

    train_set = [molecule() for _ in range(800)]
    test_set = [molecule() for _ in range(200)]
    loader = cycle(DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True, collate_fn=collate))
    model = MolNet()
    peak = 3e-3
    optimizer = torch.optim.Adam(model.parameters(), lr=peak)

    def lr_at(i):
        return peak * min((i + 1) / 8, (8 / (i + 1)) ** 0.25)

    def step(i):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = lr_at(i)
        x, e, b, t = next(loader)
        loss = F.mse_loss(model(x, e, b, len(t)), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        total = 0.0
        with torch.no_grad():
            for x, e, t in test_set:
                total += float((model(x, e, torch.zeros(len(x), dtype=torch.long), 1)[0] - t) ** 2)
        model.train()
        return total / len(test_set)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def graph_batch_without_offset_good():
    torch.manual_seed(0)
    class MolNet(nn.Module):
        def __init__(self, n_in=5, dim=32):
            super().__init__()
            self.inp = nn.Linear(n_in, dim)
            self.msg = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
            self.upd = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(2))
            self.out = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 1))

        def forward(self, x, edge_index, batch, n_graphs):
            h = F.relu(self.inp(x))
            src, dst = edge_index
            for msg, upd in zip(self.msg, self.upd):
                agg = torch.zeros_like(h).index_add(0, dst, msg(h)[src])
                h = h + F.relu(upd(torch.cat([h, agg], 1)))
            pooled = h.new_zeros(n_graphs, h.size(1)).index_add(0, batch, h)
            count = torch.bincount(batch, minlength=n_graphs).unsqueeze(1)
            return self.out(pooled / count).squeeze(1)

    g = torch.Generator().manual_seed(21)
    charge = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])

    def molecule():
        n = int(torch.randint(6, 12, (1,), generator=g))
        kind = torch.randint(0, 5, (n,), generator=g)
        a = (torch.rand(n, n, generator=g) < 0.3).triu(1)
        a = a | a.t()
        q = charge[kind]
        energy = (a * q[:, None] * q[None, :]).sum() / n
        return F.one_hot(kind, 5).float(), a.nonzero().t(), energy * 2

    def collate(mols):
        xs, edges, batch, targets, offset = [], [], [], [], 0
        for k, (x, e, t) in enumerate(mols):
            xs.append(x)
            edges.append(e + offset)
            batch.append(torch.full((len(x),), k))
            targets.append(t)
            offset += len(x)
        return torch.cat(xs), torch.cat(edges, 1), torch.cat(batch), torch.stack(targets)

    train_set = [molecule() for _ in range(800)]
    test_set = [molecule() for _ in range(200)]
    loader = cycle(DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True, collate_fn=collate))
    model = MolNet()
    peak = 3e-3
    optimizer = torch.optim.Adam(model.parameters(), lr=peak)

    def lr_at(i):
        return peak * min((i + 1) / 8, (8 / (i + 1)) ** 0.25)

    def step(i):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = lr_at(i)
        x, e, b, t = next(loader)
        loss = F.mse_loss(model(x, e, b, len(t)), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        total = 0.0
        with torch.no_grad():
            for x, e, t in test_set:
                total += float((model(x, e, torch.zeros(len(x), dtype=torch.long), 1)[0] - t) ** 2)
        model.train()
        return total / len(test_set)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def video_transformer_not_batch_first_bad():
    torch.manual_seed(0)
    class ViViTSmall(nn.Module):
        def __init__(self, frame_dim=64, T=8, dim=32, n_classes=4):
            super().__init__()
            self.patch = nn.Linear(frame_dim, dim)
            self.cls = nn.Parameter(0.02 * torch.randn(1, 1, dim))
            self.pos = nn.Parameter(0.02 * torch.randn(1, T + 1, dim))
            layer = nn.TransformerEncoderLayer(dim, 4, dim_feedforward=64, dropout=0.0)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.fc = nn.Linear(dim, n_classes)

        def forward(self, clip):
            tok = self.patch(clip.flatten(2))
            tok = torch.cat([self.cls.expand(len(tok), -1, -1), tok], 1) + self.pos
            return self.fc(self.encoder(tok)[:, 0])

    g = torch.Generator().manual_seed(22)

    def events(n, T=8, size=8):
        y = torch.randint(0, 4, (n,), generator=g)
        when = torch.randint(0, T, (n,), generator=g)
        v = 0.5 * torch.randn(n, T, size, size, generator=g)
        flash = torch.zeros(n, size, size)
        for k in range(4):
            r, c = 4 * (k // 2), 4 * (k % 2)
            flash[y == k, r:r + 4, c:c + 4] = 1.5
        v[torch.arange(n), when] += flash
        return v, y

    xv, yv = events(400)
    model = ViViTSmall()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step(i):
        model.train()
        clip, label = events(64)
        loss = F.cross_entropy(model(clip), label)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(xv).argmax(1) != yv).float().mean()
        model.train()
        return float(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def video_transformer_not_batch_first_good():
    torch.manual_seed(0)
    class ViViTSmall(nn.Module):
        def __init__(self, frame_dim=64, T=8, dim=32, n_classes=4):
            super().__init__()
            self.patch = nn.Linear(frame_dim, dim)
            self.cls = nn.Parameter(0.02 * torch.randn(1, 1, dim))
            self.pos = nn.Parameter(0.02 * torch.randn(1, T + 1, dim))
            layer = nn.TransformerEncoderLayer(dim, 4, dim_feedforward=64, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.fc = nn.Linear(dim, n_classes)

        def forward(self, clip):
            tok = self.patch(clip.flatten(2))
            tok = torch.cat([self.cls.expand(len(tok), -1, -1), tok], 1) + self.pos
            return self.fc(self.encoder(tok)[:, 0])

    g = torch.Generator().manual_seed(22)

    def events(n, T=8, size=8):
        y = torch.randint(0, 4, (n,), generator=g)
        when = torch.randint(0, T, (n,), generator=g)
        v = 0.5 * torch.randn(n, T, size, size, generator=g)
        flash = torch.zeros(n, size, size)
        for k in range(4):
            r, c = 4 * (k // 2), 4 * (k % 2)
            flash[y == k, r:r + 4, c:c + 4] = 1.5
        v[torch.arange(n), when] += flash
        return v, y

    xv, yv = events(400)
    model = ViViTSmall()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step(i):
        model.train()
        clip, label = events(64)
        loss = F.cross_entropy(model(clip), label)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(xv).argmax(1) != yv).float().mean()
        model.train()
        return float(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_without_stop_gradient_bad():
    torch.manual_seed(0)
    class SimSiam(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
                nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, dim, bias=False), nn.BatchNorm1d(dim, affine=False),
            )
            self.predictor = nn.Sequential(nn.Linear(dim, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, dim))

        def forward(self, x):
            z = self.encoder(x)
            return self.predictor(z), z

    def augment(x):
        flip = torch.rand(len(x), 1, 1, 1) < 0.5
        x = torch.where(flip, x.flip(-1), x)
        gain = 0.8 + 0.4 * torch.rand(len(x), 3, 1, 1)
        return x * gain + 0.2 * torch.randn_like(x)

    def neg_cos(p, z):
        return -F.cosine_similarity(p, z, dim=1).mean()

    x = shapes(1024, seed=23, noise=0.1)[0]
    xv = shapes(256, seed=24, noise=0.1)[0]
    loader = cycle(DataLoader(x, batch_size=64, shuffle=True, drop_last=True))
    model = SimSiam()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        img = next(loader)
        p1, z1 = model(augment(img))
        p2, z2 = model(augment(img))
        loss = 0.5 * neg_cos(p1, z2) + 0.5 * neg_cos(p2, z1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            z = F.normalize(model(xv)[1], dim=1)
        model.train()
        var = torch.linalg.svdvals(z - z.mean(0)) ** 2
        var = var / var.sum()
        return float((var * (var + 1e-9).log()).sum().exp())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_without_stop_gradient_good():
    torch.manual_seed(0)
    class SimSiam(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
                nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, dim, bias=False), nn.BatchNorm1d(dim, affine=False),
            )
            self.predictor = nn.Sequential(nn.Linear(dim, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, dim))

        def forward(self, x):
            z = self.encoder(x)
            return self.predictor(z), z

    def augment(x):
        flip = torch.rand(len(x), 1, 1, 1) < 0.5
        x = torch.where(flip, x.flip(-1), x)
        gain = 0.8 + 0.4 * torch.rand(len(x), 3, 1, 1)
        return x * gain + 0.2 * torch.randn_like(x)

    def neg_cos(p, z):
        return -F.cosine_similarity(p, z.detach(), dim=1).mean()

    x = shapes(1024, seed=23, noise=0.1)[0]
    xv = shapes(256, seed=24, noise=0.1)[0]
    loader = cycle(DataLoader(x, batch_size=64, shuffle=True, drop_last=True))
    model = SimSiam()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        img = next(loader)
        p1, z1 = model(augment(img))
        p2, z2 = model(augment(img))
        loss = 0.5 * neg_cos(p1, z2) + 0.5 * neg_cos(p2, z1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            z = F.normalize(model(xv)[1], dim=1)
        model.train()
        var = torch.linalg.svdvals(z - z.mean(0)) ** 2
        var = var / var.sum()
        return float((var * (var + 1e-9).log()).sum().exp())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def multitask_heads_are_one_module_bad():
    torch.manual_seed(0)
    class MultiTask(nn.Module):
        def __init__(self, n_in, n_tasks, hidden=64):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.heads = nn.ModuleList([nn.Linear(hidden, 1)] * n_tasks)

        def forward(self, x):
            h = self.trunk(x)
            return [head(h).squeeze(1) for head in self.heads]

    g = torch.Generator().manual_seed(25)
    X = torch.randn(4000, 10, generator=g)
    W = torch.randn(10, 4, generator=g) / math.sqrt(10)
    Y = torch.tanh(X @ W) + 0.3 * X[:, :4] * X[:, 4:8] + 0.1 * torch.randn(4000, 4, generator=g)
    Y = (Y - Y.mean(0)) / Y.std(0)
    loader = cycle(DataLoader(TensorDataset(X[:3400], Y[:3400]), batch_size=64, shuffle=True, drop_last=True))
    Xv, Yv = X[3400:], Y[3400:]
    model = MultiTask(10, 4)
    opt_trunk = torch.optim.Adam(model.trunk.parameters(), lr=1e-3)
    opt_heads = torch.optim.Adam(model.heads.parameters(), lr=3e-3)
    loss_fn = nn.MSELoss()

    def step(i):
        model.train()
        xb, yb = next(loader)
        preds = model(xb)
        losses = [loss_fn(p, yb[:, k]) for k, p in enumerate(preds)]
        loss = torch.stack(losses).mean()
        opt_trunk.zero_grad()
        opt_heads.zero_grad()
        loss.backward()
        opt_trunk.step()
        opt_heads.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            mse = F.mse_loss(torch.stack(model(Xv), 1), Yv)
        model.train()
        return float(mse)

    return {"model": model, "optimizer": [opt_trunk, opt_heads], "steps": 20, "step": step, "probe": probe}


def multitask_heads_are_one_module_good():
    torch.manual_seed(0)
    class MultiTask(nn.Module):
        def __init__(self, n_in, n_tasks, hidden=64):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.heads = nn.ModuleList([nn.Linear(hidden, 1) for _ in range(n_tasks)])

        def forward(self, x):
            h = self.trunk(x)
            return [head(h).squeeze(1) for head in self.heads]

    g = torch.Generator().manual_seed(25)
    X = torch.randn(4000, 10, generator=g)
    W = torch.randn(10, 4, generator=g) / math.sqrt(10)
    Y = torch.tanh(X @ W) + 0.3 * X[:, :4] * X[:, 4:8] + 0.1 * torch.randn(4000, 4, generator=g)
    Y = (Y - Y.mean(0)) / Y.std(0)
    loader = cycle(DataLoader(TensorDataset(X[:3400], Y[:3400]), batch_size=64, shuffle=True, drop_last=True))
    Xv, Yv = X[3400:], Y[3400:]
    model = MultiTask(10, 4)
    opt_trunk = torch.optim.Adam(model.trunk.parameters(), lr=1e-3)
    opt_heads = torch.optim.Adam(model.heads.parameters(), lr=3e-3)
    loss_fn = nn.MSELoss()

    def step(i):
        model.train()
        xb, yb = next(loader)
        preds = model(xb)
        losses = [loss_fn(p, yb[:, k]) for k, p in enumerate(preds)]
        loss = torch.stack(losses).mean()
        opt_trunk.zero_grad()
        opt_heads.zero_grad()
        loss.backward()
        opt_trunk.step()
        opt_heads.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            mse = F.mse_loss(torch.stack(model(Xv), 1), Yv)
        model.train()
        return float(mse)

    return {"model": model, "optimizer": [opt_trunk, opt_heads], "steps": 20, "step": step, "probe": probe}


def cloud_max_over_channels_bad():
    torch.manual_seed(0)
    class CloudClassifier(nn.Module):
        def __init__(self, n_feat=64, n_classes=4):
            super().__init__()
            self.local = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, n_feat), nn.ReLU(), nn.Linear(n_feat, n_feat))
            self.classify = nn.Sequential(nn.Linear(n_feat, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, n_classes))

        def forward(self, pts):
            feat = self.local(pts)
            code, _ = torch.max(feat, dim=2)
            return self.classify(code)

    x, y = clouds(1500, points=64, seed=26)
    xv, yv = clouds(400, points=64, seed=27)

    class Clouds(Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, k):
            a = torch.rand(1) * 2 * math.pi
            c, s, o = torch.cos(a), torch.sin(a), torch.zeros(1)
            rot = torch.stack([torch.cat([c, -s, o]), torch.cat([s, c, o]), torch.tensor([0.0, 0.0, 1.0])])
            return x[k] @ rot.t(), y[k]

    loader = cycle(DataLoader(Clouds(), batch_size=32, shuffle=True, drop_last=True))
    model = CloudClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)

    def step(i):
        model.train()
        pts, label = next(loader)
        loss = F.cross_entropy(model(pts), label, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(xv).argmax(1) != yv).float().mean()
        model.train()
        return float(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cloud_max_over_channels_good():
    torch.manual_seed(0)
    class CloudClassifier(nn.Module):
        def __init__(self, n_feat=64, n_classes=4):
            super().__init__()
            self.local = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, n_feat), nn.ReLU(), nn.Linear(n_feat, n_feat))
            self.classify = nn.Sequential(nn.Linear(n_feat, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, n_classes))

        def forward(self, pts):
            feat = self.local(pts)
            code, _ = torch.max(feat, dim=1)
            return self.classify(code)

    x, y = clouds(1500, points=64, seed=26)
    xv, yv = clouds(400, points=64, seed=27)

    class Clouds(Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, k):
            a = torch.rand(1) * 2 * math.pi
            c, s, o = torch.cos(a), torch.sin(a), torch.zeros(1)
            rot = torch.stack([torch.cat([c, -s, o]), torch.cat([s, c, o]), torch.tensor([0.0, 0.0, 1.0])])
            return x[k] @ rot.t(), y[k]

    loader = cycle(DataLoader(Clouds(), batch_size=32, shuffle=True, drop_last=True))
    model = CloudClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)

    def step(i):
        model.train()
        pts, label = next(loader)
        loss = F.cross_entropy(model(pts), label, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(xv).argmax(1) != yv).float().mean()
        model.train()
        return float(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def flip_drawn_twice_bad():
    torch.manual_seed(0)
    class FCN(nn.Module):
        def __init__(self, n_classes=3):
            super().__init__()
            self.down = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
                nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(24, 32, 3, padding=2, dilation=2), nn.ReLU(),
            )
            self.score = nn.Conv2d(32, n_classes, 1)
            self.up = nn.ConvTranspose2d(n_classes, n_classes, 4, stride=2, padding=1)

        def forward(self, x):
            return self.up(self.score(self.down(x)))

    imgs, masks, _, _ = shapes(400, seed=31, noise=0.2)
    xv, mv, _, _ = shapes(128, seed=32, noise=0.2)

    class SegData(Dataset):
        def __len__(self):
            return len(imgs)

        def __getitem__(self, k):
            img, mask = imgs[k], masks[k]
            if torch.rand(1) < 0.5:
                img = img.flip(-1)
            if torch.rand(1) < 0.5:
                mask = mask.flip(-1)
            return img, mask

    loader = cycle(DataLoader(SegData(), batch_size=16, shuffle=True, drop_last=True))
    model = FCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        img, mask = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(img), mask)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            pred = model(xv).argmax(1)
        model.train()
        ious = [((pred == k) & (mv == k)).sum() / ((pred == k) | (mv == k)).sum().clamp(min=1) for k in range(3)]
        return 1 - float(torch.stack(ious).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def flip_drawn_twice_good():
    torch.manual_seed(0)
    class FCN(nn.Module):
        def __init__(self, n_classes=3):
            super().__init__()
            self.down = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
                nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(24, 32, 3, padding=2, dilation=2), nn.ReLU(),
            )
            self.score = nn.Conv2d(32, n_classes, 1)
            self.up = nn.ConvTranspose2d(n_classes, n_classes, 4, stride=2, padding=1)

        def forward(self, x):
            return self.up(self.score(self.down(x)))

    imgs, masks, _, _ = shapes(400, seed=31, noise=0.2)
    xv, mv, _, _ = shapes(128, seed=32, noise=0.2)

    class SegData(Dataset):
        def __len__(self):
            return len(imgs)

        def __getitem__(self, k):
            img, mask = imgs[k], masks[k]
            if torch.rand(1) < 0.5:
                img = img.flip(-1)
                mask = mask.flip(-1)
            return img, mask

    loader = cycle(DataLoader(SegData(), batch_size=16, shuffle=True, drop_last=True))
    model = FCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        img, mask = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(img), mask)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            pred = model(xv).argmax(1)
        model.train()
        ious = [((pred == k) & (mv == k)).sum() / ((pred == k) | (mv == k)).sum().clamp(min=1) for k in range(3)]
        return 1 - float(torch.stack(ious).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def denoise_target_aliases_input_bad():
    torch.manual_seed(0)
    class DnCNN(nn.Module):
        def __init__(self, width=16, depth=4):
            super().__init__()
            layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
            for _ in range(depth - 2):
                layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
            layers.append(nn.Conv2d(width, 3, 3, padding=1))
            self.body = nn.Sequential(*layers)

        def forward(self, x):
            return x - self.body(x)

    sigma = 0.4
    clean_all = shapes(512, seed=33, noise=0.0)[0]
    val_clean = shapes(100, seed=34, noise=0.0)[0]
    val_noisy = val_clean + sigma * torch.randn(val_clean.shape, generator=torch.Generator().manual_seed(35))
    loader = cycle(DataLoader(clean_all, batch_size=16, shuffle=True, drop_last=True))
    net = DnCNN()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        net.train()
        clean = next(loader)
        noisy = clean
        noisy += sigma * torch.randn_like(clean)
        restored = net(noisy)
        loss = F.mse_loss(restored, clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            mse = F.mse_loss(net(val_noisy), val_clean)
        net.train()
        return float(mse / F.mse_loss(val_noisy, val_clean))

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def denoise_target_aliases_input_good():
    torch.manual_seed(0)
    class DnCNN(nn.Module):
        def __init__(self, width=16, depth=4):
            super().__init__()
            layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
            for _ in range(depth - 2):
                layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
            layers.append(nn.Conv2d(width, 3, 3, padding=1))
            self.body = nn.Sequential(*layers)

        def forward(self, x):
            return x - self.body(x)

    sigma = 0.4
    clean_all = shapes(512, seed=33, noise=0.0)[0]
    val_clean = shapes(100, seed=34, noise=0.0)[0]
    val_noisy = val_clean + sigma * torch.randn(val_clean.shape, generator=torch.Generator().manual_seed(35))
    loader = cycle(DataLoader(clean_all, batch_size=16, shuffle=True, drop_last=True))
    net = DnCNN()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        net.train()
        clean = next(loader)
        noisy = clean.clone()
        noisy += sigma * torch.randn_like(clean)
        restored = net(noisy)
        loss = F.mse_loss(restored, clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            mse = F.mse_loss(net(val_noisy), val_clean)
        net.train()
        return float(mse / F.mse_loss(val_noisy, val_clean))

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mean_teacher_ema_rebinds_name_bad():
    torch.manual_seed(0)
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, x):
            return self.net(x)

    g = torch.Generator().manual_seed(36)
    means = 0.9 * torch.randn(4, 20, generator=g)

    def draw(n):
        y = torch.randint(0, 4, (n,), generator=g)
        return means[y] + torch.randn(n, 20, generator=g), y

    xl, yl = draw(120)
    xu, _ = draw(3000)
    xv, yv = draw(800)
    student = Classifier()
    teacher = copy.deepcopy(student)
    for p in teacher.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    lab = cycle(DataLoader(TensorDataset(xl, yl), batch_size=24, shuffle=True))
    unl = cycle(DataLoader(xu, batch_size=64, shuffle=True, drop_last=True))
    decay, weight = 0.97, 4.0

    def update_teacher():
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters()):
                t = decay * t + (1 - decay) * s

    def step(i):
        student.train()
        (xb, yb), ub = next(lab), next(unl)
        supervised = F.cross_entropy(student(xb), yb)
        with torch.no_grad():
            target = teacher(ub + 0.2 * torch.randn_like(ub)).softmax(1)
        consistency = F.mse_loss(student(ub + 0.2 * torch.randn_like(ub)).softmax(1), target)
        loss = supervised + weight * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_teacher()
        return loss.item()

    def probe():
        student.eval()
        with torch.no_grad():
            errs = [(m(xv).argmax(1) != yv).float().mean() for m in (student, teacher)]
        student.train()
        return float(sum(errs) / 2)

    return {"model": [student, teacher], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mean_teacher_ema_rebinds_name_good():
    torch.manual_seed(0)
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, x):
            return self.net(x)

    g = torch.Generator().manual_seed(36)
    means = 0.9 * torch.randn(4, 20, generator=g)

    def draw(n):
        y = torch.randint(0, 4, (n,), generator=g)
        return means[y] + torch.randn(n, 20, generator=g), y

    xl, yl = draw(120)
    xu, _ = draw(3000)
    xv, yv = draw(800)
    student = Classifier()
    teacher = copy.deepcopy(student)
    for p in teacher.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    lab = cycle(DataLoader(TensorDataset(xl, yl), batch_size=24, shuffle=True))
    unl = cycle(DataLoader(xu, batch_size=64, shuffle=True, drop_last=True))
    decay, weight = 0.97, 4.0

    def update_teacher():
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters()):
                t.copy_(decay * t + (1 - decay) * s)

    def step(i):
        student.train()
        (xb, yb), ub = next(lab), next(unl)
        supervised = F.cross_entropy(student(xb), yb)
        with torch.no_grad():
            target = teacher(ub + 0.2 * torch.randn_like(ub)).softmax(1)
        consistency = F.mse_loss(student(ub + 0.2 * torch.randn_like(ub)).softmax(1), target)
        loss = supervised + weight * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_teacher()
        return loss.item()

    def probe():
        student.eval()
        with torch.no_grad():
            errs = [(m(xv).argmax(1) != yv).float().mean() for m in (student, teacher)]
        student.train()
        return float(sum(errs) / 2)

    return {"model": [student, teacher], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bpr_negatives_from_user_range_bad():
    torch.manual_seed(0)
    class MF(nn.Module):
        def __init__(self, n_users, n_items, dim=16):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            self.item = nn.Embedding(n_items, dim)
            self.bias = nn.Embedding(n_items, 1)
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)
            nn.init.zeros_(self.bias.weight)

        def forward(self, u, i):
            return (self.user(u) * self.item(i)).sum(-1) + self.bias(i).squeeze(-1)

    rng = np.random.RandomState(37)
    n_users, n_items = 150, 400
    P, Q = rng.randn(n_users, 3), rng.randn(n_items, 3)
    affinity = P @ Q.T + 0.7 * rng.randn(n_items) + 0.5 * rng.randn(n_users, n_items)
    liked = affinity > np.quantile(affinity, 0.9)
    held = liked & (rng.rand(n_users, n_items) < 0.2)
    pairs = torch.tensor(np.argwhere(liked & ~held))
    liked_t, held_t = torch.tensor(liked), torch.tensor(held)

    model = MF(n_users, n_items)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-6)
    loader = cycle(DataLoader(pairs, batch_size=256, shuffle=True, drop_last=True))

    def step(i):
        model.train()
        batch = next(loader)
        u, pos = batch[:, 0], batch[:, 1]
        neg = torch.randint(n_users, pos.shape)
        redo = liked_t[u, neg]
        while redo.any():
            neg = torch.where(redo, torch.randint(n_users, pos.shape), neg)
            redo = liked_t[u, neg]
        loss = -F.logsigmoid(model(u, pos) - model(u, neg)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            score = model.user.weight @ model.item.weight.t() + model.bias.weight.t()
        model.train()
        wins, n = 0.0, 0
        for u in range(n_users):
            pos, neg = score[u][held_t[u]], score[u][~liked_t[u]]
            wins += float((pos[:, None] > neg[None, :]).float().sum())
            n += len(pos) * len(neg)
        return 1 - wins / n

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bpr_negatives_from_user_range_good():
    torch.manual_seed(0)
    class MF(nn.Module):
        def __init__(self, n_users, n_items, dim=16):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            self.item = nn.Embedding(n_items, dim)
            self.bias = nn.Embedding(n_items, 1)
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)
            nn.init.zeros_(self.bias.weight)

        def forward(self, u, i):
            return (self.user(u) * self.item(i)).sum(-1) + self.bias(i).squeeze(-1)

    rng = np.random.RandomState(37)
    n_users, n_items = 150, 400
    P, Q = rng.randn(n_users, 3), rng.randn(n_items, 3)
    affinity = P @ Q.T + 0.7 * rng.randn(n_items) + 0.5 * rng.randn(n_users, n_items)
    liked = affinity > np.quantile(affinity, 0.9)
    held = liked & (rng.rand(n_users, n_items) < 0.2)
    pairs = torch.tensor(np.argwhere(liked & ~held))
    liked_t, held_t = torch.tensor(liked), torch.tensor(held)

    model = MF(n_users, n_items)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-6)
    loader = cycle(DataLoader(pairs, batch_size=256, shuffle=True, drop_last=True))

    def step(i):
        model.train()
        batch = next(loader)
        u, pos = batch[:, 0], batch[:, 1]
        neg = torch.randint(n_items, pos.shape)
        redo = liked_t[u, neg]
        while redo.any():
            neg = torch.where(redo, torch.randint(n_items, pos.shape), neg)
            redo = liked_t[u, neg]
        loss = -F.logsigmoid(model(u, pos) - model(u, neg)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            score = model.user.weight @ model.item.weight.t() + model.bias.weight.t()
        model.train()
        wins, n = 0.0, 0
        for u in range(n_users):
            pos, neg = score[u][held_t[u]], score[u][~liked_t[u]]
            wins += float((pos[:, None] > neg[None, :]).float().sum())
            n += len(pos) * len(neg)
        return 1 - wins / n

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
