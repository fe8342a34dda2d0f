"""Scores and targets that were flattened in different orders: (T, B, classes) against (B, T).

    logits = transformer(...)                                               (T, B, classes), the
                                                                            places first
    F.cross_entropy(logits.reshape(-1, classes), labels.reshape(-1))        labels are (B, T), the
                                                                            rows first

Both have T * B rows, so nothing is raised, and each place is scored against that of another row.

Footgun: where there are as many rows as places the shapes tell nothing. Labels that were transposed
first have the shape of the scores. And rows may be regrouped in between, in their order (ghost
batches, groups of experts): so what the scores hang on must have been transposed to these sizes,
and not have lost them since. Or ids with the sizes of the scores went into a table, and the labels
that do not count stand where these ids, transposed, are filled up.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher

FLAT = {"reshape", "view", "flatten"}
LOSSES = {"cross_entropy", "nll_loss"}
TURNS = {"transpose", "permute", "swapaxes", "swapdims", "movedim", "t", "T", "mT"}
IGNORED = -100
KEEPS = {"log_softmax", "float", "to", "long", "contiguous"}


class CrossedRows(Watcher):
    """Known are the sizes of which rows were made, and of what was transposed, as long as these are
    its first ones.
    """

    begins = FLAT | TURNS | {"stack"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known, self.turned = Known(self), Known(self)
        self.sizes: set[tuple] = set()  # of what was transposed, since the last backward

    def saw(self, op: Op) -> None:
        if op.name in TURNS:
            before, after = (
                (tuple(t.shape[:2]) for t in (op.given[0], op.result)) if op.given else ((), ())
            )
            if before == after[::-1]:
                self.turned.put(op.result, after)
                self.sizes.add(after)
        elif op.name in LOSSES:
            scores, targets = (
                map(self.known.get, op.given[:2]) if len(op.given) > 1 else (None, None)
            )
            if scores and targets and scores[0] != targets[0] and scores[0] == targets[0][::-1]:
                if scores[1] or self._filled_across(op, *targets[0]):
                    self.note("F3 crossed", scores[0])
        elif op.name in KEEPS:
            for r in op.results if op.given and (fact := self.known.get(op.given[0])) else ():
                self.known.put(r, fact)
        elif op.name in FLAT and op.given and isinstance(op.result, Tensor):
            x, rows = op.given[0], op.result
            scores = x.is_floating_point()
            if x.dim() == 2 + scores and rows.dim() == 1 + scores and min(x.shape[:2]) > 1:
                self.known.put(rows, (tuple(x.shape[:2]), self.turned.get(x) == tuple(x.shape[:2])))
        if op.name not in TURNS:
            self._keeps(op)

    def _filled_across(self, op: Op, rows: int, places: int) -> bool:
        """Labels (B, T) are ignored where ids (T, B), transposed, are one and the same id, and
        nowhere else.
        """
        left = op.given[1].reshape(rows, places).t() == op.kwargs.get("ignore_index", IGNORED)
        texts = [
            ids for ids in self.e.lookups if ids.shape == left.shape and ids.device == left.device
        ]
        return bool(left.any()) and any(left.equal(ids == ids[left][0]) for ids in texts)

    def _keeps(self, op: Op) -> None:
        """Keep track of what comes of something transposed, as a whole or place by place."""
        sizes = {s for t in op.given if (s := self.turned.get(t))} | (
            self.sizes if op.name == "stack" else set()
        )
        for r in op.results if sizes else ():
            if tuple(r.shape[:2]) in sizes:
                self.turned.put(r, tuple(r.shape[:2]))

    def backward(self, loss: Tensor) -> None:
        self.sizes.clear()

    def close(self) -> None:
        self.known.by_id.clear()
        self.turned.by_id.clear()
