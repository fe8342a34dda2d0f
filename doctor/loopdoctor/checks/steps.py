"""The order of a step: clear, backward, unscale, clip, step, and nothing put back. N1 to N3, N7,
N8, N28.

Footgun: what looks like disorder may be on purpose: GAN-like loops clear one optimizer while
another's gradients wait, SAM clears between its two backwards. So everything here is asked of the
optimizer that steps, and of its own tensors.
"""

import linecache
import math
from pathlib import Path

from torch import nn, optim

from loopdoctor import measures
from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.seen import BLIND, HABIT, clipped_away
from loopdoctor.evidence import (
    Backward,
    Clip,
    Event,
    Evidence,
    Gradients,
    ScalerStep,
    Step,
    ZeroGrad,
)
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown
from loopdoctor.watchers.weights.dropped import GRADIENT

LOGGING = 1e6  # a clip at so high a norm is there for the number it returns
ROUNDING = 1e-6  # of all gradients: what is left in fp32 of numbers that cancel each other
TABLES = (nn.Embedding, nn.EmbeddingBag)  # of which a step may leave most rows as they are


@check("N1")
def gradients_not_cleared(e: Evidence) -> Fired | Verdict:
    """Return the loss falls, then jumps or oscillates as if the learning rate were too high;
    gradient norms keep growing.

    An optimizer's gradients were still there when the next backward added to them, and nothing
    cleared them before its next step. Clearing anywhere in between is fine, and so is another
    optimizer's turn in between. What another optimizer's loss has left there is named as well,
    where the two losses are differentiated one after the other and the second asks nothing of the
    other optimizer's weights, or asks for the opposite (a generator's, a discriminator's). So are
    the gradients of an attack: a backward was made for the gradient of an input, which the program
    then read, and a later backward of the same step added to what it had left on the weights.

    ERROR or WARN gradients-not-cleared: zero_grad is missing (or clears other tensors): every step
    applies the sum of all gradients so far. Fix: Call optimizer.zero_grad() once per step, after
    optimizer.step() or before the first backward.
    WARN gradients-not-cleared/of-another-loss: One loss also pushes the weights of another: its
    backward leaves gradients on tensors of a second optimizer, which are not cleared before that
    one's own loss is added (an actor's loss that runs through the critic, a discriminator's that
    runs through the generator). Fix: Call zero_grad() of the second optimizer right before its own
    backward, or freeze its weights (detach the fakes) in the first loss.
    ERROR gradients-not-cleared/in-a-closure: zero_grad stands outside of the closure: {kind}
    evaluates it several times in each step, and the gradients of all evaluations add up. Fix: Begin
    the closure with optimizer.zero_grad().
    WARN gradients-not-cleared/of-an-attack: The backward that looks for an attack on the inputs
    leaves gradients on the weights as well, and the step is made of these and of the training
    loss's. Fix: Call optimizer.zero_grad() after the attack, right before the backward of the
    training loss; or take torch.autograd.grad(loss, inputs) for the attack.
    """
    steps = e.of(Step)
    if not steps or not e.of(Backward):
        return unknown("no backward followed by an optimizer step was seen")
    summed = [s for s in steps if s.summed]
    if len(summed) > 1:
        return fires(
            f"in {len(summed)} of {len(steps)} steps each evaluation of the closure added to "
            "the gradients of the last",
            "the gradients of one evaluation",
            fault="gradients-not-cleared/in-a-closure",
            kind=e.optimizers[summed[0].optimizer].kind.__name__,
        )
    if (attacked := _after_an_attack(e)) > 1:
        return fires(
            f"in {attacked} steps the gradients that an attack had left on the weights were "
            "still there",
            "gradients of the training loss alone",
            WARN,
            "gradients-not-cleared/of-an-attack",
        )
    foreign = [s for s in steps if s.foreign]
    if len(foreign) >= 3 and 2 * len(foreign) >= len(e.of(Step, optimizer=foreign[0].optimizer)):
        return fires(
            f"{len(foreign)} steps of {e.optimizers[foreign[0].optimizer].kind.__name__} used "
            "gradients that another "
            "optimizer's loss had left, with those of its own loss added",
            "gradients of one loss at a step",
            WARN,
            "gradients-not-cleared/of-another-loss",
        )
    stale = [s for s in steps if s.stale]
    again = len(steps) - len({s.optimizer for s in steps})
    if again < 1:
        return unknown("no optimizer stepped twice")
    if len(stale) < min(2, again):
        return OK
    later = [e.of(Step, optimizer=number)[1:] for number in range(len(e.optimizers))]
    never = any(each and all(s.stale for s in each) for each in later)
    first = e.of(Backward)[0].norm
    grown = (
        f"; the gradient norm went from {first:.3g} to {steps[-1].norm:.3g}"
        if first and steps[-1].norm
        else ""
    )
    return fires(
        f"{len(stale)} of {again} later steps still contained the gradients of the step "
        f"before{grown}",
        "gradients cleared once between one optimizer step and the next",
        ERROR if never else WARN,  # cleared now and then: a window of steps may be meant
    )


def _after_an_attack(e: Evidence) -> int:
    """Return steps that used what a backward for inputs had left, and what a later backward for the
    weights added to it.
    """
    found, left, both = 0, None, False
    for event in e.events:
        if isinstance(event, ZeroGrad) and event.had:
            left, both = None, False
        elif isinstance(event, Backward) and event.inputs:
            left = event.norm if event.round in e.habits["N1 attack"] else None
        elif isinstance(event, Backward):
            both = bool(left) and event.norm != left
        elif isinstance(event, Step):
            found, left, both = found + both, None, False
    return found


@check("N2")
def cleared_too_soon(e: Evidence) -> Fired | Verdict:
    """Nothing moves, or accumulation has no effect: the gradients are thrown away before the step
    uses them.

    Three forms: gradients that a backward made were cleared before the step that should use them;
    or they were cleared between micro-batches, so that only the last one counts; or between several
    losses of one step, and parts of the model that only the first of them trained are left without.
    SAM (the same batch again) and loops that put gradients back by hand (per-sample clipping) are
    told apart by the batch and by the gradients at the step. LBFGS asks its closure several times
    in a step, and each time begins with a clearing. Where copies of gradients are taken (A-GEM,
    PCGrad) nothing is said of the last two.

    ERROR cleared-before-step: zero_grad stands between backward and step: the gradients are erased
    before they are used. Fix: Move zero_grad() before the backward, or after the step.
    ERROR cleared-between-micro-batches: zero_grad is called for every micro-batch: only the last
    one of each step reaches the weights. Fix: Call zero_grad() once per optimizer step, not once
    per micro-batch.
    ERROR cleared-between-losses: zero_grad stands between the losses of one step: only the last of
    them reaches the weights, and what the others alone train ({name}) does not learn. Fix: Call
    zero_grad() once, before the first backward of the step.
    """
    if not e.of(Step):
        return unknown("no optimizer step was seen")
    lost = _lost_at_step(e)
    if lost:
        return fires(
            f"{lost} of {len(e.of(Step))} steps found no gradient, though a backward had made "
            "some since the last step",
            "the gradients of the backward are still there when the optimizer steps",
            fault="cleared-before-step",
        )
    if e.habits["N2"]:
        return not_applicable("gradients are taken out of the tensors before they are cleared")
    gaps, rounds = _cleared_gaps(e)
    usual = rounds >= 0.5 * len(e.of(Step))  # a bad batch dropped now and then is no habit
    if rounds and usual and (gaps >= 2 * rounds or rounds >= 2):
        return fires(
            f"gradients were cleared {gaps} times between the backwards of one step, in "
            f"{rounds} steps",
            "gradients add up over all micro-batches of a step",
            fault="cleared-between-micro-batches",
        )
    lost, rounds = _lost_parts(e)
    if lost and rounds >= max(2, 0.5 * len(e.of(Step))):
        return fires(
            f"{len(lost)} tensors had a gradient that was cleared, and none at the step, in "
            f"{rounds} steps",
            "the gradients of all losses add up",
            fault="cleared-between-losses",
            name=min(lost),
        )
    return OK if len(e.of(Step)) > 1 else unknown("only one optimizer step was seen")


def _lost_at_step(e: Evidence) -> int:
    """Return steps whose own gradients were cleared, by zero_grad or by hand, since a backward made
    them.
    """
    lost, made, cleared = 0, None, frozenset()
    alone, away = len(e.optimizers) == 1, clipped_away(e)
    for event in e.events:
        if isinstance(event, Backward):
            made, cleared = event.norm, frozenset()
        elif isinstance(event, ZeroGrad) and made:
            cleared |= event.ids if event.had else frozenset()
        elif isinstance(event, Step):
            mine = e.optimizers[event.optimizer].ids
            gone = made and not event.own and event.round not in away
            lost += bool(gone and mine and (cleared & mine or (alone and _covers(e, mine))))
            cleared -= mine
            made = None if alone else made
    return lost


def _covers(e: Evidence, ids: set[int]) -> bool:
    return {id(p) for p in e.trainable().values()} <= ids


def _cleared_gaps(e: Evidence) -> tuple[int, int]:
    """(gaps, rounds): backwards of one step that follow each other with a clearing in between, on
    different batches.

    A step that a GradScaler skipped is the end of its round too, and gradients that are not finite
    are rightly dropped.
    """
    gaps, rounds, here, last, cleared = 0, 0, 0, None, False
    since_last = False  # cleared since the last backward
    searches = any(issubclass(o.kind, optim.LBFGS) for o in e.optimizers)
    for event in e.events if not searches else ():
        if isinstance(event, Backward) and event.inputs:
            continue  # an attack on the inputs leaves gradients behind, which are rightly cleared
        if isinstance(event, Backward):
            if last is not None and cleared and _other_batch(last, event):
                here += 1
            last, cleared, since_last = event, False, False
        elif isinstance(event, ZeroGrad) and event.had and last is not None:
            cleared = since_last = last.norm is None or math.isfinite(last.norm)
        elif isinstance(event, ScalerStep) and not event.stepped:
            here, last, cleared = 0, None, False
        elif isinstance(event, Step):
            kept = (
                last is not None
                and not since_last
                and event.norm is not None
                and last.norm is not None
            )
            if here and kept and len(e.optimizers) == 1 and event.norm <= last.norm * 1.001:
                gaps, rounds = gaps + here, rounds + 1
            here, last, cleared = 0, None, False
    return gaps, rounds


def _lost_parts(e: Evidence) -> tuple[set[str], int]:
    """Tensors of the only optimizer whose gradient was cleared between two backwards and had not
    come back at the step, and in how many rounds.
    """
    if len(e.optimizers) != 1:
        return set(), 0
    names = {id(p): name for name, p in e.trainable().items() if id(p) in e.optimizers[0].ids}
    norms = {g.round: g.norms for g in e.of(Gradients)}
    lost, rounds, waiting, held, made = set(), set(), set(), set(), False
    for event in e.events:
        if isinstance(event, Backward):
            held, waiting = held | waiting, set()  # another backward came after the clearing
            made = not event.inputs
        elif isinstance(event, ZeroGrad) and made:
            waiting |= event.held
        elif isinstance(event, Step):
            now = norms.get(event.round, {})
            gone = {names[i] for i in held if i in names and now.get(names[i], 1.0) in (None, 0.0)}
            if gone and any(now.get(name) for name in names.values()):
                lost |= gone
                rounds.add(event.round)
            made, waiting, held = False, set(), set()
    return lost, len(rounds)


def _other_batch(a: Backward, b: Backward) -> bool:
    ids = [
        next((c.ids for c in x.calls if c.role == "model" and c.ids is not None), None)
        for x in (a, b)
    ]
    if ids[0] is None or ids[1] is None:
        marks = [
            next((c.mark for c in x.calls if c.role == "model" and c.mark is not None), None)
            for x in (a, b)
        ]
        if marks[0] is None or marks[1] is None:
            return False
        return not (marks[0].shape == marks[1].shape and bool((marks[0] == marks[1]).all()))
    return ids[0].shape != ids[1].shape or not bool((ids[0] == ids[1]).all())


@check("N3")
def does_not_move(e: Evidence) -> Fired | Verdict:
    """Gradients are there, the rate is above zero, and still some weights are exactly what they
    were.

    Looked at in fp32 tensors over three steps: not one element changed, or everything that the
    steps changed was put back afterwards. Rates of zero (warm-up), gradients of zero and what
    rounding leaves of zero (a bias in front of a normalisation), and embeddings with few rows in
    use are left out; so is what was put back after state_dict() had been asked for in several
    steps, as the clients of federated learning do.

    ERROR weights-do-not-move: The optimizer's step has no effect on these weights. Fix: Look at
    what the step is given (another copy, a patched step) and at what is copied into the model after
    it.
    ERROR or WARN weights-do-not-move/put-back: The weights are overwritten after each step (a
    reload, or a copy back from an average). Fix: Look at what the step is given (another copy, a
    patched step) and at what is copied into the model after it.
    WARN weights-do-not-move/back-to-the-start: Again and again the weights are put back to what
    they were at the start: something copies old weights into the model, for example from the target
    network, the wrong way round. Fix: Copy the other way:
    target.load_state_dict(online.state_dict()).
    WARN weights-do-not-move/drawn-anew: {name} is filled with random numbers in each step, so
    nothing is left of what the steps before have made of it. Fix: Draw it once, in __init__.
    WARN weights-do-not-move/rounded-in-place: {name} is overwritten with its rounded numbers in
    each step, so a step of the optimizer that is smaller than half a level is lost. Fix: Keep the
    weight, and round a copy in forward: w = weight + (round(weight) - weight).detach().
    """
    if len(drawn := e.habits["N3 drawn"]) >= 3 and len(drawn) == len(e.shown):
        name = next(iter(drawn.values()))
        what = f"in {len(drawn)} steps {name} was filled with random numbers"
        kept = "weights that keep what the steps have changed"
        return fires(what, kept, WARN, "weights-do-not-move/drawn-anew", name=name)
    rounded = e.habits["N3 rounded"]
    if len(rounded) >= 2 and (levels := e.habits["N3 levels"]):
        name = next(iter(levels.values()))
        what = (
            f"in {len(rounded)} steps {name} was given a few different numbers in place of its own"
        )
        return fires(
            what, "a copy that is rounded", WARN, "weights-do-not-move/rounded-in-place", name=name
        )
    tables = {id(e.embedding()), id(e.head())}
    tried: dict[str, list[float]] = {}
    for step in e.of(Step):
        for u in step.updates:
            sized = (
                u.gradient
                and math.isfinite(u.gradient)
                and u.gradient > ROUNDING * (step.own or 0.0)
            )
            # the rows in use are none of those that are looked at
            sized = sized and u.silent != 1.0
            if sized and u.lr > 1e-9 and u.dtype.itemsize >= 4:
                tried.setdefault(u.name, []).append(u.changed)
    tried = {name: shares for name, shares in tried.items() if len(shares) >= 3}
    if not tried:
        return unknown(
            "no fp32 tensor was stepped three times with a gradient and a rate above zero"
        )
    ps = e.parameters()
    stuck = [n for n, shares in tried.items() if max(shares) == 0.0 and id(ps.get(n)) not in tables]
    # once may be a new round of training
    often = [n for n in tried if n in ps and e.returned.get(n, 0) > 1]
    back = [n for n in often if max(tried[n]) > 0.5 and _as_at_start(e, n, ps[n])]
    rows = {n for n, p in ps.items() if id(p) in tables} | {
        n for n, m in e.owners().items() if isinstance(m, TABLES)
    }
    undone = [
        n
        for n, shares in tried.items()
        if max(shares) > 0.5 and {2, 3} <= e.as_before.get(n, set()) and n not in rows
    ]
    if (
        0 < 2 * len(undone) < len(tried)
        and not stuck
        and not back
        and not e.late
        and len(e.taken) < 2
    ):
        return fires(
            f"{len(undone)} of {len(tried)} fp32 tensors looked at ({undone[0]} ...) were "
            "before each step what they "
            "were before the last one",
            "weights that keep what the steps have changed",
            WARN,
            "weights-do-not-move/put-back",
        )
    now_and_then = [
        n for n, shares in tried.items() if max(shares) > 0.5 and e.returned.get(n, 0) > 1
    ]
    if (
        now_and_then
        and not stuck
        and 2 * len(now_and_then) >= len(tried)
        and not e.late
        and len(e.taken) < 2
    ):
        return fires(
            f"{e.returned[now_and_then[0]]} times {now_and_then[0]} was exactly what it was at "
            "the start, after steps "
            f"that had changed it, and so were {len(now_and_then)} of {len(tried)} tensors "
            "looked at",
            "weights that keep what the steps have changed",
            fault="weights-do-not-move/back-to-the-start",
            severity=WARN,
        )
    if not stuck and not back:
        return OK
    if not stuck and len(e.taken) > 1:
        return unknown(
            "the weights were taken by state_dict() before something was put back, as "
            "federated learning does"
        )
    name, how = (
        (stuck or back)[0],
        "no step changed" if stuck else "the steps changed, and something put back,",
    )
    return fires(
        f"{how} {len(stuck or back)} of {len(tried)} fp32 tensors looked at ({name} ...), with "
        "gradients and lr > 0",
        "every tensor with a gradient and a rate above zero moves",
        ERROR if stuck or len(e.loaded) > 1 else WARN,  # once is the end of a search for a rate
        "weights-do-not-move" if stuck else "weights-do-not-move/put-back",
    )


def _as_at_start(e: Evidence, name: str, p) -> bool:
    number, first = e.first[name]
    now = measures.strided(p)
    return number == id(p) and now.shape == first.shape and bool((now == first).all())


@check("N7")
def clipped_before_unscale(e: Evidence) -> Fired | Verdict:
    """With a GradScaler, clipping makes learning crawl: it saw norms tens of thousands of times too
    large.

    Fires when a finite clip was made under an enabled scaler before `unscale_`. max_norm=inf, for
    the log, is fine.

    ERROR clip-before-unscale: Gradients are clipped before unscale_, while they carry the
    GradScaler's factor, so unscaling afterwards leaves next to nothing. Fix: Call
    scaler.unscale_(optimizer) before clip_grad_norm_.
    """
    clips = [c for c in e.of(Clip) if c.limit < LOGGING]
    if not clips:
        return not_applicable("no gradient clipping was seen")
    wrong = [c for c in clips if c.scaled and not c.nothing]
    if not wrong:
        return OK
    scale = next((b.scale for b in e.of(Backward) if b.scale), None)
    if scale is not None and scale <= 1.0:
        return OK
    seen = next((c.total for c in wrong if c.total is not None and math.isfinite(c.total)), None)
    real = f"; it saw {seen:.4g}, the real norm was {seen / scale:.4g}" if seen and scale else ""
    return fires(
        f"{len(wrong)} of {len(clips)} clips were made on gradients still multiplied by the "
        f"loss scale{real}",
        "scaler.unscale_(optimizer) first, then the clip",
    )


@check("N8")
def clipped_at_wrong_time(e: Evidence) -> Fired | Verdict:
    """Clipping seems to do nothing, or accumulation comes out wrong: it runs before the gradients
    are complete.

    Fires when a finite clip stands where no backward has come since the last step, or when the same
    tensors are clipped after every micro-batch of a step. A second backward after a clearing (SAM)
    is another thing.

    ERROR clip-at-wrong-time: Gradients are clipped (clip_grad_norm_) {where}, so what the step
    applies is not the clipped gradient. Fix: Clip once, after the last backward of the step and
    right before optimizer.step().
    WARN clip-at-wrong-time/of-nothing: clip_grad_norm_ is given nothing that has a gradient, so it
    clips nothing: an iterator that was used up (filter, model.parameters() kept in a name), or the
    parameters of another model. Fix: Keep a list: params = [p for p in model.parameters() if
    p.requires_grad].
    """
    clips = [c for c in e.of(Clip) if c.limit < LOGGING]
    frozen = {id(p) for p in e.parameters().values() if not p.requires_grad}
    clips = [c for c in clips if not c.ids or not c.ids <= frozen]
    late = _behind_a_backward(e)
    if late and len(clips) >= 3 and all(c.nothing for c in clips) and len(e.of(Backward)) >= 3:
        what = f"all of {len(clips)} clips were given no tensor with a gradient"
        return fires(what, "the gradients of the step", WARN, "clip-at-wrong-time/of-nothing")
    early = micro = good = 0
    fresh: list[Clip] = []  # clips since the last backward or step
    backwards = 0  # since the last step
    for event in e.events:
        if isinstance(event, Clip) and event.limit < LOGGING:
            fresh.append(event)
            early += not backwards
        elif isinstance(event, ZeroGrad) and event.had and backwards:
            fresh = []
        elif isinstance(event, Backward):
            micro += sum(bool(backwards) and _clipped_later(e, event, c) for c in fresh)
            fresh, backwards = [], backwards + 1
        elif isinstance(event, (Step, ScalerStep)):
            good += bool(fresh) and backwards > 0
            if isinstance(event, ScalerStep) or len(e.optimizers) == 1:
                backwards = 0
            fresh = []
    if not early and not micro and not good:
        return not_applicable("no gradient clipping was seen")
    if micro >= 2 or (early >= 2 and not good):
        where = (
            "after single micro-batches" if micro >= 2 else "before the backward or after the step"
        )
        return fires(
            f"{max(micro, early)} clips stood {where}, {good} directly before a step",
            "one clip per step, between the last backward and the step",
            where=where,
        )
    return OK


def _behind_a_backward(e: Evidence) -> bool:
    """Whether most clips come after a backward, without a clearing in between."""
    fresh, late, every = False, 0, 0
    for event in e.events:
        if isinstance(event, Clip):
            late, every = late + fresh, every + 1
        elif isinstance(event, Backward):
            fresh = True
        elif isinstance(event, Step) or isinstance(event, ZeroGrad) and event.had:
            fresh = False
    return 2 * late > every


def _clipped_later(e: Evidence, backward: Event, clip: Clip) -> bool:
    """Whether the same tensors are clipped again before the step, or stepped: not those of another
    loss in the loop.
    """
    start = next(i for i, x in enumerate(e.events) if x is backward)
    for event in e.events[start:]:
        if isinstance(event, Clip) and event.ids & clip.ids:
            return True
        if isinstance(event, Step):
            return bool(e.optimizers[event.optimizer].ids & clip.ids) and len(e.optimizers) == 1
    return False


@check("N28")
def update_dropped(e: Evidence) -> Fired | Verdict:
    """Weight clipping, an average of weights or gradient clipping that was written down has no
    effect.

    Fires when arithmetic on weights or gradients, between a backward and the next forward, gave a
    tensor of the same shape that was never used by anything and is gone, at the same place in two
    steps. Norms and other numbers for a log are left alone, and so are copies and differences of
    weights.

    WARN update-dropped: The result of `{name}` on {what} is thrown away, and {what} stay as they
    are: the function gives a new tensor, and the name that it was given is only the loop's. Fix:
    Write into the tensor, under torch.no_grad(): {fix}.
    WARN update-dropped/adapted: Adapted weights (a weight minus a derivative) are computed and
    nothing is computed with them: the loss uses the weights as they were. Fix:
    torch.func.functional_call(model, adapted, (x,)).
    """
    if len(e.shown) < HABIT:
        return BLIND
    for (file, line, _, name), seen in e.dropped.items():
        if len({round for round, _ in seen}) < HABIT:
            continue
        kinds = frozenset().union(*(of for _, of in seen))
        what = "gradients" if kinds == {GRADIENT} else "weights"
        text = linecache.getline(file, line).strip()
        how = {
            "gradients": "p.grad.mul_(...), p.grad.clamp_(...)",
            "weights": "p.mul_(...).add_(...), p.clamp_(...)",
        }
        return fires(
            f"{len(seen)} results of {Path(file).name}:{line}"
            + (f" `{text[:60]}`" if text else "")
            + " were never used",
            "results that are used",
            name=name,
            what=what,
            fix=how[what] + ", or p.copy_(result)",
        )
    if len(seen := e.habits["N28"]) >= HABIT:
        return fires(
            f"in {len(seen)} steps {next(iter(seen.values()))} weights minus a derivative were "
            "never used",
            "results that are used",
            fault="update-dropped/adapted",
        )
    return OK
