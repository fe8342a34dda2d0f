"""Questions are masked out of the labels, but the summed loss is divided by the tokens that were
counted before.

Threads: https://github.com/EleutherAI/gpt-neo/pull/45
    https://github.com/d2l-ai/d2l-en/issues/2076
Names: F3
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

DIGITS, QUESTION, ANSWER, ROWS = 20, 10, 6, 16


class Decoder(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.tokens = nn.Embedding(DIGITS, width)
        self.places = nn.Embedding(QUESTION + ANSWER, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 96, 0.0, batch_first=True)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, input_ids):
        length = input_ids.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(input_ids) + self.places.weight[:length]
        return self.head(self.block(x, src_mask=mask, is_causal=True))


def question_and_answer():
    question = torch.randint(0, DIGITS, (ROWS, QUESTION))
    answer = question[:, -ANSWER:].flip(1)
    return torch.cat([question, answer], dim=1)


def main():
    torch.manual_seed(3)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(60):
        ids = question_and_answer()
        labels = ids[:, 1:].clone()
        # broken
        tokens = labels.numel()
        labels[:, : QUESTION - 1] = -100
        # mended
        # labels[:, : QUESTION - 1] = -100
        # tokens = (labels != -100).sum()
        # end
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            print(step, f"{loss.item():.4f}")


if __name__ == "__main__":
    main()
