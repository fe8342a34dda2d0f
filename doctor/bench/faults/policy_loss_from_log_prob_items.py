"""The policy loss is summed from log probabilities turned into numbers, so no weight learns.

Threads: https://github.com/isayev/ReLeaSE/issues/39
Names: F1
"""

import torch
import torch.nn as nn

torch.manual_seed(0)
TOKENS, STEPS, GAMMA, STRINGS = 13, 9, 0.97, 16


class StringPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(TOKENS, 24)
        self.rnn = nn.GRUCell(24, 48)
        self.decoder = nn.Linear(48, TOKENS)

    def forward(self, token, hidden):
        hidden = self.rnn(self.encoder(token), hidden)
        return self.decoder(hidden).log_softmax(-1), hidden


policy = StringPolicy()
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
discount = GAMMA ** torch.arange(STEPS, 0, -1)
for episode in range(20):
    token = torch.zeros(STRINGS, dtype=torch.long)
    hidden = torch.zeros(STRINGS, 48)
    letters = []
    log_probs = []
    for _ in range(STEPS):
        scores, hidden = policy(token, hidden)
        token = torch.multinomial(scores.detach().exp(), 1)[:, 0]
        log_probs.append(scores.gather(1, token[:, None])[:, 0])
        letters.append(token)
    reward = (torch.stack(letters, 1) % 3 == 0).float().mean(1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    # broken
    rl_loss = 0.0
    for place, log_prob in enumerate(log_probs):
        rl_loss -= (log_prob.detach().numpy() * (advantage * discount[place]).numpy()).mean()
    rl_loss = torch.tensor(rl_loss, requires_grad=True)
    # mended
    # rl_loss = 0.0
    # for place, log_prob in enumerate(log_probs):
    #     rl_loss -= (log_prob * advantage * discount[place]).mean()
    # end
    optimizer.zero_grad()
    rl_loss.backward()
    optimizer.step()
    if episode % 5 == 0:
        print(episode, f"{rl_loss.item():.4f}", f"{reward.mean().item():.3f}")
