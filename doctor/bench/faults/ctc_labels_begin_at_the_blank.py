"""The labels begin at 0, which CTC takes for its blank, so one letter is never written.

Threads: https://github.com/espnet/espnet/issues/700
    https://github.com/SeanNaren/deepspeech.pytorch/issues/354
Names: F66
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

LETTERS, MELS, REPEAT, BATCH = 11, 16, 4, 13


class Recognizer(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.conv = nn.Conv1d(MELS, 40, 5, padding=2)
        self.rnn = nn.GRU(40, 32, batch_first=True, bidirectional=True)
        self.out = nn.Linear(64, outputs)

    def forward(self, frames):
        x = torch.relu(self.conv(frames.transpose(1, 2))).transpose(1, 2)
        x, _ = self.rnn(x)
        return self.out(x).log_softmax(-1)


def utterances(voices):
    lengths = torch.randint(3, 8, (BATCH,))
    letters = torch.randint(0, LETTERS, (BATCH, int(lengths.max())))
    frames = voices[letters.repeat_interleave(REPEAT, dim=1)]
    frames = frames + 0.3 * torch.randn(frames.shape)
    return frames, lengths * REPEAT, letters, lengths


def main():
    torch.manual_seed(66)
    voices = torch.randn(LETTERS, MELS)
    # broken
    model, first = Recognizer(LETTERS), 0
    # mended
    # model, first = Recognizer(LETTERS + 1), 1
    # end
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(16):
        frames, frame_lengths, letters, letter_lengths = utterances(voices)
        log_probs = model(frames).transpose(0, 1)
        targets = letters + first
        loss = F.ctc_loss(log_probs, targets, frame_lengths, letter_lengths, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 5 == 0:
            print(f"{step:2d} ctc {loss.item():.4f}")


if __name__ == "__main__":
    main()
