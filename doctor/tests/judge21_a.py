import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)

CASES = [
    {"name": "defect_segmentation_background_ignored", "what": "The per-pixel cross entropy is called with ignore_index=0, but 0 is the background class here. No background pixel ever enters the loss, so the net paints foreground everywhere.", "steps": 200},
    {"name": "student_distillation_kl_input", "what": "The distillation term gives F.kl_div the student's probabilities although it expects log-probabilities. The term is then linear in the probabilities and pushes the student to one-hot answers instead of to the teacher's distribution.", "steps": 300},
    {"name": "demand_quantiles_pinball", "what": "The pinball loss forms the error as prediction minus truth while its max() expects truth minus prediction. Every quantile head learns the mirrored quantile, so the 10% line ends above the 90% line.", "steps": 300},
    {"name": "ctr_model_double_sigmoid", "what": "The click model already ends in a sigmoid and is trained with BCEWithLogitsLoss, which squashes a second time. The loss sees only probabilities between 0.5 and 0.73, so the click-through rates the model outputs are wrong.", "steps": 400},
    {"name": "box_localiser_iou_format", "what": "The IoU loss reads its boxes as corner coordinates, but the network and the labels give centre, width and height. Most such \"boxes\" are empty, so the box branch gets hardly any useful gradient.", "steps": 300},
    {"name": "phoneme_ctc_blank", "what": "CTCLoss keeps its default blank=0 although class 0 is a phoneme and the extra last class was meant as the blank. Phoneme 0 and silence share one output and cannot be told apart.", "steps": 300},
    {"name": "house_price_mlp_shapes", "what": "The prediction has shape (N, 1) and the price (N,), so the difference broadcasts to an (N, N) table. Every prediction is pulled to all prices in the batch, and the net learns the mean price.", "steps": 300},
    {"name": "advection_diffusion_pinn_graph", "what": "The second derivative is taken with retain_graph=True instead of create_graph=True, so u_xx is a constant to autograd. The diffusion term of the residual sends no gradient and the net is driven to a wrong solution.", "steps": 800},
    {"name": "movie_factorisation_start", "what": "User and item factors both start at exactly zero, so the gradient of their dot product is zero for both. Only the biases ever learn and the interaction part of the recommender stays dead.", "steps": 400},
    {"name": "digit_finetune_half_weights", "what": "The weights themselves are bfloat16 and the learning rate is small, so most updates are less than half a unit in the last place and are rounded away. The good twin keeps float32 weights and uses bfloat16 only inside autocast.", "steps": 300},
    {"name": "sensor_vae_sampling", "what": "The latent is drawn with Normal(...).sample(), which cuts the graph, instead of rsample(). The encoder gets no gradient from the reconstruction, only from the KL term, and forgets its input.", "steps": 500},
    {"name": "sine_maml_fast_weights", "what": "The fast weights of the inner loop are detached from the meta-parameters, so the query loss never reaches the meta-parameters: their .grad stays None and the outer optimizer does nothing.", "steps": 400},
    {"name": "hinge_gan_feature_freeze", "what": "The discriminator's feature layers are frozen for the generator step and never released, so after the first step only its last linear layer learns. The generator is then trained against nearly random features.", "steps": 1000},
    {"name": "sensor_imputation_transformer", "what": "The encoder is built without batch_first=True but gets (batch, time, feature) input. Attention then runs across the series of a batch instead of along time, so a gap cannot be filled from its own series.", "steps": 500},
    {"name": "molecule_graphs_collate", "what": "The collate function joins the graphs of a batch but does not add the node offset to the edge indices. All edges of the batch then run among the first few nodes, and the other graphs have no edges at all.", "steps": 400},
    {"name": "simsiam_embedding_collapse", "what": "The target branch of the SimSiam loss keeps its gradient. Both branches chase each other and all images are mapped onto one point, so the embedding says nothing about them.", "steps": 300},
    {"name": "categorical_pooling_shared_tables", "what": "The list of embedding tables is made by repeating one module, so all categorical columns share a single table. After sum pooling the net cannot tell which column a value came from.", "steps": 400},
    {"name": "graph_transformer_padding_mask", "what": "key_padding_mask is given the mask of real nodes, but True means \"ignore\" there. Every node attends only to padding and never sees the other nodes of its graph.", "steps": 500},
    {"name": "organ_segmentation_flip", "what": "The random flips are applied to the image but not to its mask. Half of the training pairs teach the net the mirrored place of the organ.", "steps": 250},
    {"name": "corridor_dqn_sync", "what": "The periodic sync copies the target network into the online network instead of the other way round. The target never changes and the online network is thrown back to its start every few steps.", "steps": 600},
    {"name": "signal_diffusion_noise_seed", "what": "The noise of every training step comes from a generator that is seeded anew in each call, so row k of the batch always gets the same noise. The net memorises these few noise vectors instead of learning to denoise.", "steps": 500},
    {"name": "face_attributes_accumulation", "what": "The gradients of the four tasks are meant to add up over the inner loop, but zero_grad stands inside it. Only the gradient of the last task reaches the optimizer, and the other heads never learn.", "steps": 300},
]

PROBES = {
    "defect_segmentation_background_ignored": "1 - mean IoU over the three classes on held-out scenes",
    "student_distillation_kl_input": "KL(teacher || student) on held-out images",
    "demand_quantiles_pinball": "mean pinball loss of the three quantiles on held-out windows",
    "ctr_model_double_sigmoid": "Brier score against the true click probabilities on held-out pairs",
    "box_localiser_iou_format": "1 - true mean IoU on held-out images",
    "phoneme_ctc_blank": "symbol error rate of greedy decoding on held-out utterances",
    "house_price_mlp_shapes": "mean squared error of the standardised price on held-out houses",
    "advection_diffusion_pinn_graph": "relative squared error against the exact solution on a grid",
    "movie_factorisation_start": "mean squared rating error on held-out pairs",
    "digit_finetune_half_weights": "cross entropy on held-out images",
    "sensor_vae_sampling": "reconstruction error through the posterior mean on held-out data",
    "sine_maml_fast_weights": "query error after adaptation on held-out tasks",
    "hinge_gan_feature_freeze": "energy distance between generated and held-out real points",
    "sensor_imputation_transformer": "squared error at the hidden time steps of held-out series",
    "molecule_graphs_collate": "squared error of the graph property on held-out graphs, one graph at a time",
    "simsiam_embedding_collapse": "1 + mean cosine similarity between embeddings of held-out images of different classes (2 means collapsed)",
    "categorical_pooling_shared_tables": "cross entropy on held-out rows",
    "graph_transformer_padding_mask": "squared error over the real nodes of held-out graphs",
    "organ_segmentation_flip": "1 - mean foreground Dice on held-out scenes",
    "corridor_dqn_sync": "mean squared error of the action values against the exact ones",
    "signal_diffusion_noise_seed": "noise prediction error on held-out signals with fresh noise",
    "face_attributes_accumulation": "mean cross entropy over the four tasks on held-out images"
}


def gen(seed):
    return torch.Generator().manual_seed(seed)


def forever(loader):
    while True:
        for batch in loader:
            yield batch


def class_images(n, seed, classes=5, size=10, noise=0.8):
    protos = torch.randn(classes, 1, size, size, generator=gen(99))
    g = gen(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    x = protos[y] + noise * torch.randn(n, 1, size, size, generator=g)
    return x, y


def shape_scenes(n, seed, size=16):
    g = gen(seed)
    x = 0.3 * torch.randn(n, 1, size, size, generator=g)
    m = torch.zeros(n, size, size, dtype=torch.long)
    for i in range(n):
        for c, level in ((1, 1.5), (2, -1.5)):
            r, q = torch.randint(0, size - 5, (2,), generator=g).tolist()
            h, w = torch.randint(3, 6, (2,), generator=g).tolist()
            x[i, 0, r:r + h, q:q + w] = level + 0.3 * torch.randn(h, w, generator=g)
            m[i, r:r + h, q:q + w] = c
    return x, m


def defect_segmentation_background_ignored_bad():
    torch.manual_seed(0)
    class DefectNet(nn.Module):
        def __init__(self, classes=3, width=16):
            super().__init__()
            self.enc = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
                                     nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
            self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU())
            self.out = nn.Conv2d(3 * width, classes, 1)

        def forward(self, x):
            a = self.enc(x)
            b = F.interpolate(self.down(a), scale_factor=2, mode="nearest")
            return self.out(torch.cat([a, b], 1))

    x, m = shape_scenes(256, 1)
    xv, mv = shape_scenes(64, 2)
    batches = forever(DataLoader(TensorDataset(x, m), batch_size=16, shuffle=True))
    net = DefectNet()
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def step(i):
        img, mask = next(batches)
        opt.zero_grad()
        loss = criterion(net(img), mask)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            pred = net(xv).argmax(1)
        ious = []
        for c in range(3):
            inter = ((pred == c) & (mv == c)).sum().item()
            union = ((pred == c) | (mv == c)).sum().item()
            ious.append(inter / max(union, 1))
        return 1 - sum(ious) / 3

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def defect_segmentation_background_ignored_good():
    torch.manual_seed(0)
    class DefectNet(nn.Module):
        def __init__(self, classes=3, width=16):
            super().__init__()
            self.enc = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
                                     nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
            self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU())
            self.out = nn.Conv2d(3 * width, classes, 1)

        def forward(self, x):
            a = self.enc(x)
            b = F.interpolate(self.down(a), scale_factor=2, mode="nearest")
            return self.out(torch.cat([a, b], 1))

    x, m = shape_scenes(256, 1)
    xv, mv = shape_scenes(64, 2)
    batches = forever(DataLoader(TensorDataset(x, m), batch_size=16, shuffle=True))
    net = DefectNet()
    criterion = nn.CrossEntropyLoss()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def step(i):
        img, mask = next(batches)
        opt.zero_grad()
        loss = criterion(net(img), mask)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            pred = net(xv).argmax(1)
        ious = []
        for c in range(3):
            inter = ((pred == c) & (mv == c)).sum().item()
            union = ((pred == c) | (mv == c)).sum().item()
            ious.append(inter / max(union, 1))
        return 1 - sum(ious) / 3

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def student_distillation_kl_input_bad():
    torch.manual_seed(0)
    class Teacher(nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(100, hidden), nn.ReLU(), nn.Linear(hidden, 5))

        def forward(self, x):
            return self.net(x)

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1)
            self.fc = nn.Linear(8 * 25, 5)

        def forward(self, x):
            return self.fc(F.relu(self.conv(x)).flatten(1))

    def noisy(n, seed):
        a, b = class_images(n, seed, noise=4.0)
        return a / a.std(), b

    x, y = noisy(1024, 1)
    xv, yv = noisy(256, 2)
    teacher = Teacher(64)
    t_opt = torch.optim.Adam(teacher.parameters(), lr=1e-3, weight_decay=1e-3)
    for _ in range(60):
        t_opt.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        t_opt.step()
    teacher.eval().requires_grad_(False)

    student = Student()
    opt = torch.optim.Adam(student.parameters(), lr=2e-3)
    batches = forever(DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True))
    T, alpha = 2.0, 0.8

    def distillation_loss(s_logits, t_logits, target):
        soft = F.kl_div(F.softmax(s_logits / T, dim=1),
                        F.softmax(t_logits / T, dim=1), reduction="batchmean") * T * T
        return alpha * soft + (1 - alpha) * F.cross_entropy(s_logits, target)

    def step(i):
        img, target = next(batches)
        with torch.no_grad():
            t_logits = teacher(img)
        loss = distillation_loss(student(img), t_logits, target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.kl_div(F.log_softmax(student(xv), 1), F.softmax(teacher(xv), 1), reduction="batchmean").item()

    return {"model": student, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def student_distillation_kl_input_good():
    torch.manual_seed(0)
    class Teacher(nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(100, hidden), nn.ReLU(), nn.Linear(hidden, 5))

        def forward(self, x):
            return self.net(x)

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1)
            self.fc = nn.Linear(8 * 25, 5)

        def forward(self, x):
            return self.fc(F.relu(self.conv(x)).flatten(1))

    def noisy(n, seed):
        a, b = class_images(n, seed, noise=4.0)
        return a / a.std(), b

    x, y = noisy(1024, 1)
    xv, yv = noisy(256, 2)
    teacher = Teacher(64)
    t_opt = torch.optim.Adam(teacher.parameters(), lr=1e-3, weight_decay=1e-3)
    for _ in range(60):
        t_opt.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        t_opt.step()
    teacher.eval().requires_grad_(False)

    student = Student()
    opt = torch.optim.Adam(student.parameters(), lr=2e-3)
    batches = forever(DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True))
    T, alpha = 2.0, 0.8

    def distillation_loss(s_logits, t_logits, target):
        soft = F.kl_div(F.log_softmax(s_logits / T, dim=1),
                        F.softmax(t_logits / T, dim=1), reduction="batchmean") * T * T
        return alpha * soft + (1 - alpha) * F.cross_entropy(s_logits, target)

    def step(i):
        img, target = next(batches)
        with torch.no_grad():
            t_logits = teacher(img)
        loss = distillation_loss(student(img), t_logits, target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.kl_div(F.log_softmax(student(xv), 1), F.softmax(teacher(xv), 1), reduction="batchmean").item()

    return {"model": student, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def demand_quantiles_pinball_bad():
    torch.manual_seed(0)
    class QuantileForecaster(nn.Module):
        def __init__(self, window, quantiles):
            super().__init__()
            self.gru = nn.GRU(1, 24, batch_first=True)
            self.head = nn.Linear(24, len(quantiles))

        def forward(self, w):
            out, _ = self.gru(w.unsqueeze(-1))
            return self.head(out[:, -1])

    def windows(n, seed, length=12):
        g = gen(seed)
        phase = 6.28 * torch.rand(n, 1, generator=g)
        t = torch.arange(length + 1).float()
        s = torch.sin(0.5 * t + phase) + 0.5 * torch.randn(n, length + 1, generator=g)
        return s[:, :length], s[:, length]

    quantiles = [0.1, 0.5, 0.9]
    x, y = windows(2000, 1)
    xv, yv = windows(400, 2)
    model = QuantileForecaster(12, quantiles)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True))

    def quantile_loss(pred, target):
        total = 0.0
        for k, q in enumerate(quantiles):
            err = pred[:, k] - target
            total = total + torch.max((q - 1) * err, q * err).mean()
        return total / len(quantiles)

    def step(i):
        w, nxt = next(loader)
        optimizer.zero_grad()
        loss = quantile_loss(model(w), nxt)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            p = model(xv)
        q = torch.tensor(quantiles)
        e = yv[:, None] - p
        return torch.where(e >= 0, q * e, (q - 1) * e).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def demand_quantiles_pinball_good():
    torch.manual_seed(0)
    class QuantileForecaster(nn.Module):
        def __init__(self, window, quantiles):
            super().__init__()
            self.gru = nn.GRU(1, 24, batch_first=True)
            self.head = nn.Linear(24, len(quantiles))

        def forward(self, w):
            out, _ = self.gru(w.unsqueeze(-1))
            return self.head(out[:, -1])

    def windows(n, seed, length=12):
        g = gen(seed)
        phase = 6.28 * torch.rand(n, 1, generator=g)
        t = torch.arange(length + 1).float()
        s = torch.sin(0.5 * t + phase) + 0.5 * torch.randn(n, length + 1, generator=g)
        return s[:, :length], s[:, length]

    quantiles = [0.1, 0.5, 0.9]
    x, y = windows(2000, 1)
    xv, yv = windows(400, 2)
    model = QuantileForecaster(12, quantiles)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True))

    def quantile_loss(pred, target):
        total = 0.0
        for k, q in enumerate(quantiles):
            err = target - pred[:, k]
            total = total + torch.max((q - 1) * err, q * err).mean()
        return total / len(quantiles)

    def step(i):
        w, nxt = next(loader)
        optimizer.zero_grad()
        loss = quantile_loss(model(w), nxt)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            p = model(xv)
        q = torch.tensor(quantiles)
        e = yv[:, None] - p
        return torch.where(e >= 0, q * e, (q - 1) * e).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ctr_model_double_sigmoid_bad():
    torch.manual_seed(0)
    class ClickModel(nn.Module):
        def __init__(self, users, ads, dim=8):
            super().__init__()
            self.user = nn.Embedding(users, dim)
            self.ad = nn.Embedding(ads, dim)
            self.mlp = nn.Sequential(nn.Linear(2 * dim + 3, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, u, a, ctx):
            z = torch.cat([self.user(u), self.ad(a), ctx], dim=1)
            return torch.sigmoid(self.mlp(z)).squeeze(1)

    g0 = gen(5)
    bias_u, bias_a = torch.randn(60, generator=g0), torch.randn(40, generator=g0)

    def impressions(n, seed):
        g = gen(seed)
        u = torch.randint(0, 60, (n,), generator=g)
        a = torch.randint(0, 40, (n,), generator=g)
        c = torch.randn(n, 3, generator=g)
        p = torch.sigmoid(bias_u[u] + bias_a[a] + c[:, 0] - 1.0)
        return u, a, c, torch.bernoulli(p, generator=g), p

    train, test = impressions(6000, 1), impressions(1000, 2)
    net = ClickModel(60, 40)
    bce = nn.BCEWithLogitsLoss()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    loader = forever(DataLoader(TensorDataset(*train[:4]), batch_size=128, shuffle=True, drop_last=True))

    def step(i):
        u, a, c, click = next(loader)
        loss = bce(net(u, a, c), click)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            p = net(*test[:3])
        return ((p - test[4]) ** 2).mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def ctr_model_double_sigmoid_good():
    torch.manual_seed(0)
    class ClickModel(nn.Module):
        def __init__(self, users, ads, dim=8):
            super().__init__()
            self.user = nn.Embedding(users, dim)
            self.ad = nn.Embedding(ads, dim)
            self.mlp = nn.Sequential(nn.Linear(2 * dim + 3, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, u, a, ctx):
            z = torch.cat([self.user(u), self.ad(a), ctx], dim=1)
            return torch.sigmoid(self.mlp(z)).squeeze(1)

    g0 = gen(5)
    bias_u, bias_a = torch.randn(60, generator=g0), torch.randn(40, generator=g0)

    def impressions(n, seed):
        g = gen(seed)
        u = torch.randint(0, 60, (n,), generator=g)
        a = torch.randint(0, 40, (n,), generator=g)
        c = torch.randn(n, 3, generator=g)
        p = torch.sigmoid(bias_u[u] + bias_a[a] + c[:, 0] - 1.0)
        return u, a, c, torch.bernoulli(p, generator=g), p

    train, test = impressions(6000, 1), impressions(1000, 2)
    net = ClickModel(60, 40)
    bce = nn.BCELoss()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    loader = forever(DataLoader(TensorDataset(*train[:4]), batch_size=128, shuffle=True, drop_last=True))

    def step(i):
        u, a, c, click = next(loader)
        loss = bce(net(u, a, c), click)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            p = net(*test[:3])
        return ((p - test[4]) ** 2).mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def box_localiser_iou_format_bad():
    torch.manual_seed(0)
    class Localiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
                                      nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
            self.box = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4))
            self.cls = nn.Linear(512, 2)

        def forward(self, x):
            h = self.body(x)
            return self.box(h).sigmoid(), self.cls(h)

    def scenes(n, seed):
        g = gen(seed)
        wh = 0.3 + 0.4 * torch.rand(n, 2, generator=g)
        c = wh / 2 + (1 - wh) * torch.rand(n, 2, generator=g)
        kind = torch.randint(0, 2, (n,), generator=g)
        grid = (torch.arange(16) + 0.5) / 16
        inx = (grid[None] - c[:, :1]).abs() < wh[:, :1] / 2
        iny = (grid[None] - c[:, 1:]).abs() < wh[:, 1:] / 2
        img = (iny[:, :, None] & inx[:, None, :]).float() * torch.where(kind == 0, 1.0, 2.0)[:, None, None]
        return (img + 0.2 * torch.randn(n, 16, 16, generator=g))[:, None], torch.cat([c, wh], 1), kind

    def to_corners(b):
        return torch.cat([b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2], 1)

    def pairwise_iou(a, b):
        lt, rb = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
        inter = (rb - lt).clamp(min=0).prod(1)
        area_a = (a[:, 2:] - a[:, :2]).clamp(min=0).prod(1)
        area_b = (b[:, 2:] - b[:, :2]).clamp(min=0).prod(1)
        return inter / (area_a + area_b - inter + 1e-6)

    net = Localiser()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = forever(DataLoader(TensorDataset(*scenes(1500, 1)), batch_size=32, shuffle=True, drop_last=True))
    xv, bv, _ = scenes(300, 2)

    def step(i):
        img, box, kind = next(loader)
        pred, logits = net(img)
        iou = pairwise_iou(pred, box)
        loss = (1 - iou).mean() + F.cross_entropy(logits, kind)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            pred, _ = net(xv)
            return 1 - pairwise_iou(to_corners(pred), to_corners(bv)).mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def box_localiser_iou_format_good():
    torch.manual_seed(0)
    class Localiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
                                      nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
            self.box = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4))
            self.cls = nn.Linear(512, 2)

        def forward(self, x):
            h = self.body(x)
            return self.box(h).sigmoid(), self.cls(h)

    def scenes(n, seed):
        g = gen(seed)
        wh = 0.3 + 0.4 * torch.rand(n, 2, generator=g)
        c = wh / 2 + (1 - wh) * torch.rand(n, 2, generator=g)
        kind = torch.randint(0, 2, (n,), generator=g)
        grid = (torch.arange(16) + 0.5) / 16
        inx = (grid[None] - c[:, :1]).abs() < wh[:, :1] / 2
        iny = (grid[None] - c[:, 1:]).abs() < wh[:, 1:] / 2
        img = (iny[:, :, None] & inx[:, None, :]).float() * torch.where(kind == 0, 1.0, 2.0)[:, None, None]
        return (img + 0.2 * torch.randn(n, 16, 16, generator=g))[:, None], torch.cat([c, wh], 1), kind

    def to_corners(b):
        return torch.cat([b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2], 1)

    def pairwise_iou(a, b):
        lt, rb = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
        inter = (rb - lt).clamp(min=0).prod(1)
        area_a = (a[:, 2:] - a[:, :2]).clamp(min=0).prod(1)
        area_b = (b[:, 2:] - b[:, :2]).clamp(min=0).prod(1)
        return inter / (area_a + area_b - inter + 1e-6)

    net = Localiser()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = forever(DataLoader(TensorDataset(*scenes(1500, 1)), batch_size=32, shuffle=True, drop_last=True))
    xv, bv, _ = scenes(300, 2)

    def step(i):
        img, box, kind = next(loader)
        pred, logits = net(img)
        iou = pairwise_iou(to_corners(pred), to_corners(box))
        loss = (1 - iou).mean() + F.cross_entropy(logits, kind)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            pred, _ = net(xv)
            return 1 - pairwise_iou(to_corners(pred), to_corners(bv)).mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def phoneme_ctc_blank_bad():
    torch.manual_seed(0)
    N_SYM, DIM, FRAMES = 6, 12, 30

    class AcousticModel(nn.Module):
        def __init__(self, n_out):
            super().__init__()
            self.conv = nn.Conv1d(DIM, 32, 3, padding=1)
            self.gru = nn.GRU(32, 32, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(64, n_out)

        def forward(self, feats):
            h = F.relu(self.conv(feats.transpose(1, 2))).transpose(1, 2)
            h, _ = self.gru(h)
            return self.fc(h).log_softmax(-1).transpose(0, 1)

    sound = 2 * torch.randn(N_SYM, DIM, generator=gen(3))

    def utterances(n, seed):
        g = gen(seed)
        x = 0.3 * torch.randn(n, FRAMES, DIM, generator=g)
        y = torch.randint(0, N_SYM, (n, 4), generator=g)
        for i in range(n):
            t = int(torch.randint(0, 3, (1,), generator=g))
            for s in y[i].tolist():
                d = int(torch.randint(2, 5, (1,), generator=g))
                x[i, t:t + d] += sound[s]
                t += d + int(torch.randint(1, 3, (1,), generator=g))
        return x, y

    net = AcousticModel(N_SYM + 1)
    ctc = nn.CTCLoss(zero_infinity=True)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    loader = forever(DataLoader(TensorDataset(*utterances(600, 1)), batch_size=16, shuffle=True, drop_last=True))
    xv, yv = utterances(80, 2)

    def step(i):
        feats, labels = next(loader)
        logp = net(feats)
        loss = ctc(logp, labels, torch.full((16,), FRAMES), torch.full((16,), 4))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        return loss.item()

    def edit(a, b):
        d = list(range(len(b) + 1))
        for i, p in enumerate(a, 1):
            prev, d[0] = d[0], i
            for j, q in enumerate(b, 1):
                prev, d[j] = d[j], min(d[j] + 1, d[j - 1] + 1, prev + (p != q))
        return d[-1]

    def probe():
        with torch.no_grad():
            best = net(xv).argmax(-1).T
        errors = 0
        for row, ref in zip(best, yv):
            hyp = [s for s in torch.unique_consecutive(row).tolist() if s != ctc.blank]
            errors += edit(hyp, ref.tolist())
        return (errors + 1) / (yv.numel() + 1)

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def phoneme_ctc_blank_good():
    torch.manual_seed(0)
    N_SYM, DIM, FRAMES = 6, 12, 30

    class AcousticModel(nn.Module):
        def __init__(self, n_out):
            super().__init__()
            self.conv = nn.Conv1d(DIM, 32, 3, padding=1)
            self.gru = nn.GRU(32, 32, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(64, n_out)

        def forward(self, feats):
            h = F.relu(self.conv(feats.transpose(1, 2))).transpose(1, 2)
            h, _ = self.gru(h)
            return self.fc(h).log_softmax(-1).transpose(0, 1)

    sound = 2 * torch.randn(N_SYM, DIM, generator=gen(3))

    def utterances(n, seed):
        g = gen(seed)
        x = 0.3 * torch.randn(n, FRAMES, DIM, generator=g)
        y = torch.randint(0, N_SYM, (n, 4), generator=g)
        for i in range(n):
            t = int(torch.randint(0, 3, (1,), generator=g))
            for s in y[i].tolist():
                d = int(torch.randint(2, 5, (1,), generator=g))
                x[i, t:t + d] += sound[s]
                t += d + int(torch.randint(1, 3, (1,), generator=g))
        return x, y

    net = AcousticModel(N_SYM + 1)
    ctc = nn.CTCLoss(blank=N_SYM, zero_infinity=True)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    loader = forever(DataLoader(TensorDataset(*utterances(600, 1)), batch_size=16, shuffle=True, drop_last=True))
    xv, yv = utterances(80, 2)

    def step(i):
        feats, labels = next(loader)
        logp = net(feats)
        loss = ctc(logp, labels, torch.full((16,), FRAMES), torch.full((16,), 4))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        return loss.item()

    def edit(a, b):
        d = list(range(len(b) + 1))
        for i, p in enumerate(a, 1):
            prev, d[0] = d[0], i
            for j, q in enumerate(b, 1):
                prev, d[j] = d[j], min(d[j] + 1, d[j - 1] + 1, prev + (p != q))
        return d[-1]

    def probe():
        with torch.no_grad():
            best = net(xv).argmax(-1).T
        errors = 0
        for row, ref in zip(best, yv):
            hyp = [s for s in torch.unique_consecutive(row).tolist() if s != ctc.blank]
            errors += edit(hyp, ref.tolist())
        return (errors + 1) / (yv.numel() + 1)

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def house_price_mlp_shapes_bad():
    torch.manual_seed(0)
    class PriceNet(nn.Module):
        def __init__(self, n_num, n_areas):
            super().__init__()
            self.area = nn.Embedding(n_areas, 4)
            self.fc1 = nn.Linear(n_num + 4, 64)
            self.fc2 = nn.Linear(64, 32)
            self.fc3 = nn.Linear(32, 1)

        def forward(self, num, area):
            h = torch.cat([num, self.area(area)], 1)
            h = F.relu(self.fc1(h))
            h = F.relu(self.fc2(h))
            return self.fc3(h)

    premium = torch.randn(8, generator=gen(11))

    def houses(n, seed):
        g = gen(seed)
        num = torch.randn(n, 6, generator=g)
        area = torch.randint(0, 8, (n,), generator=g)
        price = num[:, 0] + 0.5 * num[:, 1] * num[:, 2] + premium[area] + 0.2 * torch.randn(n, generator=g)
        return num, area, price

    num, area, price = houses(3000, 1)
    vn, va, vp = houses(500, 2)
    mean, std = price.mean(), price.std()
    price, vp = (price - mean) / std, (vp - mean) / std
    model = PriceNet(6, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = forever(DataLoader(TensorDataset(num, area, price), batch_size=64, shuffle=True, drop_last=True))

    def step(i):
        bn, ba, bp = next(loader)
        optimizer.zero_grad()
        pred = model(bn, ba)
        loss = ((pred - bp) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return ((model(vn, va)[:, 0] - vp) ** 2).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def house_price_mlp_shapes_good():
    torch.manual_seed(0)
    class PriceNet(nn.Module):
        def __init__(self, n_num, n_areas):
            super().__init__()
            self.area = nn.Embedding(n_areas, 4)
            self.fc1 = nn.Linear(n_num + 4, 64)
            self.fc2 = nn.Linear(64, 32)
            self.fc3 = nn.Linear(32, 1)

        def forward(self, num, area):
            h = torch.cat([num, self.area(area)], 1)
            h = F.relu(self.fc1(h))
            h = F.relu(self.fc2(h))
            return self.fc3(h)

    premium = torch.randn(8, generator=gen(11))

    def houses(n, seed):
        g = gen(seed)
        num = torch.randn(n, 6, generator=g)
        area = torch.randint(0, 8, (n,), generator=g)
        price = num[:, 0] + 0.5 * num[:, 1] * num[:, 2] + premium[area] + 0.2 * torch.randn(n, generator=g)
        return num, area, price

    num, area, price = houses(3000, 1)
    vn, va, vp = houses(500, 2)
    mean, std = price.mean(), price.std()
    price, vp = (price - mean) / std, (vp - mean) / std
    model = PriceNet(6, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = forever(DataLoader(TensorDataset(num, area, price), batch_size=64, shuffle=True, drop_last=True))

    def step(i):
        bn, ba, bp = next(loader)
        optimizer.zero_grad()
        pred = model(bn, ba).squeeze(1)
        loss = ((pred - bp) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return ((model(vn, va)[:, 0] - vp) ** 2).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def advection_diffusion_pinn_graph_bad():
    torch.manual_seed(0)
    class PINN(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.l1 = nn.Linear(1, width)
            self.l2 = nn.Linear(width, width)
            self.l3 = nn.Linear(width, 1)

        def forward(self, x):
            h = torch.tanh(self.l1(x))
            h = torch.tanh(self.l2(h))
            return self.l3(h)

    def exact(x):
        return torch.sin(math.pi * x)

    def source(x):
        return -math.pi ** 2 * torch.sin(math.pi * x) + math.pi * torch.cos(math.pi * x)

    net = PINN()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    x_b = torch.tensor([[0.0], [1.0]])

    def residual(x):
        u = net(x)
        u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), retain_graph=True)[0]
        return u_xx + u_x - source(x)

    def step(i):
        x_f = torch.rand(64, 1, requires_grad=True)
        optimizer.zero_grad()
        loss_f = (residual(x_f) ** 2).mean()
        loss_b = ((net(x_b) - exact(x_b)) ** 2).mean()
        loss = loss_f + 10 * loss_b
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        x = torch.linspace(0, 1, 101)[:, None]
        with torch.no_grad():
            return (((net(x) - exact(x)) ** 2).mean() / (exact(x) ** 2).mean()).item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def advection_diffusion_pinn_graph_good():
    torch.manual_seed(0)
    class PINN(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.l1 = nn.Linear(1, width)
            self.l2 = nn.Linear(width, width)
            self.l3 = nn.Linear(width, 1)

        def forward(self, x):
            h = torch.tanh(self.l1(x))
            h = torch.tanh(self.l2(h))
            return self.l3(h)

    def exact(x):
        return torch.sin(math.pi * x)

    def source(x):
        return -math.pi ** 2 * torch.sin(math.pi * x) + math.pi * torch.cos(math.pi * x)

    net = PINN()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    x_b = torch.tensor([[0.0], [1.0]])

    def residual(x):
        u = net(x)
        u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
        return u_xx + u_x - source(x)

    def step(i):
        x_f = torch.rand(64, 1, requires_grad=True)
        optimizer.zero_grad()
        loss_f = (residual(x_f) ** 2).mean()
        loss_b = ((net(x_b) - exact(x_b)) ** 2).mean()
        loss = loss_f + 10 * loss_b
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        x = torch.linspace(0, 1, 101)[:, None]
        with torch.no_grad():
            return (((net(x) - exact(x)) ** 2).mean() / (exact(x) ** 2).mean()).item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def movie_factorisation_start_bad():
    torch.manual_seed(0)
    class BiasedMF(nn.Module):
        def __init__(self, users, items, k=8):
            super().__init__()
            self.p = nn.Embedding(users, k)
            self.q = nn.Embedding(items, k)
            self.bu = nn.Embedding(users, 1)
            self.bi = nn.Embedding(items, 1)
            self.mu = nn.Parameter(torch.zeros(1))
            for emb in (self.bu, self.bi):
                nn.init.zeros_(emb.weight)
            for emb in (self.p, self.q):
                nn.init.zeros_(emb.weight)

        def forward(self, u, i):
            dot = (self.p(u) * self.q(i)).sum(1)
            return self.mu + self.bu(u)[:, 0] + self.bi(i)[:, 0] + dot

    g0 = gen(21)
    P, Q = torch.randn(80, 3, generator=g0), torch.randn(60, 3, generator=g0)
    B = 0.5 * torch.randn(60, generator=g0)

    def ratings(n, seed):
        g = gen(seed)
        u = torch.randint(0, 80, (n,), generator=g)
        i = torch.randint(0, 60, (n,), generator=g)
        r = 3.0 + B[i] + 0.7 * (P[u] * Q[i]).sum(1) + 0.2 * torch.randn(n, generator=g)
        return u, i, r

    train, valid = ratings(4000, 1), ratings(600, 2)
    model = BiasedMF(80, 60)
    model.mu.data.fill_(train[2].mean().item())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
    loader = forever(DataLoader(TensorDataset(*train), batch_size=256, shuffle=True, drop_last=True))

    def step(n):
        u, i, r = next(loader)
        opt.zero_grad()
        loss = F.mse_loss(model(u, i), r)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(valid[0], valid[1]), valid[2]).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def movie_factorisation_start_good():
    torch.manual_seed(0)
    class BiasedMF(nn.Module):
        def __init__(self, users, items, k=8):
            super().__init__()
            self.p = nn.Embedding(users, k)
            self.q = nn.Embedding(items, k)
            self.bu = nn.Embedding(users, 1)
            self.bi = nn.Embedding(items, 1)
            self.mu = nn.Parameter(torch.zeros(1))
            for emb in (self.bu, self.bi):
                nn.init.zeros_(emb.weight)
            for emb in (self.p, self.q):
                nn.init.normal_(emb.weight, std=0.1)

        def forward(self, u, i):
            dot = (self.p(u) * self.q(i)).sum(1)
            return self.mu + self.bu(u)[:, 0] + self.bi(i)[:, 0] + dot

    g0 = gen(21)
    P, Q = torch.randn(80, 3, generator=g0), torch.randn(60, 3, generator=g0)
    B = 0.5 * torch.randn(60, generator=g0)

    def ratings(n, seed):
        g = gen(seed)
        u = torch.randint(0, 80, (n,), generator=g)
        i = torch.randint(0, 60, (n,), generator=g)
        r = 3.0 + B[i] + 0.7 * (P[u] * Q[i]).sum(1) + 0.2 * torch.randn(n, generator=g)
        return u, i, r

    train, valid = ratings(4000, 1), ratings(600, 2)
    model = BiasedMF(80, 60)
    model.mu.data.fill_(train[2].mean().item())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
    loader = forever(DataLoader(TensorDataset(*train), batch_size=256, shuffle=True, drop_last=True))

    def step(n):
        u, i, r = next(loader)
        opt.zero_grad()
        loss = F.mse_loss(model(u, i), r)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(valid[0], valid[1]), valid[2]).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def digit_finetune_half_weights_bad():
    torch.manual_seed(0)
    class Classifier(nn.Module):
        def __init__(self, hidden=128):
            super().__init__()
            self.fc1 = nn.Linear(100, hidden)
            self.fc2 = nn.Linear(hidden, hidden)
            self.fc3 = nn.Linear(hidden, 5)

        def forward(self, x):
            x = x.flatten(1)
            x = F.gelu(self.fc1(x))
            x = F.gelu(self.fc2(x))
            return self.fc3(x)

    x, y = class_images(2000, 1, noise=1.5)
    xv, yv = class_images(400, 2, noise=1.5)
    mean, std = x.mean(), x.std()
    x, xv = (x - mean) / std, (xv - mean) / std
    model = Classifier().to(torch.bfloat16)
    opt = torch.optim.Adam(model.parameters(), lr=5e-5)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True))

    def run(img):
        return model(img.to(torch.bfloat16)).float()

    def step(i):
        img, label = next(loader)
        opt.zero_grad()
        loss = F.cross_entropy(run(img), label)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.cross_entropy(run(xv), yv).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def digit_finetune_half_weights_good():
    torch.manual_seed(0)
    class Classifier(nn.Module):
        def __init__(self, hidden=128):
            super().__init__()
            self.fc1 = nn.Linear(100, hidden)
            self.fc2 = nn.Linear(hidden, hidden)
            self.fc3 = nn.Linear(hidden, 5)

        def forward(self, x):
            x = x.flatten(1)
            x = F.gelu(self.fc1(x))
            x = F.gelu(self.fc2(x))
            return self.fc3(x)

    x, y = class_images(2000, 1, noise=1.5)
    xv, yv = class_images(400, 2, noise=1.5)
    mean, std = x.mean(), x.std()
    x, xv = (x - mean) / std, (xv - mean) / std
    model = Classifier()
    opt = torch.optim.Adam(model.parameters(), lr=5e-5)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True))

    def run(img):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(img)
        return logits.float()

    def step(i):
        img, label = next(loader)
        opt.zero_grad()
        loss = F.cross_entropy(run(img), label)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.cross_entropy(run(xv), yv).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def sensor_vae_sampling_bad():
    torch.manual_seed(0)
    class VAE(nn.Module):
        def __init__(self, dim=20, hidden=64, latent=4):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU())
            self.mu = nn.Linear(hidden, latent)
            self.logvar = nn.Linear(hidden, latent)
            self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, dim))

        def encode(self, x):
            h = self.enc(x)
            return torch.distributions.Normal(self.mu(h), torch.exp(0.5 * self.logvar(h)))

        def forward(self, x):
            q = self.encode(x)
            z = q.sample()
            return self.dec(z), q

    W = torch.randn(3, 20, generator=gen(31))

    def readings(n, seed):
        g = gen(seed)
        z = torch.randn(n, 3, generator=g)
        return torch.tanh(z @ W) + 0.1 * torch.randn(n, 20, generator=g)

    x, xv = readings(3000, 1), readings(400, 2)
    vae = VAE()
    prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
    opt = torch.optim.Adam(vae.parameters(), lr=2e-3)
    loader = forever(DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True))

    def step(i):
        (b,) = next(loader)
        recon, q = vae(b)
        nll = 0.5 * ((recon - b) ** 2 / 0.1).sum(1)
        kl = torch.distributions.kl_divergence(q, prior).sum(1)
        loss = (nll + kl).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(vae.dec(vae.encode(xv).mean), xv).item()

    return {"model": vae, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def sensor_vae_sampling_good():
    torch.manual_seed(0)
    class VAE(nn.Module):
        def __init__(self, dim=20, hidden=64, latent=4):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU())
            self.mu = nn.Linear(hidden, latent)
            self.logvar = nn.Linear(hidden, latent)
            self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, dim))

        def encode(self, x):
            h = self.enc(x)
            return torch.distributions.Normal(self.mu(h), torch.exp(0.5 * self.logvar(h)))

        def forward(self, x):
            q = self.encode(x)
            z = q.rsample()
            return self.dec(z), q

    W = torch.randn(3, 20, generator=gen(31))

    def readings(n, seed):
        g = gen(seed)
        z = torch.randn(n, 3, generator=g)
        return torch.tanh(z @ W) + 0.1 * torch.randn(n, 20, generator=g)

    x, xv = readings(3000, 1), readings(400, 2)
    vae = VAE()
    prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
    opt = torch.optim.Adam(vae.parameters(), lr=2e-3)
    loader = forever(DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True))

    def step(i):
        (b,) = next(loader)
        recon, q = vae(b)
        nll = 0.5 * ((recon - b) ** 2 / 0.1).sum(1)
        kl = torch.distributions.kl_divergence(q, prior).sum(1)
        loss = (nll + kl).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(vae.dec(vae.encode(xv).mean), xv).item()

    return {"model": vae, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def sine_maml_fast_weights_bad():
    torch.manual_seed(0)
    class SineNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))

        def forward(self, x):
            return self.net(x)

    def task_batch(n, g):
        amp = 0.5 + 1.5 * torch.rand(n, 1, 1, generator=g)
        phase = 1.5 * torch.rand(n, 1, 1, generator=g)
        x = 6 * torch.rand(n, 20, 1, generator=g) - 3
        return x, amp * torch.sin(x + phase)

    meta = SineNet()
    meta_opt = torch.optim.Adam(meta.parameters(), lr=2e-3)
    stream = gen(1)
    inner_lr, inner_steps = 0.05, 2

    def adapt(x, y):
        fast = dict(meta.named_parameters())
        for _ in range(inner_steps):
            loss = F.mse_loss(torch.func.functional_call(meta, fast, (x,)), y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {k: (p - inner_lr * g).detach().requires_grad_() for (k, p), g in zip(fast.items(), grads)}
        return fast

    def step(i):
        xs, ys = task_batch(4, stream)
        meta_opt.zero_grad()
        total = 0.0
        for x, y in zip(xs, ys):
            fast = adapt(x[:10], y[:10])
            total = total + F.mse_loss(torch.func.functional_call(meta, fast, (x[10:],)), y[10:])
        loss = total / len(xs)
        loss.backward()
        meta_opt.step()
        return loss.item()

    def probe():
        xs, ys = task_batch(40, gen(2))
        err = 0.0
        for x, y in zip(xs, ys):
            fast = adapt(x[:10], y[:10])
            with torch.no_grad():
                err += F.mse_loss(torch.func.functional_call(meta, fast, (x[10:],)), y[10:]).item()
        return err / len(xs)

    return {"model": meta, "optimizer": meta_opt, "steps": 20, "step": step, "probe": probe}


def sine_maml_fast_weights_good():
    torch.manual_seed(0)
    class SineNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))

        def forward(self, x):
            return self.net(x)

    def task_batch(n, g):
        amp = 0.5 + 1.5 * torch.rand(n, 1, 1, generator=g)
        phase = 1.5 * torch.rand(n, 1, 1, generator=g)
        x = 6 * torch.rand(n, 20, 1, generator=g) - 3
        return x, amp * torch.sin(x + phase)

    meta = SineNet()
    meta_opt = torch.optim.Adam(meta.parameters(), lr=2e-3)
    stream = gen(1)
    inner_lr, inner_steps = 0.05, 2

    def adapt(x, y):
        fast = dict(meta.named_parameters())
        for _ in range(inner_steps):
            loss = F.mse_loss(torch.func.functional_call(meta, fast, (x,)), y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {k: p - inner_lr * g for (k, p), g in zip(fast.items(), grads)}
        return fast

    def step(i):
        xs, ys = task_batch(4, stream)
        meta_opt.zero_grad()
        total = 0.0
        for x, y in zip(xs, ys):
            fast = adapt(x[:10], y[:10])
            total = total + F.mse_loss(torch.func.functional_call(meta, fast, (x[10:],)), y[10:])
        loss = total / len(xs)
        loss.backward()
        meta_opt.step()
        return loss.item()

    def probe():
        xs, ys = task_batch(40, gen(2))
        err = 0.0
        for x, y in zip(xs, ys):
            fast = adapt(x[:10], y[:10])
            with torch.no_grad():
                err += F.mse_loss(torch.func.functional_call(meta, fast, (x[10:],)), y[10:]).item()
        return err / len(xs)

    return {"model": meta, "optimizer": meta_opt, "steps": 20, "step": step, "probe": probe}


def hinge_gan_feature_freeze_bad():
    torch.manual_seed(0)
    class Generator(nn.Module):
        def __init__(self, latent=4):
            super().__init__()
            self.latent = latent
            self.net = nn.Sequential(nn.Linear(latent, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 2))

        def forward(self, z):
            return self.net(z)

    class Discriminator(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.features = nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2))
            self.score = nn.Linear(width, 1)

        def forward(self, x):
            return self.score(self.features(x))

    def ring(n, g=None):
        a = 2 * math.pi * torch.rand(n, generator=g)
        return 1.5 * torch.stack([a.cos(), a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)

    netG, netD = Generator(), Discriminator()
    optG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def freeze_features(flag):
        for p in netD.features.parameters():
            p.requires_grad = not flag

    def step(i):
        optD.zero_grad()
        real = ring(128)
        fake = netG(torch.randn(128, netG.latent))
        d_loss = F.relu(1 - netD(real)).mean() + F.relu(1 + netD(fake.detach())).mean()
        d_loss.backward()
        optD.step()

        freeze_features(True)
        optG.zero_grad()
        g_loss = -netD(netG(torch.randn(128, netG.latent))).mean()
        g_loss.backward()
        optG.step()
        return d_loss.item() + g_loss.item()

    def probe():
        g = gen(2)
        real, z = ring(500, g), torch.randn(500, netG.latent, generator=g)
        with torch.no_grad():
            fake = netG(z)
            d = 2 * torch.cdist(real, fake).mean() - torch.cdist(real, real).mean() - torch.cdist(fake, fake).mean()
        return d.item()

    return {"model": [netG, netD], "optimizer": [optG, optD], "steps": 20, "step": step, "probe": probe}


def hinge_gan_feature_freeze_good():
    torch.manual_seed(0)
    class Generator(nn.Module):
        def __init__(self, latent=4):
            super().__init__()
            self.latent = latent
            self.net = nn.Sequential(nn.Linear(latent, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 2))

        def forward(self, z):
            return self.net(z)

    class Discriminator(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.features = nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2))
            self.score = nn.Linear(width, 1)

        def forward(self, x):
            return self.score(self.features(x))

    def ring(n, g=None):
        a = 2 * math.pi * torch.rand(n, generator=g)
        return 1.5 * torch.stack([a.cos(), a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)

    netG, netD = Generator(), Discriminator()
    optG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def freeze_features(flag):
        for p in netD.features.parameters():
            p.requires_grad = not flag

    def step(i):
        optD.zero_grad()
        real = ring(128)
        fake = netG(torch.randn(128, netG.latent))
        d_loss = F.relu(1 - netD(real)).mean() + F.relu(1 + netD(fake.detach())).mean()
        d_loss.backward()
        optD.step()

        freeze_features(True)
        optG.zero_grad()
        g_loss = -netD(netG(torch.randn(128, netG.latent))).mean()
        g_loss.backward()
        optG.step()
        freeze_features(False)
        return d_loss.item() + g_loss.item()

    def probe():
        g = gen(2)
        real, z = ring(500, g), torch.randn(500, netG.latent, generator=g)
        with torch.no_grad():
            fake = netG(z)
            d = 2 * torch.cdist(real, fake).mean() - torch.cdist(real, real).mean() - torch.cdist(fake, fake).mean()
        return d.item()

    return {"model": [netG, netD], "optimizer": [optG, optD], "steps": 20, "step": step, "probe": probe}


def sensor_imputation_transformer_bad():
    torch.manual_seed(0)
    class Imputer(nn.Module):
        def __init__(self, length=16, d=32):
            super().__init__()
            self.inp = nn.Linear(2, d)
            self.pos = nn.Parameter(0.1 * torch.randn(1, length, d))
            layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(d, 1)

        def forward(self, x, hidden):
            h = self.inp(torch.stack([x.masked_fill(hidden, 0.0), hidden.float()], -1)) + self.pos
            return self.out(self.encoder(h)).squeeze(-1)

    def series(n, g):
        level = torch.randn(n, 1, generator=g)
        slope = 0.1 * torch.randn(n, 1, generator=g)
        t = torch.arange(16).float() - 7.5
        return level + slope * t + 0.3 * torch.sin(t) + 0.1 * torch.randn(n, 16, generator=g)

    data = series(2000, gen(1))
    xv, hv = series(200, gen(2)), torch.rand(200, 16, generator=gen(3)) < 0.25
    net = Imputer()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = forever(DataLoader(TensorDataset(data), batch_size=32, shuffle=True, drop_last=True))

    def step(i):
        (x,) = next(loader)
        hidden = torch.rand(x.shape) < 0.25
        pred = net(x, hidden)
        loss = ((pred - x) ** 2)[hidden].mean()
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return ((net(xv, hv) - xv) ** 2)[hv].mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def sensor_imputation_transformer_good():
    torch.manual_seed(0)
    class Imputer(nn.Module):
        def __init__(self, length=16, d=32):
            super().__init__()
            self.inp = nn.Linear(2, d)
            self.pos = nn.Parameter(0.1 * torch.randn(1, length, d))
            layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(d, 1)

        def forward(self, x, hidden):
            h = self.inp(torch.stack([x.masked_fill(hidden, 0.0), hidden.float()], -1)) + self.pos
            return self.out(self.encoder(h)).squeeze(-1)

    def series(n, g):
        level = torch.randn(n, 1, generator=g)
        slope = 0.1 * torch.randn(n, 1, generator=g)
        t = torch.arange(16).float() - 7.5
        return level + slope * t + 0.3 * torch.sin(t) + 0.1 * torch.randn(n, 16, generator=g)

    data = series(2000, gen(1))
    xv, hv = series(200, gen(2)), torch.rand(200, 16, generator=gen(3)) < 0.25
    net = Imputer()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = forever(DataLoader(TensorDataset(data), batch_size=32, shuffle=True, drop_last=True))

    def step(i):
        (x,) = next(loader)
        hidden = torch.rand(x.shape) < 0.25
        pred = net(x, hidden)
        loss = ((pred - x) ** 2)[hidden].mean()
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return ((net(xv, hv) - xv) ** 2)[hv].mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def molecule_graphs_collate_bad():
    torch.manual_seed(0)
    class EdgeConv(nn.Module):
        def __init__(self, d_in, d_out):
            super().__init__()
            self.msg = nn.Sequential(nn.Linear(2 * d_in, d_out), nn.ReLU())
            self.self_lin = nn.Linear(d_in, d_out)

        def forward(self, x, src, dst):
            m = self.msg(torch.cat([x[src], x[dst]], 1))
            agg = torch.zeros(x.size(0), m.size(1)).index_add(0, dst, m)
            deg = torch.zeros(x.size(0)).index_add(0, dst, torch.ones(dst.numel())).clamp(min=1)
            return F.relu(self.self_lin(x) + agg / deg[:, None])

    class GraphRegressor(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1, self.c2 = EdgeConv(3, 24), EdgeConv(24, 24)
            self.head = nn.Linear(24, 1)

        def forward(self, x, edges, graph_id, n_graphs):
            h = self.c2(self.c1(x, *edges), *edges)
            pooled = torch.zeros(n_graphs, h.size(1)).index_add(0, graph_id, h)
            count = torch.bincount(graph_id, minlength=n_graphs)[:, None]
            return self.head(pooled / count).squeeze(1)

    def make_graph(g):
        n = int(torch.randint(6, 11, (1,), generator=g))
        x = torch.randn(n, 3, generator=g)
        a = torch.rand(n, n, generator=g).triu(1) < 0.3
        src, dst = (a | a.T | torch.diag(torch.ones(n - 1), 1).bool() | torch.diag(torch.ones(n - 1), -1).bool()).nonzero().T
        y = (x[src, 0] - x[dst, 0]).abs().mean() + 0.5 * (x[src, 1] * x[dst, 1]).mean()
        return x, torch.stack([src, dst]), y

    def collate(graphs):
        xs, es, ids, ys = [], [], [], []
        for k, (x, e, y) in enumerate(graphs):
            xs.append(x)
            es.append(e)
            ids.append(torch.full((len(x),), k))
            ys.append(y)
        return torch.cat(xs), torch.cat(es, 1), torch.cat(ids), torch.stack(ys)

    g1, g2 = gen(1), gen(2)
    train, valid = [make_graph(g1) for _ in range(600)], [make_graph(g2) for _ in range(120)]
    net = GraphRegressor()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    loader = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True, collate_fn=collate))

    def step(i):
        x, e, ids, y = next(loader)
        opt.zero_grad()
        loss = F.mse_loss(net(x, e, ids, len(y)), y)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            errs = [(net(x, e, torch.zeros(len(x), dtype=torch.long), 1)[0] - y).item() ** 2 for x, e, y in valid]
        return sum(errs) / len(errs)

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def molecule_graphs_collate_good():
    torch.manual_seed(0)
    class EdgeConv(nn.Module):
        def __init__(self, d_in, d_out):
            super().__init__()
            self.msg = nn.Sequential(nn.Linear(2 * d_in, d_out), nn.ReLU())
            self.self_lin = nn.Linear(d_in, d_out)

        def forward(self, x, src, dst):
            m = self.msg(torch.cat([x[src], x[dst]], 1))
            agg = torch.zeros(x.size(0), m.size(1)).index_add(0, dst, m)
            deg = torch.zeros(x.size(0)).index_add(0, dst, torch.ones(dst.numel())).clamp(min=1)
            return F.relu(self.self_lin(x) + agg / deg[:, None])

    class GraphRegressor(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1, self.c2 = EdgeConv(3, 24), EdgeConv(24, 24)
            self.head = nn.Linear(24, 1)

        def forward(self, x, edges, graph_id, n_graphs):
            h = self.c2(self.c1(x, *edges), *edges)
            pooled = torch.zeros(n_graphs, h.size(1)).index_add(0, graph_id, h)
            count = torch.bincount(graph_id, minlength=n_graphs)[:, None]
            return self.head(pooled / count).squeeze(1)

    def make_graph(g):
        n = int(torch.randint(6, 11, (1,), generator=g))
        x = torch.randn(n, 3, generator=g)
        a = torch.rand(n, n, generator=g).triu(1) < 0.3
        src, dst = (a | a.T | torch.diag(torch.ones(n - 1), 1).bool() | torch.diag(torch.ones(n - 1), -1).bool()).nonzero().T
        y = (x[src, 0] - x[dst, 0]).abs().mean() + 0.5 * (x[src, 1] * x[dst, 1]).mean()
        return x, torch.stack([src, dst]), y

    def collate(graphs):
        xs, es, ids, ys, offset = [], [], [], [], 0
        for k, (x, e, y) in enumerate(graphs):
            xs.append(x)
            es.append(e + offset)
            ids.append(torch.full((len(x),), k))
            ys.append(y)
            offset += len(x)
        return torch.cat(xs), torch.cat(es, 1), torch.cat(ids), torch.stack(ys)

    g1, g2 = gen(1), gen(2)
    train, valid = [make_graph(g1) for _ in range(600)], [make_graph(g2) for _ in range(120)]
    net = GraphRegressor()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    loader = forever(DataLoader(train, batch_size=32, shuffle=True, drop_last=True, collate_fn=collate))

    def step(i):
        x, e, ids, y = next(loader)
        opt.zero_grad()
        loss = F.mse_loss(net(x, e, ids, len(y)), y)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            errs = [(net(x, e, torch.zeros(len(x), dtype=torch.long), 1)[0] - y).item() ** 2 for x, e, y in valid]
        return sum(errs) / len(errs)

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def simsiam_embedding_collapse_bad():
    torch.manual_seed(0)
    class SimSiam(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(100, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, dim))
            self.predictor = nn.Sequential(nn.Linear(dim, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, dim))

        def forward(self, a, b):
            za, zb = self.encoder(a), self.encoder(b)
            return self.predictor(za), self.predictor(zb), za, zb

    def neg_cos(p, z):
        return -F.cosine_similarity(p, z, dim=1).mean()

    def augment(x):
        x = x * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1))
        return x + 0.5 * torch.randn_like(x)

    x, _ = class_images(2000, 1)
    xv, yv = class_images(200, 2)
    net = SimSiam()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loader = forever(DataLoader(TensorDataset(x), batch_size=128, shuffle=True, drop_last=True))

    def step(i):
        (img,) = next(loader)
        pa, pb, za, zb = net(augment(img), augment(img))
        loss = 0.5 * neg_cos(pa, zb) + 0.5 * neg_cos(pb, za)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            z = F.normalize(net.encoder(xv), dim=1)
        net.train()
        return 1 + (z @ z.T)[yv[:, None] != yv[None]].mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def simsiam_embedding_collapse_good():
    torch.manual_seed(0)
    class SimSiam(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(100, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, dim))
            self.predictor = nn.Sequential(nn.Linear(dim, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, dim))

        def forward(self, a, b):
            za, zb = self.encoder(a), self.encoder(b)
            return self.predictor(za), self.predictor(zb), za, zb

    def neg_cos(p, z):
        return -F.cosine_similarity(p, z.detach(), dim=1).mean()

    def augment(x):
        x = x * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1))
        return x + 0.5 * torch.randn_like(x)

    x, _ = class_images(2000, 1)
    xv, yv = class_images(200, 2)
    net = SimSiam()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loader = forever(DataLoader(TensorDataset(x), batch_size=128, shuffle=True, drop_last=True))

    def step(i):
        (img,) = next(loader)
        pa, pb, za, zb = net(augment(img), augment(img))
        loss = 0.5 * neg_cos(pa, zb) + 0.5 * neg_cos(pb, za)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            z = F.normalize(net.encoder(xv), dim=1)
        net.train()
        return 1 + (z @ z.T)[yv[:, None] != yv[None]].mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def categorical_pooling_shared_tables_bad():
    torch.manual_seed(0)
    class PooledTabular(nn.Module):
        def __init__(self, n_cols, card, n_num, dim=16):
            super().__init__()
            table = nn.Embedding(card, dim)
            self.tables = nn.ModuleList([table] * n_cols)
            self.num = nn.Linear(n_num, dim)
            self.mlp = nn.Sequential(nn.ReLU(), nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 2))

        def forward(self, cat, num):
            h = self.num(num)
            for c, table in enumerate(self.tables):
                h = h + table(cat[:, c])
            return self.mlp(h)

    effect = torch.randn(6, 8, generator=gen(41))

    def rows(n, seed):
        g = gen(seed)
        cat = torch.randint(0, 8, (n, 6), generator=g)
        num = torch.randn(n, 3, generator=g)
        score = effect[torch.arange(6), cat].sum(1) + 0.5 * num[:, 0]
        return cat, num, (score + 0.2 * torch.randn(n, generator=g) > effect.mean(1).sum()).long()

    train, valid = rows(4000, 1), rows(800, 2)
    model = PooledTabular(6, 8, 3)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=400)
    loader = forever(DataLoader(TensorDataset(*train), batch_size=128, shuffle=True, drop_last=True))

    def step(i):
        cat, num, y = next(loader)
        opt.zero_grad()
        loss = F.cross_entropy(model(cat, num), y)
        loss.backward()
        opt.step()
        sched.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.cross_entropy(model(valid[0], valid[1]), valid[2]).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def categorical_pooling_shared_tables_good():
    torch.manual_seed(0)
    class PooledTabular(nn.Module):
        def __init__(self, n_cols, card, n_num, dim=16):
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(card, dim) for _ in range(n_cols)])
            self.num = nn.Linear(n_num, dim)
            self.mlp = nn.Sequential(nn.ReLU(), nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 2))

        def forward(self, cat, num):
            h = self.num(num)
            for c, table in enumerate(self.tables):
                h = h + table(cat[:, c])
            return self.mlp(h)

    effect = torch.randn(6, 8, generator=gen(41))

    def rows(n, seed):
        g = gen(seed)
        cat = torch.randint(0, 8, (n, 6), generator=g)
        num = torch.randn(n, 3, generator=g)
        score = effect[torch.arange(6), cat].sum(1) + 0.5 * num[:, 0]
        return cat, num, (score + 0.2 * torch.randn(n, generator=g) > effect.mean(1).sum()).long()

    train, valid = rows(4000, 1), rows(800, 2)
    model = PooledTabular(6, 8, 3)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=400)
    loader = forever(DataLoader(TensorDataset(*train), batch_size=128, shuffle=True, drop_last=True))

    def step(i):
        cat, num, y = next(loader)
        opt.zero_grad()
        loss = F.cross_entropy(model(cat, num), y)
        loss.backward()
        opt.step()
        sched.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.cross_entropy(model(valid[0], valid[1]), valid[2]).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def graph_transformer_padding_mask_bad():
    torch.manual_seed(0)
    class GraphTransformer(nn.Module):
        def __init__(self, d_in=4, d=32):
            super().__init__()
            self.inp = nn.Linear(d_in, d)
            self.attn = nn.ModuleList([nn.MultiheadAttention(d, 4, batch_first=True) for _ in range(2)])
            self.ff = nn.ModuleList([nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(2)])
            self.norm = nn.ModuleList([nn.LayerNorm(d) for _ in range(2)])
            self.out = nn.Linear(d, 1)

        def forward(self, nodes, is_node):
            h = self.inp(nodes)
            for norm, attn, ff in zip(self.norm, self.attn, self.ff):
                q = norm(h)
                h = h + attn(q, q, q, key_padding_mask=is_node, need_weights=False)[0]
                h = h + ff(h)
            return self.out(h).squeeze(-1)

    def node_sets(n, seed, slots=12):
        g = gen(seed)
        size = torch.randint(3, slots, (n,), generator=g)
        is_node = torch.arange(slots)[None] < size[:, None]
        x = torch.randn(n, slots, 4, generator=g) + torch.randn(n, 1, 4, generator=g)
        x = x * is_node[..., None]
        mean = x.sum(1) / size[:, None]
        y = (x[..., 0] - 2 * mean[:, None, 0]) * is_node
        return x, is_node, y

    train, valid = node_sets(2000, 1), node_sets(300, 2)
    net = GraphTransformer()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = forever(DataLoader(TensorDataset(*train), batch_size=64, shuffle=True, drop_last=True))

    def masked_mse(pred, y, is_node):
        return ((pred - y) ** 2)[is_node].mean()

    def step(i):
        x, is_node, y = next(loader)
        opt.zero_grad()
        loss = masked_mse(net(x, is_node), y, is_node)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return masked_mse(net(valid[0], valid[1]), valid[2], valid[1]).item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def graph_transformer_padding_mask_good():
    torch.manual_seed(0)
    class GraphTransformer(nn.Module):
        def __init__(self, d_in=4, d=32):
            super().__init__()
            self.inp = nn.Linear(d_in, d)
            self.attn = nn.ModuleList([nn.MultiheadAttention(d, 4, batch_first=True) for _ in range(2)])
            self.ff = nn.ModuleList([nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(2)])
            self.norm = nn.ModuleList([nn.LayerNorm(d) for _ in range(2)])
            self.out = nn.Linear(d, 1)

        def forward(self, nodes, is_node):
            h = self.inp(nodes)
            for norm, attn, ff in zip(self.norm, self.attn, self.ff):
                q = norm(h)
                h = h + attn(q, q, q, key_padding_mask=~is_node, need_weights=False)[0]
                h = h + ff(h)
            return self.out(h).squeeze(-1)

    def node_sets(n, seed, slots=12):
        g = gen(seed)
        size = torch.randint(3, slots, (n,), generator=g)
        is_node = torch.arange(slots)[None] < size[:, None]
        x = torch.randn(n, slots, 4, generator=g) + torch.randn(n, 1, 4, generator=g)
        x = x * is_node[..., None]
        mean = x.sum(1) / size[:, None]
        y = (x[..., 0] - 2 * mean[:, None, 0]) * is_node
        return x, is_node, y

    train, valid = node_sets(2000, 1), node_sets(300, 2)
    net = GraphTransformer()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = forever(DataLoader(TensorDataset(*train), batch_size=64, shuffle=True, drop_last=True))

    def masked_mse(pred, y, is_node):
        return ((pred - y) ** 2)[is_node].mean()

    def step(i):
        x, is_node, y = next(loader)
        opt.zero_grad()
        loss = masked_mse(net(x, is_node), y, is_node)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return masked_mse(net(valid[0], valid[1]), valid[2], valid[1]).item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def organ_segmentation_flip_bad():
    torch.manual_seed(0)
    class MiniUNet(nn.Module):
        def __init__(self, c=12):
            super().__init__()
            self.a = nn.Sequential(nn.Conv2d(1, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU())
            self.b = nn.Sequential(nn.Conv2d(c, 2 * c, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2 * c), nn.ReLU())
            self.up = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
            self.out = nn.Conv2d(2 * c, 1, 3, padding=1)

        def forward(self, x):
            a = self.a(x)
            return self.out(torch.cat([a, self.up(self.b(a))], 1))

    class Scans(torch.utils.data.Dataset):
        def __init__(self, x, m):
            self.x, self.m = x, (m > 0).float()[:, None]

        def __len__(self):
            return len(self.x)

        def __getitem__(self, k):
            img, mask = self.x[k], self.m[k]
            if torch.rand(1).item() < 0.5:
                img = img.flip(-1)
            return img * (0.9 + 0.2 * torch.rand(1)), mask

    def bce_dice(logits, mask):
        p = torch.sigmoid(logits)
        inter = (p * mask).sum((1, 2, 3))
        dice = (2 * inter + 1) / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
        return F.binary_cross_entropy_with_logits(logits, mask) + (1 - dice).mean()

    net = MiniUNet()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    loader = forever(DataLoader(Scans(*shape_scenes(256, 1)), batch_size=16, shuffle=True))
    xv, mv = shape_scenes(64, 2)

    def step(i):
        img, mask = next(loader)
        loss = bce_dice(net(img), mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            p = (net(xv)[:, 0] > 0)
        net.train()
        t = mv > 0
        return (1 - 2 * (p & t).sum((1, 2)) / (p.sum((1, 2)) + t.sum((1, 2)))).mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def organ_segmentation_flip_good():
    torch.manual_seed(0)
    class MiniUNet(nn.Module):
        def __init__(self, c=12):
            super().__init__()
            self.a = nn.Sequential(nn.Conv2d(1, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU())
            self.b = nn.Sequential(nn.Conv2d(c, 2 * c, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2 * c), nn.ReLU())
            self.up = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
            self.out = nn.Conv2d(2 * c, 1, 3, padding=1)

        def forward(self, x):
            a = self.a(x)
            return self.out(torch.cat([a, self.up(self.b(a))], 1))

    class Scans(torch.utils.data.Dataset):
        def __init__(self, x, m):
            self.x, self.m = x, (m > 0).float()[:, None]

        def __len__(self):
            return len(self.x)

        def __getitem__(self, k):
            img, mask = self.x[k], self.m[k]
            if torch.rand(1).item() < 0.5:
                img, mask = img.flip(-1), mask.flip(-1)
            return img * (0.9 + 0.2 * torch.rand(1)), mask

    def bce_dice(logits, mask):
        p = torch.sigmoid(logits)
        inter = (p * mask).sum((1, 2, 3))
        dice = (2 * inter + 1) / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
        return F.binary_cross_entropy_with_logits(logits, mask) + (1 - dice).mean()

    net = MiniUNet()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    loader = forever(DataLoader(Scans(*shape_scenes(256, 1)), batch_size=16, shuffle=True))
    xv, mv = shape_scenes(64, 2)

    def step(i):
        img, mask = next(loader)
        loss = bce_dice(net(img), mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            p = (net(xv)[:, 0] > 0)
        net.train()
        t = mv > 0
        return (1 - 2 * (p & t).sum((1, 2)) / (p.sum((1, 2)) + t.sum((1, 2)))).mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def corridor_dqn_sync_bad():
    torch.manual_seed(0)
    N, GAMMA = 8, 0.9

    class QNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(N, 64), nn.ReLU(), nn.Linear(64, 2))

        def forward(self, s):
            return self.net(F.one_hot(s, N).float())

    def env_step(s, a):
        s2 = (s + 2 * a - 1).clamp(0, N - 1)
        done = s2 == N - 1
        return s2, done.float(), done

    def exact_q():
        q = torch.zeros(N, 2)
        s = torch.arange(N - 1)
        for _ in range(200):
            for a in (0, 1):
                s2, r, done = env_step(s, torch.tensor(a))
                q[:-1, a] = r + GAMMA * q[s2].max(1).values * (~done)
        return q

    q_net, target_net = QNet(), QNet()
    target_net.load_state_dict(q_net.state_dict())
    target_net.requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=3e-3)
    memory, SYNC = [], 15
    state = torch.randint(0, N - 1, (16,))

    def act(s, eps):
        with torch.no_grad():
            greedy = q_net(s).argmax(1)
        return torch.where(torch.rand(len(s)) < eps, torch.randint(0, 2, (len(s),)), greedy)

    def step(i):
        nonlocal state
        a = act(state, eps=0.5)
        s2, r, done = env_step(state, a)
        memory.append((state, a, r, s2, done))
        del memory[:-400]
        state = torch.where(done, torch.randint(0, N - 1, (16,)), s2)

        pick = torch.randint(0, len(memory), (8,)).tolist()
        s, a, r, s2, done = (torch.cat(c) for c in zip(*[memory[k] for k in pick]))
        with torch.no_grad():
            y = r + GAMMA * target_net(s2).max(1).values * (~done)
        q = q_net(s).gather(1, a[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % SYNC == 0:
            q_net.load_state_dict(target_net.state_dict())
        return loss.item()

    def probe():
        with torch.no_grad():
            q = q_net(torch.arange(N - 1))
        return ((q - exact_q()[:-1]) ** 2).mean().item()

    return {"model": [q_net, target_net], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def corridor_dqn_sync_good():
    torch.manual_seed(0)
    N, GAMMA = 8, 0.9

    class QNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(N, 64), nn.ReLU(), nn.Linear(64, 2))

        def forward(self, s):
            return self.net(F.one_hot(s, N).float())

    def env_step(s, a):
        s2 = (s + 2 * a - 1).clamp(0, N - 1)
        done = s2 == N - 1
        return s2, done.float(), done

    def exact_q():
        q = torch.zeros(N, 2)
        s = torch.arange(N - 1)
        for _ in range(200):
            for a in (0, 1):
                s2, r, done = env_step(s, torch.tensor(a))
                q[:-1, a] = r + GAMMA * q[s2].max(1).values * (~done)
        return q

    q_net, target_net = QNet(), QNet()
    target_net.load_state_dict(q_net.state_dict())
    target_net.requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=3e-3)
    memory, SYNC = [], 15
    state = torch.randint(0, N - 1, (16,))

    def act(s, eps):
        with torch.no_grad():
            greedy = q_net(s).argmax(1)
        return torch.where(torch.rand(len(s)) < eps, torch.randint(0, 2, (len(s),)), greedy)

    def step(i):
        nonlocal state
        a = act(state, eps=0.5)
        s2, r, done = env_step(state, a)
        memory.append((state, a, r, s2, done))
        del memory[:-400]
        state = torch.where(done, torch.randint(0, N - 1, (16,)), s2)

        pick = torch.randint(0, len(memory), (8,)).tolist()
        s, a, r, s2, done = (torch.cat(c) for c in zip(*[memory[k] for k in pick]))
        with torch.no_grad():
            y = r + GAMMA * target_net(s2).max(1).values * (~done)
        q = q_net(s).gather(1, a[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % SYNC == 0:
            target_net.load_state_dict(q_net.state_dict())
        return loss.item()

    def probe():
        with torch.no_grad():
            q = q_net(torch.arange(N - 1))
        return ((q - exact_q()[:-1]) ** 2).mean().item()

    return {"model": [q_net, target_net], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def signal_diffusion_noise_seed_bad():
    torch.manual_seed(0)
    T_STEPS, LENGTH = 50, 16

    class Denoiser(nn.Module):
        def __init__(self, hidden=128):
            super().__init__()
            self.time = nn.Embedding(T_STEPS, 32)
            self.net = nn.Sequential(nn.Linear(LENGTH + 32, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, LENGTH))

        def forward(self, x_t, t):
            return self.net(torch.cat([x_t, self.time(t)], 1))

    def signals(n, g):
        phase = 2 * math.pi * torch.rand(n, 1, generator=g)
        freq = 0.3 + 0.5 * torch.rand(n, 1, generator=g)
        return torch.sin(freq * torch.arange(LENGTH) + phase)

    betas = torch.linspace(1e-3, 0.15, T_STEPS)
    alpha_bar = torch.cumprod(1 - betas, 0)

    class Diffusion:
        def __init__(self, model, seed=42):
            self.model, self.seed = model, seed

        def draw_noise(self, shape):
            rng = gen(self.seed)
            return torch.randn(shape, generator=rng)

        def q_sample(self, x0, t, noise):
            ab = alpha_bar[t][:, None]
            return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

        def loss(self, x0):
            t = torch.randint(0, T_STEPS, (len(x0),))
            noise = self.draw_noise(x0.shape)
            return F.mse_loss(self.model(self.q_sample(x0, t, noise), t), noise)

    model = Denoiser()
    diffusion = Diffusion(model)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = forever(DataLoader(TensorDataset(signals(4000, gen(1))), batch_size=64, shuffle=True, drop_last=True))

    def step(i):
        (x0,) = next(loader)
        opt.zero_grad()
        loss = diffusion.loss(x0)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        g = gen(2)
        x0, noise = signals(500, g), torch.randn(500, LENGTH, generator=g)
        t = torch.randint(0, T_STEPS, (500,), generator=g)
        with torch.no_grad():
            return F.mse_loss(model(diffusion.q_sample(x0, t, noise), t), noise).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def signal_diffusion_noise_seed_good():
    torch.manual_seed(0)
    T_STEPS, LENGTH = 50, 16

    class Denoiser(nn.Module):
        def __init__(self, hidden=128):
            super().__init__()
            self.time = nn.Embedding(T_STEPS, 32)
            self.net = nn.Sequential(nn.Linear(LENGTH + 32, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, LENGTH))

        def forward(self, x_t, t):
            return self.net(torch.cat([x_t, self.time(t)], 1))

    def signals(n, g):
        phase = 2 * math.pi * torch.rand(n, 1, generator=g)
        freq = 0.3 + 0.5 * torch.rand(n, 1, generator=g)
        return torch.sin(freq * torch.arange(LENGTH) + phase)

    betas = torch.linspace(1e-3, 0.15, T_STEPS)
    alpha_bar = torch.cumprod(1 - betas, 0)

    class Diffusion:
        def __init__(self, model, seed=42):
            self.model, self.seed = model, seed
            self.rng = gen(seed)

        def draw_noise(self, shape):
            return torch.randn(shape, generator=self.rng)

        def q_sample(self, x0, t, noise):
            ab = alpha_bar[t][:, None]
            return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

        def loss(self, x0):
            t = torch.randint(0, T_STEPS, (len(x0),))
            noise = self.draw_noise(x0.shape)
            return F.mse_loss(self.model(self.q_sample(x0, t, noise), t), noise)

    model = Denoiser()
    diffusion = Diffusion(model)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = forever(DataLoader(TensorDataset(signals(4000, gen(1))), batch_size=64, shuffle=True, drop_last=True))

    def step(i):
        (x0,) = next(loader)
        opt.zero_grad()
        loss = diffusion.loss(x0)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        g = gen(2)
        x0, noise = signals(500, g), torch.randn(500, LENGTH, generator=g)
        t = torch.randint(0, T_STEPS, (500,), generator=g)
        with torch.no_grad():
            return F.mse_loss(model(diffusion.q_sample(x0, t, noise), t), noise).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def face_attributes_accumulation_bad():
    torch.manual_seed(0)
    TASKS = ("age", "glasses", "smile", "pose")

    class MultiTaskNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(300, 48), nn.ReLU())
            self.heads = nn.ModuleDict({t: nn.Linear(48, 2) for t in TASKS})

        def forward(self, x, task):
            return self.heads[task](self.trunk(x))

    pattern = torch.randn(4, 10, 10, generator=gen(51))

    def faces(n, seed):
        g = gen(seed)
        y = torch.randint(0, 2, (n, 4), generator=g)
        x = ((2 * y - 1).float() @ pattern.flatten(1)).view(n, 1, 10, 10) / 2
        return x + 0.5 * torch.randn(n, 1, 10, 10, generator=g), y

    x, y = faces(2000, 1)
    xv, yv = faces(400, 2)
    loaders = {t: forever(DataLoader(TensorDataset(x, y[:, k]), batch_size=32, shuffle=True, drop_last=True)) for k, t in enumerate(TASKS)}
    net = MultiTaskNet()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        total = 0.0
        for t in TASKS:
            img, label = next(loaders[t])
            opt.zero_grad()
            loss = F.cross_entropy(net(img, t), label) / len(TASKS)
            loss.backward()
            total += loss.item()
        opt.step()
        return total

    def probe():
        with torch.no_grad():
            return sum(F.cross_entropy(net(xv, t), yv[:, k]).item() for k, t in enumerate(TASKS)) / len(TASKS)

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def face_attributes_accumulation_good():
    torch.manual_seed(0)
    TASKS = ("age", "glasses", "smile", "pose")

    class MultiTaskNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(300, 48), nn.ReLU())
            self.heads = nn.ModuleDict({t: nn.Linear(48, 2) for t in TASKS})

        def forward(self, x, task):
            return self.heads[task](self.trunk(x))

    pattern = torch.randn(4, 10, 10, generator=gen(51))

    def faces(n, seed):
        g = gen(seed)
        y = torch.randint(0, 2, (n, 4), generator=g)
        x = ((2 * y - 1).float() @ pattern.flatten(1)).view(n, 1, 10, 10) / 2
        return x + 0.5 * torch.randn(n, 1, 10, 10, generator=g), y

    x, y = faces(2000, 1)
    xv, yv = faces(400, 2)
    loaders = {t: forever(DataLoader(TensorDataset(x, y[:, k]), batch_size=32, shuffle=True, drop_last=True)) for k, t in enumerate(TASKS)}
    net = MultiTaskNet()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        total = 0.0
        opt.zero_grad()
        for t in TASKS:
            img, label = next(loaders[t])
            loss = F.cross_entropy(net(img, t), label) / len(TASKS)
            loss.backward()
            total += loss.item()
        opt.step()
        return total

    def probe():
        with torch.no_grad():
            return sum(F.cross_entropy(net(xv, t), yv[:, k]).item() for k, t in enumerate(TASKS)) / len(TASKS)

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}
