"""What a forward can change beside its tensors: copies of it, while it is called once more.

    self.seen.append(x.shape)         an attribute of the module, or of an object that it holds
    nonlocal calls; calls += 1        a variable around the function, or of its file (global)
    random.Random(1).random()         what a generator of one's own draws next

A model that anneals a temperature by its calls, or draws its noise from its own generator, trains
on to other numbers where somebody calls it between two steps. So a replay looks up, from the
modules on, each place that the program's own code can write to: attributes, the variables that its
functions name, the containers in them. Copies stand there meanwhile, and then all is put back. The
generators of torch, Python and numpy themselves are put back by `aside`.

Of a library's object that the program holds (settings of argparse, a sampler with its generator)
the attributes are copied too. The code of libraries is not followed from there.

Footgun: an iterator can't be copied but for the plain ones, and a replay would use it up; a queue
is shared with other threads or processes. Where there is one the model is not called again, and
what asks for a replay stays unknown.
"""

import contextlib
import copy
import functools
import itertools
import math
import random
import sys
import threading
import types
from collections import UserDict, deque
from collections.abc import Iterator
from functools import partial
from io import IOBase
from typing import Any

import torch
from torch import Tensor, nn

from loopdoctor import unheard
from loopdoctor.places import whose

# of a module; functional_call swaps what counts of it
OWN = {*nn.Module().__dict__, "_flat_weights"}
HELD = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# A packed weight (bitsandbytes) cannot be copied so; nothing writes to it. torch 2.4 has no Buffer.
PLAIN = (Tensor, nn.Parameter, getattr(nn, "Buffer", Tensor))
ATOMS = {int, float, bool, str, bytes, types.NoneType}
# where the classes come from of what is shared with others
QUEUES = {"queue", "_queue", "multiprocessing"}
LOCKS = {"threading", "_thread", *QUEUES}
# iterators that can be copied
REWOUND = (type(iter([])), type(iter(())), type(iter(range(0))), itertools.count)
# things looked at; of a container and those in it; containers in containers
LIMIT, LOOKED, DEEP = 5000, 1000, 4
# things that are copied, of one container and of all: beyond them it is the container alone, which
# undoes an append
ITEMS, ALL_ITEMS = 2000, 20_000
ROOM = 2**26  # bytes of tensors and arrays that are not held by a module
# of a class, or one of its descriptors might be called
DATA = (
    int,
    float,
    str,
    list,
    dict,
    set,
    tuple,
    deque,
    Tensor,
    random.Random,
    torch.Generator,
    types.NoneType,
)
Place = tuple[Any, str]  # a dict, a cell, a class, a function or a partial, and a name in it


@contextlib.contextmanager
def copies(module: nn.Module) -> Iterator[None]:
    """Put copies where a forward of it may write.

    RuntimeError where something can't be copied, or goes to a file.
    """
    found = _Found(module)
    hooks = {_called(f) for m in found.modules for kind in HOOKS for f in getattr(m, kind).values()}
    if writes := unheard.written(found.names, hooks):
        raise RuntimeError(f"a replay would {min(writes)} a second time")
    held = [(m, {kind: dict(getattr(m, kind)) for kind in HELD}) for m in found.modules]
    flags = [(p, p.requires_grad) for p in module.parameters()]
    before = [(place, _read(place)) for place in found.places]
    own, copier = {id(vars(m)) for m in found.modules}, Copier()
    try:
        # others than the parts of this one, whose buffers are swapped anyway
        for m in found.modules[found.inner :]:
            m._buffers.update({name: copier(b) for name, b in m._buffers.items()})
        for place, value in sorted(before, key=lambda each: id(each[0][0]) not in own):
            if id(place[0]) not in own:  # what the modules hold is copied whatever its size
                copier.room = min(copier.room, ROOM)
            if (twin := copier(value)) is not value:
                _write(place, twin)
        yield
    finally:
        for m, kinds in held:  # a mask was made, a weight became a buffer (peft's experts)
            for kind, known in kinds.items():
                getattr(m, kind).clear()
                getattr(m, kind).update(known)
        for owner, was in found.owners:
            for name in set(owner) - set(was):
                del owner[name]
            owner.update(was)
        for place, value in before:
            _write(place, value)
        for p, flag in flags:
            if p.requires_grad != flag:  # disable_adapter sets it
                p.requires_grad_(flag)


class Copier:
    """Tensors, generators and plain containers of them anew, each once; whatever else is in there
    is the same object, and so are tensors and arrays for which the room (bytes) is too small, and
    what is in a container of too many.
    """

    def __init__(self, room: float = math.inf):
        self.room, self.items = room, ALL_ITEMS
        self.twins: dict[int, Any] = {}

    def __call__(self, x: Any) -> Any:
        if type(x) in ATOMS:
            return x
        if id(x) not in self.twins:
            self.twins[id(x)] = self._twin(x)
        return self.twins[id(x)]

    def _twin(self, x: Any) -> Any:
        if type(x) in PLAIN:
            return x.detach().clone() if self._fits(x) else x
        if type(x) in (list, tuple, set):
            return type(x)(map(self, x)) if self._few(x) else type(x)(x)
        # a batch of transformers, whose forward may take something out
        if isinstance(x, (dict, UserDict)):
            twin = copy.copy(x)
            # some that transformers returns can't be written to
            with contextlib.suppress(Exception):
                twin.update({k: self(v) for k, v in x.items()} if self._few(x) else {})
            return twin
        if type(x) in (deque, random.Random, *REWOUND):
            return copy.copy(x)
        if isinstance(x, torch.Generator):
            return torch.Generator(x.device).set_state(x.get_state())
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(x) is numpy.ndarray:
            return x.copy() if self._fits(x) else x
        if numpy is not None and isinstance(x, (numpy.random.Generator, numpy.random.RandomState)):
            return copy.deepcopy(x)
        if isinstance(x, types.BuiltinFunctionType) and x.__name__ == "print":
            return unheard.printed
        if isinstance(x, (types.BuiltinMethodType, types.MethodType)):  # generator.random
            twin = self(x.__self__)
            return x if twin is x.__self__ else getattr(twin, x.__name__)
        if isinstance(x, Iterator) and not isinstance(x, IOBase) and not _own(x):
            raise RuntimeError(f"a {type(x).__name__} would be used up by a replay")
        if _library(x) in QUEUES:
            raise RuntimeError(
                f"a {type(x).__name__} is shared with others, who would see a replay"
            )
        return x

    def _few(self, x: Any) -> bool:
        few = len(x) <= ITEMS and len(x) <= self.items
        self.items -= len(x) if few else 0
        return few

    def _fits(self, x: Any) -> bool:
        size = x.numel() * x.element_size() if isinstance(x, Tensor) else x.nbytes
        fits = size <= self.room
        self.room -= size if fits else 0
        return fits


class _Found:
    """The places that the code of a module can write to, breadth first."""

    def __init__(self, module: nn.Module):
        self.modules = list(module.modules())
        self.inner = len(self.modules)  # the others are held by a variable or a plain attribute
        self.owners: list[tuple[dict, dict]] = []  # attributes of modules and objects, as they were
        self.places: list[Place] = []
        # what functions of each name name; and what variables of it call
        self.names: dict[str, set[str]] = {}
        self.seen: set = {id(m) for m in self.modules}
        self.waiting: deque = deque(self.modules)
        self.bags: deque = deque()  # objects of libraries, after the program's own
        while (self.waiting or self.bags) and len(self.seen) < LIMIT + self.inner:
            self._look(self.waiting.popleft()) if self.waiting else self._bag(self.bags.popleft())

    def _push(self, *things: Any) -> None:
        for each in itertools.chain(*map(_inside, things)):
            if id(each) not in self.seen and ((own := _looked_into(each)) or _is_bag(each)):
                self.seen.add(id(each))
                (self.waiting if own else self.bags).append(each)
                if isinstance(each, nn.Module):
                    self.modules.append(each)

    def _place(self, holder: Any, name: str, value: Any) -> None:
        if (id(holder), name) not in self.seen:
            self.seen.add((id(holder), name))
            self.places.append((holder, name))
            if called := _called(value):
                self.names.setdefault(name, set()).add(called)
            self._push(value)

    def _look(self, x: Any) -> None:
        if isinstance(x, types.FunctionType):
            self._variables(x)
        elif isinstance(x, types.MethodType):
            self._push(x.__func__, x.__self__)
        elif isinstance(x, partial):
            self._push(x.func, x.args, x.keywords)
            self._place(x, "func", x.func)
            self._place(x, "args", x.args)
            for name, value in x.keywords.items():
                self._place(x.keywords, name, value)
        elif isinstance(x, type):
            self._classes(x)
        else:
            self._attributes(x)

    def _bag(self, x: Any) -> None:
        self.owners.append((vars(x), dict(vars(x))))
        self.places += [(vars(x), name) for name in vars(x)]
        self._push(*(value for value in vars(x).values() if type(value) is type(x)))

    def _attributes(self, x: Any) -> None:
        own, module = getattr(x, "__dict__", {}), isinstance(x, nn.Module)
        self.owners.append((own, dict(own)))
        for name, value in own.items():
            if not module or name not in OWN:
                self._place(own, name, value)
        if module:
            self._push(x._modules, *(getattr(x, name) for name in HOOKS))
        self._classes(type(x))
        for kind in type(x).__mro__:
            for name, slot in vars(kind).items() if "__slots__" in vars(kind) else ():
                if isinstance(slot, types.MemberDescriptorType) and hasattr(x, name):
                    self._place(x, name, getattr(x, name))

    def _classes(self, x: type) -> None:
        for kind in x.__mro__:
            if ("class", kind) not in self.seen:
                self.seen.add(("class", kind))
                self._push(*map(_function, vars(kind).values()))
                for name, value in vars(kind).items() if _of_program(kind) else ():
                    if isinstance(value, DATA) and not name.startswith("__"):
                        self._place(kind, name, value)

    def _variables(self, f: types.FunctionType) -> None:
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
            with contextlib.suppress(ValueError):  # not yet filled
                self._place(cell, name, cell.cell_contents)
        self.names.setdefault(f.__name__, set()).update(named := _names(f.__code__))
        self._named(named, f.__globals__)
        if vars(f):  # f.calls += 1
            self.owners.append((vars(f), dict(vars(f))))
            self._named(set(vars(f)), vars(f))
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(f, name):
                self._place(f, name, getattr(f, name))

    def _named(self, names: set[str], held: dict) -> None:
        """Names of a dict, and of the program's modules among them: settings.step += 1."""
        modules = [held]
        for held in modules:
            for name in names & held.keys():
                self._place(held, name, value := held[name])
                if _file_of_program(value) and not any(vars(value) is known for known in modules):
                    modules.append(vars(value))


def _inside(x: Any, deep: int = DEEP, left: Iterator[int] | None = None) -> Iterator[Any]:
    """Yield what a container holds, and those in it, or the thing itself; LOOKED in all, containers
    too.
    """
    left = iter(range(LOOKED)) if left is None else left
    if not (isinstance(x, dict) or type(x) in (list, tuple, set, deque)):
        yield x
    elif deep:
        for each, _ in zip(x.values() if isinstance(x, dict) else x, left):
            yield from _inside(each, deep - 1, left)


def _called(x: Any) -> str:
    """Return the name of the function that it is, or is a partial of."""
    while isinstance(x, partial):
        x = x.func
    functions = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    return x.__name__ if isinstance(x, functions) else ""


def _function(f: Any) -> Any:
    """Return what a class calls for an attribute."""
    if isinstance(f, (property, functools.cached_property)):
        return f.fget if isinstance(f, property) else f.func
    return f.__func__ if isinstance(f, (staticmethod, classmethod)) else f


def _names(code: types.CodeType) -> set[str]:
    """Of attributes, and of variables that aren't its own, in functions within it too."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names + code.co_freevars).union(*map(_names, inner))


def _looked_into(x: Any) -> bool:
    if isinstance(x, types.FunctionType):
        return whose(x.__code__.co_filename) == "program"
    if isinstance(x, type):
        return _of_program(x)
    return isinstance(x, (types.MethodType, partial, nn.Module, threading.local)) or _own(x)


def _is_bag(x: Any) -> bool:
    """Return an object of a library's, with attributes. One that is called (a tokenizer, a kernel)
    keeps caches of its own, and one with a lock is in use by other threads meanwhile.
    """
    if (
        not type(x).__dictoffset__
        or callable(x)
        or isinstance(x, (types.ModuleType, Iterator, *DATA))
    ):
        return False
    held = getattr(x, "__dict__", None)
    return isinstance(held, dict) and not any(_library(value) in LOCKS for value in held.values())


def _library(x: Any) -> str:
    """Where the class of it is from."""
    return str(type(x).__module__).partition(".")[0]


def _own(x: Any) -> bool:
    """Return an object of a class of the program's."""
    return not isinstance(x, (type, Tensor, types.ModuleType)) and _of_program(type(x))


def _of_program(kind: type) -> bool:
    return kind.__module__ == "__main__" or _file_of_program(sys.modules.get(kind.__module__))


def _file_of_program(module: Any) -> bool:
    if not isinstance(module, types.ModuleType):
        return False
    # a folder without __init__.py
    files = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    return any(file and whose(file) == "program" for file in files)


def _read(place: Place) -> Any:
    holder, name = place
    if isinstance(holder, types.CellType):
        return holder.cell_contents
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _write(place: Place, value: Any) -> None:
    holder, name = place
    if isinstance(holder, types.CellType):
        holder.cell_contents = value
    elif isinstance(holder, dict):
        holder[name] = value
    elif isinstance(holder, partial):
        now = {"func": holder.func, "args": holder.args, name: value}
        holder.__setstate__((now["func"], now["args"], holder.keywords, vars(holder)))
    elif _read(place) is not value:
        # of a class or a slot, either of which may be frozen, or a default of a function
        (type if isinstance(holder, type) else object).__setattr__(holder, name, value)
