"""The average of the model takes its parameters only, and its running statistics stay at 0 and 1.

Threads: https://github.com/facebookresearch/moco/issues/70
    https://github.com/CuriousAI/mean-teacher/issues/9
Names: N29
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(97)
EVENTS = 5
spectra = torch.rand(EVENTS, 16) * 2 + 1

student = nn.Sequential(
    nn.Conv1d(16, 24, 3, padding=1),
    nn.BatchNorm1d(24),
    nn.ReLU(),
    nn.AdaptiveMaxPool1d(1),
    nn.Flatten(),
    nn.Linear(24, EVENTS),
)
teacher = copy.deepcopy(student).eval().requires_grad_(False)
optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)


def sound_clips(size, frames=20):
    event = torch.randint(EVENTS, (size,))
    onset = torch.rand(size, 1, frames) < 0.4
    return spectra[event][:, :, None] * onset + 0.3 * torch.rand(size, 16, frames), event


@torch.no_grad()
def update_teacher(alpha):
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.mul_(alpha).add_(fast, alpha=1 - alpha)
    # broken
    # mended
    # for slow, fast in zip(teacher.buffers(), student.buffers(), strict=True):
    #     slow.copy_(fast)
    # end


for step in range(18):
    clips, event = sound_clips(31)
    noisy = clips + 0.1 * torch.randn_like(clips)
    scores = student(noisy)
    consistency = F.mse_loss(scores.softmax(-1), teacher(clips).softmax(-1))
    loss = F.cross_entropy(scores, event) + 0.5 * consistency
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update_teacher(min(0.95, 1 - 1 / (step + 2)))
    print(f"step {step} loss {loss.item():.4f}")
