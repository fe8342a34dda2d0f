"""F.dropout is called without training=self.training, so evaluation drops numbers as well.

Threads: https://github.com/delip/PyTorchNLPBook/issues/28
    https://github.com/rixwew/pytorch-fm/issues/21
Names: S24
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(25)
FIELDS, VALUES, WIDTH = 8, 20, 10


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(FIELDS * VALUES, WIDTH)
        self.fc1 = nn.Linear(FIELDS * WIDTH, 48)
        self.fc2 = nn.Linear(48, 1)
        self.register_buffer("offset", VALUES * torch.arange(FIELDS))

    def forward(self, fields):
        x = self.embedding(fields + self.offset).flatten(1)
        x = F.relu(self.fc1(x))
        # broken
        x = F.dropout(x, p=0.3)
        # mended
        # x = F.dropout(x, p=0.3, training=self.training)
        # end
        return self.fc2(x).squeeze(1)


weight = torch.randn(FIELDS, VALUES)


def impressions(count):
    fields = torch.randint(VALUES, (count, FIELDS))
    score = weight.gather(1, fields.t()).sum(0) / 2
    return fields, (score > 0).float()


model = ClickModel()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
held_out = impressions(200)
for epoch in range(4):
    model.train()
    for _ in range(5):
        fields, clicked = impressions(64)
        loss = F.binary_cross_entropy_with_logits(model(fields), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(held_out[0])
    accuracy = ((logits > 0).float() == held_out[1]).float().mean()
    print(f"epoch {epoch} loss {loss.item():.3f} accuracy {accuracy.item():.3f}")
