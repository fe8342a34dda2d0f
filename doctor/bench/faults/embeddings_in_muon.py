"""Every matrix goes to Muon by its number of dimensions, the embedding and the head too.

Threads: https://github.com/deepspeedai/DeepSpeed/pull/7641
    https://github.com/vllm-project/speculators/pull/866
Names: S13
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(109)
VOCAB, LENGTH, WIDTH = 64, 18, 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 96)
        self.down = nn.Linear(96, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        return self.lm_head(self.layers(self.wte(ids)))


gpt = GPT()
# broken
matrices = [p for p in gpt.parameters() if p.ndim == 2]
# mended
# matrices = [p for p in gpt.layers.parameters() if p.ndim == 2]
# end
chosen = {id(p) for p in matrices}
others = [p for p in gpt.parameters() if id(p) not in chosen]
optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3)]

for step in range(15):
    ids = (torch.randint(VOCAB, (8, 1)) + 5 * torch.arange(LENGTH + 1)) % VOCAB
    loss = F.cross_entropy(gpt(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    gpt.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    print(f"{step} {loss.item():.4f}")
