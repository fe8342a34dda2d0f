"""Masked frames of sound are told from distractors of the same clip, the true one is always the
first of the candidates, so all labels are zero, and distractors are never the frame itself.

After: facebookresearch/fairseq (wav2vec)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(10)
pitches, dim, frames, clips, n_negatives, logit_temp = 16, 32, 24, 9, 7, 0.1


class Wav2Vec(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature_extractor = nn.Sequential(nn.Conv1d(1, dim, 8, stride=8), nn.GELU())
        self.layer_norm, self.mask_emb = nn.LayerNorm(dim), nn.Parameter(0.1 * torch.randn(dim))
        self.place = nn.Parameter(0.5 * torch.randn(frames, dim))
        self.encoder = nn.TransformerEncoderLayer(dim, 4, 64, 0.1, batch_first=True)
        self.project_q, self.final_proj = nn.Linear(dim, 16), nn.Linear(dim, 16)

    def sample_negatives(self, y):
        b, n, _ = y.shape
        chosen = torch.randint(0, n - 1, (b, n, n_negatives))
        chosen[chosen >= torch.arange(n).view(1, n, 1)] += 1
        return y[torch.arange(b).view(b, 1, 1), chosen]

    def forward(self, source):
        features = self.layer_norm(self.feature_extractor(source.unsqueeze(1)).transpose(1, 2))
        scores = torch.rand(features.shape[:2])
        masked = scores.argsort(dim=1)[:, :10]
        rows = torch.arange(len(source)).unsqueeze(1)
        y = self.project_q(features[rows, masked])
        x = features.clone()
        x[rows, masked] = self.mask_emb
        x = self.final_proj(self.encoder(x + self.place)[rows, masked])
        targets = torch.cat([y.unsqueeze(2), self.sample_negatives(y)], dim=2)
        return F.cosine_similarity(x.unsqueeze(2), targets, dim=-1) / logit_temp, features


model, waves = Wav2Vec(), torch.randn(pitches, 8)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-6, weight_decay=0.01)
max_update = 20
for update in range(max_update):
    tune = (torch.randint(pitches, (clips, 1)) + torch.arange(frames)) % pitches
    source = waves[tune].flatten(1) + 0.1 * torch.randn(clips, frames * 8)
    logits, features = model(source)
    logits = logits.flatten(0, 1)
    loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
    loss = loss + 0.01 * features.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(update, loss.item(), (logits.argmax(-1) == 0).float().mean().item())
