"""Formulas of methods with a piece missing: F54 to F62, S31, D14 and D15.

A method is a formula, and a program that leaves out one factor of it runs as well. What became of tensors in three
early steps tells (watchers/); here it is asked whether it is a habit.

Footgun: as in arithmetic.py, each of these lines is right in some other program. They warn, and each page says what is
left alone.
"""

from train_doctor.check import Fired, check, fires
from train_doctor.checks.arithmetic import no_habit
from train_doctor.evidence import Evidence
from train_doctor.finding import OK, Verdict

FAST = 5.0  # what goes into the sine of a sine, where about 1 is meant
STEPS = 2
WIDE, LEAST = 2.5, 3.0  # spread of dot products beside that of their targets, and by itself


@check("F54")
def weights_after_mean(e: Evidence) -> Fired | Verdict:
    """Weights of rows were given to the loss, and the model learns as if there were none.

    Fires when what a loss of torch gave as one number is multiplied by weights or a mask with as many rows. One
    weight for a term is left alone, and so is an exp(-loss) that is only printed or belongs to one of several tasks.

    WARN weights-after-mean: The weights multiply a loss that is a mean over the rows already, so each row has the same
    share, whatever its weight. Fix: reduction="none", then (loss * weight).sum() / weight.sum().
    WARN weights-after-mean/focal: The probability in a focal loss, exp(-loss), is that of the mean over all rows, so
    easy and hard rows have one and the same factor. Fix: reduction="none", then ((1 - pt) ** gamma * loss).mean().
    """
    if len(e.focal) >= STEPS:
        name = next(iter(e.focal.values()))
        return fires(
            f"in {len(e.focal)} steps exp(-loss) was taken of the one number that {name} gave",
            "a loss for each row",
            fault="weights-after-mean/focal",
        )
    if (verdict := no_habit(e, e.late_weights)) is not None:
        return verdict
    name, shape = next(iter(e.late_weights.values()))
    return fires(
        f"in {len(e.late_weights)} steps the one number that {name} gave met weights {shape}", "a loss for each row"
    )


@check("F55")
def gaps_rebuilt(e: Evidence) -> Fired | Verdict:
    """A recommender that rebuilds rows of ratings predicts nearly nothing for all that was not rated.

    Fires when a model is asked to give back its own input, more than half of which is exactly 0 while the other
    numbers lie on both sides of 0 or far above it, and the mean is taken over all of it. Counts, and what is multiplied
    by a mask, are left alone.

    WARN gaps-rebuilt: {share:.0%} of what is rebuilt are zeros that stand for gaps, and the loss asks for them as for
    data, so all answers are pulled to zero. Fix: ((answer - row) ** 2 * known).sum() / known.sum().
    """
    if (verdict := no_habit(e, e.gaps)) is not None:
        return verdict
    share, name = next(iter(e.gaps.values()))
    return fires(f"{name} over all places, {share:.0%} of them exactly 0", "a mean over what is known", share=share)


@check("F56")
def ends_ignored(e: Evidence) -> Fired | Verdict:
    """In Q-learning all values run to one and the same limit, and the policy does not avoid the end of an episode.

    Fires when a target holds the largest value of the next state, or a reward and a discount times a value, and flags
    of zeros and ones of its length were drawn and went into nothing before the loss. Where any such flag is used,
    nothing is said. Also when there are no flags at all, and states that are reached again and again in three steps
    are never left in any of them, while most others are.

    WARN ends-ignored: The value of the next state is counted where there is none: the ends of episodes were drawn from
    memory and are not part of the target. Fix: target = reward + gamma * next_q * (1 - done).
    WARN ends-ignored/not-kept: The value of the next state is counted in states from which nothing is ever done: they
    end an episode, the memory does not say so, and their values are never learned. Fix: Keep done in the memory, and
    target = reward + gamma * next_q * (1 - done).
    """
    if found := e.habits["F56 never left"]:
        states, rows, all_rows = next(iter(found.values()))
        what = (
            f"{states} states were reached in {rows} of {all_rows} rows and left in none, and their values are counted"
        )
        return fires(what, "a factor of 0 where nothing comes after", fault="ends-ignored/not-kept")
    if (verdict := no_habit(e, e.endless)) is not None:
        return verdict
    rows = next(iter(e.endless.values()))
    return fires(f"in {len(e.endless)} steps {rows} flags of zeros and ones had no use", "a factor (1 - done)")


@check("F57")
def both_sides_learn(e: Evidence) -> Fired | Verdict:
    """A self-supervised loss reaches its end within a few steps, and the features are alike for all data.

    Fires when a loss is nothing but cosines that are to rise, and both sides of them have a gradient. Cosines that are
    to fall as well, and further terms that learn, are left alone. Also when the loss is nothing but the distance of
    what two networks answer, and an optimizer holds both.

    WARN both-sides-learn: Two views are pulled together from both sides and nothing keeps them apart, so the shortest
    way is one answer for all data (collapse). Fix: Stop the gradient of one side: z.detach(), as SimSiam and BYOL do.
    WARN both-sides-learn/teacher: The loss is a distance of two networks, and both learn: the target comes to meet the
    answer, so a teacher forgets what it knew. Fix: teacher.requires_grad_(False), its answer under no_grad, and
    optimizer(student.parameters()).
    """
    if len(two := e.habits["F57 two"]) >= STEPS:
        what = f"in {len(two)} steps both sides of a {next(iter(two.values()))} learned, with weights of their own"
        return fires(what, "one side without a gradient", fault="both-sides-learn/teacher")
    if (verdict := no_habit(e, e.both_sides)) is not None:
        return verdict
    return fires(f"in {len(e.both_sides)} steps both sides of each cosine had a gradient", "one side without")


@check("F58")
def spread_without_price(e: Evidence) -> Fired | Verdict:
    """A network that predicts a spread makes it huge, the loss falls all the same, and its means are not learned.

    Fires when an error is divided by a spread (an exp or a softplus that learns) before it is squared, and this is the
    only use of the spread on the way to the loss. Radial functions, whose distances go on into layers, are left alone.
    Also when a small parameter does nothing but weigh errors, and its weights fell from step to step. One whose
    gradient is set by hand is left alone.

    WARN spread-without-price: A larger spread makes the loss smaller and costs nothing: the logarithm of the spread is
    missing in the density. Fix: log p = -0.5 * ((y - mean) / spread) ** 2 - log(spread).
    WARN spread-without-price/weight: The weights of terms of the loss are learned by this loss and are used for nothing
    else, so they fall until the terms count for nothing. Fix: loss = (torch.exp(-s) * errors + s).sum().
    """
    if len(seen := e.habits["F58"]) >= STEPS:
        what = f"in {len(seen)} steps weights of errors were learned, used for nothing else, and fell"
        return fires(what, "a price of small weights", fault="spread-without-price/weight")
    if (verdict := no_habit(e, e.unpriced)) is not None:
        return verdict
    name = next(iter(e.unpriced.values()))
    return fires(f"the {name} that divides an error is used for nothing else", "- log(spread) in the loss as well")


@check("F59")
def reversal_without_sign(e: Evidence) -> Fired | Verdict:
    """With a gradient reversal layer the features tell the domains apart better and better.

    Fires when a function of the program that is called a reversal (of gradients) gives back a gradient of the same sign
    as the one that it got.

    WARN reversal-without-sign: The backward of {name} does not turn the gradient round, so the features are trained to
    tell the domains apart. Fix: return -lambda * grad.
    """
    same = {turn: told for turn, told in e.reversals.items() if told[1] > 0}
    if (verdict := no_habit(e, same)) is not None:
        return verdict
    name, product = next(iter(same.values()))
    return fires(f"product of its gradients before and after: {product:.3g}", "a number below 0", name=name)


@check("S31")
def sines_too_fast(e: Evidence) -> Fired | Verdict:
    """A network of sines fits the places that it was given, and shows noise between them.

    Fires when what goes into sines that are computed from other sines has a root mean square above 5, at each step. The
    first sines and fixed frequencies are left alone.

    WARN sines-too-fast: The hidden layers of a SIREN have the weights that nn.Linear draws, times a factor of about 30,
    so their sines turn many times from place to place. Fix: Draw them from -sqrt(6 / n) / 30 to sqrt(6 / n) / 30.
    """
    if (verdict := no_habit(e, e.sines)) is not None:
        return verdict
    least = min(size for sizes in e.sines.values() for size in sizes)
    if least < FAST:
        return OK
    return fires(f"what goes into sines of sines has a root mean square of {least:.3g} or more", "about 1")


@check("D14")
def moved_apart(e: Evidence) -> Fired | Verdict:
    """A segmentation stays blurred or mirrored, though its network learns well on data without augmentation.

    Fires when pictures of a batch were flipped, turned or rolled before they were put together, and their targets of
    the same height and width (or all of it some times as large) never were, or others of them were. Also when pieces of
    a batch were cut out of larger pictures at other places than the pieces of their targets, or the frames of films one
    by one. Targets that were drawn in sight (of zeros, of a grid), and such as many pictures share, are left alone.
    Data that worker processes load are not seen.

    WARN moved-apart: Pictures are flipped or turned and their targets are not, so a part of the targets is in the wrong
    place. Fix: Draw once, and move both in the same way.
    WARN moved-apart/drawn-twice: Some pictures are flipped or turned without their target, and some targets without
    their picture: each of the two draws its own number. Fix: Draw once, and move both in the same way.
    WARN moved-apart/crops: {apart} of {rows} pieces {size} of a batch were cut out of their pictures at another place
    than those of their targets: the corner was drawn twice. Fix: Draw one corner, and cut both there (times the factor
    of a finer target).
    WARN moved-apart/frames: {moved} of the {frames} frames of a film were cut at another place than the one before, so
    all that is seen in it jumps. Fix: Draw one corner for a film, and cut all of its frames there.
    """
    if len(films := e.habits["D14 frames"]) >= STEPS:
        moved, frames = next(iter(films.values()))
        what = f"in {len(films)} steps the frames of films were cut at other places"
        return fires(what, "one place", fault="moved-apart/frames", moved=moved, frames=frames)
    if len(crops := e.habits["D14 crops"]) >= STEPS:
        apart, rows, size, _ = next(iter(crops.values()))
        what = f"in {len(crops)} steps pieces of pictures and of their targets were cut at other places"
        return fires(what, "the same places", fault="moved-apart/crops", apart=apart, rows=rows, size=size)
    if (verdict := no_habit(e, e.moved)) is not None:
        return verdict
    pictures, targets, rows, apart = (sum(told[n] for told in e.moved.values()) for n in range(4))
    if apart >= STEPS:
        return fires(
            f"of {rows} rows, {apart} pictures or more were moved alone, and as many targets alone",
            "both, or neither",
            fault="moved-apart/drawn-twice",
        )
    if targets or pictures < STEPS:
        return OK
    return fires(f"{pictures} of {rows} pictures were moved, and none of their targets", "both, or neither")


@check("F60")
def uniform_noise(e: Evidence) -> Fired | Verdict:
    """A diffusion model's loss falls well, and its samples are washed out or of one colour.

    Fires when a model is asked for noise that is mixed into its input and comes from rand or rand_like as it is.

    WARN uniform-noise: The noise is drawn by rand_like, between 0 and 1 with a mean of 0.5, and sampling begins with
    normal noise around 0. Fix: torch.randn_like.
    """
    if (verdict := no_habit(e, e.uniform_noise)) is not None:
        return verdict
    return fires(f"in {len(e.uniform_noise)} steps the noise that is asked for was uniform", "normal noise")


@check("F61")
def dot_products_too_large(e: Evidence) -> Fired | Verdict:
    """A matrix factorisation fits its training data, and on other data it is worse than the mean.

    Fires when the dot products of rows of two tables, in the first steps, have a spread above 3 and above two and a
    half times that of their targets. Rows that begin small are left alone.

    WARN dot-products-too-large: The tables begin with the numbers that nn.Embedding draws, of size 1, so their dot
    products are noise that is far larger than what they are to tell. Fix: nn.init.normal_(table.weight, std=0.05).
    """
    if (verdict := no_habit(e, e.dots)) is not None:
        return verdict
    answers, targets, _ = next(iter(e.dots.values()))
    if any(spread < max(WIDE * wide, LEAST) for spread, _, wide in e.dots.values()):
        return OK
    return fires(f"dot products have a spread of {answers:.3g} and their targets one of {targets:.3g}", "not more")


@check("D15")
def bytes_wrapped(e: Evidence) -> Fired | Verdict:
    """Dark parts of pictures come out as the brightest, and a network on pictures learns less than it should.

    Fires when a sum or difference of bytes (uint8) lies on the wrong side of what it was made of, and becomes a float.

    WARN bytes-wrapped: {name} of uint8 wraps around: a byte has no number below 0 or above 255. Fix: Convert first:
    images.float() - mean.
    """
    if (verdict := no_habit(e, e.wrapped)) is not None:
        return verdict
    name, shape = next(iter(e.wrapped.values()))
    return fires(f"in {len(e.wrapped)} steps {name} of bytes {shape} wrapped around", "floats", name=name)


@check("F62")
def entropy_punished(e: Evidence) -> Fired | Verdict:
    """A policy is sure of one action after a few updates, and stops trying others.

    Fires when the loss of a step in which actions were scored (log_prob) grows with the entropy of a distribution. Or
    when it grows with the entropy of a mean of shares, or falls with its balance loss, of which the largest were chosen
    in the same step (experts), or which mixed what several weights answered to one input.

    WARN entropy-punished: The entropy bonus is added to the loss, so training makes the policy less random: the sign is
    wrong. Fix: loss = policy_loss + value_loss - coefficient * entropy.mean().
    WARN entropy-punished/routing: The loss grows as a router's mean shares become even (their entropy is added, or
    their balance loss taken away), so training sends everything to one expert: the sign is wrong. Fix: loss = loss -
    coefficient * entropy, or loss + coefficient * balance.
    """
    if len(routed := e.habits["F62 routing"]) >= STEPS:
        what = f"in {len(routed)} steps the loss grew with the entropy of the mean shares"
        return fires(what, "a loss that falls with it", fault="entropy-punished/routing")
    if (verdict := no_habit(e, e.punished)) is not None:
        return verdict
    return fires(f"in {len(e.punished)} steps the loss grew with the entropy", "a loss that falls with it")
