"""Partners of a contrastive loss that stand elsewhere than its index says.

    z = torch.cat([z1, z2])                         row i and row i + B are two views of one picture
    partner = (torch.arange(2 * B) + B) % (2 * B)   and this says so
    partner = torch.arange(2 * B) ^ 1               of rows that take turns: 0 and 1, 2 and 3

    z = torch.stack([z1, z2], 1).view(2 * B, -1)    these take turns, and the second line is right

Two tensors of one shape that are put together, one below the other or in turns, are followed into the product with
themselves, and that into a cross-entropy.

Footgun: what is stacked along dim 0 lies one below the other; it is the shape after the view that tells which rows.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES

PRODUCTS = {"matmul", "mm", "__matmul__", "einsum", "linear", "cosine_similarity"}
KEEPS = OVER | TIMES | MINUS | PLUS | {"masked_fill", "normalize", "fill_diagonal", "where", "linalg_norm", "clone"}
LEAST = 4  # rows of a half


class PairIndex(Watcher):
    """Known are halves, and the similarities of all rows: the rows of a half, and whether they take turns."""

    begins = {"cat", "concat", "concatenate", "stack"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if op.name == "stack":
            dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
            if (
                len(op.given) == 2
                and dim == 1
                and r is not None
                and r.requires_grad
                and r.dim() == 3
                and len(r) >= LEAST
            ):
                self.known.put(r, (len(r), True))
            return
        if op.name in self.begins:
            dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
            halves = len(op.given) == 2 and op.given[0].shape == op.given[1].shape and op.given[0].dim() == 2
            if halves and dim == 0 and r is not None and r.requires_grad and len(op.given[0]) >= LEAST:
                self.known.put(r, (len(op.given[0]), False))
            return
        half, turns = next((f for f in map(self.known.get, op.given) if f), (0, False))
        if not half:
            return
        if op.name == "cross_entropy" and len(op.given) > 1:
            self._look(half, turns, *op.given[:2])
        elif op.name in ("diag", "diagonal"):  # the similarities of partners, picked by hand
            offset = op.kwargs.get("offset", op.kwargs.get("diagonal", op.args[1] if len(op.args) > 1 else 0))
            if op.given[0].shape == (2 * half, 2 * half) and turns and abs(offset) == half:
                self.note("F94 turns", half)
        elif turns and op.name in ("view", "reshape", "flatten") and r is not None:
            if r.dim() == 2 and len(r) == 2 * half:
                self.known.put(r, (half, True))
        elif r is not None and (op.name in PRODUCTS | KEEPS or op.name in ("T", "t", "mT", "transpose")):
            if r.dim() == 2 and 2 * half in r.shape:
                self.known.put(r, (half, turns))

    def _look(self, half: int, turns: bool, answer: Tensor, target: Tensor) -> None:
        if answer.shape == (2 * half, 2 * half) and target.shape == (2 * half,) and not target.is_floating_point():
            places = torch.arange(2 * half, device=target.device)
            if torch.equal(target, (places + half) % (2 * half) if turns else places ^ 1):
                self.note("F94 turns" if turns else "F94", half)

    def close(self) -> None:
        self.known.by_id.clear()
