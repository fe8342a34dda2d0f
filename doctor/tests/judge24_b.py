import copy
import math
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

CASES = []


def case(name, what):
    CASES.append({"name": name, "what": what})


def forever(loader):
    while True:
        for batch in loader:
            yield batch


# --------------------------------------------------------------------------
# house prices, tabular regression
# --------------------------------------------------------------------------
case("house_price_column_target",
     "The MLP returns (B, 1) while the targets are (B,): the hand written MSE broadcasts to (B, B), "
     "so the net learns the mean price for everybody.")


class PriceNet(nn.Module):
    def __init__(self, n_features, hidden=320):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(n_features, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
        )
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(self.body(x))


def _house_price_column_target(bug):
    torch.manual_seed(11)
    X = torch.randn(3000, 12)
    w = torch.randn(12)
    y = X @ w * 0.4 + torch.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.1 * torch.randn(3000)
    train = TensorDataset(X[:2400], y[:2400])
    X_val, y_val = X[2400:], y[2400:]
    batches = forever(DataLoader(train, batch_size=256, shuffle=True, drop_last=True))

    model = PriceNet(12)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)

    def step(i):
        xb, yb = next(batches)
        optimizer.zero_grad()
        pred = model(xb) if bug else model(xb).squeeze(-1)
        loss = ((pred - yb) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return ((model(X_val).view(-1) - y_val) ** 2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def house_price_column_target_bad():
    return _house_price_column_target(True)


def house_price_column_target_good():
    return _house_price_column_target(False)


# --------------------------------------------------------------------------
# TCN forecaster
# --------------------------------------------------------------------------
case("tcn_chomp_wrong_side",
     "The chomp of the causal convolution trims the left end instead of the right, so every position sees the "
     "future it must predict: the training loss is tiny, real forecasts are useless.")


class Chomp(nn.Module):
    def __init__(self, size, left):
        super().__init__()
        self.size = size
        self.left = left

    def forward(self, x):
        if self.left:
            return x[:, :, self.size:].contiguous()
        return x[:, :, :-self.size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, c_in, c_out, k, dilation, left):
        super().__init__()
        pad = (k - 1) * dilation
        self.net = nn.Sequential(
            nn.Conv1d(c_in, c_out, k, padding=pad, dilation=dilation), Chomp(pad, left), nn.ReLU(),
            nn.Conv1d(c_out, c_out, k, padding=pad, dilation=dilation), Chomp(pad, left), nn.ReLU(),
        )
        self.down = nn.Conv1d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x):
        return F.relu(self.net(x) + self.down(x))


def _tcn_chomp_wrong_side(bug):
    torch.manual_seed(5)

    def make_series(n, length):
        t = torch.arange(length).float()
        p1 = 2 * math.pi * torch.rand(n, 1)
        p2 = 2 * math.pi * torch.rand(n, 1)
        f1 = 0.25 + 0.1 * torch.rand(n, 1)
        f2 = 0.6 + 0.2 * torch.rand(n, 1)
        s = torch.sin(f1 * t + p1) + 0.5 * torch.sin(f2 * t + p2)
        return s + 0.05 * torch.randn(n, length)

    train = make_series(600, 49)
    test = make_series(300, 49)
    model = nn.Sequential(
        TemporalBlock(1, 24, 3, 1, bug),
        TemporalBlock(24, 24, 3, 2, bug),
        TemporalBlock(24, 24, 3, 4, bug),
        nn.Conv1d(24, 1, 1),
    )
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        idx = torch.randint(0, len(train), (32,))
        seq = train[idx].unsqueeze(1)
        opt.zero_grad()
        out = model(seq[:, :, :-1])
        loss = F.mse_loss(out, seq[:, :, 1:])
        loss.backward()
        opt.step()

    def probe():
        with torch.no_grad():
            out = model(test[:, None, :-1])
        return F.mse_loss(out[:, 0, -1], test[:, -1]).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def tcn_chomp_wrong_side_bad():
    return _tcn_chomp_wrong_side(True)


def tcn_chomp_wrong_side_good():
    return _tcn_chomp_wrong_side(False)


# --------------------------------------------------------------------------
# transformer forecaster
# --------------------------------------------------------------------------
case("transformer_pe_over_batch",
     "The positional encoding is the (max_len, 1, d) one of the tutorial but the model is batch_first: the code is "
     "added along the batch axis, so the transformer gets no order and forecasts badly.")


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=2000, seq_first=True):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe if seq_first else pe.transpose(0, 1))
        self.seq_first = seq_first

    def forward(self, x):
        if self.seq_first:
            return x + self.pe[:x.size(0)]
        return x + self.pe[:, :x.size(1)]


class Forecaster(nn.Module):
    def __init__(self, d=32, seq_first=True):
        super().__init__()
        self.proj = nn.Linear(1, d)
        self.pos = PositionalEncoding(d, seq_first=seq_first)
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, 1)

    def forward(self, x):
        h = self.enc(self.pos(self.proj(x)))
        return self.head(h[:, -1])


def _transformer_pe_over_batch(bug):
    torch.manual_seed(3)

    def windows(n, length=20):
        t = torch.arange(length + 1).float()
        amp = 0.5 + torch.rand(n, 1)
        s = amp * torch.sin((0.3 + 0.5 * torch.rand(n, 1)) * t + 6.28 * torch.rand(n, 1))
        s = s + 0.02 * torch.randn_like(s)
        return s[:, :-1, None], s[:, -1:]

    xtr, ytr = windows(2000)
    xte, yte = windows(500)
    dl = forever(DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True))
    model = Forecaster(seq_first=bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    criterion = nn.MSELoss()

    def step(i):
        model.train()
        x, y = next(dl)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def probe():
        model.eval()
        return criterion(model(xte), yte).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def transformer_pe_over_batch_bad():
    return _transformer_pe_over_batch(True)


def transformer_pe_over_batch_good():
    return _transformer_pe_over_batch(False)


# --------------------------------------------------------------------------
# node classification with a home made GCN
# --------------------------------------------------------------------------
case("gcn_scatter_to_source",
     "The message passing scatters x[src] back to src instead of dst: every node only receives copies of itself, "
     "the neighbours are never seen.")


class GraphConv(nn.Module):
    def __init__(self, d_in, d_out, to_source):
        super().__init__()
        self.lin = nn.Linear(d_in, d_out)
        self.to_source = to_source

    def forward(self, x, edge_index):
        src, dst = edge_index
        x = self.lin(x)
        index = src if self.to_source else dst
        agg = torch.zeros_like(x).index_add(0, index, x[src])
        deg = torch.zeros(x.size(0)).index_add(0, index, torch.ones(index.numel()))
        return agg / deg.clamp(min=1).unsqueeze(1)


class GCN(nn.Module):
    def __init__(self, d_in, hidden, n_cls, to_source):
        super().__init__()
        self.c1 = GraphConv(d_in, hidden, to_source)
        self.c2 = GraphConv(hidden, n_cls, to_source)

    def forward(self, x, edge_index):
        h = F.relu(self.c1(x, edge_index))
        h = F.dropout(h, 0.3, training=self.training)
        return self.c2(h, edge_index)


def _gcn_scatter_to_source(bug):
    torch.manual_seed(21)
    n, k, d = 1000, 5, 32
    labels = torch.randint(0, k, (n,))
    same = labels[:, None] == labels[None, :]
    prob = torch.where(same, 0.03, 0.002)
    upper = torch.triu(torch.rand(n, n) < prob, diagonal=1)
    adj = upper | upper.T | torch.eye(n, dtype=torch.bool)
    edge_index = adj.nonzero().T.contiguous()
    x = torch.randn(k, d)[labels] * 0.35 + torch.randn(n, d)
    perm = torch.randperm(n)
    train_idx, test_idx = perm[:300], perm[300:]

    net = GCN(d, 96, k, to_source=bug)
    opt = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)

    def step(epoch):
        net.train()
        opt.zero_grad()
        logits = net(x, edge_index)
        F.cross_entropy(logits[train_idx], labels[train_idx]).backward()
        opt.step()

    def probe():
        net.eval()
        with torch.no_grad():
            pred = net(x, edge_index).argmax(1)
        return (pred[test_idx] != labels[test_idx]).float().mean().item() + 1e-3

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def gcn_scatter_to_source_bad():
    return _gcn_scatter_to_source(True)


def gcn_scatter_to_source_good():
    return _gcn_scatter_to_source(False)


# --------------------------------------------------------------------------
# DQN in a corridor
# --------------------------------------------------------------------------
case("dqn_bootstrap_past_done",
     "The TD target ignores the done flag while the vector environment resets by itself, so the value of the next "
     "episode is bootstrapped into terminal steps; the agent prefers the small near reward.")


class Corridor:
    """12 cells; a small prize at the left end, the big one at the right end. Resets itself."""
    length = 12
    start = 2

    def __init__(self, n):
        self.n = n
        self.pos = torch.randint(1, self.length - 1, (n,))

    def obs(self):
        return F.one_hot(self.pos, self.length).float()

    def step(self, a):
        self.pos = self.pos + (2 * a - 1)
        left, right = self.pos == 0, self.pos == self.length - 1
        reward = 0.3 * left.float() + right.float()
        done = left | right
        self.pos = torch.where(done, torch.full_like(self.pos, self.start), self.pos)
        return self.obs(), reward, done.float()


def _dqn_bootstrap_past_done(bug):
    torch.manual_seed(1001)
    gamma = 0.95
    env = Corridor(64)
    q = nn.Sequential(nn.Linear(Corridor.length, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 2))
    q_target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)
    buffer = deque(maxlen=400)

    def act(obs, eps=0.9):
        greedy = q(obs).argmax(1)
        return torch.where(torch.rand(len(obs)) < eps, torch.randint(0, 2, (len(obs),)), greedy)

    def step(i):
        with torch.no_grad():
            for _ in range(4):
                o = env.obs()
                a = act(o)
                o2, r, d = env.step(a)
                buffer.append((o, a, r, o2, d))
        picks = torch.randint(0, len(buffer), (6,)).tolist()
        o, a, r, o2, d = (torch.cat(z) for z in zip(*[buffer[j] for j in picks]))
        with torch.no_grad():
            nxt = q_target(o2).max(1).values
            target = r + gamma * nxt if bug else r + gamma * (1 - d) * nxt
        qa = q(o).gather(1, a[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(qa, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, p_t in zip(q.parameters(), q_target.parameters()):
                p_t.lerp_(p, 0.1)

    @torch.no_grad()
    def probe():
        total = 0.0
        starts = list(range(1, Corridor.length - 1))
        for s in starts:
            pos, disc = s, 1.0
            for _ in range(60):
                a = q(F.one_hot(torch.tensor([pos]), Corridor.length).float()).argmax(1).item()
                pos += 2 * a - 1
                if pos == 0 or pos == Corridor.length - 1:
                    total += disc * (0.3 if pos == 0 else 1.0)
                    break
                disc *= gamma
        return 1.0 - total / len(starts)

    return {"model": {"q": q, "target": q_target}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": probe}


def dqn_bootstrap_past_done_bad():
    return _dqn_bootstrap_past_done(True)


def dqn_bootstrap_past_done_good():
    return _dqn_bootstrap_past_done(False)


# --------------------------------------------------------------------------
# advantage actor critic
# --------------------------------------------------------------------------
case("a2c_returns_left_reversed",
     "The discounted returns are built from the last step backwards with append and never turned round, so the first "
     "actions get the return of the last ones and the reverse: credit goes to the wrong actions.")


class ActorCritic(nn.Module):
    def __init__(self, obs_dim, n_act, hidden=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.pi = nn.Linear(hidden, n_act)
        self.v = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def _a2c_returns_left_reversed(bug):
    torch.manual_seed(8)
    moves = torch.tensor([[1., 0.], [-1., 0.], [0., 1.], [0., -1.]]) * 0.25
    ac = ActorCritic(2, 4)
    opt = torch.optim.Adam(ac.parameters(), lr=3e-3)
    gamma = 0.8

    def rollout(n, horizon=16):
        pos = torch.rand(n, 2) * 2 - 1
        obs, acts, rews = [], [], []
        with torch.no_grad():
            for _ in range(horizon):
                dist, _ = ac(pos)
                a = dist.sample()
                obs.append(pos)
                acts.append(a)
                pos = (pos + moves[a] + 0.25 * torch.randn_like(pos)).clamp(-2, 2)
                rews.append(-pos.norm(dim=1))
        return obs, acts, rews

    def discounted(rews):
        out, g = [], torch.zeros_like(rews[0])
        for r in reversed(rews):
            g = r + gamma * g
            out.append(g)
        if not bug:
            out.reverse()
        return torch.cat(out)

    def step(i):
        obs, acts, rews = rollout(48)
        returns = discounted(rews)
        dist, values = ac(torch.cat(obs))
        logp = dist.log_prob(torch.cat(acts))
        advantage = returns - values
        policy_loss = -(logp * advantage.detach()).mean()
        value_loss = advantage.pow(2).mean()
        loss = policy_loss + 0.5 * value_loss - 0.01 * dist.entropy().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(ac.parameters(), 0.5)
        opt.step()

    def probe():
        with torch.random.fork_rng():
            torch.manual_seed(77)
            _, _, rews = rollout(400)
        return -torch.cat(rews).mean().item()

    return {"model": ac, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def a2c_returns_left_reversed_bad():
    return _a2c_returns_left_reversed(True)


def a2c_returns_left_reversed_good():
    return _a2c_returns_left_reversed(False)


# --------------------------------------------------------------------------
# DDPG on a point mass
# --------------------------------------------------------------------------
case("ddpg_actor_grads_in_critic",
     "Both zero_grad calls come first and the actor's backward runs before the critic's step: the gradient of "
     "-Q.mean() stays in the critic and pushes its values up at every update.")


class DDPG:
    def __init__(self, obs_dim=2, act_dim=1, hidden=160, gamma=0.9, tau=0.05):
        self.actor = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                   nn.Linear(hidden, act_dim), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(obs_dim + act_dim, hidden), nn.ReLU(),
                                    nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.actor_t = copy.deepcopy(self.actor)
        self.critic_t = copy.deepcopy(self.critic)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=2e-3)
        self.gamma, self.tau = gamma, tau

    def critic_loss(self, s, a, r, s2):
        with torch.no_grad():
            y = r + self.gamma * self.critic_t(torch.cat([s2, self.actor_t(s2)], 1))
        return F.mse_loss(self.critic(torch.cat([s, a], 1)), y)

    def actor_loss(self, s):
        return -self.critic(torch.cat([s, self.actor(s)], 1)).mean()

    @torch.no_grad()
    def soft_update(self):
        for net, tgt in ((self.actor, self.actor_t), (self.critic, self.critic_t)):
            for p, q in zip(net.parameters(), tgt.parameters()):
                q.lerp_(p, self.tau)


def _ddpg_actor_grads_in_critic(bug):
    torch.manual_seed(4)

    def dynamics(s, a):
        pos, vel = s[:, :1], s[:, 1:]
        vel = 0.9 * vel + 0.4 * a
        pos = pos + 0.4 * vel
        s2 = torch.cat([pos, vel], 1).clamp(-3, 3)
        return s2, -(pos ** 2 + 0.1 * a ** 2)

    N = 4000
    S = torch.rand(N, 2) * 4 - 2
    A = torch.rand(N, 1) * 2 - 1
    S2, R = dynamics(S, A)
    agent = DDPG()

    def step(i):
        j = torch.randint(0, N, (200,))
        s, a, r, s2 = S[j], A[j], R[j], S2[j]
        agent.actor_opt.zero_grad()
        agent.critic_opt.zero_grad()
        agent.actor_loss(s).backward()
        agent.actor_opt.step()
        if not bug:
            agent.critic_opt.zero_grad()
        agent.critic_loss(s, a, r, s2).backward()
        agent.critic_opt.step()
        agent.soft_update()

    @torch.no_grad()
    def probe():
        g = torch.Generator().manual_seed(9)
        s = torch.rand(300, 2, generator=g) * 3 - 1.5
        cost = 0.0
        for _ in range(20):
            s, r = dynamics(s, agent.actor(s))
            cost -= r.mean().item()
        return cost / 20

    return {"model": {"actor": agent.actor, "critic": agent.critic, "actor_target": agent.actor_t,
                      "critic_target": agent.critic_t},
            "optimizer": [agent.actor_opt, agent.critic_opt], "steps": 20, "step": step, "probe": probe}


def ddpg_actor_grads_in_critic_bad():
    return _ddpg_actor_grads_in_critic(True)


def ddpg_actor_grads_in_critic_good():
    return _ddpg_actor_grads_in_critic(False)


# --------------------------------------------------------------------------
# two tower retrieval
# --------------------------------------------------------------------------
case("two_tower_temperature_multiplied",
     "The cosine scores of the in-batch softmax are multiplied by the temperature 0.07 instead of divided: the "
     "softmax stays almost uniform and the towers hardly learn to rank.")


class Tower(nn.Module):
    def __init__(self, n_ids, n_feat, dim=32):
        super().__init__()
        self.emb = nn.Embedding(n_ids, dim)
        self.mlp = nn.Sequential(nn.Linear(dim + n_feat, 192), nn.ReLU(), nn.Linear(192, dim))

    def forward(self, ids, feats):
        z = self.mlp(torch.cat([self.emb(ids), feats], dim=1))
        return F.normalize(z, dim=1)


def _two_tower_temperature_multiplied(bug):
    torch.manual_seed(13)
    n_users, n_items, k = 400, 300, 6
    u_lat, v_lat = torch.randn(n_users, k), torch.randn(n_items, k)
    u_feat = torch.cat([u_lat, torch.randn(n_users, 4)], 1) + 0.3 * torch.randn(n_users, 10)
    v_feat = torch.cat([v_lat, torch.randn(n_items, 4)], 1) @ (torch.randn(10, 10) / 3)
    users = torch.arange(n_users).repeat_interleave(12)
    items = torch.multinomial(F.softmax(2.5 * u_lat @ v_lat.T, dim=1), 12, replacement=False).view(-1)
    held = torch.arange(len(users)) % 12 == 0
    tr_u, tr_i = users[~held], items[~held]
    te_u, te_i = users[held], items[held]

    user_tower, item_tower = Tower(n_users, 10), Tower(n_items, 10)
    params = list(user_tower.parameters()) + list(item_tower.parameters())
    optimizer = torch.optim.Adam(params, lr=3e-3)
    temperature = 0.07

    def step(i):
        b = torch.randint(0, len(tr_u), (384,))
        u = user_tower(tr_u[b], u_feat[tr_u[b]])
        v = item_tower(tr_i[b], v_feat[tr_i[b]])
        scores = u @ v.t()
        logits = scores * temperature if bug else scores / temperature
        loss = F.cross_entropy(logits, torch.arange(len(b)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        u = user_tower(te_u, u_feat[te_u])
        v = item_tower(torch.arange(n_items), v_feat)
        scores = u @ v.t()
        pos = scores.gather(1, te_i[:, None])
        return (scores > pos).float().mean().item()

    return {"model": [user_tower, item_tower], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def two_tower_temperature_multiplied_bad():
    return _two_tower_temperature_multiplied(True)


def two_tower_temperature_multiplied_good():
    return _two_tower_temperature_multiplied(False)


# --------------------------------------------------------------------------
# PINN for the heat equation
# --------------------------------------------------------------------------
case("pinn_second_derivative_no_graph",
     "The second derivative is taken without create_graph (only retain_graph), so u_xx is a constant for the "
     "backward pass: the net never learns to satisfy the diffusion term.")


def _pinn_second_derivative_no_graph(bug):
    torch.manual_seed(2)
    nu = 0.05
    net = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)

    def exact(t, x):
        return torch.exp(-4 * nu * math.pi ** 2 * t) * torch.sin(2 * math.pi * x)

    def u(t, x):
        return net(torch.cat([t, x], 1))

    def residual(t, x):
        t.requires_grad_(True)
        x.requires_grad_(True)
        out = u(t, x)
        ones = torch.ones_like(out)
        u_t = torch.autograd.grad(out, t, ones, create_graph=True)[0]
        u_x = torch.autograd.grad(out, x, ones, create_graph=True)[0]
        if bug:
            u_xx = torch.autograd.grad(u_x, x, ones, retain_graph=True)[0]
        else:
            u_xx = torch.autograd.grad(u_x, x, ones, create_graph=True)[0]
        return u_t - nu * u_xx

    def step(i):
        optimizer.zero_grad()
        f = residual(torch.rand(1000, 1), torch.rand(1000, 1))
        x0 = torch.rand(64, 1)
        ic = u(torch.zeros_like(x0), x0) - torch.sin(2 * math.pi * x0)
        tb = torch.rand(64, 1)
        bc = torch.cat([u(tb, torch.zeros_like(tb)), u(tb, torch.ones_like(tb))])
        loss = f.pow(2).mean() + 10 * ic.pow(2).mean() + 10 * bc.pow(2).mean()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        t, x = torch.meshgrid(torch.linspace(0, 1, 30), torch.linspace(0, 1, 30), indexing="ij")
        t, x = t.reshape(-1, 1), x.reshape(-1, 1)
        return ((u(t, x) - exact(t, x)).norm() / exact(t, x).norm()).item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_second_derivative_no_graph_bad():
    return _pinn_second_derivative_no_graph(True)


def pinn_second_derivative_no_graph_good():
    return _pinn_second_derivative_no_graph(False)


# --------------------------------------------------------------------------
# deep survival (Cox)
# --------------------------------------------------------------------------
case("cox_ascending_risk_set",
     "The Cox partial likelihood sorts the times ascending before logcumsumexp, so the risk set of an event holds "
     "those who left before it: the risks are learned the wrong way round.")


def _cox_ascending_risk_set(bug):
    torch.manual_seed(30)
    X = torch.randn(2000, 10)
    log_hazard = 0.8 * X[:, 0] - 0.7 * X[:, 1] + 0.6 * X[:, 2] * X[:, 3] + 0.5 * (X[:, 4] ** 2 - 1)
    T = torch.distributions.Exponential(log_hazard.exp()).sample()
    C = torch.distributions.Exponential(torch.full_like(T, 0.4)).sample()
    time, event = torch.minimum(T, C), (T <= C).float()
    Xtr, Ttr, Etr = X[:1500], time[:1500], event[:1500]
    Xte, Tte, Ete = X[1500:], time[1500:], event[1500:]

    model = nn.Sequential(nn.Linear(10, 256), nn.SELU(), nn.Linear(256, 256), nn.SELU(),
                          nn.Linear(256, 1, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)

    def cox_loss(risk, time, event):
        order = torch.argsort(time, descending=not bug)
        risk, event = risk[order], event[order]
        log_cum = torch.logcumsumexp(risk, dim=0)
        return -((risk - log_cum) * event).sum() / event.sum()

    def step(i):
        b = torch.randperm(1500)[:400]
        optimizer.zero_grad()
        loss = cox_loss(model(Xtr[b]).squeeze(-1), Ttr[b], Etr[b])
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        r = model(Xte).squeeze(-1)
        comparable = (Tte[:, None] < Tte[None, :]) & (Ete[:, None] == 1)
        concordant = (r[:, None] > r[None, :]) & comparable
        return 1.0 - (concordant.sum() / comparable.sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cox_ascending_risk_set_bad():
    return _cox_ascending_risk_set(True)


def cox_ascending_risk_set_good():
    return _cox_ascending_risk_set(False)


# --------------------------------------------------------------------------
# first order MAML on sinusoids
# --------------------------------------------------------------------------
case("fomaml_grads_stay_in_copy",
     "First order MAML adapts a deepcopy and calls backward on its query loss, but the gradients stay in the copy: "
     "the meta optimizer steps on a model without gradients and the initialisation is never learned.")


class SineTasks:
    def sample(self, shots):
        amp = 0.5 + 4.0 * torch.rand(1)
        phase = math.pi * torch.rand(1)
        x = torch.rand(2 * shots, 1) * 10 - 5
        y = amp * torch.sin(x + phase)
        return x[:shots], y[:shots], x[shots:], y[shots:]


def adapt(model, x, y, lr, n_steps):
    learner = copy.deepcopy(model)
    inner = torch.optim.SGD(learner.parameters(), lr=lr)
    for _ in range(n_steps):
        inner.zero_grad()
        F.mse_loss(learner(x), y).backward()
        inner.step()
    learner.zero_grad()
    return learner


def _fomaml_grads_stay_in_copy(bug):
    torch.manual_seed(6)
    tasks = SineTasks()
    model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    meta_opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    meta_batch = 4

    def step(i):
        meta_opt.zero_grad()
        for _ in range(meta_batch):
            xs, ys, xq, yq = tasks.sample(10)
            learner = adapt(model, xs, ys, lr=0.01, n_steps=3)
            query_loss = F.mse_loss(learner(xq), yq) / meta_batch
            query_loss.backward()
            if not bug:
                for p, q in zip(model.parameters(), learner.parameters()):
                    p.grad = q.grad.clone() if p.grad is None else p.grad + q.grad
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        meta_opt.step()

    def probe():
        rng = torch.get_rng_state()
        torch.manual_seed(1234)
        losses = []
        for _ in range(60):
            xs, ys, xq, yq = tasks.sample(10)
            learner = adapt(model, xs, ys, lr=0.01, n_steps=3)
            with torch.no_grad():
                losses.append(F.mse_loss(learner(xq), yq).item())
        torch.set_rng_state(rng)
        return sum(losses) / len(losses)

    return {"model": model, "optimizer": meta_opt, "steps": 20, "step": step, "probe": probe}


def fomaml_grads_stay_in_copy_bad():
    return _fomaml_grads_stay_in_copy(True)


def fomaml_grads_stay_in_copy_good():
    return _fomaml_grads_stay_in_copy(False)


# --------------------------------------------------------------------------
# multi task assays with missing labels
# --------------------------------------------------------------------------
case("multitask_missing_as_negative",
     "Missing assay labels (NaN) are filled with 0 and enter the BCE unmasked, so every task is trained with most "
     "of its unmeasured compounds as negatives.")


class AssayData(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class MultiTaskNet(nn.Module):
    def __init__(self, d_in, n_tasks, hidden=448):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(d_in, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.1))
        self.heads = nn.ModuleList(nn.Linear(hidden, 1) for _ in range(n_tasks))

    def forward(self, x):
        h = self.shared(x)
        return torch.cat([head(h) for head in self.heads], dim=1)


def _multitask_missing_as_negative(bug):
    torch.manual_seed(17)
    n, d, tasks = 2600, 40, 8
    x = (torch.rand(n, d) < 0.3).float()
    base = torch.randn(d, 3)
    y_full = ((x - 0.3) @ base @ torch.randn(3, tasks) + 0.3 * torch.randn(n, tasks) > 0).float()
    y = y_full.clone()
    y[torch.rand(n, tasks) < 0.6] = float("nan")
    loader = forever(DataLoader(AssayData(x[:2000], y[:2000]), batch_size=200, shuffle=True, drop_last=True))
    x_te, y_te = x[2000:], y_full[2000:]

    model = MultiTaskNet(d, tasks)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        xb, yb = next(loader)
        measured = ~torch.isnan(yb)
        per_label = F.binary_cross_entropy_with_logits(model(xb), torch.nan_to_num(yb), reduction="none")
        loss = per_label.mean() if bug else per_label[measured].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        model.eval()
        return F.binary_cross_entropy_with_logits(model(x_te), y_te).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def multitask_missing_as_negative_bad():
    return _multitask_missing_as_negative(True)


def multitask_missing_as_negative_good():
    return _multitask_missing_as_negative(False)


# --------------------------------------------------------------------------
# denoising autoencoder for sensor anomalies
# --------------------------------------------------------------------------
case("dae_noisy_target",
     "The denoising autoencoder is asked to reproduce its own corrupted input instead of the clean one, so it "
     "learns the identity and reconstructs anomalies as well as normal data.")


class DenoisingAE(nn.Module):
    def __init__(self, d, width=512, sigma=1.0):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, width), nn.ReLU())
        self.dec = nn.Linear(width, d)
        self.sigma = sigma

    def corrupt(self, x):
        return x + self.sigma * torch.randn_like(x)

    def forward(self, x):
        return self.dec(self.enc(x))


def _dae_noisy_target(bug):
    torch.manual_seed(19)
    d, latent = 64, 4
    mix = torch.randn(latent, d) / latent ** 0.5 * 1.5
    normal = torch.tanh(torch.randn(3000, latent)) @ mix + 0.1 * torch.randn(3000, d)
    train, test_ok = normal[:2400], normal[2400:]
    anomalies = test_ok[:300] + 0.3 * torch.randn(300, d)
    model = DenoisingAE(d)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        clean = train[torch.randint(0, len(train), (512,))]
        x = model.corrupt(clean)
        target = x if bug else clean
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        score = lambda z: (model(z) - z).pow(2).mean(1)
        a, b = score(anomalies), score(test_ok[300:])
        auc = (a[:, None] > b[None, :]).float().mean().item()
        return 1.0 - auc + 0.01

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dae_noisy_target_bad():
    return _dae_noisy_target(True)


def dae_noisy_target_good():
    return _dae_noisy_target(False)


# --------------------------------------------------------------------------
# Bayes by backprop
# --------------------------------------------------------------------------
case("bbb_kl_not_scaled",
     "The mean likelihood of a batch is added to the full KL without dividing the KL by the size of the data set: "
     "the prior drowns the data and the posterior collapses on it.")


class BayesLinear(nn.Module):
    def __init__(self, d_in, d_out, prior_std=1.0):
        super().__init__()
        self.w_mu = nn.Parameter(torch.randn(d_out, d_in) / d_in ** 0.5)
        self.w_rho = nn.Parameter(torch.full((d_out, d_in), -4.0))
        self.b_mu = nn.Parameter(torch.zeros(d_out))
        self.b_rho = nn.Parameter(torch.full((d_out,), -4.0))
        self.prior_std = prior_std

    def forward(self, x):
        w = self.w_mu + F.softplus(self.w_rho) * torch.randn_like(self.w_mu)
        b = self.b_mu + F.softplus(self.b_rho) * torch.randn_like(self.b_mu)
        return F.linear(x, w, b)

    def kl(self):
        total = 0.0
        for mu, rho in ((self.w_mu, self.w_rho), (self.b_mu, self.b_rho)):
            s = F.softplus(rho)
            total = total + (math.log(self.prior_std) - s.log()
                             + (s ** 2 + mu ** 2) / (2 * self.prior_std ** 2) - 0.5).sum()
        return total


class BayesMLP(nn.Module):
    def __init__(self, d_in, hidden=192):
        super().__init__()
        self.l1 = BayesLinear(d_in, hidden)
        self.l2 = BayesLinear(hidden, hidden)
        self.l3 = BayesLinear(hidden, 1)

    def forward(self, x):
        return self.l3(F.relu(self.l2(F.relu(self.l1(x))))).squeeze(-1)

    def kl(self):
        return self.l1.kl() + self.l2.kl() + self.l3.kl()


def _bbb_kl_not_scaled(bug):
    torch.manual_seed(23)
    n_train = 5000
    x = torch.randn(n_train + 500, 8)
    y = torch.sin(x[:, 0] * 1.5) + 0.6 * x[:, 1] * (x[:, 2] > 0) - 0.5 * x[:, 3] + 0.1 * torch.randn(len(x))
    model = BayesMLP(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    noise_std = 0.3

    def step(i):
        idx = torch.randint(0, n_train, (384,))
        pred = model(x[idx])
        nll = 0.5 * ((pred - y[idx]) / noise_std).pow(2).mean()
        kl = model.kl() if bug else model.kl() / n_train
        loss = nll + kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            preds = torch.stack([model(x[n_train:]) for _ in range(20)]).mean(0)
        return (preds - y[n_train:]).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bbb_kl_not_scaled_bad():
    return _bbb_kl_not_scaled(True)


def bbb_kl_not_scaled_good():
    return _bbb_kl_not_scaled(False)


# --------------------------------------------------------------------------
# mixture density network
# --------------------------------------------------------------------------
case("mdn_mean_of_logs",
     "The mixture likelihood is written as the weighted sum of the components' log probabilities instead of the "
     "logsumexp: the components are never told apart and the modes are blurred together.")


class MDN(nn.Module):
    def __init__(self, d_in, n_comp=5, hidden=160):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d_in, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.pi = nn.Linear(hidden, n_comp)
        self.mu = nn.Linear(hidden, n_comp)
        self.log_sigma = nn.Linear(hidden, n_comp)

    def forward(self, x):
        h = self.body(x)
        return F.log_softmax(self.pi(h), dim=1), self.mu(h), self.log_sigma(h).clamp(-4, 4).exp()


def _mdn_mean_of_logs(bug):
    torch.manual_seed(29)
    y_all = torch.rand(3000, 1) * 20 - 10
    x_all = torch.sin(0.75 * y_all) * 7 + y_all * 0.5 + 0.5 * torch.randn_like(y_all)
    x_all = x_all / 10
    model = MDN(1)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)

    def component_log_prob(x, y):
        log_pi, mu, sigma = model(x)
        return log_pi, torch.distributions.Normal(mu, sigma).log_prob(y)

    def step(i):
        b = torch.randint(0, 2500, (640,))
        log_pi, log_p = component_log_prob(x_all[b], y_all[b])
        if bug:
            loss = -(log_pi.exp() * log_p).sum(dim=1).mean()
        else:
            loss = -torch.logsumexp(log_pi + log_p, dim=1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()

    @torch.no_grad()
    def probe():
        log_pi, log_p = component_log_prob(x_all[2500:], y_all[2500:])
        return -torch.logsumexp(log_pi + log_p, dim=1).mean().item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def mdn_mean_of_logs_bad():
    return _mdn_mean_of_logs(True)


def mdn_mean_of_logs_good():
    return _mdn_mean_of_logs(False)


# --------------------------------------------------------------------------
# point clouds
# --------------------------------------------------------------------------
case("pointnet_view_not_transpose",
     "The (B, N, 3) clouds are brought to (B, 3, N) with view instead of transpose, so the coordinates of different "
     "points are mixed up and the shape is hardly recognisable.")


class PointNet(nn.Module):
    def __init__(self, n_cls):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Conv1d(3, 48, 1), nn.BatchNorm1d(48), nn.ReLU(),
            nn.Conv1d(48, 96, 1), nn.BatchNorm1d(96), nn.ReLU(),
        )
        self.fc = nn.Sequential(nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, n_cls))

    def forward(self, x):
        return self.fc(self.mlp(x).max(dim=2).values)


def make_clouds(n, pts):
    labels = torch.randint(0, 4, (n,))
    out = torch.empty(n, pts, 3)
    for c in range(4):
        m = labels == c
        k = int(m.sum())
        z = torch.randn(k, pts, 3)
        if c == 0:
            p = F.normalize(z, dim=2)
        elif c == 1:
            cube = torch.rand(k, pts, 3) * 2 - 1
            p = cube / cube.abs().max(dim=2, keepdim=True).values
            p = p * 0.75
        elif c == 2:
            ring = F.normalize(z[..., :2], dim=2)
            p = torch.cat([ring, torch.rand(k, pts, 1) * 2 - 1], 2) * 0.85
        else:
            p = F.normalize(z.abs() ** 0.5 * z.sign(), p=1, dim=2) * 1.2
        out[m] = p
    q, _ = torch.linalg.qr(torch.randn(n, 3, 3))
    scale = 0.8 + 0.4 * torch.rand(n, 1, 1)
    return out @ q * scale + 0.02 * torch.randn(n, pts, 3), labels


def _pointnet_view_not_transpose(bug):
    torch.manual_seed(31)
    train_x, train_y = make_clouds(1500, 96)
    test_x, test_y = make_clouds(400, 96)
    net = PointNet(4)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def channels_first(pts):
        B, N, C = pts.shape
        return pts.reshape(B, C, N) if bug else pts.transpose(1, 2)

    def step(i):
        net.train()
        b = torch.randint(0, len(train_x), (32,))
        logits = net(channels_first(train_x[b]))
        loss = F.cross_entropy(logits, train_y[b])
        opt.zero_grad()
        loss.backward()
        opt.step()

    def probe():
        net.eval()
        with torch.no_grad():
            return F.cross_entropy(net(channels_first(test_x)), test_y).item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def pointnet_view_not_transpose_bad():
    return _pointnet_view_not_transpose(True)


def pointnet_view_not_transpose_good():
    return _pointnet_view_not_transpose(False)


# --------------------------------------------------------------------------
# sequence tagging
# --------------------------------------------------------------------------
case("tagger_lstm_batch_as_time",
     "The BiLSTM is built without batch_first although it gets (B, T, E): it runs along the batch, so a token's "
     "neighbours are tokens of other sentences.")


class Tagger(nn.Module):
    def __init__(self, vocab, n_tags, emb=32, hidden=32, **lstm_args):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb, padding_idx=0)
        self.lstm = nn.LSTM(emb, hidden, bidirectional=True, **lstm_args)
        self.out = nn.Linear(2 * hidden, n_tags)

    def forward(self, tokens):
        h, _ = self.lstm(self.emb(tokens))
        return self.out(h)


def _tagger_lstm_batch_as_time(bug):
    torch.manual_seed(37)
    vocab, n_tags, T = 60, 5, 18

    def corpus(n):
        x = torch.randint(1, vocab, (n, T))
        prev = torch.cat([torch.zeros(n, 1, dtype=torch.long), x[:, :-1]], 1)
        y = torch.where(prev < 25, x % n_tags, (x % n_tags + 2) % n_tags)
        lengths = torch.randint(8, T + 1, (n, 1))
        pad = torch.arange(T) >= lengths
        return x.masked_fill(pad, 0), y.masked_fill(pad, -100)

    train = TensorDataset(*corpus(2000))
    xt, yt = corpus(400)
    batches = forever(DataLoader(train, batch_size=64, shuffle=True))
    model = Tagger(vocab, n_tags) if bug else Tagger(vocab, n_tags, batch_first=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loss_fn = nn.CrossEntropyLoss(ignore_index=-100)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        logits = model(x)
        loss = loss_fn(logits.flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

    @torch.no_grad()
    def probe():
        model.eval()
        keep = yt != -100
        return (model(xt).argmax(-1)[keep] != yt[keep]).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tagger_lstm_batch_as_time_bad():
    return _tagger_lstm_batch_as_time(True)


def tagger_lstm_batch_as_time_good():
    return _tagger_lstm_batch_as_time(False)


# --------------------------------------------------------------------------
# molecules, energy regression with gradient accumulation
# --------------------------------------------------------------------------
case("molecule_accum_zero_grad_inside",
     "zero_grad sits inside the accumulation loop: of the four micro batches (sorted by molecule size to save padding) "
     "only the last one, the largest molecules, ever reaches the optimizer.")


class MolNet(nn.Module):
    def __init__(self, n_types=5, dim=32, layers=2):
        super().__init__()
        self.emb = nn.Embedding(n_types + 1, dim, padding_idx=0)
        self.msg = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.upd = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(layers))
        self.readout = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))

    def forward(self, z, adj):
        mask = (z > 0).float().unsqueeze(-1)
        h = self.emb(z)
        for msg, upd in zip(self.msg, self.upd):
            m = adj @ msg(h)
            h = h + F.silu(upd(torch.cat([h, m], -1))) * mask
        return (self.readout(h) * mask).sum(1).squeeze(-1) / 10


def make_molecules(n, max_atoms=18, n_types=5):
    size = torch.randint(5, max_atoms + 1, (n,))
    z = torch.randint(1, n_types + 1, (n, max_atoms))
    real = torch.arange(max_atoms) < size[:, None]
    z = z * real
    adj = torch.zeros(n, max_atoms, max_atoms)
    for a in range(1, max_atoms):
        parent = (torch.rand(n) * a).long()
        ok = real[:, a].float()
        adj[torch.arange(n), a, parent] = ok
        adj[torch.arange(n), parent, a] = ok
    atom = torch.tensor([0.0, -1.0, -2.5, -0.5, -3.0, -1.7])
    bond = torch.randn(n_types + 1, n_types + 1)
    bond = (bond + bond.T) * 0.4
    energy = atom[z].sum(1) + 0.5 * (adj * bond[z[:, :, None], z[:, None, :]]).sum((1, 2))
    return z, adj, energy, size


def _molecule_accum_zero_grad_inside(bug):
    torch.manual_seed(41)
    z, adj, energy, size = make_molecules(2000)
    n_train = 1600
    mean, std = energy[:n_train].mean(), energy[:n_train].std()
    model = MolNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    accumulate = 4

    def micro_batches():
        idx = torch.randint(0, n_train, (96,))
        idx = idx[torch.argsort(size[idx])]
        for part in idx.chunk(accumulate):
            m = int(size[part].max())
            yield z[part, :m], adj[part, :m, :m], energy[part]

    def step(i):
        optimizer.zero_grad()
        for zb, ab, eb in micro_batches():
            if bug:
                optimizer.zero_grad()
            loss = F.smooth_l1_loss(model(zb, ab), (eb - mean) / std)
            (loss / accumulate).backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        pred = model(z[n_train:], adj[n_train:]) * std + mean
        return (pred - energy[n_train:]).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def molecule_accum_zero_grad_inside_bad():
    return _molecule_accum_zero_grad_inside(True)


def molecule_accum_zero_grad_inside_good():
    return _molecule_accum_zero_grad_inside(False)


# --------------------------------------------------------------------------
# differentiable control
# --------------------------------------------------------------------------
case("control_rollout_detached",
     "The state is detached in every step of the differentiable rollout, so the policy only sees the immediate "
     "effect of its action and never the later cost.")


class Pendulum:
    dt, g, damping = 0.1, 3.0, 0.2

    def __call__(self, state, torque):
        theta, omega = state[:, :1], state[:, 1:]
        theta = theta + self.dt * omega
        omega = omega + self.dt * (self.g * torch.sin(theta) - self.damping * omega + torque)
        return torch.cat([theta, omega], 1)


def _control_rollout_detached(bug):
    torch.manual_seed(43)
    dynamics = Pendulum()
    policy = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)

    def rollout(state, horizon, carry):
        cost = 0.0
        for _ in range(horizon):
            torque = 8 * torch.tanh(policy(state))
            state = dynamics(state, torque)
            cost = cost + (state[:, 0] ** 2 + 0.02 * state[:, 1] ** 2 + 0.001 * torque[:, 0] ** 2).mean()
            state = carry(state)
        return cost / horizon

    def step(i):
        start = (torch.rand(64, 2) * 2 - 1) * torch.tensor([1.5, 1.0])
        optimizer.zero_grad()
        loss = rollout(start, 30, torch.detach if bug else (lambda s: s))
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 5.0)
        optimizer.step()

    @torch.no_grad()
    def probe():
        g = torch.Generator().manual_seed(3)
        start = (torch.rand(256, 2, generator=g) * 2 - 1) * torch.tensor([1.5, 1.0])
        return rollout(start, 50, lambda s: s).item()

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def control_rollout_detached_bad():
    return _control_rollout_detached(True)


def control_rollout_detached_good():
    return _control_rollout_detached(False)


# --------------------------------------------------------------------------
# continual learning with EWC
# --------------------------------------------------------------------------
case("ewc_anchor_aliased",
     "The EWC anchor keeps p.data without a clone, so it moves along with the weights: the penalty is always zero "
     "and the first task is forgotten.")


class EWC:
    def __init__(self, model, x, y, clone):
        self.anchor = {n: (p.data.clone() if clone else p.data) for n, p in model.named_parameters()}
        self.fisher = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        for xi, yi in zip(x.split(1), y.split(1)):
            model.zero_grad()
            F.cross_entropy(model(xi), yi).backward()
            for n, p in model.named_parameters():
                self.fisher[n] += p.grad.detach() ** 2 / len(x)
        model.zero_grad()

    def penalty(self, model):
        return sum((self.fisher[n] * (p - self.anchor[n]) ** 2).sum() for n, p in model.named_parameters())


def _ewc_anchor_aliased(bug):
    torch.manual_seed(47)
    d, k = 40, 4

    centres = torch.randn(2, k, d)
    gate = torch.randn(2, d)

    def task(t, n):
        y = torch.randint(0, k, (n,))
        return centres[t][y] * 0.6 + gate[t] + 0.8 * torch.randn(n, d), y

    xa, ya = task(0, 1500)
    xb, yb = task(1, 1500)
    xa_te, ya_te = task(0, 400)
    xb_te, yb_te = task(1, 400)
    model = nn.Sequential(nn.Linear(d, 1024), nn.ReLU(), nn.Linear(1024, k))
    first = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(150):
        j = torch.randint(0, 1500, (64,))
        first.zero_grad()
        F.cross_entropy(model(xa[j]), ya[j]).backward()
        first.step()

    ewc = EWC(model, xa[:200], ya[:200], clone=not bug)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    lam = 300.0

    def step(i):
        j = torch.randint(0, 1500, (800,))
        loss = F.cross_entropy(model(xb[j]), yb[j]) + 0.5 * lam * ewc.penalty(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        la = F.cross_entropy(model(xa_te), ya_te)
        lb = F.cross_entropy(model(xb_te), yb_te)
        return (0.5 * (la + lb)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ewc_anchor_aliased_bad():
    return _ewc_anchor_aliased(True)


def ewc_anchor_aliased_good():
    return _ewc_anchor_aliased(False)


# --------------------------------------------------------------------------
# mixed precision loop
# --------------------------------------------------------------------------
case("amp_clip_before_unscale",
     "The gradients are clipped to norm 1 while still multiplied by the loss scale (no scaler.unscale_), so the SGD "
     "updates come out some 65536 times too small.")


class AmpTrainer:
    def __init__(self, model, optimizer, max_norm, unscale):
        self.model, self.optimizer, self.max_norm, self.unscale = model, optimizer, max_norm, unscale
        self.scaler = torch.amp.GradScaler("cpu")

    def train_batch(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        if self.unscale:
            self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


def spiral_rows(n, d=16, k=4, seed=0):
    g = torch.Generator().manual_seed(100)
    proj = torch.randn(2, d, generator=g)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, k, (n,), generator=g)
    r = torch.rand(n, generator=g)
    ang = 3 * r + y * 2 * math.pi / k + 0.15 * torch.randn(n, generator=g)
    xy = torch.stack([r * ang.cos(), r * ang.sin()], 1) * 2
    return xy @ proj + 0.05 * torch.randn(n, d, generator=g), y


def _amp_clip_before_unscale(bug):
    torch.manual_seed(53)
    x, y = spiral_rows(3000, seed=1)
    xv, yv = spiral_rows(600, seed=2)
    model = nn.Sequential(nn.Linear(16, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = AmpTrainer(model, optimizer, 1.0, unscale=not bug)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=400, shuffle=True))

    def step(i):
        xb, yb = next(loader)
        trainer.train_batch(xb, yb)

    @torch.no_grad()
    def probe():
        return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_before_unscale_bad():
    return _amp_clip_before_unscale(True)


def amp_clip_before_unscale_good():
    return _amp_clip_before_unscale(False)


# --------------------------------------------------------------------------
# EMA of a network with BatchNorm
# --------------------------------------------------------------------------
case("ema_without_bn_buffers",
     "The EMA model averages only parameters(); the BatchNorm running statistics of the copy stay at their initial "
     "0 and 1, so the evaluated EMA net is wrong although the trained net is fine.")


class ModelEMA:
    def __init__(self, model, decay, with_buffers):
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        self.with_buffers = with_buffers

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p, alpha=1 - self.decay)
        if self.with_buffers:
            for e, b in zip(self.module.buffers(), model.buffers()):
                e.copy_(b)


def _ema_without_bn_buffers(bug):
    torch.manual_seed(59)
    n = 3000
    x = torch.randn(n, 10) * torch.linspace(0.5, 4, 10) + torch.linspace(-3, 3, 10)
    score = torch.stack([x[:, 0] * 2 - x[:, 1], x[:, 2] + 0.3 * x[:, 5], 0.3 * x[:, 3] * x[:, 4].sign()], 1)
    y = (score - score.mean(0)).argmax(1)
    model = nn.Sequential(nn.Linear(10, 256), nn.BatchNorm1d(256), nn.ReLU(),
                          nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    ema = ModelEMA(model, 0.95, with_buffers=not bug)

    def step(i):
        model.train()
        b = torch.randint(0, 2400, (400,))
        loss = F.cross_entropy(model(x[b]), y[b])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)

    @torch.no_grad()
    def probe():
        return F.cross_entropy(ema.module(x[2400:]), y[2400:]).item()

    return {"model": {"model": model, "ema": ema.module}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": probe}


def ema_without_bn_buffers_bad():
    return _ema_without_bn_buffers(True)


def ema_without_bn_buffers_good():
    return _ema_without_bn_buffers(False)
