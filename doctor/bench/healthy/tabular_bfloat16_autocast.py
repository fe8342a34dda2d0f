"""Mixed precision on the CPU: layers run in bfloat16 under autocast without a scaler, weights stay
in float32, and the loss is computed outside in float32.

After: pytorch/pytorch
"""

import torch
from torch import nn
from torch.nn import functional as F


class ResBlock(nn.Module):
    def __init__(self, d, d_hidden, dropout):
        super().__init__()
        self.norm = nn.BatchNorm1d(d)
        self.linear_first, self.linear_second = nn.Linear(d, d_hidden), nn.Linear(d_hidden, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        z = F.relu(self.linear_first(self.norm(x)))
        return x + self.linear_second(self.dropout(z))


class ResNet(nn.Module):
    def __init__(self, d_in, d, classes, n_blocks=2):
        super().__init__()
        self.first_layer = nn.Linear(d_in, d)
        self.blocks = nn.Sequential(*(ResBlock(d, 2 * d, 0.1) for _ in range(n_blocks)))
        self.head = nn.Sequential(nn.LayerNorm(d), nn.ReLU(), nn.Linear(d, classes))

    def forward(self, x):
        return self.head(self.blocks(self.first_layer(x)))


def make_groups(parameters, weight_decay):
    named = list(parameters)
    plain = [p for name, p in named if "norm" in name or name.endswith("bias")]
    rest = [p for name, p in named if not ("norm" in name or name.endswith("bias"))]
    return [{"params": rest, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def main():
    torch.manual_seed(0)
    model = ResNet(d_in=11, d=24, classes=4)
    optimizer = torch.optim.AdamW(make_groups(model.named_parameters(), 1e-2), lr=4e-3)
    centres = torch.randn(4, 11) * 1.2
    for step in range(18):
        y = torch.randint(0, 4, (46,))
        x = centres[y] + torch.randn(46, 11)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(step, f"{loss.item():.4f} norm {grad_norm.item():.3f}")


main()
