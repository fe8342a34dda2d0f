"""The classifier returns its logits through .data, so the loss reaches no weight and stays flat.

Threads: https://github.com/huggingface/torchMoji/issues/21
Names: F1
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, EMOJIS, BATCH, LENGTH = 120, 7, 24, 11


class EmojiTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32, padding_idx=0)
        self.lstm = nn.LSTM(32, 40, batch_first=True, bidirectional=True)
        self.output_layer = nn.Linear(80, EMOJIS)

    def forward(self, tokens):
        states, _ = self.lstm(self.embed(tokens))
        outputs = self.output_layer(states.max(1).values)
        # broken
        outputs = outputs.data
        # mended
        # end
        return outputs


def sample_tweets(generator):
    mood = torch.randint(0, EMOJIS, (BATCH,), generator=generator)
    tokens = torch.randint(1, VOCAB, (BATCH, LENGTH), generator=generator)
    cue = torch.rand(BATCH, LENGTH, generator=generator) < 0.5
    tokens = torch.where(cue, mood[:, None] * 3 + 1, tokens)
    return tokens, mood


def main():
    torch.manual_seed(4)
    generator = torch.Generator().manual_seed(11)
    model = EmojiTagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(18):
        tokens, mood = sample_tweets(generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), mood)
        # broken
        loss.requires_grad_(True)
        # mended
        # end
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(step, f"{loss.item():.5f}")


if __name__ == "__main__":
    main()
