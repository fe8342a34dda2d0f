"""A small Llama with grouped keys learns texts that were joined and cut into rows, its labels are a
copy of its inputs because the model shifts them, and a cosine schedule ends at a tenth.

After: huggingface/transformers
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(3)
vocab, eos, block_size, batch_size = 26, 1, 18, 7


def write_document():
    start, stride = torch.randint(2, vocab, (2,)).tolist()
    size = int(torch.randint(5, 15, (1,)))
    return [2 + (start + (1 + stride % 3) * i) % (vocab - 2) for i in range(size)] + [eos]


def group_texts(documents):
    joined = sum(documents, [])
    total = len(joined) // block_size * block_size
    return torch.tensor(joined[:total]).view(-1, block_size)


lm_datasets = group_texts([write_document() for _ in range(300)])
config = LlamaConfig(
    vocab_size=vocab,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=block_size,
    use_cache=False,
    bos_token_id=None,
    eos_token_id=eos,
    pad_token_id=0,
)
model = LlamaForCausalLM(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
max_steps = 18
lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max_steps, eta_min=5e-4)
order = torch.randperm(len(lm_datasets))
for step in range(max_steps):
    first = step * batch_size % (len(order) - batch_size)
    batch = lm_datasets[order[first : first + batch_size]]
    outputs = model(input_ids=batch, labels=batch)
    outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    lr_scheduler.step()
    optimizer.zero_grad()
    print(step, outputs.loss.item())
