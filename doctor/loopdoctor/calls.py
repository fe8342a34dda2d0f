"""Who is called: models, teachers and losses, and what they gave since the last backward.

A model that was given gets its hooks at once. One that was not is found: until the first round
ends, every module that no other module called is a whole model, and later owners.py may put the
object that holds several of them in their place. The parts of a model may be called one by one, or
its forward method past its hooks. Such a model is read at its two ends: what went into the
embedding and what came out of the head.

Losses are seen where torch itself looks them up: nn.CrossEntropyLoss calls `F.cross_entropy`.

Footgun: hooks inside a compiled graph break it or do not fire. A compiled model is only seen from
outside, and the Evidence says that it is opaque.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from loopdoctor import fed, graphs, histograms, measures, owners
from loopdoctor.attach import Attachments, Part, quietly
from loopdoctor.echoes import cut_like, echo
from loopdoctor.evidence import Call, Entropy, Tree, nothing
from loopdoctor.eye import Eye, tensors
from loopdoctor.histograms import Given
from loopdoctor.latents import Latents
from loopdoctor.reading import autocast_of, finite, is_compiled, on_cpu, read_call, readable, unwrap
from loopdoctor.waits import Waits

KEPT = 8  # calls of a kind whose arguments, or logits, are held
CALLS = 4096  # of models without a backward, for each step to be watched; then the watch ends
MARKED = 32  # numbers of what a model is given that tell one batch from another
HELD = 64  # losses whose tensors are held until the next backward
OPAQUE = "the model is compiled: what happens inside its graph cannot be seen"


class Calls(Part):
    """Sees the calls of models and losses."""

    def __init__(
        self,
        at: Attachments,
        model: nn.Module | None,
        teachers: Sequence[nn.Module],
        waits: Waits,
        eye: Eye,
    ):
        super().__init__(at)
        self.waits, self.layers, self.latents, self.eye = waits, Given(at), Latents(at), eye
        self.backwards = 0
        self.losing = ""  # the loss that is under way
        self.calls: list[Call] = []  # since the last backward, like the next two
        self.entropies: list[Entropy] = []
        self.embedded: list[Tensor] = []  # ids
        # what tables were asked for that is one row: places, as a rule
        self.placed: list[Tensor] = []
        self.ends: dict[str, Any] = {}  # what went into the embedding and came out of the head
        self.fed_data: set[int] = set()  # ids of modules that were given data, with gradients on
        self.given = [unwrap(m, []) for m in teachers]
        self.discovering = False
        self.idle = 0  # calls since the last backward
        self.evaluations = 0  # those of them without gradients and in eval mode
        self.calls_deep = 0  # modules inside each other, while discovering
        self.laid: dict[int, str] = {}  # modules that take the time first, by id
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # hooked as whole models
        self.covered: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # hooked to be counted
        self.heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.norms: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the last of each model
        # calls by role and gradient mode: the arguments of the first are kept for the probes
        self.kept = Counter()
        # hooks that count calls, by id of the module
        self.counted: dict[int, tuple[weakref.ref, RemovableHandle]] = {}
        self.always: set[int] = set()  # ids of those that are counted throughout
        # torch's own encoder layers are called without hooks where they run as one operation
        self.fused = False
        self.met: dict[
            int, tuple[Tree, list[nn.Module]]
        ] = {}  # id of a whole model -> as it was, parts with an adapter
        self.e.teachers += self.given
        self.e.named_teachers += self.given
        if model is not None:
            self.e.models.append(unwrap(model, self.e.wrappers))

    def start(self) -> None:
        e = self.e
        for m in (*e.models, *e.teachers):
            self._root(m)
        for wrapper in e.wrappers:
            self._wrapper(wrapper)
        for name in fed.LOSSES:
            self.at.around(F, name, self._see_loss)
        self.latents.start()
        if not any(is_compiled(m) for m in (*e.models, *e.wrappers)):
            self._discover()
        for model in e.models:
            self._cover(model)

    # ---------------------------------------------------------------- at a backward
    def name_models(self) -> None:
        """Before the first backward: who is the model, where nobody said it?"""
        owners.promote(self.e, self.given)
        whole = owners.merge(self.e)
        if whole is None:
            return
        self._root(whole)
        self._cover(whole)
        widths = {m.num_embeddings for m in whole.modules() if isinstance(m, nn.Embedding)}
        heads = [c.logits for c in self.calls if c.logits is not None and c.vocabulary in widths]
        if heads:  # what the last of its parts gave
            self.ends.setdefault("logits", heads[-1])
        self.calls = [c for c in self.calls if c.role != "model"]

    def complete(self) -> None:
        """Before each backward: a model that was compiled in place meanwhile, one that was called
        past its hooks.
        """
        self._see_compiled()
        learning = [c for c in self.calls if c.role == "model" and c.grad and not c.raised]
        if not learning:
            self._call_from_ends()
        elif learning[-1].logits is None and learning[-1].ids is not None:
            # of a backbone whose head the loss applies
            self._head_of_its_own(learning[-1])

    def let_go(self) -> None:
        """Of logits and losses, which a program may have let go of already: backward needs the
        memory.
        """
        for call in self.calls:
            call.logits = call.loss = call.hidden = call.head = None
        for entropy in self.entropies:
            entropy.input = entropy.target = entropy.value = entropy.weight = None
        self.ends = {}

    def forget(self) -> None:
        """After a backward: the next calls belong to the next one."""
        self.idle = 0
        self.evaluations = 0
        self.backwards += 1
        self.calls, self.entropies, self.embedded, self.placed, self.e.lookups = [], [], [], [], []
        if self.e.rounds + 1 in histograms.LOOKS:
            self._count_again()

    def next_round(self) -> None:
        for event in (*self.calls, *self.entropies):  # of the backward that now begins the round
            event.round = self.e.rounds
        if self.discovering:
            self.discovering = False
            self._undiscover()
        if self.e.latents:
            self._count_again()
        elif not (self.e.accelerator or self.e.opaque):
            self._count_less()

    def _count_less(self) -> None:
        """Once is enough to know that a part was called with gradients: its hook would cost a
        little at each call.
        """
        for key in [key for key in self.counted if self.e.called_with_grad.get(key)]:
            self.counted.pop(key)[1].remove()

    def _count_again(self) -> None:
        """Start the counts of a new step: what layers are given, or all that a sample may be given
        to.
        """
        for _, m in self.e.modules():
            wanted = self.e.latents or id(m) in self.layers.chosen
            if (
                wanted
                and id(m) not in self.counted
                and id(m) not in self.always
                and m in self.covered
            ):
                self._counted(m)

    def _counted(self, module: nn.Module) -> None:
        handle = module.register_forward_pre_hook(self._count)
        self.counted[id(module)] = weakref.ref(module), handle
        self.at.hook(module, handle)

    def settle(self) -> None:
        """At the end: the final word on who learns, for an optimizer may have come late, as a GAN's
        second one does.
        """
        owners.promote(self.e, self.given)
        owners.settle(self.e)

    def release(self) -> None:
        self.let_go()
        self.forget()
        self.given = []
        self.layers.waiting = {}
        for call in self.e.of(Call):
            call.args, call.kwargs, call.looked = (), {}, ()

    # ---------------------------------------------------------------- losses
    def _see_loss(self, original: Callable, *args, **kwargs) -> Any:
        """Under a mode (eye.py) a loss of torch calls itself by its name once more, and so comes by
        here twice.
        """
        if self.losing == original.__name__:
            return original(*args, **kwargs)
        outer, self.losing = self.losing, original.__name__
        try:
            value = original(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if not self.at.blind:
                self._loss(
                    original.__name__, args, kwargs, None, torch.is_grad_enabled(), str(error)
                )
            raise
        finally:
            self.losing = outer
        if not self.at.blind:
            self._loss(original.__name__, args, kwargs, value, torch.is_grad_enabled())
        return value

    @quietly
    def _loss(
        self, name: str, args: tuple, kwargs: dict, value: Any, grad: bool, raised: str = ""
    ) -> None:
        given = dict(zip(fed.SIGNED.get(name, ("input", "target")), args)) | kwargs
        given.setdefault("input", given.get("input1", given.get("log_probs")))
        ignored = kwargs.get(
            "ignore_index", args[4] if len(args) > 4 and isinstance(args[4], int) else -100
        )
        entropy = Entropy(
            round=self.e.rounds,
            name=name,
            input=given.get("input"),
            target=given.get("target"),
            value=value if isinstance(value, Tensor) else None,
            reduction=kwargs.get("reduction", "mean"),
            ignored=ignored if name in ("cross_entropy", "nll_loss") else None,
            grad=grad,
            connected=isinstance(value, Tensor) and value.requires_grad,
            number=float(value)
            if name == "kl_div" and isinstance(value, Tensor) and value.numel() == 1
            else None,
            width=args[0].shape[-1]
            if args and isinstance(args[0], Tensor) and args[0].dim()
            else None,
            shape=tuple(args[0].shape) if args and isinstance(args[0], Tensor) else (),
            dtypes=tuple(
                t.dtype for t in (given.get("input"), given.get("target")) if _of_numbers(t)
            ),
            raised=raised,
            log_target=bool(kwargs.get("log_target", False)),
            log_input=bool(
                kwargs.get(
                    "log_input", args[2] if len(args) > 2 and name.startswith("poisson") else True
                )
            ),
            smoothing=float(kwargs.get("label_smoothing", 0.0)),
            weight=kwargs.get("weight", args[2] if len(args) > 2 else None)
            if name == "cross_entropy"
            else None,
        )
        early = len(self.entropies) < fed.CALLS and measures.looked(self.e.rounds)
        if (raised or entropy.connected and early) and isinstance(entropy.input, Tensor):
            entropy.fed = fed.look(name, entropy.input, entropy.target)
        if early and entropy.ignored is not None and readable(entropy.target) and self.embedded:
            if not entropy.target.is_floating_point():
                inputs = cut_like(getattr(entropy.input, "grad_fn", None), self.embedded)
                self.e.echoed[self.e.rounds] = echo(inputs, entropy.target, entropy.ignored)
        if not entropy.connected:  # only its value may matter
            entropy.input = entropy.target = None
        if len(self.entropies) >= HELD:
            old = self.entropies[-HELD]
            old.input = old.target = old.value = old.weight = None
        if self.e.note(entropy):
            self.entropies.append(entropy)

    # ---------------------------------------------------------------- models
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
        self.at.hook(
            module, module.register_forward_hook(self._called, with_kwargs=True, always_call=True)
        )

    def _in_place(self, module: nn.Module) -> None:
        """See the calls of a module after `module.compile()`: its hooks are inside the graph and do
        not fire.
        """
        holder = weakref.ref(module)

        def see(original, *args, **kwargs):
            result = original(*args, **kwargs)
            if holder() is not None:
                self._called(holder(), args, kwargs, result)
            return result

        self.at.around(module, "_compiled_call_impl", see)
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

        self.at.hook(module, module.register_forward_pre_hook(count))
        if is_compiled(module) and module not in self.roots:
            self._root(module)

    def _discover(self) -> None:
        """Until the first round ends: every module that is called by no other module is a whole
        model.
        """
        self.discovering = True

        def enter(module, args):
            if self.at.blind or self.at.depth:
                return
            self.calls_deep += 1
            if (
                self.calls_deep == 1
                and module not in self.roots
                and any(True for _ in module.parameters())
            ):
                self._root(module)
                self._cover(module)

        def leave(module, args, output):
            if not self.at.idle and not self.at.depth:
                self.calls_deep = max(0, self.calls_deep - 1)

        hooks = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]

        def off():
            while hooks:
                hooks.pop().remove()

        self.at.undo.append(off)
        self._undiscover = off

    @quietly
    def _cover(self, model: nn.Module) -> None:
        """Count the calls of every module with parameters of its own, and see the two ends of the
        model.
        """
        if is_compiled(model):
            return
        hidden = {m for c in model.modules() if is_compiled(c) for m in c.modules()}
        norm = _last_norm(model)
        if norm is not None and norm not in hidden and norm not in self.norms:
            self.norms.add(norm)
            self.at.hook(norm, norm.register_forward_hook(self._normed))
        tables = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
        self.layers.meet(model)
        self.laid |= graphs.sequences(model)
        if not self.fused and any(
            isinstance(m, nn.TransformerEncoderLayer) for m in model.modules()
        ):
            self.fused = True
            self.at.around(nn.TransformerEncoderLayer, "forward", self._unhooked)
        for name, m in model.named_modules():
            dropout = isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0
            if m in hidden:
                continue
            own = next(iter(m._parameters.values()), None) is not None or _parametrised(m)
            if not (own or dropout):
                continue
            if isinstance(m, nn.Linear) and m not in self.heads and m.out_features in tables:
                self.heads.add(m)
                self.at.hook(m, m.register_forward_hook(self._headed))
            if m in self.covered:
                continue
            self.covered.add(m)

            if dropout or id(m) in self.laid:
                self.always.add(id(m))
                self.at.hook(m, m.register_forward_pre_hook(self._each(name, dropout)))
            else:
                self._counted(m)
            if isinstance(m, nn.Embedding):
                self.at.hook(m, m.register_forward_hook(self._embedded))

    def _unhooked(self, original: Callable, layer: nn.Module, *args, **kwargs) -> Any:
        """At rest, torch's own layer runs as one fused operation, unless hooks are in it; the two
        round differently.
        """
        learns = (
            layer.training
            or torch.is_grad_enabled()
            and any(p.requires_grad for p in layer.parameters())
        )
        if learns or torch.compiler.is_compiling():
            return original(layer, *args, **kwargs)
        return self.at.lifted(original, layer, *args, **kwargs)

    def _each(self, name: str, dropout: bool) -> Callable:
        """Return a hook for parts of which each call is of interest."""

        def count(module, args):
            self._count(module, args)
            if (
                dropout
                and self.at.on
                and torch.is_grad_enabled()
                and not torch.compiler.is_compiling()
            ):
                self.e.dropouts[id(module)] = name, module.training, module.p

        return count

    def _count(self, module: nn.Module, args: tuple = ()) -> None:
        if self.at.blind:
            return
        key = id(module)
        self.e.called[key] = self.e.called.get(key, 0) + 1
        if key in self.laid and args and readable(args[0]):
            shapes = self.e.sequences.setdefault(self.laid[key], set())
            if len(shapes) < 4:
                shapes.add(tuple(args[0].shape))
        if torch.is_grad_enabled():
            self.e.called_with_grad[key] = self.e.called_with_grad.get(key, 0) + 1
            if self.e.called_with_grad[key] == 1:
                self.waits.meet(module)
            self.waits.called()
            self.layers.called(module, args)
            self.latents.given(args)

    def _embedded(self, module, args, output) -> None:
        # an evaluation in between must not stand for the training
        if torch.is_grad_enabled() and not self.at.depth:
            self._note_embedded(module, args)

    @quietly
    def _note_embedded(self, module, args) -> None:
        ids = args[0] if args else None
        if (
            readable(ids)
            and ids.dim() == 2
            and len(self.embedded) < 8
            and measures.looked(self.e.rounds)
        ):
            self.embedded.append(ids)
            self.e.lookups = self.embedded
        if readable(ids) and ids.dim() == 1 and len(self.placed) < 4 and self.e.rounds == 0:
            self.placed.append(ids)
        widest = self.ends.get("vocabulary", 0)
        if readable(ids) and ids.dim() == 2 and module.num_embeddings >= widest:
            cast = autocast_of(ids.device.type)
            self.ends |= {"ids": ids, "vocabulary": module.num_embeddings, "autocast": cast}

    def _headed(self, module, args, output) -> None:
        if torch.is_grad_enabled() and not self.at.depth and readable(output) and output.dim() == 3:
            self._note_headed(output)

    @quietly
    def _note_headed(self, output) -> None:
        self.ends["logits"] = output

    def _normed(self, module, args, output) -> None:
        if torch.is_grad_enabled() and not self.at.depth and readable(output) and output.dim() == 3:
            self._note_normed(output)

    @quietly
    def _note_normed(self, output) -> None:
        self.ends["hidden"] = output

    def _role(self, module: nn.Module) -> str:
        e = self.e
        if module in e.models or module in e.wrappers:
            return "model"
        if module in e.teachers and (self.e.settled or not self._learns(module)):
            return "teacher"
        mine = {id(p) for p in module.parameters()}
        known = {id(p) for m in e.models for p in m.parameters()}
        if mine & known:  # a wrapper around a model we know, or a part of it called by itself
            return "other"
        if self._learns(module):
            # evaluated before its first training call
            e.teachers[:] = [m for m in e.teachers if m is not module]
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
        return (
            free and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        )

    def _called(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """After each call of a whole model.

        Gradient mode and autocast are still those of the caller.
        """
        if self.at.blind:
            return
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.eye.called(self.backwards)
        if grad and module.training:
            self.e.evaluated = 0
        if not grad and not module.training and any(module is m for m in self.e.models):
            self.e.evaluated += _rows((*args, *kwargs.values()))
            self.eye.evaluation()
            self.evaluations += 1
            if self.evaluations > KEPT:  # of an evaluation, the first calls tell enough
                self.idle += 1
                return
        self._record_call(module, args, kwargs, output, grad, inference)

    @quietly
    def _record_call(self, module, args, kwargs, output, grad, inference) -> None:
        with torch.set_grad_enabled(grad):
            role = self._role(module)
        if role == "other" and any(
            c.round == self.e.rounds and c.role == "model" for c in self.calls
        ):
            return  # the wrapper of a model whose own call was just recorded
        inner = unwrap(module, [])
        if inner is not module and self.calls and self.calls[-1].module() is inner:
            return  # DDP around it
        if role == "other" and not self._whole(inner):
            return  # a part called by itself: the model is read at its two ends
        if role == "model" and module is not inner:
            module = inner
        self.idle += 1
        if self.idle > CALLS * (self.e.declared.get("steps") or 1):
            return self.at.full()  # no training comes by
        self.kept[role, grad] += 1
        kept = self.kept[role, grad] <= KEPT or not any(
            c.role == role and c.grad == grad for c in self.calls
        )
        tree = self.e.tree()
        known = self.met.get(id(module), (None,))[0] is tree
        ps = tree.parameters.values() if known and len(self.e.models) == 1 else module.parameters()
        cast = autocast_of(next((p.device.type for p in ps), "cpu"))
        call = Call(
            round=self.e.rounds,
            role="model" if role == "other" else role,
            grad=grad,
            inference=inference,
            training=inner.training,
            autocast=cast,
            args=args if kept else (),
            kwargs=dict(kwargs) if kept else {},
        )
        call.module = weakref.ref(module)
        # else it may be another call's
        if kept and self.e.rounds == 0 and not any(c.looked for c in self.calls):
            call.looked = *self.embedded, *self.placed
        switches = [getattr(m, "disable_adapters", 0) for m in self._adapted(module, tree)]
        call.adapters_off = bool(switches) and all(s is True for s in switches)
        if output is None:
            call.raised = "the call raised"
        else:
            if grad and role == "model":
                graphs.mark_answer(self.e, output)
            if grad and id(module) not in self.fed_data:
                self._criterion(module, args, output)
            read_call(call, module, args, kwargs, output)
            if call.ids is None and role == "model" and grad:
                call.mark = _mark((*args, *kwargs.values()))
                call.learns = graphs.on_inputs((*args, *kwargs.values()))
            unread = call.vocabulary is None and call.loss is None
            if role == "other" and (
                unread or call.vocabulary is not None and self._narrow(call.vocabulary)
            ):
                return  # the backbone without its head: with tied weights it holds every parameter
        if role == "model" and self.met.get(id(inner), (None,))[0] is not tree:
            self._cover(inner)
            self.met[id(inner)] = tree, self._adapted(inner, tree)
        if self.e.note(call):
            self._make_room(call)
            self.calls.append(call)

    def _criterion(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Note a call of a loss or head with weights of its own (log variances, centres), which is
        always given what a model gave.
        """
        if not any(t.grad_fn is not None for t in tensors(args)):
            self.fed_data.add(id(module))
            self.e.criteria.pop(id(module), None)
        elif id(module) not in self.e.criteria and _is_criterion(module, output):
            own = {name: p._version for name, p in module.named_parameters()}
            self.e.criteria[id(module)] = weakref.ref(module), own

    def _adapted(self, module: nn.Module, tree: Tree) -> list[nn.Module]:
        """Its parts that hold an adapter."""
        met, parts = self.met.get(id(module), (None, []))
        return parts if met is tree else [m for m in module.modules() if hasattr(m, "lora_A")]

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
        tables = {
            m.num_embeddings
            for model in self.e.models
            for m in model.modules()
            if isinstance(m, nn.Embedding)
        }
        return bool(tables) and width not in tables and width < max(tables)

    def _whole(self, module: nn.Module) -> bool:
        """Whether a module that shares parameters with a known model stands for all of it."""
        mine = {id(p) for p in module.parameters()}
        return any({id(p) for p in m.parameters()} <= mine for m in self.e.models) or (
            any(isinstance(m, nn.Embedding) for m in module.modules())
            and module.__class__.__name__.endswith("LM")
        )

    def _call_from_ends(self) -> None:
        """Read a model at its two ends, as it was not called as a whole (its forward method, or its
        parts).
        """
        logits, ids = self.ends.get("logits"), self.ends.get("ids")
        if logits is None and ids is None:
            return
        call = Call(
            self.e.rounds,
            "model",
            grad=True,
            inference=False,
            training=True,
            autocast=self.ends.get("autocast"),
        )
        if self.e.models:
            call.training = self.e.models[0].training
        call.module = weakref.ref(self.e.models[0]) if self.e.models else nothing
        if logits is None:  # a head that was given chunks
            call.ids, call.requires_grad = on_cpu(ids), True
            self._head_of_its_own(call)
        else:
            call.ids = on_cpu(ids) if ids is not None and ids.shape == logits.shape[:2] else None
            call.logits, call.vocabulary, call.requires_grad = (
                logits,
                logits.shape[-1],
                logits.requires_grad,
            )
            call.finite = finite(logits)
        if self.e.note(call):
            self.calls.append(call)

    def _head_of_its_own(self, call: Call) -> None:
        """Note what a loss is given that applies the head itself, by chunks, and so makes no
        logits.
        """
        hidden, weight = self.ends.get("hidden"), self.e.head()
        if hidden is None or weight is None:
            return
        if (
            hidden.shape[:2] == call.ids.shape
            and weight.dim() == 2
            and hidden.shape[2] == weight.shape[1]
        ):
            call.hidden, call.head, call.vocabulary = (
                hidden.detach(),
                weight.detach(),
                weight.shape[0],
            )


def _of_numbers(x: Any) -> bool:
    """Whether it is a tensor of numbers, and not of indices."""
    return isinstance(x, Tensor) and x.is_floating_point()


def _rows(given: Sequence[Any]) -> int:
    """How many rows a model is given."""
    return next((x.shape[0] for x in given if isinstance(x, Tensor) and x.dim()), 0)


def _last_norm(model: nn.Module) -> nn.Module | None:
    """Return the last module with one row of weights as wide as the embedding: what the head is
    given comes out of it.
    """
    widths = {m.embedding_dim for m in model.modules() if isinstance(m, nn.Embedding)}
    rows = [
        m
        for m in model.modules()
        if isinstance(getattr(m, "weight", None), Tensor) and m.weight.dim() == 1
    ]
    return next((m for m in reversed(rows) if m.weight.numel() in widths), None)


def _is_criterion(module: nn.Module, output: Any) -> bool:
    """One number of weights of its own, or the answers of a head in training; a loss may hold a
    network that rests.
    """
    if not isinstance(output, Tensor) or not output.requires_grad:
        return False
    ps = module.parameters(recurse=output.numel() != 1)
    return any(p.requires_grad for p in ps) and (output.numel() == 1 or module.training)


def _parametrised(module: nn.Module) -> bool:
    """Whether its weight is computed anew whenever it is read (weight norm), which may change
    it.
    """
    return not isinstance(module, torch.jit.ScriptModule) and "weight" in module._modules.get(
        "parametrizations", ()
    )


def _mark(given: tuple) -> Tensor | None:
    """Return a few numbers of the first tensor, which tell one batch from another."""
    x = next((x for x in given if readable(x) and x.numel()), None)
    return None if x is None else histograms.few(x, MARKED)
