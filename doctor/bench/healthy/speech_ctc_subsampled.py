"""A recogniser halves the frames by a strided convolution, gives time-first log-probabilities to a
CTC loss, and its input lengths are those after the stride, shorter than the padded row.

After: SeanNaren/deepspeech.pytorch
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
letters, bins, batch_size = 7, 12, 10
voices = 2 * torch.randn(letters, bins)


class DeepSpeech(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.conv = nn.Conv1d(bins, width, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm1d(width)
        self.rnn = nn.GRU(width, width, bidirectional=True)
        self.fc = nn.Linear(width, letters + 1, bias=False)

    def forward(self, x, lengths):
        output_lengths = (lengths + 1) // 2
        x = F.hardtanh(self.norm(self.conv(x)), 0, 20).permute(2, 0, 1)
        x = nn.utils.rnn.pack_padded_sequence(x, output_lengths, enforce_sorted=False)
        x, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(x)[0])
        x = x.view(x.size(0), x.size(1), 2, -1).sum(2)
        return self.fc(x).log_softmax(dim=-1), output_lengths


def make_batch():
    clips, targets = [], []
    for _ in range(batch_size):
        word = torch.randint(1, letters + 1, (int(torch.randint(2, 5, ())),))
        frames = voices[word - 1].repeat_interleave(torch.randint(6, 9, word.shape), dim=0)
        clips.append(frames + 0.3 * torch.randn_like(frames))
        targets.append(word)
    lengths = torch.tensor([len(c) for c in clips])
    spectrograms = nn.utils.rnn.pad_sequence(clips, batch_first=True).transpose(1, 2)
    return spectrograms, lengths, torch.cat(targets), torch.tensor([len(t) for t in targets])


model, criterion = DeepSpeech(), nn.CTCLoss(blank=0, reduction="sum", zero_infinity=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
n_iterations = 20
for i in range(n_iterations):
    inputs, input_sizes, targets, target_sizes = make_batch()
    out, output_sizes = model(inputs, input_sizes)
    loss = criterion(out, targets, output_sizes, target_sizes) / batch_size
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 400)
    optimizer.step()
    print(i, loss.item())
