"""Losses that are written by hand and are not quite their formula: F85 to F90, F100 and F105.

What a formula does shows in the gradients of the answers, or in the steps that lead from a difference to the loss.

Footgun: each of these is the formula of something else. So they warn, and each page says what is left alone.
"""

from train_doctor.check import Fired, check, fires
from train_doctor.checks.arithmetic import no_habit
from train_doctor.evidence import Evidence
from train_doctor.finding import Verdict, not_applicable


@check("F85")
def quantiles_mirrored(e: Evidence) -> Fired | Verdict:
    """A forecast of several quantiles gives the high ones where the low ones should be.

    Fires when answers minus targets are weighed by two numbers, one below 0, and the larger is taken (a pinball loss),
    for several columns one after the other whose quantiles fall.

    WARN quantiles-mirrored: The pinball loss weighs answer - target, so the columns learn the quantiles {learned}, each
    the complement of what its formula names. Fix: e = target - answer; torch.max((q - 1) * e, q * e).
    """
    if (verdict := no_habit(e, seen := e.habits["F85"])) is not None:
        return verdict
    learned = ", ".join(f"{q:.3g}" for q in next(iter(seen.values())))
    return fires(f"in {len(seen)} steps the columns learned {learned}", "rising quantiles", learned=learned)


@check("F86")
def boxes_inside_out(e: Evidence) -> Fired | Verdict:
    """A detector learns boxes of the wrong size, or none.

    Fires when the third column of targets with four minus the first, and the fourth minus the second, are multiplied
    with each other, as in a loss of overlaps, and a twentieth of one of them is below 0. In a loss of single numbers,
    when beside pictures a part of them is below 0 along one axis alone, and no smaller or larger than the rest. Where
    half a width is taken from a column, when that leads out of the picture, and the width added to it never does.

    WARN boxes-inside-out: {share:.0%} of the target boxes end before they begin: they are (x, y, width, height), or a
    centre and a size, and the formula takes them for corners. Fix: torchvision.ops.box_convert(boxes, "xywh", "xyxy").
    WARN boxes-inside-out/turned: {share:.0%} of the target boxes end before they begin, along one axis: a flip mirrored
    their corners and left them in their places. Fix: x1, x2 = width - x2, width - x1.
    WARN boxes-inside-out/centre: {share:.0%} of the target boxes reach over the edge when they are read from a centre,
    and none does when read from its corner: they are (x, y, width, height) as in COCO. Fix: x + w / 2, y + h / 2 first,
    or torchvision.ops.box_convert(boxes, "xywh", "cxcywh").
    """
    if (verdict := no_habit(e, seen := e.habits["F86"])) is not None:
        return verdict
    how, share = next(iter(seen.values()))
    fault = f"boxes-inside-out/{how}" if how else ""
    if how == "centre":
        return fires(f"{share:.0%} of the boxes began left of the picture or above", "none", fault=fault, share=share)
    return fires(
        f"in {len(seen)} steps {share:.0%} of the sides of boxes were below 0", "none", fault=fault, share=share
    )


@check("F87")
def labels_pushed_wrongly(e: Evidence) -> Fired | Verdict:
    """A classifier of two classes says the opposite, or the same class for everything.

    Fires when flags of 0 and 1 (or -1 and 1) multiply what was made of a last layer's answers, and the gradients of
    these answers raise them where the flag is low and lower them where it is high; or, with a single product with the
    logarithm of a sigmoid, ask nothing where the flag is 0.

    WARN labels-pushed-wrongly/opposite: The loss that is written by hand lowers the answers of class 1 and raises those
    of the other: a sign is wrong, or y and 1 - y changed places. Fix: -(y * log(p) + (1 - y) * log(1 - p)).mean(), or
    relu(1 - t * s).
    WARN labels-pushed-wrongly/half: The loss that is written by hand has the term of class 1 alone, so p = 1 for all is
    its best answer. Fix: -(y * log(p) + (1 - y) * log(1 - p)).mean(), that is F.binary_cross_entropy_with_logits.
    """
    if (verdict := no_habit(e, seen := e.habits["F87"])) is not None:
        return verdict
    what = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps the gradient "
        + ("asked nothing of class 0" if what == "half" else "asked for the opposite"),
        "class 1 raised, class 0 lowered",
        fault=f"labels-pushed-wrongly/{what}",
    )


@check("F88")
def slip_in_a_loss(e: Evidence) -> Fired | Verdict:
    """A loss that is written by hand falls below zero or to nothing, and the model knows little.

    Fires when a loss is the mean of answers minus targets, or the square of that mean, and the differences go into
    nothing that bends; when it is minus the mean of probabilities, or of a last layer's answers, that were picked by
    class; when every cross-entropy of a step is asked for the largest of its own numbers; or when it holds the plain
    sum of matrices that its layers multiply with, of which some numbers are below 0 (or minus that sum, of which some
    are above).

    WARN slip-in-a-loss/no-error: The loss is the mean of (answer - target) as it is, which falls for ever. Fix: (answer
    - target).pow(2).mean(), or abs().
    WARN slip-in-a-loss/squared-mean: The mean was taken before the square, so errors cancel and only the mean of all
    answers is learned. Fix: ((answer - target) ** 2).mean().
    WARN slip-in-a-loss/no-logarithm: The loss is minus the probability of the right class, without its logarithm, and
    hardly asks for anything where that is small. Fix: F.cross_entropy(logits, y).
    WARN slip-in-a-loss/own-choice: The targets of the cross-entropy are the largest of the very numbers that it is
    given, so the model is asked for what it says already. Fix: The labels of the data.
    WARN slip-in-a-loss/no-softmax: The loss is minus the answer of the right class as the last layer gives it, which
    falls for ever as that answer grows, and the others are asked for nothing. Fix: F.cross_entropy(logits, y), or
    log_softmax before the class is picked.
    WARN slip-in-a-loss/no-size: The penalty is the sum of the weights as they are, so it falls without end as they go
    below zero. Fix: sum(p.abs().sum() for p in model.parameters()), or p.pow(2).
    """
    if (verdict := no_habit(e, seen := e.habits["F88"])) is not None:
        return verdict
    what = next(iter(seen.values()))
    said = {"no-error": "a mean of differences", "squared-mean": "a squared mean of differences"}
    said |= {"no-logarithm": "minus a mean of probabilities", "own-choice": "asked for its own choice"}
    said |= {"no-size": "a sum with weights as they are in it", "no-softmax": "minus a mean of picked answers"}
    return fires(f"in {len(seen)} steps the loss was {said[what]}", "an error", fault=f"slip-in-a-loss/{what}")


@check("F126")
def squashed_twice(e: Evidence) -> Fired | Verdict:
    """A classifier learns slowly and is never sure of anything, however long it is trained.

    Fires when what a softmax or a sigmoid gave goes into another one as it is: over the same classes, or a sigmoid of
    either.

    WARN squashed-twice: A {second} is taken of what a {first} gave, so what comes out lies in a narrow range, and the
    gradient is small. Fix: One of the two: leave the {first} out of the model, or the {second} out of the loss.
    """
    if (verdict := no_habit(e, seen := e.habits["F126"])) is not None:
        return verdict
    first, second = next(iter(seen.values()))
    what = f"in {len(seen)} steps a {second} was taken of a {first}"
    return fires(what, "of numbers that may be any", first=first, second=second)


@check("F89")
def divergence_per_class(e: Evidence) -> Fired | Verdict:
    """Distillation hardly differs from training without a teacher.

    Fires when kl_div of rows of several classes has the reduction "mean".

    WARN divergence-per-class: kl_div's "mean" divides by the {classes} classes as well as by the rows, so the
    divergence counts {classes} times less than it says. Fix: reduction="batchmean".
    """
    if (verdict := no_habit(e, seen := e.habits["F89"])) is not None:
        return verdict
    classes = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps kl_div took the mean over {classes} classes", "batchmean", classes=classes)


@check("F90")
def margin_taken_away(e: Evidence) -> Fired | Verdict:
    """A triplet loss is 0 after a few steps, and positives lie hardly nearer than negatives.

    Fires when a positive number is taken from the difference of two distances that learn, and what is left is cut at 0;
    or from the spread of columns over a batch. Also when a cross-entropy is given cosines, times a number, and that of
    the right class has a margin more in each row, the same in all steps; or when all classes have cos(theta + margin).

    WARN margin-taken-away: The margin is subtracted, so a triplet that is wrong by less than the margin counts as
    right. Fix: torch.relu(d_positive - d_negative + margin).
    WARN margin-taken-away/spread: The hinge punishes columns that are spread by more than a bound and not those that
    are spread by less, so the features of all rows come together. Fix: torch.relu(1 - std).mean().
    WARN margin-taken-away/added: The margin of the right class is added to its cosine, so it counts as right while
    another class is the nearer by that much. Fix: scale * (cosines - margin * one_hot), or cos(theta + margin).
    WARN margin-taken-away/all-classes: The margin is put on all classes, and not on the right one alone, so none is
    asked for more than another. Fix: torch.where(one_hot.bool(), torch.cos(theta + margin), cosines).
    """
    if (verdict := no_habit(e, seen := e.habits["F90"])) is not None:
        return verdict
    if (what := next(iter(seen.values()))) in ("added", "all-classes"):
        had = {"added": "the cosine of the right class had a margin more", "all-classes": "all classes had a margin"}
        return fires(
            f"in {len(seen)} steps {had[what]}", "less for the right class alone", fault=f"margin-taken-away/{what}"
        )
    if what == "spread":
        what = f"in {len(seen)} steps a spread over the batch, less a number, was cut at 0"
        return fires(what, "a number less the spread", fault="margin-taken-away/spread")
    return fires(f"in {len(seen)} steps a margin was taken from the difference of distances", "added to it")


@check("F100")
def divided_by_almost_nothing(e: Evidence) -> Fired | Verdict:
    """A forecast that is trained on relative errors says almost nothing everywhere, and its loss is in the thousands.

    Fires when an error is divided, number by number, by its own target with something tiny added, 2 % of these or more
    are below a thousandth of their median, and the quotients of these few make up most of the loss. Quotients that are
    masked, bounded, weighed or written into afterwards are left alone.

    WARN divided-by-almost-nothing: {share:.0%} of the targets are next to 0, and an error that is divided by them is
    {part:.0%} of the loss, so the model learns to say 0. Fix: (answer - y).abs().sum() / y.abs().sum(), or leave these
    rows out.
    """
    if (verdict := no_habit(e, seen := e.habits["F100"])) is not None:
        return verdict
    share, part = next(iter(seen.values()))
    what = f"in {len(seen)} steps {share:.1%} of the divisors were next to 0, and made {part:.1%} of the loss"
    return fires(what, "divisors of one size", share=share, part=part)


@check("F105")
def critic_bounded(e: Evidence) -> Fired | Verdict:
    """A GAN with a critic hardly learns: the critic's two means soon lie at 0 and 1, and it tells no more.

    Fires when a loss is the mean of a network's answers to what another network made, one with an optimizer of its own,
    minus that of its answers to other inputs, both straight from a sigmoid of the same layer. Where such answers go
    into a binary cross-entropy, a logarithm or a square as well, or have a number taken from them, nothing is said.

    WARN critic-bounded: The critic's answers come from a sigmoid, so their means can't lie further apart than 1, and
    where they do its slope is 0; the distance of Wasserstein needs answers without bounds. Fix: Leave the sigmoid out,
    or train a discriminator with F.binary_cross_entropy_with_logits.
    """
    if len(e.optimizers) < 2:
        return not_applicable("there are no two optimizers")
    if (verdict := no_habit(e, seen := e.habits["F105"])) is not None:
        return verdict
    return fires(f"in {len(seen)} steps the loss was a difference of means of a sigmoid", "answers without bounds")
