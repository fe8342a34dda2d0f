"""Where the host waits for a card: the numbers of it that a program asks for between a forward pass
and its step.

A card works through a queue that the host fills. `item()`, `float()`, `int()`, `if tensor:`,
`tolist()`, `nonzero()`, a mask as an index and a copy to the CPU need an answer. For each the host
waits until the queue is empty, and meanwhile the card gets nothing new to do. Such reads are
counted by the program's own line, from the first call of a model with gradients until the
optimizer's step. Later ones, a log line say, are left out, and so are those inside installed
libraries, which nobody who trains can mend.

The methods of torch.Tensor are replaced when a model on an accelerator is first called, and not
before. In a program on the CPU nothing waits, and nothing is touched.

Footguns: a tensor class of its own may send a method through torch a second time, so a read inside
a read is none. What waits inside a function of torch (torch.nonzero, repeat_interleave, a grouped
product in fp32) is not seen: the count is a lower bound.
"""

import linecache
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from loopdoctor.attach import ASIDE, Attachments, Part, quietly
from loopdoctor.places import whose

NUMBERS = (
    "item",
    "tolist",
    "nonzero",
    "masked_select",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)
INDEXED = ("__getitem__", "__setitem__")
MOVED = ("to", "cpu")
HOST = ("cpu", "meta")


class Waits(Part):
    """Counts reads of an accelerator's tensors, once a model is there."""

    def __init__(self, at: Attachments):
        super().__init__(at)
        self.open = False  # between the first forward of a step and its optimizer
        self.pending: Counter[str] = Counter()

    def start(self) -> None:
        self.at.undo.append(torch_optimizer.register_optimizer_step_post_hook(self._stepped).remove)

    @quietly
    def meet(self, module: nn.Module) -> None:
        """Note whether a module that is called with gradients for the first time is on an
        accelerator.
        """
        kinds = {p.device.type for p in module.parameters(recurse=False)} - {*HOST}
        if kinds and not self.e.accelerator:
            self.e.accelerator = min(kinds)
            for names, see in (
                (NUMBERS, self._number),
                (INDEXED, self._indexed),
                (MOVED, self._moved),
            ):
                for name in names:
                    self.at.around(Tensor, name, see)

    def called(self) -> None:
        """Before each call of a part of the model with gradients."""
        self.open = bool(self.e.accelerator)

    def _stepped(self, optimizer, args, kwargs) -> None:
        if self.open and not self.at.idle:
            self.open = False
            self.e.waits.setdefault(self.e.rounds, Counter()).update(self.pending)
            self.pending.clear()

    # ---------------------------------------------------------------- the methods of a tensor
    def _number(self, original: Callable, tensor: Tensor, *args, **kwargs) -> Any:
        return self._asked(original, _away(tensor), tensor, *args, **kwargs)

    def _indexed(self, original: Callable, tensor: Tensor, index: Any, *value) -> Any:
        mask = any(_is_mask(i) for i in (index if isinstance(index, tuple) else (index,)))
        # torch fills without counting
        filled = value and (not isinstance(value[0], Tensor) or value[0].dim() == 0)
        return self._asked(original, mask and not filled, tensor, index, *value)

    def _moved(self, original: Callable, tensor: Tensor, *args, **kwargs) -> Any:
        waits = (
            _away(tensor) and not kwargs.get("non_blocking") and not any(a is True for a in args)
        )
        target = "cpu" if original.__name__ == "cpu" else args[0] if args else kwargs.get("device")
        target = target.device if isinstance(target, Tensor) else target
        return self._asked(
            original, waits and str(target).startswith("cpu"), tensor, *args, **kwargs
        )

    def _asked(self, original: Callable, waits: bool, *args, **kwargs) -> Any:
        if not (waits and self.open) or self.at.idle or getattr(ASIDE, "asking", False):
            return original(*args, **kwargs)
        if place := _line():
            self.pending[place] += 1
        ASIDE.asking = True
        try:
            return original(*args, **kwargs)
        finally:
            ASIDE.asking = False


def _away(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.device.type not in HOST


def _is_mask(index: Any) -> bool:
    return _away(index) and index.dtype in (torch.bool, torch.uint8) and index.dim() > 0


def _line() -> str:
    """Return the line of the program that asks; nothing where a library does, or this package
    itself.
    """
    frame = sys._getframe(2)
    while frame is not None and whose(frame.f_code.co_filename) in ("torch", "doctor"):
        frame = frame.f_back
    if frame is None or whose(frame.f_code.co_filename) != "program":
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, number, frame.f_globals).strip()
    return f"{Path(file).name}:{number}" + (f" `{text[:60]}`" if text else "")
