"""Gradients that are cut number by number to next to nothing: `clip_grad_value_(parameters, 1e-5)`.

Then every number is plus or minus the limit, whatever the loss says, and the step is as long as the limit makes it. How
many numbers lie beyond ten times the limit is counted before they are cut.

Footgun: most numbers of a gradient may be zero (rows that were not asked for), and these are no share of anything. A
name that was imported before the watch goes past this.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher

TENSORS, NUMBERS = 8, 4096


class ClipValues(Watcher):
    names = begins = frozenset()

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.around(torch.nn.utils, "clip_grad_value_", "clip")

    def clip(self, original: Callable, parameters: Any, clip_value: float, *args, **kwargs) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self.eye.on and not self.eye.at.blind:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._look(parameters, clip_value)
        return original(parameters, clip_value, *args, **kwargs)

    def _look(self, parameters: list, limit: Any) -> None:
        grads = [p.grad for p in parameters if isinstance(p, Tensor) and p.grad is not None and not p.grad.is_sparse]
        some = [g.flatten()[:NUMBERS].float().abs() for g in grads[:TENSORS]]
        if some and isinstance(limit, int | float) and limit > 0:
            numbers = torch.cat([s.cpu() for s in some])
            numbers = numbers[numbers > 0]
            if numbers.numel():
                self.note("B6", (float((numbers > 10 * limit).float().mean()), float(numbers.median()), float(limit)))

    def saw(self, op: Op) -> None:
        pass
