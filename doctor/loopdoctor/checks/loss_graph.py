"""What the graph of the loss reaches, and what it keeps: F1, F2, F22, F25, F57, F81, B8, N27.

Footgun: each of these is legal, and somewhere somebody means it. So they ask for a measured effect,
and most of them warn only.
"""

from statistics import fmean

from loopdoctor import graphs, owners
from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.seen import HABIT, no_habit
from loopdoctor.evidence import Backward, Evidence, Step
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown
from loopdoctor.places import Place

STEPS = 3


@check("F1")
def loss_cut_off(e: Evidence) -> Fired | Verdict:
    """Return the loss stays exactly flat, or backward says that the tensor does not require grad
    and has no grad_fn.

    Fires when backward was called on a tensor without a history: one that requires no gradient, or
    a fresh one that was told to (`torch.tensor(loss.item(), requires_grad=True)`), and when a
    backward reaches no parameter at all of a model that was called. A run that trains something
    outside the model, and optimizers that step inside backward, reach none either and are left
    alone.

    ERROR loss-cut-off/nothing-reached: The loss does not hang on the model: the way between the
    logits and the loss was cut (detach, .data, item, numpy, or a new tensor made from a number).
    Fix: Compute the loss from the model's own output, without detach, .data, .item() or
    torch.tensor on the way.
    ERROR loss-cut-off/copies: The losses were computed with copies of the weights that are detached
    from them (adapted fast weights of an inner loop, a deep copy), so their gradients stay there
    and no weight of the model gets one. Fix: Keep the way to the weights (w - lr * g, without
    detach; create_graph=True for all of its derivative), or carry the gradients over (p.grad =
    copy.grad) before the step.
    ERROR loss-cut-off/without-gradients: The loss is not connected to the model: the model was
    called under {where}. Fix: Call the model outside {where}.
    ERROR loss-cut-off/new-tensor: The loss is not connected to the model: a new tensor was made
    from the loss's number and told to require a gradient, which only silences the error. Fix: Call
    backward on the loss that the model's output gave; remove torch.tensor(...)/detach() around it.
    ERROR loss-cut-off/detached: The loss is not connected to the model: the loss was detached on
    its way from the logits (detach, .data, .item(), numpy, argmax). Fix: Remove what detaches
    between the logits and the loss.
    ERROR loss-cut-off/inside: The loss is not connected to the model: no output of the model
    requires a gradient. Fix: Find what detaches inside the model, or is frozen.
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
                f"after {len(backwards)} backward calls no parameter has a gradient; the "
                "losses hang on other tensors "
                "of the same shapes",
                "a gradient in every layer",
                fault="loss-cut-off/copies",
            )
        return fires(
            f"after {len(backwards)} backward calls none of the followed parameters of the "
            "model has a gradient",
            "a gradient in every layer",
            fault="loss-cut-off/nothing-reached",
        )
    return OK


def _cut(e: Evidence, event: Backward) -> Fired:
    calls = [c for c in event.calls if c.role == "model"]
    without = bool(calls) and not any(c.grad for c in calls)
    alive = any(c.requires_grad for c in calls)
    where = "torch.inference_mode" if any(c.inference for c in calls) else "torch.no_grad"
    how = (
        "without-gradients"
        if without
        else "new-tensor"
        if event.leaf
        else "detached"
        if alive
        else "inside"
    )
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
    if any(b.norm is not None or b.raised for b in backwards) or e.optimized() - {
        id(p) for p in ps.values()
    }:
        return False
    return not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in ps.values())


@check("F2")
def dead_term(e: Evidence) -> Fired | Verdict:
    """One term of the loss (distillation, a regulariser) stays where it is however large its
    weight.

    Declared terms (report.terms) are looked at one by one. Otherwise the loss's graph is followed:
    a number that was added outside of it and is a fixed multiple of a recorded loss without a
    gradient is such a term. A metric that is only printed, and a true constant in the loss, are
    left alone. Where a teacher is asked at each step and no other term teaches, the dead term is
    the distillation, which is an error.

    ERROR or WARN dead-loss-term: {term} changes the number but trains nothing: it was computed
    without the trained model's own output (the teacher's twice, detached logits, or under no_grad).
    Fix: Compute the term from the trained model's logits, with gradients on and without detach.
    WARN dead-loss-term/cut-off: A term of the loss, made by hand of what the model gave, was cut
    off by detach(), so it changes the number and trains nothing. Fix: Leave out the detach(), or
    the term.
    WARN dead-loss-term/without-slope: A term of the loss trains nothing: {function} stands between
    it and all weights, and its slope is 0 everywhere. Fix: Compute the term from the numbers before
    {function} (probabilities, not decisions), or go straight through: x + ({function}(x) -
    x).detach().
    ERROR or WARN dead-loss-term/same-answers: The teacher's answers are the student's own (its
    weights are copied from the student, or it is the same model), so the distillation term teaches
    nothing. Fix: Load the teacher once, and leave it alone.
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
        what = (
            f"{name}, {value:.4g} in the first of {len(seen)} steps, requires no gradient "
            "and is part of the loss"
        )
        return _dead(
            f"the {name} term",
            what,
            ERROR if taught and not any(_alive(b) for b in backwards) else WARN,
        )
    if len(seen := e.habits["F2 detached"]) > 1:
        what = (
            f"in {len(seen)} steps a mean of what was detached, and of nothing else, was "
            "added to the loss"
        )
        return fires(what, "terms with a slope", WARN, fault="dead-loss-term/cut-off")
    if len(seen := e.habits["F2 flat"]) > 1:
        what = (
            f"in {len(seen)} steps all ways from a term of the loss to a weight led through "
            f"{(f := seen[min(seen)])}"
        )
        return fires(
            what, "a way with a slope", WARN, fault="dead-loss-term/without-slope", function=f
        )
    dead = [b for b in backwards if b.dead_term is not None]
    if len(dead) < max(1, 0.8 * len(backwards)):
        seen = any(
            b.entropies or b.declared or (b.reading is not None and b.reading.ratio)
            for b in backwards
        )
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
                f"{dead[0].dead_term:.4g} of the loss {dead[0].value:.4g} is {found[0]:.3g} "
                f"times a {what} that "
                "requires no gradient",
            )
    moving = len(sizes) > 2 and _spread(sizes) > 1e-3
    large = all(b.value and 0.002 < b.dead_term / b.value < 1 for b in dead)
    if moving and large:
        return _dead(
            "a term",
            f"{sizes[0]:.4g} of the loss {dead[0].value:.4g} was added without a gradient, new "
            "in each step",
            ERROR if taught and not any(_alive(b) for b in backwards) else WARN,
        )
    return OK


def _alive(b: Backward) -> bool:
    """Whether a recorded term that teaches carries a gradient: then the dead one may be for the
    log.
    """
    return any(n.connected for n in b.entropies if n.name in ("kl_div", "mse_loss"))


def _spread(found: list[float]) -> float:
    return (max(found) - min(found)) / (abs(fmean(found)) or 1.0)


def _round(x: float) -> bool:
    """Whether it is a number that a person would write."""
    return any(abs(x * k - round(x * k)) < 1e-3 * k * x for k in (1, 2, 4, 10)) and x > 0.01


def _same_answers(backwards: list[Backward]) -> bool:
    """Return a divergence with a gradient that stays 0 when the student moves; in the first step it
    may be 0 rightly.
    """
    later = [
        [n.number for n in b.entropies if n.name == "kl_div" and n.connected]
        for b in backwards
        if b.round > 0
    ]
    return len(later) >= 3 and all(
        values and all(v is not None and abs(v) < 1e-6 for v in values) for values in later
    )


def _always_zero(backwards: list[Backward]) -> bool:
    """Return a divergence that was made with gradients on, has none, and is 0 each time: of
    something from itself.
    """
    seen = [
        [v for name, v in b.dead_values.items() if name.startswith("kl_div dead")]
        for b in backwards
    ]
    return len(seen) > 1 and all(values and all(abs(v) < 1e-6 for v in values) for values in seen)


def _dead(what: str, observed: str, severity: str = ERROR) -> Fired:
    return fires(
        observed,
        "every term of the loss carries a gradient to the model that is trained",
        severity,
        term=what[0].upper() + what[1:],
    )


@check("B8")
def nothing_for_the_optimizer(e: Evidence) -> Fired | Verdict:
    """Losses are differentiated and the optimizer steps, and the weights stay exactly as they were.

    Fires when an optimizer made steps, and no tensor of it had a gradient at any of them. An error
    where there is no other that had some. Where what hangs on its tensors was cut off before the
    loss, the line of the cut is named.

    ERROR or WARN no-gradient-at-the-steps: No tensor in the optimizer got a gradient: the losses
    were computed with other tensors (a deep copy, an adapted copy, weights that were replaced), and
    their gradients stay there. Fix: Compute the loss with the tensors that the optimizer holds, or
    carry the gradients over (p.grad = copy.grad) before the step.
    ERROR or WARN no-gradient-at-the-steps/cut-off: What hangs on the tensors of {kind} was cut off
    by detach() (or .data) before the loss, so the loss does not reach them. Fix: Take the loss on
    the tensor itself, without detach(). The detach belongs where the other network learns.
    WARN no-gradient-at-the-steps/held-twice: {kind} holds the very tensors of another optimizer and
    steps after a loss that does not reach them; what that loss does reach is in no optimizer (copy
    and paste). Fix: Give each optimizer the parameters of its own network, here
    critic.parameters().
    """
    steps, backwards = e.of(Step), [b for b in e.of(Backward) if b.requires_grad and not b.raised]
    if len(steps) < STEPS or len({b.round for b in backwards}) < STEPS:
        return unknown("fewer than three steps with a backward were seen")
    for number, optimizer in enumerate(e.optimizers):
        mine = [s for s in steps if s.optimizer == number]
        if (
            len(mine) < 2
            or not optimizer.ids
            or optimizer.live
            or any(s.own is not None for s in mine)
        ):
            continue
        cuts = _cut_off(e, number, optimizer.ids)
        twice = any(
            optimizer.ids <= other.ids for n, other in enumerate(e.optimizers) if n != number
        )
        return fires(
            f"none of the {len(optimizer.ids)} tensors of {optimizer.kind.__name__} had a "
            f"gradient in its {len(mine)} "
            f"steps, and {len(backwards)} losses were differentiated",
            "gradients on the tensors that an optimizer holds",
            WARN if twice or len(mine) < len(steps) else ERROR,
            f"no-gradient-at-the-steps{'/held-twice' if twice else '/cut-off' if cuts else ''}",
            at=cuts,
            kind=optimizer.kind.__name__,
        )
    return OK


def _cut_off(e: Evidence, optimizer: int, ids: set[int]) -> list[Place]:
    """Lines that cut something off from the tensors of an optimizer, before the backward that its
    step follows.
    """
    found: dict[Place, None] = {}
    loss = None
    for event in e.events:
        if isinstance(event, Backward):
            loss = event.place
        elif isinstance(event, Step) and event.optimizer == optimizer and loss is not None:
            found |= dict.fromkeys(
                place for place, weights in e.cut_off.get(loss, ()) if weights & ids
            )
    return list(found)


@check("N27")
def graphs_kept(e: Evidence) -> Fired | Verdict:
    """Memory grows from step to step, and with retain_graph=True each step takes longer than the
    one before.

    Fires when the graphs of three or more of the first five steps are still alive at the end of the
    watch, or those of answers of the model for which there was no backward. Those of the last two
    steps do not count, nor what only a circle of Python's references holds.

    WARN graphs-kept/summed: The graphs of all steps are kept alive: something sums or collects
    losses or outputs as tensors. Fix: Collect numbers: total += loss.item(), or loss.detach().
    WARN graphs-kept/carried: Each backward runs through the graphs of all steps before it: a state
    is passed on with its graph, and retain_graph=True hides the error. Fix: Detach the state
    between steps (h = h.detach()) and leave retain_graph out.
    WARN graphs-kept/answers: Answers of the model that no backward was called for are kept with
    their graphs: a validation outside no_grad collects losses or outputs as tensors. Fix: Evaluate
    under torch.no_grad(), and collect numbers (loss.item()).
    WARN graphs-kept/averaged: The average of the weights (a target network, an EMA) is made with
    the graph of the weights: it grows at every step, and a loss that uses it has gradients through
    all earlier weights. Fix: Update it under torch.no_grad(), or with p.detach().
    """
    if len(e.graphs) < 2 + STEPS:
        return unknown("fewer than five steps with a graph were seen")
    kept = graphs.alive(e)
    past = graphs.past(e)
    if len(kept) < STEPS or 2 * len(kept) < len(past):
        answers = graphs.answers_alive(e)
        if len(answers) < STEPS:
            return OK
        return fires(
            f"the graphs of the model's answers in {len(answers)} of the first steps are still "
            f"alive after {e.rounds}",
            "graphs that end with their step",
            fault="graphs-kept/answers",
        )
    if averaged := e.habits["N27"]:
        return fires(
            f"in {len(averaged)} steps an average of weights that has a graph met the weights "
            "again, and the graphs of "
            f"{len(kept)} of the {len(past)} first steps are still alive after {e.rounds}",
            "an average without a graph",
            fault="graphs-kept/averaged",
        )
    carried = all(b.retained for b in e.of(Backward))
    return fires(
        f"the graphs of {len(kept)} of the {len(past)} first steps are still alive after "
        f"{e.rounds}",
        "graphs that end with their step",
        fault="graphs-kept/carried" if carried else "graphs-kept/summed",
    )


@check("F22")
def sampled_without_gradient(e: Evidence) -> Fired | Verdict:
    """Return what makes the parameters of a distribution learns from other terms alone, and what is
    rebuilt stays blurred.

    Fires when samples of a distribution whose parameters learn were drawn without a gradient and
    given to a module as they are, three times or more, and none of them was ever scored with
    log_prob.

    WARN sampled-without-gradient: {kind}.sample() cuts the graph: no loss behind the sample reaches
    the parameters of the distribution. Fix: Draw with rsample(), or score the sample with log_prob
    if it is an action.
    WARN sampled-without-gradient/valued: The loss asks for actions of a higher value, and sample()
    cuts the graph between the value and what draws them, so the critic's answer moves nothing in
    the policy. Fix: Draw with rsample().
    """
    if len(e.valued) >= 2:
        return fires(
            f"in {len(e.valued)} steps a loss was the value of what normal gave without a gradient",
            "a sample with a gradient",
            fault="sampled-without-gradient/valued",
        )
    if not e.latents:
        return not_applicable("no distribution that learns was sampled without a gradient")
    entered = [latent for latent in e.latents if latent.entered]
    if len(entered) < STEPS or any(latent.scored for latent in e.latents):
        return OK
    return fires(
        f"{len(entered)} of {len(e.latents)} samples were given to a module, and none was scored",
        "a sample with a gradient",
        kind=entered[0].kind,
    )


@check("F25")
def slope_without_graph(e: Evidence) -> Fired | Verdict:
    """Return a network that should solve a differential equation, or a gradient penalty, does not
    do what its loss asks for.

    Fires when the result of torch.autograd.grad with respect to an input, without create_graph, was
    part of the loss that was differentiated. Derivatives that only make another input, weigh a
    term, were detached, or are of something that hangs on no weight are left alone. Also when such
    a derivative was of the mean over rows that a network answers each by itself, or of all columns
    of an answer at once, and then met these columns one by one. Slopes of a mean that are summed
    over the rows, and those that meet the sum of the columns, are left alone.

    WARN slope-without-graph: A derivative with respect to the input is part of the loss and was
    computed without a graph, so the optimizer takes it for a constant. Fix:
    torch.autograd.grad(..., create_graph=True).
    WARN slope-without-graph/of-mean: The derivative is that of a mean over {rows} rows, so what is
    taken for the slope of each row is {rows} times too small. Fix:
    torch.autograd.grad(net(x).sum(), x, create_graph=True).
    WARN slope-without-graph/of-several: The derivative of {rows} columns at once is the sum of
    their derivatives, and it is used as that of each. Fix: One call of torch.autograd.grad for each
    column, of y[:, k].sum().
    """
    for_each = e.habits["F25"]
    if len(e.slopes) < HABIT <= len(for_each):
        what, rows = next(iter(for_each.values()))
        of = (
            f"the mean over {rows} rows"
            if what == "of-mean"
            else f"all {rows} columns of an answer"
        )
        fault = f"slope-without-graph/{what}"
        return fires(
            f"in {len(for_each)} steps the loss held the slope of {of}",
            "one's own",
            fault=fault,
            rows=rows,
        )
    if (verdict := no_habit(e, e.slopes)) is not None:
        return verdict
    return fires(
        f"in {len(e.slopes)} steps the loss was computed from a derivative that has no graph",
        "create_graph=True for what the loss is computed from",
    )


@check("F57")
def both_sides_learn(e: Evidence) -> Fired | Verdict:
    """Return a self-supervised loss reaches its end within a few steps, and the features are alike
    for all data.

    Fires when a loss is nothing but cosines that are to rise, and both sides of them have a
    gradient. Cosines that are to fall as well, and further terms that learn, are left alone. Also
    when the loss is nothing but the distance of what two networks answer, and an optimizer holds
    both.

    WARN both-sides-learn: Two views are pulled together from both sides and nothing keeps them
    apart, so the shortest way is one answer for all data (collapse). Fix: Stop the gradient of one
    side: z.detach(), as SimSiam and BYOL do.
    WARN both-sides-learn/teacher: The loss is a distance of two networks, and both learn: the
    target comes to meet the answer, so a teacher forgets what it knew. Fix:
    teacher.requires_grad_(False), its answer under no_grad, and optimizer(student.parameters()).
    """
    if len(two := e.habits["F57 two"]) >= HABIT:
        what = (
            f"in {len(two)} steps both sides of a {next(iter(two.values()))} learned, with "
            "weights of their own"
        )
        return fires(what, "one side without a gradient", fault="both-sides-learn/teacher")
    if (verdict := no_habit(e, e.both_sides)) is not None:
        return verdict
    return fires(
        f"in {len(e.both_sides)} steps both sides of each cosine had a gradient", "one side without"
    )


@check("F81")
def targets_that_learn(e: Evidence) -> Fired | Verdict:
    """Values come out wrong though the error falls well, or features of a comparison lose what they
    could tell.

    Fires when a difference has on one side what a network answered, and on the other a plain number
    (a reward) more than a multiple of what the same network answered, both with a gradient; or when
    both sides of a regression loss (or of a square by hand) came from the same last layer, which
    the loss reaches by this error alone, and one side is made of other weights too.

    WARN targets-that-learn/value: The target is made by the network that is trained and keeps its
    graph, so the loss also pulls the next value towards this one. Fix: with torch.no_grad(): target
    = reward + gamma * value(next).
    WARN targets-that-learn/features: The features in which two things are compared are trained by
    that comparison itself, and are soonest alike where they tell nothing. Fix: Freeze them:
    features.requires_grad_(False), and leave them out of the optimizer; or detach the side of the
    target.
    """
    if (verdict := no_habit(e, seen := e.habits["F81"])) is not None:
        return verdict
    what = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps both sides of a difference had a gradient into the same weights",
        "a target without one",
        fault=f"targets-that-learn/{what}",
    )
