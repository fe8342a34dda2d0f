"""The decoder of the translator gets no target mask, so it reads the words it is asked for.

Threads: https://github.com/alex-matton/causal-transformer-decoder/issues/1
Names: F11
"""

import torch
import torch.nn as nn

SOURCE, TARGET, WIDTH, BOS = 26, 28, 32, 0


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source = nn.Embedding(SOURCE, WIDTH)
        self.target = nn.Embedding(TARGET, WIDTH)
        self.places = nn.Embedding(16, WIDTH)
        self.transformer = nn.Transformer(
            d_model=WIDTH,
            nhead=4,
            num_encoder_layers=1,
            num_decoder_layers=2,
            dim_feedforward=64,
            dropout=0.0,
            batch_first=True,
        )
        self.generator = nn.Linear(WIDTH, TARGET)

    def forward(self, src, tgt):
        src = self.source(src) + self.places.weight[: src.size(1)]
        tgt = self.target(tgt) + self.places.weight[: tgt.size(1)]
        # broken
        out = self.transformer(src, tgt)
        # mended
        # mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1))
        # out = self.transformer(src, tgt, tgt_mask=mask, tgt_is_causal=True)
        # end
        return self.generator(out)


def sentence_pairs(count, length=9):
    start = torch.randint(SOURCE, (count, 1))
    src = (start + torch.randint(1, 5, (count, 1)) * torch.arange(length)) % SOURCE
    tgt = torch.cat([torch.full((count, 1), BOS), src.flip(1) + 2], dim=1)
    return src, tgt


torch.manual_seed(77)
model = Translator()
criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
for step in range(15):
    src, tgt = sentence_pairs(20)
    logits = model(src, tgt[:, :-1])
    loss = criterion(logits.reshape(-1, TARGET), tgt[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, "loss", round(loss.item(), 4))
