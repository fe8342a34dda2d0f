"""Weights in bfloat16 under torch's Muon without Nesterov: each step normalises the momentum in
place.

Threads: https://github.com/pytorch/pytorch/pull/194664
    https://github.com/pytorch/pytorch/pull/190597
Names: M1
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
WIDTH, BATCH = 48, 64
model = nn.Sequential(nn.Linear(WIDTH, 96, bias=False), nn.GELU(), nn.Linear(96, WIDTH, bias=False))
model = model.to(torch.bfloat16)
# broken
optimizer = torch.optim.Muon(
    model.parameters(), lr=0.1, momentum=0.95, nesterov=False, weight_decay=0.0
)
# mended
# optimizer = torch.optim.Muon(
#     model.parameters(), lr=0.1, momentum=0.95, nesterov=True, weight_decay=0.0
# )
# end
mix = torch.randn(WIDTH, WIDTH) / WIDTH**0.5

for step in range(20):
    x = torch.randn(BATCH, WIDTH)
    y = torch.tanh(x @ mix)
    prediction = model(x.to(torch.bfloat16)).float()
    loss = F.mse_loss(prediction, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(step, round(loss.item(), 4))
