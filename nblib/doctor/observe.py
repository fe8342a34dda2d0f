"""Watch a user's own training loop from outside: hooks on the model, patches on the few calls every loop makes.

Nothing is driven and nothing is wrapped. Optimizers are seen through torch's global step hooks; `backward`, gradient
clipping, `zero_grad`, GradScaler, schedulers, the losses of torch.nn.functional and reentrant checkpoints through
attributes that are replaced while the watch lasts and put back after it, also when the block raises. After the watched
steps everything is taken off again, so that the rest of the run costs nothing.

Nothing here draws a random number or writes to a tensor of the user. What needs another forward pass is in probes.py,
and that one restores generators and buffers.

Footgun: a loop may hold its own name for a function (`from torch.nn.utils import clip_grad_norm_`), which no patch of
the attribute reaches. So the patches sit one level below, on names that torch itself looks up at each call.
"""

import functools
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils import checkpoint

from nblib.doctor import anatomy, fingerprint, owners, probes
from nblib.doctor.evidence import (
    Backward,
    Call,
    Clip,
    Entropy,
    Evidence,
    Gradients,
    Optimizer,
    ScalerStep,
    Schedule,
    Step,
    Unscale,
    Update,
    ZeroGrad,
    gone,
)
from nblib.doctor.shadow import Shadow

SAMPLED, ELEMENTS = 8, 2**20  # tensors whose change is measured, and how much of each
OPAQUE = "the model is compiled: what happens inside its graph cannot be seen"
LOSSES = ("cross_entropy", "kl_div", "nll_loss", "mse_loss")
# modules whose earlier warnings say something about how the run was set up
SPOKE_BEFORE = ("peft.peft_model", "torch.utils.checkpoint", "torch.optim.lr_scheduler", "torch.amp.grad_scaler")


def quietly(method: Callable) -> Callable:
    """Observing must never end the run that is observed: a fault in it is noted and makes verdicts UNKNOWN."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        if torch.compiler.is_compiling() or self.busy or not self.on:
            return None
        try:
            with torch.no_grad():
                return method(self, *args, **kwargs)
        except Exception:
            self.e.faults.append(f"{method.__name__}: {traceback.format_exc(limit=-3)}")
            return None

    return guarded


class Observer:
    """Fills an Evidence from `start` until `stop`, or until `steps` rounds are complete; then it calls `full`."""

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
        self.on = self.busy = False
        self.round = self.depth = self.calls_deep = 0
        self.stepped = False  # an optimizer stepped, or a scaler skipped, since the last backward
        self.undo: list[Callable[[], None]] = []
        self.heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.covered: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.seen: dict[int, int] = {}  # id(optimizer) -> index
        self.backwards: dict[int, int] = {}  # index -> backwards at its last step
        self.count = 0  # of outermost backwards
        self.calls: list[Call] = []
        self.kept = 0  # calls whose arguments were kept for the probes
        self.counted = 0  # events before those of this round
        self.entropies: list[Entropy] = []
        self.scale: float | None = None
        self.unscaled = False
        self.settled = False  # who learns and who teaches is known, because an optimizer stepped
        self.closure = False  # inside an optimizer's step that was given one
        self.uncleared: set[int] = set()  # indices of optimizers whose gradients were not cleared since their step
        self.stale: set[int] = set()  # those of them to whose old gradients a backward has added
        self.old: dict[int, tuple[list[Tensor], list[float]]] = {}  # candidates for it: tensors, norms before it
        self.before: dict[str, Tensor] = {}
        self.ends: dict[str, Tensor] = {}  # what went into the embedding and came out of the head
        self.shadow = Shadow()
        self.discovering = False
        self.given = [unwrap(m, []) for m in teachers]
        for m in teachers:
            self.e.teachers.append(unwrap(m, []))
        if model is not None:
            self.e.models.append(unwrap(model, self.e.wrappers))
        for optimizer in optimizers:
            self._optimizer(optimizer)

    # ------------------------------------------------------------------------------------------- on and off
    def start(self) -> None:
        self.on = True
        e = self.e
        e.warned += _spoken_before()
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
        self.on = False
        owners.promote(self.e, self.given)
        while self.undo:
            self.undo.pop()()

    def release(self) -> None:
        """Let go of the user's objects."""
        self.shadow = Shadow()
        self.before, self.ends, self.calls, self.entropies, self.given, self.old = {}, {}, [], [], [], {}
        for optimizer in self.e.optimizers:
            optimizer.object = None

    def _swap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
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

    # ------------------------------------------------------------------------------------------- models
    def _root(self, module: nn.Module) -> None:
        """See each call of a whole model."""
        if module in self.roots:
            return
        self.roots.add(module)
        if is_compiled(module):
            self.e.opaque = OPAQUE
        if getattr(module, "_compiled_call_impl", None) is not None:
            self._in_place(module)
            return
        hook = module.register_forward_hook(self._called, with_kwargs=True, always_call=True)
        self.undo.append(hook.remove)

    def _in_place(self, module: nn.Module) -> None:
        """See the calls of a module after `module.compile()`: its hooks are inside the graph and do not fire."""
        holder = weakref.ref(module)

        def make(original):
            def seen(*args, **kwargs):
                result = original(*args, **kwargs)
                if holder() is not None:
                    self._called(holder(), args, kwargs, result)
                return result

            return seen

        self._swap(module, "_compiled_call_impl", make)
        self.e.opaque = OPAQUE

    def _see_compiled(self) -> None:
        """Models that were compiled in place since the watch began."""
        for m in self.e.models:
            call = getattr(m, "_compiled_call_impl", None)
            if call is not None and not hasattr(call, "instead_of"):
                self._in_place(m)

    def _wrapper(self, module: nn.Module) -> None:
        """Note whether a wrapper (DDP, torch.compile) is called at all, or gone round."""

        def count(m, args):
            self._count(m)

        self.undo.append(module.register_forward_pre_hook(count).remove)
        if is_compiled(module) and module not in self.roots:
            self._root(module)

    def _discover(self) -> None:
        """Until the first round ends: every module that is called by no other module is a whole model."""
        self.discovering = True

        def enter(module, args):
            if torch.compiler.is_compiling() or self.busy or not self.on or self.depth:
                return
            self.calls_deep += 1
            if self.calls_deep == 1 and module not in self.roots and any(True for _ in module.parameters()):
                self._root(module)
                self._cover(module)

        def leave(module, args, output):
            if not torch.compiler.is_compiling() and not self.busy and self.on and not self.depth:
                self.calls_deep = max(0, self.calls_deep - 1)

        hooks = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]

        def off():
            while hooks:
                hooks.pop().remove()

        self.undo.append(off)
        self.undiscover = off

    def _cover(self, model: nn.Module) -> None:
        """Count the calls of every module with parameters of its own, and see the two ends of the model."""
        if is_compiled(model):
            return
        hidden = {m for c in model.modules() if is_compiled(c) for m in c.modules()}
        tables = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
        for name, m in model.named_modules():
            dropout = isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0
            own = next(iter(m._parameters.values()), None) is not None or getattr(m, "weight", None) is not None
            if m in hidden or not (own or dropout):
                continue
            if isinstance(m, nn.Linear) and m not in self.heads and m.weight.shape[0] in tables:
                self.heads.add(m)
                self.undo.append(m.register_forward_hook(self._headed).remove)
            if m in self.covered:
                continue
            self.covered.add(m)

            def count(module, args, name=name, dropout=dropout):
                self._count(module)
                if dropout and self.on and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                    self.e.dropouts[id(module)] = name, module.training, module.p

            self.undo.append(m.register_forward_pre_hook(count).remove)
            if isinstance(m, nn.Embedding):
                self.undo.append(m.register_forward_hook(self._embedded).remove)

    def _count(self, module: nn.Module) -> None:
        if torch.compiler.is_compiling() or self.busy or not self.on:
            return
        key = id(module)
        self.e.called[key] = self.e.called.get(key, 0) + 1
        if torch.is_grad_enabled():
            self.e.called_with_grad[key] = self.e.called_with_grad.get(key, 0) + 1

    def _embedded(self, module, args, output) -> None:
        if torch.is_grad_enabled() and not self.depth:  # an evaluation in between must not stand for the training
            self._note_embedded(module, args)

    @quietly
    def _note_embedded(self, module, args) -> None:
        ids = args[0] if args else None
        widest = self.ends.get("vocabulary", 0)
        if isinstance(ids, Tensor) and ids.dim() == 2 and module.num_embeddings >= widest:
            kind = ids.device.type
            cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            self.ends |= {"ids": ids, "vocabulary": module.num_embeddings, "autocast": cast}

    def _headed(self, module, args, output) -> None:
        if torch.is_grad_enabled() and not self.depth and isinstance(output, Tensor) and output.dim() == 3:
            self._note_headed(output)

    @quietly
    def _note_headed(self, output) -> None:
        self.ends["logits"] = output

    def _role(self, module: nn.Module) -> str:
        e = self.e
        if module in e.models or module in e.wrappers:
            return "model"
        if module in e.teachers and (self.settled or not self._learns(module)):
            return "teacher"
        mine = {id(p) for p in module.parameters()}
        known = {id(p) for m in e.models for p in m.parameters()}
        if mine & known:  # a wrapper around a model we know, or a part of it called by itself
            return "other"
        if self._learns(module):
            e.teachers[:] = [m for m in e.teachers if m is not module]  # evaluated before its first training call
            e.models.append(unwrap(module, e.wrappers))
            for call in e.of(Call, role="teacher"):
                if call.module() is module:
                    call.role = "model"
            return "model"
        if mine & e.optimized():
            e.models.append(module)
            return "model"
        e.teachers.append(module)
        return "teacher"

    def _learns(self, module: nn.Module) -> bool:
        """Whether a module called with gradients may be taken for the model."""
        free = self.e.declared["model"] is None and not any(m is module for m in self.given)
        return free and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())

    def _called(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """After each call of a whole model. Gradient mode and autocast are still those of the caller."""
        if torch.compiler.is_compiling() or self.busy or not self.on:
            return
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._record_call(module, args, kwargs, output, grad, inference)

    @quietly
    def _record_call(self, module, args, kwargs, output, grad, inference) -> None:
        with torch.set_grad_enabled(grad):
            role = self._role(module)
        if role == "other" and any(c.round == self.round and c.role == "model" for c in self.calls):
            return  # the wrapper of a model whose own call was just recorded
        inner = unwrap(module, [])
        if inner is not module and self.calls and self.calls[-1].module() is inner:
            return  # DDP around it
        if role == "other" and not self._whole(inner):
            return  # a part called by itself: the model is read at its two ends
        if role == "model" and module is not inner:
            module = inner
        kept = self.kept < 8
        self.kept += 1
        device = next((p.device.type for p in module.parameters()), "cpu")
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        call = Call(
            round=self.round,
            role="model" if role == "other" else role,
            grad=grad,
            inference=inference,
            training=inner.training,
            autocast=cast,
            args=args if kept else (),
            kwargs=dict(kwargs) if kept else {},
        )
        call.module = weakref.ref(module)
        switches = [getattr(m, "disable_adapters", 0) for m in module.modules() if hasattr(m, "lora_A")]
        call.adapters_off = bool(switches) and all(s is True for s in switches)
        if output is None:
            call.raised = "the call raised"
        else:
            read_call(call, module, args, kwargs, output)
            unread = call.vocabulary is None and call.loss is None
            if role == "other" and (unread or call.vocabulary is not None and self._narrow(call.vocabulary)):
                return  # the backbone without its head: with tied weights it holds every parameter
        if role == "model":
            self._cover(inner)
        self.e.events.append(call)
        self.calls.append(call)

    def _narrow(self, width: int) -> bool:
        tables = {m.num_embeddings for model in self.e.models for m in model.modules() if isinstance(m, nn.Embedding)}
        return bool(tables) and width not in tables and width < max(tables)

    def _whole(self, module: nn.Module) -> bool:
        """Whether a module that shares parameters with a known model stands for all of it."""
        mine = {id(p) for p in module.parameters()}
        return any({id(p) for p in m.parameters()} <= mine for m in self.e.models) or (
            any(isinstance(m, nn.Embedding) for m in module.modules()) and module.__class__.__name__.endswith("LM")
        )

    # ------------------------------------------------------------------------------------------- losses
    def _patch_losses(self) -> None:
        for name in LOSSES:

            def make(original, name=name):
                @functools.wraps(original)
                def seen(*args, **kwargs):
                    value = original(*args, **kwargs)
                    if not torch.compiler.is_compiling() and self.on and not self.busy:
                        self._loss(name, args, kwargs, value, torch.is_grad_enabled())
                    return value

                return seen

            self._swap(F, name, make)

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
            width=args[0].shape[-1] if args and isinstance(args[0], Tensor) and args[0].dim() else None,
        )
        self.e.events.append(entropy)
        self.entropies.append(entropy)

    # ------------------------------------------------------------------------------------------- the loop
    def _patch_loop(self) -> None:
        self.undo.append(torch_optimizer.register_optimizer_step_pre_hook(self._before_step).remove)
        self.undo.append(torch_optimizer.register_optimizer_step_post_hook(self._after_step).remove)
        self._swap(torch.autograd, "backward", self._watched_backward)
        clip = torch.nn.utils.clip_grad
        if hasattr(clip, "_clip_grads_with_norm_"):  # looked up by clip_grad_norm_ at each call
            self._swap(clip, "_clip_grads_with_norm_", self._watched(self._clip))
        else:
            self._swap(torch.nn.utils, "clip_grad_norm_", self._watched(self._clip))
        for kind in _with_own(torch.optim.Optimizer, "zero_grad"):
            self._swap(kind, "zero_grad", self._watched(self._zero))
        self._swap(nn.Module, "zero_grad", self._watched(self._zero_module))
        for kind in _with_own(LRScheduler, "step"):
            self._swap(kind, "step", self._watched_schedule)
        for kind in _with_own(torch.amp.GradScaler, "step"):
            self._swap(kind, "step", self._watched_scaler_step)
        for kind in _with_own(torch.amp.GradScaler, "scale"):
            self._swap(kind, "scale", self._watched(self._scaled))
        for kind in _with_own(torch.amp.GradScaler, "unscale_"):
            self._swap(kind, "unscale_", self._watched(self._unscale))
        self._swap(checkpoint.CheckpointFunction, "apply", self._watched_region)
        self._swap(nn.Module, "load_state_dict", self._watched_loading)
        self._swap(warnings, "warn", self._watched_warning)

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
                self.before = {name: _strided(p).clone() for name, p in self._sampled().items()}
        self._see_compiled()
        self._look_for_old()
        if not any(c.role == "model" and c.grad for c in self.calls):
            self._call_from_ends()
        scalar = isinstance(loss, Tensor) and loss.numel() == 1
        event = Backward(
            round=self.round,
            value=float(loss.detach().float()) / (self.scale or 1.0) if scalar else None,
            requires_grad=bool(loss.requires_grad),
            leaf=bool(loss.requires_grad and loss.is_leaf),
            scale=self.scale,
            stale=self.round > 0 and not self._backwards_in_round() and self._leftover(),
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
        if self.closure:  # of an optimizer's step: the weights are still those of the forward
            self._note_gradients()
        self._added_to_old()
        for entropy in self.entropies:
            entropy.input = entropy.target = entropy.value = None
        self.calls, self.entropies, self.scale, self.ends = [], [], None, {}

    def _next_round(self) -> None:
        self.round, self.stepped, self.unscaled = self.round + 1, False, False
        self.e.rounds = self.round
        if self.discovering:
            self.discovering = False
            self.undiscover()
        if self.round >= self.steps:
            self.full()

    def _backwards_in_round(self) -> int:
        return len(self.e.of(Backward, round=self.round))

    def _call_from_ends(self) -> None:
        """The model was not called as a whole (its forward method, or its parts): read it at its two ends."""
        logits, ids = self.ends.get("logits"), self.ends.get("ids")
        if logits is None and ids is None:
            return
        call = Call(self.round, "model", grad=True, inference=False, training=True, autocast=self.ends.get("autocast"))
        if self.e.models:
            call.training = self.e.models[0].training
        call.module = weakref.ref(self.e.models[0]) if self.e.models else gone
        if logits is None:  # a head that was given chunks
            call.ids, call.requires_grad = _cpu(ids), True
        else:
            call.ids = _cpu(ids) if ids is not None and ids.shape == logits.shape[:2] else None
            call.logits, call.vocabulary, call.requires_grad = logits, logits.shape[-1], logits.requires_grad
            call.finite = _finite(logits)
        self.e.events.append(call)
        self.calls.append(call)

    # ---------------------------------------------------------------- optimizers
    def _optimizer(self, optimizer: torch.optim.Optimizer) -> int:
        """Its index; its parameters are read anew, because groups may be added."""
        ps = [p for group in optimizer.param_groups for p in group["params"]]
        if id(optimizer) not in self.seen:
            self.seen[id(optimizer)] = len(self.e.optimizers)
            self.e.optimizers.append(Optimizer(type(optimizer), set(), False, optimizer))
        entry = self.e.optimizers[self.seen[id(optimizer)]]
        entry.ids = {id(p) for p in ps}
        entry.low = any(p.is_floating_point() and p.dtype.itemsize < 4 for p in ps)
        return self.seen[id(optimizer)]

    @quietly
    def _before_step(self, optimizer, args, kwargs) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:  # the backward comes inside
            self.closure = True
            self.before = {name: _strided(p).clone() for name, p in self._sampled(optimizer).items()}
            return
        self._optimizer(optimizer)
        self._note_gradients()
        self._note_step(optimizer)
        self._aside(self.shadow.before, optimizer)

    def _note_step(self, optimizer) -> None:
        index = self._optimizer(optimizer)
        names = self._sampled(optimizer)
        if not self.closure:
            self.before = {name: _strided(p).clone() for name, p in names.items()}
        event = Step(
            round=self.round,
            optimizer=index,
            rates=[float(group.get("lr", 0.0)) for group in optimizer.param_groups],
            backwards=self.count - self.backwards.get(index, 0),
            norm=self._sampled_norm(),
        )
        own = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        event.own = sum(n**2 for n in _norms([g for g in own if not g.is_sparse])) ** 0.5 if own else None
        if own and any(g.is_sparse for g in own):
            event.own = event.own or float(max(g.detach().coalesce().values().norm() for g in own if g.is_sparse))
        event.stale = index in self.stale
        self.stale.discard(index)
        self.old.pop(index, None)
        self.uncleared.add(index)
        self.backwards[index] = self.count
        self.e.events.append(event)
        ps = (p for group in optimizer.param_groups for p in group["params"])
        self.e.optimizers[index].live |= {id(p) for p in ps if p.grad is not None}

    @quietly
    def _after_step(self, optimizer, args, kwargs) -> None:
        self.stepped = True
        if self.closure:
            self._note_step(optimizer)
            self.closure = False
        steps = self.e.of(Step, optimizer=self.seen.get(id(optimizer), -1))
        if steps and self.before:
            rates = {id(p): float(g.get("lr", 0.0)) for g in optimizer.param_groups for p in g["params"]}
            for name, p in self._sampled(optimizer).items():
                if name in self.before:
                    steps[-1].updates.append(_update(name, p, self.before[name], rates[id(p)]))
        self.before = {}
        self._aside(self.shadow.after, optimizer)
        self.e.shadow, self.e.unshadowed = self.shadow.coefficients(), self.shadow.why

    def _aside(self, work: Callable, *args) -> None:
        """Do something that may call modules, optimizers or generators of its own, unseen and without a trace."""
        self.busy = True
        state = probes.generators()
        try:
            work(*args)
        finally:
            probes.restore(state)
            self.busy = False

    def _note_gradients(self) -> None:
        """Once a round, before its first step: all gradients; in the first round the probes too."""
        if self.e.of(Gradients, round=self.round) or self.depth:
            return  # inside a backward (an optimizer that steps in gradient hooks) most are not there yet
        if self.round == 0:
            before = list(self.e.models)
            owners.settle(self.e)
            self.settled = True
            if before != self.e.models:
                self._sample()
        ps = self.e.trainable()
        have = {name: p.grad for name, p in ps.items() if p.grad is not None and not p.grad.is_sparse}
        norms = dict(zip(have, _norms(list(have.values()))))
        self.e.events.append(Gradients(self.round, {name: norms.get(name) for name in ps}))
        if self.round == 0:
            self._aside(probes.run, self.e)
        self._aside(probes.fault, self.e)
        for call in self.e.of(Call, round=self.round):
            call.args, call.kwargs, call.logits, call.loss = (), {}, None, None

    def _sample(self) -> None:
        """Choose, once, the tensors whose change is followed: trainable ones evenly over the depth, some frozen."""
        ps = self.e.parameters()
        matrices = [n for n, p in ps.items() if p.requires_grad and p.dim() >= 2]
        vectors = [n for n, p in ps.items() if p.requires_grad and p.dim() < 2]
        frozen = [n for n, p in ps.items() if not p.requires_grad and p.is_floating_point()]
        chosen = _spread(matrices, SAMPLED - 2) + _spread(vectors, 2) + _spread(frozen, 4)
        self.e.first = {n: (id(ps[n]), _strided(ps[n]).clone()) for n in chosen}
        self.e.frozen_at_start = {n for n in chosen if not ps[n].requires_grad}
        self.e.tied_at_start = _tied(self.e)
        into, out = self.e.embedding(), self.e.head()
        if self.e.tied_at_start is False and into.shape == out.shape and into.dtype == out.dtype:
            self.e.alike_at_start = bool(torch.equal(into, out))

    def _sampled(self, optimizer=None) -> dict[str, Tensor]:
        ps, mine = self.e.parameters(), None
        if optimizer is not None:
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {n: ps[n] for n in self.e.first if n in ps and (mine is None or id(ps[n]) in mine)}

    def _sampled_norm(self) -> float | None:
        gradients = [p.grad for p in self._sampled().values() if p.grad is not None and not p.grad.is_sparse]
        found = [norm for norm in _norms(gradients) if norm is not None]
        return sum(norm**2 for norm in found) ** 0.5 if found else None

    def _leftover(self) -> bool:
        """Whether parameters that were stepped in the last round still have gradients other than zero."""
        stepped = {s.optimizer for s in self.e.of(Step, round=self.round - 1)}
        mine = set().union(*(self.e.optimizers[i].ids for i in stepped)) if stepped else set()
        left = [p.grad for p in self._sampled().values() if id(p) in mine and p.grad is not None]
        return any(norm > 0 for norm in _norms([g for g in left if not g.is_sparse]))

    def _look_for_old(self) -> None:
        """Before a backward: which optimizers' gradients are still those of their last step?"""
        for index in list(self.uncleared):
            groups = self.e.optimizers[index].object.param_groups
            left = [p for g in groups for p in g["params"] if p.grad is not None and not p.grad.is_sparse]
            left = left[:: max(1, len(left) // SAMPLED)]
            norms = _norms([p.grad for p in left])
            if any(norm != 0 for norm in norms):
                self.old[index] = left, norms
            self.uncleared.discard(index)

    def _added_to_old(self) -> None:
        """After it: to which of them has it added? Copies of the weights that are given gradients by hand are not."""
        for index, (left, norms) in list(self.old.items()):
            now = [p.grad for p in left]
            if None not in now and _norms(now) != norms:
                self.stale.add(index)
                del self.old[index]

    def _cleared(self, ids: frozenset[int]) -> None:
        cleared = {i for i, o in enumerate(self.e.optimizers) if o.ids & ids}
        self.uncleared -= cleared
        self.stale -= cleared
        for index in cleared:
            self.old.pop(index, None)

    @quietly
    def _zero(self, optimizer, *args, **kwargs) -> None:
        ps = [p for group in optimizer.param_groups for p in group["params"]]
        ids = frozenset(id(p) for p in ps)
        self.e.events.append(ZeroGrad(self.round, any(p.grad is not None for p in ps), ids))
        self._cleared(ids)

    @quietly
    def _zero_module(self, module, *args, **kwargs) -> None:
        ids = frozenset(id(p) for p in module.parameters())
        if any(p.grad is not None for p in module.parameters()):
            self.e.events.append(ZeroGrad(self.round, True, ids))
        self._cleared(ids)

    @quietly
    def _clip(self, parameters, max_norm, total_norm=None, *args, **kwargs) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        total = float(total_norm) if isinstance(total_norm, Tensor) and gradients else None
        scaled = self._scaling and not self.unscaled
        ids = frozenset(id(p) for p in parameters)
        self.e.events.append(Clip(self.round, float(max_norm), total, not gradients, scaled, ids))

    # ---------------------------------------------------------------- scaler and scheduler
    _scaling = False  # an enabled scaler has scaled a loss

    @quietly
    def _scaled(self, scaler, *args, **kwargs) -> None:
        if scaler.is_enabled():
            self.scale, self._scaling, self.unscaled = float(scaler.get_scale()), True, False

    @quietly
    def _unscale(self, scaler, *args, **kwargs) -> None:
        if scaler.is_enabled():
            self.unscaled = True
            self.e.events.append(Unscale(self.round))

    def _watched_scaler_step(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def seen(scaler, optimizer, *args, **kwargs):
            before = len(self.e.of(Step)) if self.on else 0
            result = original(scaler, optimizer, *args, **kwargs)
            if self.on and not self.busy:
                self.stepped = True
                stepped = len(self.e.of(Step)) > before
                scale = float(scaler.get_scale())
                self.e.events.append(ScalerStep(self.round, scaler.is_enabled(), stepped, scale))
            return result

        return seen

    def _watched_schedule(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def seen(scheduler, *args, **kwargs):
            initial = getattr(scheduler, "_is_initial", False) or getattr(scheduler, "last_epoch", 0) == -1
            inner, self._scheduling = self._scheduling, True  # SequentialLR steps others
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._scheduling = inner
                if not inner and not initial:
                    self._scheduled(scheduler)

        return seen

    _scheduling = False

    @quietly
    def _scheduled(self, scheduler) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        index = self.seen.get(id(optimizer), -1)
        self.e.events.append(Schedule(self.round, index, isinstance(scheduler, ReduceLROnPlateau), id(scheduler)))

    # ---------------------------------------------------------------- the rest
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


# ------------------------------------------------------------------------------------------------------- reading
def read_call(call: Call, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
    """Find token ids, masks, labels, logits and loss among what went in and came out, by name and by shape."""
    given = {k: v for k, v in kwargs.items() if isinstance(v, Tensor)}
    rows = [x for x in args if isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point()]
    if len(args) == 1 and isinstance(args[0], dict):
        given = {k: v for k, v in args[0].items() if isinstance(v, Tensor)} | given
    ids = next((given[k] for k in ("input_ids", "ids", "idx", "tokens", "x") if k in given), None)
    if ids is None and rows:
        ids = rows.pop(0)
    labels = next((given[k] for k in ("labels", "targets", "target", "y") if k in given), None)
    if labels is None and ids is not None:
        labels = next((x for x in rows if x.shape == ids.shape and x.dtype == torch.int64), None)
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    call.ids = _cpu(ids) if ids is not None and ids.dim() == 2 and not ids.is_floating_point() else None
    call.labels = _cpu(labels) if labels is not None and labels.dim() == 2 else None
    call.mask = _cpu(mask) if mask is not None and mask.dim() == 2 else None
    call.positions = _cpu(positions) if positions is not None and positions.dim() == 2 else None
    found = list(_tensors(output))
    floats = [x for x in found if x.is_floating_point()]
    call.requires_grad = any(x.requires_grad for x in floats)
    named = output if hasattr(output, "get") else {}
    logits = named.get("logits") if hasattr(named, "get") else None
    if logits is None:
        shape = call.ids.shape if call.ids is not None else None
        fits = [x for x in floats if x.dim() == 3 and (shape is None or x.shape[:2] == shape)]
        logits = next(
            (x for x in fits if call.ids is None or not call.ids.numel() or x.shape[-1] > int(call.ids.max())), None
        )
    if isinstance(logits, Tensor) and logits.dim() == 3:
        call.logits, call.vocabulary = logits, logits.shape[-1]
        call.finite = _finite(logits)
    loss = named.get("loss") if hasattr(named, "get") else None
    call.loss = loss if loss is not None else next((x for x in floats if x.dim() == 0 and x.requires_grad), None)
    cache = getattr(output, "past_key_values", None)
    call.cached = cache is not None


def _finite(logits: Tensor) -> bool:
    """In one pass, without a copy: the extremes are NaN where any value is."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(logits.detach()))).all()) if logits.numel() else True


def unwrap(module: nn.Module, wrappers: list[nn.Module]) -> nn.Module:
    """The model inside DDP and torch.compile; the wrappers are collected."""
    while True:
        inner = module._modules.get("module") if _is_parallel(module) else module._modules.get("_orig_mod")
        if inner is None:
            return module
        if not any(w is module for w in wrappers):
            wrappers.append(module)
        module = inner


def is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def _is_parallel(module: nn.Module) -> bool:
    return type(module).__name__ in ("DistributedDataParallel", "DataParallel")


def _tensors(output: Any, depth: int = 0) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif depth < 3 and hasattr(output, "values") and callable(output.values):
        for value in output.values():
            yield from _tensors(value, depth + 1)
    elif depth < 3 and isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value, depth + 1)


def _cpu(x: Tensor) -> Tensor:
    return x.detach().cpu().clone()


def _strided(p: Tensor) -> Tensor:
    """At most ELEMENTS elements of a tensor, evenly spread."""
    flat = p.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)]


def _update(name: str, p: Tensor, before: Tensor, lr: float) -> Update:
    now = _strided(p)
    delta = now.float() - before.float()
    size = float(before.float().norm())
    return Update(
        name=name,
        shape=tuple(p.shape),
        dtype=p.dtype,
        lr=lr,
        rms=float(delta.square().mean().sqrt()),
        relative=float(delta.norm()) / size if size > 0 else float("inf") if float(delta.norm()) > 0 else 0.0,
        changed=float((now != before).float().mean()),
        gradient=float(p.grad.float().norm()) if p.grad is not None and not p.grad.is_sparse else None,
        silent=float((_strided(p.grad) == 0).float().mean()) if p.grad is not None and not p.grad.is_sparse else None,
    )


def _norms(tensors: list[Tensor]) -> list[float]:
    """Norm of each tensor, in fp32, with one synchronisation per device and dtype."""
    found: list[float] = [0.0] * len(tensors)
    kinds: dict[tuple, list[int]] = {}
    for i, t in enumerate(tensors):
        kinds.setdefault((t.device, t.dtype), []).append(i)
    for members in kinds.values():
        norms = torch._foreach_norm([tensors[i] for i in members], dtype=torch.float32)
        for i, norm in zip(members, torch.stack(norms).tolist()):
            found[i] = norm
    return found


def _spread(names: list[str], count: int) -> list[str]:
    if len(names) <= count:
        return names
    return [names[round(i * (len(names) - 1) / (count - 1))] for i in range(count)]


def _tied(e: Evidence) -> bool | None:
    into, out = e.embedding(), e.head()
    return None if into is None or out is None else into.data_ptr() == out.data_ptr()


def _with_own(base: type, name: str) -> list[type]:
    """The class and all its subclasses that define this method themselves."""
    kinds, found = [base], []
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if isinstance(vars(kind).get(name), types.FunctionType) and kind not in found:
            found.append(kind)
    return found


def _spoken_before() -> list[str]:
    """Warnings that some modules gave before the watch began: Python remembers the texts it has shown."""
    import sys

    texts = []
    for name in SPOKE_BEFORE:
        for key in getattr(sys.modules.get(name), "__warningregistry__", {}):
            if isinstance(key, tuple):
                texts.append(str(key[0]))
    return texts
