"""A GRU reads one character at a time and the losses of a whole chunk are summed before one
backward, so the printed loss is the sum over the chunk divided by its length.

After: spro/practical-pytorch
"""

import random
from string import ascii_lowercase

import torch
import torch.nn as nn

random.seed(torch.manual_seed(5).initial_seed())
all_characters = ascii_lowercase + " ."
file = "the rain in spain stays mainly in the plain. she sells sea shells by the sea shore. " * 8
text = torch.tensor([all_characters.index(c) for c in file])
chunk_len, hidden_size = 25, 48
n_epochs = 20


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(len(all_characters), hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size)
        self.decoder = nn.Linear(hidden_size, len(all_characters))

    def forward(self, input, hidden):
        output, hidden = self.gru(self.encoder(input.view(1, 1)), hidden)
        return self.decoder(output.view(1, -1)), hidden


def random_training_set():
    start = random.randint(0, len(text) - chunk_len - 1)
    return text[start : start + chunk_len], text[start + 1 : start + chunk_len + 1]


def evaluate(prime="t", predict_len=20):
    hidden, predicted = torch.zeros(1, 1, hidden_size), prime
    for _ in range(predict_len):
        output, hidden = decoder(torch.tensor([all_characters.index(predicted[-1])]), hidden)
        predicted += all_characters[output.data.view(-1).div(0.5).exp().multinomial(1)[0]]
    return predicted


decoder = RNN()
decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=0.008)
criterion = nn.CrossEntropyLoss()
for epoch in range(n_epochs):
    inp, target = random_training_set()
    hidden, loss = torch.zeros(1, 1, hidden_size), 0
    decoder.zero_grad()
    for c in range(chunk_len):
        output, hidden = decoder(inp[c], hidden)
        loss += criterion(output, target[c].unsqueeze(0))
    loss.backward()
    decoder_optimizer.step()
    if epoch % 5 == 4:
        print(epoch, loss.item() / chunk_len, evaluate())
