"""Padding shares its id with the end token and is masked by id, so the model never learns to stop.

Threads: https://github.com/huggingface/transformers/issues/23530
    https://github.com/huggingface/trl/issues/976
Names: F16
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB_SIZE, EOS_TOKEN_ID, ROWS = 60, 59, 9
pad_token_id = EOS_TOKEN_ID


def sentences(generator):
    for _ in range(ROWS):
        length = int(torch.randint(4, 13, (1,), generator=generator))
        start = int(torch.randint(0, 50, (1,), generator=generator))
        words = [(start + 3 * place) % 50 for place in range(length)]
        yield words + [EOS_TOKEN_ID]


def collate(rows):
    longest = max(map(len, rows))
    input_ids = torch.full((len(rows), longest), pad_token_id)
    attention_mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.tensor(row)
        attention_mask[index, : len(row)] = 1
    labels = input_ids.clone()
    # broken
    labels[labels == pad_token_id] = -100
    # mended
    # labels[attention_mask == 0] = -100
    # end
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=40, n_layer=2, n_head=4, eos_token_id=EOS_TOKEN_ID
    )
    model = GPT2LMHeadModel(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(18):
        batch = collate(list(sentences(generator)))
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print({"step": step, "loss": round(loss.item(), 4)})


main()
