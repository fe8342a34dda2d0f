"""The key padding mask is True at the words, where torch hides, so only padding is attended to.

Threads: https://github.com/InseeFrLab/torchTextClassifiers/pull/92
Names: F34
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(71)
WORDS, WIDTH, CLASSES, PAD = 45, 32, 5, 0


class NewsClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.places = nn.Parameter(0.02 * torch.randn(24, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        x = self.embed(ids) + self.places[: ids.size(1)]
        # broken
        x = self.encoder(x, src_key_padding_mask=ids != PAD)
        # mended
        # x = self.encoder(x, src_key_padding_mask=ids == PAD)
        # end
        return self.head(x[:, 0])


def headlines(count):
    labels = torch.randint(CLASSES, (count,))
    lengths = torch.randint(5, 20, (count,))
    ids = torch.full((count, 21), PAD)
    for row, (label, length) in enumerate(zip(labels.tolist(), lengths.tolist(), strict=True)):
        topic = torch.randint(5 + 8 * label, 13 + 8 * label, (length,))
        other = torch.randint(5, WORDS, (length,))
        ids[row, 1 : length + 1] = torch.where(torch.rand(length) < 0.6, topic, other)
        ids[row, 0] = 1
    return ids, labels


model = NewsClassifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(16):
    ids, labels = headlines(30)
    logits = model(ids)
    loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        hits = (logits.argmax(1) == labels).sum().item()
        print(f"step {step} loss {loss.item():.3f} hits {hits}")
