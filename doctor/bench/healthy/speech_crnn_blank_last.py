"""A recogniser of written lines reads columns of pictures as time, its blank is the last class, and
every row has the full input length because all pictures are equally wide.

After: meijieru/crnn.pytorch
"""

import torch
import torch.nn as nn

torch.manual_seed(8)
glyphs, height, columns, batch_size, word = 6, 8, 32, 14, 4
shapes = (torch.rand(glyphs, height, 6) < 0.5).float()


class CRNN(nn.Module):
    def __init__(self, nh=32):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.ReLU(True),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(12, nh, (4, 3), padding=(0, 1)),
            nn.BatchNorm2d(nh),
            nn.ReLU(True),
        )
        self.rnn = nn.LSTM(nh, nh, bidirectional=True)
        self.embedding = nn.Linear(nh * 2, glyphs + 1)

    def forward(self, input):
        conv = self.cnn(input)
        b, c, h, w = conv.size()
        assert h == 1, "the height of conv must be 1"
        recurrent, _ = self.rnn(conv.squeeze(2).permute(2, 0, 1))
        T, b, h = recurrent.size()
        return self.embedding(recurrent.view(T * b, h)).view(T, b, -1)


def write_lines():
    text = torch.randint(glyphs, (batch_size, word))
    images = torch.zeros(batch_size, 1, height, columns)
    for place in range(word):
        start = 8 * place + int(torch.randint(3, ()))
        images[:, 0, :, start : start + 6] = shapes[text[:, place]]
    return images + 0.2 * torch.randn_like(images), text


crnn, criterion = CRNN(), nn.CTCLoss(blank=glyphs)
optimizer = torch.optim.Adam(crnn.parameters(), lr=5e-3)
n_batches = 20
for i in range(n_batches):
    images, text = write_lines()
    preds = crnn(images)
    preds_size = torch.full((batch_size,), preds.size(0), dtype=torch.long)
    length = torch.full((batch_size,), word, dtype=torch.long)
    cost = criterion(preds.log_softmax(2), text, preds_size, length)
    crnn.zero_grad()
    cost.backward()
    optimizer.step()
    print(i, cost.item())
