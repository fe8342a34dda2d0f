"""The attention of the language model has no causal mask, so it sees the token it has to predict.

Threads: https://github.com/alex-matton/causal-transformer-decoder/issues/1
    https://github.com/huggingface/transformers/issues/48745
Names: F11
"""

import torch
import torch.nn as nn
from torch.nn import functional as F

torch.manual_seed(1234)
corpus = "a rose is a rose, and a thorn is a thorn; what the rose knows the thorn forgets. " * 25
symbols = sorted(set(corpus))
data = torch.tensor([symbols.index(c) for c in corpus])
block_size, n_embd, n_head = 20, 32, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, n_head, -1)).permute(2, 0, 3, 1, 4)
        att = q @ k.transpose(-2, -1) * (n_embd // n_head) ** -0.5
        # broken
        # mended
        # hidden = torch.ones(att.shape[-2:], dtype=torch.bool).triu(1)
        # att = att.masked_fill(hidden, float("-inf"))
        # end
        y = att.softmax(dim=-1) @ v
        return self.proj(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(n_embd), Attention(), nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 96), nn.GELU(), nn.Linear(96, n_embd))
        self.lm_head = nn.Linear(n_embd, vocab)

    def forward(self, idx):
        x = self.tokens(idx) + self.places.weight
        x = x + self.attn(self.ln1(x))
        return self.lm_head(x + self.mlp(self.ln2(x)))


model = GPT(len(symbols))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for it in range(16):
    ix = torch.randint(len(data) - block_size - 1, (12,))
    rows = torch.stack([data[i : i + block_size + 1] for i in ix])
    logits = model(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"iter {it}: loss {loss.item():.4f}")
