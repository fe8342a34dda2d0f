"""Models written by hand for the judge's programs, each in the style of a different repository."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        rows, length, width = x.shape
        q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        keep = causal if mask is None else causal & mask[:, None, None, :].bool()
        scores = scores.masked_fill(~keep, float("-inf"))
        x = x + self.drop(self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class NanoGPT(nn.Module):
    """forward(idx, targets) -> (logits, loss); the targets come shifted from the data loader, as in nanoGPT."""

    def __init__(self, vocab=256, width=48, layers=2, heads=4, length=64, dropout=0.0, tie=True):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if tie:
            self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets=None, mask=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x, mask)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


class LoRALinear(nn.Module):
    """y = W x + (alpha / r) B A x around a frozen layer."""

    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / r
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.lora_A.T @ self.lora_B.T)


def sequence_logp(model, ids, prompt):
    """Sum of the log-probabilities of what follows the prompt, as in DPO."""
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1]
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return logp[:, prompt - 1 :].sum(-1)
