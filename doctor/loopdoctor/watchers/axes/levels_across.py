"""A number for each row that is laid along the columns of a table: `alpha_bar[t] * x` where x is
(B, D) and B is D.

    t = torch.randint(0, T, (B,))
    x_t = alpha_bar[t].sqrt() * x
    alpha_bar[t].view(-1, 1) was meant; the network is told each row's t

    loss = (weight * (model(x) - y) ** 2).mean()
    weight (B) from the loader, beside x and y

The same as laid_across.py, for rows that are no pictures. A vector that goes with the last size of
a square table may be one for the columns, so it must be known to be one for the rows: it came as a
part of a loader's batch, or what it hangs on was drawn in this step and was also made into rows, by
a lookup or as a column.

Footgun: a table of all pairs has rows on both sides, and a weight for its columns may be meant. So
data count only if they are not symmetric and no distances, and of what learns only the answers of a
layer. And rows that were made of the vector may be tokens of the columns: they then lie along the
second of three axes.
"""

from typing import Any

from torch import Tensor, nn
from torch.utils.data import dataloader, default_collate

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import PLAIN
from loopdoctor.watchers.operators import MINUS, OVER, PLUS, POWERS, TIMES

DRAWS, LEAST = {"randint", "rand"}, 4  # rows
KEEPS = MINUS | OVER | PLUS | POWERS | TIMES | set(PLAIN) | {"relu", "sigmoid", "tanh", "exp"}
GIVEN = 0


class LevelsAcross(Watcher):
    """Known are vectors and which draw they hang on, and squares that a layer answered."""

    begins = DRAWS | {"linear", "cdist"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.vectors, self.answers = Known(self), Known(self)
        # draws of which they were made; distances of all pairs
        self.tokens, self.pairs = Known(self), Known(self)
        self.columns: set[int] = set()  # draws of which tokens of columns were made
        self.rows: set[int] = {GIVEN}  # draws that were made into rows
        # draws that were laid along columns, and how many rows there are
        self.laid: dict[int, int] = {}
        self.draws = GIVEN
        self.after(dataloader._BaseDataLoaderIter, "__next__", "given")

    def given(self, batch: Any, iterator: Any) -> None:
        plain = getattr(iterator, "_collate_fn", None) is default_collate
        for part in batch if plain and isinstance(batch, list | tuple) else ():
            if isinstance(part, Tensor) and part.dim() == 1 and part.is_floating_point():
                self.vectors.put(part, GIVEN)

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if r is None:
            return
        if op.name in DRAWS:
            if r.dim() == 1 and len(r) >= LEAST:
                self.draws += 1
                self.vectors.put(r, self.draws)
            return
        if op.name == "cdist" or any(map(self.pairs.get, op.given)) and r.dim() == 2:
            self.pairs.put(r, True)
        self._tokens(op, r)
        known = [(t, draw) for t in op.given if (draw := self.vectors.get(t)) is not None]
        if known:
            self._use(op, r, *known[0])
        if r.dim() == 2 and len(r) == r.shape[1] >= LEAST and r.requires_grad:
            layer = op.name == "linear" and isinstance(op.given[1], nn.Parameter)
            if layer or op.name in KEEPS and any(map(self.answers.get, op.given)):
                self.answers.put(r, True)

    def _use(self, op: Op, r: Tensor, vector: Tensor, draw: int) -> None:
        of = len(vector)
        x = next((t for t in op.given if t is not vector), None)
        if (
            op.name in TIMES
            and x is not None
            and vector.is_floating_point()
            and x.shape == (of, of)
        ):
            if self.pairs.get(x):
                return
            if (
                self.answers.get(x)
                if draw == GIVEN
                else not x.requires_grad and not bool((x == x.t()).all())
            ):
                self.laid[draw] = of
        elif r.dim() == 2 and (r.shape == (of, 1) or op.name == "embedding"):
            self.rows.add(draw)
            self.tokens.put(r, draw)
        elif r.shape == vector.shape and not r.requires_grad:
            self.vectors.put(r, draw)

    def _tokens(self, op: Op, r: Tensor) -> None:
        """Rows that were made of a draw, as they are told to a network."""
        x = next((t for t in op.given if self.tokens.get(t) is not None), None)
        if x is None:
            return
        if r.dim() == 3 and r.shape[1] == len(x):
            self.columns.add(self.tokens.get(x))
        elif r.dim() == 2 and len(r) == len(x) and (op.name == "linear" or len(op.given) == 1):
            self.tokens.put(r, self.tokens.get(x))

    def backward(self, loss: Tensor) -> None:
        for draw in (self.laid.keys() & self.rows) - self.columns:
            self.note("F21", ((self.laid[draw],) * 2, self.laid[draw]))
        self.rows, self.laid, self.columns = {GIVEN}, {}, set()

    def close(self) -> None:
        for known in (self.vectors, self.answers, self.tokens, self.pairs):
            known.by_id.clear()
