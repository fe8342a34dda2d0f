"""Teachers, reference models, averages, and what else should stay as it is: F6, F7, F9, S12, N12,
N14, N29.

A teacher is a model that is called in the loop and not trained. Nothing in the loss shows that it
is noisy, or that it is the student itself.

Footgun: an average of the student (EMA) is a teacher that moves, and its noise may be meant. The
other half of a GAN, which an optimizer of its own steps, is no teacher.
"""

import itertools
import math

import torch
from torch import Tensor, nn

from loopdoctor import measures, owners, replays
from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.seen import HABIT
from loopdoctor.checks.trainables import moved
from loopdoctor.evidence import Backward, Call, Evidence, Gradients, Step
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown

NOISE = 1e-3  # of the standard deviation of the logits
EXACT = 2e-6  # how near to ln 2 a loss is that no gradient ever moved
FEW = 3  # steps
SMALL = 64  # numbers of a tensor
# trained tensors whose names fit best; cosine of an average's way and the way to its twin
TWINS, STRAIGHT = 8, 0.8


@check("F6")
def noisy_teacher(e: Evidence) -> Fired | Verdict:
    """Distillation or preference training is noisy, and the teacher's loss is not the same twice.

    Asks each teacher the first batch twice, without gradients: the answers must agree. A teacher is
    a model that is called where the student learns, in at least half of the steps; one that was
    shown once and left is none. Differing answers mean live dropout, so the teacher was left in
    train mode. A teacher that changes during the run (an average of the student, as in Mean
    Teacher) is noisy on purpose, and left alone.

    ERROR or WARN teacher-not-deterministic: The teacher (or reference model) is in train mode, so
    its dropout makes other targets at every call. Fix: Call teacher.eval() before the loop, and
    after anything that calls .train() on a module that holds it.
    """
    teachers = {id(t): t for t in owners.teaching(e)}
    if not teachers:
        return not_applicable("no teacher or reference model")
    found = {
        number: what for number, what in e.probes.get("teachers", {}).items() if number in teachers
    }
    if not found:
        return unknown("the teacher's call could not be repeated")
    for number, (gap, deviation, before) in found.items():
        if not gap > NOISE * deviation:  # NaN is F5's
            continue
        teacher = teachers[number]
        if not all(torch.equal(a, b) for a, b in zip(before, replays.sample(teacher))):
            continue  # an average of the student
        live = sum(
            m.p > 0 and m.training
            for m in teacher.modules()
            if isinstance(m, nn.modules.dropout._DropoutNd)
        )
        return fires(
            f"the same batch twice: logits differ by up to {gap:.3g}, at a standard deviation "
            f"of {deviation:.3g}; "
            f"{live} dropouts are live in the {type(teacher).__name__}",
            "the same answer twice",
            ERROR if teacher.training else WARN,  # dropouts alone are woken on purpose
        )
    return OK


@check("S12")
def teacher_in_train_mode(e: Evidence) -> Fired | Verdict:
    """Return the teacher has dropout and is in train mode.

    Only where the replay of F6 was not possible: where it was, it has shown whether anything is
    noisy. A teacher inside the model that is trained is found by its answers: what a live dropout
    gave without gradients is the target of a loss, and the weights on the way neither train nor
    move.

    WARN teacher-in-train-mode: The teacher (or reference model) is in train mode, so its dropout is
    live at every call. Fix: Call teacher.eval() before the loop.
    WARN teacher-in-train-mode/inside: The targets of the loss come through a live dropout: the
    teacher is a part of the model, and model.train() puts all parts in train mode. Fix: Call
    teacher.eval() after each model.train(), or give the model a train() of its own that does.
    """
    noisy = list(e.habits["S12"].values())
    if len(noisy) >= FEW and not owners.teaching(e) and all(map(_fixed, noisy)):
        what = (
            f"in {len(noisy)} steps targets were made by {len(noisy[0])} fixed layers after "
            "a live dropout"
        )
        return fires(what, "no dropout", fault="teacher-in-train-mode/inside")
    if not e.teachers:
        return not_applicable("no teacher or reference model")
    if not e.of(Backward):
        return unknown("no backward was seen, so whatever was called is no teacher yet")
    tried = e.probes.get("teachers", {})
    for teacher in owners.teaching(e):
        gap = tried.get(id(teacher), (None,))[0]
        live = [
            m
            for m in teacher.modules()
            if isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0
        ]
        called = [c for c in e.of(Call, role="teacher") if c.module() is teacher]
        if gap is None and live and called:
            return fires(
                f"{len(live)} dropouts of the {type(teacher).__name__} are in train mode, p = "
                f"{live[0].p:g}",
                "0",
            )
    return OK


def _fixed(weights: list) -> bool:
    """Whether there are some, and none trains or has moved since it was met."""
    now = [(weight(), version) for weight, version in weights]
    return bool(now) and all(
        w is not None and not w.requires_grad and w._version == v for w, v in now
    )


def _storages(module: nn.Module, trainable: bool = False, held: set[int] | None = None) -> set[int]:
    """Of its parameters; of those that train; or of those of them that are held, where some are."""
    ps = [p for p in module.parameters() if p.requires_grad or not trainable]
    ps = [p for p in ps if id(p) in held] if held and any(id(p) in held for p in ps) else ps
    return {
        measures.values_of(p).untyped_storage().data_ptr()
        for p in ps
        if p.numel() and p.device.type != "meta"
    }


@check("F7")
def reference_aliases_policy(e: Evidence) -> Fired | Verdict:
    """Return the reference changes with the policy: KL stays 0, DPO's loss stays at 0.6931, rewards
    are 0.

    Fires when a reference or teacher shares storage with weights that train: it is the same object,
    a shallow copy, or was filled with load_state_dict(assign=True). Frozen weights may be shared,
    which is how the reference of a LoRA policy is made, and a target network inside the model does
    not train where no optimizer holds it. A second view of the weights that never sees the batch
    that is learnt (evaluation, sampling) gives a warning only.

    ERROR or WARN reference-aliases-policy: The reference is the policy itself (no copy, or a
    shallow one): it moves with every step, so the two never differ. Fix: Make it
    copy.deepcopy(model).eval().requires_grad_(False) before training, or load it again.
    WARN reference-aliases-policy/in-part: Part of the teacher are weights that are being trained,
    so the teacher changes with the student. Fix: Make it
    copy.deepcopy(model).eval().requires_grad_(False) before training, or load it again.
    """
    if not e.of(Backward):
        return unknown("no backward was seen")
    learning = {id(m): m for c in e.of(Call) if c.grad and (m := c.module()) is not None}.values()
    # a loss without logits calls the backbone, an evaluation the whole: one model
    idle = [m for m in e.models if not any(_related(m, called) for called in learning)]
    idle = idle if len(idle) < len(e.models) else []
    ours = {s for m in e.models if m not in idle for s in _storages(m, True, e.optimized())}
    # a shallow copy seems to be in the optimizer
    references = [t for t in e.teachers if t not in e.models] + idle
    same = [t for t in e.teachers if t in e.models and _storages(t, trainable=True)]
    for c in e.of(Call):  # seen as a part of the model, because it shares its parameters
        module = c.module()
        if (
            not c.grad
            and module is not None
            and not any(_related(module, m) for m in (*e.models, *references))
        ):
            references.append(module)
    if not references and not same:
        return not_applicable("no teacher or reference model")
    for r in same + references:
        theirs = _storages(r)
        shared = len(theirs & ours)
        if shared:
            most = shared >= len(ours) / 2
            return fires(
                f"{shared} of {len(ours)} trainable tensors of the model share storage with the "
                f"{type(r).__name__} used as a reference",
                "0",
                ERROR if most and (r in e.teachers or _asked_the_same(e, r)) else WARN,
                "reference-aliases-policy" if most else "reference-aliases-policy/in-part",
            )
    return OK


def _asked_the_same(e: Evidence, reference: nn.Module) -> bool:
    """Whether it was given a batch, without gradients, that the model was given with them."""
    asked = [
        c.ids for c in e.of(Call) if not c.grad and c.module() is reference and c.ids is not None
    ]
    learnt = [c.ids for c in e.of(Call) if c.grad and c.ids is not None]
    return any(a.shape == b.shape and bool(torch.equal(a, b)) for a in asked for b in learnt)


def _related(a: nn.Module, b: nn.Module) -> bool:
    return any(m is b for m in a.modules()) or any(m is a for m in b.modules())


@check("F9")
def inference_teacher(e: Evidence) -> Fired | Verdict:
    """RuntimeError: Inference tensors cannot be saved for backward. To work around you can make a
    clone ...

    Fires on that message when the weights themselves are ordinary: then a teacher's output, made
    under torch.inference_mode, met something that learns (a temperature, a projection).

    ERROR inference-mode-teacher: Outputs of a call under torch.inference_mode are multiplied with
    something that learns, and such tensors cannot be kept for backward. Fix: Call the teacher under
    torch.no_grad() in place of inference_mode, or use outputs.clone().
    """
    if "Inference tensors cannot be saved" not in e.complaint:
        return OK if e.of(Backward) else unknown("no backward was seen")
    calls = [c for c in e.of(Call) if c.inference]
    return fires(
        f"backward needs an inference tensor; {len(calls)} model calls were made under "
        "inference_mode",
        "teacher outputs made under torch.no_grad()",
    )


@check("N14")
def constant_ln2(e: Evidence) -> Fired | Verdict:
    """DPO's loss stays at 0.6931 and the rewards at 0, that of IPO where it began, a reranker's at
    ln(candidates).

    Fires when the loss is ln 2 to the last digit at each step after the first, although weights
    were updated before. A healthy run is there at its first step only, and, however low its rate,
    leaves by more than rounding. Of another preference loss (IPO, a hinge), when it stays as it is
    and the differences of policy and reference are the same. Of lists, when all candidates of each
    have one score and lists have several.

    ERROR constant-ln2: Policy and reference give the same log-probabilities (the reference is the
    policy, or its adapter was not switched off), or beta is 0: the preference loss sees no
    difference. Fix: Keep an independent copy as reference (or model.disable_adapter() around its
    forward), and beta above 0.
    ERROR constant-ln2/same-scores: The chosen and the rejected text of each pair get one and the
    same score, so the preference loss sees no difference: what the head reads is in the part that
    both share. Fix: Read the last place of each text: hidden[torch.arange(len(hidden)),
    attention_mask.sum(1) - 1].
    ERROR constant-ln2/same-lists: All candidates of a list get one and the same score, so the loss
    sees no difference: what the head reads is in the part that all of them share. Fix: Read the
    last place of each text: hidden[torch.arange(len(hidden)), attention_mask.sum(1) - 1].
    """
    rounds = {r: sum(b.value or math.nan for b in bs) for r, bs in e.by_round(Backward).items()}
    same = len(e.habits["N14 same"]) > 1
    # beta is 0
    dead = same or all(norm in (0.0, None) for g in e.of(Gradients) for norm in g.norms.values())
    moved = [
        s
        for s in e.of(Step)
        if max(s.rates, default=0) > 0 and (dead or any(u.changed > 0 for u in s.updates))
    ]
    updated = [s.round for s in moved]
    later = [v for r, v in rounds.items() if updated and r > min(updated)]
    if len(later) < 2:
        return unknown("fewer than two steps after the first update")
    if len(lists := _after(updated, e.habits["N14 lists"])) >= HABIT:
        what = (
            f"in {len(lists)} steps {lists[0][1]} scores of each of {lists[0][0]} lists "
            "were the same"
        )
        return fires(what, "scores that differ", fault="constant-ln2/same-lists")
    values = [later[0] / k for k in (1, len(e.of(Backward, round=0)) or 1)]
    still = max(later) - min(later) <= EXACT * max(1.0, abs(later[0]))
    if (
        still
        and abs(later[0]) > EXACT
        and len(margins := _after(updated, e.habits["N14 margins"])) >= HABIT
    ):
        what = (
            f"the loss was {later[0]:.6g} at {len(later)} steps after an update, and in "
            f"{len(margins)} steps "
        )
        return fires(
            what + "the margins of policy and reference were the same", "margins that come apart"
        )
    if not any(abs(v - math.log(2)) < EXACT for v in values) or max(later) - min(later) > EXACT:
        return OK
    return fires(
        f"the loss was {later[0]:.6f} = ln 2 at {len(later)} steps after an update",
        "a loss that leaves ln 2 after the first update",
        fault="constant-ln2/same-scores" if same else "constant-ln2",
    )


def _after(updated: list[int], seen: dict) -> list:
    """Return what was seen after weights were updated."""
    return [fact for number, fact in seen.items() if number > min(updated)]


@check("N29")
def average_without_buffers(e: Evidence) -> Fired | Verdict:
    """Return the average of the weights (EMA) is far worse than the model itself, in eval mode
    only.

    Looks at batch normalisations whose weight is averaged in place into another one's. Fires when
    the running mean of the model moved in the watched steps, and that of the average stayed exactly
    as it was. An average in train mode, and one of torch's AveragedModel (whose update_bn comes at
    the end), are left alone.

    WARN average-without-buffers: The average of the model has its parameters only: the running
    statistics of its batch normalisations ({name}) stay where they began. Fix: Copy the buffers as
    well: for e, b in zip(ema.buffers(), model.buffers()): e.copy_(b).
    """
    if not e.averages:
        return not_applicable("no batch normalisation is averaged into another")
    still = []
    for name, average in e.averages.items():
        mine, other = average.began
        moved = not torch.equal(mine, average.mine.running_mean)
        if moved and not average.other.training and torch.equal(other, average.other.running_mean):
            still.append(name)
    if not still or len(still) < len(e.averages):
        return OK
    return fires(
        f"{len(still)} running means of the average are as they were, those of the model have "
        "moved",
        "statistics that follow",
        name=still[0],
    )


@check("N12")
def frozen_moved(e: Evidence) -> Fired | Verdict:
    """Weights that should stay as they are drift.

    Fires when a frozen parameter changed between the first backward and the end. In an optimizer
    that means it was frozen after it had a gradient, and is stepped with what is left of it (an
    error); outside of one it may be a codebook that the loop keeps on purpose. An average is left
    alone: what goes straight towards a tensor that trains, of the same shape, whose name ends
    alike. The statistics of a batch normalisation whose weights are frozen are looked at as well.

    ERROR frozen-moved/stepped: Frozen weights (requires_grad=False) change: they were frozen after
    a backward and the optimizer still has their gradient or momentum. Fix: Freeze before the
    optimizer is built, and set the gradients of what is frozen to None.
    WARN frozen-moved/statistics: The layers are frozen, and their batch normalisation is in train
    mode: it goes on averaging its running mean and variance, so the frozen part changes. Fix: Put
    the frozen part in eval mode, and again after each model.train(). If its statistics should
    follow the new data, this is right.
    WARN frozen-moved/written: Frozen weights (requires_grad=False) change: something other than the
    optimizer writes to them. Fix: If it is no average that is meant to move, look for what writes
    to them (copy_, load_state_dict).
    """
    if not e.stepped or not e.first:
        return unknown("no optimizer step was seen")
    # an average may be in the optimizer and never get a gradient: no step writes to it
    live = set().union(*(o.live for o in e.optimizers))
    every, mine = e.parameters(), e.optimized() & live
    shared = {measures.values_of(p).data_ptr() for p in e.trainable().values()}
    thawed = {n for g in e.of(Gradients) for n in g.norms}  # layers may take turns
    frozen = {
        n: p for n, p in every.items() if n in e.frozen_at_start - thawed and not p.requires_grad
    }
    frozen = {
        n: p for n, p in frozen.items() if p.data_ptr() not in shared and id(p) == e.first[n][0]
    }
    drifted = [n for n, p in frozen.items() if p.is_floating_point() and moved(e, n)]
    drifted = [n for n in drifted if id(every[n]) in mine or _more_than_rounding(e, n)]
    drifted = _without_averages(e, drifted, mine)
    if not drifted and (moving := _statistics(e, thawed)):
        return fires(
            f"{len(moving)} normalisations whose weights are frozen have counted more batches "
            f"({moving[0]} ...)",
            "statistics that stay as they are where the weights do",
            fault="frozen-moved/statistics",
        )
    if not drifted:
        return OK if frozen else not_applicable("nothing is frozen")
    held = [n for n in drifted if id(every[n]) in mine]
    return fires(
        f"{len(drifted)} of {len(frozen)} frozen tensors that were followed changed in "
        f"{len(e.of(Step))} steps "
        f"({(held or drifted)[0]})",
        "0",
        fault="frozen-moved/stepped" if held else "frozen-moved/written",
    )


def _statistics(e: Evidence, thawed: set[str]) -> list[str]:
    """Batch normalisations with frozen weights, in a model that trains others, whose statistics are
    updated all the same. A copy that is averaged (a momentum encoder) is called without gradients
    and is left alone.
    """
    now = measures.tracked(e)
    frozen = {id(p) for n, p in e.parameters().items() if n not in thawed and not p.requires_grad}
    layers = [(n, m) for n, m in e.modules() if id(m) in now and id(m) in e.tracked and m.affine]
    layers = [
        (n, m) for n, m in layers if all(id(p) in frozen for p in m.parameters(recurse=False))
    ]
    others = frozen - {id(p) for _, m in layers for p in m.parameters(recurse=False)}
    moving = [
        n for n, m in layers if now[id(m)] > e.tracked[id(m)] + 1 and e.called_with_grad.get(id(m))
    ]
    return moving if others and e.trainable() else []


def _without_averages(e: Evidence, drifted: list[str], mine: set[int]) -> list[str]:
    """Return what follows a tensor that trains is left out.

    A small one has too few numbers to tell, and goes with others.
    """
    every = e.parameters()
    follow = {n for n in drifted if id(every[n]) not in mine and _follows(e, n)}
    rest = [n for n in drifted if n not in follow]
    large = [n for n in rest if id(every[n]) in mine or every[n].numel() >= SMALL]
    return rest if large or all(every[n].numel() < SMALL for n in follow) else []


def _follows(e: Evidence, name: str) -> bool:
    """Whether a frozen tensor has gone towards one that trains, and has not become its copy: an
    average of it.
    """
    p = e.parameters()[name]
    first = e.first[name][1].float().to(p.device)
    common = {n: _common(n, name) for n, t in e.trainable().items() if t.shape == p.shape}
    most = max(common.values(), default=0)
    twins = [e.trainable()[n] for n, many in common.items() if many == most > 0][:TWINS]
    gone = measures.strided(p).float() - first
    return any(_along(gone, measures.strided(t).float().to(p.device) - first) for t in twins)


def _common(one: str, other: str) -> int:
    """How many parts the ends of two names share."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")))
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _along(gone: Tensor, way: Tensor) -> bool:
    length = float(gone.norm()) * float(way.norm())
    return length > 0 and float(gone @ way) > STRAIGHT * length and not torch.equal(gone, way)


def _more_than_rounding(e: Evidence, name: str) -> bool:
    """Return an adapter that was merged and taken out again leaves rounding behind."""
    now, (_, first) = measures.strided(e.parameters()[name]), e.first[name]
    gap, size = (
        float((now.float() - first.to(now.device).float()).norm()),
        float(first.float().norm()),
    )
    return gap > (1e-4 if now.dtype.itemsize >= 4 else 2e-2) * size
