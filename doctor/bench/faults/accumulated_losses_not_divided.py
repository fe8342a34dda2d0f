"""The losses of four micro-batches are added up and not averaged, so gradients are four times big.

Threads: https://github.com/agokrani/distillKitPlus/issues/5
    https://github.com/hirofumi0810/neural_sp/issues/168
Names: N6
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, CONTEXT, MICRO_BATCH, ACCUMULATE = 48, 15, 6, 4


class TinyLM(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, width)
        self.wpe = nn.Embedding(CONTEXT, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 80, 0.0, batch_first=True)
        self.lm_head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        x = self.wte(ids) + self.wpe.weight[: ids.size(1)]
        return self.lm_head(self.layer(x, src_mask=mask, is_causal=True))


def micro_batch():
    start = torch.randint(0, VOCAB, (MICRO_BATCH, 1))
    step = torch.randint(1, 5, (MICRO_BATCH, 1))
    return (start + step * torch.arange(CONTEXT + 1)) % VOCAB


def main():
    torch.manual_seed(44)
    model = TinyLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer.zero_grad()
    for micro_step in range(60):
        ids = micro_batch()
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        # broken
        loss.backward()
        # mended
        # (loss / ACCUMULATE).backward()
        # end
        if (micro_step + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            if micro_step % 20 == 19:
                print(micro_step, f"{loss.item():.4f}")


if __name__ == "__main__":
    main()
