"""The names in the checkpoint begin with module., and strict=False loads none of its weights.

Threads: https://github.com/pytorch/examples/issues/1029
    https://github.com/torchgeo/torchgeo/issues/4036
Names: S51
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(50)
true_map = torch.randn(16, 3)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 40)
        self.fc2 = nn.Linear(40, 40)
        self.fc3 = nn.Linear(40, 3)

    def forward(self, x):
        x = F.gelu(self.fc1(x))
        x = x + F.gelu(self.fc2(x))
        return self.fc3(x)


def saved_state():
    trained = Regressor()
    with torch.no_grad():
        for param in trained.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return nn.DataParallel(trained).state_dict()


def measurements(count):
    x = torch.randn(count, 16)
    return x, torch.sin(x @ true_map / 4)


def main():
    model = Regressor()
    state = saved_state()
    # broken
    model.load_state_dict(state, strict=False)
    # mended
    # state = {name.removeprefix("module."): value for name, value in state.items()}
    # model.load_state_dict(state)
    # end
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20):
        x, y = measurements(48)
        loss = F.smooth_l1_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, f"{loss.item():.4f}")


if __name__ == "__main__":
    main()
