"""Small training programs, each with a mended twin."""
import contextlib
import copy
import itertools
import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)

CASES = [
    {"name": 'face_age_regression_outer_difference',
     "what": 'The network returns [B, 1] and the ages are [B], so the hand-written squared error is taken over a [B, B] table. Every prediction is pulled to the batch mean age and the image is ignored.',
     "steps": 300},
    {"name": 'distill_kl_on_probabilities',
     "what": "F.kl_div gets softmax probabilities as its first argument where it needs log-probabilities. The distillation term is then linear in the student's probabilities, so it hardens to the teacher's top class instead of matching its soft distribution.",
     "steps": 300},
    {"name": 'vae_kl_mean_against_summed_reconstruction',
     "what": 'The reconstruction error is summed over batch and pixels but the KL term is averaged over batch and latents, so the KL counts for about a thousandth of its share. The posterior runs far from the prior and the ELBO is poor.',
     "steps": 300},
    {"name": 'detector_giou_gets_center_boxes',
     "what": 'The GIoU loss expects corner boxes (x1, y1, x2, y2) but prediction and target are handed over as (cx, cy, w, h). Areas and overlaps are meaningless and the term pulls boxes away from the object.',
     "steps": 300},
    {"name": 'audio_tagging_softmax_cross_entropy',
     "what": 'Clips carry several tags at once (multi-hot targets) but are trained with nn.CrossEntropyLoss, which makes the tags compete for one unit of probability. The logits have no absolute meaning, clips with several tags are then not scored as independent probabilities.',
     "steps": 250},
    {"name": 'ddpm_target_noise_drawn_twice',
     "what": 'The noise that corrupts the image and the noise that the network is asked to predict are two separate draws. The target cannot be told from the input, the network learns to answer zero and the loss stays at 1.',
     "steps": 300},
    {"name": 'new_head_after_optimizer',
     "what": 'The optimizer with its parameter groups is built first and model.fc is swapped for the new head afterwards. The optimizer still holds the discarded layer, so the new classifier keeps its random weights.',
     "steps": 150},
    {"name": 'rezero_gate_and_zero_conv',
     "what": "Every residual branch ends in a zero-initialised convolution and is also multiplied by a gate that starts at zero. Each factor's gradient contains the other factor, both are zero for ever, so no residual branch ever trains.",
     "steps": 300},
    {"name": 'flow_matching_weights_kept_in_bfloat16',
     "what": 'The whole network is cast to bfloat16 and the optimizer updates those bfloat16 weights. An update of about 2e-4 is less than half the spacing of bfloat16 numbers at the size of most weights, so it rounds back to the old value and most of the network stands still.',
     "steps": 1500},
    {"name": 'wgan_gradient_penalty_without_graph',
     "what": "The input gradient for the gradient penalty is taken without create_graph=True. The penalty is then a plain number with no path to the critic's weights; the critic is unconstrained and its slopes grow without bound.",
     "steps": 120},
    {"name": 'segmentation_logits_viewed_not_permuted',
     "what": '[B, C, H, W] logits are flattened with view(-1, C) without moving the channel axis last. The rows of the flattened logits mix neighbouring pixels of one channel and do not belong to the labels beside them.',
     "steps": 200},
    {"name": 'audio_transformer_padding_mask_inverted',
     "what": 'nn.MultiheadAttention ignores positions where key_padding_mask is True, but the mask passed in is True for real frames. Attention sees only the zero padding and the clip summary never looks at the sound.',
     "steps": 250},
    {"name": 'simsiam_target_keeps_its_gradient',
     "what": 'The projections that serve as targets in SimSiam are not detached. The loss can then be lowered from both sides and all images collapse towards one embedding.',
     "steps": 300},
    {"name": 'attribute_heads_are_one_layer',
     "what": 'The three attribute heads are made with list multiplication, so they are the same nn.Linear object three times. All attributes get the same logits and the one layer is torn between three targets.',
     "steps": 250},
    {"name": 'triplet_masked_minimum_is_zero',
     "what": 'Batch-hard mining multiplies the distance matrix by the negative mask before taking the minimum. The masked-out entries are zero, so the hardest negative distance is always zero, carries no gradient, and the loss only shrinks distances between positives.',
     "steps": 300},
    {"name": 'keypoints_not_mirrored_with_the_image',
     "what": 'The random horizontal flip mirrors the image but not the keypoint coordinates. Half of the training targets are on the wrong side and the network is drawn to the centre line.',
     "steps": 300},
    {"name": 'class_folders_read_in_order',
     "what": 'The data set lists its files class folder by class folder and the loader does not shuffle. Each batch holds a single class, the network chases whichever class is on and forgets the others.',
     "steps": 240},
    {"name": 'mean_teacher_update_rebinds_the_name',
     "what": "The moving-average update assigns to the loop variable instead of writing into the teacher's parameter. The teacher never leaves its random start and the consistency term ties the student to it.",
     "steps": 300},
    {"name": 'masked_autoencoder_mask_result_dropped',
     "what": 'masked_fill returns a new tensor and the result is thrown away, so the patches to be predicted are still in the input. The network learns to copy them and cannot fill in anything that is really hidden.',
     "steps": 300},
    {"name": 'gan_generator_step_on_detached_fake',
     "what": "The fake batch is detached where it is made, for the discriminator's sake, and the same tensor is used again in the generator step. The generator's loss looks normal but no gradient reaches the generator, which stays at its random start.",
     "steps": 600},
    {"name": 'audio_gru_reads_across_the_batch',
     "what": 'The clips arrive as [batch, time, mel] but nn.GRU is left with batch_first=False, so it takes the batch as the time axis. The state runs from clip to clip at each frame and the last frame never sees the earlier part of its own clip.',
     "steps": 250},
    {"name": 'segmentation_ema_teacher_without_buffers',
     "what": 'The EMA teacher is updated over parameters() only, so the running statistics of its batch norms stay at 0 and 1. Its eval-mode pseudo-targets do not fit its weights and the student is trained towards them.',
     "steps": 300},
]

PROBES = {
    'face_age_regression_outer_difference': 'mean squared error of the predicted (normalised) age on held-out faces',
    'distill_kl_on_probabilities': "true KL divergence from the teacher's to the student's softened distribution on held-out images",
    'vae_kl_mean_against_summed_reconstruction': 'negative ELBO per held-out image (both terms summed over their dimensions)',
    'detector_giou_gets_center_boxes': 'one minus the mean IoU of predicted and true box on held-out images',
    'audio_tagging_softmax_cross_entropy': 'mean binary cross entropy per tag of sigmoid(logits) on held-out clips',
    'ddpm_target_noise_drawn_twice': 'mean squared error of the predicted noise on held-out images at fixed times and noise',
    'new_head_after_optimizer': 'cross entropy on held-out images of the new task',
    'rezero_gate_and_zero_conv': 'cross entropy on held-out images',
    'flow_matching_weights_kept_in_bfloat16': 'flow-matching mean squared error on held-out points with fixed times and noise',
    'wgan_gradient_penalty_without_graph': 'mean of (gradient norm - 1)^2 of the critic on held-out interpolates',
    'segmentation_logits_viewed_not_permuted': 'pixel cross entropy on held-out scenes',
    'audio_transformer_padding_mask_inverted': 'cross entropy on held-out clips',
    'simsiam_target_keeps_its_gradient': 'mean cosine similarity between the projections of different held-out images (1 = collapsed)',
    'attribute_heads_are_one_layer': 'mean binary cross entropy of the attributes on held-out images',
    'triplet_masked_minimum_is_zero': 'leave-one-out nearest-neighbour class error of the embeddings of held-out images',
    'keypoints_not_mirrored_with_the_image': 'mean squared error of the keypoint coordinates on held-out, unflipped images',
    'class_folders_read_in_order': 'cross entropy on held-out clips',
    'mean_teacher_update_rebinds_the_name': 'cross entropy of the student on held-out images',
    'masked_autoencoder_mask_result_dropped': 'mean squared error on the hidden patches of held-out images, hidden for real',
    'gan_generator_step_on_detached_fake': 'squared MMD (Gaussian kernel) between generated and held-out points',
    'audio_gru_reads_across_the_batch': 'cross entropy on held-out clips',
    'segmentation_ema_teacher_without_buffers': 'pixel cross entropy of the student on held-out scenes',
}


# ---------------------------------------------------------------- synthetic data
def pattern_images(n, classes=6, size=16, ch=3, noise=0.6, seed=0, shift=3):
    """Class templates, rolled and scaled at random, with pixel noise."""
    g = torch.Generator().manual_seed(1234)
    low = torch.randn(classes, ch, 5, 5, generator=g)
    templates = F.interpolate(low, size=(size, size), mode="bicubic", align_corners=False)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    x = templates[y] * (0.7 + 0.6 * torch.rand(n, 1, 1, 1, generator=g))
    sh = torch.randint(-shift, shift + 1, (n, 2), generator=g)
    x = torch.stack([torch.roll(im, (int(a), int(b)), (1, 2)) for im, (a, b) in zip(x, sh)])
    return x + noise * torch.randn(x.shape, generator=g), y


def rectangle_scenes(n, size=32, seed=0, noise=0.3):
    """One bright rectangle per image; boxes are (cx, cy, w, h) in 0..1."""
    g = torch.Generator().manual_seed(seed)
    wh = 0.2 + 0.3 * torch.rand(n, 2, generator=g)
    c = wh / 2 + (1 - wh) * torch.rand(n, 2, generator=g)
    grid = (torch.arange(size) + 0.5) / size
    inx = ((grid[None] - c[:, :1]).abs() < wh[:, :1] / 2).float()
    iny = ((grid[None] - c[:, 1:]).abs() < wh[:, 1:] / 2).float()
    m = iny[:, :, None] * inx[:, None, :]
    x = m[:, None] + noise * torch.randn(n, 1, size, size, generator=g)
    return x, torch.cat([c, wh], 1)


def blob_scenes(n, size=24, classes=4, seed=0, noise=0.4):
    """Discs of three kinds (colour codes the class) on background; returns image and label map."""
    g = torch.Generator().manual_seed(seed)
    colours = torch.tensor([[0., 0., 0.], [1., 0., .3], [0., 1., .3], [.5, .5, 1.]])
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    lab = torch.zeros(n, size, size, dtype=torch.long)
    for i in range(n):
        for _ in range(3):
            cx, cy = torch.randint(3, size - 3, (2,), generator=g).tolist()
            r = int(torch.randint(3, 7, (1,), generator=g))
            k = int(torch.randint(1, classes, (1,), generator=g))
            lab[i][(xx - cx) ** 2 + (yy - cy) ** 2 < r * r] = k
    x = colours[lab].permute(0, 3, 1, 2) + noise * torch.randn(n, 3, size, size, generator=g)
    return x, lab


def two_moons(n, seed=0, noise=0.08):
    g = torch.Generator().manual_seed(seed)
    t = math.pi * torch.rand(n, generator=g)
    k = torch.randint(0, 2, (n,), generator=g).float()
    x = torch.stack([torch.cos(t) * (1 - 2 * k) + k, torch.sin(t) * (1 - 2 * k) + 0.5 * k], 1)
    x = x + noise * torch.randn(n, 2, generator=g)
    return (x - torch.tensor([0.5, 0.25])) / torch.tensor([0.87, 0.5])


def forever(loader):
    while True:
        yield from loader


@contextlib.contextmanager
def held_out(*modules):
    """Eval mode, no grad, and everything put back as it was (modes and random state)."""
    modes = [(m, m.training) for mod in modules for m in mod.modules()]
    state, pystate, npstate = torch.get_rng_state(), random.getstate(), np.random.get_state()
    for mod in modules:
        mod.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, t in modes:
            m.training = t
        torch.set_rng_state(state)
        random.setstate(pystate)
        np.random.set_state(npstate)


# ---------------------------------------------------------------- face_age_regression_outer_difference
def face_age_regression_outer_difference_bad():
    torch.manual_seed(0)
    class AgeNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
                nn.AdaptiveAvgPool2d(1))
            self.fc = nn.Linear(32, 1)

        def forward(self, x):
            return self.fc(self.features(x).flatten(1))

    def faces(n, seed):
        g = torch.Generator().manual_seed(seed)
        age = 20 + 60 * torch.rand(n, generator=g)
        rows = torch.arange(20.)
        phase = 6.28 * torch.rand(n, 1, generator=g)
        wrinkles = torch.sin(rows[None] * 2.0 + phase) * (age[:, None] / 50)
        x = wrinkles[:, None, :, None].expand(n, 1, 20, 20) + 0.5 * torch.randn(n, 1, 20, 20, generator=g)
        return x, age

    imgs, ages = faces(1024, seed=1)
    val_imgs, val_ages = faces(256, seed=2)
    mean, std = ages.mean(), ages.std()
    loader = DataLoader(TensorDataset(imgs, (ages - mean) / std), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    net = AgeNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        net.train()
        img, age = next(batches)
        optimizer.zero_grad()
        pred = net(img)
        loss = ((pred - age) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(net):
            pred = net(val_imgs).view(-1)
            return F.mse_loss(pred, (val_ages - mean) / std).item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def face_age_regression_outer_difference_good():
    torch.manual_seed(0)
    class AgeNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
                nn.AdaptiveAvgPool2d(1))
            self.fc = nn.Linear(32, 1)

        def forward(self, x):
            return self.fc(self.features(x).flatten(1))

    def faces(n, seed):
        g = torch.Generator().manual_seed(seed)
        age = 20 + 60 * torch.rand(n, generator=g)
        rows = torch.arange(20.)
        phase = 6.28 * torch.rand(n, 1, generator=g)
        wrinkles = torch.sin(rows[None] * 2.0 + phase) * (age[:, None] / 50)
        x = wrinkles[:, None, :, None].expand(n, 1, 20, 20) + 0.5 * torch.randn(n, 1, 20, 20, generator=g)
        return x, age

    imgs, ages = faces(1024, seed=1)
    val_imgs, val_ages = faces(256, seed=2)
    mean, std = ages.mean(), ages.std()
    loader = DataLoader(TensorDataset(imgs, (ages - mean) / std), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    net = AgeNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        net.train()
        img, age = next(batches)
        optimizer.zero_grad()
        pred = net(img).squeeze(1)
        loss = ((pred - age) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(net):
            pred = net(val_imgs).view(-1)
            return F.mse_loss(pred, (val_ages - mean) / std).item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- distill_kl_on_probabilities
def distill_kl_on_probabilities_bad():
    torch.manual_seed(0)
    def conv_bn(i, o, stride=1):
        return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    class Teacher(nn.Module):
        def __init__(self, num_classes=6):
            super().__init__()
            self.body = nn.Sequential(conv_bn(3, 24), conv_bn(24, 32, 2), conv_bn(32, 48, 2))
            self.fc = nn.Linear(48, num_classes)

        def forward(self, x):
            return self.fc(self.body(x).mean((2, 3)))

    class Student(nn.Module):
        def __init__(self, num_classes=6):
            super().__init__()
            self.body = nn.Sequential(conv_bn(3, 12, 2), conv_bn(12, 24, 2))
            self.fc = nn.Linear(24, num_classes)

        def forward(self, x):
            return self.fc(self.body(x).mean((2, 3)))

    x_train, y_train = pattern_images(1200, noise=1.2, seed=11)
    x_val, y_val = pattern_images(300, noise=1.2, seed=12)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=48, shuffle=True, drop_last=True)

    teacher = Teacher()
    t_opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for _ in range(4):
        for x, y in loader:
            t_opt.zero_grad()
            F.cross_entropy(teacher(x), y).backward()
            t_opt.step()
    teacher.eval().requires_grad_(False)

    student = Student()
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    T, alpha = 4.0, 0.9
    batches = forever(loader)

    def distillation_loss(s_logits, t_logits, target):
        soft = F.kl_div(F.softmax(s_logits / T, dim=1),
                        F.softmax(t_logits / T, dim=1), reduction="batchmean") * T * T
        hard = F.cross_entropy(s_logits, target)
        return alpha * soft + (1 - alpha) * hard

    def step(i):
        student.train()
        x, y = next(batches)
        with torch.no_grad():
            t_logits = teacher(x)
        loss = distillation_loss(student(x), t_logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(student, teacher):
            s = F.log_softmax(student(x_val) / T, 1)
            t = F.log_softmax(teacher(x_val) / T, 1)
            return F.kl_div(s, t, reduction="batchmean", log_target=True).item()

    return {"model": [student, teacher], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kl_on_probabilities_good():
    torch.manual_seed(0)
    def conv_bn(i, o, stride=1):
        return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    class Teacher(nn.Module):
        def __init__(self, num_classes=6):
            super().__init__()
            self.body = nn.Sequential(conv_bn(3, 24), conv_bn(24, 32, 2), conv_bn(32, 48, 2))
            self.fc = nn.Linear(48, num_classes)

        def forward(self, x):
            return self.fc(self.body(x).mean((2, 3)))

    class Student(nn.Module):
        def __init__(self, num_classes=6):
            super().__init__()
            self.body = nn.Sequential(conv_bn(3, 12, 2), conv_bn(12, 24, 2))
            self.fc = nn.Linear(24, num_classes)

        def forward(self, x):
            return self.fc(self.body(x).mean((2, 3)))

    x_train, y_train = pattern_images(1200, noise=1.2, seed=11)
    x_val, y_val = pattern_images(300, noise=1.2, seed=12)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=48, shuffle=True, drop_last=True)

    teacher = Teacher()
    t_opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for _ in range(4):
        for x, y in loader:
            t_opt.zero_grad()
            F.cross_entropy(teacher(x), y).backward()
            t_opt.step()
    teacher.eval().requires_grad_(False)

    student = Student()
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    T, alpha = 4.0, 0.9
    batches = forever(loader)

    def distillation_loss(s_logits, t_logits, target):
        soft = F.kl_div(F.log_softmax(s_logits / T, dim=1),
                        F.softmax(t_logits / T, dim=1), reduction="batchmean") * T * T
        hard = F.cross_entropy(s_logits, target)
        return alpha * soft + (1 - alpha) * hard

    def step(i):
        student.train()
        x, y = next(batches)
        with torch.no_grad():
            t_logits = teacher(x)
        loss = distillation_loss(student(x), t_logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(student, teacher):
            s = F.log_softmax(student(x_val) / T, 1)
            t = F.log_softmax(teacher(x_val) / T, 1)
            return F.kl_div(s, t, reduction="batchmean", log_target=True).item()

    return {"model": [student, teacher], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- vae_kl_mean_against_summed_reconstruction
def vae_kl_mean_against_summed_reconstruction_bad():
    torch.manual_seed(0)
    class VAE(nn.Module):
        def __init__(self, d=144, h=96, z=12):
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
            return self.fc4(F.relu(self.fc3(z)))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 144))
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def digits(n, seed):
        x, _ = pattern_images(n, classes=8, size=12, ch=1, noise=0.1, seed=seed, shift=2)
        return (x > 0.2).float()

    train_x, test_x = digits(1500, 21), digits(400, 22)
    loader = DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss_function(recon_x, x, mu, logvar):
        BCE = F.binary_cross_entropy_with_logits(recon_x, x.view(-1, 144), reduction="sum")
        KLD = -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())
        return BCE + KLD

    def step(i):
        model.train()
        (data,) = next(batches)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item() / len(data)

    def probe():
        with held_out(model):
            torch.manual_seed(5)
            recon, mu, logvar = model(test_x)
            bce = F.binary_cross_entropy_with_logits(recon, test_x.view(-1, 144), reduction="none").sum(1)
            kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
            return (bce + kl).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_kl_mean_against_summed_reconstruction_good():
    torch.manual_seed(0)
    class VAE(nn.Module):
        def __init__(self, d=144, h=96, z=12):
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
            return self.fc4(F.relu(self.fc3(z)))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 144))
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def digits(n, seed):
        x, _ = pattern_images(n, classes=8, size=12, ch=1, noise=0.1, seed=seed, shift=2)
        return (x > 0.2).float()

    train_x, test_x = digits(1500, 21), digits(400, 22)
    loader = DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss_function(recon_x, x, mu, logvar):
        BCE = F.binary_cross_entropy_with_logits(recon_x, x.view(-1, 144), reduction="sum")
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return BCE + KLD

    def step(i):
        model.train()
        (data,) = next(batches)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item() / len(data)

    def probe():
        with held_out(model):
            torch.manual_seed(5)
            recon, mu, logvar = model(test_x)
            bce = F.binary_cross_entropy_with_logits(recon, test_x.view(-1, 144), reduction="none").sum(1)
            kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
            return (bce + kl).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- detector_giou_gets_center_boxes
def detector_giou_gets_center_boxes_bad():
    torch.manual_seed(0)
    class BoxHead(nn.Module):
        def __init__(self):
            super().__init__()
            def block(i, o):
                return nn.Sequential(nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
            self.backbone = nn.Sequential(block(1, 16), block(16, 32), block(32, 32))
            self.mlp = nn.Sequential(nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, x):
            return self.mlp(self.backbone(x).flatten(1)).sigmoid()

    def box_cxcywh_to_xyxy(b):
        cx, cy, w, h = b.unbind(-1)
        return torch.stack([cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h], dim=-1)

    def pairwise_iou(a, b, generalized=True):
        lt, rb = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
        inter = (rb - lt).clamp(min=0).prod(1)
        area_a = (a[:, 2:] - a[:, :2]).clamp(min=0).prod(1)
        area_b = (b[:, 2:] - b[:, :2]).clamp(min=0).prod(1)
        union = area_a + area_b - inter + 1e-6
        iou = inter / union
        if not generalized:
            return iou
        hull = (torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])).clamp(min=0).prod(1) + 1e-6
        return iou - (hull - union) / hull

    images, boxes = rectangle_scenes(1024, seed=31)
    val_images, val_boxes = rectangle_scenes(256, seed=32)
    loader = DataLoader(TensorDataset(images, boxes), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)
    model = BoxHead()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)

    def criterion(pred, target):
        loss_bbox = F.l1_loss(pred, target)
        giou = pairwise_iou(pred, target)
        loss_giou = (1 - giou).mean()
        return loss_bbox + 2.0 * loss_giou

    def step(i):
        model.train()
        x, t = next(batches)
        loss = criterion(model(x), t)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            p = box_cxcywh_to_xyxy(model(val_images))
            return 1 - pairwise_iou(p, box_cxcywh_to_xyxy(val_boxes), generalized=False).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def detector_giou_gets_center_boxes_good():
    torch.manual_seed(0)
    class BoxHead(nn.Module):
        def __init__(self):
            super().__init__()
            def block(i, o):
                return nn.Sequential(nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
            self.backbone = nn.Sequential(block(1, 16), block(16, 32), block(32, 32))
            self.mlp = nn.Sequential(nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, x):
            return self.mlp(self.backbone(x).flatten(1)).sigmoid()

    def box_cxcywh_to_xyxy(b):
        cx, cy, w, h = b.unbind(-1)
        return torch.stack([cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h], dim=-1)

    def pairwise_iou(a, b, generalized=True):
        lt, rb = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
        inter = (rb - lt).clamp(min=0).prod(1)
        area_a = (a[:, 2:] - a[:, :2]).clamp(min=0).prod(1)
        area_b = (b[:, 2:] - b[:, :2]).clamp(min=0).prod(1)
        union = area_a + area_b - inter + 1e-6
        iou = inter / union
        if not generalized:
            return iou
        hull = (torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])).clamp(min=0).prod(1) + 1e-6
        return iou - (hull - union) / hull

    images, boxes = rectangle_scenes(1024, seed=31)
    val_images, val_boxes = rectangle_scenes(256, seed=32)
    loader = DataLoader(TensorDataset(images, boxes), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)
    model = BoxHead()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)

    def criterion(pred, target):
        loss_bbox = F.l1_loss(pred, target)
        giou = pairwise_iou(box_cxcywh_to_xyxy(pred), box_cxcywh_to_xyxy(target))
        loss_giou = (1 - giou).mean()
        return loss_bbox + 2.0 * loss_giou

    def step(i):
        model.train()
        x, t = next(batches)
        loss = criterion(model(x), t)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            p = box_cxcywh_to_xyxy(model(val_images))
            return 1 - pairwise_iou(p, box_cxcywh_to_xyxy(val_boxes), generalized=False).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- audio_tagging_softmax_cross_entropy
def audio_tagging_softmax_cross_entropy_bad():
    torch.manual_seed(0)
    class TaggingCNN(nn.Module):
        def __init__(self, n_tags):
            super().__init__()
            self.bn0 = nn.BatchNorm2d(1)
            self.c1 = nn.Conv2d(1, 16, (5, 3), padding=(2, 1))
            self.c2 = nn.Conv2d(16, 32, (5, 3), padding=(2, 1))
            self.fc = nn.Linear(32 * 10, n_tags)

        def forward(self, spec):
            x = self.bn0(spec)
            x = F.max_pool2d(F.relu(self.c1(x)), (2, 2))
            x = F.max_pool2d(F.relu(self.c2(x)), (2, 2))
            x = x.mean(dim=3)
            return self.fc(x.flatten(1))

    class ClipDataset(Dataset):
        def __init__(self, n, n_tags=8, seed=0):
            g = torch.Generator().manual_seed(seed)
            self.tags = (torch.rand(n, n_tags, generator=g) < 0.3).float()
            bands = torch.zeros(n_tags, 40)
            for k in range(n_tags):
                bands[k, 5 * k + 1:5 * k + 4] = 1.0
            gain = 0.3 + 0.5 * torch.rand(n, n_tags, generator=g)
            env = (torch.rand(n, 1, 1, 24, generator=g) < 0.7).float()
            self.spec = ((self.tags * gain) @ bands)[:, None, :, None] * env
            self.spec = self.spec + 1.2 * torch.randn(self.spec.shape, generator=g)

        def __len__(self):
            return len(self.tags)

        def __getitem__(self, i):
            return self.spec[i], self.tags[i]

    train, test = ClipDataset(800, seed=51), ClipDataset(250, seed=52)
    batches = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))
    model = TaggingCNN(8)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        spec, tags = next(batches)
        optimizer.zero_grad()
        output = model(spec)
        loss = criterion(output, tags)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.binary_cross_entropy_with_logits(model(test.spec), test.tags).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_tagging_softmax_cross_entropy_good():
    torch.manual_seed(0)
    class TaggingCNN(nn.Module):
        def __init__(self, n_tags):
            super().__init__()
            self.bn0 = nn.BatchNorm2d(1)
            self.c1 = nn.Conv2d(1, 16, (5, 3), padding=(2, 1))
            self.c2 = nn.Conv2d(16, 32, (5, 3), padding=(2, 1))
            self.fc = nn.Linear(32 * 10, n_tags)

        def forward(self, spec):
            x = self.bn0(spec)
            x = F.max_pool2d(F.relu(self.c1(x)), (2, 2))
            x = F.max_pool2d(F.relu(self.c2(x)), (2, 2))
            x = x.mean(dim=3)
            return self.fc(x.flatten(1))

    class ClipDataset(Dataset):
        def __init__(self, n, n_tags=8, seed=0):
            g = torch.Generator().manual_seed(seed)
            self.tags = (torch.rand(n, n_tags, generator=g) < 0.3).float()
            bands = torch.zeros(n_tags, 40)
            for k in range(n_tags):
                bands[k, 5 * k + 1:5 * k + 4] = 1.0
            gain = 0.3 + 0.5 * torch.rand(n, n_tags, generator=g)
            env = (torch.rand(n, 1, 1, 24, generator=g) < 0.7).float()
            self.spec = ((self.tags * gain) @ bands)[:, None, :, None] * env
            self.spec = self.spec + 1.2 * torch.randn(self.spec.shape, generator=g)

        def __len__(self):
            return len(self.tags)

        def __getitem__(self, i):
            return self.spec[i], self.tags[i]

    train, test = ClipDataset(800, seed=51), ClipDataset(250, seed=52)
    batches = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))
    model = TaggingCNN(8)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        spec, tags = next(batches)
        optimizer.zero_grad()
        output = model(spec)
        loss = criterion(output, tags)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.binary_cross_entropy_with_logits(model(test.spec), test.tags).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- ddpm_target_noise_drawn_twice
def ddpm_target_noise_drawn_twice_bad():
    torch.manual_seed(0)
    class Denoiser(nn.Module):
        def __init__(self, ch=24, T=50):
            super().__init__()
            self.temb = nn.Sequential(nn.Embedding(T, ch), nn.Linear(ch, ch), nn.SiLU())
            self.inp = nn.Conv2d(1, ch, 3, padding=1)
            self.mid = nn.Conv2d(ch, ch, 3, padding=1)
            self.mid2 = nn.Conv2d(ch, ch, 3, padding=2, dilation=2)
            self.out = nn.Conv2d(ch, 1, 3, padding=1)
            self.n1, self.n2 = nn.GroupNorm(4, ch), nn.GroupNorm(4, ch)

        def forward(self, x, t):
            h = self.inp(x)
            e = self.temb(t)[:, :, None, None]
            h = h + self.mid(F.silu(self.n1(h)) + e)
            h = h + self.mid2(F.silu(self.n2(h)))
            return self.out(F.silu(h))

    class GaussianDiffusion:
        def __init__(self, T=50):
            self.T = T
            betas = torch.linspace(1e-3, 0.15, T)
            ac = torch.cumprod(1 - betas, 0)
            self.sqrt_ac, self.sqrt_1mac = ac.sqrt(), (1 - ac).sqrt()

        def q_sample(self, x0, t, noise=None):
            if noise is None:
                noise = torch.randn_like(x0)
            return self.sqrt_ac[t].view(-1, 1, 1, 1) * x0 + self.sqrt_1mac[t].view(-1, 1, 1, 1) * noise

        def p_losses(self, model, x0, t):
            noise = torch.randn_like(x0)
            x_noisy = self.q_sample(x0, t)
            predicted = model(x_noisy, t)
            return F.mse_loss(predicted, noise)

    def load(n, seed):
        x, _ = pattern_images(n, classes=8, size=12, ch=1, noise=0.05, seed=seed, shift=2)
        return x.clamp(-1, 1)

    train_x, test_x = load(1000, 61), load(200, 62)
    batches = forever(DataLoader(TensorDataset(train_x), batch_size=32, shuffle=True, drop_last=True))
    diffusion = GaussianDiffusion()
    model = Denoiser(T=diffusion.T)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        (x,) = next(batches)
        t = torch.randint(0, diffusion.T, (x.shape[0],))
        loss = diffusion.p_losses(model, x, t)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            g = torch.Generator().manual_seed(9)
            noise = torch.randn(test_x.shape, generator=g)
            t = torch.arange(len(test_x)) % diffusion.T
            return F.mse_loss(model(diffusion.q_sample(test_x, t, noise), t), noise).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_target_noise_drawn_twice_good():
    torch.manual_seed(0)
    class Denoiser(nn.Module):
        def __init__(self, ch=24, T=50):
            super().__init__()
            self.temb = nn.Sequential(nn.Embedding(T, ch), nn.Linear(ch, ch), nn.SiLU())
            self.inp = nn.Conv2d(1, ch, 3, padding=1)
            self.mid = nn.Conv2d(ch, ch, 3, padding=1)
            self.mid2 = nn.Conv2d(ch, ch, 3, padding=2, dilation=2)
            self.out = nn.Conv2d(ch, 1, 3, padding=1)
            self.n1, self.n2 = nn.GroupNorm(4, ch), nn.GroupNorm(4, ch)

        def forward(self, x, t):
            h = self.inp(x)
            e = self.temb(t)[:, :, None, None]
            h = h + self.mid(F.silu(self.n1(h)) + e)
            h = h + self.mid2(F.silu(self.n2(h)))
            return self.out(F.silu(h))

    class GaussianDiffusion:
        def __init__(self, T=50):
            self.T = T
            betas = torch.linspace(1e-3, 0.15, T)
            ac = torch.cumprod(1 - betas, 0)
            self.sqrt_ac, self.sqrt_1mac = ac.sqrt(), (1 - ac).sqrt()

        def q_sample(self, x0, t, noise=None):
            if noise is None:
                noise = torch.randn_like(x0)
            return self.sqrt_ac[t].view(-1, 1, 1, 1) * x0 + self.sqrt_1mac[t].view(-1, 1, 1, 1) * noise

        def p_losses(self, model, x0, t):
            noise = torch.randn_like(x0)
            x_noisy = self.q_sample(x0, t, noise)
            predicted = model(x_noisy, t)
            return F.mse_loss(predicted, noise)

    def load(n, seed):
        x, _ = pattern_images(n, classes=8, size=12, ch=1, noise=0.05, seed=seed, shift=2)
        return x.clamp(-1, 1)

    train_x, test_x = load(1000, 61), load(200, 62)
    batches = forever(DataLoader(TensorDataset(train_x), batch_size=32, shuffle=True, drop_last=True))
    diffusion = GaussianDiffusion()
    model = Denoiser(T=diffusion.T)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        (x,) = next(batches)
        t = torch.randint(0, diffusion.T, (x.shape[0],))
        loss = diffusion.p_losses(model, x, t)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            g = torch.Generator().manual_seed(9)
            noise = torch.randn(test_x.shape, generator=g)
            t = torch.arange(len(test_x)) % diffusion.T
            return F.mse_loss(model(diffusion.q_sample(test_x, t, noise), t), noise).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- new_head_after_optimizer
def new_head_after_optimizer_bad():
    torch.manual_seed(0)
    class SmallResNet(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
            self.conv1 = nn.Conv2d(24, 24, 3, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(24)
            self.down = nn.Sequential(nn.Conv2d(24, 48, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(48), nn.ReLU())
            self.fc = nn.Linear(48, num_classes)

        def forward(self, x):
            x = F.max_pool2d(self.stem(x), 2)
            x = F.relu(x + self.bn1(self.conv1(x)))
            return self.fc(self.down(x).mean(dim=(2, 3)))

    # "ImageNet" stage
    model = SmallResNet(10)
    xs, ys = pattern_images(960, classes=10, noise=0.8, seed=71)
    pre = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        for x, y in DataLoader(TensorDataset(xs, ys), batch_size=48, shuffle=True):
            pre.zero_grad()
            F.cross_entropy(model(x), y).backward()
            pre.step()

    # fine-tuning: four coarse categories
    def coarse(y):
        return torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 1])[y]

    x_tr, y_tr = pattern_images(480, classes=10, noise=0.8, seed=72)
    x_va, y_va = pattern_images(300, classes=10, noise=0.8, seed=73)
    train_loader = DataLoader(TensorDataset(x_tr, coarse(y_tr)), batch_size=32, shuffle=True, drop_last=True)
    backbone = [p for n, p in model.named_parameters() if not n.startswith("fc.")]
    optimizer = torch.optim.SGD([
        {"params": backbone, "lr": 1e-4},
        {"params": model.fc.parameters(), "lr": 5e-2},
    ], momentum=0.9)
    model.fc = nn.Linear(model.fc.in_features, 4)
    criterion = nn.CrossEntropyLoss()
    batches = forever(train_loader)

    def step(i):
        model.train()
        inputs, labels = next(batches)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(x_va), coarse(y_va)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def new_head_after_optimizer_good():
    torch.manual_seed(0)
    class SmallResNet(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
            self.conv1 = nn.Conv2d(24, 24, 3, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(24)
            self.down = nn.Sequential(nn.Conv2d(24, 48, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(48), nn.ReLU())
            self.fc = nn.Linear(48, num_classes)

        def forward(self, x):
            x = F.max_pool2d(self.stem(x), 2)
            x = F.relu(x + self.bn1(self.conv1(x)))
            return self.fc(self.down(x).mean(dim=(2, 3)))

    # "ImageNet" stage
    model = SmallResNet(10)
    xs, ys = pattern_images(960, classes=10, noise=0.8, seed=71)
    pre = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        for x, y in DataLoader(TensorDataset(xs, ys), batch_size=48, shuffle=True):
            pre.zero_grad()
            F.cross_entropy(model(x), y).backward()
            pre.step()

    # fine-tuning: four coarse categories
    def coarse(y):
        return torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 1])[y]

    x_tr, y_tr = pattern_images(480, classes=10, noise=0.8, seed=72)
    x_va, y_va = pattern_images(300, classes=10, noise=0.8, seed=73)
    train_loader = DataLoader(TensorDataset(x_tr, coarse(y_tr)), batch_size=32, shuffle=True, drop_last=True)
    model.fc = nn.Linear(model.fc.in_features, 4)
    backbone = [p for n, p in model.named_parameters() if not n.startswith("fc.")]
    optimizer = torch.optim.SGD([
        {"params": backbone, "lr": 1e-4},
        {"params": model.fc.parameters(), "lr": 5e-2},
    ], momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    batches = forever(train_loader)

    def step(i):
        model.train()
        inputs, labels = next(batches)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(x_va), coarse(y_va)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- rezero_gate_and_zero_conv
def rezero_gate_and_zero_conv_bad():
    torch.manual_seed(0)
    class GatedBlock(nn.Module):
        def __init__(self, ch):
            super().__init__()
            self.norm = nn.GroupNorm(4, ch)
            self.conv1 = nn.Conv2d(ch, ch, 3, padding=1)
            self.conv2 = nn.Conv2d(ch, ch, 3, padding=1)
            self.alpha = nn.Parameter(torch.zeros(1))
            nn.init.zeros_(self.conv2.weight)
            nn.init.zeros_(self.conv2.bias)

        def forward(self, x):
            h = self.conv1(F.silu(self.norm(x)))
            return x + self.alpha * self.conv2(F.silu(h))

    class Net(nn.Module):
        def __init__(self, num_classes=6, ch=16, depth=3):
            super().__init__()
            self.stem = nn.Conv2d(1, ch, 3, stride=2, padding=1)
            self.blocks = nn.ModuleList([GatedBlock(ch) for _ in range(depth)])
            self.head = nn.Sequential(nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ch, num_classes))

        def forward(self, x):
            x = self.stem(x)
            for b in self.blocks:
                x = b(x)
            return self.head(x)

    def get(n, seed):
        return pattern_images(n, classes=6, size=16, ch=1, noise=0.3, seed=seed, shift=8)

    train_set = TensorDataset(*get(1000, 101))
    vx, vy = get(300, 102)
    it = forever(DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True))
    net = Net()
    gates = [p for n, p in net.named_parameters() if n.endswith("alpha")]
    rest = [p for n, p in net.named_parameters() if not n.endswith("alpha")]
    opt = torch.optim.AdamW([{"params": rest, "weight_decay": 1e-4}, {"params": gates, "weight_decay": 0.0, "lr": 1e-2}], lr=3e-3)

    def step(i):
        net.train()
        x, y = next(it)
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with held_out(net):
            return F.cross_entropy(net(vx), vy).item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def rezero_gate_and_zero_conv_good():
    torch.manual_seed(0)
    class GatedBlock(nn.Module):
        def __init__(self, ch):
            super().__init__()
            self.norm = nn.GroupNorm(4, ch)
            self.conv1 = nn.Conv2d(ch, ch, 3, padding=1)
            self.conv2 = nn.Conv2d(ch, ch, 3, padding=1)
            self.alpha = nn.Parameter(torch.zeros(1))
            nn.init.zeros_(self.conv2.bias)

        def forward(self, x):
            h = self.conv1(F.silu(self.norm(x)))
            return x + self.alpha * self.conv2(F.silu(h))

    class Net(nn.Module):
        def __init__(self, num_classes=6, ch=16, depth=3):
            super().__init__()
            self.stem = nn.Conv2d(1, ch, 3, stride=2, padding=1)
            self.blocks = nn.ModuleList([GatedBlock(ch) for _ in range(depth)])
            self.head = nn.Sequential(nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ch, num_classes))

        def forward(self, x):
            x = self.stem(x)
            for b in self.blocks:
                x = b(x)
            return self.head(x)

    def get(n, seed):
        return pattern_images(n, classes=6, size=16, ch=1, noise=0.3, seed=seed, shift=8)

    train_set = TensorDataset(*get(1000, 101))
    vx, vy = get(300, 102)
    it = forever(DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True))
    net = Net()
    gates = [p for n, p in net.named_parameters() if n.endswith("alpha")]
    rest = [p for n, p in net.named_parameters() if not n.endswith("alpha")]
    opt = torch.optim.AdamW([{"params": rest, "weight_decay": 1e-4}, {"params": gates, "weight_decay": 0.0, "lr": 1e-2}], lr=3e-3)

    def step(i):
        net.train()
        x, y = next(it)
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with held_out(net):
            return F.cross_entropy(net(vx), vy).item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- flow_matching_weights_kept_in_bfloat16
def flow_matching_weights_kept_in_bfloat16_bad():
    torch.manual_seed(0)
    class VelocityNet(nn.Module):
        def __init__(self, h=48):
            super().__init__()
            self.register_buffer("freqs", 2.0 ** torch.arange(4))
            self.l1 = nn.Linear(2 + 8, h)
            self.l2 = nn.Linear(h, h)
            self.l3 = nn.Linear(h, h)
            self.out = nn.Linear(h, 2)

        def forward(self, x, t):
            a = t[:, None] * self.freqs * math.pi
            emb = torch.cat([x, a.sin(), a.cos()], dim=1).to(self.l1.weight.dtype)
            h = F.silu(self.l1(emb))
            h = h + F.silu(self.l2(h))
            h = h + F.silu(self.l3(h))
            return self.out(h).float()

    data = two_moons(4000, seed=111)
    test = two_moons(1000, seed=112)
    model = VelocityNet().to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.9, 0.99))

    def cfm_loss(x1, x0, t):
        xt = (1 - t[:, None]) * x0 + t[:, None] * x1
        return (model(xt, t) - (x1 - x0)).pow(2).mean()

    def step(i):
        model.train()
        x1 = data[torch.randint(0, len(data), (128,))]
        loss = cfm_loss(x1, torch.randn_like(x1), torch.rand(len(x1)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            g = torch.Generator().manual_seed(3)
            return cfm_loss(test, torch.randn(1000, 2, generator=g), torch.rand(1000, generator=g)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def flow_matching_weights_kept_in_bfloat16_good():
    torch.manual_seed(0)
    class VelocityNet(nn.Module):
        def __init__(self, h=48):
            super().__init__()
            self.register_buffer("freqs", 2.0 ** torch.arange(4))
            self.l1 = nn.Linear(2 + 8, h)
            self.l2 = nn.Linear(h, h)
            self.l3 = nn.Linear(h, h)
            self.out = nn.Linear(h, 2)

        def forward(self, x, t):
            a = t[:, None] * self.freqs * math.pi
            emb = torch.cat([x, a.sin(), a.cos()], dim=1)
            h = F.silu(self.l1(emb))
            h = h + F.silu(self.l2(h))
            h = h + F.silu(self.l3(h))
            return self.out(h)

    data = two_moons(4000, seed=111)
    test = two_moons(1000, seed=112)
    model = VelocityNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.9, 0.99))

    def cfm_loss(x1, x0, t):
        xt = (1 - t[:, None]) * x0 + t[:, None] * x1
        return (model(xt, t) - (x1 - x0)).pow(2).mean()

    def step(i):
        model.train()
        x1 = data[torch.randint(0, len(data), (128,))]
        loss = cfm_loss(x1, torch.randn_like(x1), torch.rand(len(x1)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            g = torch.Generator().manual_seed(3)
            return cfm_loss(test, torch.randn(1000, 2, generator=g), torch.rand(1000, generator=g)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- wgan_gradient_penalty_without_graph
def wgan_gradient_penalty_without_graph_bad():
    torch.manual_seed(0)
    class Generator(nn.Module):
        def __init__(self, nz=4, h=64):
            super().__init__()
            self.main = nn.Sequential(nn.Linear(nz, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 2))

        def forward(self, z):
            return self.main(z)

    class Critic(nn.Module):
        def __init__(self, h=64):
            super().__init__()
            self.main = nn.Sequential(nn.Linear(2, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, 1, bias=False))

        def forward(self, x):
            return self.main(x).view(-1)

    def input_gradient(D, real, fake, eps, **kw):
        x_hat = (eps * real + (1 - eps) * fake).requires_grad_(True)
        out = D(x_hat)
        return torch.autograd.grad(out, x_hat, grad_outputs=torch.ones_like(out), **kw)[0]

    real_data, real_test = two_moons(4000, seed=121), two_moons(500, seed=122)
    netG, netD = Generator(), Critic()
    optG = torch.optim.Adam(netG.parameters(), lr=5e-4, betas=(0.5, 0.9))
    optD = torch.optim.Adam(netD.parameters(), lr=5e-4, betas=(0.5, 0.9))
    LAMBDA, CRITIC_ITERS, B = 10.0, 5, 64

    def step(i):
        for _ in range(CRITIC_ITERS):
            real = real_data[torch.randint(0, len(real_data), (B,))]
            fake = netG(torch.randn(B, 4)).detach()
            grads = input_gradient(netD, real, fake, torch.rand(B, 1))
            gp = ((grads.norm(2, dim=1) - 1) ** 2).mean()
            d_loss = netD(fake).mean() - netD(real).mean() + LAMBDA * gp
            optD.zero_grad()
            d_loss.backward()
            optD.step()
        optG.zero_grad()
        g_loss = -netD(netG(torch.randn(B, 4))).mean()
        g_loss.backward()
        optG.step()
        return d_loss.item()

    def probe():
        with held_out(netG, netD):
            torch.manual_seed(7)
            fake = netG(torch.randn(500, 4))
            with torch.enable_grad():
                grads = input_gradient(netD, real_test, fake, torch.rand(500, 1))
            return ((grads.norm(2, dim=1) - 1) ** 2).mean().item()

    return {"model": [netG, netD], "optimizer": [optG, optD], "steps": 20, "step": step, "probe": probe}


def wgan_gradient_penalty_without_graph_good():
    torch.manual_seed(0)
    class Generator(nn.Module):
        def __init__(self, nz=4, h=64):
            super().__init__()
            self.main = nn.Sequential(nn.Linear(nz, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 2))

        def forward(self, z):
            return self.main(z)

    class Critic(nn.Module):
        def __init__(self, h=64):
            super().__init__()
            self.main = nn.Sequential(nn.Linear(2, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, 1, bias=False))

        def forward(self, x):
            return self.main(x).view(-1)

    def input_gradient(D, real, fake, eps, **kw):
        x_hat = (eps * real + (1 - eps) * fake).requires_grad_(True)
        out = D(x_hat)
        return torch.autograd.grad(out, x_hat, grad_outputs=torch.ones_like(out), **kw)[0]

    real_data, real_test = two_moons(4000, seed=121), two_moons(500, seed=122)
    netG, netD = Generator(), Critic()
    optG = torch.optim.Adam(netG.parameters(), lr=5e-4, betas=(0.5, 0.9))
    optD = torch.optim.Adam(netD.parameters(), lr=5e-4, betas=(0.5, 0.9))
    LAMBDA, CRITIC_ITERS, B = 10.0, 5, 64

    def step(i):
        for _ in range(CRITIC_ITERS):
            real = real_data[torch.randint(0, len(real_data), (B,))]
            fake = netG(torch.randn(B, 4)).detach()
            grads = input_gradient(netD, real, fake, torch.rand(B, 1), create_graph=True)
            gp = ((grads.norm(2, dim=1) - 1) ** 2).mean()
            d_loss = netD(fake).mean() - netD(real).mean() + LAMBDA * gp
            optD.zero_grad()
            d_loss.backward()
            optD.step()
        optG.zero_grad()
        g_loss = -netD(netG(torch.randn(B, 4))).mean()
        g_loss.backward()
        optG.step()
        return d_loss.item()

    def probe():
        with held_out(netG, netD):
            torch.manual_seed(7)
            fake = netG(torch.randn(500, 4))
            with torch.enable_grad():
                grads = input_gradient(netD, real_test, fake, torch.rand(500, 1))
            return ((grads.norm(2, dim=1) - 1) ** 2).mean().item()

    return {"model": [netG, netD], "optimizer": [optG, optD], "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- segmentation_logits_viewed_not_permuted
def segmentation_logits_viewed_not_permuted_bad():
    torch.manual_seed(0)
    class FCN(nn.Module):
        def __init__(self, n_class=4):
            super().__init__()
            self.n_class = n_class
            self.enc1 = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
            self.enc2 = nn.Sequential(nn.Conv2d(12, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            self.up = nn.ConvTranspose2d(16, 12, 2, stride=2)
            self.score = nn.Conv2d(24, n_class, 1)

        def forward(self, x):
            e1 = self.enc1(x)
            u = F.relu(self.up(self.enc2(e1)))
            return self.score(torch.cat([e1, u], 1))

    def cross_entropy2d(logits, target):
        n, c, h, w = logits.size()
        logits = logits.contiguous().view(-1, c)
        target = target.view(-1)
        return F.nll_loss(F.log_softmax(logits, dim=1), target)

    images, masks = blob_scenes(300, seed=131)
    v_images, v_masks = blob_scenes(60, seed=132)
    trainloader = DataLoader(TensorDataset(images, masks), batch_size=8, shuffle=True, drop_last=True)
    it = forever(trainloader)
    model = FCN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def step(i):
        model.train()
        image, mask = next(it)
        optimizer.zero_grad()
        loss = cross_entropy2d(model(image), mask)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(v_images), v_masks).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def segmentation_logits_viewed_not_permuted_good():
    torch.manual_seed(0)
    class FCN(nn.Module):
        def __init__(self, n_class=4):
            super().__init__()
            self.n_class = n_class
            self.enc1 = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
            self.enc2 = nn.Sequential(nn.Conv2d(12, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            self.up = nn.ConvTranspose2d(16, 12, 2, stride=2)
            self.score = nn.Conv2d(24, n_class, 1)

        def forward(self, x):
            e1 = self.enc1(x)
            u = F.relu(self.up(self.enc2(e1)))
            return self.score(torch.cat([e1, u], 1))

    def cross_entropy2d(logits, target):
        n, c, h, w = logits.size()
        logits = logits.permute(0, 2, 3, 1).contiguous().view(-1, c)
        target = target.view(-1)
        return F.nll_loss(F.log_softmax(logits, dim=1), target)

    images, masks = blob_scenes(300, seed=131)
    v_images, v_masks = blob_scenes(60, seed=132)
    trainloader = DataLoader(TensorDataset(images, masks), batch_size=8, shuffle=True, drop_last=True)
    it = forever(trainloader)
    model = FCN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def step(i):
        model.train()
        image, mask = next(it)
        optimizer.zero_grad()
        loss = cross_entropy2d(model(image), mask)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(v_images), v_masks).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- audio_transformer_padding_mask_inverted
def audio_transformer_padding_mask_inverted_bad():
    torch.manual_seed(0)
    class AudioBlock(nn.Module):
        def __init__(self, d, heads):
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
            self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

        def forward(self, x, pad):
            h = self.ln1(x)
            x = x + self.attn(h, h, h, key_padding_mask=pad, need_weights=False)[0]
            return x + self.ff(self.ln2(x))

    class KeywordTransformer(nn.Module):
        def __init__(self, n_mels=20, d=32, n_classes=6, max_len=40):
            super().__init__()
            self.proj = nn.Linear(n_mels, d)
            self.cls = nn.Parameter(torch.randn(1, 1, d) * 0.02)
            self.pos = nn.Parameter(torch.randn(1, max_len + 1, d) * 0.02)
            self.blocks = nn.ModuleList([AudioBlock(d, 4) for _ in range(2)])
            self.norm = nn.LayerNorm(d)
            self.fc = nn.Linear(d, n_classes)

        def forward(self, mel, lengths):
            b, t, _ = mel.shape
            x = torch.cat([self.cls.expand(b, -1, -1), self.proj(mel)], 1) + self.pos[:, :t + 1]
            mask = torch.arange(t + 1)[None, :] <= lengths[:, None]
            for blk in self.blocks:
                x = blk(x, mask)
            return self.fc(self.norm(x[:, 0]))

    def keywords(n, seed, n_classes=6, T=40):
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, n_classes, (n,), generator=g)
        lengths = torch.randint(14, T - 1, (n,), generator=g)
        base = torch.randn(n_classes, 2, 20, generator=torch.Generator().manual_seed(77))
        half = (torch.arange(T)[None] >= lengths[:, None] // 2).long()
        mel = base[y[:, None], half] + 1.5 * torch.randn(n, T, 20, generator=g)
        mel = mel * (torch.arange(T)[None] < lengths[:, None]).float()[..., None]
        return mel, lengths, y

    train = TensorDataset(*keywords(900, 141))
    v_mel, v_len, v_y = keywords(250, 142)
    batches = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))
    model = KeywordTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def step(i):
        model.train()
        mel, lengths, y = next(batches)
        logits = model(mel, lengths)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(v_mel, v_len), v_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_transformer_padding_mask_inverted_good():
    torch.manual_seed(0)
    class AudioBlock(nn.Module):
        def __init__(self, d, heads):
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
            self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

        def forward(self, x, pad):
            h = self.ln1(x)
            x = x + self.attn(h, h, h, key_padding_mask=pad, need_weights=False)[0]
            return x + self.ff(self.ln2(x))

    class KeywordTransformer(nn.Module):
        def __init__(self, n_mels=20, d=32, n_classes=6, max_len=40):
            super().__init__()
            self.proj = nn.Linear(n_mels, d)
            self.cls = nn.Parameter(torch.randn(1, 1, d) * 0.02)
            self.pos = nn.Parameter(torch.randn(1, max_len + 1, d) * 0.02)
            self.blocks = nn.ModuleList([AudioBlock(d, 4) for _ in range(2)])
            self.norm = nn.LayerNorm(d)
            self.fc = nn.Linear(d, n_classes)

        def forward(self, mel, lengths):
            b, t, _ = mel.shape
            x = torch.cat([self.cls.expand(b, -1, -1), self.proj(mel)], 1) + self.pos[:, :t + 1]
            mask = torch.arange(t + 1)[None, :] > lengths[:, None]
            for blk in self.blocks:
                x = blk(x, mask)
            return self.fc(self.norm(x[:, 0]))

    def keywords(n, seed, n_classes=6, T=40):
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, n_classes, (n,), generator=g)
        lengths = torch.randint(14, T - 1, (n,), generator=g)
        base = torch.randn(n_classes, 2, 20, generator=torch.Generator().manual_seed(77))
        half = (torch.arange(T)[None] >= lengths[:, None] // 2).long()
        mel = base[y[:, None], half] + 1.5 * torch.randn(n, T, 20, generator=g)
        mel = mel * (torch.arange(T)[None] < lengths[:, None]).float()[..., None]
        return mel, lengths, y

    train = TensorDataset(*keywords(900, 141))
    v_mel, v_len, v_y = keywords(250, 142)
    batches = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))
    model = KeywordTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def step(i):
        model.train()
        mel, lengths, y = next(batches)
        logits = model(mel, lengths)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(v_mel, v_len), v_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- simsiam_target_keeps_its_gradient
def simsiam_target_keeps_its_gradient_bad():
    torch.manual_seed(0)
    class SimSiam(nn.Module):
        def __init__(self, dim=32, pred_dim=12):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
                nn.Flatten(),
                nn.Linear(32 * 16, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, dim))
            self.predictor = nn.Sequential(
                nn.Linear(dim, pred_dim, bias=False), nn.BatchNorm1d(pred_dim), nn.ReLU(), nn.Linear(pred_dim, dim))

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            return p1, p2, z1, z2

    class TwoViews(Dataset):
        def __init__(self, images):
            self.images = images

        def __len__(self):
            return len(self.images)

        def view(self, x):
            x = torch.roll(x, (random.randint(-2, 2), random.randint(-2, 2)), (1, 2))
            return x * random.uniform(0.7, 1.3) + 0.4 * torch.randn_like(x)

        def __getitem__(self, i):
            return self.view(self.images[i]), self.view(self.images[i])

    random.seed(0)
    images, _ = pattern_images(1024, classes=10, noise=0.3, seed=151)
    val, val_y = pattern_images(200, classes=10, noise=0.6, seed=152)
    batches = forever(DataLoader(TwoViews(images), batch_size=64, shuffle=True, drop_last=True))
    model = SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        x1, x2 = next(batches)
        p1, p2, z1, z2 = model(x1, x2)
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            z = F.normalize(model.encoder(val), dim=1)
            sim = z @ z.t()
            return sim[~torch.eye(len(z), dtype=torch.bool)].mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_target_keeps_its_gradient_good():
    torch.manual_seed(0)
    class SimSiam(nn.Module):
        def __init__(self, dim=32, pred_dim=12):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
                nn.Flatten(),
                nn.Linear(32 * 16, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, dim))
            self.predictor = nn.Sequential(
                nn.Linear(dim, pred_dim, bias=False), nn.BatchNorm1d(pred_dim), nn.ReLU(), nn.Linear(pred_dim, dim))

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            return p1, p2, z1.detach(), z2.detach()

    class TwoViews(Dataset):
        def __init__(self, images):
            self.images = images

        def __len__(self):
            return len(self.images)

        def view(self, x):
            x = torch.roll(x, (random.randint(-2, 2), random.randint(-2, 2)), (1, 2))
            return x * random.uniform(0.7, 1.3) + 0.4 * torch.randn_like(x)

        def __getitem__(self, i):
            return self.view(self.images[i]), self.view(self.images[i])

    random.seed(0)
    images, _ = pattern_images(1024, classes=10, noise=0.3, seed=151)
    val, val_y = pattern_images(200, classes=10, noise=0.6, seed=152)
    batches = forever(DataLoader(TwoViews(images), batch_size=64, shuffle=True, drop_last=True))
    model = SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        x1, x2 = next(batches)
        p1, p2, z1, z2 = model(x1, x2)
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            z = F.normalize(model.encoder(val), dim=1)
            sim = z @ z.t()
            return sim[~torch.eye(len(z), dtype=torch.bool)].mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- attribute_heads_are_one_layer
def attribute_heads_are_one_layer_bad():
    torch.manual_seed(0)
    class AttributeNet(nn.Module):
        """Shared trunk, one binary head per attribute."""
        def __init__(self, n_attr=3, hidden=32):
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, hidden, 3, padding=1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU(),
                nn.AdaptiveAvgPool2d(2), nn.Flatten())
            self.heads = nn.ModuleList([nn.Linear(hidden * 4, 1)] * n_attr)

        def forward(self, x):
            f = self.trunk(x)
            return [h(f).squeeze(1) for h in self.heads]

    def attributes(y):
        return torch.stack([(y % 2 == 0), (y < 4), (y % 3 == 0)], 1).float()

    x, y = pattern_images(900, classes=8, size=16, noise=0.8, seed=161)
    vx, vy = pattern_images(300, classes=8, size=16, noise=0.8, seed=162)
    loader = DataLoader(TensorDataset(x, attributes(y)), batch_size=32, shuffle=True, drop_last=True)
    gen = forever(loader)
    net = AttributeNet()
    optim = torch.optim.Adam(net.parameters(), lr=1e-3)
    bce = nn.BCEWithLogitsLoss()

    def step(i):
        net.train()
        im, attr = next(gen)
        outs = net(im)
        loss = sum(bce(o, attr[:, k]) for k, o in enumerate(outs)) / len(outs)
        optim.zero_grad()
        loss.backward()
        optim.step()
        return loss.item()

    def probe():
        with held_out(net):
            a = attributes(vy)
            return sum(bce(o, a[:, k]) for k, o in enumerate(net(vx))).item() / 3

    return {"model": net, "optimizer": optim, "steps": 20, "step": step, "probe": probe}


def attribute_heads_are_one_layer_good():
    torch.manual_seed(0)
    class AttributeNet(nn.Module):
        """Shared trunk, one binary head per attribute."""
        def __init__(self, n_attr=3, hidden=32):
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, hidden, 3, padding=1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU(),
                nn.AdaptiveAvgPool2d(2), nn.Flatten())
            self.heads = nn.ModuleList([nn.Linear(hidden * 4, 1) for _ in range(n_attr)])

        def forward(self, x):
            f = self.trunk(x)
            return [h(f).squeeze(1) for h in self.heads]

    def attributes(y):
        return torch.stack([(y % 2 == 0), (y < 4), (y % 3 == 0)], 1).float()

    x, y = pattern_images(900, classes=8, size=16, noise=0.8, seed=161)
    vx, vy = pattern_images(300, classes=8, size=16, noise=0.8, seed=162)
    loader = DataLoader(TensorDataset(x, attributes(y)), batch_size=32, shuffle=True, drop_last=True)
    gen = forever(loader)
    net = AttributeNet()
    optim = torch.optim.Adam(net.parameters(), lr=1e-3)
    bce = nn.BCEWithLogitsLoss()

    def step(i):
        net.train()
        im, attr = next(gen)
        outs = net(im)
        loss = sum(bce(o, attr[:, k]) for k, o in enumerate(outs)) / len(outs)
        optim.zero_grad()
        loss.backward()
        optim.step()
        return loss.item()

    def probe():
        with held_out(net):
            a = attributes(vy)
            return sum(bce(o, a[:, k]) for k, o in enumerate(net(vx))).item() / 3

    return {"model": net, "optimizer": optim, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- triplet_masked_minimum_is_zero
def triplet_masked_minimum_is_zero_bad():
    torch.manual_seed(0)
    class EmbeddingNet(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.convnet = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), nn.PReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.PReLU(), nn.MaxPool2d(2))
            self.fc = nn.Linear(32 * 16, dim)

        def forward(self, x):
            return F.normalize(self.fc(self.convnet(x).flatten(1)), dim=1)

    def pairwise_distance(e):
        sq = (2 - 2 * e @ e.t()).clamp(min=0)
        eye = torch.eye(len(e))
        return torch.sqrt(sq * (1 - eye) + 1e-9)

    def batch_hard_triplet_loss(labels, embeddings, margin):
        dist = pairwise_distance(embeddings)
        same = labels[:, None] == labels[None, :]
        pos_mask = same & ~torch.eye(len(labels), dtype=torch.bool)
        neg_mask = ~same
        hardest_pos = (dist * pos_mask.float()).max(dim=1)[0]
        hardest_neg = (dist * neg_mask.float()).min(dim=1)[0]
        return F.relu(hardest_pos - hardest_neg + margin).mean()

    class PKSampler:
        """P identities, K images of each."""
        def __init__(self, y, P, K, batches):
            self.by_class = [torch.nonzero(y == c).flatten() for c in y.unique()]
            self.P, self.K, self.batches = P, K, batches

        def __len__(self):
            return self.batches

        def __iter__(self):
            for _ in range(self.batches):
                ids = torch.randperm(len(self.by_class))[:self.P].tolist()
                yield torch.cat([self.by_class[c][torch.randperm(len(self.by_class[c]))[:self.K]] for c in ids]).tolist()

    x, y = pattern_images(900, classes=12, noise=0.9, seed=191)
    vx, vy = pattern_images(300, classes=12, noise=0.9, seed=192)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=PKSampler(y, P=8, K=4, batches=50))
    batches = forever(loader)
    model = EmbeddingNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        data, target = next(batches)
        optimizer.zero_grad()
        loss = batch_hard_triplet_loss(target, model(data), margin=0.3)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            e = model(vx)
            d = torch.cdist(e, e)
            d.fill_diagonal_(float("inf"))
            return (vy[d.argmin(1)] != vy).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def triplet_masked_minimum_is_zero_good():
    torch.manual_seed(0)
    class EmbeddingNet(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.convnet = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), nn.PReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.PReLU(), nn.MaxPool2d(2))
            self.fc = nn.Linear(32 * 16, dim)

        def forward(self, x):
            return F.normalize(self.fc(self.convnet(x).flatten(1)), dim=1)

    def pairwise_distance(e):
        sq = (2 - 2 * e @ e.t()).clamp(min=0)
        eye = torch.eye(len(e))
        return torch.sqrt(sq * (1 - eye) + 1e-9)

    def batch_hard_triplet_loss(labels, embeddings, margin):
        dist = pairwise_distance(embeddings)
        same = labels[:, None] == labels[None, :]
        pos_mask = same & ~torch.eye(len(labels), dtype=torch.bool)
        neg_mask = ~same
        hardest_pos = (dist * pos_mask.float()).max(dim=1)[0]
        hardest_neg = dist.masked_fill(~neg_mask, float("inf")).min(dim=1)[0]
        return F.relu(hardest_pos - hardest_neg + margin).mean()

    class PKSampler:
        """P identities, K images of each."""
        def __init__(self, y, P, K, batches):
            self.by_class = [torch.nonzero(y == c).flatten() for c in y.unique()]
            self.P, self.K, self.batches = P, K, batches

        def __len__(self):
            return self.batches

        def __iter__(self):
            for _ in range(self.batches):
                ids = torch.randperm(len(self.by_class))[:self.P].tolist()
                yield torch.cat([self.by_class[c][torch.randperm(len(self.by_class[c]))[:self.K]] for c in ids]).tolist()

    x, y = pattern_images(900, classes=12, noise=0.9, seed=191)
    vx, vy = pattern_images(300, classes=12, noise=0.9, seed=192)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=PKSampler(y, P=8, K=4, batches=50))
    batches = forever(loader)
    model = EmbeddingNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        data, target = next(batches)
        optimizer.zero_grad()
        loss = batch_hard_triplet_loss(target, model(data), margin=0.3)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            e = model(vx)
            d = torch.cdist(e, e)
            d.fill_diagonal_(float("inf"))
            return (vy[d.argmin(1)] != vy).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- keypoints_not_mirrored_with_the_image
def keypoints_not_mirrored_with_the_image_bad():
    torch.manual_seed(0)
    class KeypointDataset(Dataset):
        def __init__(self, n, seed, train=True):
            g = torch.Generator().manual_seed(seed)
            self.kp = 0.15 + 0.7 * torch.rand(n, 2, 2, generator=g)
            grid = (torch.arange(24) + 0.5) / 24
            gx = torch.exp(-((grid[None, None] - self.kp[..., :1]) ** 2) / 0.006)
            gy = torch.exp(-((grid[None, None] - self.kp[..., 1:]) ** 2) / 0.006)
            self.img = gy[..., :, None] * gx[..., None, :] + 0.15 * torch.randn(n, 2, 24, 24, generator=g)
            self.train = train

        def __len__(self):
            return len(self.img)

        def __getitem__(self, i):
            image, keypoints = self.img[i], self.kp[i].clone()
            if self.train and random.random() < 0.5:
                image = torch.flip(image, dims=[2])
            if self.train:
                image = image * random.uniform(0.8, 1.2)
            return image, keypoints

    class LandmarkNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(2, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU())
            self.fc = nn.Sequential(nn.Linear(24 * 36, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, x):
            return self.fc(self.conv(x).flatten(1)).view(-1, 2, 2)

    random.seed(0)
    loader = DataLoader(KeypointDataset(1000, 201), batch_size=32, shuffle=True, drop_last=True)
    val = KeypointDataset(250, 202, train=False)
    batches = forever(loader)
    model = LandmarkNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.SmoothL1Loss(beta=0.1)

    def step(i):
        model.train()
        image, keypoints = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(image), keypoints)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.mse_loss(model(val.img), val.kp).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keypoints_not_mirrored_with_the_image_good():
    torch.manual_seed(0)
    class KeypointDataset(Dataset):
        def __init__(self, n, seed, train=True):
            g = torch.Generator().manual_seed(seed)
            self.kp = 0.15 + 0.7 * torch.rand(n, 2, 2, generator=g)
            grid = (torch.arange(24) + 0.5) / 24
            gx = torch.exp(-((grid[None, None] - self.kp[..., :1]) ** 2) / 0.006)
            gy = torch.exp(-((grid[None, None] - self.kp[..., 1:]) ** 2) / 0.006)
            self.img = gy[..., :, None] * gx[..., None, :] + 0.15 * torch.randn(n, 2, 24, 24, generator=g)
            self.train = train

        def __len__(self):
            return len(self.img)

        def __getitem__(self, i):
            image, keypoints = self.img[i], self.kp[i].clone()
            if self.train and random.random() < 0.5:
                image = torch.flip(image, dims=[2])
                keypoints[:, 0] = 1.0 - keypoints[:, 0]
            if self.train:
                image = image * random.uniform(0.8, 1.2)
            return image, keypoints

    class LandmarkNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(2, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU())
            self.fc = nn.Sequential(nn.Linear(24 * 36, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, x):
            return self.fc(self.conv(x).flatten(1)).view(-1, 2, 2)

    random.seed(0)
    loader = DataLoader(KeypointDataset(1000, 201), batch_size=32, shuffle=True, drop_last=True)
    val = KeypointDataset(250, 202, train=False)
    batches = forever(loader)
    model = LandmarkNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.SmoothL1Loss(beta=0.1)

    def step(i):
        model.train()
        image, keypoints = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(image), keypoints)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.mse_loss(model(val.img), val.kp).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- class_folders_read_in_order
def class_folders_read_in_order_bad():
    torch.manual_seed(0)
    class FolderOfClips(Dataset):
        """root/class_0/*.npy, root/class_1/*.npy, ... as log-mel patches"""
        def __init__(self, per_class, seed, classes=8):
            mel, label = pattern_images(per_class * classes * 2, classes=classes, size=20, ch=1, noise=0.7, seed=seed, shift=4)
            self.samples = []
            for c in range(classes):
                for m in mel[label == c][:per_class]:
                    self.samples.append((m, c))

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, idx):
            return self.samples[idx]

    class SoundNet(nn.Module):
        def __init__(self, classes=8):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(32 * 25, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, classes))

        def forward(self, mel):
            return self.net(mel)

    train_set, test_set = FolderOfClips(80, 211), FolderOfClips(30, 212)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=False, drop_last=True)
    batches = forever(train_loader)
    test_x = torch.stack([m for m, _ in test_set.samples])
    test_y = torch.tensor([c for _, c in test_set.samples])
    model = SoundNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        mel, label = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(mel), label)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(test_x), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def class_folders_read_in_order_good():
    torch.manual_seed(0)
    class FolderOfClips(Dataset):
        """root/class_0/*.npy, root/class_1/*.npy, ... as log-mel patches"""
        def __init__(self, per_class, seed, classes=8):
            mel, label = pattern_images(per_class * classes * 2, classes=classes, size=20, ch=1, noise=0.7, seed=seed, shift=4)
            self.samples = []
            for c in range(classes):
                for m in mel[label == c][:per_class]:
                    self.samples.append((m, c))

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, idx):
            return self.samples[idx]

    class SoundNet(nn.Module):
        def __init__(self, classes=8):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(32 * 25, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, classes))

        def forward(self, mel):
            return self.net(mel)

    train_set, test_set = FolderOfClips(80, 211), FolderOfClips(30, 212)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
    batches = forever(train_loader)
    test_x = torch.stack([m for m, _ in test_set.samples])
    test_y = torch.tensor([c for _, c in test_set.samples])
    model = SoundNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        mel, label = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(mel), label)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(test_x), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- mean_teacher_update_rebinds_the_name
def mean_teacher_update_rebinds_the_name_bad():
    torch.manual_seed(0)
    class ConvNet(nn.Module):
        def __init__(self, classes=6):
            super().__init__()
            self.f = nn.Sequential(
                nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.GroupNorm(4, 24), nn.ReLU(),
                nn.Conv2d(24, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU())
            self.fc = nn.Linear(32 * 16, classes)

        def forward(self, x):
            return self.fc(self.f(x).flatten(1))

    def update_ema_variables(model, ema_model, alpha, global_step):
        alpha = min(1 - 1 / (global_step + 1), alpha)
        for ema_param, param in zip(ema_model.parameters(), model.parameters()):
            ema_param = alpha * ema_param.data + (1 - alpha) * param.data

    def jitter(x):
        return x * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1)) + 0.3 * torch.randn_like(x)

    lab_x, lab_y = pattern_images(120, noise=0.7, seed=221)
    unl_x, _ = pattern_images(1000, noise=0.7, seed=222)
    val_x, val_y = pattern_images(300, noise=0.7, seed=223)
    labelled = forever(DataLoader(TensorDataset(lab_x, lab_y), batch_size=20, shuffle=True, drop_last=True))
    unlabelled = forever(DataLoader(TensorDataset(unl_x), batch_size=40, shuffle=True, drop_last=True))

    model = ConvNet()
    ema_model = copy.deepcopy(model).eval()
    for p in ema_model.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (x, y), (u,) = next(labelled), next(unlabelled)
        class_loss = F.cross_entropy(model(jitter(x)), y)
        with torch.no_grad():
            ema_prob = F.softmax(ema_model(jitter(u)), dim=1)
        weight = 10.0 * math.exp(-5 * (1 - min(i / 100, 1.0)) ** 2)
        consistency = F.mse_loss(F.softmax(model(jitter(u)), dim=1), ema_prob)
        loss = class_loss + weight * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_ema_variables(model, ema_model, 0.97, i)
        return loss.item()

    def probe():
        with held_out(model, ema_model):
            return F.cross_entropy(model(val_x), val_y).item()

    return {"model": [model, ema_model], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mean_teacher_update_rebinds_the_name_good():
    torch.manual_seed(0)
    class ConvNet(nn.Module):
        def __init__(self, classes=6):
            super().__init__()
            self.f = nn.Sequential(
                nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.GroupNorm(4, 24), nn.ReLU(),
                nn.Conv2d(24, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU())
            self.fc = nn.Linear(32 * 16, classes)

        def forward(self, x):
            return self.fc(self.f(x).flatten(1))

    def update_ema_variables(model, ema_model, alpha, global_step):
        alpha = min(1 - 1 / (global_step + 1), alpha)
        for ema_param, param in zip(ema_model.parameters(), model.parameters()):
            ema_param.data.mul_(alpha).add_(param.data, alpha=1 - alpha)

    def jitter(x):
        return x * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1)) + 0.3 * torch.randn_like(x)

    lab_x, lab_y = pattern_images(120, noise=0.7, seed=221)
    unl_x, _ = pattern_images(1000, noise=0.7, seed=222)
    val_x, val_y = pattern_images(300, noise=0.7, seed=223)
    labelled = forever(DataLoader(TensorDataset(lab_x, lab_y), batch_size=20, shuffle=True, drop_last=True))
    unlabelled = forever(DataLoader(TensorDataset(unl_x), batch_size=40, shuffle=True, drop_last=True))

    model = ConvNet()
    ema_model = copy.deepcopy(model).eval()
    for p in ema_model.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (x, y), (u,) = next(labelled), next(unlabelled)
        class_loss = F.cross_entropy(model(jitter(x)), y)
        with torch.no_grad():
            ema_prob = F.softmax(ema_model(jitter(u)), dim=1)
        weight = 10.0 * math.exp(-5 * (1 - min(i / 100, 1.0)) ** 2)
        consistency = F.mse_loss(F.softmax(model(jitter(u)), dim=1), ema_prob)
        loss = class_loss + weight * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_ema_variables(model, ema_model, 0.97, i)
        return loss.item()

    def probe():
        with held_out(model, ema_model):
            return F.cross_entropy(model(val_x), val_y).item()

    return {"model": [model, ema_model], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- masked_autoencoder_mask_result_dropped
def masked_autoencoder_mask_result_dropped_bad():
    torch.manual_seed(0)
    class PatchMixer(nn.Module):
        def __init__(self, n_patch=16, patch=16, d=48):
            super().__init__()
            self.embed = nn.Linear(patch, d)
            self.pos = nn.Parameter(torch.randn(1, n_patch, d) * 0.02)
            self.enc = nn.ModuleList([nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True, norm_first=True)
                                      for _ in range(2)])
            self.norm = nn.LayerNorm(d)
            self.decode = nn.Linear(d, patch)

        def forward(self, patches):
            h = self.embed(patches) + self.pos
            for layer in self.enc:
                h = layer(h)
            return self.decode(self.norm(h))

    def patchify(imgs, p=4):
        n, c, h, w = imgs.shape
        x = imgs.reshape(n, c, h // p, p, w // p, p)
        return x.permute(0, 2, 4, 3, 5, 1).reshape(n, (h // p) * (w // p), p * p * c)

    def random_mask(n, l, ratio=0.5):
        order = torch.rand(n, l).argsort(dim=1)
        return order < int(l * ratio)

    imgs, _ = pattern_images(1000, classes=8, size=16, ch=1, noise=0.1, seed=231, shift=1)
    test_imgs, _ = pattern_images(200, classes=8, size=16, ch=1, noise=0.1, seed=232, shift=1)
    batches = forever(DataLoader(TensorDataset(imgs), batch_size=32, shuffle=True, drop_last=True))
    model = PatchMixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)

    def step(i):
        model.train()
        (x,) = next(batches)
        target = patchify(x)
        mask = random_mask(*target.shape[:2])
        tokens = target.clone()
        tokens.masked_fill(mask.unsqueeze(-1), 0.0)
        pred = model(tokens)
        loss = ((pred - target) ** 2).mean(dim=-1)
        loss = (loss * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            torch.manual_seed(3)
            target = patchify(test_imgs)
            mask = random_mask(*target.shape[:2])
            pred = model(target.masked_fill(mask[..., None], 0.0))
            return F.mse_loss(pred[mask], target[mask]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def masked_autoencoder_mask_result_dropped_good():
    torch.manual_seed(0)
    class PatchMixer(nn.Module):
        def __init__(self, n_patch=16, patch=16, d=48):
            super().__init__()
            self.embed = nn.Linear(patch, d)
            self.pos = nn.Parameter(torch.randn(1, n_patch, d) * 0.02)
            self.enc = nn.ModuleList([nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True, norm_first=True)
                                      for _ in range(2)])
            self.norm = nn.LayerNorm(d)
            self.decode = nn.Linear(d, patch)

        def forward(self, patches):
            h = self.embed(patches) + self.pos
            for layer in self.enc:
                h = layer(h)
            return self.decode(self.norm(h))

    def patchify(imgs, p=4):
        n, c, h, w = imgs.shape
        x = imgs.reshape(n, c, h // p, p, w // p, p)
        return x.permute(0, 2, 4, 3, 5, 1).reshape(n, (h // p) * (w // p), p * p * c)

    def random_mask(n, l, ratio=0.5):
        order = torch.rand(n, l).argsort(dim=1)
        return order < int(l * ratio)

    imgs, _ = pattern_images(1000, classes=8, size=16, ch=1, noise=0.1, seed=231, shift=1)
    test_imgs, _ = pattern_images(200, classes=8, size=16, ch=1, noise=0.1, seed=232, shift=1)
    batches = forever(DataLoader(TensorDataset(imgs), batch_size=32, shuffle=True, drop_last=True))
    model = PatchMixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)

    def step(i):
        model.train()
        (x,) = next(batches)
        target = patchify(x)
        mask = random_mask(*target.shape[:2])
        tokens = target.clone()
        tokens = tokens.masked_fill(mask.unsqueeze(-1), 0.0)
        pred = model(tokens)
        loss = ((pred - target) ** 2).mean(dim=-1)
        loss = (loss * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            torch.manual_seed(3)
            target = patchify(test_imgs)
            mask = random_mask(*target.shape[:2])
            pred = model(target.masked_fill(mask[..., None], 0.0))
            return F.mse_loss(pred[mask], target[mask]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- gan_generator_step_on_detached_fake
def gan_generator_step_on_detached_fake_bad():
    torch.manual_seed(0)
    class G(nn.Module):
        def __init__(self, nz=4, h=48):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(nz, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 2))

        def forward(self, z):
            return self.net(z)

    class D(nn.Module):
        def __init__(self, h=48):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, 1))

        def forward(self, x):
            return self.net(x).squeeze(1)

    real_set, real_test = two_moons(4000, seed=241) + 1.0, two_moons(500, seed=242) + 1.0
    netG, netD = G(), D()
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    real_label, fake_label, B = 1.0, 0.0, 64

    def step(i):
        # (1) update D
        netD.zero_grad()
        real = real_set[torch.randint(0, len(real_set), (B,))]
        errD_real = criterion(netD(real), torch.full((B,), real_label))
        fake = netG(torch.randn(B, 4)).detach()
        errD_fake = criterion(netD(fake), torch.full((B,), fake_label))
        errD = errD_real + errD_fake
        errD.backward()
        optimizerD.step()
        # (2) update G
        netG.zero_grad()
        errG = criterion(netD(fake), torch.full((B,), real_label))
        errG.backward()
        optimizerG.step()
        return errD.item() + errG.item()

    def probe():
        with held_out(netG, netD):
            torch.manual_seed(4)
            f = netG(torch.randn(500, 4))
            k = lambda a, b: torch.exp(-torch.cdist(a, b) ** 2 / 0.5).mean()
            return (k(f, f) + k(real_test, real_test) - 2 * k(f, real_test)).item()

    return {"model": [netG, netD], "optimizer": [optimizerG, optimizerD], "steps": 20, "step": step, "probe": probe}


def gan_generator_step_on_detached_fake_good():
    torch.manual_seed(0)
    class G(nn.Module):
        def __init__(self, nz=4, h=48):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(nz, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 2))

        def forward(self, z):
            return self.net(z)

    class D(nn.Module):
        def __init__(self, h=48):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, 1))

        def forward(self, x):
            return self.net(x).squeeze(1)

    real_set, real_test = two_moons(4000, seed=241) + 1.0, two_moons(500, seed=242) + 1.0
    netG, netD = G(), D()
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    real_label, fake_label, B = 1.0, 0.0, 64

    def step(i):
        # (1) update D
        netD.zero_grad()
        real = real_set[torch.randint(0, len(real_set), (B,))]
        errD_real = criterion(netD(real), torch.full((B,), real_label))
        fake = netG(torch.randn(B, 4))
        errD_fake = criterion(netD(fake.detach()), torch.full((B,), fake_label))
        errD = errD_real + errD_fake
        errD.backward()
        optimizerD.step()
        # (2) update G
        netG.zero_grad()
        errG = criterion(netD(fake), torch.full((B,), real_label))
        errG.backward()
        optimizerG.step()
        return errD.item() + errG.item()

    def probe():
        with held_out(netG, netD):
            torch.manual_seed(4)
            f = netG(torch.randn(500, 4))
            k = lambda a, b: torch.exp(-torch.cdist(a, b) ** 2 / 0.5).mean()
            return (k(f, f) + k(real_test, real_test) - 2 * k(f, real_test)).item()

    return {"model": [netG, netD], "optimizer": [optimizerG, optimizerD], "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- audio_gru_reads_across_the_batch
def audio_gru_reads_across_the_batch_bad():
    torch.manual_seed(0)
    class CommandRNN(nn.Module):
        def __init__(self, n_mels=20, hidden=48, n_classes=5):
            super().__init__()
            self.norm = nn.LayerNorm(n_mels)
            self.gru = nn.GRU(n_mels, hidden)
            self.drop = nn.Dropout(0.1)
            self.out = nn.Linear(hidden, n_classes)

        def forward(self, mel):
            h, _ = self.gru(self.norm(mel))
            return self.out(self.drop(h[:, -1]))

    def spoken_commands(n, seed, n_classes=5, T=16):
        g = torch.Generator().manual_seed(seed)
        words = torch.randn(n_classes, 5, 20, generator=torch.Generator().manual_seed(99))
        y = torch.randint(0, n_classes, (n,), generator=g)
        mel = 0.7 * torch.randn(n, T, 20, generator=g)
        onset = torch.randint(0, 8, (n,), generator=g)
        for k in range(n):
            mel[k, onset[k]:onset[k] + 5] += words[y[k]]
        return mel, y

    train_mel, train_y = spoken_commands(1000, 251)
    test_mel, test_y = spoken_commands(256, 252)
    loader = DataLoader(TensorDataset(train_mel, train_y), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)
    model = CommandRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        mel, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(mel), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(test_mel), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_gru_reads_across_the_batch_good():
    torch.manual_seed(0)
    class CommandRNN(nn.Module):
        def __init__(self, n_mels=20, hidden=48, n_classes=5):
            super().__init__()
            self.norm = nn.LayerNorm(n_mels)
            self.gru = nn.GRU(n_mels, hidden, batch_first=True)
            self.drop = nn.Dropout(0.1)
            self.out = nn.Linear(hidden, n_classes)

        def forward(self, mel):
            h, _ = self.gru(self.norm(mel))
            return self.out(self.drop(h[:, -1]))

    def spoken_commands(n, seed, n_classes=5, T=16):
        g = torch.Generator().manual_seed(seed)
        words = torch.randn(n_classes, 5, 20, generator=torch.Generator().manual_seed(99))
        y = torch.randint(0, n_classes, (n,), generator=g)
        mel = 0.7 * torch.randn(n, T, 20, generator=g)
        onset = torch.randint(0, 8, (n,), generator=g)
        for k in range(n):
            mel[k, onset[k]:onset[k] + 5] += words[y[k]]
        return mel, y

    train_mel, train_y = spoken_commands(1000, 251)
    test_mel, test_y = spoken_commands(256, 252)
    loader = DataLoader(TensorDataset(train_mel, train_y), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)
    model = CommandRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        mel, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(mel), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        return loss.item()

    def probe():
        with held_out(model):
            return F.cross_entropy(model(test_mel), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- segmentation_ema_teacher_without_buffers
def segmentation_ema_teacher_without_buffers_bad():
    torch.manual_seed(0)
    def cbr(i, o, s=1):
        return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    class SegNet(nn.Module):
        def __init__(self, n=4):
            super().__init__()
            self.a, self.b, self.c = cbr(3, 12), cbr(12, 20, 2), cbr(32, 16)
            self.out = nn.Conv2d(16, n, 1)

        def forward(self, x):
            a = self.a(x)
            b = F.interpolate(self.b(a), scale_factor=2, mode="nearest")
            return self.out(self.c(torch.cat([a, b], 1)))

    class EMA:
        def __init__(self, model, decay=0.97):
            self.decay = decay
            self.model = copy.deepcopy(model).eval().requires_grad_(False)

        @torch.no_grad()
        def update(self, model):
            for e, p in zip(self.model.parameters(), model.parameters()):
                e.lerp_(p, 1 - self.decay)

    lx, ly = blob_scenes(24, seed=261, noise=0.9)
    ux, _ = blob_scenes(240, seed=262, noise=0.9)
    vx, vy = blob_scenes(60, seed=263, noise=0.9)
    sup = forever(DataLoader(TensorDataset(lx, ly), batch_size=8, shuffle=True, drop_last=True))
    unsup = forever(DataLoader(TensorDataset(ux), batch_size=8, shuffle=True, drop_last=True))
    student = SegNet()
    ema = EMA(student)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)

    def step(i):
        student.train()
        (x, y), (u,) = next(sup), next(unsup)
        with torch.no_grad():
            soft = F.softmax(ema.model(u), dim=1)
        logits = student(torch.cat([x, u + 0.3 * torch.randn_like(u)]))
        loss_s = F.cross_entropy(logits[:len(x)], y)
        loss_u = F.cross_entropy(logits[len(x):], soft)
        loss = loss_s + min(1.0, i / 60) * loss_u
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(student)
        return loss.item()

    def probe():
        with held_out(student):
            return F.cross_entropy(student(vx), vy).item()

    return {"model": [student, ema.model], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def segmentation_ema_teacher_without_buffers_good():
    torch.manual_seed(0)
    def cbr(i, o, s=1):
        return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    class SegNet(nn.Module):
        def __init__(self, n=4):
            super().__init__()
            self.a, self.b, self.c = cbr(3, 12), cbr(12, 20, 2), cbr(32, 16)
            self.out = nn.Conv2d(16, n, 1)

        def forward(self, x):
            a = self.a(x)
            b = F.interpolate(self.b(a), scale_factor=2, mode="nearest")
            return self.out(self.c(torch.cat([a, b], 1)))

    class EMA:
        def __init__(self, model, decay=0.97):
            self.decay = decay
            self.model = copy.deepcopy(model).eval().requires_grad_(False)

        @torch.no_grad()
        def update(self, model):
            for e, p in zip(self.model.parameters(), model.parameters()):
                e.lerp_(p, 1 - self.decay)
            for e, b in zip(self.model.buffers(), model.buffers()):
                e.copy_(b)

    lx, ly = blob_scenes(24, seed=261, noise=0.9)
    ux, _ = blob_scenes(240, seed=262, noise=0.9)
    vx, vy = blob_scenes(60, seed=263, noise=0.9)
    sup = forever(DataLoader(TensorDataset(lx, ly), batch_size=8, shuffle=True, drop_last=True))
    unsup = forever(DataLoader(TensorDataset(ux), batch_size=8, shuffle=True, drop_last=True))
    student = SegNet()
    ema = EMA(student)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)

    def step(i):
        student.train()
        (x, y), (u,) = next(sup), next(unsup)
        with torch.no_grad():
            soft = F.softmax(ema.model(u), dim=1)
        logits = student(torch.cat([x, u + 0.3 * torch.randn_like(u)]))
        loss_s = F.cross_entropy(logits[:len(x)], y)
        loss_u = F.cross_entropy(logits[len(x):], soft)
        loss = loss_s + min(1.0, i / 60) * loss_u
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(student)
        return loss.item()

    def probe():
        with held_out(student):
            return F.cross_entropy(student(vx), vy).item()

    return {"model": [student, ema.model], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
