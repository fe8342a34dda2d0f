"""The low-rank features are rounded to 8 bits, so lora_A gets a gradient of zero and never learns.

Threads: https://github.com/lich99/ChatGLM-finetune-LoRA/issues/22
Names: B2 B7
"""

import torch
from torch import nn
from torch.nn import functional as F


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = alpha / r

    def forward(self, x):
        low_rank = F.linear(x, self.lora_A)
        step = low_rank.detach().abs().max() / 127
        # broken
        low_rank = torch.round(low_rank / step) * step
        # mended
        # low_rank = low_rank + (torch.round(low_rank / step) * step - low_rank).detach()
        # end
        return self.base(x) + self.scaling * F.linear(low_rank, self.lora_B)


class IntentModel(nn.Module):
    def __init__(self, words=45, width=28, intents=6):
        super().__init__()
        self.embed = nn.EmbeddingBag(words, width)
        self.dense = nn.Linear(width, 36)
        self.out = nn.Linear(36, intents)

    def forward(self, ids):
        return self.out(torch.tanh(self.dense(self.embed(ids))))


def requests(count):
    intent = torch.randint(6, (count,))
    ids = torch.randint(45, (count, 11))
    ids[:, ::2] = 7 * intent[:, None] + torch.randint(7, (count, 6))
    return ids, intent


torch.manual_seed(29)
model = IntentModel().requires_grad_(False)
model.dense = LoRALinear(model.dense)
model.out = LoRALinear(model.out)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step in range(18):
    ids, intent = requests(34)
    loss = F.cross_entropy(model(ids), intent)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, round(loss.item(), 4))
