"""The teacher is a part of the model, and model.train() switches its dropout on as well.

Threads: https://github.com/yxuansu/TaCL/issues/11 https://github.com/tianweiy/DMD2/issues/21
Names: S12 F6
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(107)
VOCAB, LENGTH = 60, 12


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.project = nn.Linear(width, 20)

    def forward(self, ids):
        hidden, _ = self.rnn(self.drop(self.embed(ids)))
        return self.project(self.drop(hidden))


class SelfTeaching(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = Encoder()
        self.teacher = Encoder()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    # broken
    # mended
    # def train(self, mode=True):
    #     super().train(mode)
    #     self.teacher.eval()
    #     return self
    #
    # end
    def forward(self, ids, masked):
        with torch.no_grad():
            goal = F.normalize(self.teacher(ids), dim=-1)
        return F.mse_loss(F.normalize(self.student(masked), dim=-1), goal)


model = SelfTeaching()
optimizer = torch.optim.Adam(model.student.parameters(), lr=4e-3)
model.train()
for step in range(17):
    ids = torch.randint(1, VOCAB, (10, LENGTH)).cumsum(1) % VOCAB
    masked = ids.masked_fill(torch.rand(10, LENGTH) < 0.2, 0)
    loss = model(ids, masked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.4f}")
