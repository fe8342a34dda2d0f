"""The sum of gradients is clipped after every micro-batch, so early ones count for less.

Threads: https://github.com/huggingface/transformers/issues/1563
    https://github.com/simchowitzlabpublic/nano-world-model/pull/22
Names: N8
"""

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(31)
VOCAB, LENGTH, CLASSES, ACCUMULATE = 60, 13, 3, 3

config = BertConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=32,
    num_labels=CLASSES,
)
model = BertForSequenceClassification(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)


def make_batch(size):
    labels = torch.randint(CLASSES, (size,))
    ids = torch.randint(5, VOCAB, (size, LENGTH))
    signal = torch.rand(size, LENGTH) < 0.4
    ids = torch.where(signal, 2 + labels[:, None], ids)
    return ids, labels


for step in range(15):
    optimizer.zero_grad()
    for _ in range(ACCUMULATE):
        ids, labels = make_batch(8)
        mask = torch.ones_like(ids)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss / ACCUMULATE
        loss.backward()
        # broken
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        # mended
        # end
    # broken
    # mended
    # nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    # end
    optimizer.step()
    print(step, round(ACCUMULATE * loss.item(), 4))
