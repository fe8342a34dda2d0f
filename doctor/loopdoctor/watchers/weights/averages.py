"""An average of a model (EMA) that leaves out what is no parameter: the statistics of its batch
normalisations.

    for e, p in zip(ema.parameters(), model.parameters()):
        e.mul_(decay).add_(p, alpha=1 - decay)          running_mean and running_var stay 0 and 1

A weight that learns is seen to go, in place, into another parameter that does not. Where it is that
of a batch normalisation, the normalisation that holds the other one is looked for among all
objects, and its statistics are compared at the start and at the end.

Footgun: statistics may be made afterwards, in one pass over the data (torch's AveragedModel with
update_bn). That one averages whole lists of tensors, and is not seen here.
"""

import gc
from dataclasses import dataclass

from torch import Tensor, nn

from loopdoctor.evidence import weight_of
from loopdoctor.eye import Eye, Op, Watcher

INTO = {"add", "lerp", "copy"}
PAIRS = 4


@dataclass
class Average:
    """A normalisation and its average, with a few of the statistics of both when they were first
    seen.
    """

    mine: nn.Module
    other: nn.Module
    began: tuple[Tensor, Tensor]


class Averages(Watcher):
    names = INTO

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.weights: dict[int, tuple[str, nn.Module]] | None = None
        self.asked: set[int] = set()

    def saw(self, op: Op) -> None:
        if op.name not in INTO or len(op.given) != 2 or op.result is not op.given[0]:
            return
        into, source = op.given
        if (
            into.requires_grad
            or into.dim() != 1
            or into.shape != source.shape
            or id(into) in self.asked
        ):
            return
        if self.weights is None:
            norms = [
                (n, m)
                for n, m in self.e.modules()
                if isinstance(m, nn.modules.batchnorm._BatchNorm)
            ]
            self.weights = {
                id(weight_of(m)): (n, m)
                for n, m in norms
                if m.running_mean is not None and m.affine
            }
        found = self.weights.get(id(source))
        if found is None or len(self.asked) >= PAIRS:  # each is a look at all objects
            return
        self.asked.add(id(into))
        kinds = {type(m) for _, m in self.weights.values()}
        other = next(
            (m for m in gc.get_objects() if type(m) in kinds and weight_of(m) is into), None
        )
        if other is not None and other.running_mean is not None:
            name, mine = found
            began = mine.running_mean.clone(), other.running_mean.clone()
            self.e.averages[name] = Average(mine, other, began)
