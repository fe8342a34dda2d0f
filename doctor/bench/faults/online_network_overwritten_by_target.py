"""The sync writes the old target weights into the Q-network instead of the other way.

Threads: https://github.com/kengz/SLM-Lab/pull/169
Names: N3 N36
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(4)
GAMMA = 0.95


class QNetwork(nn.Module):
    def __init__(self, observations=6, actions=3, hidden=32):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(observations, hidden),
            nn.ReLU(),
            nn.Linear(hidden, actions),
        )

    def forward(self, state):
        return self.layers(state)


def sample_replay(size):
    state = torch.randn(size, 6)
    action = torch.randint(3, (size,))
    reward = state[torch.arange(size), action] - 0.5 * state[:, 5]
    following = 0.8 * state + 0.3 * torch.randn(size, 6)
    return state, action, reward, following


q_network = QNetwork()
target_network = copy.deepcopy(q_network)
target_network.requires_grad_(False)
optimizer = torch.optim.Adam(q_network.parameters(), lr=2e-3)

for step in range(20):
    state, action, reward, following = sample_replay(40)
    with torch.no_grad():
        goal = reward + GAMMA * target_network(following).max(1).values
    q_value = q_network(state).gather(1, action[:, None]).squeeze(1)
    loss = F.smooth_l1_loss(q_value, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        # broken
        q_network.load_state_dict(target_network.state_dict())
        # mended
        # target_network.load_state_dict(q_network.state_dict())
        # end
    print(step, f"{loss.item():.4f}")
