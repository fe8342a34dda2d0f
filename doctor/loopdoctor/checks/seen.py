"""How much of a model could be seen: what every check asks before it says OK of the inside.

Footgun: a compiled block in a model that is otherwise open hides its own inside only. Then what is
outside of it is seen, and silence about the rest must not read as health.
"""

import math
from collections.abc import Sized

import torch
from torch import nn

from loopdoctor.evidence import Clip, Evidence, Step
from loopdoctor.finding import OK, Verdict, unknown

HABIT = 2  # steps in which a thing must have been seen
BLIND = unknown(
    "no step was seen function by function: fewer than three steps, or something is compiled"
)


def hidden(e: Evidence) -> set[int]:
    """Ids of the modules inside compiled parts of the trained models: their calls leave no
    trace.
    """
    found: set[int] = set()
    for _, module in e.modules():
        if e.opaque or compiled(module):
            found |= {id(m) for m in module.modules()}
    return found


def compiled(module: nn.Module) -> bool:
    """Whether torch.compile was called on this module, around it or in place."""
    return (
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    )


def spoilt(e: Evidence) -> bool:
    """Whether some followed trainable weight is no number by now."""
    ps = e.parameters()
    followed = [ps[n].detach() for n in e.first if n in ps and ps[n].requires_grad]
    return any(not bool(torch.isfinite(p.sum())) for p in followed if p.is_floating_point())


def clipped_away(e: Evidence) -> set[int]:
    """Return rounds whose gradients were all made 0 by a clip that saw an infinite norm: it divides
    by it.
    """
    infinite = {c.round for c in e.of(Clip) if c.total == math.inf}
    return {s.round for s in e.of(Step) if s.round in infinite and s.own == 0}


def no_habit(e: Evidence, seen: Sized) -> Verdict | None:
    """Say what is said where a fault was not seen in several steps; None where it was."""
    if len(e.shown) < HABIT:
        return BLIND
    return OK if len(seen) < HABIT else None
