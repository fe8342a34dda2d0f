"""Positions begin anew in each packed document, and attention still crosses into the ones before.

Threads: https://github.com/huggingface/nanoVLM/pull/204
    https://github.com/DeepOpt-com/WrinkleFree-Monorepo/issues/53
Names: F12
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH, HEADS, ROW = 33, 32, 4, 30


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x, keep):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep.unsqueeze(1))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class PackedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(ROW, WIDTH)
        self.layers, self.head = nn.ModuleList([DecoderLayer()]), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, position_ids):
        x = self.tokens(input_ids) + self.places(position_ids)
        document = (position_ids == 0).cumsum(dim=1)
        keep = torch.ones(ROW, ROW, dtype=torch.bool).tril().expand(len(x), -1, -1)
        # broken
        # mended
        # keep = keep & (document.unsqueeze(2) == document.unsqueeze(1))
        # end
        for layer in self.layers:
            x = layer(x, keep)
        return self.head(x), document


torch.manual_seed(66)
model = PackedLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(16):
    lengths = torch.stack([torch.randperm(3) * 2 + 8 for _ in range(7)])
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths.tolist()])
    starts = torch.randint(VOCAB, (7, 3)).repeat_interleave(ROW // 3, dim=1)
    ids = (starts.gather(1, (places == 0).cumsum(1) * 10 - 10) + 3 * places) % VOCAB
    logits, document = model(ids, places)
    targets = ids[:, 1:].masked_fill(document[:, 1:] != document[:, :-1], -100)
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
