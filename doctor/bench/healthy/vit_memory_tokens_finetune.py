"""A trained vision transformer is frozen, and only memory tokens, a new class token and a new head
learn a second task; an attention mask keeps the old tokens from seeing the memory.

After: lucidrains/vit-pytorch
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(12)
DIM, PATCHES = 24, 6
directions = F.normalize(torch.randn(7, PATCHES, 10), dim=-1) * 2


class ViT(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.embed = nn.Linear(10, DIM)
        self.pos = nn.Parameter(torch.randn(1, PATCHES, DIM) * 0.1)
        layer = nn.TransformerEncoderLayer(DIM, 4, 48, 0.0, batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, num_classes)

    def forward(self, img):
        return self.head(self.transformer(self.embed(img) + self.pos).mean(1))


class Adapter(nn.Module):
    def __init__(self, vit, num_classes, memories=3):
        super().__init__()
        self.vit = vit.requires_grad_(False)
        self.memory_cls = nn.Parameter(torch.randn(1, 1, DIM) * 0.02)
        self.memories = nn.Parameter(torch.randn(1, memories, DIM))
        self.mlp_head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, num_classes))
        self.register_buffer("hidden", torch.zeros(2 * (PATCHES + memories + 1,)).bool())
        self.hidden[:PATCHES, PATCHES:] = True

    def forward(self, img):
        x = self.vit.embed(img) + self.vit.pos
        extra = torch.cat((self.memories, self.memory_cls), dim=1).expand(len(x), -1, -1)
        x = self.vit.transformer(torch.cat((x, extra), dim=1), mask=self.hidden)
        return self.mlp_head(x[:, -1])


def fit(model, first, classes, steps, lr):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=lr)
    for step in range(steps):
        y = torch.randint(0, classes, (20,))
        loss = F.cross_entropy(model(directions[first + y] + torch.randn(20, PATCHES, 10)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, sum(p.numel() for p in trained), loss.item())


base = ViT(num_classes=4)
fit(base, first=0, classes=4, steps=8, lr=2e-3)
fit(Adapter(base, num_classes=3), first=4, classes=3, steps=10, lr=1e-2)
