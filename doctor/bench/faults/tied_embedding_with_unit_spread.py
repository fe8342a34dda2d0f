"""The tied embedding keeps a spread of 1, so the logits are huge and the first loss is far off.

Threads: https://github.com/pytorch/pytorch/issues/3121
    https://github.com/keras-team/keras/issues/6259
Names: F4
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH, BLOCK, BATCH = 57, 128, 20, 12


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        # broken
        # mended
        # nn.init.normal_(self.tok.weight, std=0.02)
        # end
        self.pos = nn.Parameter(torch.zeros(BLOCK, WIDTH))
        self.block = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, idx):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1))
        x = self.block(self.tok(idx) + self.pos[: idx.size(1)], src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def get_batch():
    start = torch.randint(0, VOCAB, (BATCH, 1))
    stride = torch.randint(1, 4, (BATCH, 1))
    text = (start + stride * torch.arange(BLOCK + 1)) % VOCAB
    return text[:, :-1], text[:, 1:]


def main():
    torch.manual_seed(1337)
    model = CharModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for it in range(16):
        inputs, targets = get_batch()
        logits = model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if it % 5 == 0:
            print(f"iter {it}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
