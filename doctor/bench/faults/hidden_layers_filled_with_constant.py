"""All layers begin with one constant, so the units of a hidden layer are equal and stay equal.

Threads: https://github.com/soumith/net2net.torch/issues/3
Names: S20
"""

import torch
from torch import nn


def init_weights(module):
    if isinstance(module, nn.Linear):
        # broken
        nn.init.constant_(module.weight, 0.05)
        # mended
        # nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
        # end
        nn.init.zeros_(module.bias)


class HouseModel(nn.Module):
    def __init__(self, inputs=11):
        super().__init__()
        self.fc1 = nn.Linear(inputs, 64)
        self.fc2 = nn.Linear(64, 32)
        self.fc3 = nn.Linear(32, 1)
        self.apply(init_weights)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        return self.fc3(x).squeeze(1)


def houses(count, generator):
    x = torch.randn(count, 11, generator=generator)
    price = x[:, 0] * x[:, 1] + torch.relu(x[:, 2]) - x[:, 3].abs() + 0.5 * x[:, 4]
    return x, price + 0.1 * torch.randn(count, generator=generator)


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(15)
    model = HouseModel()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(20):
        x, price = houses(64, generator)
        loss = criterion(model(x), price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1}, mse {loss.item():.3f}")


if __name__ == "__main__":
    main()
