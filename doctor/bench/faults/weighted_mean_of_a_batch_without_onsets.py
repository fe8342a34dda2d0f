"""The loss is divided by the number of onset frames, and a clip without any makes it NaN.

Threads: https://github.com/york135/CTC_CE_for_AST/issues/3
Names: N17
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

BINS, FRAMES, PITCHES = 20, 30, 9


class Transcriber(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(BINS, 32, 3, padding=1)
        self.onset = nn.Conv1d(32, 1, 1)
        self.pitch = nn.Conv1d(32, PITCHES, 1)

    def forward(self, clip):
        h = F.relu(self.conv(clip))
        return self.onset(h).squeeze(1), self.pitch(h)


def song(generator, timbre):
    loud = torch.rand(1, generator=generator) < 0.7
    onset = ((torch.rand(1, FRAMES, generator=generator) < 0.2) & loud).float()
    pitch = torch.randint(0, PITCHES, (1, FRAMES), generator=generator)
    clip = timbre[pitch].transpose(1, 2) * onset.unsqueeze(1)
    return clip + 0.1 * torch.randn(clip.shape, generator=generator), onset, pitch


def main():
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(8)
    timbre = torch.randn(PITCHES, BINS)
    model = Transcriber()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(18):
        clip, onset, pitch = song(generator, timbre)
        onset_logits, pitch_logits = model(clip)
        onset_loss = F.binary_cross_entropy_with_logits(onset_logits, onset)
        per_frame = F.cross_entropy(pitch_logits, pitch, reduction="none")
        # broken
        pitch_loss = (per_frame * onset).sum() / onset.sum()
        # mended
        # pitch_loss = (per_frame * onset).sum() / onset.sum().clamp(min=1)
        # end
        loss = onset_loss + pitch_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            print(f"{step} onset {onset_loss.item():.3f} pitch {pitch_loss.item():.3f}")


main()
