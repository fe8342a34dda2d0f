"""Scores and targets that were flattened in different orders: (T, B, classes) against (B, T).

    logits = transformer(...)                                               (T, B, classes), the places first
    F.cross_entropy(logits.reshape(-1, classes), labels.reshape(-1))        labels are (B, T), the rows first

Both have T * B rows, so nothing is raised, and each place is scored against that of another row.

Footgun: where there are as many rows as places the shapes tell nothing. Labels that were transposed first have the
shape of the scores. And rows may be regrouped in between, in their order (ghost batches): so something with the sizes
(B, T) must have been transposed in the step.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

FLAT = {"reshape", "view", "flatten"}
LOSSES = {"cross_entropy", "nll_loss"}
TURNS = {"transpose", "permute", "swapaxes", "swapdims", "movedim", "t", "T", "mT"}
KEEPS = {"log_softmax", "float", "to", "long", "contiguous"}


class CrossedRows(Watcher):
    """Known are the sizes of which rows were made."""

    names, begins = FLAT | LOSSES | KEEPS | TURNS, FLAT | TURNS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.turned: set[tuple] = set()  # sizes of what was transposed, afterwards

    def saw(self, op: Op) -> None:
        if op.name in TURNS:
            before, after = (tuple(t.shape[:2]) for t in (op.given[0], op.result)) if op.given else ((), ())
            if before == after[::-1]:
                self.turned.add(after)
        elif op.name in LOSSES:
            scores, targets = map(self.known.get, op.given[:2]) if len(op.given) > 1 else (None, None)
            if scores in self.turned and targets and scores != targets and scores == targets[::-1]:
                self.note("F3 crossed", scores)
        elif op.name in KEEPS:
            for r in op.results if (fact := self.known.get(op.given[0])) else ():
                self.known.put(r, fact)
        elif op.given and isinstance(op.result, Tensor):
            x, rows = op.given[0], op.result
            scores = x.is_floating_point()
            if x.dim() == 2 + scores and rows.dim() == 1 + scores and min(x.shape[:2]) > 1:
                self.known.put(rows, tuple(x.shape[:2]))

    def backward(self, loss: Tensor) -> None:
        self.turned.clear()

    def close(self) -> None:
        self.known.by_id.clear()
