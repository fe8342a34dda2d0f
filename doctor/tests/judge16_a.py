"""Twenty-two small programs of every kind, each with one bug that people often make, and a mended twin, by somebody who
had not seen the checks.

See step_programs.py. They are kept as they were written.
"""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


# ----------------------------------------------------------------- shared synthetic data
def endless(loader):
    while True:
        for batch in loader:
            yield batch


def make_pictures(n, classes, size, channels, seed, noise=0.7, proto_seed=7):
    """Class prototypes (smooth pictures), shifted at random, with noise; about zero mean, unit variance."""
    gp = torch.Generator().manual_seed(proto_seed)
    proto = torch.randn(classes, channels, size // 4, size // 4, generator=gp)
    proto = F.interpolate(proto, size=(size, size), mode="bilinear", align_corners=False)
    proto = (proto - proto.mean((1, 2, 3), keepdim=True)) / proto.std((1, 2, 3), keepdim=True)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    sh = torch.randint(-2, 3, (n, 2), generator=g)
    x = torch.stack([torch.roll(proto[c], (int(a), int(b)), dims=(1, 2)) for c, (a, b) in zip(y.tolist(), sh.tolist())])
    x = x + noise * torch.randn(x.shape, generator=g)
    x = x / math.sqrt(1 + noise ** 2)
    return x, y


CASES = [
    {"name": "softmax_before_cross_entropy", "what": "The network ends in nn.Softmax and its output goes to CrossEntropyLoss, which applies log_softmax itself: the loss is fed probabilities instead of logits.", "steps": 200},
    {"name": "kl_div_gets_probabilities", "what": "Distillation with F.kl_div whose first argument is softmax(student) where log-probabilities are expected, so the loss is not a divergence.", "steps": 400},
    {"name": "cosine_embedding_zero_labels", "what": "CosineEmbeddingLoss is fed labels 0/1 for different/same where it expects -1/1: pairs labelled 0 contribute no loss, so nothing pushes different pairs apart.", "steps": 300},
    {"name": "box_loss_over_background_cells", "what": "The box regression loss of a grid detector is averaged over all cells, background ones with all-zero targets included, instead of only over cells that hold an object.", "steps": 400},
    {"name": "gan_generator_step_on_detached_fake", "what": "The generator's loss is computed on D(fake.detach()), so no gradient reaches the generator and it stays at its random start.", "steps": 1000},
    {"name": "hidden_layers_in_python_list", "what": "The hidden layers sit in a plain Python list instead of nn.ModuleList, so they are not registered, model.parameters() lacks them and they stay at their random start.", "steps": 600},
    {"name": "head_replaced_after_optimizer", "what": "The optimizer is built before the classifier head is swapped for a new nn.Linear, so it holds the old head's parameters and the new head never changes.", "steps": 300},
    {"name": "constant_weight_init", "what": "All Linear weights are initialised to one constant, so all hidden units of a layer compute the same thing and receive the same gradient (symmetry is never broken).", "steps": 600},
    {"name": "segmentation_view_instead_of_permute", "what": "Logits of shape (B, C, H, W) are flattened with view(-1, C) without moving the class axis last, so rows of C logits mix neighbouring pixels and do not belong to the label beside them.", "steps": 200},
    {"name": "lstm_without_batch_first", "what": "nn.LSTM is built without batch_first=True but fed (batch, time, features): it runs along the batch axis, so samples influence each other and time is not read.", "steps": 400},
    {"name": "task_heads_share_one_module", "what": "nn.ModuleList([head] * n) repeats one and the same Linear, so all tasks share one head and get identical predictions.", "steps": 400},
    {"name": "eval_mode_never_left", "what": "The validation at the end of each epoch calls model.eval() and nothing calls model.train() again, so dropout is off for the rest of the training.", "steps": 160},
    {"name": "actor_critic_advantage_not_detached", "what": "The advantage in the policy loss is not detached, so the actor's term also sends gradients into the value head and pushes the critic off the returns.", "steps": 600},
    {"name": "dqn_target_without_done_mask", "what": "The TD target is r + gamma * max Q(s') for every transition, without (1 - done), so it bootstraps past the end of the episode.", "steps": 1500},
    {"name": "vae_mean_reconstruction_summed_kl", "what": "The VAE's reconstruction loss is averaged over pixels while the KL is summed over latents, so the KL is weighted hundreds of times too much and the posterior collapses.", "steps": 400},
    {"name": "pinn_derivative_without_create_graph", "what": "The derivative in the physics residual is taken by torch.autograd.grad without create_graph=True, so the residual's derivative term is a constant to the optimizer.", "steps": 1500},
    {"name": "maml_query_loss_with_unadapted_weights", "what": "MAML's outer loss runs the query set through the model's original weights instead of the fast weights adapted on the support set, so the inner loop has no effect on training.", "steps": 1200},
    {"name": "neighbour_sum_by_indexed_plus_equals", "what": "The neighbour sum of a graph layer is written agg[dst] += x[src]; with repeated indices this does not add up, only one neighbour per node survives (index_add is needed).", "steps": 80},
    {"name": "zero_grad_never_called", "what": "The loop never calls optimizer.zero_grad(), so each step uses the sum of all gradients so far.", "steps": 300},
    {"name": "epoch_scheduler_stepped_per_batch", "what": "StepLR is set up in epochs but scheduler.step() is called after every batch, so the learning rate falls to nearly nothing within the first epochs.", "steps": 320},
    {"name": "flip_image_but_not_mask", "what": "The random horizontal flip of the augmentation is applied to the picture but not to its segmentation mask, so half of the training pairs do not match.", "steps": 300},
    {"name": "squared_error_broadcasts", "what": "Predictions of shape (N, 1) are subtracted from targets of shape (N,), which broadcasts to (N, N), so each prediction is compared with every target.", "steps": 600},
]

PROBES = {  # what each probe measures, in words
    "softmax_before_cross_entropy": "held-out error rate",
    "kl_div_gets_probabilities": "held-out KL(teacher || student)",
    "cosine_embedding_zero_labels": "held-out verification error at cosine 0.5",
    "box_loss_over_background_cells": "held-out mean absolute box error on cells with an object",
    "gan_generator_step_on_detached_fake": "energy distance between generated and held-out points",
    "hidden_layers_in_python_list": "held-out mean squared error",
    "head_replaced_after_optimizer": "held-out error rate",
    "constant_weight_init": "held-out error rate",
    "segmentation_view_instead_of_permute": "held-out pixel error rate",
    "lstm_without_batch_first": "held-out error rate",
    "task_heads_share_one_module": "held-out mean squared error over the tasks",
    "eval_mode_never_left": "held-out cross-entropy",
    "actor_critic_advantage_not_detached": "critic's RMSE against the exact value of its policy",
    "dqn_target_without_done_mask": "1 - (mean greedy episode length / 200)",
    "vae_mean_reconstruction_summed_kl": "held-out reconstruction error (squared, per pixel)",
    "pinn_derivative_without_create_graph": "RMSE against the exact solution",
    "maml_query_loss_with_unadapted_weights": "query error after adaptation, held-out tasks",
    "neighbour_sum_by_indexed_plus_equals": "test-node error rate",
    "zero_grad_never_called": "held-out mean absolute error",
    "epoch_scheduler_stepped_per_batch": "held-out error rate",
    "flip_image_but_not_mask": "held-out 1 - IoU",
    "squared_error_broadcasts": "held-out mean squared error",
}


# ----------------------------------------------------------------- 1
def softmax_before_cross_entropy_bad():
    torch.manual_seed(0)

    class SmallCNN(nn.Module):
        def __init__(self, num_classes=10):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            )
            self.classifier = nn.Linear(32 * 4 * 4, num_classes)
            self.softmax = nn.Softmax(dim=1)

        def forward(self, x):
            x = self.features(x)
            x = torch.flatten(x, 1)
            return self.softmax(self.classifier(x))

    x, y = make_pictures(2048, 10, 16, 1, seed=1, noise=1.5)
    xt, yt = make_pictures(1000, 10, 16, 1, seed=2, noise=1.5)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)
    model = SmallCNN()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

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
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xt).argmax(1) != yt).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def softmax_before_cross_entropy_good():
    torch.manual_seed(0)

    class SmallCNN(nn.Module):
        def __init__(self, num_classes=10):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            )
            self.classifier = nn.Linear(32 * 4 * 4, num_classes)

        def forward(self, x):
            x = self.features(x)
            x = torch.flatten(x, 1)
            return self.classifier(x)

    x, y = make_pictures(2048, 10, 16, 1, seed=1, noise=1.5)
    xt, yt = make_pictures(1000, 10, 16, 1, seed=2, noise=1.5)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)
    model = SmallCNN()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

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
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xt).argmax(1) != yt).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------- 2
def trained_teacher(classes=8):
    """A wide network trained for a moment on noisy pictures; returned frozen and in eval mode."""
    torch.manual_seed(123)
    x, y = make_pictures(2048, classes, 16, 1, seed=11, noise=2.0)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, classes))
    opt = torch.optim.Adam(teacher.parameters(), lr=1e-3)
    for k in range(96):
        j = (k % 32) * 64
        loss = F.cross_entropy(teacher(x[j:j + 64]), y[j:j + 64])
        opt.zero_grad()
        loss.backward()
        opt.step()
    for p in teacher.parameters():
        p.requires_grad_(False)
    return teacher.eval()


def kl_div_gets_probabilities_bad():
    teacher = trained_teacher()
    torch.manual_seed(0)
    x, _ = make_pictures(4096, 8, 16, 1, seed=12, noise=2.0)
    xt, _ = make_pictures(1000, 8, 16, 1, seed=13, noise=2.0)
    batches = endless(DataLoader(TensorDataset(x), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0)))
    student = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    T = 2.0

    def step(i):
        student.train()
        (xb,) = next(batches)
        with torch.no_grad():
            t_logits = teacher(xb)
        s_logits = student(xb)
        loss = F.kl_div(F.softmax(s_logits / T, dim=1), F.softmax(t_logits / T, dim=1), reduction="batchmean") * T * T
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.kl_div(F.log_softmax(student(xt), 1), F.softmax(teacher(xt), 1), reduction="batchmean").item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def kl_div_gets_probabilities_good():
    teacher = trained_teacher()
    torch.manual_seed(0)
    x, _ = make_pictures(4096, 8, 16, 1, seed=12, noise=2.0)
    xt, _ = make_pictures(1000, 8, 16, 1, seed=13, noise=2.0)
    batches = endless(DataLoader(TensorDataset(x), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0)))
    student = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    T = 2.0

    def step(i):
        student.train()
        (xb,) = next(batches)
        with torch.no_grad():
            t_logits = teacher(xb)
        s_logits = student(xb)
        loss = F.kl_div(F.log_softmax(s_logits / T, dim=1), F.softmax(t_logits / T, dim=1), reduction="batchmean") * T * T
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.kl_div(F.log_softmax(student(xt), 1), F.softmax(teacher(xt), 1), reduction="batchmean").item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------- 3
def make_pairs(n, seed):
    """Pairs of pictures of 6 identities; same is 1 where both show the same one (half of the pairs)."""
    g = torch.Generator().manual_seed(seed)
    x, y = make_pictures(1500, 6, 16, 1, seed=seed, noise=0.8)
    by = [torch.nonzero(y == c).flatten() for c in range(6)]
    a, b, same = [], [], []
    for k in range(n):
        c = int(torch.randint(0, 6, (1,), generator=g))
        s = k % 2
        d = c if s else (c + int(torch.randint(1, 6, (1,), generator=g))) % 6
        a.append(by[c][int(torch.randint(0, len(by[c]), (1,), generator=g))])
        b.append(by[d][int(torch.randint(0, len(by[d]), (1,), generator=g))])
        same.append(s)
    return x[torch.stack(a)], x[torch.stack(b)], torch.tensor(same)


def cosine_embedding_zero_labels_bad():
    torch.manual_seed(0)

    class EmbeddingNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            )
            self.fc = nn.Linear(16 * 16, 32)

        def forward(self, x):
            return self.fc(self.conv(x).flatten(1))

    a, b, same = make_pairs(3000, seed=21)
    at, bt, st = make_pairs(600, seed=22)
    loader = DataLoader(TensorDataset(a, b, same), batch_size=50, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)
    model = EmbeddingNet()
    criterion = nn.CosineEmbeddingLoss(margin=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        x1, x2, label = next(batches)
        target = label.float()
        e1, e2 = model(x1), model(x2)
        loss = criterion(e1, e2, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            cos = F.cosine_similarity(model(at), model(bt))
        return ((cos > 0.5).long() != st).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cosine_embedding_zero_labels_good():
    torch.manual_seed(0)

    class EmbeddingNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            )
            self.fc = nn.Linear(16 * 16, 32)

        def forward(self, x):
            return self.fc(self.conv(x).flatten(1))

    a, b, same = make_pairs(3000, seed=21)
    at, bt, st = make_pairs(600, seed=22)
    loader = DataLoader(TensorDataset(a, b, same), batch_size=50, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)
    model = EmbeddingNet()
    criterion = nn.CosineEmbeddingLoss(margin=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        x1, x2, label = next(batches)
        target = label.float() * 2 - 1
        e1, e2 = model(x1), model(x2)
        loss = criterion(e1, e2, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            cos = F.cosine_similarity(model(at), model(bt))
        return ((cos > 0.5).long() != st).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------- 4
def make_detection(n, seed):
    """Pictures 1x24x24 with one or two bright boxes; targets on a 6x6 grid: objectness and (dx, dy, log w, log h)."""
    g = torch.Generator().manual_seed(seed)
    x = 0.3 * torch.randn(n, 1, 24, 24, generator=g)
    obj = torch.zeros(n, 6, 6)
    box = torch.zeros(n, 4, 6, 6)
    for k in range(n):
        for _ in range(1 + int(torch.randint(0, 2, (1,), generator=g))):
            w, h = (torch.randint(3, 9, (2,), generator=g)).tolist()
            left = int(torch.randint(0, 24 - w + 1, (1,), generator=g))
            top = int(torch.randint(0, 24 - h + 1, (1,), generator=g))
            cx, cy = left + w / 2, top + h / 2
            i, j = min(int(cy // 4), 5), min(int(cx // 4), 5)
            if obj[k].sum() > 0 and (obj[k, max(i - 2, 0):i + 3, max(j - 2, 0):j + 3].sum() > 0):
                continue
            x[k, 0, top:top + h, left:left + w] += 1.5
            obj[k, i, j] = 1
            box[k, :, i, j] = torch.tensor([cx / 4 - j - 0.5, cy / 4 - i - 0.5, math.log(w / 4), math.log(h / 4)])
    return x, obj, box


def box_loss_over_background_cells_bad():
    torch.manual_seed(0)

    class GridDetector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
            )
            self.obj_head = nn.Conv2d(24, 1, 1)
            self.box_head = nn.Conv2d(24, 4, 1)

        def forward(self, x):
            f = self.backbone(x)
            return self.obj_head(f).squeeze(1), self.box_head(f)

    train = TensorDataset(*make_detection(1024, seed=31))
    xt, ot, bt = make_detection(300, seed=32)
    batches = endless(DataLoader(train, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0)))
    model = GridDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        img, obj, box = next(batches)
        pred_obj, pred_box = model(img)
        obj_loss = F.binary_cross_entropy_with_logits(pred_obj, obj)
        box_loss = F.smooth_l1_loss(pred_box, box)
        loss = obj_loss + box_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            _, pb = model(xt)
        model.train(was)
        m = ot.bool()
        return (pb - bt).abs().mean(1)[m].mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def box_loss_over_background_cells_good():
    torch.manual_seed(0)

    class GridDetector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
            )
            self.obj_head = nn.Conv2d(24, 1, 1)
            self.box_head = nn.Conv2d(24, 4, 1)

        def forward(self, x):
            f = self.backbone(x)
            return self.obj_head(f).squeeze(1), self.box_head(f)

    train = TensorDataset(*make_detection(1024, seed=31))
    xt, ot, bt = make_detection(300, seed=32)
    batches = endless(DataLoader(train, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0)))
    model = GridDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        img, obj, box = next(batches)
        pred_obj, pred_box = model(img)
        obj_loss = F.binary_cross_entropy_with_logits(pred_obj, obj)
        pos = obj.bool()
        box_loss = F.smooth_l1_loss(pred_box.permute(0, 2, 3, 1)[pos], box.permute(0, 2, 3, 1)[pos])
        loss = obj_loss + box_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            _, pb = model(xt)
        model.train(was)
        m = ot.bool()
        return (pb - bt).abs().mean(1)[m].mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------- 5
def make_ring(n, seed):
    """Points in the plane on a noisy half ring, of about unit scale."""
    g = torch.Generator().manual_seed(seed)
    a = math.pi * torch.rand(n, generator=g)
    pts = torch.stack([torch.cos(a), 2 * torch.sin(a) - 1.27], 1) * 1.4
    return pts + 0.1 * torch.randn(n, 2, generator=g)


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def gan_generator_step_on_detached_fake_bad():
    torch.manual_seed(0)
    z_dim, batch_size = 8, 128

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(z_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

        def forward(self, z):
            return self.net(z)

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
            )

        def forward(self, x):
            return self.net(x)

    netG, netD = Generator(), Discriminator()
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    dataset = TensorDataset(make_ring(5120, seed=41))
    held_out = make_ring(1000, seed=42)
    fixed_noise = torch.randn(1000, z_dim, generator=torch.Generator().manual_seed(43))
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)
    real_label, fake_label = torch.ones(batch_size, 1), torch.zeros(batch_size, 1)

    def step(i):
        (real,) = next(batches)
        # (1) update D: real up, fake down
        netD.zero_grad()
        errD_real = criterion(netD(real), real_label)
        fake = netG(torch.randn(batch_size, z_dim))
        errD_fake = criterion(netD(fake.detach()), fake_label)
        errD = errD_real + errD_fake
        errD.backward()
        optimizerD.step()
        # (2) update G: make D say "real"
        netG.zero_grad()
        errG = criterion(netD(fake.detach()), real_label)
        errG.backward()
        optimizerG.step()
        return (errD + errG).item()

    def probe():
        with torch.no_grad():
            return energy_distance(netG(fixed_noise), held_out)

    return {"model": (netG, netD), "optimizer": (optimizerG, optimizerD), "steps": 20, "step": step, "probe": probe}


def gan_generator_step_on_detached_fake_good():
    torch.manual_seed(0)
    z_dim, batch_size = 8, 128

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(z_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

        def forward(self, z):
            return self.net(z)

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
            )

        def forward(self, x):
            return self.net(x)

    netG, netD = Generator(), Discriminator()
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    dataset = TensorDataset(make_ring(5120, seed=41))
    held_out = make_ring(1000, seed=42)
    fixed_noise = torch.randn(1000, z_dim, generator=torch.Generator().manual_seed(43))
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)
    real_label, fake_label = torch.ones(batch_size, 1), torch.zeros(batch_size, 1)

    def step(i):
        (real,) = next(batches)
        # (1) update D: real up, fake down
        netD.zero_grad()
        errD_real = criterion(netD(real), real_label)
        fake = netG(torch.randn(batch_size, z_dim))
        errD_fake = criterion(netD(fake.detach()), fake_label)
        errD = errD_real + errD_fake
        errD.backward()
        optimizerD.step()
        # (2) update G: make D say "real"
        netG.zero_grad()
        errG = criterion(netD(fake), real_label)
        errG.backward()
        optimizerG.step()
        return (errD + errG).item()

    def probe():
        with torch.no_grad():
            return energy_distance(netG(fixed_noise), held_out)

    return {"model": (netG, netD), "optimizer": (optimizerG, optimizerD), "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------- 6
def make_table(n, d, seed, noise=0.1):
    """A table of d standard normal columns and a target with interactions, of about unit variance."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * (x[:, 3] ** 2 - 1) + torch.tanh(x[:, 4] - x[:, 5])
    y = y / 1.6 + noise * torch.randn(n, generator=g)
    return x, y.unsqueeze(1)


def hidden_layers_in_python_list_bad():
    torch.manual_seed(0)

    class DeepRegressor(nn.Module):
        def __init__(self, in_dim, width=64, depth=3):
            super().__init__()
            self.inp = nn.Linear(in_dim, width)
            self.hidden = [nn.Linear(width, width) for _ in range(depth)]
            self.out = nn.Linear(width, 1)

        def forward(self, x):
            x = F.relu(self.inp(x))
            for layer in self.hidden:
                x = F.relu(layer(x))
            return self.out(x)

    train = TensorDataset(*make_table(4096, 8, seed=51))
    xt, yt = make_table(1000, 8, seed=52)
    batches = endless(DataLoader(train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0)))
    model = DeepRegressor(8)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(xt), yt).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def hidden_layers_in_python_list_good():
    torch.manual_seed(0)

    class DeepRegressor(nn.Module):
        def __init__(self, in_dim, width=64, depth=3):
            super().__init__()
            self.inp = nn.Linear(in_dim, width)
            self.hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
            self.out = nn.Linear(width, 1)

        def forward(self, x):
            x = F.relu(self.inp(x))
            for layer in self.hidden:
                x = F.relu(layer(x))
            return self.out(x)

    train = TensorDataset(*make_table(4096, 8, seed=51))
    xt, yt = make_table(1000, 8, seed=52)
    batches = endless(DataLoader(train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0)))
    model = DeepRegressor(8)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(xt), yt).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------- 7
class PretrainedNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )
        self.fc = nn.Linear(32 * 4 * 4, num_classes)

    def forward(self, x):
        return self.fc(self.features(x))


def load_pretrained():
    """A small CNN trained on 12 other classes (stands for downloaded weights)."""
    torch.manual_seed(321)
    x, y = make_pictures(2048, 12, 16, 3, seed=61, noise=1.0, proto_seed=70)
    net = PretrainedNet(12)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for k in range(96):
        j = (k % 32) * 64
        loss = F.cross_entropy(net(x[j:j + 64]), y[j:j + 64])
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.zero_grad(set_to_none=True)
    return net


def head_replaced_after_optimizer_bad():
    model = load_pretrained()
    torch.manual_seed(0)
    x, y = make_pictures(1024, 5, 16, 3, seed=62, noise=2.5, proto_seed=71)
    xt, yt = make_pictures(600, 5, 16, 3, seed=63, noise=2.5, proto_seed=71)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)

    for param in model.features.parameters():
        param.requires_grad = False
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.002, momentum=0.9)
    model.fc = nn.Linear(model.fc.in_features, 5)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        inputs, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(xt).argmax(1) != yt).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def head_replaced_after_optimizer_good():
    model = load_pretrained()
    torch.manual_seed(0)
    x, y = make_pictures(1024, 5, 16, 3, seed=62, noise=2.5, proto_seed=71)
    xt, yt = make_pictures(600, 5, 16, 3, seed=63, noise=2.5, proto_seed=71)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)

    for param in model.features.parameters():
        param.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, 5)
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.002, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        inputs, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(xt).argmax(1) != yt).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------- 8
def make_rings(n, seed):
    """A table of 6 columns; the class (0, 1, 2) depends on the radius in the first two and on a sign of a product."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    y = (x[:, 0] ** 2 + x[:, 1] ** 2 > 1.4).long() + ((x[:, 2] * x[:, 3] > 0) & (x[:, 0] ** 2 + x[:, 1] ** 2 > 1.4)).long()
    return x, y


def constant_weight_init_bad():
    torch.manual_seed(0)

    def init_weights(m):
        if isinstance(m, nn.Linear):
            nn.init.constant_(m.weight, 0.1)
            nn.init.zeros_(m.bias)

    model = nn.Sequential(
        nn.Linear(6, 64), nn.ReLU(),
        nn.Linear(64, 32), nn.ReLU(),
        nn.Linear(32, 3),
    )
    model.apply(init_weights)
    train = TensorDataset(*make_rings(4096, seed=81))
    xt, yt = make_rings(1000, seed=82)
    batches = endless(DataLoader(train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(xt).argmax(1) != yt).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def constant_weight_init_good():
    torch.manual_seed(0)

    def init_weights(m):
        if isinstance(m, nn.Linear):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
            nn.init.zeros_(m.bias)

    model = nn.Sequential(
        nn.Linear(6, 64), nn.ReLU(),
        nn.Linear(64, 32), nn.ReLU(),
        nn.Linear(32, 3),
    )
    model.apply(init_weights)
    train = TensorDataset(*make_rings(4096, seed=81))
    xt, yt = make_rings(1000, seed=82)
    batches = endless(DataLoader(train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(xt).argmax(1) != yt).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------- 9
def make_scenes(n, seed):
    """Pictures 3x16x16 split in regions of 4 classes, each with its own colour plus noise."""
    g = torch.Generator().manual_seed(seed)
    colour = torch.tensor([[1.2, -0.6, -0.6], [-0.6, 1.2, -0.6], [-0.6, -0.6, 1.2], [-0.2, -0.2, -0.2]])
    coarse = torch.randn(n, 4, 4, 4, generator=g)
    mask = F.interpolate(coarse, size=(16, 16), mode="bilinear", align_corners=False).argmax(1)
    x = colour[mask].permute(0, 3, 1, 2) + 0.8 * torch.randn(n, 3, 16, 16, generator=g)
    return x.contiguous(), mask


def segmentation_view_instead_of_permute_bad():
    torch.manual_seed(0)
    num_classes = 4
    train = TensorDataset(*make_scenes(640, seed=91))
    xt, mt = make_scenes(150, seed=92)
    loader = DataLoader(train, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, num_classes, 1),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        images, masks = next(batches)
        logits = model(images)
        logits_flat = logits.view(-1, num_classes)
        loss = criterion(logits_flat, masks.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xt).argmax(1) != mt).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def segmentation_view_instead_of_permute_good():
    torch.manual_seed(0)
    num_classes = 4
    train = TensorDataset(*make_scenes(640, seed=91))
    xt, mt = make_scenes(150, seed=92)
    loader = DataLoader(train, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, num_classes, 1),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        images, masks = next(batches)
        logits = model(images)
        logits_flat = logits.permute(0, 2, 3, 1).reshape(-1, num_classes)
        loss = criterion(logits_flat, masks.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xt).argmax(1) != mt).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------- 10
def make_sensor_series(n, seed):
    """Series of 24 steps and 3 channels; the class is the frequency of a wave of random phase."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    freq = torch.tensor([0.35, 0.6, 0.95])[y]
    ph = 2 * math.pi * torch.rand(n, 1, 3, generator=g)
    t = torch.arange(24.0).view(1, 24, 1)
    x = 1.2 * torch.sin(freq.view(-1, 1, 1) * t + ph) + 0.4 * torch.randn(n, 24, 3, generator=g)
    return x, y


def lstm_without_batch_first_bad():
    torch.manual_seed(0)

    class SensorLSTM(nn.Module):
        def __init__(self, n_features=3, hidden=48, n_classes=3):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden)
            self.fc = nn.Linear(hidden, n_classes)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    train = TensorDataset(*make_sensor_series(1600, seed=101))
    xt, yt = make_sensor_series(500, seed=102)
    loader = DataLoader(train, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)
    model = SensorLSTM()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        xb, yb = next(batches)  # (batch, time, features)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(xt).argmax(1) != yt).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_without_batch_first_good():
    torch.manual_seed(0)

    class SensorLSTM(nn.Module):
        def __init__(self, n_features=3, hidden=48, n_classes=3):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden, batch_first=True)
            self.fc = nn.Linear(hidden, n_classes)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    train = TensorDataset(*make_sensor_series(1600, seed=101))
    xt, yt = make_sensor_series(500, seed=102)
    loader = DataLoader(train, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)
    model = SensorLSTM()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        xb, yb = next(batches)  # (batch, time, features)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(xt).argmax(1) != yt).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------- 11
def make_multitask(n, seed):
    """A table of 10 columns and 3 standardised targets that share some structure."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    a, b, c = torch.sin(1.5 * x[:, 0]), torch.tanh(x[:, 1] + x[:, 2]), x[:, 3] * 0.5 + x[:, 4] * 0.5
    y = torch.stack([a + b, b - c, c - a], 1)
    return x, y + 0.1 * torch.randn(n, 3, generator=g)


def task_heads_share_one_module_bad():
    torch.manual_seed(0)

    class MultiTaskNet(nn.Module):
        def __init__(self, in_dim=10, width=64, n_tasks=3):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(in_dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            self.heads = nn.ModuleList([nn.Linear(width, 1)] * n_tasks)

        def forward(self, x):
            h = self.trunk(x)
            return [head(h).squeeze(-1) for head in self.heads]

    train = TensorDataset(*make_multitask(3200, seed=111))
    xt, yt = make_multitask(800, seed=112)
    batches = endless(DataLoader(train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0)))
    model = MultiTaskNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)

    def step(i):
        model.train()
        xb, yb = next(batches)
        preds = model(xb)
        loss = sum(F.mse_loss(p, yb[:, k]) for k, p in enumerate(preds))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(torch.stack(model(xt), 1), yt).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def task_heads_share_one_module_good():
    torch.manual_seed(0)

    class MultiTaskNet(nn.Module):
        def __init__(self, in_dim=10, width=64, n_tasks=3):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(in_dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            self.heads = nn.ModuleList([nn.Linear(width, 1) for _ in range(n_tasks)])

        def forward(self, x):
            h = self.trunk(x)
            return [head(h).squeeze(-1) for head in self.heads]

    train = TensorDataset(*make_multitask(3200, seed=111))
    xt, yt = make_multitask(800, seed=112)
    batches = endless(DataLoader(train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0)))
    model = MultiTaskNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)

    def step(i):
        model.train()
        xb, yb = next(batches)
        preds = model(xb)
        loss = sum(F.mse_loss(p, yb[:, k]) for k, p in enumerate(preds))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(torch.stack(model(xt), 1), yt).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------- 12
def make_small_table(n, seed):
    """40 columns of which 6 matter; the label (2 classes) follows them with noise."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 40, generator=g)
    score = x[:, 0] + x[:, 1] - x[:, 2] + x[:, 3] * x[:, 4] - 0.7 * x[:, 5]
    y = torch.bernoulli(torch.sigmoid(1.5 * score), generator=g).long()
    return x, y


def eval_mode_never_left_bad():
    torch.manual_seed(0)
    train = TensorDataset(*make_small_table(512, seed=121))
    val = TensorDataset(*make_small_table(256, seed=122))
    xt, yt = make_small_table(1000, seed=123)
    train_loader = DataLoader(train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    val_loader = DataLoader(val, batch_size=128)
    batches = endless(train_loader)
    model = nn.Sequential(
        nn.Linear(40, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, 2),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = []

    def validate():
        model.eval()
        total = 0.0
        with torch.no_grad():
            for xv, yv in val_loader:
                total += criterion(model(xv), yv).item() * len(yv)
        history.append(total / len(val))

    model.train()

    def step(i):
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(train_loader) == 0:  # end of an epoch
            validate()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            ce = criterion(model(xt), yt).item()
        model.train(was)
        return ce

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def eval_mode_never_left_good():
    torch.manual_seed(0)
    train = TensorDataset(*make_small_table(512, seed=121))
    val = TensorDataset(*make_small_table(256, seed=122))
    xt, yt = make_small_table(1000, seed=123)
    train_loader = DataLoader(train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    val_loader = DataLoader(val, batch_size=128)
    batches = endless(train_loader)
    model = nn.Sequential(
        nn.Linear(40, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, 2),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = []

    def validate():
        model.eval()
        total = 0.0
        with torch.no_grad():
            for xv, yv in val_loader:
                total += criterion(model(xv), yv).item() * len(yv)
        history.append(total / len(val))

    model.train()

    def step(i):
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(train_loader) == 0:  # end of an epoch
            validate()
            model.train()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            ce = criterion(model(xt), yt).item()
        model.train(was)
        return ce

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------- 13
def actor_critic_advantage_not_detached_bad():
    torch.manual_seed(0)
    n_states, n_envs, n_steps, gamma = 10, 32, 8, 0.95

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(n_states, 64), nn.Tanh())
            self.pi = nn.Linear(64, 2)
            self.v = nn.Linear(64, 1)

        def forward(self, s):
            h = self.body(s)
            return self.pi(h), self.v(h).squeeze(-1)

    # corridor of 10 cells; moves succeed with 0.8; reward 1 at the right end and 0.2 at the left end, then a new start
    start_gen = torch.Generator().manual_seed(5)
    eye = torch.eye(n_states)

    def env_step(s, a):
        move = torch.where(torch.rand(s.shape, generator=start_gen) < 0.8, a * 2 - 1, 1 - a * 2)
        s2 = s + move
        done = (s2 <= 0) | (s2 >= n_states - 1)
        r = 1.0 * (s2 >= n_states - 1).float() + 0.2 * (s2 <= 0).float()
        fresh = torch.randint(1, n_states - 1, s.shape, generator=start_gen)
        return torch.where(done, fresh, s2), r, done.float()

    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    state = {"s": torch.randint(1, n_states - 1, (n_envs,), generator=start_gen)}

    def step(i):
        s = state["s"]
        log_probs, values, entropies, rewards, dones = [], [], [], [], []
        for _ in range(n_steps):
            logits, v = model(eye[s])
            dist = torch.distributions.Categorical(logits=logits)
            a = dist.sample()
            s, r, d = env_step(s, a)
            log_probs.append(dist.log_prob(a))
            entropies.append(dist.entropy())
            values.append(v)
            rewards.append(r)
            dones.append(d)
        state["s"] = s
        with torch.no_grad():
            R = model(eye[s])[1]
        returns = []
        for r, d in zip(reversed(rewards), reversed(dones)):
            R = r + gamma * R * (1 - d)
            returns.insert(0, R)
        returns, values = torch.stack(returns), torch.stack(values)
        log_probs, entropies = torch.stack(log_probs), torch.stack(entropies)
        advantage = returns - values
        actor_loss = -(log_probs * advantage).mean()
        critic_loss = advantage.pow(2).mean()
        loss = actor_loss + 0.5 * critic_loss - 0.01 * entropies.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            logits, v = model(eye)
            right = F.softmax(logits, 1)[:, 1]
            p_right = 0.8 * right + 0.2 * (1 - right)
            exact = torch.zeros(n_states)
            for _ in range(400):
                up = torch.cat([exact[1:-1][1:] * gamma, torch.tensor([1.0])])
                down = torch.cat([torch.tensor([0.2]), exact[1:-1][:-1] * gamma])
                inner = p_right[1:-1] * up + (1 - p_right[1:-1]) * down
                exact = torch.cat([torch.zeros(1), inner, torch.zeros(1)])
            return (v - exact)[1:-1].pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def actor_critic_advantage_not_detached_good():
    torch.manual_seed(0)
    n_states, n_envs, n_steps, gamma = 10, 32, 8, 0.95

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(n_states, 64), nn.Tanh())
            self.pi = nn.Linear(64, 2)
            self.v = nn.Linear(64, 1)

        def forward(self, s):
            h = self.body(s)
            return self.pi(h), self.v(h).squeeze(-1)

    # corridor of 10 cells; moves succeed with 0.8; reward 1 at the right end and 0.2 at the left end, then a new start
    start_gen = torch.Generator().manual_seed(5)
    eye = torch.eye(n_states)

    def env_step(s, a):
        move = torch.where(torch.rand(s.shape, generator=start_gen) < 0.8, a * 2 - 1, 1 - a * 2)
        s2 = s + move
        done = (s2 <= 0) | (s2 >= n_states - 1)
        r = 1.0 * (s2 >= n_states - 1).float() + 0.2 * (s2 <= 0).float()
        fresh = torch.randint(1, n_states - 1, s.shape, generator=start_gen)
        return torch.where(done, fresh, s2), r, done.float()

    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    state = {"s": torch.randint(1, n_states - 1, (n_envs,), generator=start_gen)}

    def step(i):
        s = state["s"]
        log_probs, values, entropies, rewards, dones = [], [], [], [], []
        for _ in range(n_steps):
            logits, v = model(eye[s])
            dist = torch.distributions.Categorical(logits=logits)
            a = dist.sample()
            s, r, d = env_step(s, a)
            log_probs.append(dist.log_prob(a))
            entropies.append(dist.entropy())
            values.append(v)
            rewards.append(r)
            dones.append(d)
        state["s"] = s
        with torch.no_grad():
            R = model(eye[s])[1]
        returns = []
        for r, d in zip(reversed(rewards), reversed(dones)):
            R = r + gamma * R * (1 - d)
            returns.insert(0, R)
        returns, values = torch.stack(returns), torch.stack(values)
        log_probs, entropies = torch.stack(log_probs), torch.stack(entropies)
        advantage = returns - values
        actor_loss = -(log_probs * advantage.detach()).mean()
        critic_loss = advantage.pow(2).mean()
        loss = actor_loss + 0.5 * critic_loss - 0.01 * entropies.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            logits, v = model(eye)
            right = F.softmax(logits, 1)[:, 1]
            p_right = 0.8 * right + 0.2 * (1 - right)
            exact = torch.zeros(n_states)
            for _ in range(400):
                up = torch.cat([exact[1:-1][1:] * gamma, torch.tensor([1.0])])
                down = torch.cat([torch.tensor([0.2]), exact[1:-1][:-1] * gamma])
                inner = p_right[1:-1] * up + (1 - p_right[1:-1]) * down
                exact = torch.cat([torch.zeros(1), inner, torch.zeros(1)])
            return (v - exact)[1:-1].pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------- 14
def cartpole_reset(n, gen):
    return 0.1 * torch.rand(n, 4, generator=gen) - 0.05


def cartpole_step(s, a):
    """The classic cart and pole, for a batch of states (n, 4) and actions (n,); returns next states and falls."""
    x, xd, th, thd = s.unbind(1)
    force = (a.float() * 2 - 1) * 10.0
    c, si = torch.cos(th), torch.sin(th)
    temp = (force + 0.05 * thd ** 2 * si) / 1.1
    tacc = (9.8 * si - c * temp) / (0.5 * (4.0 / 3.0 - 0.1 * c ** 2 / 1.1))
    xacc = temp - 0.05 * tacc * c / 1.1
    s2 = torch.stack([x + 0.02 * xd, xd + 0.02 * xacc, th + 0.02 * thd, thd + 0.02 * tacc], 1)
    fall = (s2[:, 0].abs() > 2.4) | (s2[:, 2].abs() > 0.2095)
    return s2, fall


def dqn_target_without_done_mask_bad():
    torch.manual_seed(0)
    gamma, n_envs, batch_size, capacity = 0.98, 8, 64, 20000
    gen = torch.Generator().manual_seed(3)

    policy_net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    target_net = copy.deepcopy(policy_net)
    target_net.eval()
    for p in target_net.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(policy_net.parameters(), lr=1e-3)

    mem = {
        "s": torch.zeros(capacity, 4), "a": torch.zeros(capacity, dtype=torch.long), "r": torch.zeros(capacity),
        "s2": torch.zeros(capacity, 4), "d": torch.zeros(capacity),
    }
    st = {"n": 0, "s": cartpole_reset(n_envs, gen), "t": torch.zeros(n_envs)}

    def act_and_store(eps):
        s = st["s"]
        with torch.no_grad():
            greedy = policy_net(s).argmax(1)
        rnd = torch.randint(0, 2, (n_envs,), generator=gen)
        a = torch.where(torch.rand(n_envs, generator=gen) < eps, rnd, greedy)
        s2, fall = cartpole_step(s, a)
        st["t"] += 1
        idx = (st["n"] + torch.arange(n_envs)) % capacity
        mem["s"][idx], mem["a"][idx], mem["s2"][idx] = s, a, s2
        mem["r"][idx], mem["d"][idx] = 1.0, fall.float()
        st["n"] += n_envs
        over = fall | (st["t"] >= 200)
        st["s"] = torch.where(over.unsqueeze(1), cartpole_reset(n_envs, gen), s2)
        st["t"] = torch.where(over, torch.zeros(n_envs), st["t"])

    for _ in range(125):  # 1000 random transitions before learning
        act_and_store(1.0)

    def step(i):
        act_and_store(max(0.05, 1.0 - i / 600))
        j = torch.randint(0, min(st["n"], capacity), (batch_size,), generator=gen)
        s, a, r, s2, d = (mem[k][j] for k in ("s", "a", "r", "s2", "d"))
        q = policy_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_q = target_net(s2).max(1).values
            target = r + gamma * next_q
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy_net.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            for p, t in zip(policy_net.parameters(), target_net.parameters()):
                t.lerp_(p, 0.02)
        return loss.item()

    def probe():
        g = torch.Generator().manual_seed(99)
        s = cartpole_reset(40, g)
        alive, length = torch.ones(40, dtype=torch.bool), torch.zeros(40)
        with torch.no_grad():
            for _ in range(200):
                s, fall = cartpole_step(s, policy_net(s).argmax(1))
                alive &= ~fall
                length += alive.float()
        return 1 - length.mean().item() / 200

    return {"model": policy_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_target_without_done_mask_good():
    torch.manual_seed(0)
    gamma, n_envs, batch_size, capacity = 0.98, 8, 64, 20000
    gen = torch.Generator().manual_seed(3)

    policy_net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    target_net = copy.deepcopy(policy_net)
    target_net.eval()
    for p in target_net.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(policy_net.parameters(), lr=1e-3)

    mem = {
        "s": torch.zeros(capacity, 4), "a": torch.zeros(capacity, dtype=torch.long), "r": torch.zeros(capacity),
        "s2": torch.zeros(capacity, 4), "d": torch.zeros(capacity),
    }
    st = {"n": 0, "s": cartpole_reset(n_envs, gen), "t": torch.zeros(n_envs)}

    def act_and_store(eps):
        s = st["s"]
        with torch.no_grad():
            greedy = policy_net(s).argmax(1)
        rnd = torch.randint(0, 2, (n_envs,), generator=gen)
        a = torch.where(torch.rand(n_envs, generator=gen) < eps, rnd, greedy)
        s2, fall = cartpole_step(s, a)
        st["t"] += 1
        idx = (st["n"] + torch.arange(n_envs)) % capacity
        mem["s"][idx], mem["a"][idx], mem["s2"][idx] = s, a, s2
        mem["r"][idx], mem["d"][idx] = 1.0, fall.float()
        st["n"] += n_envs
        over = fall | (st["t"] >= 200)
        st["s"] = torch.where(over.unsqueeze(1), cartpole_reset(n_envs, gen), s2)
        st["t"] = torch.where(over, torch.zeros(n_envs), st["t"])

    for _ in range(125):  # 1000 random transitions before learning
        act_and_store(1.0)

    def step(i):
        act_and_store(max(0.05, 1.0 - i / 600))
        j = torch.randint(0, min(st["n"], capacity), (batch_size,), generator=gen)
        s, a, r, s2, d = (mem[k][j] for k in ("s", "a", "r", "s2", "d"))
        q = policy_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_q = target_net(s2).max(1).values
            target = r + gamma * (1 - d) * next_q
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy_net.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            for p, t in zip(policy_net.parameters(), target_net.parameters()):
                t.lerp_(p, 0.02)
        return loss.item()

    def probe():
        g = torch.Generator().manual_seed(99)
        s = cartpole_reset(40, g)
        alive, length = torch.ones(40, dtype=torch.bool), torch.zeros(40)
        with torch.no_grad():
            for _ in range(200):
                s, fall = cartpole_step(s, policy_net(s).argmax(1))
                alive &= ~fall
                length += alive.float()
        return 1 - length.mean().item() / 200

    return {"model": policy_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------- 15
def make_bars(n, seed):
    """Pictures 1x16x16 in [0, 1]: a soft ellipse of random place, size and tilt."""
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
    u = torch.rand(n, 5, 1, 1, generator=g)
    cx, cy, ang = 0.8 * (u[:, 0] - 0.5), 0.8 * (u[:, 1] - 0.5), math.pi * u[:, 2]
    a, b = 0.4 + 0.3 * u[:, 3], 0.2 + 0.15 * u[:, 4]
    px = (xx - cx) * torch.cos(ang) + (yy - cy) * torch.sin(ang)
    py = -(xx - cx) * torch.sin(ang) + (yy - cy) * torch.cos(ang)
    return torch.sigmoid(8 * (1 - (px / a) ** 2 - (py / b) ** 2)).unsqueeze(1)


def vae_mean_reconstruction_summed_kl_bad():
    torch.manual_seed(0)

    class VAE(nn.Module):
        def __init__(self, z=8):
            super().__init__()
            self.fc1 = nn.Linear(256, 128)
            self.fc_mu = nn.Linear(128, z)
            self.fc_logvar = nn.Linear(128, z)
            self.fc3 = nn.Linear(z, 128)
            self.fc4 = nn.Linear(128, 256)

        def encode(self, x):
            h = F.relu(self.fc1(x))
            return self.fc_mu(h), self.fc_logvar(h)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + torch.randn_like(std) * std

        def decode(self, z):
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 256))
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 256), reduction="mean")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return bce + kld

    x, xt = make_bars(3200, seed=151), make_bars(500, seed=152)
    batches = endless(DataLoader(TensorDataset(x), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0)))
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

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
            mu, _ = model.encode(xt.view(-1, 256))
            return F.mse_loss(model.decode(mu), xt.view(-1, 256)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_mean_reconstruction_summed_kl_good():
    torch.manual_seed(0)

    class VAE(nn.Module):
        def __init__(self, z=8):
            super().__init__()
            self.fc1 = nn.Linear(256, 128)
            self.fc_mu = nn.Linear(128, z)
            self.fc_logvar = nn.Linear(128, z)
            self.fc3 = nn.Linear(z, 128)
            self.fc4 = nn.Linear(128, 256)

        def encode(self, x):
            h = F.relu(self.fc1(x))
            return self.fc_mu(h), self.fc_logvar(h)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + torch.randn_like(std) * std

        def decode(self, z):
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 256))
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 256), reduction="sum") / x.size(0)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return bce + kld

    x, xt = make_bars(3200, seed=151), make_bars(500, seed=152)
    batches = endless(DataLoader(TensorDataset(x), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0)))
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

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
            mu, _ = model.encode(xt.view(-1, 256))
            return F.mse_loss(model.decode(mu), xt.view(-1, 256)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------- 16
def pinn_derivative_without_create_graph_bad():
    torch.manual_seed(0)
    # logistic growth du/dt = u (1 - u), u(0) = 0.2, on [0, 4]
    class PINN(nn.Module):
        def __init__(self, t_max=4.0, width=32):
            super().__init__()
            self.t_max = t_max
            self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

        def forward(self, t):
            return self.net(2 * t / self.t_max - 1)

    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(0)
    t0 = torch.zeros(1, 1)
    u0 = torch.full((1, 1), 0.2)

    def exact(t):
        return 0.2 * torch.exp(t) / (1 - 0.2 + 0.2 * torch.exp(t))

    def step(i):
        t = (4 * torch.rand(128, 1, generator=gen)).requires_grad_(True)
        u = model(t)
        du_dt = torch.autograd.grad(u, t, grad_outputs=torch.ones_like(u), retain_graph=True)[0]
        residual = du_dt - u * (1 - u)
        loss_pde = residual.pow(2).mean()
        loss_ic = (model(t0) - u0).pow(2).mean()
        loss = loss_pde + loss_ic
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        t = torch.linspace(0, 4, 101).unsqueeze(1)
        with torch.no_grad():
            return (model(t) - exact(t)).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_derivative_without_create_graph_good():
    torch.manual_seed(0)
    # logistic growth du/dt = u (1 - u), u(0) = 0.2, on [0, 4]
    class PINN(nn.Module):
        def __init__(self, t_max=4.0, width=32):
            super().__init__()
            self.t_max = t_max
            self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

        def forward(self, t):
            return self.net(2 * t / self.t_max - 1)

    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(0)
    t0 = torch.zeros(1, 1)
    u0 = torch.full((1, 1), 0.2)

    def exact(t):
        return 0.2 * torch.exp(t) / (1 - 0.2 + 0.2 * torch.exp(t))

    def step(i):
        t = (4 * torch.rand(128, 1, generator=gen)).requires_grad_(True)
        u = model(t)
        du_dt = torch.autograd.grad(u, t, grad_outputs=torch.ones_like(u), create_graph=True)[0]
        residual = du_dt - u * (1 - u)
        loss_pde = residual.pow(2).mean()
        loss_ic = (model(t0) - u0).pow(2).mean()
        loss = loss_pde + loss_ic
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        t = torch.linspace(0, 4, 101).unsqueeze(1)
        with torch.no_grad():
            return (model(t) - exact(t)).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------- 17
def maml_query_loss_with_unadapted_weights_bad():
    torch.manual_seed(0)
    from torch.func import functional_call

    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    inner_lr, inner_steps, meta_batch, k_shot = 0.05, 2, 4, 10
    gen = torch.Generator().manual_seed(0)

    def sample_task(g):
        amp = 0.5 + 1.5 * torch.rand(1, generator=g)
        phase = math.pi * torch.rand(1, generator=g)

        def draw():
            x = 2 * torch.rand(k_shot, 1, generator=g) - 1
            return x, amp * torch.sin(math.pi * x + phase)

        return draw(), draw()

    def adapt(params, x, y, create_graph):
        for _ in range(inner_steps):
            loss = F.mse_loss(functional_call(model, params, (x,)), y)
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph)
            params = {n: p - inner_lr * g for (n, p), g in zip(params.items(), grads)}
        return params

    def step(i):
        optimizer.zero_grad()
        meta_loss = 0.0
        for _ in range(meta_batch):
            (xs, ys), (xq, yq) = sample_task(gen)
            fast = adapt(dict(model.named_parameters()), xs, ys, create_graph=True)
            query_pred = model(xq)
            meta_loss = meta_loss + F.mse_loss(query_pred, yq)
        meta_loss = meta_loss / meta_batch
        meta_loss.backward()
        optimizer.step()
        return meta_loss.item()

    def probe():
        g = torch.Generator().manual_seed(77)
        total = 0.0
        for _ in range(100):
            (xs, ys), (xq, yq) = sample_task(g)
            params = {n: p.detach().clone().requires_grad_(True) for n, p in model.named_parameters()}
            fast = adapt(params, xs, ys, create_graph=False)
            with torch.no_grad():
                total += F.mse_loss(functional_call(model, fast, (xq,)), yq).item()
        return total / 100

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def maml_query_loss_with_unadapted_weights_good():
    torch.manual_seed(0)
    from torch.func import functional_call

    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    inner_lr, inner_steps, meta_batch, k_shot = 0.05, 2, 4, 10
    gen = torch.Generator().manual_seed(0)

    def sample_task(g):
        amp = 0.5 + 1.5 * torch.rand(1, generator=g)
        phase = math.pi * torch.rand(1, generator=g)

        def draw():
            x = 2 * torch.rand(k_shot, 1, generator=g) - 1
            return x, amp * torch.sin(math.pi * x + phase)

        return draw(), draw()

    def adapt(params, x, y, create_graph):
        for _ in range(inner_steps):
            loss = F.mse_loss(functional_call(model, params, (x,)), y)
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph)
            params = {n: p - inner_lr * g for (n, p), g in zip(params.items(), grads)}
        return params

    def step(i):
        optimizer.zero_grad()
        meta_loss = 0.0
        for _ in range(meta_batch):
            (xs, ys), (xq, yq) = sample_task(gen)
            fast = adapt(dict(model.named_parameters()), xs, ys, create_graph=True)
            query_pred = functional_call(model, fast, (xq,))
            meta_loss = meta_loss + F.mse_loss(query_pred, yq)
        meta_loss = meta_loss / meta_batch
        meta_loss.backward()
        optimizer.step()
        return meta_loss.item()

    def probe():
        g = torch.Generator().manual_seed(77)
        total = 0.0
        for _ in range(100):
            (xs, ys), (xq, yq) = sample_task(g)
            params = {n: p.detach().clone().requires_grad_(True) for n, p in model.named_parameters()}
            fast = adapt(params, xs, ys, create_graph=False)
            with torch.no_grad():
                total += F.mse_loss(functional_call(model, fast, (xq,)), yq).item()
        return total / 100

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------- 18
def make_citations(n=600, classes=4, feats=32, seed=181):
    """A citation-like graph: 4 topics, links mostly within a topic, noisy features; edges as an edge index."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    p = torch.where(y[:, None] == y[None, :], 0.04, 0.006)
    adj = (torch.rand(n, n, generator=g) < p).float().triu(1)
    adj = adj + adj.t()
    centres = torch.randn(classes, feats, generator=g)
    x = 0.35 * centres[y] + torch.randn(n, feats, generator=g)
    order = torch.randperm(n, generator=g)
    train_mask, test_mask = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    train_mask[order[:250]] = True
    test_mask[order[250:]] = True
    return x, adj.nonzero().t().contiguous(), y, train_mask, test_mask


def neighbour_sum_by_indexed_plus_equals_bad():
    torch.manual_seed(0)

    class SAGEConv(nn.Module):
        """Mean of the neighbours, beside the node itself."""

        def __init__(self, i, o):
            super().__init__()
            self.lin_self = nn.Linear(i, o)
            self.lin_neigh = nn.Linear(i, o, bias=False)

        def forward(self, x, edge_index):
            src, dst = edge_index
            agg = torch.zeros_like(x)
            agg[dst] += x[src]
            deg = torch.bincount(dst, minlength=x.size(0)).clamp(min=1).unsqueeze(1)
            return self.lin_self(x) + self.lin_neigh(agg / deg)

    class GraphSAGE(nn.Module):
        def __init__(self, i, h, o):
            super().__init__()
            self.conv1, self.conv2 = SAGEConv(i, h), SAGEConv(h, o)

        def forward(self, x, edge_index):
            x = F.relu(self.conv1(x, edge_index))
            x = F.dropout(x, p=0.5, training=self.training)
            return self.conv2(x, edge_index)

    x, edge_index, y, train_mask, test_mask = make_citations()
    model = GraphSAGE(x.size(1), 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = F.cross_entropy(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            pred = model(x, edge_index).argmax(1)
        model.train(was)
        return (pred != y)[test_mask].float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def neighbour_sum_by_indexed_plus_equals_good():
    torch.manual_seed(0)

    class SAGEConv(nn.Module):
        """Mean of the neighbours, beside the node itself."""

        def __init__(self, i, o):
            super().__init__()
            self.lin_self = nn.Linear(i, o)
            self.lin_neigh = nn.Linear(i, o, bias=False)

        def forward(self, x, edge_index):
            src, dst = edge_index
            agg = torch.zeros_like(x)
            agg = agg.index_add(0, dst, x[src])
            deg = torch.bincount(dst, minlength=x.size(0)).clamp(min=1).unsqueeze(1)
            return self.lin_self(x) + self.lin_neigh(agg / deg)

    class GraphSAGE(nn.Module):
        def __init__(self, i, h, o):
            super().__init__()
            self.conv1, self.conv2 = SAGEConv(i, h), SAGEConv(h, o)

        def forward(self, x, edge_index):
            x = F.relu(self.conv1(x, edge_index))
            x = F.dropout(x, p=0.5, training=self.training)
            return self.conv2(x, edge_index)

    x, edge_index, y, train_mask, test_mask = make_citations()
    model = GraphSAGE(x.size(1), 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = F.cross_entropy(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            pred = model(x, edge_index).argmax(1)
        model.train(was)
        return (pred != y)[test_mask].float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------- 19
def make_ages(n, seed):
    """Pictures 1x16x16 whose standardised target is the (signed) size of a blob and its place."""
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
    r = 0.25 + 0.5 * torch.rand(n, generator=g)
    c = 0.6 * (torch.rand(n, 2, generator=g) - 0.5)
    d2 = (yy - c[:, 0, None, None]) ** 2 + (xx - c[:, 1, None, None]) ** 2
    x = torch.exp(-d2 / (2 * (r[:, None, None] / 2) ** 2)).unsqueeze(1)
    x = (x - 0.16) / 0.25 + 0.1 * torch.randn(n, 1, 16, 16, generator=g)
    y = (r - 0.5) / 0.144
    return x, y.unsqueeze(1)


def zero_grad_never_called_bad():
    torch.manual_seed(0)
    train = TensorDataset(*make_ages(1600, seed=191))
    xt, yt = make_ages(400, seed=192)
    train_loader = DataLoader(train, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(train_loader)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 1),
    )
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        inputs, targets = next(batches)
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(xt) - yt).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def zero_grad_never_called_good():
    torch.manual_seed(0)
    train = TensorDataset(*make_ages(1600, seed=191))
    xt, yt = make_ages(400, seed=192)
    train_loader = DataLoader(train, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(train_loader)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 1),
    )
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        inputs, targets = next(batches)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(xt) - yt).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------- 20
def epoch_scheduler_stepped_per_batch_bad():
    torch.manual_seed(0)

    class BasicBlock(nn.Module):
        def __init__(self, i, o, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(i, o, 3, stride=stride, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(o)
            self.conv2 = nn.Conv2d(o, o, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(o)
            self.short = nn.Sequential(nn.Conv2d(i, o, 1, stride=stride, bias=False), nn.BatchNorm2d(o))

        def forward(self, x):
            h = F.relu(self.bn1(self.conv1(x)))
            return F.relu(self.bn2(self.conv2(h)) + self.short(x))

    x, y = make_pictures(1024, 8, 16, 3, seed=201, noise=2.5)
    xt, yt = make_pictures(800, 8, 16, 3, seed=202, noise=2.5)
    train_loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(train_loader)
    model = nn.Sequential(
        BasicBlock(3, 8, 2), BasicBlock(8, 16, 2),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 8),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    # 20 epochs of 16 batches: lr / 10 after 8 and after 16 epochs
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.1)

    def step(i):
        model.train()
        images, labels = next(batches)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xt).argmax(1) != yt).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def epoch_scheduler_stepped_per_batch_good():
    torch.manual_seed(0)

    class BasicBlock(nn.Module):
        def __init__(self, i, o, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(i, o, 3, stride=stride, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(o)
            self.conv2 = nn.Conv2d(o, o, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(o)
            self.short = nn.Sequential(nn.Conv2d(i, o, 1, stride=stride, bias=False), nn.BatchNorm2d(o))

        def forward(self, x):
            h = F.relu(self.bn1(self.conv1(x)))
            return F.relu(self.bn2(self.conv2(h)) + self.short(x))

    x, y = make_pictures(1024, 8, 16, 3, seed=201, noise=2.5)
    xt, yt = make_pictures(800, 8, 16, 3, seed=202, noise=2.5)
    train_loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(train_loader)
    model = nn.Sequential(
        BasicBlock(3, 8, 2), BasicBlock(8, 16, 2),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 8),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    # 20 epochs of 16 batches: lr / 10 after 8 and after 16 epochs
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.1)

    def step(i):
        model.train()
        images, labels = next(batches)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % len(train_loader) == 0:  # end of the epoch
            scheduler.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xt).argmax(1) != yt).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------- 21
def make_shapes(n, seed):
    """Pictures 1x24x24 with a bright ellipse anywhere, over noise and a dim gradient, and the mask of the ellipse."""
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij")
    c = 5 + 14 * torch.rand(n, 2, 1, 1, generator=g)
    r = 3 + 3 * torch.rand(n, 2, 1, 1, generator=g)
    m = (((yy - c[:, 0]) / r[:, 0]) ** 2 + ((xx - c[:, 1]) / r[:, 1]) ** 2 <= 1).float().unsqueeze(1)
    slope = torch.randn(n, 2, 1, 1, generator=g)
    bg = 0.3 * (slope[:, 0] * (yy - 11.5) + slope[:, 1] * (xx - 11.5)).unsqueeze(1) / 11.5
    x = 2.0 * m - 0.25 + bg + 0.7 * torch.randn(n, 1, 24, 24, generator=g)
    return x, m


def flip_image_but_not_mask_bad():
    torch.manual_seed(0)
    from torch.utils.data import Dataset

    class LesionDataset(Dataset):
        def __init__(self, images, masks, augment=False):
            self.images, self.masks, self.augment = images, masks, augment

        def __len__(self):
            return len(self.images)

        def __getitem__(self, k):
            image, mask = self.images[k], self.masks[k]
            if self.augment and torch.rand(1).item() < 0.5:
                image = torch.flip(image, dims=[-1])
            return image, mask

    class SegNet(nn.Module):
        def __init__(self, ch=8):
            super().__init__()
            self.down1 = nn.Sequential(nn.Conv2d(1, ch, 3, padding=1), nn.BatchNorm2d(ch), nn.ReLU())
            self.down2 = nn.Sequential(nn.Conv2d(ch, 2 * ch, 3, padding=1), nn.BatchNorm2d(2 * ch), nn.ReLU())
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
            self.last = nn.Sequential(
                nn.Conv2d(3 * ch, ch, 3, padding=1), nn.BatchNorm2d(ch), nn.ReLU(), nn.Conv2d(ch, 1, 1)
            )

        def forward(self, x):
            a = self.down1(x)
            b = self.down2(F.max_pool2d(a, 2))
            return self.last(torch.cat([a, self.up(b)], 1))

    train_loader = DataLoader(LesionDataset(*make_shapes(640, seed=211), augment=True), batch_size=16, shuffle=True)
    xt, mt = make_shapes(150, seed=212)
    batches = endless(train_loader)
    net = SegNet()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    def step(i):
        net.train()
        imgs, true_masks = next(batches)
        masks_pred = net(imgs)
        loss = criterion(masks_pred, true_masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = net.training
        net.eval()
        with torch.no_grad():
            p = net(xt) > 0
        net.train(was)
        t = mt.bool()
        return 1 - (p & t).sum().item() / max((p | t).sum().item(), 1)

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def flip_image_but_not_mask_good():
    torch.manual_seed(0)
    from torch.utils.data import Dataset

    class LesionDataset(Dataset):
        def __init__(self, images, masks, augment=False):
            self.images, self.masks, self.augment = images, masks, augment

        def __len__(self):
            return len(self.images)

        def __getitem__(self, k):
            image, mask = self.images[k], self.masks[k]
            if self.augment and torch.rand(1).item() < 0.5:
                image = torch.flip(image, dims=[-1])
                mask = torch.flip(mask, dims=[-1])
            return image, mask

    class SegNet(nn.Module):
        def __init__(self, ch=8):
            super().__init__()
            self.down1 = nn.Sequential(nn.Conv2d(1, ch, 3, padding=1), nn.BatchNorm2d(ch), nn.ReLU())
            self.down2 = nn.Sequential(nn.Conv2d(ch, 2 * ch, 3, padding=1), nn.BatchNorm2d(2 * ch), nn.ReLU())
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
            self.last = nn.Sequential(
                nn.Conv2d(3 * ch, ch, 3, padding=1), nn.BatchNorm2d(ch), nn.ReLU(), nn.Conv2d(ch, 1, 1)
            )

        def forward(self, x):
            a = self.down1(x)
            b = self.down2(F.max_pool2d(a, 2))
            return self.last(torch.cat([a, self.up(b)], 1))

    train_loader = DataLoader(LesionDataset(*make_shapes(640, seed=211), augment=True), batch_size=16, shuffle=True)
    xt, mt = make_shapes(150, seed=212)
    batches = endless(train_loader)
    net = SegNet()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    def step(i):
        net.train()
        imgs, true_masks = next(batches)
        masks_pred = net(imgs)
        loss = criterion(masks_pred, true_masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = net.training
        net.eval()
        with torch.no_grad():
            p = net(xt) > 0
        net.train(was)
        t = mt.bool()
        return 1 - (p & t).sum().item() / max((p | t).sum().item(), 1)

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------- 22
def make_houses(n, seed):
    """A table like house prices: raw columns of different scales and a price in thousands."""
    g = torch.Generator().manual_seed(seed)
    area = 60 + 25 * torch.randn(n, generator=g).abs() + 10 * torch.randn(n, generator=g)
    rooms = torch.round(area / 25 + torch.randn(n, generator=g)).clamp(1)
    age = 60 * torch.rand(n, generator=g)
    dist = 15 * torch.rand(n, generator=g)
    price = 3.0 * area + 12 * rooms - 0.8 * age + 120 * torch.exp(-dist / 4) + 12 * torch.randn(n, generator=g)
    return torch.stack([area, rooms, age, dist], 1), price


def squared_error_broadcasts_bad():
    torch.manual_seed(0)
    x, y = make_houses(3200, seed=221)
    xt, yt = make_houses(800, seed=222)
    x_mean, x_std, y_mean, y_std = x.mean(0), x.std(0), y.mean(), y.std()
    x, xt = (x - x_mean) / x_std, (xt - x_mean) / x_std
    y, yt = (y - y_mean) / y_std, (yt - y_mean) / y_std
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)

    class PriceModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, x):
            return self.net(x)

    def mse(pred, target):
        return ((pred - target) ** 2).mean()

    model = PriceModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        features, price = next(batches)
        pred = model(features)
        loss = mse(pred, price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(xt).squeeze(1), yt).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def squared_error_broadcasts_good():
    torch.manual_seed(0)
    x, y = make_houses(3200, seed=221)
    xt, yt = make_houses(800, seed=222)
    x_mean, x_std, y_mean, y_std = x.mean(0), x.std(0), y.mean(), y.std()
    x, xt = (x - x_mean) / x_std, (xt - x_mean) / x_std
    y, yt = (y - y_mean) / y_std, (yt - y_mean) / y_std
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = endless(loader)

    class PriceModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, x):
            return self.net(x)

    def mse(pred, target):
        return ((pred - target) ** 2).mean()

    model = PriceModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        features, price = next(batches)
        pred = model(features)
        loss = mse(pred.squeeze(1), price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(xt).squeeze(1), yt).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
