"""Who receives a gradient in the backward pass: S10, S20, S37, B1 to B4, B7.

Footgun: no gradient is not a fault by itself. Experts that no token went to, a pooler that nothing
uses, an adapter that is switched off have none and are healthy. What counts is a module that took
part and was cut off.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from statistics import median

import torch
from torch import Tensor, nn

from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.seen import clipped_away, hidden, no_habit, spoilt
from loopdoctor.checks.trainables import moved
from loopdoctor.evidence import Backward, Evidence, Gradients, Step, is_adapter
from loopdoctor.finding import ERROR, NOTE, OK, WARN, Verdict, not_applicable, unknown

POOLER = re.compile(r"(^|\.)pooler\.(dense|\d+)\.(weight|bias)$")  # of transformers' encoders
ROUNDED = 1e-7  # of the median gradient
SPARSE = re.compile(r"expert|moe\b|router", re.IGNORECASE)  # parts that a batch may leave out
FEW = 3  # steps from which on zeros are no start


def _norms(e: Evidence) -> dict[str, list[float | None]]:
    """Gradient norms of each trainable parameter over the rounds."""
    found: dict[str, list[float | None]] = {}
    for event in e.of(Gradients):
        for name, norm in event.norms.items():
            found.setdefault(name, []).append(norm)
    return found


@check("S10")
def reentrant_cut(e: Evidence) -> Fired | Verdict:
    """With gradient checkpointing, adapters do not learn, or backward says that nothing requires a
    gradient.

    A reentrant checkpoint gives its region gradients only if one of its inputs requires one; behind
    a frozen embedding none does. Fires when such regions were entered with gradients on and
    trainable tensors inside were only ever called with gradients off. Frozen regions may be cut,
    and a reference pass under no_grad warns without harm.

    ERROR reentrant-checkpoint-cut: Reentrant gradient checkpointing (activation checkpointing)
    behind frozen inputs cuts the graph: what is trainable inside the checkpointed regions gets no
    gradient. Fix: Use use_reentrant=False, or call model.enable_input_require_grads().
    """
    if not e.regions and hidden(e):
        return unknown("part of the model is compiled, and a checkpoint inside would not be seen")
    if not e.regions:
        return not_applicable("no reentrant checkpoint was entered with gradients on")
    if not e.cut_regions:
        return OK
    norms, owners = _norms(e), e.owners()
    lost = [
        n
        for n in e.trainable()
        if e.called.get(id(owners[n]))
        and not e.called_with_grad.get(id(owners[n]))
        and not any(norms.get(n, ()))
    ]
    if not lost and e.cut_regions == e.regions and any(_without_graph(b) for b in e.of(Backward)):
        # seen with gradients in a check in eval mode
        lost = [n for n in e.trainable() if e.called.get(id(owners[n]))]
    if not lost:
        return OK
    return fires(
        f"{e.cut_regions} of {e.regions} reentrant checkpoints had no input that requires a "
        f"gradient; {len(lost)} of "
        f"{len(e.trainable())} trainable tensors are inside them and got none ({lost[0]} ...)",
        "at least one input of each checkpointed region requires a gradient",
    )


def _without_graph(event: Backward) -> bool:
    """Return a loss without a gradient that was computed with gradients on, from an output that had
    none already.
    """
    calls = [c for c in event.calls if c.role == "model"]
    return (
        not event.requires_grad
        and bool(calls)
        and all(c.grad and not c.requires_grad for c in calls)
    )


@check("B1")
def called_but_no_gradient(e: Evidence) -> Fired | Verdict:
    """Part of the model stays at its initial values although it is used in the forward pass.

    Fires for trainable tensors of modules that were called and whose gradient was None at every
    step, while others had one; and for those that the forward pass read as a plain number. A module
    that was never called (an unrouted expert, an inactive adapter) is no fault, nor is a bias that
    a derivative leaves out; a single module at a dead end is a warning, and a library's unused
    pooler a note.

    ERROR or WARN called-but-no-gradient: Part of the model takes part in the forward pass but gets
    no gradient: {why}. Fix: Look at what happens to the output of {module} and keep it in the
    graph.
    NOTE called-but-no-gradient/unused: {module} of a model of a library is called by it, and what
    it gives is not used. Fix: Nothing, or leave it out (add_pooling_layer=False), which saves its
    memory.
    WARN called-but-no-gradient/as-a-number: {name} goes into the forward pass as a plain number
    ({how}), which has no graph, so the weight stays what it was. Fix: Use the tensor as it is: x *
    self.scale.
    """
    norms, owners, ps = _norms(e), e.owners(), e.trainable()
    if not norms:
        return unknown("no optimizer step was seen, so no gradients were looked at")
    if not any(norm is not None for each in norms.values() for norm in each):
        return not_applicable("nothing has a gradient: that has another cause")
    read = e.habits["B1 read"]
    stepping = {s.optimizer for s in e.of(Step)}
    moved_on = {key for number, o in enumerate(e.optimizers) if number in stepping for key in o.ids}
    silent = [n for n in ps if n in norms and all(norm is None for norm in norms[n])]
    if name := next((n for n in silent if id(ps[n]) in read and id(ps[n]) in moved_on), None):
        how = f".{read[id(ps[name])].strip('_')}()"
        what = (
            f"{name} was read by {how} while gradients were on, and has gradient None in all steps"
        )
        return fires(
            what, "a tensor", WARN, "called-but-no-gradient/as-a-number", name=name, how=how
        )
    inside = hidden(e)
    called = [
        n
        for n in ps
        if n in norms
        and id(owners[n]) not in inside
        and e.called.get(id(owners[n]))
        and _leaf(owners[n])
    ]
    cut = [
        n
        for n in called
        if all(norm is None for norm in norms[n]) and not _vanishes(e, n, owners, norms)
    ]
    if not cut and any(id(owners[n]) in inside and norms[n][-1] is None for n in ps if n in norms):
        return unknown(
            "tensors inside a compiled part have no gradient, and whether they took part "
            "cannot be seen"
        )
    if not cut:
        return OK if called else unknown("no module with trainable tensors was seen to be called")
    followed = [n for n in cut if n in e.first]
    if followed and all(moved(e, n) for n in followed):
        return not_applicable(
            "what has no gradient is moved by other means, as an average of the rest is"
        )
    if all(POOLER.search(n) for n in cut):
        module = cut[-1].rpartition(".")[0]
        what = f"{len(cut)} tensors of {module} have no gradient"
        return fires(what, "nothing", NOTE, "called-but-no-gradient/unused", module=module)
    shielded = [n for n in cut if not e.called_with_grad.get(id(owners[n]))]
    modules = {id(owners[n]) for n in cut}
    kinds = {re.sub(r"\d+", "#", n) for n in cut}
    size = sum(ps[n].numel() for n in cut) / sum(ps[n].numel() for n in called)
    table = any(isinstance(owners[n], nn.Embedding) for n in cut)
    held = any(id(ps[n]) in e.optimized() for n in cut)
    sure = held and (table or len(modules) >= 3 or size >= 0.2 or len(cut) > len(kinds))
    why = (
        "they run under no_grad inside the forward pass"
        if len(shielded) == len(cut)
        else "their output is cut from the loss (.detach(), .data, .item(), no_grad, a new "
        "tensor made of values, or a "
        "term that was computed and not added: loss = in place of loss +=)"
    )
    return fires(
        f"{len(cut)} of {len(called)} trainable tensors whose module was called have gradient "
        "None in all "
        f"{len(e.of(Gradients))} steps: {', '.join(cut[:3])}{' ...' if len(cut) > 3 else ''}",
        "a gradient for every trainable tensor that took part in the forward pass",
        ERROR if sure and len(shielded) < len(cut) else WARN,  # no_grad may stand for frozen
        why=why,
        module=cut[-1].rpartition(".")[0] or "the model",
    )


def _vanishes(
    e: Evidence, name: str, owners: dict[str, nn.Module], norms: dict[str, list[float | None]]
) -> bool:
    """Return a bias of a layer whose answer is only differentiated (forces of an energy): its
    weight, which no other layer has, is trained. Of a model that is called twice in a step, the
    loss may have lost the other answer.
    """
    layer, weight = owners[name], name.removesuffix("bias") + "weight"
    once = set(Counter(call.round for call in e.forwards).values()) == {1}
    plain = name.endswith("bias") and type(layer).__module__.startswith("torch.nn.")
    return once and plain and owners.get(weight) is layer and any(norms.get(weight, ()))


def _leaf(module: nn.Module) -> bool:
    """Whether a call of it must use its parameters; one with parts inside may own tensors for other
    occasions.
    """
    return not any(True for _ in module.children())


@check("B3")
def zero_gradients(e: Evidence) -> Fired | Verdict:
    """Return the loss is printed and differs from batch to batch, and yet all gradients are exactly
    zero.

    Fires when every trainable tensor that has a gradient has one of exactly zero, at every step
    (parameters anchored by `+ p.sum() * 0`, a loss weight of zero, both factors of an adapter at
    zero), or all adapters' second factors do while the first are not zero.

    ERROR or WARN gradients-exactly-zero: The trainable tensors are in the graph, but their
    gradients are exactly zero: what is differentiated does not depend on them (a path multiplied by
    zero, a dead branch, a loss of zero). Fix: Look for a factor of zero between these tensors and
    the loss.
    ERROR or WARN gradients-exactly-zero/both-factors: The trainable tensors are in the graph, but
    their gradients are exactly zero: both factors of every adapter are zero, and each one's
    gradient is multiplied by the other. Fix: Leave the first factor (A) as it is drawn at random
    (kaiming_uniform_) and only the second (B) at zero.
    """
    norms = _norms(e)
    have = {n: [x for x in each if x is not None] for n, each in norms.items()}
    have = {n: each for n, each in have.items() if each}
    if not have:
        return unknown("no gradients were seen")
    if clipped_away(e):
        return not_applicable("the gradients were there before they were clipped: see B4")
    factors = _all_zero(e, have)
    seconds = [n for n in have if "lora_B" in n or "lora_embedding_B" in n]
    everything = not any(x for each in have.values() for x in each)
    if not everything and not (seconds and not any(x for n in seconds for x in have[n])):
        return OK
    ps = e.trainable()
    firsts = [n for n in have if "lora_A" in n or "lora_embedding_A" in n]
    both = (
        firsts
        and seconds
        and not any(bool(ps[n].detach().any()) for n in firsts + seconds if n in ps)
    )
    both = both or everything and factors
    which = list(have) if everything else seconds
    return fires(
        f"{len(which)} of {len(have)} gradients are exactly 0 in all {len(e.of(Gradients))} "
        f"steps ({which[0]} ...)",
        "gradients other than zero",
        # rewards that are all alike give a loss of 0
        ERROR if any(b.value != 0 for b in e.of(Backward)) else WARN,
        "gradients-exactly-zero/both-factors" if both else "gradients-exactly-zero",
    )


def _all_zero(e: Evidence, names: Iterable[str]) -> bool:
    """Whether all these tensors are two matrices of each part, all of zeros, which fit each other
    as factors.
    """
    ps, parts = e.trainable(), {}
    for name in names:
        if name not in ps or ps[name].dim() != 2 or bool(ps[name].detach().any()):
            return False
        parts.setdefault(name.removesuffix(".weight").rpartition(".")[0], []).append(
            tuple(ps[name].shape)
        )
    pairs = [shapes[0] for shapes in parts.values() if len(shapes) == 2]
    fit = all(set(a) & set(b) for a, b in (shapes for shapes in parts.values() if len(shapes) == 2))
    return bool(pairs) and len(pairs) == len(parts) and fit


@check("B2")
def first_factor_dead(e: Evidence) -> Fired | Verdict:
    """Return an adapter's second factor learns, its first one stays as it was initialised.

    While lora_B is zero the gradient of lora_A is zero too, in the first step and as long as the
    rate is zero. Fires when it stays exactly zero in two steps after lora_B has moved.

    ERROR adapter-first-factor-dead: The path into the adapter (LoRA) is cut: lora_A gets no
    gradient although lora_B has left zero. Fix: Look for a detach, a dropout of 1 or a zero between
    lora_A and lora_B.
    """
    rounds = [g for g in e.of(Gradients)]
    firsts = [n for n in e.trainable() if is_adapter(n) and "lora_A" in n]
    if not firsts:
        return not_applicable("no trainable low-rank adapter")
    if len(rounds) < 3:
        return unknown("fewer than three steps were seen")
    moved = next((s.round for s in e.of(Step) if any(s.rates) and s.own), None)
    later = [g for g in rounds if moved is not None and g.round > moved]
    ps = e.trainable()
    dead = []
    for name in firsts:
        other = name.replace("lora_A", "lora_B")
        if other in ps and bool(ps[other].detach().any()) and len(later) >= 2:
            # while the second one learns
            cut = all(g.norms.get(name) == 0 and g.norms.get(other) for g in later)
            dead += [name] if cut else []
    alive = [n for n in firsts if n.replace("lora_A", "lora_B") in ps]
    if not dead or len(dead) < len(alive) / 2:
        return OK
    return fires(
        f"{len(dead)} of {len(firsts)} lora_A tensors have gradients of exactly 0 in "
        f"{len(later)} steps "
        "after lora_B moved",
        "gradients in both factors once lora_B is not zero",
    )


@check("B4")
def non_finite_gradients(e: Evidence) -> Fired | Verdict:
    """Weights turn to NaN: an optimizer stepped on gradients that were not finite.

    A GradScaler skips such steps; they are not counted. Fires when a step was made with NaN or
    infinity in it. Where the weights are still finite it is a warning: some optimizers leave such a
    step out by themselves (the fused ones do under a scaler), and weights may have been put back.

    ERROR or WARN gradients-not-finite: The optimizer stepped on gradients that are NaN or infinite,
    which spoils the weights for good. Fix: Find where they begin
    (torch.autograd.set_detect_anomaly), and skip steps that are not finite.
    ERROR gradients-not-finite/clipped-away: The norm of all gradients is infinite, and
    clip_grad_norm_ divides by it: each gradient becomes 0, and no step moves anything. The largest
    number, {largest:.1e}, stands in that of {name}. Fix: Find where the gradients grow so large on
    their way back to {name}: a torch.autograd.Function whose backward forgets a factor, layers
    without a normalisation; or numbers below 32 bits, whose norm overflows.
    """
    events = e.of(Gradients)
    if not events:
        return unknown("no gradients were seen")
    away, seen = clipped_away(e), e.habits["B4 clipped"]
    # now and then a batch may be left out like that
    if seen and len(away) >= 3 and 2 * len(away) > len(events):
        name, most, middle = next(iter(seen.values()))
        return fires(
            f"in {len(away)} of {len(events)} steps clip_grad_norm_ saw an infinite norm and "
            "left gradients of exactly "
            f"0; the largest number of a gradient was {most:.1e} ({name}), of the middle one "
            f"{middle:.1e}",
            "a finite norm",
            ERROR,
            "gradients-not-finite/clipped-away",
            largest=most,
            name=name,
        )
    for event in events:
        bad = [n for n, norm in event.norms.items() if norm is not None and not math.isfinite(norm)]
        if bad and not spoilt(e) and any(b.scale for b in e.of(Backward)):
            continue  # a fused optimizer is stepped all the same, and skips inside
        if bad:
            first = next(
                (b.value for b in e.of(Backward, round=event.round) if b.value is not None), None
            )
            return fires(
                f"step {event.round + 1} used {len(bad)} gradients with NaN or infinity "
                f"({bad[0]} ...); loss {first}",
                "finite gradients at every step that is made",
                ERROR if spoilt(e) else WARN,
            )
    return OK


def _norms_of_each(e: Evidence) -> dict[str, list[float]]:
    """Gradient norms of each trainable tensor, of the rounds in which it had a gradient."""
    there = {name: [norm for norm in each if norm is not None] for name, each in _norms(e).items()}
    return {name: each for name, each in there.items() if each}


@check("B7")
def always_zero(e: Evidence) -> Fired | Verdict:
    """Return some layers stay exactly as they began while others learn, and nothing is frozen.

    Fires for trainable tensors whose gradient was there and exactly zero in every step, three or
    more with a rate above zero, while others had one. Left alone are experts, adapters (B2), a bias
    whose weight learns, for behind it a normalisation may take out its mean, and what only a term
    of the loss teaches that stands at its floor (free nats). Also for matrices whose gradient is
    not zero and, in every step, ten million times smaller than the median of the others': what
    rounding leaves of a formula that has no slope in them.

    WARN some-gradients-zero: The gradient of these tensors is exactly zero in every step: {why}.
    Fix: {look} {name}.
    WARN some-gradients-zero/flat: The gradient of these tensors is exactly zero because {function}
    stands between them and the loss, and has no slope. Fix: A straight-through step: w +
    ({function}(w) - w).detach().
    WARN some-gradients-zero/next-to-nothing: The gradient of {name} is what rounding leaves of
    zero: the loss does not depend on it (a score divided by itself, a softmax over one number, a
    mean that is taken out again). Fix: Look at what the output of {name} is divided by or
    normalised with; leave that out, or {name}.
    WARN some-gradients-zero/rounded: A layer multiplies with what a {function} gave, which has no
    slope: what stands before it learns by its scale alone, if it learns at all. Fix: A
    straight-through step: w + (q - w).detach().
    """
    norms, steps = _norms_of_each(e), [s for s in e.of(Step) if any(rate != 0 for rate in s.rates)]
    if not norms:
        return unknown("no gradients were seen")
    rounds = {s.round for s in steps}
    if len(rounds) < FEW:
        return unknown("fewer than three steps with a rate above zero were seen")
    live = {n for n, each in norms.items() if any(x != 0 for x in each)}
    dead = [n for n, each in norms.items() if n not in live and len(each) >= FEW]
    if not live:
        return not_applicable("all gradients are zero, or there are none: see B3")
    ps = e.trainable()
    dead = [
        n for n in dead if n in ps and not is_adapter(n) and not SPARSE.search(n) and ps[n].numel()
    ]
    dead = [
        n
        for n in dead
        if not (ps[n].dim() < 2 and f"{_stem(n)}weight" in live and n.endswith("bias"))
    ]
    if len(floors := e.habits["B7 floor"]) >= FEW:
        dead = [n for n in dead if not all(id(ps[n]) in resting for resting in floors.values())]
    if not dead and len(rounded := e.habits["B7 rounded"]) >= FEW:
        function = next(iter(rounded.values()))
        what = (
            f"in {len(rounded)} steps a layer was given what came out of a {function} with a graph"
        )
        return fires(
            what, "a straight-through step", fault="some-gradients-zero/rounded", function=function
        )
    if not dead and (tiny := _next_to_nothing(norms, ps)):
        name, least, usual = tiny
        rounds = len(e.of(Gradients))
        what = (
            f"the gradient of {name} is at most {least:.2g} in all {rounds} steps, the "
            f"median {usual:.2g}"
        )
        return fires(
            what, "gradients of one order", fault="some-gradients-zero/next-to-nothing", name=name
        )
    if not dead:
        return OK
    last = dead[-1]
    starved = all(f"{_stem(n)}bias" in live for n in dead)
    where = "in front of" if starved else "behind"
    nothing = [n for n in dead if not n.endswith("bias") and not ps[n].detach().any()]
    pair = next(
        (
            (a, b)
            for a in nothing
            for b in nothing
            if a != b and _stem(a) and _stem(b).startswith(_stem(a))
        ),
        None,
    )
    whole = len(dead) > 1 and all(ps[n].dim() > 1 for n in dead) and len(nothing) == len(dead)
    factors = pair is not None or whole
    flat = next(
        (name for name, below in e.starving.items() if all(id(ps[n]) in below for n in dead)), None
    )
    if flat is not None:
        return fires(
            f"{len(dead)} tensors below {flat} have a gradient of exactly 0 in all "
            f"{len(e.of(Gradients))} steps: "
            f"{', '.join(dead[:3])}{' ...' if len(dead) > 3 else ''}",
            "a gradient other than zero in some step",
            fault="some-gradients-zero/flat",
            function=flat,
        )
    if factors:
        first, second = pair or nothing[:2]
        why = (
            f"{first} and {second} are zero and multiplied with each other, so none of them "
            "ever leaves zero"
        )
    elif starved:
        why = (
            "what goes into them is zero (a branch of zeros, units in front of them that are "
            "dead, a mask of zeros)"
        )
    else:
        why = (
            "nothing comes back to them (a factor of zero, units that are dead or saturated, a "
            "flat function such as "
            "round, sign or clamp, a term of the loss that does not depend on them)"
        )
    return fires(
        f"{len(dead)} of {len(norms)} trainable tensors have a gradient of exactly 0 in all "
        f"{len(e.of(Gradients))} "
        f"steps: {', '.join(dead[:3])}{' ...' if len(dead) > 3 else ''}",
        "a gradient other than zero in some step",
        why=why,
        look="Begin with small random numbers in" if factors else f"Look at what stands {where}",
        name=nothing[0] if factors else _stem(last).rstrip(".") or last,
    )


def _next_to_nothing(norms: dict[str, list[float]], ps: dict) -> tuple[str, float, float] | None:
    """Return a matrix whose gradient is there and, in every step, what rounding leaves of nothing:
    its name, the largest norm of it, and the median of all in the step of that norm.
    """
    steps = [[x for x in column if x] for column in zip(*norms.values())]
    if len(steps) < FEW or not all(len(column) > FEW for column in steps):
        return None
    usual = [median(column) for column in steps]
    for name, each in norms.items():
        matrix = (
            name in ps and ps[name].dim() > 1 and not is_adapter(name) and len(each) == len(usual)
        )
        if matrix and all(0 < x < ROUNDED * y for x, y in zip(each, usual)):
            return name, max(each), usual[each.index(max(each))]
    return None


def _stem(name: str) -> str:
    """Return the module's name with its dot, of a parameter's name."""
    return name[: name.rfind(".") + 1]


@check("S20")
def units_alike(e: Evidence) -> Fired | Verdict:
    """Return a wide layer learns no more than one with a single unit, and a larger one does not
    help.

    Fires when the units of a layer (the rows of its weight) began alike and are alike to the last
    bit after three steps or more with gradients. A last layer of zeros, a gate of zeros and the
    second factor of an adapter begin alike too, and are not after a step.

    WARN units-alike: All units of this layer are the same and get the same gradient, so they stay
    the same for ever: it began with a constant (zeros, ones, fill_). Fix: Begin with random numbers
    (nn.init.kaiming_uniform_, or leave torch's own), and keep constants for biases, gains and last
    layers.
    """
    norms = _norms_of_each(e)
    if not norms:
        return unknown("no gradients were seen")
    ps, owners = e.trainable(), e.owners()
    learnt = [
        n
        for n in ps
        if sum(x > 0 for x in norms.get(n, ())) >= FEW and ps[n].dim() >= 2 and len(ps[n]) > 1
    ]
    learnt = [n for n in learnt if not isinstance(owners[n], nn.Embedding) and not is_adapter(n)]
    if not learnt:
        return unknown("no matrix with a gradient in three steps was seen")
    alike = [n for n in learnt if _alike(ps[n].detach())]
    if not alike:
        return OK
    name, size = alike[0], tuple(ps[alike[0]].shape)
    return fires(
        f"all {size[0]} rows of {name} {size} are equal after {len(norms[name])} steps with a "
        "gradient" + (f", and so are those of {', '.join(alike[1:3])}" if alike[1:] else ""),
        "units that differ",
    )


def _alike(p: Tensor) -> bool:
    if p.is_meta or p.is_sparse or not torch.equal(p[0], p[1]):  # nearly always already here
        return False
    return bool(torch.isfinite(p[0]).all()) and bool((p == p[:1]).all())


@check("S37")
def one_way_hardly_read(e: Evidence) -> Fired | Verdict:
    """Return a bidirectional network is hardly better than one that reads one way.

    Fires when output[:, -1] (output[-1] where time comes first), whole, is taken of a recurrent
    network that reads both ways.

    WARN one-way-hardly-read: The last place of the output holds the last state of the forward half,
    and of the backward half its first one, which has read a single place ({half} numbers). Fix:
    torch.cat([h_n[-2], h_n[-1]], dim=1), or a mean over all places.
    """
    if (verdict := no_habit(e, seen := e.habits["S37"])) is not None:
        return verdict
    half = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps the last place of a bidirectional output was taken",
        "both ends",
        half=half,
    )
