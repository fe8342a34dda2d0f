"""Formulas of methods with a piece missing: F54 to F62, S31, D14 and D15.

A method is a formula, and a program that leaves out one factor of it runs as well. What became of tensors in three
early steps tells (watchers/); here it is asked whether it is a habit.

Footgun: as in arithmetic.py, each of these lines is right in some other program. They warn, and each page says what is
left alone.
"""

from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.arithmetic import no_habit
from loopdoctor.evidence import Evidence
from loopdoctor.finding import OK, Verdict

STEPS = 2
WIDE, LEAST = 2.5, 3.0  # spread of dot products beside that of their targets, and by itself


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
