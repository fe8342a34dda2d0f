"""How much noise there is, and whether the network is told.

    t = torch.randint(steps, (rows,))
    x_t = a[t] * x0 + s[t] * noise
    model(x_t)                                      model(x_t, t) was meant; or its forward never uses t

A network that is asked for the noise at every strength, and not told which, gives an answer between all of them. What
was drawn for each row is followed, through tables, sines and layers, into the noisy input on one side and into
anything that learns on the other.

Footguns: a blind denoiser adds noise of some strength, often to data that stay as they are, and mixup puts data and
data together. So both parts must be scaled by what was drawn, one must be noise, and there must be much of it. Whatever
learns may be told in any way: by a table, by a column, by a factor; each of them counts.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES

DRAWS, NORMAL = {"randint", "rand"}, {"randn", "randn_like", "normal"}
LAYERS = {"linear", "conv1d", "conv2d", "conv3d"}
TIME, NOISE, GAP, PART, NOISY = "time", "noise", "gap", "part", "noisy"
LEAST, STRONG = 8, 0.75  # rows; the share of noise that is reached by what a sampler begins with


class NoiseTimes(Watcher):
    """What is known of a tensor: (TIME, rows), NOISE as it was drawn, GAP of it and data, PART of a mixture with what
    was scaled, or that it is NOISY."""

    begins = DRAWS | NORMAL

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.asked = 0  # rows that were given to a layer, noisy
        self.told = False
        self.most = 0.0  # of the shares of noise

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if r is None:
            return
        if op.name in self.begins:
            if r.dim() and r.numel() == len(r) >= LEAST and op.name in DRAWS:
                self.known.put(r, (TIME, len(r)))
            elif op.name in NORMAL and r.dim() > 1:
                self.known.put(r, (NOISE,))
            return
        facts = [self.known.get(t) or ("",) for t in op.given]
        kinds = [f[0] for f in facts]
        if r.requires_grad:
            self.told = self.told or TIME in kinds
            if NOISY in kinds and op.name in LAYERS:
                self.asked = len(op.given[kinds.index(NOISY)])
        elif fact := self._next(op, kinds, facts, r):
            self.known.put(r, fact)

    def _next(self, op: Op, kinds: list, facts: list, r: Tensor) -> tuple | None:
        time = next((f for f in facts if f[0] == TIME), None)
        if time is not None:
            return self._timed(op, kinds, time, r)
        if op.name in PLUS | MINUS and len(kinds) == 2:
            parts, alike = {f[-1] for f in facts if f[0] == PART}, op.given[0].shape == op.given[1].shape
            if kinds.count(PART) == 2 and NOISE in parts or GAP in parts and alike:
                return (NOISY,)
            if op.name in MINUS and kinds.count(NOISE) == 1 and alike:
                return (GAP,)
        alone = [k for k in kinds if k]
        if op.name in TIMES | OVER | PLUS | MINUS:
            return (NOISY,) if alone == [NOISY] else None
        return facts[kinds.index(alone[0])] if len(set(alone)) == 1 and r.numel() >= op.given[0].numel() else None

    def _timed(self, op: Op, kinds: list, time: tuple, r: Tensor) -> tuple | None:
        """Of a time and something else: a later form of the time, a part of a mixture, or an input that tells it."""
        rows = time[1]
        other = next((n for n, t in enumerate(op.given) if kinds[n] != TIME and t.dim() > 1 and len(t) == rows), None)
        if op.name == "lerp" and other is not None:
            self.most = 1.0
            return (NOISY,) if NOISE in kinds else None
        if other is None or op.name in ("__getitem__", "gather", "index_select", "take"):
            return time if r.dim() and len(r) == rows else None
        if op.name in TIMES | OVER:
            if kinds[other] in (NOISE, GAP):
                share = op.given[1 - other].detach() if len(op.given) == 2 else None
                self.most = max(self.most, float(share.float().abs().max()) if share is not None else 0.0)
            return (NOISY,) if kinds[other] == NOISY else (PART, kinds[other])
        return time  # put beside it: an input that tells the time

    def backward(self, loss: Tensor) -> None:
        if self.asked and not self.told and self.most > STRONG:
            self.note("F106", self.asked)
        self.asked, self.told, self.most = 0, False, 0.0

    def close(self) -> None:
        self.known.by_id.clear()
