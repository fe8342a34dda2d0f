"""The mask is True at the past, which nn.MultiheadAttention hides, so each place sees the future.

Threads: https://github.com/rasbt/LLMs-from-scratch/issues/1061
Names: F34 F11
"""

import torch
from torch import nn
from torch.nn import functional as F

NOTES, WIDTH, LENGTH = 36, 32, 18


class MelodyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.note = nn.Embedding(NOTES, WIDTH)
        self.time = nn.Embedding(LENGTH, WIDTH)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 80), nn.GELU(), nn.Linear(80, WIDTH))
        self.out = nn.Linear(WIDTH, NOTES)
        ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        # broken
        mask = ones.tril(-1)
        # mended
        # mask = ones.triu(1)
        # end
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, notes):
        x = self.note(notes) + self.time.weight[: notes.size(1)]
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        return self.out(self.norm2(x + self.mlp(x)))


def melodies(count):
    scale = torch.tensor([0, 2, 4, 5, 7, 9, 11])
    root = torch.randint(12, (count, 1))
    walk = torch.randint(-1, 2, (count, LENGTH + 1)).cumsum(dim=1).clamp(-6, 14) + 6
    return (root + scale[walk % 7] + 12 * (walk // 7)) % NOTES


def main():
    torch.manual_seed(39)
    model = MelodyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(16):
        notes = melodies(20)
        logits = model(notes[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), notes[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


if __name__ == "__main__":
    main()
