"""assign=True gives the reference the policy's own tensors, so both move together.

Threads: https://github.com/andri27-ts/Reinforcement-Learning/issues/14
    https://github.com/DerrickXuNu/dvrl_pytorch/issues/2
Names: F7 N14 F2
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(151)
VOCAB, PROMPT, ANSWER, BETA = 30, 5, 7, 0.2


class SmallLM(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def answer_logp(model, ids):
    logp = model(ids[:, :-1]).log_softmax(-1)
    return logp.gather(-1, ids[:, 1:, None])[:, PROMPT - 1 :, 0].sum(-1)


def make_pairs(size):
    prompt = torch.randint(VOCAB, (size, PROMPT))
    rising = (prompt[:, -1:] + torch.arange(1, ANSWER + 1)) % VOCAB
    falling = (prompt[:, -1:] - torch.arange(1, ANSWER + 1)) % VOCAB
    return torch.cat([prompt, rising], 1), torch.cat([prompt, falling], 1)


policy = SmallLM()
with torch.device("meta"):
    reference = SmallLM()
# broken
reference.load_state_dict(policy.state_dict(), assign=True)
# mended
# reference.load_state_dict({k: v.clone() for k, v in policy.state_dict().items()}, assign=True)
# end
reference.eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)

for step in range(16):
    chosen, rejected = make_pairs(12)
    margin = answer_logp(policy, chosen) - answer_logp(policy, rejected)
    with torch.no_grad():
        base = answer_logp(reference, chosen) - answer_logp(reference, rejected)
    loss = -F.logsigmoid(BETA * (margin - base)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step} loss {loss.item():.4f}")
