"""The teacher keeps its dropout while it teaches, so its soft targets are noisy.

Threads: https://github.com/vrvlive/knowlege-distillation/issues/2
    https://github.com/Sharpiless/yolov5-distillation-5.0/issues/5
Names: F6 S12
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(113)
CLASSES, TEMPERATURE = 6, 3.0
shapes = torch.randn(CLASSES, 3, 8, 8)


def make_batch(size):
    label = torch.randint(CLASSES, (size,))
    return shapes[label] + torch.randn(size, 3, 8, 8), label


def big_network():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.Flatten(),
        nn.Linear(32 * 64, 64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, CLASSES),
    )


teacher = big_network()
with torch.no_grad():
    teacher[4].weight[:CLASSES] = 0.05 * torch.randn(CLASSES, 32 * 64)
student = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, CLASSES))
optimizer = torch.optim.SGD(student.parameters(), lr=0.02, momentum=0.9)

# broken
# mended
# teacher.eval()
# end
student.train()
for step in range(18):
    images, label = make_batch(27)
    with torch.no_grad():
        soft = (teacher(images) / TEMPERATURE).softmax(-1)
    scores = student(images)
    hard_loss = F.cross_entropy(scores, label)
    soft_loss = F.kl_div((scores / TEMPERATURE).log_softmax(-1), soft, reduction="batchmean")
    loss = 0.4 * hard_loss + 0.6 * TEMPERATURE**2 * soft_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} hard {hard_loss.item():.4f} soft {soft_loss.item():.4f}")
