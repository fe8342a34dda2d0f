"""A column against a row, by hand: (B, 1) times (B) is (B, B), each row of the batch with each
other one.

    loss = -(ratio * advantage).mean()
    ratio (B), advantage (B, 1) from a critic or a loader

Nothing is raised, and the mean of a table is a number as well. Here each row is credited with the
mean of all, so what was to be learned cancels. The column may also be a network's answer, as in
`reward + gamma * critic(x)`.

Footgun: tables of pairs are made on purpose, by unsqueeze, by None in an index, or by a sum that
keeps its dimension. What came about so, or by arithmetic on it, is left alone. But logarithms of
probabilities are no side of such a table: where they are the row, a column that was made on purpose
is wrong as well.
"""

from typing import Any, NamedTuple

from torch import Tensor, distributions

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.places import Place, here
from loopdoctor.watchers.operators import OVER, PLUS

MADE = {"mul", "multiply", "__mul__", "__rmul__", "sub", "subtract", "__sub__", "rsub", "__rsub__"}
COLUMNS = {  # functions that can make a column on purpose
    *(
        "unsqueeze",
        "view",
        "reshape",
        "__getitem__",
        "sum",
        "mean",
        "max",
        "min",
        "amax",
        "amin",
        "norm",
        "var",
        "std",
    ),
    *(
        "logsumexp",
        "prod",
        "stack",
        "cat",
        "concat",
        "expand",
        "matmul",
        "__matmul__",
        "mm",
        "mv",
        "einsum",
        "median",
    ),
    *(
        "t",
        "T",
        "transpose",
        "permute",
        "gather",
        "index_select",
        "argmax",
        "argmin",
        "vector_norm",
        "linalg_norm",
    ),
    *(
        "linalg_vector_norm",
        "nanmean",
        "any",
        "all",
        "logaddexp",
        "diagonal",
        "repeat",
        "tile",
        "quantile",
        "topk",
    ),
    *(
        "unflatten",
        "swapaxes",
        "movedim",
        "as_strided",
        "select",
        "narrow",
        "squeeze",
        "flatten",
        "sort",
        "cumsum",
    ),
}


KEPT = MADE | {
    "neg",
    "__neg__",
    "__getitem__",
    "view",
    "flatten",
    "reshape",
    "squeeze",
    "exp",
    "clamp",
}
ARITHMETIC = MADE | PLUS | OVER
JOINED = {"cat", "concat", "stack"}
CUT = {"detach", "data"}
SUMMED = {"sum", "mean", "einsum"}
MEANS_IT = {
    "cross_entropy",
    "softmax",
    "log_softmax",
    "logsumexp",
    "diagonal",
    "diag",
    "topk",
    "argmax",
}
MEANT, SCORES, ANSWER, LOOKED_UP, PAIRED, SQUARE = range(1, 7)


class Square(NamedTuple):
    """A table that a column and a row of the batch went into."""

    name: str  # of the function
    rows: int
    place: Place | None


class OuterProducts(Watcher):
    """Known are columns that were made on purpose, what a distribution's log_prob gave, columns of
    layers and of embeddings (the bias of a user), and sums over each row (the product of a user and
    an item).
    """

    begins = COLUMNS | MADE | {"linear", "embedding"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        # a table of such a column and a row, since the last backward
        self.squares: Square | None = None
        self.of_distributions("log_prob", "score", after=True)

    def score(self, result: Any, of: distributions.Distribution, value: Any) -> None:
        if isinstance(result, Tensor) and result.dim() == 1:
            self.known.put(result, SCORES)

    def saw(self, op: Op) -> None:
        result = op.result
        if not isinstance(result, Tensor) or not op.given:
            return
        facts = [self.known.get(t) for t in op.given]
        if SQUARE in facts:
            self._of_a_square(op, facts)
        if result.dim() == 1 and facts[0] == SCORES:
            if op.name in KEPT or op.name in JOINED and set(facts) == {SCORES}:
                self.known.put(result, SCORES)
        if (
            result.dim() == 1
            and facts[0] == ANSWER
            and op.name in ("squeeze", "flatten", "view", "__getitem__")
        ):
            # scores of pairs, or of two ends of an edge, meet as a table
            self.known.put(result, ANSWER)
        if result.dim() == 1 and op.name in SUMMED and op.given[0].dim() == 2:
            self.known.put(result, PAIRED)
        if result.dim() != 2:
            return
        if result.shape[1] == 1 and op.name == "embedding":
            self.known.put(result, LOOKED_UP)
        elif result.shape[1] == 1 and (
            op.name == "linear" or ANSWER in facts and op.name in ARITHMETIC | CUT
        ):
            self.known.put(result, ANSWER)
        elif result.shape[1] == 1:
            meant = (
                op.kwargs.get("keepdim")
                or any(a is True for a in op.args[1:])
                or op.given[0].dim() != 2
            )
            meant = (
                meant and op.name not in ("tensor", "as_tensor", "linear") and op.given[0].dim() > 0
            )
            if meant or MEANT in facts:
                self.known.put(result, MEANT)
        elif (
            op.name in ARITHMETIC and len(op.given) == 2 and result.shape[0] == result.shape[1] > 1
        ):
            if {LOOKED_UP, PAIRED} == set(facts):
                self._square(op, result)
            if ANSWER not in facts and (op.name not in MADE or not result.requires_grad):
                return
            for column, row in (op.given, op.given[::-1]):
                meant = self.known.get(column) == MEANT and self.known.get(row) != SCORES
                answers = self.known.get(column) == ANSWER and (
                    row.requires_grad or self.known.get(row) == ANSWER
                )
                if (
                    column.shape == (len(result), 1)
                    and row.shape == (len(result),)
                    and not meant
                    and not answers
                ):
                    self._square(op, result)

    def _square(self, op: Op, result: Tensor) -> None:
        self.known.put(result, SQUARE)
        self.squares = Square(op.name, len(result), here())

    def _of_a_square(self, op: Op, facts: list) -> None:
        """Leave alone what meets a table of its size, or is asked for a place of each row: that is
        on purpose.
        """
        mine = op.given[facts.index(SQUARE)]
        if (
            any(t.shape == mine.shape and fact != SQUARE for t, fact in zip(op.given, facts))
            or op.name in MEANS_IT
        ):
            self.squares = None
        elif isinstance(op.result, Tensor) and op.result.shape == mine.shape:
            self.known.put(op.result, SQUARE)

    def backward(self, loss: Tensor) -> None:
        if self.squares is not None:
            self.e.outer.setdefault(self.eye.turn, self.squares)
        self.squares = None

    def close(self) -> None:
        self.known.by_id.clear()
