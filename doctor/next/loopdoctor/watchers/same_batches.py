"""The same data in each step, given to parts of a model that is never called as a whole.

    user, item = next(iter(loader))                         the first batch, for ever
    scores = model.user(user) @ model.item(item).T          two towers: forward does not exist

What a model is given as a whole is known from its call (D12). Here the first few things without a graph that layers
with weights are given in a step are compared with those of the step before.

Footgun: positions and coordinates are the same in each step, so all that is given must be; and one batch may be learned
by heart on purpose, so nothing is looked at before a loader was begun. A loader that comes to its end in training gives
all that it has: a stream of one batch, or a full gradient, a step for each pass, where only the first call of a step is
known to be the same. And what stays may be a graph or prompts, beside a loader that begins with other rows each time.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import dataloader

from loopdoctor.eye import Eye, Op, Watcher, plain, tensors

LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "embedding", "embedding_bag"}
GIVEN, FEW = 4, 64  # tensors of a step, beyond which there may be others; numbers of each, and tensors of a batch


class SameBatches(Watcher):
    names = begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.now: list[Tensor] = []
        self.last: list[Tensor] = []
        self.first: dict[int, list[Tensor]] = {}  # id of a data set -> some numbers of what its loader began with
        self.around(dataloader._BaseDataLoaderIter, "__next__", "_fetching")
        self.after(dataloader._BaseDataLoaderIter, "__next__", "fetched")

    def _fetching(self, original: Callable, iterator: Any) -> Any:
        try:
            return original(iterator)
        except StopIteration:
            if torch.is_grad_enabled():
                self.e.passed.add(id(getattr(iterator, "_dataset", None)))
            raise

    def fetched(self, batch: Any, iterator: Any) -> None:
        if iterator._num_yielded == 1:
            now = [_few(t) for t in islice(tensors((batch,)), FEW) if plain(t) and t.numel()]
            before = self.first.setdefault(id(iterator._dataset), now)
            if len(before) != len(now) or not all(map(torch.equal, before, now)):
                self.e.passed.add(id(iterator._dataset))

    def saw(self, op: Op) -> None:
        if len(self.now) > GIVEN or len(op.given) < 2 or not self.eye.grad or not self.e.restarted:
            return
        x, weight = (op.given[1], op.given[0]) if op.name == "embedding_bag" else op.given[:2]
        if not x.requires_grad and weight.requires_grad and x.numel() > 1 and x.layout == torch.strided:
            self.now.append(_few(x))

    def backward(self, loss: Tensor) -> None:
        last, self.last, self.now = self.last, self.now, []
        if 0 < len(last) == len(self.last) <= GIVEN and all(map(torch.equal, last, self.last)):
            self.note("D12", True)

    def close(self) -> None:
        self.now, self.last, self.first = [], [], {}


def _few(x: Tensor) -> Tensor:
    return x.detach().take(torch.arange(0, x.numel(), -(-x.numel() // FEW), device=x.device))
