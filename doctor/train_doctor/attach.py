"""How a watch holds on to a running program, and how it lets go: hooks, replaced attributes, and a guard around both.

The observer is made of parts. Each part owns its own fields and asks the others through their methods:

    Attachments  what was attached and how it comes off, the Evidence, whether anything may be noted now   attach.py
    Calls        who is called: models, teachers, losses, and what they gave since the last backward       calls.py
    Optimizers   who steps: gradients before, updates after, clearing, clipping, scalers, schedulers       observe.py
    Waits        who asks an accelerator for numbers in the middle of a step                               waits.py
    Observer     start and stop, backwards, rounds                                                         observe.py

Footgun: another watch may be open at the same time and may end first. So a patch remembers what it replaced and whether
it is still on, and attributes come back right in either order.
"""

import functools
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from train_doctor.evidence import Evidence
from train_doctor.probes import generators, restore

ASIDE = threading.local()  # .busy while some watch works aside in this thread; no watch must see what another replays
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
# modules whose earlier warnings say something about how the run was set up
SPOKE_BEFORE = ("peft.peft_model", "torch.utils.checkpoint", "torch.optim.lr_scheduler", "torch.amp.grad_scaler")


class Attachments:
    """What was attached to the program, and the Evidence that all parts fill."""

    def __init__(self, e: Evidence):
        self.e = e
        self.on = False
        self.depth = 0  # of backwards inside each other; a call inside one is a recomputation
        self.handles: set[int] = set()  # of our hooks on modules
        self.undo: list[Callable[[], None]] = []

    @property
    def busy(self) -> bool:
        """With something of a watch's own, which no watch may observe."""
        return getattr(ASIDE, "busy", False)

    @property
    def idle(self) -> bool:
        """Nothing may be noted: the watch is over, or works aside, or the program is being compiled."""
        return torch.compiler.is_compiling() or self.busy or not self.on

    @property
    def blind(self) -> bool:
        """Under a compiler, a tracer or a transform of torch.func nothing is seen: tensors have no numbers there."""
        if self.idle or torch.jit.is_tracing():
            return True
        return torch._C._functorch.peek_interpreter_stack() is not None

    def off(self) -> None:
        """Take everything off. Safe to call twice."""
        self.on = False
        while self.undo:
            self.undo.pop()()

    def hook(self, handle: RemovableHandle) -> None:
        """Until `off`."""
        self.handles.add(handle.id)
        self.undo.append(handle.remove)

    def aside(self, work: Callable, *args) -> None:
        """Do something that may call modules, optimizers or generators of its own, unseen and without a trace."""
        ASIDE.busy = True
        state = generators()
        try:
            work(*args)
        finally:
            restore(state)
            ASIDE.busy = False

    def around(self, owner: Any, name: str, see: Callable) -> None:
        """Call `see(original, ...)` in place of a function until `off`. On a class, what was inherited is so again."""
        mine = name in vars(owner)
        original = vars(owner)[name] if mine else getattr(owner, name)
        function = original if not isinstance(original, staticmethod) else original.__func__

        @functools.wraps(function)
        def patch(*args, **kwargs):
            return see(function, *args, **kwargs)

        patch.instead_of = [original, mine, True]  # the last: still on
        setattr(owner, name, patch)

        def back():
            patch.instead_of[2] = False
            if vars(owner).get(name) is not patch:
                return  # another watch patched over ours and puts both back; off, ours only passes the call on
            before, own = original, mine
            while own and not getattr(before, "instead_of", (0, 0, True))[2]:  # that of a watch which ended earlier
                before, own, _ = before.instead_of
            if own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

        self.undo.append(back)

    def before(self, owner: Any, name: str, note: Callable) -> None:
        """Call `note` with the same arguments before each call of this function."""

        def see(original, *args, **kwargs):
            note(*args, **kwargs)
            return original(*args, **kwargs)

        self.around(owner, name, see)

    # ---------------------------------------------------------------- patches that only write to the Evidence
    def see_region(self, original: Callable, function: Callable, preserve: bool, *inputs) -> Any:
        """A reentrant checkpoint."""
        if not self.idle and torch.is_grad_enabled():
            self.e.regions += 1
            self.e.cut_regions += not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        return original(function, preserve, *inputs)

    def see_loading(self, original: Callable, module: nn.Module, *args, **kwargs) -> Any:
        result = original(module, *args, **kwargs)
        if self.on and not self.busy:
            missing, unexpected = (list(getattr(result, k, ())) for k in ("missing_keys", "unexpected_keys"))
            self.e.loaded.append((type(module).__name__, missing, unexpected))
        return result

    def see_warning(self, original: Callable, message, category=None, stacklevel=1, *args, **kwargs) -> None:
        if not self.idle:
            self.e.warned.append(str(message))
        original(message, category, stacklevel + 2, *args, **kwargs)  # this frame and the patch's

    def without_hooks(self, original: Callable, module: nn.Module) -> Any:
        """Copies and files made of a model while it is watched carry none of our hooks."""
        state = original(module)
        for name in HOOKS if isinstance(state, dict) else ():
            ours = self.handles.intersection(state.get(name) or ())
            if ours:
                state = state | {name: type(state[name])((k, v) for k, v in state[name].items() if k not in ours)}
        return state


class Part:
    """A part of the observer."""

    def __init__(self, at: Attachments):
        self.at = at

    @property
    def e(self) -> Evidence:
        return self.at.e


def quietly(method: Callable) -> Callable:
    """Observing must never end the run that is observed: a fault in it is noted and makes verdicts UNKNOWN."""

    @functools.wraps(method)
    def guarded(self: Part, *args, **kwargs):
        if self.at.blind:
            return None
        try:
            with torch.no_grad():
                return method(self, *args, **kwargs)
        except Exception:
            self.e.faults.append(f"{method.__name__}: {traceback.format_exc(limit=-3)}")
            return None

    return guarded


def with_own(base: type, name: str) -> list[type]:
    """The class and all its subclasses that define this method themselves."""
    kinds, owning = [base], []
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if isinstance(vars(kind).get(name), types.FunctionType) and kind not in owning:
            owning.append(kind)
    return owning


def spoken_before() -> list[str]:
    """Warnings that some modules gave before the watch began: Python remembers the texts it has shown."""
    texts = []
    for name in SPOKE_BEFORE:
        for key in getattr(sys.modules.get(name), "__warningregistry__", {}):
            if isinstance(key, tuple):
                texts.append(str(key[0]))
    return texts
