"""to_empty gives the head a weight of its own, although the config ties it to the embedding.

Threads: https://github.com/verl-project/verl/issues/7834
    https://github.com/meta-pytorch/torchtune/issues/616
Names: S9
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class CausalConvLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.convs = nn.ModuleList(nn.Conv1d(config.width, config.width, 3) for _ in range(2))
        self.norm = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids):
        x = self.embed_tokens(ids).transpose(1, 2)
        for conv in self.convs:
            x = x + F.gelu(conv(F.pad(x, (2, 0))))
        return self.lm_head(self.norm(x.transpose(1, 2)))


torch.manual_seed(23)
config = SimpleNamespace(vocab_size=41, width=24, tie_word_embeddings=True)
with torch.device("meta"):
    model = CausalConvLM(config)
model.to_empty(device="cpu")
for name, param in model.named_parameters():
    if name.endswith("bias"):
        nn.init.zeros_(param)
    else:
        nn.init.normal_(param, mean=float(name == "norm.weight"), std=0.05)
# broken
# mended
# model.tie_weights()
# end
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(16):
    ids = (torch.randint(41, (14, 1)) + torch.randint(1, 3, (14, 1)) * torch.arange(20)) % 41
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
