"""The head is replaced after the optimizer was built, and the old head's tensors are still in it.

Threads: https://github.com/huggingface/transformers/pull/3519
    https://github.com/deepspeedai/DeepSpeed/pull/8377
Names: S4 S3
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(19)


class TabularNet(nn.Module):
    def __init__(self, columns, outputs):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(columns, 40), nn.ReLU(), nn.Linear(40, 28), nn.ReLU())
        self.head = nn.Linear(28, outputs)

    def forward(self, x):
        return self.head(self.trunk(x))


def customers(count, rule, classes):
    x = torch.randn(count, 15)
    return x, (x @ rule).argmax(dim=1) % classes


model = TabularNet(15, outputs=9)
# broken
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
# the new task has fewer classes
model.head = nn.Linear(28, 4)
optimizer.add_param_group({"params": model.head.parameters(), "lr": 6e-3})
# mended
# model.head = nn.Linear(28, 4)
# optimizer = torch.optim.AdamW(
#     [
#         {"params": model.trunk.parameters(), "lr": 3e-3},
#         {"params": model.head.parameters(), "lr": 6e-3},
#     ]
# )
# end

rule = torch.randn(15, 4)
for step in range(18):
    x, segment = customers(44, rule, 4)
    logits = model(x)
    loss = F.cross_entropy(logits, segment)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    hits = (logits.argmax(1) == segment).float().mean()
    print(f"step {step} loss {loss.item():.3f} accuracy {hits.item():.2f}")
