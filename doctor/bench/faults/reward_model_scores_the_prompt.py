"""The reward head reads the first token of a causal model, so both answers get one score.

Threads: https://github.com/RLHFlow/RLHF-Reward-Modeling/issues/49
Names: N14
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2Model

torch.manual_seed(47)
VOCAB, PROMPT, ANSWER, PAD = 50, 5, 8, 0


class RewardModel(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32)
        dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        config = GPT2Config(**sizes, **dropout, use_cache=False)
        self.backbone = GPT2Model(config)
        self.value_head = nn.Linear(32, 1)

    def forward(self, ids):
        mask = (ids != PAD).long()
        hidden = self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        # broken
        pooled = hidden[:, 0]
        # mended
        # pooled = hidden[torch.arange(len(ids)), mask.sum(1) - 1]
        # end
        return self.value_head(pooled).squeeze(-1)


def with_padding(answer):
    length = torch.randint(4, ANSWER + 1, (len(answer), 1))
    return torch.where(torch.arange(ANSWER) < length, answer, PAD)


def make_pairs(size):
    prompt = torch.randint(1, VOCAB, (size, PROMPT))
    polite = with_padding(torch.randint(30, VOCAB, (size, ANSWER)))
    rude = with_padding(torch.randint(1, 30, (size, ANSWER)))
    return torch.cat([prompt, polite], 1), torch.cat([prompt, rude], 1)


model = RewardModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(16):
    chosen, rejected = make_pairs(7)
    better, worse = model(torch.cat([chosen, rejected])).chunk(2)
    loss = -F.logsigmoid(better - worse).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
