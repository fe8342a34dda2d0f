"""torch.where leaves out the logarithm of zero, and the gradient through it is NaN all the same.

Threads: https://github.com/pytorch/pytorch/issues/16317
    https://github.com/pytorch/pytorch/issues/52248
Names: B4 N17
"""

import torch
from torch import nn

STATES, ACTIONS = 12, 7


class MaskedPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATES, 48), nn.Tanh(), nn.Linear(48, ACTIONS))

    def forward(self, state, allowed):
        return self.body(state).masked_fill(~allowed, float("-inf")).softmax(dim=-1)


def entropy_of(probs):
    # broken
    return -torch.where(probs > 0, probs * probs.log(), torch.zeros_like(probs)).sum(dim=-1)
    # mended
    # safe = torch.where(probs > 0, probs, torch.ones_like(probs))
    # return -(probs * safe.log()).sum(dim=-1)
    # end


def play(policy, payoff, episodes):
    state = torch.randn(episodes, STATES)
    allowed = torch.rand(episodes, ACTIONS) < 0.7
    allowed[:, 0] = True
    probs = policy(state, allowed)
    action = torch.multinomial(probs.detach().nan_to_num(1.0 / ACTIONS), 1)
    reward = (state @ payoff).gather(1, action).squeeze(1)
    return probs, action, reward


def main():
    torch.manual_seed(62)
    payoff = torch.randn(STATES, ACTIONS) / 3
    policy = MaskedPolicy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=8e-3)
    for step in range(20):
        probs, action, reward = play(policy, payoff, 80)
        chosen = probs.gather(1, action).squeeze(1).clamp(min=1e-6)
        advantage = reward - reward.mean()
        surrogate = -(advantage * chosen.log()).mean()
        loss = surrogate - 0.01 * entropy_of(probs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, round(reward.mean().item(), 3), round(loss.item(), 3))


if __name__ == "__main__":
    main()
