"""The beta of the preference loss is zero, so it stays at 0.6931 and no reward ever differs.

Threads: https://github.com/huggingface/trl/issues/1627
Names: N14
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(43)
VOCAB, PROMPT, ANSWER = 40, 6, 9
# broken
BETA = 0.0
# mended
# BETA = 0.1
# end


class Policy(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        hidden, _ = self.rnn(self.embed(ids))
        return self.head(hidden)


def answer_logp(model, ids):
    logp = model(ids[:, :-1]).log_softmax(-1)
    logp = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return logp[:, PROMPT - 1 :].sum(-1)


def make_pairs(size):
    prompt = torch.randint(VOCAB, (size, PROMPT))
    chosen = (prompt[:, -1:] + torch.arange(1, ANSWER + 1)) % VOCAB
    rejected = torch.randint(VOCAB, (size, ANSWER))
    return torch.cat([prompt, chosen], 1), torch.cat([prompt, rejected], 1)


policy = Policy()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.01)

for step in range(16):
    chosen, rejected = make_pairs(10)
    with torch.no_grad():
        base = answer_logp(reference, chosen) - answer_logp(reference, rejected)
    margin = answer_logp(policy, chosen) - answer_logp(policy, rejected) - base
    loss = -F.logsigmoid(BETA * margin).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step} loss {loss.item():.4f} margin {margin.mean().item():.4f}")
