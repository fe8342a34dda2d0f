"""Short documents are packed into one row with a mask of blocks, places begin at zero in each of
them, and the last token of a document is not asked for the first of the next one.

After: pytorch-labs/attention-gym
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
vocab, dim, heads, row, batch = 18, 32, 4, 30, 5


def packed_row():
    tokens, document, position = [], [], []
    while len(tokens) < row:
        size = int(torch.randint(4, 11, (1,)))
        start, stride = torch.randint(2, vocab, (2,)).tolist()
        tokens += [1] + [(start + stride % 3 * i) % (vocab - 2) + 2 for i in range(size)]
        document += [max(document, default=-1) + 1] * (size + 1)
        position += range(size + 1)
    return torch.tensor([tokens[:row], document[:row], position[:row]])


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, dim), nn.Embedding(row, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, document, position):
        b, n = ids.shape
        same = document.unsqueeze(2) == document.unsqueeze(1)
        mask = (same & torch.ones(n, n).tril().bool()).unsqueeze(1)
        x = self.tokens(ids) + self.places(position)
        for norm, qkv, out in zip(self.norms, self.qkv, self.out, strict=False):
            q, k, v = qkv(norm(x)).view(b, n, 3, heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + out(y.transpose(1, 2).reshape(b, n, dim))
        return self.head(self.norms[-1](x))


model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
steps = 18
for step in range(steps):
    ids, document, position = torch.stack([packed_row() for _ in range(batch)], dim=1)
    labels = ids[:, 1:].masked_fill(document[:, 1:] != document[:, :-1], -100)
    logits = model(ids, document, position)[:, :-1]
    loss = F.cross_entropy(logits.reshape(-1, vocab), labels.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
