"""A small student learns from a large teacher that made the labels, at temperature 4, where the
divergence is scaled by 16 and weighs more than the cross-entropy.

After: HobbitLong/RepDistiller
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
features, n_cls, batch_size, kd_T, gamma, alpha = 16, 6, 48, 4.0, 0.1, 0.9


class DistillKL(nn.Module):
    def __init__(self, T):
        super().__init__()
        self.T = T

    def forward(self, y_s, y_t):
        p_s = F.log_softmax(y_s / self.T, dim=1)
        p_t = F.softmax(y_t / self.T, dim=1)
        return F.kl_div(p_s, p_t, reduction="batchmean") * self.T**2


model_t = nn.Sequential(nn.Linear(features, 128), nn.Dropout(0.2), nn.Tanh(), nn.Linear(128, n_cls))
model_t[3].weight.data.mul_(8)
model_s = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, n_cls))
criterion_cls, criterion_div = nn.CrossEntropyLoss(), DistillKL(kd_T)
optimizer = torch.optim.SGD(model_s.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
model_s.train()
model_t.eval()
num_batches = 20
for idx in range(num_batches):
    input = torch.randn(batch_size, features)
    with torch.no_grad():
        logit_t = model_t(input)
        target = logit_t.argmax(dim=1)
    logit_s = model_s(input)
    loss_cls = criterion_cls(logit_s, target)
    loss_div = criterion_div(logit_s, logit_t)
    loss = gamma * loss_cls + alpha * loss_div
    acc = (logit_s.argmax(1) == target).float().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(idx, loss.item(), loss_cls.item(), acc.item())
