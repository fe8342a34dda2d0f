"""Preferences without a reference model: the margin is between mean log-probabilities of answers of
different lengths, and a little likelihood of the chosen answer is added.

After: princeton-nlp/SimPO
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(19)
vocab, dim, eos, batch, beta, gamma, sft_weight = 13, 40, 1, 14, 2.0, 0.8, 0.2


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(vocab, dim, padding_idx=0), nn.LSTM(dim, dim, 2)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(self.lstm(self.embed(ids).transpose(0, 1))[0]).transpose(0, 1)


def join(prompt, answers):
    ids = torch.zeros(len(prompt), 12, dtype=torch.long)
    labels = torch.full((len(prompt), 12), -100)
    for row, answer in enumerate(answers):
        ids[row, : 4 + len(answer)] = torch.cat([prompt[row], answer])
        labels[row, 4 : 4 + len(answer)] = answer
    return ids, labels


def average_log_prob(model, ids, labels):
    logits = model(ids[:, :-1])
    negative = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    return -negative.sum(1) / (labels[:, 1:] != -100).sum(1)


model = Writer()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
num_steps = 20
for step in range(num_steps):
    prompt = torch.randint(2, vocab, (batch, 4))
    stop = torch.tensor([eos])
    sizes = torch.randint(1, 7, (batch, 2)).tolist()
    good = [torch.cat([p[-1:].repeat(n), stop]) for p, (n, _) in zip(prompt, sizes, strict=True)]
    poor = [torch.cat([torch.randint(2, vocab, (n,)), stop]) for _, n in sizes]
    chosen = average_log_prob(model, *join(prompt, good))
    rejected = average_log_prob(model, *join(prompt, poor))
    loss = -F.logsigmoid(beta * (chosen - rejected) - gamma).mean() - sft_weight * chosen.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), (chosen > rejected).float().mean().item())
