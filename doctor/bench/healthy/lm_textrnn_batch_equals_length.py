"""An RNN guesses the fourth word from three, time first by a transpose, with as many sentences in
the batch as words in a sentence, so that a swapped axis could not be told by its size.

After: graykode/nlp-tutorial
"""

import torch
import torch.nn as nn
import torch.optim as optim

torch.manual_seed(0)
subjects = ["cats", "dogs", "birds", "cows"]
verbs = {"cats": "drink", "dogs": "chew", "birds": "peck", "cows": "graze"}
things = {"drink": "milk", "chew": "bones", "peck": "seeds", "graze": "grass"}
adverbs = ["often", "never"]
sentences = [f"{s} {a} {verbs[s]} {things[verbs[s]]}" for s in subjects for a in adverbs]
word_list = sorted(set(" ".join(sentences).split()))
word_dict = {w: i for i, w in enumerate(word_list)}
n_class, n_hidden, n_step, batch_size = len(word_list), 12, 3, 3
ids = torch.tensor([[word_dict[w] for w in s.split()] for s in sentences])


class TextRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(input_size=n_class, hidden_size=n_hidden)
        self.W = nn.Linear(n_hidden, n_class, bias=False)
        self.b = nn.Parameter(torch.ones([n_class]))

    def forward(self, hidden, X):
        X = X.transpose(0, 1)
        outputs, hidden = self.rnn(X, hidden)
        outputs = outputs[-1]
        return self.W(outputs) + self.b


model = TextRNN()
criterion = nn.CrossEntropyLoss()
optimizer = optim.Adam(model.parameters(), lr=0.02)
steps = 20
for step in range(steps):
    rows = torch.randperm(len(ids))[:batch_size]
    input_batch, target_batch = torch.eye(n_class)[ids[rows, :-1]], ids[rows, -1]
    optimizer.zero_grad()
    hidden = torch.zeros(1, batch_size, n_hidden)
    output = model(hidden, input_batch)
    loss = criterion(output, target_batch)
    loss.backward()
    optimizer.step()
    print(step, loss.item())
hidden = torch.zeros(1, len(ids), n_hidden)
predict = model(hidden, torch.eye(n_class)[ids[:, :-1]]).data.max(1)[1]
print((predict == ids[:, -1]).float().mean().item())
