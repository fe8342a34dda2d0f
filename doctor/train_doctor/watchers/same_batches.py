"""The same data in each step, given to parts of a model that is never called as a whole.

    user, item = next(iter(loader))                         the first batch, for ever
    scores = model.user(user) @ model.item(item).T          two towers: forward does not exist

What a model is given as a whole is known from its call (D12). Here the first few things without a graph that layers
with weights are given in a step are compared with those of the step before.

Footgun: positions and coordinates are the same in each step, so all that is given must be; and one batch may be learned
by heart on purpose, so nothing is looked at before a loader was begun. A stream does not say how many batches it has:
it has one where an iterator of it came to its end behind the first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, dataloader

from train_doctor.eye import Eye, Op, Watcher

LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "embedding", "embedding_bag"}
GIVEN, FEW = 4, 64  # tensors of a step, beyond which there may be others; numbers of each


class SameBatches(Watcher):
    names = begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.now: list[Tensor] = []
        self.last: list[Tensor] = []
        self.around(dataloader._BaseDataLoaderIter, "__next__", "_fetching")

    def _fetching(self, original: Callable, iterator: Any) -> Any:
        try:
            return original(iterator)
        except StopIteration:
            stream = isinstance(getattr(iterator, "_dataset", None), IterableDataset)
            if stream and torch.is_grad_enabled() and getattr(iterator, "_num_yielded", 0) == 1:
                self.note("D12 whole", True)
            raise

    def saw(self, op: Op) -> None:
        if len(self.now) > GIVEN or len(op.given) < 2 or not self.eye.grad or not self.e.restarted:
            return
        x, weight = (op.given[1], op.given[0]) if op.name == "embedding_bag" else op.given[:2]
        if not x.requires_grad and weight.requires_grad and x.numel() > 1 and x.layout == torch.strided:
            self.now.append(x.detach().take(torch.arange(0, x.numel(), -(-x.numel() // FEW), device=x.device)))

    def backward(self, loss: Tensor) -> None:
        last, self.last, self.now = self.last, self.now, []
        if 0 < len(last) == len(self.last) <= GIVEN and all(map(torch.equal, last, self.last)):
            self.note("D12", True)

    def close(self) -> None:
        self.now, self.last = [], []
