"""Besides the next token, two more heads guess the ones after it, each loss goes backward into a
detached copy of the output of the trunk, and the gathered gradient then goes through the trunk.

After: facebookresearch/multi-token-prediction
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(21)
vocab, dim, horizon, length, batch = 15, 28, 3, 13, 9


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(vocab, dim), nn.LSTM(dim, dim, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids):
        return self.norm(self.rnn(self.embed(ids))[0])


trunk = Trunk()
heads = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.SiLU()) for _ in range(horizon))
unembed = nn.Linear(dim, vocab, bias=False)
parameters = [*trunk.parameters(), *heads.parameters(), *unembed.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=5e-3)
num_updates = 20
for update in range(num_updates):
    step = torch.randint(1, 3, (batch, 1))
    ids = (torch.randint(vocab, (batch, 1)) + step * torch.arange(length + horizon)) % vocab
    optimizer.zero_grad()
    z = trunk(ids[:, :length])
    d = z.detach()
    d.requires_grad = True
    losses = []
    for i, head in enumerate(heads):
        logits = unembed(d + head(d))
        loss_i = F.cross_entropy(logits.flatten(0, 1), ids[:, i + 1 : i + 1 + length].flatten())
        loss_i.backward()
        losses.append(loss_i.item())
    z.backward(gradient=d.grad)
    optimizer.step()
    print(update, *(round(x, 3) for x in losses))
