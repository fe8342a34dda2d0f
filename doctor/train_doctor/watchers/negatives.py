"""Rows that were drawn at random, and a loss that prefers them: the sign of BPR and of other losses of pairs.

    negative = torch.randint(items, (rows,))
    gap = (user * item[positive]).sum(1) - (user * item[negative]).sum(1)
    loss = -F.logsigmoid(gap).mean()                                        with +gap, for it must be wide

What was drawn by randint or multinomial is followed through a table and a sum to a score, and the score's sign through
what only rises (logsigmoid, softplus, exp) to the loss. The loss must grow with it.

The limit of a draw is looked at as well: where it is the size of another table, that one's rows were meant.

Footgun: only draws inside the step are seen. Random users and start nodes have scores as well; so what was drawn must
be looked up in a table in which what was not drawn is looked up too, and nothing that is looked up was picked by it.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers import signs
from train_doctor.watchers.operators import TIMES

DRAWS = {"randint", "randint_like", "multinomial", "randperm"}
LOOKUPS = {"embedding", "__getitem__", "index_select"}
RISES = {"logsigmoid", "sigmoid", "softplus", "exp", "relu", "log", "clamp", "clamp_min", "log_sigmoid"}
PRODUCTS = TIMES | {"bmm", "matmul", "einsum", "__matmul__"}
VIEWS = {"view", "squeeze", "unsqueeze", "reshape", "flatten", "long", "to", "transpose", "__getitem__", "T", "mT"}
DRAWN, PICKED, BOUND, ROWS, PRODUCT = "drawn", "picked", "bound", "rows", "product"
MANY = 0.5  # of what multinomial may draw: fewer are choices of a person


class Negatives(Watcher):
    """What is known of a tensor: a draw or what it picked (with the draw's number), rows, a product, or signs."""

    begins = DRAWS | {"embedding"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.number = 0  # of draws
        self.drawn: set[int] = set()  # tables of which rows were looked up by a draw
        self.given: set[int] = set()  # tables in which other rows were
        self.tables: dict[int, int] = {}  # how many rows each has
        self.limits: list[tuple[int, int]] = []  # tables that a draw of randint looked up, and its limit

    def saw(self, op: Op) -> None:
        if isinstance(op.result, Tensor):
            if fact := self._fact(op, [self.known.get(t) for t in op.given]):
                self.known.put(op.result, fact)

    def _fact(self, op: Op, facts: list) -> object:
        if op.name in DRAWS:
            few = op.name == "multinomial" and op.given and float((op.given[0] > 0).float().mean()) < MANY
            self.number += 1
            return None if few else (DRAWN, self.number, _limit(op))
        if op.name == "where":
            return next((f for f in facts[1:] if isinstance(f, tuple) and f[0] == DRAWN), None)
        first = facts[0] if facts and isinstance(facts[0], tuple) else ("", 0)
        if op.name == "embedding":
            self.tables[id(op.given[1])] = len(op.given[1])
            if first[0] == DRAWN and first[2]:
                self.limits.append((id(op.given[1]), first[2]))
            if first[0] != DRAWN:
                self.given.add(id(op.given[1]))
                return (BOUND, first[1]) if first[0] == PICKED else None
            self.drawn.add(id(op.given[1]))
            return ROWS, first[1]
        if first[0] in (DRAWN, PICKED):
            return first if op.name in VIEWS or op.name in ("add", "remainder") else None
        index = next((f for f in facts[1:] if isinstance(f, tuple) and f[0] in (DRAWN, PICKED)), None)
        if index and op.name in LOOKUPS and not op.result.is_floating_point():
            return PICKED, index[1]
        signed = any(isinstance(f, frozenset) for f in facts)
        rows = [f for f in facts if isinstance(f, tuple) and f[0] in (ROWS, PRODUCT)]
        if len(rows) == 1 and not signed and op.result.requires_grad:
            if op.name in PRODUCTS and len(op.given) == 2:
                if (BOUND, rows[0][1]) in facts:
                    return None  # a start node that was drawn, and its neighbour
                return (PRODUCT, 0) if op.name in TIMES else frozenset({1})
            if rows[0][0] == PRODUCT and op.name in ("sum", "mean"):
                return frozenset({1})
            return rows[0] if op.name in VIEWS else None
        if op.name in RISES:
            return facts[0] if facts and isinstance(facts[0], frozenset) else None
        return signs.followed(op, self.known)

    def backward(self, loss: Tensor) -> None:
        if self.known.get(loss) == frozenset({-1}) and self.drawn & self.given and not self.eye.rising:
            self.note("F78", True)
        for table, high in self.limits:
            rows, others = self.tables[table], {self.tables[t] for t in self.tables if t != table}
            if high < rows - 1 and high in others:  # one more is a row for padding
                self.note("D23", (rows, high))
        self.tables, self.limits = {}, []
        self.drawn, self.given = set(), set()

    def close(self) -> None:
        self.known.by_id.clear()


def _limit(op: Op) -> int:
    """Of a randint that begins at 0; 0 for anything else."""
    plain = [a for a in op.args if isinstance(a, int)]
    low = op.kwargs.get("low", plain[0] if len(plain) > 1 else 0)
    high = op.kwargs.get("high", plain[-1] if plain else 0)
    return high if op.name == "randint" and low == 0 and isinstance(high, int) else 0
