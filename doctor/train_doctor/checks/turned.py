"""What is turned round: told by the data (F74, D19), by the gradient of an answer (F75), or by a formula (F76 to F80).

Which label means "the same", and whether a number is a place in a picture, is written down nowhere. But pairs of one
kind are more alike than pairs of two kinds, and a place moves with what it is the place of. Both are asked of the rows
of three steps, as a difference of two means or of two correlations, in standard errors.

Footgun: a difference that is not there in a hundred rows is not seen, and data can be picked so that it is the other
way round. So these checks warn.
"""

import math
from collections.abc import Iterable

from train_doctor.check import Fired, check, fires
from train_doctor.checks.arithmetic import no_habit
from train_doctor.evidence import Evidence
from train_doctor.finding import OK, Verdict, not_applicable
from train_doctor.watchers.aims import AWAY, NEARER

PAIRS, GAP, ERRORS = 32, 0.1, 4.5  # of each kind, at least; of their means, as a share and in standard errors
STEPS, NARROWER = 3, 0.1
FAR, NEAR = 0.93, 0.95  # of the distance of rows that are paired at random
ROWS, CLEAR = 16, 0.25  # of a correlation; how large it is at least
ALWAYS, ABOUT = 0.95, 0.15  # of the pictures; of the distance of two points


@check("F74")
def pairs_turned_round(e: Evidence) -> Fired | Verdict:
    """A metric learner puts what is alike far apart and what is different together.

    Fires when pairs of inputs that the loss draws together lie clearly further apart, as inputs, than pairs that it
    pushes apart: over three steps the means differ by a tenth and by four and a half standard errors. Pictures and
    series are compared by how strong each of their frequencies is as well, which does not depend on where something
    stands.
    Which pairs are drawn is read off the gradients of two calls of one network that meet row by row; pairs of one call
    are told apart only where a label of two values decides it. Rows that were picked for being near are left alone;
    pairs from two cameras or domains look like this fault. For torch's triplet losses the names of what they are given
    are read as well.

    WARN pairs-turned-round: The loss draws pairs together that are less alike than those it pushes apart: the meaning
    of the label (1 = same or 1 = different), the order of positive and negative, or a similarity in the place of a
    distance is turned round. Fix: loss = same * d**2 + (1 - same) * relu(margin - d)**2, with same = 1 for a pair of
    one kind.
    WARN pairs-turned-round/named: A triplet loss takes (anchor, positive, negative), and is given {first} for the
    positive and {second} for the negative. Fix: criterion(anchor, positive, negative).
    """
    if len(named := e.habits["F74 named"]) >= STEPS:
        first, second = next(iter(named.values()))
        fault = "pairs-turned-round/named"
        what = f"in {len(named)} steps the positive was {first} and the negative {second}"
        return fires(what, "the positive second", fault=fault, first=first, second=second)
    if (verdict := no_habit(e, seen := e.habits["F74"])) is not None:
        return verdict
    groups = [g for groups in seen.values() for g in groups]
    enough = False
    for compared in sorted({g[-1] for g in groups}):
        drawn, pushed = (_pooled([g for g in groups if g[0] is way and g[-1] == compared]) for way in (True, False))
        if min(drawn[0], pushed[0]) < PAIRS:
            continue
        enough = True
        gap, error = drawn[1] - pushed[1], math.sqrt(drawn[2] / drawn[0] + pushed[2] / pushed[0])
        picked = drawn[1] < FAR * drawn[3] or pushed[1] > NEAR * pushed[3]  # for being near or far
        if gap > GAP * pushed[1] and gap > ERRORS * error and not picked:
            ratio = drawn[1] / pushed[1]
            return fires(f"the inputs that are drawn together lie {ratio:.2f} times as far apart", "less than 1")
    return OK if enough else not_applicable("no pairs are both drawn together and pushed apart")


def _pooled(groups: list[tuple[bool, int, float, float, float, int]]) -> tuple[int, float, float, float]:
    """How many rows there are, the mean and variance of all, and the mean of those that are paired at random."""
    rows = sum(n for _, n, *_ in groups)
    mean = sum(n * m for _, n, m, *_ in groups) / max(rows, 1)
    variance = sum(n * (v + (m - mean) ** 2) for _, n, m, v, *_ in groups) / max(rows, 1)
    return rows, mean, variance, sum(n * r for _, n, _, _, r, _ in groups) / max(rows, 1)


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


@check("D28")
def targets_turned(e: Evidence) -> Fired | Verdict:
    """A network that answers with maps (masks, heat maps) learns slowly, and its answers lie beside what they are of.

    Fires when maps of the size of their pictures, or coarser by a whole number, go along with them better, place by
    place, when they are turned or mirrored in one of seven ways: over three steps by a tenth and four and a half
    standard errors. What all pictures of a batch have in common is left out.

    WARN targets-turned: The maps fit their pictures {way}, and not as they stand. Fix: Index maps [row, column], which
    is [y, x]; load both in the same orientation.
    """
    if (verdict := no_habit(e, seen := e.habits["D28"])) is not None:
        return verdict
    best = (0.0, "", 0.0, 0.0)
    for way in set.intersection(*map(set, seen.values())):
        n, gain, squares, alike = (sum(numbers) for numbers in zip(*(step[way] for step in seen.values()), strict=True))
        error = math.sqrt(max(squares / n - (gain / n) ** 2, 1e-12) / n)
        if n >= ROWS and gain / n > GAP and gain / n > ERRORS * error and alike / n > CLEAR:
            best = max(best, (gain / n, way, alike / n, (alike - gain) / n))
    if not best[1]:
        return OK
    _, way, turned, as_it_is = best
    return fires(f"a correlation of {turned:.2f} {way}, of {as_it_is:.2f} as they are", "the other way round", way=way)


@check("F75")
def away_from_targets(e: Evidence) -> Fired | Verdict:
    """The loss falls below zero and on, or to the least that it can be, and the answers get worse with training.

    Fires when in three steps the gradients of all answers that met a target of their shape (in a difference, a
    regression loss, or the products of a correlation or an SSIM) say that the loss grows on the way to the target. A
    step in which any answer is drawn nearer to what it meets is left alone; so are steps with a loss of classes too,
    targets that weights made, attacks on an input, a loss that is to grow, and gradients that are negated before the
    step. Also when the loss holds minus the size (a square, an absolute value, a norm) of matrices that its layers
    multiply with, and that nothing cuts to a range; and when torch's losses of classes stand in the loss of a single
    optimizer with a minus.

    WARN away-from-targets: The loss grows as the answer comes nearer to its target, so training drives them apart: a
    minus too many before an error, or one missing before a likeness. Fix: loss = error, or loss = 1 - likeness.
    WARN away-from-targets/weights: The penalty on the weights has a minus in front, so the loss falls without end as
    the weights grow. Fix: loss = error + 1e-4 * sum(p.pow(2).sum() for p in model.parameters()).
    WARN away-from-targets/classes: {name} stands in the loss with a minus (or maximize=True was given), so training
    makes the right class less likely with each step. Fix: Leave out the minus, or maximize.
    """
    if len(classes := e.habits["F75 classes"]) >= STEPS and len(e.optimizers) < 2:
        name = next(iter(classes.values()))
        what = f"in {len(classes)} steps {name} was to grow"
        return fires(what, "to fall", fault="away-from-targets/classes", name=name[:1].upper() + name[1:])
    if len(turned := e.habits["F75 weights"]) >= STEPS:
        what = f"in {len(turned)} steps the size of weights stood in the loss with a minus"
        return fires(what, "a plus", fault="away-from-targets/weights")
    if (verdict := no_habit(e, seen := e.habits["F75"])) is not None:
        return verdict
    heard = [ways for asked, ways in seen.values() if ways]
    if len(heard) < STEPS:
        return OK
    if any(min(ways) < NEARER or max(ways) < AWAY for ways in heard):
        return OK
    least = min(max(ways) for ways in heard)
    return fires(f"in {len(heard)} steps {least:.0%} or more of the gradient led away from the target", "towards it")


@check("F76")
def caution_turned_round(e: Evidence) -> Fired | Verdict:
    """A policy changes too far in one update and collapses, or values are overrated and grow.

    Fires when the better of PPO's two objectives (of which one was cut to a range around 1) is what the loss holds, or
    when the larger of the answers of two critics, without a graph, is part of a target that two answers are asked for.
    Where the smaller of two values is used in the same step, nothing is said.

    WARN caution-turned-round/objective: The loss holds the better of the two objectives of a policy, and the cut is to
    keep the worse: nothing holds the policy near the old one. Fix: loss = -torch.min(ratio * advantage, cut *
    advantage).mean(), or torch.max of the two negated ones.
    WARN caution-turned-round/value: The target holds the larger of two critics' values, so what one of them overrates
    is handed on. Fix: torch.min(q1, q2).
    """
    if (verdict := no_habit(e, seen := e.habits["F76"])) is not None:
        return verdict
    what = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps the loss held the better {what} of two",
        "the worse one",
        fault=f"caution-turned-round/{what}",
    )


@check("F77")
def squash_not_counted(e: Evidence) -> Fired | Verdict:
    """A policy with squashed actions (SAC) goes to their ends, and its temperature falls or its entropy grows for ever.

    Fires when a draw with a gradient (rsample) went through a tanh and its log-probability reached the loss, without
    anything added to it that was made of the draw itself. Differences of log-probabilities are left alone.

    WARN squash-not-counted: The log-probability in the loss is that of the draw before the tanh, and the action is what
    comes after it. Fix: log_prob - torch.log(1 - action.pow(2) + 1e-6), summed over the numbers of an action.
    """
    if (verdict := no_habit(e, seen := e.habits["F77"])) is not None:
        return verdict
    return fires(f"in {len(seen)} steps the log-probability was that of the draw", "the logarithm of the tanh's slope")


@check("F78")
def random_rows_preferred(e: Evidence) -> Fired | Verdict:
    """A recommender or an embedding ranks what a person chose below what was drawn at random.

    Fires when rows were looked up by what randint, randperm or multinomial drew in the step, in a table in which other
    rows were looked up too, and the loss falls as their scores rise. Start nodes and their neighbours are left alone.

    WARN random-rows-preferred: The loss falls as the scores of randomly drawn rows rise: the two scores are swapped, or
    a minus is wrong. Fix: loss = -F.logsigmoid(score_positive - score_negative).mean().
    """
    if (verdict := no_habit(e, seen := e.habits["F78"])) is not None:
        return verdict
    return fires(f"in {len(seen)} steps the loss fell with the scores of rows drawn at random", "a loss that grows")


@check("F79")
def penalty_of_other_lengths(e: Evidence) -> Fired | Verdict:
    """A critic with a gradient penalty (WGAN-GP) stays flat or becomes far too steep.

    Fires when a derivative of several rows, with its graph, is made into lengths from which a number is taken, and
    there is one length for all of them, or one for each place of pictures.

    WARN penalty-of-other-lengths: The penalty asks a length of {what} and not of each row, which holds critics of
    another slope at 1. Fix: slope.flatten(1).norm(2, dim=1).
    """
    if (verdict := no_habit(e, seen := e.habits["F79"])) is not None:
        return verdict
    what = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps the length was that of {what}", "one length for each row", what=what)


@check("F80")
def focus_turned_round(e: Evidence) -> Fired | Verdict:
    """A focal loss does worse than plain cross-entropy, above all on rare classes.

    Fires when a power above 1 of a probability is the weight of its own negative logarithm, in all rows or in those of
    one class alone.

    WARN focus-turned-round: The weight p**gamma is large where the answer is right already, and nearly nothing where it
    is wrong. Fix: (1 - p) ** gamma * -log(p).
    WARN focus-turned-round/one-class: The weight is made of the probability of one class, and not of that of each row's
    own label: in the other class it is large where the answer is right already. Fix: p_t = p * y + (1 - p) * (1 - y),
    and (1 - p_t) ** gamma * loss.
    """
    if len(one := e.habits["F80 one"]) >= STEPS:
        rows, of = next(iter(one.values()))
        what = f"in {len(one)} steps the weight was a power of the row's own probability in {rows} of {of} rows"
        return fires(what, "a power of 1 - p_t in all", fault="focus-turned-round/one-class")
    if (verdict := no_habit(e, seen := e.habits["F80"])) is not None:
        return verdict
    return fires(f"in {len(seen)} steps the weight of -log(p) was a power of p", "a power of 1 - p")


@check("S44")
def groups_cut_across(e: Evidence) -> Fired | Verdict:
    """Few-shot classification hardly gets better: the prototypes are alike.

    Fires when answers (N, D) are cut into groups of which the mean is taken, and the inputs of the rows are clearly
    more alike within the groups that come about the other way round: rows of a group that lie side by side, or that lie
    apart by the number of groups.

    WARN groups-cut-across: The means of {count} groups of {size} rows are taken across what belongs together: rows of
    one class lie {where}. Fix: {fix}.
    """
    if (verdict := no_habit(e, seen := e.habits["S44"])) is not None:
        return verdict
    told = [fact for step in seen.values() for fact in step]
    gains = [gain for gain, *_ in told]
    mean = sum(gains) / len(gains)
    error = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / len(gains) / len(gains))
    if len(gains) < STEPS or mean > -NARROWER or mean > -ERRORS * error:
        return OK
    _, count, size, dim = told[0]
    return fires(
        f"within the other groups the inputs vary {math.exp(mean):.2f} times as much, in {len(gains)} cuts",
        "about as much, or more",
        count=count,
        size=size,
        where=f"{count} apart" if dim else "side by side",
        fix="z.view(shots, classes, -1).mean(0)" if dim else "z.view(classes, shots, -1).mean(1)",
    )
