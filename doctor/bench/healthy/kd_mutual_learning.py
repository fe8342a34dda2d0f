"""Two networks teach each other, each with an optimizer of its own that steps in turn, and the
answers of one are constants in the other's divergence.

After: YingZhangDUT/Deep-Mutual-Learning
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(31)
features, classes, batch_size = 10, 4, 40
prototypes = 1.4 * torch.randn(classes * 2, features)


def network(width, activation):
    return nn.Sequential(nn.Linear(features, width), activation, nn.Linear(width, classes))


models = [network(24, nn.ReLU()), network(56, nn.Tanh())]
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=12, gamma=0.1) for o in optimizers]
loss_kl, loss_ce = nn.KLDivLoss(reduction="batchmean"), nn.CrossEntropyLoss()
epochs = 18
for epoch in range(epochs):
    kind = torch.randint(len(prototypes), (batch_size,))
    images, labels = prototypes[kind] + torch.randn(batch_size, features), kind // 2
    outputs = [model(images) for model in models]
    losses = []
    for i, output in enumerate(outputs):
        kl_loss = 0
        for j, other in enumerate(outputs):
            if i != j:
                kl_loss += loss_kl(F.log_softmax(output, dim=1), F.softmax(other.detach(), dim=1))
        losses.append(loss_ce(output, labels) + kl_loss / (len(models) - 1))
    for optimizer, loss, scheduler in zip(optimizers, losses, schedulers, strict=True):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    print(epoch, [round(loss.item(), 3) for loss in losses])
