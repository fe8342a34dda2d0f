"""How much of a model could be seen: what every check asks before it says OK of the inside.

Footgun: a compiled block in a model that is otherwise open hides its own inside only. Then what is outside of it is
seen, and silence about the rest must not read as health.
"""

from torch import nn

from nblib.doctor.evidence import Evidence


def hidden(e: Evidence) -> set[int]:
    """Ids of the modules inside compiled parts of the trained models: their calls leave no trace."""
    found: set[int] = set()
    for _, module in e.modules():
        if e.opaque or compiled(module):
            found |= {id(m) for m in module.modules()}
    return found


def compiled(module: nn.Module) -> bool:
    """Whether torch.compile was called on this module, around it or in place."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
