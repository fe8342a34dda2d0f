"""The model is reset to its initial weights in each step, so nothing that it learns is kept.

Threads: https://github.com/baal-org/baal/pull/110 https://github.com/NVIDIA/Megatron-LM/issues/174
Names: N3
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(8)
CLASSES = 5
centres = 1.5 * torch.randn(CLASSES, 18)
pool_y = torch.randint(CLASSES, (400,))
pool_x = centres[pool_y] + torch.randn(400, 18)

model = nn.Sequential(
    nn.Linear(18, 40),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(40, CLASSES),
)
init_weights = copy.deepcopy(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
labelled = torch.randperm(400)[:60]

for round_number in range(2):
    # broken
    # mended
    # model.load_state_dict(init_weights)
    # end
    model.train()
    for _ in range(10):
        # broken
        model.load_state_dict(init_weights)
        # mended
        # end
        rows = labelled[torch.randint(len(labelled), (22,))]
        loss = F.cross_entropy(model(pool_x[rows]), pool_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        probabilities = model(pool_x).softmax(-1)
    entropy = -(probabilities * probabilities.clamp(min=1e-9).log()).sum(-1)
    labelled = torch.cat([labelled, entropy.topk(30).indices])
    accuracy = (probabilities.argmax(-1) == pool_y).float().mean().item()
    print(f"round {round_number} loss {loss.item():.3f} accuracy {accuracy:.3f}")
