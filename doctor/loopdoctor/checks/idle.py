"""Tensors that learn or rest against what was written: a misspelt flag, a frozen table in a group of its own, what was
frozen on the way, a group without a rate: S18, S41, S42, N24.

Python lets anybody set an attribute that does not exist. `p.require_grad = False` and `module.requires_grad = False`
do nothing at all, and nothing says so.

Footgun: a group may rest on purpose until a schedule wakes it, so only a group that rests in every step is named.
"""

import re

from torch import nn

from loopdoctor.check import Fired, check, fires
from loopdoctor.evidence import Evidence, Step, weight_of
from loopdoctor.finding import OK, Verdict, unknown

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


LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
FEW, GENTLE = 4, 0.6  # groups; the factor from one to the next of a decay by layers
NOTHING = 2e-4  # of the largest rate
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
