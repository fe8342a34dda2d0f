"""Partners of a contrastive loss that stand elsewhere than its index says.

    z = torch.cat([z1, z2])                         row i and row i + B are two views of one picture
    partner = (torch.arange(2 * B) + B) % (2 * B)   and this says so
    partner = torch.arange(2 * B) ^ 1               of rows that take turns: 0 and 1, 2 and 3

Two tensors of one shape that are put together along dim 0 are followed into the product with themselves, and that into
a cross-entropy.

Footgun: rows that were put together in turns (stack and flatten) have their partners beside them, and nothing is said.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES

PRODUCTS = {"matmul", "mm", "__matmul__", "einsum", "linear", "cosine_similarity"}
KEEPS = OVER | TIMES | MINUS | PLUS | {"masked_fill", "normalize", "fill_diagonal", "where", "linalg_norm", "clone"}
LEAST = 4  # rows of a half


class PairIndex(Watcher):
    """Known are halves, and the similarities of all rows: the rows of a half."""

    begins = {"cat", "concat", "concatenate"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if op.name in self.begins:
            dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
            halves = len(op.given) == 2 and op.given[0].shape == op.given[1].shape and op.given[0].dim() == 2
            if halves and dim == 0 and r is not None and r.requires_grad and len(op.given[0]) >= LEAST:
                self.known.put(r, len(op.given[0]))
            return
        half = next((f for f in map(self.known.get, op.given) if f), None)
        if half is None:
            return
        if op.name == "cross_entropy" and len(op.given) > 1:
            self._look(half, *op.given[:2])
        elif r is not None and (op.name in PRODUCTS | KEEPS or op.name in ("T", "t", "mT", "transpose")):
            if r.dim() == 2 and 2 * half in r.shape:
                self.known.put(r, half)

    def _look(self, half: int, answer: Tensor, target: Tensor) -> None:
        if answer.shape == (2 * half, 2 * half) and target.shape == (2 * half,) and not target.is_floating_point():
            if torch.equal(target, torch.arange(2 * half, device=target.device) ^ 1):
                self.note("F94", half)

    def close(self) -> None:
        self.known.by_id.clear()
