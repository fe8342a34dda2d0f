"""An RNN reads whole names whose rows begin with token 0 and end with target 0, where 0 is also the
filling of the inputs and -1 that of the targets.

After: karpathy/makemore
"""

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(3407)
names = "emma olivia ava isabella sophia mia amelia harper evelyn ella anna lena nora mara".split()
vocabulary = sorted(set("".join(names)))
max_word_length = max(len(n) for n in names)


class CharDataset(Dataset):
    def __len__(self):
        return len(names)

    def __getitem__(self, idx):
        ix = torch.tensor([vocabulary.index(c) + 1 for c in names[idx]])
        x = torch.zeros(max_word_length + 1, dtype=torch.long)
        y = torch.zeros(max_word_length + 1, dtype=torch.long)
        x[1 : 1 + len(ix)] = ix
        y[: len(ix)] = ix
        y[len(ix) + 1 :] = -1
        return x, y


class RNN(nn.Module):
    def __init__(self, n_embd=24, n_hidden=40):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(1, n_hidden))
        self.wte = nn.Embedding(len(vocabulary) + 1, n_embd)
        self.xh_to_h = nn.Linear(n_embd + n_hidden, n_hidden)
        self.lm_head = nn.Linear(n_hidden, len(vocabulary) + 1)

    def forward(self, idx, targets):
        emb, hprev, hiddens = self.wte(idx), self.start.expand(idx.size(0), -1), []
        for i in range(idx.size(1)):
            hprev = torch.tanh(self.xh_to_h(torch.cat([emb[:, i], hprev], dim=1)))
            hiddens.append(hprev)
        logits = self.lm_head(torch.stack(hiddens, 1))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


model = RNN()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01, eps=1e-8)
epochs = 17
for epoch in range(epochs):
    for X, Y in DataLoader(CharDataset(), batch_size=14, shuffle=True):
        loss = model(X, Y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
