"""How a watch holds on to a running program, and how it lets go: hooks, replaced attributes, and a
guard around both.

The observer is made of parts. Each part owns its own fields and asks the others through their
methods:

    Attachments  what was attached and how it comes off, the Evidence, whether anything may be noted
                 now   attach.py
    Calls        who is called: models, teachers, losses, and what they gave since the last backward
                 calls.py
    Optimizers   who steps: gradients before, updates after, clearing, clipping, scalers, schedulers
                 observe.py
    Waits        who asks an accelerator for numbers in the middle of a step
                 waits.py
    Observer     start and stop, backwards, rounds
                 observe.py

Footgun: another watch may be open at the same time and may end first. So a patch remembers what it
replaced and whether it is still on, and attributes come back right in either order.
"""

import contextlib
import functools
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

from loopdoctor import loads
from loopdoctor.draws import generators, restore
from loopdoctor.evidence import ROOM, Evidence

# .busy while some watch works aside in this thread; no watch must see what another replays
ASIDE = threading.local()
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
FAULTS = 16  # of watching itself that are kept
COPYING = ("__getstate__", "__reduce__", "__reduce_ex__", "__deepcopy__")
# hooks of every module and optimizer: those that a user has put there are not called by replays
SHARED = {
    nn.modules.module: [
        name for name in vars(nn.modules.module) if name.startswith("_global_") and "hooks" in name
    ],
    torch_optimizer: ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"],
}
# modules whose earlier warnings say something about how the run was set up
SPOKE_BEFORE = (
    "peft.peft_model",
    "torch.utils.checkpoint",
    "torch.optim.lr_scheduler",
    "torch.amp.grad_scaler",
)


class Attachments:
    """What was attached to the program, and the Evidence that all parts fill."""

    def __init__(self, e: Evidence):
        self.e = e
        self.on = self.over = False
        self.full: Callable[[], None] = dict  # ends the watch
        self.depth = 0  # of backwards inside each other; a call inside one is a recomputation
        self.handles: set[int] = set()  # of our hooks on modules
        # classes and those of their methods that make copies
        self.guarded: set[tuple[type, str]] = set()
        self.met: set[type] = set()  # classes of modules whose methods were looked through for that
        self.undo: list[Callable[[], None]] = []

    @property
    def busy(self) -> bool:
        """With something of a watch's own, which no watch may observe."""
        return getattr(ASIDE, "busy", False)

    @property
    def idle(self) -> bool:
        """Nothing may be noted: the watch is over, or works aside, or the program is being
        compiled.
        """
        return torch.compiler.is_compiling() or self.busy or not self.on

    @property
    def blind(self) -> bool:
        """Under a compiler, a tracer or a transform of torch.func nothing is seen: tensors have no
        numbers there.
        """
        if self.idle or torch.jit.is_tracing():
            return True
        return torch._C._functorch.peek_interpreter_stack() is not None

    def off(self) -> None:
        """Take everything off. Safe to call twice."""
        self.on, self.over = False, True
        while self.undo:
            self.undo.pop()()

    def hook(self, module: nn.Module, handle: RemovableHandle) -> None:
        """Until `off`. Copies and files made of the module meanwhile carry none of our hooks,
        whatever class it is: many have a way of their own to be copied (nn.LSTM, traced graphs).
        """
        # the last step of a watch ended it, and what comes after that step wants to see the next
        if self.over:
            return handle.remove()
        self.handles.add(handle.id)
        self.undo.append(handle.remove)
        if type(module) in self.met:
            return
        self.met.add(type(module))
        for kind in type(module).__mro__:
            for name in COPYING if issubclass(kind, nn.Module) else ():
                inherited = kind is nn.Module and name == "__getstate__"  # from object
                own = inherited or isinstance(vars(kind).get(name), types.FunctionType)
                if own and (kind, name) not in self.guarded:
                    self.guarded.add((kind, name))
                    self.around(
                        kind, name, self.lifted if name == "__deepcopy__" else self.without_hooks
                    )

    def aside(self, work: Callable, *args) -> None:
        """Do something that may call modules, optimizers or generators of its own, unseen and
        without a trace.
        """
        ASIDE.busy = True
        state = generators()
        shared = [
            (owner, name, getattr(owner, name)) for owner, names in SHARED.items() for name in names
        ]
        try:
            # others may be walking through the hooks, so these are not emptied
            for owner, name, hooks in shared:
                setattr(owner, name, type(hooks)())
            work(*args)
        finally:
            for owner, name, hooks in shared:
                setattr(owner, name, hooks)
            restore(state)
            ASIDE.busy = False

    def around(self, owner: Any, name: str, see: Callable) -> None:
        """Call `see(original, ...)` in place of a function until `off`.

        On a class, what was inherited is so again.
        """
        if self.over:
            return
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
                # another watch patched over ours and puts both back; off, ours only passes the call
                # on
                return
            before, own = original, mine
            # that of a watch which ended earlier
            while own and not getattr(before, "instead_of", (0, 0, True))[2]:
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

    # ------------------------------------------------------ patches that only write to the Evidence
    def see_region(self, original: Callable, function: Callable, preserve: bool, *inputs) -> Any:
        """Return a reentrant checkpoint."""
        if not self.idle and torch.is_grad_enabled():
            self.e.regions += 1
            self.e.cut_regions += not any(
                isinstance(x, torch.Tensor) and x.requires_grad for x in inputs
            )
        return original(function, preserve, *inputs)

    def see_loading(self, original: Callable, /, *args, **kwargs) -> Any:
        """Return the module may be given by name: `self=module`, as torch.distributed does."""
        result = original(*args, **kwargs)
        if self.on and not self.busy:
            module = args[0] if args else kwargs["self"]
            missing, unexpected = (
                list(getattr(result, k, ())) for k in ("missing_keys", "unexpected_keys")
            )
            self.e.loaded = self.e.loaded[-ROOM:] + [(type(module).__name__, missing, unexpected)]
            if not self.e.stepped:
                self.e.loads_before = loads.count()
        return result

    def see_taking(self, module: nn.Module, *args, **kwargs) -> None:
        """Note that the weights are read to be kept elsewhere: by a round of federated learning,
        say.
        """
        if not self.idle and any(module is m for m in self.e.models):
            self.e.taken.add(self.e.rounds)

    def note_packing(self, *args) -> None:
        """Note that what is saved for a backward pass is saved in some other form."""
        self.e.packed = self.e.packed or not self.idle

    def see_restart(self, original: Callable, loader: DataLoader) -> Any:
        """Return an epoch begins; or one batch is wanted, and it is always the first one."""
        if not self.idle and len(self.e.restarted) < ROOM:
            # it may have no end; without a size it gives batches
            stream = isinstance(loader.dataset, IterableDataset)
            batches = int(loader.batch_size is None) if stream else len(loader)
            known = self.e.restarted.setdefault(id(loader), (batches, set(), id(loader.dataset)))
            if torch.is_grad_enabled():  # or it is looked through, to see how good the model is
                known[1].add(self.e.rounds)
        return original(loader)

    def see_warning(
        self, original: Callable, message, category=None, stacklevel=1, *args, **kwargs
    ) -> None:
        if not self.idle and len(self.e.warned) < 8 * ROOM:
            self.e.warned.append(str(message))
        original(message, category, stacklevel + 2, *args, **kwargs)  # this frame and the patch's

    def without_hooks(self, original: Callable, module: nn.Module, *args) -> Any:
        """Return what a module gives to be copied or written."""
        return self._bare(original(module, *args))

    def _bare(self, state: Any) -> Any:
        if type(state) is tuple:
            return tuple(map(self._bare, state))
        for name in HOOKS if isinstance(state, dict) else ():
            hooks = state.get(name)
            ours = self.handles.intersection(hooks) if isinstance(hooks, dict) else ()
            if ours:
                state = state | {
                    name: type(hooks)((k, v) for k, v in hooks.items() if k not in ours)
                }
        return state

    def lifted(self, original: Callable, module: nn.Module, *args, **kwargs) -> Any:
        """Return a module that copies itself, or looks for hooks, reads its own attributes: our
        hooks are off meanwhile.
        """
        every = [getattr(m, name) for m in module.modules() for name in HOOKS]
        kept = [
            (hooks, {key: hooks[key] for key in self.handles.intersection(hooks)})
            for hooks in every
            if hooks
        ]
        try:
            for hooks, ours in kept:
                for key in ours:
                    del hooks[key]
            return original(module, *args, **kwargs)
        finally:
            for hooks, ours in kept:
                hooks.update(ours)


class Gone:
    """What stands for a part of the observer in another process: it sees nothing."""

    def __getattr__(self, name: str) -> Callable:
        if name.startswith("__"):
            raise AttributeError(name)
        return no_hook


def no_hook(*args, **kwargs) -> None:
    pass


class Part:
    """A part of the observer. Who keeps the handle of a hook keeps all hooks of that module, ours
    among them, so a copy of a model may come by here: it holds the same part, and what is written
    holds none.
    """

    def __init__(self, at: Attachments):
        self.at = at

    def __deepcopy__(self, memo: dict) -> "Part":
        return self

    def __reduce__(self) -> tuple:
        return Gone, ()

    @property
    def e(self) -> Evidence:
        return self.at.e


def quietly(method: Callable) -> Callable:
    """Observing must never end the run that is observed: a fault in it is noted and makes verdicts
    UNKNOWN. What is asked of tensors meanwhile is shown to no mode, neither ours (eye.py) nor one
    of the program's.
    """
    return _guarded(method, torch._C.DisableTorchFunction)


def quietly_calling(method: Callable) -> Callable:
    """Return the same for what calls the program's own functions again, which may need the
    program's modes.
    """
    return _guarded(method, contextlib.nullcontext)


def _guarded(method: Callable, aside: Callable) -> Callable:
    @functools.wraps(method)
    def guarded(self: Part, *args, **kwargs):
        if self.at.blind:
            return None
        grad = torch.is_grad_enabled()
        with aside():
            torch._C._set_grad_enabled(False)  # what no_grad does, at a tenth of its cost
            try:
                return method(self, *args, **kwargs)
            except Exception:
                if len(self.e.faults) < FAULTS:
                    self.e.faults.append(f"{method.__name__}: {traceback.format_exc(limit=-3)}")
                return None
            finally:
                torch._C._set_grad_enabled(grad)

    return guarded


def with_own(base: type, name: str) -> list[type]:
    """Return the class and all its subclasses that define this method themselves."""
    kinds, owning = [base], []
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if isinstance(vars(kind).get(name), types.FunctionType) and kind not in owning:
            owning.append(kind)
    return owning


def spoken_before() -> list[str]:
    """Warnings that some modules gave before the watch began: Python remembers the texts it has
    shown.
    """
    texts = []
    for name in SPOKE_BEFORE:
        for key in getattr(sys.modules.get(name), "__warningregistry__", {}):
            if isinstance(key, tuple):
                texts.append(str(key[0]))
    return texts
