"""Questions and answers share one encoder, cosines are multiplied by 20, each answer in the batch
is a negative for the other questions, and one hard negative for each row stands behind them.

After: UKPLab/sentence-transformers
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(15)
words, dim, batch_size, length, scale = 90, 40, 26, 7, 20.0
synonym = torch.randperm(words)


class SentenceTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.dense = nn.EmbeddingBag(words, dim, mode="mean"), nn.Linear(dim, dim)

    def forward(self, ids):
        x = self.bag(ids)
        return F.normalize(x + torch.tanh(self.dense(x)), p=2, dim=1)


def triplets():
    anchor = torch.randint(words, (batch_size, length))
    positive = torch.where(torch.rand(batch_size, length) < 0.6, synonym[anchor], anchor)
    negative = torch.where(torch.rand(batch_size, length) < 0.3, anchor, anchor.roll(3, 0))
    return anchor, positive[:, torch.randperm(length)], negative


def multiple_negatives_ranking_loss(model, anchor, positive, negative):
    embeddings_a = model(anchor)
    embeddings_b = torch.cat([model(positive), model(negative)])
    scores = embeddings_a @ embeddings_b.T * scale
    labels = torch.arange(len(scores))
    return F.cross_entropy(scores, labels)


model = SentenceTransformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=4)
steps = 20
for step in range(steps):
    loss = multiple_negatives_ranking_loss(model, *triplets())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    print(step, loss.item())
