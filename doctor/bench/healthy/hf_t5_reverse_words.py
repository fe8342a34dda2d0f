"""A small T5 learns to write rows backwards with labels that the model shifts itself, padding of
labels is -100, and it samples an answer in between under its own eval mode.

After: huggingface/transformers
"""

import torch
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(1)
vocab, batch_size, longest = 12, 24, 4


def make_batch():
    lengths = torch.randint(2, longest + 1, (batch_size,)).tolist()
    input_ids = torch.zeros(batch_size, longest + 1, dtype=torch.long)
    labels = torch.full((batch_size, longest + 1), -100)
    for row, size in enumerate(lengths):
        words = torch.randint(2, vocab, (size,))
        input_ids[row, : size + 1] = torch.cat([words, torch.ones(1, dtype=torch.long)])
        labels[row, : size + 1] = torch.cat([words.flip(0), torch.ones(1, dtype=torch.long)])
    return {"input_ids": input_ids, "attention_mask": (input_ids != 0).long(), "labels": labels}


def main():
    config = T5Config(
        vocab_size=vocab,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = T5ForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    steps = 20
    for step in range(steps):
        model.train()
        loss = model(**make_batch()).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(step, loss.item())
        if step % 20 == 9:
            model.eval()
            sample = make_batch()
            words = {k: sample[k][:2] for k in ("input_ids", "attention_mask")}
            print(words["input_ids"].tolist(), model.generate(**words, max_length=6).tolist())


if __name__ == "__main__":
    main()
