"""Student and teacher begin alike, the teacher follows slowly by a growing momentum, its output is
centred and sharpened, and the gradient of the last layer is dropped in the first steps.

After: facebookresearch/dino
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
inputs, out_dim, batch_size = 20, 24, 32


class DINOHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(inputs, 48), nn.GELU(), nn.Linear(48, 16))
        self.last_layer = nn.utils.weight_norm(nn.Linear(16, out_dim, bias=False))
        self.last_layer.weight_g.data.fill_(1)
        self.last_layer.weight_g.requires_grad = False

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1, p=2))


def dino_loss(student_output, teacher_output, center):
    student_out = (student_output / 0.1).chunk(4)
    teacher_out = F.softmax((teacher_output - center) / 0.04, dim=-1).detach().chunk(2)
    terms = []
    for iq, q in enumerate(teacher_out):
        others = [F.log_softmax(out, dim=-1) for v, out in enumerate(student_out) if v != iq]
        terms += [torch.sum(-q * out, dim=-1).mean() for out in others]
    return sum(terms) / len(terms)


student, teacher = DINOHead(), DINOHead().requires_grad_(False)
teacher.load_state_dict(student.state_dict())
center, themes = torch.zeros(1, out_dim), 2 * torch.randn(7, inputs)
params = filter(lambda p: p.requires_grad, student.parameters())
optimizer = torch.optim.AdamW(params, lr=2e-3, weight_decay=0.04)
niters = 20
for it in range(niters):
    images = themes[torch.randint(len(themes), (batch_size,))]
    crops = [images + s * torch.randn_like(images) for s in (0.5, 0.5, 1.0, 1.0)]
    teacher_output = teacher(torch.cat(crops[:2]))
    loss = dino_loss(student(torch.cat(crops)), teacher_output, center)
    optimizer.zero_grad()
    loss.backward()
    if it < 3:
        student.last_layer.weight_v.grad = None
    optimizer.step()
    with torch.no_grad():
        m = 1 - 0.04 * (math.cos(math.pi * it / niters) + 1) / 2
        for param_q, param_k in zip(student.parameters(), teacher.parameters(), strict=True):
            param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
        center = center * 0.9 + teacher_output.mean(dim=0, keepdim=True) * 0.1
    print(it, loss.item())
