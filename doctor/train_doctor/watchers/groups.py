"""Means over groups that were cut the other way: prototypes of several classes each.

    z = encoder(support)                                (classes * shots, D), all shots of the first class first
    z.view(classes, shots, D).mean(1)                   a mean for each class
    z.view(shots, classes, D).mean(0)                   of the same shape, and over pieces of several classes

Which rows belong together is written down nowhere; but they are more alike, as inputs. So the inputs of the rows are
grouped both ways, and it is asked which groups are the narrower ones.

Footguns: means of hours, cameras or leads are taken across what is more alike. So only a mean that answers of the same
size are compared with, as queries are with prototypes, is asked about. And rows that are alike in nothing that can be
measured tell nothing, and episodes are small. So what three steps say is put together, and the difference must be
clear.
"""

import itertools
import math

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS

COMPARES = MINUS | {"cdist", "matmul", "mm", "__matmul__", "cosine_similarity", "pairwise_distance"}
VIEWS = {"unsqueeze", "__getitem__", "t", "T", "transpose", "normalize", "expand"}
FIRST, CUTS = {"linear", "conv2d", "conv1d"}, {"view", "reshape", "unflatten"}
LEAST, LOOKED = 6, 2**20  # rows; numbers


class Groups(Watcher):
    """Known are answers that were cut into groups -> the two sizes and the rows' inputs; of their means also the dim
    and a number."""

    begins = FIRST | CUTS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.inputs: dict[int, Tensor] = {}  # rows -> the last input of as many
        self.means, self.compared = itertools.count(), set()  # numbers of means, and of those that were asked about

    def saw(self, op: Op) -> None:
        x, result = (*op.given, None)[0], op.result
        if x is None or not isinstance(result, Tensor):
            return
        if op.name in FIRST:
            data = x.is_floating_point() and not x.requires_grad
            if data and x.dim() > 1 and len(x) >= LEAST and x.numel() <= LOOKED:
                self.inputs[len(x)] = x
        elif op.name in CUTS:
            given = self.inputs.get(len(x)) if x.requires_grad and x.dim() == 2 == result.dim() - 1 else None
            if given is not None and min(result.shape[:2]) > 1 and result.shape[2] == x.shape[1]:
                self.known.put(result, (*result.shape[:2], given))
        elif op.name in COMPARES and len(op.given) == 2 and all(t.requires_grad and not t.is_leaf for t in op.given):
            for fact in filter(None, map(self.known.get, op.given)):
                if len(fact) == 5 and fact[4] not in self.compared:
                    self.compared.add(fact[4])
                    self._compare(*fact[:4])
        elif op.name == "mean" and (fact := self.known.get(x)) and len(fact) == 3:
            dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
            if dim in (0, 1, -3, -2):
                self.known.put(result, (*fact, dim % 3, next(self.means)))
        elif op.name in VIEWS and (fact := self.known.get(x)) and len(fact) == 5:
            self.known.put(result, fact)

    def _compare(self, first: int, second: int, given: Tensor, dim: int) -> None:
        """Of (first, second, ...) the mean is taken over `dim`; the other way to get as many groups is asked too."""
        rows = given.detach().flatten(1).double()
        rows = rows - rows.mean(0)
        here = rows.unflatten(0, (first, second))
        other = rows.unflatten(0, (second, first))
        as_it_is, turned = _within(here, dim), _within(other, 1 - dim)
        if min(as_it_is, turned) > 0:
            told = self.e.habits["S44"].setdefault(self.eye.turn, [])
            count, size = (first, second) if dim else (second, first)
            told.append((math.log(turned / as_it_is), count, size, dim))

    def backward(self, loss: Tensor) -> None:
        self.inputs = {}

    def close(self) -> None:
        self.known.by_id.clear()
        self.inputs = {}


def _within(groups: Tensor, dim: int) -> float:
    return float((groups - groups.mean(dim, keepdim=True)).square().sum())
