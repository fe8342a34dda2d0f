"""Fields of one memory that are each drawn with an index of their own: states of some rows, actions of others.

    s, a = S[torch.randint(n, (rows,))], A[torch.randint(n, (rows,))]       two draws, and no row belongs together
    at = torch.randint(n, (rows,));  s, a = S[at], A[at]

Footguns: two batches are drawn apart on purpose, each with all of its fields (two domains, negatives, points inside and
at the border), and so are rows of several classes. So each draw must have picked from one tensor alone, three of them
of one length and of different kinds, and what two of them picked must meet.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

DRAWS, PICKS = {"randint", "randperm"}, {"__getitem__", "index_select"}
DRAWN, ROWS = "drawn", "rows"
FIELDS, LEAST, LOOKED = 3, 8, 2**16  # tensors; rows; of a tensor


class FieldsApart(Watcher):
    """Known is (DRAWN, number) of an index, or (ROWS, numbers) of what such indices picked."""

    begins = DRAWS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.number = 0  # of draws
        self.picked: dict[int, list[Tensor]] = {}  # draw -> tensors that it picked from, since the last backward
        self.met: set[int] = set()  # draws whose rows met those of others

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if r is None:
            return
        if op.name in DRAWS:
            if r.dim() == 1 and LEAST <= len(r) <= LOOKED:
                self.number += 1
                self.known.put(r, (DRAWN, frozenset({self.number})))
            return
        facts = [f for f in map(self.known.get, op.given) if f]
        draws = [f for f in facts if f[0] == DRAWN]
        if draws and op.name in PICKS:
            source = op.given[0]
            if len(op.given) == 2 and not source.requires_grad and r.dim() and len(r) == len(op.given[1]):
                (number,) = draws[0][1]
                self.picked.setdefault(number, []).append(source)
                self.known.put(r, (ROWS, draws[0][1]))
            elif op.given[0].dim() == 1 and r.dim() == 1 and not r.is_floating_point():
                self.known.put(r, draws[0])  # a piece of a permutation
            return
        rows = [f[1] for f in facts if f[0] == ROWS]
        if not rows:
            return
        numbers = frozenset().union(*rows)
        if len(numbers) > 1:
            self.met |= numbers
        for result in op.results:
            if result.dim():
                self.known.put(result, (ROWS, numbers))

    def backward(self, loss: Tensor) -> None:
        alone = [picked[0] for number, picked in self.picked.items() if len(picked) == 1 and number in self.met]
        lengths = {len(t) for t in alone}
        kinds = {(t.dtype, t.shape[1:]) for t in alone}
        if len(kinds) >= FIELDS and len(lengths) == 1 and len(alone) == len(self.picked):
            self.note("D11 fields", (len(alone), lengths.pop()))
        self.picked, self.met = {}, set()

    def close(self) -> None:
        self.known.by_id.clear()
        self.picked = {}
