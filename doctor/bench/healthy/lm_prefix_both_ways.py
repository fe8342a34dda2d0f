"""A prefix language model reads its prompt in both directions and only its answer from left to
right, so places of the prompt see later ones, and they have no loss.

After: google-research/text-to-text-transfer-transformer
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(12)
vocab, dim, prefix_len, answer_len, batch_size = 14, 32, 7, 5, 24


class PrefixLM(nn.Module):
    def __init__(self):
        super().__init__()
        total = prefix_len + answer_len
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(total, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.lm_head = nn.Linear(dim, vocab)
        visible = torch.ones(total, total).tril().bool()
        visible[:prefix_len, :prefix_len] = True
        self.register_buffer("hidden_places", ~visible)

    def forward(self, ids):
        n = ids.size(1)
        x = self.wte(ids) + self.wpe(torch.arange(n))
        return self.lm_head(self.body(x, mask=self.hidden_places[:n, :n]))


def batch():
    prompt = torch.randint(1, vocab, (batch_size, prefix_len - 1))
    marker = torch.zeros(batch_size, 1, dtype=torch.long)
    answer = prompt.sort(dim=1, descending=True)[0][:, :answer_len]
    return torch.cat([prompt, marker], dim=1), answer


model = PrefixLM()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
train_steps = 20
for step in range(train_steps):
    prompt, answer = batch()
    logits = model(torch.cat([prompt, answer[:, :-1]], dim=1))[:, prefix_len - 1 :]
    loss = F.cross_entropy(logits.transpose(1, 2), answer)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        print(step, loss.item(), (logits.argmax(-1) == answer).float().mean().item())
