"""Rows that were drawn at random, and a loss that prefers them: the sign of BPR and of other losses of pairs.

    negative = torch.randint(items, (rows,))
    gap = (user * item[positive]).sum(1) - (user * item[negative]).sum(1)
    loss = -F.logsigmoid(gap).mean()                                        with +gap, for it must be wide

What was drawn by randint or multinomial is followed through a table and a sum to a score, and the score's sign through
what only rises (logsigmoid, softplus, exp) to the loss. The loss must grow with it.

Footgun: only draws inside the step are seen. Random users and random actions have scores as well; so what was drawn
must be looked up in a table in which what was not drawn is looked up too.
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
DRAWN, ROWS = "drawn", "rows"


class Negatives(Watcher):
    begins = DRAWS | {"embedding"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.drawn: set[int] = set()  # tables in which draws were looked up, and others
        self.given: set[int] = set()

    def saw(self, op: Op) -> None:
        if not isinstance(op.result, Tensor):
            return
        facts = [self.known.get(t) for t in op.given]
        if fact := self._fact(op, facts):
            self.known.put(op.result, fact)

    def _fact(self, op: Op, facts: list) -> object:
        if op.name in DRAWS:
            return DRAWN
        if op.name == "embedding":
            index, table = facts[0], id(op.given[1])
            (self.drawn if index == DRAWN else self.given).add(table)
            return (ROWS, table) if index == DRAWN else None
        if facts and facts[0] == DRAWN:  # what is picked by a draw is not itself one
            return DRAWN if op.name in VIEWS or op.name in ("add", "remainder") else None
        rows = [f for f in facts if isinstance(f, tuple)]
        if len(rows) == 1 and not any(isinstance(f, frozenset) for f in facts) and op.result.requires_grad:
            if op.name in PRODUCTS and len(op.given) == 2:
                product = op.name in TIMES
                return ("product", rows[0][1]) if product else frozenset({1})
            if rows[0][0] == "product" and op.name in ("sum", "mean"):
                return frozenset({1})
            return rows[0] if op.name in VIEWS else None
        if op.name in RISES:
            return facts[0] if facts and isinstance(facts[0], frozenset) else None
        return signs.followed(op, self.known)

    def backward(self, loss: Tensor) -> None:
        if self.known.get(loss) == frozenset({-1}) and self.drawn & self.given and not self.eye.rising:
            self.note("F78", True)
        self.drawn, self.given = set(), set()

    def close(self) -> None:
        self.known.by_id.clear()
