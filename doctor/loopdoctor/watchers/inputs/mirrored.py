"""Places that stay where they were while their pictures are flipped: key points, boxes, the angle
of a wheel.

    if random.random() < 0.5:
        image = image.flip(-1)          and points[:, 0] = 1 - points[:, 0] was forgotten

Whether a number tells a place is not written down, but it shows: it goes along with where the
picture is bright or dark. In pictures that were flipped as well as in those that were not, a number
that was flipped too goes the same way, a count goes no way, and a place that was forgotten goes the
other way.

A size of something that is always on one side goes along with both; it goes along with how much
there is, too.

Of key points it is also counted which of two is left of the other. A left eye that keeps its name
in a flipped picture is the right one.

Footgun: where the flip is drawn for each picture, it is followed into the batch (as in
moved_rows.py); loaders with workers show nothing.
"""

from typing import Any

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import LOSSES, kind
from loopdoctor.watchers.operators import MINUS

FLIPS = {"flip", "fliplr", "flipud", "hflip", "vflip"}
AXES = (-2, -1)  # down, across
NUMBERS, LOOKED = 32, 2**22  # of a target, of a batch of pictures


class Mirrored(Watcher):
    """What is known of a tensor: the axis along which it was flipped, or that of each of its rows
    (None for none).
    """

    begins = FLIPS | {"stack", "conv2d"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.pictures: list[tuple[tuple, Tensor]] = []  # the axis of each row, and the batch
        self.flips = False  # there are some

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        first, result = op.given[0], op.result if isinstance(op.result, Tensor) else None
        facts = [self.known.get(t) for t in op.given]
        if op.name in FLIPS and result is not None and not first.requires_grad:
            self.flips = True
            self.known.put(result, _axis(op))
        elif op.name == "stack" and result is not None and result.dim() == 4:
            self.known.put(result, tuple(facts))
        elif op.name == "conv2d":
            self._look(first, facts[0])
        elif (op.name in LOSSES or op.name in MINUS) and len(op.given) == 2 and self.pictures:
            self._compare(*op.given)
        elif op.name == "__setitem__":
            # a flip is written into it
            if first.dim() == 4 and not first.requires_grad and isinstance(facts[-1], int):
                self.known.put(first, _some(op.args[1], facts[-1], len(first)))
        elif any(f is not None for f in facts) and result is not None and not result.requires_grad:
            fact = next(f for f in facts if f is not None)
            if op.name == "where" and len(facts) == 3:  # a mask, and what is taken of two
                number = 1 if isinstance(facts[1], int) else 2
                fact = _some(first if number == 1 else ~first, facts[number], len(result))
            if result.dim() > 1 and (not isinstance(fact, tuple) or len(result) == len(fact)):
                self.known.put(result, fact)

    def asks(self, name: str, known: int, forward: bool) -> bool:
        return super().asks(name, known, forward) or name in LOSSES or name in MINUS

    def _look(self, x: Tensor, fact: tuple | int | None) -> None:
        if (
            x.requires_grad
            or x.dim() != 4
            or x.numel() > LOOKED
            or not x.is_floating_point()
            or len(self.pictures) > 2
        ):
            return
        axes = fact if isinstance(fact, tuple) else (fact,) * len(x)
        if len(axes) == len(x):
            self.pictures.append((axes, x.detach()))

    def _compare(self, answer: Tensor, target: Tensor) -> None:
        if not answer.requires_grad:
            answer, target = target, answer
        if (
            target.requires_grad
            or not answer.requires_grad
            or not target.is_floating_point()
            or target.dim() > 3
        ):
            return
        if not self.flips or len(self.pictures) > 1 or _turned_back(answer):
            # which pictures it answers is not known, or its answer was flipped in place of the
            # target
            return
        axes, x = self.pictures[-1]
        if (
            len(target) != len(axes)
            or answer.numel() != target.numel()
            or self.known.get(target) is not None
        ):
            return
        # (B, K)
        numbers = (
            target.detach().float().flatten(1)
            if target.dim() > 1
            else target.detach().float()[:, None]
        )
        if numbers.shape[1] > NUMBERS:
            return
        middles = _middle(x)
        told = self.e.habits["D19"].setdefault(self.eye.turn, [])
        for n, axis in enumerate(AXES):
            for flipped in (False, True):
                rows = torch.tensor(
                    [a == axis if flipped else a is None for a in axes], device=numbers.device
                )
                if bool(rows.any()):
                    told.append((axis, flipped, _sums(middles[rows, n], numbers[rows])))
                    told.append(("whole", (axis, flipped), _sums(middles[rows, 2], numbers[rows])))
        if target.dim() == 3 and target.shape[2] == 2:
            left = target.detach()[:, :, 0].float()  # (B, K)
            for flipped in (False, True):
                rows = torch.tensor(
                    [a == AXES[1] if flipped else a is None for a in axes], device=left.device
                )
                of = left[rows]
                orders = (of[:, :, None] < of[:, None]).sum(0).flatten().tolist()
                told.append(("order", flipped, [[len(of), *of.sum(0).tolist(), *orders]]))
        self.pictures = []

    def backward(self, loss: Tensor) -> None:
        self.pictures = []

    def close(self) -> None:
        self.known.by_id.clear()
        self.pictures = []


def _some(which: Any, axis: Any, rows: int) -> tuple | int:
    """Return the axis of each row, where a mask of rows says which were flipped; 0 where it is
    something else.
    """
    mask = (
        isinstance(which, Tensor)
        and which.dtype == torch.bool
        and which.numel() == rows == which.shape[:1].numel()
    )
    return (
        tuple(axis if w else None for w in which.flatten().tolist())
        if mask and isinstance(axis, int)
        else 0
    )


def _axis(op: Op) -> int:
    """-1 across, -2 down, 0 for anything else."""
    if op.name in ("fliplr", "hflip", "flipud", "vflip"):
        dims = (
            [1]
            if op.name == "fliplr"
            else [0]
            if op.name == "flipud"
            else [-1]
            if op.name == "hflip"
            else [-2]
        )
    else:
        dims = op.kwargs.get("dims", op.args[1:])
        dims = (
            list(dims[0]) if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else list(dims)
        )
    if len(dims) != 1 or not isinstance(dims[0], int):
        return 0
    axis = dims[0] - op.given[0].dim() if dims[0] >= 0 else dims[0]
    return axis if axis in AXES else 0


def _turned_back(answer: Tensor) -> bool:
    """Return a sign or a complement after the last layer, one for each number.

    A unit (a factor above 0) is none.
    """
    node = answer.grad_fn
    if kind(node) == "Mul" and sum(edge is not None for edge, _ in node.next_functions) == 1:
        factor = getattr(node, "_saved_other", None)
        return not (isinstance(factor, Tensor) and factor.numel() == 1 and float(factor) > 0)
    return kind(node) in ("Neg", "Rsub", "Sub", "Where", "Stack", "Cat")


def _middle(x: Tensor) -> Tensor:
    """How far down and how far across each picture's weight lies, from -1 to 1, and how much it is:
    what differs from its middle grey.
    """
    weight = (x - x.flatten(1).median(1).values[:, None, None, None]).abs().sum(1)  # (B, H, W)
    down, across = (torch.linspace(-1, 1, size, device=x.device) for size in weight.shape[1:])
    total = weight.sum((1, 2)).clamp_min(1e-12)
    return torch.stack(
        [(weight.sum(2) * down).sum(1) / total, (weight.sum(1) * across).sum(1) / total, total], 1
    )


def _sums(middle: Tensor, numbers: Tensor) -> list[list[float]]:
    """For each number of a target: rows, and the sums from which a correlation is made."""
    m = middle[:, None].double().expand_as(numbers)
    t = numbers.double()
    sums = [
        torch.ones_like(t).sum(0),
        m.sum(0),
        t.sum(0),
        (m * m).sum(0),
        (t * t).sum(0),
        (m * t).sum(0),
    ]
    return torch.stack(sums, 1).tolist()  # (K, 6)
