"""Tensors that learn or rest against what was written: a misspelt flag, a frozen table in a group of its own, what was
frozen on the way, a group without a rate: S18, S41, S42, N24.

Python lets anybody set an attribute that does not exist. `p.require_grad = False` and `module.requires_grad = False`
do nothing at all, and nothing says so.

Footgun: a group may rest on purpose until a schedule wakes it, so only a group that rests in every step is named.
"""

import re

from torch import nn

from train_doctor.check import Fired, check, fires
from train_doctor.evidence import Evidence, Gradients, Step, weight_of
from train_doctor.finding import OK, Verdict, not_applicable, unknown

LAST = 4  # rounds
MISSPELT = re.compile(r"requires?d?_?(grad|gard|gradient)s?_?", re.IGNORECASE)


@check("S18")
def misspelt_flag(e: Evidence) -> Fired | Verdict:
    """Layers that were frozen go on learning; or layers that were set to learn stay as they are.

    Fires when a parameter carries a flag whose name is nearly requires_grad, or a module carries requires_grad itself,
    and the parameters do the opposite of what it says.

    ERROR misspelt-flag/parameter: `{name}` is no flag of a parameter: setting it does nothing. Fix: Write
    p.requires_grad = {value}, or p.requires_grad_({value}).
    ERROR misspelt-flag/module: requires_grad is no flag of a module: setting it does nothing to its parameters. Fix:
    Write module.requires_grad_({value}).
    """
    if not e.models:
        return unknown("no model was seen")
    for name, p in e.parameters().items():
        for flag, value in vars(p).items():
            if isinstance(value, bool) and MISSPELT.fullmatch(flag) and value != p.requires_grad:
                return fires(
                    f"{name}.{flag} = {value}, and {name}.requires_grad = {p.requires_grad}",
                    "flags that parameters have",
                    fault="misspelt-flag/parameter",
                    name=flag,
                    value=value,
                )
    for name, module in e.modules():
        ps = list(module.parameters())
        for flag, value in vars(module).items():
            against = isinstance(value, bool) and ps and all(p.requires_grad != value for p in ps)
            if against and MISSPELT.fullmatch(flag) and flag not in _own(module):
                return fires(
                    f"{name or type(module).__name__}.{flag} = {value}, and its {len(ps)} parameters do the opposite",
                    "module.requires_grad_()",
                    fault="misspelt-flag/module",
                    value=value,
                )
    return OK


def _own(module: nn.Module) -> set[str]:
    """Names that the module's own code reads: an option of that name is its author's business."""
    kinds = [kind for kind in type(module).__mro__ if kind not in (nn.Module, object)]
    codes = [f.__code__ for kind in kinds for f in vars(kind).values() if hasattr(f, "__code__")]
    return {name for code in codes for name in (*code.co_names, *code.co_varnames)}


@check("S41")
def table_at_rest(e: Evidence) -> Fired | Verdict:
    """Vectors that were loaded into a table are still what they were after training.

    Fires when an optimizer has a group of its own for tables (nn.Embedding) that are frozen, beside groups that train.
    Where other groups rest as well they are thawed one after the other, and nothing is said.

    WARN table-at-rest: The optimizer has a group of its own for {name}, and its requires_grad is False, as
    Embedding.from_pretrained leaves it: it does not learn. Fix: from_pretrained(vectors, freeze=False); if it should
    rest, leave it out of the optimizer.
    """
    tables = {id(weight_of(m)): name for name, m in e.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    for optimizer in e.optimizers:
        groups = [g["params"] for g in optimizer.object.param_groups] if optimizer.object is not None else []
        resting = [g for g in groups if g and not any(p.requires_grad for p in g)]
        if len(resting) == 1 < len(groups):  # several are thawed one after the other
            params = resting[0]
            if all(id(p) in tables for p in params):
                name = tables[id(params[0])] or "a table"
                return fires(f"a group of {optimizer.kind.__name__} holds {name} alone, frozen", "trainable", name=name)
    return OK if tables else not_applicable("there is no table")


@check("S42")
def frozen_on_the_way(e: Evidence) -> Fired | Verdict:
    """One of two networks stops learning after its first step, and the other one has it easy.

    Fires when tensors of an optimizer had a gradient in early rounds and none in the last four, and requires_grad is
    False at the end, while that optimizer goes on.

    WARN frozen-on-the-way: {name} was frozen after its first steps (requires_grad = False, for the other network's
    step perhaps) and never released, so it learns no more. Fix: Set requires_grad = True again before its own loss.
    """
    rounds = e.of(Gradients)
    if len(rounds) < 2 * LAST:
        return unknown("fewer than eight rounds were seen")
    early = {name for g in rounds[:-LAST] for name, norm in g.norms.items() if norm}
    late = {name for g in rounds[-LAST:] for name, norm in g.norms.items() if norm}
    names = e.parameters()
    for index, optimizer in enumerate(e.optimizers):
        going = [s for s in e.of(Step, optimizer=index) if s.round >= rounds[-LAST].round]
        held = [n for n in sorted(early - late) if n in names and id(names[n]) in optimizer.ids]
        still = [n for n in held if not names[n].requires_grad]
        if len(going) > 1 and still:
            kind = optimizer.kind.__name__
            return fires(f"{len(still)} tensors of {kind} were frozen ({still[0]} ...)", "trainable", name=still[0])
    return OK


LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
FEW, GENTLE = 4, 0.6  # groups; the factor from one to the next of a decay by layers
NOTHING = 2e-4  # of the largest rate
RATES = {"lr", "params", "initial_lr", "max_lr", "min_lr", "weight_decay", "name", "param_names"}
APART, WORDS = 20, 1000  # times that one rate is another; outputs of a layer that stand for a vocabulary


@check("N24")
def group_at_rest(e: Evidence) -> Fired | Verdict:
    """Part of the model does not change at all, while the rest learns.

    Fires when the rate of one group of an optimizer was exactly zero in all steps, three or more, while another
    group's was not; or less than a five-thousandth of the largest one's.

    WARN group-at-rest: A group of parameters has the learning rate 0 in every step, so what is in it does not learn.
    Fix: Give the group a rate; if it should rest, freeze it with requires_grad_(False) and leave it out.
    WARN group-at-rest/next-to-nothing: A group of parameters has the rate {rate:.2g}, {times:.2g} times less than
    another one: what is in it hardly moves. Fix: Look at how the rates are made; a decay by layers is 0.65 or more a
    layer.
    """
    steps = e.of(Step)
    weights = {id(weight_of(m)) for _, m in e.modules() if isinstance(m, (*LAYERS, nn.Embedding))}
    for number, optimizer in enumerate(e.optimizers):
        mine = [s.rates for s in steps if s.optimizer == number]
        if len(mine) < 3 or len({len(rates) for rates in mine}) > 1:
            continue
        columns = list(zip(*mine))
        resting = [k for k, rates in enumerate(columns) if all(r == 0 for r in rates)]
        if resting and any(any(r > 0 for r in rates) for rates in columns):
            return fires(
                f"group {resting[0]} of {optimizer.kind.__name__} had the rate 0 in all {len(mine)} steps",
                "a rate above zero",
            )
        groups = optimizer.object.param_groups if optimizer.object is not None else ()
        held = [any(id(p) in weights for p in group["params"]) for group in groups]
        means = [sum(rates) / len(rates) for rates in columns]
        low = min(means, default=0.0)
        if not 0 < low < NOTHING * max(means) or len(held) != len(means) or not held[means.index(low)]:
            continue
        even = len(means) > FEW and (low / max(means)) ** (1 / (len(means) - 1)) > GENTLE
        if not even and not any(rates[-1] > rates[0] or 0 in rates for rates in columns):
            what = f"group {means.index(low)} of {optimizer.kind.__name__} has {low:.2g}, another one {max(means):.2g}"
            fault = "group-at-rest/next-to-nothing"
            return fires(what, "rates of one order", fault=fault, rate=low, times=max(means) / low)
    return OK if len(steps) >= 3 else unknown("fewer than three steps were seen")


@check("N39")
def rates_exchanged(e: Evidence) -> Fired | Verdict:
    """A pretrained network forgets what it knew, and its new last layer hardly learns.

    Looks at the rates of the groups of one optimizer. Fires when the last linear layer that is called has a twentieth
    of the rate of the matrices in front of it, or less. Tables, layers over a vocabulary, and layers whose weight is
    tied are left alone.

    WARN rates-exchanged: The last layer has the rate {low:.2g} and what is in front of it {high:.2g}: the rates of two
    groups changed places. Fix: The small rate for what is pretrained, and the large one for what is new.
    """
    steps = e.of(Step)
    if len(steps) < 3:
        return unknown("fewer than three steps were seen")
    tables = {id(p) for _, m in e.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    seen = False
    for model in e.models:
        layers = [m for m in model.modules() if isinstance(m, LAYERS) and e.called_with_grad.get(id(m))]
        if len(layers) < 3 or not isinstance(layers[-1], nn.Linear) or layers[-1].out_features >= WORDS:
            continue
        seen = True
        for optimizer in e.optimizers:
            groups = optimizer.object.param_groups if optimizer.object is not None else ()
            if len({tuple(sorted((k, str(v)) for k, v in g.items() if k not in RATES)) for g in groups}) > 1:
                continue  # groups of another kind have rates of their own
            rate = {
                id(p): float(group.get("initial_lr") or group.get("lr") or 0.0)
                for group in groups
                for p in group["params"]
            }
            *before, end = [id(weight_of(m)) for m in layers]
            front = [rate[w] for w in before if w in rate and w not in tables]
            last = rate.get(end)
            if last and 2 * len(front) >= len(layers) and end not in tables and min(front) >= APART * last:
                what = (
                    f"the last layer has the rate {last:.2g}, and {len(front)} layers in front of it {min(front):.2g}"
                )
                return fires(what, "the larger one last", low=last, high=min(front))
    if not any(sum(isinstance(m, LAYERS) for m in model.modules()) > 2 for model in e.models):
        return not_applicable("no model has three layers")
    return OK if seen else unknown("no three layers of which the last one is linear were seen to be called")
