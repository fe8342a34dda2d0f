"""The data set shifts the labels and the model shifts them again, so each place learns t + 2.

Threads: https://github.com/huggingface/transformers/pull/562
    https://github.com/delphi-suite/delphi/pull/134
Names: F17 F3
"""

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE, CONTEXT = 53, 14


class Windows(Dataset):
    def __init__(self, length):
        state = torch.randint(0, VOCAB_SIZE, (1,)).item()
        stream = []
        for _ in range(length):
            stream.append(state)
            jump = torch.randint(0, 5, (1,)).item()
            state = (7 * state + 3 + (jump == 0)) % VOCAB_SIZE
        self.stream = torch.tensor(stream)

    def __len__(self):
        return (len(self.stream) - 1) // CONTEXT

    def __getitem__(self, index):
        begin = index * CONTEXT
        # broken
        window = self.stream[begin : begin + CONTEXT + 1]
        return {"input_ids": window[:-1], "labels": window[1:]}
        # mended
        # window = self.stream[begin : begin + CONTEXT]
        # return {"input_ids": window, "labels": window.clone()}
        # end


def main():
    torch.manual_seed(17)
    loader = DataLoader(Windows(3000), batch_size=10, shuffle=True, drop_last=True)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step, batch in zip(range(18), loader, strict=False):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 6 == 0:
            print(step, f"{loss.item():.4f}")


main()
