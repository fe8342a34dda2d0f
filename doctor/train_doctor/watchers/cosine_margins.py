"""Margins of a softmax of cosines that go the wrong way, or go to all classes.

    logits = scale * (cosines - margin * one_hot)                           CosFace: the right class must be the better
    logits = scale * torch.where(one_hot, cos(theta + margin), cosines)     ArcFace: the same, as an angle
    logits = scale * (cosines + margin * one_hot)                           right already when it is the worse
    logits = scale * cos(theta + margin)                                    asks no more of one class than of another

There are many ways to write this. So the numbers that the cross-entropy is given are compared with the cosines that
they were made of: those of the other classes must be a multiple of them, and that of the right class less.

Footgun: a negative margin is published for few-shot learning. It is written as a subtraction, so where something below
0 is subtracted nothing is said; nor where it changes from step to step, for a schedule may begin below 0. Squared
distances of vectors of length one are cosines and a constant; where all cosines are small, a sine is a constant as
well.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER

NORMS = {"norm", "linalg_norm", "vector_norm", "linalg_vector_norm"}
PRODUCTS = {"matmul", "mm", "__matmul__", "linear", "einsum"}
VIEWS = {"t", "T", "mT", "transpose", "permute", "unsqueeze", "__getitem__"}
LEAST, LOOKED = 8, 2**20  # rows; numbers
SAME = 2e-3  # how near two numbers must be, as a share of the cosines' size
MARGIN = 0.02
STEADY = 1e-3  # what a margin may change by; else it has a schedule


class CosineMargins(Watcher):
    """Known are lengths, vectors of length one, and what was made of cosines with these cosines."""

    begins = {"normalize", "cosine_similarity"} | NORMS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.added: list[tuple[int, float]] = []  # turns and margins
        self.meant: set[int] = set()  # cosines from which something below 0 was taken

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name == "cross_entropy":
            if isinstance(facts[0], Tensor) and len(op.given) > 1:
                self._look(facts[0], *op.given[:2])
        elif (fact := self._fact(op, facts)) is not None:
            for r in op.results or op.given[:1]:
                self.known.put(r, fact)

    def _fact(self, op: Op, facts: list) -> object:
        r = op.results[0] if op.results else op.given[0]
        cosines = next((f for f in facts if isinstance(f, Tensor)), None)
        if cosines is not None:
            if op.name in MINUS and len(op.args) > 1 and _below_zero(op.args[1]):
                self.meant.add(id(cosines))
            return cosines if r.shape == cosines.shape and r.is_floating_point() else None
        if op.name == "normalize":
            return "unit"
        if op.name in NORMS:
            return ("length of", id(op.given[0])) if op.kwargs.get("keepdim") else None
        if op.name in OVER and len(facts) == 2 and facts[1] == ("length of", id(op.given[0])):
            return "unit"
        product = op.name in PRODUCTS and facts[:2] == ["unit", "unit"] and len(op.given) == 2
        if product or op.name == "cosine_similarity":
            if r.dim() == 2 and r.requires_grad and len(r) >= LEAST and r.shape[1] > 2 and r.numel() <= LOOKED:
                return r.detach().clone()
            return None
        return facts[0] if op.name in VIEWS and facts[0] == "unit" else None

    def _look(self, cosines: Tensor, answer: Tensor, target: Tensor) -> None:
        if answer.shape != cosines.shape or target.shape != answer.shape[:1] or target.is_floating_point():
            return
        if (
            id(cosines) in self.meant
            or bool(((target < 0) | (target >= answer.shape[1])).any())
            or answer.dtype in (torch.half, torch.bfloat16)
        ):
            return
        given, cosines = answer.detach().double(), cosines.double().clamp(-1, 1)
        target = target.long()  # bytes are classes too
        right = torch.nn.functional.one_hot(target, cosines.shape[1]).bool()
        scale = (given * cosines)[~right].sum() / cosines[~right].square().sum().clamp_min(1e-9)
        near = SAME * cosines.square().mean().sqrt()
        if float(scale) > 0 and bool(((given / scale - cosines)[~right].abs() < near).all()):
            gained = (given / scale)[right] - cosines[right]
            turned = cosines[right].arccos() - (given / scale)[right].clamp(-1, 1).arccos()
            for more in (gained, turned):
                if float(more.mean()) > MARGIN and float((more - more.mean()).abs().max()) < SAME:
                    self.added.append((self.eye.turn, float(more.mean())))
        elif not bool((given == cosines).all()):
            self._all(given, cosines)

    def _all(self, given: Tensor, cosines: Tensor) -> None:
        """Whether all of it is s * cos(theta + m) = s * cos(m) * cosine - s * sin(m) * sine."""
        sides = torch.stack([cosines.flatten(), (1 - cosines.square()).sqrt().flatten()], 1)
        square, both = sides.T @ sides, sides.T @ given.flatten()
        if float(size := square.det()) < 1e-9:
            return
        one = (square[1, 1] * both[0] - square[0, 1] * both[1]) / size
        two = (square[0, 0] * both[1] - square[1, 0] * both[0]) / size
        apart = (sides @ torch.stack([one, two]) - given.flatten()).abs().max()
        if _of_one_number(cosines.flatten(), given.flatten(), SAME * float(one.hypot(two))):
            return
        if one > 0 > two and float(-two / one) > MARGIN and float(apart) < SAME * float(one.hypot(two)):
            self.note("F90", "all-classes")

    def backward(self, loss: Tensor) -> None:
        self.known.by_id.clear()
        self.meant = set()

    def close(self) -> None:
        margins = [margin for _, margin in self.added]
        for turn, _ in self.added if margins and max(margins) - min(margins) < STEADY else ():
            self.note("F90", "added", turn)
        self.known.by_id.clear()


def _of_one_number(x: Tensor, y: Tensor, near: float) -> bool:
    """Whether y is x times a number and one more: a squared distance, it may be, of vectors that are near no other."""
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum().clamp_min(1e-30)
    return float((y - y.mean() - slope * (x - x.mean())).abs().max()) < near


def _below_zero(what) -> bool:
    """Of a number or a tensor that is taken away; one that learns is no margin."""
    if isinstance(what, Tensor):
        return not what.requires_grad and what.numel() > 0 and bool((what < 0).any())
    return isinstance(what, int | float) and what < 0
