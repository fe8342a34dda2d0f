"""All weights are bfloat16 and the rate is small, so most updates are rounded away.

Threads: https://github.com/vllm-project/speculators/pull/765
    https://github.com/pytorch/ao/pull/1124
Names: N4
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(2)
VOCAB, LENGTH, WIDTH = 50, 20, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 64), nn.SiLU())
        self.out = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(self.mlp(x))


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


model = TinyLM()
# broken
model = model.to(torch.bfloat16)
# mended
# end
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

for step in range(16):
    start = torch.randint(VOCAB, (12, 1))
    ids = (start + 3 * torch.arange(LENGTH + 1)) % VOCAB
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print(f"{step} {loss.item():.4f}")
