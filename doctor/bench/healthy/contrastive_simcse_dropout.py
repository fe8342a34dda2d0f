"""The same sentence goes through an encoder twice and only its dropout differs, so both views begin
very near each other, the rest of the batch are negatives, and labels are row numbers.

After: princeton-nlp/SimCSE
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(13)
vocab, dim, batch_size, longest, temp, topics = 60, 32, 22, 9, 0.05, 6


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, dim, padding_idx=0), nn.Embedding(longest, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, 0.15, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.dense = nn.Linear(dim, dim)

    def forward(self, ids):
        pad = ids == 0
        hidden = self.embed(ids) + self.place(torch.arange(longest))
        hidden = self.layers(hidden, src_key_padding_mask=pad)
        keep = (~pad).unsqueeze(-1).float()
        pooled = (hidden * keep).sum(1) / keep.sum(1)
        return torch.tanh(self.dense(pooled)) if self.training else pooled


def sentences():
    topic = torch.randint(topics, (batch_size, 1))
    ids = 1 + (topic * 9 + torch.randint(14, (batch_size, longest))) % (vocab - 1)
    lengths = torch.randint(4, longest + 1, (batch_size, 1))
    return ids.masked_fill(torch.arange(longest) >= lengths, 0)


model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
max_steps = 20
for step in range(max_steps):
    model.train()
    ids = sentences()
    z1, z2 = model(torch.cat([ids, ids])).chunk(2)
    cos_sim = F.cosine_similarity(z1.unsqueeze(1), z2.unsqueeze(0), dim=-1) / temp
    loss = F.cross_entropy(cos_sim, torch.arange(batch_size))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
