"""Whether the loss hangs on the model, with every one of its terms: F1 and F2.

Footgun: a number in a loss is no fault by itself: constants, baselines and printed metrics are numbers too. What moves
from step to step as a recorded loss does was meant to train something.
"""

from statistics import fmean

from loopdoctor import owners
from loopdoctor.check import Fired, check, fires
from loopdoctor.evidence import Backward, Evidence, Step
from loopdoctor.finding import ERROR, OK, WARN, Verdict, unknown


@check("F1")
def loss_cut_off(e: Evidence) -> Fired | Verdict:
    """The loss stays exactly flat, or backward says that the tensor does not require grad and has no grad_fn.

    Fires when backward was called on a tensor without a history: one that requires no gradient, or a fresh one that
    was told to (`torch.tensor(loss.item(), requires_grad=True)`), and when a backward reaches no parameter at all of a
    model that was called. A run that trains something outside the model, and optimizers that step inside backward,
    reach none either and are left alone.

    ERROR loss-cut-off/nothing-reached: The loss does not hang on the model: the way between the logits and the loss was
    cut (detach, .data, item, numpy, or a new tensor made from a number). Fix: Compute the loss from the model's own
    output, without detach, .data, .item() or torch.tensor on the way.
    ERROR loss-cut-off/copies: The losses were computed with copies of the weights that are detached from them (adapted
    fast weights of an inner loop, a deep copy), so their gradients stay there and no weight of the model gets one. Fix:
    Keep the way to the weights (w - lr * g, without detach; create_graph=True for all of its derivative), or carry the
    gradients over (p.grad = copy.grad) before the step.
    ERROR loss-cut-off/without-gradients: The loss is not connected to the model: the model was called under {where}.
    Fix: Call the model outside {where}.
    ERROR loss-cut-off/new-tensor: The loss is not connected to the model: a new tensor was made from the loss's number
    and told to require a gradient, which only silences the error. Fix: Call backward on the loss that the model's
    output gave; remove torch.tensor(...)/detach() around it.
    ERROR loss-cut-off/detached: The loss is not connected to the model: the loss was detached on its way from the
    logits (detach, .data, .item(), numpy, argmax). Fix: Remove what detaches between the logits and the loss.
    ERROR loss-cut-off/inside: The loss is not connected to the model: no output of the model requires a gradient. Fix:
    Find what detaches inside the model, or is frozen.
    """
    backwards = e.of(Backward)
    if not backwards:
        return unknown("backward was never called")
    first = next((b for b in backwards if b.leaf or not b.requires_grad), None)
    leaves = sum(b.leaf for b in backwards)  # one now and then stands for a batch without targets
    if first is not None and (first.raised or (first.leaf and 2 * leaves > len(backwards))):
        return _cut(e, first)
    if _reached_nothing(e, backwards):
        if any(b.copies for b in backwards):
            if any(s.own is not None for s in e.of(Step)):
                return OK  # their gradients are carried over
            return fires(
                f"after {len(backwards)} backward calls no parameter has a gradient; the losses hang on other tensors "
                "of the same shapes",
                "a gradient in every layer",
                fault="loss-cut-off/copies",
            )
        return fires(
            f"after {len(backwards)} backward calls none of the followed parameters of the model has a gradient",
            "a gradient in every layer",
            fault="loss-cut-off/nothing-reached",
        )
    return OK


def _cut(e: Evidence, event: Backward) -> Fired:
    calls = [c for c in event.calls if c.role == "model"]
    without = bool(calls) and not any(c.grad for c in calls)
    alive = any(c.requires_grad for c in calls)
    where = "torch.inference_mode" if any(c.inference for c in calls) else "torch.no_grad"
    how = "without-gradients" if without else "new-tensor" if event.leaf else "detached" if alive else "inside"
    kind = "requires a gradient but has no history" if event.leaf else "requires no gradient"
    return fires(
        f"the loss given to backward {kind}",
        "a loss with a grad_fn that leads to the parameters",
        fault=f"loss-cut-off/{how}",
        where=where,
    )


def _reached_nothing(e: Evidence, backwards: list[Backward]) -> bool:
    ps = e.trainable()
    if not ps or not any(name in ps for name in e.first) or e.opaque or not e.forwards:
        return False
    if any(b.norm is not None or b.raised for b in backwards) or e.optimized() - {id(p) for p in ps.values()}:
        return False
    return not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in ps.values())


@check("F2")
def dead_term(e: Evidence) -> Fired | Verdict:
    """One term of the loss (distillation, a regulariser) stays where it is however large its weight.

    Declared terms (report.terms) are looked at one by one. Otherwise the loss's graph is followed: a number that was
    added outside of it and is a fixed multiple of a recorded loss without a gradient is such a term. A metric that is
    only printed, and a true constant in the loss, are left alone. Where a teacher is asked at each step and no other
    term teaches, the dead term is the distillation, which is an error.

    ERROR or WARN dead-loss-term: {term} changes the number but trains nothing: it was computed without the trained
    model's own output (the teacher's twice, detached logits, or under no_grad). Fix: Compute the term from the trained
    model's logits, with gradients on and without detach.
    WARN dead-loss-term/cut-off: A term of the loss, made by hand of what the model gave, was cut off by detach(), so it
    changes the number and trains nothing. Fix: Leave out the detach(), or the term.
    WARN dead-loss-term/without-slope: A term of the loss trains nothing: {function} stands between it and all weights,
    and its slope is 0 everywhere. Fix: Compute the term from the numbers before {function} (probabilities, not
    decisions), or go straight through: x + ({function}(x) - x).detach().
    ERROR or WARN dead-loss-term/same-answers: The teacher's answers are the student's own (its weights are copied from
    the student, or it is the same model), so the distillation term teaches nothing. Fix: Load the teacher once, and
    leave it alone.
    """
    backwards = [b for b in e.of(Backward) if b.requires_grad]
    if not backwards:
        return unknown("no loss with a gradient was seen")
    for b in backwards:
        for name, (value, alive) in b.declared.items():
            if not alive and value != 0:
                return _dead(f"the term {name}", f"{name} = {value:.4g} requires no gradient")
    taught = bool(owners.teaching(e))
    if _same_answers(backwards):
        only = all(b.value is not None and abs(b.value) < 1e-6 for b in backwards if b.round > 0)
        return fires(
            "the divergence (kl_div) was 0 in every step, also after the weights had changed",
            "a teacher that differs from its student",
            ERROR if only else WARN,
            fault="dead-loss-term/same-answers",
        )
    if _always_zero(backwards):
        what = "kl_div is 0 in every step and requires no gradient"
        return _dead("the kl_div term", what, ERROR if taught else WARN)
    if len(seen := e.habits["F2"]) > 1:
        name, value = next(iter(seen.values()))
        what = f"{name}, {value:.4g} in the first of {len(seen)} steps, requires no gradient and is part of the loss"
        return _dead(f"the {name} term", what, ERROR if taught and not any(_alive(b) for b in backwards) else WARN)
    if len(seen := e.habits["F2 detached"]) > 1:
        what = f"in {len(seen)} steps a mean of what was detached, and of nothing else, was added to the loss"
        return fires(what, "terms with a slope", WARN, fault="dead-loss-term/cut-off")
    if len(seen := e.habits["F2 flat"]) > 1:
        what = f"in {len(seen)} steps all ways from a term of the loss to a weight led through {(f := seen[min(seen)])}"
        return fires(what, "a way with a slope", WARN, fault="dead-loss-term/without-slope", function=f)
    dead = [b for b in backwards if b.dead_term is not None]
    if len(dead) < max(1, 0.8 * len(backwards)):
        seen = any(b.entropies or b.declared or (b.reading is not None and b.reading.ratio) for b in backwards)
        return OK if seen else unknown("no term of the loss was seen as it was made")
    sizes = [b.dead_term for b in dead]
    ratios: dict[str, list[float]] = {}
    for b in dead:
        for name, value in b.dead_values.items():
            if value:
                ratios.setdefault(name, []).append(b.dead_term / value)
    for name, found in ratios.items():
        # it moves as the term does: a true constant in the loss does not
        steady = len(found) == len(dead) and _spread(found) <= min(2e-3, 0.2 * _spread(sizes))
        if found[0] > 0 and (steady if len(found) > 1 else _round(found[0])):
            what = name.split(" ")[0]
            return _dead(
                f"the {what} term",
                f"{dead[0].dead_term:.4g} of the loss {dead[0].value:.4g} is {found[0]:.3g} times a {what} that "
                "requires no gradient",
            )
    moving = len(sizes) > 2 and _spread(sizes) > 1e-3
    large = all(b.value and 0.002 < b.dead_term / b.value < 1 for b in dead)
    if moving and large:
        return _dead(
            "a term",
            f"{sizes[0]:.4g} of the loss {dead[0].value:.4g} was added without a gradient, new in each step",
            ERROR if taught and not any(_alive(b) for b in backwards) else WARN,
        )
    return OK


def _alive(b: Backward) -> bool:
    """Whether a recorded term that teaches carries a gradient: then the dead one may be for the log."""
    return any(n.connected for n in b.entropies if n.name in ("kl_div", "mse_loss"))


def _spread(found: list[float]) -> float:
    return (max(found) - min(found)) / (abs(fmean(found)) or 1.0)


def _round(x: float) -> bool:
    """Whether it is a number that a person would write."""
    return any(abs(x * k - round(x * k)) < 1e-3 * k * x for k in (1, 2, 4, 10)) and x > 0.01


def _same_answers(backwards: list[Backward]) -> bool:
    """A divergence with a gradient that stays 0 when the student moves; in the first step it may be 0 rightly."""
    later = [[n.number for n in b.entropies if n.name == "kl_div" and n.connected] for b in backwards if b.round > 0]
    return len(later) >= 3 and all(values and all(v is not None and abs(v) < 1e-6 for v in values) for values in later)


def _always_zero(backwards: list[Backward]) -> bool:
    """A divergence that was made with gradients on, has none, and is 0 each time: of something from itself."""
    seen = [[v for name, v in b.dead_values.items() if name.startswith("kl_div dead")] for b in backwards]
    return len(seen) > 1 and all(values and all(abs(v) < 1e-6 for v in values) for values in seen)


def _dead(what: str, observed: str, severity: str = ERROR) -> Fired:
    return fires(
        observed,
        "every term of the loss carries a gradient to the model that is trained",
        severity,
        term=what[0].upper() + what[1:],
    )
