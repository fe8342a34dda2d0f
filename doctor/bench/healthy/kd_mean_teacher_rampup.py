"""A mean teacher judges rows of which most have no label (-1), the weight of consistency grows from
nothing, and the teacher stays in train mode, as its authors meant it, to keep its own norms.

After: CuriousAI/mean-teacher
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

NO_LABEL = -1
torch.manual_seed(2)
batch_size, labeled, classes = 60, 16, 3


def create_model(ema=False):
    model = nn.Sequential(
        nn.Linear(2, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, classes)
    )
    if ema:
        for param in model.parameters():
            param.detach_()
    return model


def update_ema_variables(model, ema_model, alpha, global_step):
    alpha = min(1 - 1 / (global_step + 1), alpha)
    for ema_param, param in zip(ema_model.parameters(), model.parameters(), strict=True):
        ema_param.data.mul_(alpha).add_(param.data, alpha=1 - alpha)


def spirals(count):
    y = torch.randint(classes, (count,))
    r = torch.rand(count) * 2 + 0.2
    angle = y * 2 * torch.pi / classes + r
    return torch.stack([r * angle.cos(), r * angle.sin()], dim=1), y


model, ema_model = create_model(), create_model(ema=True)
class_criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=NO_LABEL)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
model.train()
ema_model.train()
steps = 20
for global_step in range(steps):
    x, target = spirals(batch_size)
    target[labeled:] = NO_LABEL
    model_out = model(x + 0.05 * torch.randn_like(x))
    ema_logit = ema_model(x + 0.05 * torch.randn_like(x)).detach()
    class_loss = class_criterion(model_out, target) / labeled
    weight = 5.0 * min(1.0, global_step / 10) ** 2
    consistency = F.mse_loss(model_out.softmax(1), ema_logit.softmax(1), reduction="sum") / classes
    loss = class_loss + weight * consistency / batch_size
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update_ema_variables(model, ema_model, 0.95, global_step + 1)
    print(global_step, class_loss.item(), consistency.item())
