"""Blocks are checkpointed by hand while the cache of generation is on: the recomputation appends to
it.

Threads: https://github.com/huggingface/transformers/issues/28056
    https://github.com/huggingface/transformers/pull/30320
Names: F10
"""

import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=80,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config)
# broken
model.config.use_cache = True
# mended
# model.config.use_cache = False
# end


def checkpointed(layer):
    inner = layer.forward

    def forward(hidden, **others):
        return checkpoint(lambda x: inner(x, **others), hidden, use_reentrant=True)

    layer.forward = forward


for layer in model.model.layers:
    checkpointed(layer)

text = torch.randint(1, 4, (4000,)).cumsum(0) % 80
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    starts = torch.randint(len(text) - 25, (6,))
    ids = torch.stack([text[s : s + 24] for s in starts])
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
