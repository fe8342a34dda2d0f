"""Labels in blocks for rows that alternate, or the other way round.

    candidates = torch.cat([pos[:, None], neg], 1)          (B, 1 + K), laid out row by row: + - - + - - + - -
    labels = torch.cat([ones(B), zeros(B * K)])             + + + - - - - - -
    views = torch.cat([x.rot90(k, (2, 3)) for k in range(4)])       all of k = 0 first
    labels = torch.arange(4).repeat(B)                              0 1 2 3 0 1 2 3

Both have as many rows. What was put together of pieces keeps the order of its pieces until it meets a first layer, and
labels that are the same number in each piece tell theirs by their numbers.

Footgun: with as many pieces as rows the two orders can't be told from each other by their shapes.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

LAYERS = {"embedding", "linear", "conv2d", "conv1d"}
LOSSES = {"cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy"}
JOINS = {"cat", "concat", "stack"}
LAID = {"reshape", "view", "flatten"}
GRID, ROWS, BLOCKS = "grid", "row by row", "in blocks"
LEAST = 4  # rows of a piece


class OrderOfPieces(Watcher):
    """What is known of a tensor: (GRID, ROWS or BLOCKS, rows, pieces)."""

    begins = JOINS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.laid: set[tuple] = set()  # orders that first layers were given in this step
        self.names = JOINS | LAID | LAYERS | LOSSES | {"to", "float", "long", "contiguous", "sub", "div", "mul", "add"}

    def asks(self, name: str, known: int, forward: bool) -> bool:
        return name in LOSSES or super().asks(name, known, forward)

    def saw(self, op: Op) -> None:
        if op.name in LOSSES:
            self._labelled(op)
            return
        fact = next((f for f in map(self.known.get, op.given) if f), None)
        if op.name in JOINS and fact is None:
            fact = _joined(op)
        elif fact is not None and op.name in LAYERS:
            if fact[0] != GRID:
                self.laid.add(fact)
            return
        elif fact is not None and op.name in LAID:
            fact = _laid(op, fact)
        elif fact is not None and (op.name in JOINS or op.results and op.results[0].shape != op.given[0].shape):
            return
        for r in op.results if fact else ():
            self.known.put(r, fact)

    def _labelled(self, op: Op) -> None:
        if len(op.given) < 2 or not self.laid or not op.given[0].requires_grad:
            return
        labels = op.given[1].detach()
        if not labels.dim() or labels.numel() != len(labels) or len(self.laid) != 1:
            return
        ((how, rows, pieces),) = self.laid
        if len(labels) == rows * pieces and rows != pieces:
            alternate, blocks = labels.view(rows, pieces), labels.view(pieces, rows).T
            mine, other = (alternate, blocks) if how == ROWS else (blocks, alternate)
            if _same_in_each_row(other) and not _same_in_each_row(mine):
                self.note("D38", (how, rows, pieces))

    def backward(self, loss: Tensor) -> None:
        self.laid = set()

    def close(self) -> None:
        self.known.by_id.clear()
        self.laid = set()


def _joined(op: Op) -> tuple | None:
    dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
    pieces, out = op.given, op.result
    if not isinstance(dim, int) or len(pieces) < 2 or not isinstance(out, Tensor) or not all(t.dim() for t in pieces):
        return None
    if any(t.requires_grad for t in pieces):
        return None
    same = all(t.shape == pieces[0].shape for t in pieces)
    if op.name == "stack":
        if len(out) < 2 or dim not in (0, 1) or len(pieces[0]) < LEAST:
            return None
        return (GRID, ROWS, len(pieces[0]), len(pieces)) if dim else (GRID, BLOCKS, len(pieces[0]), len(pieces))
    if dim == 0 and same and len(pieces[0]) >= LEAST:
        return BLOCKS, len(pieces[0]), len(pieces)
    if dim in (1, -1) and out.dim() == 2 and len(out) >= LEAST and not out.is_floating_point():
        return GRID, ROWS, *out.shape
    return None


def _laid(op: Op, fact: tuple) -> tuple | None:
    """A grid whose first two dimensions have become one."""
    out, how = op.result, fact
    if how[0] == GRID:
        return how[1:] if out.dim() and len(out) == how[2] * how[3] and out.dim() < op.given[0].dim() else None
    return how if out.dim() and len(out) == len(op.given[0]) else None


def _same_in_each_row(labels: Tensor) -> bool:
    """Whether each column (a piece) has one label, and not all have the same."""
    return bool((labels == labels[:1]).all()) and bool((labels[0] != labels[0, 0]).any())
