"""What is turned round by the testimony of the data: F74 and D19.

Which label means "the same", and whether a number is a place in a picture, is written down nowhere. But pairs of one
kind are more alike than pairs of two kinds, and a place moves with what it is the place of. Both are asked of the rows
of three steps, as a difference of two means or of two correlations, in standard errors.

Footgun: a difference that is not there in a hundred rows is not seen, and data can be picked so that it is the other
way round. So these checks warn.
"""

import math

from train_doctor.check import Fired, check, fires
from train_doctor.checks.arithmetic import no_habit
from train_doctor.evidence import Evidence
from train_doctor.finding import OK, Verdict, not_applicable

PAIRS, GAP, ERRORS = 32, 0.1, 4.5  # of each kind, at least; of their means, as a share and in standard errors
ROWS, CLEAR = 16, 0.25  # of a correlation; how large it is at least


@check("F74")
def pairs_turned_round(e: Evidence) -> Fired | Verdict:
    """A metric learner puts what is alike far apart and what is different together.

    Fires when pairs of inputs that the loss draws together lie clearly further apart, as inputs, than pairs that it
    pushes apart: over three steps the means differ by a tenth and by four and a half standard errors. Pictures and
    series are compared by how strong each of their frequencies is, which does not depend on where something stands.
    Which pairs are drawn is read off the gradients of two calls of one network that meet row by row; pairs of one call
    are told apart only where a label of two values decides it. Positives that were picked for being hard look the same.

    WARN pairs-turned-round: The loss draws pairs together that are less alike than those it pushes apart: the meaning
    of the label (1 = same or 1 = different), the order of positive and negative, or a similarity in the place of a
    distance is turned round. Fix: loss = same * d**2 + (1 - same) * relu(margin - d)**2, with same = 1 for a pair of
    one kind.
    """
    if (verdict := no_habit(e, seen := e.habits["F74"])) is not None:
        return verdict
    drawn, pushed = (_pooled([g for groups in seen.values() for g in groups if g[0] is way]) for way in (True, False))
    if min(drawn[0], pushed[0]) < PAIRS:
        return not_applicable("no pairs are both drawn together and pushed apart")
    gap, error = drawn[1] - pushed[1], math.sqrt(drawn[2] / drawn[0] + pushed[2] / pushed[0])
    if gap <= GAP * pushed[1] or gap <= ERRORS * error:
        return OK
    return fires(f"the inputs that are drawn together lie {drawn[1] / pushed[1]:.2f} times as far apart", "less than 1")


def _pooled(groups: list[tuple[bool, int, float, float]]) -> tuple[int, float, float]:
    """How many rows there are, and the mean and variance of all."""
    rows = sum(n for _, n, _, _ in groups)
    mean = sum(n * m for _, n, m, _ in groups) / max(rows, 1)
    return rows, mean, sum(n * (v + (m - mean) ** 2) for _, n, m, v in groups) / max(rows, 1)


@check("D19")
def places_left_behind(e: Evidence) -> Fired | Verdict:
    """Key points, boxes or angles come out near the middle, or on both sides, and a network without augmentation is
    better.

    Fires when some pictures are flipped before the network sees them, and a number of their targets goes along with
    where a picture's weight lies, in those that were flipped the other way than in those that were not: the two
    correlations have opposite signs, 0.25 at least, and differ by four and a half standard errors. Counts and classes
    go along with neither.

    WARN places-left-behind: Pictures are flipped {way}, and number {number} of their targets stays where it was, though
    it tells a place: in flipped pictures it is on the wrong side. Fix: Flip the coordinates as well (x = width - 1 - x;
    of a pair, change left and right), or the sign of an angle.
    """
    if (verdict := no_habit(e, seen := e.habits["D19"])) is not None:
        return verdict
    for axis, way in ((-1, "left to right"), (-2, "upside down")):
        kept, flipped = (_summed(seen.values(), axis, flips) for flips in (False, True))
        for number, (one, other) in enumerate(zip(kept, flipped, strict=False)):
            (n, r), (m, q) = _correlation(one), _correlation(other)
            if min(n, m) < ROWS or r * q >= 0 or min(abs(r), abs(q)) < CLEAR:
                continue
            if abs(math.atanh(r) - math.atanh(q)) > ERRORS * math.sqrt(1 / (n - 3) + 1 / (m - 3)):
                return fires(
                    f"number {number} goes with the weight of pictures by {r:+.2f} in those left alone and by {q:+.2f} "
                    f"in the flipped",
                    "the same sign in both",
                    way=way,
                    number=number,
                )
    return OK


def _summed(steps, axis: int, flipped: bool) -> list[list[float]]:
    """The sums of all steps, for each number of a target."""
    all_of = [sums for step in steps for a, f, sums in step if (a, f) == (axis, flipped)]
    same = [sums for sums in all_of if len(sums) == len(all_of[0])]
    return [[sum(n) for n in zip(*numbers, strict=True)] for numbers in zip(*same, strict=True)]


def _correlation(sums: list[float]) -> tuple[float, float]:
    """Rows, and the correlation; 0 where one of the two is constant."""
    n, x, y, xx, yy, xy = sums
    spread = (xx - x * x / n) * (yy - y * y / n)
    return n, max(-0.9999, min(0.9999, (xy - x * y / n) / math.sqrt(spread))) if spread > 1e-12 else 0.0
