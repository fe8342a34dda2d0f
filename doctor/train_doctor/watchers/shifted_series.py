"""Series that are shifted in time while the labels of their times stay where they are.

    x = torch.roll(x, shift, dims=1)                (B, T, F), to make more of few data
    loss = F.cross_entropy(model(x), labels)        (B, T): each time has the label of another

What was rolled along the times is followed into a layer. A target with as many times that was not rolled belongs to
other times.

Footguns: a shift by one makes a decoder's input of its targets. One label for the whole of a series is right anywhere.
And a model that rolls by itself (windows that are shifted and shifted back) does so with what it computed.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import LOSSES
from train_doctor.watchers.operators import MINUS

LAYERS = {"linear", "conv1d", "lstm", "gru", "rnn_tanh"}
PIECES = {"cat", "gather", "take_along_dim", "index_select"}
LEAST = 6


class ShiftedSeries(Watcher):
    """What is known of a tensor that was rolled along its times: rows, times and dims."""

    begins = {"roll"} | MINUS | set(LOSSES) | PIECES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.fed: tuple[int, int, int] | None = None  # rows, times and dims of a rolled series that a layer was given

    def saw(self, op: Op) -> None:
        x = op.given[0] if op.given else None
        if x is None:
            return
        if op.name == "roll":
            self._rolled(op, x)
        elif op.name in PIECES:
            if op.results and not op.results[0].is_floating_point() and op.results[0].dim() > 1:
                self.known.put(op.results[0], (*op.results[0].shape[:2], 0))  # labels that were put together anew
        elif op.name in LAYERS and self.known.get(x) and not x.requires_grad:
            self.fed = self.known.get(x)
        elif op.name in self.begins and len(op.given) == 2 and self.fed:
            self._compare(*op.given)
        elif (fact := self.known.get(x)) and all(t.numel() < x.numel() for t in op.given[1:] if t is not x):
            for r in op.results:  # by itself: with another series it is something else
                if not r.requires_grad and r.dim() > 1 and len(r) == len(x):
                    self.known.put(r, fact)

    def _rolled(self, op: Op, x: Tensor) -> None:
        shift = op.kwargs.get("shifts", op.args[1] if len(op.args) > 1 else None)
        dim = op.kwargs.get("dims", op.args[2] if len(op.args) > 2 else None)
        shift, dim = (v[0] if isinstance(v, list | tuple) and len(v) == 1 else v for v in (shift, dim))
        if x.requires_grad or not isinstance(shift, int) or not isinstance(dim, int) or dim % x.dim() == 0:
            return
        times = x.shape[dim]
        if x.dim() in (2, 3) and times >= LEAST and op.results and abs(shift) != 1:  # by 0 as well: it is drawn
            self.known.put(op.results[0], (len(x), times, x.dim()))

    def _compare(self, answer: Tensor, target: Tensor) -> None:
        answer, target = (answer, target) if answer.requires_grad else (target, answer)
        if answer.requires_grad and not target.requires_grad and target.dim() in (2, 3) and not self.known.get(target):
            if target.shape[:2] == self.fed[:2] and self.fed[1] in answer.shape[1:]:
                if self.fed[2] == 2 and target.is_floating_point():
                    return  # a table, it may be
                self.note("D26", self.fed)

    def backward(self, loss: Tensor) -> None:
        self.fed = None

    def close(self) -> None:
        self.known.by_id.clear()
