"""SAC with two critics and an optimizer for each network, a temperature that is learned by its
logarithm, and an actor whose loss passes through the critics, whose stale gradients are cleared.

After: seungeunrho/minimalRL
"""

import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

torch.manual_seed(4)


def policy(x):
    mu, std = body(x).chunk(2, dim=1)
    dist = Normal(mu, F.softplus(std))
    action = dist.rsample()
    log_prob = dist.log_prob(action) - torch.log(1 - torch.tanh(action).pow(2) + 1e-7)
    return torch.tanh(action), log_prob


def smallest(nets, s, a):
    return torch.min(*(net(torch.cat([s, a], dim=1)) for net in nets))


body = nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 2))
nets = [nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 1)) for _ in range(4)]
critics, targets = nets[:2], nets[2:]
log_alpha = torch.tensor(-2.0, requires_grad=True)
pi_optimizer = torch.optim.Adam(body.parameters(), lr=0.003)
log_alpha_optimizer = torch.optim.Adam([log_alpha], lr=0.01)
for q, q_target in zip(critics, targets, strict=True):
    q_target.load_state_dict(q.state_dict())
optimizers = [torch.optim.Adam(q.parameters(), lr=0.005) for q in critics]
n_steps = 20
for n in range(n_steps):
    s = torch.randn(32, 3)
    with torch.no_grad():
        a = policy(s)[0]
        r = -(s[:, :1] - a).pow(2)
        s_prime = 0.8 * s + 0.3 * a + 0.1 * torch.randn(32, 3)
        a_prime, log_prob = policy(s_prime)
        value = smallest(targets, s_prime, a_prime) - log_alpha.exp() * log_prob
    for q, optimizer in zip(critics, optimizers, strict=True):
        loss = F.smooth_l1_loss(q(torch.cat([s, a], dim=1)), r + 0.9 * value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    a, log_prob = policy(s)
    pi_optimizer.zero_grad()
    (log_alpha.exp().detach() * log_prob - smallest(critics, s, a)).mean().backward()
    pi_optimizer.step()
    log_alpha_optimizer.zero_grad()
    (-log_alpha.exp() * (log_prob - 1.0).detach()).mean().backward()
    log_alpha_optimizer.step()
    for q, q_target in zip(critics, targets, strict=True):
        for param_target, param in zip(q_target.parameters(), q.parameters(), strict=True):
            param_target.data.copy_(param_target.data * 0.95 + param.data * 0.05)
    print(n, r.mean().item(), loss.item(), log_alpha.item())
