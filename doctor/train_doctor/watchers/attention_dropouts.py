"""Attention whose dropout stays on when the model is evaluated: scaled_dot_product_attention knows no mode.

    F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
    F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)       was meant

Either it is seen in a module that is in eval mode, without gradients; or the line that calls it is read: it gives a
number that the module keeps, and the function around it says nothing of training.

Footguns: an attention that is drawn on purpose (Monte Carlo dropout) is asked several times the same, or some dropouts
are left awake. A module may set its number to 0 in a train() of its own, or compute it where it is asked for, and a
function that is given the number is told by who calls it.
"""

import ast
import inspect
import sys
import textwrap
from types import FrameType

from torch import nn

from train_doctor.eye import Eye, Op, Watcher
from train_doctor.waits import whose
from train_doctor.watchers.dropouts import _name

ATTENDS = "scaled_dot_product_attention"
BETWEEN = ("train_doctor/eye.py", "train_doctor/watchers/attention_dropouts.py", "torch/overrides.py")
MODES = {"training", "train", "eval", "is_training"}
FIFTH = 4  # dropout_p, where it is given without its name


class AttentionDropouts(Watcher):
    names = {ATTENDS}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.read: set[tuple] = set()  # calls whose line was read
        self.found: dict[int, str] = {}  # step -> where
        self.last: dict[int, float] = {}  # id of a module -> the sum of what asked it last, in eval mode
        self.drawn = False  # asked the same again

    def saw(self, op: Op) -> None:
        p = op.kwargs.get("dropout_p", op.args[FIFTH] if len(op.args) > FIFTH else 0.0)
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.endswith(BETWEEN):
            frame = frame.f_back
        if not isinstance(p, float) or not p > 0 or frame is None or whose(frame.f_code.co_filename) != "program":
            return
        code, line = frame.f_code, frame.f_lineno
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if not isinstance(module, nn.Module):
            return
        where = f"{type(module).__name__}.{code.co_name}, line {line}"
        if not module.training and not self.eye.grad:
            self._evaluated(module, op, where)
        elif module.training and (code, line) not in self.read:
            self.read.add((code, line))
            if _unaware(frame, module):
                self.found.setdefault(self.eye.turn, where)

    def _evaluated(self, module: nn.Module, op: Op, where: str) -> None:
        asked = float(op.given[0].double().sum())
        self.drawn = self.drawn or self.last.get(id(module)) == asked
        self.last[id(module)] = asked
        awake = any(m.training for model in self.e.models for m in model.modules())
        if not awake and any(m is module for _, m in self.e.modules()):
            self.found.setdefault(self.eye.turn, where)

    def close(self) -> None:
        for turn, where in self.found.items() if not self.drawn else ():
            self.note("S24 attention", where, turn)


def _unaware(frame: FrameType, module: nn.Module) -> bool:
    """Whether the call on this line is given a number of the module, as it is, and nothing here asks for its mode."""
    code = frame.f_code
    try:
        lines, begin = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return False
    if type(module).train is not nn.Module.train or any(_name(part) in MODES for part in ast.walk(tree)):
        return False
    calls = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and _name(c.func) == ATTENDS]
    here = [c for c in calls if c.lineno <= frame.f_lineno - begin + 1 <= (c.end_lineno or c.lineno)]
    given = [k.value for c in here for k in c.keywords if k.arg == "dropout_p"]
    given = given or [a for c in here for a in c.args[FIFTH : FIFTH + 1]]
    return len(here) == 1 and len(given) == 1 and _kept(given[0], code.co_varnames[0], module)


def _kept(given: ast.expr, me: str, module: nn.Module) -> bool:
    """self.dropout, a number of its own; or self.drop.p of a dropout."""
    if isinstance(given, ast.Attribute) and given.attr == "p" and isinstance(given.value, ast.Attribute):
        inner = getattr(module, given.value.attr, None)
        return _name(given.value.value) == me and isinstance(inner, nn.modules.dropout._DropoutNd)
    plain = isinstance(given, ast.Attribute) and isinstance(given.value, ast.Name) and given.value.id == me
    return plain and isinstance(vars(module).get(given.attr), float)
