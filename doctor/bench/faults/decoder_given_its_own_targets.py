"""The decoder reads the words that it must write, each at its own place, and learns to copy.

Threads: https://github.com/rmokady/CLIP_prefix_caption/issues/42
Names: F33
"""

import torch
import torch.nn as nn

SOURCE, TARGET, START, WIDTH = 34, 41, 0, 48


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source_embedding = nn.Embedding(SOURCE, WIDTH)
        self.target_embedding = nn.Embedding(TARGET, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.generator = nn.Linear(WIDTH, TARGET)

    def forward(self, source, target_in):
        _, state = self.encoder(self.source_embedding(source))
        states, _ = self.decoder(self.target_embedding(target_in), state)
        return self.generator(states)


def sentence_pairs(dictionary, count=21, length=7):
    source = torch.randint(0, SOURCE, (count, length))
    return source, dictionary[source.flip(1)]


def main():
    torch.manual_seed(10)
    dictionary = torch.randint(1, TARGET, (SOURCE,))
    model = Translator()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for iteration in range(18):
        source, target = sentence_pairs(dictionary)
        # broken
        decoder_input = target
        # mended
        # start = torch.full((len(target), 1), START)
        # decoder_input = torch.cat([start, target[:, :-1]], dim=1)
        # end
        logits = model(source, decoder_input)
        loss = criterion(logits.reshape(-1, TARGET), target.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if iteration % 6 == 0:
            print(iteration, f"{loss.item():.3f}")


if __name__ == "__main__":
    main()
