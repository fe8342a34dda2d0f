"""One thing taken for another: S33 to S37, F81 to F84, D20 to D22, D32, S43, N36 and N37.

Rows for places, a network for its own target, a tensor for its neighbour, a generator for a seed, the weights of one
optimizer for another's. All were noted step by step by watchers; here it is asked whether they are a habit.

Footgun: each of these lines is right somewhere (watchers/ says where), so these checks warn.
"""

from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.arithmetic import no_habit
from loopdoctor.evidence import Evidence
from loopdoctor.finding import Verdict

ROWS, STRONG = 48, 0.5  # shares of noise that are known, and of which one is above


@check("S33")
def softmax_over_the_batch(e: Evidence) -> Fired | Verdict:
    """A model with attention or shares is worse than it should be, and answers a row alone differently than in a batch.

    Fires when a softmax of something that learns was taken over dim 0, and what came of it met a target with one row
    for each of these rows in a loss. Matrices of all pairs, tables that learn and series whose time
    comes first are left alone. Or when the shares of maps were taken along one of their sides, and the loss takes them
    for shares of classes, which lie in dim 1. Or when classes or experts were picked along another axis than that of
    the softmax.

    WARN softmax-over-the-batch: A softmax is taken over dim 0, the {rows} rows of the batch, so the answer to a row
    hangs on the others. Fix: Name the dim in which the places of one row lie: softmax(scores, dim=1) or dim=-1.
    WARN softmax-over-the-batch/places: A softmax of maps is taken over dim {dim}, their places, and the loss takes what
    comes out for shares of the classes in dim 1. Fix: softmax(dim=1).
    WARN softmax-over-the-batch/picked: Shares were made along dim {dim}, and are used as those of the classes (or
    experts) in dim {along}. Fix: log_softmax(dim={along}), softmax(dim={along}).
    """
    if len(picked := e.habits["S33 picked"]) >= 3:
        dim, along = next(iter(picked.values()))
        what = f"in {len(picked)} steps a softmax was taken along dim {dim}, and its classes lie in dim {along}"
        fault = "softmax-over-the-batch/picked"
        return fires(what, "one axis for both", fault=fault, dim=dim, along=along)
    axis = e.habits["S33 axis"]
    if len(axis) >= 3:
        dim = next(iter(axis.values()))
        what = f"in {len(axis)} steps shares along dim {dim} were held against classes of dim 1"
        return fires(what, "shares along dim 1", fault="softmax-over-the-batch/places", dim=dim)
    if (verdict := no_habit(e, seen := e.habits["S33"])) is not None:
        return verdict
    rows = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps {rows} rows shared out a softmax among them", "one within each row", rows=rows)


@check("F81")
def targets_that_learn(e: Evidence) -> Fired | Verdict:
    """Values come out wrong though the error falls well, or features of a comparison lose what they could tell.

    Fires when a difference has on one side what a network answered, and on the other a plain number (a reward) more
    than a multiple of what the same network answered, both with a gradient; or when both sides of a regression loss (or
    of a square by hand) came from the same last layer, which the loss reaches by this error alone, and one side is made
    of other weights too.

    WARN targets-that-learn/value: The target is made by the network that is trained and keeps its graph, so the loss
    also pulls the next value towards this one. Fix: with torch.no_grad(): target = reward + gamma * value(next).
    WARN targets-that-learn/features: The features in which two things are compared are trained by that comparison
    itself, and are soonest alike where they tell nothing. Fix: Freeze them: features.requires_grad_(False), and leave
    them out of the optimizer; or detach the side of the target.
    """
    if (verdict := no_habit(e, seen := e.habits["F81"])) is not None:
        return verdict
    what = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps both sides of a difference had a gradient into the same weights",
        "a target without one",
        fault=f"targets-that-learn/{what}",
    )


@check("S37")
def one_way_hardly_read(e: Evidence) -> Fired | Verdict:
    """A bidirectional network is hardly better than one that reads one way.

    Fires when output[:, -1] (output[-1] where time comes first), whole, is taken of a recurrent network that reads both
    ways.

    WARN one-way-hardly-read: The last place of the output holds the last state of the forward half, and of the backward
    half its first one, which has read a single place ({half} numbers). Fix: torch.cat([h_n[-2], h_n[-1]], dim=1), or a
    mean over all places.
    """
    if (verdict := no_habit(e, seen := e.habits["S37"])) is not None:
        return verdict
    half = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps the last place of a bidirectional output was taken", "both ends", half=half)
