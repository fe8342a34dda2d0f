"""Dropout by a function that is not told whether the model is in training: `F.dropout(x, 0.5)`.

nn.Dropout asks its module. The function does not know one: its third argument, training, is True
unless it is given. So `model.eval()` leaves it on, and the answers of the finished model are
random.

The mode sees the function with all its arguments filled in, whoever gave them. So the line that
called it is read, and of several calls on it the one that was made (w = F.dropout(w, p,
self.training) if fast else F.dropout(w, p)): the call must have neither a third argument nor
training=, and the function around it must not ask for `training` but for another dropout.

Footgun: where the text of a program can't be read (a notebook's cell can, code that was made by
exec can't), nothing is said.
"""

import ast
import inspect
import itertools
import sys
import textwrap

from loopdoctor.eye import Eye, Op, Watcher
from loopdoctor.places import whose

NAMES = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}


class Dropouts(Watcher):
    names = NAMES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.read: set[tuple] = set()  # calls whose line was read

    def saw(self, op: Op) -> None:
        if not op.kwargs.get("p", 0.5):
            return
        if not op.kwargs.get("training", True):
            if self.eye.grad and op.given and op.given[0].requires_grad:
                self.note("S11", op.kwargs.get("p", 0.5))
            return
        frame = sys._getframe(1)
        # a module of torch knows its mode
        passed = ("eye.py", "dropouts.py", "overrides.py", "functional.py")
        while frame is not None and frame.f_code.co_filename.endswith(passed):
            frame = frame.f_back
        if frame is None or whose(frame.f_code.co_filename) != "program":
            return  # a module of torch, which knows its mode
        code, line, at = frame.f_code, frame.f_lineno, frame.f_lasti
        if (code, at, op.name) in self.read:
            return
        self.read.add((code, at, op.name))
        if code not in self.e.unaware and unaware(code, line, op.name, at):
            self.e.unaware[code] = (
                f"{code.co_qualname}, line {line}" if sys.version_info > (3, 11) else code.co_name
            )


def unaware(code, line: int, name: str, at: int | None = None) -> bool:
    """Whether the calls of the function on this line say nothing of training, or the one whose
    instruction it is.
    """
    try:
        lines, begin = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return False
    calls = [c for c in ast.walk(tree) if isinstance(c, ast.Call)]
    drops = [c for c in calls if _name(c.func) in NAMES]
    here = [
        c for c in drops if begin + c.lineno - 1 <= line <= begin + (c.end_lineno or c.lineno) - 1
    ]
    here = [c for c in here if _name(c.func) == name]
    place = _place(code, at, begin, len(lines[0]) - len(lines[0].lstrip()))
    here = [
        c for c in here if place == (c.lineno, c.col_offset, c.end_lineno, c.end_col_offset)
    ] or here
    of_others = {id(part) for c in drops for part in ast.walk(c)}
    if any(_name(part) == "training" and id(part) not in of_others for part in ast.walk(tree)):
        return False
    told = any(
        len(c.args) > 2 or any(k.arg in ("training", "train", None) for k in c.keywords)
        for c in here
    )
    starred = any(isinstance(a, ast.Starred) for c in here for a in c.args)
    return bool(here) and not told and not starred


def _place(code, at: int | None, begin: int, indent: int) -> tuple | None:
    """Where an instruction stands in the text of its function, as ast tells it; several calls may
    share a line.
    """
    if at is None or not hasattr(code, "co_positions"):
        return None
    line, last, column, end = next(
        itertools.islice(code.co_positions(), at // 2, None), (None,) * 4
    )
    known = None not in (line, last, column, end)
    return (line - begin + 1, column - indent, last - begin + 1, end - indent) if known else None


def _name(node) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))
