"""The chat template writes a begin token and the encoder adds another, so each text has two.

Threads: https://github.com/OpenRLHF/OpenRLHF/issues/393
    https://github.com/ml-explore/mlx-examples/issues/1095
Names: F18
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BOS, EOS, PAD, USER, ASSISTANT, VOCAB = 1, 2, 0, 3, 4, 64


def apply_chat_template(question, answer):
    return [BOS, USER, *question, ASSISTANT, *answer, EOS]


def encode(ids, add_special_tokens=True):
    return [BOS, *ids] if add_special_tokens else list(ids)


def conversations(count):
    for _ in range(count):
        length = torch.randint(2, 8, (1,)).item()
        question = torch.randint(8, VOCAB, (length,)).tolist()
        yield question, sorted(question)


def build_batch(count):
    rows = []
    for question, answer in conversations(count):
        text = apply_chat_template(question, answer)
        # broken
        rows.append(encode(text))
        # mended
        # rows.append(encode(text, add_special_tokens=False))
        # end
    longest = max(len(row) for row in rows)
    input_ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    attention_mask = (input_ids != PAD).long()
    return input_ids, attention_mask, input_ids.masked_fill(attention_mask == 0, -100)


torch.manual_seed(42)
config = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=40,
    intermediate_size=80,
    num_hidden_layers=1,
    num_attention_heads=4,
    pad_token_id=PAD,
)
model = LlamaForCausalLM(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(16):
    input_ids, attention_mask, labels = build_batch(11)
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
