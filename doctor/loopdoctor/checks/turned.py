"""What is turned round: told by the data (F74, D19), by the gradient of an answer (F75), or by a formula (F76 to F80).

Which label means "the same", and whether a number is a place in a picture, is written down nowhere. But pairs of one
kind are more alike than pairs of two kinds, and a place moves with what it is the place of. Both are asked of the rows
of three steps, as a difference of two means or of two correlations, in standard errors.

Footgun: a difference that is not there in a hundred rows is not seen, and data can be picked so that it is the other
way round. So these checks warn.
"""

import math
from collections.abc import Iterable

from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.arithmetic import no_habit
from loopdoctor.evidence import Evidence
from loopdoctor.finding import OK, Verdict

PAIRS, GAP, ERRORS = 32, 0.1, 4.5  # of each kind, at least; of their means, as a share and in standard errors
STEPS, NARROWER = 3, 0.1
FAR, NEAR = 0.93, 0.95  # of the distance of rows that are paired at random
ROWS, CLEAR = 16, 0.25  # of a correlation; how large it is at least
ALWAYS, ABOUT = 0.95, 0.15  # of the pictures; of the distance of two points


@check("D19")
def places_left_behind(e: Evidence) -> Fired | Verdict:
    """Key points, boxes or angles come out near the middle, or on both sides, and a network without augmentation is
    better.

    Fires when some pictures are flipped before the network sees them, and a number of their targets goes along with
    where a picture's weight lies, in those that were flipped the other way than in those that were not: the two
    correlations have opposite signs, 0.25 at least, and differ by four and a half standard errors. Counts and classes
    go along with neither, and a number that goes along with how much there is in a picture is left alone. Of key points
    (N, K, 2): when two pairs of them or more, about one middle, stand in one order in all pictures as they are, and in
    the other order in all flipped ones.

    WARN places-left-behind: Pictures are flipped {way}, and number {number} of their targets stays where it was, though
    it tells a place: in flipped pictures it is on the wrong side. Fix: Flip the coordinates as well (x = width - 1 - x;
    of a pair, change left and right), or the sign of an angle.
    WARN places-left-behind/names: In flipped pictures {pairs} pairs of key points have exchanged their sides and kept
    their names: a left eye is asked for at the right one. Fix: After x = width - 1 - x, exchange the points of each
    pair: points = points[[1, 0, 3, 2, ...]].
    """
    if (verdict := no_habit(e, seen := e.habits["D19"])) is not None:
        return verdict
    for axis, way in ((-1, "left to right"), (-2, "upside down")):
        kept, flipped = (_summed(seen.values(), axis, flips) for flips in (False, True))
        sizes = [_summed(seen.values(), "whole", (axis, flips)) for flips in (False, True)]
        for number, (one, other) in enumerate(zip(kept, flipped, strict=False)):
            much = [_correlation(size[number])[1] for size in sizes]
            if much[0] * much[1] > 0 and min(map(abs, much)) > CLEAR:
                continue  # a size
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
    pairs = _exchanged(seen.values())
    if pairs > 1:
        what = f"{pairs} pairs of points in one order in pictures as they are, and in the other order in flipped ones"
        return fires(what, "left points on the left in both", fault="places-left-behind/names", pairs=pairs)
    return OK


def _exchanged(steps: Iterable) -> int:
    """How many pairs of points, about one middle, change their order with a flip."""
    steps = list(steps)
    both = [_summed(steps, "order", flipped) for flipped in (False, True)]
    if not all(both) or min(sums[0][0] for sums in both) < ROWS:
        return 0
    points = math.isqrt(len(both[0][0]) - 1)  # K + K * K numbers
    (rows, *kept), (turned, *flipped) = both[0][0], both[1][0]
    places, orders = [x / rows for x in kept[:points]], (kept[points:], flipped[points:])
    found: list[tuple[float, float, set[int]]] = []
    for i in range(points):
        for j in range(points):
            before, after = orders[0][i * points + j] / rows, orders[1][i * points + j] / turned
            if before > ALWAYS and after < 1 - ALWAYS:
                found.append(((places[i] + places[j]) / 2, places[j] - places[i], {i, j}))
    most = 0
    for middle, width, _ in found:
        used = set()
        for other, _, pair in found:
            if abs(other - middle) < ABOUT * width and not used & pair:
                used |= pair
        most = max(most, len(used) // 2)
    return most


def _summed(steps, axis: int | str, flipped: bool | tuple[int, bool]) -> list[list[float]]:
    """The sums of all steps, for each number of a target."""
    all_of = [sums for step in steps for a, f, sums in step if (a, f) == (axis, flipped)]
    same = [sums for sums in all_of if len(sums) == len(all_of[0])]
    return [[sum(n) for n in zip(*numbers, strict=True)] for numbers in zip(*same, strict=True)]


def _correlation(sums: list[float]) -> tuple[float, float]:
    """Rows, and the correlation; 0 where one of the two is constant."""
    n, x, y, xx, yy, xy = sums
    spread = (xx - x * x / n) * (yy - y * y / n)
    return n, max(-0.9999, min(0.9999, (xy - x * y / n) / math.sqrt(spread))) if spread > 1e-12 else 0.0
