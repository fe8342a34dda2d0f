"""The caption model is asked for the word that it has just read, so the loss falls to nothing.

Threads: https://github.com/rmokady/CLIP_prefix_caption/issues/42
    https://github.com/huggingface/transformers/pull/404
Names: F33 F3
Missed: a prefix of places without ids stands before the words
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(14)
WORDS, PREFIX, DIM = 70, 3, 48


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        self.clip_project = nn.Linear(20, PREFIX * DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, 96, 0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(DIM, WORDS)

    def forward(self, clip_embed, tokens):
        prefix = self.clip_project(clip_embed).view(-1, PREFIX, DIM)
        x = torch.cat([prefix, self.words(tokens)], dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return self.lm_head(self.decoder(x, mask=mask, is_causal=True))


topics = torch.randn(WORDS, 20)


def photos(count, length=8):
    subject = torch.randint(0, WORDS, (count, 1))
    noise = torch.randint(0, 3, (count, length)).cumsum(1)
    return topics[subject[:, 0]], (subject + 5 * torch.arange(length) + noise) % WORDS


model = Captioner()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(20):
    clip_embed, tokens = photos(26)
    outputs = model(clip_embed, tokens)
    # broken
    logits = outputs[:, PREFIX:]
    # mended
    # logits = outputs[:, PREFIX - 1 : -1]
    # end
    loss = F.cross_entropy(logits.reshape(-1, WORDS), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(step, f"{loss.item():.4f}")
