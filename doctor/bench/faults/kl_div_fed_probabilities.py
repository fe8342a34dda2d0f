"""The student side of kl_div is a softmax without its logarithm, so the term is no divergence.

Threads: https://github.com/microsoft/ProDA/issues/43
Names: F3
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
NUM_CLASSES = 5


def segmenter(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, NUM_CLASSES, 1),
    )


palette = torch.randn(NUM_CLASSES, 3)


def scene(size):
    coarse = torch.randint(0, NUM_CLASSES, (size, 4, 6))
    label = coarse.repeat_interleave(4, 1).repeat_interleave(4, 2)
    image = palette[label].permute(0, 3, 1, 2)
    return image + 0.4 * torch.randn(image.shape), label


stage1 = nn.Conv2d(3, NUM_CLASSES, 1)
stage1.load_state_dict({"weight": 2 * palette[..., None, None], "bias": -palette.pow(2).sum(1)})
stage1.requires_grad_(False)

net = segmenter(12)
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
for iteration in range(18):
    image, label = scene(7)
    out = net(image)
    with torch.no_grad():
        teacher_prob = F.softmax(stage1(image), dim=1)
    # broken
    student = F.softmax(out, dim=1)
    # mended
    # student = F.log_softmax(out, dim=1)
    # end
    loss_kd = F.kl_div(student, teacher_prob, reduction="none").sum(1).mean()
    loss = F.cross_entropy(out, label) + loss_kd
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(iteration, f"{loss.item():.4f} {loss_kd.item():.4f}")
