"""Learning rates, schedules, and the optimizers that they are meant for: N5, N5b, N9, N11, S13, M1.

Footgun: a scheduler that is called rarely may be one per epoch, and one that is called often may be
sized so. A rate of zero at the start is a warm-up. So the severe verdicts rest on what the rates
were, not on how they came about.
"""

import math
from statistics import median

import torch
from torch import nn

from loopdoctor.check import Fired, check, fires
from loopdoctor.evidence import (
    Backward,
    Call,
    Entropy,
    Evidence,
    ScalerStep,
    Schedule,
    Step,
    Update,
    is_adapter,
    weight_of,
)
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown

EPOCHAL = {"StepLR", "MultiStepLR", "ExponentialLR", "MultiplicativeLR"}
SOON, VERY_SOON = 100, 50  # steps
LOW, AGAIN = 0.1, 3.0  # of the highest rate; of the lowest one
PASSES = 10  # over the data
LEAST_ROWS, WHOLE = 16, 1e-3  # evaluated; how far from a whole number of them
JUST_BEFORE = 3  # rounds
# how near a share is to that of the training rows, and how far from its opposite
LIKE, UNLIKE = 0.2, 0.3


def _by_round(e: Evidence) -> list[float]:
    """Return the highest rate of any optimizer in each round."""
    return [
        max((r for s in steps for r in s.rates), default=0.0) for steps in e.by_round(Step).values()
    ]


def _rising(rates: list[float]) -> bool:
    return len(rates) > 1 and rates[-1] > 1.05 * rates[0]


@check("N11")
def rate_is_zero(e: Evidence) -> Fired | Verdict:
    """Return steps are made and nothing changes, because the learning rate is zero.

    Fires when all rates of all optimizers were zero in three steps running: a schedule that has run
    out, a warm-up by integer division, a schedule that is never stepped. A warm-up that begins at
    zero is past it after one step. The rates of the steps after the watched ones are looked at as
    well: those that are zero, or less than a millionth of what they were, for a tenth of these
    steps and up to the last one.

    ERROR or WARN learning-rate-zero: The learning rate (lr) is zero: {why}. Fix: Look at the
    schedule's arguments (total steps, warm-up steps) and step it once per optimizer step.
    WARN learning-rate-zero/tiny: The learning rate (lr) has fallen to less than a millionth of what
    it was. Fix: Look at the schedule's arguments, and at how often it is stepped: those that count
    epochs fall too fast when they are stepped at every batch.
    """
    rates = _by_round(e)
    if len(rates) < 3:
        return unknown("fewer than three steps were seen")
    longest = here = 0
    for rate in rates:
        here = here + 1 if rate == 0 else 0
        longest = max(longest, here)
    if longest < 3:
        return OK
    scheduled = bool(e.of(Schedule))
    if rates[0] > 0:
        why = "the schedule has run out: it was built for fewer steps than are made"
    elif scheduled:
        why = (
            "the schedule gives zero (an integer division in the warmup, or far too long a warmup)"
        )
    elif any("initial_lr" in g for o in e.optimizers if o.object for g in o.object.param_groups):
        why = "a schedule that starts at zero was built but scheduler.step() is never called"
    else:
        why = "it was set to zero"
    return fires(
        f"learning rate 0 in {longest} steps running; rates seen: "
        f"{', '.join(f'{r:.2g}' for r in rates[:6])}",
        "a rate above zero, but for the first step of a warm-up and the very last one",
        ERROR if rates[-1] == 0 else WARN,  # a late start may be meant
        why=why,
    )


@check("N9")
def scheduler_rate(e: Evidence) -> Fired | Verdict:
    """Return the learning rate decays too fast: the scheduler is stepped for every micro-batch.

    Fires when one scheduler is stepped at least 1.5 times per step of its optimizer, or before the
    first step. Calls before the first backward (fast-forward on resume), several schedulers of one
    optimizer, and schedulers per epoch are left out. A warning: a scheduler may be sized in
    micro-batches. A rate that has reached zero within the first half of the steps watched, and
    stays there, is named as well, and so is one that a StepLR, MultiStepLR or ExponentialLR has
    made a hundred times smaller within the steps watched, or will have within two passes over the
    data and a hundred steps; where no loader tells of passes, within fifty steps, each on other
    data. Of a LambdaLR it is asked whether its factor is the learning rate itself and does not rise
    from there, neither in these steps nor, where its function can be asked, in later ones or for
    another group; and of a CosineAnnealingLR whether the rate has come down and goes up again, in
    the steps watched or after them. Of a warm-up it is asked whether it is longer than the run that
    the schedule was told; of ReduceLROnPlateau, whether what it is given is a share of the rows
    that were evaluated, and whether it is near the share of training rows that are right (mode
    "min") or wrong (mode "max"). That can be seen only where an epoch ends within the steps
    watched.

    WARN plateau-mode: ReduceLROnPlateau is given an accuracy and its mode is "min": each time the
    accuracy rises, it counts a step without progress, and lowers the rate when the model learns
    best. Fix: mode="max" for what should rise; or give it the validation loss.
    WARN plateau-mode/max: ReduceLROnPlateau is given an error rate and its mode is "max": it lowers
    the rate when the model learns best. Fix: mode="min" for what should fall; or give it the
    accuracy.
    WARN warm-up-outlasts-run: The warm-up takes {warm} steps and the run {steps}: the rate never
    reaches the value that it was given, and ends at {share:.2g} of it. Fix: Let the warm-up be a
    few hundredths of the steps of the run, both counted in optimizer steps.
    WARN scheduler-steps-too-often: The scheduler is stepped per micro-batch (inside gradient
    accumulation), so the learning rate decays that many times too fast. Fix: Call scheduler.step()
    once, right after optimizer.step().
    WARN scheduler-before-optimizer: The scheduler is stepped before the optimizer, so the first
    value of the schedule is skipped. Fix: Call scheduler.step() once, right after optimizer.step().
    WARN schedule-falls-fast: The learning rate falls to a {share} of what it was within {steps}
    steps: {kind} counts epochs in most recipes, and is stepped at every batch. Fix: Step it once
    per epoch, or give it step_size, milestones or gamma meant for single steps.
    WARN schedule-comes-back: The learning rate has come to its end and rises again:
    CosineAnnealingLR has made its T_max steps and goes back up. Fix: T_max is the number of
    scheduler.step() calls of the whole run: epochs * len(loader) where it is stepped at every
    batch.
    WARN schedule-absolute: The function of LambdaLR returns a learning rate; torch multiplies the
    optimizer's rate by it, so the rate is squared: {rate:.2g} in place of {base:g}. Fix: Return a
    factor (1 for the full rate), or give the optimizer lr=1.
    WARN schedule-ends-early: The schedule reaches zero too early: it was built for fewer steps than
    are made (num_training_steps counts optimizer steps). Fix: Give the scheduler the number of
    optimizer steps of the whole run, and step it once per optimizer step.
    """
    if (told := _plateau(e) or _long_warm_up(e)) is not None:
        return told
    begun, calls, steps, early = False, {}, 0, False
    for event in e.events:
        begun = begun or isinstance(event, Backward)
        if isinstance(event, ScalerStep) and not event.stepped or isinstance(event, Step):
            steps += 1
        elif isinstance(event, Schedule) and begun and not event.epochal:
            calls.setdefault(event.scheduler, []).append(event)
            early = early or not steps
    if not calls:
        return not_applicable("no scheduler was stepped")
    worst, ratio = None, 0.0
    for events in calls.values():
        index = events[0].optimizer
        made = len(e.of(Step, optimizer=index)) if index >= 0 else steps
        made += sum(not s.stepped for s in e.of(ScalerStep))
        if made and len(events) / made > ratio:
            worst, ratio = events, len(events) / made
    world = torch.distributed.get_world_size() if _distributed() else 1
    if steps < 2 and not early:
        return unknown("fewer than two optimizer steps were seen")
    many = ratio >= 1.5 and len(worst) >= 3 and not (world > 1 and abs(ratio - world) < 0.5)
    if not many and not early:
        return (
            OK if e.late else _ended_early(e) or _fell(e) or _came_back(e) or _squared(e) or OK
        )  # late, that may be the end of the run
    if not many:
        return fires(
            "scheduler.step() came before the first optimizer.step()",
            "one scheduler step after each optimizer step",
            fault="scheduler-before-optimizer",
        )
    backwards = len(e.of(Backward)) / max(1, len(e.of(Step)))
    return fires(
        f"{ratio:.2g} scheduler steps per optimizer step ({backwards:.2g} backwards per "
        "optimizer step)",
        "one scheduler step after each optimizer step",
    )


def _plateau(e: Evidence) -> Fired | None:
    """Return a share of the rows that were evaluated, and whether it is of those that are right or
    of those that are wrong.

    A model that learns fast is soon far from where it was. So a share is compared with the training
    rows of the last rounds before it, and one share that speaks for the mode is enough to say
    nothing.
    """
    told = []
    for given in (s for s in e.of(Schedule) if s.mode in ("min", "max") and s.metric is not None):
        share, accuracy = _share(given.metric, given.evaluated), _right_before(given.round, e)
        if share is None or accuracy is None:
            continue
        of_right, of_wrong = abs(share - accuracy), abs(share - (1 - accuracy))
        if min(of_right, of_wrong) >= LIKE or max(of_right, of_wrong) <= UNLIKE:
            continue
        if (of_right < of_wrong) == (given.mode == "max"):
            return None
        told.append((given, accuracy))
    if not told:
        return None
    given, accuracy = told[0]
    return fires(
        f"in mode {given.mode!r} it was given {given.metric:.4g}, a whole share of the "
        f"{given.evaluated} rows "
        f"that were evaluated; of the training rows {accuracy:.2g} are right",
        'mode="max" for an accuracy, mode="min" for an error or a loss',
        fault="plateau-mode" if given.mode == "min" else "plateau-mode/max",
    )


def _right_before(number: int, e: Evidence) -> float | None:
    """Return the share of training rows that were right in the last rounds before this one, where
    one of them was measured.
    """
    recent = [
        n.fed.right
        for n in e.of(Entropy)
        if n.fed is not None and number - JUST_BEFORE <= n.round <= number
    ]
    right = [share for share in recent if share is not None]
    return sum(right) / len(right) if right else None


def _share(metric: float, rows: int) -> float | None:
    """Return the share of rows that a number is, as such or in hundredths; None where it is none,
    or all or nothing.
    """
    for share in (metric, metric / 100):
        count = share * rows
        if rows >= LEAST_ROWS and 0 < share < 1 and abs(count - round(count)) < WHOLE:
            return share
    return None


def _long_warm_up(e: Evidence) -> Fired | None:
    told = [s.warm_up for s in e.of(Schedule) if s.warm_up is not None]
    for warm, steps in told:
        if 0 < steps <= warm:
            return fires(
                f"the schedule was told {warm} steps of warm-up in a run of {steps}",
                "a warm-up that is a part of the run",
                fault="warm-up-outlasts-run",
                warm=warm,
                steps=steps,
                share=steps / warm,
            )
    return None


def _ended_early(e: Evidence) -> Fired | None:
    """Return the rate was above zero, and is zero in the last two steps of few: the schedule was
    built for fewer.

    More zeros than two are N11.
    """
    rates = _by_round(e)
    above = sum(rate > 0 for rate in rates)
    if (
        not rates
        or rates[0] <= 0
        or len(rates) - above != 2
        or 2 * above > len(rates)
        or any(rates[above:])
    ):
        return None
    return fires(
        f"the learning rate reached 0 after {above} of {len(rates)} steps",
        "a rate above zero until the last step",
        fault="schedule-ends-early",
    )


def _fell(e: Evidence) -> Fired | None:
    """To a hundredth within the steps watched, by a scheduler whose settings are usually in
    epochs.
    """
    kinds = {s.kind for s in e.of(Schedule)} & EPOCHAL
    rates = _by_round(e)
    if not kinds or len(rates) < 3 or not 0 < rates[-1] < 0.01 * rates[0]:
        return _will_fall(e, len(rates))
    return fires(
        f"the learning rate went from {rates[0]:.2g} to {rates[-1]:.2g} in {len(rates)} steps",
        "a rate that lasts for the run",
        fault="schedule-falls-fast",
        share=f"{round(rates[0] / rates[-1])}th",
        steps=len(rates),
        kind=min(kinds),
    )


def _came_back(e: Evidence) -> Fired | None:
    if not any(s.past for s in e.of(Schedule)):
        return None
    rates = _by_round(e)
    at = min(range(len(rates)), key=rates.__getitem__, default=0)
    before, after = max(rates[: at + 1], default=0.0), rates[-1] if rates else 0.0
    if not rates[at] < LOW * before or after < max(AGAIN * rates[at], LOW * before):
        return None
    return fires(
        f"the learning rate went from {before:.2g} to {rates[at]:.2g} in {at + 1} steps, and "
        f"was {after:.2g} in step "
        f"{len(rates)}",
        "a rate that falls to the end of the run",
        fault="schedule-comes-back",
    )


def _will_fall(e: Evidence, steps: int) -> Fired | None:
    """To a hundredth before the data were seen ten times, if the schedule goes on as it began."""
    batches = max((batches for batches, *_ in e.restarted.values()), default=0)
    for number in {s.scheduler for s in e.of(Schedule)}:
        calls = [s for s in e.of(Schedule) if s.scheduler == number]
        falls = calls[0].hundredth
        soon = min(SOON, PASSES * batches) if batches else VERY_SOON if _other_data(e) else 0
        if falls is not None and falls <= soon and len(calls) >= max(3, steps - 1):
            of = f"a pass over the data has {batches}" if batches else "each step had other data"
            return fires(
                f"stepped {len(calls)} times in {steps} steps, it makes the rate a hundredth "
                f"after {falls} steps, and "
                f"{of}",
                "a rate that lasts for the run",
                fault="schedule-falls-fast",
                share="hundredth",
                steps=falls,
                kind=calls[0].kind,
            )
    return None


def _other_data(e: Evidence) -> bool:
    """Each step's first call of a model was given something else."""
    first = {}
    for call in e.of(Call, role="model", grad=True):
        if (mark := call.ids if call.mark is None else call.mark) is not None:
            first.setdefault(call.round, mark)
    given = list(first.values())
    same = [a.shape == b.shape and bool((a == b).all()) for a, b in zip(given, given[1:])]
    return len(given) >= 3 and not any(same)


def _squared(e: Evidence) -> Fired | None:
    """Return a LambdaLR whose factor is the rate, at once or after a warm-up.

    One of 1 / lr steps begins so too, and rises.
    """
    for number in {
        s.optimizer for s in e.of(Schedule) if s.kind == "LambdaLR" and s.optimizer >= 0
    }:
        rates = [s.rates[0] for s in e.of(Step, optimizer=number) if s.rates]
        optimizer = e.optimizers[number].object
        base = optimizer.param_groups[0].get("initial_lr", 0.0) if optimizer is not None else 0.0
        if not 0 < base <= 0.1 or len(rates) < 3:
            continue
        factors = [float(rate) / float(base) ** 2 for rate in rates]
        peaks = [s.peak for s in e.of(Schedule, optimizer=number) if s.peak is not None]
        # or what it will rise to is known
        flat = not peaks and abs(factors[0] - 1) < 0.01 and min(factors) > 0.1
        if (flat or any(0.9 < peak / float(base) < 1.01 for peak in peaks)) and max(factors) < 1.01:
            return fires(
                f"the rate is at most {max(rates):.3g}: the optimizer's {base:g} times factors "
                f"up to {base:g}",
                "a factor near 1 where the full rate is meant",
                fault="schedule-absolute",
                rate=float(base) ** 2,
                base=base,
            )
    return None


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@check("S13")
def misplaced_in_muon(e: Evidence) -> Fired | Verdict:
    """Return a Muon run learns worse than AdamW: embeddings, the output head or vectors are in
    Muon's group.

    Looked at in optimizers whose class is named after Muon. Groups that are marked as AdamW's
    (use_muon=False, an algorithm of another name) are left out, and classes that sort by themselves
    are not judged.

    ERROR or WARN embedding-in-muon: Muon orthogonalises updates of tensors that are not maps
    between hidden layers (embedding, head or vectors). Fix: Select by module, not by ndim == 2:
    give embeddings, head and vectors to AdamW.
    """
    found, kinds = (
        [],
        [o for o in e.optimizers if "muon" in o.kind.__name__.lower() and o.object is not None],
    )
    if not kinds:
        return not_applicable("no Muon optimizer")
    tables = {id(weight_of(m)) for _, m in e.modules() if isinstance(m, nn.Embedding)}
    tables |= {id(t) for t in (e.embedding(), e.head()) if t is not None}
    names = {id(p): n for n, p in e.parameters().items()}
    sorts = False
    for o in kinds:
        keys = {
            key.lower() for group in (o.object.defaults, *o.object.param_groups) for key in group
        }
        sorts = sorts or any(word in o.kind.__name__.lower() for word in ("adam", "aux", "hybrid"))
        # arguments of the optimizer for the rest
        sorts = sorts or any("adam" in key or "betas" in key for key in keys)
        for group in o.object.param_groups:
            said = " ".join(v.lower() for v in group.values() if isinstance(v, str))
            if group.get("use_muon") is False or any(
                word in said for word in ("adamw", "lion", "sgd")
            ):
                if "match_rms_adamw" not in said or group.get("use_muon") is False:
                    continue
            for p in group["params"]:
                aside = o.object.state.get(p, {}).get("use_muon") is False
                if not aside and (id(p) in tables or p.dim() < 2):
                    found.append(names.get(id(p), f"a tensor of shape {tuple(p.shape)}"))
    if not found:
        return OK
    if sorts:
        return unknown("this optimizer may sort its parameters by itself")
    return fires(
        f"{len(found)} tensors in Muon that are no hidden matrices: {', '.join(found[:3])}",
        "hidden matrices in Muon; embeddings, head, norms and biases in AdamW",
        ERROR if any(o.kind is getattr(torch.optim, "Muon", None) for o in kinds) else WARN,
    )


@check("N5b")
def muon_rate(e: Evidence) -> Fired | Verdict:
    """Muon hardly moves the weights at AdamW's learning rate, or tears them apart at its own.

    torch's Muon has two conventions: "original" wants about 0.02, "match_rms_adamw" wants AdamW's
    rate. Compared are the convention and the highest rate seen, once it no longer rises.

    WARN muon-learning-rate: Muon's learning rate is that of the other convention: {size}. Fix: Use
    lr about 0.02 with 'original', or adjust_lr_fn='match_rms_adamw' with AdamW's rate.
    """
    kinds = [
        (i, o)
        for i, o in enumerate(e.optimizers)
        if "muon" in o.kind.__name__.lower() and o.object is not None
    ]
    if not kinds:
        return not_applicable("no Muon optimizer")
    judged = False
    for index, o in kinds:
        group = o.object.param_groups[0]
        # torch's name, ours; None is 'original'
        convention = group.get("adjust_lr_fn", group.get("adjust", ...))
        rates = [max(s.rates) for s in e.of(Step, optimizer=index) if s.rates]
        if not rates or _rising(rates[len(rates) // 2 :]) or convention is ...:
            continue
        judged = True
        matched = convention == "match_rms_adamw"
        top = max(rates)
        ups = [u for s in e.of(Step, optimizer=index) for u in s.updates if u.lr]
        size = median(u.rms for u in ups) / 0.2 if ups else None
        if (matched and top >= 0.01) or (not matched and 0 < top < 2e-3):
            want = "AdamW's rates (1e-5 to 3e-3)" if matched else "rates around 0.02"
            equal = f"; each step is like AdamW's at {size:.2g}" if size else ""
            return fires(
                f"Muon at lr {top:.2g} with convention {convention or 'original'!r}{equal}",
                f"{want} for this convention",
                size="far too large" if matched else "too small",
            )
    return OK if judged else unknown("a rate that still rises, no step, or a Muon of another kind")


@check("N5")
def update_size(e: Evidence) -> Fired | Verdict:
    """Return the loss jumps about or explodes, or does not move at all: steps are far too large or
    too small.

    Looked at in the matrices of the later half of the steps that were measured: a change above 0.3
    of the tensor's own norm per step, or one that AdamW would make at a rate below 1e-7, or of
    SGD's below a millionth of the norm. Adapters and tensors that began at zero are left out: what
    is new is small, and a step is a large part of it. So are matrices of fewer than 16 numbers: one
    of them may cross zero.

    WARN update-too-large: The learning rate (lr) is far too large (too high) for these weights.
    Fix: Lower the learning rate by a factor of ten or more.
    WARN update-too-small: The learning rate (lr) is far too small (too low) for these weights. Fix:
    Raise the learning rate by a factor of ten or more.
    """
    rounds = sorted(e.by_round(Step))
    measured = sorted({s.round for s in e.of(Step) if s.updates})
    later = set(measured[len(measured) // 2 :])
    new = {
        u.name
        for s in e.of(Step)
        for u in s.updates
        if u.relative == float("inf") or "trainable_tokens" in u.name
    }
    ups: list[Update] = [
        u
        for s in e.of(Step)
        if s.round in later
        for u in s.updates
        if len(u.shape) >= 2 and math.prod(u.shape) >= 16 and u.gradient and u.lr > 0
        if not is_adapter(u.name) and u.name not in new
    ]
    if any(issubclass(o.kind, torch.optim.LBFGS) for o in e.optimizers):
        return not_applicable("a line search chooses the size of a step")
    if not ups or len(rounds) < 3:
        return unknown("no matrix was seen in three steps with a gradient and a rate above zero")
    share, rms = median(u.relative for u in ups), median(u.rms for u in ups)
    known = {u.name for u in ups}
    first = [
        u.relative
        for s in e.of(Step, round=rounds[0])
        for u in s.updates
        if u.name in known and u.lr > 0
    ]
    # weights that grew a hundredfold at once change little afterwards
    jump = median(first) if first else 0.0
    large = 0.3 < share < float("inf") or jump > 2.0
    groups = [
        group for o in e.optimizers if o.object is not None for group in o.object.param_groups
    ]
    ended = any(
        float(group.get("initial_lr") or 0.0) > 10 * float(group.get("lr") or 0.0)
        for group in groups
    )
    plain = all(issubclass(o.kind, torch.optim.SGD) for o in e.optimizers) and not ended
    small = (
        not large and (plain or rms / 0.2 < 1e-7) and not _rising(_by_round(e)) and 0 < share < 1e-6
    )
    if not large and not small:
        return OK
    return fires(
        f"a step changes the matrices by {max(share, jump) if large else share:.2g} of their norm "
        f"(lr {max(_by_round(e)):.2g})",
        "roughly 1e-4 to 1e-1",
        fault="update-too-large" if large else "update-too-small",
    )


@check("M1")
def muon_overwrites_its_momentum(e: Evidence) -> Fired | Verdict:
    """Muon learns worse with weights in bf16 than in fp32, and its momentum seems to have no
    effect.

    Fires for torch's own Muon with nesterov=False on weights of bf16, where the installed torch
    overwrites the momentum (its bf16 copy of the buffer is the buffer itself, and is divided in
    place): a step on a small matrix is tried.

    WARN momentum-overwritten: torch.optim.Muon with nesterov=False normalises the momentum of bf16
    weights in place, so each step keeps a direction and forgets its size. Fix: nesterov=True, or
    weights in fp32 under autocast.
    """
    kind = getattr(torch.optim, "Muon", None)
    mine = [o for o in e.optimizers if kind is not None and o.kind is kind and o.object is not None]
    if not mine:
        return not_applicable("no Muon of torch's")
    if not e.of(Step):
        return unknown("no step was seen")
    groups = [
        group for o in mine for group in o.object.param_groups if not group.get("nesterov", True)
    ]
    halves = [p for group in groups for p in group["params"] if p.dtype is torch.bfloat16]
    if not halves or not _overwrites(kind):
        return OK
    return fires(
        f"{len(halves)} matrices in bfloat16, nesterov=False, torch {torch.__version__}",
        "a momentum that is kept from step to step",
        WARN,
    )


def _overwrites(kind: type) -> bool:
    """Whether this torch does: the first momentum of a gradient g is (1 - momentum) g, or g, but
    never of norm 1.
    """
    weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    weight.grad = 8 * torch.eye(4, dtype=torch.bfloat16)
    optimizer = kind([weight], lr=0.0, momentum=0.5, nesterov=False, weight_decay=0.0)
    optimizer.step()
    held = [
        t
        for t in optimizer.state[weight].values()
        if isinstance(t, torch.Tensor) and t.shape == weight.shape
    ]
    return bool(held) and float(held[0].float().norm()) < 1.5
