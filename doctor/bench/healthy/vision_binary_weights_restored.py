"""Binary weights: the forward and backward passes see signs only, and the real weights come back
into the same parameters before the optimizer steps and are clamped after.

After: itayhubara/BinaryNet.pytorch
"""

import torch
import torch.nn as nn


class BinarizeLinear(nn.Linear):
    def forward(self, input):
        if not hasattr(self.weight, "org"):
            self.weight.org = self.weight.data.clone()
        self.weight.data = self.weight.org.sign() * self.weight.org.abs().mean()
        return nn.functional.linear(input, self.weight, self.bias)


torch.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(), nn.Linear(49, 40), nn.BatchNorm1d(40), nn.Hardtanh(),
    BinarizeLinear(40, 32), nn.BatchNorm1d(32), nn.Hardtanh(),
    BinarizeLinear(32, 24), nn.BatchNorm1d(24), nn.Hardtanh(), nn.Linear(24, 6),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
criterion = nn.CrossEntropyLoss()
glyphs = torch.randn(6, 7, 7)


def train(epoch, batches):
    model.train()
    for batch_idx in range(batches):
        target = torch.randint(0, 6, (30,))
        data = glyphs[target] + 0.8 * torch.randn(30, 7, 7)
        output = model(data)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if hasattr(p, "org"):
                p.data.copy_(p.org)
        optimizer.step()
        for p in model.parameters():
            if hasattr(p, "org"):
                p.org.copy_(p.data.clamp_(-1, 1))
        if batch_idx % 3 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{batches}] Loss: {loss.item():.4f}")


def test():
    model.eval()
    target = torch.arange(60) % 6
    with torch.no_grad():
        output = model(glyphs[target] + 0.8 * torch.randn(60, 7, 7))
    print(f"Test accuracy: {(output.argmax(1) == target).float().mean().item():.2f}")


for epoch in range(2):
    train(epoch, 9)
    test()
