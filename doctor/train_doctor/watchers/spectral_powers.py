"""A power spectrogram that goes into a network as it is: its numbers span many powers of ten.

    power = torch.stft(wave, ...).abs().pow(2)
    model(mel @ power)                              the loudest bins decide everything
    model((mel @ power + 1e-6).log())

The square of what a transform gave is followed through filters to a first layer that learns.

Footgun: magnitudes, without the square, are given as they are by networks that make masks for them. A root, a logarithm
and a division by a mean end it, also just behind that layer, which may be the bank of filters itself. A layer that
normalises does not: its numbers are as far apart as before.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import OVER

TRANSFORMS = {"stft", "fft_rfft", "fft_fft", "rfft", "fft"}
LAYERS = {"linear", "conv1d", "conv2d", "gru", "lstm", "batch_norm", "layer_norm"}
KEEPS = {"matmul", "__matmul__", "mm", "bmm", "einsum", "transpose", "permute", "unsqueeze", "squeeze", "stack", "to"}
KEEPS |= {"cat", "float", "__getitem__", "contiguous", "view", "reshape", "clamp", "add", "__add__", "T", "mT"}
COMPRESSES = {"log", "log10", "log2", "log1p", "sqrt", "pow", "__pow__"}
SPECTRUM, PARTS, SIZE, POWER, HEARD = "spectrum", "parts", "size", "power", "heard"
WIDE = 100  # how many times as large as their median the largest are


class SpectralPowers(Watcher):
    begins = TRANSFORMS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.heard: list[tuple] = []  # what layers were given in this step: shape, median, largest

    def saw(self, op: Op) -> None:
        if op.name in TRANSFORMS:
            made = SPECTRUM if op.results and op.results[0].is_complex() else PARTS
        else:
            fact = next((f for f in map(self.known.get, op.given) if f), None)
            made = fact and self._next(op, fact)
        for r in op.results if made else ():
            self.known.put(r, made)

    def _next(self, op: Op, fact: str) -> str | None:
        if fact == HEARD or op.name in OVER and fact == POWER:  # a logarithm behind it, or a division by what it made
            if op.name in OVER or op.name in COMPRESSES:
                self.heard = []
            return HEARD if fact == HEARD and op.name in KEEPS | {"relu", "softplus"} else None
        if op.name in LAYERS and fact == POWER:
            if any(t.requires_grad for t in op.given[1:]):
                x = op.given[0].detach().float()
                middle, top = (float(x.median()), float(x.max())) if x.numel() else (0.0, 0.0)
                if not op.given[0].requires_grad and top > WIDE * middle and float(x.min()) >= 0:
                    self.heard.append((tuple(x.shape), middle, top))
                    return HEARD
                return None
            return fact  # a bank of filters
        if op.name == "abs" and fact == SPECTRUM:
            return SIZE
        if op.name in ("view_as_real", "real", "imag") and fact == SPECTRUM:
            return PARTS
        number = op.args[1] if len(op.args) == 2 and isinstance(op.args[1], int | float) else None
        power = op.name == "square" or op.name in ("pow", "__pow__") and number == 2
        if power and fact in (SIZE, PARTS):
            return POWER
        if op.name in KEEPS or fact == POWER and op.name in ("sum", "mean"):
            return fact
        return None

    def backward(self, loss: Tensor) -> None:
        for heard in self.heard[:1]:
            self.note("D42", heard)
        self.heard = []

    def close(self) -> None:
        self.heard = []
        self.known.by_id.clear()
