"""Packed texts come with a mask of ones, so each text attends to those before it in its row.

Threads: https://github.com/huggingface/transformers/pull/46634
    https://github.com/alex-hh/profam/issues/495
Names: F12
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(55)
VOCAB, ROW = 47, 36


def text():
    length = int(torch.randint(6, 15, ()))
    return (torch.randint(VOCAB, (1,)) + 2 * torch.arange(length)) % VOCAB


def packed_row():
    ids, places, labels = [], [], []
    while sum(map(len, ids)) < ROW:
        piece = text()
        label = piece.clone()
        label[0] = -100
        ids.append(piece)
        labels.append(label)
        places.append(torch.arange(len(piece)))
    return [torch.cat(parts)[:ROW] for parts in (ids, places, labels)]


def collate(rows):
    ids, places, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    return {
        "input_ids": ids,
        "position_ids": places,
        "labels": labels,
        # broken
        "attention_mask": torch.ones_like(ids),
        # mended
        # end
    }


config = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    use_cache=False,
)
model = LlamaForCausalLM(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(15):
    batch = collate([packed_row() for _ in range(5)])
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{step} {loss.item():.4f}")
