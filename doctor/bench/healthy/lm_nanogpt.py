"""A GPT with tied weights is trained on characters with micro-batches, whose losses are divided
on purpose, and is evaluated before its first step, then put back into train mode.
After: karpathy/nanoGPT"""

import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1337)
text = "to be or not to be, that is the question: whether it is nobler in the mind to suffer. " * 30
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
splits = {"train": data[:2200], "val": data[2200:]}
block_size, n_embd, accum = 24, 32, 3
max_iters = 18


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.TransformerEncoderLayer(n_embd, 4, 128, 0.1, F.gelu, 1e-5, True, True)
        self.ln_f, self.drop = nn.LayerNorm(n_embd), nn.Dropout(0.1)
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, idx, targets):
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1))))
        x = self.h(x, nn.Transformer.generate_square_subsequent_mask(idx.size(1)), is_causal=True)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, len(chars)), targets.view(-1), ignore_index=-1)


def get_batch(split):
    ix = torch.randint(len(splits[split]) - block_size, (10,))
    return (torch.stack([splits[split][i + o : i + o + block_size] for i in ix]) for o in (0, 1))


model = GPT()
groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1}]
groups += [{"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        cosine = 0.55 + 0.45 * math.cos(math.pi * iter_num / max_iters)
        group["lr"] = 3e-3 * min((iter_num + 1) / 5, cosine)
    if iter_num % 6 == 0:
        model.eval()
        with torch.no_grad():
            print("val", sum(model(*get_batch("val")).item() for _ in range(3)) / 3)
        model.train()
    for _ in range(accum):
        loss = model(*get_batch("train")) / accum
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(iter_num, loss.item() * accum)
