"""The function of LambdaLR contains the learning rate, so the rate is applied twice.

Threads: https://github.com/lhoyer/MIC/issues/60 https://github.com/pytorch/pytorch/issues/78917
Names: N9 N5
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(19)
LR, GAMMA, DECAY = 0.003, 0.05, 0.75
CLASSES = 6
prototypes = torch.randn(CLASSES, 3, 8, 8)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(16 * 16, CLASSES)

    def forward(self, images):
        return self.head(self.features(images).flatten(1))


def domain_batch(size, shift):
    label = torch.randint(CLASSES, (size,))
    return prototypes[label] + torch.randn(size, 3, 8, 8) + shift, label


model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-3)
# broken
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: LR * (1.0 + GAMMA * step) ** (-DECAY)
)
# mended
# scheduler = torch.optim.lr_scheduler.LambdaLR(
#     optimizer, lambda step: (1.0 + GAMMA * step) ** (-DECAY)
# )
# end

for step in range(20):
    source, label = domain_batch(21, 0.0)
    target, _ = domain_batch(21, 0.3)
    entropy = torch.distributions.Categorical(logits=model(target)).entropy().mean()
    loss = F.cross_entropy(model(source), label) + 0.1 * entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"{step} {loss.item():.4f} {scheduler.get_last_lr()[0]:.2e}")
