"""Twenty-two small programs of agents, series, tables, graphs and mechanics, each with one bug that people often make,
and a mended twin, by somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""

import contextlib
import copy
import itertools
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)


@contextlib.contextmanager
def quiet(*modules):
    """Evaluation without a trace: eval mode, no grad, RNG and modes put back."""
    modes = [(m, m.training) for root in modules for m in root.modules()]
    rng, py = torch.get_rng_state(), random.getstate()
    for root in modules:
        root.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, t in modes:
            m.training = t
        torch.set_rng_state(rng)
        random.setstate(py)


def endless(loader):
    while True:
        yield from loader


class GridWorld:
    """n parallel 5x5 grids; the agent walks to a goal cell. obs = (agent xy, goal xy) in [-1, 1]."""

    def __init__(self, n, size=5):
        self.n, self.size = n, size
        self.moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
        self.agent = torch.zeros(n, 2, dtype=torch.long)
        self.goal = torch.zeros(n, 2, dtype=torch.long)
        self.reset()

    def reset(self, which=None):
        a = torch.randint(self.size, (self.n, 2))
        g = torch.randint(self.size, (self.n, 2))
        same = (a == g).all(1)
        g[same, 0] = (g[same, 0] + 1) % self.size
        if which is None:
            which = torch.ones(self.n, dtype=torch.bool)
        self.agent[which], self.goal[which] = a[which], g[which]
        return self.obs()

    def obs(self):
        half = (self.size - 1) / 2
        return torch.cat([self.agent, self.goal], 1).float() / half - 1

    def step(self, action):
        self.agent = (self.agent + self.moves[action]).clamp(0, self.size - 1)
        done = (self.agent == self.goal).all(1)
        reward = torch.where(done, 1.0, -0.05)
        return self.obs(), reward, done


class CartPoles:
    """n parallel cart-poles, -1 on a fall, 0 otherwise; a fallen one is reset."""

    def __init__(self, n):
        self.n = n
        self.s = torch.empty(n, 4).uniform_(-0.05, 0.05)

    def obs(self):
        return self.s / torch.tensor([2.4, 2.0, 0.21, 2.0])

    def step(self, action):
        x, xd, th, thd = self.s.unbind(1)
        force = torch.where(action == 1, 10.0, -10.0)
        c, si = th.cos(), th.sin()
        tmp = (force + 0.05 * thd ** 2 * si) / 1.1
        tha = (9.8 * si - c * tmp) / (0.5 * (4 / 3 - 0.1 * c ** 2 / 1.1))
        xa = tmp - 0.05 * tha * c / 1.1
        self.s = torch.stack([x + 0.02 * xd, xd + 0.02 * xa, th + 0.02 * thd, thd + 0.02 * tha], 1)
        done = (self.s[:, 0].abs() > 2.4) | (self.s[:, 2].abs() > 0.21)
        fresh = torch.empty(self.n, 4).uniform_(-0.05, 0.05)
        self.s = torch.where(done[:, None], fresh, self.s)
        return self.obs(), -done.float(), done


class PointMass:
    """n parallel point masses on a line, pushed by a force in [-1, 1]; reward = -(distance)."""

    def __init__(self, n):
        self.n = n
        self.s = torch.empty(n, 2).uniform_(-1, 1)
        self.t = torch.randint(0, 40, (n,))

    def obs(self):
        return self.s.clone()

    def step(self, action):
        p, v = self.s.unbind(1)
        v = (0.9 * v + 0.25 * action.squeeze(1)).clamp(-1, 1)
        p = (p + 0.25 * v).clamp(-1.5, 1.5)
        nxt = torch.stack([p, v], 1)
        reward = -(p ** 2 + 0.1 * v ** 2)
        self.t = self.t + 1
        over = self.t >= 40
        self.t = torch.where(over, 0, self.t)
        self.s = torch.where(over[:, None], torch.empty(self.n, 2).uniform_(-1, 1), nxt)
        return nxt, reward


CASES = [
    {"name": 'reinforce_softmax_as_logits',
     "what": 'The policy network already ends in a softmax, but its probabilities are handed to Categorical as logits, so the softmax is applied twice and no action can get more than about 48 percent.',
     "steps": 300},
    {"name": 'dqn_q_target_broadcast',
     "what": 'The chosen Q values keep the shape (B, 1) that gather returns while the TD targets are (B,), so the squared error is broadcast to a B x B matrix and every Q is pulled to the mean target of the batch.',
     "steps": 600},
    {"name": 'a2c_advantage_not_detached',
     "what": 'The advantage in the actor loss is not detached, so the policy gradient term also flows into the critic and drives its values away from the returns.',
     "steps": 400},
    {"name": 'ddpg_soft_update_swapped',
     "what": 'The soft update is called with the networks the wrong way round, so the online actor and critic are pulled towards the never-changing targets instead of the targets following them.',
     "steps": 500},
    {"name": 'lstm_not_batch_first',
     "what": 'The windows are (batch, time, features) but nn.LSTM was built without batch_first=True, so the recurrence runs over the samples of the batch and each window is only seen at its last time step.',
     "steps": 300},
    {"name": 'har_conv_view_for_permute',
     "what": 'To bring the channels first for Conv1d the (batch, time, channel) windows are reshaped with view instead of permuted, which mixes time steps and channels.',
     "steps": 250},
    {"name": 'traffic_missing_counted_in_loss',
     "what": 'Missing detector readings are recorded as zero speed and are left in the loss instead of being masked out, so the forecaster is trained towards readings that never happened.',
     "steps": 400},
    {"name": 'entity_embeddings_in_python_list',
     "what": 'The embeddings of the categorical columns are kept in a plain Python list instead of nn.ModuleList, so they are not registered, not given to the optimizer and stay at their random values.',
     "steps": 400},
    {"name": 'biomarker_eval_mode_left_on',
     "what": 'The validation at the end of every epoch puts the model into eval mode and nothing puts it back into train mode, so from the second epoch on dropout is off and batch norm no longer uses or updates batch statistics.',
     "steps": 400},
    {"name": 'claims_poisson_log_input',
     "what": 'The network outputs a positive rate (softplus) but nn.PoissonNLLLoss is left at log_input=True, so the rate is exponentiated again inside the loss.',
     "steps": 300},
    {"name": 'wine_argmax_loss_requires_grad',
     "what": 'The loss is computed from argmax predictions and requires_grad is switched on by hand to silence the error, so backward reaches no parameter and nothing is trained.',
     "steps": 250},
    {"name": 'cox_risk_set_ascending',
     "what": "The patients are sorted by ascending time before the log-cumsum-exp, so each event's risk set holds those who failed earlier instead of those still at risk.",
     "steps": 250},
    {"name": 'mf_default_normal_embeddings',
     "what": "The user and item factors keep nn.Embedding's default N(0, 1) initialisation, so the initial dot products have a spread of several stars and the model spends its training memorising around that noise.",
     "steps": 200},
    {"name": 'graph_collate_without_offset',
     "what": 'When the graphs of a batch are joined into one big graph the edge indices are not shifted by the number of nodes before them, so all edges connect nodes of the first graphs and the other graphs have none.',
     "steps": 300},
    {"name": 'ctc_label_on_blank_index',
     "what": 'The phone vocabulary is numbered from 0 although index 0 is the blank of nn.CTCLoss, so the first phone is trained as blank and can never be recognised.',
     "steps": 300},
    {"name": 'keyword_padding_mask_inverted',
     "what": 'src_key_padding_mask is True on the valid frames instead of on the padding, so the attention can only look at padding.',
     "steps": 300},
    {"name": 'pinn_residual_without_create_graph',
     "what": 'The derivatives in the PDE residual are taken without create_graph=True, so the residual is a constant for backward and only the initial and boundary terms train the network.',
     "steps": 600},
    {"name": 'realnvp_log_det_sign',
     "what": 'The flow maps data to noise, so the log determinant must be added to the prior log density, but the loss subtracts it and thereby rewards contracting the data to a point.',
     "steps": 400},
    {"name": 'maml_query_with_initial_weights',
     "what": 'The query loss is computed with the initial parameters instead of the adapted fast weights, so the inner loop never enters the meta-gradient and plain averaging over tasks is trained.',
     "steps": 500},
    {"name": 'multitask_loss_overwritten',
     "what": 'Inside the loop over the tasks the total loss is assigned instead of added up, so only the last task is trained and the other heads never get a gradient.',
     "steps": 300},
    {"name": 'amp_clip_before_unscale',
     "what": 'clip_grad_norm_ is called on gradients that the GradScaler still holds multiplied by its scale (no scaler.unscale_ first), so after unscaling the step is thousands of times too small.',
     "steps": 300},
    {"name": 'ae_scheduler_stepped_every_batch',
     "what": 'The exponential decay that is meant per epoch is stepped after every batch, so the learning rate has practically vanished within the first epochs.',
     "steps": 480},
]


def reinforce_softmax_as_logits_bad():
    torch.manual_seed(0)


    class Policy(nn.Module):
        def __init__(self, n_obs=4, n_actions=4, hidden=64):
            super().__init__()
            self.fc1 = nn.Linear(n_obs, hidden)
            self.fc2 = nn.Linear(hidden, hidden)
            self.out = nn.Linear(hidden, n_actions)

        def forward(self, obs):
            h = torch.tanh(self.fc1(obs))
            h = torch.tanh(self.fc2(h))
            return F.softmax(self.out(h), dim=-1)


    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    env = GridWorld(32)
    gamma, horizon = 0.95, 16


    def act(obs):
        dist = Categorical(logits=policy(obs))
        return dist


    def step(i):
        obs = env.reset()
        alive = torch.ones(env.n)
        log_probs, rewards, masks, entropies = [], [], [], []
        for _ in range(horizon):
            dist = act(obs)
            action = dist.sample()
            nxt, reward, done = env.step(action)
            log_probs.append(dist.log_prob(action))
            entropies.append(dist.entropy())
            rewards.append(reward * alive)
            masks.append(alive)
            alive = alive * (~done).float()
            obs = nxt

        returns, g = [], torch.zeros(env.n)
        for r in reversed(rewards):
            g = r + gamma * g
            returns.insert(0, g)
        returns, mask = torch.stack(returns), torch.stack(masks)
        mean = (returns * mask).sum() / mask.sum()
        std = (((returns - mean) ** 2 * mask).sum() / mask.sum()).sqrt()
        advantage = (returns - mean) / (std + 1e-8)

        loss = -(torch.stack(log_probs) * advantage * mask).sum() / mask.sum()
        loss = loss - 0.01 * (torch.stack(entropies) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # mean number of moves to the goal under the policy itself
        with quiet(policy):
            torch.manual_seed(123)
            test = GridWorld(256)
            obs, alive, moves = test.obs(), torch.ones(256), torch.zeros(256)
            for _ in range(30):
                moves += alive
                obs, _, done = test.step(act(obs).sample())
                alive = alive * (~done).float()
            return moves.mean().item()


    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def reinforce_softmax_as_logits_good():
    torch.manual_seed(0)


    class Policy(nn.Module):
        def __init__(self, n_obs=4, n_actions=4, hidden=64):
            super().__init__()
            self.fc1 = nn.Linear(n_obs, hidden)
            self.fc2 = nn.Linear(hidden, hidden)
            self.out = nn.Linear(hidden, n_actions)

        def forward(self, obs):
            h = torch.tanh(self.fc1(obs))
            h = torch.tanh(self.fc2(h))
            return F.softmax(self.out(h), dim=-1)


    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    env = GridWorld(32)
    gamma, horizon = 0.95, 16


    def act(obs):
        dist = Categorical(probs=policy(obs))
        return dist


    def step(i):
        obs = env.reset()
        alive = torch.ones(env.n)
        log_probs, rewards, masks, entropies = [], [], [], []
        for _ in range(horizon):
            dist = act(obs)
            action = dist.sample()
            nxt, reward, done = env.step(action)
            log_probs.append(dist.log_prob(action))
            entropies.append(dist.entropy())
            rewards.append(reward * alive)
            masks.append(alive)
            alive = alive * (~done).float()
            obs = nxt

        returns, g = [], torch.zeros(env.n)
        for r in reversed(rewards):
            g = r + gamma * g
            returns.insert(0, g)
        returns, mask = torch.stack(returns), torch.stack(masks)
        mean = (returns * mask).sum() / mask.sum()
        std = (((returns - mean) ** 2 * mask).sum() / mask.sum()).sqrt()
        advantage = (returns - mean) / (std + 1e-8)

        loss = -(torch.stack(log_probs) * advantage * mask).sum() / mask.sum()
        loss = loss - 0.01 * (torch.stack(entropies) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # mean number of moves to the goal under the policy itself
        with quiet(policy):
            torch.manual_seed(123)
            test = GridWorld(256)
            obs, alive, moves = test.obs(), torch.ones(256), torch.zeros(256)
            for _ in range(30):
                moves += alive
                obs, _, done = test.step(act(obs).sample())
                alive = alive * (~done).float()
            return moves.mean().item()


    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_q_target_broadcast_bad():
    torch.manual_seed(0)


    class QNet(nn.Module):
        def __init__(self, n_obs=4, n_actions=4):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(n_obs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_actions))

        def forward(self, x):
            return self.net(x)


    class ReplayBuffer:
        def __init__(self, size):
            self.size, self.data, self.pos = size, [], 0

        def push(self, *items):
            for row in zip(*items):
                if len(self.data) < self.size:
                    self.data.append(row)
                else:
                    self.data[self.pos] = row
                    self.pos = (self.pos + 1) % self.size

        def sample(self, k):
            return [torch.stack(c) for c in zip(*random.sample(self.data, k))]


    random.seed(0)
    env = GridWorld(8)
    q_net = QNet()
    target_net = copy.deepcopy(q_net)
    target_net.requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-3)
    buffer = ReplayBuffer(5000)
    gamma, tau, batch_size = 0.9, 0.02, 64


    def interact(eps):
        obs = env.obs()
        with torch.no_grad():
            greedy = q_net(obs).argmax(1)
        explore = torch.rand(env.n) < eps
        action = torch.where(explore, torch.randint(4, (env.n,)), greedy)
        nxt, reward, done = env.step(action)
        buffer.push(obs, action, reward, nxt, done.float())
        env.reset(done)


    for _ in range(64):
        interact(1.0)


    def step(i):
        interact(max(0.1, 1.0 - i / 300))
        s, a, r, s2, d = buffer.sample(batch_size)
        q = q_net(s).gather(1, a.unsqueeze(1))
        with torch.no_grad():
            target = r + gamma * (1 - d) * target_net(s2).max(1).values
        loss = ((q - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, tp in zip(q_net.parameters(), target_net.parameters()):
                tp.lerp_(p, tau)
        return loss.item()


    def probe():
        # mean number of moves to the goal, greedy policy, 30 at most
        with quiet(q_net):
            torch.manual_seed(123)
            test = GridWorld(256)
            obs, alive, moves = test.obs(), torch.ones(256), torch.zeros(256)
            for _ in range(30):
                moves += alive
                obs, _, done = test.step(q_net(obs).argmax(1))
                alive = alive * (~done).float()
            return moves.mean().item()


    return {"model": q_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_q_target_broadcast_good():
    torch.manual_seed(0)


    class QNet(nn.Module):
        def __init__(self, n_obs=4, n_actions=4):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(n_obs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_actions))

        def forward(self, x):
            return self.net(x)


    class ReplayBuffer:
        def __init__(self, size):
            self.size, self.data, self.pos = size, [], 0

        def push(self, *items):
            for row in zip(*items):
                if len(self.data) < self.size:
                    self.data.append(row)
                else:
                    self.data[self.pos] = row
                    self.pos = (self.pos + 1) % self.size

        def sample(self, k):
            return [torch.stack(c) for c in zip(*random.sample(self.data, k))]


    random.seed(0)
    env = GridWorld(8)
    q_net = QNet()
    target_net = copy.deepcopy(q_net)
    target_net.requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-3)
    buffer = ReplayBuffer(5000)
    gamma, tau, batch_size = 0.9, 0.02, 64


    def interact(eps):
        obs = env.obs()
        with torch.no_grad():
            greedy = q_net(obs).argmax(1)
        explore = torch.rand(env.n) < eps
        action = torch.where(explore, torch.randint(4, (env.n,)), greedy)
        nxt, reward, done = env.step(action)
        buffer.push(obs, action, reward, nxt, done.float())
        env.reset(done)


    for _ in range(64):
        interact(1.0)


    def step(i):
        interact(max(0.1, 1.0 - i / 300))
        s, a, r, s2, d = buffer.sample(batch_size)
        q = q_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            target = r + gamma * (1 - d) * target_net(s2).max(1).values
        loss = ((q - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, tp in zip(q_net.parameters(), target_net.parameters()):
                tp.lerp_(p, tau)
        return loss.item()


    def probe():
        # mean number of moves to the goal, greedy policy, 30 at most
        with quiet(q_net):
            torch.manual_seed(123)
            test = GridWorld(256)
            obs, alive, moves = test.obs(), torch.ones(256), torch.zeros(256)
            for _ in range(30):
                moves += alive
                obs, _, done = test.step(q_net(obs).argmax(1))
                alive = alive * (~done).float()
            return moves.mean().item()


    return {"model": q_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def a2c_advantage_not_detached_bad():
    torch.manual_seed(0)


    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
            self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

        def forward(self, obs):
            return Categorical(logits=self.actor(obs)), self.critic(obs).squeeze(-1)


    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    env = CartPoles(16)
    gamma, n_steps = 0.95, 16


    def step(i):
        obs = env.obs()
        log_probs, values, rewards, masks, entropies = [], [], [], [], []
        for _ in range(n_steps):
            dist, value = model(obs)
            action = dist.sample()
            obs, reward, done = env.step(action)
            log_probs.append(dist.log_prob(action))
            entropies.append(dist.entropy())
            values.append(value)
            rewards.append(reward)
            masks.append(1 - done.float())

        with torch.no_grad():
            _, ret = model(obs)
        returns = []
        for r, m in zip(reversed(rewards), reversed(masks)):
            ret = r + gamma * ret * m
            returns.insert(0, ret)
        returns = torch.cat(returns)
        log_probs, values, entropies = torch.cat(log_probs), torch.cat(values), torch.cat(entropies)

        advantage = returns - values
        actor_loss = -(log_probs * advantage).mean()
        critic_loss = F.mse_loss(values, returns)
        loss = actor_loss + 0.5 * critic_loss - 0.01 * entropies.mean()

        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.item()


    def probe():
        # falls per 100 steps of the sampled policy
        with quiet(model):
            torch.manual_seed(123)
            test, falls = CartPoles(128), 0.0
            for _ in range(200):
                _, reward, done = test.step(model(test.obs())[0].sample())
                falls += done.float().mean().item()
            return falls / 2 + 1e-3


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def a2c_advantage_not_detached_good():
    torch.manual_seed(0)


    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
            self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

        def forward(self, obs):
            return Categorical(logits=self.actor(obs)), self.critic(obs).squeeze(-1)


    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    env = CartPoles(16)
    gamma, n_steps = 0.95, 16


    def step(i):
        obs = env.obs()
        log_probs, values, rewards, masks, entropies = [], [], [], [], []
        for _ in range(n_steps):
            dist, value = model(obs)
            action = dist.sample()
            obs, reward, done = env.step(action)
            log_probs.append(dist.log_prob(action))
            entropies.append(dist.entropy())
            values.append(value)
            rewards.append(reward)
            masks.append(1 - done.float())

        with torch.no_grad():
            _, ret = model(obs)
        returns = []
        for r, m in zip(reversed(rewards), reversed(masks)):
            ret = r + gamma * ret * m
            returns.insert(0, ret)
        returns = torch.cat(returns)
        log_probs, values, entropies = torch.cat(log_probs), torch.cat(values), torch.cat(entropies)

        advantage = returns - values
        actor_loss = -(log_probs * advantage.detach()).mean()
        critic_loss = F.mse_loss(values, returns)
        loss = actor_loss + 0.5 * critic_loss - 0.01 * entropies.mean()

        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.item()


    def probe():
        # falls per 100 steps of the sampled policy
        with quiet(model):
            torch.manual_seed(123)
            test, falls = CartPoles(128), 0.0
            for _ in range(200):
                _, reward, done = test.step(model(test.obs())[0].sample())
                falls += done.float().mean().item()
            return falls / 2 + 1e-3


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpg_soft_update_swapped_bad():
    torch.manual_seed(0)


    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Tanh())

        def forward(self, s):
            return self.net(s)


    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, s, a):
            return self.net(torch.cat([s, a], 1)).squeeze(1)


    def soft_update(target, source, tau):
        for t, s in zip(target.parameters(), source.parameters()):
            t.data.copy_(tau * s.data + (1 - tau) * t.data)


    actor, critic = Actor(), Critic()
    actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
    env = PointMass(8)
    gamma, tau, batch_size = 0.9, 0.02, 64
    memory = []


    def interact(noise):
        s = env.obs()
        with torch.no_grad():
            a = (actor(s) + noise * torch.randn(env.n, 1)).clamp(-1, 1)
        s2, r = env.step(a)
        memory.append((s, a, r, s2))


    for _ in range(50):
        interact(1.0)


    def step(i):
        interact(0.3)
        S, A, R, S2 = [torch.cat(c) for c in zip(*memory)]
        idx = torch.randint(len(S), (batch_size,))
        s, a, r, s2 = S[idx], A[idx], R[idx], S2[idx]

        with torch.no_grad():
            y = r + gamma * critic_target(s2, actor_target(s2))
        critic_loss = F.mse_loss(critic(s, a), y)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        actor_loss = -critic(s, actor(s)).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()

        soft_update(critic, critic_target, tau)
        soft_update(actor, actor_target, tau)
        return critic_loss.item()


    def probe():
        # mean cost per step of the noiseless policy
        with quiet(actor):
            torch.manual_seed(123)
            test, cost = PointMass(256), 0.0
            test.t.zero_()
            for _ in range(39):
                _, r = test.step(actor(test.obs()))
                cost -= r.mean().item() / 39
            return cost


    return {"model": (actor, critic), "optimizer": (actor_opt, critic_opt), "steps": 20, "step": step, "probe": probe}


def ddpg_soft_update_swapped_good():
    torch.manual_seed(0)


    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Tanh())

        def forward(self, s):
            return self.net(s)


    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, s, a):
            return self.net(torch.cat([s, a], 1)).squeeze(1)


    def soft_update(target, source, tau):
        for t, s in zip(target.parameters(), source.parameters()):
            t.data.copy_(tau * s.data + (1 - tau) * t.data)


    actor, critic = Actor(), Critic()
    actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
    env = PointMass(8)
    gamma, tau, batch_size = 0.9, 0.02, 64
    memory = []


    def interact(noise):
        s = env.obs()
        with torch.no_grad():
            a = (actor(s) + noise * torch.randn(env.n, 1)).clamp(-1, 1)
        s2, r = env.step(a)
        memory.append((s, a, r, s2))


    for _ in range(50):
        interact(1.0)


    def step(i):
        interact(0.3)
        S, A, R, S2 = [torch.cat(c) for c in zip(*memory)]
        idx = torch.randint(len(S), (batch_size,))
        s, a, r, s2 = S[idx], A[idx], R[idx], S2[idx]

        with torch.no_grad():
            y = r + gamma * critic_target(s2, actor_target(s2))
        critic_loss = F.mse_loss(critic(s, a), y)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        actor_loss = -critic(s, actor(s)).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()

        soft_update(critic_target, critic, tau)
        soft_update(actor_target, actor, tau)
        return critic_loss.item()


    def probe():
        # mean cost per step of the noiseless policy
        with quiet(actor):
            torch.manual_seed(123)
            test, cost = PointMass(256), 0.0
            test.t.zero_()
            for _ in range(39):
                _, r = test.step(actor(test.obs()))
                cost -= r.mean().item() / 39
            return cost


    return {"model": (actor, critic), "optimizer": (actor_opt, critic_opt), "steps": 20, "step": step, "probe": probe}


def lstm_not_batch_first_bad():
    torch.manual_seed(0)


    def load_series(n=3000):
        g = torch.Generator().manual_seed(1)
        t = torch.arange(n).float()
        temp = torch.sin(2 * math.pi * t / 24) + 0.3 * torch.randn(n, generator=g)
        load = torch.zeros(n)
        eps = torch.randn(n, generator=g)
        for k in range(4, n):
            load[k] = 1.2 * load[k - 1] - 0.8 * load[k - 2] + 0.4 * temp[k - 3] + 0.3 * eps[k]
        return torch.stack([load, temp], 1)


    class WindowDataset(Dataset):
        def __init__(self, series, length=24):
            self.series, self.length = series, length

        def __len__(self):
            return len(self.series) - self.length

        def __getitem__(self, i):
            return self.series[i:i + self.length], self.series[i + self.length, 0]


    class LoadForecaster(nn.Module):
        def __init__(self, n_features=2, hidden=32):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden, num_layers=1)
            self.fc = nn.Linear(hidden, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1]).squeeze(-1)


    series = load_series()
    train, test = series[:2400], series[2400:]
    mean, std = train.mean(0), train.std(0)
    train, test = (train - mean) / std, (test - mean) / std
    loader = DataLoader(WindowDataset(train), batch_size=32, shuffle=True)
    batches = endless(loader)

    model = LoadForecaster()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)


    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # test mean squared error of the one-step forecast
        with quiet(model):
            x, y = map(torch.stack, zip(*[WindowDataset(test)[k] for k in range(0, 560)]))
            return F.mse_loss(model(x), y).item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_not_batch_first_good():
    torch.manual_seed(0)


    def load_series(n=3000):
        g = torch.Generator().manual_seed(1)
        t = torch.arange(n).float()
        temp = torch.sin(2 * math.pi * t / 24) + 0.3 * torch.randn(n, generator=g)
        load = torch.zeros(n)
        eps = torch.randn(n, generator=g)
        for k in range(4, n):
            load[k] = 1.2 * load[k - 1] - 0.8 * load[k - 2] + 0.4 * temp[k - 3] + 0.3 * eps[k]
        return torch.stack([load, temp], 1)


    class WindowDataset(Dataset):
        def __init__(self, series, length=24):
            self.series, self.length = series, length

        def __len__(self):
            return len(self.series) - self.length

        def __getitem__(self, i):
            return self.series[i:i + self.length], self.series[i + self.length, 0]


    class LoadForecaster(nn.Module):
        def __init__(self, n_features=2, hidden=32):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden, num_layers=1, batch_first=True)
            self.fc = nn.Linear(hidden, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1]).squeeze(-1)


    series = load_series()
    train, test = series[:2400], series[2400:]
    mean, std = train.mean(0), train.std(0)
    train, test = (train - mean) / std, (test - mean) / std
    loader = DataLoader(WindowDataset(train), batch_size=32, shuffle=True)
    batches = endless(loader)

    model = LoadForecaster()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)


    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # test mean squared error of the one-step forecast
        with quiet(model):
            x, y = map(torch.stack, zip(*[WindowDataset(test)[k] for k in range(0, 560)]))
            return F.mse_loss(model(x), y).item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def har_conv_view_for_permute_bad():
    torch.manual_seed(0)


    def make_windows(n, seed):
        g = torch.Generator().manual_seed(seed)
        T, C, K = 64, 6, 5
        tmpl = torch.Generator().manual_seed(99)
        freq = torch.tensor([2.0, 2.0, 2.0, 3.0, 3.0])
        phase = 2 * math.pi * torch.rand(K, C, generator=tmpl)
        amp = 0.5 + torch.rand(K, C, generator=tmpl)
        y = torch.randint(K, (n,), generator=g)
        t = torch.arange(T).float() / T
        shift = torch.rand(n, 1, 1, generator=g)
        f = freq[y][:, None, None] * (1 + 0.1 * torch.randn(n, 1, 1, generator=g))
        x = amp[y][:, None] * torch.sin(2 * math.pi * f * (t[None, :, None] + shift) + phase[y][:, None])
        return x + 1.2 * torch.randn(n, T, C, generator=g), y


    class HARConvNet(nn.Module):
        def __init__(self, n_channels=6, n_classes=5):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv1d(n_channels, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2),
                nn.Conv1d(32, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(1),
            )
            self.classifier = nn.Linear(32, n_classes)

        def forward(self, x):
            b, t, c = x.shape
            x = x.view(b, c, t)
            return self.classifier(self.features(x).flatten(1))


    x_train, y_train = make_windows(2000, 1)
    x_test, y_test = make_windows(600, 2)
    mean, std = x_train.mean((0, 1)), x_train.std((0, 1))
    x_train, x_test = (x_train - mean) / std, (x_test - mean) / std
    batches = endless(DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, drop_last=True))

    model = HARConvNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # test error rate
        with quiet(model):
            return (model(x_test).argmax(1) != y_test).float().mean().item() + 1e-3


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def har_conv_view_for_permute_good():
    torch.manual_seed(0)


    def make_windows(n, seed):
        g = torch.Generator().manual_seed(seed)
        T, C, K = 64, 6, 5
        tmpl = torch.Generator().manual_seed(99)
        freq = torch.tensor([2.0, 2.0, 2.0, 3.0, 3.0])
        phase = 2 * math.pi * torch.rand(K, C, generator=tmpl)
        amp = 0.5 + torch.rand(K, C, generator=tmpl)
        y = torch.randint(K, (n,), generator=g)
        t = torch.arange(T).float() / T
        shift = torch.rand(n, 1, 1, generator=g)
        f = freq[y][:, None, None] * (1 + 0.1 * torch.randn(n, 1, 1, generator=g))
        x = amp[y][:, None] * torch.sin(2 * math.pi * f * (t[None, :, None] + shift) + phase[y][:, None])
        return x + 1.2 * torch.randn(n, T, C, generator=g), y


    class HARConvNet(nn.Module):
        def __init__(self, n_channels=6, n_classes=5):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv1d(n_channels, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2),
                nn.Conv1d(32, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(1),
            )
            self.classifier = nn.Linear(32, n_classes)

        def forward(self, x):
            b, t, c = x.shape
            x = x.permute(0, 2, 1)
            return self.classifier(self.features(x).flatten(1))


    x_train, y_train = make_windows(2000, 1)
    x_test, y_test = make_windows(600, 2)
    mean, std = x_train.mean((0, 1)), x_train.std((0, 1))
    x_train, x_test = (x_train - mean) / std, (x_test - mean) / std
    batches = endless(DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, drop_last=True))

    model = HARConvNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # test error rate
        with quiet(model):
            return (model(x_test).argmax(1) != y_test).float().mean().item() + 1e-3


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def traffic_missing_counted_in_loss_bad():
    torch.manual_seed(0)
    N, HIST, HORIZON = 12, 12, 3


    def load_speeds(n=2500):
        g = torch.Generator().manual_seed(1)
        t = torch.arange(n).float()[:, None]
        phase = 0.6 * torch.rand(N, generator=g)
        rush = torch.exp(4 * (torch.cos(2 * math.pi * t / 96 + phase) - 1)) + torch.exp(4 * (torch.cos(2 * math.pi * t / 96 + phase + 2.4) - 1))
        noise = torch.zeros(n, N)
        for k in range(1, n):
            noise[k] = 0.9 * noise[k - 1] + 1.5 * torch.randn(N, generator=g)
        speed = (62 - 22 * rush + noise).clamp(min=5)
        seen = torch.rand(n, N, generator=g) > 0.35
        return speed * seen


    class Forecaster(nn.Module):
        def __init__(self, hidden=64):
            super().__init__()
            self.gru = nn.GRU(2 * N, hidden, batch_first=True)
            self.head = nn.Linear(hidden, HORIZON * N)

        def forward(self, x):
            _, h = self.gru(x)
            return self.head(h[-1]).view(-1, HORIZON, N)


    speeds = load_speeds()
    train, test = speeds[:2000], speeds[2000:]
    observed = train[train > 0]
    mean, std = observed.mean(), observed.std()


    def windows(data):
        z = (data - mean) / std
        seen = (data > 0).float()
        inputs = torch.cat([z * seen, seen], 1)
        idx = range(len(data) - HIST - HORIZON + 1)
        x = torch.stack([inputs[k:k + HIST] for k in idx])
        y = torch.stack([z[k + HIST:k + HIST + HORIZON] for k in idx])
        m = torch.stack([seen[k + HIST:k + HIST + HORIZON] for k in idx])
        return x, y, m


    batches = endless(DataLoader(TensorDataset(*windows(train)), batch_size=64, shuffle=True))
    x_test, y_test, m_test = windows(test)

    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


    def step(i):
        x, y, mask = next(batches)
        pred = model(x)
        loss = (pred - y).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()


    def probe():
        # mean absolute error in mph on the readings that exist
        with quiet(model):
            err = (model(x_test) - y_test).abs() * m_test
            return (std * err.sum() / m_test.sum()).item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def traffic_missing_counted_in_loss_good():
    torch.manual_seed(0)
    N, HIST, HORIZON = 12, 12, 3


    def load_speeds(n=2500):
        g = torch.Generator().manual_seed(1)
        t = torch.arange(n).float()[:, None]
        phase = 0.6 * torch.rand(N, generator=g)
        rush = torch.exp(4 * (torch.cos(2 * math.pi * t / 96 + phase) - 1)) + torch.exp(4 * (torch.cos(2 * math.pi * t / 96 + phase + 2.4) - 1))
        noise = torch.zeros(n, N)
        for k in range(1, n):
            noise[k] = 0.9 * noise[k - 1] + 1.5 * torch.randn(N, generator=g)
        speed = (62 - 22 * rush + noise).clamp(min=5)
        seen = torch.rand(n, N, generator=g) > 0.35
        return speed * seen


    class Forecaster(nn.Module):
        def __init__(self, hidden=64):
            super().__init__()
            self.gru = nn.GRU(2 * N, hidden, batch_first=True)
            self.head = nn.Linear(hidden, HORIZON * N)

        def forward(self, x):
            _, h = self.gru(x)
            return self.head(h[-1]).view(-1, HORIZON, N)


    speeds = load_speeds()
    train, test = speeds[:2000], speeds[2000:]
    observed = train[train > 0]
    mean, std = observed.mean(), observed.std()


    def windows(data):
        z = (data - mean) / std
        seen = (data > 0).float()
        inputs = torch.cat([z * seen, seen], 1)
        idx = range(len(data) - HIST - HORIZON + 1)
        x = torch.stack([inputs[k:k + HIST] for k in idx])
        y = torch.stack([z[k + HIST:k + HIST + HORIZON] for k in idx])
        m = torch.stack([seen[k + HIST:k + HIST + HORIZON] for k in idx])
        return x, y, m


    batches = endless(DataLoader(TensorDataset(*windows(train)), batch_size=64, shuffle=True))
    x_test, y_test, m_test = windows(test)

    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


    def step(i):
        x, y, mask = next(batches)
        pred = model(x)
        loss = ((pred - y).abs() * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()


    def probe():
        # mean absolute error in mph on the readings that exist
        with quiet(model):
            err = (model(x_test) - y_test).abs() * m_test
            return (std * err.sum() / m_test.sum()).item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def entity_embeddings_in_python_list_bad():
    torch.manual_seed(0)
    CARDS = [300, 40, 7]


    def load_sales(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(7)
        store, item, dow = torch.randn(300, generator=w), torch.randn(40, generator=w), torch.randn(7, generator=w)
        trend = torch.randn(40, generator=w)
        cat = torch.stack([torch.randint(c, (n,), generator=g) for c in CARDS], 1)
        num = torch.randn(n, 3, generator=g)
        y = store[cat[:, 0]] + item[cat[:, 1]] + 0.5 * dow[cat[:, 2]] + trend[cat[:, 1]] * num[:, 0] + 0.3 * num[:, 1]
        return cat, num, y / 2 + 0.15 * torch.randn(n, generator=g)


    class EntityEmbeddingNet(nn.Module):
        def __init__(self, cards, n_num, dim=4):
            super().__init__()
            self.embeddings = [nn.Embedding(c, dim) for c in cards]
            self.mlp = nn.Sequential(
                nn.Linear(dim * len(cards) + n_num, 64), nn.ReLU(),
                nn.Linear(64, 32), nn.ReLU(),
                nn.Linear(32, 1),
            )

        def forward(self, cat, num):
            e = [emb(cat[:, j]) for j, emb in enumerate(self.embeddings)]
            return self.mlp(torch.cat(e + [num], 1)).squeeze(1)


    batches = endless(DataLoader(TensorDataset(*load_sales(12000, 1)), batch_size=256, shuffle=True))
    cat_test, num_test, y_test = load_sales(2000, 2)
    model = EntityEmbeddingNet(CARDS, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()


    def step(i):
        cat, num, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(cat, num), y)
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # test root mean squared error of the standardised log sales
        with quiet(model):
            return F.mse_loss(model(cat_test, num_test), y_test).sqrt().item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def entity_embeddings_in_python_list_good():
    torch.manual_seed(0)
    CARDS = [300, 40, 7]


    def load_sales(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(7)
        store, item, dow = torch.randn(300, generator=w), torch.randn(40, generator=w), torch.randn(7, generator=w)
        trend = torch.randn(40, generator=w)
        cat = torch.stack([torch.randint(c, (n,), generator=g) for c in CARDS], 1)
        num = torch.randn(n, 3, generator=g)
        y = store[cat[:, 0]] + item[cat[:, 1]] + 0.5 * dow[cat[:, 2]] + trend[cat[:, 1]] * num[:, 0] + 0.3 * num[:, 1]
        return cat, num, y / 2 + 0.15 * torch.randn(n, generator=g)


    class EntityEmbeddingNet(nn.Module):
        def __init__(self, cards, n_num, dim=4):
            super().__init__()
            self.embeddings = nn.ModuleList([nn.Embedding(c, dim) for c in cards])
            self.mlp = nn.Sequential(
                nn.Linear(dim * len(cards) + n_num, 64), nn.ReLU(),
                nn.Linear(64, 32), nn.ReLU(),
                nn.Linear(32, 1),
            )

        def forward(self, cat, num):
            e = [emb(cat[:, j]) for j, emb in enumerate(self.embeddings)]
            return self.mlp(torch.cat(e + [num], 1)).squeeze(1)


    batches = endless(DataLoader(TensorDataset(*load_sales(12000, 1)), batch_size=256, shuffle=True))
    cat_test, num_test, y_test = load_sales(2000, 2)
    model = EntityEmbeddingNet(CARDS, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()


    def step(i):
        cat, num, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(cat, num), y)
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # test root mean squared error of the standardised log sales
        with quiet(model):
            return F.mse_loss(model(cat_test, num_test), y_test).sqrt().item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def biomarker_eval_mode_left_on_bad():
    torch.manual_seed(0)


    def load_panel(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(5)
        W = torch.randn(3, 40, generator=w) * (torch.rand(40, generator=w) < 0.25)
        y = torch.randint(3, (n,), generator=g)
        return 0.9 * W[y] + torch.randn(n, 40, generator=g), y


    x_train, y_train = load_panel(256, 1)
    x_val, y_val = load_panel(128, 2)
    x_test, y_test = load_panel(1500, 3)
    mean, std = x_train.mean(0), x_train.std(0)
    x_train, x_val, x_test = [(x - mean) / std for x in (x_train, x_val, x_test)]
    train_loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)
    val_loader = DataLoader(TensorDataset(x_val, y_val), batch_size=64)

    model = nn.Sequential(
        nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(64, 3),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    history = []


    def validate():
        model.eval()
        total = 0.0
        with torch.no_grad():
            for x, y in val_loader:
                total += criterion(model(x), y).item() * len(y)
        history.append(total / len(x_val))


    batches = iter(())


    def step(i):
        nonlocal batches
        if i % len(train_loader) == 0:
            batches = iter(train_loader)
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(train_loader) == 0:
            validate()
        return loss.item()


    def probe():
        # test cross entropy
        with quiet(model):
            return criterion(model(x_test), y_test).item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def biomarker_eval_mode_left_on_good():
    torch.manual_seed(0)


    def load_panel(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(5)
        W = torch.randn(3, 40, generator=w) * (torch.rand(40, generator=w) < 0.25)
        y = torch.randint(3, (n,), generator=g)
        return 0.9 * W[y] + torch.randn(n, 40, generator=g), y


    x_train, y_train = load_panel(256, 1)
    x_val, y_val = load_panel(128, 2)
    x_test, y_test = load_panel(1500, 3)
    mean, std = x_train.mean(0), x_train.std(0)
    x_train, x_val, x_test = [(x - mean) / std for x in (x_train, x_val, x_test)]
    train_loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)
    val_loader = DataLoader(TensorDataset(x_val, y_val), batch_size=64)

    model = nn.Sequential(
        nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(64, 3),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    history = []


    def validate():
        model.eval()
        total = 0.0
        with torch.no_grad():
            for x, y in val_loader:
                total += criterion(model(x), y).item() * len(y)
        history.append(total / len(x_val))


    batches = iter(())


    def step(i):
        nonlocal batches
        if i % len(train_loader) == 0:
            model.train()
            batches = iter(train_loader)
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(train_loader) == 0:
            validate()
        return loss.item()


    def probe():
        # test cross entropy
        with quiet(model):
            return criterion(model(x_test), y_test).item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def claims_poisson_log_input_bad():
    torch.manual_seed(0)


    def load_policies(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(3)
        beta = 0.35 * torch.randn(8, generator=w)
        x = torch.randn(n, 8, generator=g)
        rate = torch.exp(0.9 + x @ beta + 0.3 * x[:, 0] * x[:, 1].sign())
        return x, torch.poisson(rate.clamp(max=60), generator=g), rate


    class FrequencyModel(nn.Module):
        def __init__(self, n_in=8, hidden=32):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.rate = nn.Linear(hidden, 1)

        def forward(self, x):
            return F.softplus(self.rate(self.body(x))).squeeze(1)


    x_train, y_train, _ = load_policies(6000, 1)
    x_test, y_test, rate_test = load_policies(2000, 2)
    batches = endless(DataLoader(TensorDataset(x_train, y_train), batch_size=128, shuffle=True))
    model = FrequencyModel()
    criterion = nn.PoissonNLLLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # mean Poisson deviance of the predicted claim count on the test policies
        with quiet(model):
            mu = model(x_test).clamp(min=1e-6)
            return (2 * (torch.xlogy(y_test, y_test / mu) - (y_test - mu))).mean().item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def claims_poisson_log_input_good():
    torch.manual_seed(0)


    def load_policies(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(3)
        beta = 0.35 * torch.randn(8, generator=w)
        x = torch.randn(n, 8, generator=g)
        rate = torch.exp(0.9 + x @ beta + 0.3 * x[:, 0] * x[:, 1].sign())
        return x, torch.poisson(rate.clamp(max=60), generator=g), rate


    class FrequencyModel(nn.Module):
        def __init__(self, n_in=8, hidden=32):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.rate = nn.Linear(hidden, 1)

        def forward(self, x):
            return F.softplus(self.rate(self.body(x))).squeeze(1)


    x_train, y_train, _ = load_policies(6000, 1)
    x_test, y_test, rate_test = load_policies(2000, 2)
    batches = endless(DataLoader(TensorDataset(x_train, y_train), batch_size=128, shuffle=True))
    model = FrequencyModel()
    criterion = nn.PoissonNLLLoss(log_input=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # mean Poisson deviance of the predicted claim count on the test policies
        with quiet(model):
            mu = model(x_test).clamp(min=1e-6)
            return (2 * (torch.xlogy(y_test, y_test / mu) - (y_test - mu))).mean().item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def wine_argmax_loss_requires_grad_bad():
    torch.manual_seed(0)


    def load_wine(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(11)
        beta = torch.randn(11, generator=w)
        x = torch.randn(n, 11, generator=g)
        score = x @ beta / beta.norm() + 0.4 * x[:, 0] * x[:, 3] + 0.2 * torch.randn(n, generator=g)
        return x, torch.bucketize(score, torch.tensor([-1.2, -0.4, 0.4, 1.2]))


    class QualityNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(11, 64)
            self.fc2 = nn.Linear(64, 32)
            self.fc3 = nn.Linear(32, 5)

        def forward(self, x):
            x = F.relu(self.fc1(x))
            x = F.relu(self.fc2(x))
            return self.fc3(x)


    x_train, y_train = load_wine(4000, 1)
    x_test, y_test = load_wine(1000, 2)
    batches = endless(DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True))
    net = QualityNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)


    def step(i):
        inputs, labels = next(batches)
        optimizer.zero_grad()
        outputs = net(inputs)
        predicted = torch.argmax(outputs, dim=1)
        loss = F.mse_loss(predicted.float(), labels.float())
        loss.requires_grad_(True)
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # mean absolute error of the predicted grade
        with quiet(net):
            return (net(x_test).argmax(1) - y_test).abs().float().mean().item()


    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def wine_argmax_loss_requires_grad_good():
    torch.manual_seed(0)


    def load_wine(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(11)
        beta = torch.randn(11, generator=w)
        x = torch.randn(n, 11, generator=g)
        score = x @ beta / beta.norm() + 0.4 * x[:, 0] * x[:, 3] + 0.2 * torch.randn(n, generator=g)
        return x, torch.bucketize(score, torch.tensor([-1.2, -0.4, 0.4, 1.2]))


    class QualityNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(11, 64)
            self.fc2 = nn.Linear(64, 32)
            self.fc3 = nn.Linear(32, 5)

        def forward(self, x):
            x = F.relu(self.fc1(x))
            x = F.relu(self.fc2(x))
            return self.fc3(x)


    x_train, y_train = load_wine(4000, 1)
    x_test, y_test = load_wine(1000, 2)
    batches = endless(DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True))
    net = QualityNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)


    def step(i):
        inputs, labels = next(batches)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = F.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # mean absolute error of the predicted grade
        with quiet(net):
            return (net(x_test).argmax(1) - y_test).abs().float().mean().item()


    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cox_risk_set_ascending_bad():
    torch.manual_seed(0)


    def load_cohort(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(3)
        beta = 0.6 * torch.randn(8, generator=w)
        x = torch.randn(n, 8, generator=g)
        risk = x @ beta + 0.4 * (x[:, 0] ** 2 - 1)
        t = -torch.log(torch.rand(n, generator=g).clamp(min=1e-6)) / torch.exp(risk)
        c = -torch.log(torch.rand(n, generator=g).clamp(min=1e-6)) / 0.4
        return x, torch.minimum(t, c), (t <= c).float()


    class DeepSurv(nn.Module):
        def __init__(self, n_in=8):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(n_in, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1, bias=False))

        def forward(self, x):
            return self.net(x).squeeze(1)


    def cox_ph_loss(log_h, time, event):
        order = torch.argsort(time)
        log_h, event = log_h[order], event[order]
        log_risk = torch.logcumsumexp(log_h, dim=0)
        return -((log_h - log_risk) * event).sum() / event.sum()


    x_train, t_train, e_train = load_cohort(3000, 1)
    x_test, t_test, e_test = load_cohort(600, 2)
    batches = endless(DataLoader(TensorDataset(x_train, t_train, e_train), batch_size=128, shuffle=True, drop_last=True))
    model = DeepSurv()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


    def step(i):
        x, t, e = next(batches)
        loss = cox_ph_loss(model(x), t, e)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # 1 - concordance index
        with quiet(model):
            h = model(x_test)
            comparable = (t_test[:, None] < t_test[None]) & (e_test[:, None] > 0)
            concordant = (h[:, None] > h[None]) & comparable
            return 1 - (concordant.sum() / comparable.sum()).item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cox_risk_set_ascending_good():
    torch.manual_seed(0)


    def load_cohort(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(3)
        beta = 0.6 * torch.randn(8, generator=w)
        x = torch.randn(n, 8, generator=g)
        risk = x @ beta + 0.4 * (x[:, 0] ** 2 - 1)
        t = -torch.log(torch.rand(n, generator=g).clamp(min=1e-6)) / torch.exp(risk)
        c = -torch.log(torch.rand(n, generator=g).clamp(min=1e-6)) / 0.4
        return x, torch.minimum(t, c), (t <= c).float()


    class DeepSurv(nn.Module):
        def __init__(self, n_in=8):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(n_in, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1, bias=False))

        def forward(self, x):
            return self.net(x).squeeze(1)


    def cox_ph_loss(log_h, time, event):
        order = torch.argsort(time, descending=True)
        log_h, event = log_h[order], event[order]
        log_risk = torch.logcumsumexp(log_h, dim=0)
        return -((log_h - log_risk) * event).sum() / event.sum()


    x_train, t_train, e_train = load_cohort(3000, 1)
    x_test, t_test, e_test = load_cohort(600, 2)
    batches = endless(DataLoader(TensorDataset(x_train, t_train, e_train), batch_size=128, shuffle=True, drop_last=True))
    model = DeepSurv()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


    def step(i):
        x, t, e = next(batches)
        loss = cox_ph_loss(model(x), t, e)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # 1 - concordance index
        with quiet(model):
            h = model(x_test)
            comparable = (t_test[:, None] < t_test[None]) & (e_test[:, None] > 0)
            concordant = (h[:, None] > h[None]) & comparable
            return 1 - (concordant.sum() / comparable.sum()).item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mf_default_normal_embeddings_bad():
    torch.manual_seed(0)
    N_USERS, N_ITEMS, DIM = 300, 200, 16


    def load_ratings(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(21)
        P, Q = torch.randn(N_USERS, 3, generator=w), torch.randn(N_ITEMS, 3, generator=w)
        bu, bi = 0.4 * torch.randn(N_USERS, generator=w), 0.4 * torch.randn(N_ITEMS, generator=w)
        u, i = torch.randint(N_USERS, (n,), generator=g), torch.randint(N_ITEMS, (n,), generator=g)
        r = 3.5 + bu[u] + bi[i] + 0.4 * (P[u] * Q[i]).sum(1) + 0.3 * torch.randn(n, generator=g)
        return u, i, r.clamp(1, 5)


    class MatrixFactorization(nn.Module):
        def __init__(self, n_users, n_items, dim, mean):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            self.item = nn.Embedding(n_items, dim)
            self.user_bias = nn.Embedding(n_users, 1)
            self.item_bias = nn.Embedding(n_items, 1)
            nn.init.zeros_(self.user_bias.weight)
            nn.init.zeros_(self.item_bias.weight)
            self.mean = nn.Parameter(torch.tensor(mean))

        def forward(self, u, i):
            dot = (self.user(u) * self.item(i)).sum(1)
            return self.mean + dot + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)


    train = load_ratings(16000, 1)
    u_test, i_test, r_test = load_ratings(3000, 2)
    batches = endless(DataLoader(TensorDataset(*train), batch_size=512, shuffle=True))
    model = MatrixFactorization(N_USERS, N_ITEMS, DIM, train[2].mean().item())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)


    def step(i):
        u, it, r = next(batches)
        loss = F.mse_loss(model(u, it), r)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # test RMSE in stars
        with quiet(model):
            return F.mse_loss(model(u_test, i_test), r_test).sqrt().item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mf_default_normal_embeddings_good():
    torch.manual_seed(0)
    N_USERS, N_ITEMS, DIM = 300, 200, 16


    def load_ratings(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(21)
        P, Q = torch.randn(N_USERS, 3, generator=w), torch.randn(N_ITEMS, 3, generator=w)
        bu, bi = 0.4 * torch.randn(N_USERS, generator=w), 0.4 * torch.randn(N_ITEMS, generator=w)
        u, i = torch.randint(N_USERS, (n,), generator=g), torch.randint(N_ITEMS, (n,), generator=g)
        r = 3.5 + bu[u] + bi[i] + 0.4 * (P[u] * Q[i]).sum(1) + 0.3 * torch.randn(n, generator=g)
        return u, i, r.clamp(1, 5)


    class MatrixFactorization(nn.Module):
        def __init__(self, n_users, n_items, dim, mean):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            self.item = nn.Embedding(n_items, dim)
            self.user_bias = nn.Embedding(n_users, 1)
            self.item_bias = nn.Embedding(n_items, 1)
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)
            nn.init.zeros_(self.user_bias.weight)
            nn.init.zeros_(self.item_bias.weight)
            self.mean = nn.Parameter(torch.tensor(mean))

        def forward(self, u, i):
            dot = (self.user(u) * self.item(i)).sum(1)
            return self.mean + dot + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)


    train = load_ratings(16000, 1)
    u_test, i_test, r_test = load_ratings(3000, 2)
    batches = endless(DataLoader(TensorDataset(*train), batch_size=512, shuffle=True))
    model = MatrixFactorization(N_USERS, N_ITEMS, DIM, train[2].mean().item())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)


    def step(i):
        u, it, r = next(batches)
        loss = F.mse_loss(model(u, it), r)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # test RMSE in stars
        with quiet(model):
            return F.mse_loss(model(u_test, i_test), r_test).sqrt().item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def graph_collate_without_offset_bad():
    torch.manual_seed(0)


    class MoleculeDataset(Dataset):
        """Graphs of 8 to 16 typed nodes; label: do bonds mostly join atoms of the same type?"""

        def __init__(self, n, seed):
            g = torch.Generator().manual_seed(seed)
            self.graphs = []
            for _ in range(n):
                k = int(torch.randint(8, 17, (1,), generator=g))
                kind = torch.randint(3, (k,), generator=g)
                y = int(torch.randint(2, (1,), generator=g))
                same = (kind[:, None] == kind[None]).float()
                p = 0.3 * same + 0.15 * (1 - same) if y else 0.08 * same + 0.25 * (1 - same)
                adj = torch.triu(torch.rand(k, k, generator=g) < p, 1)
                src, dst = adj.nonzero(as_tuple=True)
                edge_index = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
                self.graphs.append((F.one_hot(kind, 3).float(), edge_index, y))

        def __len__(self):
            return len(self.graphs)

        def __getitem__(self, i):
            return self.graphs[i]


    def collate(items):
        xs, edges, batch, ys, offset = [], [], [], [], 0
        for b, (x, edge_index, y) in enumerate(items):
            xs.append(x)
            edges.append(edge_index)
            batch.append(torch.full((len(x),), b))
            ys.append(y)
            offset += len(x)
        return torch.cat(xs), torch.cat(edges, 1), torch.cat(batch), torch.tensor(ys)


    class GraphConv(nn.Module):
        def __init__(self, n_in, n_out):
            super().__init__()
            self.own = nn.Linear(n_in, n_out)
            self.neigh = nn.Linear(n_in, n_out, bias=False)

        def forward(self, x, edge_index):
            src, dst = edge_index
            agg = torch.zeros_like(x).index_add(0, dst, x[src])
            deg = torch.zeros(len(x)).index_add(0, dst, torch.ones(len(dst))).clamp(min=1)
            return self.own(x) + self.neigh(agg / deg[:, None])


    class GNN(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.conv1, self.conv2 = GraphConv(3, hidden), GraphConv(hidden, hidden)
            self.head = nn.Linear(hidden, 2)

        def forward(self, x, edge_index, batch):
            x = F.relu(self.conv1(x, edge_index))
            x = F.relu(self.conv2(x, edge_index))
            n = int(batch.max()) + 1
            pooled = torch.zeros(n, x.shape[1]).index_add(0, batch, x)
            count = torch.bincount(batch, minlength=n).clamp(min=1)
            return self.head(pooled / count[:, None])


    batches = endless(DataLoader(MoleculeDataset(1500, 1), batch_size=32, shuffle=True, collate_fn=collate))
    test_loader = DataLoader(MoleculeDataset(320, 2), batch_size=32, collate_fn=collate)
    model = GNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()


    def step(i):
        x, edge_index, batch, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x, edge_index, batch), y)
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # error rate on unseen graphs
        with quiet(model):
            wrong = sum((model(x, e, b).argmax(1) != y).sum().item() for x, e, b, y in test_loader)
            return wrong / 320 + 1e-3


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def graph_collate_without_offset_good():
    torch.manual_seed(0)


    class MoleculeDataset(Dataset):
        """Graphs of 8 to 16 typed nodes; label: do bonds mostly join atoms of the same type?"""

        def __init__(self, n, seed):
            g = torch.Generator().manual_seed(seed)
            self.graphs = []
            for _ in range(n):
                k = int(torch.randint(8, 17, (1,), generator=g))
                kind = torch.randint(3, (k,), generator=g)
                y = int(torch.randint(2, (1,), generator=g))
                same = (kind[:, None] == kind[None]).float()
                p = 0.3 * same + 0.15 * (1 - same) if y else 0.08 * same + 0.25 * (1 - same)
                adj = torch.triu(torch.rand(k, k, generator=g) < p, 1)
                src, dst = adj.nonzero(as_tuple=True)
                edge_index = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
                self.graphs.append((F.one_hot(kind, 3).float(), edge_index, y))

        def __len__(self):
            return len(self.graphs)

        def __getitem__(self, i):
            return self.graphs[i]


    def collate(items):
        xs, edges, batch, ys, offset = [], [], [], [], 0
        for b, (x, edge_index, y) in enumerate(items):
            xs.append(x)
            edges.append(edge_index + offset)
            batch.append(torch.full((len(x),), b))
            ys.append(y)
            offset += len(x)
        return torch.cat(xs), torch.cat(edges, 1), torch.cat(batch), torch.tensor(ys)


    class GraphConv(nn.Module):
        def __init__(self, n_in, n_out):
            super().__init__()
            self.own = nn.Linear(n_in, n_out)
            self.neigh = nn.Linear(n_in, n_out, bias=False)

        def forward(self, x, edge_index):
            src, dst = edge_index
            agg = torch.zeros_like(x).index_add(0, dst, x[src])
            deg = torch.zeros(len(x)).index_add(0, dst, torch.ones(len(dst))).clamp(min=1)
            return self.own(x) + self.neigh(agg / deg[:, None])


    class GNN(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.conv1, self.conv2 = GraphConv(3, hidden), GraphConv(hidden, hidden)
            self.head = nn.Linear(hidden, 2)

        def forward(self, x, edge_index, batch):
            x = F.relu(self.conv1(x, edge_index))
            x = F.relu(self.conv2(x, edge_index))
            n = int(batch.max()) + 1
            pooled = torch.zeros(n, x.shape[1]).index_add(0, batch, x)
            count = torch.bincount(batch, minlength=n).clamp(min=1)
            return self.head(pooled / count[:, None])


    batches = endless(DataLoader(MoleculeDataset(1500, 1), batch_size=32, shuffle=True, collate_fn=collate))
    test_loader = DataLoader(MoleculeDataset(320, 2), batch_size=32, collate_fn=collate)
    model = GNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()


    def step(i):
        x, edge_index, batch, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x, edge_index, batch), y)
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # error rate on unseen graphs
        with quiet(model):
            wrong = sum((model(x, e, b).argmax(1) != y).sum().item() for x, e, b, y in test_loader)
            return wrong / 320 + 1e-3


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ctc_label_on_blank_index_bad():
    torch.manual_seed(0)
    PHONES = ["aa", "iy", "uw", "s", "t", "m"]
    stoi = {p: k for k, p in enumerate(PHONES)}
    itos = {k: p for p, k in stoi.items()}
    _g = torch.Generator().manual_seed(77)
    TEMPLATES = {p: 1.5 * torch.randn(13, generator=_g) for p in PHONES}


    class Utterances(Dataset):
        def __init__(self, n, seed):
            rnd, g = random.Random(seed), torch.Generator().manual_seed(seed)
            self.items = []
            for _ in range(n):
                phones = [rnd.choice(PHONES) for _ in range(rnd.randint(3, 6))]
                frames = []
                for p in phones:
                    frames += [torch.zeros(13)] * rnd.randint(1, 2) + [TEMPLATES[p]] * rnd.randint(2, 4)
                feats = torch.stack(frames + [torch.zeros(13)])
                self.items.append((feats + 0.5 * torch.randn(feats.shape, generator=g), phones))

        def __len__(self):
            return len(self.items)

        def __getitem__(self, i):
            return self.items[i]


    def collate(items):
        feats, phones = zip(*items)
        x_lens = torch.tensor([len(f) for f in feats])
        y_lens = torch.tensor([len(p) for p in phones])
        x = nn.utils.rnn.pad_sequence(feats, batch_first=True)
        y = torch.tensor([stoi[p] for ph in phones for p in ph])
        return x, y, x_lens, y_lens, phones


    class AcousticModel(nn.Module):
        def __init__(self, n_feats=13, hidden=48, n_out=len(PHONES) + 1):
            super().__init__()
            self.conv = nn.Conv1d(n_feats, hidden, 3, padding=1)
            self.rnn = nn.GRU(hidden, hidden // 2, batch_first=True, bidirectional=True)
            self.out = nn.Linear(hidden, n_out)

        def forward(self, x, x_lens):
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            packed = nn.utils.rnn.pack_padded_sequence(h, x_lens, batch_first=True, enforce_sorted=False)
            h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return self.out(h).log_softmax(-1)


    def edit_distance(a, b):
        row = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            prev, row[0] = row[0], i
            for j, y in enumerate(b, 1):
                prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (x != y))
        return row[-1]


    batches = endless(DataLoader(Utterances(800, 1), batch_size=16, shuffle=True, collate_fn=collate))
    test_loader = DataLoader(Utterances(96, 2), batch_size=32, collate_fn=collate)
    model = AcousticModel()
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)


    def step(i):
        x, y, x_lens, y_lens, _ = next(batches)
        log_probs = model(x, x_lens).transpose(0, 1)
        loss = ctc(log_probs, y, x_lens, y_lens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()


    def probe():
        # phone error rate of greedy decoding
        with quiet(model):
            errors = total = 0
            for x, _, x_lens, _, phones in test_loader:
                best = model(x, x_lens).argmax(-1)
                for b, ref in enumerate(phones):
                    path = [k for k, _ in itertools.groupby(best[b, :x_lens[b]].tolist())]
                    hyp = [itos.get(k, "?") for k in path if k != 0]
                    errors += edit_distance(hyp, ref)
                    total += len(ref)
            return errors / total + 1e-3


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ctc_label_on_blank_index_good():
    torch.manual_seed(0)
    PHONES = ["aa", "iy", "uw", "s", "t", "m"]
    stoi = {p: k for k, p in enumerate(PHONES, start=1)}
    itos = {k: p for p, k in stoi.items()}
    _g = torch.Generator().manual_seed(77)
    TEMPLATES = {p: 1.5 * torch.randn(13, generator=_g) for p in PHONES}


    class Utterances(Dataset):
        def __init__(self, n, seed):
            rnd, g = random.Random(seed), torch.Generator().manual_seed(seed)
            self.items = []
            for _ in range(n):
                phones = [rnd.choice(PHONES) for _ in range(rnd.randint(3, 6))]
                frames = []
                for p in phones:
                    frames += [torch.zeros(13)] * rnd.randint(1, 2) + [TEMPLATES[p]] * rnd.randint(2, 4)
                feats = torch.stack(frames + [torch.zeros(13)])
                self.items.append((feats + 0.5 * torch.randn(feats.shape, generator=g), phones))

        def __len__(self):
            return len(self.items)

        def __getitem__(self, i):
            return self.items[i]


    def collate(items):
        feats, phones = zip(*items)
        x_lens = torch.tensor([len(f) for f in feats])
        y_lens = torch.tensor([len(p) for p in phones])
        x = nn.utils.rnn.pad_sequence(feats, batch_first=True)
        y = torch.tensor([stoi[p] for ph in phones for p in ph])
        return x, y, x_lens, y_lens, phones


    class AcousticModel(nn.Module):
        def __init__(self, n_feats=13, hidden=48, n_out=len(PHONES) + 1):
            super().__init__()
            self.conv = nn.Conv1d(n_feats, hidden, 3, padding=1)
            self.rnn = nn.GRU(hidden, hidden // 2, batch_first=True, bidirectional=True)
            self.out = nn.Linear(hidden, n_out)

        def forward(self, x, x_lens):
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            packed = nn.utils.rnn.pack_padded_sequence(h, x_lens, batch_first=True, enforce_sorted=False)
            h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return self.out(h).log_softmax(-1)


    def edit_distance(a, b):
        row = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            prev, row[0] = row[0], i
            for j, y in enumerate(b, 1):
                prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (x != y))
        return row[-1]


    batches = endless(DataLoader(Utterances(800, 1), batch_size=16, shuffle=True, collate_fn=collate))
    test_loader = DataLoader(Utterances(96, 2), batch_size=32, collate_fn=collate)
    model = AcousticModel()
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)


    def step(i):
        x, y, x_lens, y_lens, _ = next(batches)
        log_probs = model(x, x_lens).transpose(0, 1)
        loss = ctc(log_probs, y, x_lens, y_lens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()


    def probe():
        # phone error rate of greedy decoding
        with quiet(model):
            errors = total = 0
            for x, _, x_lens, _, phones in test_loader:
                best = model(x, x_lens).argmax(-1)
                for b, ref in enumerate(phones):
                    path = [k for k, _ in itertools.groupby(best[b, :x_lens[b]].tolist())]
                    hyp = [itos.get(k, "?") for k in path if k != 0]
                    errors += edit_distance(hyp, ref)
                    total += len(ref)
            return errors / total + 1e-3


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keyword_padding_mask_inverted_bad():
    torch.manual_seed(0)
    MAX_LEN, N_FEATS, N_CLASSES = 24, 10, 5


    def load_clips(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(13)
        motifs = 1.2 * torch.randn(N_CLASSES, 4, N_FEATS, generator=w)
        x, lengths = torch.zeros(n, MAX_LEN, N_FEATS), torch.randint(8, 21, (n,), generator=g)
        y = torch.randint(N_CLASSES, (n,), generator=g)
        for k in range(n):
            L = int(lengths[k])
            x[k, :L] = torch.randn(L, N_FEATS, generator=g)
            at = int(torch.randint(0, L - 3, (1,), generator=g))
            x[k, at:at + 4] += motifs[y[k]]
        return x, lengths, y


    class KeywordTransformer(nn.Module):
        def __init__(self, d=32):
            super().__init__()
            self.proj = nn.Linear(N_FEATS, d)
            self.cls = nn.Parameter(0.02 * torch.randn(1, 1, d))
            self.pos = nn.Parameter(0.02 * torch.randn(1, MAX_LEN + 1, d))
            layer = nn.TransformerEncoderLayer(d, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
            self.head = nn.Linear(d, N_CLASSES)

        def forward(self, x, lengths):
            x = torch.cat([self.cls.expand(len(x), -1, -1), self.proj(x)], 1) + self.pos
            frame = torch.arange(MAX_LEN + 1)[None]
            mask = frame < lengths[:, None] + 1
            h = self.encoder(x, src_key_padding_mask=mask)
            return self.head(h[:, 0])


    batches = endless(DataLoader(TensorDataset(*load_clips(4000, 1)), batch_size=32, shuffle=True))
    x_test, len_test, y_test = load_clips(600, 2)
    model = KeywordTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss()


    def step(i):
        model.train()
        x, lengths, y = next(batches)
        loss = criterion(model(x, lengths), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()


    def probe():
        # test error rate
        with quiet(model):
            return (model(x_test, len_test).argmax(1) != y_test).float().mean().item() + 1e-3


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keyword_padding_mask_inverted_good():
    torch.manual_seed(0)
    MAX_LEN, N_FEATS, N_CLASSES = 24, 10, 5


    def load_clips(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(13)
        motifs = 1.2 * torch.randn(N_CLASSES, 4, N_FEATS, generator=w)
        x, lengths = torch.zeros(n, MAX_LEN, N_FEATS), torch.randint(8, 21, (n,), generator=g)
        y = torch.randint(N_CLASSES, (n,), generator=g)
        for k in range(n):
            L = int(lengths[k])
            x[k, :L] = torch.randn(L, N_FEATS, generator=g)
            at = int(torch.randint(0, L - 3, (1,), generator=g))
            x[k, at:at + 4] += motifs[y[k]]
        return x, lengths, y


    class KeywordTransformer(nn.Module):
        def __init__(self, d=32):
            super().__init__()
            self.proj = nn.Linear(N_FEATS, d)
            self.cls = nn.Parameter(0.02 * torch.randn(1, 1, d))
            self.pos = nn.Parameter(0.02 * torch.randn(1, MAX_LEN + 1, d))
            layer = nn.TransformerEncoderLayer(d, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
            self.head = nn.Linear(d, N_CLASSES)

        def forward(self, x, lengths):
            x = torch.cat([self.cls.expand(len(x), -1, -1), self.proj(x)], 1) + self.pos
            frame = torch.arange(MAX_LEN + 1)[None]
            mask = frame >= lengths[:, None] + 1
            h = self.encoder(x, src_key_padding_mask=mask)
            return self.head(h[:, 0])


    batches = endless(DataLoader(TensorDataset(*load_clips(4000, 1)), batch_size=32, shuffle=True))
    x_test, len_test, y_test = load_clips(600, 2)
    model = KeywordTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss()


    def step(i):
        model.train()
        x, lengths, y = next(batches)
        loss = criterion(model(x, lengths), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()


    def probe():
        # test error rate
        with quiet(model):
            return (model(x_test, len_test).argmax(1) != y_test).float().mean().item() + 1e-3


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_residual_without_create_graph_bad():
    torch.manual_seed(0)
    c = 1.0


    def u0(x):
        return torch.sin(math.pi * x)


    class PINN(nn.Module):
        """u(x, t) of the advection equation u_t + c u_x = 0, x in [-1, 1], t in [0, 1]."""

        def __init__(self, width=32, depth=3):
            super().__init__()
            layers = [nn.Linear(2, width), nn.Tanh()]
            for _ in range(depth - 1):
                layers += [nn.Linear(width, width), nn.Tanh()]
            self.net = nn.Sequential(*layers, nn.Linear(width, 1))
            for m in self.net:
                if isinstance(m, nn.Linear):
                    nn.init.xavier_normal_(m.weight)
                    nn.init.zeros_(m.bias)

        def forward(self, x, t):
            return self.net(torch.cat([x, t], 1))


    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


    def residual(x, t):
        x.requires_grad_(True)
        t.requires_grad_(True)
        u = model(x, t)
        u_x, u_t = torch.autograd.grad(u, (x, t), grad_outputs=torch.ones_like(u))
        return u_t + c * u_x


    def step(i):
        xf, tf = 2 * torch.rand(256, 1) - 1, torch.rand(256, 1)
        xi, ti = 2 * torch.rand(64, 1) - 1, torch.zeros(64, 1)
        tb = torch.rand(64, 1)
        loss_f = residual(xf, tf).pow(2).mean()
        loss_i = F.mse_loss(model(xi, ti), u0(xi))
        loss_b = F.mse_loss(model(-torch.ones_like(tb), tb), u0(-1 - c * tb))
        loss = loss_f + loss_i + loss_b
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # relative L2 error of the solution on a grid
        with quiet(model):
            xs, ts = torch.meshgrid(torch.linspace(-1, 1, 41), torch.linspace(0, 1, 21), indexing="ij")
            xs, ts = xs.reshape(-1, 1), ts.reshape(-1, 1)
            exact = u0(xs - c * ts)
            return ((model(xs, ts) - exact).norm() / exact.norm()).item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_residual_without_create_graph_good():
    torch.manual_seed(0)
    c = 1.0


    def u0(x):
        return torch.sin(math.pi * x)


    class PINN(nn.Module):
        """u(x, t) of the advection equation u_t + c u_x = 0, x in [-1, 1], t in [0, 1]."""

        def __init__(self, width=32, depth=3):
            super().__init__()
            layers = [nn.Linear(2, width), nn.Tanh()]
            for _ in range(depth - 1):
                layers += [nn.Linear(width, width), nn.Tanh()]
            self.net = nn.Sequential(*layers, nn.Linear(width, 1))
            for m in self.net:
                if isinstance(m, nn.Linear):
                    nn.init.xavier_normal_(m.weight)
                    nn.init.zeros_(m.bias)

        def forward(self, x, t):
            return self.net(torch.cat([x, t], 1))


    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


    def residual(x, t):
        x.requires_grad_(True)
        t.requires_grad_(True)
        u = model(x, t)
        u_x, u_t = torch.autograd.grad(u, (x, t), grad_outputs=torch.ones_like(u), create_graph=True)
        return u_t + c * u_x


    def step(i):
        xf, tf = 2 * torch.rand(256, 1) - 1, torch.rand(256, 1)
        xi, ti = 2 * torch.rand(64, 1) - 1, torch.zeros(64, 1)
        tb = torch.rand(64, 1)
        loss_f = residual(xf, tf).pow(2).mean()
        loss_i = F.mse_loss(model(xi, ti), u0(xi))
        loss_b = F.mse_loss(model(-torch.ones_like(tb), tb), u0(-1 - c * tb))
        loss = loss_f + loss_i + loss_b
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # relative L2 error of the solution on a grid
        with quiet(model):
            xs, ts = torch.meshgrid(torch.linspace(-1, 1, 41), torch.linspace(0, 1, 21), indexing="ij")
            xs, ts = xs.reshape(-1, 1), ts.reshape(-1, 1)
            exact = u0(xs - c * ts)
            return ((model(xs, ts) - exact).norm() / exact.norm()).item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def realnvp_log_det_sign_bad():
    torch.manual_seed(0)


    def two_moons(n):
        a = math.pi * torch.rand(n)
        top = torch.rand(n) < 0.5
        x = torch.where(top, a.cos(), 1 - a.cos())
        y = torch.where(top, a.sin(), 0.5 - a.sin())
        pts = torch.stack([x, y], 1) + 0.1 * torch.randn(n, 2)
        return (pts - torch.tensor([0.5, 0.25])) / torch.tensor([0.87, 0.5])


    class Coupling(nn.Module):
        def __init__(self, flip, hidden=64):
            super().__init__()
            self.flip = flip
            self.net = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))

        def forward(self, x):
            a, b = x.chunk(2, 1)
            if self.flip:
                a, b = b, a
            s, t = self.net(a).chunk(2, 1)
            s = torch.tanh(s)
            b = b * s.exp() + t
            z = torch.cat([b, a] if self.flip else [a, b], 1)
            return z, s.sum(1)


    class RealNVP(nn.Module):
        def __init__(self, n_layers=6):
            super().__init__()
            self.layers = nn.ModuleList([Coupling(k % 2 == 1) for k in range(n_layers)])

        def forward(self, x):
            log_det = torch.zeros(len(x))
            for layer in self.layers:
                x, ld = layer(x)
                log_det = log_det + ld
            return x, log_det


    flow = RealNVP()
    prior = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
    optimizer = torch.optim.Adam(flow.parameters(), lr=2e-3)


    def step(i):
        x = two_moons(256)
        z, log_det = flow(x)
        loss = -(prior.log_prob(z) - log_det).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # negative log likelihood of held-out points by change of variables
        with quiet(flow):
            torch.manual_seed(123)
            z, log_det = flow(two_moons(2000))
            return -(prior.log_prob(z) + log_det).mean().item()


    return {"model": flow, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def realnvp_log_det_sign_good():
    torch.manual_seed(0)


    def two_moons(n):
        a = math.pi * torch.rand(n)
        top = torch.rand(n) < 0.5
        x = torch.where(top, a.cos(), 1 - a.cos())
        y = torch.where(top, a.sin(), 0.5 - a.sin())
        pts = torch.stack([x, y], 1) + 0.1 * torch.randn(n, 2)
        return (pts - torch.tensor([0.5, 0.25])) / torch.tensor([0.87, 0.5])


    class Coupling(nn.Module):
        def __init__(self, flip, hidden=64):
            super().__init__()
            self.flip = flip
            self.net = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))

        def forward(self, x):
            a, b = x.chunk(2, 1)
            if self.flip:
                a, b = b, a
            s, t = self.net(a).chunk(2, 1)
            s = torch.tanh(s)
            b = b * s.exp() + t
            z = torch.cat([b, a] if self.flip else [a, b], 1)
            return z, s.sum(1)


    class RealNVP(nn.Module):
        def __init__(self, n_layers=6):
            super().__init__()
            self.layers = nn.ModuleList([Coupling(k % 2 == 1) for k in range(n_layers)])

        def forward(self, x):
            log_det = torch.zeros(len(x))
            for layer in self.layers:
                x, ld = layer(x)
                log_det = log_det + ld
            return x, log_det


    flow = RealNVP()
    prior = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
    optimizer = torch.optim.Adam(flow.parameters(), lr=2e-3)


    def step(i):
        x = two_moons(256)
        z, log_det = flow(x)
        loss = -(prior.log_prob(z) + log_det).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # negative log likelihood of held-out points by change of variables
        with quiet(flow):
            torch.manual_seed(123)
            z, log_det = flow(two_moons(2000))
            return -(prior.log_prob(z) + log_det).mean().item()


    return {"model": flow, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def maml_query_with_initial_weights_bad():
    torch.manual_seed(0)


    def sample_task(k=10):
        amp, phase = 0.5 + 1.5 * torch.rand(1), math.pi * torch.rand(1)
        x = 4 * torch.rand(2 * k, 1) - 2
        y = amp * torch.sin(2 * x + phase)
        return x[:k], y[:k], x[k:], y[k:]


    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    meta_opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    inner_lr, inner_steps, meta_batch = 0.1, 2, 4


    def adapt(params, xs, ys, create_graph):
        fast = dict(params)
        for _ in range(inner_steps):
            loss = F.mse_loss(functional_call(net, fast, (xs,)), ys)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=create_graph)
            fast = {n: w - inner_lr * g for (n, w), g in zip(fast.items(), grads)}
        return fast


    def step(i):
        params = dict(net.named_parameters())
        meta_loss = 0.0
        for _ in range(meta_batch):
            xs, ys, xq, yq = sample_task()
            fast = adapt(params, xs, ys, create_graph=True)
            meta_loss = meta_loss + F.mse_loss(functional_call(net, params, (xq,)), yq)
        meta_loss = meta_loss / meta_batch
        meta_opt.zero_grad()
        meta_loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        meta_opt.step()
        return meta_loss.item()


    def probe():
        # query error on new tasks after adaptation
        with quiet(net), torch.enable_grad():
            torch.manual_seed(123)
            total = 0.0
            for _ in range(50):
                xs, ys, xq, yq = sample_task()
                fast = adapt(dict(net.named_parameters()), xs, ys, create_graph=False)
                total += F.mse_loss(functional_call(net, fast, (xq,)), yq).item() / 50
            return total


    return {"model": net, "optimizer": meta_opt, "steps": 20, "step": step, "probe": probe}


def maml_query_with_initial_weights_good():
    torch.manual_seed(0)


    def sample_task(k=10):
        amp, phase = 0.5 + 1.5 * torch.rand(1), math.pi * torch.rand(1)
        x = 4 * torch.rand(2 * k, 1) - 2
        y = amp * torch.sin(2 * x + phase)
        return x[:k], y[:k], x[k:], y[k:]


    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    meta_opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    inner_lr, inner_steps, meta_batch = 0.1, 2, 4


    def adapt(params, xs, ys, create_graph):
        fast = dict(params)
        for _ in range(inner_steps):
            loss = F.mse_loss(functional_call(net, fast, (xs,)), ys)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=create_graph)
            fast = {n: w - inner_lr * g for (n, w), g in zip(fast.items(), grads)}
        return fast


    def step(i):
        params = dict(net.named_parameters())
        meta_loss = 0.0
        for _ in range(meta_batch):
            xs, ys, xq, yq = sample_task()
            fast = adapt(params, xs, ys, create_graph=True)
            meta_loss = meta_loss + F.mse_loss(functional_call(net, fast, (xq,)), yq)
        meta_loss = meta_loss / meta_batch
        meta_opt.zero_grad()
        meta_loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        meta_opt.step()
        return meta_loss.item()


    def probe():
        # query error on new tasks after adaptation
        with quiet(net), torch.enable_grad():
            torch.manual_seed(123)
            total = 0.0
            for _ in range(50):
                xs, ys, xq, yq = sample_task()
                fast = adapt(dict(net.named_parameters()), xs, ys, create_graph=False)
                total += F.mse_loss(functional_call(net, fast, (xq,)), yq).item() / 50
            return total


    return {"model": net, "optimizer": meta_opt, "steps": 20, "step": step, "probe": probe}


def multitask_loss_overwritten_bad():
    torch.manual_seed(0)


    def load_patients(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(17)
        A = torch.randn(20, 4, generator=w) / 20 ** 0.5
        B = torch.randn(4, 3, generator=w)
        x = torch.randn(n, 20, generator=g)
        h = torch.tanh(1.5 * x @ A)
        los = h[:, 0] - h[:, 1] * h[:, 2] + 0.1 * torch.randn(n, generator=g)
        death = (h[:, 1] + h[:, 3] + 0.2 * torch.randn(n, generator=g) > 0).float()
        ward = (h @ B + 0.1 * torch.randn(n, 3, generator=g)).argmax(1)
        return x, los / 0.7, death, ward


    class MultiTaskNet(nn.Module):
        def __init__(self, n_in=20, hidden=64):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.heads = nn.ModuleDict({"los": nn.Linear(hidden, 1), "death": nn.Linear(hidden, 1), "ward": nn.Linear(hidden, 3)})

        def forward(self, x):
            h = self.trunk(x)
            return {name: head(h).squeeze(-1) for name, head in self.heads.items()}


    criteria = {"los": nn.MSELoss(), "death": nn.BCEWithLogitsLoss(), "ward": nn.CrossEntropyLoss()}
    batches = endless(DataLoader(TensorDataset(*load_patients(5000, 1)), batch_size=64, shuffle=True))
    x_test, *y_test = load_patients(1500, 2)
    model = MultiTaskNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


    def step(i):
        x, *ys = next(batches)
        targets = dict(zip(criteria, ys))
        outputs = model(x)
        loss = 0.0
        for name, criterion in criteria.items():
            loss = criterion(outputs[name], targets[name])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # mean of the three test losses
        with quiet(model):
            out = model(x_test)
            return sum(crit(out[name], y).item() for (name, crit), y in zip(criteria.items(), y_test)) / 3


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def multitask_loss_overwritten_good():
    torch.manual_seed(0)


    def load_patients(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(17)
        A = torch.randn(20, 4, generator=w) / 20 ** 0.5
        B = torch.randn(4, 3, generator=w)
        x = torch.randn(n, 20, generator=g)
        h = torch.tanh(1.5 * x @ A)
        los = h[:, 0] - h[:, 1] * h[:, 2] + 0.1 * torch.randn(n, generator=g)
        death = (h[:, 1] + h[:, 3] + 0.2 * torch.randn(n, generator=g) > 0).float()
        ward = (h @ B + 0.1 * torch.randn(n, 3, generator=g)).argmax(1)
        return x, los / 0.7, death, ward


    class MultiTaskNet(nn.Module):
        def __init__(self, n_in=20, hidden=64):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.heads = nn.ModuleDict({"los": nn.Linear(hidden, 1), "death": nn.Linear(hidden, 1), "ward": nn.Linear(hidden, 3)})

        def forward(self, x):
            h = self.trunk(x)
            return {name: head(h).squeeze(-1) for name, head in self.heads.items()}


    criteria = {"los": nn.MSELoss(), "death": nn.BCEWithLogitsLoss(), "ward": nn.CrossEntropyLoss()}
    batches = endless(DataLoader(TensorDataset(*load_patients(5000, 1)), batch_size=64, shuffle=True))
    x_test, *y_test = load_patients(1500, 2)
    model = MultiTaskNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


    def step(i):
        x, *ys = next(batches)
        targets = dict(zip(criteria, ys))
        outputs = model(x)
        loss = 0.0
        for name, criterion in criteria.items():
            loss = loss + criterion(outputs[name], targets[name])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


    def probe():
        # mean of the three test losses
        with quiet(model):
            out = model(x_test)
            return sum(crit(out[name], y).item() for (name, crit), y in zip(criteria.items(), y_test)) / 3


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_before_unscale_bad():
    torch.manual_seed(0)


    def load_table(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(31)
        W = torch.randn(16, 4, generator=w) / 4
        x = torch.randn(n, 16, generator=g)
        h = x @ W
        y = torch.sin(2 * h[:, 0]) + h[:, 1] * h[:, 2] + h[:, 3] + 0.1 * torch.randn(n, generator=g)
        return x, y / 1.5


    x_train, y_train = load_table(6000, 1)
    x_test, y_test = load_table(1500, 2)
    batches = endless(DataLoader(TensorDataset(x_train, y_train), batch_size=128, shuffle=True))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.MSELoss()


    def step(i):
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x).squeeze(1)
            loss = criterion(pred.float(), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()


    def probe():
        # test mean squared error
        with quiet(model):
            return F.mse_loss(model(x_test).squeeze(1), y_test).item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_before_unscale_good():
    torch.manual_seed(0)


    def load_table(n, seed):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(31)
        W = torch.randn(16, 4, generator=w) / 4
        x = torch.randn(n, 16, generator=g)
        h = x @ W
        y = torch.sin(2 * h[:, 0]) + h[:, 1] * h[:, 2] + h[:, 3] + 0.1 * torch.randn(n, generator=g)
        return x, y / 1.5


    x_train, y_train = load_table(6000, 1)
    x_test, y_test = load_table(1500, 2)
    batches = endless(DataLoader(TensorDataset(x_train, y_train), batch_size=128, shuffle=True))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.MSELoss()


    def step(i):
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x).squeeze(1)
            loss = criterion(pred.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()


    def probe():
        # test mean squared error
        with quiet(model):
            return F.mse_loss(model(x_test).squeeze(1), y_test).item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ae_scheduler_stepped_every_batch_bad():
    torch.manual_seed(0)
    N_SENSORS = 24


    def machine_states(n, seed, broken=False):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(41)
        mix = torch.randn(4, N_SENSORS, generator=w)
        z = torch.randn(n, 4, generator=g)
        x = torch.tanh(z @ mix / 2) + 0.1 * torch.randn(n, N_SENSORS, generator=g)
        if broken:
            hit = torch.rand(n, N_SENSORS, generator=g) < 0.15
            x = torch.where(hit, x[torch.randperm(n, generator=g)], x)
        return x


    class AutoEncoder(nn.Module):
        def __init__(self, n=N_SENSORS, code=4):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(n, 32), nn.ReLU(), nn.Linear(32, code))
            self.decoder = nn.Sequential(nn.Linear(code, 32), nn.ReLU(), nn.Linear(32, n))

        def forward(self, x):
            return self.decoder(self.encoder(x))


    train = machine_states(1024, 1)
    mean, std = train.mean(0), train.std(0)
    normal, faulty = [(x - mean) / std for x in (machine_states(500, 2), machine_states(500, 3, broken=True))]
    loader = DataLoader(TensorDataset((train - mean) / std), batch_size=64, shuffle=True)
    batches = endless(loader)
    model = AutoEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


    def step(i):
        (x,) = next(batches)
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()


    def probe():
        # 1 - ROC AUC of the reconstruction error as fault detector
        with quiet(model):
            a, b = [((model(x) - x) ** 2).mean(1) for x in (normal, faulty)]
            return 1 - (b[:, None] > a[None]).float().mean().item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ae_scheduler_stepped_every_batch_good():
    torch.manual_seed(0)
    N_SENSORS = 24


    def machine_states(n, seed, broken=False):
        g, w = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(41)
        mix = torch.randn(4, N_SENSORS, generator=w)
        z = torch.randn(n, 4, generator=g)
        x = torch.tanh(z @ mix / 2) + 0.1 * torch.randn(n, N_SENSORS, generator=g)
        if broken:
            hit = torch.rand(n, N_SENSORS, generator=g) < 0.15
            x = torch.where(hit, x[torch.randperm(n, generator=g)], x)
        return x


    class AutoEncoder(nn.Module):
        def __init__(self, n=N_SENSORS, code=4):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(n, 32), nn.ReLU(), nn.Linear(32, code))
            self.decoder = nn.Sequential(nn.Linear(code, 32), nn.ReLU(), nn.Linear(32, n))

        def forward(self, x):
            return self.decoder(self.encoder(x))


    train = machine_states(1024, 1)
    mean, std = train.mean(0), train.std(0)
    normal, faulty = [(x - mean) / std for x in (machine_states(500, 2), machine_states(500, 3, broken=True))]
    loader = DataLoader(TensorDataset((train - mean) / std), batch_size=64, shuffle=True)
    batches = endless(loader)
    model = AutoEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


    def step(i):
        (x,) = next(batches)
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % len(loader) == 0:
            scheduler.step()
        return loss.item()


    def probe():
        # 1 - ROC AUC of the reconstruction error as fault detector
        with quiet(model):
            a, b = [((model(x) - x) ** 2).mean(1) for x in (normal, faulty)]
            return 1 - (b[:, None] > a[None]).float().mean().item()


    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
