"""DQN learns from a replay memory, actions are drawn by an epsilon that falls, and the target
network is loaded from the other one only now and then, though its answers carry a graph.

After: seungeunrho/minimalRL
"""

import collections
import random

import torch
from torch import nn

random.seed(torch.manual_seed(3).initial_seed())
size = 5


def sample(n):
    rows = zip(*random.sample(memory, n), strict=True)
    s, a, r, s_prime, done_mask = (torch.tensor(x) for x in rows)
    return s.float(), a.view(-1, 1), r.view(-1, 1), s_prime.float(), done_mask.view(-1, 1)


class Qnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x / size)))

    def act(self, obs, epsilon):
        out = self(torch.tensor(obs).float())
        return random.randrange(4) if random.random() < epsilon else out.argmax().item()


def move(s, action):
    dx, dy = ((1, 0), (-1, 0), (0, 1), (0, -1))[action]
    x, y = (min(max(c, 0), size - 1) for c in (s[0] + dx, s[1] + dy))
    gain = abs(s[0] - s[2]) + abs(s[1] - s[3]) - abs(x - s[2]) - abs(y - s[3])
    return (x, y, *s[2:]), float(gain), (x, y) == s[2:]


s, q, q_target, memory = (0, 0, 3, 2), Qnet(), Qnet(), collections.deque(maxlen=2000)
q_target.load_state_dict(q.state_dict())
optimizer = torch.optim.Adam(q.parameters(), lr=0.005)
n_steps = 20
for n_epi in range(n_steps):
    for _ in range(20):
        a = q.act(s, max(0.1, 0.6 - 0.01 * n_epi))
        s_prime, r, done = move(s, a)
        memory.append((s, a, r, s_prime, 1.0 - done))
        s = tuple(random.randrange(size) for _ in range(4)) if done else s_prime
    s_b, a_b, r_b, s_prime_b, mask_b = sample(20)
    target = r_b + 0.9 * q_target(s_prime_b).max(1)[0].unsqueeze(1) * mask_b
    loss = nn.functional.smooth_l1_loss(q(s_b).gather(1, a_b), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if n_epi % 5 == 4:
        q_target.load_state_dict(q.state_dict())
    print(n_epi, loss.item(), sum(row[2] for row in list(memory)[-20:]))
