"""PPO goes over the same short rollout three times, so its first ratio is exactly one, and the
advantage is summed backwards from temporal differences that carry no gradient.

After: seungeunrho/minimalRL
"""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

torch.manual_seed(2)
gamma, lmbda, eps_clip, T_horizon = 0.9, 0.95, 0.1, 24


def env_step(x, a):
    x = torch.stack([0.8 * x[0] + 0.7 * (a - 1) * x[1].sign() + 0.2 * torch.randn(()), -x[1]])
    return x, 0.5 - x[0].abs().item(), bool(torch.rand(()) < 0.05)


class PPO(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc_pi, self.fc_v = nn.Linear(2, 64), nn.Linear(64, 3), nn.Linear(64, 1)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.005)

    def heads(self, x):
        h = torch.relu(self.fc1(x))
        return self.fc_pi(h).softmax(dim=-1), self.fc_v(h)

    def train_net(self, data):
        s, a, r, s_prime, prob_a, mask = (torch.stack(x) for x in zip(*data, strict=True))
        for _ in range(3):
            (pi, v), td_target = self.heads(s), r + gamma * self.heads(s_prime)[1] * mask
            delta, advantage, advantages = (td_target - v).detach(), torch.zeros(1), []
            for delta_t, mask_t in zip(delta.flip(0), mask.flip(0), strict=True):
                advantage = gamma * lmbda * advantage * mask_t + delta_t
                advantages.insert(0, advantage)
            advantage = torch.stack(advantages)
            ratio = torch.exp(pi.gather(1, a).log() - prob_a.log())
            surr2 = torch.clamp(ratio, 1 - eps_clip, 1 + eps_clip) * advantage
            loss = F.smooth_l1_loss(v, td_target.detach()) - torch.min(ratio * advantage, surr2)
            self.optimizer.zero_grad()
            loss.mean().backward()
            self.optimizer.step()


model, s = PPO(), torch.tensor([1.5, 1.0])
epochs = 6
for epoch in range(epochs):
    data = []
    for _ in range(T_horizon):
        prob = model.heads(s)[0].detach()
        a = Categorical(prob).sample()
        s_prime, r, done = env_step(s, a)
        reward, mask = torch.tensor([r]), torch.tensor([1.0 - done])
        data.append((s, a.view(1), reward, s_prime, prob[a].view(1), mask))
        s = torch.tensor([1.5, 1.0]) if done else s_prime
    model.train_net(data)
    print(epoch, sum(row[2].item() for row in data) / T_horizon)
