"""The flags of episode ends are drawn from memory and not used, so values go on past the end.

Threads: https://github.com/navneet-nmk/pytorch-rl/issues/2
    https://github.com/seungeunrho/minimalRL/issues/32
Names: F56
"""

import copy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CELLS, GAMMA, BATCH = 12, 0.98, 32


def sample(buffer, random):
    chosen = random.choice(len(buffer), BATCH)
    columns = zip(*(buffer[i] for i in chosen), strict=True)
    return [torch.tensor(np.array(column)) for column in columns]


def walk(buffer, random, moves):
    place = CELLS // 2
    for _ in range(moves):
        action = int(random.integers(2))
        after = place + (1 if action else -1)
        over = after in (0, CELLS - 1)
        reward = 1.0 if after == CELLS - 1 else -0.02
        eye = np.eye(CELLS, dtype=np.float32)
        buffer.append((eye[place], action, np.float32(reward), eye[after], np.float32(over)))
        place = CELLS // 2 if over else after


torch.manual_seed(7)
random = np.random.default_rng(7)
buffer = []
online = nn.Sequential(nn.Linear(CELLS, 40), nn.ReLU(), nn.Linear(40, 2))
target_net = copy.deepcopy(online)
optimizer = torch.optim.Adam(online.parameters(), lr=2e-3)
walk(buffer, random, 300)
for step in range(20):
    walk(buffer, random, 10)
    state, action, reward, next_state, done = sample(buffer, random)
    with torch.no_grad():
        next_q = target_net(next_state).max(1).values
        # broken
        target_q = reward + GAMMA * next_q
        # mended
        # target_q = reward + GAMMA * next_q * (1 - done)
        # end
    q = online(state).gather(1, action.unsqueeze(1)).squeeze(1)
    loss = F.smooth_l1_loss(q, target_q)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        target_net.load_state_dict(online.state_dict())
