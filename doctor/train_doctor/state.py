"""What the parts of the observer share: what is known so far, replaced attributes, and the guard around all of it.

The observer is one object made of parts, each in a file of its own, and they stand on each other in this order:

    State       what is known, `quietly`, `swap`, `aside`               state.py
    Patches     losses, warnings, checkpoints, loading of weights       patches.py
    Calls       hooks on models: who is called, who learns              calls.py
    Optimizers  steps, gradients, clearing                              optimizers.py
    Scaling     GradScaler, clipping, schedulers                        scaling.py
    Observer    on and off, backwards, rounds                           observe.py

Footgun: another watch may be open at the same time and may end first. So a patch remembers what it replaced and whether
it is still on, and attributes come back right in either order.
"""

import functools
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from train_doctor.evidence import Call, Entropy, Evidence, Optimizer
from train_doctor.probes import generators, restore
from train_doctor.reading import unwrap
from train_doctor.shadow import Shadow

ASIDE = threading.local()  # .busy while some watch works aside in this thread; no watch must see what another replays


def quietly(method: Callable) -> Callable:
    """Observing must never end the run that is observed: a fault in it is noted and makes verdicts UNKNOWN."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        if self.blind:
            return None
        try:
            with torch.no_grad():
                return method(self, *args, **kwargs)
        except Exception:
            self.e.faults.append(f"{method.__name__}: {traceback.format_exc(limit=-3)}")
            return None

    return guarded


class State:
    """What is known while the watch lasts, and what every part of the observer uses."""

    def __init__(
        self,
        model: nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer],
        teachers: Sequence[nn.Module],
        steps: int,
        full: Callable[[], None],
        terms: Callable[[], dict],
        **declared,
    ):
        self.e = Evidence(steps=steps, model=model, **declared)
        self.steps, self.full, self.terms = steps, full, terms
        self.on = False
        self.handles: set[int] = set()  # of our hooks on modules
        self.undo: list[Callable[[], None]] = []
        # where in the run
        self.round = 0
        self.depth = 0  # of backwards inside each other
        self.count = 0  # of outermost backwards
        self.stepped = False  # an optimizer stepped, or a scaler skipped, since the last backward
        self.closure = False  # inside an optimizer's step that was given one
        # models
        self.discovering = False
        self.calls_deep = 0
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.covered: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.kept = Counter()  # calls by role and gradient mode: the arguments of the first are kept for the probes
        self.settled = False  # who learns and who teaches is known, because an optimizer stepped
        # since the last backward
        self.calls: list[Call] = []
        self.entropies: list[Entropy] = []
        self.ends: dict[str, Tensor] = {}  # what went into the embedding and came out of the head
        self.scale: float | None = None
        # optimizers
        self.seen: dict[int, int] = {}  # id(optimizer) -> index
        self.backwards: dict[int, int] = {}  # index -> backwards at its last step
        self.uncleared: set[int] = set()  # indices of optimizers whose gradients were not cleared since their step
        self.stale: set[int] = set()  # those of them to whose old gradients a backward has added
        self.old: dict[int, tuple[list[Tensor], list[float]]] = {}  # candidates for it: tensors, norms before it
        self.before: dict[str, Tensor] = {}
        self.shadow = Shadow()
        # scalers and schedulers
        self.scaling = False  # an enabled scaler has scaled a loss
        self.unscaled = False
        self.scheduling = False  # inside a scheduler's step
        self.given = [unwrap(m, []) for m in teachers]
        self.e.teachers += self.given
        self.e.named_teachers += self.given
        if model is not None:
            self.e.models.append(unwrap(model, self.e.wrappers))
        for optimizer in optimizers:
            self.learn(optimizer)

    @property
    def busy(self) -> bool:
        """With something of a watch's own, which no watch may observe."""
        return getattr(ASIDE, "busy", False)

    @property
    def blind(self) -> bool:
        """Under a compiler, a tracer or a transform of torch.func nothing is seen: tensors have no numbers there."""
        if torch.compiler.is_compiling() or self.busy or not self.on or torch.jit.is_tracing():
            return True
        return torch._C._functorch.peek_interpreter_stack() is not None

    def hook(self, handle: RemovableHandle) -> None:
        """Until `stop`."""
        self.handles.add(handle.id)
        self.undo.append(handle.remove)

    def learn(self, optimizer: torch.optim.Optimizer) -> int:
        """Its index; its parameters are read anew, because groups may be added."""
        ps = [p for group in optimizer.param_groups for p in group["params"]]
        if id(optimizer) not in self.seen:
            self.seen[id(optimizer)] = len(self.e.optimizers)
            self.e.optimizers.append(Optimizer(type(optimizer), set(), False, optimizer))
        entry = self.e.optimizers[self.seen[id(optimizer)]]
        entry.ids = {id(p) for p in ps}
        entry.low = any(p.is_floating_point() and p.dtype.itemsize < 4 for p in ps)
        return self.seen[id(optimizer)]

    def aside(self, work: Callable, *args) -> None:
        """Do something that may call modules, optimizers or generators of its own, unseen and without a trace."""
        ASIDE.busy = True
        state = generators()
        try:
            work(*args)
        finally:
            restore(state)
            ASIDE.busy = False

    def swap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute until `stop`. On a class, an inherited attribute is uncovered again."""
        mine = name in vars(owner)
        original = vars(owner)[name] if mine else getattr(owner, name)
        patch = make(original if not isinstance(original, staticmethod) else original.__func__)
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
