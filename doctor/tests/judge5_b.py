"""Twelve small training programs, each with one bug and a mended twin, by somebody who had not seen the checks.

See judge5.py. They are kept as they were written.
"""
# ruff: noqa: E501, B007, E731

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

SEED = 0


def dqn_bitwise_not_done(fault, watch):
    torch.manual_seed(SEED)
    n_states, gamma, capacity = 9, 0.9, 2000

    def encode(s):
        return F.one_hot(s, n_states).float()

    buf_s = torch.zeros(capacity, dtype=torch.long)
    buf_a = torch.zeros(capacity, dtype=torch.long)
    buf_r = torch.zeros(capacity)
    buf_next = torch.zeros(capacity, dtype=torch.long)
    buf_done = torch.zeros(capacity, dtype=torch.uint8)
    s = n_states // 2
    for i in range(capacity):  # random behaviour fills the replay buffer
        a = int(torch.randint(0, 2, (1,)))
        nxt = s + (1 if a == 1 else -1)
        done = nxt in (0, n_states - 1)
        buf_s[i], buf_a[i], buf_next[i], buf_done[i] = s, a, nxt, int(done)
        buf_r[i] = 1.0 if nxt == n_states - 1 else (-1.0 if nxt == 0 else 0.0)
        s = int(torch.randint(1, n_states - 1, (1,))) if done else nxt

    class QNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(n_states, 64), nn.ReLU(), nn.Linear(64, 2))

        def forward(self, x):
            return self.net(x)

    q = QNet()
    target_q = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters(), lr=3e-3)
    with watch(q, optimizer):
        for step in range(30):
            i = torch.randint(0, capacity, (64,))
            value = q(encode(buf_s[i])).gather(1, buf_a[i].unsqueeze(1)).squeeze(1)
            with torch.no_grad():
                best = target_q(encode(buf_next[i])).max(1).values
                alive = ~buf_done[i] if fault else 1 - buf_done[i]
                target = buf_r[i] + gamma * best * alive
            loss = F.smooth_l1_loss(value, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % 5 == 0:
                target_q.load_state_dict(q.state_dict())

    with torch.no_grad():
        return float(q(encode(torch.arange(1, n_states - 1))).abs().max())


def a2c_advantage_not_detached(fault, watch):
    torch.manual_seed(SEED)
    n_envs, horizon, gamma, n_states, n_actions = 32, 8, 0.5, 8, 4

    def env_step(s, a):
        return torch.randint(0, n_states, s.shape), (a == s % n_actions).float()

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Sequential(nn.Linear(n_states, 32), nn.Tanh(), nn.Linear(32, n_actions))
            self.critic = nn.Sequential(nn.Linear(n_states, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, s):
            x = F.one_hot(s, n_states).float()
            return torch.distributions.Categorical(logits=self.actor(x)), self.critic(x).squeeze(-1)

    def rollout(s):
        logps, values, rewards, entropies = [], [], [], []
        for _ in range(horizon):
            dist, v = model(s)
            a = dist.sample()
            s, r = env_step(s, a)
            logps.append(dist.log_prob(a)), values.append(v), rewards.append(r), entropies.append(dist.entropy())
        with torch.no_grad():
            ret, returns = model(s)[1], []
            for r in reversed(rewards):
                ret = r + gamma * ret
                returns.insert(0, ret)
        return s, torch.stack(logps), torch.stack(values), torch.stack(returns), torch.stack(entropies)

    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    s = torch.randint(0, n_states, (n_envs,))
    with watch(model, optimizer):
        for update in range(30):
            s, logp, value, returns, entropy = rollout(s)
            advantage = returns - value
            if fault:
                actor_loss = -(logp * advantage).mean()
            else:
                actor_loss = -(logp * advantage.detach()).mean()
            loss = actor_loss + 0.5 * advantage.pow(2).mean() - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    horizon = 12  # long enough for 0.5 ** 12 not to matter
    with torch.no_grad():
        _, _, value, returns, _ = rollout(torch.randint(0, n_states, (512,)))
        return float((value[0] - returns[0]).mean().abs())


def ctc_raw_logits(fault, watch):
    torch.manual_seed(SEED)
    symbols, frames, label_len, feat = 5, 24, 4, 12  # class 0 is the blank
    codebook = 1.5 * torch.randn(symbols + 1, feat)
    codebook[0] = 0

    def make(n):
        labels = torch.randint(1, symbols + 1, (n, label_len))
        x = torch.zeros(n, frames, feat)
        for i in range(n):
            for j in range(label_len):
                start = 6 * j + int(torch.randint(0, 3, (1,)))
                x[i, start : start + 3] = codebook[labels[i, j]]
        return x + 0.3 * torch.randn_like(x), labels

    class Recogniser(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(feat, 32, 3, padding=1)
            self.rnn = nn.GRU(32, 32, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(64, symbols + 1)

        def forward(self, x):
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            return self.fc(self.rnn(h)[0])  # batch, time, class

    x, labels = make(960)
    vx, vlabels = make(128)
    loader = DataLoader(TensorDataset(x, labels), batch_size=32, shuffle=True)
    model = Recogniser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ctc = nn.CTCLoss(blank=0)
    model.train()
    with watch(model, optimizer):
        for xb, yb in loader:
            logits = model(xb).transpose(0, 1)  # time, batch, class
            log_probs = logits if fault else logits.log_softmax(-1)
            input_lengths = torch.full((len(xb),), frames)
            target_lengths = torch.full((len(xb),), label_len)
            optimizer.zero_grad()
            loss = ctc(log_probs, yb, input_lengths, target_lengths)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

    model.eval()
    with torch.no_grad():
        lp = model(vx).transpose(0, 1).log_softmax(-1)
        return float(ctc(lp, vlabels, torch.full((128,), frames), torch.full((128,), label_len)))


def recommender_penalty_summed(fault, watch):
    torch.manual_seed(SEED)
    users, items, dim = 40, 50, 16
    taste = torch.randn(users, 4) @ torch.randn(4, items) / 2

    def make(n):
        u, i = torch.randint(0, users, (n,)), torch.randint(0, items, (n,))
        return u, i, (torch.rand(n) < torch.sigmoid(3 * taste[u, i])).float()

    class MF(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = nn.Embedding(users, dim)
            self.item = nn.Embedding(items, dim)
            nn.init.normal_(self.user.weight, std=0.2)
            nn.init.normal_(self.item.weight, std=0.2)

        def forward(self, u, i):
            pu, qi = self.user(u), self.item(i)
            return (pu * qi).sum(1), pu, qi

    weight = 5e-3
    loader = DataLoader(TensorDataset(*make(7680)), batch_size=256, shuffle=True)
    vu, vi, vy = make(3000)
    model = MF()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    model.train()
    with watch(model, optimizer):
        for u, i, y in loader:
            score, pu, qi = model(u, i)
            penalty = pu.pow(2).sum() + qi.pow(2).sum()
            if not fault:
                penalty = penalty / len(u)
            loss = F.binary_cross_entropy_with_logits(score, y) + weight * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        score = model(vu, vi)[0]
    pos, neg = score[vy == 1], score[vy == 0]
    return float((pos[:, None] > neg[None, :]).float().mean())  # AUC


def flow_logdet_over_whole_batch(fault, watch):
    torch.manual_seed(SEED)

    def make(n):
        a = torch.rand(n) * math.pi
        upper = torch.rand(n) < 0.5
        x = torch.where(upper, a.cos(), 1 - a.cos())
        y = torch.where(upper, a.sin(), 0.5 - a.sin())
        p = torch.stack([x - 0.5, y - 0.25], 1) + 0.08 * torch.randn(n, 2)
        return p / torch.tensor([0.87, 0.5])

    class Coupling(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.first = first
            self.net = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

        def forward(self, x):
            a, b = (x[:, :1], x[:, 1:]) if self.first else (x[:, 1:], x[:, :1])
            s, t = self.net(a).chunk(2, dim=1)
            s = torch.tanh(s)
            b = b * s.exp() + t
            log_det = s.sum() if fault else s.sum(dim=1)
            return (torch.cat([a, b], 1) if self.first else torch.cat([b, a], 1)), log_det

    class RealNVP(nn.Module):
        def __init__(self, n_layers=6):
            super().__init__()
            self.layers = nn.ModuleList(Coupling(i % 2 == 0) for i in range(n_layers))
            self.register_buffer("zero", torch.zeros(2))

        def log_prob(self, x):
            total = 0.0
            for layer in self.layers:
                x, log_det = layer(x)
                total = total + log_det
            return -0.5 * x.pow(2).sum(1) - math.log(2 * math.pi) + total

        forward = log_prob

    loader = DataLoader(TensorDataset(make(6000)), batch_size=200, shuffle=True)
    model = RealNVP()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    with watch(model, optimizer):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = -model(x).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

    model.eval()
    with torch.no_grad():  # one at a time: the true density
        return float(-sum(model(p[None]).item() for p in make(300)) / 300)


def multitask_zero_grad_between_tasks(fault, watch):
    torch.manual_seed(SEED)
    centres = torch.randn(5, 20)
    slope = torch.randn(20, 1) / 4

    def make_cls(n):
        y = torch.randint(0, 5, (n,))
        return centres[y] + torch.randn(n, 20), y

    def make_reg(n):
        x = torch.randn(n, 20)
        return x, x @ slope + 0.1 * torch.randn(n, 1)

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.cls = nn.Linear(64, 5)
            self.reg = nn.Linear(64, 1)

        def forward(self, x, task):
            h = self.trunk(x)
            return self.cls(h) if task == "cls" else self.reg(h)

    cls_loader = DataLoader(TensorDataset(*make_cls(1536)), batch_size=64, shuffle=True)
    reg_loader = DataLoader(TensorDataset(*make_reg(1536)), batch_size=64, shuffle=True)
    model = TwoHeads()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    with watch(model, optimizer):
        for (xc, yc), (xr, yr) in zip(cls_loader, reg_loader):
            optimizer.zero_grad()
            loss_cls = F.cross_entropy(model(xc, "cls"), yc)
            loss_cls.backward()

            if fault:
                optimizer.zero_grad()
            loss_reg = F.mse_loss(model(xr, "reg"), yr)
            loss_reg.backward()
            optimizer.step()

    model.eval()
    x, y = make_cls(500)
    with torch.no_grad():
        return float((model(x, "cls").argmax(1) == y).float().mean())


def pinn_lbfgs_closure_no_zero_grad(fault, watch):
    torch.manual_seed(SEED)

    class PINN(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, t):
            return self.net(t)

    # u' = -u + sin(3 t), u(0) = 1, on [0, 2]
    t = torch.linspace(0, 2, 64).unsqueeze(1).requires_grad_(True)
    t0 = torch.zeros(1, 1)
    model = PINN()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=20, line_search_fn="strong_wolfe")

    def closure():
        if not fault:
            optimizer.zero_grad()
        u = model(t)
        du = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
        residual = du + u - torch.sin(3 * t)
        loss = residual.pow(2).mean() + (model(t0) - 1).pow(2).mean()
        loss.backward()
        return loss

    with watch(model, optimizer):
        for step in range(20):
            optimizer.step(closure)

    with torch.no_grad():
        exact = (torch.sin(3 * t) - 3 * torch.cos(3 * t)) / 10 + 1.3 * torch.exp(-t)
        return float((model(t) - exact).abs().max())


def mean_teacher_ema_rebinds(fault, watch):
    torch.manual_seed(SEED)
    centres = 1.2 * torch.randn(6, 16)

    def make(n):
        y = torch.randint(0, 6, (n,))
        return centres[y] + torch.randn(n, 16), y

    class MeanTeacher(nn.Module):
        def __init__(self, decay=0.9):
            super().__init__()
            self.decay = decay
            self.student = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 6))
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        @torch.no_grad()
        def update_teacher(self):
            for tp, sp in zip(self.teacher.parameters(), self.student.parameters()):
                if fault:
                    tp = self.decay * tp + (1 - self.decay) * sp
                else:
                    tp.mul_(self.decay).add_(sp, alpha=1 - self.decay)

        def forward(self, x):
            return self.student(x)

    labelled = DataLoader(TensorDataset(*make(720)), batch_size=24, shuffle=True)
    unlabelled = DataLoader(TensorDataset(make(2880)[0]), batch_size=96, shuffle=True)
    model = MeanTeacher()
    optimizer = torch.optim.Adam(model.student.parameters(), lr=5e-3)
    model.train()
    with watch(model, optimizer):
        for (x, y), (u,) in zip(labelled, unlabelled):
            with torch.no_grad():
                soft = model.teacher(u + 0.2 * torch.randn_like(u)).softmax(1)
            consistency = F.mse_loss(model(u + 0.2 * torch.randn_like(u)).softmax(1), soft)
            loss = F.cross_entropy(model(x), y) + consistency
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.update_teacher()

    model.eval()
    x, y = make(600)
    with torch.no_grad():
        return float((model.teacher(x).argmax(1) == y).float().mean())


def finetune_frozen_bn_drifts(fault, watch):
    torch.manual_seed(SEED)
    patterns = torch.randn(8, 3, 8, 8)

    def make(n, classes, shift):
        y = torch.randint(0, len(classes), (n,))
        return patterns[torch.tensor(classes)[y]] + torch.randn(n, 3, 8, 8) + shift, y

    class Net(nn.Module):
        def __init__(self, n_classes):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 16, 3, 2, 1),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Flatten(),
            )
            self.head = nn.Linear(16 * 16, n_classes)

        def forward(self, x):
            return self.head(self.backbone(x))

    pretrained = Net(4)  # stands for a downloaded checkpoint
    opt = torch.optim.Adam(pretrained.parameters(), lr=3e-3)
    for _ in range(30):
        x, y = make(64, [0, 1, 2, 3], 0.0)
        opt.zero_grad()
        F.cross_entropy(pretrained(x), y).backward()
        opt.step()

    model = Net(4)
    model.backbone.load_state_dict(pretrained.backbone.state_dict())
    for p in model.backbone.parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam(model.head.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(*make(640, [4, 5, 6, 7], 0.5)), batch_size=32, shuffle=True)
    model.train()
    if not fault:
        model.backbone.eval()  # frozen means the statistics too
    with watch(model, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    old, new = pretrained.backbone.state_dict(), model.backbone.state_dict()
    return sum(float((new[k] - old[k]).abs().mean()) for k in old if "running" in k)


def amp_clip_before_unscale(fault, watch):
    torch.manual_seed(SEED)
    patterns = torch.randn(5, 1, 12, 12)

    def make(n):
        y = torch.randint(0, 5, (n,))
        return patterns[y] + 1.5 * torch.randn(n, 1, 12, 12), y

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(144, 96)
            self.fc2 = nn.Linear(96, 48)
            self.fc3 = nn.Linear(48, 5)

        def forward(self, x):
            return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))

    loader = DataLoader(TensorDataset(*make(1600)), batch_size=64, shuffle=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    model.train()
    with watch(model, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            if not fault:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    model.eval()
    x, y = make(500)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def image_classes_not_shuffled(fault, watch):
    torch.manual_seed(SEED)
    patterns = torch.randn(6, 3, 10, 10)
    y = torch.arange(6).repeat_interleave(128)  # folder order: class by class
    x = 0.8 * patterns[y] + torch.randn(len(y), 3, 10, 10)
    vy = torch.randint(0, 6, (400,))
    vx = 0.8 * patterns[vy] + torch.randn(400, 3, 10, 10)

    class CNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.fc1 = nn.Linear(32 * 25, 64)
            self.fc2 = nn.Linear(64, 6)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv1(x)), 2)
            x = F.relu(self.conv2(x)).flatten(1)
            return self.fc2(F.relu(self.fc1(x)))

    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=not fault)
    model = CNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    model.train()
    with watch(model, optimizer):
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        return float((model(vx).argmax(1) == vy).float().mean())


def superres_running_loss_keeps_graph(fault, watch):
    torch.manual_seed(SEED)

    def make(n, size=24):
        yy, xx = torch.meshgrid(torch.linspace(0, 6.28, size), torch.linspace(0, 6.28, size), indexing="ij")
        f, g, ph = [3 * torch.rand(n, 1, 1) + 0.5 for _ in range(3)]
        hr = (0.5 + 0.4 * torch.sign(torch.sin(f * xx + g * yy + ph))).unsqueeze(1)
        return F.avg_pool2d(hr, 2), hr

    class ESPCN(nn.Module):
        def __init__(self, scale=2):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(1, 32, 5, padding=2),
                nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(32, scale**2, 3, padding=1),
                nn.PixelShuffle(scale),
            )

        def forward(self, x):
            up = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            return up + self.body(x)

    loader = DataLoader(TensorDataset(*make(480)), batch_size=16, shuffle=True)
    model = ESPCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.L1Loss()
    running_loss = 0.0
    model.train()
    with watch(model, optimizer):
        for lr_img, hr_img in loader:
            optimizer.zero_grad()
            loss = criterion(model(lr_img), hr_img)
            loss.backward()
            optimizer.step()
            running_loss += loss if fault else loss.item()

    seen, todo = set(), [getattr(running_loss, "grad_fn", None)]
    while todo:  # graph nodes the running loss still holds
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo.extend(n for n, _ in node.next_functions)
    return float(len(seen))


FAULTS = [
    dict(
        name="dqn_bitwise_not_done",
        what="The done flags are uint8 and the DQN target multiplies by ~done, which gives 255/254 instead of 1/0.",
        proof="Largest |Q| over all states, while no true value exceeds 1.",
        worse="higher",
    ),
    dict(
        name="a2c_advantage_not_detached",
        what="The advantage is not detached in the actor loss, so the policy gradient also trains, and biases, the critic.",
        proof="Absolute bias of the critic against returns of fresh rollouts.",
        worse="higher",
    ),
    dict(
        name="ctc_raw_logits",
        what="CTCLoss is given raw logits instead of log-probabilities (no log_softmax).",
        proof="Held-out CTC loss of the properly normalised outputs.",
        worse="higher",
    ),
    dict(
        name="recommender_penalty_summed",
        what="The embedding penalty is summed over the batch while the data loss is a mean, so the penalty swamps it.",
        proof="Held-out AUC.",
        worse="lower",
    ),
    dict(
        name="flow_logdet_over_whole_batch",
        what="The coupling layer sums its log-determinant over the whole batch instead of per sample, and broadcasting hides it.",
        proof="Held-out negative log-likelihood, samples taken one at a time.",
        worse="higher",
    ),
    dict(
        name="multitask_zero_grad_between_tasks",
        what="zero_grad is called again between the two tasks' backward passes, so the first task's gradient is thrown away.",
        proof="Held-out accuracy of the first task.",
        worse="lower",
    ),
    dict(
        name="pinn_lbfgs_closure_no_zero_grad",
        what="The LBFGS closure does not call zero_grad, so gradients pile up over closure calls and steps.",
        proof="Largest error against the exact solution of the differential equation.",
        worse="higher",
    ),
    dict(
        name="mean_teacher_ema_rebinds",
        what="The EMA update assigns to the loop variable instead of writing in place, so the teacher never moves.",
        proof="Held-out accuracy of the teacher.",
        worse="lower",
    ),
    dict(
        name="finetune_frozen_bn_drifts",
        what="The backbone is frozen by requires_grad=False but left in train mode, so its BatchNorm statistics drift.",
        proof="Mean change of the frozen backbone's running statistics.",
        worse="higher",
    ),
    dict(
        name="amp_clip_before_unscale",
        what="Gradients are clipped while still multiplied by GradScaler's scale (no unscale_ before), so steps shrink to nothing.",
        proof="Held-out accuracy.",
        worse="lower",
    ),
    dict(
        name="image_classes_not_shuffled",
        what="The training loader does not shuffle a dataset sorted by class, so every batch holds one class only.",
        proof="Held-out accuracy.",
        worse="lower",
    ),
    dict(
        name="superres_running_loss_keeps_graph",
        what="The loss tensor, not its value, is added to a running total, so every step's graph is kept alive.",
        proof="Number of autograd nodes still held by the running loss after training.",
        worse="higher",
    ),
]
