"""What a method asks for, turned round or left in half: F63 to F73, D16 to D18, S32, N34 and N35.

Most of it was noted step by step (watchers/, in `e.habits`); here it is asked whether it is a habit.

Footgun: as in arithmetic.py, each of these lines is right in some other program. They warn, and each page says what is
left alone.
"""

import math
from dataclasses import dataclass

from train_doctor import owners
from train_doctor.check import Fired, check, fires
from train_doctor.checks.arithmetic import no_habit
from train_doctor.evidence import Call, Clip, Evidence, ScalerStep, Step, ZeroGrad
from train_doctor.finding import OK, Verdict, not_applicable, unknown

STEPS = 3


@dataclass
class Clipped:
    """What was clipped before a step of an optimizer."""

    optimizer: int
    ids: frozenset[int]
    left: set[int]  # of these, not cleared since
    used: bool  # an optimizer stepped with some of it, or none is known that holds it
    again: bool = False  # an optimizer that holds some of it stepped later


@check("F63")
def policy_pushed_away(e: Evidence) -> Fired | Verdict:
    """A policy gets worse with every update, or does the worst that it can.

    Fires when the loss grows with log-probabilities (or ratios of them) that were multiplied by weights. Weights that
    were negated first, and those made of log-probabilities, of a loss or of a distance, are left alone, and so is a
    loss that is to grow (maximize=True, backward from -1). Where the weights are costs of another kind, the sign is
    right. Also when the weights are an answer minus what came and the loss falls with them, and when an actor's loss
    grows with what a critic answers that is trained by a regression.

    WARN policy-pushed-away: The loss grows with the log-probability of actions times their weights, so what was better
    than expected becomes less likely: the minus is missing, unless the weights are costs. Fix: loss = -(log_prob *
    advantage).mean().
    WARN policy-pushed-away/regret: The actions are weighted by what the critic answered minus what came, so those that
    did better than expected become less likely, unless what comes are costs. Fix: advantage = returns -
    values.detach().
    WARN policy-pushed-away/value: The actor's loss grows with the critic's value of its actions, so it looks for the
    worst ones: the minus is missing, unless the values are costs. Fix: actor_loss = -critic(s, actor(s)).mean().
    """
    if (verdict := no_habit(e, seen := e.habits["F63"])) is not None:
        return verdict
    if next(iter(seen.values())) == "value":
        what = f"in {len(seen)} steps the loss of the actor grew with the critic's answer"
        return fires(what, "a loss that falls with it", fault="policy-pushed-away/value")
    if next(iter(seen.values())) == "regret":
        what = f"in {len(seen)} steps log-probabilities were weighted by an answer minus what came"
        return fires(what, "what came minus the answer", fault="policy-pushed-away/regret")
    return fires(f"in {len(seen)} steps the loss grew with weighted log-probabilities", "a loss that falls with them")


@check("F64")
def ends_inverted(e: Evidence) -> Fired | Verdict:
    """In Q-learning all values stay near the rewards of single steps, and the policy does not look ahead.

    Fires when the largest value of the next state is multiplied by flags of zeros and ones, sixteen or more, less than
    a fifth of which are 1. Flags that are 1 where an episode goes on are mostly 1. Where flags are turned round in the
    same step as well, they are left alone.

    WARN ends-inverted: The value of the next state is multiplied by the flag of the end itself, so it counts where
    there is no next state and nowhere else. Fix: target = reward + gamma * next_q * (1 - done).
    """
    if (verdict := no_habit(e, seen := e.habits["F64"])) is not None:
        return verdict
    share = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps the next values met flags of which {share:.0%} were 1", "mostly 1: not yet over"
    )


@check("F65")
def adversaries_agree(e: Evidence) -> Fired | Verdict:
    """A GAN's losses fall together from the start, and its samples do not come to look like the data.

    Fires when two networks with an optimizer each, the answer of one to what the other made, both want that answer up
    or both want it down, and none that had a part in it wants the opposite. Answers that a square is taken of, or of
    which a step says both, are left alone, and so are losses that are to grow.

    WARN adversaries-agree: Generator and discriminator both want the answer to generated data {way}, so they help each
    other and nothing makes the samples better: a label or a sign is the wrong one. Fix: The discriminator wants it
    down (target 0), the generator wants it up (target 1); without labels, d_loss = d(fake).mean() - d(real).mean() and
    g_loss = -d(fake).mean().
    """
    if len(e.optimizers) < 2:
        return not_applicable("there are no two optimizers")
    if (verdict := no_habit(e, seen := e.habits["F65"])) is not None:
        return verdict
    way = "up" if next(iter(seen.values())) < 0 else "down"
    return fires(f"in {len(seen)} steps the losses of both wanted it {way}", "one up and the other down", way=way)


@check("F66")
def blank_among_labels(e: Evidence) -> Fired | Verdict:
    """A speech or handwriting model never writes one of its labels, and leaves gaps.

    Fires when ctc_loss is given labels one of which is its blank, 0 unless it says otherwise. What lies behind the
    length of a row is padding, and left alone.

    ERROR blank-among-labels: {count} of {total} labels are {blank}, which ctc_loss takes for the blank: that label can
    never be told from nothing. Fix: Begin labels at 1 and give the model one output more, or CTCLoss(blank=number of
    labels).
    WARN blank-among-labels/lengths: The lengths of the targets are those of the filled rows, so the {count} blanks at
    their ends (of {total} labels) count as text. Fix: target_lengths hold how many labels each row really has.
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


@check("F67")
def roots_missing(e: Evidence) -> Fired | Verdict:
    """A diffusion model's loss falls, and its samples are blurred, grey or far too bright.

    Fires when data and a normal draw are mixed by factors whose squares do not sum to 1 while they themselves do, or
    one with the other's square, and the loss asks for that draw. What asks for something else (flow matching) is left
    alone, and shares that sum to 1 are, unless they were looked up in a table of steps.

    WARN roots-missing: Data and noise are mixed without the root of {which}, so the mixtures are not those of the
    sampler's formulas. Fix: xt = abar.sqrt() * x0 + (1 - abar).sqrt() * noise.
    """
    if (verdict := no_habit(e, seen := e.habits["F67"])) is not None:
        return verdict
    which = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps the shares of data and noise lacked the root of {which}",
        "squares of the two shares that sum to 1",
        which={"both": "both shares", "the noise": "the noise's share", "the data": "the data's share"}[which],
    )


@check("F68")
def targets_not_mixed(e: Evidence) -> Fired | Verdict:
    """With mixup the training loss stays high, and the model is worse than without.

    Fires when a batch is summed with itself in another order, with one share for all rows, nothing else of its length
    was put into that order or turned, the order was used for nothing else, and a cross-entropy is asked for. Or when
    the loss of the labels in that order has the share of the rows that were not, which differs clearly.

    WARN targets-not-mixed: The inputs are mixed with those of other rows and the targets are not, so each row is asked
    for the label of one half alone. Fix: loss = lam * criterion(out, y) + (1 - lam) * criterion(out, y[order]).
    WARN targets-not-mixed/shares: The rows in another order make up {share:.0%} of the inputs, and the loss of their
    labels counts {asked:.0%}: the shares are exchanged. Fix: lam is the share of the row itself (in CutMix 1 - area):
    loss = lam * criterion(out, y) + (1 - lam) * criterion(out, y[order]).
    WARN targets-not-mixed/orders: The rows that are mixed in are in one random order and their labels in another one.
    Fix: Draw the order once: order = torch.randperm(len(x)); x[order], y[order].
    """
    if orders := e.habits["F68 orders"]:  # exact, too
        what = f"in {len(orders)} steps the rows and their labels were mixed in two orders"
        return fires(what, "one order for both", fault="targets-not-mixed/orders")
    seen = e.habits["F68"]
    shares = [fact for fact in seen.values() if isinstance(fact, tuple)]
    if shares:  # exact, so one step is enough: many mix in every second one
        what = f"in {len(shares)} steps the factor of a loss was one minus the share of its rows"
        share, asked = shares[0]
        return fires(what, "the share itself", fault="targets-not-mixed/shares", share=share, asked=asked)
    if (verdict := no_habit(e, seen)) is not None:
        return verdict
    fact = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps {fact} rows were mixed and no target", "targets mixed too")


@check("F69")
def risk_set_reversed(e: Evidence) -> Fired | Verdict:
    """A survival model orders people no better than chance, or the wrong way round.

    Fires when answers in rising order of a sort go into a running logarithm of sums, and flags of events were put into
    that order as well. Times that were computed in the step (negated), and rows that were turned round, are left alone.
    Fires as well when nothing is sorted, the batch holds numbers above 0 that run neither way, and flags multiply what
    comes of the sum.

    WARN risk-set-reversed: The running sum goes from the shortest time to the longest, so each event is set against
    those who left before it and not against those still at risk. Fix: argsort(descending=True) before logcumsumexp.
    WARN risk-set-reversed/not-sorted: The running sum goes over rows in the order in which they were drawn, so the
    risk set of each event is a random part of the batch. Fix: order = time.argsort(descending=True), and take log_risk
    and event in that order.
    """
    if (verdict := no_habit(e, seen := e.habits["F69"])) is not None:
        return verdict
    rows = next(iter(seen.values()))
    if rows < 0:
        return fires(
            f"in {len(seen)} steps a running sum went over {-rows} rows in no order of their times",
            "falling times",
            fault="risk-set-reversed/not-sorted",
        )
    return fires(f"in {len(seen)} steps a running sum went over {rows} rows in rising order", "falling times")


@check("F70")
def distances_unbounded(e: Evidence) -> Fired | Verdict:
    """The loss of a metric learner falls below zero and on without end, and its embeddings grow.

    Fires when a loss is the mean or the sum of differences of two distances that learn on both sides, with nothing that
    keeps it from falling (relu, clamp, softplus). Distances of what is bounded (of length 1, a tanh) are left alone.
    What is added to it does not count as a floor.

    WARN distances-unbounded: The loss is a difference of two distances, which falls for ever as all embeddings grow:
    the floor is missing. Fix: torch.relu(d_positive - d_negative + margin).mean().
    """
    if (verdict := no_habit(e, seen := e.habits["F70"])) is not None:
        return verdict
    return fires(f"in {len(seen)} steps the loss was a difference of distances", "one that ends at zero")


@check("F71")
def score_minimised(e: Evidence) -> Fired | Verdict:
    """The loss falls below zero and on, or to the least that it can be, and the model gets worse with training.

    Fires when the loss grows with log-probabilities of what was seen, with the overlap of answers and masks (Dice,
    IoU), or with cosines of answers and targets that are its only term. Gradients that are negated before the step are
    left alone. Weights that are no shares or flags make a
    policy's loss of it, which is F63.

    WARN score-minimised/likelihood: The loss is a log-probability itself, so what was seen becomes less likely: the
    minus is missing. Fix: loss = -log_prob.mean().
    WARN score-minimised/overlap: The loss is the overlap itself (Dice, IoU), so the masks are pushed apart. Fix: loss =
    1 - score.
    WARN score-minimised/cosine: The loss is the cosine of answers and targets itself, so they are turned away from each
    other. Fix: loss = 1 - cosine_similarity(answer, target).mean().
    """
    if (verdict := no_habit(e, seen := e.habits["F71"])) is not None:
        return verdict
    what = next(iter(seen.values()))
    fault = {"log": "likelihood"}.get(what, what)
    return fires(
        f"in {len(seen)} steps the loss grew with the {fault}",
        "a loss that falls with it",
        fault=f"score-minimised/{fault}",
    )


@check("F72")
def temperatures_differ(e: Evidence) -> Fired | Verdict:
    """A distilled student is unsure of everything, and worse than one that learned from labels alone.

    Fires when a divergence compares the softmax of one's logits as they are with that of the other one's, which were
    divided by more than 1. Attention is left alone. Or when a divergence at 3 or more is added to a
    cross-entropy with labels with a factor of 1 or less.

    WARN temperatures-differ: The teacher's logits are divided by a temperature ({by:.3g}) and the student's are
    not, so the student learns to be as unsure as the teacher was made. Fix: log_softmax(student / T) beside
    softmax(teacher / T), and T * T in front of it.
    WARN temperatures-differ/student: The student's logits are divided by a temperature ({by:.3g}) and the teacher's are
    not, so the student learns to be far too sure, and of what the teacher thinks of the other classes hardly anything
    is left. Fix: log_softmax(student / T) beside softmax(teacher / T), and T * T in front of it.
    WARN temperatures-differ/square: The divergence at a temperature of {by:.3g} has gradients 1 / T**2 as large, and
    nothing makes up for it, so the labels alone teach. Fix: kl_div(...) * T * T.
    """
    if (verdict := no_habit(e, seen := e.habits["F72"])) is not None:
        return verdict
    who, by = next(iter(seen.values()))
    if who == "square":
        what = f"in {len(seen)} steps a divergence at {by:.3g} was added with a factor of 1 or less"
        return fires(what, f"a factor of about {by * by:.3g}", fault="temperatures-differ/square", by=by)
    return fires(
        f"in {len(seen)} steps the {who}'s logits were divided by {by:.3g} and the other one's by nothing",
        "one temperature for both",
        fault="temperatures-differ" + ("/student" if who == "student" else ""),
        by=by,
    )


@check("F73")
def asked_for_the_noise(e: Evidence) -> Fired | Verdict:
    """A denoiser gives its input back, noise and all, and its loss falls to nearly nothing.

    Fires when noise that was drawn like a batch (randn_like) was added to it, the model was given the sum, and is asked
    for that same tensor.

    WARN asked-for-the-noise: The target of the denoiser is its noisy input itself (the same tensor, or the clean one
    that noise was added to in place), so it learns to change nothing. Fix: noisy = clean + sigma *
    torch.randn_like(clean), and loss = criterion(model(noisy), clean).
    """
    if (verdict := no_habit(e, seen := e.habits["F73"])) is not None:
        return verdict
    return fires(f"in {len(seen)} steps the target was the noisy input, {next(iter(seen.values()))}", "the clean one")


@check("D16")
def sampler_too_short(e: Evidence) -> Fired | Verdict:
    """The training loss falls to nothing at once, and the model knows a handful of rows.

    Fires when a WeightedRandomSampler has a twentieth as many weights as its data set has rows, or fewer, so it draws
    from the first rows only. A weight for each file of several rows is left alone.

    WARN sampler-too-short: WeightedRandomSampler has {weights} weights for {rows} rows, and a weight is one of a row:
    only the first {weights} rows are ever drawn. Fix: weights = class_weights[targets], one for each row.
    """
    if not e.restarted:
        return not_applicable("no DataLoader was begun in the watched steps")
    if e.short_sampler is None:
        return OK
    weights, rows = e.short_sampler
    return fires(f"{weights} weights, {rows} rows", "a weight for each row", weights=weights, rows=rows)


@check("D17")
def fractions_cut(e: Evidence) -> Fired | Verdict:
    """A regression answers 0 for everything, or in whole numbers.

    Fires when numbers with a fraction were cast to a whole type and are then the floating targets of a regression or
    of a binary loss. Classes that were made of numbers, and numbers that were computed or drawn in the step, are left
    alone.

    WARN fractions-cut: Targets between whole numbers were cast to a whole type, which cuts their fractions off, before
    they became floats again. Fix: torch.tensor(target, dtype=torch.float32), and no .long() on targets of a regression.
    """
    if (verdict := no_habit(e, seen := e.habits["D17"])) is not None:
        return verdict
    return fires(f"in {len(seen)} steps the targets had been cut to whole numbers", "targets as they are in the data")


@check("D18")
def gaps_as_targets(e: Evidence) -> Fired | Verdict:
    """A model of depths, or of other maps with gaps, answers too little everywhere.

    Fires when a regression's targets are pictures (N, C, H, W) that are the same least number in places (0, before any
    scaling) while all others lie well above it, spread out, and the mean is taken over all places. Of tables and series
    the batch must also hold flags of just these places. Targets that were NaN until they were filled in need no other
    sign. Whole numbers, maps that end at 1, losses under a mask, answers that were masked, and places where the input
    has nothing either are left alone. Targets of two to eight numbers for each place (boxes) are compared with the
    classes of the same step: are all of them 0 just where the class is 0, in nine of ten places or more? Of several
    pairs of numbers for each picture it is asked whether some are exactly (0, 0) and all others lie well above.

    WARN gaps-as-targets: {share:.0%} of the targets are one number apart from all others, as a sensor writes where it
    saw nothing, and the loss asks for them as for data. Fix: known = target > 0; ((answer - target).abs() *
    known).sum() / known.sum().
    WARN gaps-as-targets/filled: {share:.0%} of the targets were NaN, as what nobody knows, and were filled in, and the
    loss asks for them as for data. Fix: known = ~target.isnan(); (loss * known).sum() / known.sum(), with
    reduction="none".
    WARN gaps-as-targets/background: {share:.0%} of the places hold nothing, and the loss of the boxes asks for zeros
    there: their error is a mean over all places, of which few have a box. Fix: on = classes > 0;
    F.smooth_l1_loss(boxes[on], wanted[on]).
    WARN gaps-as-targets/points: {share:.0%} of the key points are (0, 0), as data sets write what nobody marked, and
    the loss draws all answers to that corner. Fix: visible = (wanted != 0).any(-1); (loss.sum(-1) * visible).sum() /
    visible.sum(), with reduction="none".
    """
    if (verdict := no_habit(e, seen := e.habits["D18"])) is not None:
        return verdict
    what, share = next(iter(seen.values()))
    were = {"": "such zeros", "filled": "NaN before", "background": "zeros at places of class 0", "points": "(0, 0)"}[
        what
    ]
    return fires(
        f"in {len(seen)} steps {share:.0%} of the targets were {were}",
        "a mask of what is known",
        fault="gaps-as-targets" + (f"/{what}" if what else ""),
        share=share,
    )


@check("S32")
def layer_made_anew(e: Evidence) -> Fired | Verdict:
    """A model learns less than it should, its answers to one input differ, and a layer is missing in the saved file.

    Fires when a weight that belongs to no model and no optimizer is used on what the model computed, is gone after the
    step, and another of its kind is there in the next. What is near a weight of the model is a copy that is adapted,
    and left alone.

    WARN layer-made-anew: A layer ({name}, {shape}) is made inside of forward, so each call has new random weights and
    nothing that it does is learned. Fix: Make it in __init__ (self.layer = nn.Linear(...)) and call it in forward.
    """
    if (verdict := no_habit(e, seen := e.habits["S32"])) is not None:
        return verdict
    name, shape = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps {name} had a weight {shape} that was gone afterwards",
        "the same weights in every step",
        name=name,
        shape=shape,
    )


@check("N34")
def clips_others(e: Evidence) -> Fired | Verdict:
    """One of two networks has gradients of any size, though all are clipped.

    Fires when before each step of an optimizer gradients are clipped, none of which it holds, and they are cleared
    before their own optimizer steps again.

    WARN clips-others: Before {kind} steps, gradients are clipped that it does not hold, and its own are not. Fix:
    Give clip_grad_norm_ the parameters that this optimizer holds.
    """
    if not e.of(Clip):
        return not_applicable("no gradients were clipped")
    pending: set[int] = set()  # clipped since the last step
    seen: list[Clipped] = []
    for event in e.events:
        if isinstance(event, Clip):
            pending |= event.ids
        elif isinstance(event, ZeroGrad):
            for one in seen:
                one.left -= event.ids
        elif isinstance(event, Step):
            held = e.optimizers[event.optimizer].ids
            for one in seen:
                one.used = one.used or bool(one.left & held)
                one.again = one.again or bool(one.ids & held)
            if pending:
                known = pending <= set().union(*(o.ids for o in e.optimizers))
                seen.append(
                    Clipped(event.optimizer, frozenset(pending), set(pending), not known or bool(pending & held))
                )
            pending = set()
    for number in {one.optimizer for one in seen}:
        vain = [one.again and not one.used for one in seen if one.optimizer == number]
        vain = vain[:-1] if len(vain) > STEPS else vain  # after the last nothing is seen
        if len(vain) >= STEPS and all(vain):
            kind = e.optimizers[number].kind.__name__
            return fires(
                f"in {len(vain)} steps what was clipped before {kind} stepped was none of its own",
                "its own gradients clipped",
                kind=kind,
            )
    return OK if seen else unknown("no step after a clipping was seen")


@check("N35")
def never_steps(e: Evidence) -> Fired | Verdict:
    """The loss is printed, differs from batch to batch, and does not fall; no weight changes.

    Fires when an optimizer cleared gradients after three backwards or more, and none ever stepped. Where a module
    clears them (a gradient is looked at, or an input is attacked) nothing is said. A program that only measures its
    gradients has such a loop as well.

    WARN never-steps: Gradients are computed and cleared {count} times, and no optimizer steps. Fix: optimizer.step()
    after loss.backward().
    WARN never-steps/not-finite: The gradients are NaN or infinite in each backward, and the program leaves out the
    step: nothing is ever learned. They are made in the backward pass (a square root, a norm or a distance at 0, a
    logarithm of 0, 0 times infinity). Fix: A small number under the root: x.clamp(min=1e-12).sqrt().
    """
    totals = [c.total for c in e.of(Clip) if c.total is not None]
    broken = sum(not math.isfinite(total) for total in totals)
    if (
        broken >= STEPS
        and not any(map(math.isfinite, totals[-2:]))
        and 2 * broken > len(totals)
        and len(e.of(Step)) < broken
        and not e.of(ScalerStep)
    ):
        what = f"in {broken} of {len(totals)} clips the norm was not finite, and {len(e.of(Step))} steps were made"
        return fires(what, "finite gradients, and a step after each", fault="never-steps/not-finite")
    if e.stepped:
        return OK
    if e.of(ScalerStep):
        return not_applicable("a GradScaler was asked for the steps")
    count = sum(event.had and not event.module for event in e.of(ZeroGrad))
    if e.moved_by_hand or all(event.module for event in e.of(ZeroGrad)):
        return not_applicable("no optimizer was used")
    if count < STEPS:
        return unknown("fewer than three steps were seen")
    return fires(f"{count} times gradients were cleared, and no optimizer stepped", "a step after each", count=count)


@check("F116")
def own_bootstraps(e: Evidence) -> Fired | Verdict:
    """Q-learning begins well, and then its values run away or swing, though there is a target network.

    Fires when the largest value of the next state, in a target, was answered by the weights that are trained, and there
    is a copy of it that the program calls a target, which no optimizer holds and nobody asks. Without one, Q-learning
    from its own values is a method, and is left alone.

    WARN own-bootstraps: The targets are made by the network that learns them, and {name} is never asked: each step
    moves its own targets. Fix: target = reward + gamma * target_net(next_states).max(1).values.
    """
    if (verdict := no_habit(e, seen := e.habits["F116"])) is not None:
        return verdict
    asked = {id(call.module()) for call in e.of(Call)}
    if not (idle := [m for m in owners.copies(e) if id(m) not in asked]):
        return OK
    what = f"in {len(seen)} steps targets hold the trained network's own largest value, and a copy of it is idle"
    return fires(what, f"values of the other {type(idle[0]).__name__}", name=next(iter(seen.values())))


@check("F117")
def same_slope_twice(e: Evidence) -> Fired | Verdict:
    """A physics-informed network solves its equation to the last digit, and the solution is wrong.

    Fires when the derivative of one answer by one input is taken more than once in a step, with a graph, and no
    derivative of that derivative.

    WARN same-slope-twice: The derivative of one answer by one input is taken {many} times in a step, and none of the
    derivative: where the second one was meant, the first stands again. Fix: u_xx = torch.autograd.grad(u_x.sum(), x,
    create_graph=True)[0].
    """
    if (verdict := no_habit(e, seen := e.habits["F117"])) is not None:
        return verdict
    many = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps one derivative was taken {many} times", "each once", many=many)


@check("F118")
def slope_of_rescaled(e: Evidence) -> Fired | Verdict:
    """A physics-informed network on rescaled inputs solves another equation: its solution has the wrong size or speed.

    Fires when derivatives are taken by a leaf that plain numbers made of an x, no number has multiplied them since, and
    they are added to what was made of that x itself.

    WARN slope-of-rescaled: The derivative is by a variable that is {factor:.3g} times x, and what it is added to is of
    x itself: the factor of the chain rule is missing. Fix: u_x = factor * u_z, u_xx = factor ** 2 * u_zz; or
    x.requires_grad_(), and rescale inside the model.
    """
    if (verdict := no_habit(e, seen := e.habits["F118"])) is not None:
        return verdict
    factor = next(iter(seen.values()))
    what = f"in {len(seen)} steps slopes by {factor:.3g} x were added to what is made of x"
    return fires(what, "slopes by x", factor=factor)


@check("F119")
def nothing_drawn(e: Evidence) -> Fired | Verdict:
    """A variational autoencoder rebuilds well, and what it makes of new draws is nothing.

    Fires when the loss holds the divergence of a posterior, and nothing else of it hangs on the logarithm of its
    variance; or when a draw of one row multiplies the spreads of all rows of a batch.

    WARN nothing-drawn: The variance has a price in the divergence and no other use: the decoder is given the means, and
    never sees what lies between them. Fix: z = mu + torch.randn_like(mu) * (0.5 * logvar).exp().
    WARN nothing-drawn/once: One draw multiplies the spreads of all {rows} rows, so all of a batch are moved alike. Fix:
    torch.randn_like(std), which has a number for each.
    """
    if (verdict := no_habit(e, seen := e.habits["F119"])) is not None:
        return verdict
    if rows := next(iter(seen.values())):
        what = f"in {len(seen)} steps a draw of one row multiplied {rows[0]} spreads"
        return fires(what, "a draw for each row", fault="nothing-drawn/once", rows=rows[0])
    return fires(f"in {len(seen)} steps the logarithm of a variance stood in the divergence alone", "draws by it")


@check("F122")
def read_before_the_end(e: Evidence) -> Fired | Verdict:
    """A reward model, or a classifier of conversations, learns nothing: all answers get much the same score.

    Looks at one place of each row that is taken out of what a model gave for the ids of a table. Fires when this is the
    place before the first token that also fills the rows up, and half of the rows go on after it; or when the rows are
    filled up on the left, and it is the number of their tokens less one.

    WARN read-before-the-end: Each row is read before its first padding token, and that token stands in the text too
    (the end-of-text of each turn): in {rows} of {all} rows there is more text behind it. Fix: The last place of the
    attention mask: attention_mask.sum(-1) - 1.
    WARN read-before-the-end/left: The rows are filled up on the left and read at the number of their tokens less one,
    which counts from the other side: in {rows} of {all} rows that is in the middle of the text. Fix: hidden[:, -1], or
    padding_side="right".
    """
    if len(left := e.habits["F122 left"]) >= STEPS:
        rows, every = next(iter(left.values()))
        what = f"in {len(left)} steps text stood behind the place that was read, in {rows} of {every} rows"
        return fires(what, "the last place", fault="read-before-the-end/left", rows=rows, all=every)
    if (verdict := no_habit(e, seen := e.habits["F122"])) is not None:
        return verdict
    rows, every = next(iter(seen.values()))
    what = f"in {len(seen)} steps text stood behind the place that was read, in {rows} of {every} rows"
    return fires(what, "nothing but padding behind it", rows=rows, all=every)


@check("F123")
def one_step_for_uneven_times(e: Evidence) -> Fired | Verdict:
    """A neural ODE fits its training series badly, and is wrong at all other times.

    Times are known by their numbers: they rise by steps whose spread is over a tenth of their mean. Fires when a state
    for each of them is put together, and of the times only two, or the mean of their steps, reached what has a
    gradient.

    WARN one-step-for-uneven-times: The {length} times lie unevenly (the steps differ by {uneven:.0%} of their mean),
    and the solver makes all steps with one size, so its states are those of other times. Fix: h = t[k + 1] - t[k] in
    each step.
    """
    if (verdict := no_habit(e, seen := e.habits["F123"])) is not None:
        return verdict
    length, uneven = next(iter(seen.values()))
    what = f"in {len(seen)} steps a state for each of {length} times was made with one step"
    return fires(what, "a step for each two times", length=length, uneven=uneven)


@check("F124")
def first_place_of_a_causal_network(e: Evidence) -> Fired | Verdict:
    """A classifier on top of a causal language model learns how common the classes are, and no more.

    Fires when all attention of the step is causal, all rows begin with the same token, and of what the network gave the
    first place alone is read.

    WARN first-place-of-causal: The network is causal and its first place is read, which has seen nothing but the token
    that all {rows} rows begin with: all get the same answer. Fix: hidden[torch.arange(len(hidden)), lengths - 1], the
    last place of each row.
    """
    if (verdict := no_habit(e, seen := e.habits["F124"])) is not None:
        return verdict
    rows = next(iter(seen.values()))[0]
    return fires(f"in {len(seen)} steps the first place of {rows} rows was read", "their last places", rows=rows)


@check("F125")
def drowned_term(e: Evidence) -> Fired | Verdict:
    """Of two tasks that share a network one is learned, and the other hardly gets better.

    Fires when a loss is the sum of a squared error and a classification's loss, with whatever weights, the first is a
    hundred times the second, its targets are tens or more as they were measured, and both reach weights in common.
    Losses whose slope is bounded, a regression that is learned already, and tasks with networks of their own are left
    alone.

    WARN drowned-term: The squared error is {high:.3g} of this loss and {small} {low:.2g}: the targets of the first have
    their own unit (about {raw:.2g}), so the weights that both share are moved by it alone. Fix: Bring the targets to
    mean 0 and spread 1 by numbers of the training data, or give the term a weight that makes both of one size.
    """
    if (verdict := no_habit(e, seen := e.habits["F125"])) is not None:
        return verdict
    high, small, low, raw = next(iter(seen.values()))
    what = f"in {len(seen)} steps MseLoss was more than a hundred times {small}, first {high:.3g} and {low:.2g}"
    return fires(what, "terms of about one size", high=high, small=small, low=low, raw=raw)
