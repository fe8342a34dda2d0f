"""MoCo: the right class is always zero, and the loss rises at first while keys of past batches take
the place of the random ones in the queue.

After: facebookresearch/moco
"""

import torch
from torch import nn


class MoCo(nn.Module):
    def __init__(self, base_encoder, dim=10, K=96, m=0.9, T=0.1):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = base_encoder(30, dim), base_encoder(30, dim)
        self.encoder_k.load_state_dict(self.encoder_q.state_dict())
        self.encoder_k.requires_grad_(False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(dim, K), dim=0))
        self.queue_ptr = 0

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        online = dict(self.encoder_q.named_parameters())
        for name, param_k in self.encoder_k.named_parameters():
            param_k.data = param_k.data * self.m + online[name].data * (1.0 - self.m)

    def _dequeue_and_enqueue(self, keys):
        self.queue[:, self.queue_ptr : self.queue_ptr + len(keys)] = keys.T
        self.queue_ptr = (self.queue_ptr + len(keys)) % self.K

    def forward(self, im_q, im_k):
        q = nn.functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = nn.functional.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        logits = torch.cat([l_pos, q @ self.queue.clone().detach()], dim=1) / self.T
        self._dequeue_and_enqueue(k)
        return logits, torch.zeros(len(q)).long()


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 48), nn.ReLU(), nn.Linear(48, outputs))


def main():
    torch.manual_seed(0)
    model, criterion = MoCo(mlp), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    sources = torch.randn(6, 30)
    for i in range(20):
        im_q, im_k = (torch.rand(24, 6) * 2 - 1) @ sources + 0.3 * torch.randn(2, 24, 30)
        loss = criterion(*model(im_q, im_k))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"[{i}/20] Loss {loss.item():.4e}")


main()
