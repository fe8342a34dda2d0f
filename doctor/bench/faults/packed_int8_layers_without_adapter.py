"""The linear layers hold packed 8-bit weights and no adapter; only norms and embedding learn.

Threads: https://github.com/huggingface/peft/issues/1342
    https://github.com/AGI-Edgerunners/LLM-Adapters/issues/55
Names: S8
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH, LENGTH = 31, 32, 15


class Linear8bitLt(nn.Module):
    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        packed = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scale", scale)
        # broken
        # mended
        # self.lora_A = nn.Parameter(torch.randn(4, linear.in_features) / 8)
        # self.lora_B = nn.Parameter(torch.zeros(linear.out_features, 4))
        # end

    def forward(self, x):
        y = F.linear(x, self.weight.float() * self.scale)
        # broken
        # mended
        # y = y + F.linear(F.linear(x, self.lora_A), self.lora_B)
        # end
        return y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Linear8bitLt(nn.Linear(2 * WIDTH, 3 * WIDTH, bias=False))
        self.down = Linear8bitLt(nn.Linear(3 * WIDTH, WIDTH, bias=False))

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.down(F.gelu(self.up(torch.cat([self.norm(x), before], dim=-1))))


torch.manual_seed(6)
blocks = [Block() for _ in range(2)]
model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, Linear8bitLt(nn.Linear(WIDTH, VOCAB)))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
for step in range(16):
    ids = (torch.randint(VOCAB, (20, 1)) + 4 * torch.arange(LENGTH + 1)) % VOCAB
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, round(loss.item(), 3))
