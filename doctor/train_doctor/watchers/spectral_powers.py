"""A power spectrogram that goes into a network as it is: its numbers span many powers of ten.

    power = torch.stft(wave, ...).abs().pow(2)
    model(mel @ power)                              the loudest bins decide everything
    model((mel @ power + 1e-6).log())

The square of what a transform gave is followed through filters to a first layer that learns.

Footgun: magnitudes, without the square, are given as they are by networks that make masks for them. A root, a logarithm
and a division by a mean end it. A layer that normalises does not: its numbers are as far apart as before.
"""

from train_doctor.eye import Eye, Known, Op, Watcher

TRANSFORMS = {"stft", "fft_rfft", "fft_fft", "rfft", "fft"}
LAYERS = {"linear", "conv1d", "conv2d", "gru", "lstm", "batch_norm", "layer_norm"}
KEEPS = {"matmul", "__matmul__", "mm", "bmm", "einsum", "transpose", "permute", "unsqueeze", "squeeze", "stack", "to"}
KEEPS |= {"cat", "float", "__getitem__", "contiguous", "view", "reshape", "clamp", "add", "__add__", "T", "mT"}
SPECTRUM, PARTS, SIZE, POWER = "spectrum", "parts", "size", "power"
WIDE = 100  # how many times as large as their median the largest are


class SpectralPowers(Watcher):
    begins = TRANSFORMS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name in TRANSFORMS:
            made = SPECTRUM if op.results and op.results[0].is_complex() else PARTS
        else:
            fact = next((f for f in map(self.known.get, op.given) if f), None)
            made = fact and self._next(op, fact)
        for r in op.results if made else ():
            self.known.put(r, made)

    def _next(self, op: Op, fact: str) -> str | None:
        if op.name in LAYERS and fact == POWER:
            if any(t.requires_grad for t in op.given[1:]):
                x = op.given[0].detach().float()
                middle, top = float(x.median()), float(x.max())
                if not op.given[0].requires_grad and float(x.min()) >= 0 and top > WIDE * middle:
                    self.note("D42", (tuple(x.shape), middle, top))
                return None
            return fact  # a bank of filters
        if op.name == "abs" and fact == SPECTRUM:
            return SIZE
        if op.name in ("view_as_real", "real", "imag") and fact == SPECTRUM:
            return PARTS
        power = op.name == "square" or op.name in ("pow", "__pow__") and op.args[1:] in ((2,), (2.0,))
        if power and fact in (SIZE, PARTS):
            return POWER
        if op.name in KEEPS or fact == POWER and op.name in ("sum", "mean"):
            return fact
        return None

    def close(self) -> None:
        self.known.by_id.clear()
