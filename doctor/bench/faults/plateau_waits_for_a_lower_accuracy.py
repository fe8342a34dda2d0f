"""ReduceLROnPlateau is given the validation accuracy and left in the mode for losses.

Threads: https://github.com/md-mohaiminul/ViS4mer/issues/4
    https://github.com/FunctionLab/selene/issues/115
Names: N9
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(37)
CLASSES, SIDE = 4, 10
shapes = torch.randn(CLASSES, 1, SIDE, SIDE)
labels = torch.randint(0, CLASSES, (900,))
images = shapes[labels] + 3 * torch.randn(900, 1, SIDE, SIDE)
training = DataLoader(TensorDataset(images[:700], labels[:700]), batch_size=175, shuffle=True)
validation = DataLoader(TensorDataset(images[700:], labels[700:]), batch_size=100)

model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, CLASSES)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
# broken
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=2)
# mended
# scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
#     optimizer, mode="max", factor=0.3, patience=2
# )
# end

for epoch in range(6):
    model.train()
    for pictures, wanted in training:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pictures), wanted)
        loss.backward()
        optimizer.step()

    model.eval()
    right = 0
    with torch.no_grad():
        for pictures, wanted in validation:
            right += (model(pictures).argmax(dim=1) == wanted).sum().item()
    accuracy = right / len(validation.dataset)
    scheduler.step(accuracy)
    print(epoch, f"{accuracy:.3f}", optimizer.param_groups[0]["lr"])
