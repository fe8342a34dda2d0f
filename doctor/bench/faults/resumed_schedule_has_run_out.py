"""A resumed schedule counts on from the old step towards the new run's end, and the rate is zero.

Threads: https://github.com/facebookresearch/DPR/issues/99
    https://github.com/determined-ai/determined/pull/711
Names: N11 N9
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(29)
VOCAB, LENGTH, WIDTH = 80, 11, 32
RUN_STEPS = 18
checkpoint = {"step": 40, "lr": 2e-3}


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.question = nn.Linear(WIDTH, 24)
        self.passage = nn.Linear(WIDTH, 24)

    def forward(self, question, passage):
        q = self.question(self.words(question).mean(1))
        p = self.passage(self.words(passage).mean(1))
        return q @ p.t()


def make_pairs(size):
    topic = torch.randint(0, VOCAB - 8, (size, 1))
    question = topic + torch.randint(0, 8, (size, 5))
    passage = topic + torch.randint(0, 8, (size, LENGTH))
    return question, passage


model = TwoTower()
groups = [{"params": model.parameters(), "initial_lr": checkpoint["lr"]}]
optimizer = torch.optim.AdamW(groups, lr=checkpoint["lr"])
# broken
total_steps = RUN_STEPS
# mended
# total_steps = checkpoint["step"] + RUN_STEPS
# end
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    lambda step: max(0.0, (total_steps - step) / total_steps),
    last_epoch=checkpoint["step"],
)

for _ in range(RUN_STEPS):
    question, passage = make_pairs(17)
    scores = model(question, passage)
    loss = F.cross_entropy(scores, torch.arange(len(question)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}")
