"""REINFORCE walks back through an episode with a loss and a backward for each step and one step of
the optimizer at the end, so gradients pile up on purpose.

After: seungeunrho/minimalRL
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

torch.manual_seed(0)
learning_rate, gamma = 0.01, 0.95


class Corridor:
    def reset(self):
        self.place, self.time, self.side = 0, 0, 1 if torch.rand(()) < 0.5 else -1
        return self.look()

    def look(self):
        return torch.tensor([self.place / 3, float(self.side), self.time / 12])

    def step(self, action):
        self.place, self.time = self.place + (1 if action == 1 else -1), self.time + 1
        done = abs(self.place) == 3 or self.time == 12
        return self.look(), 1.0 if self.place == 3 * self.side else -0.05, done


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.data, self.fc1, self.fc2 = [], nn.Linear(3, 64), nn.Linear(64, 2)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=learning_rate)

    def forward(self, x):
        return F.softmax(self.fc2(F.relu(self.fc1(x))), dim=0)

    def train_net(self):
        R = 0
        self.optimizer.zero_grad()
        for r, prob in self.data[::-1]:
            R = r + gamma * R
            (-torch.log(prob) * R).backward()
        self.optimizer.step()


env, pi, score = Corridor(), Policy(), 0.0
n_episodes = 20
for n_epi in range(n_episodes):
    s, done = env.reset(), False
    while not done:
        prob = pi(s)
        a = Categorical(prob).sample()
        s, r, done = env.step(a.item())
        pi.data.append((r, prob[a]))
        score += r
    pi.train_net()
    pi.data = []
    print(n_epi, score / (n_epi + 1))
