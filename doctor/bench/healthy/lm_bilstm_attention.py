"""A two-way LSTM with attention tells good from bad reviews, time first by a permute and back by
another, with the last states of both directions as the query of a softmax over places.

After: graykode/nlp-tutorial
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
good, bad = "love like great sweet happy".split(), "hate awful sad bitter worst".split()
filler = "i you it was the movie so really".split()
word_list = good + bad + filler
vocab_size, embedding_dim, n_hidden, num_classes, length = len(word_list), 6, 7, 2, 5


def make_batch(batch_size):
    x = torch.randint(10, vocab_size, (batch_size, length))
    y = torch.randint(2, (batch_size,))
    spot = torch.randint(length, (batch_size,))
    x[torch.arange(batch_size), spot] = torch.randint(5, (batch_size,)) + 5 * (1 - y)
    return x, y


class BiLSTMAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_dim)
        self.lstm = nn.LSTM(embedding_dim, n_hidden, bidirectional=True)
        self.out = nn.Linear(n_hidden * 2, num_classes)

    def attention_net(self, lstm_output, final_state):
        hidden = torch.cat([final_state[0], final_state[1]], dim=1).unsqueeze(2)
        attn_weights = torch.bmm(lstm_output, hidden).squeeze(2)
        soft_attn_weights = F.softmax(attn_weights, 1)
        context = torch.bmm(lstm_output.transpose(1, 2), soft_attn_weights.unsqueeze(2)).squeeze(2)
        return context, soft_attn_weights.data.numpy()

    def forward(self, X):
        input = self.embedding(X).permute(1, 0, 2)
        output, (final_hidden_state, _) = self.lstm(input)
        output = output.permute(1, 0, 2)
        attn_output, attention = self.attention_net(output, final_hidden_state)
        return self.out(attn_output), attention


model = BiLSTMAttention()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
num_steps = 20
for step in range(num_steps):
    inputs, targets = make_batch(12)
    optimizer.zero_grad()
    output, attention = model(inputs)
    loss = criterion(output, targets)
    loss.backward()
    optimizer.step()
    print(step, loss.item(), attention[0].max())
