"""Gaps that are rebuilt as if they were data: an autoencoder of ratings whose loss counts what nobody rated.

    loss = ((model(r) - r) ** 2).mean()                       r is 0 where there is no rating
    loss = ((model(r) - r) ** 2 * known).sum() / known.sum()

Most of the loss asks for zeros, so all answers are pulled to zero. A difference of an answer and the model's own input
is followed to its mean, and it is asked whether a mask came between.

Footgun: counts and dark pixels are zeros that are meant. Numbers around zero have none by themselves: where more than
half are exactly 0, and the others lie on both sides of it or far above it, zeros stand for nothing. Of targets that are
not the input (a depth in each place of a picture), the others must lie above 0 by more than they are spread there. And
in tables and series nothing is said unless the batch holds flags of what is known, too: an appliance that is off takes
exactly 0. Targets that were NaN until something filled them in are gaps whatever they are.
"""

import torch
from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import POWERS, TIMES, written

FIRST = {"linear", "dropout"}
MINUS = {"sub", "subtract", "__sub__", "rsub", "__rsub__"}
SAME, CASTS = {"view", "reshape", "flatten"}, {"float", "to", "squeeze"}
LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
FLAGGED = {"binary_cross_entropy", "binary_cross_entropy_with_logits"}  # asked for filled targets only
FILLS = {"nan_to_num", "isnan", "where", "masked_fill", "__setitem__"}
NODES = 3000
SOME, SORTED, SOME_NUMBERS = 0.02, 4096, 32  # share of zeros, numbers that are sorted, different ones among them
FLAGS = (torch.bool, torch.float32, torch.uint8)
EMPTY, LEAST, LOOKED = 0.5, 64, 2**22  # share of zeros; numbers
RESTORED = 0.5  # of a correlation: the target is what the picture was


class Gaps(Watcher):
    names = FIRST | MINUS | POWERS | TIMES | SAME | LOSSES | FLAGGED | FILLS | CASTS | {"mean", "stack", "conv2d"}
    begins = FIRST | MINUS | LOSSES | {"stack", "conv2d", "nan_to_num", "isnan"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # a difference of an answer and a target with gaps -> their share, whether its input
        self.filled = Known(self)  # where NaN is, and what was filled in there -> the share of NaN
        self.inputs: list[Tensor] = []
        self.masks: list[Tensor] = []
        self.pictures: list[Tensor] = []
        self.means: list[tuple] = []  # a mean over all places, what is known of it, and its name

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        if op.name == "stack":
            if isinstance(op.result, Tensor) and len(self.masks) < 8 and _two_values(op.result):
                self.masks.append(op.result)
            return
        if op.name == "conv2d":
            x = op.given[0]
            if not x.requires_grad and x.dim() == 4 and x.numel() <= LOOKED and len(self.pictures) < 2:
                self.pictures.append(x)
            return
        if written(op) and op.name not in POWERS and self.known.get(op.given[0]):
            self.known.put(op.given[0], None)  # a mask, it may be
        if op.name in TIMES:
            return
        if op.name in FILLS:
            return self._fill(op)
        if op.name in FLAGGED:
            share = self.filled.get(op.given[1]) if len(op.given) == 2 else None  # three have weights
            if share and op.kwargs.get("reduction") != "none":
                self.note("D18", ("filled", share))
            return
        if op.name in CASTS | SAME and (share := self.filled.get(op.given[0])):
            for r in op.results:
                self.filled.put(r, share)
        if op.name in FIRST:
            x = op.given[0]
            if not x.requires_grad and x.dim() == 2 and x.is_floating_point() and len(self.inputs) < 4:
                self.inputs.append(x)
            return
        if op.name in MINUS or op.name in LOSSES:
            fact = self._share(op.given) if len(op.given) == 2 else None
            if fact and op.name in MINUS and isinstance(op.result, Tensor):
                self.known.put(op.result, fact)
            elif fact and op.kwargs.get("reduction", "mean") == "mean":
                self.means.append((op.result, fact, op.name))
            elif fact and op.kwargs["reduction"] == "none" and isinstance(op.result, Tensor):
                self.known.put(op.result, fact)
            return
        fact = self.known.get(op.given[0])
        if fact and op.name == "mean" and isinstance(op.result, Tensor) and not op.result.dim():
            self.means.append((op.result, fact, "a square"))
        elif fact and isinstance(op.result, Tensor):
            self.known.put(op.result, fact)

    def _fill(self, op: Op) -> None:
        """What was NaN and is no more."""
        first = op.given[0]
        if op.name in ("nan_to_num", "isnan") and not first.requires_grad and first.is_floating_point():
            share = float(torch.isnan(first).float().mean())
            if SOME < share < 1:
                self.filled.put(op.result, share)
            return
        share = next((share for t in op.given if (share := self.filled.get(t))), None)
        if share and not _constant(op):
            return  # with what the model answers, say, so that nothing is asked for there
        if share and op.name == "__setitem__":
            self.filled.put(first, share)
        elif share and isinstance(op.result, Tensor) and not op.result.requires_grad:
            self.filled.put(op.result, share)

    def _meant(self, answer: Tensor, target: Tensor) -> bool:
        """The answer was masked before, or the picture that went in is the target with noise, or has nothing there."""
        gap = target == target.min()
        if not bool(answer[gap].any()):
            return True
        alike = [x for x in self.pictures if x.shape == target.shape]
        return any(torch.equal(x == x.min(), gap) or _together(x, target) > RESTORED for x in alike)

    def _marked(self, target: Tensor) -> bool:
        """The batch also says where the targets are known."""
        known = target != target.min()
        return any(m.shape == target.shape and bool((m.bool() == known).all()) for m in self.masks)

    def _note(self, fact: tuple[float, bool], name: str) -> None:
        share, own = fact
        if own:
            self.e.gaps.setdefault(self.eye.turn, (share, name))
        else:
            self.note("D18", ("filled", -share) if share < 0 else ("", share))

    def _share(self, sides: list[Tensor]) -> tuple[float, bool] | None:
        """Of gaps in the target, and whether that is the input."""
        for answer, target in (sides, sides[::-1]):
            if not answer.requires_grad or target.requires_grad or answer.shape != target.shape:
                continue
            if share := self.filled.get(target):
                empty = target == 0
                masked = bool(empty.any()) and not bool(answer.detach()[empty].any())
                return None if masked else (-share, False)
            for x in self.inputs:
                if x.shape == target.shape and LEAST <= x.numel() <= LOOKED and (x is target or torch.equal(x, target)):
                    return (share, True) if (share := _gaps(x)) else None
            if target.dim() > 1 and LEAST <= target.numel() <= LOOKED and target.is_floating_point():
                share = _isolated(target.detach()) if target.dim() == 4 or self._marked(target) else 0.0
                if share and self._meant(answer.detach(), target):
                    return None
                return (share, False) if share else None
        return None

    def backward(self, loss: Tensor) -> None:
        if self.means:
            held = set(graphs.walk(loss, NODES))
            for mean, fact, name in self.means:
                if mean.grad_fn in held:  # and not only logged
                    self._note(fact, name)
        self.means = []
        self.inputs, self.masks, self.pictures = [], [], []

    def close(self) -> None:
        self.known.by_id.clear()
        self.filled.by_id.clear()
        self.means = []
        self.inputs, self.masks, self.pictures = [], [], []


def _constant(op: Op) -> bool:
    """Whether one number is filled in."""
    if op.name != "where":
        filler = op.kwargs["value"] if "value" in op.kwargs else op.args[-1]
        return not isinstance(filler, Tensor) or filler.numel() == 1
    return any(not isinstance(a, Tensor) or bool((a == a.flatten()[:1]).all()) for a in op.args[1:])


def _together(x: Tensor, y: Tensor) -> float:
    """The correlation of two pictures' numbers."""
    x, y = x.detach().float() - x.float().mean(), y.float() - y.float().mean()
    return float((x * y).mean() / (x.square().mean() * y.square().mean()).sqrt().clamp_min(1e-12))


def _two_values(x: Tensor) -> bool:
    """Zeros and ones, both."""
    if x.requires_grad or x.dim() < 2 or not LEAST <= x.numel() <= LOOKED or x.dtype not in FLAGS:
        return False
    ones, zeros = x == 1, x == 0
    return bool((ones | zeros).all()) and bool(ones.any()) and bool(zeros.any())


def _isolated(x: Tensor) -> float:
    """The share of the least number (0, or what it became by scaling), where all others lie well above it, are spread
    out and no whole numbers."""
    x = x - x.min()
    held = x[x != 0]
    share = 1 - held.numel() / x.numel()
    if not SOME < share < 1 - SOME or bool((held == held.round()).all()):
        return 0.0
    held = held.flatten()[:: max(1, held.numel() // SORTED)].sort().values
    low, above = float(held[0]), float(held[len(held) // 20])
    if float(held[-1]) <= 1:  # a map of what is likely, cut off
        return 0.0
    return float(share) if held.unique().numel() >= SOME_NUMBERS and low > 2 * (above - low) else 0.0


def _gaps(x: Tensor) -> float:
    """The share of zeros, where they are no numbers like the others."""
    held = x[x != 0]
    share = 1 - held.numel() / x.numel()
    if not EMPTY < share < 1:
        return 0.0
    low, high = held.aminmax()
    both = low < 0 < high
    far = low > 0 and held.median() >= 2 * low and low >= 0.1 * high
    return float(share) if both or far else 0.0
