"""Settings that are easily taken for their opposite: S26, F45, F46, F50 to F52, N31 and N32.

Each is a number with a meaning that is the other way round elsewhere: the share that is kept or dropped, the new part
or the old one, the largest or the least.

Footgun: every one of them may be meant. So they are warnings, and only values that hardly anybody means are named.
"""

from torch import nn

from loopdoctor.check import Fired, check, fires
from loopdoctor.evidence import Evidence
from loopdoctor.finding import OK, Verdict, unknown

MOMENTUM, SHARE, SMOOTHING = 0.9, 0.8, 0.5  # from here on the opposite was meant
SEEN, RATIO, APART = 64, 3.0, 1.5  # rows; of the counts of classes; of their weights
EVEN, ALIKE = 1.5, 1.25  # of counts; the ratio of a loss's weights over that of a sampler's
MANY, NEAR, FAR = 4, 0.2, 0.6  # classes; logarithms that may, and must, lie between weights and what was expected


@check("S30")
def one_layer_many_times(e: Evidence) -> Fired | Verdict:
    """A model has far fewer parameters than it should, and more layers hardly help.

    Fires when a ModuleList or Sequential holds one and the same module with weights at all of its places, three or
    more. Weights that are shared by name (ALBERT, a loop over one layer) are left alone.

    WARN one-layer-many-times: {name} holds one layer {times} times, and not {times} layers: [layer] * {times} repeats a
    reference. Fix: nn.ModuleList([make_layer() for _ in range({times})]).
    """
    if not e.models:
        return unknown("no model was seen")
    for name, m in e.modules():
        if isinstance(m, nn.ModuleList | nn.Sequential):
            parts = [part for part in m._modules.values() if part is not None]
            one = len(parts) > 2 and len({id(p) for p in parts}) == 1
            if one and any(p.requires_grad for p in parts[0].parameters()):
                times = len(parts)
                return fires(f"{times} places of {name}, one layer", "a layer for each", name=name, times=times)
    return OK
