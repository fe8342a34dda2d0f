"""Twenty-two small programs of pictures, sounds and clouds of points, each with one bug that people often make, and a
mended twin, by somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""
# ruff: noqa

import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)


# ---------------------------------------------------------------- synthetic data
def endless(loader):
    while True:
        for batch in loader:
            yield batch


def draw_shapes(n, seed, size=16, noise=0.3, labels=None):
    """n pictures (n,1,size,size), roughly zero mean / unit scale, of 8 kinds of shape."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 8, (n,), generator=g) if labels is None else labels
    c = torch.rand(n, 2, generator=g) * (size * 0.3) + size * 0.35
    r = torch.rand(n, generator=g) * (size * 0.12) + size * 0.2
    ax = torch.arange(size).float()
    dy = ax.view(1, size, 1) - c[:, 0].view(n, 1, 1)
    dx = ax.view(1, 1, size) - c[:, 1].view(n, 1, 1)
    dy, dx = dy.expand(n, size, size), dx.expand(n, size, size)
    r = r.view(n, 1, 1)
    rad = (dx**2 + dy**2).sqrt()
    box = torch.maximum(dx.abs(), dy.abs())
    kinds = torch.stack(
        [
            rad < r,
            box < r,
            (rad < r + 0.5) & (rad > r - 1.3),
            (box < r + 0.5) & (box > r - 1.0),
            (box < r) & ((dx.abs() < 1.0) | (dy.abs() < 1.0)),
            (box < r) & (((dx - dy).abs() < 1.4) | ((dx + dy).abs() < 1.4)),
            (dx.abs() < r) & (dy.abs() < 1.5),
            (dy.abs() < r) & (dx.abs() < 1.5),
        ],
        1,
    ).float()
    img = kinds[torch.arange(n), y]
    img = (img - 0.18) / 0.38 + noise / 0.38 * torch.randn(n, size, size, generator=g)
    img = img / (1 + (noise / 0.38) ** 2) ** 0.5
    return img.unsqueeze(1), y


def clean_shapes(n, seed, size=16):
    """pictures in [0, 1], no noise, soft edges."""
    x, y = draw_shapes(n, seed, size, noise=0.0)
    x = x * 0.38 + 0.18
    x = F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 1)
    return x.clamp(0, 1), y


def colour_shapes(n, seed, size=24, noise=0.35):
    g = torch.Generator().manual_seed(seed + 77)
    x, y = draw_shapes(n, seed, size, noise)
    tint = 0.5 + torch.rand(n, 3, 1, 1, generator=g)
    x = x * tint
    return (x - x.mean()) / x.std(), y


def rgb_textures(n, seed, size=24):
    """smooth coloured pictures, zero mean, unit std."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, size // 4, size // 4, generator=g)
    x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
    return (x - x.mean()) / x.std()


def tones(n, seed, length=256, noise=0.3):
    """waveforms (n,1,length) of one tone; target = standardised log frequency."""
    g = torch.Generator().manual_seed(seed)
    f = torch.rand(n, generator=g)
    cycles = 4 * (8**f)
    t = torch.arange(length).float() / length
    ph = torch.rand(n, 1, generator=g) * 2 * math.pi
    w = torch.sin(2 * math.pi * cycles.view(n, 1) * t + ph)
    w = w * 1.35 + noise * torch.randn(n, length, generator=g)
    return w.unsqueeze(1), (f - 0.5) / 0.2887


def spectrograms(n, seed, noise=1.0, classes=6):
    """log-mel-like patches (n,1,20,24): a chirp with a class-specific start and slope."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    start = torch.tensor([4.0, 10.0, 15.0, 4.0, 10.0, 15.0])[y] + torch.randn(n, generator=g)
    slope = torch.tensor([0.4, 0.3, -0.4, 0.0, -0.3, 0.0])[y] + 0.08 * torch.randn(n, generator=g)
    t = torch.arange(24).float().view(1, 1, 24)
    m = torch.arange(20).float().view(1, 20, 1)
    centre = start.view(n, 1, 1) + slope.view(n, 1, 1) * t
    x = 3 * torch.exp(-0.5 * (m - centre) ** 2) + noise * torch.randn(n, 20, 24, generator=g)
    return ((x - x.mean()) / x.std()).unsqueeze(1), y


def point_clouds(n, seed, pts=64):
    """(n, pts, 3) surfaces: sphere, cube, cylinder, cone, torus; rotated about z, jittered."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    u = torch.rand(n, pts, generator=g) * 2 * math.pi
    v = torch.rand(n, pts, generator=g) * 2 - 1
    s = (1 - v**2).clamp(min=0).sqrt()
    sphere = torch.stack([s * u.cos(), s * u.sin(), v], -1)
    q = torch.randn(n, pts, 3, generator=g)
    cube = q / q.abs().amax(-1, keepdim=True) * 0.8
    cyl = torch.stack([0.8 * u.cos(), 0.8 * u.sin(), v], -1)
    h = (v + 1) / 2
    cone = torch.stack([h.sqrt() * u.cos(), h.sqrt() * u.sin(), 1 - 2 * h.sqrt()], -1)
    w = v * math.pi
    torus = torch.stack([(0.75 + 0.3 * w.cos()) * u.cos(), (0.75 + 0.3 * w.cos()) * u.sin(), 0.3 * w.sin()], -1)
    p = torch.stack([sphere, cube, cyl, cone, torus], 1)[torch.arange(n), y]
    a = torch.rand(n, generator=g) * 2 * math.pi
    stretch = 0.8 + 0.4 * torch.rand(n, 1, 3, generator=g)
    p = p * stretch + 0.08 * torch.randn(n, pts, 3, generator=g)
    ca, sa, z = a.cos(), a.sin(), torch.zeros(n)
    R = torch.stack([ca, -sa, z, sa, ca, z, z, z, z + 1], -1).view(n, 3, 3)
    p = p @ R
    p = p - p.mean(1, keepdim=True)
    return p / p.std(), y


def moving_clips(n, seed, frames=8, size=16):
    """(n, frames, 1, size, size): a blob that drifts left/right/up/down/stays."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    d = torch.tensor([[0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])[y]
    d = d * (0.6 + 0.4 * torch.rand(n, 1, generator=g))
    c = torch.rand(n, 2, generator=g) * 6 + 5 - d * frames / 2 * torch.rand(n, 1, generator=g) * 2
    t = torch.arange(frames).float()
    pos = c.unsqueeze(1) + d.unsqueeze(1) * t.view(1, frames, 1)
    ax = torch.arange(size).float()
    dy = ax.view(1, 1, size, 1) - pos[..., 0].view(n, frames, 1, 1)
    dx = ax.view(1, 1, 1, size) - pos[..., 1].view(n, frames, 1, 1)
    x = 3.5 * torch.exp(-(dx**2 + dy**2) / 5) + 0.6 * torch.randn(n, frames, size, size, generator=g)
    return ((x - x.mean()) / x.std()).unsqueeze(2), y


def seg_scenes(n, seed, size=16):
    """pictures (n,3,size,size) and masks (n,size,size) with 0=background, 1=disc, 2=box."""
    g = torch.Generator().manual_seed(seed)
    c = torch.rand(n, 4, generator=g) * (size - 6) + 3
    r = torch.rand(n, 2, generator=g) * 2 + 2.5
    ax = torch.arange(size).float()
    yy, xx = ax.view(1, size, 1), ax.view(1, 1, size)
    disc = ((yy - c[:, 0].view(n, 1, 1)) ** 2 + (xx - c[:, 1].view(n, 1, 1)) ** 2) < r[:, 0].view(n, 1, 1) ** 2
    box = torch.maximum((yy - c[:, 2].view(n, 1, 1)).abs(), (xx - c[:, 3].view(n, 1, 1)).abs()) < r[:, 1].view(n, 1, 1)
    mask = torch.zeros(n, size, size, dtype=torch.long)
    mask[disc] = 1
    mask[box] = 2
    palette = torch.tensor([[0.3, 0.4, 0.3], [0.7, 0.4, 0.4], [0.4, 0.45, 0.75]])
    img = palette[mask].permute(0, 3, 1, 2) + 0.2 * torch.randn(n, 3, size, size, generator=g)
    m = img.mean((0, 2, 3), keepdim=True)
    s = img.std((0, 2, 3), keepdim=True)
    return ((img - m) / s).contiguous(), mask


def det_scenes(n, seed):
    """one or two objects of 3 classes in a 1x32x32 picture, targets on a 4x4 grid.
    target: (n, 6, 4, 4) = objectness, dx, dy (in cell), w, h (of 16 px), class id."""
    g = torch.Generator().manual_seed(seed)
    img = torch.zeros(n, 32, 32)
    tgt = torch.zeros(n, 6, 4, 4)
    for b in range(n):
        for _ in range(1 + int(torch.randint(0, 2, (1,), generator=g))):
            cy, cx = (torch.rand(2, generator=g) * 24 + 4).tolist()
            h, w = (torch.rand(2, generator=g) * 7 + 5).tolist()
            k = int(torch.randint(0, 3, (1,), generator=g))
            gy, gx = int(cy // 8), int(cx // 8)
            if tgt[b, 0, gy, gx] > 0:
                continue
            y0, y1 = max(0, round(cy - h / 2)), min(32, round(cy + h / 2))
            x0, x1 = max(0, round(cx - w / 2)), min(32, round(cx + w / 2))
            if k == 0:
                img[b, y0:y1, x0:x1] = 1.0
            elif k == 1:
                img[b, y0:y1, x0:x1] = 1.0
                img[b, y0 + 1 : y1 - 1, x0 + 1 : x1 - 1] = 0.1
            else:
                img[b, y0:y1:2, x0:x1] = 1.0
            tgt[b, :, gy, gx] = torch.tensor([1.0, cx / 8 - gx, cy / 8 - gy, w / 16, h / 16, float(k)])
    img = img + 0.1 * torch.randn(n, 32, 32, generator=g)
    return ((img - img.mean()) / img.std()).unsqueeze(1), tgt


def face_like(n, seed, size=24):
    """pictures with three different marks; key points (n,3,2) as (x, y) in [-1, 1]."""
    g = torch.Generator().manual_seed(seed)
    base = torch.tensor([[0.0, -0.45], [0.0, 0.0], [0.0, 0.45]]).view(1, 3, 2)
    k = base + (torch.rand(n, 3, 2, generator=g) * 2 - 1) * torch.tensor([0.75, 0.2])
    ax = torch.linspace(-1, 1, size)
    yy, xx = ax.view(1, 1, size, 1), ax.view(1, 1, 1, size)
    dx = xx - k[..., 0].view(n, 3, 1, 1)
    dy = yy - k[..., 1].view(n, 3, 1, 1)
    m0 = torch.exp(-(dx**2 + dy**2)[:, 0] / 0.02)
    m1 = ((dx.abs() < 0.2) & (dy.abs() < 0.08))[:, 1].float()
    m2 = ((dx.abs() < 0.06) & (dy.abs() < 0.25))[:, 2].float()
    x = m0 + m1 + m2 + 0.15 * torch.randn(n, size, size, generator=g)
    return ((x - x.mean()) / x.std()).unsqueeze(1), k


def frame_pairs(n, seed, size=16):
    """two frames: the second is the first moved by a global (u, v) of up to 2 pixels."""
    g = torch.Generator().manual_seed(seed)
    big = torch.randn(n, 1, 10, 10, generator=g)
    big = F.interpolate(big, size=(size + 16, size + 16), mode="bicubic", align_corners=True)
    big = big / big.std()
    uv = torch.rand(n, 2, generator=g) * 4 - 2
    S = size + 16
    ax = torch.arange(size).float() + 8
    yy, xx = torch.meshgrid(ax, ax, indexing="ij")
    a = big[:, :, 8 : 8 + size, 8 : 8 + size].contiguous()
    gx = (xx.unsqueeze(0) - uv[:, 0].view(n, 1, 1)) * 2 / (S - 1) - 1
    gy = (yy.unsqueeze(0) - uv[:, 1].view(n, 1, 1)) * 2 / (S - 1) - 1
    b = F.grid_sample(big, torch.stack([gx, gy], -1), align_corners=True)
    return a, b, uv


def two_moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.rand(n, generator=g) * math.pi
    k = torch.randint(0, 2, (n,), generator=g).float()
    x = torch.where(k > 0, 1 - t.cos(), t.cos())
    y = torch.where(k > 0, 0.5 - t.sin(), t.sin())
    p = torch.stack([x, y], 1) + 0.08 * torch.randn(n, 2, generator=g)
    return (p - torch.tensor([0.5, 0.25])) / torch.tensor([0.87, 0.5])


def knn_error(bank, bank_y, query, query_y, k=5):
    d = torch.cdist(query, bank)
    idx = d.topk(k, largest=False).indices
    votes = F.one_hot(bank_y[idx], int(bank_y.max()) + 1).sum(1)
    return (votes.argmax(1) != query_y).float().mean().item()


CASES = [
    {
        "name": "softmax_layer_before_cross_entropy",
        "what": "The network ends in nn.Softmax and its probabilities are fed to nn.CrossEntropyLoss, which expects raw logits and applies log-softmax itself.",
        "steps": 300,
    },
    {
        "name": "head_replaced_after_optimizer",
        "what": "The optimizer is built from model.fc.parameters() before model.fc is replaced by the new head, so it updates the discarded layer and the new classifier never trains.",
        "steps": 200,
    },
    {
        "name": "gan_generator_step_on_detached_fake",
        "what": "In the generator step the discriminator is given fake.detach(), so the generator loss has no path to the generator and it never trains.",
        "steps": 500,
    },
    {
        "name": "vae_pixel_mean_reconstruction",
        "what": "The reconstruction term is averaged over batch and pixels while the KL is summed over latent dimensions, so the KL is weighted 256 times too heavily and the posterior collapses.",
        "steps": 600,
    },
    {
        "name": "ddpm_target_noise_not_the_one_added",
        "what": "q_sample is called without the drawn noise and draws its own, so the network is trained to predict noise that is independent of its input.",
        "steps": 500,
    },
    {
        "name": "simsiam_missing_stop_gradient",
        "what": "The target projection z is not detached in the negative cosine loss, so both branches are pulled together and the representation collapses.",
        "steps": 600,
    },
    {
        "name": "siamese_pair_label_convention",
        "what": "The contrastive loss takes label 1 for a different pair but the pair sampler sets 1 for the same class, so equal pictures are pushed apart and different ones together.",
        "steps": 300,
    },
    {
        "name": "distill_kldiv_without_log",
        "what": "F.kl_div expects log-probabilities as its first argument but the student's softmax probabilities are passed, so the distillation term is not a KL divergence.",
        "steps": 300,
    },
    {
        "name": "realnvp_log_det_sign",
        "what": "The log-determinant of the data-to-latent map is subtracted instead of added in the change-of-variables formula, so the flow is rewarded for shrinking volume.",
        "steps": 400,
    },
    {
        "name": "yolo_box_loss_over_background_cells",
        "what": "The box regression loss is averaged over all grid cells, background cells with zero targets included, instead of only the cells that hold an object.",
        "steps": 400,
    },
    {
        "name": "seg_logits_view_without_permute",
        "what": "NCHW logits are flattened with .view(-1, C) without first moving the class axis last, so each row mixes values of different pixels and the rows do not match the flattened mask.",
        "steps": 250,
    },
    {
        "name": "keypoints_not_flipped_with_image",
        "what": "The random horizontal flip is applied to the picture but not to the x coordinates of its key points, so half of the targets are wrong.",
        "steps": 400,
    },
    {
        "name": "flow_warp_grid_rows_first",
        "what": "The sampling grid for grid_sample is stacked as (y, x) although grid_sample expects (x, y) in the last axis, so the warp transposes the frame.",
        "steps": 500,
    },
    {
        "name": "denoiser_target_overwritten_in_place",
        "what": "noisy = clean only makes an alias and the noise is added in place, so the clean target is corrupted too and the network learns the identity.",
        "steps": 300,
    },
    {
        "name": "style_features_of_output_under_no_grad",
        "what": "The frozen loss network is run on the stylised output inside torch.no_grad(), so content and style losses carry no gradient and only the total-variation term trains the transformer.",
        "steps": 250,
    },
    {
        "name": "pointnet_layers_in_plain_list",
        "what": "The shared point-wise layers are kept in a Python list instead of nn.ModuleList, so they are not registered, never reach the optimizer and stay at their random initial values.",
        "steps": 480,
    },
    {
        "name": "video_lstm_without_batch_first",
        "what": "The LSTM is built without batch_first=True but is given (batch, time, features), so it recurs over the clips of the batch instead of over the frames.",
        "steps": 300,
    },
    {
        "name": "steplr_stepped_every_batch",
        "what": "scheduler.step() of an epoch-wise StepLR is called after every batch, so the learning rate falls tenfold every 7 batches and training freezes within the first epochs.",
        "steps": 320,
    },
    {
        "name": "amp_clip_before_unscale",
        "what": "Gradients are clipped while still multiplied by the GradScaler's scale (no scaler.unscale_ first), so after unscaling the updates are tens of thousands of times too small.",
        "steps": 300,
    },
    {
        "name": "audio_regression_broadcast_loss",
        "what": "The network gives (N, 1) and the targets are (N,), so MSELoss broadcasts to N x N pairs and the best answer becomes the batch mean.",
        "steps": 300,
    },
    {
        "name": "sorted_folders_without_shuffle",
        "what": "The training set is stored class by class, as ImageFolder lists it, and the DataLoader has shuffle=False, so each batch holds a single class and the network forgets the others.",
        "steps": 300,
    },
    {
        "name": "validation_leaves_model_in_eval",
        "what": "validate() puts the network in eval mode and model.train() is called only once before the epochs, so from the second epoch on dropout is off and the batch-norm statistics are frozen during training.",
        "steps": 500,
    },
]


def softmax_layer_before_cross_entropy_bad():
    torch.manual_seed(0)
    x_train, y_train = colour_shapes(2048, 1)
    x_test, y_test = colour_shapes(512, 2)
    trainloader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.pool = nn.MaxPool2d(2, 2)
            self.fc1 = nn.Linear(32 * 6 * 6, 64)
            self.fc2 = nn.Linear(64, 8)
            self.softmax = nn.Softmax(dim=1)

        def forward(self, x):
            x = self.pool(F.relu(self.conv1(x)))
            x = self.pool(F.relu(self.conv2(x)))
            x = torch.flatten(x, 1)
            x = F.relu(self.fc1(x))
            return self.softmax(self.fc2(x))

    net = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    batches = endless(trainloader)

    def step(i):
        inputs, labels = next(batches)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            pred = net(x_test).argmax(1)
        return (pred != y_test).float().mean().item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def softmax_layer_before_cross_entropy_good():
    torch.manual_seed(0)
    x_train, y_train = colour_shapes(2048, 1)
    x_test, y_test = colour_shapes(512, 2)
    trainloader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.pool = nn.MaxPool2d(2, 2)
            self.fc1 = nn.Linear(32 * 6 * 6, 64)
            self.fc2 = nn.Linear(64, 8)

        def forward(self, x):
            x = self.pool(F.relu(self.conv1(x)))
            x = self.pool(F.relu(self.conv2(x)))
            x = torch.flatten(x, 1)
            x = F.relu(self.fc1(x))
            return self.fc2(x)

    net = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    batches = endless(trainloader)

    def step(i):
        inputs, labels = next(batches)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            pred = net(x_test).argmax(1)
        return (pred != y_test).float().mean().item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def head_replaced_after_optimizer_bad():
    torch.manual_seed(0)

    class SmallResNet(nn.Module):
        def __init__(self, num_classes):
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
            )
            self.fc = nn.Linear(32 * 4 * 4, num_classes)

        def forward(self, x):
            return self.fc(self.features(x).flatten(1))

    def load_pretrained():
        net = SmallResNet(8)
        x, y = draw_shapes(2048, 11)
        opt = torch.optim.Adam(net.parameters(), lr=2e-3)
        net.train()
        for k in range(100):
            idx = torch.randint(0, 2048, (32,))
            opt.zero_grad()
            F.cross_entropy(net(x[idx]), y[idx]).backward()
            opt.step()
        net.zero_grad()
        return net

    # new task: the same kind of pictures, sorted into 4 super-classes
    x_train, y8 = draw_shapes(1024, 3)
    y_train = torch.tensor([0, 1, 0, 1, 2, 2, 3, 3])[y8]
    x_val, y8v = draw_shapes(512, 4)
    y_val = torch.tensor([0, 1, 0, 1, 2, 2, 3, 3])[y8v]
    train_loader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True, drop_last=True)

    model = load_pretrained()
    for p in model.features.parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=1e-3)
    model.fc = nn.Linear(model.fc.in_features, 4)
    criterion = nn.CrossEntropyLoss()
    batches = endless(train_loader)

    def step(i):
        model.train()
        model.features.eval()
        images, target = next(batches)
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = [(m, m.training) for m in model.modules()]
        model.eval()
        with torch.no_grad():
            err = (model(x_val).argmax(1) != y_val).float().mean().item()
        for m, t in was:
            m.training = t
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def head_replaced_after_optimizer_good():
    torch.manual_seed(0)

    class SmallResNet(nn.Module):
        def __init__(self, num_classes):
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
            )
            self.fc = nn.Linear(32 * 4 * 4, num_classes)

        def forward(self, x):
            return self.fc(self.features(x).flatten(1))

    def load_pretrained():
        net = SmallResNet(8)
        x, y = draw_shapes(2048, 11)
        opt = torch.optim.Adam(net.parameters(), lr=2e-3)
        net.train()
        for k in range(100):
            idx = torch.randint(0, 2048, (32,))
            opt.zero_grad()
            F.cross_entropy(net(x[idx]), y[idx]).backward()
            opt.step()
        net.zero_grad()
        return net

    # new task: the same kind of pictures, sorted into 4 super-classes
    x_train, y8 = draw_shapes(1024, 3)
    y_train = torch.tensor([0, 1, 0, 1, 2, 2, 3, 3])[y8]
    x_val, y8v = draw_shapes(512, 4)
    y_val = torch.tensor([0, 1, 0, 1, 2, 2, 3, 3])[y8v]
    train_loader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True, drop_last=True)

    model = load_pretrained()
    for p in model.features.parameters():
        p.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, 4)
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    batches = endless(train_loader)

    def step(i):
        model.train()
        model.features.eval()
        images, target = next(batches)
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = [(m, m.training) for m in model.modules()]
        model.eval()
        with torch.no_grad():
            err = (model(x_val).argmax(1) != y_val).float().mean().item()
        for m, t in was:
            m.training = t
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gan_generator_step_on_detached_fake_bad():
    torch.manual_seed(0)
    nz = 16
    real_all = clean_shapes(1024, 5)[0] * 2 - 1
    held_out = clean_shapes(256, 6)[0] * 2 - 1
    dataloader = DataLoader(TensorDataset(real_all), batch_size=32, shuffle=True, drop_last=True)

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.ConvTranspose2d(nz, 32, 4, 1, 0, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(True),
                nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(True),
                nn.ConvTranspose2d(16, 1, 4, 2, 1),
                nn.Tanh(),
            )

        def forward(self, z):
            return self.main(z)

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(1, 16, 4, 2, 1),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(16, 32, 4, 2, 1, bias=False),
                nn.BatchNorm2d(32),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(32, 1, 4, 1, 0),
            )

        def forward(self, x):
            return self.main(x).view(-1)

    def weights_init(m):
        if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(m.weight, 0.0, 0.02)
        elif isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.weight, 1.0, 0.02)
            nn.init.zeros_(m.bias)

    netG, netD = Generator(), Discriminator()
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    g = torch.Generator().manual_seed(9)
    fixed_noise = torch.randn(256, nz, 1, 1, generator=g)
    proj = F.normalize(torch.randn(256, 64, generator=g), dim=0)
    batches = endless(dataloader)

    def step(i):
        (real,) = next(batches)
        b = real.size(0)
        # (1) update D
        netD.zero_grad()
        errD_real = criterion(netD(real), torch.ones(b))
        noise = torch.randn(b, nz, 1, 1)
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), torch.zeros(b))
        errD = errD_real + errD_fake
        errD.backward()
        optimizerD.step()
        # (2) update G
        netG.zero_grad()
        output = netD(fake.detach())
        errG = criterion(output, torch.ones(b))
        errG.backward()
        optimizerG.step()
        return errD.item() + errG.item()

    def probe():
        was = netG.training
        netG.eval()
        with torch.no_grad():
            a = (netG(fixed_noise).flatten(1) @ proj).sort(0).values
        netG.train(was)
        b = (held_out.flatten(1) @ proj).sort(0).values
        return (a - b).abs().mean().item()

    return {
        "model": {"G": netG, "D": netD},
        "optimizer": (optimizerD, optimizerG),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def gan_generator_step_on_detached_fake_good():
    torch.manual_seed(0)
    nz = 16
    real_all = clean_shapes(1024, 5)[0] * 2 - 1
    held_out = clean_shapes(256, 6)[0] * 2 - 1
    dataloader = DataLoader(TensorDataset(real_all), batch_size=32, shuffle=True, drop_last=True)

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.ConvTranspose2d(nz, 32, 4, 1, 0, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(True),
                nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(True),
                nn.ConvTranspose2d(16, 1, 4, 2, 1),
                nn.Tanh(),
            )

        def forward(self, z):
            return self.main(z)

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(1, 16, 4, 2, 1),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(16, 32, 4, 2, 1, bias=False),
                nn.BatchNorm2d(32),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(32, 1, 4, 1, 0),
            )

        def forward(self, x):
            return self.main(x).view(-1)

    def weights_init(m):
        if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(m.weight, 0.0, 0.02)
        elif isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.weight, 1.0, 0.02)
            nn.init.zeros_(m.bias)

    netG, netD = Generator(), Discriminator()
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    g = torch.Generator().manual_seed(9)
    fixed_noise = torch.randn(256, nz, 1, 1, generator=g)
    proj = F.normalize(torch.randn(256, 64, generator=g), dim=0)
    batches = endless(dataloader)

    def step(i):
        (real,) = next(batches)
        b = real.size(0)
        # (1) update D
        netD.zero_grad()
        errD_real = criterion(netD(real), torch.ones(b))
        noise = torch.randn(b, nz, 1, 1)
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), torch.zeros(b))
        errD = errD_real + errD_fake
        errD.backward()
        optimizerD.step()
        # (2) update G
        netG.zero_grad()
        output = netD(fake)
        errG = criterion(output, torch.ones(b))
        errG.backward()
        optimizerG.step()
        return errD.item() + errG.item()

    def probe():
        was = netG.training
        netG.eval()
        with torch.no_grad():
            a = (netG(fixed_noise).flatten(1) @ proj).sort(0).values
        netG.train(was)
        b = (held_out.flatten(1) @ proj).sort(0).values
        return (a - b).abs().mean().item()

    return {
        "model": {"G": netG, "D": netD},
        "optimizer": (optimizerD, optimizerG),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def vae_pixel_mean_reconstruction_bad():
    torch.manual_seed(0)
    train_x = clean_shapes(2048, 7)[0]
    test_x = clean_shapes(256, 8)[0]
    loader = DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True)

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(256, 128)
            self.fc21 = nn.Linear(128, 8)
            self.fc22 = nn.Linear(128, 8)
            self.fc3 = nn.Linear(8, 128)
            self.fc4 = nn.Linear(128, 256)

        def encode(self, x):
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            eps = torch.randn_like(std)
            return mu + eps * std

        def decode(self, z):
            return self.fc4(F.relu(self.fc3(z)))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 256))
            z = self.reparameterize(mu, logvar)
            return self.decode(z), mu, logvar

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_function(recon_logits, x, mu, logvar):
        x = x.view(-1, 256)
        BCE = F.binary_cross_entropy_with_logits(recon_logits, x)
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return BCE + KLD

    batches = endless(loader)

    def step(i):
        model.train()
        (data,) = next(batches)
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            mu, _ = model.encode(test_x.view(-1, 256))
            return (
                F.binary_cross_entropy_with_logits(model.decode(mu), test_x.view(-1, 256), reduction="sum").item() / 256
            )

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_pixel_mean_reconstruction_good():
    torch.manual_seed(0)
    train_x = clean_shapes(2048, 7)[0]
    test_x = clean_shapes(256, 8)[0]
    loader = DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True)

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(256, 128)
            self.fc21 = nn.Linear(128, 8)
            self.fc22 = nn.Linear(128, 8)
            self.fc3 = nn.Linear(8, 128)
            self.fc4 = nn.Linear(128, 256)

        def encode(self, x):
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            eps = torch.randn_like(std)
            return mu + eps * std

        def decode(self, z):
            return self.fc4(F.relu(self.fc3(z)))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 256))
            z = self.reparameterize(mu, logvar)
            return self.decode(z), mu, logvar

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_function(recon_logits, x, mu, logvar):
        x = x.view(-1, 256)
        BCE = F.binary_cross_entropy_with_logits(recon_logits, x, reduction="sum") / x.size(0)
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return BCE + KLD

    batches = endless(loader)

    def step(i):
        model.train()
        (data,) = next(batches)
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            mu, _ = model.encode(test_x.view(-1, 256))
            return (
                F.binary_cross_entropy_with_logits(model.decode(mu), test_x.view(-1, 256), reduction="sum").item() / 256
            )

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_target_noise_not_the_one_added_bad():
    torch.manual_seed(0)
    T = 100
    betas = torch.linspace(1e-3, 0.08, T)
    alphas_cumprod = torch.cumprod(1 - betas, 0)
    sqrt_ac = alphas_cumprod.sqrt()
    sqrt_1mac = (1 - alphas_cumprod).sqrt()
    train_x = clean_shapes(1024, 9)[0] * 2 - 1
    test_x = clean_shapes(128, 10)[0] * 2 - 1
    dataloader = DataLoader(TensorDataset(train_x), batch_size=32, shuffle=True, drop_last=True)

    def extract(a, t):
        return a.gather(0, t).view(-1, 1, 1, 1)

    def q_sample(x_start, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x_start)
        return extract(sqrt_ac, t) * x_start + extract(sqrt_1mac, t) * noise

    class TimeEmbedding(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.dim = dim

        def forward(self, t):
            half = self.dim // 2
            freqs = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
            a = t[:, None].float() * freqs[None]
            return torch.cat((a.sin(), a.cos()), -1)

    class Block(nn.Module):
        def __init__(self, cin, cout, tdim):
            super().__init__()
            self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
            self.norm1 = nn.GroupNorm(4, cout)
            self.time = nn.Linear(tdim, cout)
            self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
            self.norm2 = nn.GroupNorm(4, cout)

        def forward(self, x, temb):
            h = F.silu(self.norm1(self.conv1(x)))
            h = h + self.time(temb)[:, :, None, None]
            return F.silu(self.norm2(self.conv2(h)))

    class TinyUNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.temb = nn.Sequential(TimeEmbedding(16), nn.Linear(16, 32), nn.SiLU())
            self.down = Block(1, 12, 32)
            self.mid = Block(12, 24, 32)
            self.up = Block(36, 12, 32)
            self.out = nn.Conv2d(12, 1, 1)

        def forward(self, x, t):
            e = self.temb(t)
            d = self.down(x, e)
            m = self.mid(F.avg_pool2d(d, 2), e)
            u = F.interpolate(m, scale_factor=2, mode="nearest")
            return self.out(self.up(torch.cat([u, d], 1), e))

    model = TinyUNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(3)
    probe_t = torch.randint(0, T, (128,), generator=g)
    probe_noise = torch.randn(128, 1, 16, 16, generator=g)

    def p_losses(x_start, t):
        noise = torch.randn_like(x_start)
        x_noisy = q_sample(x_start, t)
        predicted = model(x_noisy, t)
        return F.mse_loss(predicted, noise)

    batches = endless(dataloader)

    def step(i):
        (batch,) = next(batches)
        optimizer.zero_grad()
        t = torch.randint(0, T, (batch.shape[0],)).long()
        loss = p_losses(batch, t)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(q_sample(test_x, probe_t, probe_noise), probe_t), probe_noise).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_target_noise_not_the_one_added_good():
    torch.manual_seed(0)
    T = 100
    betas = torch.linspace(1e-3, 0.08, T)
    alphas_cumprod = torch.cumprod(1 - betas, 0)
    sqrt_ac = alphas_cumprod.sqrt()
    sqrt_1mac = (1 - alphas_cumprod).sqrt()
    train_x = clean_shapes(1024, 9)[0] * 2 - 1
    test_x = clean_shapes(128, 10)[0] * 2 - 1
    dataloader = DataLoader(TensorDataset(train_x), batch_size=32, shuffle=True, drop_last=True)

    def extract(a, t):
        return a.gather(0, t).view(-1, 1, 1, 1)

    def q_sample(x_start, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x_start)
        return extract(sqrt_ac, t) * x_start + extract(sqrt_1mac, t) * noise

    class TimeEmbedding(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.dim = dim

        def forward(self, t):
            half = self.dim // 2
            freqs = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
            a = t[:, None].float() * freqs[None]
            return torch.cat((a.sin(), a.cos()), -1)

    class Block(nn.Module):
        def __init__(self, cin, cout, tdim):
            super().__init__()
            self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
            self.norm1 = nn.GroupNorm(4, cout)
            self.time = nn.Linear(tdim, cout)
            self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
            self.norm2 = nn.GroupNorm(4, cout)

        def forward(self, x, temb):
            h = F.silu(self.norm1(self.conv1(x)))
            h = h + self.time(temb)[:, :, None, None]
            return F.silu(self.norm2(self.conv2(h)))

    class TinyUNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.temb = nn.Sequential(TimeEmbedding(16), nn.Linear(16, 32), nn.SiLU())
            self.down = Block(1, 12, 32)
            self.mid = Block(12, 24, 32)
            self.up = Block(36, 12, 32)
            self.out = nn.Conv2d(12, 1, 1)

        def forward(self, x, t):
            e = self.temb(t)
            d = self.down(x, e)
            m = self.mid(F.avg_pool2d(d, 2), e)
            u = F.interpolate(m, scale_factor=2, mode="nearest")
            return self.out(self.up(torch.cat([u, d], 1), e))

    model = TinyUNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(3)
    probe_t = torch.randint(0, T, (128,), generator=g)
    probe_noise = torch.randn(128, 1, 16, 16, generator=g)

    def p_losses(x_start, t):
        noise = torch.randn_like(x_start)
        x_noisy = q_sample(x_start, t, noise)
        predicted = model(x_noisy, t)
        return F.mse_loss(predicted, noise)

    batches = endless(dataloader)

    def step(i):
        (batch,) = next(batches)
        optimizer.zero_grad()
        t = torch.randint(0, T, (batch.shape[0],)).long()
        loss = p_losses(batch, t)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(q_sample(test_x, probe_t, probe_noise), probe_t), probe_noise).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_missing_stop_gradient_bad():
    torch.manual_seed(0)
    train_x, train_y = draw_shapes(2048, 12)
    test_x, test_y = draw_shapes(512, 13)
    loader = DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True)

    def augment(x):
        n = x.size(0)
        scale = 0.8 + 0.4 * torch.rand(n, 1, 1)
        theta = torch.cat([torch.eye(2).expand(n, 2, 2) * scale, 0.5 * torch.rand(n, 2, 1) - 0.25], 2)
        x = F.grid_sample(
            x, F.affine_grid(theta, x.shape, align_corners=False), padding_mode="reflection", align_corners=False
        )
        gain = 0.7 + 0.6 * torch.rand(n, 1, 1, 1)
        return x * gain + 0.3 * torch.randn_like(x)

    class SimSiam(nn.Module):
        def __init__(self, dim=64, pred_dim=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(inplace=True),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(inplace=True),
                nn.Flatten(),
                nn.Linear(512, dim, bias=False),
                nn.BatchNorm1d(dim),
                nn.ReLU(inplace=True),
                nn.Linear(dim, dim, bias=False),
                nn.BatchNorm1d(dim, affine=False),
            )
            self.predictor = nn.Sequential(
                nn.Linear(dim, pred_dim, bias=False),
                nn.BatchNorm1d(pred_dim),
                nn.ReLU(inplace=True),
                nn.Linear(pred_dim, dim),
            )

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            return p1, p2, z1, z2

    model = SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    batches = endless(loader)

    def step(i):
        model.train()
        (images,) = next(batches)
        p1, p2, z1, z2 = model(augment(images), augment(images))
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            a, b = F.normalize(model.encoder(train_x), dim=1), F.normalize(model.encoder(test_x), dim=1)
        model.train(was)
        return knn_error(a, train_y, b, test_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_missing_stop_gradient_good():
    torch.manual_seed(0)
    train_x, train_y = draw_shapes(2048, 12)
    test_x, test_y = draw_shapes(512, 13)
    loader = DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True)

    def augment(x):
        n = x.size(0)
        scale = 0.8 + 0.4 * torch.rand(n, 1, 1)
        theta = torch.cat([torch.eye(2).expand(n, 2, 2) * scale, 0.5 * torch.rand(n, 2, 1) - 0.25], 2)
        x = F.grid_sample(
            x, F.affine_grid(theta, x.shape, align_corners=False), padding_mode="reflection", align_corners=False
        )
        gain = 0.7 + 0.6 * torch.rand(n, 1, 1, 1)
        return x * gain + 0.3 * torch.randn_like(x)

    class SimSiam(nn.Module):
        def __init__(self, dim=64, pred_dim=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(inplace=True),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(inplace=True),
                nn.Flatten(),
                nn.Linear(512, dim, bias=False),
                nn.BatchNorm1d(dim),
                nn.ReLU(inplace=True),
                nn.Linear(dim, dim, bias=False),
                nn.BatchNorm1d(dim, affine=False),
            )
            self.predictor = nn.Sequential(
                nn.Linear(dim, pred_dim, bias=False),
                nn.BatchNorm1d(pred_dim),
                nn.ReLU(inplace=True),
                nn.Linear(pred_dim, dim),
            )

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            return p1, p2, z1.detach(), z2.detach()

    model = SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    batches = endless(loader)

    def step(i):
        model.train()
        (images,) = next(batches)
        p1, p2, z1, z2 = model(augment(images), augment(images))
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            a, b = F.normalize(model.encoder(train_x), dim=1), F.normalize(model.encoder(test_x), dim=1)
        model.train(was)
        return knn_error(a, train_y, b, test_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def siamese_pair_label_convention_bad():
    torch.manual_seed(0)
    train_x, train_y = draw_shapes(1024, 14)
    test_x, test_y = draw_shapes(384, 15)

    class SiameseDataset(Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y
            self.by_class = [(y == k).nonzero().flatten().tolist() for k in range(8)]

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            c = int(self.y[index])
            if random.random() < 0.5:
                other = random.choice(self.by_class[c])
            else:
                other = random.choice(self.by_class[random.choice([k for k in range(8) if k != c])])
            label = float(self.y[other] == c)
            return self.x[index], self.x[other], torch.tensor(label)

    class SiameseNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn1 = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            )
            self.fc1 = nn.Sequential(nn.Linear(512, 64), nn.ReLU(inplace=True), nn.Linear(64, 16))

        def forward_once(self, x):
            return self.fc1(self.cnn1(x).flatten(1))

        def forward(self, a, b):
            return self.forward_once(a), self.forward_once(b)

    class ContrastiveLoss(nn.Module):
        """label = 0 for a pair of the same class, 1 for a pair of different classes"""

        def __init__(self, margin=2.0):
            super().__init__()
            self.margin = margin

        def forward(self, out1, out2, label):
            d = F.pairwise_distance(out1, out2)
            return torch.mean((1 - label) * d.pow(2) + label * torch.clamp(self.margin - d, min=0.0).pow(2))

    random.seed(0)
    loader = DataLoader(SiameseDataset(train_x, train_y), batch_size=64, shuffle=True)
    net = SiameseNetwork()
    criterion = ContrastiveLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    batches = endless(loader)

    def step(i):
        img0, img1, label = next(batches)
        optimizer.zero_grad()
        output1, output2 = net(img0, img1)
        loss = criterion(output1, output2, label)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return knn_error(net.forward_once(train_x), train_y, net.forward_once(test_x), test_y)

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def siamese_pair_label_convention_good():
    torch.manual_seed(0)
    train_x, train_y = draw_shapes(1024, 14)
    test_x, test_y = draw_shapes(384, 15)

    class SiameseDataset(Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y
            self.by_class = [(y == k).nonzero().flatten().tolist() for k in range(8)]

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            c = int(self.y[index])
            if random.random() < 0.5:
                other = random.choice(self.by_class[c])
            else:
                other = random.choice(self.by_class[random.choice([k for k in range(8) if k != c])])
            label = float(self.y[other] != c)
            return self.x[index], self.x[other], torch.tensor(label)

    class SiameseNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn1 = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            )
            self.fc1 = nn.Sequential(nn.Linear(512, 64), nn.ReLU(inplace=True), nn.Linear(64, 16))

        def forward_once(self, x):
            return self.fc1(self.cnn1(x).flatten(1))

        def forward(self, a, b):
            return self.forward_once(a), self.forward_once(b)

    class ContrastiveLoss(nn.Module):
        """label = 0 for a pair of the same class, 1 for a pair of different classes"""

        def __init__(self, margin=2.0):
            super().__init__()
            self.margin = margin

        def forward(self, out1, out2, label):
            d = F.pairwise_distance(out1, out2)
            return torch.mean((1 - label) * d.pow(2) + label * torch.clamp(self.margin - d, min=0.0).pow(2))

    random.seed(0)
    loader = DataLoader(SiameseDataset(train_x, train_y), batch_size=64, shuffle=True)
    net = SiameseNetwork()
    criterion = ContrastiveLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    batches = endless(loader)

    def step(i):
        img0, img1, label = next(batches)
        optimizer.zero_grad()
        output1, output2 = net(img0, img1)
        loss = criterion(output1, output2, label)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return knn_error(net.forward_once(train_x), train_y, net.forward_once(test_x), test_y)

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kldiv_without_log_bad():
    torch.manual_seed(0)
    T, alpha = 4.0, 0.9

    def conv_net(width):
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 8),
        )

    train_x, train_y = draw_shapes(2048, 16, noise=0.5)
    val_x, val_y = draw_shapes(512, 17, noise=0.5)
    teacher = conv_net(20)
    t_opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for k in range(150):
        idx = torch.randint(0, 2048, (48,))
        t_opt.zero_grad()
        F.cross_entropy(teacher(train_x[idx]), train_y[idx]).backward()
        t_opt.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)
        p.grad = None

    student = conv_net(6)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    train_loader = DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True)

    def loss_fn_kd(outputs, labels, teacher_outputs):
        kd = F.kl_div(F.softmax(outputs / T, dim=1), F.softmax(teacher_outputs / T, dim=1), reduction="batchmean") * (
            T * T
        )
        return alpha * kd + (1.0 - alpha) * F.cross_entropy(outputs, labels)

    batches = endless(train_loader)

    def step(i):
        student.train()
        train_batch, labels_batch = next(batches)
        output_batch = student(train_batch)
        with torch.no_grad():
            output_teacher = teacher(train_batch)
        loss = loss_fn_kd(output_batch, labels_batch, output_teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = student.training
        student.eval()
        with torch.no_grad():
            nll = F.cross_entropy(student(val_x), val_y).item()
        student.train(was)
        return nll

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kldiv_without_log_good():
    torch.manual_seed(0)
    T, alpha = 4.0, 0.9

    def conv_net(width):
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 8),
        )

    train_x, train_y = draw_shapes(2048, 16, noise=0.5)
    val_x, val_y = draw_shapes(512, 17, noise=0.5)
    teacher = conv_net(20)
    t_opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for k in range(150):
        idx = torch.randint(0, 2048, (48,))
        t_opt.zero_grad()
        F.cross_entropy(teacher(train_x[idx]), train_y[idx]).backward()
        t_opt.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)
        p.grad = None

    student = conv_net(6)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    train_loader = DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True)

    def loss_fn_kd(outputs, labels, teacher_outputs):
        kd = F.kl_div(
            F.log_softmax(outputs / T, dim=1), F.softmax(teacher_outputs / T, dim=1), reduction="batchmean"
        ) * (T * T)
        return alpha * kd + (1.0 - alpha) * F.cross_entropy(outputs, labels)

    batches = endless(train_loader)

    def step(i):
        student.train()
        train_batch, labels_batch = next(batches)
        output_batch = student(train_batch)
        with torch.no_grad():
            output_teacher = teacher(train_batch)
        loss = loss_fn_kd(output_batch, labels_batch, output_teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = student.training
        student.eval()
        with torch.no_grad():
            nll = F.cross_entropy(student(val_x), val_y).item()
        student.train(was)
        return nll

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def realnvp_log_det_sign_bad():
    torch.manual_seed(0)
    train = two_moons(4096, 18)
    test = two_moons(1024, 19)

    class Coupling(nn.Module):
        def __init__(self, mask, hidden=48):
            super().__init__()
            self.register_buffer("mask", mask)
            self.s = nn.Sequential(
                nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2), nn.Tanh()
            )
            self.t = nn.Sequential(
                nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)
            )

        def forward(self, x):
            xm = x * self.mask
            s = self.s(xm) * (1 - self.mask)
            t = self.t(xm) * (1 - self.mask)
            return xm + (1 - self.mask) * (x * torch.exp(s) + t), s.sum(1)

    class RealNVP(nn.Module):
        def __init__(self, n=6):
            super().__init__()
            self.layers = nn.ModuleList(
                [Coupling(torch.tensor([1.0, 0.0]) if k % 2 else torch.tensor([0.0, 1.0])) for k in range(n)]
            )

        def forward(self, x):
            log_det = x.new_zeros(x.size(0))
            for layer in self.layers:
                x, ld = layer(x)
                log_det = log_det + ld
            return x, log_det

    flow = RealNVP()
    prior = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)

    def step(i):
        x = train[torch.randint(0, len(train), (128,))]
        z, log_det = flow(x)
        loss = -(prior.log_prob(z) - log_det).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            z, log_det = flow(test)
            return -(prior.log_prob(z) + log_det).mean().item()

    return {"model": flow, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def realnvp_log_det_sign_good():
    torch.manual_seed(0)
    train = two_moons(4096, 18)
    test = two_moons(1024, 19)

    class Coupling(nn.Module):
        def __init__(self, mask, hidden=48):
            super().__init__()
            self.register_buffer("mask", mask)
            self.s = nn.Sequential(
                nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2), nn.Tanh()
            )
            self.t = nn.Sequential(
                nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)
            )

        def forward(self, x):
            xm = x * self.mask
            s = self.s(xm) * (1 - self.mask)
            t = self.t(xm) * (1 - self.mask)
            return xm + (1 - self.mask) * (x * torch.exp(s) + t), s.sum(1)

    class RealNVP(nn.Module):
        def __init__(self, n=6):
            super().__init__()
            self.layers = nn.ModuleList(
                [Coupling(torch.tensor([1.0, 0.0]) if k % 2 else torch.tensor([0.0, 1.0])) for k in range(n)]
            )

        def forward(self, x):
            log_det = x.new_zeros(x.size(0))
            for layer in self.layers:
                x, ld = layer(x)
                log_det = log_det + ld
            return x, log_det

    flow = RealNVP()
    prior = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)

    def step(i):
        x = train[torch.randint(0, len(train), (128,))]
        z, log_det = flow(x)
        loss = -(prior.log_prob(z) + log_det).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            z, log_det = flow(test)
            return -(prior.log_prob(z) + log_det).mean().item()

    return {"model": flow, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def yolo_box_loss_over_background_cells_bad():
    torch.manual_seed(0)
    train_x, train_t = det_scenes(768, 20)
    val_x, val_t = det_scenes(256, 21)
    loader = DataLoader(TensorDataset(train_x, train_t), batch_size=32, shuffle=True)

    class TinyYolo(nn.Module):
        def __init__(self, num_classes=3):
            super().__init__()

            def cbl(i, o):
                return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.1))

            self.body = nn.Sequential(
                cbl(1, 12), nn.MaxPool2d(2), cbl(12, 24), nn.MaxPool2d(2), cbl(24, 48), nn.MaxPool2d(2), cbl(48, 48)
            )
            self.head = nn.Conv2d(48, 5 + num_classes, 1)

        def forward(self, x):
            out = self.head(self.body(x))
            return out[:, 0], out[:, 1:5], out[:, 5:]

    class YoloLoss(nn.Module):
        def __init__(self, lambda_box=5.0):
            super().__init__()
            self.lambda_box = lambda_box

        def forward(self, obj, box, cls, target):
            mask = target[:, 0] > 0
            obj_loss = F.binary_cross_entropy_with_logits(obj, target[:, 0])
            box, tbox = box.permute(0, 2, 3, 1), target[:, 1:5].permute(0, 2, 3, 1)
            box_loss = F.smooth_l1_loss(box, tbox)
            cls_loss = F.cross_entropy(cls.permute(0, 2, 3, 1)[mask], target[:, 5][mask].long())
            return obj_loss + self.lambda_box * box_loss + cls_loss

    model = TinyYolo()
    criterion = YoloLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = endless(loader)

    def step(i):
        model.train()
        imgs, targets = next(batches)
        obj, box, cls = model(imgs)
        loss = criterion(obj, box, cls, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            _, box, _ = model(val_x)
        model.train(was)
        m = val_t[:, 0] > 0
        return (box.permute(0, 2, 3, 1)[m] - val_t[:, 1:5].permute(0, 2, 3, 1)[m]).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def yolo_box_loss_over_background_cells_good():
    torch.manual_seed(0)
    train_x, train_t = det_scenes(768, 20)
    val_x, val_t = det_scenes(256, 21)
    loader = DataLoader(TensorDataset(train_x, train_t), batch_size=32, shuffle=True)

    class TinyYolo(nn.Module):
        def __init__(self, num_classes=3):
            super().__init__()

            def cbl(i, o):
                return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.1))

            self.body = nn.Sequential(
                cbl(1, 12), nn.MaxPool2d(2), cbl(12, 24), nn.MaxPool2d(2), cbl(24, 48), nn.MaxPool2d(2), cbl(48, 48)
            )
            self.head = nn.Conv2d(48, 5 + num_classes, 1)

        def forward(self, x):
            out = self.head(self.body(x))
            return out[:, 0], out[:, 1:5], out[:, 5:]

    class YoloLoss(nn.Module):
        def __init__(self, lambda_box=5.0):
            super().__init__()
            self.lambda_box = lambda_box

        def forward(self, obj, box, cls, target):
            mask = target[:, 0] > 0
            obj_loss = F.binary_cross_entropy_with_logits(obj, target[:, 0])
            box, tbox = box.permute(0, 2, 3, 1), target[:, 1:5].permute(0, 2, 3, 1)
            box_loss = F.smooth_l1_loss(box[mask], tbox[mask])
            cls_loss = F.cross_entropy(cls.permute(0, 2, 3, 1)[mask], target[:, 5][mask].long())
            return obj_loss + self.lambda_box * box_loss + cls_loss

    model = TinyYolo()
    criterion = YoloLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = endless(loader)

    def step(i):
        model.train()
        imgs, targets = next(batches)
        obj, box, cls = model(imgs)
        loss = criterion(obj, box, cls, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            _, box, _ = model(val_x)
        model.train(was)
        m = val_t[:, 0] > 0
        return (box.permute(0, 2, 3, 1)[m] - val_t[:, 1:5].permute(0, 2, 3, 1)[m]).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seg_logits_view_without_permute_bad():
    torch.manual_seed(0)
    num_classes = 3
    train_x, train_m = seg_scenes(768, 22)
    val_x, val_m = seg_scenes(192, 23)
    train_dl = DataLoader(TensorDataset(train_x, train_m), batch_size=16, shuffle=True)

    class DoubleConv(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1, bias=False),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
                nn.Conv2d(o, o, 3, padding=1, bias=False),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
            )

        def forward(self, x):
            return self.net(x)

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.d1, self.d2 = DoubleConv(3, 12), DoubleConv(12, 24)
            self.up = nn.ConvTranspose2d(24, 12, 2, stride=2)
            self.u1 = DoubleConv(24, 12)
            self.outc = nn.Conv2d(12, num_classes, 1)

        def forward(self, x):
            a = self.d1(x)
            b = self.d2(F.max_pool2d(a, 2))
            return self.outc(self.u1(torch.cat([a, self.up(b)], 1)))

    model = UNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = endless(train_dl)

    def step(i):
        model.train()
        images, masks = next(batches)
        outputs = model(images)
        loss = criterion(outputs.view(-1, num_classes), masks.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(val_x).argmax(1) != val_m).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seg_logits_view_without_permute_good():
    torch.manual_seed(0)
    num_classes = 3
    train_x, train_m = seg_scenes(768, 22)
    val_x, val_m = seg_scenes(192, 23)
    train_dl = DataLoader(TensorDataset(train_x, train_m), batch_size=16, shuffle=True)

    class DoubleConv(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1, bias=False),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
                nn.Conv2d(o, o, 3, padding=1, bias=False),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
            )

        def forward(self, x):
            return self.net(x)

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.d1, self.d2 = DoubleConv(3, 12), DoubleConv(12, 24)
            self.up = nn.ConvTranspose2d(24, 12, 2, stride=2)
            self.u1 = DoubleConv(24, 12)
            self.outc = nn.Conv2d(12, num_classes, 1)

        def forward(self, x):
            a = self.d1(x)
            b = self.d2(F.max_pool2d(a, 2))
            return self.outc(self.u1(torch.cat([a, self.up(b)], 1)))

    model = UNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = endless(train_dl)

    def step(i):
        model.train()
        images, masks = next(batches)
        outputs = model(images)
        loss = criterion(outputs.permute(0, 2, 3, 1).reshape(-1, num_classes), masks.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(val_x).argmax(1) != val_m).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keypoints_not_flipped_with_image_bad():
    torch.manual_seed(0)
    train_x, train_k = face_like(1024, 24)
    val_x, val_k = face_like(256, 25)

    class KeypointDataset(Dataset):
        def __init__(self, images, keypoints, train=True):
            self.images, self.keypoints, self.train = images, keypoints, train

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            image = self.images[idx]
            kpts = self.keypoints[idx].clone()
            if self.train and random.random() < 0.5:
                image = torch.flip(image, dims=[2])
            return {"image": image, "keypoints": kpts.reshape(-1)}

    class KeypointNet(nn.Module):
        def __init__(self, n_points=3):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            self.fc1 = nn.Linear(32 * 6 * 6, 96)
            self.fc2 = nn.Linear(96, 2 * n_points)

        def forward(self, x):
            x = self.conv(x).flatten(1)
            return self.fc2(F.relu(self.fc1(x)))

    random.seed(0)
    model = KeypointNet()
    train_loader = DataLoader(KeypointDataset(train_x, train_k), batch_size=32, shuffle=True)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = endless(train_loader)

    def step(i):
        data = next(batches)
        output = model(data["image"])
        loss = criterion(output, data["keypoints"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            out = model(val_x).view(-1, 3, 2)
        return (out - val_k).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keypoints_not_flipped_with_image_good():
    torch.manual_seed(0)
    train_x, train_k = face_like(1024, 24)
    val_x, val_k = face_like(256, 25)

    class KeypointDataset(Dataset):
        def __init__(self, images, keypoints, train=True):
            self.images, self.keypoints, self.train = images, keypoints, train

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            image = self.images[idx]
            kpts = self.keypoints[idx].clone()
            if self.train and random.random() < 0.5:
                image = torch.flip(image, dims=[2])
                kpts[:, 0] = -kpts[:, 0]
            return {"image": image, "keypoints": kpts.reshape(-1)}

    class KeypointNet(nn.Module):
        def __init__(self, n_points=3):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            self.fc1 = nn.Linear(32 * 6 * 6, 96)
            self.fc2 = nn.Linear(96, 2 * n_points)

        def forward(self, x):
            x = self.conv(x).flatten(1)
            return self.fc2(F.relu(self.fc1(x)))

    random.seed(0)
    model = KeypointNet()
    train_loader = DataLoader(KeypointDataset(train_x, train_k), batch_size=32, shuffle=True)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = endless(train_loader)

    def step(i):
        data = next(batches)
        output = model(data["image"])
        loss = criterion(output, data["keypoints"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            out = model(val_x).view(-1, 3, 2)
        return (out - val_k).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def flow_warp_grid_rows_first_bad():
    torch.manual_seed(0)
    f1, f2, _ = frame_pairs(1536, 26)
    v1, v2, v_uv = frame_pairs(256, 27)
    loader = DataLoader(TensorDataset(f1, f2), batch_size=32, shuffle=True)

    def warp(img, flow):
        """sample img at x + flow; flow is (B, 2, H, W) in pixels, channel 0 = u (x), 1 = v (y)"""
        B, _, H, W = img.shape
        yy, xx = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
        gx = 2.0 * (xx.unsqueeze(0) + flow[:, 0]) / (W - 1) - 1.0
        gy = 2.0 * (yy.unsqueeze(0) + flow[:, 1]) / (H - 1) - 1.0
        grid = torch.stack((gy, gx), dim=3)
        return F.grid_sample(img, grid, mode="bilinear", padding_mode="border", align_corners=True)

    class FlowNetTiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(
                nn.Conv2d(2, 24, 5, padding=2),
                nn.LeakyReLU(0.1),
                nn.Conv2d(24, 32, 3, stride=2, padding=1),
                nn.LeakyReLU(0.1),
                nn.Conv2d(32, 48, 3, stride=2, padding=1),
                nn.LeakyReLU(0.1),
                nn.Conv2d(48, 48, 3, padding=1),
                nn.LeakyReLU(0.1),
            )
            self.pred = nn.Conv2d(48, 2, 3, padding=1)

        def forward(self, a, b):
            flow = self.pred(self.enc(torch.cat([a, b], 1)))
            return F.interpolate(flow, size=a.shape[-2:], mode="bilinear", align_corners=False)

    def charbonnier(x, eps=1e-3):
        return torch.sqrt(x * x + eps * eps).mean()

    def smoothness(flow):
        return charbonnier(flow[..., 1:] - flow[..., :-1]) + charbonnier(flow[..., 1:, :] - flow[..., :-1, :])

    model = FlowNetTiny()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = endless(loader)

    def step(i):
        im1, im2 = next(batches)
        flow = model(im1, im2)
        loss = charbonnier(warp(im2, flow) - im1) + 0.1 * smoothness(flow)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            flow = model(v1, v2)
        return (flow - v_uv[:, :, None, None]).norm(dim=1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def flow_warp_grid_rows_first_good():
    torch.manual_seed(0)
    f1, f2, _ = frame_pairs(1536, 26)
    v1, v2, v_uv = frame_pairs(256, 27)
    loader = DataLoader(TensorDataset(f1, f2), batch_size=32, shuffle=True)

    def warp(img, flow):
        """sample img at x + flow; flow is (B, 2, H, W) in pixels, channel 0 = u (x), 1 = v (y)"""
        B, _, H, W = img.shape
        yy, xx = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
        gx = 2.0 * (xx.unsqueeze(0) + flow[:, 0]) / (W - 1) - 1.0
        gy = 2.0 * (yy.unsqueeze(0) + flow[:, 1]) / (H - 1) - 1.0
        grid = torch.stack((gx, gy), dim=3)
        return F.grid_sample(img, grid, mode="bilinear", padding_mode="border", align_corners=True)

    class FlowNetTiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(
                nn.Conv2d(2, 24, 5, padding=2),
                nn.LeakyReLU(0.1),
                nn.Conv2d(24, 32, 3, stride=2, padding=1),
                nn.LeakyReLU(0.1),
                nn.Conv2d(32, 48, 3, stride=2, padding=1),
                nn.LeakyReLU(0.1),
                nn.Conv2d(48, 48, 3, padding=1),
                nn.LeakyReLU(0.1),
            )
            self.pred = nn.Conv2d(48, 2, 3, padding=1)

        def forward(self, a, b):
            flow = self.pred(self.enc(torch.cat([a, b], 1)))
            return F.interpolate(flow, size=a.shape[-2:], mode="bilinear", align_corners=False)

    def charbonnier(x, eps=1e-3):
        return torch.sqrt(x * x + eps * eps).mean()

    def smoothness(flow):
        return charbonnier(flow[..., 1:] - flow[..., :-1]) + charbonnier(flow[..., 1:, :] - flow[..., :-1, :])

    model = FlowNetTiny()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = endless(loader)

    def step(i):
        im1, im2 = next(batches)
        flow = model(im1, im2)
        loss = charbonnier(warp(im2, flow) - im1) + 0.1 * smoothness(flow)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            flow = model(v1, v2)
        return (flow - v_uv[:, :, None, None]).norm(dim=1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def denoiser_target_overwritten_in_place_bad():
    torch.manual_seed(0)
    train_x = (clean_shapes(1024, 28)[0] - 0.2) / 0.3
    val_x = (clean_shapes(192, 29)[0] - 0.2) / 0.3
    val_noisy = val_x + 0.7 * torch.randn(val_x.shape, generator=torch.Generator().manual_seed(30))
    loader = DataLoader(TensorDataset(train_x), batch_size=32, shuffle=True)

    class DenoisingNet(nn.Module):
        def __init__(self, ch=24):
            super().__init__()
            self.inp = nn.Conv2d(1, ch, 3, padding=1)
            self.down = nn.Conv2d(ch, ch, 3, stride=2, padding=1)
            self.mid = nn.Conv2d(ch, ch, 3, padding=1)
            self.up = nn.ConvTranspose2d(ch, ch, 4, stride=2, padding=1)
            self.out = nn.Conv2d(2 * ch, 1, 3, padding=1)

        def forward(self, x):
            a = F.relu(self.inp(x))
            b = F.relu(self.mid(F.relu(self.down(a))))
            return self.out(torch.cat([a, F.relu(self.up(b))], 1))

    model = DenoisingNet()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sigma = 0.7
    batches = endless(loader)

    def step(i):
        (clean,) = next(batches)
        noisy = clean
        noisy += sigma * torch.randn_like(clean)
        restored = model(noisy)
        loss = criterion(restored, clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(val_noisy), val_x).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def denoiser_target_overwritten_in_place_good():
    torch.manual_seed(0)
    train_x = (clean_shapes(1024, 28)[0] - 0.2) / 0.3
    val_x = (clean_shapes(192, 29)[0] - 0.2) / 0.3
    val_noisy = val_x + 0.7 * torch.randn(val_x.shape, generator=torch.Generator().manual_seed(30))
    loader = DataLoader(TensorDataset(train_x), batch_size=32, shuffle=True)

    class DenoisingNet(nn.Module):
        def __init__(self, ch=24):
            super().__init__()
            self.inp = nn.Conv2d(1, ch, 3, padding=1)
            self.down = nn.Conv2d(ch, ch, 3, stride=2, padding=1)
            self.mid = nn.Conv2d(ch, ch, 3, padding=1)
            self.up = nn.ConvTranspose2d(ch, ch, 4, stride=2, padding=1)
            self.out = nn.Conv2d(2 * ch, 1, 3, padding=1)

        def forward(self, x):
            a = F.relu(self.inp(x))
            b = F.relu(self.mid(F.relu(self.down(a))))
            return self.out(torch.cat([a, F.relu(self.up(b))], 1))

    model = DenoisingNet()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sigma = 0.7
    batches = endless(loader)

    def step(i):
        (clean,) = next(batches)
        noisy = clean + sigma * torch.randn_like(clean)
        restored = model(noisy)
        loss = criterion(restored, clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(val_noisy), val_x).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def style_features_of_output_under_no_grad_bad():
    torch.manual_seed(0)
    train_x = rgb_textures(512, 31)
    val_x = rgb_textures(64, 32)
    g = torch.Generator().manual_seed(33)
    ax = torch.arange(24).float()
    style_img = torch.stack(
        [
            torch.sin(ax.view(1, 24) * 1.6).expand(24, 24),
            torch.sin(ax.view(24, 1) * 0.8 + ax.view(1, 24) * 0.8),
            torch.randn(24, 24, generator=g),
        ]
    ).unsqueeze(0)
    loader = DataLoader(TensorDataset(train_x), batch_size=8, shuffle=True)

    class LossNet(nn.Module):
        """stands in for the first blocks of VGG16; frozen"""

        def __init__(self):
            super().__init__()
            self.block1 = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
            self.block2 = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
            for m in self.modules():
                if isinstance(m, nn.Conv2d):
                    nn.init.kaiming_normal_(m.weight)
                    nn.init.zeros_(m.bias)
            for p in self.parameters():
                p.requires_grad = False

        def forward(self, x):
            r1 = self.block1(x)
            return r1, self.block2(r1)

    class TransformerNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1 = nn.Conv2d(3, 16, 5, padding=2, padding_mode="reflect")
            self.in1 = nn.InstanceNorm2d(16, affine=True)
            self.c2 = nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect")
            self.in2 = nn.InstanceNorm2d(16, affine=True)
            self.c3 = nn.Conv2d(16, 3, 5, padding=2, padding_mode="reflect")

        def forward(self, x):
            y = F.relu(self.in1(self.c1(x)))
            y = y + F.relu(self.in2(self.c2(y)))
            return self.c3(y)

    def gram_matrix(y):
        b, ch, h, w = y.size()
        f = y.view(b, ch, h * w)
        return f.bmm(f.transpose(1, 2)) / (h * w)

    vgg = LossNet().eval()
    transformer = TransformerNet()
    optimizer = torch.optim.Adam(transformer.parameters(), lr=2e-3)
    mse = nn.MSELoss()
    gram_style = [gram_matrix(f) for f in vgg(style_img)]
    content_weight, style_weight, tv_weight = 1.0, 1.0, 1e-3
    batches = endless(loader)

    def losses(feats_y, feats_x):
        content = mse(feats_y[1], feats_x[1])
        style = sum(mse(gram_matrix(f), gs.expand(f.size(0), -1, -1)) for f, gs in zip(feats_y, gram_style))
        return content_weight * content + style_weight * style

    def step(i):
        transformer.train()
        (x,) = next(batches)
        optimizer.zero_grad()
        y = transformer(x)
        with torch.no_grad():
            features_x = vgg(x)
            features_y = vgg(y)
        tv = (y[..., 1:] - y[..., :-1]).abs().mean() + (y[..., 1:, :] - y[..., :-1, :]).abs().mean()
        total_loss = losses(features_y, features_x) + tv_weight * tv
        total_loss.backward()
        optimizer.step()
        return total_loss.item()

    def probe():
        with torch.no_grad():
            return losses(vgg(transformer(val_x)), vgg(val_x)).item()

    return {"model": transformer, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def style_features_of_output_under_no_grad_good():
    torch.manual_seed(0)
    train_x = rgb_textures(512, 31)
    val_x = rgb_textures(64, 32)
    g = torch.Generator().manual_seed(33)
    ax = torch.arange(24).float()
    style_img = torch.stack(
        [
            torch.sin(ax.view(1, 24) * 1.6).expand(24, 24),
            torch.sin(ax.view(24, 1) * 0.8 + ax.view(1, 24) * 0.8),
            torch.randn(24, 24, generator=g),
        ]
    ).unsqueeze(0)
    loader = DataLoader(TensorDataset(train_x), batch_size=8, shuffle=True)

    class LossNet(nn.Module):
        """stands in for the first blocks of VGG16; frozen"""

        def __init__(self):
            super().__init__()
            self.block1 = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
            self.block2 = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
            for m in self.modules():
                if isinstance(m, nn.Conv2d):
                    nn.init.kaiming_normal_(m.weight)
                    nn.init.zeros_(m.bias)
            for p in self.parameters():
                p.requires_grad = False

        def forward(self, x):
            r1 = self.block1(x)
            return r1, self.block2(r1)

    class TransformerNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1 = nn.Conv2d(3, 16, 5, padding=2, padding_mode="reflect")
            self.in1 = nn.InstanceNorm2d(16, affine=True)
            self.c2 = nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect")
            self.in2 = nn.InstanceNorm2d(16, affine=True)
            self.c3 = nn.Conv2d(16, 3, 5, padding=2, padding_mode="reflect")

        def forward(self, x):
            y = F.relu(self.in1(self.c1(x)))
            y = y + F.relu(self.in2(self.c2(y)))
            return self.c3(y)

    def gram_matrix(y):
        b, ch, h, w = y.size()
        f = y.view(b, ch, h * w)
        return f.bmm(f.transpose(1, 2)) / (h * w)

    vgg = LossNet().eval()
    transformer = TransformerNet()
    optimizer = torch.optim.Adam(transformer.parameters(), lr=2e-3)
    mse = nn.MSELoss()
    gram_style = [gram_matrix(f) for f in vgg(style_img)]
    content_weight, style_weight, tv_weight = 1.0, 1.0, 1e-3
    batches = endless(loader)

    def losses(feats_y, feats_x):
        content = mse(feats_y[1], feats_x[1])
        style = sum(mse(gram_matrix(f), gs.expand(f.size(0), -1, -1)) for f, gs in zip(feats_y, gram_style))
        return content_weight * content + style_weight * style

    def step(i):
        transformer.train()
        (x,) = next(batches)
        optimizer.zero_grad()
        y = transformer(x)
        with torch.no_grad():
            features_x = vgg(x)
        features_y = vgg(y)
        tv = (y[..., 1:] - y[..., :-1]).abs().mean() + (y[..., 1:, :] - y[..., :-1, :]).abs().mean()
        total_loss = losses(features_y, features_x) + tv_weight * tv
        total_loss.backward()
        optimizer.step()
        return total_loss.item()

    def probe():
        with torch.no_grad():
            return losses(vgg(transformer(val_x)), vgg(val_x)).item()

    return {"model": transformer, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pointnet_layers_in_plain_list_bad():
    torch.manual_seed(0)
    train_p, train_y = point_clouds(1536, 34)
    test_p, test_y = point_clouds(512, 35)
    loader = DataLoader(TensorDataset(train_p, train_y), batch_size=32, shuffle=True)

    class PointNet(nn.Module):
        def __init__(self, num_classes=5, widths=(32, 32, 64)):
            super().__init__()
            layers = []
            cin = 3
            for w in widths:
                layers.append(nn.Conv1d(cin, w, 1))
                cin = w
            self.mlps = layers
            self.fc1 = nn.Linear(cin, 32)
            self.fc2 = nn.Linear(32, num_classes)

        def forward(self, pts):
            x = pts.transpose(2, 1)
            for conv in self.mlps:
                x = F.relu(conv(x))
            x = torch.max(x, 2)[0]
            return self.fc2(F.relu(self.fc1(x)))

    classifier = PointNet()
    optimizer = torch.optim.Adam(classifier.parameters(), lr=2e-3, betas=(0.9, 0.999))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10 * len(loader))
    batches = endless(loader)

    def step(i):
        points, target = next(batches)
        optimizer.zero_grad()
        classifier.train()
        pred = classifier(points)
        loss = F.cross_entropy(pred, target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (classifier(test_p).argmax(1) != test_y).float().mean().item()

    return {"model": classifier, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pointnet_layers_in_plain_list_good():
    torch.manual_seed(0)
    train_p, train_y = point_clouds(1536, 34)
    test_p, test_y = point_clouds(512, 35)
    loader = DataLoader(TensorDataset(train_p, train_y), batch_size=32, shuffle=True)

    class PointNet(nn.Module):
        def __init__(self, num_classes=5, widths=(32, 32, 64)):
            super().__init__()
            layers = []
            cin = 3
            for w in widths:
                layers.append(nn.Conv1d(cin, w, 1))
                cin = w
            self.mlps = nn.ModuleList(layers)
            self.fc1 = nn.Linear(cin, 32)
            self.fc2 = nn.Linear(32, num_classes)

        def forward(self, pts):
            x = pts.transpose(2, 1)
            for conv in self.mlps:
                x = F.relu(conv(x))
            x = torch.max(x, 2)[0]
            return self.fc2(F.relu(self.fc1(x)))

    classifier = PointNet()
    optimizer = torch.optim.Adam(classifier.parameters(), lr=2e-3, betas=(0.9, 0.999))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10 * len(loader))
    batches = endless(loader)

    def step(i):
        points, target = next(batches)
        optimizer.zero_grad()
        classifier.train()
        pred = classifier(points)
        loss = F.cross_entropy(pred, target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (classifier(test_p).argmax(1) != test_y).float().mean().item()

    return {"model": classifier, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def video_lstm_without_batch_first_bad():
    torch.manual_seed(0)
    train_v, train_y = moving_clips(1024, 36)
    test_v, test_y = moving_clips(256, 37)
    train_loader = DataLoader(TensorDataset(train_v, train_y), batch_size=16, shuffle=True)

    class CNNEncoder(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
            )
            self.fc = nn.Linear(256, dim)

        def forward(self, x):
            return F.relu(self.fc(self.conv(x).flatten(1)))

    class CRNN(nn.Module):
        def __init__(self, num_classes=5):
            super().__init__()
            self.cnn = CNNEncoder()
            self.lstm = nn.LSTM(32, 48)
            self.classifier = nn.Linear(48, num_classes)

        def forward(self, clips):
            B, T = clips.shape[:2]
            feats = self.cnn(clips.flatten(0, 1)).view(B, T, -1)
            out, _ = self.lstm(feats)
            return self.classifier(out[:, -1])

    model = CRNN()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = endless(train_loader)

    def step(i):
        model.train()
        X, y = next(batches)
        optimizer.zero_grad()
        output = model(X)
        loss = criterion(output, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(test_v).argmax(1) != test_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def video_lstm_without_batch_first_good():
    torch.manual_seed(0)
    train_v, train_y = moving_clips(1024, 36)
    test_v, test_y = moving_clips(256, 37)
    train_loader = DataLoader(TensorDataset(train_v, train_y), batch_size=16, shuffle=True)

    class CNNEncoder(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
            )
            self.fc = nn.Linear(256, dim)

        def forward(self, x):
            return F.relu(self.fc(self.conv(x).flatten(1)))

    class CRNN(nn.Module):
        def __init__(self, num_classes=5):
            super().__init__()
            self.cnn = CNNEncoder()
            self.lstm = nn.LSTM(32, 48, batch_first=True)
            self.classifier = nn.Linear(48, num_classes)

        def forward(self, clips):
            B, T = clips.shape[:2]
            feats = self.cnn(clips.flatten(0, 1)).view(B, T, -1)
            out, _ = self.lstm(feats)
            return self.classifier(out[:, -1])

    model = CRNN()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = endless(train_loader)

    def step(i):
        model.train()
        X, y = next(batches)
        optimizer.zero_grad()
        output = model(X)
        loss = criterion(output, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(test_v).argmax(1) != test_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def steplr_stepped_every_batch_bad():
    torch.manual_seed(0)
    train_x, train_y = colour_shapes(512, 38, noise=0.25)
    valid_x, valid_y = colour_shapes(512, 39, noise=0.25)
    train_loader = DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True)

    class BasicBlock(nn.Module):
        def __init__(self, cin, cout, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(cout)
            self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(cout)
            self.short = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

        def forward(self, x):
            out = F.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            return F.relu(out + self.short(x))

    model = nn.Sequential(BasicBlock(3, 12, 2), BasicBlock(12, 24, 2), nn.Flatten(), nn.Linear(24 * 36, 8))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    batches = endless(train_loader)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(valid_x).argmax(1) != valid_y).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def steplr_stepped_every_batch_good():
    torch.manual_seed(0)
    train_x, train_y = colour_shapes(512, 38, noise=0.25)
    valid_x, valid_y = colour_shapes(512, 39, noise=0.25)
    train_loader = DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True)

    class BasicBlock(nn.Module):
        def __init__(self, cin, cout, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(cout)
            self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(cout)
            self.short = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

        def forward(self, x):
            out = F.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            return F.relu(out + self.short(x))

    model = nn.Sequential(BasicBlock(3, 12, 2), BasicBlock(12, 24, 2), nn.Flatten(), nn.Linear(24 * 36, 8))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    batches = endless(train_loader)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(train_loader) == 0:
            scheduler.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(valid_x).argmax(1) != valid_y).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_before_unscale_bad():
    torch.manual_seed(0)

    def pairs(n, seed):
        g = torch.Generator().manual_seed(seed)
        hr = torch.randn(n, 1, 8, 8, generator=g)
        hr = F.interpolate(hr, size=(24, 24), mode="bicubic", align_corners=False)
        hr = torch.tanh(3 * hr)
        lr = F.interpolate(hr, scale_factor=0.5, mode="area")
        return F.interpolate(lr, scale_factor=2, mode="bicubic", align_corners=False), hr

    train_lr, train_hr = pairs(512, 40)
    val_lr, val_hr = pairs(64, 41)
    loader = DataLoader(TensorDataset(train_lr, train_hr), batch_size=8, shuffle=True)

    class VDSR(nn.Module):
        def __init__(self, depth=3, ch=16):
            super().__init__()
            body = [nn.Conv2d(1, ch, 3, padding=1), nn.ReLU(inplace=True)]
            for _ in range(depth - 2):
                body += [nn.Conv2d(ch, ch, 3, padding=1), nn.ReLU(inplace=True)]
            body += [nn.Conv2d(ch, 1, 3, padding=1)]
            self.body = nn.Sequential(*body)
            for m in self.modules():
                if isinstance(m, nn.Conv2d):
                    nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
                    nn.init.zeros_(m.bias)
            nn.init.normal_(self.body[-1].weight, std=0.02)

        def forward(self, x):
            return x + self.body(x)

    model = VDSR()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.MSELoss()
    batches = endless(loader)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
            loss = criterion(out.float(), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(val_lr), val_hr).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_before_unscale_good():
    torch.manual_seed(0)

    def pairs(n, seed):
        g = torch.Generator().manual_seed(seed)
        hr = torch.randn(n, 1, 8, 8, generator=g)
        hr = F.interpolate(hr, size=(24, 24), mode="bicubic", align_corners=False)
        hr = torch.tanh(3 * hr)
        lr = F.interpolate(hr, scale_factor=0.5, mode="area")
        return F.interpolate(lr, scale_factor=2, mode="bicubic", align_corners=False), hr

    train_lr, train_hr = pairs(512, 40)
    val_lr, val_hr = pairs(64, 41)
    loader = DataLoader(TensorDataset(train_lr, train_hr), batch_size=8, shuffle=True)

    class VDSR(nn.Module):
        def __init__(self, depth=3, ch=16):
            super().__init__()
            body = [nn.Conv2d(1, ch, 3, padding=1), nn.ReLU(inplace=True)]
            for _ in range(depth - 2):
                body += [nn.Conv2d(ch, ch, 3, padding=1), nn.ReLU(inplace=True)]
            body += [nn.Conv2d(ch, 1, 3, padding=1)]
            self.body = nn.Sequential(*body)
            for m in self.modules():
                if isinstance(m, nn.Conv2d):
                    nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
                    nn.init.zeros_(m.bias)
            nn.init.normal_(self.body[-1].weight, std=0.02)

        def forward(self, x):
            return x + self.body(x)

    model = VDSR()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.MSELoss()
    batches = endless(loader)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
            loss = criterion(out.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(val_lr), val_hr).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_regression_broadcast_loss_bad():
    torch.manual_seed(0)
    train_w, train_f = tones(2048, 42)
    test_w, test_f = tones(512, 43)
    loader = DataLoader(TensorDataset(train_w, train_f), batch_size=32, shuffle=True)

    class PitchNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(1, 16, 15, stride=2, padding=7),
                nn.ReLU(),
                nn.Conv1d(16, 32, 7, stride=2, padding=3),
                nn.ReLU(),
                nn.AdaptiveAvgPool1d(1),
            )
            self.fc = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, x):
            return self.fc(self.conv(x).squeeze(-1))

    model = PitchNet()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = endless(loader)

    def step(i):
        wav, pitch = next(batches)
        optimizer.zero_grad()
        pred = model(wav)
        loss = criterion(pred, pitch)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(test_w).squeeze(1) - test_f).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_regression_broadcast_loss_good():
    torch.manual_seed(0)
    train_w, train_f = tones(2048, 42)
    test_w, test_f = tones(512, 43)
    loader = DataLoader(TensorDataset(train_w, train_f), batch_size=32, shuffle=True)

    class PitchNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(1, 16, 15, stride=2, padding=7),
                nn.ReLU(),
                nn.Conv1d(16, 32, 7, stride=2, padding=3),
                nn.ReLU(),
                nn.AdaptiveAvgPool1d(1),
            )
            self.fc = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, x):
            return self.fc(self.conv(x).squeeze(-1))

    model = PitchNet()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = endless(loader)

    def step(i):
        wav, pitch = next(batches)
        optimizer.zero_grad()
        pred = model(wav)
        loss = criterion(pred.squeeze(1), pitch)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(test_w).squeeze(1) - test_f).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sorted_folders_without_shuffle_bad():
    torch.manual_seed(0)

    class FolderDataset(Dataset):
        """lists class_0/*, class_1/*, ... in order, as ImageFolder does"""

        def __init__(self, per_class, seed, transform=None):
            targets = torch.arange(8).repeat_interleave(per_class)
            self.images, self.targets = draw_shapes(len(targets), seed, labels=targets)
            self.transform = transform

        def __len__(self):
            return len(self.targets)

        def __getitem__(self, i):
            img = self.images[i]
            if self.transform is not None:
                img = self.transform(img)
            return img, self.targets[i]

    train_set = FolderDataset(64, 44)
    val_set = FolderDataset(48, 45)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=False)

    class LeNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1 = nn.Conv2d(1, 16, 3, padding=1)
            self.c2 = nn.Conv2d(16, 32, 3, padding=1)
            self.f1 = nn.Linear(512, 64)
            self.f2 = nn.Linear(64, 8)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.c1(x)), 2)
            x = F.max_pool2d(F.relu(self.c2(x)), 2)
            x = F.relu(self.f1(x.flatten(1)))
            return F.log_softmax(self.f2(x), dim=1)

    model = LeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = endless(train_loader)

    def step(i):
        model.train()
        data, target = next(batches)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(val_set.images).argmax(1) != val_set.targets).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sorted_folders_without_shuffle_good():
    torch.manual_seed(0)

    class FolderDataset(Dataset):
        """lists class_0/*, class_1/*, ... in order, as ImageFolder does"""

        def __init__(self, per_class, seed, transform=None):
            targets = torch.arange(8).repeat_interleave(per_class)
            self.images, self.targets = draw_shapes(len(targets), seed, labels=targets)
            self.transform = transform

        def __len__(self):
            return len(self.targets)

        def __getitem__(self, i):
            img = self.images[i]
            if self.transform is not None:
                img = self.transform(img)
            return img, self.targets[i]

    train_set = FolderDataset(64, 44)
    val_set = FolderDataset(48, 45)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)

    class LeNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1 = nn.Conv2d(1, 16, 3, padding=1)
            self.c2 = nn.Conv2d(16, 32, 3, padding=1)
            self.f1 = nn.Linear(512, 64)
            self.f2 = nn.Linear(64, 8)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.c1(x)), 2)
            x = F.max_pool2d(F.relu(self.c2(x)), 2)
            x = F.relu(self.f1(x.flatten(1)))
            return F.log_softmax(self.f2(x), dim=1)

    model = LeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = endless(train_loader)

    def step(i):
        model.train()
        data, target = next(batches)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(val_set.images).argmax(1) != val_set.targets).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def validation_leaves_model_in_eval_bad():
    torch.manual_seed(0)
    train_s, train_y = spectrograms(256, 46, noise=1.6)
    val_s, val_y = spectrograms(96, 47, noise=1.6)
    test_s, test_y = spectrograms(512, 48, noise=1.6)
    train_loader = DataLoader(TensorDataset(train_s, train_y), batch_size=32, shuffle=True)

    class KWS(nn.Module):
        def __init__(self, n=6):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Dropout(0.2),
                nn.Conv2d(16, 24, 3, padding=1, bias=False),
                nn.BatchNorm2d(24),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Dropout(0.5),
                nn.Linear(24 * 30, 64),
                nn.ReLU(),
                nn.Dropout(0.5),
                nn.Linear(64, n),
            )

        def forward(self, x):
            return self.net(x)

    model = KWS()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    n_batches = len(train_loader)
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            history.append((model(val_s).argmax(1) == val_y).float().mean().item())

    batches = endless(train_loader)
    model.train()

    def step(i):
        specs, labels = next(batches)
        loss = criterion(model(specs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % n_batches == 0:
            validate()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            loss = criterion(model(test_s), test_y).item()
        model.train(was)
        return loss

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def validation_leaves_model_in_eval_good():
    torch.manual_seed(0)
    train_s, train_y = spectrograms(256, 46, noise=1.6)
    val_s, val_y = spectrograms(96, 47, noise=1.6)
    test_s, test_y = spectrograms(512, 48, noise=1.6)
    train_loader = DataLoader(TensorDataset(train_s, train_y), batch_size=32, shuffle=True)

    class KWS(nn.Module):
        def __init__(self, n=6):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Dropout(0.2),
                nn.Conv2d(16, 24, 3, padding=1, bias=False),
                nn.BatchNorm2d(24),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Dropout(0.5),
                nn.Linear(24 * 30, 64),
                nn.ReLU(),
                nn.Dropout(0.5),
                nn.Linear(64, n),
            )

        def forward(self, x):
            return self.net(x)

    model = KWS()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    n_batches = len(train_loader)
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            history.append((model(val_s).argmax(1) == val_y).float().mean().item())

    batches = endless(train_loader)
    model.train()

    def step(i):
        if i % n_batches == 0:
            model.train()
        specs, labels = next(batches)
        loss = criterion(model(specs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % n_batches == 0:
            validate()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            loss = criterion(model(test_s), test_y).item()
        model.train(was)
        return loss

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
