"""Functions of torch that every program calls, replaced while the watch lasts: losses, checkpoints, loading, warnings.

Footgun: a loop may hold its own name for a function (`from torch.nn.utils import clip_grad_norm_`), which no patch of
the attribute reaches. So patches sit on names that torch itself looks up at each call: nn.CrossEntropyLoss calls
`F.cross_entropy`, and `clip_grad_norm_` a function of its own module.
"""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from train_doctor.evidence import Entropy
from train_doctor.state import State, quietly

HELD = 64  # losses whose tensors are held until the next backward
LOSSES = ("cross_entropy", "kl_div", "nll_loss", "mse_loss")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
# modules whose earlier warnings say something about how the run was set up
SPOKE_BEFORE = ("peft.peft_model", "torch.utils.checkpoint", "torch.optim.lr_scheduler", "torch.amp.grad_scaler")


class Patches(State):
    """Sees calls of losses, reentrant checkpoints, loaded weights and warnings."""

    def _patch_losses(self) -> None:
        for name in LOSSES:

            def make(original, name=name):
                @functools.wraps(original)
                def seen(*args, **kwargs):
                    value = original(*args, **kwargs)
                    if not self.blind:
                        self._loss(name, args, kwargs, value, torch.is_grad_enabled())
                    return value

                return seen

            self.swap(F, name, make)

    @quietly
    def _loss(self, name: str, args: tuple, kwargs: dict, value: Any, grad: bool) -> None:
        given = dict(zip(("input", "target"), args)) | kwargs
        ignored = kwargs.get("ignore_index", args[4] if len(args) > 4 and isinstance(args[4], int) else -100)
        entropy = Entropy(
            round=self.round,
            name=name,
            input=given.get("input"),
            target=given.get("target"),
            value=value if isinstance(value, Tensor) else None,
            reduction=kwargs.get("reduction", "mean"),
            ignored=ignored if name in ("cross_entropy", "nll_loss") else None,
            grad=grad,
            connected=isinstance(value, Tensor) and value.requires_grad,
            number=float(value) if name == "kl_div" and isinstance(value, Tensor) and value.numel() == 1 else None,
            width=args[0].shape[-1] if args and isinstance(args[0], Tensor) and args[0].dim() else None,
            shape=tuple(args[0].shape) if args and isinstance(args[0], Tensor) else (),
        )
        if not entropy.connected:  # only its value may matter
            entropy.input = entropy.target = None
        if len(self.entropies) >= HELD:
            old = self.entropies[-HELD]
            old.input = old.target = old.value = None
        self.e.events.append(entropy)
        self.entropies.append(entropy)

    def _without_hooks(self, original: Callable) -> Callable:
        """Copies and files made of a model while it is watched carry none of our hooks."""

        @functools.wraps(original)
        def seen(module):
            state = original(module)
            for name in HOOKS if isinstance(state, dict) else ():
                ours = self.handles.intersection(state.get(name) or ())
                if ours:
                    state = state | {name: type(state[name])((k, v) for k, v in state[name].items() if k not in ours)}
            return state

        return seen

    def _watched_region(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def seen(function, preserve, *inputs):
            if self.on and not self.busy and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self.e.regions += 1
                self.e.cut_regions += not any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
            return original(function, preserve, *inputs)

        return seen

    def _watched_loading(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def seen(module, *args, **kwargs):
            result = original(module, *args, **kwargs)
            if self.on and not self.busy:
                missing, unexpected = (list(getattr(result, k, ())) for k in ("missing_keys", "unexpected_keys"))
                self.e.loaded.append((type(module).__name__, missing, unexpected))
            return result

        return seen

    def _watched_warning(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def seen(message, category=None, stacklevel=1, *args, **kwargs):
            if not torch.compiler.is_compiling() and self.on and not self.busy:
                self.e.warned.append(str(message))
            return original(message, category, stacklevel + 1, *args, **kwargs)

        return seen


def with_own(base: type, name: str) -> list[type]:
    """The class and all its subclasses that define this method themselves."""
    kinds, found = [base], []
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if isinstance(vars(kind).get(name), types.FunctionType) and kind not in found:
            found.append(kind)
    return found


def spoken_before() -> list[str]:
    """Warnings that some modules gave before the watch began: Python remembers the texts it has shown."""
    texts = []
    for name in SPOKE_BEFORE:
        for key in getattr(sys.modules.get(name), "__warningregistry__", {}):
            if isinstance(key, tuple):
                texts.append(str(key[0]))
    return texts
