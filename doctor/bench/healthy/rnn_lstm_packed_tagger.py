"""A two-way LSTM tags packed rows of different lengths that are sorted by length, and tags of
padding are the class of padding itself, which the criterion leaves out.

After: bentrevett/pytorch-pos-tagging
"""

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

torch.manual_seed(42)
vocab, tags, batch_size, tag_pad = 25, 5, 18, 0


class BiLSTMPOSTagger(nn.Module):
    def __init__(self, embedding_dim=16, hidden_dim=24):
        super().__init__()
        self.embedding = nn.Embedding(vocab, embedding_dim, padding_idx=0)
        self.lstm = nn.LSTM(embedding_dim, hidden_dim, bidirectional=True)
        self.fc, self.dropout = nn.Linear(hidden_dim * 2, tags), nn.Dropout(0.1)

    def forward(self, text, lengths):
        embedded = self.dropout(self.embedding(text))
        outputs, _ = self.lstm(pack_padded_sequence(embedded, lengths))
        return self.fc(self.dropout(pad_packed_sequence(outputs)[0]))


def init_weights(m):
    for name, param in m.named_parameters():
        if name != "embedding.weight":
            nn.init.normal_(param.data, mean=0, std=0.1)


def make_batch():
    lengths = torch.randint(3, 12, (batch_size,)).sort(descending=True)[0]
    text = [torch.randint(1, vocab, (n,)) for n in lengths.tolist()]
    after_high = [torch.cat([torch.zeros(1).long(), (t[:-1] > 15).long()]) for t in text]
    labels = [t % 2 + 2 * a + 1 for t, a in zip(text, after_high, strict=True)]
    return pad_sequence(text), lengths, pad_sequence(labels, padding_value=tag_pad)


model = BiLSTMPOSTagger()
model.apply(init_weights)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
criterion = nn.CrossEntropyLoss(ignore_index=tag_pad)
n_batches = 20
for i in range(n_batches):
    text, lengths, labels = make_batch()
    predictions = model(text, lengths).view(-1, tags)
    labels = labels.view(-1)
    loss = criterion(predictions, labels)
    kept = labels != tag_pad
    acc = (predictions.argmax(1)[kept] == labels[kept]).float().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(i, loss.item(), acc.item())
