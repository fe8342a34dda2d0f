"""A thin network learns the middle features of a wide one through a regressor that is thrown away
afterwards, while its head learns from answers and labels, after the wide one was fitted first.

After: AberHu/Knowledge-Distillation-Zoo
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(9)
classes, batch_size, size = 5, 32, 12


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, stride=2), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        rb = self.body(self.stem(x))
        return rb, self.head(rb.mean(dim=(2, 3)))


def pictures():
    y = torch.randint(classes, (batch_size,))
    row = torch.arange(size).view(1, size, 1)
    col = torch.arange(size).view(1, 1, size)
    angle = y.view(-1, 1, 1) * torch.pi / classes
    wave = torch.sin(1.3 * (row * angle.cos() + col * angle.sin()))
    return (wave + 0.4 * torch.randn(batch_size, size, size)).unsqueeze(1), y


def train(params, step_loss, lr, count):
    optimizer = torch.optim.Adam(params, lr=lr)
    for _ in range(count):
        loss = step_loss(*pictures())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def student_loss(x, y):
    with torch.no_grad():
        rb_t, out_t = tnet(x)
    rb_s, out_s = snet(x)
    hint = F.mse_loss(regressor(rb_s), rb_t)
    soft = F.kl_div((out_s / 4).log_softmax(1), (out_t / 4).softmax(1), reduction="batchmean")
    return 10 * hint + 16 * soft + F.cross_entropy(out_s, y)


tnet, snet, regressor = Net(24), Net(8), nn.Conv2d(8, 24, 1, bias=False)
num_steps = 15
print(train(tnet.parameters(), lambda x, y: F.cross_entropy(tnet(x)[1], y), 2e-2, 5))
tnet.eval().requires_grad_(False)
print(train([*snet.parameters(), *regressor.parameters()], student_loss, 5e-3, num_steps))
