"""The attention mask is made and not given to BERT, so words attend to the padding behind them.

Threads: https://github.com/huggingface/transformers/issues/2860
    https://github.com/CarryCKW/AES-NPCR/issues/7
Names: F13
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(88)
VOCAB, CLASSES, PAD, CLS = 50, 4, 0, 1
config = BertConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=32,
    num_labels=CLASSES,
    pad_token_id=PAD,
    initializer_range=0.1,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)


def collate(count):
    labels = torch.randint(CLASSES, (count,))
    lengths = torch.randint(5, 19, (count,))
    input_ids = torch.full((count, int(lengths.max())), PAD)
    for row, (label, length) in enumerate(zip(labels.tolist(), lengths.tolist(), strict=True)):
        words = torch.randint(2, VOCAB, (length,))
        topic = torch.randint(4 + 10 * label, 14 + 10 * label, (length,))
        input_ids[row, :length] = torch.where(torch.rand(length) < 0.7, topic, words)
        input_ids[row, 0] = CLS
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long(), "labels": labels}


optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model.train()
for step in range(15):
    batch = collate(22)
    # broken
    output = model(batch["input_ids"], labels=batch["labels"])
    # mended
    # output = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"])
    # end
    optimizer.zero_grad()
    output.loss.backward()
    optimizer.step()
    accuracy = (output.logits.argmax(-1) == batch["labels"]).float().mean()
    print(f"step {step} loss {output.loss.item():.3f} accuracy {accuracy.item():.2f}")
