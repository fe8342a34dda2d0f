"""DPO with a reference that is a copy of the policy, so that the first loss is exactly ln 2, and
chosen and rejected answers go through the model in one batch.

After: eric-mitchell/direct-preference-optimization
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
vocab, dim, prompt_len, answer_len, batch_size, beta = 15, 32, 5, 4, 12, 0.1


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Embedding(vocab, dim), nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0])


def get_batch_logps(logits, labels):
    labels = labels[:, 1:].clone()
    loss_mask = labels != -100
    labels[labels == -100] = 0
    per_token = logits[:, :-1].log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    return (per_token * loss_mask).sum(-1)


def concatenated_forward(model, ids, labels):
    return get_batch_logps(model(ids), labels).chunk(2)


policy = Policy()
reference_model = copy.deepcopy(policy).eval()
optimizer = torch.optim.RMSprop(policy.parameters(), lr=2e-3)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 4))
steps = 20
for step in range(steps):
    prompt = torch.randint(1, vocab, (batch_size, prompt_len))
    chosen = (prompt[:, -1:] + torch.arange(1, answer_len + 1)) % vocab
    rejected = torch.randint(1, vocab, (batch_size, answer_len))
    ids = torch.cat([torch.cat([prompt, chosen], 1), torch.cat([prompt, rejected], 1)])
    labels = ids.clone()
    labels[:, :prompt_len] = -100
    policy_chosen, policy_rejected = concatenated_forward(policy, ids, labels)
    with torch.no_grad():
        reference_chosen, reference_rejected = concatenated_forward(reference_model, ids, labels)
    logits = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)
    loss = -F.logsigmoid(beta * logits).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warmup.step()
    print(step, loss.item(), (logits > 0).float().mean().item())
