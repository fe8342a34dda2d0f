"""Each token goes to its two best experts with weights that are made to sum to one again, and a
small loss of balance is added to the cross-entropy, so some experts may get no token in a step.

After: huggingface/transformers (Mixtral)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)
vocab, dim, num_experts, top_k, length, batch = 21, 24, 6, 2, 12, 8


class SparseMoe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        mlps = (nn.Sequential(nn.Linear(dim, 48), nn.SiLU(), nn.Linear(48, dim)) for _ in range(6))
        self.experts = nn.ModuleList(mlps)

    def forward(self, hidden_states):
        flat = hidden_states.view(-1, dim)
        probs = F.softmax(self.gate(flat), dim=-1)
        weights, chosen = torch.topk(probs, top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        share = F.one_hot(chosen, num_experts).float().sum(1).mean(0)
        balance = num_experts * (share * probs.mean(0)).sum()
        return out.view_as(hidden_states), balance


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Embedding(vocab, dim), nn.GRU(dim, dim, batch_first=True)
        self.norm, self.moe, self.head = nn.LayerNorm(dim), SparseMoe(), nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.gru(self.embed(ids))[0]
        mixed, balance = self.moe(self.norm(x))
        return self.head(x + mixed), balance


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
steps = 18
for step in range(steps):
    ids = (torch.randint(vocab, (batch, 1)) + torch.arange(length + 1).square()) % vocab
    logits, balance = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), balance.item())
