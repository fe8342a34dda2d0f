"""Programs that raise: which line of the program did it, with which sizes.

Python's traceback ends inside torch, and often at a line that is not to blame: a tensor is changed
in place in one line, another line had kept it for the backward pass, and a third one,
`loss.backward()`, raises. What an error says is in its message; which tensors it means is in the
frames of the traceback, in the syntax tree of the program, and in the events of the watch (which
line made a step, which line called a model).

    read(error, e)      an error that people meet often, as a Raised; None for any other

Footgun: a traceback holds all tensors of the program. Nothing here keeps a frame.
"""

import ast
import linecache
import re
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from loopdoctor.evidence import Call, Entropy, Evidence, Step
from loopdoctor.places import Place, spell, whose

KEEPS_ITS_RESULT = {
    "Sigmoid",
    "Tanh",
    "Exp",
    "Softmax",
    "LogSoftmax",
    "Relu",
    "Sqrt",
    "Rsqrt",
    "Reciprocal",
    "Elu",
}
FEW = 3  # lines that are named where several may be meant
NODES = 3000  # of a graph that are looked at

IN_PLACE = re.compile(
    r"modified by an inplace operation: \[(\S+) \[?([\d, ]*)\]?\](?:, which is output \d+ of "
    r"(\w+))?, "
    r"is at version (\d+); expected version (\d+)"
)
SIZES = (
    re.compile(r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)"),
    re.compile(r"[Tt]he size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)"),
    re.compile(r"Expected input batch_size \((\d+)\) to match target batch_size \((\d+)\)"),
    re.compile(r"[Tt]arget size .*must be (?:the same as|equal to) .*size|Using a target size"),
    re.compile(r"shape '\[.*\]' is invalid for input of size \d+"),
    re.compile(
        r"Sizes of tensors must match except in dimension|stack expects each tensor to be "
        r"equal size"
    ),
    re.compile(
        r"[Gg]iven groups=.*expected input\[|Expected \dD .*input|normalized_shape|Expected "
        r"size for first two"
    ),
    re.compile(r"Expected more than 1 value per channel|Calculated padded input size per channel"),
    re.compile(r"input\.size\(-1\) must be equal to input_size|weight of size .*but got"),
)
DTYPES = re.compile(
    r"must have the same dtype|expected scalar type (\w+) but found (\w+)|Found dtype (\w+) "
    r"but expected (\w+)|"
    r"expected m1 and m2 to have the same dtype|result type (\w+) can't be cast|"
    r"expected .*[Tt]ensor for argument.*indices.*got|not implemented for '(\w+)'"
)
DEVICES = re.compile(
    r"Expected all tensors to be on the same device|should be the same|found at least two devices"
)


class Raised(NamedTuple):
    """What a check is told of an error."""

    fault: str  # of R1
    observed: str
    at: tuple[Place, ...] = ()  # lines that are to blame, the one to change first
    blanks: dict[str, Any] = {}


def read(error: BaseException | None, e: Evidence) -> Raised | None:
    """Read an error that ended the program, while its traceback is still there."""
    if not isinstance(error, (RuntimeError, IndexError, ValueError)):
        return None
    try:
        return _read(error, e)
    except Exception:  # the program's own error must come out, whatever is wrong with reading it
        e.faults.append(f"raising: {traceback.format_exc(limit=-3)}")
        return None


def _read(error: BaseException, e: Evidence) -> Raised | None:
    frames = list(_frames(error))
    own = [(frame, line) for frame, line in frames if whose(frame.f_code.co_filename) == "program"]
    if not own:
        return None
    frame, line = own[-1]
    text = str(error)
    for reads in (
        _in_place,
        _second_backward,
        _not_a_number,
        _index,
        _target,
        _dtypes,
        _devices,
        _sizes,
    ):
        raised = reads(text, frames, frame, line, e)
        if raised is not None:
            return raised
    return None


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a traceback and their lines, the outermost first."""
    here = error.__traceback__
    while here is not None:
        yield here.tb_frame, here.tb_lineno
        here = here.tb_next


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].partition(" Hint: ")[0]


# --------------------------------------------------------------------------------- changed in place
def _in_place(text: str, frames: list, frame: FrameType, line: int, e: Evidence) -> Raised | None:
    """Return a tensor that the backward pass needs was changed after it was kept."""
    match = IN_PLACE.search(text)
    if match is None:
        return None
    shape = tuple(int(size) for size in match[2].split(",") if size.strip())
    made_by, version = re.sub(r"Backward\d*$", "", match[3] or ""), int(match[4])
    observed = f"a tensor {shape} is at version {version}, and was kept at version {match[5]}"

    moved = _weights_moved(shape, version, e)
    if moved is not None:
        step, call = moved
        blanks = {"changed": _spelled(step), "needed": _spelled(call)}
        return Raised("stepped-before-backward", observed, _some(step, call), blanks)

    for name in _tensors_named(frame, shape, version):
        lines = _changed_and_kept(frame, line, name, made_by)
        if lines is not None:
            changed, kept = ((frame.f_code.co_filename, number) for number in lines)
            blanks = {"name": name, "changed": _spelled(changed), "needed": _spelled(kept)}
            return Raised("changed-in-place", observed, (changed, kept), blanks)

    lines = _in_place_lines(e)
    several = f"; {len(lines)} lines of the model change something in place" if lines else ""
    return Raised(
        "changed-in-place/somewhere", observed + several, lines[:FEW] or ((_file(frame), line),)
    )


def _weights_moved(
    shape: tuple[int, ...], version: int, e: Evidence
) -> tuple[Place | None, Place | None] | None:
    """Where an optimizer stepped after a model had been called, and which call still needs the old
    weights.
    """
    for step in reversed(e.of(Step)):
        optimizer = e.optimizers[step.optimizer].object
        held = (
            []
            if optimizer is None
            else [p for group in optimizer.param_groups for p in group["params"]]
        )
        mine = {id(p) for p in held if _written(p) == version and sorted(p.shape) == sorted(shape)}
        if not mine:
            continue
        before = e.events[: next(n for n, event in enumerate(e.events) if event is step)]
        for call in reversed([event for event in before if isinstance(event, Call) and event.grad]):
            module = call.module()
            if module is not None and any(id(p) in mine for p in module.parameters()):
                return step.place, call.place
        return step.place, None
    return None


def _tensors_named(frame: FrameType, shape: tuple[int, ...], version: int) -> list[str]:
    """Names in a frame of tensors with this shape that were changed so often."""
    space = {**frame.f_globals, **frame.f_locals}
    tensors = {name: value for name, value in space.items() if isinstance(value, Tensor)}
    return [
        name for name, t in tensors.items() if tuple(t.shape) == shape and _written(t) == version
    ]


def _written(t: Tensor) -> int | None:
    """How often a tensor was written to; one that was made under inference_mode does not count
    that.
    """
    return None if t.is_inference() else t._version


def _changed_and_kept(
    frame: FrameType, line: int, name: str, made_by: str
) -> tuple[int, int] | None:
    """Return the last line before `line` that changes a name in place, and the line before it that
    kept the tensor.
    """
    changes, reads, makes = [], [], []
    for node in _statements(frame):
        if node.lineno > line:
            continue
        if _changes(node, name):
            changes.append(node.lineno)
        elif isinstance(node, ast.Assign) and any(
            name in _names(target) for target in node.targets
        ):
            makes.append(node.lineno)
        elif name in _read_names(node):
            reads.append(node.lineno)
    if not changes:
        return None
    changed = max(changes)
    made = max((n for n in makes if n < changed), default=None)
    used = [n for n in reads if (made or 0) < n < changed]
    kept = made if made_by in KEEPS_ITS_RESULT or not used else used[0]
    return (changed, kept) if kept is not None else None


def _changes(node: ast.stmt, name: str) -> bool:
    """`name += 1`, `name[...] = 1`, `name.add_(1)`, `f(out=name)`."""
    if isinstance(node, ast.AugAssign):
        return name in _names(node.target) or _base(node.target) == name
    if isinstance(node, ast.Assign) and any(
        isinstance(t, ast.Subscript) and _base(t) == name for t in node.targets
    ):
        return True
    for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
        method = call.func
        if isinstance(method, ast.Attribute) and _base(method.value) == name:
            if method.attr.endswith("_") and not method.attr.endswith("__"):
                return True
        if any(k.arg == "out" and name in _names(k.value) for k in call.keywords):
            return True
    return False


def _in_place_lines(e: Evidence) -> tuple[Place, ...]:
    """Lines in the forwards of the program's own modules that change something in place."""
    found: dict[Place, None] = {}
    for _, module in e.modules():
        forward = getattr(type(module), "forward", None)
        code = getattr(forward, "__code__", None)
        if code is None or whose(code.co_filename) != "program":
            continue
        for node in _statements_of(code):
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            if any(_changes(node, name) for name in names):
                found[code.co_filename, node.lineno] = None
    return tuple(found)


# -------------------------------------------------------------------------------- a second backward
def _second_backward(
    text: str, frames: list, frame: FrameType, line: int, e: Evidence
) -> Raised | None:
    """Return the graph of a loss was used up by a backward before."""
    if "backward through the graph a second time" not in text:
        return None
    observed = "backward() came to a part of the graph that an earlier backward() has freed"
    carried = _carried(frame, line)
    if carried is not None:
        name, number = carried
        at = (_file(frame), number)
        return Raised("graph-carried-on", observed, (at,), {"name": name, "line": _spelled(at)})
    others = [n for n in _backward_lines(frame) if n < line]
    at = tuple((_file(frame), number) for number in (*others[-1:], line))
    return Raised("graph-used-twice", observed, at)


def _carried(frame: FrameType, line: int) -> tuple[str, int] | None:
    """Return a name that a loop reads before it sets it, and that holds a graph: its value comes
    from the step before.
    """
    loops = [
        n
        for n in _nodes(frame)
        if isinstance(n, (ast.For, ast.While)) and n.lineno <= line <= n.end_lineno
    ]
    space = {**frame.f_globals, **frame.f_locals}
    for loop in reversed(loops):  # the innermost first
        set_before: set[str] = set()
        read_first: set[str] = set()
        sets: dict[str, int] = {}
        for node in sorted(
            (n for n in ast.walk(loop) if isinstance(n, ast.stmt)), key=lambda n: n.lineno
        ):
            if node is loop or isinstance(node, (ast.For, ast.While, ast.If, ast.With, ast.Try)):
                continue
            read_first |= _read_names(node) - set_before
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in set().union(*map(_names, targets)):
                    if isinstance(node, ast.AugAssign) and name not in set_before:
                        read_first.add(name)
                    set_before.add(name)
                    sets[name] = node.lineno
        for name, number in sets.items():
            if name in read_first and _has_graph(space.get(name)):
                return name, number
    return None


def _has_graph(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    return isinstance(value, (tuple, list)) and any(map(_has_graph, value))


def _backward_lines(frame: FrameType) -> list[int]:
    """Lines of a frame's code that call `.backward(...)`."""
    calls = (
        n for n in _nodes(frame) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    )
    return sorted(call.lineno for call in calls if call.func.attr == "backward")


# ---------------------------------------------------------------------------------------- no number
def _not_a_number(
    text: str, frames: list, frame: FrameType, line: int, e: Evidence
) -> Raised | None:
    """Anomaly mode has found the function whose derivative is NaN; each node of the graph keeps
    where it was made.
    """
    match = re.search(r"Function '((\w+?)(?:Backward\d*)?)' returned nan values", text)
    if match is None:
        return None
    lines = [
        place
        for node in _graph(frames)
        if node.name() == match[1] and (place := _made_at(node)) is not None
    ]
    at = tuple(dict.fromkeys(lines))[:FEW] or ((_file(frame), line),)
    return Raised("derivative-is-nan", _first_line(text), at, {"function": match[2].lower()})


def _graph(frames: list) -> Iterator[Any]:
    """Yield the nodes behind the loss whose backward raised, the last one first."""
    found = [inner.f_locals.get("tensors") for inner, _ in frames]
    given = [
        t
        for tensors in found
        for t in (tensors if isinstance(tensors, (tuple, list)) else (tensors,))
    ]
    queue = [loss.grad_fn for loss in [t for t in given if isinstance(t, Tensor)][-1:]]
    seen = set()
    while queue and len(seen) < NODES:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        queue += [edge for edge, _ in node.next_functions]


def _made_at(node: Any) -> Place | None:
    """Return the line of the program that made a node under anomaly mode."""
    lines = re.findall(r'File "(.+?)", line (\d+)', "".join(node.metadata.get("traceback_") or ()))
    return next(
        ((file, int(number)) for file, number in reversed(lines) if whose(file) == "program"), None
    )


# ------------------------------------------------------------------------------------------ indices
def _index(text: str, frames: list, frame: FrameType, line: int, e: Evidence) -> Raised | None:
    """Return an id that a table has no row for."""
    if "index out of range in self" not in text:
        return None
    for inner, _ in reversed(frames):
        ids, table = inner.f_locals.get("input"), inner.f_locals.get("weight")
        if (
            isinstance(ids, Tensor)
            and isinstance(table, Tensor)
            and not ids.is_floating_point()
            and ids.numel()
        ):
            rows, low, high = table.shape[0], int(ids.min()), int(ids.max())
            wrong = high if high >= rows else low
            where = _layer(frames, frame, e)
            observed = (
                f"{where or 'a table'} of {rows} rows was asked for row {wrong}; ids "
                f"from {low} to {high}"
            )
            blanks = {"id": wrong, "rows": rows, "last": rows - 1}
            return Raised("id-outside-table", observed, ((_file(frame), line),), blanks)
    return None


def _target(text: str, frames: list, frame: FrameType, line: int, e: Evidence) -> Raised | None:
    """Return a label that the answers have no class for."""
    match = re.search(r"Target (-?\d+) is out of bounds", text)
    if match is None:
        return None
    for inner, _ in reversed(frames):
        answers, labels = inner.f_locals.get("input"), inner.f_locals.get("target")
        if (
            isinstance(answers, Tensor)
            and isinstance(labels, Tensor)
            and answers.dim()
            and labels.numel()
        ):
            classes = answers.shape[1] if answers.dim() > 1 else answers.shape[0]
            observed = (
                f"labels from {int(labels.min())} to {int(labels.max())}, answers of "
                f"{classes} classes"
            )
            blanks = {"label": int(match[1]), "classes": classes, "last": classes - 1}
            return Raised("label-outside-classes", observed, ((_file(frame), line),), blanks)
    return None


# --------------------------------------------------------------------------- dtypes, devices, sizes
def _dtypes(text: str, frames: list, frame: FrameType, line: int, e: Evidence) -> Raised | None:
    if DTYPES.search(text) is None:
        return None
    at, observed = (_file(frame), line), _first_line(text)
    # some versions of torch let a loss take two dtypes, and its backward raises: the line of the
    # loss is to blame
    mixed = [loss for loss in e.of(Entropy) if len(set(loss.dtypes)) > 1 and loss.place is not None]
    if "Found dtype" in text and mixed:
        at = mixed[-1].place
        observed = (
            f"{observed}: {mixed[-1].name} was given {' and '.join(map(str, mixed[-1].dtypes))}"
        )
    layer = _layer(frames, frame, e)
    return Raised("dtypes-differ", f"{observed}{f', in {layer}' if layer else ''}", (at,))


def _devices(text: str, frames: list, frame: FrameType, line: int, e: Evidence) -> Raised | None:
    if DEVICES.search(text) is None or "device" not in text and "cuda" not in text:
        return None
    layer = _layer(frames, frame, e)
    observed = f"{_first_line(text)}{f', in {layer}' if layer else ''}"
    return Raised("devices-differ", observed, ((_file(frame), line),))


def _sizes(text: str, frames: list, frame: FrameType, line: int, e: Evidence) -> Raised | None:
    if not any(pattern.search(text) for pattern in SIZES):
        return None
    layer = _layer(frames, frame, e)
    observed = f"{_first_line(text)}{f', in {layer}' if layer else ''}"
    given = _given(frames)
    if given:
        observed += f", which was given {given}"
    return Raised("sizes-differ", observed, ((_file(frame), line),))


def _layer(frames: list, frame: FrameType, e: Evidence) -> str:
    """Return the innermost layer of torch's own under way, by its name in a model or in the
    program.
    """
    for inner, _ in reversed(frames):
        module = inner.f_locals.get("self")
        if not isinstance(module, nn.Module) or whose(inner.f_code.co_filename) != "torch":
            continue
        if inner.f_code.co_name != "forward" or isinstance(module, nn.Sequential):
            continue
        names = [name for name, m in e.modules() if m is module and name]
        names += [
            name for name, value in {**frame.f_globals, **frame.f_locals}.items() if value is module
        ]
        kind = repr(module) if not list(module.children()) else type(module).__name__
        return f"the layer {names[0]}, {kind}" if names else f"a layer {kind}"
    return ""


def _given(frames: list) -> str:
    """Return the shape of what the innermost layer of torch was given."""
    for inner, _ in reversed(frames):
        if isinstance(inner.f_locals.get("self"), nn.Module) and inner.f_code.co_name == "forward":
            x = inner.f_locals.get("input", inner.f_locals.get("x"))
            if whose(inner.f_code.co_filename) == "torch" and isinstance(x, torch.Tensor):
                return str(tuple(x.shape))
    return ""


# ---------------------------------------------------------------------------------- the syntax tree
def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _spelled(place: Place | None) -> str:
    return "a line that is not known" if place is None else spell(place)


def _some(*places: Place | None) -> tuple[Place, ...]:
    return tuple(place for place in places if place is not None)


def _nodes(frame: FrameType) -> list[ast.AST]:
    """Return the syntax tree of a frame's code, as a list; empty where there is no text of it."""
    return _nodes_of(frame.f_code)


def _nodes_of(code) -> list[ast.AST]:
    text = "".join(linecache.getlines(code.co_filename))
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = [number for *_, number in code.co_lines() if number]
    first, last = min(lines, default=0), max(lines, default=0)
    return [n for n in ast.walk(tree) if first <= getattr(n, "lineno", -1) <= last]


def _statements(frame: FrameType) -> list[ast.stmt]:
    return _statements_of(frame.f_code)


def _statements_of(code) -> list[ast.stmt]:
    """Statements without others in them, in the order of their lines."""
    plain = [n for n in _nodes_of(code) if isinstance(n, ast.stmt) and not hasattr(n, "body")]
    return sorted(plain, key=lambda node: node.lineno)


def _names(target: ast.AST) -> set[str]:
    """Names that an assignment sets: `a`, `a, b`, `[a, *b]`."""
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, (ast.Tuple, ast.List)):
        return set().union(*map(_names, target.elts)) if target.elts else set()
    return _names(target.value) if isinstance(target, ast.Starred) else set()


def _base(node: ast.AST) -> str:
    """Return the name under subscripts and attributes: `a` of `a[0].data`."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _read_names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
