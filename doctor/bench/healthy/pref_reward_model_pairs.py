"""A reward model reads pairs of texts with padding on the right and is trained on the difference of
their scores at the last real token alone, so its scores have no zero of their own.

After: huggingface/trl
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)
vocab, dim, pad, longest, pairs = 22, 32, 0, 11, 20


class RewardModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=pad)
        self.place = nn.Embedding(longest, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, ids):
        n = ids.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        hidden = self.body(self.embed(ids) + self.place(torch.arange(n)), mask, is_causal=True)
        last = (ids != pad).sum(1) - 1
        return self.score(hidden)[torch.arange(len(ids)), last].squeeze(-1)


def write(count, polite):
    ids = torch.randint(6, vocab, (count, longest))
    spots = torch.rand(count, longest) < (0.5 if polite else 0.15)
    ids[spots] = torch.randint(1, 6, (int(spots.sum()),))
    lengths = torch.randint(5, longest + 1, (count, 1))
    return ids.masked_fill(torch.arange(longest) >= lengths, pad)


model = RewardModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
max_steps = 20
for step in range(max_steps):
    rewards_chosen, rewards_rejected = model(write(pairs, True)), model(write(pairs, False))
    margin = rewards_chosen - rewards_rejected
    loss = -F.logsigmoid(margin).mean()
    loss = loss + 0.01 * torch.mean((rewards_chosen + rewards_rejected) ** 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), (margin > 0).float().mean().item())
