"""The router returns probabilities, and the balance loss takes a softmax of them.

Threads: https://github.com/huggingface/transformers/issues/45120
    https://github.com/huggingface/transformers/pull/45131
Names: M2
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(5)
VOCAB, LENGTH, DIM, EXPERTS, CHOSEN = 60, 16, 32, 6, 2


def load_balancing_loss(router_logits, selected):
    probabilities = router_logits.softmax(dim=-1)
    tokens_per_expert = F.one_hot(selected, EXPERTS).float().mean(dim=(0, 1))
    return EXPERTS * (tokens_per_expert * probabilities.mean(dim=0)).sum()


class SparseBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * DIM) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * DIM, DIM) * (2 * DIM) ** -0.5)

    def forward(self, hidden):
        flat = hidden.reshape(-1, DIM)
        router_logits = self.gate(flat)
        # broken
        router_logits = router_logits.softmax(dim=-1)
        weights, selected = router_logits.topk(CHOSEN, dim=-1)
        # mended
        # weights, selected = router_logits.softmax(dim=-1).topk(CHOSEN, dim=-1)
        # end
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        for slot in range(CHOSEN):
            up, down = self.up[selected[:, slot]], self.down[selected[:, slot]]
            inner = F.gelu(torch.einsum("nd,ndh->nh", flat, up))
            out = out + weights[:, slot, None] * torch.einsum("nh,nhd->nd", inner, down)
        return out.view_as(hidden), load_balancing_loss(router_logits, selected)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.moe, self.head = SparseBlock(), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        y, aux_loss = self.moe(self.norm(x))
        return self.head(x + y), aux_loss


text = torch.randint(1, 5, (6000,)).cumsum(0) % VOCAB
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(16):
    starts = torch.randint(len(text) - LENGTH - 1, (12,))
    ids = torch.stack([text[s : s + LENGTH + 1] for s in starts])
    logits, aux_loss = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * aux_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, round(loss.item(), 3), round(aux_loss.item(), 3))
