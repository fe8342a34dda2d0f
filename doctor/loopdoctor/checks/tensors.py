"""Tensors that do not learn though the rest does, one by one, with the reason: B7, S19, S20, N25.

Others say it of a whole run (B3, S1, S2), of what no optimizer holds (S3), of a group (N24), of a flag (S18), of what
is rounded away (N4).

Footgun: a gradient of zero is no fault by itself. A gate that begins at zero passes nothing back in its first step, an
expert to which no token went gets zeros, a bias in front of a normalisation changes nothing, and below its free nats a
divergence teaches nothing.
"""

import math
import re
from collections.abc import Iterator
from inspect import signature

import torch
from torch import Tensor, nn

from loopdoctor import graphs
from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.seen import spoilt
from loopdoctor.evidence import Evidence, Gradients, Optimizer, Step, is_adapter
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown

SPARSE = re.compile(r"expert|moe\b|router", re.IGNORECASE)  # parts that a batch may leave out
FEW = 3  # steps from which on zeros are no start
LARGE = 0.01  # an epsilon of Adam that may be a slip
USUAL, RAISED = 0.02, 0.05  # rates of Adam; one that was raised with the epsilon, as a share of it
NEAR = 5  # nodes of what a module keeps of a parameter
INSIDE, LISTED = 2, 1024  # lists in lists that are looked into; things in one and those in it


def _norms(e: Evidence) -> dict[str, list[float]]:
    """Gradient norms of each trainable tensor, of the rounds in which it had a gradient."""
    found: dict[str, list[float]] = {}
    for event in e.of(Gradients):
        for name, norm in event.norms.items():
            if norm is not None:
                found.setdefault(name, []).append(norm)
    return found


@check("B7")
def always_zero(e: Evidence) -> Fired | Verdict:
    """Some layers stay exactly as they began while others learn, and nothing is frozen.

    Fires for trainable tensors whose gradient was there and exactly zero in every step, three or more with a rate above
    zero, while others had one. Left alone are experts, adapters (B2), a bias whose weight learns, for behind it a
    normalisation may take out its mean, and what only a term of the loss teaches that stands at its floor (free nats).

    WARN some-gradients-zero: The gradient of these tensors is exactly zero in every step: {why}. Fix: {look}
    {name}.
    WARN some-gradients-zero/flat: The gradient of these tensors is exactly zero because {function} stands between them
    and the loss, and has no slope. Fix: A straight-through step: w + ({function}(w) - w).detach().
    WARN some-gradients-zero/rounded: A layer multiplies with what a {function} gave, which has no slope: what stands
    before it learns by its scale alone, if it learns at all. Fix: A straight-through step: w + (q - w).detach().
    """
    norms, steps = _norms(e), [s for s in e.of(Step) if any(rate != 0 for rate in s.rates)]
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
    dead = [n for n in dead if n in ps and not is_adapter(n) and not SPARSE.search(n) and ps[n].numel()]
    dead = [n for n in dead if not (ps[n].dim() < 2 and f"{_stem(n)}weight" in live and n.endswith("bias"))]
    if len(floors := e.habits["B7 floor"]) >= FEW:
        dead = [n for n in dead if not all(id(ps[n]) in resting for resting in floors.values())]
    if not dead and len(rounded := e.habits["B7 rounded"]) >= FEW:
        function = next(iter(rounded.values()))
        what = f"in {len(rounded)} steps a layer was given what came out of a {function} with a graph"
        return fires(what, "a straight-through step", fault="some-gradients-zero/rounded", function=function)
    if not dead:
        return OK
    last = dead[-1]
    starved = all(f"{_stem(n)}bias" in live for n in dead)
    where = "in front of" if starved else "behind"
    nothing = [n for n in dead if not n.endswith("bias") and not ps[n].detach().any()]
    pair = next(
        ((a, b) for a in nothing for b in nothing if a != b and _stem(a) and _stem(b).startswith(_stem(a))), None
    )
    whole = len(dead) > 1 and all(ps[n].dim() > 1 for n in dead) and len(nothing) == len(dead)
    factors = pair is not None or whole
    flat = next((name for name, below in e.starving.items() if all(id(ps[n]) in below for n in dead)), None)
    if flat is not None:
        return fires(
            f"{len(dead)} tensors below {flat} have a gradient of exactly 0 in all {len(e.of(Gradients))} steps: "
            f"{', '.join(dead[:3])}{' ...' if len(dead) > 3 else ''}",
            "a gradient other than zero in some step",
            fault="some-gradients-zero/flat",
            function=flat,
        )
    if factors:
        first, second = pair or nothing[:2]
        why = f"{first} and {second} are zero and multiplied with each other, so none of them ever leaves zero"
    elif starved:
        why = "what goes into them is zero (a branch of zeros, units in front of them that are dead, a mask of zeros)"
    else:
        why = (
            "nothing comes back to them (a factor of zero, units that are dead or saturated, a flat function such as "
            "round, sign or clamp, a term of the loss that does not depend on them)"
        )
    return fires(
        f"{len(dead)} of {len(norms)} trainable tensors have a gradient of exactly 0 in all {len(e.of(Gradients))} "
        f"steps: {', '.join(dead[:3])}{' ...' if len(dead) > 3 else ''}",
        "a gradient other than zero in some step",
        why=why,
        look="Begin with small random numbers in" if factors else f"Look at what stands {where}",
        name=nothing[0] if factors else _stem(last).rstrip(".") or last,
    )


def _stem(name: str) -> str:
    """The module's name with its dot, of a parameter's name."""
    return name[: name.rfind(".") + 1]


@check("S19")
def not_registered(e: Evidence) -> Fired | Verdict:
    """A layer or tensor of the model is used and never learns, it is missing in the saved file, or .to() leaves it.

    Fires when a module holds a tensor that requires a gradient as a plain attribute, as a buffer, or in a Python list
    or dict (also inside modules in such a list), so that model.parameters() does not have it, and it got a gradient.
    Also when a plain attribute of zeros is added to what learns, in each step that is looked at.

    WARN not-registered: model.parameters() does not have this tensor, because it is {how}; so no optimizer is given it.
    Fix: {fix}.
    WARN not-registered/unsaved: An optimizer trains this tensor, but the model does not have it in its state_dict,
    because it is {how}; a saved model loses it. Fix: {fix}.
    WARN not-registered/zeros: {name} is a plain tensor of zeros, which nothing trains, so adding it changes nothing.
    Fix: self.pos_embed = nn.Parameter(torch.zeros(1, n, d)).
    """
    if not e.models:
        return unknown("no model was seen")
    held = e.optimized()
    listed = [m for _, holder in e.modules() for m in _listed(holder)]
    parts = {id(m) for m in listed if not any(id(p) in held for p in m.parameters())}
    known = {id(p) for m in (*e.models, *e.teachers) if id(m) not in parts for p in m.parameters()}
    teaching = {id(m) for m in e.teachers if id(m) not in parts}
    found: dict[int, tuple[str, str, Tensor]] = {}
    for prefix, module in e.modules():
        for name, how, t in _loose(module, teaching):
            if t.requires_grad and t.grad_fn is not None and how == "a plain tensor":
                t, how = _made_of(t), "made of an nn.Parameter and no longer one"
            if t is not None and id(t) not in known and t.requires_grad and t.is_leaf and t.is_floating_point():
                found.setdefault(id(t), (f"{prefix}.{name}".removeprefix("."), how, t))
    zeros = set(e.habits["S19"].values())
    still = [
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in e.modules()
        for name, how, t in _loose(module, teaching)
        if how == "a plain tensor" and t is not None and id(t) in zeros and not t.requires_grad and not t.any()
    ]  # an id alone may be a later tensor's
    if still:
        what = f"{still[0]} was added in {len(e.habits['S19'])} steps, and is 0 everywhere"
        return fires(what, "an nn.Parameter, or other numbers", fault="not-registered/zeros", name=still[0])
    used = [each for each in found.values() if each[2].grad is not None or not e.trainable()]
    if not used:
        return OK
    missing = [each for each in used if id(each[2]) not in held]
    name, how, _ = (missing or used)[0]
    names = [each[0] for each in missing or used]
    fixes = {
        "a plain tensor": "Make it an nn.Parameter",
        "made of an nn.Parameter and no longer one": "Make it whole first: nn.Parameter(torch.zeros(1, n, d))",
        "a buffer": "Make it an nn.Parameter: a buffer is no parameter even if it requires a gradient",
        "in a Python list": "Use nn.ModuleList, nn.ModuleDict, nn.ParameterList or nn.ParameterDict",
    }
    return fires(
        f"{len(names)} tensors that require a gradient are held by the model and are none of its parameters: "
        f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}",
        "every tensor that should learn in model.parameters()",
        fault="not-registered" if missing else "not-registered/unsaved",
        how=how if how != "in a Python list" else "in a Python list or dict, into which torch does not look",
        fix=fixes[how],
    )


def _made_of(t: Tensor) -> Tensor | None:
    """The one parameter that a tensor was made of in a few steps (unsqueeze, a factor, to)."""
    nodes = list(graphs.walk(t, NEAR + 1))
    ways = [n.variable for n in nodes if hasattr(n, "variable")]
    return ways[0] if len(nodes) <= NEAR and len(ways) == 1 and isinstance(ways[0], nn.Parameter) else None


def _loose(module: nn.Module, teaching: set[int]) -> Iterator[tuple[str, str, Tensor]]:
    """Tensors that a module holds past its registers: name, how, tensor."""
    for name, value in module._buffers.items():
        if value is not None:
            yield name, "a buffer", value
    for name, value in vars(module).items():
        if name.startswith("_") and name in vars(nn.Module()):
            continue
        if isinstance(value, Tensor):
            yield name, "a plain tensor", value
        elif isinstance(value, (list, tuple, dict)):
            for path, t in _inside(value, teaching, INSIDE, iter(range(LISTED))):
                yield f"{name}{path}", "in a Python list", t


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in its lists of several, which were found as models of their own where it is not called by its name."""
    for value in vars(module).values():
        if isinstance(value, list | tuple) and len(value) > 1:
            parts = [m for m in value if isinstance(m, nn.Module)]
            yield from (m for m in parts if any(p.grad is not None for p in m.parameters()))


def _inside(holder, teaching: set[int], depth: int, left: Iterator[int]) -> Iterator[tuple[str, Tensor]]:
    items = holder.items() if isinstance(holder, dict) else enumerate(holder)
    for (key, value), _ in zip(items, left):
        if isinstance(value, Tensor):
            yield f"[{key!r}]", value
        elif isinstance(value, nn.Module) and id(value) not in teaching:
            yield from ((f"[{key!r}].{n}", p) for n, p in value.named_parameters())
        elif isinstance(value, (list, tuple, dict)) and depth:
            yield from ((f"[{key!r}]{path}", t) for path, t in _inside(value, teaching, depth - 1, left))


@check("S20")
def units_alike(e: Evidence) -> Fired | Verdict:
    """A wide layer learns no more than one with a single unit, and a larger one does not help.

    Fires when the units of a layer (the rows of its weight) began alike and are alike to the last bit after three steps
    or more with gradients. A last layer of zeros, a gate of zeros and the second factor of an adapter begin alike too,
    and are not after a step.

    WARN units-alike: All units of this layer are the same and get the same gradient, so they stay the same for ever: it
    began with a constant (zeros, ones, fill_). Fix: Begin with random numbers (nn.init.kaiming_uniform_, or leave
    torch's own), and keep constants for biases, gains and last layers.
    """
    norms = _norms(e)
    if not norms:
        return unknown("no gradients were seen")
    ps, owners = e.trainable(), e.owners()
    learnt = [n for n in ps if sum(x > 0 for x in norms.get(n, ())) >= FEW and ps[n].dim() >= 2 and len(ps[n]) > 1]
    learnt = [n for n in learnt if not isinstance(owners[n], nn.Embedding) and not is_adapter(n)]
    if not learnt:
        return unknown("no matrix with a gradient in three steps was seen")
    alike = [n for n in learnt if _alike(ps[n].detach())]
    if not alike:
        return OK
    name, size = alike[0], tuple(ps[alike[0]].shape)
    return fires(
        f"all {size[0]} rows of {name} {size} are equal after {len(norms[name])} steps with a gradient"
        + (f", and so are those of {', '.join(alike[1:3])}" if alike[1:] else ""),
        "units that differ",
    )


def _alike(p: Tensor) -> bool:
    if p.is_meta or p.is_sparse or not torch.equal(p[0], p[1]):  # nearly always already here
        return False
    return bool(torch.isfinite(p[0]).all()) and bool((p == p[:1]).all())


@check("N25")
def epsilon_vanishes(e: Evidence) -> Fired | Verdict:
    """Weights in 16 bits turn to NaN at the first step, or those with a gradient of 0 do.

    Fires when an optimizer of torch adds an epsilon to a root in the dtype of the weights, and in that dtype the
    epsilon is 0: 1e-8 is less than half of what fp16 can hold (6e-8). It is an error when weights are NaN by now.
    Also when the epsilon of Adam or AdamW is a hundredth or more, and most gradients are ten times smaller (half of
    them four times, where the decay is the default and the betas are not: they were given by their places); but not
    where the rate was raised with it, to a twentieth of it or more: that is a descent with momentum.

    ERROR or WARN epsilon-vanishes: The optimizer's eps = {eps} is 0 in {dtype}, so where a gradient is 0 it divides 0
    by 0. Fix: Keep the weights in fp32 and use autocast, or give eps=1e-4.
    WARN epsilon-vanishes/decides: {kind} divides gradients by their own size plus eps = {eps}, which is far larger than
    they are: updates are {times} times too small, and it hardly learns. The fourth argument of {kind} is eps, and not
    weight_decay. Fix: {kind}(parameters, lr, betas, weight_decay={eps}), with names; eps=1e-8.
    """
    if not e.stepped:
        return unknown("no optimizer step was seen")
    if (large := _decides(e)) is not None:
        return large
    low = False
    for o in e.optimizers:
        if o.object is None or not o.kind.__module__.startswith("torch.optim"):
            continue
        for group in o.object.param_groups:
            eps = group.get("eps")
            if group.get("fused") or not isinstance(eps, float):
                continue
            for dtype in {p.dtype for p in group["params"] if p.is_floating_point() and p.dtype.itemsize < 4}:
                low = True
                if eps > 0 and not float(torch.tensor(eps, dtype=dtype)):
                    name, info = str(dtype).removeprefix("torch."), torch.finfo(dtype)
                    return fires(
                        f"{o.kind.__name__} has eps = {eps:g} for weights in {name}, where the smallest number is "
                        f"{info.smallest_normal * info.eps:.1g}",
                        "an epsilon that is not 0 in the dtype of the weights",
                        ERROR if spoilt(e) else WARN,
                        eps=f"{eps:g}",
                        dtype=name,
                    )
    return OK if low else not_applicable("no optimizer of torch with an epsilon holds weights below 32 bits")


def _decides(e: Evidence) -> Fired | None:
    """An epsilon next to which the gradients of Adam are nothing."""
    for number, o in enumerate(e.optimizers):
        if o.object is None or not issubclass(o.kind, torch.optim.Adam | torch.optim.AdamW):
            continue
        eps, rate = (max(float(group[of]) for group in o.object.param_groups) for of in ("eps", "lr"))
        updates = [u for step in e.of(Step, optimizer=number) for u in step.updates if u.gradient]
        sizes = sorted(u.gradient / math.prod(u.shape) ** 0.5 for u in updates)
        raised = rate > USUAL and rate >= RAISED * eps
        if eps < LARGE or raised or len(sizes) < FEW:
            continue
        middle, kind = sizes[len(sizes) // 2], o.kind.__name__
        if sizes[len(sizes) * 3 // 4] < eps / 10 or _by_place(o) and middle < eps / 4:
            what = f"{kind} has eps = {eps:g}, and the middle gradient is {middle:.2g}"
            fault, times = "epsilon-vanishes/decides", f"{1 + eps / middle:.0f}"
            return fires(what, "an epsilon next to nothing", WARN, fault, kind=kind, eps=f"{eps:g}", times=times)
    return None


def _by_place(o: Optimizer) -> bool:
    """Whether Adam looks as if its betas and its decay were given by their places: the decay, which came out as the
    epsilon, is the default itself."""
    usual = signature(o.kind).parameters
    betas, decay = ({group[of] for group in o.object.param_groups} for of in ("betas", "weight_decay"))
    return decay == {usual["weight_decay"].default} and betas.isdisjoint({usual["betas"].default})
