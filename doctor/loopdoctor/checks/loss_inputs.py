"""What a loss is given: F20, F21, F33, F66, F89.

Every loss of torch asks for one of three things: logits, probabilities or their logarithms. It
takes the wrong one without a word, trains a little, and stays there. What was given is read from
its numbers and from the graph (fed.py).

Footgun: a loss of one's own may use a library loss in a strange and right way. So only losses that
the differentiated one hangs on are judged, and a fault must show at each call. How classes are
distributed is nobody's fault.
"""

import math
import re

import torch

from loopdoctor import fed, measures
from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.seen import no_habit
from loopdoctor.evidence import Backward, Entropy, Evidence
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown

SIZES = re.compile(
    r"target size \(torch\.Size\(\[([\d, ]*)\]\)\).*input size \(torch\.Size\(\[([\d, ]*)\]\)\)"
)
SQUASHED = {"Sigmoid": "a sigmoid", "Relu": "a ReLU", "Tanh": "a tanh"}
# how far beyond 0 and 1 the targets of a binary loss may be: noisy labels of a GAN reach 1.2
OUTSIDE = 0.5
ENDS = {
    "Sigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Relu": (0.0, math.inf),
}  # of what these give
MANY_CALLS = 3  # from where on it is a habit
# calls; targets without a 0: where zeros are one in a hundred, as many may have none
FEW, MANY = 2, 128
LINEAR = ("Addmm", "Mm", "Convolution")


def judged(e: Evidence) -> dict[tuple, list[Entropy]]:
    """Return the losses at work, by name and by the sizes behind the batch's."""
    found: dict[tuple, list[Entropy]] = {}
    for b in e.of(Backward):
        for n in b.entropies:
            if n.fed is not None and n.used:
                found.setdefault((n.name, n.fed.shape[1:]), []).append(n)
    return found


def raised(e: Evidence, *texts: str) -> Entropy | None:
    """Return the loss that ended the run with such a message."""
    if not any(text in e.complaint for text in texts):
        return None
    return next(
        (n for n in reversed(e.of(Entropy)) if any(text in n.raised for text in texts)), None
    )


# ------------------------------------------------------------------------------------------ targets
@check("F20")
def wrong_targets(e: Evidence) -> Fired | Verdict:
    """Return the loss turns negative or NaN, or falls without end, and nothing in the model
    explains it.

    Looks at targets that are numbers, not indices: those of a binary loss lie between 0 and 1,
    those of a divergence are probabilities (or logarithms, with log_target=True), those of a
    cross-entropy sum to 1 in each row, and those of a ranking or hinge loss are -1 and 1. Soft,
    smoothed, mixed and noisy labels are left alone, and so is a divergence whose targets sum to
    less. A regression is held against what the last function of the model can give at all. Targets
    that are classes are named where each batch has one class only, not always the same, in every
    step that is measured, and the loss is given what a linear layer gives. A binary loss that is
    all there is to be learned from must meet a 0 now and then; where it judges differences of
    scores, 1 is all it asks for. A hinge of what has an end of its own (softplus of capacities,
    zeros and ones of scenarios) is a shortfall, and left alone.

    ERROR wrong-targets/outside: A binary cross-entropy is given targets that are no probabilities,
    so its loss has no lower end. Fix: Scale the targets to 0 .. 1 (classes -1 and 1: (y + 1) / 2;
    pixels: x / 255).
    ERROR wrong-targets/logarithms: kl_div is given logits or log-probabilities as targets and takes
    them for probabilities; the logarithm of a negative number is NaN. Fix: Give it probabilities
    (softmax), or log-probabilities with log_target=True; its first argument is the student's
    log_softmax.
    ERROR wrong-targets/probabilities: kl_div was told log_target=True and is given probabilities,
    whose exponentials it takes. Fix: Leave log_target out, or give it log-probabilities.
    ERROR wrong-targets/no-sign: {name} takes targets of -1 and 1 and is given 0 and 1: where the
    target is 0, its loss has no gradient. Fix: Use 2 * target - 1.
    WARN wrong-targets/out-of-reach: The model ends in {by}, whose numbers lie between {low:g} and
    {high:g}, and the targets lie far outside: no training can reach them. Fix: Scale the targets to
    that range (and back when the model is used), or leave {by} out.
    WARN wrong-targets/one-class: Every batch holds one class only: the data are sorted by class and
    not shuffled, so each step pulls all answers to the class it sees. Fix: Shuffle the training
    data (shuffle=True).
    WARN wrong-targets/ones-alone: All targets are 1, and nothing else is in the loss: a model that
    answers yes to everything is without fault, and becomes that. Fix: Draw examples whose target is
    0 as well (for pairs of users and things: random things), or use a loss of ranks.
    WARN wrong-targets/one-sided: In each of its steps the discriminator was taught one answer
    alone: all of its targets are {side}. Fix: bce(d(real), ones) + bce(d(fake.detach()), zeros).
    WARN wrong-targets/several-classes: cross_entropy is given rows with several classes (multi-hot
    targets): its softmax lets one class rise only if another falls. Fix: Use
    binary_cross_entropy_with_logits for several labels in a row, or divide each row by its sum.
    WARN wrong-targets/exchanged: kl_div takes (answer, target) and is given the target first, so
    the divergence is the reverse one, KL(answer || target): it asks for one peak of the target and
    not for all of it. Fix: F.kl_div(student .log_softmax(-1), teacher.softmax(-1)).
    WARN wrong-targets/shares: {name} is given a softmax, whose classes share 1 among them, and rows
    with several ones, which can never all be reached. Fix: torch.sigmoid in place of the softmax,
    one probability for each label.
    WARN wrong-targets/sum: The rows of soft targets sum to {sum:.4g} and not to 1, so the loss and
    its gradient are of no probabilities. Fix: Smoothing by s: target * (1 - s) + s / classes, or
    label_smoothing=s.
    ERROR wrong-targets/masked: The target's own logit was filled with {filled:g} by a mask, so the
    loss asks for what can't be. Fix: Leave the target out of the mask; in a contrastive loss the
    positive is the other view of a row, and only the row itself is masked.
    WARN wrong-targets/zero-margin: A hinge loss that is written by hand is given targets of 0 and
    1: where the target is 0, relu(1 - target * answer) is 1 whatever the answer. Fix: Use 2 *
    target - 1.
    """
    n = raised(e, "all elements of target should be between 0 and 1")
    if n is not None and n.fed is not None and n.fed.target_low is not None:
        return _outside(n)
    losses = judged(e)
    if len(masked := e.habits["F20 masked"]) > 1:
        gone, rows, filled = next(iter(masked.values()))
        what = f"the logit of the target is {filled:g} in {gone} of {rows} rows"
        return fires(what, "logits of the model", ERROR, "wrong-targets/masked", filled=filled)
    if (exchanged := _exchanged(e)) is not None:
        return exchanged
    if len(hinges := [told for told in e.overlaps.values() if told[0] == "hinge"]) >= FEW:
        return fires(
            f"in {len(hinges)} steps answers from {hinges[0][1]:.3g} to {hinges[0][2]:.3g} "
            "were multiplied by zeros "
            "and ones, taken from 1 and cut at 0",
            "targets of -1 and 1",
            WARN,
            "wrong-targets/zero-margin",
        )
    for (name, _), calls in losses.items():
        found = [_targets(name, n) for n in calls]
        if None not in found:
            return found[0]
        if name in fed.CLASSES and _one_class(calls):
            several = sorted({n.fed.only for n in calls})
            return fires(
                f"all {calls[0].fed.shape[0]} targets of a batch are the same class, in "
                f"{len(calls)} batches (classes "
                f"{', '.join(map(str, several[:4]))})",
                "batches of several classes",
                WARN,
                "wrong-targets/one-class",
            )
    if len(sums := e.habits["F20 sum"]) >= 3:
        total = next(iter(sums.values()))
        what = f"in {len(sums)} steps the rows of soft targets, by hand, summed to {total:.4g}"
        return fires(what, "1", WARN, "wrong-targets/sum", sum=total)
    if len(rises := e.habits["F20 rises"]) >= 3:
        return fires(
            f"in {len(rises)} steps the loss was minus the mean of log-sigmoids of scores, and "
            "nothing else",
            "scores that are to fall as well",
            WARN,
            "wrong-targets/ones-alone",
        )
    if judged_so := e.habits["F20 judge"]:
        steps, side = next(iter(judged_so.values()))
        what = f"all targets of {steps} steps of one of {len(e.optimizers)} optimizers were {side}"
        return fires(what, "ones and zeros", WARN, "wrong-targets/one-sided", side=side)
    if alone := _ones_alone(e):
        return fires(
            f"all {math.prod(alone[0].fed.shape)} targets of {alone[0].name} are 1, in "
            f"{len(alone)} batches",
            "targets of 0 as well",
            WARN,
            "wrong-targets/ones-alone",
        )
    if any(n.fed.target_low is not None for calls in losses.values() for n in calls):
        return OK
    return (
        not_applicable("no loss with targets that are numbers")
        if losses
        else unknown("no loss of torch was seen")
    )


def _outside(n: Entropy) -> Fired:
    return fires(
        f"targets from {n.fed.target_low:.3g} to {n.fed.target_high:.3g} given to {n.name}",
        "targets from 0 to 1",
        fault="wrong-targets/outside",
    )


def _one_class(calls: list[Entropy]) -> bool:
    """One class in each batch, and in each step: real and made pictures, or two domains, come as
    batches of two.
    """
    by_round: dict[int, set] = {}
    for n in calls:
        by_round.setdefault(n.round, set()).add(n.fed.only)
    makers = [[m for m in n.fed.makers if m != "LogSoftmax"] for n in calls]
    many = all(n.fed.shape[:1] >= (8,) and (n.fed.classes or 0) > 1 for n in calls)
    alone = all(len(seen) == 1 and None not in seen for seen in by_round.values())
    several = (
        len({n.fed.only for n in calls}) > 1
    )  # a discriminator's or a contrastive loss may ask for one class for ever
    return (
        len(by_round) >= 3
        and several
        and many
        and alone
        and all(m[:1] and m[0] in LINEAR for m in makers)
    )


def _ones_alone(e: Evidence) -> list[Entropy]:
    """Return the binary losses that all backwards of three rounds began at, if none of many targets
    of theirs is a 0.
    """
    found: dict[int, Entropy] = {}
    for round, backwards in e.by_round(Backward).items():
        used = [[n for n in b.entropies if n.fed is not None and n.used] for b in backwards]
        if not any(used):
            continue  # not measured
        for b, losses in zip(backwards, used):
            if (
                len(losses) != 1
                or losses[0].name not in fed.BINARY + fed.PLAIN
                or not losses[0].number
                or not b.value
            ):
                return []
            (n,), parts = losses, losses[0].number / b.value
            # a score for each row
            scores = n.name in fed.BINARY or math.prod(n.fed.shape) == n.fed.shape[0]
            ones = n.fed.target_low == n.fed.target_high == 1 and scores
            compared = {"Sub", "Rsub"} & set(n.fed.makers[:2])
            # the mean itself, or its share of a step
            close = min(abs(parts - whole) for whole in (1, len(backwards)))
            if not ones or compared or close > 1e-3:
                return []
            found[round] = n
    targets = sum(math.prod(n.fed.shape) for n in found.values())
    return list(found.values()) if len(found) >= 3 and targets >= MANY else []


def _exchanged(e: Evidence) -> Fired | None:
    """kl_div with the target first, alone or beside a cross-entropy: a distillation.

    A penalty stands beside more.
    """
    found = 0
    for b in e.of(Backward):
        names = {n.name for n in b.entropies if n.used}
        for n in b.entropies:
            if (
                n.name != "kl_div"
                or not n.used
                or n.fed is None
                or not n.fed.exchanged
                or n.log_target
            ):
                continue
            alone = (
                bool(n.number and b.value)
                and abs(b.value / n.number - round(b.value / n.number)) < 1e-3
            )
            found += n.fed.high != n.fed.low and (alone or "cross_entropy" in names)
    if found < MANY_CALLS:
        return None
    what = (
        f"in {found} backwards the first argument of kl_div has no gradient, and its second one has"
    )
    return fires(what, "the answer first, and the target second", WARN, "wrong-targets/exchanged")


def _targets(name: str, n: Entropy) -> Fired | None:
    f = n.fed
    if f.target_low is None or not math.isfinite(f.target_low + f.target_high):
        return None
    if name in fed.PLAIN and f.makers[:1] and f.makers[0] in ENDS:
        low, high = ENDS[f.makers[0]]
        if f.target_low < low - OUTSIDE or f.target_high > high + OUTSIDE:
            return fires(
                f"targets from {f.target_low:.3g} to {f.target_high:.3g} given to {name}",
                f"targets from {low:g} to {high:g}",
                WARN,
                "wrong-targets/out-of-reach",
                by=SQUASHED.get(f.makers[0], f"a {f.makers[0].lower()}"),
                low=low,
                high=high,
            )
    if name in fed.BINARY and (f.target_low < -OUTSIDE or f.target_high > 1 + OUTSIDE):
        return _outside(n)
    if name in fed.SIGNED and f.target_hard and f.target_low == 0:
        return fires(
            f"targets of {name} are 0 and 1",
            "targets of -1 and 1",
            fault="wrong-targets/no-sign",
            name=name,
        )
    low, high = f.target_sums
    if name == "kl_div":
        apart = max(abs(low - 1), abs(high - 1))
        if n.log_target and f.target_low >= 0 and apart < f.tolerance and (f.classes or 0) > 1:
            return fires(
                "rows of targets are positive and sum to 1",
                "logarithms",
                fault="wrong-targets/probabilities",
            )
        if not n.log_target and f.target_low < 0:
            return fires(
                f"targets from {f.target_low:.3g} to {f.target_high:.3g} given to kl_div",
                "probabilities",
                fault="wrong-targets/logarithms",
            )
    if name == "cross_entropy" and f.target_hard and high > 1:
        return fires(
            f"rows of zeros and ones with up to {high:.0f} ones are given to cross_entropy as "
            "targets",
            "one class in a row, or rows that sum to 1",
            WARN,
            "wrong-targets/several-classes",
        )
    shared = (
        name in (*fed.BINARY, *fed.PLAIN) and f.makers[:1] == ["Softmax"] and f.softmax_over == 1
    )
    if shared and f.target_hard and high > 1 and f.target_shape == f.shape:
        return fires(
            f"a softmax and rows of zeros and ones with up to {high:.0f} ones are given to {name}",
            "a sigmoid for each class",
            WARN,
            "wrong-targets/shares",
            name=name,
        )
    if (
        name == "cross_entropy"
        and low > 0
        and high - low < 1e-4
        and abs(low - 1) > 1e-2
        and (f.classes or 0) > 1
    ):
        return fires(
            f"each row of the targets sums to {low:.4g}",
            "rows that sum to 1",
            WARN,
            "wrong-targets/sum",
            sum=low,
        )
    return None


# ------------------------------------------------------------------------------------------- shapes
@check("F21")
def shapes_meet(e: Evidence) -> Fired | Verdict:
    """Return a regression learns the mean and no more; or a loss is 0 from the first step on; or a
    target size is refused.

    Fires when predictions and targets of a loss differ in shape and are broadcast: (N, 1) with (N)
    compares each prediction with every target. The same is looked for where the difference is
    written by hand. One number as the target of all, and shapes that differ by sizes of 1 at the
    front, are left alone.

    ERROR or WARN shapes-broadcast: Predictions and targets have different shapes and are broadcast
    against each other, so predictions are compared with targets of other rows. Fix: Give both the
    same shape: prediction.squeeze(-1), or target.unsqueeze(-1).
    ERROR shapes-broadcast/refused: Predictions and targets have different shapes, which this loss
    refuses. Fix: Give both the same shape: prediction.squeeze(-1), or target.unsqueeze(-1).
    WARN shapes-broadcast/product: A column (N, 1) meets a row (N) and makes a square: each row of
    the batch is combined with each other one, and the mean of it tells nothing of any. Fix: Give
    both the same shape: column.squeeze(-1), or row.unsqueeze(-1).
    WARN shapes-broadcast/maps: Maps with a channel, {large}, meet maps without one, {small}: each
    picture is combined with each other one. Fix: masks.unsqueeze(1), or probabilities.squeeze(1).
    WARN shapes-broadcast/by-hand: A difference of predictions and targets became a square: (N, 1)
    minus (N) compares each prediction with every target. Fix: Give both the same shape:
    prediction.squeeze(-1), or target.unsqueeze(-1).
    WARN shapes-broadcast/across: A vector with a number for each of {rows} rows lies along the last
    size of {shape}, which is {rows} as well, so each column got the number of another row. Fix:
    vector.view({sizes}).
    ERROR shapes-broadcast/one-class: A cross-entropy over one class: its softmax is 1 whatever the
    logit, so the loss is 0 and has no gradient. Fix: Use binary_cross_entropy_with_logits for one
    output, or two outputs.
    """
    n = raised(e, "that is different to the input size", "must be the same as input size")
    if n is not None and n.fed is not None:
        return fires(
            f"predictions {n.fed.shape} and targets {n.fed.target_shape} given to {n.name}",
            "the same shape",
            fault="shapes-broadcast/refused",
        )
    if len(maps := e.habits["F21 maps"]) >= FEW:
        large, small = next(iter(maps.values()))
        what = f"in {len(maps)} steps {large} met {small}"
        return fires(
            what, "maps of one shape", WARN, "shapes-broadcast/maps", large=large, small=small
        )
    losses = judged(e)
    for (name, _), calls in losses.items():
        if name in fed.CLASSES and all(n.fed.classes == 1 for n in calls):
            return fires(
                f"{name} on {calls[0].fed.shape}: one class",
                "two classes or more",
                fault="shapes-broadcast/one-class",
            )
        found = [_broadcast(n.fed.shape, n.fed.target_shape) for n in calls]
        if name in (*fed.PLAIN, "kl_div") and None not in found:
            return found[0]
    seen = any(name in fed.PLAIN for name, _ in losses)
    for text in e.warned:  # a name that was imported before the watch: torch warns
        match = SIZES.search(text) if not seen else None
        if match:
            target, given = (
                tuple(int(x) for x in group.split(",") if x.strip()) for group in match.groups()
            )
            if (one := _broadcast(given, target)) is not None:
                return one
    squares = [b.square for b in e.of(Backward) if b.requires_grad and measures.looked(b.round)]
    if squares and all(squares):
        before, after = squares[0]
        return fires(
            f"the difference in the loss is {after}, of predictions {before}",
            f"a difference of {before}",
            fault="shapes-broadcast/by-hand",
            at=[square.place for square in list(e.outer.values())[:1]],
        )
    if len(laid := e.habits["F21"]) >= FEW:
        shape, rows = next(iter(laid.values()))
        return fires(
            f"in {len(laid)} steps {shape} was multiplied by ({rows},), drawn or taken for "
            "each row",
            f"a product with {(rows, *(len(shape) - 1) * (1,))}",
            WARN,
            "shapes-broadcast/across",
            rows=rows,
            shape=shape,
            sizes=", ".join(("-1", *(len(shape) - 1) * ("1",))),
        )
    if len(e.outer) >= FEW:
        name, rows, place = next(iter(e.outer.values()))
        return fires(
            f"in {len(e.outer)} steps {name} made ({rows}, {rows}) of a column ({rows}, 1) and "
            f"a row ({rows})",
            "the same shape",
            fault="shapes-broadcast/product",
            at=[place],
        )
    if any(n.fed.target_shape is not None for calls in losses.values() for n in calls):
        return OK
    return unknown("no call of a loss was seen with its shapes")


def _broadcast(given: tuple[int, ...], target: tuple[int, ...] | None) -> Fired | None:
    if target is None or given == target:
        return None
    sizes = math.prod(given), math.prod(target)
    try:
        together = tuple(torch.broadcast_shapes(given, target))
    except RuntimeError:
        return None  # refused, and said so
    if 1 in sizes or math.prod(together) == sizes[0] == sizes[1]:
        return None
    crossed = math.prod(together) > max(sizes)
    if len(given) == len(target) and not crossed and given[-1] == target[-1]:
        return None  # a template for all rows
    return fires(
        f"predictions {given} and targets {target} are compared as {together}",
        "the same shape",
        ERROR if crossed and len(given) != len(target) else WARN,
    )


@check("F33")
def echoed_targets(e: Evidence) -> Fired | Verdict:
    """Return the loss falls to nearly nothing, and at inference the model writes nonsense.

    Lays the targets of a cross-entropy over the ids that embeddings were given. Fires when nearly
    all targets went in at their own places: into the second of two embeddings at work, which is a
    decoder's, or into the only one, where one id hides all other places. Also when more than half
    went into the only one, and most of the others stand under one token that is never a target. An
    autoencoder, whose encoder is given the target, is left alone, and so is one of a series with a
    narrow place at each step. Of a convolution that is masked for a picture, the kernel is looked
    at.

    ERROR echoed-targets: The decoder is given the tokens that it is asked for, each at its own
    place, so it learns to copy. Fix: Shift what goes in by one: begin with a start token and leave
    out the last one.
    ERROR echoed-targets/mask: The loss asks for the tokens that the model can read, and leaves out
    those that are hidden behind the mask token: the mask of the labels is inverted. Fix:
    labels[~masked] = -100.
    ERROR echoed-targets/alias: The loss asks for the mask token where it stands: the labels are the
    tensor that was masked, or were copied after it. Fix: labels = input_ids.clone() before the
    first token is masked.
    WARN echoed-targets/unmasked: A masked model is asked for tokens that it can read: what it is
    given was not masked. Fix: input_ids[masked] = mask_token_id, after labels = input_ids.clone().
    WARN echoed-targets/visible: A masked model is asked for all tokens, and most of them it can
    read: copying is most of what it learns. Fix: labels[~masked] = -100.
    WARN echoed-targets/pixels: The first masked convolution is given the picture {shape} that the
    loss asks for, and its kernel is zero behind its middle only: each pixel is predicted from
    itself. Fix: Mask the middle of the first one as well (type A), and that of no other (type B).
    WARN echoed-targets/series: A recurrent layer is given the series {shape} that the loss asks
    for, each place at its own, so it learns to copy. Fix: Shift what goes in by one place:
    torch.cat([start, y[:, :-1]], 1).
    """
    series = list(e.habits["F33 series"].values())
    if len(series) >= 3:
        what = f"in {len(series)} steps the targets went in at their own places"
        return fires(what, "the places before", WARN, "echoed-targets/series", shape=series[0])
    pixels = list(e.habits["F33 pixels"].values())
    if len(pixels) >= 3:
        what = f"in {len(pixels)} steps a masked kernel with its middle was laid over the target"
        return fires(what, "the pixels before", WARN, "echoed-targets/pixels", shape=pixels[0])
    kinds = list(e.echoed.values())
    if not kinds:
        return not_applicable(
            "no ids of an embedding were there beside the targets of a cross-entropy"
        )
    if len(kinds) < 2:
        return unknown("fewer than two steps were seen")
    if not all(kinds):
        return OK
    if kinds[0] == "visible":
        what = (
            f"in {len(kinds)} steps most targets could be read at their own places, and "
            "most others had one token"
        )
        return fires(what, "targets that are hidden", WARN, "echoed-targets/visible")
    if kinds[0] == "unmasked":
        what = (
            f"in {len(kinds)} steps all targets could be read at their own places, here and "
            "there in a row"
        )
        return fires(what, "a mask token there", WARN, "echoed-targets/unmasked")
    fault = f"echoed-targets/{kinds[0]}" if kinds[0] in ("mask", "alias") else ""
    return fires(
        f"in {len(kinds)} of {len(kinds)} steps the targets went in at their own places",
        "none",
        fault=fault,
    )


@check("F66")
def blank_among_labels(e: Evidence) -> Fired | Verdict:
    """Return a speech or handwriting model never writes one of its labels, and leaves gaps.

    Fires when ctc_loss is given labels one of which is its blank, 0 unless it says otherwise. What
    lies behind the length of a row is padding, and left alone.

    ERROR blank-among-labels: {count} of {total} labels are {blank}, which ctc_loss takes for the
    blank: that label can never be told from nothing. Fix: Begin labels at 1 and give the model one
    output more, or CTCLoss(blank=number of labels).
    WARN blank-among-labels/lengths: The lengths of the targets are those of the filled rows, so the
    {count} blanks at their ends (of {total} labels) count as text. Fix: target_lengths hold how
    many labels each row really has.
    """
    if (verdict := no_habit(e, seen := e.habits["F66"])) is not None:
        return verdict
    blank, count, total, at_ends = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps the labels held the index of the blank, {blank}",
        "no blank among the labels",
        fault="blank-among-labels" + ("/lengths" if at_ends else ""),
        blank=blank,
        count=count,
        total=total,
    )


@check("F89")
def divergence_per_class(e: Evidence) -> Fired | Verdict:
    """Distillation hardly differs from training without a teacher.

    Fires when kl_div of rows of several classes has the reduction "mean".

    WARN divergence-per-class: kl_div's "mean" divides by the {classes} classes as well as by the
    rows, so the divergence counts {classes} times less than it says. Fix: reduction="batchmean".
    """
    if (verdict := no_habit(e, seen := e.habits["F89"])) is not None:
        return verdict
    classes = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps kl_div took the mean over {classes} classes",
        "batchmean",
        classes=classes,
    )
