"""Pictures and targets that were moved apart, and data that an augmentation wrote into: D13, D14,
D19.

Footgun: a difference that is not there in a hundred rows is not seen, and data can be picked so
that it is the other way round. So these checks warn.
"""

import math
from collections.abc import Iterable

from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.seen import HABIT, no_habit
from loopdoctor.evidence import Evidence
from loopdoctor.finding import OK, Verdict

ERRORS = 4.5  # standard errors between two correlations
ROWS, CLEAR = 16, 0.25  # of a correlation; how large it is at least
ALWAYS, ABOUT = 0.95, 0.15  # of the pictures; of the distance of two points


@check("D13")
def data_overwritten(e: Evidence) -> Fired | Verdict:
    """Return the first epoch goes well, and then the model gets worse from epoch to epoch, on the
    training data too.

    Watches DataLoaders that fetch in this process. Fires when numbers were written into a tensor
    that the data set keeps, or arithmetic was done on it in place, and an item of the same batch
    lies in that tensor. Copies, and data sets that keep what they have read, are left alone;
    workers are not seen. Without a DataLoader, it fires when numbers that were drawn in this step
    are written into a slice of a tensor that stays, and then the model is given that slice; buffers
    that are filled anew, chains of a sampler, and what is read once from one end to the other (it
    may be a copy for one epoch) are left alone.

    WARN data-overwritten: The augmentation of {name} writes into the data that are stored, for an
    item is a view of them: what one epoch has masked or shifted stays so in the next. Fix: x =
    self.data[index].clone() before anything in place.
    WARN data-overwritten/slices: Noise or a mask is written into the data themselves: the batch
    {shape} is a slice of them, and no copy, so what one step has changed stays so, and the next
    visit adds to it. Fix: x * a + noise * b in place of x.mul_(a).add_(noise * b), or
    data[i:j].clone().
    """
    if len(slices := e.habits["D13 slices"]) >= HABIT and e.habits["D13 elsewhere"]:
        shape = next(iter(slices.values()))
        what = (
            f"in {len(slices)} steps drawn numbers were written into a slice {shape} of a "
            "tensor that stays"
        )
        return fires(what, "a copy of the slice", fault="data-overwritten/slices", shape=shape)
    if (verdict := no_habit(e, e.stored)) is not None:
        return verdict
    name = next(iter(e.stored.values()))
    return fires(
        f"in {len(e.stored)} steps items of a {name} were changed in place where they are stored",
        "items that are copies",
        name=name,
    )


@check("D14")
def moved_apart(e: Evidence) -> Fired | Verdict:
    """Return a segmentation stays blurred or mirrored, though its network learns well on data
    without augmentation.

    Fires when pictures of a batch were flipped, turned or rolled before they were put together, and
    their targets of the same height and width (or all of it some times as large) never were, or
    others of them were. Also when pieces of a batch were cut out of larger pictures at other places
    than the pieces of their targets, or the frames of films one by one. Targets that were drawn in
    sight (of zeros, of a grid), and such as many pictures share, are left alone. Data that worker
    processes load are not seen.

    WARN moved-apart: Pictures are flipped or turned and their targets are not, so a part of the
    targets is in the wrong place. Fix: Draw once, and move both in the same way.
    WARN moved-apart/drawn-twice: Some pictures are flipped or turned without their target, and some
    targets without their picture: each of the two draws its own number. Fix: Draw once, and move
    both in the same way.
    WARN moved-apart/crops: {apart} of {rows} pieces {size} of a batch were cut out of their
    pictures at another place than those of their targets: the corner was drawn twice. Fix: Draw one
    corner, and cut both there (times the factor of a finer target).
    WARN moved-apart/frames: {moved} of the {frames} frames of a film were cut at another place than
    the one before, so all that is seen in it jumps. Fix: Draw one corner for a film, and cut all of
    its frames there.
    """
    if len(films := e.habits["D14 frames"]) >= HABIT:
        moved, frames = next(iter(films.values()))
        what = f"in {len(films)} steps the frames of films were cut at other places"
        return fires(what, "one place", fault="moved-apart/frames", moved=moved, frames=frames)
    if len(crops := e.habits["D14 crops"]) >= HABIT:
        apart, rows, size, _ = next(iter(crops.values()))
        what = (
            f"in {len(crops)} steps pieces of pictures and of their targets were cut at "
            "other places"
        )
        return fires(
            what, "the same places", fault="moved-apart/crops", apart=apart, rows=rows, size=size
        )
    if (verdict := no_habit(e, e.moved)) is not None:
        return verdict
    pictures, targets, rows, apart = (sum(told[n] for told in e.moved.values()) for n in range(4))
    if apart >= HABIT:
        return fires(
            f"of {rows} rows, {apart} pictures or more were moved alone, and as many targets alone",
            "both, or neither",
            fault="moved-apart/drawn-twice",
        )
    if targets or pictures < HABIT:
        return OK
    return fires(
        f"{pictures} of {rows} pictures were moved, and none of their targets", "both, or neither"
    )


@check("D19")
def places_left_behind(e: Evidence) -> Fired | Verdict:
    """Key points, boxes or angles come out near the middle, or on both sides, and a network without
    augmentation is better.

    Fires when some pictures are flipped before the network sees them, and a number of their targets
    goes along with where a picture's weight lies, in those that were flipped the other way than in
    those that were not: the two correlations have opposite signs, 0.25 at least, and differ by four
    and a half standard errors. Counts and classes go along with neither, and a number that goes
    along with how much there is in a picture is left alone. Of key points (N, K, 2): when two pairs
    of them or more, about one middle, stand in one order in all pictures as they are, and in the
    other order in all flipped ones.

    WARN places-left-behind: Pictures are flipped {way}, and number {number} of their targets stays
    where it was, though it tells a place: in flipped pictures it is on the wrong side. Fix: Flip
    the coordinates as well (x = width - 1 - x; of a pair, change left and right), or the sign of an
    angle.
    WARN places-left-behind/names: In flipped pictures {pairs} pairs of key points have exchanged
    their sides and kept their names: a left eye is asked for at the right one. Fix: After x = width
    - 1 - x, exchange the points of each pair: points = points[[1, 0, 3, 2, ...]].
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
                    f"number {number} goes with the weight of pictures by {r:+.2f} in those "
                    f"left alone and by {q:+.2f} "
                    f"in the flipped",
                    "the same sign in both",
                    way=way,
                    number=number,
                )
    pairs = _exchanged(seen.values())
    if pairs > 1:
        what = (
            f"{pairs} pairs of points in one order in pictures as they are, and in the "
            "other order in flipped ones"
        )
        return fires(
            what, "left points on the left in both", fault="places-left-behind/names", pairs=pairs
        )
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
    """Return the sums of all steps, for each number of a target."""
    all_of = [sums for step in steps for a, f, sums in step if (a, f) == (axis, flipped)]
    same = [sums for sums in all_of if len(sums) == len(all_of[0])]
    return [[sum(n) for n in zip(*numbers, strict=True)] for numbers in zip(*same, strict=True)]


def _correlation(sums: list[float]) -> tuple[float, float]:
    """Rows, and the correlation; 0 where one of the two is constant."""
    n, x, y, xx, yy, xy = sums
    spread = (xx - x * x / n) * (yy - y * y / n)
    return n, max(
        -0.9999, min(0.9999, (xy - x * y / n) / math.sqrt(spread))
    ) if spread > 1e-12 else 0.0
