"""Free adversarial training: each batch is shown four times in a row, and one backward serves both
the weights and the disturbance of the picture, which lives on between batches.

After: mahyarnajibi/FreeAdversarialTraining
"""

import torch
import torch.nn as nn

torch.manual_seed(0)
clip_eps, fgsm_step, n_repeats, batch_size = 0.08, 0.08, 4, 26
global_noise_data = torch.zeros(batch_size, 1, 8, 8)

model = nn.Sequential(
    nn.Conv2d(1, 12, 3, stride=2),
    nn.BatchNorm2d(12),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(12 * 9, 32),
    nn.ReLU(),
    nn.Linear(32, 5),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
kinds = torch.rand(5, 1, 8, 8)


def loader(batches):
    for _ in range(batches):
        target = torch.randint(0, 5, (batch_size,))
        noise = 0.15 * torch.randn(batch_size, 1, 8, 8)
        yield (kinds[target] + noise).clamp(0, 1), target


def train(epoch):
    model.train()
    for i, (input, target) in enumerate(loader(5)):
        for _ in range(n_repeats):
            noise_batch = global_noise_data[: input.size(0)].clone().requires_grad_(True)
            in1 = (input + noise_batch).clamp(0, 1.0)
            in1 = (in1 - 0.5) / 0.29
            output = model(in1)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()

            pert = fgsm_step * torch.sign(noise_batch.grad)
            global_noise_data[: input.size(0)] += pert
            global_noise_data.clamp_(-clip_eps, clip_eps)
            optimizer.step()
        print(f"Epoch [{epoch}][{i}] Loss {loss.item():.4f}")


train(0)
