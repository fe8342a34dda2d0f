"""Axes that were regrouped where they were meant to change places: `x.reshape(B, F, T)` of an x of shape (B, T, F).

    x.transpose(1, 2)[b, f, t] is x[b, t, f]
    x.reshape(B, F, T)[b, f, t] is the number that stands at place f * T + t of the row, of another time and feature

Both give the same shape, so nothing is raised. The numbers of a row stay in the row, so a network still learns
something.

Footgun: sizes of 1 and equal sizes move nothing that could be seen, and a reshape to other sizes is meant as one.
"""

from torch import Tensor, nn

from train_doctor.eye import Op, Watcher, place

NAMES = {"reshape", "view", "view_as", "reshape_as"}


class Axes(Watcher):
    names = set(NAMES)

    def saw(self, op: Op) -> None:
        if op.name not in NAMES or not isinstance(op.result, Tensor) or not op.given:
            return
        x = op.given[0]
        if isinstance(x, nn.Parameter) or x.shape == op.result.shape:
            return
        before, after = ([size for size in t.shape if size > 1] for t in (x, op.result))
        if before != after and sorted(before) == sorted(after) and place() is not None:
            self.e.regrouped.setdefault(self.eye.turn, (op.name, tuple(x.shape), tuple(op.result.shape)))
