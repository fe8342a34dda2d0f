"""The teacher's features come from inference mode and meet a trained projection: backward refuses.

Threads: https://github.com/lucidrains/denoising-diffusion-pytorch/issues/286
    https://github.com/facebookresearch/dinov2/issues/472
Names: F9
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(137)
CLASSES = 5
textures = torch.randn(CLASSES, 3, 9, 9)

teacher = nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
teacher.eval().requires_grad_(False)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 12, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.classify = nn.Linear(12 * 16, CLASSES)
        self.mine = nn.Linear(12 * 16, 20)
        self.theirs = nn.Linear(24 * 4, 20)

    def forward(self, images, teacher_features):
        hidden = self.body(images)
        gap = self.mine(hidden) - self.theirs(teacher_features)
        return self.classify(hidden), gap.square().mean()


# broken
@torch.inference_mode()
# mended
# @torch.no_grad()
# end
def teacher_features(images):
    return teacher(images)


student = Student()
optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)

for step in range(16):
    label = torch.randint(CLASSES, (22,))
    images = textures[label] + 0.7 * torch.randn(22, 3, 9, 9)
    scores, hint_loss = student(images, teacher_features(images))
    loss = F.cross_entropy(scores, label) + 0.5 * hint_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
