"""Which state dicts were loaded into which modules, from the import of loopdoctor on.

    model.load_state_dict({"module." + name: ...}, strict=False)
    takes nothing and says nothing

A checkpoint is loaded before a watch begins, and what was left out is returned to nobody. So from
the import on `nn.Module.load_state_dict` is listened to: of each load that came to an end a `Load`
is kept, with the names that were missing and those that were not expected, and with a weak
reference to the module. It holds no tensor. A load is forgotten when a later one brings what it
left out, be it through a part of the module or through a wrapper around it.

Weights may come in by other means than a load: by `copy_`, tensor for tensor. So of some tensors
that were left out a few numbers are kept, and where these are others at the first backward of a
watch, they were brought (`brought`).

Footgun: a load of which all tensors are the module's own (`own = model.state_dict()`, updated with
what a filter let through, which is nothing) ends well by every other sign. After `assign=True` any
load looks like that, so it is asked before. Only plain dicts are looked into: others may read a
file for each value.
"""

import itertools
import math
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MOST, NAMES = 64, 5000  # loads that are kept, names of each list
HELD, NUMBERS = 64, 4  # tensors of which numbers are kept, and how many of each
ROUNDING = 2**-7  # of numbers that were cast since
MARK = "_loopdoctor_loads"  # of the function that listens: what it has kept
Shapes = dict[str, tuple[int, ...] | None]  # None where it is not known


class Load(NamedTuple):
    """One call of load_state_dict that came to an end."""

    number: int  # of this process, from 0 on
    module: Callable[[], nn.Module | None]  # weak reference
    kind: str
    given: int  # tensors, or whatever the state dict holds
    keys: int  # that the module has
    lacking: int  # of them, that were not given
    extra: int  # that were given and that the module does not have
    missing: Shapes  # those that were not given, or the first of them
    unexpected: Shapes  # those that it does not have, or the first of them
    # of those that it does not have, which are dicts of tensors; the names of these are there
    deeper: tuple[str, ...]
    own: bool  # all that was given were tensors of the module
    place: str  # file and line of the program
    # some of those that were not given -> a few of their numbers after the load
    held: dict[str, list[float]] = {}

    @property
    def empty(self) -> bool:
        """Nothing can have come in, whatever the names."""
        return self.own or not self.given


class Kept:
    """What the function that listens has kept. It survives a second import of this module."""

    def __init__(self):
        self.loads: list[Load] = []
        self.numbers, self.next = itertools.count(), 0
        self.lock, self.inside = threading.Lock(), threading.local()

    def add(self, load: Load, module: nn.Module) -> None:
        with self.lock:
            here = [(old, m) for old in self.loads if (m := old.module()) is not None]
            if not load.empty:
                taken = (
                    _taken(load, module)
                    if any(old.empty or old.extra for old, _ in here)
                    else set()
                )
                here = [(old, m) for old, m in here if not _over(old, m, load, module, taken)]
            self.loads = [*(old for old, _ in here), load][-MOST:]


def _over(old: Load, its: nn.Module, load: Load, module: nn.Module, taken: set[int]) -> bool:
    """Return a later load of the same module leaves out no more, or one of any module has brought
    what this one left out.
    """
    if its is module and load.missing.keys() <= old.missing.keys():
        return True
    lost = _lost(old, its) if old.empty or old.extra else set()
    return 2 * len(lost & taken) >= len(lost) > 0


def _lost(load: Load, module: nn.Module) -> set[int]:
    """Return the tensors that a load has left as they were."""
    return {
        id(member(module, name)) for name in (_names(module) if load.empty else load.missing)
    } - {id(None)}


def _taken(load: Load, module: nn.Module) -> set[int]:
    return {id(member(module, name)) for name in _names(module) if name not in load.missing}


def _names(module: nn.Module) -> list[str]:
    pairs = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return [name for name, _ in pairs]


def kept() -> list[Load]:
    """Return the last loads, in order, of modules that are still there."""
    return [load for load in KEPT.loads if load.module() is not None]


def count() -> int:
    """How many loads there were: the number that the next one will have."""
    return KEPT.next


# ------------------------------------------------------------------------------------ a few numbers
def brought() -> dict[int, set[str]]:
    """Return number of a load -> the tensors that it left out and that hold other numbers now."""
    return {
        load.number: names for load in kept() if load.held and (names := _quietly(_brought, load))
    }


def _brought(load: Load) -> set[str]:
    """Return what was not looked at went the way of the one before it, for parts are brought as a
    whole. A tensor that holds one number alone and held it before says nothing: a bias of zeros may
    have come in.
    """
    now, names, other = _held(load.module(), load.held), set(), False
    for name in load.missing:
        if name in now:
            changed = not all(map(_close, load.held[name], now[name]))
            other = changed if changed or len(set(now[name])) > 1 else other
        if other:
            names.add(name)
    return names


def _close(before: float, after: float) -> bool:
    return abs(after - before) <= ROUNDING * abs(before) or math.isnan(before)


def _held(module: nn.Module, names: Iterable[str]) -> dict[str, list[float]]:
    """Return a few numbers of each tensor that can be read, with one wait for each device and
    dtype.
    """
    if torch._C._len_torch_dispatch_stack():
        return {}
    few: dict[tuple, dict[str, list[Tensor]]] = {}
    with torch.no_grad():
        for name in names:
            if _readable(t := member(module, name)):
                few.setdefault((t.device, t.dtype), {})[name] = _few(t.detach())
        rows = [
            (each, torch.stack([x for four in each.values() for x in four]).tolist())
            for each in few.values()
        ]
    return {
        name: row[NUMBERS * i : NUMBERS * (i + 1)]
        for each, row in rows
        for i, name in enumerate(each)
    }


def _readable(t: Any) -> bool:
    plain = (Tensor, nn.Parameter, getattr(nn, "Buffer", Tensor))  # torch 2.4 has no Buffer
    if type(t) not in plain or not t.is_floating_point() or t.layout != torch.strided:
        return False
    if t.is_meta or t.is_nested or not t.numel() or not t.untyped_storage().nbytes():
        return False
    return not t.is_cuda or not torch.cuda.is_current_stream_capturing()


def _few(t: Tensor) -> list[Tensor]:
    """Evenly spread, the first and the last among them; by their places, so nothing is copied
    whatever the strides.
    """
    found = []
    for i in range(NUMBERS):
        at, place = i * (t.numel() - 1) // (NUMBERS - 1), []
        for size in reversed(t.shape):
            at, last = divmod(at, size)
            place.insert(0, last)
        found.append(t[tuple(place)])
    return found


def _left(
    module: nn.Module, missing: list[str], unexpected: list[str], keys: int
) -> dict[str, list[float]]:
    """Of loads that look as if names did not fit, a few numbers of what was left out."""
    if not unexpected or 2 * len(missing) < keys:
        return {}
    names = [name for name in missing[:NAMES] if _readable(member(module, name))]
    return _held(module, names[:: -(-len(names) // HELD)] if names else ())


# ---------------------------------------------------------------------------------------- listening
def _listening(original: Callable, kept: Kept) -> Callable:
    """Return the same function; what it was given and what it returned is noted, of the outermost
    call.
    """

    @wraps(original)
    def load_state_dict(*args, **kwargs):
        if torch.compiler.is_compiling() or getattr(kept.inside, "on", False):
            return original(*args, **kwargs)
        kept.inside.on = True
        try:
            before = _quietly(_before, args, kwargs)
            result = original(*args, **kwargs)
            if before is not None:
                _quietly(_note, kept, before, result)
            return result
        finally:
            kept.inside.on = False

    setattr(load_state_dict, MARK, kept)
    return load_state_dict


def _quietly(function: Callable, *args) -> Any:
    """Return a fault in listening must never end a load."""
    try:
        with torch._C.DisableTorchFunction():
            return function(*args)
    except Exception:
        return None


def _before(args: tuple, kwargs: dict) -> tuple[nn.Module, Any, bool]:
    """Return the module, the state dict, and whether all of it are the module's own tensors."""
    given = dict(zip(("self", "state_dict"), args)) | kwargs
    module, state = given["self"], given["state_dict"]
    plain = type(state) in (dict, OrderedDict)
    own = (
        plain
        and len(state) > 0
        and all(_same(value, member(module, name)) for name, value in state.items())
    )
    return module, state, own


def _note(kept: Kept, before: tuple[nn.Module, Any, bool], result: Any) -> None:
    module, state, own = before
    missing, unexpected = (
        list(getattr(result, kind, ())) for kind in ("missing_keys", "unexpected_keys")
    )
    plain, number = type(state) in (dict, OrderedDict), next(kept.numbers)
    keys = len(state) - len(unexpected) + len(missing)
    load = Load(
        number,
        weakref.ref(module),
        type(module).__name__,
        given=len(state),
        keys=keys,
        lacking=len(missing),
        extra=len(unexpected),
        missing={name: _shape(member(module, name)) for name in missing[:NAMES]},
        unexpected=dict(itertools.islice(_unknown(state if plain else {}, unexpected), NAMES)),
        deeper=tuple(
            name for name in unexpected[:NAMES] if plain and isinstance(state.get(name), dict)
        ),
        own=own,
        place=_place(),
        held=_quietly(_left, module, missing, unexpected, keys) or {},
    )
    kept.next = number + 1
    kept.add(load, module)


def _unknown(state: dict, names: list[str]) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """Names that a module does not have, and shapes; of a dict of tensors in a state dict, what is
    in it.
    """
    for name in names:
        value = state.get(name)
        if isinstance(value, dict):
            yield from (
                (f"{name}.{n}", _shape(x)) for n, x in value.items() if isinstance(x, Tensor)
            )
        else:
            yield name, _shape(value)


def member(module: nn.Module, name: str) -> Any:
    """Return a parameter or a buffer by its name; None where there is none."""
    *path, last = name.split(".")
    for part in path:
        module = getattr(module, "_modules", {}).get(part)
    held = [getattr(module, kind, {}).get(last) for kind in ("_parameters", "_buffers")]
    return next((x for x in held if x is not None), None)


def _same(value: Any, own: Any) -> bool:
    """Whether it is the tensor itself, or a view of all of it."""
    if not isinstance(value, Tensor) or not isinstance(own, Tensor):
        return False
    return value is own or value.untyped_storage()._cdata == own.untyped_storage()._cdata


def _shape(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, Tensor) or isinstance(value, nn.parameter.UninitializedTensorMixin):
        return None
    return tuple(value.shape)


def _place() -> str:
    """Where the program called."""
    frame = sys._getframe(1)
    while frame is not None and _passed(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _passed(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "loopdoctor")


def _listen() -> Kept:
    """Once for each process: a second import, or a reload, goes on with what the first has kept."""
    there = getattr(nn.Module.load_state_dict, MARK, None)
    if there is None:
        there = Kept()
        nn.Module.load_state_dict = _listening(nn.Module.load_state_dict, there)
    return there


KEPT = _listen()
