"""Actor and critic share a layer, the advantage is a constant for the actor, and the target of the
critic is made with the same network and cut from the graph.

After: seungeunrho/minimalRL
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

torch.manual_seed(1)
learning_rate, gamma, n_rollout, states, actions = 0.01, 0.8, 20, 7, 3
one_hot, payoff = torch.eye(states), torch.randint(actions, (states,))
n_updates = 20


def env_step(state, action):
    reward = 1.0 if action == payoff[state] else 0.0
    done = bool(torch.rand(()) < 0.1)
    return int(torch.randint(states, ())) if done else (state + 1 + action) % states, reward, done


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.data = []
        self.fc1 = nn.Linear(states, 64)
        self.fc_pi, self.fc_v = nn.Linear(64, actions), nn.Linear(64, 1)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=learning_rate)

    def pi(self, x, softmax_dim=0):
        return F.softmax(self.fc_pi(F.relu(self.fc1(x))), dim=softmax_dim)

    def v(self, x):
        return self.fc_v(F.relu(self.fc1(x)))

    def train_net(self):
        s, a, r, s_prime, not_done = (torch.stack(x) for x in zip(*self.data, strict=True))
        td_target = r + gamma * self.v(s_prime) * not_done
        delta = td_target - self.v(s)
        pi_a = self.pi(s, softmax_dim=1).gather(1, a)
        loss = -torch.log(pi_a) * delta.detach() + F.smooth_l1_loss(self.v(s), td_target.detach())
        self.optimizer.zero_grad()
        loss.mean().backward()
        self.optimizer.step()


model, state = ActorCritic(), 0
for n in range(n_updates):
    for _ in range(n_rollout):
        a = Categorical(model.pi(one_hot[state])).sample()
        state_prime, r, done = env_step(state, a.item())
        row = torch.tensor([r]), one_hot[state_prime], torch.tensor([0.0 if done else 1.0])
        model.data.append((one_hot[state], a.view(1), *row))
        state = state_prime
    print(n, sum(row[2].item() for row in model.data) / n_rollout)
    model.train_net()
    model.data.clear()
