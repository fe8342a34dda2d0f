"""The group of the tagger's head is built and never appended, so only the encoder is optimized.

Threads: https://github.com/zjunlp/HVPNeT/issues/5
Names: S3
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(4)
WORDS, TAGS, LENGTH = 50, 7, 12


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict(
            {"embed": nn.Embedding(WORDS, 28), "rnn": nn.GRU(28, 20, batch_first=True)}
        )
        self.mix = nn.Linear(20, 32)
        self.fc = nn.Linear(32, TAGS)

    def forward(self, words):
        states, _ = self.encoder["rnn"](self.encoder["embed"](words))
        return self.fc(torch.relu(self.mix(states)))


def build_optimizer(model):
    parameters = []
    group = {"lr": 2e-3, "weight_decay": 1e-2, "params": []}
    for name, param in model.named_parameters():
        if "encoder" in name:
            group["params"].append(param)
    parameters.append(group)
    group = {"lr": 5e-3, "weight_decay": 1e-2, "params": []}
    for name, param in model.named_parameters():
        if name.startswith(("mix", "fc")):
            group["params"].append(param)
    # broken
    # mended
    # parameters.append(group)
    # end
    return torch.optim.AdamW(parameters)


tag_of = torch.randint(TAGS, (WORDS,))
model = Tagger()
optimizer = build_optimizer(model)
for step in range(18):
    words = torch.randint(WORDS, (16, LENGTH))
    previous = torch.cat([torch.zeros(16, 1, dtype=torch.long), words[:, :-1]], dim=1)
    tags = torch.where(previous % 5 == 1, (tag_of[words] + 1) % TAGS, tag_of[words])
    loss = F.cross_entropy(model(words).transpose(1, 2), tags)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step:2d} {loss.item():.4f}")
