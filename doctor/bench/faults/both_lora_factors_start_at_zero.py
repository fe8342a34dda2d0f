"""Both factors of each low-rank adapter start at zero, so each one's gradient is exactly zero.

Threads: https://github.com/Guitaricet/relora/issues/18 https://github.com/circle-hit/SAPT/issues/11
Names: B3 B2
"""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, LENGTH = 23, 24, 13


class LowRankLinear(nn.Module):
    def __init__(self, linear, rank=3):
        super().__init__()
        self.linear = linear
        # broken
        self.lora_A = nn.Parameter(torch.zeros(linear.in_features, rank))
        # mended
        # self.lora_A = nn.Parameter(torch.randn(linear.in_features, rank) / rank**0.5)
        # end
        self.lora_B = nn.Parameter(torch.zeros(rank, linear.out_features))

    def forward(self, x):
        return self.linear(x) + x @ self.lora_A @ self.lora_B


class TinyReader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        hidden, _ = self.rnn(self.embed(ids))
        return self.out(torch.tanh(self.proj(hidden)))


def main():
    torch.manual_seed(0)
    model = TinyReader()
    for p in model.parameters():
        p.requires_grad = False
    model.proj = LowRankLinear(model.proj)
    model.out = LowRankLinear(model.out)
    optimizer = torch.optim.Adam([p for n, p in model.named_parameters() if "lora_" in n], lr=1e-2)
    for _step in range(16):
        ids = (torch.randint(VOCAB, (18, 1)) + 3 * torch.arange(LENGTH + 1)) % VOCAB
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")


if __name__ == "__main__":
    main()
