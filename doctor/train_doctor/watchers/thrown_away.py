"""Results that a line throws away: `x.clamp(0, 1)` on a line of its own, where `x = x.clamp(0, 1)` was meant.

    h + self.positions              changes nothing; h = h + self.positions
    state.detach()                  changes nothing; state = state.detach()

Python itself says so: after the call comes an instruction that drops what it gave. It is asked of functions that make a
new tensor and do nothing else, where the program calls them itself.

Footgun: what ends in an underscore works in place, and gives the tensor itself. And a call of a module or of a function
of someone else (Report.terms, clip_grad_norm_) is made for what it does: what is called inside it is not the program's.
"""

import dis
import sys
from types import CodeType, FrameType

import torch
import torch.nn.functional as F
from torch import Tensor

from train_doctor.callers import written
from train_doctor.eye import Eye, Op, Watcher
from train_doctor.waits import PASSED, whose
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES, TURNS

VIEWS = {"view", "reshape", "squeeze", "unsqueeze", "permute", "transpose", "flatten", "expand", "t", "contiguous"}
CASTS = {"to", "float", "long", "half", "bfloat16", "double", "cuda", "cpu", "int", "bool", "type"}
MADE = {"clamp", "clip", "relu", "dropout", "softmax", "log_softmax", "sigmoid", "tanh", "normalize", "pad", "detach"}
MADE |= {"masked_fill", "index_add", "scatter", "scatter_add", "index_copy", "index_fill", "abs", "exp", "log", "neg"}
FUNCTIONS = MINUS | OVER | PLUS | TIMES | TURNS | VIEWS | CASTS | MADE
BETWEEN = {*PASSED, *(m.__file__ for m in (torch._tensor, torch.functional, torch.overrides, F))}  # before a function


class ThrownAway(Watcher):
    names = begins = FUNCTIONS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.drops: dict[CodeType, set[int]] = {}  # instructions whose results are dropped

    def saw(self, op: Op) -> None:
        if not isinstance(op.result, Tensor) or not op.results:
            return
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename in BETWEEN:
            frame = frame.f_back
        if frame is None or whose(frame.f_code.co_filename) != "program":
            return
        code = frame.f_code
        if code not in self.drops:
            steps = list(dis.get_instructions(code))
            dropped = ((a.offset, b.offset) for a, b in zip(steps, steps[1:]) if b.opname == "POP_TOP")
            self.drops[code] = {n for a, b in dropped for n in range(a, b)}  # with its inline caches
        if frame.f_lasti in self.drops[code] and not _of_another(frame, op.name):
            self.note("N37", (op.name, code.co_filename, frame.f_lineno))

    def close(self) -> None:
        self.drops.clear()


def _of_another(frame: FrameType, name: str) -> bool:
    """The line's own call is one that only passes this one on: `kept.extend(map(torch.detach, losses))`."""
    call = written(frame)
    called = getattr(call.func, "attr", getattr(call.func, "id", "")) if call is not None else ""
    return called.rstrip("_") != name if called else False
