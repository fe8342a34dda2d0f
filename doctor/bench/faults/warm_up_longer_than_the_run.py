"""The warm-up is taken over from a long recipe: it has more steps than this run.

Threads: https://github.com/ace-step/ACE-Step/pull/198
Names: N9
"""

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

torch.manual_seed(41)
VOCAB, LENGTH, STEPS = 40, 20, 24
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
# broken
WARM_UP = 500
# mended
# WARM_UP = 2
# end
scheduler = get_cosine_schedule_with_warmup(
    optimizer, num_warmup_steps=WARM_UP, num_training_steps=STEPS
)


def sample_counting(size):
    first = torch.randint(0, VOCAB, (size, 1))
    stride = torch.randint(1, 4, (size, 1))
    return (first + stride * torch.arange(LENGTH)) % VOCAB


model.train()
for step in range(STEPS):
    ids = sample_counting(16)
    logits = model(ids).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    print(step, f"{loss.item():.3f}", scheduler.get_last_lr())
