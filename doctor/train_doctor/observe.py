"""Watch a user's own training loop from outside: hooks on the model, patches on the few calls every loop makes.

Nothing is driven and nothing is wrapped. Optimizers are seen through torch's global step hooks; `backward`, gradient
clipping, `zero_grad`, GradScaler, schedulers, the losses of torch.nn.functional and reentrant checkpoints through
attributes that are replaced while the watch lasts and put back after it, also when the block raises. After the watched
steps everything is taken off again, so that the rest of the run costs nothing. The parts are listed in state.py.

Nothing here draws a random number or writes to a tensor of the user. What needs another forward pass is in probes.py,
and that one restores generators and buffers.

Footgun: a round ends with the first backward after a step, not with the step: several optimizers may step, and a
scheduler, a scaler and `zero_grad` come after them.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import checkpoint

from train_doctor import anatomy, fingerprint, measures, owners
from train_doctor.calls import Calls
from train_doctor.evidence import Backward, Call, Evidence
from train_doctor.optimizers import Optimizers
from train_doctor.patches import Patches, spoken_before, with_own
from train_doctor.reading import is_compiled, readable
from train_doctor.scaling import Scaling
from train_doctor.shadow import Shadow
from train_doctor.state import quietly


class Observer(Patches, Calls, Optimizers, Scaling):
    """Fills an Evidence from `start` until `stop`, or until `steps` rounds are complete; then it calls `full`."""

    def start(self) -> None:
        self.on = True
        e = self.e
        e.warned += spoken_before()
        for m in (*e.models, *e.teachers):
            self._root(m)
        for wrapper in e.wrappers:
            self._wrapper(wrapper)
        self._patch_losses()
        self._patch_loop()
        if not any(is_compiled(m) for m in (*e.models, *e.wrappers)):
            self._discover()
        for model in e.models:
            self._cover(model)

    def stop(self) -> None:
        """Take everything off. Safe to call twice."""
        self._settled()
        self.on = False
        while self.undo:
            self.undo.pop()()

    @quietly
    def _settled(self) -> None:
        owners.promote(self.e, self.given)
        owners.settle(self.e)  # an optimizer may have come late, as a GAN's second one does

    def release(self) -> None:
        """Let go of the user's objects."""
        self._let_go()
        self.shadow = Shadow()
        self.before, self.ends, self.calls, self.entropies, self.given, self.old = {}, {}, [], [], [], {}
        for call in self.e.of(Call):
            call.args, call.kwargs = (), {}
        for optimizer in self.e.optimizers:
            optimizer.object = None
        self.e = Evidence(**self.e.declared)
        self.full = self.terms = dict  # they hold the observer: without them no garbage collection is needed

    def _patch_loop(self) -> None:
        self.undo.append(torch_optimizer.register_optimizer_step_pre_hook(self._before_step).remove)
        self.undo.append(torch_optimizer.register_optimizer_step_post_hook(self._after_step).remove)
        self.swap(torch.autograd, "backward", self._watched_backward)
        clip = torch.nn.utils.clip_grad
        if hasattr(clip, "_clip_grads_with_norm_"):  # looked up by clip_grad_norm_ at each call
            self.swap(clip, "_clip_grads_with_norm_", self._watched(self._clip))
        else:
            self.swap(torch.nn.utils, "clip_grad_norm_", self._watched(self._clip))
        for kind in with_own(torch.optim.Optimizer, "zero_grad"):
            self.swap(kind, "zero_grad", self._watched(self._zero))
        self.swap(nn.Module, "zero_grad", self._watched(self._zero_module))
        for kind in with_own(LRScheduler, "step"):
            self.swap(kind, "step", self._watched_schedule)
        for kind in with_own(torch.amp.GradScaler, "step"):
            self.swap(kind, "step", self._watched_scaler_step)
        for kind in with_own(torch.amp.GradScaler, "scale"):
            self.swap(kind, "scale", self._watched(self._scaled))
        for kind in with_own(torch.amp.GradScaler, "unscale_"):
            self.swap(kind, "unscale_", self._watched(self._unscale))
        self.swap(checkpoint.CheckpointFunction, "apply", self._watched_region)
        self.swap(nn.Module, "load_state_dict", self._watched_loading)
        self.swap(nn.Module, "__getstate__", self._without_hooks)
        self.swap(warnings, "warn", self._watched_warning)

    def _watched(self, note: Callable) -> Callable:
        """A patch that notes the arguments and then makes the call."""

        def make(original):
            @functools.wraps(original)
            def seen(*args, **kwargs):
                note(*args, **kwargs)
                return original(*args, **kwargs)

            return seen

        return make

    def _watched_backward(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def seen(tensors, *args, **kwargs):
            if torch.compiler.is_compiling() or self.busy or not self.on or self.depth:
                return original(tensors, *args, **kwargs)  # the inner backward of a reentrant checkpoint
            with torch.enable_grad():
                event = self._begin_backward(tensors)
            self._let_go()
            if not self.on:  # that was the first backward after the last watched step
                return original(tensors, *args, **kwargs)
            self.depth += 1
            try:
                return original(tensors, *args, **kwargs)
            except BaseException as error:
                if event is not None:
                    event.raised = f"{type(error).__name__}: {error}"
                raise
            finally:
                self.depth -= 1
                self._end_backward(event)

        return seen

    @quietly
    def _begin_backward(self, tensors: Any) -> Backward | None:
        if self.stepped:
            self._next_round()
            if not self.on:
                return None
        e = self.e
        loss = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        if not isinstance(loss, Tensor):
            return None
        if loss.is_meta:
            e.opaque, self.on = "the tensors are on the meta device, which has no numbers", False
            return None
        if not e.first:
            owners.promote(e, self.given)
            whole = owners.merge(e)
            if whole is not None:
                self._root(whole)
                self._cover(whole)
                widths = {m.num_embeddings for m in whole.modules() if isinstance(m, nn.Embedding)}
                heads = [c.logits for c in self.calls if c.logits is not None and c.vocabulary in widths]
                if heads:  # what the last of its parts gave
                    self.ends.setdefault("logits", heads[-1])
                self.calls = [c for c in self.calls if c.role != "model"]
            self._sample()
            if self.closure:
                self.before = {name: measures.strided(p).clone() for name, p in self._sampled().items()}
        self._see_compiled()
        self._look_for_old()
        if not any(c.role == "model" and c.grad for c in self.calls):
            self._call_from_ends()
        scalar = loss.numel() == 1 and readable(loss)
        event = Backward(
            round=self.round,
            value=float(loss.detach().float()) / (self.scale or 1.0) if scalar else None,
            requires_grad=bool(loss.requires_grad),
            leaf=bool(loss.requires_grad and loss.is_leaf),
            scale=self.scale,
            calls=self.calls,
            entropies=self.entropies,
            declared=self.terms(),
        )
        e.events.append(event)
        if scalar:
            event.reading = fingerprint.read(e, event, loss)
            event.dead_term = anatomy.constant_added(loss, event, self.scale)
            event.dead_values = anatomy.unconnected(event)
        return event

    @quietly
    def _end_backward(self, event: Backward | None) -> None:
        self.count += 1
        if event is not None:
            event.norm = self._sampled_norm()
            for call in event.calls:
                now = int(call.cache().get_seq_length()) if call.cache() is not None else 0
                call.recached = now if now > call.kept else 0
        if self.closure:  # of an optimizer's step: the weights are still those of the forward
            self._note_gradients()
        self._added_to_old()
        self.calls, self.entropies, self.scale = [], [], None

    def _let_go(self) -> None:
        """Of logits and losses, which a program may have let go of already: backward needs the memory."""
        for call in self.calls:
            call.logits = call.loss = None
        for entropy in self.entropies:
            entropy.input = entropy.target = entropy.value = None
        self.ends = {}

    def _next_round(self) -> None:
        self.round, self.stepped, self.unscaled = self.round + 1, False, False
        self.e.rounds = self.round
        for event in (*self.calls, *self.entropies):  # of the backward that now begins the round
            event.round = self.round
        if self.discovering:
            self.discovering = False
            self.undiscover()
        if self.round >= self.steps:
            self.full()
