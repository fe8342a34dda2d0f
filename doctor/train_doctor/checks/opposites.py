"""Settings that are easily taken for their opposite: S26, F45, F46, F50 to F52, N31 and N32.

Each is a number with a meaning that is the other way round elsewhere: the share that is kept or dropped, the new part
or the old one, the largest or the least.

Footgun: every one of them may be meant. So they are warnings, and only values that hardly anybody means are named.
"""

import math

import torch
from torch import nn

from train_doctor import fed
from train_doctor.check import Fired, check, fires
from train_doctor.checks.losses import judged
from train_doctor.evidence import Backward, Entropy, Evidence, Schedule, Step
from train_doctor.finding import OK, Verdict, not_applicable, unknown

MOMENTUM, SHARE, SMOOTHING = 0.9, 0.8, 0.5  # from here on the opposite was meant
SEEN, RATIO, APART = 64, 3.0, 1.5  # rows; of the counts of classes; of their weights
EVEN, ALIKE = 1.5, 1.25  # of counts; the ratio of a loss's weights over that of a sampler's
MANY, NEAR, FAR = 4, 0.2, 0.6  # classes; logarithms that may, and must, lie between weights and what was expected
CUT = 0.25  # share of answers at their ends
COMPARED = 3  # batches


STANDSTILL = 2e-4  # share of a new batch in running statistics


@check("S26")
def argument_reversed(e: Evidence) -> Fired | Verdict:
    """Evaluation is noisy from batch to batch, or training is far slower than that of the same network elsewhere.

    Looks at arguments of torch whose meaning is the other way round in other libraries: the momentum of a batch
    normalisation, of which torch takes the share of the new batch; the probability of a dropout, which torch takes for
    the share that is dropped; the two betas of Adam; the smoothing of labels. Fires from 0.9, 0.8 and 0.5 on, and below
    a momentum of 0.0002.

    WARN argument-reversed/momentum: The batch normalisation forgets: momentum={value:g} is torch's share of the NEW
    batch, so the running statistics are those of the last batch or two. Fix: momentum={other:g} (TensorFlow's {value:g}
    is {other:g} here).
    WARN argument-reversed/standstill: The running statistics of the batch normalisation hardly move: momentum={value:g}
    is the share of the new batch, so in evaluation they are those of the start, 0 and 1. Fix: momentum=0.1.
    WARN argument-reversed/dropout: p={value:g} is the share that a dropout drops: of ten numbers {left} are left. Fix:
    If {value:g} was to be kept, p={other:g}.
    WARN argument-reversed/betas: The betas of {name} are in the wrong order: the first one, {value:g}, is of the mean
    of the gradients and is the smaller one. Fix: betas=(0.9, 0.999).
    WARN argument-reversed/forgets-nothing: momentum={value:g} forgets nothing: SGD adds up all gradients since the
    start and runs away. Fix: momentum=0.9.
    WARN argument-reversed/smoothing: label_smoothing={value:g} gives the right class less than all others together.
    Fix: label_smoothing={other:g}, the share that is taken away.
    """
    for name, m in e.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats and m.momentum is not None:
            if MOMENTUM <= m.momentum < 1 and m.training:
                return _reversed("momentum", f"{name} has momentum={m.momentum:g}", "about 0.1", m.momentum)
            if m.momentum < STANDSTILL and m.training:
                return _reversed("standstill", f"{name} has momentum={m.momentum:g}", "about 0.1", m.momentum)
        if isinstance(m, nn.modules.dropout._DropoutNd) and SHARE <= m.p < 1 and m.training:
            return _reversed("dropout", f"{name} has p={m.p:g}", "up to 0.5", m.p, left=round(10 * (1 - m.p)))
    for o in e.optimizers:
        for group in o.object.param_groups if o.object is not None else ():
            betas, momentum = group.get("betas"), group.get("momentum")
            if issubclass(o.kind, torch.optim.SGD) and isinstance(momentum, int | float) and momentum >= 1:
                return _reversed("forgets-nothing", f"momentum = {momentum:g}", "below 1", momentum)
            if isinstance(betas, tuple | list) and len(betas) == 2 and all(isinstance(b, float) for b in betas):
                if betas[0] > betas[1] and betas[0] > 0.95:
                    return _reversed("betas", f"betas = {tuple(betas)}", "(0.9, 0.999)", betas[0], name=o.kind.__name__)
    smoothed = [n.smoothing for n in e.of(Entropy) if n.smoothing >= SMOOTHING]
    if smoothed:
        return _reversed("smoothing", f"label_smoothing={smoothed[0]:g}", "about 0.1", smoothed[0])
    return OK if e.models else unknown("no model was seen")


def _reversed(fault: str, observed: str, expected: str, value: float, **blanks) -> Fired:
    return fires(observed, expected, fault=f"argument-reversed/{fault}", value=value, other=1 - value, **blanks)


@check("F45")
def weights_reversed(e: Evidence) -> Fired | Verdict:
    """The rare class is never predicted, and the weights that were to help make it worse.

    Counts the classes of some batches and lays them beside the weights that the loss was given. Fires when the more
    common classes have the larger weights, and both differ clearly. Weights beside balanced batches are left alone,
    unless a WeightedRandomSampler balances them by much the same weights, and these do not undo each other. Four
    weights or more, the same in all batches, are laid in the order of the counts as well: do they fit then, and as they
    stand do not?

    A pos_weight for each of several labels is laid beside their odds: where it is what they are, it is upside down.

    WARN weights-reversed: The loss counts the common classes more than the rare ones: weights {weights} for {counts}
    rows. Fix: weight = rows / (classes * counts), and pos_weight = negatives / positives.
    WARN weights-reversed/twice: Rare classes are made up for twice: the sampler draws them as often as the common ones,
    and the loss counts them {ratio:.3g} times as much on top. Fix: One of the two: leave weight= or pos_weight out, or
    take shuffle=True in place of the sampler.
    WARN weights-reversed/order: The weights are those of the classes in another order: weights {weights} for {counts}
    rows, as a list by size (Counter.most_common, value_counts) gives them. Fix: By number of the class:
    torch.bincount(targets, minlength=classes).
    WARN weights-reversed/odds: Each label's pos_weight is its positives over its negatives, so what is rare counts less
    still: weights {weights} for {counts} positives of {rows} rows. Fix: pos_weight = negatives / positives.
    """
    if e.weighed_labels is not None and _as_odds(*e.weighed_labels):
        weights, hits, rows = e.weighed_labels
        told = [", ".join(f"{x:.3g}" for x in each[:4]) for each in (weights, hits)]
        return fires(
            f"pos_weight {told[0]} for labels with {told[1]} positives in {rows} rows",
            "more weight for what is rare",
            fault="weights-reversed/odds",
            weights=told[0],
            counts=told[1],
            rows=rows,
        )
    if not e.weighed:
        return not_applicable("no weights of classes were seen")
    for name, (weights, counts) in e.weighed.items():
        there = [(w, c) for w, c in zip(weights, counts) if w > 0 and c > 0]
        if sum(counts) < SEEN or len(there) < 2:
            continue
        ws, cs = (torch.tensor(each, dtype=torch.float64).log() for each in zip(*there))
        if len(e.weights_seen.get(name, ())) == 1 and (found := _twice(e, ws, cs) or _in_order(ws, cs)):
            told = [", ".join(f"{x:.3g}" for x in each[:6]) for each in zip(*there)]
            return fires(
                f"{name}: weights {told[0]} for classes of {told[1]} rows in the batches that were counted",
                "what makes up for what is rare, once and in its place",
                fault=f"weights-reversed/{found}",
                ratio=float((ws.max() - ws.min()).exp()),
                weights=told[0],
                counts=told[1],
            )
        if float(cs.max() - cs.min()) < math.log(RATIO) or float(ws.max() - ws.min()) < math.log(APART):
            continue
        a, b = ws - ws.mean(), cs - cs.mean()
        if float((a * b).sum() / (a.norm() * b.norm())) > 0.7:
            told = [", ".join(f"{x:.3g}" for x in each[:4]) for each in zip(*there)]
            return fires(
                f"{name}: weights {told[0]} for classes of {told[1]} rows in the batches that were counted",
                "smaller weights for more common classes",
                weights=told[0],
                counts=told[1],
            )
    return OK


def _twice(e: Evidence, ws: torch.Tensor, cs: torch.Tensor) -> str:
    """Whether a sampler has evened the classes out, by weights that differ about as much as those of the loss."""
    ratio, drawn = float(ws.max() - ws.min()), math.log(max(e.drawn_unevenly, 1.0))
    even = float(cs.max() - cs.min()) < math.log(EVEN)
    if e.drawn_classes and len(e.drawn_classes) == len(ws):  # a loss that undoes what the sampler did is calibrated
        often = torch.tensor(e.drawn_classes, dtype=torch.float64)
        if float(((often - often.mean()) * (ws - ws.mean())).sum()) < 0:
            return ""
    alike = min(ratio, drawn) > math.log(RATIO) and abs(ratio - drawn) < math.log(ALIKE)
    return "twice" if even and alike else ""


def _as_odds(weights: list[float], hits: list[int], rows: int) -> bool:
    """Whether rare labels have the weight that is their odds, in the mean of those that were seen."""
    there = [(math.log(w), math.log(h / (rows - h))) for w, h in zip(weights, hits) if w > 0 and 0 < h < rows]
    if len(there) < 2 or sum(hits) < SEEN:
        return False
    odds = sum(odd for _, odd in there) / len(there)
    apart = sum(w - odd for w, odd in there) / len(there)
    fits = abs(apart) < math.log(APART) and all(abs(w - odd) < math.log(RATIO) for w, odd in there)
    return odds < -math.log(RATIO) and fits and len(set(weights)) > 1


def _in_order(ws: torch.Tensor, cs: torch.Tensor) -> str:
    """Whether the weights, or their squares, go with one over the counts when both are sorted, and only then."""
    if len(ws) < MANY or float(cs.min()) < math.log(SEEN) or float(cs.max() - cs.min()) < math.log(RATIO):
        return ""
    a, b = ws - ws.mean(), cs - cs.mean()
    for power in (1.0, 0.5):
        as_they_are = float((a + power * b).abs().max())
        in_order = float((a.sort().values + power * b.sort(descending=True).values).abs().max())
        if in_order < NEAR and as_they_are > FAR:
            return "order"
    return ""


@check("F46")
def own_row_left_in(e: Evidence) -> Fired | Verdict:
    """A contrastive loss falls a little and stays, and what was learned separates little.

    Looks at matrices that a cross-entropy is given. Fires when the diagonal of a square one is one and the same number,
    the largest of each row, and no row has itself as its target, at each call; or when all targets are one column, and
    what a row has there stands in one more of its columns.

    WARN own-row-left-in: Each row of similarities still holds the row's similarity to itself, the largest there is, and
    the loss pushes it down in vain. Fix: similarity.fill_diagonal_(float("-inf")), or masked_fill with torch.eye.
    WARN own-row-left-in/again: The positive of each row stands among its negatives too, so the loss asks for both at
    once: the queue was filled with these keys before the loss was made, or the bank of memory holds them. Fix: The
    loss first, then queue.push(keys); or leave the row's own index out of the negatives.
    """
    twice = [n for calls in judged(e).values() for n in calls if n.name == "cross_entropy" and n.fed.only is not None]
    if twice and all(n.fed.again for n in twice):
        what = f"in {len(twice)} matrices {twice[0].fed.shape} column {twice[0].fed.only:g} stands in another one again"
        return fires(what, "positives that are no negatives", fault="own-row-left-in/again")
    square = [n for calls in judged(e).values() for n in calls if len(n.fed.shape) == 2 and n.name == "cross_entropy"]
    square = [n for n in square if n.fed.shape[0] == n.fed.shape[1] > 3]
    if not square:
        return not_applicable("no cross-entropy of a square matrix was seen")
    if not all(n.fed.own for n in square):
        return OK
    return fires(
        f"the diagonals of {len(square)} matrices {square[0].fed.shape} hold the largest number of each row",
        "no similarity of a row to itself",
    )


@check("F50")
def target_in_inputs(e: Evidence) -> Fired | Verdict:
    """The training loss and the evaluation's fall to nearly nothing, and in use the model is no good.

    Lays the target of a loss, one number or class in a row, beside each column that the model is given. Fires when a
    column is the target, but for a factor and a constant, in each batch that was looked at; or when the last of three
    columns or more is the first of several values to come, and none is the second.

    WARN target-in-inputs: The target is among the inputs: column {column} of {shape} is what the loss asks for, so
    nothing else is learned. Fix: Take that column out of what the model is given.
    WARN target-in-inputs/first: The first value that is to be forecast stands in the input: the window of the target
    begins too early, and all that is forecast is late by one. Fix: target = series[start + window : ...].
    """
    if not e.leaks:
        return not_applicable("no target of one number in a row was seen beside columns of numbers")
    column, shape, first = next(iter(e.leaks.values()))
    if column is None or len(e.leaks) < COMPARED or any(column != other for other, *_ in e.leaks.values()):
        return OK
    if first:
        return fires(
            f"column {column} of the input {shape} is the first value of the target, in {len(e.leaks)} batches",
            "a target that begins after the input",
            fault="target-in-inputs/first",
        )
    return fires(
        f"column {column} of the input {shape} is the target, in {len(e.leaks)} batches",
        "inputs that are known before the target is",
        column=column,
        shape=shape,
    )


@check("F51")
def class_ignored(e: Evidence) -> Fired | Verdict:
    """One class is never predicted, though it has rows in the data and an output in the model.

    Fires when a cross-entropy over whole rows of the input ignores a class that the model has an output for, and
    rows of that class came by. Text and pictures, where padding and background have a class, are left alone.

    WARN class-ignored: ignore_index={index} leaves out a class: {there} of {rows} rows are of it, and none of them
    counts. Fix: Leave ignore_index at -100, and mark rows without a label by -100.
    """
    found = [(index, there, rows) for index, there, rows in e.left_out.values() if 0 < there < rows]
    if not found:
        return not_applicable("no class is ignored")
    index, there, rows = found[0]
    if there < 3:
        return OK
    return fires(
        f"{there} of {rows} rows have the class {index}, which is ignored",
        "an ignored number that is no class",
        index=index,
        there=there,
        rows=rows,
    )


@check("F52")
def answers_cut(e: Evidence) -> Fired | Verdict:
    """A regression or a classifier learns from a few rows only, and most of its answers are one of two numbers.

    Fires when what a loss is given was cut by a clamp and at least a quarter of it lies at the ends, at each call.

    WARN answers-cut: {share:.0%} of the answers are cut by a clamp before the loss, and what is cut has no gradient.
    Fix: Give the loss the answers as they are (or through a sigmoid or a tanh), and clamp where they are used.
    """
    calls = [n for losses in judged(e).values() for n in losses if n.fed.makers[:1] == ["Clamp"]]
    calls = [n for n in calls if n.name in (*fed.PLAIN, *fed.BINARY)]
    if not calls:
        return not_applicable("no loss was given what a clamp gave")
    shares = [n.fed.cut or 0.0 for n in calls]
    if min(shares) < CUT:
        return OK
    share = sum(shares) / len(shares)
    return fires(f"{share:.0%} of the answers lie at the ends of a clamp", "answers that are not cut", share=share)


@check("N31")
def rates_made_alike(e: Evidence) -> Fired | Verdict:
    """The weights of a pretrained part are soon destroyed, though its group was given a small learning rate.

    Fires when the groups of an optimizer began with rates that differ by a half or more, and had one and the same rate
    in every step.

    WARN rates-made-alike: The groups of {name} were given different learning rates, {began}, and all step with
    {rate:.3g}: something writes one rate into all of them. Fix: Multiply each group's own rate: group["lr"] =
    group["initial_lr"] * factor.
    """
    several = [(i, o) for i, o in enumerate(e.optimizers) if len(o.began) > 1]
    if not several:
        return not_applicable("no optimizer with several groups")
    for index, o in several:
        low, high = min(o.began), max(o.began)
        rates = [s.rates for s in e.of(Step, optimizer=index) if len(s.rates) == len(o.began)]
        alike = all(max(each) > 0 and max(each) - min(each) <= 1e-3 * max(each) for each in rates)
        if 0 < low and high >= 1.5 * low and len(rates) >= 3 and alike:
            began = " and ".join(f"{rate:.3g}" for rate in sorted(set(o.began))[:3])
            return fires(
                f"rates {began} at first, and {float(rates[-1][0]):.3g} in all {len(o.began)} groups at each step",
                "rates that keep their ratio",
                name=o.kind.__name__,
                began=began,
                rate=float(rates[-1][0]),
            )
    return OK


@check("N32")
def plateau_upside_down(e: Evidence) -> Fired | Verdict:
    """The learning rate is cut again and again while the loss falls well.

    Fires when a ReduceLROnPlateau with mode="max" is given the training loss, or its mean since the last time.

    WARN plateau-upside-down: ReduceLROnPlateau waits for the loss to RISE (mode="max"), so it takes each step of
    progress for a bad one. Fix: mode="min" for a loss; "max" is for an accuracy.
    """
    given = [s for s in e.of(Schedule) if s.metric is not None]
    if not given:
        return not_applicable("no ReduceLROnPlateau was stepped")
    losses: list[float] = []
    for event in e.events:
        if isinstance(event, Backward) and event.value is not None:
            losses.append(event.value)
        elif isinstance(event, Schedule) and event.metric is not None and losses:
            near = [losses[-1], sum(losses) / len(losses), sum(losses)]
            if event.mode == "max" and any(math.isclose(event.metric, x, rel_tol=1e-4) for x in near):
                return fires(
                    f'it was given {event.metric:.4g}, which is the loss, with mode="max"', 'mode="min" for a loss'
                )
            losses = []
    return OK


@check("N33")
def optimizer_made_anew(e: Evidence) -> Fired | Verdict:
    """Adam or momentum behave as if they had just begun, in every step: progress is slow and noisy.

    Fires when optimizers with a memory were made at least three times for the same weights, and none made more than one
    step. Plain SGD has nothing to forget.

    WARN optimizer-made-anew: {name} is made anew for every step, so its running means never hold more than one
    gradient. Fix: Make it once, before the loop.
    """
    if len({s.round for s in e.of(Step)}) < 3:
        return unknown("fewer than three steps were seen")
    made: dict[tuple, list[int]] = {}
    for index, o in enumerate(e.optimizers):
        group = o.object.param_groups[0] if o.object is not None else {}
        if "betas" in group or group.get("momentum") or "rho" in group or "alpha" in group:
            made.setdefault((o.kind, frozenset(o.ids)), []).append(index)
    for (kind, _), several in made.items():
        steps = [len(e.of(Step, optimizer=index)) for index in several]
        if len(several) >= 3 and max(steps) == 1:
            return fires(
                f"{len(several)} optimizers {kind.__name__} for the same weights, one step each",
                "one optimizer for all steps",
                name=kind.__name__,
            )
    return OK


@check("S30")
def one_layer_many_times(e: Evidence) -> Fired | Verdict:
    """A model has far fewer parameters than it should, and more layers hardly help.

    Fires when a ModuleList or Sequential holds one and the same module with weights at all of its places, three or
    more. Weights that are shared by name (ALBERT, a loop over one layer) are left alone.

    WARN one-layer-many-times: {name} holds one layer {times} times, and not {times} layers: [layer] * {times} repeats a
    reference. Fix: nn.ModuleList([make_layer() for _ in range({times})]).
    """
    if not e.models:
        return unknown("no model was seen")
    for name, m in e.modules():
        if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 2:
            parts = [part for part in m._modules.values() if part is not None]
            if len({id(p) for p in parts}) == 1 and any(p.requires_grad for p in parts[0].parameters()):
                times = len(parts)
                return fires(f"{times} places of {name}, one layer", "a layer for each", name=name, times=times)
    return OK
