"""A GPT learns to sort digits, its callback evaluates at iteration 0 and after, and the places of
the input are ignored as -1, so that less than half of each row is learnt.

After: karpathy/minGPT
"""

import torch
import torch.nn as nn
from torch.nn import functional as F

torch.manual_seed(3407)
length, digits, n_embd = 6, 3, 48
max_iters = 20


def sorting_batch(count):
    inp = torch.randint(digits, (count, length))
    cat = torch.cat((inp, inp.sort(dim=1)[0]), dim=1)
    y = cat[:, 1:].clone()
    y[:, : length - 1] = -1
    return cat[:, :-1], y


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(digits, n_embd), nn.Embedding(2 * length, n_embd)
        self.c_attn = nn.ModuleList(nn.Linear(n_embd, 3 * n_embd) for _ in range(2))
        self.c_proj = nn.ModuleList(nn.Linear(n_embd, n_embd) for _ in range(2))
        self.ln = nn.ModuleList(nn.LayerNorm(n_embd) for _ in range(3))
        self.lm_head, self.drop = nn.Linear(n_embd, digits, bias=False), nn.Dropout(0.1)
        self.register_buffer("bias", torch.ones(2 * length, 2 * length).tril())

    def forward(self, idx, targets):
        (B, T), x = idx.size(), self.wte(idx) + self.wpe.weight[: idx.size(1)]
        for i in range(2):
            q, k, v = self.c_attn[i](self.ln[i](x)).view(B, T, 3, 4, -1).permute(2, 0, 3, 1, 4)
            att = q @ k.mT / k.size(-1) ** 0.5
            att = att.masked_fill(self.bias[:T, :T] == 0, float("-inf")).softmax(dim=-1)
            x = x + self.c_proj[i]((self.drop(att) @ v).transpose(1, 2).reshape(B, T, n_embd))
        logits = self.lm_head(self.ln[2](x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
for iter_num in range(max_iters):
    if iter_num % 10 == 0:
        x, y = sorting_batch(40)
        model.eval()
        with torch.no_grad():
            hits = (model(x, y)[0].argmax(-1) == y)[:, length - 1 :]
        print("right", hits.float().mean().item())
        model.train()
    loss = model(*sorting_batch(32))[1]
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(iter_num, loss.item())
