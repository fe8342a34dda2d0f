import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Normal
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)

CASES = [
    {"name": "reinforce_baseline_outer", "what": "The advantage has shape (N, 1) and log_prob has shape (N,), so their product is an (N, N) table: every action is credited with every advantage and the policy gradient nearly averages out.", "steps": 150},
    {"name": "dqn_bootstrap_past_end", "what": "The TD target bootstraps from the next observation on terminal transitions too (the reset state of the next episode), so Q-values are those of an endless task and grow far past the real returns.", "steps": 400},
    {"name": "gaussian_policy_rsample", "what": "Actions come from rsample(), so log_prob is differentiated through the action as well: the two paths cancel exactly and the policy mean gets no gradient from the score-function loss.", "steps": 200},
    {"name": "td_target_with_grad", "what": "The bootstrapped TD target r + gamma * V(s') is not detached, so the loss also pulls V(s') towards V(s); with random transitions this residual gradient converges to wrongly smoothed values.", "steps": 600},
    {"name": "polyak_wrong_way", "what": "The soft update copies the target network into the online network instead of the other way round: the target stays at its random start and the online weights are pulled back to it after every step.", "steps": 500},
    {"name": "cox_risk_set_reversed", "what": "The partial likelihood sorts the patients by ascending time before the running logcumsumexp, so each risk set holds those who died earlier instead of those still alive, and the risk order comes out reversed.", "steps": 200},
    {"name": "quantile_error_sign", "what": "The pinball loss takes the error as prediction minus target, so the weights of over- and under-prediction change places: the 0.9 head learns the 0.1 quantile and the other way round.", "steps": 200},
    {"name": "outside_tag_ignored", "what": "The tag matrix is padded with 0 and the loss gets ignore_index=0, but 0 is also the id of the real tag O: no outside token ever counts, so the tagger never learns to say O and marks everything as an entity.", "steps": 150},
    {"name": "softmax_then_cross_entropy", "what": "The network ends with a softmax and is trained with CrossEntropyLoss, which applies log_softmax again: the logits are squeezed into [0, 1], gradients are tiny and the classes are not separated.", "steps": 250},
    {"name": "ctc_phone_zero_is_blank", "what": "Phones are numbered from 0 while CTCLoss keeps index 0 for the blank, so phone 0 and the blank are one symbol: that phone can never be decoded and its frames are taken for silence.", "steps": 250},
    {"name": "gnn_layers_in_list", "what": "The message-passing layers sit in a plain Python list, so parameters() does not see them: they stay at their random start and only encoder and head are trained.", "steps": 200},
    {"name": "maml_grads_stay_in_copy", "what": "The query loss is back-propagated through a deepcopy of the model; its gradients are never carried over to the model that the meta optimizer holds, so the meta parameters never move.", "steps": 300},
    {"name": "bf16_weights_small_rate", "what": "The DeepONet is cast to bfloat16 as a whole, weights included; with this small rate most Adam updates are below half a rounding step of the weight and vanish (mended: float32 weights with autocast).", "steps": 600},
    {"name": "pretrained_items_frozen", "what": "Embedding.from_pretrained freezes its weight by default, so the item factors that were meant to be fine-tuned (they even have a parameter group of their own) never change.", "steps": 300},
    {"name": "pinn_no_create_graph", "what": "The derivatives for the PDE residual are taken without create_graph, so they are constants for the optimizer: the residual has no gradient and only the initial condition is learned.", "steps": 500},
    {"name": "graph_batch_no_offset", "what": "When graphs are merged into one batch, the edge indices are concatenated without adding each graph's node offset: all edges land on the nodes of the first graphs and the others get no messages at all.", "steps": 250},
    {"name": "forecaster_no_causal_mask", "what": "The transformer that predicts the next value at every position gets no causal mask, so each position simply reads its answer from its right neighbour and no forecast is learned.", "steps": 250},
    {"name": "lstm_runs_over_batch", "what": "The LSTM is built without batch_first but is fed (batch, time, features): it runs along the batch, so a row's prediction depends on the rows before it and sees only its own last time step.", "steps": 300},
    {"name": "fno_view_for_permute", "what": "The Fourier operator turns (batch, points, channels) into (batch, channels, points) with view instead of permute: points and channels are scrambled, and the Fourier modes are not those of the grid.", "steps": 250},
    {"name": "epoch_decay_every_batch", "what": "The ExponentialLR that is meant to shrink the rate once an epoch is stepped after every batch, so the learning rate is gone after a few dozen batches and the two towers stay near their start.", "steps": 400},
    {"name": "time_shift_without_labels", "what": "The augmentation shifts the feature frames in time by a random amount but leaves the frame labels where they are, so most frames are trained with the label of another frame.", "steps": 250},
    {"name": "zero_grad_between_tasks", "what": "zero_grad sits inside the loop over the tasks, so every task's backward wipes the gradients of the tasks before it and only the last task trains the network.", "steps": 250},
]

PROBES = {
    "reinforce_baseline_outer": "mean distance to the goal after 12 greedy moves from held-out start points",
    "dqn_bootstrap_past_end": "root mean squared error of Q against the exact optimal Q of the chain",
    "gaussian_policy_rsample": "mean squared distance of the mean action from the best action on held-out contexts",
    "td_target_with_grad": "root mean squared error of V against the exact values of the walk",
    "polyak_wrong_way": "mean number of moves (at most 30) the greedy policy needs to reach the goal of the grid",
    "cox_risk_set_reversed": "1 - concordance index on held-out patients",
    "quantile_error_sign": "correct pinball loss of the three quantiles on held-out windows",
    "outside_tag_ignored": "share of wrongly tagged real tokens on held-out sentences",
    "softmax_then_cross_entropy": "error rate on held-out rows",
    "ctc_phone_zero_is_blank": "phone error rate (edit distance over length) of greedy decoding on held-out utterances",
    "gnn_layers_in_list": "mean squared error on the nodes of held-out graphs, relative to the variance of the target",
    "maml_grads_stay_in_copy": "mean squared error on query points of held-out sine tasks after one adaptation step",
    "bf16_weights_small_rate": "relative squared error of the predicted antiderivative on held-out functions",
    "pretrained_items_frozen": "binary cross entropy on held-out interactions",
    "pinn_no_create_graph": "root mean squared error against the exact travelling wave on a space-time grid",
    "graph_batch_no_offset": "mean squared error over target variance on held-out graphs fed one at a time",
    "forecaster_no_causal_mask": "mean squared error of a six-step autoregressive roll-out from held-out prefixes",
    "lstm_runs_over_batch": "mean squared error over target variance on held-out sequences",
    "fno_view_for_permute": "relative squared error of the predicted solution on held-out initial conditions",
    "epoch_decay_every_batch": "1 - recall@10 of held-out clicks among all items",
    "time_shift_without_labels": "frame error rate on held-out, unshifted utterances",
    "zero_grad_between_tasks": "mean of the three held-out task losses (each relative to a constant prediction)",
}


def reinforce_baseline_outer_bad():
    torch.manual_seed(0)
    moves = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]) * 0.25

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4))

        def forward(self, obs):
            return Categorical(logits=self.net(obs))

    policy = Policy()
    baseline = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    pi_opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
    v_opt = torch.optim.Adam(baseline.parameters(), lr=1e-2)
    gamma = 0.9
    eval_starts = torch.rand(200, 2) * 3 - 1.5

    def rollout(n_envs=24, horizon=12):
        pos = torch.rand(n_envs, 2) * 3 - 1.5
        obs, acts, rews = [], [], []
        for _ in range(horizon):
            with torch.no_grad():
                a = policy(pos).sample()
            new = pos + moves[a]
            obs.append(pos)
            acts.append(a)
            rews.append(pos.norm(dim=1) - new.norm(dim=1))
            pos = new
        ret, rets = torch.zeros(n_envs), []
        for r in reversed(rews):
            ret = r + gamma * ret
            rets.insert(0, ret)
        return torch.cat(obs), torch.cat(acts), torch.cat(rets)

    def step(i):
        obs, acts, rets = rollout()
        rets = rets.unsqueeze(1)
        values = baseline(obs)
        adv = (rets - values).detach()
        logp = policy(obs).log_prob(acts)
        pi_loss = -(logp * adv).mean()
        v_loss = ((values - rets) ** 2).mean()
        pi_opt.zero_grad()
        pi_loss.backward()
        pi_opt.step()
        v_opt.zero_grad()
        v_loss.backward()
        v_opt.step()
        return (pi_loss + v_loss).item()

    @torch.no_grad()
    def probe():
        pos = eval_starts.clone()
        for _ in range(12):
            pos = pos + moves[policy(pos).logits.argmax(1)]
        return pos.norm(dim=1).mean().item()

    return {"model": [policy, baseline], "optimizer": [pi_opt, v_opt], "steps": 20, "step": step, "probe": probe}


def reinforce_baseline_outer_good():
    torch.manual_seed(0)
    moves = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]) * 0.25

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4))

        def forward(self, obs):
            return Categorical(logits=self.net(obs))

    policy = Policy()
    baseline = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    pi_opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
    v_opt = torch.optim.Adam(baseline.parameters(), lr=1e-2)
    gamma = 0.9
    eval_starts = torch.rand(200, 2) * 3 - 1.5

    def rollout(n_envs=24, horizon=12):
        pos = torch.rand(n_envs, 2) * 3 - 1.5
        obs, acts, rews = [], [], []
        for _ in range(horizon):
            with torch.no_grad():
                a = policy(pos).sample()
            new = pos + moves[a]
            obs.append(pos)
            acts.append(a)
            rews.append(pos.norm(dim=1) - new.norm(dim=1))
            pos = new
        ret, rets = torch.zeros(n_envs), []
        for r in reversed(rews):
            ret = r + gamma * ret
            rets.insert(0, ret)
        return torch.cat(obs), torch.cat(acts), torch.cat(rets)

    def step(i):
        obs, acts, rets = rollout()
        rets = rets.unsqueeze(1)
        values = baseline(obs)
        adv = (rets - values).detach()
        logp = policy(obs).log_prob(acts).unsqueeze(1)
        pi_loss = -(logp * adv).mean()
        v_loss = ((values - rets) ** 2).mean()
        pi_opt.zero_grad()
        pi_loss.backward()
        pi_opt.step()
        v_opt.zero_grad()
        v_loss.backward()
        v_opt.step()
        return (pi_loss + v_loss).item()

    @torch.no_grad()
    def probe():
        pos = eval_starts.clone()
        for _ in range(12):
            pos = pos + moves[policy(pos).logits.argmax(1)]
        return pos.norm(dim=1).mean().item()

    return {"model": [policy, baseline], "optimizer": [pi_opt, v_opt], "steps": 20, "step": step, "probe": probe}


def dqn_bootstrap_past_end_bad():
    torch.manual_seed(0)
    n_states, gamma = 8, 0.95

    class QNet(nn.Module):
        def __init__(self, n_obs, n_act):
            super().__init__()
            self.fc1 = nn.Linear(n_obs, 48)
            self.fc2 = nn.Linear(48, n_act)

        def forward(self, s):
            return self.fc2(F.relu(self.fc1(s)))

    class Chain:
        """Walk on a line: right end pays 1, left end pays 0.2, both end the episode."""

        def reset(self):
            self.s = int(torch.randint(1, n_states - 1, (1,)))
            return self.s

        def step(self, a):
            self.s += 1 if a == 1 else -1
            done = self.s in (0, n_states - 1)
            r = 1.0 if self.s == n_states - 1 else (0.2 if self.s == 0 else 0.0)
            return (self.reset() if done else self.s), r, done

    env, memory = Chain(), []
    q, q_target = QNet(n_states, 2), QNet(n_states, 2)
    q_target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=3e-3)
    eye = torch.eye(n_states)
    state = env.reset()
    for _ in range(1500):
        a = int(torch.randint(2, (1,)))
        nxt, r, done = env.step(a)
        memory.append((state, a, r, nxt, float(done)))
        state = nxt
    cols = [torch.tensor(c) for c in zip(*memory)]

    true_q = torch.zeros(n_states, 2)
    for _ in range(200):
        v = true_q.max(1).values
        for s in range(1, n_states - 1):
            true_q[s, 0] = 0.2 if s == 1 else gamma * v[s - 1]
            true_q[s, 1] = 1.0 if s == n_states - 2 else gamma * v[s + 1]

    def step(i):
        idx = torch.randint(len(memory), (64,))
        s, a, r, s2, done = (c[idx] for c in cols)
        q_sa = q(eye[s]).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            q_next = q_target(eye[s2]).max(1).values
            target = r + gamma * q_next
        loss = F.smooth_l1_loss(q_sa, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        optimizer.step()
        if (i + 1) % 10 == 0:
            q_target.load_state_dict(q.state_dict())
        return loss.item()

    @torch.no_grad()
    def probe():
        inner = slice(1, n_states - 1)
        return (q(eye[inner]) - true_q[inner]).pow(2).mean().sqrt().item()

    return {"model": q, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_bootstrap_past_end_good():
    torch.manual_seed(0)
    n_states, gamma = 8, 0.95

    class QNet(nn.Module):
        def __init__(self, n_obs, n_act):
            super().__init__()
            self.fc1 = nn.Linear(n_obs, 48)
            self.fc2 = nn.Linear(48, n_act)

        def forward(self, s):
            return self.fc2(F.relu(self.fc1(s)))

    class Chain:
        """Walk on a line: right end pays 1, left end pays 0.2, both end the episode."""

        def reset(self):
            self.s = int(torch.randint(1, n_states - 1, (1,)))
            return self.s

        def step(self, a):
            self.s += 1 if a == 1 else -1
            done = self.s in (0, n_states - 1)
            r = 1.0 if self.s == n_states - 1 else (0.2 if self.s == 0 else 0.0)
            return (self.reset() if done else self.s), r, done

    env, memory = Chain(), []
    q, q_target = QNet(n_states, 2), QNet(n_states, 2)
    q_target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=3e-3)
    eye = torch.eye(n_states)
    state = env.reset()
    for _ in range(1500):
        a = int(torch.randint(2, (1,)))
        nxt, r, done = env.step(a)
        memory.append((state, a, r, nxt, float(done)))
        state = nxt
    cols = [torch.tensor(c) for c in zip(*memory)]

    true_q = torch.zeros(n_states, 2)
    for _ in range(200):
        v = true_q.max(1).values
        for s in range(1, n_states - 1):
            true_q[s, 0] = 0.2 if s == 1 else gamma * v[s - 1]
            true_q[s, 1] = 1.0 if s == n_states - 2 else gamma * v[s + 1]

    def step(i):
        idx = torch.randint(len(memory), (64,))
        s, a, r, s2, done = (c[idx] for c in cols)
        q_sa = q(eye[s]).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            q_next = q_target(eye[s2]).max(1).values
            target = r + gamma * (1 - done) * q_next
        loss = F.smooth_l1_loss(q_sa, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        optimizer.step()
        if (i + 1) % 10 == 0:
            q_target.load_state_dict(q.state_dict())
        return loss.item()

    @torch.no_grad()
    def probe():
        inner = slice(1, n_states - 1)
        return (q(eye[inner]) - true_q[inner]).pow(2).mean().sqrt().item()

    return {"model": q, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gaussian_policy_rsample_bad():
    torch.manual_seed(0)

    class Actor(nn.Module):
        def __init__(self, obs_dim=3, act_dim=2):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh())
            self.mu = nn.Linear(32, act_dim)
            self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))

        def forward(self, obs):
            mu = self.mu(self.body(obs))
            return Normal(mu, self.log_std.exp().expand_as(mu))

    class Critic(nn.Module):
        def __init__(self, obs_dim=3):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, obs):
            return self.net(obs).squeeze(-1)

    mix = torch.tensor([[0.8, -0.5, 0.3], [-0.4, 0.6, 0.9]])

    def best_action(obs):
        return torch.sin(obs @ mix.T) + 0.5

    def env_reward(obs, act):
        return -((act - best_action(obs)) ** 2).sum(-1)

    actor, critic = Actor(), Critic()
    optimizer = torch.optim.Adam([
        {"params": actor.parameters(), "lr": 5e-3},
        {"params": critic.parameters(), "lr": 1e-2},
    ])
    held_out = torch.randn(400, 3)

    def step(i):
        obs = torch.randn(128, 3)
        dist = actor(obs)
        act = dist.rsample()
        reward = env_reward(obs, act.detach())
        value = critic(obs)
        adv = (reward - value).detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        logp = dist.log_prob(act).sum(-1)
        actor_loss = -(logp * adv).mean()
        critic_loss = F.mse_loss(value, reward)
        loss = actor_loss + 0.5 * critic_loss - 0.001 * dist.entropy().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.mse_loss(actor(held_out).mean, best_action(held_out)).item()

    return {"model": [actor, critic], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gaussian_policy_rsample_good():
    torch.manual_seed(0)

    class Actor(nn.Module):
        def __init__(self, obs_dim=3, act_dim=2):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh())
            self.mu = nn.Linear(32, act_dim)
            self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))

        def forward(self, obs):
            mu = self.mu(self.body(obs))
            return Normal(mu, self.log_std.exp().expand_as(mu))

    class Critic(nn.Module):
        def __init__(self, obs_dim=3):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, obs):
            return self.net(obs).squeeze(-1)

    mix = torch.tensor([[0.8, -0.5, 0.3], [-0.4, 0.6, 0.9]])

    def best_action(obs):
        return torch.sin(obs @ mix.T) + 0.5

    def env_reward(obs, act):
        return -((act - best_action(obs)) ** 2).sum(-1)

    actor, critic = Actor(), Critic()
    optimizer = torch.optim.Adam([
        {"params": actor.parameters(), "lr": 5e-3},
        {"params": critic.parameters(), "lr": 1e-2},
    ])
    held_out = torch.randn(400, 3)

    def step(i):
        obs = torch.randn(128, 3)
        dist = actor(obs)
        act = dist.sample()
        reward = env_reward(obs, act.detach())
        value = critic(obs)
        adv = (reward - value).detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        logp = dist.log_prob(act).sum(-1)
        actor_loss = -(logp * adv).mean()
        critic_loss = F.mse_loss(value, reward)
        loss = actor_loss + 0.5 * critic_loss - 0.001 * dist.entropy().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.mse_loss(actor(held_out).mean, best_action(held_out)).item()

    return {"model": [actor, critic], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def td_target_with_grad_bad():
    torch.manual_seed(0)
    n, gamma = 12, 0.9

    class ValueNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = nn.Linear(n, 64)
            self.out = nn.Linear(64, 1)

        def forward(self, s):
            h = torch.tanh(self.hidden(F.one_hot(s, n).float()))
            return self.out(h).squeeze(-1)

    reward = torch.zeros(n)
    reward[[1, 4, 9]] = torch.tensor([2.0, -2.0, 3.0])
    jumps = torch.tensor([-3, -2, -1, 1, 2, 3])

    def env_step(s):
        s2 = (s + jumps[torch.randint(len(jumps), s.shape)]) % n
        return reward[s2], s2

    P = torch.zeros(n, n)
    for s in range(n):
        for j in jumps.tolist():
            P[s, (s + j) % n] += 1 / len(jumps)
    true_v = torch.linalg.solve(torch.eye(n) - gamma * P, P @ reward)

    net = ValueNet()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    states = torch.randint(n, (64,))

    def step(i):
        nonlocal states
        rew, nxt = env_step(states)
        v = net(states)
        target = rew + gamma * net(nxt)
        loss = (target - v).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        states = nxt
        return loss.item()

    @torch.no_grad()
    def probe():
        return (net(torch.arange(n)) - true_v).pow(2).mean().sqrt().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def td_target_with_grad_good():
    torch.manual_seed(0)
    n, gamma = 12, 0.9

    class ValueNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = nn.Linear(n, 64)
            self.out = nn.Linear(64, 1)

        def forward(self, s):
            h = torch.tanh(self.hidden(F.one_hot(s, n).float()))
            return self.out(h).squeeze(-1)

    reward = torch.zeros(n)
    reward[[1, 4, 9]] = torch.tensor([2.0, -2.0, 3.0])
    jumps = torch.tensor([-3, -2, -1, 1, 2, 3])

    def env_step(s):
        s2 = (s + jumps[torch.randint(len(jumps), s.shape)]) % n
        return reward[s2], s2

    P = torch.zeros(n, n)
    for s in range(n):
        for j in jumps.tolist():
            P[s, (s + j) % n] += 1 / len(jumps)
    true_v = torch.linalg.solve(torch.eye(n) - gamma * P, P @ reward)

    net = ValueNet()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    states = torch.randint(n, (64,))

    def step(i):
        nonlocal states
        rew, nxt = env_step(states)
        v = net(states)
        with torch.no_grad():
            target = rew + gamma * net(nxt)
        loss = (target - v).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        states = nxt
        return loss.item()

    @torch.no_grad()
    def probe():
        return (net(torch.arange(n)) - true_v).pow(2).mean().sqrt().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def polyak_wrong_way_bad():
    torch.manual_seed(0)
    size, gamma, tau = 5, 0.9, 0.05
    deltas = [(0, 1), (0, -1), (1, 0), (-1, 0)]
    goal = size * size - 1
    table = torch.zeros(size * size, 4, dtype=torch.long)
    for cell in range(size * size):
        for k, (dr, dc) in enumerate(deltas):
            r = min(max(cell // size + dr, 0), size - 1)
            c = min(max(cell % size + dc, 0), size - 1)
            table[cell, k] = r * size + c

    class DuelingQ(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(size * size, 64), nn.ReLU())
            self.value = nn.Linear(64, 1)
            self.adv = nn.Linear(64, 4)

        def forward(self, cell):
            h = self.trunk(F.one_hot(cell, size * size).float())
            a = self.adv(h)
            return self.value(h) + a - a.mean(1, keepdim=True)

    online = DuelingQ()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=3e-3)

    def soft_update(src, dst):
        with torch.no_grad():
            for p, q in zip(src.parameters(), dst.parameters()):
                q.mul_(1 - tau).add_(tau * p)

    def step(i):
        s = torch.randint(goal, (128,))
        a = torch.randint(4, (128,))
        s2 = table[s, a]
        done = (s2 == goal).float()
        with torch.no_grad():
            best = online(s2).argmax(1, keepdim=True)
            backup = done + gamma * (1 - done) * target(s2).gather(1, best).squeeze(1)
        q_sa = online(s).gather(1, a[:, None]).squeeze(1)
        loss = F.mse_loss(q_sa, backup)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        soft_update(target, online)
        return loss.item()

    @torch.no_grad()
    def probe():
        cell = torch.arange(goal)
        moves = torch.zeros(goal)
        for _ in range(30):
            moves += (cell != goal).float()
            nxt = table[cell, online(cell).argmax(1)]
            cell = torch.where(cell == goal, cell, nxt)
        return moves.mean().item()

    return {"model": online, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def polyak_wrong_way_good():
    torch.manual_seed(0)
    size, gamma, tau = 5, 0.9, 0.05
    deltas = [(0, 1), (0, -1), (1, 0), (-1, 0)]
    goal = size * size - 1
    table = torch.zeros(size * size, 4, dtype=torch.long)
    for cell in range(size * size):
        for k, (dr, dc) in enumerate(deltas):
            r = min(max(cell // size + dr, 0), size - 1)
            c = min(max(cell % size + dc, 0), size - 1)
            table[cell, k] = r * size + c

    class DuelingQ(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(size * size, 64), nn.ReLU())
            self.value = nn.Linear(64, 1)
            self.adv = nn.Linear(64, 4)

        def forward(self, cell):
            h = self.trunk(F.one_hot(cell, size * size).float())
            a = self.adv(h)
            return self.value(h) + a - a.mean(1, keepdim=True)

    online = DuelingQ()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=3e-3)

    def soft_update(src, dst):
        with torch.no_grad():
            for p, q in zip(src.parameters(), dst.parameters()):
                q.mul_(1 - tau).add_(tau * p)

    def step(i):
        s = torch.randint(goal, (128,))
        a = torch.randint(4, (128,))
        s2 = table[s, a]
        done = (s2 == goal).float()
        with torch.no_grad():
            best = online(s2).argmax(1, keepdim=True)
            backup = done + gamma * (1 - done) * target(s2).gather(1, best).squeeze(1)
        q_sa = online(s).gather(1, a[:, None]).squeeze(1)
        loss = F.mse_loss(q_sa, backup)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        soft_update(online, target)
        return loss.item()

    @torch.no_grad()
    def probe():
        cell = torch.arange(goal)
        moves = torch.zeros(goal)
        for _ in range(30):
            moves += (cell != goal).float()
            nxt = table[cell, online(cell).argmax(1)]
            cell = torch.where(cell == goal, cell, nxt)
        return moves.mean().item()

    return {"model": online, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cox_risk_set_reversed_bad():
    torch.manual_seed(0)
    beta = torch.tensor([1.0, -0.8, 0.6, 0.0, 0.0, 0.4])

    def cohort(n):
        x = torch.randn(n, 6)
        rate = torch.exp(x @ beta + 0.5 * torch.sin(2 * x[:, 0]))
        t_event = -torch.log(torch.rand(n)) / rate
        t_cens = -torch.log(torch.rand(n)) / 0.3
        return x, torch.minimum(t_event, t_cens), (t_event <= t_cens).float()

    class DeepSurv(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 32), nn.SELU(), nn.Linear(32, 16), nn.SELU(),
                                     nn.Linear(16, 1, bias=False))

        def forward(self, x):
            return self.net(x).squeeze(-1)

    def neg_partial_log_likelihood(risk, time, event):
        order = torch.argsort(time)
        risk, event = risk[order], event[order]
        log_risk_set = torch.logcumsumexp(risk, dim=0)
        return -((risk - log_risk_set) * event).sum() / event.sum()

    loader = DataLoader(TensorDataset(*cohort(1024)), batch_size=128, shuffle=True, drop_last=True)
    xv, tv, ev = cohort(400)
    model = DeepSurv()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    batches = iter(loader)

    def step(i):
        nonlocal batches
        try:
            x, t, e = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, t, e = next(batches)
        opt.zero_grad()
        loss = neg_partial_log_likelihood(model(x), t, e)
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        r = model(xv)
        usable = (tv[:, None] < tv[None, :]) & (ev[:, None] == 1)
        right = (r[:, None] > r[None, :]) & usable
        return 1 - (right.sum() / usable.sum()).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def cox_risk_set_reversed_good():
    torch.manual_seed(0)
    beta = torch.tensor([1.0, -0.8, 0.6, 0.0, 0.0, 0.4])

    def cohort(n):
        x = torch.randn(n, 6)
        rate = torch.exp(x @ beta + 0.5 * torch.sin(2 * x[:, 0]))
        t_event = -torch.log(torch.rand(n)) / rate
        t_cens = -torch.log(torch.rand(n)) / 0.3
        return x, torch.minimum(t_event, t_cens), (t_event <= t_cens).float()

    class DeepSurv(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 32), nn.SELU(), nn.Linear(32, 16), nn.SELU(),
                                     nn.Linear(16, 1, bias=False))

        def forward(self, x):
            return self.net(x).squeeze(-1)

    def neg_partial_log_likelihood(risk, time, event):
        order = torch.argsort(time, descending=True)
        risk, event = risk[order], event[order]
        log_risk_set = torch.logcumsumexp(risk, dim=0)
        return -((risk - log_risk_set) * event).sum() / event.sum()

    loader = DataLoader(TensorDataset(*cohort(1024)), batch_size=128, shuffle=True, drop_last=True)
    xv, tv, ev = cohort(400)
    model = DeepSurv()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    batches = iter(loader)

    def step(i):
        nonlocal batches
        try:
            x, t, e = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, t, e = next(batches)
        opt.zero_grad()
        loss = neg_partial_log_likelihood(model(x), t, e)
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        r = model(xv)
        usable = (tv[:, None] < tv[None, :]) & (ev[:, None] == 1)
        right = (r[:, None] > r[None, :]) & usable
        return 1 - (right.sum() / usable.sum()).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def quantile_error_sign_bad():
    torch.manual_seed(0)
    quantiles = torch.tensor([0.1, 0.5, 0.9])

    def make_windows(n, length=24):
        phase = torch.rand(n, 1) * 2 * math.pi
        t = torch.arange(length + 1).float()
        clean = torch.sin(0.4 * t + phase)
        noise = 0.1 * torch.randn(n, length + 1)
        series = clean + noise
        y = clean[:, -1] + (0.15 + 0.35 * (clean[:, -2].abs())) * torch.randn(n)
        return series[:, :length, None], y

    class QuantileGRU(nn.Module):
        def __init__(self, hidden=24):
            super().__init__()
            self.gru = nn.GRU(1, hidden, batch_first=True)
            self.head = nn.Linear(hidden, len(quantiles))

        def forward(self, x):
            _, h = self.gru(x)
            return self.head(h[-1])

    def quantile_loss(pred, y):
        err = pred - y.unsqueeze(1)
        return torch.maximum(quantiles * err, (quantiles - 1) * err).mean()

    x, y = make_windows(2000)
    xv, yv = make_windows(500)
    model = QuantileGRU()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(i):
        idx = torch.randint(len(x), (64,))
        loss = quantile_loss(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        d = yv[:, None] - model(xv)
        return torch.where(d >= 0, quantiles * d, (quantiles - 1) * d).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def quantile_error_sign_good():
    torch.manual_seed(0)
    quantiles = torch.tensor([0.1, 0.5, 0.9])

    def make_windows(n, length=24):
        phase = torch.rand(n, 1) * 2 * math.pi
        t = torch.arange(length + 1).float()
        clean = torch.sin(0.4 * t + phase)
        noise = 0.1 * torch.randn(n, length + 1)
        series = clean + noise
        y = clean[:, -1] + (0.15 + 0.35 * (clean[:, -2].abs())) * torch.randn(n)
        return series[:, :length, None], y

    class QuantileGRU(nn.Module):
        def __init__(self, hidden=24):
            super().__init__()
            self.gru = nn.GRU(1, hidden, batch_first=True)
            self.head = nn.Linear(hidden, len(quantiles))

        def forward(self, x):
            _, h = self.gru(x)
            return self.head(h[-1])

    def quantile_loss(pred, y):
        err = y.unsqueeze(1) - pred
        return torch.maximum(quantiles * err, (quantiles - 1) * err).mean()

    x, y = make_windows(2000)
    xv, yv = make_windows(500)
    model = QuantileGRU()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(i):
        idx = torch.randint(len(x), (64,))
        loss = quantile_loss(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        d = yv[:, None] - model(xv)
        return torch.where(d >= 0, quantiles * d, (quantiles - 1) * d).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def outside_tag_ignored_bad():
    torch.manual_seed(0)
    TAGS = {"O": 0, "B-PER": 1, "I-PER": 2, "B-LOC": 3, "I-LOC": 4}
    PAD_TAG = 0
    vocab = 121

    def sentence():
        words, tags = [], []
        length = int(torch.randint(5, 18, (1,)))
        while len(words) < length:
            if torch.rand(1) < 0.3:
                kind = int(torch.randint(2, (1,)))
                words.append(1 + 20 * kind + int(torch.randint(20, (1,))))
                tags.append(1 + 2 * kind)
                if torch.rand(1) < 0.6:
                    words.append(41 + int(torch.randint(20, (1,))))
                    tags.append(2 + 2 * kind)
            else:
                words.append(41 + int(torch.randint(80, (1,))))
                tags.append(TAGS["O"])
        return torch.tensor(words), torch.tensor(tags)

    def collate(batch):
        words, tags = zip(*batch)
        return (pad_sequence(words, batch_first=True, padding_value=0),
                pad_sequence(tags, batch_first=True, padding_value=PAD_TAG),
                torch.tensor([len(w) for w in words]))

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(vocab, 24, padding_idx=0)
            self.lstm = nn.LSTM(24, 24, batch_first=True, bidirectional=True)
            self.out = nn.Linear(48, len(TAGS))

        def forward(self, words, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(self.emb(words), lengths, batch_first=True,
                                                       enforce_sorted=False)
            h, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return self.out(h)

    train = DataLoader([sentence() for _ in range(600)], batch_size=32, shuffle=True, collate_fn=collate)
    held_out = [sentence() for _ in range(100)]
    model = Tagger()
    criterion = nn.CrossEntropyLoss(ignore_index=PAD_TAG)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def forever():
        while True:
            yield from train

    stream = forever()

    def step(i):
        words, tags, lengths = next(stream)
        optimizer.zero_grad()
        logits = model(words, lengths)
        loss = criterion(logits.reshape(-1, len(TAGS)), tags.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        wrong = total = 0
        for words, tags in held_out:
            pred = model(words[None], torch.tensor([len(words)]))[0].argmax(-1)
            wrong += (pred != tags).sum().item()
            total += len(tags)
        return wrong / total

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def outside_tag_ignored_good():
    torch.manual_seed(0)
    TAGS = {"O": 0, "B-PER": 1, "I-PER": 2, "B-LOC": 3, "I-LOC": 4}
    PAD_TAG = -100
    vocab = 121

    def sentence():
        words, tags = [], []
        length = int(torch.randint(5, 18, (1,)))
        while len(words) < length:
            if torch.rand(1) < 0.3:
                kind = int(torch.randint(2, (1,)))
                words.append(1 + 20 * kind + int(torch.randint(20, (1,))))
                tags.append(1 + 2 * kind)
                if torch.rand(1) < 0.6:
                    words.append(41 + int(torch.randint(20, (1,))))
                    tags.append(2 + 2 * kind)
            else:
                words.append(41 + int(torch.randint(80, (1,))))
                tags.append(TAGS["O"])
        return torch.tensor(words), torch.tensor(tags)

    def collate(batch):
        words, tags = zip(*batch)
        return (pad_sequence(words, batch_first=True, padding_value=0),
                pad_sequence(tags, batch_first=True, padding_value=PAD_TAG),
                torch.tensor([len(w) for w in words]))

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(vocab, 24, padding_idx=0)
            self.lstm = nn.LSTM(24, 24, batch_first=True, bidirectional=True)
            self.out = nn.Linear(48, len(TAGS))

        def forward(self, words, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(self.emb(words), lengths, batch_first=True,
                                                       enforce_sorted=False)
            h, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return self.out(h)

    train = DataLoader([sentence() for _ in range(600)], batch_size=32, shuffle=True, collate_fn=collate)
    held_out = [sentence() for _ in range(100)]
    model = Tagger()
    criterion = nn.CrossEntropyLoss(ignore_index=PAD_TAG)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def forever():
        while True:
            yield from train

    stream = forever()

    def step(i):
        words, tags, lengths = next(stream)
        optimizer.zero_grad()
        logits = model(words, lengths)
        loss = criterion(logits.reshape(-1, len(TAGS)), tags.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        wrong = total = 0
        for words, tags in held_out:
            pred = model(words[None], torch.tensor([len(words)]))[0].argmax(-1)
            wrong += (pred != tags).sum().item()
            total += len(tags)
        return wrong / total

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def softmax_then_cross_entropy_bad():
    torch.manual_seed(0)
    n_classes, n_num, n_cat = 12, 8, 10

    gen = torch.Generator().manual_seed(7)
    centers = torch.randn(n_classes, n_num, generator=gen)
    cat_probs = torch.softmax(1.5 * torch.randn(n_classes, n_cat, generator=gen), dim=1)

    def table(n):
        y = torch.randint(n_classes, (n,))
        num = centers[y] + 0.7 * torch.randn(n, n_num)
        cat = torch.multinomial(cat_probs[y], 1).squeeze(1)
        return num, cat, y

    class TabularNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(n_cat, 4)
            self.mlp = nn.Sequential(
                nn.Linear(n_num + 4, 64),
                nn.ReLU(),
                nn.Linear(64, 32),
                nn.ReLU(),
                nn.Linear(32, n_classes),
                nn.Softmax(dim=1),
            )

        def forward(self, num, cat):
            return self.mlp(torch.cat([num, self.emb(cat)], dim=1))

    loader = DataLoader(TensorDataset(*table(2048)), batch_size=64, shuffle=True)
    num_v, cat_v, y_v = table(1000)
    model = TabularNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    it = iter(loader)

    def step(i):
        nonlocal it
        batch = next(it, None)
        if batch is None:
            it = iter(loader)
            batch = next(it)
        num, cat, y = batch
        optimizer.zero_grad()
        loss = criterion(model(num, cat), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return (model(num_v, cat_v).argmax(1) != y_v).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def softmax_then_cross_entropy_good():
    torch.manual_seed(0)
    n_classes, n_num, n_cat = 12, 8, 10

    gen = torch.Generator().manual_seed(7)
    centers = torch.randn(n_classes, n_num, generator=gen)
    cat_probs = torch.softmax(1.5 * torch.randn(n_classes, n_cat, generator=gen), dim=1)

    def table(n):
        y = torch.randint(n_classes, (n,))
        num = centers[y] + 0.7 * torch.randn(n, n_num)
        cat = torch.multinomial(cat_probs[y], 1).squeeze(1)
        return num, cat, y

    class TabularNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(n_cat, 4)
            self.mlp = nn.Sequential(
                nn.Linear(n_num + 4, 64),
                nn.ReLU(),
                nn.Linear(64, 32),
                nn.ReLU(),
                nn.Linear(32, n_classes),
            )

        def forward(self, num, cat):
            return self.mlp(torch.cat([num, self.emb(cat)], dim=1))

    loader = DataLoader(TensorDataset(*table(2048)), batch_size=64, shuffle=True)
    num_v, cat_v, y_v = table(1000)
    model = TabularNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    it = iter(loader)

    def step(i):
        nonlocal it
        batch = next(it, None)
        if batch is None:
            it = iter(loader)
            batch = next(it)
        num, cat, y = batch
        optimizer.zero_grad()
        loss = criterion(model(num, cat), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return (model(num_v, cat_v).argmax(1) != y_v).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ctc_phone_zero_is_blank_bad():
    torch.manual_seed(0)
    n_phones, n_mel, frames = 6, 10, 30
    proto = torch.randn(n_phones, n_mel, generator=torch.Generator().manual_seed(3))

    def utterance():
        n = int(torch.randint(3, 7, (1,)))
        phones = torch.randint(n_phones, (n,))
        feats, pos = 0.3 * torch.randn(frames, n_mel), int(torch.randint(0, 3, (1,)))
        for p in phones:
            dur = int(torch.randint(2, 4, (1,)))
            feats[pos:pos + dur] += proto[p]
            pos += dur + int(torch.randint(1, 3, (1,)))
        return feats, phones

    def to_labels(phones):
        return phones

    class AcousticModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(n_mel, 48, 3, padding=1)
            self.rnn = nn.GRU(48, 32, batch_first=True, bidirectional=True)
            self.proj = nn.Linear(64, n_phones + 1)

        def forward(self, x):
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            h, _ = self.rnn(h)
            return self.proj(h).log_softmax(-1)

    corpus = [utterance() for _ in range(600)]
    test_set = [utterance() for _ in range(80)]
    model = AcousticModel()
    ctc = nn.CTCLoss(blank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def edit_distance(a, b):
        row = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            prev, row[0] = row[0], i
            for j, y in enumerate(b, 1):
                prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (x != y))
        return row[-1]

    def step(i):
        batch = [corpus[k] for k in torch.randint(len(corpus), (16,)).tolist()]
        feats = torch.stack([f for f, _ in batch])
        labels = torch.cat([to_labels(p) for _, p in batch])
        in_len = torch.full((len(batch),), frames)
        lab_len = torch.tensor([len(p) for _, p in batch])
        log_probs = model(feats).transpose(0, 1)
        loss = ctc(log_probs, labels, in_len, lab_len)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        best = model(torch.stack([f for f, _ in test_set])).argmax(-1)
        errors = total = 0
        for path, (_, phones) in zip(best, test_set):
            hyp = [k for k in torch.unique_consecutive(path).tolist() if k != 0]
            errors += edit_distance(hyp, to_labels(phones).tolist())
            total += len(phones)
        return errors / total

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ctc_phone_zero_is_blank_good():
    torch.manual_seed(0)
    n_phones, n_mel, frames = 6, 10, 30
    proto = torch.randn(n_phones, n_mel, generator=torch.Generator().manual_seed(3))

    def utterance():
        n = int(torch.randint(3, 7, (1,)))
        phones = torch.randint(n_phones, (n,))
        feats, pos = 0.3 * torch.randn(frames, n_mel), int(torch.randint(0, 3, (1,)))
        for p in phones:
            dur = int(torch.randint(2, 4, (1,)))
            feats[pos:pos + dur] += proto[p]
            pos += dur + int(torch.randint(1, 3, (1,)))
        return feats, phones

    def to_labels(phones):
        return phones + 1

    class AcousticModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(n_mel, 48, 3, padding=1)
            self.rnn = nn.GRU(48, 32, batch_first=True, bidirectional=True)
            self.proj = nn.Linear(64, n_phones + 1)

        def forward(self, x):
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            h, _ = self.rnn(h)
            return self.proj(h).log_softmax(-1)

    corpus = [utterance() for _ in range(600)]
    test_set = [utterance() for _ in range(80)]
    model = AcousticModel()
    ctc = nn.CTCLoss(blank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def edit_distance(a, b):
        row = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            prev, row[0] = row[0], i
            for j, y in enumerate(b, 1):
                prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (x != y))
        return row[-1]

    def step(i):
        batch = [corpus[k] for k in torch.randint(len(corpus), (16,)).tolist()]
        feats = torch.stack([f for f, _ in batch])
        labels = torch.cat([to_labels(p) for _, p in batch])
        in_len = torch.full((len(batch),), frames)
        lab_len = torch.tensor([len(p) for _, p in batch])
        log_probs = model(feats).transpose(0, 1)
        loss = ctc(log_probs, labels, in_len, lab_len)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        best = model(torch.stack([f for f, _ in test_set])).argmax(-1)
        errors = total = 0
        for path, (_, phones) in zip(best, test_set):
            hyp = [k for k in torch.unique_consecutive(path).tolist() if k != 0]
            errors += edit_distance(hyp, to_labels(phones).tolist())
            total += len(phones)
        return errors / total

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gnn_layers_in_list_bad():
    torch.manual_seed(0)

    class SageLayer(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.self_lin = nn.Linear(dim, dim)
            self.neigh_lin = nn.Linear(dim, dim, bias=False)

        def forward(self, h, adj):
            return self.self_lin(h) + self.neigh_lin(adj @ h)

    class GraphNet(nn.Module):
        def __init__(self, in_dim=6, dim=12, n_layers=3):
            super().__init__()
            self.encoder = nn.Linear(in_dim, dim)
            self.layers = [SageLayer(dim) for _ in range(n_layers)]
            self.head = nn.Linear(dim, 1)

        def forward(self, x, adj):
            h = self.encoder(x)
            for layer in self.layers:
                h = torch.relu(layer(h, adj))
            return self.head(h).squeeze(-1)

    def random_graph(n=40, p=0.12):
        a = (torch.rand(n, n) < p).float().triu(1)
        a = a + a.T
        adj = a / a.sum(1, keepdim=True).clamp(min=1)
        x = torch.randn(n, 6)
        near = adj @ x
        far = adj @ near
        y = torch.tanh(2 * near[:, 0] * x[:, 1]) + near[:, 2].abs() * 2 - far[:, 3] * 2 + 0.5 * x[:, 4]
        return x, adj, y

    graphs = [random_graph() for _ in range(60)]
    held_out = [random_graph() for _ in range(20)]
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        picks = torch.randperm(len(graphs))[:6].tolist()
        optimizer.zero_grad()
        loss = 0.0
        for k in picks:
            x, adj, y = graphs[k]
            loss = loss + F.mse_loss(model(x, adj), y) / len(picks)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        pred = torch.cat([model(x, adj) for x, adj, _ in held_out])
        y = torch.cat([g[2] for g in held_out])
        return (F.mse_loss(pred, y) / y.var()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gnn_layers_in_list_good():
    torch.manual_seed(0)

    class SageLayer(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.self_lin = nn.Linear(dim, dim)
            self.neigh_lin = nn.Linear(dim, dim, bias=False)

        def forward(self, h, adj):
            return self.self_lin(h) + self.neigh_lin(adj @ h)

    class GraphNet(nn.Module):
        def __init__(self, in_dim=6, dim=12, n_layers=3):
            super().__init__()
            self.encoder = nn.Linear(in_dim, dim)
            self.layers = nn.ModuleList([SageLayer(dim) for _ in range(n_layers)])
            self.head = nn.Linear(dim, 1)

        def forward(self, x, adj):
            h = self.encoder(x)
            for layer in self.layers:
                h = torch.relu(layer(h, adj))
            return self.head(h).squeeze(-1)

    def random_graph(n=40, p=0.12):
        a = (torch.rand(n, n) < p).float().triu(1)
        a = a + a.T
        adj = a / a.sum(1, keepdim=True).clamp(min=1)
        x = torch.randn(n, 6)
        near = adj @ x
        far = adj @ near
        y = torch.tanh(2 * near[:, 0] * x[:, 1]) + near[:, 2].abs() * 2 - far[:, 3] * 2 + 0.5 * x[:, 4]
        return x, adj, y

    graphs = [random_graph() for _ in range(60)]
    held_out = [random_graph() for _ in range(20)]
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        picks = torch.randperm(len(graphs))[:6].tolist()
        optimizer.zero_grad()
        loss = 0.0
        for k in picks:
            x, adj, y = graphs[k]
            loss = loss + F.mse_loss(model(x, adj), y) / len(picks)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        pred = torch.cat([model(x, adj) for x, adj, _ in held_out])
        y = torch.cat([g[2] for g in held_out])
        return (F.mse_loss(pred, y) / y.var()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def maml_grads_stay_in_copy_bad():
    torch.manual_seed(0)
    inner_lr, meta_batch, shots = 0.05, 4, 10

    class SineNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))

        def forward(self, x):
            return self.net(x)

    def sample_task(gen=None):
        amp = 0.5 + 1.5 * torch.rand(1, generator=gen)
        phase = 1.5 * torch.rand(1, generator=gen)
        x = torch.rand(2 * shots, 1, generator=gen) * 6 - 3
        y = amp * torch.sin(x + phase)
        return x[:shots], y[:shots], x[shots:], y[shots:]

    def adapt(net, x, y):
        learner = copy.deepcopy(net)
        grads = torch.autograd.grad(F.mse_loss(learner(x), y), list(learner.parameters()))
        with torch.no_grad():
            for p, g in zip(learner.parameters(), grads):
                p.sub_(inner_lr * g)
        return learner

    model = SineNet()
    meta_opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(11)
    test_tasks = [sample_task(gen) for _ in range(40)]

    def step(i):
        meta_opt.zero_grad()
        total = 0.0
        for _ in range(meta_batch):
            xs, ys, xq, yq = sample_task()
            learner = adapt(model, xs, ys)
            learner.zero_grad()
            query_loss = F.mse_loss(learner(xq), yq) / meta_batch
            query_loss.backward()
            total += query_loss.item()
        meta_opt.step()
        return total

    def probe():
        errs = []
        for xs, ys, xq, yq in test_tasks:
            learner = adapt(model, xs, ys)
            with torch.no_grad():
                errs.append(F.mse_loss(learner(xq), yq).item())
        return sum(errs) / len(errs)

    return {"model": model, "optimizer": meta_opt, "steps": 20, "step": step, "probe": probe}


def maml_grads_stay_in_copy_good():
    torch.manual_seed(0)
    inner_lr, meta_batch, shots = 0.05, 4, 10

    class SineNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))

        def forward(self, x):
            return self.net(x)

    def sample_task(gen=None):
        amp = 0.5 + 1.5 * torch.rand(1, generator=gen)
        phase = 1.5 * torch.rand(1, generator=gen)
        x = torch.rand(2 * shots, 1, generator=gen) * 6 - 3
        y = amp * torch.sin(x + phase)
        return x[:shots], y[:shots], x[shots:], y[shots:]

    def adapt(net, x, y):
        learner = copy.deepcopy(net)
        grads = torch.autograd.grad(F.mse_loss(learner(x), y), list(learner.parameters()))
        with torch.no_grad():
            for p, g in zip(learner.parameters(), grads):
                p.sub_(inner_lr * g)
        return learner

    model = SineNet()
    meta_opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(11)
    test_tasks = [sample_task(gen) for _ in range(40)]

    def step(i):
        meta_opt.zero_grad()
        total = 0.0
        for _ in range(meta_batch):
            xs, ys, xq, yq = sample_task()
            learner = adapt(model, xs, ys)
            learner.zero_grad()
            query_loss = F.mse_loss(learner(xq), yq) / meta_batch
            query_loss.backward()
            for p, q in zip(model.parameters(), learner.parameters()):
                p.grad = q.grad.clone() if p.grad is None else p.grad + q.grad
            total += query_loss.item()
        meta_opt.step()
        return total

    def probe():
        errs = []
        for xs, ys, xq, yq in test_tasks:
            learner = adapt(model, xs, ys)
            with torch.no_grad():
                errs.append(F.mse_loss(learner(xq), yq).item())
        return sum(errs) / len(errs)

    return {"model": model, "optimizer": meta_opt, "steps": 20, "step": step, "probe": probe}


def bf16_weights_small_rate_bad():
    torch.manual_seed(0)
    sensors = torch.linspace(0, 1, 32)

    def sample_functions(n, n_query=24):
        freq = torch.arange(1, 4).float() * math.pi
        coef = torch.randn(n, 3)
        u = coef @ torch.cos(freq[:, None] * sensors[None])
        q = torch.rand(n_query, 1)
        s = coef @ (torch.sin(freq[:, None] * q[:, 0][None]) / freq[:, None])
        return u, q, s * 3

    class DeepONet(nn.Module):
        def __init__(self, p=48):
            super().__init__()
            self.branch = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, p))
            self.trunk = nn.Sequential(nn.Linear(1, 64), nn.GELU(), nn.Linear(64, p))
            self.bias = nn.Parameter(torch.zeros(1))

        def forward(self, u, q):
            return self.branch(u) @ self.trunk(q).T + self.bias

    model = DeepONet().to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    u_val, q_val, s_val = sample_functions(200)

    def predict(u, q):
        return model(u.to(torch.bfloat16), q.to(torch.bfloat16)).float()

    def step(i):
        u, q, s = sample_functions(64)
        loss = F.mse_loss(predict(u, q), s)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return ((predict(u_val, q_val) - s_val).pow(2).mean() / s_val.pow(2).mean()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bf16_weights_small_rate_good():
    torch.manual_seed(0)
    sensors = torch.linspace(0, 1, 32)

    def sample_functions(n, n_query=24):
        freq = torch.arange(1, 4).float() * math.pi
        coef = torch.randn(n, 3)
        u = coef @ torch.cos(freq[:, None] * sensors[None])
        q = torch.rand(n_query, 1)
        s = coef @ (torch.sin(freq[:, None] * q[:, 0][None]) / freq[:, None])
        return u, q, s * 3

    class DeepONet(nn.Module):
        def __init__(self, p=48):
            super().__init__()
            self.branch = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, p))
            self.trunk = nn.Sequential(nn.Linear(1, 64), nn.GELU(), nn.Linear(64, p))
            self.bias = nn.Parameter(torch.zeros(1))

        def forward(self, u, q):
            return self.branch(u) @ self.trunk(q).T + self.bias

    model = DeepONet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    u_val, q_val, s_val = sample_functions(200)

    def predict(u, q):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(u, q).float()

    def step(i):
        u, q, s = sample_functions(64)
        loss = F.mse_loss(predict(u, q), s)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return ((predict(u_val, q_val) - s_val).pow(2).mean() / s_val.pow(2).mean()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pretrained_items_frozen_bad():
    torch.manual_seed(0)
    n_users, n_items, dim = 150, 120, 8
    true_u = torch.randn(n_users, dim)
    true_v = torch.randn(n_items, dim)
    last_month = 0.5 * true_v[:, torch.randperm(dim)] + torch.randn(n_items, dim)

    def interactions(n):
        u = torch.randint(n_users, (n,))
        v = torch.randint(n_items, (n,))
        p = torch.sigmoid((true_u[u] * true_v[v]).sum(1))
        return u, v, torch.bernoulli(p)

    class MatrixFactorization(nn.Module):
        def __init__(self, item_vectors):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            nn.init.normal_(self.user.weight, std=0.1)
            self.item = nn.Embedding.from_pretrained(item_vectors)
            self.user_bias = nn.Embedding(n_users, 1)
            nn.init.zeros_(self.user_bias.weight)

        def forward(self, u, v):
            return (self.user(u) * self.item(v)).sum(-1) + self.user_bias(u).squeeze(-1)

    loader = DataLoader(TensorDataset(*interactions(30000)), batch_size=256, shuffle=True)
    u_val, v_val, y_val = interactions(3000)
    model = MatrixFactorization(last_month.clone())
    optimizer = torch.optim.Adam([
        {"params": [model.user.weight, model.user_bias.weight], "lr": 2e-2},
        {"params": [model.item.weight], "lr": 1e-2},
    ])
    bce = nn.BCEWithLogitsLoss()

    def batches():
        while True:
            for batch in loader:
                yield batch

    stream = batches()

    def step(i):
        u, v, y = next(stream)
        loss = bce(model(u, v), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return bce(model(u_val, v_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pretrained_items_frozen_good():
    torch.manual_seed(0)
    n_users, n_items, dim = 150, 120, 8
    true_u = torch.randn(n_users, dim)
    true_v = torch.randn(n_items, dim)
    last_month = 0.5 * true_v[:, torch.randperm(dim)] + torch.randn(n_items, dim)

    def interactions(n):
        u = torch.randint(n_users, (n,))
        v = torch.randint(n_items, (n,))
        p = torch.sigmoid((true_u[u] * true_v[v]).sum(1))
        return u, v, torch.bernoulli(p)

    class MatrixFactorization(nn.Module):
        def __init__(self, item_vectors):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            nn.init.normal_(self.user.weight, std=0.1)
            self.item = nn.Embedding.from_pretrained(item_vectors, freeze=False)
            self.user_bias = nn.Embedding(n_users, 1)
            nn.init.zeros_(self.user_bias.weight)

        def forward(self, u, v):
            return (self.user(u) * self.item(v)).sum(-1) + self.user_bias(u).squeeze(-1)

    loader = DataLoader(TensorDataset(*interactions(30000)), batch_size=256, shuffle=True)
    u_val, v_val, y_val = interactions(3000)
    model = MatrixFactorization(last_month.clone())
    optimizer = torch.optim.Adam([
        {"params": [model.user.weight, model.user_bias.weight], "lr": 2e-2},
        {"params": [model.item.weight], "lr": 1e-2},
    ])
    bce = nn.BCEWithLogitsLoss()

    def batches():
        while True:
            for batch in loader:
                yield batch

    stream = batches()

    def step(i):
        u, v, y = next(stream)
        loss = bce(model(u, v), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return bce(model(u_val, v_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_no_create_graph_bad():
    torch.manual_seed(0)
    speed = 0.5

    class WaveNet(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.fc1 = nn.Linear(2, width)
            self.fc2 = nn.Linear(width, width)
            self.fc3 = nn.Linear(width, 1)

        def forward(self, x, t):
            h = torch.tanh(self.fc1(torch.cat([x, t], dim=1)))
            h = torch.tanh(self.fc2(h))
            return self.fc3(h)

    def initial(x):
        return torch.sin(math.pi * x)

    model = WaveNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    gx, gt = torch.meshgrid(torch.linspace(0, 1, 21), torch.linspace(0, 1, 21), indexing="ij")
    gx, gt = gx.reshape(-1, 1), gt.reshape(-1, 1)

    def pde_residual(n=200):
        x = (torch.rand(n, 1) * 2 - 1).requires_grad_(True)
        t = torch.rand(n, 1).requires_grad_(True)
        u = model(x, t)
        u_x, u_t = torch.autograd.grad(u, (x, t), grad_outputs=torch.ones_like(u))
        return u_t + speed * u_x

    def step(i):
        x0 = torch.rand(100, 1) * 2 - 1
        loss_ic = (model(x0, torch.zeros_like(x0)) - initial(x0)).pow(2).mean()
        loss_pde = pde_residual().pow(2).mean()
        loss = loss_ic + 0.5 * loss_pde
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return (model(gx, gt) - initial(gx - speed * gt)).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_no_create_graph_good():
    torch.manual_seed(0)
    speed = 0.5

    class WaveNet(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.fc1 = nn.Linear(2, width)
            self.fc2 = nn.Linear(width, width)
            self.fc3 = nn.Linear(width, 1)

        def forward(self, x, t):
            h = torch.tanh(self.fc1(torch.cat([x, t], dim=1)))
            h = torch.tanh(self.fc2(h))
            return self.fc3(h)

    def initial(x):
        return torch.sin(math.pi * x)

    model = WaveNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    gx, gt = torch.meshgrid(torch.linspace(0, 1, 21), torch.linspace(0, 1, 21), indexing="ij")
    gx, gt = gx.reshape(-1, 1), gt.reshape(-1, 1)

    def pde_residual(n=200):
        x = (torch.rand(n, 1) * 2 - 1).requires_grad_(True)
        t = torch.rand(n, 1).requires_grad_(True)
        u = model(x, t)
        u_x, u_t = torch.autograd.grad(u, (x, t), grad_outputs=torch.ones_like(u), create_graph=True)
        return u_t + speed * u_x

    def step(i):
        x0 = torch.rand(100, 1) * 2 - 1
        loss_ic = (model(x0, torch.zeros_like(x0)) - initial(x0)).pow(2).mean()
        loss_pde = pde_residual().pow(2).mean()
        loss = loss_ic + 0.5 * loss_pde
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return (model(gx, gt) - initial(gx - speed * gt)).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def graph_batch_no_offset_bad():
    torch.manual_seed(0)

    def molecule():
        n = int(torch.randint(6, 13, (1,)))
        x = F.one_hot(torch.randint(4, (n,)), 4).float()
        left = torch.arange(1, n)
        right = (torch.rand(n - 1) * left).long()
        edges = torch.stack([torch.cat([left, right]), torch.cat([right, left])])
        kinds = x.argmax(1)
        same = (kinds[left] == kinds[right]).float().sum()
        pair = ((kinds[left] + kinds[right]) == 3).float().sum()
        return x, edges, (same - pair) / 2

    def collate(graphs):
        xs, es, owner, offset = [], [], [], 0
        for k, (x, e, _) in enumerate(graphs):
            xs.append(x)
            es.append(e)
            owner.append(torch.full((len(x),), k))
            offset += len(x)
        y = torch.stack([g[2] for g in graphs])
        return torch.cat(xs), torch.cat(es, dim=1), torch.cat(owner), y

    class EdgeConv(nn.Module):
        def __init__(self, d_in, d_out):
            super().__init__()
            self.msg = nn.Sequential(nn.Linear(2 * d_in, d_out), nn.ReLU(), nn.Linear(d_out, d_out))
            self.skip = nn.Linear(d_in, d_out)

        def forward(self, x, edge_index):
            src, dst = edge_index
            m = self.msg(torch.cat([x[src], x[dst]], dim=1))
            return self.skip(x).index_add(0, dst, m)

    class MolNet(nn.Module):
        def __init__(self, dim=24):
            super().__init__()
            self.conv1 = EdgeConv(4, dim)
            self.conv2 = EdgeConv(dim, dim)
            self.readout = nn.Linear(dim, 1)

        def forward(self, x, edge_index, owner):
            h = F.relu(self.conv1(x, edge_index))
            h = F.relu(self.conv2(h, edge_index))
            pooled = h.new_zeros(int(owner.max()) + 1, h.size(1)).index_add(0, owner, h)
            return self.readout(pooled).squeeze(-1)

    loader = DataLoader([molecule() for _ in range(800)], batch_size=32, shuffle=True, collate_fn=collate)
    held_out = [molecule() for _ in range(150)]
    model = MolNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    it = iter(loader)

    def step(i):
        nonlocal it
        try:
            x, edge_index, owner, y = next(it)
        except StopIteration:
            it = iter(loader)
            x, edge_index, owner, y = next(it)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, edge_index, owner), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        y = torch.stack([g[2] for g in held_out])
        pred = torch.cat([model(x, e, torch.zeros(len(x), dtype=torch.long)) for x, e, _ in held_out])
        return (F.mse_loss(pred, y) / y.var()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def graph_batch_no_offset_good():
    torch.manual_seed(0)

    def molecule():
        n = int(torch.randint(6, 13, (1,)))
        x = F.one_hot(torch.randint(4, (n,)), 4).float()
        left = torch.arange(1, n)
        right = (torch.rand(n - 1) * left).long()
        edges = torch.stack([torch.cat([left, right]), torch.cat([right, left])])
        kinds = x.argmax(1)
        same = (kinds[left] == kinds[right]).float().sum()
        pair = ((kinds[left] + kinds[right]) == 3).float().sum()
        return x, edges, (same - pair) / 2

    def collate(graphs):
        xs, es, owner, offset = [], [], [], 0
        for k, (x, e, _) in enumerate(graphs):
            xs.append(x)
            es.append(e + offset)
            owner.append(torch.full((len(x),), k))
            offset += len(x)
        y = torch.stack([g[2] for g in graphs])
        return torch.cat(xs), torch.cat(es, dim=1), torch.cat(owner), y

    class EdgeConv(nn.Module):
        def __init__(self, d_in, d_out):
            super().__init__()
            self.msg = nn.Sequential(nn.Linear(2 * d_in, d_out), nn.ReLU(), nn.Linear(d_out, d_out))
            self.skip = nn.Linear(d_in, d_out)

        def forward(self, x, edge_index):
            src, dst = edge_index
            m = self.msg(torch.cat([x[src], x[dst]], dim=1))
            return self.skip(x).index_add(0, dst, m)

    class MolNet(nn.Module):
        def __init__(self, dim=24):
            super().__init__()
            self.conv1 = EdgeConv(4, dim)
            self.conv2 = EdgeConv(dim, dim)
            self.readout = nn.Linear(dim, 1)

        def forward(self, x, edge_index, owner):
            h = F.relu(self.conv1(x, edge_index))
            h = F.relu(self.conv2(h, edge_index))
            pooled = h.new_zeros(int(owner.max()) + 1, h.size(1)).index_add(0, owner, h)
            return self.readout(pooled).squeeze(-1)

    loader = DataLoader([molecule() for _ in range(800)], batch_size=32, shuffle=True, collate_fn=collate)
    held_out = [molecule() for _ in range(150)]
    model = MolNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    it = iter(loader)

    def step(i):
        nonlocal it
        try:
            x, edge_index, owner, y = next(it)
        except StopIteration:
            it = iter(loader)
            x, edge_index, owner, y = next(it)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, edge_index, owner), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        y = torch.stack([g[2] for g in held_out])
        pred = torch.cat([model(x, e, torch.zeros(len(x), dtype=torch.long)) for x, e, _ in held_out])
        return (F.mse_loss(pred, y) / y.var()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forecaster_no_causal_mask_bad():
    torch.manual_seed(0)
    window, d_model = 32, 32

    def series(n):
        t = torch.arange(window + 1).float()
        period = 6 + 6 * torch.rand(n, 1)
        phase = 2 * math.pi * torch.rand(n, 1)
        return torch.sin(2 * math.pi * t / period + phase) + 0.05 * torch.randn(n, window + 1)

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(1, d_model)
            self.pos = nn.Parameter(0.02 * torch.randn(window, d_model))
            layer = nn.TransformerEncoderLayer(d_model, nhead=4, dim_feedforward=64, dropout=0.0,
                                               batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, num_layers=2)
            self.out = nn.Linear(d_model, 1)

        def forward(self, x):
            L = x.size(1)
            h = self.inp(x.unsqueeze(-1)) + self.pos[:L]
            h = self.encoder(h)
            return self.out(h).squeeze(-1)

    data = series(1500)
    held_out = series(100)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)

    def step(i):
        seq = data[torch.randint(len(data), (32,))]
        pred = model(seq[:, :-1])
        loss = F.mse_loss(pred, seq[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        ctx = held_out[:, :20]
        for _ in range(6):
            ctx = torch.cat([ctx, model(ctx)[:, -1:]], dim=1)
        return F.mse_loss(ctx[:, 20:], held_out[:, 20:26]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forecaster_no_causal_mask_good():
    torch.manual_seed(0)
    window, d_model = 32, 32

    def series(n):
        t = torch.arange(window + 1).float()
        period = 6 + 6 * torch.rand(n, 1)
        phase = 2 * math.pi * torch.rand(n, 1)
        return torch.sin(2 * math.pi * t / period + phase) + 0.05 * torch.randn(n, window + 1)

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(1, d_model)
            self.pos = nn.Parameter(0.02 * torch.randn(window, d_model))
            layer = nn.TransformerEncoderLayer(d_model, nhead=4, dim_feedforward=64, dropout=0.0,
                                               batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, num_layers=2)
            self.out = nn.Linear(d_model, 1)

        def forward(self, x):
            L = x.size(1)
            h = self.inp(x.unsqueeze(-1)) + self.pos[:L]
            mask = nn.Transformer.generate_square_subsequent_mask(L)
            h = self.encoder(h, mask=mask, is_causal=True)
            return self.out(h).squeeze(-1)

    data = series(1500)
    held_out = series(100)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)

    def step(i):
        seq = data[torch.randint(len(data), (32,))]
        pred = model(seq[:, :-1])
        loss = F.mse_loss(pred, seq[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        ctx = held_out[:, :20]
        for _ in range(6):
            ctx = torch.cat([ctx, model(ctx)[:, -1:]], dim=1)
        return F.mse_loss(ctx[:, 20:], held_out[:, 20:26]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_runs_over_batch_bad():
    torch.manual_seed(0)

    class SensorRegressor(nn.Module):
        def __init__(self, n_features=4, hidden=32):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden)
            self.fc = nn.Sequential(nn.Linear(hidden, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    def make_data(n, T=20):
        level = torch.randn(n, 1, 4)
        x = level + 0.8 * torch.randn(n, T, 4).cumsum(1) / math.sqrt(T)
        wear = torch.relu(x[:, :, 0]).mean(1) + (x[:, :, 1] * x[:, :, 2]).mean(1)
        y = wear + x[:, :5, 3].mean(1)
        return x, y.unsqueeze(1)

    x, y = make_data(1600)
    mean, std = x.mean((0, 1)), x.std((0, 1))
    y_mean, y_std = y.mean(), y.std()
    train_set = TensorDataset((x - mean) / std, (y - y_mean) / y_std)
    xv, yv = make_data(320)
    xv, yv = (xv - mean) / std, (yv - y_mean) / y_std
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    model = SensorRegressor()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batch_iter = iter(loader)

    def step(i):
        nonlocal batch_iter
        try:
            xb, yb = next(batch_iter)
        except StopIteration:
            batch_iter = iter(loader)
            xb, yb = next(batch_iter)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        pred = torch.cat([model(c) for c in xv.split(32)])
        return (criterion(pred, yv) / yv.var()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_runs_over_batch_good():
    torch.manual_seed(0)

    class SensorRegressor(nn.Module):
        def __init__(self, n_features=4, hidden=32):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden, batch_first=True)
            self.fc = nn.Sequential(nn.Linear(hidden, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    def make_data(n, T=20):
        level = torch.randn(n, 1, 4)
        x = level + 0.8 * torch.randn(n, T, 4).cumsum(1) / math.sqrt(T)
        wear = torch.relu(x[:, :, 0]).mean(1) + (x[:, :, 1] * x[:, :, 2]).mean(1)
        y = wear + x[:, :5, 3].mean(1)
        return x, y.unsqueeze(1)

    x, y = make_data(1600)
    mean, std = x.mean((0, 1)), x.std((0, 1))
    y_mean, y_std = y.mean(), y.std()
    train_set = TensorDataset((x - mean) / std, (y - y_mean) / y_std)
    xv, yv = make_data(320)
    xv, yv = (xv - mean) / std, (yv - y_mean) / y_std
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    model = SensorRegressor()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batch_iter = iter(loader)

    def step(i):
        nonlocal batch_iter
        try:
            xb, yb = next(batch_iter)
        except StopIteration:
            batch_iter = iter(loader)
            xb, yb = next(batch_iter)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        pred = torch.cat([model(c) for c in xv.split(32)])
        return (criterion(pred, yv) / yv.var()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fno_view_for_permute_bad():
    torch.manual_seed(0)
    n_grid, width, modes = 48, 16, 8
    grid = torch.arange(n_grid) / n_grid

    def heat_pairs(n, nu=0.01, T=0.5):
        k = torch.arange(1, 6).float()
        a, b = torch.randn(2, n, 5)
        decay = torch.exp(-nu * (2 * math.pi * k) ** 2 * T)
        arg = 2 * math.pi * k[:, None] * grid[None]
        shift = 2 * math.pi * k[:, None] * (grid[None] - 0.25)
        u0 = a @ torch.cos(arg) + b @ torch.sin(arg)
        uT = (a * decay) @ torch.cos(shift) + (b * decay) @ torch.sin(shift)
        return u0.unsqueeze(-1), torch.tanh(uT).unsqueeze(-1)

    class SpectralConv(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, width, modes, 2) / width)

        def forward(self, x):
            xf = torch.fft.rfft(x)[..., :modes]
            yf = torch.einsum("bim,iom->bom", xf, torch.view_as_complex(self.weight))
            return torch.fft.irfft(F.pad(yf, (0, n_grid // 2 + 1 - modes)), n=n_grid)

    class FNO(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift = nn.Linear(2, width)
            self.spectral = nn.ModuleList([SpectralConv() for _ in range(2)])
            self.local = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(2)])
            self.proj = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, 1))

        def forward(self, u):
            pos = grid.view(1, -1, 1).expand(len(u), -1, -1)
            h = self.lift(torch.cat([u, pos], dim=-1))
            h = h.view(len(u), width, n_grid)
            for spec, loc in zip(self.spectral, self.local):
                h = F.gelu(spec(h) + loc(h))
            return self.proj(h.permute(0, 2, 1))

    u_train, s_train = heat_pairs(600)
    u_val, s_val = heat_pairs(100)
    model = FNO()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def step(i):
        idx = torch.randint(len(u_train), (20,))
        pred = model(u_train[idx])
        loss = F.mse_loss(pred, s_train[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return ((model(u_val) - s_val).pow(2).sum() / s_val.pow(2).sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fno_view_for_permute_good():
    torch.manual_seed(0)
    n_grid, width, modes = 48, 16, 8
    grid = torch.arange(n_grid) / n_grid

    def heat_pairs(n, nu=0.01, T=0.5):
        k = torch.arange(1, 6).float()
        a, b = torch.randn(2, n, 5)
        decay = torch.exp(-nu * (2 * math.pi * k) ** 2 * T)
        arg = 2 * math.pi * k[:, None] * grid[None]
        shift = 2 * math.pi * k[:, None] * (grid[None] - 0.25)
        u0 = a @ torch.cos(arg) + b @ torch.sin(arg)
        uT = (a * decay) @ torch.cos(shift) + (b * decay) @ torch.sin(shift)
        return u0.unsqueeze(-1), torch.tanh(uT).unsqueeze(-1)

    class SpectralConv(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, width, modes, 2) / width)

        def forward(self, x):
            xf = torch.fft.rfft(x)[..., :modes]
            yf = torch.einsum("bim,iom->bom", xf, torch.view_as_complex(self.weight))
            return torch.fft.irfft(F.pad(yf, (0, n_grid // 2 + 1 - modes)), n=n_grid)

    class FNO(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift = nn.Linear(2, width)
            self.spectral = nn.ModuleList([SpectralConv() for _ in range(2)])
            self.local = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(2)])
            self.proj = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, 1))

        def forward(self, u):
            pos = grid.view(1, -1, 1).expand(len(u), -1, -1)
            h = self.lift(torch.cat([u, pos], dim=-1))
            h = h.permute(0, 2, 1)
            for spec, loc in zip(self.spectral, self.local):
                h = F.gelu(spec(h) + loc(h))
            return self.proj(h.permute(0, 2, 1))

    u_train, s_train = heat_pairs(600)
    u_val, s_val = heat_pairs(100)
    model = FNO()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def step(i):
        idx = torch.randint(len(u_train), (20,))
        pred = model(u_train[idx])
        loss = F.mse_loss(pred, s_train[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return ((model(u_val) - s_val).pow(2).sum() / s_val.pow(2).sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def epoch_decay_every_batch_bad():
    torch.manual_seed(0)
    n_users, n_items, n_topics = 200, 150, 10
    user_topic = torch.randint(n_topics, (n_users,))
    item_topic = torch.randint(n_topics, (n_items,))
    by_topic = [torch.nonzero(item_topic == k).flatten() for k in range(n_topics)]

    def clicks(n):
        users = torch.randint(n_users, (n,))
        items = torch.tensor([int(by_topic[user_topic[u]][torch.randint(len(by_topic[user_topic[u]]), (1,))])
                              for u in users.tolist()])
        return users, items

    class Tower(nn.Module):
        def __init__(self, n, dim=24):
            super().__init__()
            self.emb = nn.Embedding(n, dim)
            self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim))

        def forward(self, ids):
            return self.mlp(self.emb(ids))

    users, items = clicks(6400)
    u_val, i_val = clicks(1000)
    user_tower, item_tower = Tower(n_users), Tower(n_items)
    params = list(user_tower.parameters()) + list(item_tower.parameters())
    optimizer = torch.optim.Adam(params, lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    batch_size = 128
    per_epoch = len(users) // batch_size
    order = torch.randperm(len(users))

    def step(i):
        nonlocal order
        b = i % per_epoch
        if b == 0:
            order = torch.randperm(len(users))
        idx = order[b * batch_size:(b + 1) * batch_size]
        pos, neg = items[idx], torch.randint(n_items, (len(idx), 4))
        u = user_tower(users[idx])
        s_pos = (u * item_tower(pos)).sum(-1, keepdim=True)
        s_neg = (u.unsqueeze(1) * item_tower(neg)).sum(-1)
        loss = -F.logsigmoid(s_pos - s_neg).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        scores = user_tower(u_val) @ item_tower(torch.arange(n_items)).T
        top = scores.topk(10, dim=1).indices
        return 1 - (top == i_val.unsqueeze(1)).any(1).float().mean().item()

    return {"model": [user_tower, item_tower], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def epoch_decay_every_batch_good():
    torch.manual_seed(0)
    n_users, n_items, n_topics = 200, 150, 10
    user_topic = torch.randint(n_topics, (n_users,))
    item_topic = torch.randint(n_topics, (n_items,))
    by_topic = [torch.nonzero(item_topic == k).flatten() for k in range(n_topics)]

    def clicks(n):
        users = torch.randint(n_users, (n,))
        items = torch.tensor([int(by_topic[user_topic[u]][torch.randint(len(by_topic[user_topic[u]]), (1,))])
                              for u in users.tolist()])
        return users, items

    class Tower(nn.Module):
        def __init__(self, n, dim=24):
            super().__init__()
            self.emb = nn.Embedding(n, dim)
            self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim))

        def forward(self, ids):
            return self.mlp(self.emb(ids))

    users, items = clicks(6400)
    u_val, i_val = clicks(1000)
    user_tower, item_tower = Tower(n_users), Tower(n_items)
    params = list(user_tower.parameters()) + list(item_tower.parameters())
    optimizer = torch.optim.Adam(params, lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    batch_size = 128
    per_epoch = len(users) // batch_size
    order = torch.randperm(len(users))

    def step(i):
        nonlocal order
        b = i % per_epoch
        if b == 0:
            order = torch.randperm(len(users))
        idx = order[b * batch_size:(b + 1) * batch_size]
        pos, neg = items[idx], torch.randint(n_items, (len(idx), 4))
        u = user_tower(users[idx])
        s_pos = (u * item_tower(pos)).sum(-1, keepdim=True)
        s_neg = (u.unsqueeze(1) * item_tower(neg)).sum(-1)
        loss = -F.logsigmoid(s_pos - s_neg).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if b == per_epoch - 1:
            scheduler.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        scores = user_tower(u_val) @ item_tower(torch.arange(n_items)).T
        top = scores.topk(10, dim=1).indices
        return 1 - (top == i_val.unsqueeze(1)).any(1).float().mean().item()

    return {"model": [user_tower, item_tower], "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def time_shift_without_labels_bad():
    torch.manual_seed(0)
    n_states, n_mel, T = 8, 12, 40
    means = 1.2 * torch.randn(n_states, n_mel, generator=torch.Generator().manual_seed(5))

    def utterances(n):
        labels = torch.empty(n, T, dtype=torch.long)
        for k in range(n):
            t = 0
            while t < T:
                dur = int(torch.randint(3, 7, (1,)))
                labels[k, t:t + dur] = int(torch.randint(n_states, (1,)))
                t += dur
        return means[labels] + torch.randn(n, T, n_mel), labels

    class FrameClassifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(n_mel, 48, 5, padding=2), nn.BatchNorm1d(48), nn.ReLU(),
                nn.Conv1d(48, 48, 5, padding=2), nn.BatchNorm1d(48), nn.ReLU(),
                nn.Conv1d(48, n_states, 1),
            )

        def forward(self, feats):
            return self.conv(feats.transpose(1, 2))

    def augment(feats, labels):
        shift = int(torch.randint(-8, 9, (1,)))
        gain = 1 + 0.1 * torch.randn(len(feats), 1, 1)
        feats = torch.roll(feats, shift, dims=1) * gain
        return feats, labels

    loader = DataLoader(TensorDataset(*utterances(300)), batch_size=16, shuffle=True, drop_last=True)
    feats_val, labels_val = utterances(60)
    model = FrameClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    source = iter(loader)

    def step(i):
        nonlocal source
        batch = next(source, None)
        if batch is None:
            source = iter(loader)
            batch = next(source)
        feats, labels = augment(*batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(feats), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        err = (model(feats_val).argmax(1) != labels_val).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def time_shift_without_labels_good():
    torch.manual_seed(0)
    n_states, n_mel, T = 8, 12, 40
    means = 1.2 * torch.randn(n_states, n_mel, generator=torch.Generator().manual_seed(5))

    def utterances(n):
        labels = torch.empty(n, T, dtype=torch.long)
        for k in range(n):
            t = 0
            while t < T:
                dur = int(torch.randint(3, 7, (1,)))
                labels[k, t:t + dur] = int(torch.randint(n_states, (1,)))
                t += dur
        return means[labels] + torch.randn(n, T, n_mel), labels

    class FrameClassifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(n_mel, 48, 5, padding=2), nn.BatchNorm1d(48), nn.ReLU(),
                nn.Conv1d(48, 48, 5, padding=2), nn.BatchNorm1d(48), nn.ReLU(),
                nn.Conv1d(48, n_states, 1),
            )

        def forward(self, feats):
            return self.conv(feats.transpose(1, 2))

    def augment(feats, labels):
        shift = int(torch.randint(-8, 9, (1,)))
        gain = 1 + 0.1 * torch.randn(len(feats), 1, 1)
        feats = torch.roll(feats, shift, dims=1) * gain
        labels = torch.roll(labels, shift, dims=1)
        return feats, labels

    loader = DataLoader(TensorDataset(*utterances(300)), batch_size=16, shuffle=True, drop_last=True)
    feats_val, labels_val = utterances(60)
    model = FrameClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    source = iter(loader)

    def step(i):
        nonlocal source
        batch = next(source, None)
        if batch is None:
            source = iter(loader)
            batch = next(source)
        feats, labels = augment(*batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(feats), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        err = (model(feats_val).argmax(1) != labels_val).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def zero_grad_between_tasks_bad():
    torch.manual_seed(0)

    class MultiTask(nn.Module):
        def __init__(self, n_in=10):
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
            self.heads = nn.ModuleDict({
                "price": nn.Linear(32, 1),
                "sold": nn.Linear(32, 1),
                "days": nn.Linear(32, 1),
            })

        def forward(self, x, task):
            return self.heads[task](self.shared(x)).squeeze(-1)

    w = torch.randn(10, 3, generator=torch.Generator().manual_seed(2))

    def houses(n):
        x = torch.randn(n, 10)
        z = x @ w / math.sqrt(10)
        price = z[:, 0] + 0.5 * z[:, 1] ** 2 + 0.1 * torch.randn(n)
        sold = torch.bernoulli(torch.sigmoid(4 * z[:, 1]))
        days = torch.sin(2 * z[:, 2]) + 0.1 * torch.randn(n)
        return x, {"price": price, "sold": sold, "days": days}

    losses = {"price": F.mse_loss, "sold": F.binary_cross_entropy_with_logits, "days": F.mse_loss}
    x, targets = houses(3000)
    xv, tv = houses(1000)
    model = MultiTask()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        idx = torch.randint(len(x), (64,))
        total = 0.0
        for task, loss_fn in losses.items():
            optimizer.zero_grad()
            loss = loss_fn(model(x[idx], task), targets[task][idx])
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    @torch.no_grad()
    def probe():
        rel = []
        for task, loss_fn in losses.items():
            base = math.log(2) if task == "sold" else tv[task].var().item()
            rel.append(loss_fn(model(xv, task), tv[task]).item() / base)
        return sum(rel) / len(rel)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def zero_grad_between_tasks_good():
    torch.manual_seed(0)

    class MultiTask(nn.Module):
        def __init__(self, n_in=10):
            super().__init__()
            self.shared = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
            self.heads = nn.ModuleDict({
                "price": nn.Linear(32, 1),
                "sold": nn.Linear(32, 1),
                "days": nn.Linear(32, 1),
            })

        def forward(self, x, task):
            return self.heads[task](self.shared(x)).squeeze(-1)

    w = torch.randn(10, 3, generator=torch.Generator().manual_seed(2))

    def houses(n):
        x = torch.randn(n, 10)
        z = x @ w / math.sqrt(10)
        price = z[:, 0] + 0.5 * z[:, 1] ** 2 + 0.1 * torch.randn(n)
        sold = torch.bernoulli(torch.sigmoid(4 * z[:, 1]))
        days = torch.sin(2 * z[:, 2]) + 0.1 * torch.randn(n)
        return x, {"price": price, "sold": sold, "days": days}

    losses = {"price": F.mse_loss, "sold": F.binary_cross_entropy_with_logits, "days": F.mse_loss}
    x, targets = houses(3000)
    xv, tv = houses(1000)
    model = MultiTask()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        idx = torch.randint(len(x), (64,))
        total = 0.0
        optimizer.zero_grad()
        for task, loss_fn in losses.items():
            loss = loss_fn(model(x[idx], task), targets[task][idx])
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    @torch.no_grad()
    def probe():
        rel = []
        for task, loss_fn in losses.items():
            base = math.log(2) if task == "sold" else tv[task].var().item()
            rel.append(loss_fn(model(xv, task), tv[task]).item() / base)
        return sum(rel) / len(rel)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
