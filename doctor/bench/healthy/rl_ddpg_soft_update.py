"""DDPG with a replay memory: the actor's loss is minus the mean of the critic, so it falls below
zero or rises with the critic, and both targets follow softly.

After: seungeunrho/minimalRL
"""

import copy
import random

import torch
from torch import nn, optim

random.seed(torch.manual_seed(5).initial_seed())
tau, batch_size = 0.05, 40


class MuNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc_mu = nn.Linear(2, 48), nn.Linear(48, 1)

    def forward(self, x):
        return torch.tanh(self.fc_mu(torch.relu(self.fc1(x)))) * 2


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc_sa, self.fc_out = nn.Linear(3, 64), nn.Linear(64, 1)

    def forward(self, x, a):
        return self.fc_out(torch.relu(self.fc_sa(torch.cat([x, a], dim=1))))


mu, q = MuNet(), QNet()
mu_target, q_target = copy.deepcopy(mu), copy.deepcopy(q)
mu_optimizer, q_optimizer = optim.Adam(mu.parameters(), 0.002), optim.Adam(q.parameters(), 0.005)
memory, s, noise = [], torch.randn(2), torch.zeros(1)
n_updates = 20
for n in range(n_updates):
    for _ in range(batch_size):
        noise = 0.9 * noise + 0.3 * torch.randn(1)
        a = mu(s).detach() + noise
        s_prime = s * torch.tensor([0.9, 1.0]) + a * torch.tensor([0.4, 0.0])
        memory.append((s, a, -(s_prime[:1] - s[1:]).pow(2), s_prime))
        s = torch.randn(2) if random.random() < 0.2 else s_prime
    rows = zip(*random.sample(memory, batch_size), strict=True)
    s_b, a_b, r_b, s_prime_b = map(torch.stack, rows)
    target = r_b + 0.8 * q_target(s_prime_b, mu_target(s_prime_b))
    q_loss = nn.functional.smooth_l1_loss(q(s_b, a_b), target.detach())
    q_optimizer.zero_grad()
    q_loss.backward()
    q_optimizer.step()
    mu_loss = -q(s_b, mu(s_b)).mean()
    mu_optimizer.zero_grad()
    mu_loss.backward()
    mu_optimizer.step()
    for net, slow in ((mu, mu_target), (q, q_target)):
        for p_slow, p in zip(slow.parameters(), net.parameters(), strict=True):
            p_slow.data.copy_(p_slow.data * (1.0 - tau) + p.data * tau)
    print(n, q_loss.item(), mu_loss.item(), r_b.mean().item())
