"""A sequence to sequence forecaster whose share of true values fed back falls from one to zero, so
that its loss may rise on the way; the plateau scheduler has the mode min.

After: bentrevett/pytorch-seq2seq
"""

import random

import torch
import torch.nn as nn


class Seq2Seq(nn.Module):
    def __init__(self, hid_dim=32):
        super().__init__()
        self.encoder, self.cell = nn.GRU(2, hid_dim, batch_first=True), nn.GRUCell(1, hid_dim)
        self.fc_out = nn.Linear(hid_dim, 1)

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        hidden = self.encoder(src)[1].squeeze(0)
        value, outputs = src[:, -1, :1], []
        for t in range(trg.shape[1]):
            hidden = self.cell(value, hidden)
            guess = value + self.fc_out(hidden)
            outputs.append(guess)
            value = trg[:, t] if random.random() < teacher_forcing_ratio else guess
        return torch.stack(outputs, dim=1)


def waves(count, length=15, horizon=6):
    speed = torch.rand(count, 1) * 0.4 + 0.3
    time = torch.arange(length + horizon) * speed + torch.rand(count, 1) * 6.28
    series = torch.sin(time).unsqueeze(-1)
    past = torch.cat([series[:, :length], speed.unsqueeze(1).expand(-1, length, -1)], dim=-1)
    return past, series[:, length:]


def main():
    random.seed(torch.manual_seed(1234).initial_seed())
    model, criterion = Seq2Seq(), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", patience=2)
    held_src, held_trg = waves(50)
    for epoch in range(5):
        model.train()
        for _ in range(4):
            src, trg = waves(34)
            optimizer.zero_grad()
            loss = criterion(model(src, trg, teacher_forcing_ratio=1 - epoch / 4), trg)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            held = criterion(model(held_src, held_trg, 0), held_trg).item()
        plateau.step(held)
        print(f"epoch {epoch} train {loss.item():.4f} held {held:.4f}")


main()
