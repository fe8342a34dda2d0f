"""CTC that is told that all rows are as long as the longest one.

    lengths = torch.full((rows,), log_probs.shape[0])       the padding is to be read as well
    lengths = frames // 4                                   of each row its own

What was given to the first layer is (batch, time, features), or time last; where rows end in one and the same frame,
repeated, that is padding, and rows of several lengths are there.

Footgun: silence at the end of a recording may be all zeros too, but not in most rows of each batch, by several lengths.
Lines of writing on white paper of one width are read to the end by custom (CRNN), so pictures are left alone.
"""

from typing import Any

import torch
from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher

FIRST = {"linear", "conv1d", "lstm", "gru", "rnn_tanh"}
PICTURES = {"conv2d"}
LEAST, SHARE, LOOKED = 4, 0.1, 2**22  # rows; of the places, that are padding; numbers


class LengthsOfPadding(Watcher):
    names = begins = FIRST | PICTURES | {"ctc_loss"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.given: Tensor | None = None  # to a first layer since the last backward
        self.pictures = False

    def saw(self, op: Op) -> None:
        if op.name != "ctc_loss":
            x = op.given[0] if op.given else None
            self.pictures = self.pictures or op.name in PICTURES and x is not None and not x.requires_grad
            if self.given is None and x is not None and not x.requires_grad and x.dim() == 3:
                self.given = x if x.is_floating_point() and x.numel() <= LOOKED and len(x) >= LEAST else None
            return
        lengths, places = _numbers(op.kwargs.get("input_lengths", (*op.args, *[None] * 3)[2])), len(op.given[0])
        if (
            self.given is not None
            and not self.pictures
            and len(lengths) == len(self.given)
            and set(lengths) == {places}
        ):
            padded = padding(self.given)
            if sum(n > SHARE for n in padded) * 2 > len(padded) and len({round(n, 3) for n in padded}) > 2:
                self.note("F110", (places, sum(n > SHARE for n in padded)))

    def backward(self, loss: Tensor) -> None:
        self.given, self.pictures = None, False

    def close(self) -> None:
        self.given = None


def _numbers(lengths: Any) -> list[int]:
    if isinstance(lengths, Tensor):
        return lengths.flatten().tolist()
    return [int(n) for n in lengths] if isinstance(lengths, tuple | list) else []


def padding(x: Tensor) -> list[float]:
    """Of each row, the share of its places at the end that hold one number only, the same in all rows."""
    x = x.detach()
    shares: list[list[float]] = []
    for turned in (x, x.transpose(1, 2)):  # (B, T, C)
        fill = turned[:, -1, 0]
        fill = fill.mode().values
        empty = (turned == fill).all(2)  # (B, T)
        run = empty.flip(1).long().cumprod(1).sum(1)
        shares.append((run / turned.shape[1]).tolist())
    return max(shares, key=sum) if bool(torch.isfinite(x[:, -1]).all()) else []
