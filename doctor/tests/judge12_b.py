"""Twenty-two small programs of everything but pictures, each with one bug that people often make, and a mended twin, by
somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""
# ruff: noqa

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)


# ----------------------------------------------------------------------------------------------
# shared helpers: evaluation context and synthetic data
# ----------------------------------------------------------------------------------------------
class quiet:
    """Evaluate without leaving a trace: eval mode, no grad, RNG and train/eval flags restored."""

    def __init__(self, *modules, grad=False):
        self.modules = modules
        self.grad = grad

    def __enter__(self):
        self.rng = torch.get_rng_state()
        self.flags = [(m, m.training) for mod in self.modules for m in mod.modules()]
        for mod in self.modules:
            mod.eval()
        self.ctx = torch.set_grad_enabled(self.grad)
        self.ctx.__enter__()
        torch.manual_seed(12345)

    def __exit__(self, *exc):
        self.ctx.__exit__(*exc)
        for m, flag in self.flags:
            m.training = flag
        torch.set_rng_state(self.rng)


def cartpole_step(s, a):
    """Vectorised CartPole: s (N,4), a (N,) in {0,1} -> next state, fallen (bool)."""
    x, xd, th, thd = s.unbind(1)
    force = torch.where(a == 1, 10.0, -10.0)
    cos, sin = th.cos(), th.sin()
    tmp = (force + 0.05 * thd**2 * sin) / 1.1
    thacc = (9.8 * sin - cos * tmp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    xacc = tmp - 0.05 * thacc * cos / 1.1
    s2 = torch.stack([x + 0.02 * xd, xd + 0.02 * xacc, th + 0.02 * thd, thd + 0.02 * thacc], 1)
    fallen = (s2[:, 0].abs() > 2.4) | (s2[:, 2].abs() > 0.2095)
    return s2, fallen


def pointmass_reset(n, g=None):
    pos = torch.rand(n, 2, generator=g) * 2 - 1
    vel = (torch.rand(n, 2, generator=g) * 2 - 1) * 0.3
    return torch.cat([pos, vel], 1)


def pointmass_step(s, a):
    """s (N,4) = position, velocity; a (N,2) force. Reward: minus the distance to the origin."""
    pos, vel = s[:, :2], s[:, 2:]
    vel = 0.8 * vel + 0.2 * a.clamp(-1, 1)
    pos = (pos + 0.5 * vel).clamp(-2, 2)
    return torch.cat([pos, vel], 1), -pos.norm(dim=1)


def load_curve(n=3000):
    """Hourly multivariate series: load, temperature, price, wind."""
    g = torch.Generator().manual_seed(1)
    t = torch.arange(n).float()
    base = (
        torch.sin(2 * math.pi * t / 24)
        + 0.7 * torch.sin(2 * math.pi * t / 10.3 + 1)
        + 0.6 * torch.sin(2 * math.pi * t / 6.1 + 2)
    )
    temp = torch.sin(2 * math.pi * (t - 3) / 24) + 0.4 * torch.randn(n, generator=g)
    price = 0.5 * base + 0.5 * torch.randn(n, generator=g)
    wind = torch.randn(n, generator=g)
    load = base + 0.15 * torch.randn(n, generator=g)
    return torch.stack([900 + 120 * load, 12 + 6 * temp, 45 + 9 * price, 6 + 2 * wind], 1)


def oscillators(n, length, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length).float()
    f = 0.04 + 0.12 * torch.rand(n, 1, generator=g)
    ph = 2 * math.pi * torch.rand(n, 1, generator=g)
    amp = 0.8 + 0.8 * torch.rand(n, 1, generator=g)
    x = amp * torch.sin(2 * math.pi * f * t + ph) + 0.1 * torch.randn(n, length, generator=g)
    return x.unsqueeze(-1)


def survival_table(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    risk = 1.0 * x[:, 0] - 0.8 * x[:, 1] + 0.7 * x[:, 2] * x[:, 3] + 0.5 * x[:, 4]
    t_event = -torch.log(torch.rand(n, generator=g).clamp_min(1e-6)) * torch.exp(-risk) * 24
    t_cens = -torch.log(torch.rand(n, generator=g).clamp_min(1e-6)) * 60
    return x, torch.minimum(t_event, t_cens), (t_event <= t_cens).float()


def churn_table(n, seed):
    g = torch.Generator().manual_seed(seed)
    num = torch.randn(n, 8, generator=g)
    contract = torch.randint(0, 4, (n,), generator=g)
    region = torch.randint(0, 10, (n,), generator=g)
    c_eff = torch.tensor([1.2, 0.2, -0.6, -1.4])[contract]
    r_eff = torch.linspace(-0.8, 0.8, 10)[region]
    z = 1.5 * (1.2 * num[:, 0] - num[:, 1] + 0.8 * num[:, 2] * (num[:, 3] > 0) + c_eff + r_eff) - 0.5
    churned = torch.rand(n, generator=g) < torch.sigmoid(z)
    return num, torch.stack([contract, region], 1), churned


def ratings_log(n_users=150, n_items=100, n=9000):
    g = torch.Generator().manual_seed(4)
    pu, qi = torch.randn(n_users, 3, generator=g), torch.randn(n_items, 3, generator=g)
    bu, bi = 0.5 * torch.randn(n_users, generator=g), 0.5 * torch.randn(n_items, generator=g)
    u = torch.randint(0, n_users, (n,), generator=g)
    i = torch.randint(0, n_items, (n,), generator=g)
    r = 3.3 + bu[u] + bi[i] + 0.45 * (pu[u] * qi[i]).sum(1) + 0.2 * torch.randn(n, generator=g)
    return u, i, (r * 2).round().div(2).clamp(0.5, 5.0)  # half stars


def citation_graph(seed, n=240, k=4, feats=32, p_in=0.09, p_out=0.008, strength=0.45):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, k, (n,), generator=g)
    same = y[:, None] == y[None]
    u = torch.triu(torch.rand(n, n, generator=g), 1)
    upper = torch.triu((u < torch.where(same, p_in, p_out)).float(), 1)
    adj = upper + upper.T
    centre = torch.randn(k, feats, generator=g) * strength
    x = centre[y] + torch.randn(n, feats, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    perm = torch.randperm(n, generator=g)
    train = torch.zeros(n, dtype=torch.bool)
    train[perm[:100]] = True
    return x, adj, y, train, ~train


def accelerometer(n, seed, length=64, k=5):
    """Raw windows (n, 3, length) in m/s^2 around gravity, with an activity label."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, k, (n,), generator=g)
    t = torch.arange(length).float() / 32
    f = (1.0 + 0.7 * y.float() + 0.15 * torch.randn(n, generator=g))[:, None, None]
    ph = 2 * math.pi * torch.rand(n, 3, 1, generator=g)
    amp = 1.5 + 1.5 * torch.rand(n, 3, 1, generator=g)
    x = amp * torch.sin(2 * math.pi * f * t + ph) + 1.2 * torch.randn(n, 3, length, generator=g)
    return x + torch.tensor([0.4, 9.8, 1.5])[None, :, None], y


def keyword_spectrograms(n, seed, k=6, mels=20, frames=32):
    """Log-mel patches in dB (n, mels, frames): a keyword is a pair of gliding formants; noisy."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, k, (n,), generator=g)
    gc = torch.Generator().manual_seed(99)
    start, end = torch.rand(k, 2, generator=gc) * mels, torch.rand(k, 2, generator=gc) * mels
    t = torch.linspace(0, 1, frames)
    shift = torch.randn(n, 1, 1, generator=g) * 1.2
    path = start[y][:, :, None] * (1 - t) + end[y][:, :, None] * t + shift  # n,2,frames
    m = torch.arange(mels).float()[None, None, :, None]
    x = torch.exp(-0.5 * ((m - path[:, :, None, :]) / 1.3) ** 2).sum(1) * 2.0
    x = x + 4.2 * torch.randn(n, mels, frames, generator=g)
    return -45.0 + 9.0 * x, y


def polysomnography(n, seed, length=20, feats=16, k=5):
    """Nights cut into sequences of 30 s epochs; stages follow a sticky Markov chain."""
    g = torch.Generator().manual_seed(seed)
    gc = torch.Generator().manual_seed(77)
    proto = torch.randn(k, feats, generator=gc) * 0.7
    y = torch.zeros(n, length, dtype=torch.long)
    y[:, 0] = torch.randint(0, k, (n,), generator=g)
    for t in range(1, length):
        stay = torch.rand(n, generator=g) < 0.75
        y[:, t] = torch.where(stay, y[:, t - 1], torch.randint(0, k, (n,), generator=g))
    return proto[y] + torch.randn(n, length, feats, generator=g), y


PHONES = ["aa", "iy", "s", "t", "n", "k"]


def utterances(n, seed, frames=28, feats=12):
    """Frame features (n, frames, feats) and the phone string that was spoken (lists of names)."""
    g = torch.Generator().manual_seed(seed)
    gc = torch.Generator().manual_seed(55)
    proto = torch.randn(len(PHONES) + 1, feats, generator=gc)
    x, said, n_frames = torch.zeros(n, frames, feats), [], []
    for i in range(n):
        length = int(torch.randint(3, 6, (1,), generator=g))
        ids, t = [], int(torch.randint(0, 3, (1,), generator=g))
        track = [len(PHONES)] * t
        for _ in range(length):
            ids.append(int(torch.randint(0, len(PHONES), (1,), generator=g)))
            track += [ids[-1]] * int(torch.randint(2, 4, (1,), generator=g))
            track += [len(PHONES)] * int(torch.randint(1, 3, (1,), generator=g))
        track = track[:frames]
        x[i, : len(track)] = proto[track] + 0.45 * torch.randn(len(track), feats, generator=g)
        said.append([PHONES[j] for j in ids])
        n_frames.append(len(track))
    return x, said, torch.tensor(n_frames)


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
    return row[-1]


def antiderivatives(n, seed, sensors=40, points=20):
    """Random smooth functions u at the sensors, query points y, and the integral of u up to y."""
    g = torch.Generator().manual_seed(seed)
    xs = torch.linspace(0, 1, sensors)
    k = torch.arange(1, 5).float()
    a, b = torch.randn(n, 4, generator=g) / k, torch.randn(n, 4, generator=g) / k
    w = 2 * math.pi * k * 0.5
    u = (a[:, None] * torch.sin(w * xs[:, None]) + b[:, None] * torch.cos(w * xs[:, None])).sum(-1)
    y = torch.rand(n, points, generator=g)
    s = (a[:, None] * (1 - torch.cos(w * y[..., None])) / w + b[:, None] * torch.sin(w * y[..., None]) / w).sum(-1)
    return u, y.unsqueeze(-1), s / 0.48


def spectra(n, seed, bins=64):
    """Emission spectra: three lines whose heights, positions and widths vary."""
    g = torch.Generator().manual_seed(seed)
    grid = torch.linspace(0, 1, bins)
    pos = torch.tensor([0.2, 0.5, 0.8]) + 0.06 * torch.randn(n, 3, generator=g)
    h = 1.0 + 2.0 * torch.rand(n, 3, generator=g)
    x = (h[..., None] * torch.exp(-0.5 * ((grid - pos[..., None]) / 0.06) ** 2)).sum(1)
    return (x - 0.9) + 0.1 * torch.randn(n, bins, generator=g)


def device_traffic(n, seed, feats=24, k=10):
    g = torch.Generator().manual_seed(seed)
    gc = torch.Generator().manual_seed(31)
    w1, w2 = torch.randn(feats, 24, generator=gc) / feats**0.5, torch.randn(24, k, generator=gc)
    x = torch.randn(n, feats, generator=g)
    logits = 1.5 * torch.tanh(2 * x @ w1) @ w2
    y = torch.distributions.utils.probs_to_logits(torch.softmax(logits, 1))
    gumbel = -torch.log(-torch.log(torch.rand(n, k, generator=g).clamp(1e-6, 1 - 1e-6)))
    return x, (y + gumbel).argmax(1)


def sinusoid_task(g, shots):
    amp = 0.5 + 1.5 * torch.rand(1, generator=g)
    ph = math.pi * torch.rand(1, generator=g)
    x = torch.rand(2 * shots, 1, generator=g) * 6 - 3
    y = amp * torch.sin(x + ph)
    return x[:shots], y[:shots], x[shots:], y[shots:]


def clips_and_captions(n, seed, d_audio=40, vocab=60, latent=8):
    """Paired audio embeddings and bag-of-tags captions of the same scene."""
    g = torch.Generator().manual_seed(seed)
    gc = torch.Generator().manual_seed(17)
    wa, wt = torch.randn(latent, d_audio, generator=gc) / latent**0.5, torch.randn(latent, vocab, generator=gc)
    z = torch.randn(n, latent, generator=g)
    audio = torch.tanh(1.5 * z @ wa) + 0.3 * torch.randn(n, d_audio, generator=g)
    tags = (torch.rand(n, vocab, generator=g) < torch.sigmoid(1.5 * z @ wt - 0.5)).float()
    return (audio - audio.mean(0)) / audio.std(0), (tags - tags.mean(0)) / tags.std(0).clamp_min(0.1)


def machine_table(n, seed):
    """Machines in four operating regimes, each with a response of its own."""
    g = torch.Generator().manual_seed(seed)
    gc = torch.Generator().manual_seed(8)
    x = torch.randn(n, 8, generator=g)
    regime = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    w = torch.randn(4, 8, generator=gc)
    v = torch.randn(4, 8, generator=gc)
    y = (w[regime] * x).sum(1) / 3 + 0.7 * torch.sin((v[regime] * x).sum(1) / 2) + 0.1 * torch.randn(n, generator=g)
    return x, y.unsqueeze(1)


# ----------------------------------------------------------------------------------------------
# the cases
# ----------------------------------------------------------------------------------------------
CASES = [
    {
        "name": "dqn_no_terminal_mask",
        "steps": 2000,
        "what": "The TD target bootstraps through terminal states: the (1 - done) factor is missing, so falling over costs nothing and all values tend to r/(1-gamma).",
    },
    {
        "name": "ppo_advantage_broadcast",
        "steps": 200,
        "what": "Log-probs (and so the ratio) have shape (B,) while the advantages have shape (B,1); the surrogate silently broadcasts to (B,B) and every action is weighted by every advantage.",
    },
    {
        "name": "sac_sample_not_rsample",
        "steps": 1200,
        "what": "The SAC actor draws its action with sample() instead of rsample(), so no gradient of Q flows through the action into the policy.",
    },
    {
        "name": "td3bc_critic_never_zeroed",
        "steps": 1500,
        "what": "critic_optimizer.zero_grad() is missing: the critic's gradients add up over all steps (those of the actor loss included).",
    },
    {
        "name": "lstm_batch_axis",
        "steps": 500,
        "what": "nn.LSTM is built without batch_first=True but fed (batch, time, features): it recurs over the samples of the batch instead of over time.",
    },
    {
        "name": "transformer_no_causal_mask",
        "steps": 500,
        "what": "The forecasting transformer is trained on next-step targets at every position without a causal mask, so each position can read its own target from the input.",
    },
    {
        "name": "cox_sorted_ascending",
        "steps": 300,
        "what": "The Cox partial likelihood sorts durations in ascending order before the running log-sum-exp (descending=True is missing), so the risk sets hold those who left earlier, not those still at risk.",
    },
    {
        "name": "churn_minus_one_labels",
        "steps": 300,
        "what": "Labels are encoded -1/+1 but the loss is BCEWithLogitsLoss, which needs 0/1; the loss is unbounded below.",
    },
    {
        "name": "ratings_cast_to_long",
        "steps": 600,
        "what": "The dataset casts ratings scaled to (0,1] to torch.long, which truncates nearly all of them to 0.",
    },
    {
        "name": "gat_mask_not_minus_inf",
        "steps": 200,
        "what": "Non-edges are filled with 1e-9 instead of -1e9 before the attention softmax, so every node attends to all nodes of the graph.",
    },
    {
        "name": "gcn_randn_init",
        "steps": 100,
        "what": "The hand-written graph convolution initialises its weights with bare torch.randn (standard deviation 1 whatever the fan-in) instead of a fan-scaled initialisation such as Xavier.",
    },
    {
        "name": "har_inplace_normalise",
        "steps": 300,
        "what": "__getitem__ normalises a view of the stored windows in place, so each epoch normalises the already normalised data again and the data set is destroyed.",
    },
    {
        "name": "keyword_eval_mode_stuck",
        "steps": 200,
        "what": "validate() switches the model to eval and train() is called only once before the loop, so training goes on with dropout off and batch-norm statistics frozen.",
    },
    {
        "name": "sleep_view_not_permute",
        "steps": 300,
        "what": "Logits (B,T,C) are brought to (B,C,T) for the cross-entropy with view instead of permute, which scrambles time and class.",
    },
    {
        "name": "ctc_blank_collides",
        "steps": 500,
        "what": "Phone ids start at 0, which is the blank index of CTCLoss: the first phone and the blank share an output.",
    },
    {
        "name": "pinn_retain_not_create_graph",
        "steps": 1500,
        "what": "Derivatives for the PDE residual are taken with retain_graph=True instead of create_graph=True, so the residual term gives no gradient to the network.",
    },
    {
        "name": "deeponet_scheduler_per_batch",
        "steps": 800,
        "what": "A per-epoch ExponentialLR is stepped after every batch, so the rate decays to nothing within a few epochs.",
    },
    {
        "name": "vae_kl_sum_recon_mean",
        "steps": 600,
        "what": "The reconstruction term is averaged over the bins while the KL term is summed over the latent dimensions; the KL outweighs it and the posterior collapses.",
    },
    {
        "name": "distill_kl_wants_log",
        "steps": 400,
        "what": "KLDivLoss is fed the student's probabilities (softmax) instead of log-probabilities (log_softmax).",
    },
    {
        "name": "fomaml_grads_stay_on_clone",
        "steps": 500,
        "what": "The query loss is back-propagated into the deep-copied learner and the gradients are never copied to the meta-model, so the meta-optimizer has nothing to apply.",
    },
    {
        "name": "clap_temperature_multiplied",
        "steps": 400,
        "what": "Cosine similarities are multiplied by the temperature instead of divided by it, so the logits are almost constant.",
    },
    {
        "name": "moe_experts_plain_list",
        "steps": 500,
        "what": "The experts sit in a plain Python list instead of an nn.ModuleList: they are not registered and never reach the optimizer.",
    },
]


def dqn_no_terminal_mask_bad():
    torch.manual_seed(0)
    gamma, batch_size, n_envs, capacity, tau = 0.95, 128, 8, 20000, 0.01

    class QNet(nn.Module):
        def __init__(self, obs_dim, n_actions, hidden=64):
            super().__init__()
            self.fc1 = nn.Linear(obs_dim, hidden)
            self.fc2 = nn.Linear(hidden, hidden)
            self.out = nn.Linear(hidden, n_actions)

        def forward(self, x):
            x = F.relu(self.fc1(x))
            x = F.relu(self.fc2(x))
            return self.out(x)

    class ReplayBuffer:
        def __init__(self):
            self.s = torch.zeros(capacity, 4)
            self.a = torch.zeros(capacity, dtype=torch.long)
            self.r = torch.zeros(capacity)
            self.s2 = torch.zeros(capacity, 4)
            self.done = torch.zeros(capacity)
            self.ptr = self.size = 0

        def push(self, s, a, r, s2, done):
            idx = (torch.arange(len(s)) + self.ptr) % capacity
            self.s[idx], self.a[idx], self.r[idx], self.s2[idx], self.done[idx] = s, a, r, s2, done
            self.ptr = (self.ptr + len(s)) % capacity
            self.size = min(self.size + len(s), capacity)

        def sample(self, n):
            idx = torch.randint(0, self.size, (n,))
            return self.s[idx], self.a[idx], self.r[idx], self.s2[idx], self.done[idx]

    scale = torch.tensor([1.0, 1.0, 0.1, 1.0])  # observation scaling: pole angle is tiny
    q_net, target_net = QNet(4, 2), QNet(4, 2)
    target_net.load_state_dict(q_net.state_dict())
    target_net.requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-3)
    buffer = ReplayBuffer()
    env = {"s": (torch.rand(n_envs, 4) - 0.5) * 0.1, "t": torch.zeros(n_envs)}

    def interact(eps):
        s = env["s"]
        with torch.no_grad():
            greedy = q_net(s / scale).argmax(1)
        a = torch.where(torch.rand(n_envs) < eps, torch.randint(0, 2, (n_envs,)), greedy)
        s2, fallen = cartpole_step(s, a)
        buffer.push(s, a, torch.ones(n_envs), s2, fallen.float())
        env["t"] += 1
        over = fallen | (env["t"] >= 200)  # time limit: reset, but not a terminal state
        env["s"] = torch.where(over[:, None], (torch.rand(n_envs, 4) - 0.5) * 0.1, s2)
        env["t"] = torch.where(over, torch.zeros(n_envs), env["t"])

    for _ in range(150):
        interact(eps=1.0)

    def step(i):
        interact(eps=max(0.1, 1.0 - i / 600))
        s, a, r, s2, done = buffer.sample(batch_size)
        q = q_net(s / scale).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_q = target_net(s2 / scale).max(1).values
            target = r + gamma * next_q
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q_net.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            for p, tp in zip(q_net.parameters(), target_net.parameters()):
                tp.lerp_(p, tau)
        return loss.item()

    def probe():
        with quiet(q_net):
            s = (torch.rand(40, 4) - 0.5) * 0.1
            alive, length = torch.ones(40, dtype=torch.bool), torch.zeros(40)
            for _ in range(200):
                s, fallen = cartpole_step(s, q_net(s / scale).argmax(1))
                alive &= ~fallen
                length += alive.float()
            return 200.0 - length.mean().item()

    return {"model": q_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_no_terminal_mask_good():
    torch.manual_seed(0)
    gamma, batch_size, n_envs, capacity, tau = 0.95, 128, 8, 20000, 0.01

    class QNet(nn.Module):
        def __init__(self, obs_dim, n_actions, hidden=64):
            super().__init__()
            self.fc1 = nn.Linear(obs_dim, hidden)
            self.fc2 = nn.Linear(hidden, hidden)
            self.out = nn.Linear(hidden, n_actions)

        def forward(self, x):
            x = F.relu(self.fc1(x))
            x = F.relu(self.fc2(x))
            return self.out(x)

    class ReplayBuffer:
        def __init__(self):
            self.s = torch.zeros(capacity, 4)
            self.a = torch.zeros(capacity, dtype=torch.long)
            self.r = torch.zeros(capacity)
            self.s2 = torch.zeros(capacity, 4)
            self.done = torch.zeros(capacity)
            self.ptr = self.size = 0

        def push(self, s, a, r, s2, done):
            idx = (torch.arange(len(s)) + self.ptr) % capacity
            self.s[idx], self.a[idx], self.r[idx], self.s2[idx], self.done[idx] = s, a, r, s2, done
            self.ptr = (self.ptr + len(s)) % capacity
            self.size = min(self.size + len(s), capacity)

        def sample(self, n):
            idx = torch.randint(0, self.size, (n,))
            return self.s[idx], self.a[idx], self.r[idx], self.s2[idx], self.done[idx]

    scale = torch.tensor([1.0, 1.0, 0.1, 1.0])  # observation scaling: pole angle is tiny
    q_net, target_net = QNet(4, 2), QNet(4, 2)
    target_net.load_state_dict(q_net.state_dict())
    target_net.requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-3)
    buffer = ReplayBuffer()
    env = {"s": (torch.rand(n_envs, 4) - 0.5) * 0.1, "t": torch.zeros(n_envs)}

    def interact(eps):
        s = env["s"]
        with torch.no_grad():
            greedy = q_net(s / scale).argmax(1)
        a = torch.where(torch.rand(n_envs) < eps, torch.randint(0, 2, (n_envs,)), greedy)
        s2, fallen = cartpole_step(s, a)
        buffer.push(s, a, torch.ones(n_envs), s2, fallen.float())
        env["t"] += 1
        over = fallen | (env["t"] >= 200)  # time limit: reset, but not a terminal state
        env["s"] = torch.where(over[:, None], (torch.rand(n_envs, 4) - 0.5) * 0.1, s2)
        env["t"] = torch.where(over, torch.zeros(n_envs), env["t"])

    for _ in range(150):
        interact(eps=1.0)

    def step(i):
        interact(eps=max(0.1, 1.0 - i / 600))
        s, a, r, s2, done = buffer.sample(batch_size)
        q = q_net(s / scale).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_q = target_net(s2 / scale).max(1).values
            target = r + gamma * (1.0 - done) * next_q
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q_net.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            for p, tp in zip(q_net.parameters(), target_net.parameters()):
                tp.lerp_(p, tau)
        return loss.item()

    def probe():
        with quiet(q_net):
            s = (torch.rand(40, 4) - 0.5) * 0.1
            alive, length = torch.ones(40, dtype=torch.bool), torch.zeros(40)
            for _ in range(200):
                s, fallen = cartpole_step(s, q_net(s / scale).argmax(1))
                alive &= ~fallen
                length += alive.float()
            return 200.0 - length.mean().item()

    return {"model": q_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ppo_advantage_broadcast_bad():
    torch.manual_seed(0)
    n_envs, horizon, gamma, lam = 12, 16, 0.9, 0.95
    clip_coef, vf_coef, ent_coef, epochs, minibatch = 0.2, 0.5, 0.001, 3, 64

    def layer_init(layer, std=math.sqrt(2), bias=0.0):
        nn.init.orthogonal_(layer.weight, std)
        nn.init.constant_(layer.bias, bias)
        return layer

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic = nn.Sequential(
                layer_init(nn.Linear(4, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 1), std=1.0),
            )
            self.actor_mean = nn.Sequential(
                layer_init(nn.Linear(4, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 2), std=0.01),
            )
            self.actor_logstd = nn.Parameter(torch.full((1, 2), -0.5))

        def get_value(self, x):
            return self.critic(x)

        def get_action_and_value(self, x, action=None):
            mean = self.actor_mean(x)
            probs = Normal(mean, self.actor_logstd.expand_as(mean).exp())
            if action is None:
                action = probs.sample()
            logprob = probs.log_prob(action).sum(-1)
            return action, logprob, probs.entropy().sum(-1), self.critic(x)

    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=7e-4, eps=1e-5)

    def rollout():
        obs, actions, logps, rewards, values = [], [], [], [], []
        s = pointmass_reset(n_envs)
        with torch.no_grad():
            for _ in range(horizon):
                a, logp, _, v = agent.get_action_and_value(s)
                obs.append(s), actions.append(a), logps.append(logp), values.append(v)
                s, r = pointmass_step(s, a)
                rewards.append(0.25 * r.unsqueeze(1))
            next_value = agent.get_value(s)
        adv, last = [None] * horizon, torch.zeros(n_envs, 1)
        for t in reversed(range(horizon)):
            nxt = next_value if t == horizon - 1 else values[t + 1]
            delta = rewards[t] + gamma * nxt - values[t]
            last = delta + gamma * lam * last
            adv[t] = last
        adv, values = torch.stack(adv), torch.stack(values)
        return (torch.cat(obs), torch.cat(actions), torch.cat(logps), adv.reshape(-1, 1), (adv + values).reshape(-1, 1))

    def step(i):
        b_obs, b_act, b_logp, b_adv, b_ret = rollout()
        total, n = 0.0, 0
        for _ in range(epochs):
            for idx in torch.randperm(len(b_obs)).split(minibatch):
                _, logp, entropy, value = agent.get_action_and_value(b_obs[idx], b_act[idx])
                ratio = (logp - b_logp[idx]).exp()
                mb_adv = b_adv[idx]
                mb_adv = (mb_adv - mb_adv.mean()) / (mb_adv.std() + 1e-8)
                pg1 = -mb_adv * ratio
                pg2 = -mb_adv * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
                pg_loss = torch.max(pg1, pg2).mean()
                v_loss = F.mse_loss(value, b_ret[idx])
                loss = pg_loss - ent_coef * entropy.mean() + vf_coef * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                total, n = total + loss.item(), n + 1
        return total / n

    def probe():
        with quiet(agent):
            s, dist = pointmass_reset(64), 0.0
            for _ in range(horizon):
                s, r = pointmass_step(s, agent.actor_mean(s))
                dist -= r.mean().item()
            return dist / horizon

    return {"model": agent, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ppo_advantage_broadcast_good():
    torch.manual_seed(0)
    n_envs, horizon, gamma, lam = 12, 16, 0.9, 0.95
    clip_coef, vf_coef, ent_coef, epochs, minibatch = 0.2, 0.5, 0.001, 3, 64

    def layer_init(layer, std=math.sqrt(2), bias=0.0):
        nn.init.orthogonal_(layer.weight, std)
        nn.init.constant_(layer.bias, bias)
        return layer

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic = nn.Sequential(
                layer_init(nn.Linear(4, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 1), std=1.0),
            )
            self.actor_mean = nn.Sequential(
                layer_init(nn.Linear(4, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 2), std=0.01),
            )
            self.actor_logstd = nn.Parameter(torch.full((1, 2), -0.5))

        def get_value(self, x):
            return self.critic(x)

        def get_action_and_value(self, x, action=None):
            mean = self.actor_mean(x)
            probs = Normal(mean, self.actor_logstd.expand_as(mean).exp())
            if action is None:
                action = probs.sample()
            logprob = probs.log_prob(action).sum(-1, keepdim=True)
            return action, logprob, probs.entropy().sum(-1), self.critic(x)

    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=7e-4, eps=1e-5)

    def rollout():
        obs, actions, logps, rewards, values = [], [], [], [], []
        s = pointmass_reset(n_envs)
        with torch.no_grad():
            for _ in range(horizon):
                a, logp, _, v = agent.get_action_and_value(s)
                obs.append(s), actions.append(a), logps.append(logp), values.append(v)
                s, r = pointmass_step(s, a)
                rewards.append(0.25 * r.unsqueeze(1))
            next_value = agent.get_value(s)
        adv, last = [None] * horizon, torch.zeros(n_envs, 1)
        for t in reversed(range(horizon)):
            nxt = next_value if t == horizon - 1 else values[t + 1]
            delta = rewards[t] + gamma * nxt - values[t]
            last = delta + gamma * lam * last
            adv[t] = last
        adv, values = torch.stack(adv), torch.stack(values)
        return (torch.cat(obs), torch.cat(actions), torch.cat(logps), adv.reshape(-1, 1), (adv + values).reshape(-1, 1))

    def step(i):
        b_obs, b_act, b_logp, b_adv, b_ret = rollout()
        total, n = 0.0, 0
        for _ in range(epochs):
            for idx in torch.randperm(len(b_obs)).split(minibatch):
                _, logp, entropy, value = agent.get_action_and_value(b_obs[idx], b_act[idx])
                ratio = (logp - b_logp[idx]).exp()
                mb_adv = b_adv[idx]
                mb_adv = (mb_adv - mb_adv.mean()) / (mb_adv.std() + 1e-8)
                pg1 = -mb_adv * ratio
                pg2 = -mb_adv * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
                pg_loss = torch.max(pg1, pg2).mean()
                v_loss = F.mse_loss(value, b_ret[idx])
                loss = pg_loss - ent_coef * entropy.mean() + vf_coef * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                total, n = total + loss.item(), n + 1
        return total / n

    def probe():
        with quiet(agent):
            s, dist = pointmass_reset(64), 0.0
            for _ in range(horizon):
                s, r = pointmass_step(s, agent.actor_mean(s))
                dist -= r.mean().item()
            return dist / horizon

    return {"model": agent, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sac_sample_not_rsample_bad():
    torch.manual_seed(0)
    gamma, tau, alpha, batch_size, n_envs = 0.9, 0.01, 0.05, 128, 4

    def mlp(sizes):
        layers = []
        for a, b in zip(sizes[:-1], sizes[1:]):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    class SquashedGaussianActor(nn.Module):
        def __init__(self, obs_dim, act_dim, hidden=64):
            super().__init__()
            self.net = nn.Sequential(mlp([obs_dim, hidden, hidden]), nn.ReLU())
            self.mu_layer = nn.Linear(hidden, act_dim)
            self.log_std_layer = nn.Linear(hidden, act_dim)

        def forward(self, obs, deterministic=False):
            h = self.net(obs)
            mu, log_std = self.mu_layer(h), self.log_std_layer(h).clamp(-5, 2)
            pi = Normal(mu, log_std.exp())
            u = mu if deterministic else pi.sample()
            logp = pi.log_prob(u).sum(-1)
            logp = logp - (2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)
            return torch.tanh(u), logp

    class QFunction(nn.Module):
        def __init__(self, obs_dim, act_dim, hidden=64):
            super().__init__()
            self.q = mlp([obs_dim + act_dim, hidden, hidden, 1])

        def forward(self, obs, act):
            return self.q(torch.cat([obs, act], -1)).squeeze(-1)

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.pi = SquashedGaussianActor(4, 2)
            self.q1, self.q2 = QFunction(4, 2), QFunction(4, 2)

    ac = ActorCritic()
    ac_targ = copy.deepcopy(ac)
    for p in ac_targ.parameters():
        p.requires_grad = False
    q_params = list(ac.q1.parameters()) + list(ac.q2.parameters())
    pi_optimizer = torch.optim.Adam(ac.pi.parameters(), lr=1e-3)
    q_optimizer = torch.optim.Adam(q_params, lr=1e-3)

    class ReplayBuffer:
        def __init__(self, size=20000):
            self.o, self.o2 = torch.zeros(size, 4), torch.zeros(size, 4)
            self.a, self.r = torch.zeros(size, 2), torch.zeros(size)
            self.ptr, self.size, self.max_size = 0, 0, size

        def store(self, o, a, r, o2):
            idx = (torch.arange(len(o)) + self.ptr) % self.max_size
            self.o[idx], self.a[idx], self.r[idx], self.o2[idx] = o, a, r, o2
            self.ptr = (self.ptr + len(o)) % self.max_size
            self.size = min(self.size + len(o), self.max_size)

        def sample_batch(self, n):
            idx = torch.randint(0, self.size, (n,))
            return self.o[idx], self.a[idx], self.r[idx], self.o2[idx]

    replay = ReplayBuffer()
    s0, a0 = pointmass_reset(1000), torch.rand(1000, 2) * 2 - 1  # random actions to start from
    s1, r0 = pointmass_step(s0, a0)
    replay.store(s0, a0, r0, s1)
    env = {"s": pointmass_reset(n_envs), "t": 0}

    def step(i):
        with torch.no_grad():
            a, _ = ac.pi(env["s"])
        s2, r = pointmass_step(env["s"], a)
        replay.store(env["s"], a, r, s2)
        env["s"], env["t"] = s2, env["t"] + 1
        if env["t"] % 25 == 0:
            env["s"] = pointmass_reset(n_envs)

        o, a, r, o2 = replay.sample_batch(batch_size)
        with torch.no_grad():
            a2, logp_a2 = ac.pi(o2)
            q_targ = torch.min(ac_targ.q1(o2, a2), ac_targ.q2(o2, a2))
            backup = r + gamma * (q_targ - alpha * logp_a2)
        loss_q = F.mse_loss(ac.q1(o, a), backup) + F.mse_loss(ac.q2(o, a), backup)
        q_optimizer.zero_grad()
        loss_q.backward()
        q_optimizer.step()

        for p in q_params:
            p.requires_grad = False
        a_pi, logp_pi = ac.pi(o)
        q_pi = torch.min(ac.q1(o, a_pi), ac.q2(o, a_pi))
        loss_pi = (alpha * logp_pi - q_pi).mean()
        pi_optimizer.zero_grad()
        loss_pi.backward()
        pi_optimizer.step()
        for p in q_params:
            p.requires_grad = True

        with torch.no_grad():
            for p, p_targ in zip(ac.parameters(), ac_targ.parameters()):
                p_targ.data.mul_(1 - tau)
                p_targ.data.add_(tau * p.data)
        return loss_q.item()

    def probe():
        with quiet(ac):
            s, dist = pointmass_reset(64), 0.0
            for _ in range(25):
                a, _ = ac.pi(s, deterministic=True)
                s, r = pointmass_step(s, a)
                dist -= r.mean().item()
            return dist / 25

    return {"model": ac, "optimizer": (q_optimizer, pi_optimizer), "steps": 20, "step": step, "probe": probe}


def sac_sample_not_rsample_good():
    torch.manual_seed(0)
    gamma, tau, alpha, batch_size, n_envs = 0.9, 0.01, 0.05, 128, 4

    def mlp(sizes):
        layers = []
        for a, b in zip(sizes[:-1], sizes[1:]):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    class SquashedGaussianActor(nn.Module):
        def __init__(self, obs_dim, act_dim, hidden=64):
            super().__init__()
            self.net = nn.Sequential(mlp([obs_dim, hidden, hidden]), nn.ReLU())
            self.mu_layer = nn.Linear(hidden, act_dim)
            self.log_std_layer = nn.Linear(hidden, act_dim)

        def forward(self, obs, deterministic=False):
            h = self.net(obs)
            mu, log_std = self.mu_layer(h), self.log_std_layer(h).clamp(-5, 2)
            pi = Normal(mu, log_std.exp())
            u = mu if deterministic else pi.rsample()
            logp = pi.log_prob(u).sum(-1)
            logp = logp - (2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)
            return torch.tanh(u), logp

    class QFunction(nn.Module):
        def __init__(self, obs_dim, act_dim, hidden=64):
            super().__init__()
            self.q = mlp([obs_dim + act_dim, hidden, hidden, 1])

        def forward(self, obs, act):
            return self.q(torch.cat([obs, act], -1)).squeeze(-1)

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.pi = SquashedGaussianActor(4, 2)
            self.q1, self.q2 = QFunction(4, 2), QFunction(4, 2)

    ac = ActorCritic()
    ac_targ = copy.deepcopy(ac)
    for p in ac_targ.parameters():
        p.requires_grad = False
    q_params = list(ac.q1.parameters()) + list(ac.q2.parameters())
    pi_optimizer = torch.optim.Adam(ac.pi.parameters(), lr=1e-3)
    q_optimizer = torch.optim.Adam(q_params, lr=1e-3)

    class ReplayBuffer:
        def __init__(self, size=20000):
            self.o, self.o2 = torch.zeros(size, 4), torch.zeros(size, 4)
            self.a, self.r = torch.zeros(size, 2), torch.zeros(size)
            self.ptr, self.size, self.max_size = 0, 0, size

        def store(self, o, a, r, o2):
            idx = (torch.arange(len(o)) + self.ptr) % self.max_size
            self.o[idx], self.a[idx], self.r[idx], self.o2[idx] = o, a, r, o2
            self.ptr = (self.ptr + len(o)) % self.max_size
            self.size = min(self.size + len(o), self.max_size)

        def sample_batch(self, n):
            idx = torch.randint(0, self.size, (n,))
            return self.o[idx], self.a[idx], self.r[idx], self.o2[idx]

    replay = ReplayBuffer()
    s0, a0 = pointmass_reset(1000), torch.rand(1000, 2) * 2 - 1  # random actions to start from
    s1, r0 = pointmass_step(s0, a0)
    replay.store(s0, a0, r0, s1)
    env = {"s": pointmass_reset(n_envs), "t": 0}

    def step(i):
        with torch.no_grad():
            a, _ = ac.pi(env["s"])
        s2, r = pointmass_step(env["s"], a)
        replay.store(env["s"], a, r, s2)
        env["s"], env["t"] = s2, env["t"] + 1
        if env["t"] % 25 == 0:
            env["s"] = pointmass_reset(n_envs)

        o, a, r, o2 = replay.sample_batch(batch_size)
        with torch.no_grad():
            a2, logp_a2 = ac.pi(o2)
            q_targ = torch.min(ac_targ.q1(o2, a2), ac_targ.q2(o2, a2))
            backup = r + gamma * (q_targ - alpha * logp_a2)
        loss_q = F.mse_loss(ac.q1(o, a), backup) + F.mse_loss(ac.q2(o, a), backup)
        q_optimizer.zero_grad()
        loss_q.backward()
        q_optimizer.step()

        for p in q_params:
            p.requires_grad = False
        a_pi, logp_pi = ac.pi(o)
        q_pi = torch.min(ac.q1(o, a_pi), ac.q2(o, a_pi))
        loss_pi = (alpha * logp_pi - q_pi).mean()
        pi_optimizer.zero_grad()
        loss_pi.backward()
        pi_optimizer.step()
        for p in q_params:
            p.requires_grad = True

        with torch.no_grad():
            for p, p_targ in zip(ac.parameters(), ac_targ.parameters()):
                p_targ.data.mul_(1 - tau)
                p_targ.data.add_(tau * p.data)
        return loss_q.item()

    def probe():
        with quiet(ac):
            s, dist = pointmass_reset(64), 0.0
            for _ in range(25):
                a, _ = ac.pi(s, deterministic=True)
                s, r = pointmass_step(s, a)
                dist -= r.mean().item()
            return dist / 25

    return {"model": ac, "optimizer": (q_optimizer, pi_optimizer), "steps": 20, "step": step, "probe": probe}


def td3bc_critic_never_zeroed_bad():
    torch.manual_seed(0)
    gamma, tau, policy_noise, noise_clip, alpha_bc, batch_size = 0.9, 0.01, 0.2, 0.5, 2.5, 128

    # logged data of a mediocre, noisy controller
    g = torch.Generator().manual_seed(5)
    obs, act, rew, obs2 = [], [], [], []
    s = pointmass_reset(200, g)
    for t in range(20):
        a = (-0.4 * s[:, :2] + 0.6 * torch.randn(200, 2, generator=g)).clamp(-1, 1)
        s2, r = pointmass_step(s, a)
        obs.append(s), act.append(a), rew.append(r), obs2.append(s2)
        s = s2
    obs, act, rew, obs2 = torch.cat(obs), torch.cat(act), torch.cat(rew), torch.cat(obs2)
    mean, std = obs.mean(0), obs.std(0) + 1e-3
    obs, obs2 = (obs - mean) / std, (obs2 - mean) / std

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1, self.l2, self.l3 = nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 2)

        def forward(self, s):
            return torch.tanh(self.l3(F.relu(self.l2(F.relu(self.l1(s))))))

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1, self.l2, self.l3 = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 1)
            self.l4, self.l5, self.l6 = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, s, a):
            sa = torch.cat([s, a], 1)
            q1 = self.l3(F.relu(self.l2(F.relu(self.l1(sa)))))
            q2 = self.l6(F.relu(self.l5(F.relu(self.l4(sa)))))
            return q1, q2

        def Q1(self, s, a):
            return self.l3(F.relu(self.l2(F.relu(self.l1(torch.cat([s, a], 1))))))

    actor, critic = Actor(), Critic()
    actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def step(i):
        idx = torch.randint(0, len(obs), (batch_size,))
        state, action, reward, next_state = obs[idx], act[idx], rew[idx].unsqueeze(1), obs2[idx]
        with torch.no_grad():
            noise = (torch.randn_like(action) * policy_noise).clamp(-noise_clip, noise_clip)
            next_action = (actor_target(next_state) + noise).clamp(-1, 1)
            tq1, tq2 = critic_target(next_state, next_action)
            target_q = reward + gamma * torch.min(tq1, tq2)
        q1, q2 = critic(state, action)
        critic_loss = F.mse_loss(q1, target_q) + F.mse_loss(q2, target_q)
        critic_loss.backward()
        critic_optimizer.step()

        if i % 2 == 0:  # delayed policy updates
            pi = actor(state)
            Q = critic.Q1(state, pi)
            lmbda = alpha_bc / Q.abs().mean().detach()
            actor_loss = -lmbda * Q.mean() + F.mse_loss(pi, action)
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
            with torch.no_grad():
                for net, tgt in ((critic, critic_target), (actor, actor_target)):
                    for p, tp in zip(net.parameters(), tgt.parameters()):
                        tp.data.copy_(tau * p.data + (1 - tau) * tp.data)
        return critic_loss.item()

    def probe():
        with quiet(actor):
            s, dist = pointmass_reset(64), 0.0
            for _ in range(20):
                s, r = pointmass_step(s, actor((s - mean) / std))
                dist -= r.mean().item()
            return dist / 20

    return {
        "model": (actor, critic),
        "optimizer": (actor_optimizer, critic_optimizer),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def td3bc_critic_never_zeroed_good():
    torch.manual_seed(0)
    gamma, tau, policy_noise, noise_clip, alpha_bc, batch_size = 0.9, 0.01, 0.2, 0.5, 2.5, 128

    # logged data of a mediocre, noisy controller
    g = torch.Generator().manual_seed(5)
    obs, act, rew, obs2 = [], [], [], []
    s = pointmass_reset(200, g)
    for t in range(20):
        a = (-0.4 * s[:, :2] + 0.6 * torch.randn(200, 2, generator=g)).clamp(-1, 1)
        s2, r = pointmass_step(s, a)
        obs.append(s), act.append(a), rew.append(r), obs2.append(s2)
        s = s2
    obs, act, rew, obs2 = torch.cat(obs), torch.cat(act), torch.cat(rew), torch.cat(obs2)
    mean, std = obs.mean(0), obs.std(0) + 1e-3
    obs, obs2 = (obs - mean) / std, (obs2 - mean) / std

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1, self.l2, self.l3 = nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 2)

        def forward(self, s):
            return torch.tanh(self.l3(F.relu(self.l2(F.relu(self.l1(s))))))

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1, self.l2, self.l3 = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 1)
            self.l4, self.l5, self.l6 = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, s, a):
            sa = torch.cat([s, a], 1)
            q1 = self.l3(F.relu(self.l2(F.relu(self.l1(sa)))))
            q2 = self.l6(F.relu(self.l5(F.relu(self.l4(sa)))))
            return q1, q2

        def Q1(self, s, a):
            return self.l3(F.relu(self.l2(F.relu(self.l1(torch.cat([s, a], 1))))))

    actor, critic = Actor(), Critic()
    actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def step(i):
        idx = torch.randint(0, len(obs), (batch_size,))
        state, action, reward, next_state = obs[idx], act[idx], rew[idx].unsqueeze(1), obs2[idx]
        with torch.no_grad():
            noise = (torch.randn_like(action) * policy_noise).clamp(-noise_clip, noise_clip)
            next_action = (actor_target(next_state) + noise).clamp(-1, 1)
            tq1, tq2 = critic_target(next_state, next_action)
            target_q = reward + gamma * torch.min(tq1, tq2)
        q1, q2 = critic(state, action)
        critic_loss = F.mse_loss(q1, target_q) + F.mse_loss(q2, target_q)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        if i % 2 == 0:  # delayed policy updates
            pi = actor(state)
            Q = critic.Q1(state, pi)
            lmbda = alpha_bc / Q.abs().mean().detach()
            actor_loss = -lmbda * Q.mean() + F.mse_loss(pi, action)
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
            with torch.no_grad():
                for net, tgt in ((critic, critic_target), (actor, actor_target)):
                    for p, tp in zip(net.parameters(), tgt.parameters()):
                        tp.data.copy_(tau * p.data + (1 - tau) * tp.data)
        return critic_loss.item()

    def probe():
        with quiet(actor):
            s, dist = pointmass_reset(64), 0.0
            for _ in range(20):
                s, r = pointmass_step(s, actor((s - mean) / std))
                dist -= r.mean().item()
            return dist / 20

    return {
        "model": (actor, critic),
        "optimizer": (actor_optimizer, critic_optimizer),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def lstm_batch_axis_bad():
    torch.manual_seed(0)
    LOOKBACK, BATCH = 24, 32

    series = load_curve()
    n_train = 2400
    mu, sd = series[:n_train].mean(0), series[:n_train].std(0)
    series = (series - mu) / sd

    class WindowDataset(Dataset):
        def __init__(self, data):
            self.data = data

        def __len__(self):
            return len(self.data) - LOOKBACK

        def __getitem__(self, i):
            return self.data[i : i + LOOKBACK], self.data[i + LOOKBACK, 0]

    class LoadForecaster(nn.Module):
        def __init__(self, n_features, hidden_size=48, num_layers=1):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden_size, num_layers)
            self.fc = nn.Linear(hidden_size, 1)

        def forward(self, x):  # x: (batch, lookback, features)
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :]).squeeze(-1)

    loader = DataLoader(
        WindowDataset(series[:n_train]),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    model = LoadForecaster(series.shape[1])
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def batches():
        while True:
            yield from loader

    stream = batches()
    test = WindowDataset(series[n_train:])
    xt = torch.stack([test[i][0] for i in range(0, 512)])
    yt = torch.stack([test[i][1] for i in range(0, 512)])

    def step(i):
        model.train()
        x, y = next(stream)
        optimizer.zero_grad()
        pred = model(x)
        loss = criterion(pred, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            err = torch.cat([(model(x) - y).abs() for x, y in zip(xt.split(BATCH), yt.split(BATCH))])
            return err.mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_batch_axis_good():
    torch.manual_seed(0)
    LOOKBACK, BATCH = 24, 32

    series = load_curve()
    n_train = 2400
    mu, sd = series[:n_train].mean(0), series[:n_train].std(0)
    series = (series - mu) / sd

    class WindowDataset(Dataset):
        def __init__(self, data):
            self.data = data

        def __len__(self):
            return len(self.data) - LOOKBACK

        def __getitem__(self, i):
            return self.data[i : i + LOOKBACK], self.data[i + LOOKBACK, 0]

    class LoadForecaster(nn.Module):
        def __init__(self, n_features, hidden_size=48, num_layers=1):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden_size, num_layers, batch_first=True)
            self.fc = nn.Linear(hidden_size, 1)

        def forward(self, x):  # x: (batch, lookback, features)
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :]).squeeze(-1)

    loader = DataLoader(
        WindowDataset(series[:n_train]),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    model = LoadForecaster(series.shape[1])
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def batches():
        while True:
            yield from loader

    stream = batches()
    test = WindowDataset(series[n_train:])
    xt = torch.stack([test[i][0] for i in range(0, 512)])
    yt = torch.stack([test[i][1] for i in range(0, 512)])

    def step(i):
        model.train()
        x, y = next(stream)
        optimizer.zero_grad()
        pred = model(x)
        loss = criterion(pred, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            err = torch.cat([(model(x) - y).abs() for x, y in zip(xt.split(BATCH), yt.split(BATCH))])
            return err.mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def transformer_no_causal_mask_bad():
    torch.manual_seed(0)
    T, d_model = 32, 32

    class TimeSeriesTransformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_proj = nn.Linear(1, d_model)
            pos = torch.arange(T).unsqueeze(1)
            div = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
            pe = torch.zeros(1, T, d_model)
            pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(pos * div), torch.cos(pos * div)
            self.register_buffer("pe", pe)
            self.layers = nn.ModuleList(
                [
                    nn.TransformerEncoderLayer(
                        d_model, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True, norm_first=True
                    )
                    for _ in range(2)
                ]
            )
            self.norm = nn.LayerNorm(d_model)
            self.head = nn.Linear(d_model, 1)

        def forward(self, x):
            L = x.size(1)
            h = self.input_proj(x) + self.pe[:, :L]
            for layer in self.layers:
                h = layer(h)
            return self.head(self.norm(h))

    train = oscillators(2000, T + 1, seed=1)
    test = oscillators(300, T + 1, seed=2)
    model = TimeSeriesTransformer()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10))  # warm-up
    loader = DataLoader(
        TensorDataset(train), batch_size=32, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0)
    )
    state = {"it": iter(loader)}

    def step(i):
        model.train()
        try:
            (seq,) = next(state["it"])
        except StopIteration:
            state["it"] = iter(loader)
            (seq,) = next(state["it"])
        inp, tgt = seq[:, :-1], seq[:, 1:]
        loss = F.mse_loss(model(inp), tgt)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        return loss.item()

    def probe():  # one-step-ahead forecast beyond the end of the context
        with quiet(model):
            return F.mse_loss(model(test[:, :-1])[:, -1], test[:, -1]).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def transformer_no_causal_mask_good():
    torch.manual_seed(0)
    T, d_model = 32, 32

    class TimeSeriesTransformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_proj = nn.Linear(1, d_model)
            pos = torch.arange(T).unsqueeze(1)
            div = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
            pe = torch.zeros(1, T, d_model)
            pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(pos * div), torch.cos(pos * div)
            self.register_buffer("pe", pe)
            self.layers = nn.ModuleList(
                [
                    nn.TransformerEncoderLayer(
                        d_model, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True, norm_first=True
                    )
                    for _ in range(2)
                ]
            )
            self.norm = nn.LayerNorm(d_model)
            self.head = nn.Linear(d_model, 1)

        def forward(self, x):
            L = x.size(1)
            h = self.input_proj(x) + self.pe[:, :L]
            mask = nn.Transformer.generate_square_subsequent_mask(L)
            for layer in self.layers:
                h = layer(h, src_mask=mask)
            return self.head(self.norm(h))

    train = oscillators(2000, T + 1, seed=1)
    test = oscillators(300, T + 1, seed=2)
    model = TimeSeriesTransformer()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10))  # warm-up
    loader = DataLoader(
        TensorDataset(train), batch_size=32, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0)
    )
    state = {"it": iter(loader)}

    def step(i):
        model.train()
        try:
            (seq,) = next(state["it"])
        except StopIteration:
            state["it"] = iter(loader)
            (seq,) = next(state["it"])
        inp, tgt = seq[:, :-1], seq[:, 1:]
        loss = F.mse_loss(model(inp), tgt)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        return loss.item()

    def probe():  # one-step-ahead forecast beyond the end of the context
        with quiet(model):
            return F.mse_loss(model(test[:, :-1])[:, -1], test[:, -1]).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def cox_sorted_ascending_bad():
    torch.manual_seed(0)

    x_train, t_train, e_train = survival_table(1500, 1)
    x_test, t_test, e_test = survival_table(500, 2)

    class DeepSurv(nn.Module):
        def __init__(self, in_dim):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(in_dim, 32),
                nn.BatchNorm1d(32),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(32, 32),
                nn.BatchNorm1d(32),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(32, 1),
            )

        def forward(self, x):
            return self.net(x).squeeze(-1)

    def cox_ph_loss(log_h, durations, events):
        """Negative log partial likelihood; the risk set of a subject is a running log-sum-exp."""
        idx = durations.argsort()
        events, log_h = events[idx], log_h[idx]
        log_risk = torch.logcumsumexp(log_h, dim=0)
        return -((log_h - log_risk) * events).sum() / events.sum().clamp_min(1.0)

    model = DeepSurv(x_train.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    loader = DataLoader(
        TensorDataset(x_train, t_train, e_train),
        batch_size=128,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )

    def epochs():
        while True:
            for batch in loader:
                yield batch

    stream = epochs()

    def step(i):
        model.train()
        x, t, e = next(stream)
        log_h = model(x)
        loss = cox_ph_loss(log_h, t, e)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # 1 - Harrell's concordance
        with quiet(model):
            h = model(x_test)
            comparable = (t_test[:, None] < t_test[None]) & (e_test[:, None] > 0)
            right = (h[:, None] > h[None]) & comparable
            return 1.0 - (right.sum() / comparable.sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cox_sorted_ascending_good():
    torch.manual_seed(0)

    x_train, t_train, e_train = survival_table(1500, 1)
    x_test, t_test, e_test = survival_table(500, 2)

    class DeepSurv(nn.Module):
        def __init__(self, in_dim):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(in_dim, 32),
                nn.BatchNorm1d(32),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(32, 32),
                nn.BatchNorm1d(32),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(32, 1),
            )

        def forward(self, x):
            return self.net(x).squeeze(-1)

    def cox_ph_loss(log_h, durations, events):
        """Negative log partial likelihood; the risk set of a subject is a running log-sum-exp."""
        idx = durations.argsort(descending=True)
        events, log_h = events[idx], log_h[idx]
        log_risk = torch.logcumsumexp(log_h, dim=0)
        return -((log_h - log_risk) * events).sum() / events.sum().clamp_min(1.0)

    model = DeepSurv(x_train.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    loader = DataLoader(
        TensorDataset(x_train, t_train, e_train),
        batch_size=128,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )

    def epochs():
        while True:
            for batch in loader:
                yield batch

    stream = epochs()

    def step(i):
        model.train()
        x, t, e = next(stream)
        log_h = model(x)
        loss = cox_ph_loss(log_h, t, e)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # 1 - Harrell's concordance
        with quiet(model):
            h = model(x_test)
            comparable = (t_test[:, None] < t_test[None]) & (e_test[:, None] > 0)
            right = (h[:, None] > h[None]) & comparable
            return 1.0 - (right.sum() / comparable.sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def churn_minus_one_labels_bad():
    torch.manual_seed(0)

    num, cat, churned = churn_table(3000, 1)
    num_t, cat_t, churned_t = churn_table(1000, 2)
    mean, std = num.mean(0), num.std(0)

    class TabularModel(nn.Module):
        def __init__(self, cardinalities, n_numeric):
            super().__init__()
            self.embeds = nn.ModuleList([nn.Embedding(c, min(8, (c + 1) // 2)) for c in cardinalities])
            width = sum(e.embedding_dim for e in self.embeds) + n_numeric
            self.layers = nn.Sequential(
                nn.Linear(width, 64),
                nn.ReLU(),
                nn.BatchNorm1d(64),
                nn.Dropout(0.1),
                nn.Linear(64, 32),
                nn.ReLU(),
                nn.BatchNorm1d(32),
                nn.Dropout(0.1),
                nn.Linear(32, 1),
            )

        def forward(self, x_num, x_cat):
            emb = [e(x_cat[:, j]) for j, e in enumerate(self.embeds)]
            return self.layers(torch.cat(emb + [x_num], 1)).squeeze(1)

    def encode(flag):
        return torch.where(flag, 1.0, -1.0)

    ds = TensorDataset((num - mean) / std, cat, encode(churned))
    dl = DataLoader(ds, batch_size=64, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))
    model = TabularModel([4, 10], 8)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    it = {"dl": iter(dl)}

    def step(i):
        model.train()
        batch = next(it["dl"], None)
        if batch is None:
            it["dl"] = iter(dl)
            batch = next(it["dl"])
        x_num, x_cat, y = batch
        optimizer.zero_grad()
        loss = criterion(model(x_num, x_cat), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # log loss of the predicted churn probability
        with quiet(model):
            p = torch.sigmoid(model((num_t - mean) / std, cat_t)).clamp(1e-6, 1 - 1e-6)
            return F.binary_cross_entropy(p, churned_t.float()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def churn_minus_one_labels_good():
    torch.manual_seed(0)

    num, cat, churned = churn_table(3000, 1)
    num_t, cat_t, churned_t = churn_table(1000, 2)
    mean, std = num.mean(0), num.std(0)

    class TabularModel(nn.Module):
        def __init__(self, cardinalities, n_numeric):
            super().__init__()
            self.embeds = nn.ModuleList([nn.Embedding(c, min(8, (c + 1) // 2)) for c in cardinalities])
            width = sum(e.embedding_dim for e in self.embeds) + n_numeric
            self.layers = nn.Sequential(
                nn.Linear(width, 64),
                nn.ReLU(),
                nn.BatchNorm1d(64),
                nn.Dropout(0.1),
                nn.Linear(64, 32),
                nn.ReLU(),
                nn.BatchNorm1d(32),
                nn.Dropout(0.1),
                nn.Linear(32, 1),
            )

        def forward(self, x_num, x_cat):
            emb = [e(x_cat[:, j]) for j, e in enumerate(self.embeds)]
            return self.layers(torch.cat(emb + [x_num], 1)).squeeze(1)

    def encode(flag):
        return torch.where(flag, 1.0, 0.0)

    ds = TensorDataset((num - mean) / std, cat, encode(churned))
    dl = DataLoader(ds, batch_size=64, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))
    model = TabularModel([4, 10], 8)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    it = {"dl": iter(dl)}

    def step(i):
        model.train()
        batch = next(it["dl"], None)
        if batch is None:
            it["dl"] = iter(dl)
            batch = next(it["dl"])
        x_num, x_cat, y = batch
        optimizer.zero_grad()
        loss = criterion(model(x_num, x_cat), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # log loss of the predicted churn probability
        with quiet(model):
            p = torch.sigmoid(model((num_t - mean) / std, cat_t)).clamp(1e-6, 1 - 1e-6)
            return F.binary_cross_entropy(p, churned_t.float()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ratings_cast_to_long_bad():
    torch.manual_seed(0)

    users, items, stars = ratings_log()
    ratings = stars / 5.0  # scaled to (0, 1]

    class RatingsDataset(Dataset):
        def __init__(self, users, items, ratings):
            self.users, self.items, self.ratings = users.tolist(), items.tolist(), ratings.tolist()

        def __len__(self):
            return len(self.users)

        def __getitem__(self, idx):
            return (
                torch.tensor(self.users[idx], dtype=torch.long),
                torch.tensor(self.items[idx], dtype=torch.long),
                torch.tensor(self.ratings[idx], dtype=torch.long),
            )

    class MatrixFactorization(nn.Module):
        def __init__(self, n_users, n_items, n_factors=8):
            super().__init__()
            self.user_factors = nn.Embedding(n_users, n_factors)
            self.item_factors = nn.Embedding(n_items, n_factors)
            self.user_bias = nn.Embedding(n_users, 1)
            self.item_bias = nn.Embedding(n_items, 1)
            self.global_bias = nn.Parameter(torch.tensor(0.6))
            for emb in (self.user_factors, self.item_factors):
                nn.init.normal_(emb.weight, std=0.1)
            for emb in (self.user_bias, self.item_bias):
                nn.init.zeros_(emb.weight)

        def forward(self, u, i):
            dot = (self.user_factors(u) * self.item_factors(i)).sum(1)
            return self.global_bias + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1) + dot

    n_train = 8000
    loader = DataLoader(
        RatingsDataset(users[:n_train], items[:n_train], ratings[:n_train]),
        batch_size=256,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    model = MatrixFactorization(150, 100)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-5)
    loss_fn = nn.MSELoss()

    def forever():
        while True:
            yield from loader

    feed = forever()

    def step(i):
        u, m, r = next(feed)
        pred = model(u, m)
        loss = loss_fn(pred, r.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # RMSE in stars
        with quiet(model):
            pred = 5.0 * model(users[n_train:], items[n_train:])
            return (pred - stars[n_train:]).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ratings_cast_to_long_good():
    torch.manual_seed(0)

    users, items, stars = ratings_log()
    ratings = stars / 5.0  # scaled to (0, 1]

    class RatingsDataset(Dataset):
        def __init__(self, users, items, ratings):
            self.users, self.items, self.ratings = users.tolist(), items.tolist(), ratings.tolist()

        def __len__(self):
            return len(self.users)

        def __getitem__(self, idx):
            return (
                torch.tensor(self.users[idx], dtype=torch.long),
                torch.tensor(self.items[idx], dtype=torch.long),
                torch.tensor(self.ratings[idx], dtype=torch.float),
            )

    class MatrixFactorization(nn.Module):
        def __init__(self, n_users, n_items, n_factors=8):
            super().__init__()
            self.user_factors = nn.Embedding(n_users, n_factors)
            self.item_factors = nn.Embedding(n_items, n_factors)
            self.user_bias = nn.Embedding(n_users, 1)
            self.item_bias = nn.Embedding(n_items, 1)
            self.global_bias = nn.Parameter(torch.tensor(0.6))
            for emb in (self.user_factors, self.item_factors):
                nn.init.normal_(emb.weight, std=0.1)
            for emb in (self.user_bias, self.item_bias):
                nn.init.zeros_(emb.weight)

        def forward(self, u, i):
            dot = (self.user_factors(u) * self.item_factors(i)).sum(1)
            return self.global_bias + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1) + dot

    n_train = 8000
    loader = DataLoader(
        RatingsDataset(users[:n_train], items[:n_train], ratings[:n_train]),
        batch_size=256,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    model = MatrixFactorization(150, 100)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-5)
    loss_fn = nn.MSELoss()

    def forever():
        while True:
            yield from loader

    feed = forever()

    def step(i):
        u, m, r = next(feed)
        pred = model(u, m)
        loss = loss_fn(pred, r.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # RMSE in stars
        with quiet(model):
            pred = 5.0 * model(users[n_train:], items[n_train:])
            return (pred - stars[n_train:]).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gat_mask_not_minus_inf_bad():
    torch.manual_seed(0)
    x, adj, y, train_mask, test_mask = citation_graph(seed=3)
    adj = adj + torch.eye(len(adj))

    class GraphAttentionLayer(nn.Module):
        def __init__(self, in_f, out_f, dropout=0.3, alpha=0.2, concat=True):
            super().__init__()
            self.W = nn.Parameter(torch.empty(in_f, out_f))
            self.a = nn.Parameter(torch.empty(2 * out_f, 1))
            nn.init.xavier_uniform_(self.W)
            nn.init.xavier_uniform_(self.a)
            self.out_f, self.dropout, self.concat = out_f, dropout, concat
            self.leakyrelu = nn.LeakyReLU(alpha)

        def forward(self, h, adj):
            Wh = h @ self.W
            e = self.leakyrelu(Wh @ self.a[: self.out_f] + (Wh @ self.a[self.out_f :]).T)
            attention = e.masked_fill(adj == 0, 1e-9)
            attention = F.softmax(attention, dim=1)
            attention = F.dropout(attention, self.dropout, training=self.training)
            h_prime = attention @ Wh
            return F.elu(h_prime) if self.concat else h_prime

    class GAT(nn.Module):
        def __init__(self, nfeat, nhid, nclass, nheads=4, dropout=0.3):
            super().__init__()
            self.dropout = dropout
            self.heads = nn.ModuleList([GraphAttentionLayer(nfeat, nhid) for _ in range(nheads)])
            self.out_att = GraphAttentionLayer(nhid * nheads, nclass, concat=False)

        def forward(self, x, adj):
            x = F.dropout(x, self.dropout, training=self.training)
            x = torch.cat([att(x, adj) for att in self.heads], dim=1)
            x = F.dropout(x, self.dropout, training=self.training)
            return F.log_softmax(self.out_att(x, adj), dim=1)

    model = GAT(x.shape[1], 8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)

    def step(epoch):
        model.train()
        optimizer.zero_grad()
        output = model(x, adj)
        loss_train = F.nll_loss(output[train_mask], y[train_mask])
        loss_train.backward()
        optimizer.step()
        return loss_train.item()

    def probe():
        with quiet(model):
            return (model(x, adj).argmax(1)[test_mask] != y[test_mask]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gat_mask_not_minus_inf_good():
    torch.manual_seed(0)
    x, adj, y, train_mask, test_mask = citation_graph(seed=3)
    adj = adj + torch.eye(len(adj))

    class GraphAttentionLayer(nn.Module):
        def __init__(self, in_f, out_f, dropout=0.3, alpha=0.2, concat=True):
            super().__init__()
            self.W = nn.Parameter(torch.empty(in_f, out_f))
            self.a = nn.Parameter(torch.empty(2 * out_f, 1))
            nn.init.xavier_uniform_(self.W)
            nn.init.xavier_uniform_(self.a)
            self.out_f, self.dropout, self.concat = out_f, dropout, concat
            self.leakyrelu = nn.LeakyReLU(alpha)

        def forward(self, h, adj):
            Wh = h @ self.W
            e = self.leakyrelu(Wh @ self.a[: self.out_f] + (Wh @ self.a[self.out_f :]).T)
            attention = e.masked_fill(adj == 0, -1e9)
            attention = F.softmax(attention, dim=1)
            attention = F.dropout(attention, self.dropout, training=self.training)
            h_prime = attention @ Wh
            return F.elu(h_prime) if self.concat else h_prime

    class GAT(nn.Module):
        def __init__(self, nfeat, nhid, nclass, nheads=4, dropout=0.3):
            super().__init__()
            self.dropout = dropout
            self.heads = nn.ModuleList([GraphAttentionLayer(nfeat, nhid) for _ in range(nheads)])
            self.out_att = GraphAttentionLayer(nhid * nheads, nclass, concat=False)

        def forward(self, x, adj):
            x = F.dropout(x, self.dropout, training=self.training)
            x = torch.cat([att(x, adj) for att in self.heads], dim=1)
            x = F.dropout(x, self.dropout, training=self.training)
            return F.log_softmax(self.out_att(x, adj), dim=1)

    model = GAT(x.shape[1], 8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)

    def step(epoch):
        model.train()
        optimizer.zero_grad()
        output = model(x, adj)
        loss_train = F.nll_loss(output[train_mask], y[train_mask])
        loss_train.backward()
        optimizer.step()
        return loss_train.item()

    def probe():
        with quiet(model):
            return (model(x, adj).argmax(1)[test_mask] != y[test_mask]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gcn_randn_init_bad():
    torch.manual_seed(0)
    x, adj, y, train_mask, test_mask = citation_graph(seed=4, p_in=0.07, p_out=0.01, strength=0.4)
    a_hat = adj + torch.eye(len(adj))
    d = a_hat.sum(1).pow(-0.5)
    a_norm = d[:, None] * a_hat * d[None]

    class GraphConvolution(nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(in_features, out_features))
            self.bias = nn.Parameter(torch.zeros(out_features))

        def forward(self, x, adj):
            support = torch.mm(x, self.weight)
            return torch.mm(adj, support) + self.bias

    class GCN(nn.Module):
        def __init__(self, nfeat, nhid, nclass, dropout):
            super().__init__()
            self.gc1 = GraphConvolution(nfeat, nhid)
            self.gc2 = GraphConvolution(nhid, nclass)
            self.dropout = dropout

        def forward(self, x, adj):
            x = F.relu(self.gc1(x, adj))
            x = F.dropout(x, self.dropout, training=self.training)
            return self.gc2(x, adj)

    model = GCN(x.shape[1], 32, 4, 0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()

    def step(epoch):
        model.train()
        optimizer.zero_grad()
        logits = model(x, a_norm)
        loss = criterion(logits[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            return F.cross_entropy(model(x, a_norm)[test_mask], y[test_mask]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gcn_randn_init_good():
    torch.manual_seed(0)
    x, adj, y, train_mask, test_mask = citation_graph(seed=4, p_in=0.07, p_out=0.01, strength=0.4)
    a_hat = adj + torch.eye(len(adj))
    d = a_hat.sum(1).pow(-0.5)
    a_norm = d[:, None] * a_hat * d[None]

    class GraphConvolution(nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(in_features, out_features))
            nn.init.xavier_uniform_(self.weight)
            self.bias = nn.Parameter(torch.zeros(out_features))

        def forward(self, x, adj):
            support = torch.mm(x, self.weight)
            return torch.mm(adj, support) + self.bias

    class GCN(nn.Module):
        def __init__(self, nfeat, nhid, nclass, dropout):
            super().__init__()
            self.gc1 = GraphConvolution(nfeat, nhid)
            self.gc2 = GraphConvolution(nhid, nclass)
            self.dropout = dropout

        def forward(self, x, adj):
            x = F.relu(self.gc1(x, adj))
            x = F.dropout(x, self.dropout, training=self.training)
            return self.gc2(x, adj)

    model = GCN(x.shape[1], 32, 4, 0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()

    def step(epoch):
        model.train()
        optimizer.zero_grad()
        logits = model(x, a_norm)
        loss = criterion(logits[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            return F.cross_entropy(model(x, a_norm)[test_mask], y[test_mask]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def har_inplace_normalise_bad():
    torch.manual_seed(0)

    windows, labels = accelerometer(384, 1)
    windows_t, labels_t = accelerometer(400, 2)

    class HARDataset(Dataset):
        """Windows of raw acceleration, normalised per channel on the way out."""

        def __init__(self, windows, labels):
            self.windows, self.labels = windows.clone(), labels
            self.mean = windows.mean((0, 2)).unsqueeze(1)
            self.std = windows.std((0, 2)).unsqueeze(1)

        def __len__(self):
            return len(self.labels)

        def __getitem__(self, idx):
            x = self.windows[idx]
            x -= self.mean
            x /= self.std
            return x, self.labels[idx]

    class HARNet(nn.Module):
        def __init__(self, n_classes=5):
            super().__init__()
            self.conv1 = nn.Conv1d(3, 16, 7, padding=3, bias=False)
            self.bn1 = nn.BatchNorm1d(16)
            self.conv2 = nn.Conv1d(16, 32, 5, padding=2, bias=False)
            self.bn2 = nn.BatchNorm1d(32)
            self.drop = nn.Dropout(0.2)
            self.fc = nn.Linear(32, n_classes)

        def forward(self, x):
            x = F.max_pool1d(F.relu(self.bn1(self.conv1(x))), 2)
            x = F.relu(self.bn2(self.conv2(x))).mean(-1)
            return self.fc(self.drop(x))

    train_set = HARDataset(windows, labels)
    loader = DataLoader(train_set, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    xt = (windows_t - train_set.mean) / train_set.std
    model = HARNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    def endless():
        while True:
            for xb, yb in loader:
                yield xb, yb

    gen = endless()

    def step(i):
        model.train()
        xb, yb = next(gen)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            return (model(xt).argmax(1) != labels_t).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def har_inplace_normalise_good():
    torch.manual_seed(0)

    windows, labels = accelerometer(384, 1)
    windows_t, labels_t = accelerometer(400, 2)

    class HARDataset(Dataset):
        """Windows of raw acceleration, normalised per channel on the way out."""

        def __init__(self, windows, labels):
            self.windows, self.labels = windows.clone(), labels
            self.mean = windows.mean((0, 2)).unsqueeze(1)
            self.std = windows.std((0, 2)).unsqueeze(1)

        def __len__(self):
            return len(self.labels)

        def __getitem__(self, idx):
            x = (self.windows[idx] - self.mean) / self.std
            return x, self.labels[idx]

    class HARNet(nn.Module):
        def __init__(self, n_classes=5):
            super().__init__()
            self.conv1 = nn.Conv1d(3, 16, 7, padding=3, bias=False)
            self.bn1 = nn.BatchNorm1d(16)
            self.conv2 = nn.Conv1d(16, 32, 5, padding=2, bias=False)
            self.bn2 = nn.BatchNorm1d(32)
            self.drop = nn.Dropout(0.2)
            self.fc = nn.Linear(32, n_classes)

        def forward(self, x):
            x = F.max_pool1d(F.relu(self.bn1(self.conv1(x))), 2)
            x = F.relu(self.bn2(self.conv2(x))).mean(-1)
            return self.fc(self.drop(x))

    train_set = HARDataset(windows, labels)
    loader = DataLoader(train_set, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    xt = (windows_t - train_set.mean) / train_set.std
    model = HARNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    def endless():
        while True:
            for xb, yb in loader:
                yield xb, yb

    gen = endless()

    def step(i):
        model.train()
        xb, yb = next(gen)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            return (model(xt).argmax(1) != labels_t).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keyword_eval_mode_stuck_bad():
    torch.manual_seed(0)
    x_train, y_train = keyword_spectrograms(384, 1)
    x_val, y_val = keyword_spectrograms(128, 2)
    x_test, y_test = keyword_spectrograms(600, 3)

    class KWSNet(nn.Module):
        def __init__(self, n_mels=20, n_classes=6):
            super().__init__()
            self.bn0 = nn.BatchNorm1d(n_mels)  # normalises the log-mel bins (dB)
            self.features = nn.Sequential(
                nn.Conv1d(n_mels, 48, 5, padding=2),
                nn.BatchNorm1d(48),
                nn.ReLU(),
                nn.MaxPool1d(2),
                nn.Conv1d(48, 64, 3, padding=1),
                nn.BatchNorm1d(64),
                nn.ReLU(),
                nn.MaxPool1d(2),
            )
            self.classifier = nn.Sequential(
                nn.Flatten(),
                nn.Dropout(0.5),
                nn.Linear(64 * 8, 64),
                nn.ReLU(),
                nn.Dropout(0.5),
                nn.Linear(64, n_classes),
            )

        def forward(self, x):
            return self.classifier(self.features(self.bn0(x)))

    model = KWSNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_loader = DataLoader(
        TensorDataset(x_train, y_train), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            out = model(x_val)
        history.append((criterion(out, y_val).item(), (out.argmax(1) == y_val).float().mean().item()))

    def training():
        model.train()
        validate()  # sanity check of the validation loop before the first epoch
        while True:
            for xb, yb in train_loader:
                optimizer.zero_grad()
                loss = criterion(model(xb), yb)
                loss.backward()
                optimizer.step()
                yield loss.item()
            validate()

    trainer = training()

    def step(i):
        return next(trainer)

    def probe():
        with quiet(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keyword_eval_mode_stuck_good():
    torch.manual_seed(0)
    x_train, y_train = keyword_spectrograms(384, 1)
    x_val, y_val = keyword_spectrograms(128, 2)
    x_test, y_test = keyword_spectrograms(600, 3)

    class KWSNet(nn.Module):
        def __init__(self, n_mels=20, n_classes=6):
            super().__init__()
            self.bn0 = nn.BatchNorm1d(n_mels)  # normalises the log-mel bins (dB)
            self.features = nn.Sequential(
                nn.Conv1d(n_mels, 48, 5, padding=2),
                nn.BatchNorm1d(48),
                nn.ReLU(),
                nn.MaxPool1d(2),
                nn.Conv1d(48, 64, 3, padding=1),
                nn.BatchNorm1d(64),
                nn.ReLU(),
                nn.MaxPool1d(2),
            )
            self.classifier = nn.Sequential(
                nn.Flatten(),
                nn.Dropout(0.5),
                nn.Linear(64 * 8, 64),
                nn.ReLU(),
                nn.Dropout(0.5),
                nn.Linear(64, n_classes),
            )

        def forward(self, x):
            return self.classifier(self.features(self.bn0(x)))

    model = KWSNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_loader = DataLoader(
        TensorDataset(x_train, y_train), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            out = model(x_val)
        history.append((criterion(out, y_val).item(), (out.argmax(1) == y_val).float().mean().item()))

    def training():
        validate()  # sanity check of the validation loop before the first epoch
        while True:
            model.train()
            for xb, yb in train_loader:
                optimizer.zero_grad()
                loss = criterion(model(xb), yb)
                loss.backward()
                optimizer.step()
                yield loss.item()
            validate()

    trainer = training()

    def step(i):
        return next(trainer)

    def probe():
        with quiet(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sleep_view_not_permute_bad():
    torch.manual_seed(0)
    n_classes = 5

    class SleepStager(nn.Module):
        def __init__(self, in_dim=16, hidden=32):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(in_dim, 32), nn.LayerNorm(32), nn.GELU())
            self.gru = nn.GRU(32, hidden, batch_first=True, bidirectional=True)
            self.head = nn.Linear(2 * hidden, n_classes)

        def forward(self, x):  # (B, T, in_dim) -> (B, T, n_classes)
            h, _ = self.gru(self.encoder(x))
            return self.head(h)

    x, y = polysomnography(600, 1)
    x_test, y_test = polysomnography(150, 2)
    mean, std = x.mean((0, 1)), x.std((0, 1))
    x, x_test = (x - mean) / std, (x_test - mean) / std

    model = SleepStager()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    loader = DataLoader(
        TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0)
    )
    state = {"it": iter(loader)}

    def step(i):
        model.train()
        try:
            xb, yb = next(state["it"])
        except StopIteration:
            state["it"] = iter(loader)
            xb, yb = next(state["it"])
        logits = model(xb)
        B, T, C = logits.shape
        loss = criterion(logits.view(B, C, T), yb)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            return (model(x_test).argmax(-1) != y_test).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sleep_view_not_permute_good():
    torch.manual_seed(0)
    n_classes = 5

    class SleepStager(nn.Module):
        def __init__(self, in_dim=16, hidden=32):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(in_dim, 32), nn.LayerNorm(32), nn.GELU())
            self.gru = nn.GRU(32, hidden, batch_first=True, bidirectional=True)
            self.head = nn.Linear(2 * hidden, n_classes)

        def forward(self, x):  # (B, T, in_dim) -> (B, T, n_classes)
            h, _ = self.gru(self.encoder(x))
            return self.head(h)

    x, y = polysomnography(600, 1)
    x_test, y_test = polysomnography(150, 2)
    mean, std = x.mean((0, 1)), x.std((0, 1))
    x, x_test = (x - mean) / std, (x_test - mean) / std

    model = SleepStager()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    loader = DataLoader(
        TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0)
    )
    state = {"it": iter(loader)}

    def step(i):
        model.train()
        try:
            xb, yb = next(state["it"])
        except StopIteration:
            state["it"] = iter(loader)
            xb, yb = next(state["it"])
        logits = model(xb)
        B, T, C = logits.shape
        loss = criterion(logits.permute(0, 2, 1), yb)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with quiet(model):
            return (model(x_test).argmax(-1) != y_test).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ctc_blank_collides_bad():
    torch.manual_seed(0)

    phone2id = {p: i for i, p in enumerate(PHONES)}
    id2phone = {i: p for p, i in phone2id.items()}
    n_out = len(PHONES) + 1  # phones and the blank

    x, said, n_frames = utterances(600, 1)
    x_test, said_test, n_frames_test = utterances(100, 2)

    class Utterances(Dataset):
        def __len__(self):
            return len(said)

        def __getitem__(self, i):
            return x[i, : n_frames[i]], torch.tensor([phone2id[p] for p in said[i]])

    def collate(batch):
        feats, labels = zip(*batch)
        return (
            nn.utils.rnn.pad_sequence(feats, batch_first=True),
            torch.cat(labels),
            torch.tensor([len(f) for f in feats]),
            torch.tensor([len(l) for l in labels]),
        )

    class AcousticModel(nn.Module):
        def __init__(self, feats=12, hidden=32):
            super().__init__()
            self.conv = nn.Conv1d(feats, 32, 3, padding=1)
            self.rnn = nn.GRU(32, hidden, batch_first=True, bidirectional=True)
            self.out = nn.Linear(2 * hidden, n_out)

        def forward(self, x, lens):
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            packed = nn.utils.rnn.pack_padded_sequence(h, lens, batch_first=True, enforce_sorted=False)
            h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return F.log_softmax(self.out(h), dim=-1)

    model = AcousticModel()
    ctc_loss = nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(
        Utterances(),
        batch_size=16,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(0),
    )

    def cycle():
        while True:
            yield from loader

    stream = cycle()

    def step(i):
        model.train()
        feats, labels, feat_lens, label_lens = next(stream)
        log_probs = model(feats, feat_lens).transpose(0, 1)  # (T, N, C)
        loss = ctc_loss(log_probs, labels, feat_lens, label_lens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():  # phone error rate of greedy decoding
        with quiet(model):
            best = model(x_test, n_frames_test).argmax(-1)
        errors = total = 0
        for path, length, truth in zip(best, n_frames_test, said_test):
            ids = torch.unique_consecutive(path[:length]).tolist()
            errors += edit_distance([id2phone[j] for j in ids if j != ctc_loss.blank], truth)
            total += len(truth)
        return errors / total

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ctc_blank_collides_good():
    torch.manual_seed(0)

    phone2id = {p: i for i, p in enumerate(PHONES, start=1)}
    id2phone = {i: p for p, i in phone2id.items()}
    n_out = len(PHONES) + 1  # phones and the blank

    x, said, n_frames = utterances(600, 1)
    x_test, said_test, n_frames_test = utterances(100, 2)

    class Utterances(Dataset):
        def __len__(self):
            return len(said)

        def __getitem__(self, i):
            return x[i, : n_frames[i]], torch.tensor([phone2id[p] for p in said[i]])

    def collate(batch):
        feats, labels = zip(*batch)
        return (
            nn.utils.rnn.pad_sequence(feats, batch_first=True),
            torch.cat(labels),
            torch.tensor([len(f) for f in feats]),
            torch.tensor([len(l) for l in labels]),
        )

    class AcousticModel(nn.Module):
        def __init__(self, feats=12, hidden=32):
            super().__init__()
            self.conv = nn.Conv1d(feats, 32, 3, padding=1)
            self.rnn = nn.GRU(32, hidden, batch_first=True, bidirectional=True)
            self.out = nn.Linear(2 * hidden, n_out)

        def forward(self, x, lens):
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            packed = nn.utils.rnn.pack_padded_sequence(h, lens, batch_first=True, enforce_sorted=False)
            h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return F.log_softmax(self.out(h), dim=-1)

    model = AcousticModel()
    ctc_loss = nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(
        Utterances(),
        batch_size=16,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(0),
    )

    def cycle():
        while True:
            yield from loader

    stream = cycle()

    def step(i):
        model.train()
        feats, labels, feat_lens, label_lens = next(stream)
        log_probs = model(feats, feat_lens).transpose(0, 1)  # (T, N, C)
        loss = ctc_loss(log_probs, labels, feat_lens, label_lens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():  # phone error rate of greedy decoding
        with quiet(model):
            best = model(x_test, n_frames_test).argmax(-1)
        errors = total = 0
        for path, length, truth in zip(best, n_frames_test, said_test):
            ids = torch.unique_consecutive(path[:length]).tolist()
            errors += edit_distance([id2phone[j] for j in ids if j != ctc_loss.blank], truth)
            total += len(truth)
        return errors / total

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_retain_not_create_graph_bad():
    torch.manual_seed(0)
    c = 0.5  # u_t + c u_x = 0 on [-1,1] x [0,1], u(x,0) = sin(pi x), periodic

    class PINN(nn.Module):
        def __init__(self, width=32, depth=3):
            super().__init__()
            dims = [2] + [width] * depth + [1]
            self.linears = nn.ModuleList([nn.Linear(a, b) for a, b in zip(dims[:-1], dims[1:])])
            for lin in self.linears:
                nn.init.xavier_normal_(lin.weight)
                nn.init.zeros_(lin.bias)

        def forward(self, x, t):
            h = torch.cat([x, t], 1)
            for lin in self.linears[:-1]:
                h = torch.tanh(lin(h))
            return self.linears[-1](h)

    net = PINN()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    def grad(out, inp):
        return torch.autograd.grad(out, inp, grad_outputs=torch.ones_like(out), retain_graph=True)[0]

    def step(i):
        x_f = (torch.rand(200, 1) * 2 - 1).requires_grad_(True)
        t_f = torch.rand(200, 1).requires_grad_(True)
        u = net(x_f, t_f)
        residual = grad(u, t_f) + c * grad(u, x_f)
        loss_f = residual.pow(2).mean()

        x_0 = torch.rand(64, 1) * 2 - 1
        loss_ic = (net(x_0, torch.zeros_like(x_0)) - torch.sin(math.pi * x_0)).pow(2).mean()
        t_b = torch.rand(64, 1)
        loss_bc = (net(-torch.ones_like(t_b), t_b) - net(torch.ones_like(t_b), t_b)).pow(2).mean()

        loss = loss_f + loss_ic + loss_bc
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # relative L2 error against the exact solution
        with quiet(net):
            X, T = torch.meshgrid(torch.linspace(-1, 1, 41), torch.linspace(0, 1, 21), indexing="ij")
            x, t = X.reshape(-1, 1), T.reshape(-1, 1)
            exact = torch.sin(math.pi * (x - c * t))
            return ((net(x, t) - exact).norm() / exact.norm()).item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_retain_not_create_graph_good():
    torch.manual_seed(0)
    c = 0.5  # u_t + c u_x = 0 on [-1,1] x [0,1], u(x,0) = sin(pi x), periodic

    class PINN(nn.Module):
        def __init__(self, width=32, depth=3):
            super().__init__()
            dims = [2] + [width] * depth + [1]
            self.linears = nn.ModuleList([nn.Linear(a, b) for a, b in zip(dims[:-1], dims[1:])])
            for lin in self.linears:
                nn.init.xavier_normal_(lin.weight)
                nn.init.zeros_(lin.bias)

        def forward(self, x, t):
            h = torch.cat([x, t], 1)
            for lin in self.linears[:-1]:
                h = torch.tanh(lin(h))
            return self.linears[-1](h)

    net = PINN()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    def grad(out, inp):
        return torch.autograd.grad(out, inp, grad_outputs=torch.ones_like(out), create_graph=True)[0]

    def step(i):
        x_f = (torch.rand(200, 1) * 2 - 1).requires_grad_(True)
        t_f = torch.rand(200, 1).requires_grad_(True)
        u = net(x_f, t_f)
        residual = grad(u, t_f) + c * grad(u, x_f)
        loss_f = residual.pow(2).mean()

        x_0 = torch.rand(64, 1) * 2 - 1
        loss_ic = (net(x_0, torch.zeros_like(x_0)) - torch.sin(math.pi * x_0)).pow(2).mean()
        t_b = torch.rand(64, 1)
        loss_bc = (net(-torch.ones_like(t_b), t_b) - net(torch.ones_like(t_b), t_b)).pow(2).mean()

        loss = loss_f + loss_ic + loss_bc
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # relative L2 error against the exact solution
        with quiet(net):
            X, T = torch.meshgrid(torch.linspace(-1, 1, 41), torch.linspace(0, 1, 21), indexing="ij")
            x, t = X.reshape(-1, 1), T.reshape(-1, 1)
            exact = torch.sin(math.pi * (x - c * t))
            return ((net(x, t) - exact).norm() / exact.norm()).item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def deeponet_scheduler_per_batch_bad():
    torch.manual_seed(0)

    u_train, y_train, s_train = antiderivatives(512, 1)
    u_test, y_test, s_test = antiderivatives(200, 2)

    class DeepONet(nn.Module):
        def __init__(self, sensors=40, p=32, width=64):
            super().__init__()
            self.branch = nn.Sequential(
                nn.Linear(sensors, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, p)
            )
            self.trunk = nn.Sequential(
                nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, p)
            )
            self.bias = nn.Parameter(torch.zeros(1))

        def forward(self, u, y):  # u (B, sensors), y (B, points, 1)
            return torch.einsum("bp,bnp->bn", self.branch(u), self.trunk(y)) + self.bias

    model = DeepONet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
    train_loader = DataLoader(
        TensorDataset(u_train, y_train, s_train),
        batch_size=32,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
    )
    mse = nn.MSELoss()

    def train_loop(num_epochs):
        for epoch in range(num_epochs):
            model.train()
            for u, y, s in train_loader:
                optimizer.zero_grad()
                loss = mse(model(u, y), s)
                loss.backward()
                optimizer.step()
                scheduler.step()
                yield loss.item()

    run = train_loop(num_epochs=60)

    def step(i):
        return next(run)

    def probe():
        with quiet(model):
            return ((model(u_test, y_test) - s_test).norm() / s_test.norm()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def deeponet_scheduler_per_batch_good():
    torch.manual_seed(0)

    u_train, y_train, s_train = antiderivatives(512, 1)
    u_test, y_test, s_test = antiderivatives(200, 2)

    class DeepONet(nn.Module):
        def __init__(self, sensors=40, p=32, width=64):
            super().__init__()
            self.branch = nn.Sequential(
                nn.Linear(sensors, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, p)
            )
            self.trunk = nn.Sequential(
                nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, p)
            )
            self.bias = nn.Parameter(torch.zeros(1))

        def forward(self, u, y):  # u (B, sensors), y (B, points, 1)
            return torch.einsum("bp,bnp->bn", self.branch(u), self.trunk(y)) + self.bias

    model = DeepONet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
    train_loader = DataLoader(
        TensorDataset(u_train, y_train, s_train),
        batch_size=32,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
    )
    mse = nn.MSELoss()

    def train_loop(num_epochs):
        for epoch in range(num_epochs):
            model.train()
            for u, y, s in train_loader:
                optimizer.zero_grad()
                loss = mse(model(u, y), s)
                loss.backward()
                optimizer.step()
                yield loss.item()
            scheduler.step()

    run = train_loop(num_epochs=60)

    def step(i):
        return next(run)

    def probe():
        with quiet(model):
            return ((model(u_test, y_test) - s_test).norm() / s_test.norm()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_kl_sum_recon_mean_bad():
    torch.manual_seed(0)

    class SpectraVAE(nn.Module):
        def __init__(self, bins=64, hidden=64, z_dim=6):
            super().__init__()
            self.fc1 = nn.Linear(bins, hidden)
            self.fc21 = nn.Linear(hidden, z_dim)
            self.fc22 = nn.Linear(hidden, z_dim)
            self.fc3 = nn.Linear(z_dim, hidden)
            self.fc4 = nn.Linear(hidden, bins)

        def encode(self, x):
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + std * torch.randn_like(std)

        def decode(self, z):
            return self.fc4(F.relu(self.fc3(z)))

        def forward(self, x):
            mu, logvar = self.encode(x)
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        MSE = 0.5 * F.mse_loss(recon_x, x)
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
        return MSE + KLD

    train, test = spectra(2000, 1), spectra(400, 2)
    loader = DataLoader(
        TensorDataset(train), batch_size=64, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0)
    )
    model = SpectraVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def batches():
        while True:
            for (data,) in loader:
                yield data

    stream = batches()

    def step(i):
        model.train()
        data = next(stream)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # reconstruction error from the posterior mean
        with quiet(model):
            mu, _ = model.encode(test)
            return F.mse_loss(model.decode(mu), test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_kl_sum_recon_mean_good():
    torch.manual_seed(0)

    class SpectraVAE(nn.Module):
        def __init__(self, bins=64, hidden=64, z_dim=6):
            super().__init__()
            self.fc1 = nn.Linear(bins, hidden)
            self.fc21 = nn.Linear(hidden, z_dim)
            self.fc22 = nn.Linear(hidden, z_dim)
            self.fc3 = nn.Linear(z_dim, hidden)
            self.fc4 = nn.Linear(hidden, bins)

        def encode(self, x):
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + std * torch.randn_like(std)

        def decode(self, z):
            return self.fc4(F.relu(self.fc3(z)))

        def forward(self, x):
            mu, logvar = self.encode(x)
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        MSE = 0.5 * F.mse_loss(recon_x, x, reduction="sum") / x.size(0)
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
        return MSE + KLD

    train, test = spectra(2000, 1), spectra(400, 2)
    loader = DataLoader(
        TensorDataset(train), batch_size=64, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0)
    )
    model = SpectraVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def batches():
        while True:
            for (data,) in loader:
                yield data

    stream = batches()

    def step(i):
        model.train()
        data = next(stream)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # reconstruction error from the posterior mean
        with quiet(model):
            mu, _ = model.encode(test)
            return F.mse_loss(model.decode(mu), test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kl_wants_log_bad():
    torch.manual_seed(0)
    T, alpha = 3.0, 0.9

    def make_net(width):
        return nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    # the big teacher, trained on plenty of data
    x_big, y_big = device_traffic(6000, 1)
    teacher = make_net(128)
    t_opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for it in range(250):
        idx = torch.randint(0, len(x_big), (128,))
        t_opt.zero_grad()
        F.cross_entropy(teacher(x_big[idx]), y_big[idx]).backward()
        t_opt.step()
    teacher.eval()
    teacher.requires_grad_(False)

    x_train, y_train = device_traffic(1500, 2)
    x_test, y_test = device_traffic(1000, 3)
    student = make_net(32)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    loader = DataLoader(
        TensorDataset(x_train, y_train),
        batch_size=64,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    kl = nn.KLDivLoss(reduction="batchmean")

    def cycle():
        while True:
            yield from loader

    stream = cycle()

    def step(i):
        student.train()
        x, y = next(stream)
        with torch.no_grad():
            t_logits = teacher(x)
        s_logits = student(x)
        soft = kl(F.softmax(s_logits / T, dim=1), F.softmax(t_logits / T, dim=1)) * T * T
        hard = F.cross_entropy(s_logits, y)
        loss = alpha * soft + (1 - alpha) * hard
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with quiet(student):
            return F.cross_entropy(student(x_test), y_test).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kl_wants_log_good():
    torch.manual_seed(0)
    T, alpha = 3.0, 0.9

    def make_net(width):
        return nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    # the big teacher, trained on plenty of data
    x_big, y_big = device_traffic(6000, 1)
    teacher = make_net(128)
    t_opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for it in range(250):
        idx = torch.randint(0, len(x_big), (128,))
        t_opt.zero_grad()
        F.cross_entropy(teacher(x_big[idx]), y_big[idx]).backward()
        t_opt.step()
    teacher.eval()
    teacher.requires_grad_(False)

    x_train, y_train = device_traffic(1500, 2)
    x_test, y_test = device_traffic(1000, 3)
    student = make_net(32)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    loader = DataLoader(
        TensorDataset(x_train, y_train),
        batch_size=64,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    kl = nn.KLDivLoss(reduction="batchmean")

    def cycle():
        while True:
            yield from loader

    stream = cycle()

    def step(i):
        student.train()
        x, y = next(stream)
        with torch.no_grad():
            t_logits = teacher(x)
        s_logits = student(x)
        soft = kl(F.log_softmax(s_logits / T, dim=1), F.softmax(t_logits / T, dim=1)) * T * T
        hard = F.cross_entropy(s_logits, y)
        loss = alpha * soft + (1 - alpha) * hard
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with quiet(student):
            return F.cross_entropy(student(x_test), y_test).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fomaml_grads_stay_on_clone_bad():
    torch.manual_seed(0)
    inner_lr, inner_steps, meta_batch, shots = 0.02, 3, 4, 10
    g = torch.Generator().manual_seed(3)

    meta_model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    meta_optimizer = torch.optim.Adam(meta_model.parameters(), lr=2e-3)
    loss_fn = nn.MSELoss()

    def adapt(model, x, y, steps):
        learner = copy.deepcopy(model)
        inner_opt = torch.optim.SGD(learner.parameters(), lr=inner_lr)
        for _ in range(steps):
            inner_opt.zero_grad()
            loss_fn(learner(x), y).backward()
            inner_opt.step()
        return learner

    def step(i):
        meta_optimizer.zero_grad()
        total = 0.0
        for _ in range(meta_batch):
            xs, ys, xq, yq = sinusoid_task(g, shots)
            learner = adapt(meta_model, xs, ys, inner_steps)
            query_loss = loss_fn(learner(xq), yq) / meta_batch
            query_loss.backward()
            total += query_loss.item()
        meta_optimizer.step()
        return total

    def probe():  # query error after adapting to new tasks
        with quiet(meta_model, grad=True):
            gt, err = torch.Generator().manual_seed(777), 0.0
            for _ in range(40):
                xs, ys, xq, yq = sinusoid_task(gt, shots)
                learner = adapt(meta_model, xs, ys, inner_steps)
                with torch.no_grad():
                    err += loss_fn(learner(xq), yq).item() / 40
        return err

    return {"model": meta_model, "optimizer": meta_optimizer, "steps": 20, "step": step, "probe": probe}


def fomaml_grads_stay_on_clone_good():
    torch.manual_seed(0)
    inner_lr, inner_steps, meta_batch, shots = 0.02, 3, 4, 10
    g = torch.Generator().manual_seed(3)

    meta_model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    meta_optimizer = torch.optim.Adam(meta_model.parameters(), lr=2e-3)
    loss_fn = nn.MSELoss()

    def adapt(model, x, y, steps):
        learner = copy.deepcopy(model)
        inner_opt = torch.optim.SGD(learner.parameters(), lr=inner_lr)
        for _ in range(steps):
            inner_opt.zero_grad()
            loss_fn(learner(x), y).backward()
            inner_opt.step()
        return learner

    def step(i):
        meta_optimizer.zero_grad()
        total = 0.0
        for _ in range(meta_batch):
            xs, ys, xq, yq = sinusoid_task(g, shots)
            learner = adapt(meta_model, xs, ys, inner_steps)
            query_loss = loss_fn(learner(xq), yq) / meta_batch
            grads = torch.autograd.grad(query_loss, list(learner.parameters()))
            for p, gr in zip(meta_model.parameters(), grads):
                p.grad = gr if p.grad is None else p.grad + gr
            total += query_loss.item()
        meta_optimizer.step()
        return total

    def probe():  # query error after adapting to new tasks
        with quiet(meta_model, grad=True):
            gt, err = torch.Generator().manual_seed(777), 0.0
            for _ in range(40):
                xs, ys, xq, yq = sinusoid_task(gt, shots)
                learner = adapt(meta_model, xs, ys, inner_steps)
                with torch.no_grad():
                    err += loss_fn(learner(xq), yq).item() / 40
        return err

    return {"model": meta_model, "optimizer": meta_optimizer, "steps": 20, "step": step, "probe": probe}


def clap_temperature_multiplied_bad():
    torch.manual_seed(0)

    class Tower(nn.Module):
        def __init__(self, in_dim, hidden=96, out=32):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(in_dim, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, out))

        def forward(self, x):
            return F.normalize(self.net(x), dim=-1)

    class AudioTextCLIP(nn.Module):
        def __init__(self, temperature=0.2):
            super().__init__()
            self.audio_encoder = Tower(40)
            self.text_encoder = Tower(60)
            self.temperature = temperature

        def forward(self, audio, text):
            a, t = self.audio_encoder(audio), self.text_encoder(text)
            logits = a @ t.T * self.temperature
            targets = torch.arange(len(a))
            return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2

    audio, tags = clips_and_captions(2000, 1)
    audio_t, tags_t = clips_and_captions(200, 2)
    model = AudioTextCLIP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    loader = DataLoader(
        TensorDataset(audio, tags),
        batch_size=64,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )

    def infinite():
        while True:
            yield from loader

    data = infinite()

    def step(i):
        model.train()
        a, t = next(data)
        loss = model(a, t)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # 1 - recall@5, audio to text
        with quiet(model):
            sim = model.audio_encoder(audio_t) @ model.text_encoder(tags_t).T
            hit = (sim.topk(5, dim=1).indices == torch.arange(len(sim))[:, None]).any(1)
            return 1.0 - hit.float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def clap_temperature_multiplied_good():
    torch.manual_seed(0)

    class Tower(nn.Module):
        def __init__(self, in_dim, hidden=96, out=32):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(in_dim, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, out))

        def forward(self, x):
            return F.normalize(self.net(x), dim=-1)

    class AudioTextCLIP(nn.Module):
        def __init__(self, temperature=0.2):
            super().__init__()
            self.audio_encoder = Tower(40)
            self.text_encoder = Tower(60)
            self.temperature = temperature

        def forward(self, audio, text):
            a, t = self.audio_encoder(audio), self.text_encoder(text)
            logits = a @ t.T / self.temperature
            targets = torch.arange(len(a))
            return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2

    audio, tags = clips_and_captions(2000, 1)
    audio_t, tags_t = clips_and_captions(200, 2)
    model = AudioTextCLIP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    loader = DataLoader(
        TensorDataset(audio, tags),
        batch_size=64,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )

    def infinite():
        while True:
            yield from loader

    data = infinite()

    def step(i):
        model.train()
        a, t = next(data)
        loss = model(a, t)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():  # 1 - recall@5, audio to text
        with quiet(model):
            sim = model.audio_encoder(audio_t) @ model.text_encoder(tags_t).T
            hit = (sim.topk(5, dim=1).indices == torch.arange(len(sim))[:, None]).any(1)
            return 1.0 - hit.float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def moe_experts_plain_list_bad():
    torch.manual_seed(0)

    class Expert(nn.Module):
        def __init__(self, d_in, d_hidden):
            super().__init__()
            self.w1, self.w2 = nn.Linear(d_in, d_hidden), nn.Linear(d_hidden, 1)

        def forward(self, x):
            return self.w2(F.silu(self.w1(x)))

    class MoERegressor(nn.Module):
        def __init__(self, d_in=8, d_hidden=24, n_experts=4):
            super().__init__()
            self.experts = [Expert(d_in, d_hidden) for _ in range(n_experts)]
            self.gate = nn.Sequential(nn.Linear(d_in, 16), nn.SiLU(), nn.Linear(16, n_experts))

        def forward(self, x):
            w = F.softmax(self.gate(x), dim=-1)  # (B, E)
            out = torch.stack([e(x) for e in self.experts], dim=1)  # (B, E, 1)
            return (w.unsqueeze(-1) * out).sum(1), w

    x, y = machine_table(3000, 1)
    x_test, y_test = machine_table(600, 2)
    model = MoERegressor()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-3)
    loader = DataLoader(
        TensorDataset(x, y), batch_size=128, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0)
    )

    def stream():
        while True:
            yield from loader

    it = stream()

    def step(i):
        model.train()
        xb, yb = next(it)
        pred, w = model(xb)
        importance = w.mean(0)
        balance = len(importance) * (importance**2).sum() - 1.0  # 0 when the load is even
        loss = F.mse_loss(pred, yb) + 0.01 * balance
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with quiet(model):
            return F.mse_loss(model(x_test)[0], y_test).sqrt().item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def moe_experts_plain_list_good():
    torch.manual_seed(0)

    class Expert(nn.Module):
        def __init__(self, d_in, d_hidden):
            super().__init__()
            self.w1, self.w2 = nn.Linear(d_in, d_hidden), nn.Linear(d_hidden, 1)

        def forward(self, x):
            return self.w2(F.silu(self.w1(x)))

    class MoERegressor(nn.Module):
        def __init__(self, d_in=8, d_hidden=24, n_experts=4):
            super().__init__()
            self.experts = nn.ModuleList([Expert(d_in, d_hidden) for _ in range(n_experts)])
            self.gate = nn.Sequential(nn.Linear(d_in, 16), nn.SiLU(), nn.Linear(16, n_experts))

        def forward(self, x):
            w = F.softmax(self.gate(x), dim=-1)  # (B, E)
            out = torch.stack([e(x) for e in self.experts], dim=1)  # (B, E, 1)
            return (w.unsqueeze(-1) * out).sum(1), w

    x, y = machine_table(3000, 1)
    x_test, y_test = machine_table(600, 2)
    model = MoERegressor()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-3)
    loader = DataLoader(
        TensorDataset(x, y), batch_size=128, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0)
    )

    def stream():
        while True:
            yield from loader

    it = stream()

    def step(i):
        model.train()
        xb, yb = next(it)
        pred, w = model(xb)
        importance = w.mean(0)
        balance = len(importance) * (importance**2).sum() - 1.0  # 0 when the load is even
        loss = F.mse_loss(pred, yb) + 0.01 * balance
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with quiet(model):
            return F.mse_loss(model(x_test)[0], y_test).sqrt().item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}
