"""A bigram model is one matrix, its softmax and negative log-likelihood are written by hand, all
data are seen in each step, and a rate of 20 is right for it.

After: karpathy/makemore
"""

import torch
import torch.nn.functional as F

words = "emma olivia ava isabella sophia mia amelia harper evelyn ella anna lena nora maria".split()
chars = ["."] + sorted(set("".join(words)))
stoi = {s: i for i, s in enumerate(chars)}
xs, ys = [], []
for w in words:
    chs = ["."] + list(w) + ["."]
    for ch1, ch2 in zip(chs, chs[1:], strict=False):
        xs.append(stoi[ch1])
        ys.append(stoi[ch2])
xs, ys = torch.tensor(xs), torch.tensor(ys)
num = xs.nelement()

g = torch.Generator().manual_seed(2147483647)
W = torch.randn((len(chars), len(chars)), generator=g, requires_grad=True)
iterations = 20
for k in range(iterations):
    xenc = F.one_hot(xs, num_classes=len(chars)).float()
    logits = xenc @ W
    counts = logits.exp()
    probs = counts / counts.sum(1, keepdims=True)
    loss = -probs[torch.arange(num), ys].log().mean() + 0.01 * (W**2).mean()
    W.grad = None
    loss.backward()
    W.data += -20 * W.grad
    print(k, loss.item())

for _ in range(3):
    out, ix = [], 0
    while len(out) < 12:
        p = F.one_hot(torch.tensor([ix]), num_classes=len(chars)).float() @ W.detach()
        ix = torch.multinomial(p.softmax(1), 1, generator=g).item()
        out.append(chars[ix])
        if ix == 0:
            break
    print("".join(out))
