"""The loaded model is in eval mode and is trained so: its dropout of 0.1 is off in every step.

Threads: https://github.com/huggingface/transformers/pull/1703
Names: S11
"""

import torch
from transformers import DistilBertConfig, DistilBertForTokenClassification

torch.manual_seed(103)
VOCAB, LENGTH, LABELS = 70, 15, 3


def load_model():
    config = DistilBertConfig(
        vocab_size=VOCAB,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=32,
        num_labels=LABELS,
    )
    return DistilBertForTokenClassification(config).eval()


model = load_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
label_of_word = torch.randint(LABELS, (VOCAB,))


def make_batch(size):
    ids = torch.randint(2, VOCAB, (size, LENGTH))
    lengths = torch.randint(8, LENGTH + 1, (size, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = torch.where(mask.bool(), label_of_word[ids], -100)
    return ids * mask, mask, labels


# broken
# mended
# model.train()
# end
for step in range(16):
    ids, mask, labels = make_batch(9)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(step, round(loss.item(), 4))
