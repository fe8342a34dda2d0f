"""What was prepared for the loss and does not fit it: D36 to D44.

Flags that nothing reads, targets that lost their scale, labels in another order than the rows: the model and the loss
are right, and what comes between the data and them is not.

Footgun: data can be meant as they are. Each watcher says by which numbers it is certain, and these checks warn.
"""

from train_doctor.check import Fired, check, fires
from train_doctor.checks.arithmetic import no_habit
from train_doctor.evidence import Evidence
from train_doctor.finding import OK, Verdict

EMPTY, CUT = 0.4, 0.02  # shares of heatmaps: that are empty, and whose hill is cut off at the last line or column


@check("D36")
def unread_flags(e: Evidence) -> Fired | Verdict:
    """A model treats all rows alike: those that were censored, left empty or filled up count like all others.

    Watches what is done with each part of what a DataLoader gives, from one batch to the next. Fires when a batch has
    three parts or more, all were read but one, one of those that were has a number for each row, and the one that was
    not holds zeros and ones (of each row, or of each of its places up to an end), or the lengths of the rows.

    WARN unread-flags: Each batch brings {what} {shape}, and nothing reads them, so every row counts in the same way.
    Fix: Give them to the loss or to the model: (loss * flags).sum() / flags.sum(), a padding mask, event in the
    likelihood; or leave them out of the data set.
    WARN unread-flags/mask: Each batch brings a mask of the places that hold something, {shape}, and nothing reads it,
    so what rows were filled up with counts as data. Fix: src_key_padding_mask=~mask, or (x * mask).sum(1) /
    mask.sum(1).
    WARN unread-flags/lengths: Each batch brings the lengths of its rows, {shape}, and nothing reads them, so what rows
    were filled up with counts as data. Fix: pack_padded_sequence(x, lengths), or a mask: arange(T) < lengths[:, None].
    """
    if (verdict := no_habit(e, seen := e.habits["D36"])) is not None:
        return verdict
    what, shape = next(iter(seen.values()))
    observed = f"in {len(seen)} steps the {what} of a batch {shape} were given to no function of torch"
    fault = "unread-flags" if what == "flags" else f"unread-flags/{what}"
    return fires(observed, "all parts of a batch used", fault=fault, what=what, shape=shape)


@check("D37")
def targets_lost_their_level(e: Evidence) -> Fired | Verdict:
    """A forecast has the right form and the wrong level: it begins somewhere else than the past ends.

    Fires when each row of a regression's target has the mean 0 and the spread 1, and so has each row of what a first
    layer was given, and both are slices of one tensor, of which one begins where the other ends. Other signals are left
    alone: their level may mean nothing.

    WARN targets-lost-their-level: Each row of the targets {shape} was standardised by its own mean and spread, so what
    is asked for does not tell how it lies to the past that the model is given. Fix: (y - x.mean()) / x.std(), with the
    numbers of the input's window.
    """
    if (verdict := no_habit(e, seen := e.habits["D37"])) is not None:
        return verdict
    shape = next(iter(seen.values()))
    what = f"in {len(seen)} steps each row of a target {shape} had the mean 0 and the spread 1, and so had the inputs"
    return fires(what, "the mean and spread of the input's window", shape=shape)


@check("D38")
def labels_in_another_order(e: Evidence) -> Fired | Verdict:
    """A model that ranks, or tells pieces apart, learns nothing: its loss stays where guessing puts it.

    Follows rows that were put together of pieces to the first layer. Fires when the labels of a classification are one
    number for each piece, in blocks where the rows alternate, or alternating where the rows are in blocks.

    WARN labels-in-another-order: The {rows} x {pieces} rows are laid out {how}, and their labels the other way, so most
    rows have the label of another piece. Fix: labels built like the rows: torch.cat([ones(B, 1), zeros(B, K)],
    1).reshape(-1) beside candidates.reshape(-1), repeat_interleave beside cat.
    """
    if (verdict := no_habit(e, seen := e.habits["D38"])) is not None:
        return verdict
    how, rows, pieces = next(iter(seen.values()))
    what = f"in {len(seen)} steps rows of {pieces} pieces were laid out {how}, and their labels were not"
    return fires(what, "one order", how=how, rows=rows, pieces=pieces)


@check("D39")
def labels_clamped(e: Evidence) -> Fired | Verdict:
    """One class is found everywhere where nobody has labelled anything.

    Fires when labels of a classification were clamped, one number alone was changed, and it lies beyond the largest of
    the others by two or more, or below 0. A loss of each row may be masked afterwards, and is left alone.

    WARN labels-clamped: The label {mark} ({share:.0%} of all) stands for none, and was clamped to {into}, which is a
    class. Fix: F.cross_entropy(out, y, ignore_index={mark}).
    """
    if (verdict := no_habit(e, seen := e.habits["D39"])) is not None:
        return verdict
    mark, into, share = next(iter(seen.values()))
    what = f"in {len(seen)} steps the label {mark} was changed to {into} by a clamp"
    return fires(what, "a label that is left out", mark=mark, into=into, share=share)


@check("D40")
def maps_left_empty(e: Evidence) -> Fired | Verdict:
    """A network for key points answers with empty maps, or finds the points of one corner only.

    Looks at targets of many maps that are smaller than the pictures by a whole number. Fires when two fifths of them
    are empty or more, and some hold no more than the foot of a hill, at the last line or column and never at the first.

    WARN maps-left-empty: {empty:.0%} of the heatmaps are empty, and {cut:.0%} are cut off at their end: points of a
    picture {picture} were drawn on maps {size}. Fix: points / stride, before the maps are drawn.
    """
    if (verdict := no_habit(e, seen := e.habits["D40"])) is not None:
        return verdict
    maps = sum(n for n, *_ in seen.values())
    empty = sum(n * share for n, share, *_ in seen.values()) / maps
    lower, right, upper, left = (sum(ends[k] for _, _, ends, *_ in seen.values()) for k in range(4))
    cut = (lower + right) / maps
    if empty < EMPTY or cut < CUT or not lower or not right or upper + left > 0.1 * (lower + right):
        return OK
    *_, picture, size = next(iter(seen.values()))
    what = f"of {maps} maps {empty:.0%} are empty, and {cut:.0%} hold the foot of a hill at the last line or column"
    return fires(what, "a hill in nearly each", empty=empty, cut=cut, picture=picture, size=size)


@check("D41")
def sides_exchanged(e: Evidence) -> Fired | Verdict:
    """Boxes or points are off on wide or tall pictures, and right on square ones.

    Looks at regressions whose columns take turns as x and y, beside pictures that are not square. Fires when the column
    of the longer side ends beyond 1, at the ratio of the sides at most, and the other one below the reverse of it.

    WARN sides-exchanged: On pictures {high} high and {wide} wide, x ends at {x:.2f} and y at {y:.2f}: x was divided by
    the height and y by the width. Fix: height, width = x.shape[-2:]; boxes / torch.tensor([width, height, width,
    height]).
    """
    if (verdict := no_habit(e, seen := e.habits["D41"])) is not None:
        return verdict
    xs, ys, *_ = zip(*seen.values())
    *_, high, wide = next(iter(seen.values()))
    x, y = max(xs), max(ys)
    what = f"in {len(seen)} steps x ends at {x:.2f} and y at {y:.2f}, of pictures {high} x {wide}"
    return fires(what, "both end at 1", high=high, wide=wide, x=x, y=y)


@check("D42")
def powers_without_a_logarithm(e: Evidence) -> Fired | Verdict:
    """A network for sound learns to hear loud clips, and little else.

    Follows the square of what a Fourier transform gave through banks of filters. Fires when it goes into a first layer
    that learns (a BatchNorm is one) without a logarithm or a root, and the largest is a hundred times the median.

    WARN powers-without-a-logarithm: The network is given the powers of a spectrogram {shape} as they are, with a median
    of {middle:.2g} and up to {top:.2g}, so the loudest bins decide everything. Fix: torch.log(power + 1e-6), or
    AmplitudeToDB.
    """
    if (verdict := no_habit(e, seen := e.habits["D42"])) is not None:
        return verdict
    shape, middle, top = next(iter(seen.values()))
    what = f"in {len(seen)} steps a layer was given powers {shape}, of which the largest is {top:.2g}"
    return fires(what, "numbers of about one size", shape=shape, middle=middle, top=top)


@check("D43")
def targets_not_turned(e: Evidence) -> Fired | Verdict:
    """A network for clouds of points blurs its normals, or its flow, the more the clouds are turned.

    Follows clouds that a rotation was multiplied with to a first layer. Fires when three numbers for each point are
    asked for that no rotation was multiplied with. A target that is the cloud before it was turned is left alone.

    WARN targets-not-turned: The clouds {shape} were turned, and the vectors that are asked for at their points were
    not, so both lie in different frames. Fix: normals @ rotation.transpose(1, 2), with the rotation of the points.
    """
    if (verdict := no_habit(e, seen := e.habits["D43"])) is not None:
        return verdict
    shape = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps clouds {shape} were turned without their targets", "both", shape=shape)


@check("D44")
def ids_cut(e: Evidence) -> Fired | Verdict:
    """A language model reads and writes some words as if they were others, and the rest of its vocabulary stays unused.

    Fires when an embedding has more rows than a type of integers can name (a byte, or two), the ids that it is asked
    for reach up to the last numbers of that type, many of them high, and not one goes beyond. Left alone are places and
    distances, bytes of a text, which end at 244, and tables of 256 codes with a few rows more. So are 320 to 512 rows
    (256 codes, padded), but where the first 64 ids (or 128, of 384 rows) come twice as often as all others: the lost
    ones land there.

    WARN ids-cut: The ids end at {last} in a table of {rows} rows, as they do when a vocabulary is stored in {bits} bits
    without a sign: higher ids lost their upper part and are those of other words. Fix: np.uint16 for a vocabulary of up
    to 65,536, np.uint32 for a larger one; assert ids.max() <= np.iinfo(dtype).max before they are stored.
    """
    if (verdict := no_habit(e, seen := e.habits["D44"])) is not None:
        return verdict
    cut, rows, last = next(iter(seen.values()))
    what = f"in {len(seen)} steps ids ended at {last} of {rows:,}, and {cut - 1} is the largest number of their type"
    return fires(what, "ids of the whole table", last=last, rows=rows, bits=cut.bit_length() - 1)
