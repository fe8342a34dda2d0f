"""Attention whose dropout stays on when the model is evaluated: scaled_dot_product_attention knows
no mode.

    F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
    F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
    was meant

Either it is seen in a module that is in eval mode, without gradients; or the line that calls it is
read: it gives a number that the module keeps, and neither the function around it nor who calls that
says anything of training.

Footguns: an attention that is drawn on purpose (Monte Carlo dropout) is asked several times the
same, or for copies of rows at once, or some dropouts are left awake. A module, or one that holds
it, may set its number to 0 in a train() of its own or in another method, and a program before it
validates, which may be much later; or another model is evaluated that holds 0. Or the number is
computed where it is asked for, and a function that is given it is told by who calls it.
"""

import ast
import dis
import functools
import gc
import inspect
import sys
import textwrap
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from loopdoctor.eye import Eye, Op, Watcher
from loopdoctor.places import whose
from loopdoctor.watchers.layers.dropouts import _name

ATTENDS = "scaled_dot_product_attention"
BETWEEN = ("loopdoctor/eye.py", "layers/attention_dropouts.py", "torch/overrides.py")
MODES = {"training", "train", "eval", "is_training"}
FIFTH = 4  # dropout_p, where it is given without its name
DISTINCT = 0.75  # of the rows that are asked for, where each is drawn once


class AttentionDropouts(Watcher):
    names = {ATTENDS}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.read: set[tuple] = set()  # calls whose line was read
        self.found: dict[int, tuple[str, int]] = {}  # step -> where, and the id of the module
        # modules, by their kinds, and what they call their number
        self.kept: set[tuple[type, str]] = set()
        # id of a module -> the sum of what asked it last, in eval mode
        self.last: dict[int, float] = {}
        self.drawn = False  # asked the same again
        self.calm: set[int] = set()  # ids of modules that dropped nothing in eval mode

    def saw(self, op: Op) -> None:
        p = op.kwargs.get("dropout_p", op.args[FIFTH] if len(op.args) > FIFTH else 0.0)
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.endswith(BETWEEN):
            frame = frame.f_back
        if (
            not isinstance(p, float)
            or frame is None
            or whose(frame.f_code.co_filename) != "program"
        ):
            return
        code, line = frame.f_code, frame.f_lineno
        module = _owner(frame)
        if not isinstance(module, nn.Module):
            return
        where = f"{type(module).__name__}.{code.co_name}, line {line}"
        if not p > 0:
            if not module.training:
                self.calm.add(id(module))
        elif not module.training and not self.eye.grad:
            self._evaluated(module, op, where)
        elif module.training and (code, line) not in self.read:
            self.read.add((code, line))
            name = _unaware(frame, module)
            if name and not self._switched(module, name):
                self.kept.add((type(module), name))
                self.found.setdefault(self.eye.turn, (where, id(module)))

    def _switched(self, module: nn.Module, name: str) -> bool:
        """Return what holds this attention has a train() of its own, or a method that sets the
        number: it may see to it.
        """
        parts = (part for model in self.e.models for part in model.modules())
        seeing = (part for part in parts if _own_train(part) or _sets(type(part), name))
        return any(m is module for part in seeing for m in part.modules())

    def _evaluated(self, module: nn.Module, op: Op, where: str) -> None:
        rows = op.given[0].double().flatten(1).sum(1)
        asked, copies = (
            float(rows.sum()),
            len(rows.round(decimals=4).unique()) < DISTINCT * len(rows),
        )
        self.drawn = self.drawn or copies or self.last.get(id(module)) == asked
        self.last[id(module)] = asked
        awake = any(m.training for model in self.e.models for m in model.modules())
        if not awake and any(m is module for _, m in self.e.modules()):
            self.found.setdefault(self.eye.turn, (where, id(module)))

    def close(self) -> None:
        there = gc.get_objects() if self.kept else ()
        off = any(
            (type(m), name) in self.kept and vars(m).get(name) == 0
            for m in there
            for _, name in self.kept
        )
        for turn, (where, module) in self.found.items() if not (self.drawn or off) else ():
            if module not in self.calm:
                self.note("S24 attention", where, turn)


def _unaware(frame: FrameType, module: nn.Module) -> str:
    """Return the name of a number of the module that the call on this line is given as it is, where
    nothing here asks for its mode.
    """
    code = frame.f_code
    tree, begin = _read(code)
    if type(module).train is not nn.Module.train or _asks(frame, module):
        return ""
    calls = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and _name(c.func) == ATTENDS]
    here = [
        c for c in calls if c.lineno <= frame.f_lineno - begin + 1 <= (c.end_lineno or c.lineno)
    ]
    given = [k.value for c in here for k in c.keywords if k.arg == "dropout_p"]
    given = given or [a for c in here for a in c.args[FIFTH : FIFTH + 1]]
    plain = len(here) == 1 and len(given) == 1 and _kept(given[0], code.co_varnames[0], module)
    return given[0].attr if plain else ""


def _asks(frame: FrameType | None, module: nn.Module) -> bool:
    """Whether this function, or one of the same module that calls it, says anything of training."""
    while frame is not None and _owner(frame) is module:
        if any(_name(part) in MODES for part in ast.walk(_read(frame.f_code)[0])):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=64)
def _read(code: CodeType) -> tuple[ast.Module, int]:
    """Return a function, and the line that it begins on; nothing where it can't be read."""
    try:
        lines, begin = inspect.getsourcelines(code)
        return ast.parse(textwrap.dedent("".join(lines))), begin
    except (OSError, SyntaxError, TypeError):
        return ast.Module([], []), 0


def _owner(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _own_train(module: nn.Module) -> bool:
    code = getattr(type(module).train, "__code__", None)
    return code is None or whose(code.co_filename) == "program"


def _sets(kind: type, name: str) -> bool:
    """Whether a method of the program, but for the one that makes it, sets the attribute of this
    name.
    """
    own = [vars(c).values() for c in kind.__mro__ if c.__module__.partition(".")[0] != "torch"]
    codes = [
        f.__code__
        for fs in own
        for f in fs
        if isinstance(f, FunctionType) and f.__name__ != "__init__"
    ]
    here = [dis.get_instructions(code) for code in codes if name in code.co_names]
    return any(
        i.opname == "STORE_ATTR" and i.argval == name for instructions in here for i in instructions
    )


def _kept(given: ast.expr, me: str, module: nn.Module) -> bool:
    """self.dropout, a number of its own; or self.drop.p of a dropout."""
    if (
        isinstance(given, ast.Attribute)
        and given.attr == "p"
        and isinstance(given.value, ast.Attribute)
    ):
        inner = getattr(module, given.value.attr, None)
        return _name(given.value.value) == me and isinstance(inner, nn.modules.dropout._DropoutNd)
    plain = (
        isinstance(given, ast.Attribute)
        and isinstance(given.value, ast.Name)
        and given.value.id == me
    )
    return plain and isinstance(vars(module).get(given.attr), float)
