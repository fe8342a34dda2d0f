"""The response marker is searched with a trailing space token, is not found, and no row has labels.

Threads: https://github.com/huggingface/trl/issues/1920
    https://github.com/huggingface/trl/issues/1820
Names: F14
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

PAD, EOS, QUESTION, ANSWER, SPACE, WORDS = 0, 1, 2, 3, 4, 48


def make_example(generator):
    words = torch.randint(8, WORDS, (int(torch.randint(3, 7, (1,), generator=generator)),))
    reply = words.flip(0)
    return [QUESTION, *words.tolist(), ANSWER, *reply.tolist(), EOS]


def find(row, marker):
    for start in range(len(row) - len(marker) + 1):
        if row[start : start + len(marker)] == marker:
            return start + len(marker)
    return None


def collate(rows, marker):
    length = max(len(row) for row in rows)
    input_ids = torch.full((len(rows), length), PAD)
    labels = torch.full((len(rows), length), -100)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.tensor(row)
        if begin := find(row, marker):
            labels[index, begin : len(row)] = torch.tensor(row[begin:])
    return input_ids, labels


def main():
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(5)
    # broken
    response_template = [ANSWER, SPACE]
    # mended
    # response_template = [ANSWER]
    # end
    config = GPT2Config(vocab_size=WORDS, n_embd=48, n_layer=1, n_head=3, eos_token_id=EOS)
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(16):
        rows = [make_example(generator) for _ in range(10)]
        input_ids, labels = collate(rows, response_template)
        attention_mask = (input_ids != PAD).long()
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


main()
