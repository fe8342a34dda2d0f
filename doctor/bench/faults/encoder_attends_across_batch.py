"""The encoder layer expects time first and is given the batch first, so rows attend to each other.

Threads: https://github.com/IBM/TabFormer/pull/14 https://github.com/Exorust/TorchLeet/issues/5
Names: S21
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(20)


class SensorTransformer(nn.Module):
    def __init__(self, sensors=6, width=24, length=21, states=4):
        super().__init__()
        self.project = nn.Linear(sensors, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, length, width))
        layer = nn.TransformerEncoderLayer(
            d_model=width,
            nhead=4,
            dim_feedforward=48,
            dropout=0.0,
            # broken
            # mended
            # batch_first=True,
            # end
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, states)

    def forward(self, x):
        hidden = self.encoder(self.project(x) + self.position)
        return self.head(hidden.mean(dim=1))


def machines(count, length=21):
    state = torch.randint(4, (count,))
    t = torch.arange(length).float()
    phase = 6.28 * torch.rand(count, 6, 1)
    speed = (0.3 + 0.4 * state).view(-1, 1, 1)
    signal = torch.sin(speed * t + phase) + 0.4 * levels[state].unsqueeze(-1)
    return signal.transpose(1, 2).contiguous(), state


levels = torch.randn(4, 6)
model = SensorTransformer()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(18):
    x, state = machines(32)
    logits = model(x)
    loss = F.cross_entropy(logits, state)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 2:
        accuracy = (logits.argmax(1) == state).float().mean().item()
        print(f"step {step + 1} loss {loss.item():.4f} accuracy {accuracy:.2f}")
