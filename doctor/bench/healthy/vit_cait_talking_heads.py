"""A small CaiT: talking heads, layer scale of 0.1, and whole layers left out by chance.

After: lucidrains/vit-pytorch
"""

import torch
from torch import einsum, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads=3, dim_head=8):
        super().__init__()
        self.heads, self.scale, inner = heads, dim_head**-0.5, heads * dim_head
        self.to_q, self.to_kv = nn.Linear(dim, inner, False), nn.Linear(dim, 2 * inner, False)
        self.mix_heads_pre_attn = nn.Parameter(torch.randn(heads, heads))
        self.mix_heads_post_attn = nn.Parameter(torch.randn(heads, heads))
        self.norm, self.to_out = nn.LayerNorm(dim), nn.Linear(inner, dim)

    def forward(self, x, context=None):
        x = self.norm(x)
        context = x if context is None else torch.cat((x, context), dim=1)
        qkv = self.to_q(x), *self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv)
        dots = einsum("b h i j, h g -> b g i j", q @ k.mT, self.mix_heads_pre_attn) * self.scale
        attn = einsum("b h i j, h g -> b g i j", dots.softmax(-1), self.mix_heads_post_attn)
        return self.to_out((attn @ v).transpose(1, 2).flatten(2))


class CaiT(nn.Module):
    def __init__(self, patch_dim=16, num_patches=9, dim=20, num_classes=4):
        super().__init__()
        self.embed, self.cls = nn.Linear(patch_dim, dim), nn.Parameter(torch.randn(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, num_patches, dim))
        self.layers = nn.ModuleList(Attention(dim) for _ in range(5))
        self.scales = nn.ParameterList(torch.full((dim,), 0.1) for _ in range(5))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_classes))

    def forward(self, img):
        x = self.embed(F.unfold(img, 4, stride=4).mT) + self.pos
        for i in range(3):
            if not self.training or torch.rand(()) > 0.05:
                x = x + self.scales[i] * self.layers[i](x)
        cls = self.cls.expand(len(x), -1, -1)
        for i in range(3, 5):
            cls = cls + self.scales[i] * self.layers[i](cls, context=x)
        return self.head(cls[:, 0])


torch.manual_seed(0)
v = CaiT()
optimizer = torch.optim.AdamW(v.parameters(), lr=2e-3, weight_decay=0.05)
kinds = torch.randn(4, 1, 12, 12)
for step in range(18):
    label = torch.randint(0, 4, (22,))
    loss = F.cross_entropy(v(kinds[label] + 0.5 * torch.randn(22, 1, 12, 12)), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
