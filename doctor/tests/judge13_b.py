"""Twenty-two small programs of everything but pictures, each with one bug that people often make, and a
mended twin, by somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""
# ruff: noqa

import copy
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


# --------------------------------------------------------------------------- shared data and small environments
def _gen(seed):
    return torch.Generator().manual_seed(seed)


class CartPoles:
    """n cart-poles side by side; an episode ends only when the pole falls or the cart leaves the track."""

    def __init__(self, n, seed):
        self.n, self.g = n, _gen(seed)
        self.s = self._fresh(n)

    def _fresh(self, n):
        return torch.rand(n, 4, generator=self.g) * 0.3 - 0.15

    @staticmethod
    def physics(s, a):
        x, xd, th, thd = s.unbind(1)
        force = torch.where(a == 1, 10.0, -10.0)
        c, sn = th.cos(), th.sin()
        temp = (force + 0.05 * thd**2 * sn) / 1.1
        tha = (9.8 * sn - c * temp) / (0.5 * (4.0 / 3.0 - 0.1 * c**2 / 1.1))
        xa = temp - 0.05 * tha * c / 1.1
        dt = 0.04
        s = torch.stack([x + dt * xd, xd + dt * xa, th + dt * thd, thd + dt * tha], 1)
        done = (s[:, 0].abs() > 2.4) | (s[:, 2].abs() > 0.21)
        return s, done

    def step(self, a):
        nxt, done = self.physics(self.s, a)
        self.s = torch.where(done[:, None], self._fresh(self.n), nxt)
        return nxt, torch.ones(self.n), done.float()


def cartpole_lost_steps(greedy, horizon=150):
    """Average number of steps, out of the horizon, that the greedy policy does not survive."""
    s = torch.rand(24, 4, generator=_gen(99)) * 0.3 - 0.15
    alive = torch.ones(24, dtype=torch.bool)
    lived = torch.zeros(24)
    with torch.no_grad():
        for _ in range(horizon):
            s, done = CartPoles.physics(s, greedy(s))
            alive &= ~done
            lived += alive.float()
            s = torch.where(alive[:, None], s, torch.zeros_like(s))
    return float((horizon - lived).mean())


class PointMass:
    """A sled on a line, pushed by a force in [-1, 1]; the reward is for being at the origin."""

    def __init__(self, n, seed, horizon=40):
        self.n, self.g, self.h, self.t = n, _gen(seed), horizon, 0
        self.s = self.fresh(n, self.g)

    @staticmethod
    def fresh(n, g):
        return torch.stack([torch.rand(n, generator=g) * 3 - 1.5, torch.rand(n, generator=g) * 2 - 1], 1)

    @staticmethod
    def physics(s, a):
        x, v = s[:, 0], s[:, 1]
        r = -0.25 * (x**2 + 0.1 * v**2)
        v = 0.95 * v + 0.3 * a.squeeze(1).clamp(-1, 1)
        return torch.stack([(x + 0.2 * v).clamp(-3, 3), v], 1), r

    def step(self, a):
        s = self.s
        nxt, r = self.physics(s, a)
        self.t += 1
        self.s = self.fresh(self.n, self.g) if self.t % self.h == 0 else nxt
        return s, r, nxt


def pointmass_cost(policy):
    s = PointMass.fresh(32, _gen(77))
    cost = 0.0
    with torch.no_grad():
        for _ in range(40):
            s, r = PointMass.physics(s, policy(s))
            cost -= r.mean().item()
    return cost / 40


class Replay:
    def __init__(self, cap):
        self.cap, self.data, self.pos = cap, None, 0
        self.size = 0

    def push(self, *cols):
        n = cols[0].shape[0]
        if self.data is None:
            self.data = [torch.zeros((self.cap,) + c.shape[1:], dtype=c.dtype) for c in cols]
        idx = (torch.arange(n) + self.pos) % self.cap
        for d, c in zip(self.data, cols):
            d[idx] = c
        self.pos = (self.pos + n) % self.cap
        self.size = min(self.cap, self.size + n)

    def sample(self, n):
        idx = torch.randint(0, self.size, (n,))
        return [d[idx] for d in self.data]


def endless(loader):
    while True:
        for batch in loader:
            yield batch


def make_table(n, d, seed, noise=0.1, wseed=5):
    """A smooth non-linear table, features about unit scale."""
    gw, g = _gen(wseed), _gen(seed)
    w1 = torch.randn(d, 6, generator=gw) / d**0.5
    w2 = torch.randn(6, generator=gw)
    x = torch.randn(n, d, generator=g)
    y = torch.sin(2 * (x @ w1)) @ w2 + noise * torch.randn(n, generator=g)
    return x, y


def make_waves(n, seed, length=32):
    """Sensor windows: 2 channels, five kinds of vibration."""
    g = _gen(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    t = torch.arange(length) / length
    f = 1.5 + 1.0 * y[:, None].float() + 0.3 * torch.randn(n, 1, generator=g)
    ph = torch.rand(n, 1, generator=g) * 6.283
    a = torch.sin(6.283 * f * t + ph)
    b = torch.cos(6.283 * f * t + ph) * (1 + 0.2 * y[:, None])
    x = torch.stack([a, b], 1) + 0.5 * torch.randn(n, 2, length, generator=g)
    return x, y


def auc_error(score_neg, score_pos):
    return float((score_neg[:, None] >= score_pos[None, :]).float().mean())


CASES = [
    {
        "name": "dqn_no_done_mask",
        "what": "The one-step Q target bootstraps from the next state even when the episode ended there: the (1 - done) factor is missing, so falling over costs nothing.",
        "steps": 4000,
    },
    {
        "name": "bandit_gather_broadcast",
        "what": "gather() leaves the chosen arm's prediction as (N, 1) while the rewards are (N,), so the squared error is taken over an N x N matrix and every arm learns the average reward.",
        "steps": 400,
    },
    {
        "name": "sac_sample_not_rsample",
        "what": "The policy draws its action with sample() instead of rsample(), so no gradient of Q with respect to the action reaches the actor.",
        "steps": 700,
    },
    {
        "name": "ddpg_soft_update_rebinds",
        "what": "The soft update assigns to the loop variable (tp = ...) instead of writing into the target parameter, so both target networks keep their random start for ever.",
        "steps": 900,
    },
    {
        "name": "lstm_batch_first_missing",
        "what": "The windows are (batch, time, feature) but the LSTM was built without batch_first=True, so it recurs over the batch and each forecast sees only the last reading.",
        "steps": 400,
    },
    {
        "name": "transformer_pad_mask_inverted",
        "what": "src_key_padding_mask is given True for the real measurements (it must be True for padding), so attention sees the padding and ignores the data.",
        "steps": 400,
    },
    {
        "name": "sensor_sorted_no_shuffle",
        "what": "The training windows are stored class after class and the DataLoader does not shuffle, so every batch holds one class only.",
        "steps": 330,
    },
    {
        "name": "fraud_pos_weight_inverted",
        "what": "pos_weight is computed as positives / negatives instead of negatives / positives, so the rare class is weighted down rather than up.",
        "steps": 400,
    },
    {
        "name": "cox_risk_set_order",
        "what": "The Cox partial likelihood sorts by ascending time before the cumulative log-sum-exp, so each risk set holds those who failed earlier instead of those still at risk.",
        "steps": 300,
    },
    {
        "name": "ncf_double_sigmoid",
        "what": "The network already ends in a sigmoid and its output is then given to BCEWithLogitsLoss, which applies a second sigmoid.",
        "steps": 600,
    },
    {
        "name": "two_tower_one_tower_in_optimizer",
        "what": "Only the query tower's parameters are given to the optimizer; the item tower stays at its random start.",
        "steps": 400,
    },
    {
        "name": "gcn_randn_init",
        "what": "The hand-written graph convolution makes its weight with torch.randn and never scales it by the fan-in, so activations and logits start tens of times too large.",
        "steps": 120,
    },
    {
        "name": "ctc_softmax_no_log",
        "what": "CTCLoss is fed softmax probabilities; it expects log-probabilities (log_softmax).",
        "steps": 400,
    },
    {
        "name": "pinn_second_derivative_cut",
        "what": "The second derivative is taken with autograd.grad without create_graph=True, so the PDE residual carries no gradient and only the boundary term trains the network.",
        "steps": 500,
    },
    {
        "name": "bbb_kl_unscaled",
        "what": "The likelihood term is averaged over the batch but the whole KL is added to it without dividing by the number of training points, so the prior outweighs the data about a thousandfold.",
        "steps": 1000,
    },
    {
        "name": "maml_query_on_unadapted",
        "what": "The outer (query) loss is computed with the initial weights instead of the adapted ones, so the meta-learner never optimises what happens after the inner step.",
        "steps": 800,
    },
    {
        "name": "multitask_loss_rewrapped",
        "what": "The task losses are put into a new tensor with requires_grad=True before summing, so backward() ends in that new leaf and the network gets no gradient.",
        "steps": 300,
    },
    {
        "name": "fedavg_state_dict_alias",
        "what": "Each client's state_dict() is kept without a copy, so all the kept dictionaries point at the one working network and the average is simply the last client's weights.",
        "steps": 80,
    },
    {
        "name": "steplr_stepped_per_batch",
        "what": "StepLR was set up in epochs (halve every 5) but scheduler.step() runs after every batch, so the rate is gone within a few dozen batches.",
        "steps": 320,
    },
    {
        "name": "amp_clip_without_unscale",
        "what": "Gradients are clipped while still multiplied by the GradScaler's scale (no scaler.unscale_ first), so the true gradients end up tens of thousands of times too small.",
        "steps": 300,
    },
    {
        "name": "eval_never_back_to_train",
        "what": "validate() puts the model in eval mode every epoch and nothing puts it back, so from the second epoch on dropout is off and batch norm is frozen.",
        "steps": 320,
    },
    {
        "name": "dae_target_is_noisy_input",
        "what": "The denoising autoencoder is trained to reproduce the corrupted input instead of the clean one, so it learns the identity and reconstructs anomalies as well.",
        "steps": 600,
    },
]

PROBES = {
    "dqn_no_done_mask": "greedy CartPole: steps of 150 not survived (24 fixed starts)",
    "bandit_gather_broadcast": "mean regret of the greedy arm on held-out contexts",
    "sac_sample_not_rsample": "mean control cost of the deterministic policy over 40 steps from 32 fixed starts",
    "ddpg_soft_update_rebinds": "mean control cost of the deterministic policy over 40 steps from 32 fixed starts",
    "lstm_batch_first_missing": "held-out RMSE of the one-step forecast (standardised units)",
    "transformer_pad_mask_inverted": "held-out error rate",
    "sensor_sorted_no_shuffle": "held-out error rate over five classes",
    "fraud_pos_weight_inverted": "balanced error rate at threshold 0.5 on held-out data",
    "cox_risk_set_order": "1 - concordance index on held-out patients",
    "ncf_double_sigmoid": "held-out log loss of the predicted click probability",
    "two_tower_one_tower_in_optimizer": "held-out 1 - recall@1 among 100 candidates",
    "gcn_randn_init": "log loss on the unlabelled nodes",
    "ctc_softmax_no_log": "held-out phone error rate by greedy decoding",
    "pinn_second_derivative_cut": "relative L2 error against the exact solution",
    "bbb_kl_unscaled": "held-out RMSE of the posterior mean prediction",
    "maml_query_on_unadapted": "query MSE on 40 held-out tasks after one inner step",
    "multitask_loss_rewrapped": "mean of held-out RMSE (task 1) and error rate (task 2)",
    "fedavg_state_dict_alias": "error rate of the global model on held-out data of all clients",
    "steplr_stepped_per_batch": "held-out RMSE (standardised units)",
    "amp_clip_without_unscale": "held-out error rate over five classes",
    "eval_never_back_to_train": "held-out cross-entropy",
    "dae_target_is_noisy_input": "1 - AUC of reconstruction error, anomalies against normal readings",
}


def dqn_no_done_mask_bad():
    torch.manual_seed(0)
    env = CartPoles(8, seed=1)
    memory = Replay(10000)
    gamma, batch_size = 0.95, 64

    def make_q():
        return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    policy_net, target_net = make_q(), make_q()
    target_net.load_state_dict(policy_net.state_dict())
    target_net.eval()
    optimizer = torch.optim.Adam(policy_net.parameters(), lr=1e-3)

    def act(state, eps):
        with torch.no_grad():
            a = policy_net(state).argmax(1)
        return torch.where(torch.rand(len(a)) < eps, torch.randint(0, 2, a.shape), a)

    def collect(eps):
        state = env.s
        action = act(state, eps)
        next_state, reward, done = env.step(action)
        memory.push(state, action, reward, next_state, done)

    for _ in range(60):
        collect(1.0)

    def step(i):
        collect(max(0.05, 1.0 - i / 800))
        state, action, reward, next_state, done = memory.sample(batch_size)
        q = policy_net(state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_q = target_net(next_state).max(1).values
            target = reward + gamma * next_q
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % 100 == 0:
            target_net.load_state_dict(policy_net.state_dict())
        return loss.item()

    def probe():
        return cartpole_lost_steps(lambda s: policy_net(s).argmax(1))

    return {"model": policy_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_no_done_mask_good():
    torch.manual_seed(0)
    env = CartPoles(8, seed=1)
    memory = Replay(10000)
    gamma, batch_size = 0.95, 64

    def make_q():
        return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    policy_net, target_net = make_q(), make_q()
    target_net.load_state_dict(policy_net.state_dict())
    target_net.eval()
    optimizer = torch.optim.Adam(policy_net.parameters(), lr=1e-3)

    def act(state, eps):
        with torch.no_grad():
            a = policy_net(state).argmax(1)
        return torch.where(torch.rand(len(a)) < eps, torch.randint(0, 2, a.shape), a)

    def collect(eps):
        state = env.s
        action = act(state, eps)
        next_state, reward, done = env.step(action)
        memory.push(state, action, reward, next_state, done)

    for _ in range(60):
        collect(1.0)

    def step(i):
        collect(max(0.05, 1.0 - i / 800))
        state, action, reward, next_state, done = memory.sample(batch_size)
        q = policy_net(state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_q = target_net(next_state).max(1).values
            target = reward + gamma * next_q * (1 - done)
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % 100 == 0:
            target_net.load_state_dict(policy_net.state_dict())
        return loss.item()

    def probe():
        return cartpole_lost_steps(lambda s: policy_net(s).argmax(1))

    return {"model": policy_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bandit_gather_broadcast_bad():
    torch.manual_seed(0)
    n_arms, d = 5, 10
    gw = _gen(51)
    W1 = torch.randn(d, 12, generator=gw) / d**0.5
    W2 = torch.randn(12, n_arms, generator=gw) / 12**0.5

    def expected_reward(ctx):
        return torch.sigmoid(3 * torch.tanh(1.5 * ctx @ W1) @ W2)

    class RewardNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(d, 64)
            self.fc2 = nn.Linear(64, 64)
            self.out = nn.Linear(64, n_arms)

        def forward(self, ctx):
            return self.out(F.relu(self.fc2(F.relu(self.fc1(ctx)))))

    net = RewardNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    memory = Replay(8000)

    def interact(n, eps):
        ctx = torch.randn(n, d)
        with torch.no_grad():
            greedy = net(ctx).argmax(dim=1)
        arm = torch.where(torch.rand(n) < eps, torch.randint(0, n_arms, (n,)), greedy)
        reward = torch.bernoulli(expected_reward(ctx).gather(1, arm.unsqueeze(1)).squeeze(1))
        memory.push(ctx, arm, reward)

    interact(512, 1.0)

    def step(t):
        interact(32, max(0.1, 1.0 - t / 200))
        ctx, arm, reward = memory.sample(128)
        pred = net(ctx).gather(1, arm.unsqueeze(1))
        loss = (pred - reward).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    test_ctx = torch.randn(1000, d, generator=_gen(7))

    def probe():
        value = expected_reward(test_ctx)
        with torch.no_grad():
            arm = net(test_ctx).argmax(dim=1)
        return (value.max(1).values - value.gather(1, arm.unsqueeze(1)).squeeze(1)).mean().item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bandit_gather_broadcast_good():
    torch.manual_seed(0)
    n_arms, d = 5, 10
    gw = _gen(51)
    W1 = torch.randn(d, 12, generator=gw) / d**0.5
    W2 = torch.randn(12, n_arms, generator=gw) / 12**0.5

    def expected_reward(ctx):
        return torch.sigmoid(3 * torch.tanh(1.5 * ctx @ W1) @ W2)

    class RewardNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(d, 64)
            self.fc2 = nn.Linear(64, 64)
            self.out = nn.Linear(64, n_arms)

        def forward(self, ctx):
            return self.out(F.relu(self.fc2(F.relu(self.fc1(ctx)))))

    net = RewardNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    memory = Replay(8000)

    def interact(n, eps):
        ctx = torch.randn(n, d)
        with torch.no_grad():
            greedy = net(ctx).argmax(dim=1)
        arm = torch.where(torch.rand(n) < eps, torch.randint(0, n_arms, (n,)), greedy)
        reward = torch.bernoulli(expected_reward(ctx).gather(1, arm.unsqueeze(1)).squeeze(1))
        memory.push(ctx, arm, reward)

    interact(512, 1.0)

    def step(t):
        interact(32, max(0.1, 1.0 - t / 200))
        ctx, arm, reward = memory.sample(128)
        pred = net(ctx).gather(1, arm.unsqueeze(1)).squeeze(1)
        loss = (pred - reward).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    test_ctx = torch.randn(1000, d, generator=_gen(7))

    def probe():
        value = expected_reward(test_ctx)
        with torch.no_grad():
            arm = net(test_ctx).argmax(dim=1)
        return (value.max(1).values - value.gather(1, arm.unsqueeze(1)).squeeze(1)).mean().item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sac_sample_not_rsample_bad():
    torch.manual_seed(0)
    env = PointMass(8, seed=3)
    buf = Replay(8000)
    gamma, tau, alpha = 0.95, 0.01, 0.05

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.mu = nn.Linear(64, 1)
            self.log_std = nn.Linear(64, 1)

        def forward(self, s):
            h = self.body(s)
            return self.mu(h), self.log_std(h).clamp(-5, 2)

        def draw(self, s):
            mu, log_std = self(s)
            dist = torch.distributions.Normal(mu, log_std.exp())
            u = dist.sample()
            a = torch.tanh(u)
            logp = dist.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)
            return a, logp.sum(1)

    class TwinQ(nn.Module):
        def __init__(self):
            super().__init__()
            self.q1 = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
            self.q2 = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, s, a):
            sa = torch.cat([s, a], 1)
            return self.q1(sa).squeeze(-1), self.q2(sa).squeeze(-1)

    actor, critic = Actor(), TwinQ()
    critic_target = copy.deepcopy(critic).requires_grad_(False)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)

    for _ in range(40):
        a = torch.rand(8, 1) * 2 - 1
        s, r, s2 = env.step(a)
        buf.push(s, a, r, s2)

    def step(i):
        with torch.no_grad():
            a, _ = actor.draw(env.s)
        s, r, s2 = env.step(a)
        buf.push(s, a, r, s2)

        s, a, r, s2 = buf.sample(64)
        with torch.no_grad():
            a2, logp2 = actor.draw(s2)
            q_next = torch.min(*critic_target(s2, a2)) - alpha * logp2
            y = r + gamma * q_next
        q1, q2 = critic(s, a)
        critic_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        a_pi, logp = actor.draw(s)
        for p in critic.parameters():
            p.requires_grad_(False)
        actor_loss = (alpha * logp - torch.min(*critic(s, a_pi))).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()
        for p in critic.parameters():
            p.requires_grad_(True)

        with torch.no_grad():
            for p, tp in zip(critic.parameters(), critic_target.parameters()):
                tp.mul_(1 - tau).add_(tau * p)
        return critic_loss.item() + actor_loss.item()

    def probe():
        return pointmass_cost(lambda s: torch.tanh(actor(s)[0]))

    return {
        "model": {"actor": actor, "critic": critic},
        "optimizer": (actor_opt, critic_opt),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def sac_sample_not_rsample_good():
    torch.manual_seed(0)
    env = PointMass(8, seed=3)
    buf = Replay(8000)
    gamma, tau, alpha = 0.95, 0.01, 0.05

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.mu = nn.Linear(64, 1)
            self.log_std = nn.Linear(64, 1)

        def forward(self, s):
            h = self.body(s)
            return self.mu(h), self.log_std(h).clamp(-5, 2)

        def draw(self, s):
            mu, log_std = self(s)
            dist = torch.distributions.Normal(mu, log_std.exp())
            u = dist.rsample()
            a = torch.tanh(u)
            logp = dist.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)
            return a, logp.sum(1)

    class TwinQ(nn.Module):
        def __init__(self):
            super().__init__()
            self.q1 = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
            self.q2 = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, s, a):
            sa = torch.cat([s, a], 1)
            return self.q1(sa).squeeze(-1), self.q2(sa).squeeze(-1)

    actor, critic = Actor(), TwinQ()
    critic_target = copy.deepcopy(critic).requires_grad_(False)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)

    for _ in range(40):
        a = torch.rand(8, 1) * 2 - 1
        s, r, s2 = env.step(a)
        buf.push(s, a, r, s2)

    def step(i):
        with torch.no_grad():
            a, _ = actor.draw(env.s)
        s, r, s2 = env.step(a)
        buf.push(s, a, r, s2)

        s, a, r, s2 = buf.sample(64)
        with torch.no_grad():
            a2, logp2 = actor.draw(s2)
            q_next = torch.min(*critic_target(s2, a2)) - alpha * logp2
            y = r + gamma * q_next
        q1, q2 = critic(s, a)
        critic_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        a_pi, logp = actor.draw(s)
        for p in critic.parameters():
            p.requires_grad_(False)
        actor_loss = (alpha * logp - torch.min(*critic(s, a_pi))).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()
        for p in critic.parameters():
            p.requires_grad_(True)

        with torch.no_grad():
            for p, tp in zip(critic.parameters(), critic_target.parameters()):
                tp.mul_(1 - tau).add_(tau * p)
        return critic_loss.item() + actor_loss.item()

    def probe():
        return pointmass_cost(lambda s: torch.tanh(actor(s)[0]))

    return {
        "model": {"actor": actor, "critic": critic},
        "optimizer": (actor_opt, critic_opt),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def ddpg_soft_update_rebinds_bad():
    torch.manual_seed(0)
    env = PointMass(8, seed=4)
    memory = Replay(8000)
    GAMMA, TAU = 0.95, 0.01

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.out = nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, s):
            return torch.tanh(self.out(F.relu(self.fc2(F.relu(self.fc1(s))))))

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.out = nn.Linear(3, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, s, a):
            x = torch.cat([s, a], dim=1)
            return self.out(F.relu(self.fc2(F.relu(self.fc1(x))))).squeeze(1)

    def soft_update(target, source):
        for tp, p in zip(target.parameters(), source.parameters()):
            tp = TAU * p.data + (1.0 - TAU) * tp.data

    actor, critic = Actor(), Critic()
    actor_target, critic_target = Actor(), Critic()
    actor_target.load_state_dict(actor.state_dict())
    critic_target.load_state_dict(critic.state_dict())
    for p in list(actor_target.parameters()) + list(critic_target.parameters()):
        p.requires_grad = False
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=5e-4)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

    for _ in range(40):
        a = torch.rand(8, 1) * 2 - 1
        s, r, s2 = env.step(a)
        memory.push(s, a, r, s2)

    def step(i):
        with torch.no_grad():
            a = (actor(env.s) + 0.2 * torch.randn(8, 1)).clamp(-1, 1)
        s, r, s2 = env.step(a)
        memory.push(s, a, r, s2)

        states, actions, rewards, next_states = memory.sample(64)
        with torch.no_grad():
            q_next = critic_target(next_states, actor_target(next_states))
        q_expected = critic(states, actions)
        critic_loss = F.mse_loss(q_expected, rewards + GAMMA * q_next)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        actor_loss = -critic(states, actor(states)).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        soft_update(critic_target, critic)
        soft_update(actor_target, actor)
        return critic_loss.item()

    def probe():
        return pointmass_cost(actor)

    return {
        "model": {"actor": actor, "critic": critic, "actor_target": actor_target, "critic_target": critic_target},
        "optimizer": (actor_optimizer, critic_optimizer),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def ddpg_soft_update_rebinds_good():
    torch.manual_seed(0)
    env = PointMass(8, seed=4)
    memory = Replay(8000)
    GAMMA, TAU = 0.95, 0.01

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.out = nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, s):
            return torch.tanh(self.out(F.relu(self.fc2(F.relu(self.fc1(s))))))

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.out = nn.Linear(3, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, s, a):
            x = torch.cat([s, a], dim=1)
            return self.out(F.relu(self.fc2(F.relu(self.fc1(x))))).squeeze(1)

    def soft_update(target, source):
        for tp, p in zip(target.parameters(), source.parameters()):
            tp.data.copy_(TAU * p.data + (1.0 - TAU) * tp.data)

    actor, critic = Actor(), Critic()
    actor_target, critic_target = Actor(), Critic()
    actor_target.load_state_dict(actor.state_dict())
    critic_target.load_state_dict(critic.state_dict())
    for p in list(actor_target.parameters()) + list(critic_target.parameters()):
        p.requires_grad = False
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=5e-4)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

    for _ in range(40):
        a = torch.rand(8, 1) * 2 - 1
        s, r, s2 = env.step(a)
        memory.push(s, a, r, s2)

    def step(i):
        with torch.no_grad():
            a = (actor(env.s) + 0.2 * torch.randn(8, 1)).clamp(-1, 1)
        s, r, s2 = env.step(a)
        memory.push(s, a, r, s2)

        states, actions, rewards, next_states = memory.sample(64)
        with torch.no_grad():
            q_next = critic_target(next_states, actor_target(next_states))
        q_expected = critic(states, actions)
        critic_loss = F.mse_loss(q_expected, rewards + GAMMA * q_next)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        actor_loss = -critic(states, actor(states)).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        soft_update(critic_target, critic)
        soft_update(actor_target, actor)
        return critic_loss.item()

    def probe():
        return pointmass_cost(actor)

    return {
        "model": {"actor": actor, "critic": critic, "actor_target": actor_target, "critic_target": critic_target},
        "optimizer": (actor_optimizer, critic_optimizer),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def lstm_batch_first_missing_bad():
    torch.manual_seed(0)

    def series(n, seed):
        g = _gen(seed)
        t = torch.arange(n).float()
        temp = torch.sin(t * 0.26) + 0.3 * torch.randn(n, generator=g)
        load = torch.zeros(n)
        e = 0.1 * torch.randn(n, generator=g)
        for k in range(6, n):
            load[k] = 0.8 * load[k - 4] + 0.5 * temp[k - 3] - 0.3 * temp[k - 6] + e[k]
        return torch.stack([load, temp], 1)

    train, test = series(1200, 1), series(500, 2)
    mean, std = train.mean(0), train.std(0)

    def windows(raw, size=16):
        z = (raw - mean) / std
        x = torch.stack([z[k : k + size] for k in range(len(z) - size)])
        return x, z[size:, :1]

    loader = DataLoader(TensorDataset(*windows(train)), batch_size=64, shuffle=True, drop_last=True)
    x_test, y_test = windows(test)

    class Forecaster(nn.Module):
        def __init__(self, n_features=2, hidden=32):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden, num_layers=1)
            self.fc = nn.Linear(hidden, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    model = Forecaster()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = endless(loader)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            v = F.mse_loss(model(x_test), y_test).sqrt().item()
        model.train(was)
        return v

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_batch_first_missing_good():
    torch.manual_seed(0)

    def series(n, seed):
        g = _gen(seed)
        t = torch.arange(n).float()
        temp = torch.sin(t * 0.26) + 0.3 * torch.randn(n, generator=g)
        load = torch.zeros(n)
        e = 0.1 * torch.randn(n, generator=g)
        for k in range(6, n):
            load[k] = 0.8 * load[k - 4] + 0.5 * temp[k - 3] - 0.3 * temp[k - 6] + e[k]
        return torch.stack([load, temp], 1)

    train, test = series(1200, 1), series(500, 2)
    mean, std = train.mean(0), train.std(0)

    def windows(raw, size=16):
        z = (raw - mean) / std
        x = torch.stack([z[k : k + size] for k in range(len(z) - size)])
        return x, z[size:, :1]

    loader = DataLoader(TensorDataset(*windows(train)), batch_size=64, shuffle=True, drop_last=True)
    x_test, y_test = windows(test)

    class Forecaster(nn.Module):
        def __init__(self, n_features=2, hidden=32):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden, num_layers=1, batch_first=True)
            self.fc = nn.Linear(hidden, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    model = Forecaster()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = endless(loader)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            v = F.mse_loss(model(x_test), y_test).sqrt().item()
        model.train(was)
        return v

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def transformer_pad_mask_inverted_bad():
    torch.manual_seed(0)
    max_len, d_in = 20, 6

    def patients(n, seed):
        g = _gen(seed)
        lengths = torch.randint(6, 17, (n,), generator=g)
        x = torch.randn(n, max_len, d_in, generator=g)
        valid = torch.arange(max_len)[None] < lengths[:, None]
        x = x * valid[..., None]
        risk = torch.relu(x[..., 0]).sum(1) - torch.relu(x[..., 1]).sum(1) + 0.5 * x[..., 2].sum(1)
        y = (risk > 0).float()
        return x, lengths, y

    train_ds = TensorDataset(*patients(2000, 1))
    xv, lv, yv = patients(600, 2)
    loader = DataLoader(train_ds, batch_size=64, shuffle=True, drop_last=True)

    class VisitEncoder(nn.Module):
        def __init__(self, d=32):
            super().__init__()
            self.proj = nn.Linear(d_in, d)
            self.cls = nn.Parameter(torch.randn(1, 1, d) * 0.02)
            self.pos = nn.Parameter(torch.randn(1, max_len + 1, d) * 0.02)
            layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(d), enable_nested_tensor=False)
            self.head = nn.Linear(d, 1)

        def forward(self, x, lengths):
            h = torch.cat([self.cls.expand(len(x), -1, -1), self.proj(x)], 1) + self.pos
            mask = torch.arange(max_len + 1)[None, :] < (lengths + 1)[:, None]
            h = self.encoder(h, src_key_padding_mask=mask)
            return self.head(h[:, 0]).squeeze(-1)

    model = VisitEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    criterion = nn.BCEWithLogitsLoss()
    batches = endless(loader)

    def step(i):
        model.train()
        x, lengths, y = next(batches)
        loss = criterion(model(x, lengths), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            v = ((model(xv, lv) > 0).float() != yv).float().mean().item()
        model.train(was)
        return v

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def transformer_pad_mask_inverted_good():
    torch.manual_seed(0)
    max_len, d_in = 20, 6

    def patients(n, seed):
        g = _gen(seed)
        lengths = torch.randint(6, 17, (n,), generator=g)
        x = torch.randn(n, max_len, d_in, generator=g)
        valid = torch.arange(max_len)[None] < lengths[:, None]
        x = x * valid[..., None]
        risk = torch.relu(x[..., 0]).sum(1) - torch.relu(x[..., 1]).sum(1) + 0.5 * x[..., 2].sum(1)
        y = (risk > 0).float()
        return x, lengths, y

    train_ds = TensorDataset(*patients(2000, 1))
    xv, lv, yv = patients(600, 2)
    loader = DataLoader(train_ds, batch_size=64, shuffle=True, drop_last=True)

    class VisitEncoder(nn.Module):
        def __init__(self, d=32):
            super().__init__()
            self.proj = nn.Linear(d_in, d)
            self.cls = nn.Parameter(torch.randn(1, 1, d) * 0.02)
            self.pos = nn.Parameter(torch.randn(1, max_len + 1, d) * 0.02)
            layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(d), enable_nested_tensor=False)
            self.head = nn.Linear(d, 1)

        def forward(self, x, lengths):
            h = torch.cat([self.cls.expand(len(x), -1, -1), self.proj(x)], 1) + self.pos
            mask = torch.arange(max_len + 1)[None, :] >= (lengths + 1)[:, None]
            h = self.encoder(h, src_key_padding_mask=mask)
            return self.head(h[:, 0]).squeeze(-1)

    model = VisitEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    criterion = nn.BCEWithLogitsLoss()
    batches = endless(loader)

    def step(i):
        model.train()
        x, lengths, y = next(batches)
        loss = criterion(model(x, lengths), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            v = ((model(xv, lv) > 0).float() != yv).float().mean().item()
        model.train(was)
        return v

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sensor_sorted_no_shuffle_bad():
    torch.manual_seed(0)
    x, y = make_waves(1000, seed=1)
    order = torch.argsort(y, stable=True)
    train_set = TensorDataset(x[order], y[order])
    x_val, y_val = make_waves(500, seed=2)
    train_loader = DataLoader(train_set, batch_size=32)

    model = nn.Sequential(
        nn.Conv1d(2, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(128, 5),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    it = endless(train_loader)

    def step(i):
        inputs, labels = next(it)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sensor_sorted_no_shuffle_good():
    torch.manual_seed(0)
    x, y = make_waves(1000, seed=1)
    order = torch.argsort(y, stable=True)
    train_set = TensorDataset(x[order], y[order])
    x_val, y_val = make_waves(500, seed=2)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)

    model = nn.Sequential(
        nn.Conv1d(2, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(128, 5),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    it = endless(train_loader)

    def step(i):
        inputs, labels = next(it)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(x_val).argmax(1) != y_val).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fraud_pos_weight_inverted_bad():
    torch.manual_seed(0)

    def transactions(n, seed):
        x, score = make_table(n, 10, seed, noise=0.2, wseed=11)
        return x, (score > 2.0).float()

    x, y = transactions(4000, 1)
    x_test, y_test = transactions(3000, 2)
    mu, sd = x.mean(0), x.std(0)
    loader = DataLoader(TensorDataset((x - mu) / sd, y), batch_size=256, shuffle=True, drop_last=True)
    x_test = (x_test - mu) / sd

    n_pos, n_neg = y.sum(), (1 - y).sum()
    criterion = nn.BCEWithLogitsLoss(pos_weight=n_pos / n_neg)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = endless(loader)

    def step(i):
        xb, yb = next(batches)
        logits = model(xb).squeeze(1)
        loss = criterion(logits, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            pred = (model(x_test).squeeze(1) > 0).float()
        miss = (pred[y_test == 1] == 0).float().mean()
        false = (pred[y_test == 0] == 1).float().mean()
        return float((miss + false) / 2)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fraud_pos_weight_inverted_good():
    torch.manual_seed(0)

    def transactions(n, seed):
        x, score = make_table(n, 10, seed, noise=0.2, wseed=11)
        return x, (score > 2.0).float()

    x, y = transactions(4000, 1)
    x_test, y_test = transactions(3000, 2)
    mu, sd = x.mean(0), x.std(0)
    loader = DataLoader(TensorDataset((x - mu) / sd, y), batch_size=256, shuffle=True, drop_last=True)
    x_test = (x_test - mu) / sd

    n_pos, n_neg = y.sum(), (1 - y).sum()
    criterion = nn.BCEWithLogitsLoss(pos_weight=n_neg / n_pos)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = endless(loader)

    def step(i):
        xb, yb = next(batches)
        logits = model(xb).squeeze(1)
        loss = criterion(logits, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            pred = (model(x_test).squeeze(1) > 0).float()
        miss = (pred[y_test == 1] == 0).float().mean()
        false = (pred[y_test == 0] == 1).float().mean()
        return float((miss + false) / 2)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cox_risk_set_order_bad():
    torch.manual_seed(0)

    def cohort(n, seed):
        x, h = make_table(n, 8, seed, noise=0.0, wseed=21)
        g = _gen(seed + 100)
        t = -torch.log(torch.rand(n, generator=g) + 1e-9) * torch.exp(-h)
        c = -torch.log(torch.rand(n, generator=g) + 1e-9) * 3.0
        return x, torch.minimum(t, c), (t <= c).float()

    x, time, event = cohort(1500, 1)
    xt, tt, et = cohort(500, 2)
    loader = DataLoader(TensorDataset(x, time, event), batch_size=128, shuffle=True, drop_last=True)

    def cox_ph_loss(log_h, time, event):
        idx = torch.argsort(time)
        log_h, event = log_h[idx], event[idx]
        log_risk = torch.logcumsumexp(log_h, dim=0)
        return -((log_h - log_risk) * event).sum() / event.sum()

    class DeepSurv(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(8, 64),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(64, 32),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(32, 1, bias=False),
            )

        def forward(self, x):
            return self.net(x).squeeze(-1)

    model = DeepSurv()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    batches = endless(loader)

    def step(i):
        model.train()
        xb, tb, eb = next(batches)
        loss = cox_ph_loss(model(xb), tb, eb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            h = model(xt)
        model.train(was)
        comparable = (tt[:, None] < tt[None, :]) & (et[:, None] == 1)
        right = (h[:, None] > h[None, :])[comparable].float().mean()
        return float(1 - right)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cox_risk_set_order_good():
    torch.manual_seed(0)

    def cohort(n, seed):
        x, h = make_table(n, 8, seed, noise=0.0, wseed=21)
        g = _gen(seed + 100)
        t = -torch.log(torch.rand(n, generator=g) + 1e-9) * torch.exp(-h)
        c = -torch.log(torch.rand(n, generator=g) + 1e-9) * 3.0
        return x, torch.minimum(t, c), (t <= c).float()

    x, time, event = cohort(1500, 1)
    xt, tt, et = cohort(500, 2)
    loader = DataLoader(TensorDataset(x, time, event), batch_size=128, shuffle=True, drop_last=True)

    def cox_ph_loss(log_h, time, event):
        idx = torch.argsort(time, descending=True)
        log_h, event = log_h[idx], event[idx]
        log_risk = torch.logcumsumexp(log_h, dim=0)
        return -((log_h - log_risk) * event).sum() / event.sum()

    class DeepSurv(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(8, 64),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(64, 32),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(32, 1, bias=False),
            )

        def forward(self, x):
            return self.net(x).squeeze(-1)

    model = DeepSurv()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    batches = endless(loader)

    def step(i):
        model.train()
        xb, tb, eb = next(batches)
        loss = cox_ph_loss(model(xb), tb, eb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            h = model(xt)
        model.train(was)
        comparable = (tt[:, None] < tt[None, :]) & (et[:, None] == 1)
        right = (h[:, None] > h[None, :])[comparable].float().mean()
        return float(1 - right)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ncf_double_sigmoid_bad():
    torch.manual_seed(0)
    n_users, n_items = 120, 80
    g = _gen(1)
    pu, qi = torch.randn(n_users, 4, generator=g), torch.randn(n_items, 4, generator=g)
    prob = torch.sigmoid(2.0 * (pu @ qi.T) - 1.0)
    clicks = (torch.rand(n_users, n_items, generator=g) < prob).float()
    pairs = torch.cartesian_prod(torch.arange(n_users), torch.arange(n_items))
    pairs = pairs[torch.randperm(len(pairs), generator=g)]
    labels = clicks[pairs[:, 0], pairs[:, 1]]
    n_tr = 7500
    loader = DataLoader(TensorDataset(pairs[:n_tr], labels[:n_tr]), batch_size=256, shuffle=True, drop_last=True)

    class NCF(nn.Module):
        def __init__(self, dim=8):
            super().__init__()
            self.user, self.item = nn.Embedding(n_users, dim), nn.Embedding(n_items, dim)
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)
            self.mlp = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
            self.out = nn.Linear(16 + dim, 1)

        def forward(self, u, v):
            u, v = self.user(u), self.item(v)
            z = torch.cat([self.mlp(torch.cat([u, v], 1)), u * v], 1)
            return torch.sigmoid(self.out(z)).squeeze(1)

    model = NCF()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = endless(loader)

    def step(i):
        p, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(p[:, 0], p[:, 1]), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            score = model(pairs[n_tr:, 0], pairs[n_tr:, 1])
            return F.binary_cross_entropy(score.clamp(1e-4, 1 - 1e-4), labels[n_tr:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ncf_double_sigmoid_good():
    torch.manual_seed(0)
    n_users, n_items = 120, 80
    g = _gen(1)
    pu, qi = torch.randn(n_users, 4, generator=g), torch.randn(n_items, 4, generator=g)
    prob = torch.sigmoid(2.0 * (pu @ qi.T) - 1.0)
    clicks = (torch.rand(n_users, n_items, generator=g) < prob).float()
    pairs = torch.cartesian_prod(torch.arange(n_users), torch.arange(n_items))
    pairs = pairs[torch.randperm(len(pairs), generator=g)]
    labels = clicks[pairs[:, 0], pairs[:, 1]]
    n_tr = 7500
    loader = DataLoader(TensorDataset(pairs[:n_tr], labels[:n_tr]), batch_size=256, shuffle=True, drop_last=True)

    class NCF(nn.Module):
        def __init__(self, dim=8):
            super().__init__()
            self.user, self.item = nn.Embedding(n_users, dim), nn.Embedding(n_items, dim)
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)
            self.mlp = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
            self.out = nn.Linear(16 + dim, 1)

        def forward(self, u, v):
            u, v = self.user(u), self.item(v)
            z = torch.cat([self.mlp(torch.cat([u, v], 1)), u * v], 1)
            return self.out(z).squeeze(1)

    model = NCF()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = endless(loader)

    def step(i):
        p, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(p[:, 0], p[:, 1]), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            score = torch.sigmoid(model(pairs[n_tr:, 0], pairs[n_tr:, 1]))
            return F.binary_cross_entropy(score.clamp(1e-4, 1 - 1e-4), labels[n_tr:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def two_tower_one_tower_in_optimizer_bad():
    torch.manual_seed(0)

    def pairs(n, seed):
        gw, g = _gen(31), _gen(seed)
        a, b = torch.randn(6, 16, generator=gw), torch.randn(6, 24, generator=gw)
        z = torch.randn(n, 6, generator=g)
        q = z @ a / 2.5 + 0.3 * torch.randn(n, 16, generator=g)
        it = torch.tanh(z @ b / 2.5) + 0.3 * torch.randn(n, 24, generator=g)
        nuis = torch.randn(n, 24, generator=g)
        return q, torch.cat([it, 1.0 * nuis], 1)

    q_tr, d_tr = pairs(3000, 1)
    q_te, d_te = pairs(100, 2)

    def tower(d_in):
        return nn.Sequential(nn.Linear(d_in, 64), nn.ReLU(), nn.Linear(64, 32))

    class TwoTower(nn.Module):
        def __init__(self):
            super().__init__()
            self.query_tower = tower(16)
            self.item_tower = tower(48)

        def forward(self, q, d):
            return F.normalize(self.query_tower(q), dim=-1), F.normalize(self.item_tower(d), dim=-1)

    model = TwoTower()
    optimizer = torch.optim.Adam(model.query_tower.parameters(), lr=2e-3)
    temperature = 0.1
    loader = DataLoader(TensorDataset(q_tr, d_tr), batch_size=128, shuffle=True, drop_last=True)
    batches = endless(loader)

    def step(i):
        q, d = next(batches)
        zq, zd = model(q, d)
        logits = zq @ zd.t() / temperature
        labels = torch.arange(len(q))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            zq, zd = model(q_te, d_te)
            return ((zq @ zd.t()).argmax(1) != torch.arange(100)).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def two_tower_one_tower_in_optimizer_good():
    torch.manual_seed(0)

    def pairs(n, seed):
        gw, g = _gen(31), _gen(seed)
        a, b = torch.randn(6, 16, generator=gw), torch.randn(6, 24, generator=gw)
        z = torch.randn(n, 6, generator=g)
        q = z @ a / 2.5 + 0.3 * torch.randn(n, 16, generator=g)
        it = torch.tanh(z @ b / 2.5) + 0.3 * torch.randn(n, 24, generator=g)
        nuis = torch.randn(n, 24, generator=g)
        return q, torch.cat([it, 1.0 * nuis], 1)

    q_tr, d_tr = pairs(3000, 1)
    q_te, d_te = pairs(100, 2)

    def tower(d_in):
        return nn.Sequential(nn.Linear(d_in, 64), nn.ReLU(), nn.Linear(64, 32))

    class TwoTower(nn.Module):
        def __init__(self):
            super().__init__()
            self.query_tower = tower(16)
            self.item_tower = tower(48)

        def forward(self, q, d):
            return F.normalize(self.query_tower(q), dim=-1), F.normalize(self.item_tower(d), dim=-1)

    model = TwoTower()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    temperature = 0.1
    loader = DataLoader(TensorDataset(q_tr, d_tr), batch_size=128, shuffle=True, drop_last=True)
    batches = endless(loader)

    def step(i):
        q, d = next(batches)
        zq, zd = model(q, d)
        logits = zq @ zd.t() / temperature
        labels = torch.arange(len(q))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            zq, zd = model(q_te, d_te)
            return ((zq @ zd.t()).argmax(1) != torch.arange(100)).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gcn_randn_init_bad():
    torch.manual_seed(0)
    n, k, d = 300, 4, 32
    g = _gen(1)
    y = torch.arange(n) % k
    same = (y[:, None] == y[None, :]).float()
    adj = (torch.rand(n, n, generator=g) < 0.05 * same + 0.007 * (1 - same)).float().triu(1)
    adj = adj + adj.t() + torch.eye(n)
    deg = adj.sum(1).rsqrt()
    A_hat = deg[:, None] * adj * deg[None, :]
    centres = torch.randn(k, d, generator=g)
    X = 0.45 * centres[y] + torch.randn(n, d, generator=g)
    perm = torch.randperm(n, generator=g)
    train_idx, test_idx = perm[:80], perm[80:]

    class GraphConvolution(nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(in_features, out_features))
            self.bias = nn.Parameter(torch.zeros(out_features))

        def forward(self, adj, h):
            return adj @ (h @ self.weight) + self.bias

    class GCN(nn.Module):
        def __init__(self, hidden=64):
            super().__init__()
            self.gc1 = GraphConvolution(d, hidden)
            self.gc2 = GraphConvolution(hidden, hidden)
            self.gc3 = GraphConvolution(hidden, k)

        def forward(self, adj, x):
            x = F.relu(self.gc1(adj, x))
            x = F.dropout(x, 0.5, training=self.training)
            x = F.relu(self.gc2(adj, x))
            x = F.dropout(x, 0.5, training=self.training)
            return F.log_softmax(self.gc3(adj, x), dim=1)

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(epoch):
        model.train()
        optimizer.zero_grad()
        output = model(A_hat, X)
        loss = F.nll_loss(output[train_idx], y[train_idx])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            v = F.nll_loss(model(A_hat, X)[test_idx], y[test_idx]).item()
        model.train(was)
        return v

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gcn_randn_init_good():
    torch.manual_seed(0)
    n, k, d = 300, 4, 32
    g = _gen(1)
    y = torch.arange(n) % k
    same = (y[:, None] == y[None, :]).float()
    adj = (torch.rand(n, n, generator=g) < 0.05 * same + 0.007 * (1 - same)).float().triu(1)
    adj = adj + adj.t() + torch.eye(n)
    deg = adj.sum(1).rsqrt()
    A_hat = deg[:, None] * adj * deg[None, :]
    centres = torch.randn(k, d, generator=g)
    X = 0.45 * centres[y] + torch.randn(n, d, generator=g)
    perm = torch.randperm(n, generator=g)
    train_idx, test_idx = perm[:80], perm[80:]

    class GraphConvolution(nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(in_features, out_features))
            nn.init.xavier_uniform_(self.weight)
            self.bias = nn.Parameter(torch.zeros(out_features))

        def forward(self, adj, h):
            return adj @ (h @ self.weight) + self.bias

    class GCN(nn.Module):
        def __init__(self, hidden=64):
            super().__init__()
            self.gc1 = GraphConvolution(d, hidden)
            self.gc2 = GraphConvolution(hidden, hidden)
            self.gc3 = GraphConvolution(hidden, k)

        def forward(self, adj, x):
            x = F.relu(self.gc1(adj, x))
            x = F.dropout(x, 0.5, training=self.training)
            x = F.relu(self.gc2(adj, x))
            x = F.dropout(x, 0.5, training=self.training)
            return F.log_softmax(self.gc3(adj, x), dim=1)

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(epoch):
        model.train()
        optimizer.zero_grad()
        output = model(A_hat, X)
        loss = F.nll_loss(output[train_idx], y[train_idx])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            v = F.nll_loss(model(A_hat, X)[test_idx], y[test_idx]).item()
        model.train(was)
        return v

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ctc_softmax_no_log_bad():
    torch.manual_seed(0)
    n_phones, n_mels, T = 8, 12, 36
    proto = torch.randn(n_phones + 1, n_mels, generator=_gen(5))

    def utterances(n, seed):
        g = _gen(seed)
        feats = proto[0] + 0.4 * torch.randn(n, T, n_mels, generator=g)
        targets = torch.zeros(n, 6, dtype=torch.long)
        frames, lens = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)
        for b in range(n):
            L = int(torch.randint(3, 7, (1,), generator=g))
            pos = 1
            for j in range(L):
                p = int(torch.randint(1, n_phones + 1, (1,), generator=g))
                dur = int(torch.randint(3, 5, (1,), generator=g))
                feats[b, pos : pos + dur] += proto[p] - proto[0]
                targets[b, j] = p
                pos += dur + 1
            lens[b], frames[b] = L, pos
        return feats, targets, frames, lens

    train = utterances(600, 1)
    test = utterances(100, 2)
    loader = DataLoader(TensorDataset(*train), batch_size=32, shuffle=True, drop_last=True)

    class AcousticModel(nn.Module):
        def __init__(self, hidden=48):
            super().__init__()
            self.conv = nn.Conv1d(n_mels, hidden, 3, padding=1)
            self.rnn = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(2 * hidden, n_phones + 1)

        def forward(self, x):
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            h, _ = self.rnn(h)
            return self.fc(h)

    model = AcousticModel()
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = endless(loader)

    def step(i):
        feats, targets, frames, lens = next(batches)
        logits = model(feats)
        log_probs = F.softmax(logits, dim=-1).transpose(0, 1)
        loss = ctc(log_probs, targets, frames, lens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def edits(a, b):
        row = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            prev, row[0] = row[0], i
            for j, y in enumerate(b, 1):
                prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (x != y))
        return row[-1]

    def probe():
        feats, targets, frames, lens = test
        with torch.no_grad():
            best = model(feats).argmax(-1)
        wrong = total = 0
        for b in range(len(best)):
            path = torch.unique_consecutive(best[b, : frames[b]]).tolist()
            ref = targets[b, : lens[b]].tolist()
            wrong += edits([p for p in path if p], ref)
            total += len(ref)
        return wrong / total

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ctc_softmax_no_log_good():
    torch.manual_seed(0)
    n_phones, n_mels, T = 8, 12, 36
    proto = torch.randn(n_phones + 1, n_mels, generator=_gen(5))

    def utterances(n, seed):
        g = _gen(seed)
        feats = proto[0] + 0.4 * torch.randn(n, T, n_mels, generator=g)
        targets = torch.zeros(n, 6, dtype=torch.long)
        frames, lens = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)
        for b in range(n):
            L = int(torch.randint(3, 7, (1,), generator=g))
            pos = 1
            for j in range(L):
                p = int(torch.randint(1, n_phones + 1, (1,), generator=g))
                dur = int(torch.randint(3, 5, (1,), generator=g))
                feats[b, pos : pos + dur] += proto[p] - proto[0]
                targets[b, j] = p
                pos += dur + 1
            lens[b], frames[b] = L, pos
        return feats, targets, frames, lens

    train = utterances(600, 1)
    test = utterances(100, 2)
    loader = DataLoader(TensorDataset(*train), batch_size=32, shuffle=True, drop_last=True)

    class AcousticModel(nn.Module):
        def __init__(self, hidden=48):
            super().__init__()
            self.conv = nn.Conv1d(n_mels, hidden, 3, padding=1)
            self.rnn = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(2 * hidden, n_phones + 1)

        def forward(self, x):
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            h, _ = self.rnn(h)
            return self.fc(h)

    model = AcousticModel()
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = endless(loader)

    def step(i):
        feats, targets, frames, lens = next(batches)
        logits = model(feats)
        log_probs = F.log_softmax(logits, dim=-1).transpose(0, 1)
        loss = ctc(log_probs, targets, frames, lens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def edits(a, b):
        row = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            prev, row[0] = row[0], i
            for j, y in enumerate(b, 1):
                prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (x != y))
        return row[-1]

    def probe():
        feats, targets, frames, lens = test
        with torch.no_grad():
            best = model(feats).argmax(-1)
        wrong = total = 0
        for b in range(len(best)):
            path = torch.unique_consecutive(best[b, : frames[b]]).tolist()
            ref = targets[b, : lens[b]].tolist()
            wrong += edits([p for p in path if p], ref)
            total += len(ref)
        return wrong / total

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_second_derivative_cut_bad():
    torch.manual_seed(0)

    class PINN(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
            )
            for m in self.net:
                if isinstance(m, nn.Linear):
                    nn.init.xavier_normal_(m.weight)
                    nn.init.zeros_(m.bias)

        def forward(self, x):
            return self.net(x)

    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x_b = torch.tensor([[-1.0], [1.0]])
    u_b = torch.tensor([[0.0], [0.0]])
    x_test = torch.linspace(-1, 1, 101).unsqueeze(1)
    u_exact = torch.sin(math.pi * x_test)

    def residual(x):
        u = model(x)
        u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x))[0]
        return u_xx / math.pi**2 + torch.sin(math.pi * x)

    def step(it):
        x_f = (torch.rand(128, 1) * 2 - 1).requires_grad_(True)
        loss_pde = residual(x_f).pow(2).mean()
        loss_bc = F.mse_loss(model(x_b), u_b)
        loss = loss_pde + loss_bc
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return ((model(x_test) - u_exact).norm() / u_exact.norm()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_second_derivative_cut_good():
    torch.manual_seed(0)

    class PINN(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
            )
            for m in self.net:
                if isinstance(m, nn.Linear):
                    nn.init.xavier_normal_(m.weight)
                    nn.init.zeros_(m.bias)

        def forward(self, x):
            return self.net(x)

    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x_b = torch.tensor([[-1.0], [1.0]])
    u_b = torch.tensor([[0.0], [0.0]])
    x_test = torch.linspace(-1, 1, 101).unsqueeze(1)
    u_exact = torch.sin(math.pi * x_test)

    def residual(x):
        u = model(x)
        u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
        return u_xx / math.pi**2 + torch.sin(math.pi * x)

    def step(it):
        x_f = (torch.rand(128, 1) * 2 - 1).requires_grad_(True)
        loss_pde = residual(x_f).pow(2).mean()
        loss_bc = F.mse_loss(model(x_b), u_b)
        loss = loss_pde + loss_bc
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return ((model(x_test) - u_exact).norm() / u_exact.norm()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bbb_kl_unscaled_bad():
    torch.manual_seed(0)
    x, y = make_table(1000, 5, seed=1, noise=0.2, wseed=41)
    x_test, y_test = make_table(500, 5, seed=2, noise=0.2, wseed=41)
    y_mean, y_std = y.mean(), y.std()
    y, y_test = (y - y_mean) / y_std, (y_test - y_mean) / y_std
    loader = DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True)
    n_train = len(x)

    class BayesLinear(nn.Module):
        def __init__(self, n_in, n_out, prior_sigma=1.0):
            super().__init__()
            self.w_mu = nn.Parameter(torch.randn(n_out, n_in) / n_in**0.5)
            self.w_rho = nn.Parameter(torch.full((n_out, n_in), -4.0))
            self.b_mu = nn.Parameter(torch.zeros(n_out))
            self.b_rho = nn.Parameter(torch.full((n_out,), -4.0))
            self.prior = torch.distributions.Normal(0.0, prior_sigma)

        def forward(self, x):
            if not self.training:
                return F.linear(x, self.w_mu, self.b_mu)
            w = self.w_mu + F.softplus(self.w_rho) * torch.randn_like(self.w_mu)
            b = self.b_mu + F.softplus(self.b_rho) * torch.randn_like(self.b_mu)
            return F.linear(x, w, b)

        def kl(self):
            out = 0.0
            for mu, rho in ((self.w_mu, self.w_rho), (self.b_mu, self.b_rho)):
                q = torch.distributions.Normal(mu, F.softplus(rho))
                out = out + torch.distributions.kl_divergence(q, self.prior).sum()
            return out

    class BNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1, self.l2 = BayesLinear(5, 32), BayesLinear(32, 1)
            self.log_noise = nn.Parameter(torch.tensor(-0.5))

        def forward(self, x):
            return self.l2(torch.relu(self.l1(x))).squeeze(1)

        def kl(self):
            return self.l1.kl() + self.l2.kl()

    model = BNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = endless(loader)

    def step(i):
        model.train()
        xb, yb = next(batches)
        pred = model(xb)
        nll = -torch.distributions.Normal(pred, model.log_noise.exp()).log_prob(yb).mean()
        loss = nll + model.kl()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            v = F.mse_loss(model(x_test), y_test).sqrt().item()
        model.train(was)
        return v

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bbb_kl_unscaled_good():
    torch.manual_seed(0)
    x, y = make_table(1000, 5, seed=1, noise=0.2, wseed=41)
    x_test, y_test = make_table(500, 5, seed=2, noise=0.2, wseed=41)
    y_mean, y_std = y.mean(), y.std()
    y, y_test = (y - y_mean) / y_std, (y_test - y_mean) / y_std
    loader = DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True)
    n_train = len(x)

    class BayesLinear(nn.Module):
        def __init__(self, n_in, n_out, prior_sigma=1.0):
            super().__init__()
            self.w_mu = nn.Parameter(torch.randn(n_out, n_in) / n_in**0.5)
            self.w_rho = nn.Parameter(torch.full((n_out, n_in), -4.0))
            self.b_mu = nn.Parameter(torch.zeros(n_out))
            self.b_rho = nn.Parameter(torch.full((n_out,), -4.0))
            self.prior = torch.distributions.Normal(0.0, prior_sigma)

        def forward(self, x):
            if not self.training:
                return F.linear(x, self.w_mu, self.b_mu)
            w = self.w_mu + F.softplus(self.w_rho) * torch.randn_like(self.w_mu)
            b = self.b_mu + F.softplus(self.b_rho) * torch.randn_like(self.b_mu)
            return F.linear(x, w, b)

        def kl(self):
            out = 0.0
            for mu, rho in ((self.w_mu, self.w_rho), (self.b_mu, self.b_rho)):
                q = torch.distributions.Normal(mu, F.softplus(rho))
                out = out + torch.distributions.kl_divergence(q, self.prior).sum()
            return out

    class BNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1, self.l2 = BayesLinear(5, 32), BayesLinear(32, 1)
            self.log_noise = nn.Parameter(torch.tensor(-0.5))

        def forward(self, x):
            return self.l2(torch.relu(self.l1(x))).squeeze(1)

        def kl(self):
            return self.l1.kl() + self.l2.kl()

    model = BNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = endless(loader)

    def step(i):
        model.train()
        xb, yb = next(batches)
        pred = model(xb)
        nll = -torch.distributions.Normal(pred, model.log_noise.exp()).log_prob(yb).mean()
        loss = nll + model.kl() / n_train
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            v = F.mse_loss(model(x_test), y_test).sqrt().item()
        model.train(was)
        return v

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def maml_query_on_unadapted_bad():
    torch.manual_seed(0)
    inner_lr, shots, meta_batch = 0.05, 10, 6

    def sample_task(g=None):
        amp = torch.rand(1, generator=g) * 1.5 + 0.5
        phase = torch.rand(1, generator=g) * math.pi
        x = torch.rand(2 * shots, 1, generator=g) * 6 - 3
        y = amp * torch.sin(x + phase)
        return x[:shots], y[:shots], x[shots:], y[shots:]

    net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    meta_opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def adapt(x, y, create_graph):
        params = dict(net.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(net, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph)
        return {k: p - inner_lr * gr for (k, p), gr in zip(params.items(), grads)}

    def step(i):
        meta_loss = 0.0
        for _ in range(meta_batch):
            xs, ys, xq, yq = sample_task()
            fast = adapt(xs, ys, create_graph=True)
            pred = net(xq)
            meta_loss = meta_loss + F.mse_loss(pred, yq)
        meta_loss = meta_loss / meta_batch
        meta_opt.zero_grad()
        meta_loss.backward()
        meta_opt.step()
        return meta_loss.item()

    g_test = _gen(9)
    test_tasks = [sample_task(g_test) for _ in range(40)]

    def probe():
        total = 0.0
        for xs, ys, xq, yq in test_tasks:
            fast = adapt(xs, ys, create_graph=False)
            with torch.no_grad():
                total += F.mse_loss(torch.func.functional_call(net, fast, (xq,)), yq).item()
        return total / len(test_tasks)

    return {"model": net, "optimizer": meta_opt, "steps": 20, "step": step, "probe": probe}


def maml_query_on_unadapted_good():
    torch.manual_seed(0)
    inner_lr, shots, meta_batch = 0.05, 10, 6

    def sample_task(g=None):
        amp = torch.rand(1, generator=g) * 1.5 + 0.5
        phase = torch.rand(1, generator=g) * math.pi
        x = torch.rand(2 * shots, 1, generator=g) * 6 - 3
        y = amp * torch.sin(x + phase)
        return x[:shots], y[:shots], x[shots:], y[shots:]

    net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    meta_opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def adapt(x, y, create_graph):
        params = dict(net.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(net, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph)
        return {k: p - inner_lr * gr for (k, p), gr in zip(params.items(), grads)}

    def step(i):
        meta_loss = 0.0
        for _ in range(meta_batch):
            xs, ys, xq, yq = sample_task()
            fast = adapt(xs, ys, create_graph=True)
            pred = torch.func.functional_call(net, fast, (xq,))
            meta_loss = meta_loss + F.mse_loss(pred, yq)
        meta_loss = meta_loss / meta_batch
        meta_opt.zero_grad()
        meta_loss.backward()
        meta_opt.step()
        return meta_loss.item()

    g_test = _gen(9)
    test_tasks = [sample_task(g_test) for _ in range(40)]

    def probe():
        total = 0.0
        for xs, ys, xq, yq in test_tasks:
            fast = adapt(xs, ys, create_graph=False)
            with torch.no_grad():
                total += F.mse_loss(torch.func.functional_call(net, fast, (xq,)), yq).item()
        return total / len(test_tasks)

    return {"model": net, "optimizer": meta_opt, "steps": 20, "step": step, "probe": probe}


def multitask_loss_rewrapped_bad():
    torch.manual_seed(0)

    def data(n, seed):
        x, a = make_table(n, 12, seed, noise=0.1, wseed=51)
        _, b = make_table(n, 12, seed, noise=0.1, wseed=52)
        return x, a / 1.8, (b > 0).long()

    train_loader = DataLoader(TensorDataset(*data(2000, 1)), batch_size=64, shuffle=True, drop_last=True)
    xt, at, bt = data(600, 2)

    class SharedBottom(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.reg_head = nn.Linear(64, 1)
            self.cls_head = nn.Linear(64, 2)

        def forward(self, x):
            h = self.shared(x)
            return self.reg_head(h).squeeze(1), self.cls_head(h)

    model = SharedBottom()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    mse, ce = nn.MSELoss(), nn.CrossEntropyLoss()
    batches = endless(train_loader)

    def step(i):
        x, target_value, target_class = next(batches)
        value, logits = model(x)
        losses = [mse(value, target_value), ce(logits, target_class)]
        loss = torch.tensor([l.item() for l in losses], requires_grad=True).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            value, logits = model(xt)
            return 0.5 * (mse(value, at).sqrt() + (logits.argmax(1) != bt).float().mean()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def multitask_loss_rewrapped_good():
    torch.manual_seed(0)

    def data(n, seed):
        x, a = make_table(n, 12, seed, noise=0.1, wseed=51)
        _, b = make_table(n, 12, seed, noise=0.1, wseed=52)
        return x, a / 1.8, (b > 0).long()

    train_loader = DataLoader(TensorDataset(*data(2000, 1)), batch_size=64, shuffle=True, drop_last=True)
    xt, at, bt = data(600, 2)

    class SharedBottom(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.reg_head = nn.Linear(64, 1)
            self.cls_head = nn.Linear(64, 2)

        def forward(self, x):
            h = self.shared(x)
            return self.reg_head(h).squeeze(1), self.cls_head(h)

    model = SharedBottom()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    mse, ce = nn.MSELoss(), nn.CrossEntropyLoss()
    batches = endless(train_loader)

    def step(i):
        x, target_value, target_class = next(batches)
        value, logits = model(x)
        losses = [mse(value, target_value), ce(logits, target_class)]
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            value, logits = model(xt)
            return 0.5 * (mse(value, at).sqrt() + (logits.argmax(1) != bt).float().mean()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fedavg_state_dict_alias_bad():
    torch.manual_seed(0)
    n_clients, n_classes = 4, 8
    centres = torch.randn(n_classes, 16, generator=_gen(61))

    def samples(n, classes, seed):
        g = _gen(seed)
        y = torch.tensor(classes)[torch.randint(0, len(classes), (n,), generator=g)]
        return 0.8 * centres[y] + 0.8 * torch.randn(n, 16, generator=g), y

    shards = []
    for c in range(n_clients):
        own = samples(210, [2 * c, 2 * c + 1], 10 + c)
        rest = samples(90, list(range(n_classes)), 20 + c)
        shards.append(TensorDataset(torch.cat([own[0], rest[0]]), torch.cat([own[1], rest[1]])))
    loaders = [endless(DataLoader(s, batch_size=32, shuffle=True)) for s in shards]
    x_test, y_test = samples(1000, list(range(n_classes)), 99)

    def make_net():
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, n_classes))

    global_net, local_net = make_net(), make_net()
    optimizer = torch.optim.SGD(local_net.parameters(), lr=0.1)

    def average(states):
        return {k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]}

    def step(rnd):
        local_states, losses = [], []
        for loader in loaders:
            local_net.load_state_dict(global_net.state_dict())
            for _ in range(5):
                x, y = next(loader)
                loss = F.cross_entropy(local_net(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            local_states.append(local_net.state_dict())
        global_net.load_state_dict(average(local_states))
        return sum(losses) / len(losses)

    def probe():
        with torch.no_grad():
            return (global_net(x_test).argmax(1) != y_test).float().mean().item()

    return {
        "model": {"global_net": global_net, "local_net": local_net},
        "optimizer": optimizer,
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def fedavg_state_dict_alias_good():
    torch.manual_seed(0)
    n_clients, n_classes = 4, 8
    centres = torch.randn(n_classes, 16, generator=_gen(61))

    def samples(n, classes, seed):
        g = _gen(seed)
        y = torch.tensor(classes)[torch.randint(0, len(classes), (n,), generator=g)]
        return 0.8 * centres[y] + 0.8 * torch.randn(n, 16, generator=g), y

    shards = []
    for c in range(n_clients):
        own = samples(210, [2 * c, 2 * c + 1], 10 + c)
        rest = samples(90, list(range(n_classes)), 20 + c)
        shards.append(TensorDataset(torch.cat([own[0], rest[0]]), torch.cat([own[1], rest[1]])))
    loaders = [endless(DataLoader(s, batch_size=32, shuffle=True)) for s in shards]
    x_test, y_test = samples(1000, list(range(n_classes)), 99)

    def make_net():
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, n_classes))

    global_net, local_net = make_net(), make_net()
    optimizer = torch.optim.SGD(local_net.parameters(), lr=0.1)

    def average(states):
        return {k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]}

    def step(rnd):
        local_states, losses = [], []
        for loader in loaders:
            local_net.load_state_dict(global_net.state_dict())
            for _ in range(5):
                x, y = next(loader)
                loss = F.cross_entropy(local_net(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            local_states.append(copy.deepcopy(local_net.state_dict()))
        global_net.load_state_dict(average(local_states))
        return sum(losses) / len(losses)

    def probe():
        with torch.no_grad():
            return (global_net(x_test).argmax(1) != y_test).float().mean().item()

    return {
        "model": {"global_net": global_net, "local_net": local_net},
        "optimizer": optimizer,
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def steplr_stepped_per_batch_bad():
    torch.manual_seed(0)
    x, y = make_table(1024, 8, seed=1, wseed=71)
    xv, yv = make_table(500, 8, seed=2, wseed=71)
    m, s = y.mean(), y.std()
    train_loader = DataLoader(TensorDataset(x, (y - m) / s), batch_size=64, shuffle=True)
    yv = (yv - m) / s

    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    n_batches = len(train_loader)
    batches = endless(train_loader)

    def step(i):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        outputs = model(inputs).squeeze(-1)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return criterion(model(xv).squeeze(-1), yv).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def steplr_stepped_per_batch_good():
    torch.manual_seed(0)
    x, y = make_table(1024, 8, seed=1, wseed=71)
    xv, yv = make_table(500, 8, seed=2, wseed=71)
    m, s = y.mean(), y.std()
    train_loader = DataLoader(TensorDataset(x, (y - m) / s), batch_size=64, shuffle=True)
    yv = (yv - m) / s

    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    n_batches = len(train_loader)
    batches = endless(train_loader)

    def step(i):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        outputs = model(inputs).squeeze(-1)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        if (i + 1) % n_batches == 0:
            scheduler.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return criterion(model(xv).squeeze(-1), yv).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_without_unscale_bad():
    torch.manual_seed(0)
    train_ds = TensorDataset(*make_waves(1200, seed=3))
    x_val, y_val = make_waves(500, seed=4)
    loader = DataLoader(train_ds, batch_size=64, shuffle=True, drop_last=True)

    class WaveNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(64)
            self.fc1 = nn.Linear(64, 128)
            self.fc2 = nn.Linear(128, 128)
            self.head = nn.Linear(128, 5)

        def forward(self, x):
            h = self.norm(x.flatten(1))
            h = F.relu(self.fc1(h))
            h = F.relu(self.fc2(h))
            return self.head(h)

    model = WaveNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    batches = endless(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            v = (model(x_val).argmax(1) != y_val).float().mean().item()
        model.train(was)
        return v

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_without_unscale_good():
    torch.manual_seed(0)
    train_ds = TensorDataset(*make_waves(1200, seed=3))
    x_val, y_val = make_waves(500, seed=4)
    loader = DataLoader(train_ds, batch_size=64, shuffle=True, drop_last=True)

    class WaveNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(64)
            self.fc1 = nn.Linear(64, 128)
            self.fc2 = nn.Linear(128, 128)
            self.head = nn.Linear(128, 5)

        def forward(self, x):
            h = self.norm(x.flatten(1))
            h = F.relu(self.fc1(h))
            h = F.relu(self.fc2(h))
            return self.head(h)

    model = WaveNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    batches = endless(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            v = (model(x_val).argmax(1) != y_val).float().mean().item()
        model.train(was)
        return v

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def eval_never_back_to_train_bad():
    torch.manual_seed(0)

    def churn(n, seed):
        g = _gen(seed)
        x = torch.randn(n, 20, generator=g)
        s = x[:, 0] + x[:, 1] - x[:, 2] + x[:, 3] * x[:, 4] + 0.7 * torch.randn(n, generator=g)
        return x, (s > 0).long()

    x, y = churn(480, 1)
    x_val, y_val = churn(200, 2)
    x_test, y_test = churn(1000, 3)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

    model = nn.Sequential(
        nn.Linear(20, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss()
    n_batches = len(loader)
    batches = endless(loader)
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            history.append(criterion(model(x_val), y_val).item())

    model.train()

    def step(i):
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        if (i + 1) % n_batches == 0:
            validate()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            v = criterion(model(x_test), y_test).item()
        model.train(was)
        return v

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def eval_never_back_to_train_good():
    torch.manual_seed(0)

    def churn(n, seed):
        g = _gen(seed)
        x = torch.randn(n, 20, generator=g)
        s = x[:, 0] + x[:, 1] - x[:, 2] + x[:, 3] * x[:, 4] + 0.7 * torch.randn(n, generator=g)
        return x, (s > 0).long()

    x, y = churn(480, 1)
    x_val, y_val = churn(200, 2)
    x_test, y_test = churn(1000, 3)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

    model = nn.Sequential(
        nn.Linear(20, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss()
    n_batches = len(loader)
    batches = endless(loader)
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            history.append(criterion(model(x_val), y_val).item())

    model.train()

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        if (i + 1) % n_batches == 0:
            validate()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            v = criterion(model(x_test), y_test).item()
        model.train(was)
        return v

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dae_target_is_noisy_input_bad():
    torch.manual_seed(0)
    mix = torch.randn(4, 24, generator=_gen(91))

    def readings(n, seed):
        g = _gen(seed)
        z = torch.randn(n, 4, generator=g)
        return torch.tanh(z @ mix / 2) + 0.05 * torch.randn(n, 24, generator=g)

    x_train, x_ok = readings(2000, 1), readings(400, 2)
    mean, std = x_train.mean(0), x_train.std(0)
    g = _gen(3)
    x_bad = readings(400, 4)
    swap = torch.rand(400, 24, generator=g) < 0.15
    x_bad = torch.where(swap, x_bad[torch.randperm(400, generator=g)], x_bad)
    x_train, x_ok, x_bad = [(v - mean) / std for v in (x_train, x_ok, x_bad)]
    loader = DataLoader(TensorDataset(x_train), batch_size=64, shuffle=True, drop_last=True)

    class DAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
            self.decoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 24))

        def forward(self, x):
            return self.decoder(self.encoder(x))

    model = DAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = endless(loader)

    def step(i):
        (x,) = next(batches)
        noisy = x + 0.5 * torch.randn_like(x)
        recon = model(noisy)
        loss = F.mse_loss(recon, noisy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            ok = (model(x_ok) - x_ok).pow(2).mean(1)
            bad = (model(x_bad) - x_bad).pow(2).mean(1)
        return auc_error(ok, bad)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dae_target_is_noisy_input_good():
    torch.manual_seed(0)
    mix = torch.randn(4, 24, generator=_gen(91))

    def readings(n, seed):
        g = _gen(seed)
        z = torch.randn(n, 4, generator=g)
        return torch.tanh(z @ mix / 2) + 0.05 * torch.randn(n, 24, generator=g)

    x_train, x_ok = readings(2000, 1), readings(400, 2)
    mean, std = x_train.mean(0), x_train.std(0)
    g = _gen(3)
    x_bad = readings(400, 4)
    swap = torch.rand(400, 24, generator=g) < 0.15
    x_bad = torch.where(swap, x_bad[torch.randperm(400, generator=g)], x_bad)
    x_train, x_ok, x_bad = [(v - mean) / std for v in (x_train, x_ok, x_bad)]
    loader = DataLoader(TensorDataset(x_train), batch_size=64, shuffle=True, drop_last=True)

    class DAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
            self.decoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 24))

        def forward(self, x):
            return self.decoder(self.encoder(x))

    model = DAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = endless(loader)

    def step(i):
        (x,) = next(batches)
        noisy = x + 0.5 * torch.randn_like(x)
        recon = model(noisy)
        loss = F.mse_loss(recon, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            ok = (model(x_ok) - x_ok).pow(2).mean(1)
            bad = (model(x_bad) - x_bad).pow(2).mean(1)
        return auc_error(ok, bad)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
