"""A BERT that was fitted for a few steps gets LoRA and a classifier of more classes, which is saved
beside it, while places and norms of the first task stay frozen on purpose.

After: huggingface/peft
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(7)
vocab, size, batch_size = 32, 10, 24
config = BertConfig(
    vocab_size=vocab,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=16,
    num_labels=3,
)


def batch(classes):
    ids = torch.randint(4, 16, (batch_size, size))
    labels = torch.randint(classes, (batch_size,))
    ids[:, 1:6] = torch.where(torch.rand(batch_size, 5) < 0.5, labels.view(-1, 1) + 16, ids[:, 1:6])
    lengths = torch.randint(6, size + 1, (batch_size, 1))
    mask = (torch.arange(size) < lengths).long()
    ids = ids * mask
    ids[:, 0] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def fit(model, params, classes, lr, count):
    optimizer = torch.optim.AdamW(params, lr=lr)
    model.train()
    for _ in range(count):
        outputs = model(**batch(classes))
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(outputs.loss.item())


num_steps = 15
base = BertForSequenceClassification(config)
fit(base, base.parameters(), 3, 5e-3, 5)
base.num_labels = base.config.num_labels = 5
base.classifier = torch.nn.Linear(config.hidden_size, 5)
targets = ["word_embeddings", "query", "value", "dense"]
lora = LoraConfig(task_type="SEQ_CLS", r=8, target_modules=targets)
model = get_peft_model(base, lora)
fit(model, [p for p in model.parameters() if p.requires_grad], 5, 1e-2, num_steps)
