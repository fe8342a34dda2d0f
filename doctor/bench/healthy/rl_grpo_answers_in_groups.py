"""GRPO draws eight answers to each prompt, scales rewards within each group, and takes one step per
batch, so the ratio is one and the loss is near zero though its gradient is not.

After: huggingface/trl
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(6)
vocab, dim, prompt_len, answer_len, prompts, group, beta = 11, 32, 3, 4, 7, 8, 0.02


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Embedding(vocab, dim), nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0])


def per_token_logps(model, ids):
    logits = model(ids)[:, prompt_len - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, prompt_len:, None]).squeeze(-1)


@torch.no_grad()
def generate(model, ids):
    for _ in range(answer_len):
        drawn = torch.multinomial(F.softmax(model(ids)[:, -1], dim=-1), 1)
        ids = torch.cat([ids, drawn], dim=1)
    return ids


policy = Policy()
ref_model = copy.deepcopy(policy).requires_grad_(False).eval()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
max_steps = 20
for step in range(max_steps):
    prompt = torch.randint(vocab, (prompts, prompt_len))
    ids = generate(policy, prompt.repeat_interleave(group, dim=0))
    grouped = (ids[:, prompt_len:] == ids[:, :1]).float().mean(1).view(prompts, group)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    logps = per_token_logps(policy, ids)
    ref_logps = per_token_logps(ref_model, ids)
    kl = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
    ratio = torch.exp(logps - logps.detach())
    loss = -(ratio * advantages.view(-1, 1) - beta * kl).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), grouped.mean().item())
