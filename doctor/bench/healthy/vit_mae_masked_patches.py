"""A masked autoencoder: its target is its own input, normalised patch by patch, and the loss counts
only the three quarters of the patches that the encoder did not see.

After: facebookresearch/mae
"""

import torch
import torch.nn as nn


def fixed_places(length, dim):
    angle = torch.arange(length)[:, None] / 10 ** (torch.arange(dim // 2) / dim * 2)
    return torch.cat([angle.sin(), angle.cos()], dim=1).unsqueeze(0)


class MaskedAutoencoder(nn.Module):
    def __init__(self, patches=16, patch_dim=9, dim=24, decoder_dim=16):
        super().__init__()
        self.patch_embed = nn.Linear(patch_dim, dim)
        self.pos_embed = nn.Parameter(fixed_places(patches, dim), requires_grad=False)
        self.encoder = nn.TransformerEncoderLayer(dim, 3, 48, 0.0, batch_first=True)
        self.decoder_embed = nn.Linear(dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_dim))
        self.decoder_pos = nn.Parameter(fixed_places(patches, decoder_dim), requires_grad=False)
        self.decoder = nn.TransformerEncoderLayer(decoder_dim, 2, 32, 0.0, batch_first=True)
        self.decoder_pred = nn.Linear(decoder_dim, patch_dim)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, patches, mask_ratio=0.75):
        n, length, _ = patches.shape
        keep = int(length * (1 - mask_ratio))
        ids_shuffle = torch.rand(n, length).argsort(dim=1)
        ids_restore = ids_shuffle.argsort(dim=1)
        x = self.patch_embed(patches) + self.pos_embed
        x = x.gather(1, ids_shuffle[:, :keep, None].expand(-1, -1, x.shape[-1]))
        x = self.decoder_embed(self.encoder(x))
        x = torch.cat([x, self.mask_token.expand(n, length - keep, -1)], dim=1)
        x = x.gather(1, ids_restore[..., None].expand(-1, -1, x.shape[-1])) + self.decoder_pos
        pred = self.decoder_pred(self.decoder(x))
        mean, var = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
        target = (patches - mean) / (var + 1e-2) ** 0.5
        return (pred - target).pow(2).mean(-1)[ids_restore >= keep].mean()


def main():
    torch.manual_seed(0)
    model = MaskedAutoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    grid = torch.arange(12.0)
    for step in range(20):
        slope, phase = torch.rand(2, 30, 1, 1)
        imgs = torch.sin(grid.view(1, 12, 1) * (0.4 + slope) + grid * 0.5 + phase * 6)
        loss = model(nn.functional.unfold(imgs.unsqueeze(1), 3, stride=3).mT)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
