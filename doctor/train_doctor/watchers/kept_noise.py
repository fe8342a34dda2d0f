"""Noise that was drawn once, before the loop, and is used in every step.

    z = torch.randn(64, 100)                            in front of the loop
    for real in loader: ... d(g(z)) ...                 the generator learns 64 samples

What looks like standard normal draws is told by its numbers: what goes into a first layer that learns, is the target
of a regression, or is multiplied number by number with what learns (the spread of a latent). In three steps with the
same noise and other data, nothing was random. Where two optimizers take turns, two of these are seen, with a step of
the other one in between.

Footgun: one network that turns fixed noise into one picture (a deep image prior) has no other data. Columns that were
standardised have a mean of 0 each, which draws do not. And whole data, that rows are taken of in the same steps, may be
asked for an accuracy in each. Rows of an earlier task that are kept have classes that are kept with them.
"""

from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher
from train_doctor.fed import CLASSES, PLAIN
from train_doctor.watchers.operators import TIMES
from train_doctor.watchers.redrawn import few

LAYERS = {"linear", "conv2d", "conv1d", "conv_transpose2d"}
TAKES = {"__getitem__", "index_select"}
LEAST, COLUMNS, LOOKED, STEPS = 64, 2, 2**20, 3  # numbers; of a row; numbers; steps
FAR = 4.0  # standard errors of a mean or a spread


class KeptNoise(Watcher):
    names = begins = LAYERS | set(PLAIN) | TAKES | set(CLASSES) | TIMES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.noise: dict[int, dict[tuple, tuple]] = {}  # step -> what looks like draws -> its shape
        self.data: dict[int, set[tuple]] = {}  # step -> what went into first layers
        self.labels: dict[int, set[tuple]] = {}  # step -> how many rows, and their classes
        self.whole: set[tuple] = set()  # shapes of data that rows were taken of

    def saw(self, op: Op) -> None:
        if op.name in TAKES:
            fewer = op.results and op.results[0].dim() > 1 and len(op.results[0]) < len(op.given[0])
            self.whole |= {tuple(t.shape) for t in op.given[:1] if not t.requires_grad and t.dim() > 1 and fewer}
            return
        if len(op.given) < 2 or not self.eye.grad:
            return
        x, other = op.given[:2]
        if op.name in CLASSES:
            if not other.is_floating_point() and other.dim() == 1:
                self.labels.setdefault(self.eye.turn, set()).add((len(other), few(other)))
            return
        if op.name in PLAIN or op.name in TIMES and x.requires_grad:
            x, other = other, x
        if op.name in TIMES and (x.shape != other.shape or other.grad_fn is None):
            return  # or noise of weights, which a rollout keeps
        if x.requires_grad or not other.requires_grad or x.dim() < 2 or not x.is_floating_point():
            return
        if LEAST <= x.numel() <= LOOKED and len(self.data.setdefault(self.eye.turn, set())) < LEAST:
            number = few(x)
            if _normal(x.detach().float().flatten(1)):
                self.noise.setdefault(self.eye.turn, {})[number] = tuple(x.shape)
            if op.name in LAYERS:
                self.data[self.eye.turn].add(number)

    def close(self) -> None:
        steps = list(self.noise)
        enough = len(steps) >= STEPS or len(self.e.optimizers) > 1 and len(steps) > 1 and steps[-1] - steps[0] > 1
        kept = set.intersection(*(set(self.noise[turn]) for turn in steps)) if enough else set()
        kept = {number for number in kept if self.noise[steps[0]][number] not in self.whole}
        labelled = {rows for rows, _ in set.intersection(*self.labels.values())} if self.labels else set()
        kept = {number for number in kept if self.noise[steps[0]][number][0] not in labelled}
        fresh = [data - kept for turn in steps if (data := self.data.get(turn, set())) - kept]
        if kept and len(fresh) > 1 and all(not a & b for n, a in enumerate(fresh) for b in fresh[:n]):
            for turn in steps:
                self.note("D20", ("kept", self.noise[turn][next(iter(kept))]), turn)
        self.noise, self.data, self.labels = {}, {}, {}


def _normal(x: Tensor) -> bool:
    """(B, D): whether these may be draws with mean 0 and spread 1."""
    count, (rows, columns) = x.numel(), x.shape
    if columns < COLUMNS or rows < COLUMNS:
        return False
    spread, mean = x.std(), x.mean()
    near = abs(float(mean)) < FAR / count**0.5 and abs(float(spread) - 1) < FAR / (2 * count) ** 0.5
    drift = float(x.mean(0).square().mean() * rows)  # about 1, of columns that nobody has put at 0
    flat = float((x - mean).pow(4).mean() / spread**4)  # 3, of normal draws; 1.8 of uniform ones
    return near and 0.15 < drift < FAR and 2.2 < flat < 4.5
