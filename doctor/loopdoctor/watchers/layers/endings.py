"""The last state of a recurrent network over rows that end in padding.

    _, (state, _) = lstm(table(ids))            ids are padded at their ends to one length
    state[-1], or output[:, -1]                 what is left after the padding was read, too

Short rows are filled up with one and the same vector. The network reads it as it reads all else,
and the state that comes out has gone through as many steps of nothing as the row was short. A
packed sequence ends where its row ends, and output[rows, lengths - 1] takes the state of that
place.

Of a network that reads both ways, output[:, -1] holds the last state of one way and the first one
of the other, which has read a single place.

Footgun: rows of one length end in whatever they hold. So the same vector must end several rows, at
least three times over, in runs of different lengths. What begins rows as well is the margin of a
picture that is read line by line.
"""

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher

NETWORKS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
TAKING = {
    "__getitem__",
    "select",
    "squeeze",
    "cat",
    "mean",
    "permute",
    "transpose",
    "view",
    "reshape",
    "linear",
}
RUN, SHARE, LOOKED = 3, 0.3, 2**24  # places; of the rows; numbers


class Endings(Watcher):
    names = NETWORKS | TAKING
    begins = NETWORKS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        # an output or a last state -> which, how many rows of how many, and the axis of time
        self.known = Known(self)
        # the width of one way at the last place; the other way's end is taken as well
        self.taken, self.both = 0, False

    def saw(self, op: Op) -> None:
        if op.name in NETWORKS:
            self._read(op)
            return
        fact = self.known.get(op.given[0]) if op.given else None
        if fact is None:
            return
        what, rows, axis = fact
        last = op.name == "__getitem__" and _last(op.args[1], axis)
        if rows is None:
            self._one_way(op, what, axis, last)
        elif what == "state" or last:
            self.e.endings.setdefault(self.eye.turn, rows)

    def _one_way(self, op: Op, what: str, axis: int, last: bool) -> None:
        """Of both ways the last place alone is taken, whole."""
        if what == "taken":
            self.both |= op.name == "__getitem__"  # a half of it
        elif last and all(
            i == slice(None)
            for i in (op.args[1] if isinstance(op.args[1], tuple) else ())[axis + 1 :]
        ):
            self.taken = op.given[0].shape[-1] // 2
            self.known.put(op.result, ("taken", None, axis))
        elif op.name == "__getitem__" and _at(op.args[1], axis, 0):
            self.both = True  # where the other way ends

    def backward(self, loss: Tensor) -> None:
        if self.taken and not self.both:
            self.note("S37", self.taken)
        self.taken, self.both = 0, False

    def _read(self, op: Op) -> None:
        x, result = op.given[0], op.result
        packed = (
            len(op.args) > 1 and isinstance(op.args[1], Tensor) and op.args[1].dtype is torch.int64
        )
        if packed or x.dim() != 3 or not isinstance(result, tuple):
            return
        first, both = bool(op.args[-1]), op.args[-2] is True  # batch_first, bidirectional
        if both and result[0].dim() == 3 and result[0].requires_grad:
            self.known.put(result[0], ("output", None, 1 if first else 0))
        runs = runs_at_end(x.detach() if first else x.detach().transpose(0, 1))
        if runs is None:
            return
        padded = int((runs >= RUN).sum())
        if padded >= SHARE * len(runs) and len(set(runs.tolist())) > 2:
            axis, rows = (1 if first else 0), (padded, len(runs))
            for what, t in zip(("output", "state", "state"), result):
                self.known.put(t, (what, rows, axis))

    def close(self) -> None:
        self.known.by_id.clear()


def runs_at_end(x: Tensor) -> Tensor | None:
    """How often the one vector that ends several rows (B, T, D) stands at the end of each row."""
    if x.shape[0] < 4 or x.shape[1] <= RUN or x.numel() > LOOKED:
        return None
    same = (x == x[:, -1:]).all(-1).flip(1).int().cumprod(1).sum(1)  # (B,)
    ends = x[same >= RUN, -1]
    if not len(ends) or bool((ends != ends[:1]).any()):
        return None
    margin = (x[:, 0] == ends[:1]).all(-1)
    return (
        None
        if bool(margin.float().mean() > SHARE)
        else torch.where((x[:, -1] == ends[:1]).all(-1), same, 0)
    )


def _last(index, axis: int) -> bool:
    """[:, -1] where time is the second axis, [-1] where it is the first."""
    return _at(index, axis, -1)


def _at(index, axis: int, number: int) -> bool:
    index = index if isinstance(index, tuple) else (index,)
    before, at = index[:axis], index[axis] if len(index) > axis else None
    return isinstance(at, int) and at == number and all(i == slice(None) for i in before)
