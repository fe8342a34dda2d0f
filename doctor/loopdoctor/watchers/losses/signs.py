"""The sign with which a term enters a loss: what is left of it after sums, differences and factors.

    loss = pg_loss + 0.5 * value_loss - 0.01 * entropy.mean()         the entropy has -1

Footgun: a factor that is itself learned, or that holds several numbers, has no one sign. Then
nothing is known any more.
"""

from torch import Tensor

from loopdoctor.eye import Known, Op
from loopdoctor.watchers.operators import MINUS, OVER, PLUS, TIMES, TURNS

SAME = {"mean", "sum", "view", "reshape", "squeeze", "flatten", "__getitem__"}
FOLLOWED = SAME | PLUS | MINUS | TURNS | TIMES | OVER


def turned(signs: frozenset | None) -> frozenset:
    return frozenset(-s for s in signs or ())


def followed(op: Op, known: Known) -> frozenset | None:
    """Return the signs of a result, of those of what it is made of; None where there are none."""
    facts = [f if isinstance(f, frozenset) else None for f in map(known.get, op.given)]
    if not any(facts):
        return None
    first = facts[0]
    if op.name in SAME:
        return first
    if op.name in PLUS:
        return frozenset().union(*(f for f in facts if f))
    if op.name in TURNS:
        return turned(first) if first else None
    if op.name in MINUS:
        return (first or frozenset()) | (turned(facts[1]) if len(facts) == 2 else frozenset())
    if op.name not in TIMES | OVER:
        return None
    factor = [a for a in op.args if not (isinstance(a, Tensor) and known.get(a))]
    if (
        len(factor) != 1
        or isinstance(factor[0], Tensor)
        and (factor[0].numel() > 1 or factor[0].requires_grad)
    ):
        return None
    of = next(f for f in facts if f)
    # 0: a weight that warms up
    return None if not float(factor[0]) else of if float(factor[0]) > 0 else turned(of)
