"""One axis taken for another: F30, S21, S33.

Footgun: each of these lines is right in some other program. They warn, and each page says what is
left alone.
"""

from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.loss_inputs import judged
from loopdoctor.checks.seen import HABIT, no_habit
from loopdoctor.evidence import Evidence
from loopdoctor.finding import OK, Verdict, not_applicable, unknown

STEPS = 3


@check("F30")
def axes_regrouped(e: Evidence) -> Fired | Verdict:
    """Return the loss falls some way and stays there; the same network on data in the right layout
    goes much further.

    Fires when a line of the program calls reshape or view on a tensor and what comes out has the
    same sizes in another order, like (32, 20, 40) of (32, 40, 20). That regroups the numbers along
    the memory. Sizes of 1 do not count, and equal sizes can't be seen. Reshapes to other sizes are
    left alone, but for a picture that is cut into as many pieces as it has squares of their size,
    and for rows that were two axes and are taken apart in the other order.

    WARN axes-regrouped: {name} makes {after} of {before}, which moves no axis: it cuts the same row
    of numbers in other places, so each of the new rows holds pieces of several old ones. Fix:
    transpose or permute, which move axes; F.pixel_shuffle for a larger picture.
    WARN axes-regrouped/patches: {name} makes {after} of {before}, which cuts each picture into
    pieces of its lines, and not into square patches. Fix: nn.Conv2d(C, D, p, stride=p), or
    x.reshape(B, C, H // p, p, W // p, p).permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * p * p).
    WARN axes-regrouped/unfolded: The rows were {one} times {two}, and {name} takes them apart as
    {two} times {one}, so each of the new rows holds pieces of several old ones. Fix:
    features.view(B, T, -1), in the order in which flatten(0, 1) has put them, then transpose(0, 1).
    """
    if len(unfolded := e.habits["F30 unfolded"]) >= HABIT:
        name, one, two = next(iter(unfolded.values()))
        what = (
            f"in {len(unfolded)} steps rows of {one} times {two} were taken apart as {two} "
            f"times {one}"
        )
        return fires(
            what, "one order", fault="axes-regrouped/unfolded", name=name, one=one, two=two
        )
    if (verdict := no_habit(e, seen := e.habits["F30"])) is not None:
        return verdict
    name, before, after, patches = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps {name} made a tensor of {before} into one of {after}",
        "transpose or permute where axes change places",
        fault="axes-regrouped" + ("/patches" if patches else ""),
        name=name,
        before=str(before),
        after=str(after),
    )


@check("S33")
def softmax_over_the_batch(e: Evidence) -> Fired | Verdict:
    """Return a model with attention or shares is worse than it should be, and answers a row alone
    differently than in a batch.

    Fires when a softmax of something that learns was taken over dim 0, and what came of it met a
    target with one row for each of these rows in a loss. Matrices of all pairs, tables that learn
    and series whose time comes first are left alone. Or when the shares of maps were taken along
    one of their sides, and the loss takes them for shares of classes, which lie in dim 1. Or when
    classes or experts were picked along another axis than that of the softmax.

    WARN softmax-over-the-batch: A softmax is taken over dim 0, the {rows} rows of the batch, so the
    answer to a row hangs on the others. Fix: Name the dim in which the places of one row lie:
    softmax(scores, dim=1) or dim=-1.
    WARN softmax-over-the-batch/places: A softmax of maps is taken over dim {dim}, their places, and
    the loss takes what comes out for shares of the classes in dim 1. Fix: softmax(dim=1).
    WARN softmax-over-the-batch/picked: Shares were made along dim {dim}, and are used as those of
    the classes (or experts) in dim {along}. Fix: log_softmax(dim={along}), softmax(dim={along}).
    """
    if len(picked := e.habits["S33 picked"]) >= 3:
        dim, along = next(iter(picked.values()))
        what = (
            f"in {len(picked)} steps a softmax was taken along dim {dim}, and its classes "
            f"lie in dim {along}"
        )
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
    return fires(
        f"in {len(seen)} steps {rows} rows shared out a softmax among them",
        "one within each row",
        rows=rows,
    )


@check("S21")
def batch_as_time(e: Evidence) -> Fired | Verdict:
    """Return the answer to one row depends on the other rows of its batch, and the order within a
    row counts for nothing.

    Fires when an attention or recurrent module without batch_first was given (rows, length,
    features): its first size is that of the loss, its second one is not in the loss. Or when it was
    given what a table has for ids that were stacked from rows of words, or picked by an index.
    Tables with attention along both axes are left alone.

    WARN batch-as-time: {name} takes (time, batch, features) unless batch_first=True, and is given
    (batch, time, features): it runs along the batch and mixes its rows. Fix: Build it with
    batch_first=True, or transpose(0, 1) before and after it.
    WARN batch-as-time/columns: {name} takes (batch, time, features) with batch_first=True, and is
    given (time, batch, features): it runs from text to text. Fix: Build it without batch_first, or
    transpose the ids.
    """
    if len(seen := e.habits["S21 columns"]) >= STEPS:
        name, shape = next(iter(seen.values()))
        what = (
            f"{name} with batch_first=True was given ids {shape}, whose next tokens stand "
            "in the next row"
        )
        return fires(
            what, "(batch, time)", name=f"nn.{name.upper()}", fault="batch-as-time/columns"
        )
    if e.habits["both axes"]:
        return OK  # attention between the columns of a table, and between its rows
    if len(seen := e.habits["S21"]) >= STEPS:
        name, shape = next(iter(seen.values()))
        return fires(
            f"{name} is given {shape}, of ids (rows, length)", "(time, batch, features)", name=name
        )
    if not e.sequences:
        return not_applicable("no attention or recurrent module without batch_first was called")
    shapes = [n.fed.shape for calls in judged(e).values() for n in calls]
    if not shapes:
        return unknown("no loss of torch was seen, whose rows would tell")
    for name, given in e.sequences.items():
        wrong = [s for s in given if all(_along(s, loss) for loss in shapes)]
        if wrong and len(wrong) == len(given):
            return fires(
                f"{name} is given {wrong[0]}, and the loss has {shapes[0]}",
                "(time, batch, features)",
                name=name,
            )
    return OK


def _along(given: tuple[int, ...], loss: tuple[int, ...]) -> bool:
    """Whether the rows of the loss stand first in what was given, and could not be its length."""
    if given[:1] == given[1:2]:
        return False
    return (
        len(given) == 3
        and min(given[:2]) > 1
        and bool(loss)
        and loss[0] == given[0]
        and given[1] not in loss[1:]
    )
