"""A look at each function of torch that the program calls, for three steps: what goes in, what
comes out, what becomes of it.

Hooks and patched losses see models and losses, and nothing between them. A clamped copy that is
thrown away, a target that is another draw than the noise in the input, a derivative without a
graph: all of that is plain arithmetic of the program. A `TorchFunctionMode` sees it. It is on from
the end of the first optimizer step to that of the fourth (the eighth at most, where several
optimizers take turns), and off inside the steps themselves. What is known of a tensor hangs on a
weak reference, so nothing lives longer for it.

Each kind of question is a class of its own with `saw(op)`: the files of watchers/.

Footguns: a mode may only leave the stack where no function of torch is under way, for torch puts
back afterwards what it took off for the call. So it comes and goes in the hooks around an
optimizer's step, and from the first backward of a closure on it rests on the stack until the step
is over. And it lies beneath the modes of the program, or a `with` of the program that ends would
take ours off and leave its own. Under a mode `has_torch_function` is true of every tensor, and then
nn.TransformerEncoderLayer leaves its fast path, which has other bits; so that question is answered
for the tensors alone.
"""

import itertools
import os
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributions, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from loopdoctor.attach import FAULTS, Attachments, Part
from loopdoctor.evidence import Step
from loopdoctor.places import caller, here

LAST, LONGEST = 4, 8  # optimizer steps after which it is over; it begins after the first
EACH = 3  # steps of each optimizer that are waited for, where several take turns
UNSTEPPED = 2  # backwards without any step before it begins all the same
CALLS = 100_000  # of functions; then it is over
WITHOUT = 1000  # functions in a row without gradients that are looked at
DEEP = 3  # lists inside each other that are looked into
QUIET = {  # questions about a tensor that do not use its numbers
    *(
        "size",
        "dim",
        "stride",
        "numel",
        "nelement",
        "ndimension",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
    ),
    *(
        "_set_grad_enabled",
        "register_hook",
        "retain_grad",
        "requires_grad_",
        "get_device",
        "element_size",
        "data_ptr",
    ),
    *(
        "__len__",
        "__hash__",
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "layout",
    ),
    *(
        "is_cuda",
        "is_sparse",
        "is_nested",
        "is_meta",
        "is_quantized",
        "_version",
        "names",
        "itemsize",
        "nbytes",
    ),
    *(
        "__set_name__",
        "is_inference",
        "_backward_hooks",
        "storage_offset",
        "is_cpu",
        "output_nr",
        "_base",
    ),
}
OPEN: "weakref.WeakSet[Eye]" = weakref.WeakSet()


class Op(NamedTuple):
    """One call of a function of torch."""

    name: str  # mul; also for mul_
    given: list[Tensor]  # also those inside lists
    results: list[Tensor]  # that are none of these
    args: tuple
    kwargs: dict
    result: Any


class Known:
    """What a watcher knows of tensors, for as long as these live."""

    def __init__(self, watcher: "Watcher", died: Callable[[Any], None] | None = None):
        self.by_id: dict[int, tuple[weakref.ref, Any]] = {}
        self.marks, self.bit, self.died = watcher.eye.marks, watcher.bit, died

    def get(self, t: Tensor) -> Any:
        entry = self.by_id.get(id(t))
        return entry[1] if entry is not None and entry[0]() is t else None

    def put(self, t: Tensor, fact: Any) -> None:
        key, facts, died, marks = id(t), self.by_id, self.died, self.marks
        marks[key] = marks.get(key, 0) | self.bit

        def gone(ref: weakref.ref) -> None:
            if facts.get(key, (None,))[0] is ref:
                del facts[key]
                marks.pop(key, None)
            if died is not None:
                died(fact)

        facts[key] = weakref.ref(t, gone), fact


# kinds of torch's own
LASTING = {type(torch.mul), type(Tensor.mul), type(Tensor.__add__), type(Tensor.shape.__get__)}
NAMES: dict[Callable, str] = {}  # of such functions that were met


def _name(function: Callable) -> str:
    """mul for mul_ as well; for what is read or set of a tensor its name, with = where it is
    set.
    """
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        name = getattr(getattr(function, "__self__", None), "__name__", name) + (
            "=" if name == "__set__" else ""
        )
    if not name.startswith("__") and name not in QUIET:
        name = name.rstrip("_")
    if type(function) in LASTING:
        NAMES[function] = name
    return name


class Mode(TorchFunctionMode):
    """Passes each call on, and shows it."""

    def __init__(self, eye: "Eye"):
        super().__init__()
        self.eye = weakref.ref(eye)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs) if kwargs else function(*args)
        eye = self.eye()
        # dynamo traces this function
        if eye is not None and eye.on and not torch.compiler.is_compiling():
            name = NAMES.get(function) if type(function) in LASTING else None
            if name is None:
                name = _name(function)
            if name not in QUIET and not eye.paused() and not eye.at.depth and not eye.at.blind:
                eye.show(name, args, kwargs or {}, result)
        return result


class Eye(Part):
    """Is on in a few steps, and shows what it sees to those who ask about it."""

    def __init__(self, at: Attachments):
        super().__init__(at)
        self.on = self.over = False
        self.mode = Mode(self)
        self.calls = 0
        self.backwards = 0
        self.rising = False  # the loss that is differentiated is to grow
        self.grad = True  # whether gradients were on in the call that is looked at
        self.forward = False  # the next forward has begun since the last backward
        # the model was called in eval mode without gradients; until these are on again
        self.evaluating = False
        self.without = 0  # functions in a row that were called without gradients
        self.closure = False  # inside an optimizer's step, whose closure has made no backward yet
        self.undo: list[Callable[[], None]] = []
        self.watchers: list[Watcher] = []
        # by name of a function, marks and whether a forward has begun
        self.asked: dict[tuple, list[Watcher]] = {}
        self.numbers = itertools.count()  # of watchers
        # id of a tensor -> bits of those who may know something of it
        self.marks: dict[int, int] = {}
        # a class or module and a function's name -> watchers that are told, and how
        self.told: dict[tuple, list] = {}
        self.soon: list[Callable[[], None]] = []  # to be done before the next call is looked at

    @property
    def turn(self) -> int:
        """Number of the step, or of the backward where there are no steps."""
        return self.e.rounds if self.e.stepped else self.backwards

    def start(self, watchers: "list[Watcher]") -> None:
        self.watchers, self.asked = watchers, {}

    # ---------------------------------------------------------------- when
    def before_step(self, closure: bool) -> None:
        """Look before an optimizer steps; nothing in its step is the program's own but a closure's
        first forward.
        """
        self.closure = closure and self.on
        if not self.closure:
            self._off()

    def after_step(self) -> None:
        if self.closure or not self.on:
            self._off()  # it rests, or the closure had no backward
        self.closure = False
        last = self.e.declared.get("steps") or LONGEST
        if not self.over and self.e.rounds + 1 >= min(LAST if self._each_seen() else LONGEST, last):
            self.close()
        elif not self.over:
            self._on()

    def _each_seen(self) -> bool:
        """Where optimizers take turns, each loss is to be seen as often as one alone is."""
        if len(self.e.optimizers) < 2 or self.e.rounds + 1 < LAST:
            return True
        steps = Counter(step.optimizer for step in self.e.every(Step))
        return min(steps.values()) >= EACH

    def called(self, backwards: int) -> None:
        """Take note of a model's call: where no optimizer ever steps, the watch begins and ends
        here.
        """
        self.backwards = backwards
        if self.e.stepped:
            return
        if self.on:
            self.e.shown.add(self.turn)
        if self.over or backwards < UNSTEPPED:
            return
        if backwards >= UNSTEPPED + LAST:
            self.close()
        elif not self.on:
            self._on()

    def backward(self, loss: Tensor, given: Any = None) -> None:
        """Before a backward, which may be given a gradient to begin with."""
        if self.on:
            self.forward = False
            self.rising = _negative(given) or any(
                group.get("maximize")
                for o in self.e.optimizers
                if o.object is not None
                for group in o.object.param_groups
            )
            for watcher in self.watchers:
                try:
                    watcher.backward(loss)
                except Exception:
                    self._fault(watcher)
            if self.closure:
                # it rests until the step is over: a function of torch, backward, is under way
                self.on = False

    def close(self) -> None:
        """For good."""
        self._off()
        if not self.over:
            self.over = True
            for watcher in self.watchers:
                watcher.close()

    def release(self) -> None:
        self.watchers, self.asked, self.soon = [], {}, []
        self.marks.clear()

    def leave(self) -> None:
        """Leave the block; where the watch ended inside a function of torch, the mode is on the
        stack again.
        """
        _away(self.mode)

    def _on(self) -> None:
        if self.on or self.at.blind or self.at.depth or self.e.opaque or self._compiled():
            return
        if self.calls > CALLS:
            return
        self.e.shown.add(self.e.rounds + 1 if self.e.stepped else self.turn)
        _beneath(self.mode)
        before, mode = torch.overrides.has_torch_function, self.mode

        def of_the_tensors_alone(tensors) -> bool:
            if torch._C._len_torch_function_stack() > 1 or not _has(mode):
                return before(tensors)
            return any(type(t) not in PLAIN and before((t,)) and _overrides(t) for t in tensors)

        torch.overrides.has_torch_function = of_the_tensors_alone

        def back() -> None:
            if torch.overrides.has_torch_function is of_the_tensors_alone:
                torch.overrides.has_torch_function = before

        self.undo.append(back)
        self.on = True
        OPEN.add(self)

    def _off(self) -> None:
        self.on = False
        OPEN.discard(self)
        _away(self.mode)
        while self.undo:
            self.undo.pop()()

    def _compiled(self) -> bool:
        """Something was compiled: a mode would have it compiled anew."""
        utils = sys.modules.get("torch._dynamo.utils")
        return utils is not None and bool(utils.counters["frames"])

    def paused(self) -> bool:
        """Whether the program evaluates its model, or computes at length without gradients."""
        if torch.is_grad_enabled():
            self.evaluating = False
            self.without = 0
            return False
        self.without += 1
        return self.evaluating or self.without > WITHOUT

    def evaluation(self) -> None:
        """Note that the model was called in eval mode and without gradients."""
        self.evaluating = True

    # ---------------------------------------------------------------- what
    def show(self, name: str, args: tuple, kwargs: dict, result: Any) -> None:
        try:
            self._show(name, args, kwargs, result)
        except Exception:
            self.on = False  # the rest of the steps are not looked at
            if len(self.e.faults) < FAULTS:
                self.e.faults.append(f"eye: {traceback.format_exc(limit=-3)}")

    def _show(self, name: str, args: tuple, kwargs: dict, result: Any) -> None:
        self.calls += 1
        if self.calls > CALLS:
            self.on = False
            return
        while self.soon:
            self.soon.pop()()
        given = [a for a in args if isinstance(a, Tensor)]
        if len(given) < len(args) or kwargs:
            given = list(tensors(args))
            given += tensors(tuple(kwargs.values()))
        if given and given[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return  # to ask for numbers would end the capture
        # who asks about this function, or knows something of a tensor that it was given
        known = 0 if given else -1
        for t in given:
            known |= self.marks.get(id(t), 0)
        asked = self._asked(name, known)
        if not asked:
            return
        results = [r for r in tensors((result,)) if not any(r is t for t in given)]
        if not all(map(plain, (*given, *results))):  # only that the rest was used is of interest
            name, results, result = "", [], None
            asked = self._asked(name, known)
        op = Op(name, given, results, args, kwargs, result)
        self.grad = grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            for watcher in asked:
                try:
                    watcher.saw(op)
                except Exception:
                    self._fault(watcher)
        finally:
            torch._C._set_grad_enabled(grad)

    def _fault(self, watcher: "Watcher") -> None:
        """One that fails is not asked again; the others go on."""
        self.watchers = [w for w in self.watchers if w is not watcher]
        self.asked = {}
        if len(self.e.faults) < FAULTS:
            self.e.faults.append(f"{type(watcher).__name__}: {traceback.format_exc(limit=-3)}")

    def tell(self, owner: Any, name: str, watcher: "Watcher", method: str) -> None:
        """One patch of a function, whoever wants to be told what it gave: most of them want to know
        the same few.
        """
        if (listening := self.told.get((owner, name))) is not None:
            listening.append((weakref.ref(watcher), method))
            return
        listening, eye = (
            self.told.setdefault((owner, name), [(weakref.ref(watcher), method)]),
            weakref.ref(self),
        )

        def see(original: Callable, *args, **kwargs) -> Any:
            result, mine = original(*args, **kwargs), eye()
            if mine is not None and mine.on and not mine.at.blind:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    for watcher, method in [(ref(), method) for ref, method in listening]:
                        try:
                            if watcher is not None:
                                getattr(watcher, method)(result, *args, **kwargs)
                        except Exception:
                            mine._fault(watcher)
            return result

        self.at.around(owner, name, see)

    def _asked(self, name: str, known: int) -> "list[Watcher]":
        """Those that ask about this function, given something of which these bits know."""
        key = name, known, self.forward
        asked = self.asked.get(key)
        if asked is None:
            asked = self.asked[key] = [
                w for w in self.watchers if w.asks(name, known, self.forward)
            ]
        return asked


OWN: dict[str, list[type]] = {}  # name of a function -> distributions that have one of their own


def _own(name: str) -> list[type]:
    kinds = [kind for kind in vars(distributions).values() if isinstance(kind, type)]
    return [
        kind
        for kind in kinds
        if issubclass(kind, distributions.Distribution) and name in vars(kind)
    ]


class Watcher:
    """Asks one question of what the eye sees."""

    # of the functions that it asks about; None for all
    names: "frozenset[str] | set[str] | None" = None
    # those that it asks about whatever they are given, None for all of the names: of the others it
    # is told where they are given a tensor of which it knows something (Known), or none at all
    begins: "frozenset[str] | set[str] | None" = None
    # it is told of all functions after a backward, until the next forward has begun
    between = False

    def __init__(self, eye: Eye):
        self.eye, self.e = eye, eye.e
        self.bit = 1 << next(eye.numbers)

    def asks(self, name: str, known: int, forward: bool) -> bool:
        if self.names is not None and name not in self.names:
            return False
        begins = self.begins is None or name in self.begins
        return begins or bool(known & self.bit) or self.between and not forward

    def around(self, owner: Any, name: str, method: str) -> None:
        """Call a method of this watcher in place of a function. It may be gone before the patch is:
        after a fault of its own, or beneath the patch of another watch.
        """
        mine = weakref.ref(self)

        def see(original: Callable, *args, **kwargs) -> Any:
            watcher = mine()
            if watcher is None:
                return original(*args, **kwargs)
            return getattr(watcher, method)(original, *args, **kwargs)

        self.eye.at.around(owner, name, see)

    def after(self, owner: Any, name: str, method: str) -> None:
        """Tell a method of this watcher what a function gave, and what it was given. What fails in
        there must not end the user's program, and the eye does not see what is computed there.
        """
        self.eye.tell(owner, name, self, method)

    def of_distributions(self, name: str, method: str, *, after: bool = False) -> None:
        """Do the same for a function of each distribution that has its own."""
        for kind in OWN.get(name) or OWN.setdefault(name, _own(name)):
            (self.after if after else self.around)(kind, name, method)

    def saw(self, op: Op) -> None:
        raise NotImplementedError

    def note(self, check: str, fact: Any, turn: int | None = None) -> None:
        """For a check, the first fact of this step, or of an earlier one."""
        turn = self.eye.turn if turn is None else turn
        if turn not in self.e.habits[check]:
            self.e.habits[check][turn] = fact
            place = here()
            if place is not None:
                self.e.places[check][turn] = place

    def backward(self, loss: Tensor) -> None:
        """Before a backward from this loss."""

    def close(self) -> None:
        """Close the eye for good."""


PLAIN = (Tensor, nn.Parameter, getattr(nn, "Buffer", Tensor), type(None))  # torch 2.4 has no Buffer


def _negative(given: Any) -> bool:
    """Return a gradient that a backward begins with, which turns the loss round."""
    given = given[0] if isinstance(given, list | tuple) and given else given
    return isinstance(given, Tensor) and given.numel() == 1 and float(given) < 0


def plain(t: Tensor) -> bool:
    return type(t) in PLAIN and not t.is_nested and not t.is_meta and t.layout == torch.strided


def _overrides(t: Any) -> bool:
    own = getattr(type(t), "__torch_function__", None)
    return own is not None and own is not torch._C._disabled_torch_function_impl


def tensors(things: Any, deep: int = DEEP) -> Iterator[Tensor]:
    for thing in things:
        if isinstance(thing, Tensor):
            yield thing
        elif deep and isinstance(thing, (list, tuple)):
            yield from tensors(thing, deep - 1)
        elif deep and isinstance(thing, dict):
            yield from tensors(thing.values(), deep - 1)


def place() -> tuple[str, int, int] | None:
    """File, line and instruction of the program; None where a library calls."""
    frame = caller()
    if frame is None:
        return None
    return frame.f_code.co_filename, frame.f_lineno, frame.f_lasti


# ------------------------------------------------------------------------------- the stack of modes
def _has(mode: Mode) -> bool:
    return any(
        torch._C._get_function_stack_at(i) is mode
        for i in range(torch._C._len_torch_function_stack())
    )


def _taken() -> list:
    """All modes, the lowest first; the stack is empty then."""
    stack = torch._C._len_torch_function_stack()
    return [torch._C._pop_torch_function_stack() for _ in range(stack)][::-1]


def _beneath(mode: Mode) -> None:
    """Put it under all modes of the program, but over a default device, which must be the
    lowest.
    """
    modes = [one for one in _taken() if one is not mode]
    low = 1 if modes and isinstance(modes[0], DeviceContext) else 0
    for one in (*modes[:low], mode, *modes[low:]):
        torch._C._push_on_torch_function_stack(one)


def _away(mode: Mode) -> None:
    if _has(mode):
        for one in _taken():
            if one is not mode:
                torch._C._push_on_torch_function_stack(one)


def _forked() -> None:
    """Take the modes off in a worker that loads data, which has a copy of the stack."""
    for eye in list(OPEN):
        eye.on = False
        _away(eye.mode)


os.register_at_fork(after_in_child=_forked)
