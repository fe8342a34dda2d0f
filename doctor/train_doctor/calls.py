"""Hooks on models: every call of a whole model, who learns and who teaches, and how often each part was called.

A model that was given gets its hooks at once. One that was not is found: until the first round ends, every module that
no other module called is a whole model, and later owners.py may put the object that holds several of them in their
place. A model whose parts are called one by one, or whose forward method is called past its hooks, is read at its two
ends: what went into the embedding and came out of the head.

Footgun: hooks inside a compiled graph break it or do not fire. A compiled model is only seen from outside, and the
Evidence says that it is opaque.
"""

import weakref
from typing import Any

import torch
from torch import nn

from train_doctor.evidence import Call, gone
from train_doctor.reading import autocast_of, finite, is_compiled, on_cpu, read_call, readable, unwrap
from train_doctor.state import State, quietly

KEPT = 8  # calls of a kind whose arguments, or logits, are held
OPAQUE = "the model is compiled: what happens inside its graph cannot be seen"


class Calls(State):
    """Sees the calls of models."""

    @quietly
    def _root(self, module: nn.Module) -> None:
        """See each call of a whole model."""
        if module in self.roots:
            return
        self.roots.add(module)
        if is_compiled(module):
            self.e.opaque = OPAQUE
        if isinstance(module, torch.jit.ScriptModule):
            return  # takes no hooks
        if getattr(module, "_compiled_call_impl", None) is not None:
            self._in_place(module)
            return
        self.hook(module.register_forward_hook(self._called, with_kwargs=True, always_call=True))

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

        self.swap(module, "_compiled_call_impl", make)
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

        self.hook(module.register_forward_pre_hook(count))
        if is_compiled(module) and module not in self.roots:
            self._root(module)

    def _discover(self) -> None:
        """Until the first round ends: every module that is called by no other module is a whole model."""
        self.discovering = True

        def enter(module, args):
            if self.blind or self.depth:
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

    @quietly
    def _cover(self, model: nn.Module) -> None:
        """Count the calls of every module with parameters of its own, and see the two ends of the model."""
        if is_compiled(model):
            return
        hidden = {m for c in model.modules() if is_compiled(c) for m in c.modules()}
        tables = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
        for name, m in model.named_modules():
            dropout = isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0
            if m in hidden:
                continue
            own = next(iter(m._parameters.values()), None) is not None or getattr(m, "weight", None) is not None
            if not (own or dropout):
                continue
            if isinstance(m, nn.Linear) and m not in self.heads and m.out_features in tables:
                self.heads.add(m)
                self.hook(m.register_forward_hook(self._headed))
            if m in self.covered:
                continue
            self.covered.add(m)

            def count(module, args, name=name, dropout=dropout):
                self._count(module)
                if dropout and self.on and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                    self.e.dropouts[id(module)] = name, module.training, module.p

            self.hook(m.register_forward_pre_hook(count))
            if isinstance(m, nn.Embedding):
                self.hook(m.register_forward_hook(self._embedded))

    def _count(self, module: nn.Module) -> None:
        if self.blind:
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
        if readable(ids) and ids.dim() == 2 and module.num_embeddings >= widest:
            cast = autocast_of(ids.device.type)
            self.ends |= {"ids": ids, "vocabulary": module.num_embeddings, "autocast": cast}

    def _headed(self, module, args, output) -> None:
        if torch.is_grad_enabled() and not self.depth and readable(output) and output.dim() == 3:
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
        if self.blind:
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
        self.kept[role, grad] += 1
        kept = self.kept[role, grad] <= KEPT
        device = next((p.device.type for p in module.parameters()), "cpu")
        cast = autocast_of(device)
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
        self._make_room(call)
        self.e.events.append(call)
        self.calls.append(call)

    def _make_room(self, call: Call) -> None:
        """Hold on to few logits: an evaluation makes many calls and no backward."""
        if call.role != "model" and not call.grad:
            call.logits = call.loss = None
            return
        held = [c for c in self.calls if c.logits is not None or c.loss is not None]
        past = [c for c in held if not c.grad] + [c for c in held if c.grad][: -KEPT or None]
        for old in past:
            old.logits = old.loss = None

    def _narrow(self, width: int) -> bool:
        tables = {m.num_embeddings for model in self.e.models for m in model.modules() if isinstance(m, nn.Embedding)}
        return bool(tables) and width not in tables and width < max(tables)

    def _whole(self, module: nn.Module) -> bool:
        """Whether a module that shares parameters with a known model stands for all of it."""
        mine = {id(p) for p in module.parameters()}
        return any({id(p) for p in m.parameters()} <= mine for m in self.e.models) or (
            any(isinstance(m, nn.Embedding) for m in module.modules()) and module.__class__.__name__.endswith("LM")
        )

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
            call.ids, call.requires_grad = on_cpu(ids), True
        else:
            call.ids = on_cpu(ids) if ids is not None and ids.shape == logits.shape[:2] else None
            call.logits, call.vocabulary, call.requires_grad = logits, logits.shape[-1], logits.requires_grad
            call.finite = finite(logits)
        self.e.events.append(call)
        self.calls.append(call)
