"""One sentence at a time goes through an encoder and a decoder with attention, each has its own
optimizer, and the loss is a sum over words that is divided only for the print.

After: spro/practical-pytorch
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(7)
vocab, hidden_size, sos, eos = 10, 40, 0, 1


class EncoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size)

    def forward(self, word_inputs):
        return self.gru(self.embedding(word_inputs).view(len(word_inputs), 1, -1))


class AttnDecoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden_size)
        self.attn, self.out = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size * 2, vocab)
        self.gru = nn.GRU(hidden_size * 2, hidden_size)

    def forward(self, word_input, last_context, last_hidden, encoder_outputs):
        embedded = self.embedding(word_input).view(1, 1, -1)
        output, hidden = self.gru(torch.cat((embedded, last_context), 2), last_hidden)
        energies = self.attn(encoder_outputs).squeeze(1) @ output.view(-1)
        attn_weights = F.softmax(energies, dim=0).view(1, 1, -1)
        context = attn_weights.bmm(encoder_outputs.transpose(0, 1))
        return self.out(torch.cat((output, context), 2)).view(1, -1), context, hidden


encoder, decoder = EncoderRNN(), AttnDecoderRNN()
encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=0.005)
decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=0.005)
criterion = nn.CrossEntropyLoss()
n_epochs = 20
for epoch in range(n_epochs):
    words = torch.randint(2, vocab, (int(torch.randint(3, 7, ())),))
    target = torch.cat([words.flip(0), torch.tensor([eos])])
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    encoder_outputs, decoder_hidden = encoder(words)
    decoder_input, decoder_context, loss = torch.tensor([sos]), torch.zeros(1, 1, hidden_size), 0
    for di in range(len(target)):
        state = decoder_input, decoder_context, decoder_hidden, encoder_outputs
        decoder_output, decoder_context, decoder_hidden = decoder(*state)
        loss += criterion(decoder_output, target[di : di + 1])
        decoder_input = target[di]
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
    print(epoch, loss.item() / len(target))
