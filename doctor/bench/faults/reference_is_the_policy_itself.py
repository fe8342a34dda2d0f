"""The reference is a second name of the policy, so the KL term is zero however far it moves.

Threads: https://github.com/andri27-ts/Reinforcement-Learning/issues/14
    https://github.com/DerrickXuNu/dvrl_pytorch/issues/2
Names: F7 F2
Missed: one object is called with and without gradients, as the old policy of PPO is.
"""

import torch
from torch import nn

torch.manual_seed(127)
VOCAB, PROMPT, ANSWER, KL_WEIGHT = 24, 4, 6, 0.1


class Policy(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


@torch.no_grad()
def generate(model, prompt):
    for _ in range(ANSWER):
        odds = model(prompt)[:, -1].softmax(-1)
        prompt = torch.cat([prompt, torch.multinomial(odds, 1)], dim=1)
    return prompt


def token_logp(model, ids):
    logp = model(ids[:, :-1]).log_softmax(-1)
    return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, PROMPT - 1 :]


policy = Policy()
# broken
reference = policy
# mended
# reference = Policy().requires_grad_(False)
# reference.load_state_dict(policy.state_dict())
# end
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

for step in range(16):
    ids = generate(policy, torch.randint(VOCAB, (20, PROMPT)))
    reward = (ids[:, PROMPT:] % 2 == 0).float().mean(1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
    with torch.no_grad():
        base = token_logp(reference, ids)
    logp = token_logp(policy, ids)
    kl = (base - logp).exp() - (base - logp) - 1
    loss = (KL_WEIGHT * kl - advantage[:, None] * logp).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step} reward {reward.mean():.3f} kl {kl.mean().item():.5f}")
