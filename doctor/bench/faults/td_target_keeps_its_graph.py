"""The TD target is made by the trained network with its graph, so the next value is pulled too.

Threads: https://github.com/datawhalechina/easy-rl/pull/117
    https://github.com/Farama-Foundation/Gymnasium/issues/1494
Names: F81
"""

import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F

STATES, ACTIONS, GAMMA, BATCH = 4, 3, 0.95, 28


def environment_step(state, action):
    push = (action - 1) * 0.3
    after = (0.9 * state + push + 0.05 * torch.randn(STATES)).clamp(-2, 2)
    reward = 1.0 - after[0].abs().item()
    return after, reward, after[0].abs().item() > 1.5


def main():
    torch.manual_seed(19)
    random.seed(19)
    q_net = nn.Sequential(nn.Linear(STATES, 48), nn.ReLU(), nn.Linear(48, ACTIONS))
    optimizer = torch.optim.Adam(q_net.parameters(), lr=2e-3)
    memory = deque(maxlen=500)
    state = torch.randn(STATES)
    for tick in range(160):
        action = random.randrange(ACTIONS)
        after, reward, done = environment_step(state, action)
        memory.append((state, action, reward, after, float(done)))
        state = torch.randn(STATES) if done else after
        if tick < 40 or tick % 7:
            continue
        s, a, r, s2, d = zip(*random.sample(memory, BATCH), strict=True)
        s, s2, a = torch.stack(s), torch.stack(s2), torch.tensor(a)
        r, d = torch.tensor(r), torch.tensor(d)
        q = q_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
        target = r + GAMMA * (1 - d) * q_net(s2).max(1).values
        # broken
        loss = F.mse_loss(q, target)
        # mended
        # loss = F.mse_loss(q, target.detach())
        # end
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
