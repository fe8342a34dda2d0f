"""An LSTM reads one long text as columns, time first, its state is carried from batch to batch
without its graph, and tied weights are stepped by hand through `.data` at a rate of 20.

After: pytorch/examples
"""

import torch
import torch.nn as nn

torch.manual_seed(1111)
ntokens, emsize, nlayers, batch_size, bptt, lr, clip = 33, 40, 2, 8, 12, 20, 0.25
epochs = 3


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


successor = torch.randperm(ntokens)
words = [0]
for spot in range(520):
    words.append((successor[words[-1]].item() + (spot % 3 == 0)) % ntokens)
train_data = batchify(torch.tensor(words), batch_size)


class RNNModel(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(dropout), nn.Embedding(ntokens, emsize)
        self.rnn = nn.LSTM(emsize, emsize, nlayers, dropout=dropout)
        self.decoder = nn.Linear(emsize, ntokens)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, ntokens)
        return torch.log_softmax(decoded, dim=1), hidden


model, criterion = RNNModel(), nn.NLLLoss()
for epoch in range(epochs):
    model.train()
    total_loss = 0.0
    hidden = tuple(torch.zeros(nlayers, batch_size, emsize) for _ in range(2))
    for i in range(0, train_data.size(0) - 1, bptt):
        seq_len = min(bptt, len(train_data) - 1 - i)
        data, targets = train_data[i : i + seq_len], train_data[i + 1 : i + 1 + seq_len].view(-1)
        model.zero_grad()
        hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
    print(epoch, total_loss)
