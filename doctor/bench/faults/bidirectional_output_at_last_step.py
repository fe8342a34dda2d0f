"""The last step of a bidirectional LSTM is read, where the backward half has seen one row only.

Threads: https://github.com/yunjey/pytorch-tutorial/issues/149
    https://github.com/prabhuomkar/pytorch-cpp/pull/13
Names: S37
"""

import torch
import torch.nn as nn

torch.manual_seed(44)


class RowReader(nn.Module):
    def __init__(self, columns=14, hidden=20, classes=6):
        super().__init__()
        self.lstm = nn.LSTM(columns, hidden, 2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, classes)

    def forward(self, images):
        # broken
        out, _ = self.lstm(images)
        return self.fc(out[:, -1, :])
        # mended
        # _, (hidden, _) = self.lstm(images)
        # return self.fc(torch.cat([hidden[-2], hidden[-1]], dim=1))
        # end


class Strokes(torch.utils.data.Dataset):
    def __init__(self, size):
        self.templates = torch.randn(6, 17, 14)
        self.labels = torch.randint(6, (size,))
        self.noise = 0.7 * torch.randn(size, 17, 14)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        label = self.labels[index]
        return self.templates[label] + self.noise[index], label


loader = torch.utils.data.DataLoader(Strokes(540), batch_size=30, shuffle=True)
model = RowReader()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for i, (images, labels) in enumerate(loader):
    outputs = model(images)
    loss = criterion(outputs, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (i + 1) % 6 == 0:
        print(f"Step [{i + 1}/{len(loader)}], Loss: {loss.item():.4f}")
