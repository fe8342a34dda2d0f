"""The rows are sorted by class and not shuffled, so each batch pulls all answers to one class.

Threads: https://github.com/Deci-AI/super-gradients/issues/416
    https://github.com/pytorch/vision/issues/7818
Names: F20
"""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(12)
SPECIES, PER_SPECIES, MEASURES = 5, 72, 8
centers = 1.5 * torch.randn(SPECIES, MEASURES)
species = torch.arange(SPECIES).repeat_interleave(PER_SPECIES)
measures = centers[species] + torch.randn(len(species), MEASURES)
train_set = TensorDataset(measures, species)
# broken
loader = DataLoader(train_set, batch_size=18)
# mended
# loader = DataLoader(train_set, batch_size=18, shuffle=True)
# end

classifier = nn.Sequential(nn.Linear(MEASURES, 32), nn.ReLU(), nn.Linear(32, SPECIES))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1, momentum=0.8)
for batch, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = criterion(classifier(x), y)
    loss.backward()
    optimizer.step()
    if batch % 4 == 0:
        print(batch, f"{loss.item():.4f}")
with torch.no_grad():
    accuracy = (classifier(measures).argmax(1) == species).float().mean()
print(f"accuracy {accuracy.item():.3f}")
