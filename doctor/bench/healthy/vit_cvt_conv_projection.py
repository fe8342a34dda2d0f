"""CvT blocks: keys and values come from a strided convolution and are fewer than the queries.

After: lucidrains/vit-pytorch
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(21)


class ChannelNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.ones(1, dim, 1, 1))
        self.b = nn.Parameter(torch.zeros(1, dim, 1, 1))

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=1, unbiased=False, keepdim=True)
        return (x - mean) / (var + self.eps).sqrt() * self.g + self.b


def projection(dim, out, stride):
    return nn.Sequential(
        nn.Conv2d(dim, dim, 3, stride, 1, groups=dim), nn.BatchNorm2d(dim), nn.Conv2d(dim, out, 1)
    )


class Block(nn.Module):
    def __init__(self, dim, heads=2, dim_head=8):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, ChannelNorm(dim), ChannelNorm(dim)
        self.to_q = projection(dim, heads * dim_head, 1)
        self.to_kv = projection(dim, heads * dim_head * 2, 2)
        self.to_out = nn.Conv2d(heads * dim_head, dim, 1)
        self.ff = nn.Sequential(nn.Conv2d(dim, 3 * dim, 1), nn.GELU(), nn.Conv2d(3 * dim, dim, 1))

    def forward(self, x):
        fmap = self.norm1(x)
        heads = [self.to_q(fmap), *self.to_kv(fmap).chunk(2, dim=1)]
        q, k, v = (t.flatten(2).unflatten(1, (self.heads, -1)).mT for t in heads)
        out = F.scaled_dot_product_attention(q, k, v).mT.flatten(1, 2)
        x = x + self.to_out(out.unflatten(-1, fmap.shape[2:]))
        return x + self.ff(self.norm2(x))


embed = nn.Sequential(nn.Conv2d(3, 12, 7, 4, 3), ChannelNorm(12))
head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4))
model = nn.Sequential(embed, Block(12), Block(12), head)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)
for i in range(16):
    x, y = torch.randn(18, 3, 24, 24), torch.randint(0, 4, (18,))
    x[:, 0] += torch.sin(torch.arange(24.0) * (y.view(-1, 1, 1) + 1) * 0.5) * 1.5
    opt.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    loss.backward()
    opt.step()
    print(i, round(loss.item(), 4))
