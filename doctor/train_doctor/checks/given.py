"""What a model is given, and taken for something else: D31, S45, S47, F101, F102 and F104.

A code for a number, the farthest for the nearest, an angle for a number that has ends. Watchers noted them step by
step; here it is asked whether they are a habit.

Footgun: each of these lines is right somewhere (watchers/ says where), so these checks warn.
"""

import math
from collections import Counter

from train_doctor.check import Fired, check, fires
from train_doctor.checks.arithmetic import STEPS, no_habit
from train_doctor.evidence import Evidence
from train_doctor.finding import OK, Verdict

CIRCLES = {"-pi to pi": (-math.pi, math.pi), "0 to 2 pi": (0.0, 2 * math.pi), "0 to 360": (0.0, 360.0)}
CIRCLES |= {"-180 to 180": (-180.0, 180.0)}
ENDS = 1.5  # square of how far both ends lie apart in the input, over that to the middle: no circle
END, OTHER = 0.016, 0.035  # parts of a circle that lack at one end, and at the other
COMMON = (0.4, 2.5)  # times the mean number of labels of a class
SECTORS, SECTOR, LEAST = 8, 0.04, 48  # of a circle, the share of one; targets
RIM = 0.34  # the share of the four that are nearest to an end: numbers about a middle thin out there


@check("D31")
def missing_code(e: Evidence) -> Fired | Verdict:
    """A network on a table learns less than a tree does, and hardly anything from some columns.

    Fires when a column of what a first layer is given has one number in several rows that is its least or its largest,
    and twenty times as far from all others as these are spread, in three steps; and two columns have it in other rows
    each. Of -999, 9999 and the like, as they stand, one column and three times are enough. Columns that repeat other
    numbers too, and those beside which a column of flags says the same, in this table or in another, are left alone.

    WARN missing-code: Column {column} of the table is {code:.4g} in {share:.0%} of the rows, which stands for a missing
    value and is taken for a measured one{squeezed}. Fix: Fill it in with the mean or median of the others before
    anything is scaled, and tell where in a column of flags; so too where it says that something was off.
    """
    if (verdict := no_habit(e, seen := e.habits["D31"])) is not None:
        return verdict
    steps = [{(at, round(code, 4)): (share, named) for at, code, share, named in found} for found in seen.values()]
    common = set(steps[0]).intersection(*steps[1:])
    if len(steps) < STEPS + 1 or not common:
        return OK
    column, code = min(common)
    share, named = (sum(step[column, code][n] for step in steps) / len(steps) for n in (0, 1))
    return fires(
        f"in {len(seen)} steps {len(common)} columns have an end that rows share, far from all others",
        "numbers that were measured",
        column=column,
        code=code,
        share=share,
        squeezed="" if named else "; scaled with it, all others lie in a small part of the range",
    )


@check("S45")
def state_not_passed(e: Evidence) -> Fired | Verdict:
    """A recurrent model is no better than one that sees the last step of time alone.

    Fires when a cell, or a recurrent layer that is given one step of time, is called four times or more for one
    backward, and begins with zeros each time: its state is left out, or made anew. Where one of these calls has a
    state, rows of a memory or several steps, or two have something that is no step of a series, nothing is said. Also
    when an LSTM is given the cell state of an LSTM as its hidden state, and the hidden state as its cell state.

    WARN state-not-passed: {name} is called {calls} times and begins with zeros each time, so nothing of one step
    reaches the next, and its recurrent weights learn nothing. Fix: Pass the state on: h, c = cell(x[:, t], (h, c)), or
    h = cell(x[:, t], h).
    WARN state-not-passed/swapped: The two states of an LSTM are exchanged on their way to an LSTM: the cell state is
    taken for the hidden state. Fix: The hidden state comes first: _, (h, c) = lstm(x), and h, c = cell(x, (h, c)).
    """
    if no_habit(e, swapped := e.habits["S45 swapped"]) is None:
        what = f"in {len(swapped)} steps a cell state {next(iter(swapped.values()))} came first"
        return fires(what, "the hidden state first", fault="state-not-passed/swapped")
    if (verdict := no_habit(e, seen := e.habits["S45"])) is not None:
        return verdict
    name, calls = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps all of {calls} calls began with zeros", "the first alone", name=name, calls=calls
    )


@check("S47")
def statistics_of_other_data(e: Evidence) -> Fired | Verdict:
    """A new head on a frozen, pretrained network learns less than others report.

    Looks at the first batch normalisation of a frozen part that is in eval mode, in a model of which other parts learn.
    Fires when what it is given, in the middle one of its channels, is spread seven times as much or as little as what
    it was trained on, or lies one and a half spreads away from that, in two steps or more; less than half as much is
    enough where a frozen layer is given pictures from 0 to 1. Averages that move, those of a layer that never learned,
    pictures that ImageNet's numbers bring no nearer, and normalised ones that are mostly dark are left alone.

    WARN statistics-of-other-data: {name} is given numbers {spread:.2g} times as widely spread as those that the frozen
    network was trained on, and {off:.2g} spreads away: its inputs are not prepared as they were then. Fix: The same
    normalisation as in pretraining, once (transforms.Normalize(mean, std), or the weights' own transforms); of data
    that are others, leave the normalisations in train mode.
    """
    if (verdict := no_habit(e, seen := e.habits["S47"])) is not None:
        return verdict
    if len({(name, held) for name, _, _, held in seen.values()}) > 1:
        return OK
    name, spread, off, _ = next(iter(seen.values()))
    told = (
        f"in {len(seen)} steps the spread was {spread:.2g} of that in the running statistics, the means {off:.2g} off"
    )
    return fires(told, "about 1, and 0", name=name or "The normalisation", spread=spread, off=off)


@check("F101")
def farthest_for_nearest(e: Evidence) -> Fired | Verdict:
    """A network on clouds of points, or on a graph of neighbours, is no better than one that sees each point alone.

    Fires when the largest of each row of distances are picked (topk, or the end of an order), two at least and half of
    them at most, and what stands at their places goes into a layer. Distances under a mask or from one point alone,
    steps in which the nearest are picked as well, and those in which answers are held against zeros, are left alone.

    WARN farthest-for-nearest: The {number} neighbours are those with the largest distances, the farthest of all: topk
    takes the largest where it is not told otherwise. Fix: distances.topk({number}, largest=False), or the topk of
    negative distances.
    """
    if (verdict := no_habit(e, seen := e.habits["F101"])) is not None:
        return verdict
    number = next(iter(seen.values()))
    told = f"in {len(seen)} steps the {number} largest distances of each row were picked, and went into a layer"
    return fires(told, "the least ones", number=number)


@check("F102")
def angle_without_wrap(e: Evidence) -> Fired | Verdict:
    """A network that tells angles or directions is far off near one place of the circle, and answers its opposite.

    Fires when the targets of a regression of one number, over three steps, all lie within -pi to pi, 0 to 2 pi, 0 to
    360 or -180 to 180, meet both ends and fill all that lies between. Where a sine, a cosine, an atan2, a remainder or
    a choice (torch.where) of as many numbers is taken in the same step, nothing is said; nor where the error is written
    into, or the rows at one end are least alike those at the other in what a first linear layer is given.

    WARN angle-without-wrap: The targets go round a circle, {circle}, and the loss takes its two ends for the farthest
    apart, though they are one direction. Fix: Ask for the sine and the cosine, and take torch.atan2(sin, cos) of the
    answers; or loss = (1 - torch.cos(answer - angle)).mean(). If both ends differ (a joint that can't go round), this
    is right.
    """
    if (verdict := no_habit(e, seen := e.habits["F102"])) is not None:
        return verdict
    values = [v for told, _ in seen.values() for v in told]
    far, near = (sum(ends[n] for _, ends in seen.values()) for n in (0, 1))
    if far > ENDS * max(near, 0.0) and far > 0:
        return OK
    circle = next((name for name, ends in CIRCLES.items() if _fill(values, *ends)), None)
    if circle is None:
        return OK
    told = f"in {len(seen)} steps the {len(values)} targets lay between {min(values):.4g} and {max(values):.4g}"
    return fires(told, "a loss for which both ends are one", circle=circle)


def _fill(values: list[float], low: float, high: float) -> bool:
    """Whether numbers go once round, from one end to the other."""
    inside = 1e-4 * (high - low)
    if len(values) < LEAST or not all(math.isfinite(v) and low - inside <= v <= high + inside for v in values):
        return False
    sectors = Counter(min(max(int(SECTORS * (v - low) / (high - low)), 0), SECTORS - 1) for v in values)
    whole = len(sectors) == SECTORS and min(sectors.values()) >= SECTOR * len(values)
    rim = sum(sectors[k] for k in (0, 1, SECTORS - 2, SECTORS - 1))
    lacks = [(min(values) - low) / (high - low), (high - max(values)) / (high - low)]
    told = min(lacks) if low else lacks[1]  # many numbers begin at 0
    return whole and rim >= RIM * len(values) and told < END and max(lacks) < OTHER


@check("F104")
def no_condition_is_a_class(e: Evidence) -> Fired | Verdict:
    """A diffusion model with guidance makes poor samples of one class, and guides the others away from it.

    Fires when labels are replaced at random by one number before they look up a table (or become one-hot), that number
    is a class of the data about as often as any other, and the table has no row more than there are classes. There
    must be one label for each row, and a regression beside noise of as many rows. Labels that pick from numbers that do
    not learn (times, augmentations) are left alone.

    WARN no-condition-is-a-class: The label {null} stands for no condition, and is a class of the data as well: what is
    made without a condition is mixed with that class. Fix: A number of its own: nn.Embedding(classes + 1, width), and
    torch.where(drop, classes, y). If it says in the data that the class is not known, this is right.
    """
    if (verdict := no_habit(e, seen := e.habits["F104"])) is not None:
        return verdict
    facts = list(seen.values())
    counts = Counter(label for _, _, left in facts for label in left)
    (rows, null), *others = {(rows, null) for rows, null, _ in facts}
    if others or len(counts) < 2 or max(counts) + 1 != rows:
        return OK
    if not COMMON[0] < counts[null] * len(counts) / counts.total() < COMMON[1] or counts[null] < 2:
        return OK
    return fires(
        f"in {len(facts)} steps labels were replaced by {null}, which {counts[null]} of {counts.total()} others are",
        f"a label that no row has, in a table of {rows + 1} rows",
        null=null,
    )
