"""Two LSTM cells in double precision learn sine waves by LBFGS on the whole table, whose closure
runs many passes for one step; the forecast goes on beyond the data without gradients.

After: pytorch/examples
"""

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 16)
        self.lstm2 = nn.LSTMCell(16, 16)
        self.linear = nn.Linear(16, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t = torch.zeros(input.size(0), 16, dtype=torch.double)
        c_t = torch.zeros_like(h_t)
        h_t2 = torch.zeros_like(h_t)
        c_t2 = torch.zeros_like(h_t)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


np.random.seed(0)
torch.manual_seed(0)
data = np.sin((np.arange(20) + np.random.randint(-40, 40, 11).reshape(11, 1)) / 3.0)
input, target = torch.from_numpy(data[3:, :-1]), torch.from_numpy(data[3:, 1:])
test_input, test_target = torch.from_numpy(data[:3, :-1]), torch.from_numpy(data[:3, 1:])
seq = Sequence().double()
criterion = nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=3)


def closure():
    optimizer.zero_grad()
    loss = criterion(seq(input), target)
    loss.backward()
    return loss


for i in range(15):
    loss = optimizer.step(closure)
    with torch.no_grad():
        pred = seq(test_input, future=5)
        print(i, loss.item(), "test", criterion(pred[:, :-5], test_target).item())
