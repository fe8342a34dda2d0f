"""Shares of data and noise in a diffusion model without their roots: `a * x0 + (1 - a) * noise`.

    xt = a.sqrt() * x0 + (1 - a).sqrt() * noise

Then the variance stays 1 at every time, and the sampler's formulas hold. Without one root or both the network is shown
other mixtures than the sampler makes, and nothing else tells.

The factors of a sum of data and a normal draw are looked at. Their squares must not sum to 1 while they themselves do,
or one with the other's square, and the loss must ask for that draw.

Footgun: straight paths (flow matching) mix by t and 1 - t rightly. Their time is drawn, and theirs is no table of steps
that is looked up; and mostly they ask for the difference of noise and data.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, PLUS, POWERS, TIMES

NORMAL = {"randn", "randn_like", "normal"}
LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"} | MINUS
LOOKED, CLOSE = 4096, 1e-4
LOOKUPS = {"__getitem__", "gather", "index_select", "take"}  # in a table, by the numbers of steps
ALONG = {"view", "reshape", "unsqueeze", "squeeze", "sqrt", "rsub", "__rsub__", "sub", "expand", "to", "float", "pow"}
ALONG |= LOOKUPS
NOISE, TABLE, ASKED = "noise", "table", "asked"


class Mixtures(Watcher):
    """What is known of a tensor: NOISE, TABLE of what was looked up, ASKED of a difference of an answer and noise, or
    (its factors, whether they are those of noise, whether they were looked up)."""

    begins = NORMAL | TIMES | {"__getitem__", "gather", "index_select", "take"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.mixed = ""  # which roots are missing, since the last backward

    def saw(self, op: Op) -> None:
        result = op.result
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return
        if op.name in LOOKUPS and len(op.given) > 1 and not result.requires_grad:
            self.known.put(result, TABLE)
        elif op.name in ALONG and TABLE in map(self.known.get, op.given) and op.name not in TIMES:
            self.known.put(result, TABLE)
        elif op.name in NORMAL and not result.requires_grad:
            self.known.put(result, NOISE)
        elif op.name in TIMES and not result.requires_grad and result.dim() > 1:
            self._product(op, result)
        elif op.name in PLUS and len(op.given) == 2:
            facts = [self.known.get(t) for t in op.given]
            if all(isinstance(f, tuple) for f in facts) and facts[0][1] != facts[1][1]:
                (noise,), (data,) = ([f[0] for f in facts if f[1] is kind] for kind in (True, False))
                kind = _missing(data, noise)
                steps = all(f[2] for f in facts)  # a straight path has a time that is drawn, and no table of it
                self.mixed = kind if kind and (steps or kind != "both") else self.mixed
        elif op.name in LOSSES and len(op.given) == 2 and self.mixed:
            for answer, target in (op.given, op.given[::-1]):
                if answer.requires_grad and self.known.get(target) == NOISE:
                    self.known.put(result, ASKED) if op.name in MINUS else self.note("F67", self.mixed)
        elif op.name in POWERS and self.known.get(op.given[0]) == ASKED and self.mixed:
            self.note("F67", self.mixed)

    def _product(self, op: Op, result: Tensor) -> None:
        for whole, factor in (op.args[:2], op.args[1::-1]) if len(op.args) == 2 else ():
            if not isinstance(whole, Tensor) or whole.shape != result.shape:
                continue
            if isinstance(factor, Tensor) and not 0 < factor.numel() * 2 <= whole.numel():
                continue
            if isinstance(factor, Tensor) and factor.numel() > LOOKED:
                continue
            table = isinstance(factor, Tensor) and self.known.get(factor) == TABLE
            self.known.put(result, (torch.as_tensor(factor).detach().flatten(), self.known.get(whole) == NOISE, table))
            return

    def backward(self, loss: Tensor) -> None:
        self.mixed = ""

    def close(self) -> None:
        self.known.by_id.clear()


def _missing(data: Tensor, noise: Tensor) -> str:
    """Which factor lacks its root."""
    if data.numel() != noise.numel() or not data.is_floating_point() or not noise.is_floating_point():
        return ""
    data, noise = data.double(), noise.double()
    middle = (data > 0.02) & (noise > 0.02)

    def one(sums: Tensor) -> bool:
        return bool(((sums - 1).abs() < CLOSE).all())

    if not bool(middle.any()) or one(data**2 + noise**2):
        return ""
    kinds = {"both": data + noise, "the noise": data**2 + noise, "the data": data + noise**2}
    return next((kind for kind, sums in kinds.items() if one(sums)), "")
