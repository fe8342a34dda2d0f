"""A feed-forward language model learns three sentences by heart as one batch, with direct
connections from the words to the answer and two tensors that are parameters of their own.

After: graykode/nlp-tutorial
"""

import torch
import torch.nn as nn
import torch.optim as optim

torch.manual_seed(0)
sentences = ["i like dog", "i love coffee", "i hate milk", "we like tea", "we love cats"]
word_list = sorted(set(" ".join(sentences).split()))
word_dict = {w: i for i, w in enumerate(word_list)}
n_class, n_step, n_hidden, m = len(word_list), 2, 6, 4


def make_batch():
    words = [sen.split() for sen in sentences]
    inputs = [[word_dict[n] for n in word[:-1]] for word in words]
    return torch.LongTensor(inputs), torch.LongTensor([word_dict[word[-1]] for word in words])


class NNLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.C = nn.Embedding(n_class, m)
        self.H = nn.Linear(n_step * m, n_hidden, bias=False)
        self.d = nn.Parameter(torch.ones(n_hidden))
        self.U = nn.Linear(n_hidden, n_class, bias=False)
        self.W = nn.Linear(n_step * m, n_class, bias=False)
        self.b = nn.Parameter(torch.ones(n_class))

    def forward(self, X):
        X = self.C(X)
        X = X.view(-1, n_step * m)
        tanh = torch.tanh(self.d + self.H(X))
        return self.b + self.W(X) + self.U(tanh)


model = NNLM()
criterion = nn.CrossEntropyLoss()
optimizer = optim.Adam(model.parameters(), lr=0.02)
input_batch, target_batch = make_batch()
epochs = 20
for epoch in range(epochs):
    optimizer.zero_grad()
    output = model(input_batch)
    loss = criterion(output, target_batch)
    if (epoch + 1) % 5 == 0:
        print(f"Epoch: {epoch + 1:04d} cost = {loss:.6f}")
    loss.backward()
    optimizer.step()
predict = model(input_batch).data.max(1, keepdim=True)[1]
print([word_list[n.item()] for n in predict.squeeze()])
