"""An actor-critic keeps an episode's log-probabilities and values as tensors with graphs, scales
its returns within the episode, and its summed loss has no trend though the reward rises.

After: pytorch/examples
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

torch.manual_seed(543)
gamma, cells, max_time = 0.9, 6, 30
eps = torch.finfo(torch.float32).eps


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(cells, 64)
        self.action_head, self.value_head = nn.Linear(64, 3), nn.Linear(64, 1)
        self.saved_actions, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


def finish_episode():
    R, returns = 0.0, []
    for r in model.rewards[::-1]:
        R = r + gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    policy_losses, value_losses = [], []
    for (log_prob, value), R in zip(model.saved_actions, returns, strict=True):
        policy_losses.append(-log_prob * (R - value.item()))
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
    optimizer.zero_grad()
    (torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()).backward()
    optimizer.step()
    del model.rewards[:]
    del model.saved_actions[:]


model = Policy()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
n_episodes = 20
for i_episode in range(n_episodes):
    place = int(torch.randint(cells, ()))
    for _ in range(max_time):
        probs, state_value = model(F.one_hot(torch.tensor(place), cells).float())
        m = Categorical(probs)
        action = m.sample()
        model.saved_actions.append((m.log_prob(action), state_value))
        model.rewards.append(float(action == place % 3))
        place = (place + 1 + action.item()) % cells
    print(i_episode, sum(model.rewards))
    finish_episode()
