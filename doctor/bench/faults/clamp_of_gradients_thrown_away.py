"""Gradients are clamped into a new tensor that nobody keeps, so they are used as they were.

Threads: https://github.com/pytorch/tutorials/pull/30
Names: N28
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(83)
GAMMA, ACTIONS = 0.9, 4


class ScreenQNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 3, stride=2)
        self.advantage = nn.Linear(10 * 16, ACTIONS)
        self.value = nn.Linear(10 * 16, 1)

    def forward(self, screen):
        hidden = F.relu(self.conv(screen)).flatten(1)
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(1, keepdim=True)


def transitions(size):
    screen = torch.rand(size, 1, 9, 9)
    action = torch.randint(ACTIONS, (size,))
    corners = screen[:, 0, ::8, ::8].flatten(1)
    reward = 10 * corners.gather(1, action[:, None]).squeeze(1)
    return screen, action, reward, torch.rand(size, 1, 9, 9)


policy_net = ScreenQNet()
target_net = copy.deepcopy(policy_net).requires_grad_(False)
optimizer = torch.optim.RMSprop(policy_net.parameters(), lr=1e-3)

for step in range(18):
    screen, action, reward, following = transitions(27)
    expected = reward + GAMMA * target_net(following).max(1).values
    value = policy_net(screen).gather(1, action[:, None]).squeeze(1)
    loss = F.mse_loss(value, expected)
    optimizer.zero_grad()
    loss.backward()
    for parameter in policy_net.parameters():
        # broken
        parameter.grad.data.clamp(-1, 1)
        # mended
        # parameter.grad.data.clamp_(-1, 1)
        # end
    optimizer.step()
    if step % 6 == 5:
        target_net.load_state_dict(policy_net.state_dict())
    print(f"{step} {loss.item():.3f}")
