"""Key points that nobody marked, at (0, 0), asked for as if they were there.

    loss = F.smooth_l1_loss(points, wanted)                             COCO writes x = y = visible = 0
    loss = (F.smooth_l1_loss(points, wanted, reduction="none").sum(-1) * visible).sum() / visible.sum()

Targets of several pairs of numbers for each picture are looked at. Is a part of the pairs exactly (0, 0), while all
others have two numbers well above 0? Then the difference to the answers is followed to the loss: a mask on the way is
a product, a choice or an index, also in place.

Footguns: what stands still has a shift of (0, 0), and what is on no plate has neither mass nor volume. So the network
must see pictures, and all other pairs must lie as places do: above 0, few of them near it or far out, both numbers
about as far, and not one along with the other. Answers that were masked before, and are 0 in these places too, are left
alone.
"""

from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN
from train_doctor.watchers.operators import MINUS, POWERS, written

FOLLOWED = POWERS | {"norm", "linalg_norm", "vector_norm", "linalg_vector_norm", "sqrt", "view", "reshape", "flatten"}
SHARE, LOOKED, PAIRS = (0.02, 0.9), 2**20, (2, 512)  # of pairs without a place; numbers; pairs of a picture
NEAR, FAR = 0.1, 5.0  # times the middle number, between which nineteen of twenty, and all, must lie
NODES = 500  # of a loss
LEAST, UNLIKE, TOGETHER = 16, 3.0, 0.9  # pairs; of how far both reach, the ratio; a correlation


class UnlabelledPoints(Watcher):
    """Known are errors, and what was made of them -> the share of pairs that are (0, 0)."""

    begins = {"conv2d"} | MINUS | set(PLAIN)

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.pictures = False  # went into a network, since the last backward
        self.means: list[tuple] = []  # shares, and the nodes of what was made of their errors

    def saw(self, op: Op) -> None:
        if written(op) and op.name not in POWERS and self.known.get(op.given[0]):
            self.known.put(op.given[0], None)
        if op.name == "conv2d":
            self.pictures = self.pictures or op.given[0].dim() == 4 and self.eye.grad
        elif not isinstance(op.result, Tensor):
            return
        elif op.name in MINUS or op.name in PLAIN:
            share = _unmarked(op.given) if self.pictures and len(op.given) == 2 else 0.0
            if share and (op.name in MINUS or op.kwargs.get("reduction", "mean") == "none"):
                self.known.put(op.result, share)
            elif share:
                self.means.append((share, op.result.grad_fn))
        elif op.given and (share := self.known.get(op.given[0])):
            if op.name in ("mean", "sum") and not op.result.dim():
                self.means.append((share, op.result.grad_fn))
            elif op.name in FOLLOWED | {"mean", "sum"} or op.name == "mul" and all(t is op.given[0] for t in op.given):
                self.known.put(op.result, share)

    def backward(self, loss: Tensor) -> None:
        reached = set(graphs.walk(loss, NODES)) if self.means else ()
        for share, node in self.means:
            if node in reached:  # else it is for the log
                self.note("D18", ("points", share))
        self.pictures, self.means = False, []
        self.known.by_id.clear()

    def close(self) -> None:
        self.means = []
        self.known.by_id.clear()


def _unmarked(sides: list[Tensor]) -> float:
    """The share of pairs of a target that are (0, 0), where all others are places."""
    answer, target = sides if sides[0].requires_grad else sides[::-1]
    fits = answer.requires_grad and not target.requires_grad and answer.shape == target.shape
    pairs = target.shape[1:].numel() / 2 if target.dim() == 3 and target.shape[2] == 2 or target.dim() == 2 else 0
    if not fits or not PAIRS[0] <= pairs <= PAIRS[1] or pairs % 1 or target.numel() > LOOKED:
        return 0.0
    if not target.is_floating_point():
        return 0.0
    of = target.detach().reshape(len(target), -1, 2).float()
    empty = (of == 0).all(2)
    share, there = float(empty.float().mean()), of[~empty]
    if not SHARE[0] <= share <= SHARE[1] or not bool((there > 0).all()) or not bool(there.isfinite().all()):
        return 0.0
    if bool((answer.detach().reshape(of.shape)[empty] == 0).all()):
        return 0.0
    return share if bool(empty.any(0).sum() > 1) and _places(there[:: max(1, len(there) // 2048)]) else 0.0


def _places(pairs: Tensor) -> bool:
    """Whether pairs lie in a picture: both numbers reach about as far, few are near 0 or far out, and each goes its
    own way."""
    numbers, middle = pairs.flatten().sort().values, float(pairs.median())
    low, high = float(numbers[len(numbers) // 20]), float(numbers[-1])
    wide = pairs.amax(0)
    if len(pairs) < LEAST or not NEAR * middle < low <= high < FAR * middle or float(wide.max() / wide.min()) > UNLIKE:
        return False
    own = pairs - pairs.mean(0)
    alike = float((own[:, 0] * own[:, 1]).sum() / (own[:, 0].norm() * own[:, 1].norm()).clamp_min(1e-12))
    return len(numbers.unique()) > len(numbers) / 4 and abs(alike) < TOGETHER
