"""Texts are compared with keys from a slow copy and a queue of older keys that fills by rows, the
positive is column zero of the logits, and the queue begins with random unit vectors.

After: facebookresearch/moco
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(16)
vocab, dim, K, m, T, batch_size, length = 50, 24, 96, 0.95, 0.1, 16, 10


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        bag = nn.EmbeddingBag(vocab, 48)
        self.encoder_q = nn.Sequential(bag, nn.ReLU(), nn.Linear(48, dim))
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for param_k in self.encoder_k.parameters():
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def keys(self, im_k):
        pairs = zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True)
        for param_q, param_k in pairs:
            param_k.data = param_k.data * m + param_q.data * (1.0 - m)
        return F.normalize(self.encoder_k(im_k), dim=1)

    @torch.no_grad()
    def dequeue_and_enqueue(self, keys):
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % K

    def forward(self, text_q, text_k):
        q, k = F.normalize(self.encoder_q(text_q), dim=1), self.keys(text_k)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        self.dequeue_and_enqueue(k)
        return torch.cat([l_pos, l_neg], dim=1) / T, torch.zeros(len(q), dtype=torch.long)


model = MoCo()
optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.3, momentum=0.9)
n_iter = 20
for i in range(n_iter):
    text = torch.randint(vocab, (batch_size, length))
    views = [text[:, torch.randperm(length)[:7]] for _ in range(2)]
    output, target = model(*views)
    loss = F.cross_entropy(output, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(i, loss.item(), (output.argmax(1) == target).float().mean().item())
