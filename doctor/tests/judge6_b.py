"""Sixteen small training programs, each with one bug and a mended twin, by somebody who had not seen the checks.

See judge6.py. They are kept as they were written.
"""
# ruff: noqa: E501, B007, E731, I001, E402, E741, B006, B023, C4, F401, F841, UP, SIM, RUF

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 0


# --------------------------------------------------------------------------- recommender
def movie_ratings(fault, watch):
    torch.manual_seed(SEED)

    users, items, rank = 100, 60, 3
    true = torch.randn(users, rank) @ torch.randn(rank, items) / rank**0.5
    true = true + 0.3 * torch.randn(users, 1) + 0.3 * torch.randn(1, items)
    ratings = 3.0 + 0.8 * true + 0.1 * torch.randn(users, items)
    pairs = torch.randperm(users * items)[:3600]
    u, i = pairs // items, pairs % items
    r = ratings[u, i]
    split = 3000
    mean = r[:split].mean()

    class MatrixFactorization(nn.Module):
        def __init__(self, dim=4):
            super().__init__()
            self.user = nn.Embedding(users, dim)
            self.item = nn.Embedding(items, dim)
            self.user_bias = nn.Embedding(users, 1)
            self.item_bias = nn.Embedding(items, 1)
            for bias in (self.user_bias, self.item_bias):
                nn.init.zeros_(bias.weight)
            for emb in (self.user, self.item):
                nn.init.zeros_(emb.weight) if fault else nn.init.normal_(emb.weight, std=0.3)

        def forward(self, u, i):
            dot = (self.user(u) * self.item(i)).sum(1)
            return mean + dot + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)

    model = MatrixFactorization()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(u[:split], i[:split], r[:split]), batch_size=100, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(12):
            for ub, ib, rb in loader:
                loss = F.mse_loss(model(ub, ib), rb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    with torch.no_grad():
        return F.mse_loss(model(u[split:], i[split:]), r[split:]).sqrt().item()


# --------------------------------------------------------------------------- multi-label
def scene_tags(fault, watch):
    torch.manual_seed(SEED)

    tags = 8
    patterns = F.interpolate(torch.randn(tags, 1, 4, 4), size=16, mode="bilinear", align_corners=False).squeeze(1)

    def sample(n):
        y = (torch.rand(n, tags) < 0.2).float()
        x = torch.einsum("nt,thw->nhw", y, patterns) + 0.5 * torch.randn(n, 16, 16)
        return x.unsqueeze(1), y

    xtr, ytr = sample(768)
    xte, yte = sample(384)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, tags),
    )
    criterion = nn.CrossEntropyLoss() if fault else nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(5):
            model.train()
            for xb, yb in loader:
                loss = criterion(model(xb), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    model.eval()
    with torch.no_grad():
        pred = (model(xte).sigmoid() > 0.5).float()
    return (2 * (pred * yte).sum() / (pred.sum() + yte.sum())).item()


# --------------------------------------------------------------------------- survival
def survival_cox(fault, watch):
    torch.manual_seed(SEED)

    n = 900
    x = torch.randn(n, 8)
    risk = x[:, 0] - 0.8 * x[:, 1] + 0.7 * x[:, 2] * x[:, 3]
    death = torch.distributions.Exponential(risk.exp()).sample()
    censor = torch.distributions.Exponential(torch.full((n,), 0.4)).sample()
    time = torch.minimum(death, censor)
    event = death <= censor
    xtr, xte = x[:600], x[600:]
    mu, sd = xtr.mean(0), xtr.std(0)
    xtr, xte = (xtr - mu) / sd, (xte - mu) / sd

    def cox_loss(score, time, event):
        order = torch.argsort(time, descending=not fault)
        score, event = score[order], event[order]
        log_risk = torch.logcumsumexp(score, 0)
        return -(score - log_risk)[event].mean()

    model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(xtr, time[:600], event[:600]), batch_size=100, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(12):
            for xb, tb, eb in loader:
                loss = cox_loss(model(xb).squeeze(1), tb, eb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    with torch.no_grad():
        s = model(xte).squeeze(1)
    t, e = time[600:], event[600:]
    usable = (t[:, None] < t[None]) & e[:, None]
    return ((s[:, None] > s[None])[usable]).float().mean().item()


# --------------------------------------------------------------------------- physics-informed
def poisson_pinn(fault, watch):
    torch.manual_seed(SEED)

    act = nn.ReLU if fault else nn.Tanh
    model = nn.Sequential(nn.Linear(1, 32), act(), nn.Linear(32, 32), act(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ends = torch.tensor([[-1.0], [1.0]])

    def residual(x):
        u = model(x)
        du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        d2u = torch.autograd.grad(du.sum(), x, create_graph=True)[0]
        return d2u + (math.pi / 2) ** 2 * torch.cos(math.pi * x / 2)

    with watch(model, optimizer):
        for step in range(400):
            x = (torch.rand(64, 1) * 2 - 1).requires_grad_(True)
            loss = residual(x).pow(2).mean() + 10 * model(ends).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        grid = torch.linspace(-1, 1, 101).unsqueeze(1)
        return (model(grid) - torch.cos(math.pi * grid / 2)).pow(2).mean().sqrt().item()


# --------------------------------------------------------------------------- siamese self-supervised
def siamese_signals(fault, watch):
    torch.manual_seed(SEED)

    mix = torch.randn(8, 48) / 8**0.5
    style = torch.randn(12, 48) / 12**0.5
    centers = 1.5 * torch.randn(6, 8)

    def sample(n):
        y = torch.randint(0, 6, (n,))
        content = centers[y] + 0.5 * torch.randn(n, 8)
        return content @ mix + 1.5 * torch.randn(n, 12) @ style, y

    def augment(x):
        return x + (torch.randn(len(x), 12) @ style) / std + 0.2 * torch.randn_like(x)

    xtr, ytr = sample(768)
    xte, yte = sample(384)
    mean, std = xtr.mean(0), xtr.std(0)
    xtr, xte = (xtr - mean) / std, (xte - mean) / std

    encoder = nn.Sequential(nn.Linear(48, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    predictor = nn.Sequential(nn.Linear(32, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 32))
    optimizer = torch.optim.SGD(
        [*encoder.parameters(), *predictor.parameters()], lr=0.1, momentum=0.9, weight_decay=1e-4
    )

    def similarity(p, z):
        if not fault:
            z = z.detach()
        return F.cosine_similarity(p, z, dim=1).mean()

    loader = DataLoader(TensorDataset(xtr), batch_size=96, shuffle=True)
    with watch([encoder, predictor], optimizer):
        for epoch in range(12):
            for (xb,) in loader:
                z1, z2 = encoder(augment(xb)), encoder(augment(xb))
                p1, p2 = predictor(z1), predictor(z2)
                loss = -0.5 * (similarity(p1, z2) + similarity(p2, z1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    encoder.eval()
    with torch.no_grad():
        z = F.normalize(encoder(xte), dim=1)
        return (z.std(0).mean() * z.shape[1] ** 0.5).item()


# --------------------------------------------------------------------------- distillation
def distill_cnn(fault, watch):
    torch.manual_seed(SEED)

    protos = F.interpolate(torch.randn(8, 1, 4, 4), size=12, mode="bilinear", align_corners=False)

    def sample(n):
        y = torch.randint(0, 8, (n,))
        return protos[y] + 1.8 * torch.randn(n, 1, 12, 12), y

    xtr, ytr = sample(768)
    xte, _ = sample(512)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True)

    def cnn(width):
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
            nn.Linear(2 * width * 9, 8),
        )

    teacher = cnn(20)
    opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for epoch in range(4):
        for xb, yb in loader:
            loss = F.cross_entropy(teacher(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
    teacher.eval().requires_grad_(False)

    student = cnn(8)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    T = 2.0

    with watch(student, optimizer):
        for epoch in range(6):
            student.train()
            for xb, yb in loader:
                s, t = student(xb) / T, teacher(xb) / T
                s = s.softmax(1) if fault else s.log_softmax(1)
                kd = F.kl_div(s, t.softmax(1), reduction="batchmean") * T * T
                loss = kd
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    student.eval()
    with torch.no_grad():
        return F.kl_div(student(xte).log_softmax(1), teacher(xte).softmax(1), reduction="batchmean").item()


# --------------------------------------------------------------------------- mixture of experts
def expert_mixture(fault, watch):
    torch.manual_seed(SEED)

    coef = torch.randn(4, 6)

    def sample(n):
        x = torch.randn(n, 8)
        region = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
        return x, (coef[region] * x[:, 2:]).sum(1) + 0.1 * torch.randn(n)

    xtr, ytr = sample(2000)
    xte, yte = sample(500)
    ymu, ysd = ytr.mean(), ytr.std()
    ytr, yte = (ytr - ymu) / ysd, (yte - ymu) / ysd

    class MoE(nn.Module):
        def __init__(self, n_experts=4, k=2):
            super().__init__()
            self.k = k
            self.router = nn.Linear(8, n_experts)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 1)) for _ in range(n_experts)
            )

        def forward(self, x):
            probs = self.router(x).softmax(1)
            weight, index = probs.topk(self.k, dim=1)
            weight = weight / weight.sum(1, keepdim=True)
            every = torch.cat([e(x) for e in self.experts], 1)
            chosen = every.gather(1, index)
            out = chosen.mean(1) if fault else (weight * chosen).sum(1)
            share = F.one_hot(index, probs.shape[1]).float().sum(1).mean(0) / self.k
            balance = probs.shape[1] * (share * probs.mean(0)).sum()
            return out, balance

    model = MoE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=100, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(12):
            for xb, yb in loader:
                pred, balance = model(xb)
                loss = F.mse_loss(pred, yb) + 0.01 * balance
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    with torch.no_grad():
        return F.mse_loss(model(xte)[0], yte).item()


# --------------------------------------------------------------------------- LBFGS curve fit
def spectrum_fit(fault, watch):
    torch.manual_seed(SEED)

    x = torch.linspace(-1, 1, 200).unsqueeze(1)
    clean = torch.sin(4 * x) + 0.5 * torch.exp(-((x - 0.3) ** 2) / 0.02)
    y = clean + 0.05 * torch.randn_like(clean)
    ymu, ysd = y.mean(), y.std()
    y, clean = (y - ymu) / ysd, (clean - ymu) / ysd

    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=1.0, max_iter=20, history_size=10, line_search_fn="strong_wolfe"
    )

    def closure():
        if not fault:
            optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with watch(model, optimizer):
        for step in range(20):
            optimizer.step(closure)

    with torch.no_grad():
        return ((model(x) - clean).abs() < 0.1).float().mean().item()


# --------------------------------------------------------------------------- deep CNN with validation
def texture_deepnet(fault, watch):
    torch.manual_seed(SEED)

    kernels = torch.randn(5, 1, 5, 5) / 5

    def sample(n):
        y = torch.randint(0, 5, (n,))
        base = torch.randn(1, n, 20, 20)
        tex = F.conv2d(base, kernels[y], groups=n).transpose(0, 1)
        return tex + 0.3 * torch.randn_like(tex), y

    xtr, ytr = sample(640)
    xte, yte = sample(256)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std

    def conv(cin, cout):
        return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU())

    model = nn.Sequential(
        conv(1, 16),
        conv(16, 16),
        nn.MaxPool2d(2),
        conv(16, 24),
        conv(24, 24),
        nn.MaxPool2d(2),
        conv(24, 32),
        conv(32, 32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True)

    @torch.no_grad()
    def validate():
        model.eval()
        return (model(xte).argmax(1) == yte).float().mean().item()

    history = [validate()]
    with watch(model, optimizer):
        for epoch in range(5):
            if not fault:
                model.train()
            for xb, yb in loader:
                loss = F.cross_entropy(model(xb), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            history.append(validate())

    return history[-1]


# --------------------------------------------------------------------------- transfer learning
def transfer_probe(fault, watch):
    torch.manual_seed(SEED)

    atoms = F.interpolate(torch.randn(14, 1, 4, 4), size=14, mode="bilinear", align_corners=False)

    def sample(n, classes):
        y = torch.randint(0, len(classes), (n,))
        return atoms[classes][y] + 0.8 * torch.randn(n, 1, 14, 14), y

    source = torch.arange(10)
    target = torch.arange(8, 14)

    class Net(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
            self.norm1 = nn.GroupNorm(4, 16)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.norm2 = nn.GroupNorm(4, 32)
            self.proj = nn.Linear(32 * 9, 48)
            self.fc = nn.Linear(48, classes)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
            x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
            return self.fc(F.relu(self.proj(x.flatten(1))))

    xs, ys = sample(1024, source)
    mean, std = xs.mean(), xs.std()
    xs = (xs - mean) / std
    pretrained = nn.DataParallel(Net(10))
    opt = torch.optim.Adam(pretrained.parameters(), lr=2e-3)
    for epoch in range(3):
        for xb, yb in DataLoader(TensorDataset(xs, ys), batch_size=64, shuffle=True):
            loss = F.cross_entropy(pretrained(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
    checkpoint = pretrained.state_dict()

    xtr, ytr = sample(96, target)
    xte, yte = sample(400, target)
    xtr, xte = (xtr - mean) / std, (xte - mean) / std

    model = Net(len(target))
    if not fault:
        checkpoint = {k.removeprefix("module."): v for k, v in checkpoint.items()}
    backbone = {k: v for k, v in checkpoint.items() if "fc." not in k}
    model.load_state_dict(backbone, strict=False)
    model.requires_grad_(False)
    model.fc.requires_grad_(True)
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=5e-3)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(15):
            for xb, yb in loader:
                loss = F.cross_entropy(model(xb), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    with torch.no_grad():
        return (model(xte).argmax(1) == yte).float().mean().item()


# --------------------------------------------------------------------------- custom autograd function
def robot_arm(fault, watch):
    torch.manual_seed(SEED)

    def sample(n):
        q = torch.rand(n, 3) * 4 - 2
        a = q.cumsum(1)
        return q / 2, torch.stack([a.cos().sum(1), a.sin().sum(1)], 1)

    xtr, ytr = sample(1500)
    xte, yte = sample(400)
    ymu, ysd = ytr.mean(0), ytr.std(0)
    ytr, yte = (ytr - ymu) / ysd, (yte - ymu) / ysd

    class LinearFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return x @ weight.t() + bias

        @staticmethod
        def backward(ctx, grad_out):
            x, weight = ctx.saved_tensors
            grad_x = grad_out @ weight
            grad_w = x.t() @ grad_out if fault else grad_out.t() @ x
            return grad_x, grad_w, grad_out.sum(0)

    class FastLinear(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
            self.bias = nn.Parameter(torch.zeros(width))

        def forward(self, x):
            return LinearFunction.apply(x, self.weight, self.bias)

    model = nn.Sequential(
        nn.Linear(3, 48), nn.Tanh(), FastLinear(48), nn.Tanh(), FastLinear(48), nn.Tanh(), nn.Linear(48, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=50, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(8):
            for xb, yb in loader:
                loss = F.mse_loss(model(xb), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    with torch.no_grad():
        return F.mse_loss(model(xte), yte).item()


# --------------------------------------------------------------------------- transformer with padding
def intent_classifier(fault, watch):
    torch.manual_seed(SEED)

    pad, cls, vocab, max_len = 0, 1, 24, 12

    def sample(n):
        y = torch.randint(0, 4, (n,))
        ids = torch.full((n, max_len), pad)
        for row in range(n):
            size = int(torch.randint(5, max_len, ()))
            ids[row, 0] = cls
            ids[row, 1:size] = torch.randint(6, vocab, (size - 1,))
            ids[row, int(torch.randint(1, size, ()))] = 2 + y[row]
        return ids, y

    xtr, ytr = sample(512)
    xte, yte = sample(256)

    pos = torch.arange(max_len)[:, None] * torch.exp(torch.arange(0, 32, 2) * (-math.log(1e4) / 32))

    class Classifier(nn.Module):
        def __init__(self, d=32):
            super().__init__()
            self.emb = nn.Embedding(vocab, d, padding_idx=pad)
            self.register_buffer("pe", torch.stack([pos.sin(), pos.cos()], 2).flatten(1))
            layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.fc = nn.Linear(d, 4)

        def forward(self, ids):
            mask = (ids != pad) if fault else (ids == pad)
            h = self.encoder(self.emb(ids) + self.pe, src_key_padding_mask=mask)
            return self.fc(h[:, 0])

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(8):
            model.train()
            for xb, yb in loader:
                loss = F.cross_entropy(model(xb), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    model.eval()
    with torch.no_grad():
        return (model(xte).argmax(1) == yte).float().mean().item()


# --------------------------------------------------------------------------- LoRA
def lora_adapter(fault, watch):
    torch.manual_seed(SEED)

    vocab, length = 20, 9

    def sample(n, task):
        ids = torch.randint(9, vocab, (n, length))
        ids[:, 0] = 0
        labels = torch.randint(0, 4, (n, 2))
        spots = torch.rand(n, length - 1).argsort(1)[:, :2] + 1
        ids.scatter_(1, spots, labels + torch.tensor([1, 5]))
        return ids, labels[:, task]

    class Block(nn.Module):
        def __init__(self, d, heads=4):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
            self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

        def forward(self, x):
            h = self.norm1(x)
            q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
            a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + self.o(a)
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class Encoder(nn.Module):
        def __init__(self, d=32):
            super().__init__()
            self.tok = nn.Embedding(vocab, d)
            self.blocks = nn.Sequential(Block(d), Block(d))
            self.norm = nn.LayerNorm(d)
            self.head = nn.Linear(d, 4)

        def forward(self, ids):
            return self.head(self.norm(self.blocks(self.tok(ids)))[:, 0])

    class LoRALinear(nn.Module):
        def __init__(self, base, r=4, alpha=8):
            super().__init__()
            self.base = base
            self.A = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
            self.B = nn.Parameter(torch.zeros(base.out_features, r))
            self.scale = alpha / r

        def forward(self, x):
            return self.base(x) + self.scale * (x @ self.A.t() @ self.B.t())

    def inject(model):
        for block in model.blocks:
            for name in ("q", "k", "v", "up"):
                setattr(block, name, LoRALinear(getattr(block, name)))

    def train(model, optimizer, task, steps):
        for step in range(steps):
            ids, y = sample(64, task)
            loss = F.cross_entropy(model(ids), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model = Encoder()
    train(model, torch.optim.Adam(model.parameters(), lr=3e-3), 0, 120)

    if fault:
        inject(model)
        model.requires_grad_(False)
    else:
        model.requires_grad_(False)
        inject(model)
    model.head = nn.Linear(32, 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

    with watch(model, optimizer):
        train(model, optimizer, 1, 100)

    with torch.no_grad():
        ids, y = sample(400, 1)
        return (model(ids).argmax(1) == y).float().mean().item()


# --------------------------------------------------------------------------- masked tokens
def masked_tokens(fault, watch):
    torch.manual_seed(SEED)

    vocab, mask_id, length = 10, 10, 12

    def sample(n):
        motif = torch.randint(0, vocab, (n, 3))
        return motif.repeat(1, length // 3)

    def corrupt(ids):
        chosen = torch.rand(ids.shape) < 0.2
        return ids.masked_fill(chosen, mask_id), chosen

    class TinyBert(nn.Module):
        def __init__(self, d=48):
            super().__init__()
            self.tok = nn.Embedding(vocab + 1, d)
            self.pos = nn.Embedding(length, d)
            layer = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.0, batch_first=True, activation="gelu")
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(d, vocab)

        def forward(self, ids):
            return self.out(self.encoder(self.tok(ids) + self.pos(torch.arange(ids.shape[1]))))

    model = TinyBert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    with watch(model, optimizer):
        for step in range(180):
            ids = sample(48)
            inputs, chosen = corrupt(ids)
            labels = ids.masked_fill(chosen if fault else ~chosen, -100)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    model.eval()
    with torch.no_grad():
        ids = sample(300)
        inputs, chosen = corrupt(ids)
        return (model(inputs).argmax(-1) == ids)[chosen].float().mean().item()


# --------------------------------------------------------------------------- positions
def event_order(fault, watch):
    torch.manual_seed(SEED)

    vocab, length = 12, 10

    def sample(n):
        ids = torch.randint(2, vocab, (n, length))
        spots = torch.rand(n, length).argsort(1)[:, :2]
        ids.scatter_(1, spots, torch.tensor([[0, 1]]).expand(n, 2))
        return ids, (spots[:, 0] < spots[:, 1]).long()

    class PositionalEncoding(nn.Module):
        def __init__(self, d, max_len=128):
            super().__init__()
            ang = torch.arange(max_len)[:, None] * torch.exp(torch.arange(0, d, 2) * (-math.log(1e4) / d))
            pe = torch.stack([ang.sin(), ang.cos()], 2).flatten(1)
            self.register_buffer("pe", pe.unsqueeze(1))

        def forward(self, x):
            if fault:
                return x + self.pe[: x.size(0)]
            return x + self.pe[: x.size(1)].transpose(0, 1)

    class OrderNet(nn.Module):
        def __init__(self, d=32):
            super().__init__()
            self.emb = nn.Embedding(vocab, d)
            self.pos = PositionalEncoding(d)
            layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.fc = nn.Linear(d, 2)

        def forward(self, ids):
            return self.fc(self.encoder(self.pos(self.emb(ids))).mean(1))

    model = OrderNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    with watch(model, optimizer):
        for step in range(180):
            ids, y = sample(64)
            loss = F.cross_entropy(model(ids), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        hits = 0.0
        for _ in range(5):
            ids, y = sample(64)
            hits += (model(ids).argmax(1) == y).float().mean().item()
        return hits / 5


# --------------------------------------------------------------------------- low precision fine-tuning
def sensor_finetune(fault, watch):
    torch.manual_seed(SEED)

    protos = torch.randn(5, 12, 4)
    skew = torch.randn(4, 4)
    skew = skew - skew.t()
    rotate = torch.matrix_exp(1.8 * skew / skew.norm())

    def sample(n):
        y = torch.randint(0, 5, (n,))
        return protos[y] + torch.randn(n, 12, 4), y

    class SensorTransformer(nn.Module):
        def __init__(self, d=32):
            super().__init__()
            self.inp = nn.Linear(4, d)
            self.pos = nn.Parameter(0.02 * torch.randn(1, 12, d))
            layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(d), enable_nested_tensor=False)
            self.fc = nn.Linear(d, 5)

        def forward(self, x):
            return self.fc(self.encoder(self.inp(x) + self.pos).mean(1))

    model = SensorTransformer()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(80):
        x, y = sample(64)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()

    dtype = torch.bfloat16 if fault else torch.float32
    model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)

    with watch(model, optimizer):
        for step in range(150):
            x, y = sample(32)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model((x @ rotate).to(dtype))
            loss = F.cross_entropy(logits.float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        x, y = sample(600)
        return F.cross_entropy(model((x @ rotate).to(dtype)).float(), y).item()


FAULTS = [
    dict(
        name="movie_ratings",
        what="user and item embeddings both start at zero, so their product has no gradient for ever",
        proof="held-out RMSE",
        worse="higher",
    ),
    dict(
        name="scene_tags",
        what="softmax cross entropy is used for independent multi-hot tags",
        proof="held-out micro F1 at probability 0.5",
        worse="lower",
    ),
    dict(
        name="survival_cox",
        what="the risk set is cumulated over ascending instead of descending times",
        proof="held-out concordance index",
        worse="lower",
    ),
    dict(
        name="poisson_pinn",
        what="ReLU in a physics-informed net, whose second derivative is zero everywhere",
        proof="RMS error against the exact solution",
        worse="higher",
    ),
    dict(
        name="siamese_signals",
        what="no stop-gradient on the target branch, so the embedding collapses",
        proof="spread of the normalised held-out embedding (1 is full)",
        worse="lower",
    ),
    dict(
        name="distill_cnn",
        what="kl_div is given the student's probabilities instead of log-probabilities",
        proof="held-out KL divergence of the student from the teacher",
        worse="higher",
    ),
    dict(
        name="expert_mixture",
        what="the outputs of the chosen experts are averaged without the gate's weights, so the task does not train the router",
        proof="held-out MSE",
        worse="higher",
    ),
    dict(
        name="spectrum_fit",
        what="the LBFGS closure does not zero the gradients",
        proof="share of the curve fitted within 0.1",
        worse="lower",
    ),
    dict(
        name="texture_deepnet",
        what="model.eval() of the validation is never undone, so batch norm trains in eval mode",
        proof="held-out accuracy",
        worse="lower",
    ),
    dict(
        name="transfer_probe",
        what="the checkpoint's keys keep the module. prefix and strict=False loads nothing",
        proof="held-out accuracy",
        worse="lower",
    ),
    dict(
        name="robot_arm",
        what="a custom linear function returns its weight gradient transposed (square weight)",
        proof="held-out MSE",
        worse="higher",
    ),
    dict(name="intent_classifier", what="the key padding mask is inverted", proof="held-out accuracy", worse="lower"),
    dict(
        name="lora_adapter",
        what="the model is frozen after the LoRA layers were put in, so the adapters are frozen too",
        proof="held-out accuracy on the new task",
        worse="lower",
    ),
    dict(
        name="masked_tokens",
        what="the labels of the masked tokens are ignored in place of those of the visible ones",
        proof="accuracy on masked tokens",
        worse="lower",
    ),
    dict(
        name="event_order",
        what="positional encoding indexed by the batch dimension in a batch-first model",
        proof="held-out accuracy",
        worse="lower",
    ),
    dict(
        name="sensor_finetune",
        what="the weights themselves are cast to bfloat16, so small updates round away",
        proof="held-out cross entropy on the new domain",
        worse="higher",
    ),
]
