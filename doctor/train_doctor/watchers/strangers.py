"""Targets that a network made of other rows than those that are asked for them.

    weak, strong = next(weak_loader), next(strong_loader)           each shuffled by itself
    target = model(weak).argmax(1)
    loss = F.cross_entropy(model(strong), target)                   row i of one is a stranger to row i of the other

Two views of one row are alike in something: in their numbers, in their numbers sorted, or in what the network answers.
The inputs are followed to the answers, these to the targets, and the two inputs of a loss are compared row by row with
those of other rows.

Footguns: views may be turned and cut. So only where they are alike in nothing, in three steps together, is anything
said. Two cameras, or the first half of a night and the second, are alike in the class alone, and there one network
teaches another: so both inputs must go through one network, or through a copy of it. And a target that is computed with
data as well (a reward and the value of the next state) is no view.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.who_chooses import copied

LAYERS = {"linear", "conv1d", "conv2d", "conv3d"}
JUDGES = {"cross_entropy", "kl_div", "nll_loss"}
LEAST, LOOKED = 16, 2**20  # rows; numbers


class Strangers(Watcher):
    """Known is the input that something was made of, and the weights that it met first."""

    begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not op.given or not op.results:
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name in JUDGES and len(op.given) > 1:
            self._judge(op, *facts[:2])
            return
        x = op.given[0]
        there = {id(f[0]): f for f in facts if f is not None}
        if not there and op.name in LAYERS and not x.requires_grad and x.is_floating_point() and x.dim() > 1:
            fits = len(op.given) > 1 and len(x) >= LEAST and x.numel() <= LOOKED
            there = {id(x): (x, op.given[1])} if fits else {}
        elif there and not any(t.requires_grad for t in op.given) and self.known.get(x) is None:
            there = {}
        if len(there) == 1 and not self._with_data(op, facts):
            (source,) = there.values()
            for r in op.results:
                if r.dim() and len(r) == len(source[0]):
                    self.known.put(r, source)

    def _with_data(self, op: Op, facts: list) -> bool:
        """Something of a network's answer and of data as they are."""
        others = [t for t, f in zip(op.given, facts) if f is None]
        return op.name not in LAYERS and any(
            not t.requires_grad and t.numel() > 1 and t.is_floating_point() for t in others
        )

    def _judge(self, op: Op, first: tuple | None, second: tuple | None) -> None:
        answer, target = op.given[:2]
        if first is None or second is None or first[1] is not second[1] and not copied(first[1], second[1]):
            return
        one, two = first[0], second[0]
        if one is two or target.requires_grad or not answer.requires_grad:
            return
        if one.shape != two.shape or len(answer) != len(one) or answer.dim() != 2 or bool((one == two).all()):
            return
        told = [likeness(one.flatten(1), two.flatten(1)), likeness(_sorted(one), _sorted(two))]
        if target.shape == answer.shape:
            told.append(likeness(answer, target))
        self.e.habits["F107"].setdefault(self.eye.turn, (len(one), told))

    def close(self) -> None:
        self.known.by_id.clear()


def _sorted(x: Tensor) -> Tensor:
    return x.detach().flatten(1).sort(1).values


def likeness(one: Tensor, two: Tensor) -> float:
    """By how many of its own spreads the mean cosine of a row with its partner is above that with other rows."""
    sides = [t.detach().double() for t in (one, two)]
    sides = [t - t.mean(0) for t in sides]
    sides = [t / t.norm(dim=1, keepdim=True).clamp_min(1e-12) for t in sides]
    table = sides[0] @ sides[1].T  # (rows, rows)
    own = table.diagonal()
    rest = table[~torch.eye(len(table), dtype=torch.bool, device=table.device)]
    spread = float(rest.std())
    return float(own.mean() - rest.mean()) / spread * len(own) ** 0.5 if spread > 0 else 99.0
