"""A BERT classifier is tuned with two groups of decay, a linear schedule whose first rate is zero
and micro-batches, and it is evaluated after each epoch and put back into train mode.

After: huggingface/transformers
"""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

torch.manual_seed(0)
accumulation = 2
max_train_steps = 18


def make_examples(count):
    examples = []
    for _ in range(count):
        size = int(torch.randint(4, 13, (1,)))
        ids = torch.randint(5, 30, (size,))
        examples.append({"ids": [1, *ids.tolist(), 2], "label": int((ids < 7).any())})
    return examples


def collate_fn(examples):
    longest = max(len(e["ids"]) for e in examples)
    ids = [e["ids"] + [0] * (longest - len(e["ids"])) for e in examples]
    mask = [[1] * len(e["ids"]) + [0] * (longest - len(e["ids"])) for e in examples]
    batch = {"input_ids": ids, "attention_mask": mask, "labels": [e["label"] for e in examples]}
    return {k: torch.tensor(v) for k, v in batch.items()}


def main():
    sizes = {"vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    config = BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=20, num_labels=2)
    model = BertForSequenceClassification(config)
    train = DataLoader(make_examples(192), 16, shuffle=True, collate_fn=collate_fn)
    evaluation = DataLoader(make_examples(40), 20, collate_fn=collate_fn)
    named = [("bias" in n or "LayerNorm" in n, p) for n, p in model.named_parameters()]
    groups = [{"params": [p for skip, p in named if not skip], "weight_decay": 0.01}]
    groups += [{"params": [p for skip, p in named if skip], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    lr_scheduler = get_scheduler("linear", optimizer, 2, max_train_steps)
    for epoch in range(max_train_steps * accumulation // len(train)):
        model.train()
        for step, batch in enumerate(train):
            loss = model(**batch).loss / accumulation
            loss.backward()
            if step % accumulation == accumulation - 1:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            hits = [model(**b).logits.argmax(-1).eq(b["labels"]).sum().item() for b in evaluation]
        print(epoch, loss.item() * accumulation, sum(hits) / 40)


if __name__ == "__main__":
    main()
