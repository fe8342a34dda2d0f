"""An autoencoder: input and target are the same pictures, as they should be, with a bottleneck of
three numbers; the labels of the loader are not used.

After: MorvanZhou/PyTorch-Tutorial
"""

import torch
import torch.nn as nn
import torch.utils.data as Data

torch.manual_seed(1)

EPOCH, LR = 2, 0.005
BATCH_SIZE = 28

angles = torch.rand(BATCH_SIZE * 9) * 3.14
axis = torch.linspace(-1, 1, 10)
across = axis.view(1, 10, 1) * angles.cos().view(-1, 1, 1)
along = axis.view(1, 1, 10) * angles.sin().view(-1, 1, 1)
pictures = torch.exp(-8 * (across + along) ** 2)
labels = (angles / 3.14 * 5).long()
train_loader = Data.DataLoader(
    dataset=Data.TensorDataset(pictures, labels), batch_size=BATCH_SIZE, shuffle=True
)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(100, 48), nn.Tanh(), nn.Linear(48, 12), nn.Tanh(), nn.Linear(12, 3)
        )
        self.decoder = nn.Sequential(
            nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 100),
            nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x):
        encoded = self.encoder(x)
        decoded = self.decoder(encoded)
        return encoded, decoded


autoencoder = AutoEncoder()
optimizer = torch.optim.Adam(autoencoder.parameters(), lr=LR)
loss_func = nn.MSELoss()
view_data = pictures[:5].view(-1, 100)

for epoch in range(EPOCH):
    for step, (x, _) in enumerate(train_loader):
        b_x = x.view(-1, 100)
        b_y = x.view(-1, 100)
        encoded, decoded = autoencoder(b_x)
        loss = loss_func(decoded, b_y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            _, decoded_data = autoencoder(view_data)
            print("Epoch: ", epoch, f"| train loss: {loss.data.numpy():.4f}")
