"""What a program leaves out without a word: F106 to F110, F112 to F115, F120, D33 to D35, S48 to S50.

A network that is not told how noisy its input is, a level that a window lost, an order that attention can't see.
Nothing in the line that is there is wrong; something else is missing.

Footgun: what is missing may have been left out on purpose. Each watcher says when it is certain, and these checks warn.
"""

import math
import statistics

from torch import Tensor, nn

from train_doctor.check import Fired, check, fires
from train_doctor.checks.arithmetic import BLIND, STEPS, no_habit
from train_doctor.evidence import Evidence, weight_of
from train_doctor.finding import OK, Verdict, unknown

FAR, STRANGE, ROWS = 0.02, 2.5, 48  # of a mean; spreads below which rows are strangers; rows that were compared
CHANCE = 3.0  # by how much more than their own variance the means and spreads of random rows may differ


@check("F106")
def time_not_told(e: Evidence) -> Fired | Verdict:
    """A diffusion or flow model's loss stops early, and its samples are blurred or noisy.

    Fires when data and noise are mixed in shares that were drawn for each row, the mixture goes into layers, and
    nothing that learns is given what was drawn, in any form. Noise of any strength that is added to data as they are is
    left alone: a denoiser may be blind. So are classes at any noise, critics, two draws for data and noise, and what is
    asked for neither the noise nor the data.

    WARN time-not-told: The network is given {rows} mixtures of data and noise and not how noisy they are, so it answers
    with a mean over all strengths. Fix: Give t to the network (model(x_t, t)), and use it there: embedded, or as a
    column.
    """
    if (verdict := no_habit(e, seen := e.habits["F106"])) is not None:
        return verdict
    rows = next(iter(seen.values()))
    what = f"in {len(seen)} steps what was drawn for each row reached the noisy input and nothing that learns"
    return fires(what, "an input that tells the time", rows=rows)


@check("F107")
def targets_of_strangers(e: Evidence) -> Fired | Verdict:
    """Semi-supervised training with pseudo-labels makes a classifier worse, though the labels it makes are good.

    Compares the input of which a network made targets with the input that is asked for them, row by row: in their
    numbers, in their numbers sorted, and in the answers. Fires when rows and their partners are no more alike than rows
    and others, over all steps that are looked at, and both go through one network, or through a copy of it. One network
    that teaches another from another camera is left alone. A target of which data are a part as well is no view, and is
    left alone.

    WARN targets-of-strangers: The targets were made of other rows than those that are asked for them: row i of one
    input has nothing in common with row i of the other. Fix: One loader whose items are both views of the same row.
    """
    seen = e.habits["F107"]
    if (verdict := no_habit(e, seen)) is not None:
        return verdict
    rows = sum(n for n, _ in seen.values())
    kinds = zip(*(told for _, told in seen.values()))
    most = max(sum(one) / len(one) ** 0.5 for one in kinds)
    if rows < ROWS or most > STRANGE:
        return OK
    what = f"the inputs of {rows} rows and of their targets are alike to {most:.1f} spreads of chance"
    return fires(what, "more than those of other rows")


@check("F108")
def chosen_by_the_target(e: Evidence) -> Fired | Verdict:
    """Double Q-learning overrates its values as plain Q-learning does.

    Fires when the network that no optimizer holds chooses the best action, and the one that learns says what it is
    worth, which gets into the target of a regression. A fixed policy that is judged, which is no copy of that network,
    is left alone.

    WARN chosen-by-the-target: The two networks of double Q-learning stand in each other's place: the target network
    chooses, and the value is that of the network that learns. Fix: best = online(next).argmax(1, keepdim=True); value =
    target(next).gather(1, best).
    """
    if (verdict := no_habit(e, seen := e.habits["F108"])) is not None:
        return verdict
    return fires(f"in {len(seen)} steps the value was picked from the network that learns", "from the target network")


@check("F109")
def not_put_back(e: Evidence) -> Fired | Verdict:
    """A masked autoencoder's loss stays high, and what it fills in is a blur.

    Fires when pieces are picked by an order that was drawn for each row, others are put after them, and positions that
    are the same for all rows are added, without the pieces going back to their places first. Pieces that were sorted by
    something (a time, a score), and pieces that are told whether they were seen, are left alone.

    WARN not-put-back: The {places} pieces are in the order in which they were shuffled when they are given their
    positions, so each gets the place of another. Fix: ids_restore = ids_shuffle.argsort(1), and x.gather(1,
    ids_restore[..., None].expand(-1, -1, x.shape[2])) before the positions are added.
    """
    if (verdict := no_habit(e, seen := e.habits["F109"])) is not None:
        return verdict
    places = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps positions were added to shuffled pieces", "pieces put back", places=places)


@check("F110")
def lengths_of_padding(e: Evidence) -> Fired | Verdict:
    """A speech or handwriting model writes nothing but blanks for long, or letters that nobody said at the end.

    Fires when ctc_loss is told that every row is as long as the longest one, and most rows of what went into the first
    layer end in one repeated frame, over several lengths. Pictures of one width are left alone.

    WARN lengths-of-padding: ctc_loss is told {places} places for every row, and {padded} rows end in padding: the
    padding is read as sound. Fix: input_lengths of each row's own frames (divided by the stride of the network).
    """
    if (verdict := no_habit(e, seen := e.habits["F110"])) is not None:
        return verdict
    places, padded = next(iter(seen.values()))
    what = f"in {len(seen)} steps all rows had {places} places, with {padded} rows that end in padding"
    return fires(what, "each row's own length", places=places, padded=padded)


@check("F112")
def logits_as_confidence(e: Evidence) -> Fired | Verdict:
    """Semi-supervised training trusts nearly all of its pseudo-labels, wrong ones too.

    Fires when the largest of each row of what a layer answered, without a gradient and without a softmax, is compared
    with a number between one half and one, and some of these lie outside of 0 to 1.

    WARN logits-as-confidence: A threshold of {number:g} for probabilities is held against logits. Fix: sure, label =
    logits.softmax(1).max(1).
    """
    if (verdict := no_habit(e, seen := e.habits["F112"])) is not None:
        return verdict
    number = next(iter(seen.values()))
    what = f"in {len(seen)} steps the largest logit of each row was compared with {number:g}"
    return fires(what, "the largest probability", number=number)


@check("F113")
def ratio_per_dimension(e: Evidence) -> Fired | Verdict:
    """PPO with actions of several dimensions learns slowly, or changes its policy too far.

    Fires when log-probabilities of a normal distribution, (rows, dimensions), go into a ratio as they are, and the
    ratio is multiplied by one advantage for each row.

    WARN ratio-per-dimension: The ratio is taken for each of the {dimensions} dimensions of an action, and an action has
    one probability. Fix: dist.log_prob(action).sum(-1).
    """
    if (verdict := no_habit(e, seen := e.habits["F113"])) is not None:
        return verdict
    dimensions = next(iter(seen.values()))
    what = f"in {len(seen)} steps a ratio of {dimensions} numbers met one advantage"
    return fires(what, "one ratio for each action", dimensions=dimensions)


@check("F114")
def critic_unbounded(e: Evidence) -> Fired | Verdict:
    """A Wasserstein critic's loss falls into the thousands below zero, and the generator learns nothing of use.

    Fires when the loss of one of two optimizers is the difference of two means of one layer's answers and nothing else,
    no weight is clipped, no derivative is asked for, and no layer is normalised by its spectrum or its length.

    WARN critic-unbounded: Nothing keeps the critic's slope in bounds, so its loss falls as its weights grow. Fix: A
    gradient penalty, spectral_norm on its layers, or p.data.clamp_(-0.01, 0.01) for all of its weights after each step.
    """
    if (verdict := no_habit(e, seen := e.habits["F114"])) is not None:
        return verdict
    return fires(f"in {len(seen)} steps the loss was a difference of two means of answers", "something that bounds it")


@check("F115")
def embeddings_not_normalised(e: Evidence) -> Fired | Verdict:
    """A contrastive loss begins far above the logarithm of its rows, jumps, and ranks poorly.

    Measures the rows of both sides of a square table of products that goes into a cross-entropy with a factor of five
    or more (a temperature of 0.2 or less). Fires when half of the rows of each side or more are not of length 1.
    Products with a smaller factor are left alone.

    WARN embeddings-not-normalised: A temperature for cosines is put to products of embeddings that are {length:.3g}
    long (a factor of {factor:.3g}): the logits hang on lengths, and one pair decides. Fix: F.normalize(z, dim=-1) on
    both sides before the product.
    """
    if (verdict := no_habit(e, seen := e.habits["F115"])) is not None:
        return verdict
    length, factor = next(iter(seen.values()))
    what = f"in {len(seen)} steps rows of a length of {length:.3g} were multiplied, times {factor:.3g}"
    return fires(what, "rows of length 1", length=length, factor=factor)


@check("S50")
def size_by_name_only(e: Evidence) -> Fired | Verdict:
    """A pretrained network still answers with all of its old classes, though it was given a new number of them.

    Compares what a linear layer or a convolution says of its size with its weight. Fires when it says fewer outputs
    than the weight has. Weights that were cut (pruned) have fewer than their layer says, and are left alone.

    WARN size-by-name-only: {name} says {said} outputs and has {has}: to set the attribute changes nothing. Fix:
    model.fc = nn.Linear(model.fc.in_features, classes).
    """
    if not e.models:
        return unknown("no model was seen")
    for name, m in e.modules():
        said = {nn.Linear: "out_features", nn.Conv2d: "out_channels", nn.Conv1d: "out_channels"}.get(type(m))
        weight = weight_of(m) if said is not None else None
        if said is None or not isinstance(weight, Tensor) or weight.dim() < 2 or not weight.is_floating_point():
            continue
        if getattr(m, said) < len(weight):
            numbers = dict(said=getattr(m, said), has=len(weight))
            return fires(
                f"{said} is {numbers['said']}, the weight has {len(weight)} rows", "the same", name=name, **numbers
            )
    return OK


@check("D33")
def scale_of_each_batch(e: Evidence) -> Fired | Verdict:
    """A regression's answers have no unit: they can't be turned back into what was measured.

    Fires when the targets of a regression are standardised by the mean and spread of their own batch, which differ from
    step to step as those of random rows do. Groups that are standardised each by itself (the stocks of a day) differ by
    more and are left alone; so are returns that weigh log-probabilities, answers that are standardised as well, and all
    data in one batch.

    WARN scale-of-each-batch: The targets are standardised by each batch's own mean and spread, so the same target is
    another number in every step. Fix: Take the mean and the spread of the training data once, and keep them.
    """
    if (verdict := no_habit(e, seen := e.habits["D33"])) is not None:
        return verdict
    means, spreads, counts = zip(*seen.values())
    if _differ(means, spreads, min(counts)) > CHANCE:
        return OK  # groups
    if max(means) - min(means) <= FAR * max(spreads) and max(spreads) <= (1 + FAR) * min(spreads):
        return OK
    what = f"the means that were taken away were {', '.join(f'{m:.3g}' for m in means[:3])}"
    return fires(what, "one mean for all batches")


def _differ(means: tuple, spreads: tuple, count: int) -> float:
    """How far means and spreads of batches lie apart, in variances of chance: about 1 for random rows."""
    if len(means) < 2 or min(spreads) <= 0:
        return 0.0
    among = statistics.mean(spreads)
    of_means = statistics.variance(means) / among**2 * count
    of_spreads = statistics.variance(map(math.log, spreads)) * 2 * count
    return (of_means + of_spreads) / 2


@check("D34")
def level_taken_away(e: Evidence) -> Fired | Verdict:
    """A forecast has the right shape at the wrong height.

    Fires when each row of the input loses its own mean and spread, these are used for nothing else, and the targets of
    the regression hang on them (a correlation above 0.8) and rise by as much as they do. Pictures, a level that another
    input holds, and targets in another unit (water, by a spectrum) are left alone.

    WARN level-taken-away: Each window is standardised by its own mean and spread, and what follows it is not: the
    targets hang on a level that the network can't see. Fix: answer * std + mean, or (y - mean) / std with the window's
    numbers.
    """
    if (verdict := no_habit(e, seen := e.habits["D34"])) is not None:
        return verdict
    told = next(iter(seen.values()))
    what = f"in {len(seen)} steps the targets hung on the means that were taken away (a correlation of {told:.2f})"
    return fires(what, "the means used again")


@check("S48")
def places_unseen(e: Evidence) -> Fired | Verdict:
    """A transformer on a series is hardly better than one on the same numbers in any order.

    Fires when a series whose neighbours are alike goes, place by place, into attention without a mask, and nothing that
    is the same for all rows was added on the way. Left alone are sets and points, whose places have no order, rows with
    a column that only rises or falls (their own times), closed outlines, and attention before a recurrent layer, a
    convolution, or a layer on all places laid side by side.

    WARN places-unseen: Attention is given {places} places of a series and nothing that tells one place from another, so
    their order counts for nothing. Fix: x = x + positions, learned or made of sines, before the first attention.
    """
    if (verdict := no_habit(e, seen := e.habits["S48"])) is not None:
        return verdict
    places = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps {places} places met in attention without positions", "positions", places=places)


@check("F120")
def turned_by_head(e: Evidence) -> Fired | Verdict:
    """A transformer with rotary positions is no better than one without any, and words in another order score alike.

    Fires when queries and keys are multiplied by a table of angles that differs along the heads, and is one and the
    same for all places of a head. The table is known by its numbers (squares of a sine and a cosine that add up to one,
    or complex numbers of size 1), and its axes are followed to the attention. Left alone are tables of a grid, turns of
    a part of the features, steps of one place, and what is written into the attention by a kernel outside of torch.

    WARN turned-by-head: Rotary positions run over the {heads} heads and not over the {places} places (the function is
    written for the other layout), so angles cancel in each head and attention is told no order. Fix: Turn q and k in
    the layout that the function takes, (batch, places, heads, features) or (batch, heads, places, features), and lay
    cos and sin out with places where q has them.
    WARN turned-by-head/one-side: The {side} alone are turned by their places, so a product of the two tells where one
    of them stands and not how far apart they are. Fix: Turn q and k alike.
    """
    if len(one := e.habits["F120 one"]) >= STEPS:
        side = next(iter(one.values()))
        return fires(
            f"in {len(one)} steps {side} alone were turned", "both", fault="turned-by-head/one-side", side=side
        )
    if (verdict := no_habit(e, seen := e.habits["F120"])) is not None:
        return verdict
    heads, places = next(iter(seen.values()))
    what = f"in {len(seen)} steps angles differed along {heads} heads and along none of the {places} places"
    return fires(what, "angles that differ along the places", heads=heads, places=places)


@check("D35")
def made_in_another_range(e: Evidence) -> Fired | Verdict:
    """A discriminator is sure of itself from the start, and the generator learns nothing but to give no negatives.

    Fires when what a tanh gave, some of it below -0.1, and data that lie in 0..1 go into one first layer that learns;
    or data of which a quarter lies beyond -1..1; or what a sigmoid gave, and data of which a tenth lies below -0.1.
    Made ones that are compared with data themselves are left alone.

    WARN made-in-another-range: The generator ends in tanh (-1..1, {below:.0%} of it below 0), and the real data lie in
    {low:.2g}..{high:.2g}: the sign tells them apart. Fix: real * 2 - 1 (Normalize(0.5, 0.5)), or a generator that ends
    in a sigmoid.
    WARN made-in-another-range/dark: The generator ends in a sigmoid (0..1), and the real data lie in
    {low:.2g}..{high:.2g}, {below:.0%} of them below 0: it can never make these. Fix: A generator that ends in tanh, or
    data in 0..1.
    WARN made-in-another-range/beyond: The generator ends in tanh (-1..1), and the real data lie in
    {low:.2g}..{high:.2g}, {below:.0%} of them beyond: it can never make these. Fix: A generator that ends in a linear
    layer, or data brought into -1..1.
    """
    if (verdict := no_habit(e, seen := e.habits["D35"])) is not None:
        return verdict
    low, high, below, by = next(iter(seen.values()))
    if by == "sigmoid":
        what = f"in {len(seen)} steps a sigmoid was to make data of which {below:.0%} are negative"
        return fires(what, "one range for both", fault="made-in-another-range/dark", low=low, high=high, below=below)
    if by == "beyond":
        what = f"in {len(seen)} steps a tanh was to make data of which {below:.0%} lie beyond -1..1"
        return fires(what, "one range for both", fault="made-in-another-range/beyond", low=low, high=high, below=below)
    what = f"in {len(seen)} steps {below:.0%} of what a tanh made was negative, and nothing of the data"
    return fires(what, "one range for both", low=low, high=high, below=below)


@check("S49")
def members_alike(e: Evidence) -> Fired | Verdict:
    """An ensemble is no better than one of its members, and they agree on everything, far from the data too.

    Fires when modules of one class, under one parent or below one loss, had the same numbers at the first backward that
    was seen, were given the same, have learned, and have the same numbers still. Members that drift apart (other
    inputs, dropout) are left alone.

    WARN members-alike: {many} modules of class {kind} are copies of each other, are given the same and learn the same,
    so they are one network {many} times. Fix: Make each anew, [make() for _ in range(n)], instead of copying one; or
    call reset_parameters() on each copy.
    """
    if not e.habits["S49"]:
        return BLIND if len(e.shown) < STEPS else OK
    many, kind = next(iter(e.habits["S49"].values()))
    return fires(
        f"the numbers of {many} modules were equal at the start and after steps", "other weights", many=many, kind=kind
    )
