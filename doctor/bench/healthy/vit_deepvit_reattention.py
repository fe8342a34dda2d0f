"""A DeepViT: attention maps are mixed over heads and normalised, so their rows do not sum to one.

After: lucidrains/vit-pytorch
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ReAttention(nn.Module):
    def __init__(self, dim, heads, dim_head=8, dropout=0.1):
        super().__init__()
        self.heads, self.scale, self.norm = heads, dim_head**-0.5, nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, heads * dim_head * 3, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.reattn_weights = nn.Parameter(torch.randn(heads, heads))
        self.reattn_norm = nn.LayerNorm(heads)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(dropout))

    def forward(self, x):
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        attn = torch.einsum("bihd,bjhd->bhij", q, k) * self.scale
        attn = self.dropout(attn.softmax(dim=-1))
        attn = self.reattn_norm(torch.einsum("bhij,hg->bijg", attn, self.reattn_weights))
        return self.to_out(torch.einsum("bijh,bjhd->bihd", attn, v).flatten(2))


class DeepViT(nn.Module):
    def __init__(self, dim=24, depth=3, heads=4, num_classes=3):
        super().__init__()
        self.to_patch_embedding = nn.Conv2d(1, dim, 5, stride=5)
        self.pos_embedding = nn.Parameter(torch.randn(1, 5, dim) * 0.5)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            ff = [nn.LayerNorm(dim), nn.Linear(dim, 40), nn.GELU(), nn.Linear(40, dim)]
            self.layers.append(nn.ModuleList([ReAttention(dim, heads), nn.Sequential(*ff)]))
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_classes))

    def forward(self, img):
        x = self.to_patch_embedding(img).flatten(2).mT
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embedding
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.mlp_head(x[:, 0])


labels = torch.randint(0, 3, (16 * 17,), generator=torch.manual_seed(0))
images = torch.randn(3, 1, 10, 10)[labels] + 0.7 * torch.randn(len(labels), 1, 10, 10)
model = DeepViT()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for data, label in DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True):
    loss = F.cross_entropy(model(data), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
