"""Reentrant checkpointing starts behind a frozen embedding, so the blocks inside get no gradient.

Threads: https://github.com/cloneofsimo/lora/issues/26
    https://github.com/kohya-ss/sd-scripts/issues/91
Names: S10 B1
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(8)
TOKENS, WIDTH, LENGTH, LABELS = 37, 32, 14, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            # broken
            x = checkpoint(block, x, use_reentrant=True)
            # mended
            # x = checkpoint(block, x, use_reentrant=False)
            # end
        return self.head(x.mean(dim=1))


model = Classifier()
model.embedding.weight.requires_grad_(False)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=2e-3)
topic_words = torch.randint(TOKENS, (LABELS, 6))
for step in range(18):
    labels = torch.randint(LABELS, (24,))
    ids = topic_words[labels].gather(1, torch.randint(6, (24, LENGTH)))
    loss = F.cross_entropy(model(ids), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step:2d}: {loss.item():.4f}")
