"""Encoder and decoder run time first after a transpose, with as many rows as places in the source,
targets are fed back half of the time, and the first row of the outputs stays zero and has no loss.

After: bentrevett/pytorch-seq2seq
"""

import random

import torch
import torch.nn as nn

random.seed(torch.manual_seed(1234).initial_seed())
vocab, emb_dim, hid_dim, src_len, batch_size, pad, sos = 12, 24, 48, 8, 8, 0, 1


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(vocab, emb_dim), nn.GRU(emb_dim, hid_dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, src):
        return self.rnn(self.dropout(self.embedding(src)))[1]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(vocab, emb_dim), nn.GRU(emb_dim + hid_dim, hid_dim)
        self.fc_out = nn.Linear(emb_dim + hid_dim * 2, vocab)

    def forward(self, input, hidden, context):
        embedded = self.embedding(input.unsqueeze(0))
        output, hidden = self.rnn(torch.cat((embedded, context), dim=2), hidden)
        output = torch.cat((embedded.squeeze(0), hidden.squeeze(0), context.squeeze(0)), dim=1)
        return self.fc_out(output), hidden


encoder, decoder = Encoder(), Decoder()
parameters = [*encoder.parameters(), *decoder.parameters()]
optimizer = torch.optim.Adam(parameters, lr=5e-3)
criterion = nn.CrossEntropyLoss(ignore_index=pad)
n_iterations = 20
for i in range(n_iterations):
    rows = torch.randint(2, vocab, (batch_size, src_len))
    rows = rows.masked_fill(torch.arange(src_len) >= torch.randint(3, 9, (batch_size, 1)), pad)
    trg = torch.cat([torch.full((batch_size, 1), sos), rows[:, :5]], dim=1).transpose(0, 1)
    optimizer.zero_grad()
    context = encoder(rows.transpose(0, 1))
    hidden, input = context, trg[0]
    outputs = torch.zeros(trg.shape[0], batch_size, vocab)
    for t in range(1, trg.shape[0]):
        outputs[t], hidden = decoder(input, hidden, context)
        input = trg[t] if random.random() < 0.5 else outputs[t].argmax(1)
    loss = criterion(outputs[1:].view(-1, vocab), trg[1:].reshape(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    print(i, loss.item())
