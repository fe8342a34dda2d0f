"""A VQ-VAE whose codes are buffers: running means of the encoder's outputs move them in the forward
pass, no optimizer does, and codes that nobody uses are put onto outputs of the batch.

After: rosinality/vq-vae-2-pytorch
"""

import torch
from torch import nn
from torch.nn import functional as F


class Quantize(nn.Module):
    def __init__(self, dim, n_embed, decay=0.9, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        embed = torch.randn(dim, n_embed)
        self.register_buffer("embed", embed)
        self.register_buffer("embed_avg", embed.clone())
        self.register_buffer("cluster_size", torch.ones(n_embed))

    def forward(self, input):
        flatten = input.reshape(-1, input.shape[-1])
        embed_ind = torch.cdist(flatten, self.embed.t()).argmin(dim=1)
        onehot = F.one_hot(embed_ind, self.embed.shape[1]).type(flatten.dtype)
        quantize = F.embedding(embed_ind, self.embed.t()).view_as(input)
        if self.training:
            self.update(flatten.detach(), onehot)
        diff = (quantize.detach() - input).pow(2).mean()
        return input + (quantize - input).detach(), diff

    @torch.no_grad()
    def update(self, flatten, onehot):
        self.cluster_size.lerp_(onehot.sum(0), 1 - self.decay)
        self.embed_avg.lerp_(flatten.t() @ onehot, 1 - self.decay)
        unused = self.cluster_size < 0.2
        self.cluster_size[unused] = 1.0
        self.embed_avg[:, unused] = flatten[: int(unused.sum())].t()
        self.embed.data.copy_(self.embed_avg / (self.cluster_size + self.eps))


def main():
    torch.manual_seed(3)
    enc = nn.Sequential(nn.Linear(20, 40), nn.GELU(), nn.Linear(40, 3 * 5), nn.Unflatten(1, (3, 5)))
    quantize = Quantize(dim=5, n_embed=16)
    dec = nn.Sequential(nn.Flatten(), nn.Linear(15, 40), nn.GELU(), nn.Linear(40, 20))
    optimizer = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=4e-3)
    factors = torch.randn(3, 4, 20)
    for i in range(18):
        chosen = torch.randint(0, 4, (3, 38))
        x = sum(factor[kind] for factor, kind in zip(factors, chosen, strict=True)) * 0.6
        quant, diff = quantize(enc(x))
        recon_loss = F.mse_loss(dec(quant), x)
        loss = recon_loss + 0.25 * diff
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{i} mse: {recon_loss.item():.5f}; latent: {diff.item():.3f}")


main()
