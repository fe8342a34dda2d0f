"""The distillation term compares the teacher with itself, so the student learns from labels alone.

Threads: https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/66
Names: F2
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)
CLASSES, SIDE, TEMPERATURE = 6, 12, 5.0


def convnet(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(2 * width * 9, CLASSES),
    )


prototypes = torch.randn(CLASSES, 3, SIDE, SIDE)


def batch(size):
    label = torch.randint(0, CLASSES, (size,))
    return prototypes[label] + 1.2 * torch.randn(size, 3, SIDE, SIDE), label


large = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, CLASSES))
flat = prototypes.flatten(1)
large.load_state_dict({"1.weight": flat / 40, "1.bias": -flat.pow(2).sum(1) / 80})
large.requires_grad_(False).eval()

small = convnet(6)
optimizer = torch.optim.Adam(small.parameters(), lr=2e-3)
for step in range(20):
    images, label = batch(32)
    output = small(images)
    with torch.no_grad():
        large_logits = large(images)
    soft_targets = F.softmax(large_logits / TEMPERATURE, dim=-1)
    # broken
    soft_prob = F.log_softmax(large_logits / TEMPERATURE, dim=-1)
    # mended
    # soft_prob = F.log_softmax(output / TEMPERATURE, dim=-1)
    # end
    soft_loss = F.kl_div(soft_prob, soft_targets, reduction="batchmean")
    loss = TEMPERATURE**2 * soft_loss + 0.5 * F.cross_entropy(output, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(step, f"{loss.item():.4f}")
