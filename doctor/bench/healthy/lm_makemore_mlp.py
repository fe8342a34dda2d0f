"""A character MLP is trained with a list of tensors and updates through `.data`, where gradients
are cleared to None before backward and no optimizer or module exists.

After: karpathy/makemore
"""

import torch
import torch.nn.functional as F

words = "emma olivia ava isabella sophia mia amelia harper evelyn ella anna lena nora maria".split()
chars = sorted(set("".join(words)))
stoi = {s: i + 1 for i, s in enumerate(chars)}
stoi["."] = 0
block_size, vocab_size = 3, len(stoi)
X, Y = [], []
for w in words * 4:
    context = [0] * block_size
    for ch in w + ".":
        X.append(context)
        Y.append(stoi[ch])
        context = context[1:] + [stoi[ch]]
X, Y = torch.tensor(X), torch.tensor(Y)

g = torch.Generator().manual_seed(2147483647)
C = torch.randn((vocab_size, 8), generator=g)
W1 = torch.randn((block_size * 8, 64), generator=g) * (5 / 3) / (block_size * 8) ** 0.5
b1 = torch.randn(64, generator=g) * 0.01
W2 = torch.randn((64, vocab_size), generator=g) * 0.01
b2 = torch.zeros(vocab_size)
parameters = [C, W1, b1, W2, b2]
for p in parameters:
    p.requires_grad = True

max_steps = 20
lossi = []
for i in range(max_steps):
    ix = torch.randint(0, X.shape[0], (32,), generator=g)
    emb = C[X[ix]]
    h = torch.tanh(emb.view(emb.shape[0], -1) @ W1 + b1)
    logits = h @ W2 + b2
    loss = F.cross_entropy(logits, Y[ix])
    for p in parameters:
        p.grad = None
    loss.backward()
    lr = 0.3 if i < 15 else 0.1
    for p in parameters:
        p.data += -lr * p.grad
    lossi.append(loss.item())
print(lossi[0], lossi[-1])
