"""The encoder is frozen between backward and step, so its leftover gradients still move it.

Threads: https://github.com/neuralmagic/sparseml/issues/965
Names: N12
Missed: the encoder still trains at the first backward, and the check looks at what is frozen then.
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(37)
CLASSES = 4
templates = torch.randn(CLASSES, 2, 40)

encoder = nn.Sequential(
    nn.Conv1d(2, 16, 7, padding=3),
    nn.GELU(),
    nn.Conv1d(16, 16, 5, stride=2),
    nn.AdaptiveAvgPool1d(6),
    nn.Flatten(),
)
for number, tensor in enumerate(encoder.parameters()):
    nn.init.trunc_normal_(tensor, std=0.2 / (1 + number))
head = nn.Linear(96, CLASSES)
optimizer = torch.optim.SGD(
    [*encoder.parameters(), *head.parameters()], lr=0.05, momentum=0.9, weight_decay=1e-3
)


def sensor_batch(size):
    label = torch.randint(CLASSES, (size,))
    shift = torch.randint(0, 5, (1,)).item()
    return templates[label].roll(shift, -1) + 0.5 * torch.randn(size, 2, 40), label


def apply_recipe(step):
    if step == 0:
        encoder.requires_grad_(False)


# broken
# mended
# apply_recipe(0)
# end
for step in range(18):
    signal, label = sensor_batch(19)
    loss = F.cross_entropy(head(encoder(signal)), label)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    # broken
    apply_recipe(step)
    # mended
    # end
    optimizer.step()
    print(step, f"{loss.item():.4f}")
