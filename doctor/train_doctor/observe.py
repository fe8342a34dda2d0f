"""Watch a user's own training loop from outside: hooks on the model, patches on the few calls every loop makes.

Nothing is driven and nothing is wrapped. Optimizers are seen through torch's global step hooks, so any optimizer is,
also one made inside the block; `backward`, gradient clipping, `zero_grad`, GradScaler, schedulers, the losses of
torch.nn.functional and reentrant checkpoints through attributes that are replaced while the watch lasts and put back
after it, also when the block raises. Patches sit on names that torch itself looks up at each call, because a loop may
hold its own name for a function (`from torch.nn.utils import clip_grad_norm_`). After the watched steps everything is
taken off again, so that the rest of the run costs nothing. The parts are listed in attach.py.

Once a round, before its first step, all gradients are measured; of eight tensors the change by the step is. Nothing
here draws a random number or writes to a tensor of the user. What needs another forward pass is in probes.py, and that
one restores generators and buffers.

Footguns: a round ends with the first backward after a step, not with the step: several optimizers may step, and a
scheduler, a scaler and `zero_grad` come after them. An optimizer with a closure (LBFGS) calls backward inside its step,
so what belongs before the step comes in the middle of it. SequentialLR steps other schedulers inside its own step, and
every scheduler steps once when it is made. Only the outermost step of a scheduler that is under way is the loop's.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils import checkpoint

from train_doctor import anatomy, fed, fingerprint, graphs, histograms, measures, owners, probes
from train_doctor.attach import Attachments, Part, quietly, spoken_before, with_own
from train_doctor.calls import Calls
from train_doctor.evidence import (
    Backward,
    Call,
    Clip,
    Evidence,
    Gradients,
    Optimizer,
    ScalerStep,
    Schedule,
    Step,
    Unscale,
    ZeroGrad,
)
from train_doctor.measures import SAMPLED
from train_doctor.reading import readable
from train_doctor.shadow import Shadow
from train_doctor.waits import Waits

BACKWARDS = 256  # without a step, for each step to be watched; then the watch ends
MARKS = 64  # numbers of a tensor that tell whether it moved


class Optimizers(Part):
    """Sees optimizers step and gradients being cleared, clipped and scaled."""

    def __init__(self, at: Attachments, optimizers: Sequence[torch.optim.Optimizer], layers: histograms.Given):
        super().__init__(at)
        self.layers = layers
        self.seen: dict[int, int] = {}  # id(optimizer) -> index
        self.count = 0  # of outermost backwards
        self.waiting = 0  # of those since an optimizer stepped, or the weights moved
        self.marks: list[Tensor] = []  # a few weights at the last backward, while no optimizer has stepped
        self.moves = 0  # how often they had changed
        self.backwards: dict[int, int] = {}  # index -> count at its last step
        self.stepped = False  # an optimizer stepped, or a scaler skipped, since the last backward
        self.closure = False  # inside an optimizer's step that was given one
        self.before: dict[str, Tensor] = {}  # the followed tensors before a step
        self.uncleared: set[int] = set()  # indices of optimizers whose gradients were not cleared since their step
        self.stale: set[int] = set()  # those of them to whose old gradients a backward has added
        self.old: dict[int, tuple[list[Tensor], list[float]]] = {}  # candidates for it: tensors, norms before it
        self.left: dict[int, int] = {}  # index -> optimizer that stepped while gradients waited here
        self.added: dict[int, tuple] = {}  # of those, before a backward: norms of both
        self.foreign: set[int] = set()  # those to which another loss was added since
        self.shadow = Shadow()
        self.scale: float | None = None  # of the scaler that scaled a loss since the last backward
        self.scaling = False  # an enabled scaler has scaled a loss
        self.unscaled = False
        self.scheduling = False  # inside a scheduler's step
        self.hold: Callable | None = None  # takes the hook after a step where torch cannot, see windows.py
        for optimizer in optimizers:
            self.learn(optimizer)

    def start(self) -> None:
        at, clip, scaler = self.at, torch.nn.utils.clip_grad, torch.amp.GradScaler
        at.undo.append(torch_optimizer.register_optimizer_step_pre_hook(self._before_step).remove)
        register = torch_optimizer.register_optimizer_step_post_hook
        at.undo.append(register(self._after_step).remove if self.hold is None else self.hold(self._after_step))
        if hasattr(clip, "_clip_grads_with_norm_"):  # looked up by clip_grad_norm_ at each call
            at.before(clip, "_clip_grads_with_norm_", self._clip)
        else:
            at.before(torch.nn.utils, "clip_grad_norm_", self._clip)
        for kind in with_own(torch.optim.Optimizer, "zero_grad"):
            at.around(kind, "zero_grad", self._see_zero)
        at.around(nn.Module, "zero_grad", self._see_zero)
        for kind in with_own(LRScheduler, "step"):
            at.around(kind, "step", self._see_schedule)
        for kind in with_own(scaler, "step"):
            at.around(kind, "step", self._see_scaler_step)
        for kind in with_own(scaler, "scale"):
            at.before(kind, "scale", self._scaled)
        for kind in with_own(scaler, "unscale_"):
            at.before(kind, "unscale_", self._unscale)

    # ---------------------------------------------------------------- at a backward
    def by_hand(self) -> bool:
        """Whether the weights are moved without an optimizer of torch, so that this backward begins a step.

        Once may be a search for a direction (SAM) whose optimizer has yet to step; the third time is a habit.
        """
        if self.backwards or self.closure:
            return False
        marks = [measures.strided(p)[:: max(1, p.numel() // MARKS)].clone() for p in self._sampled().values()]
        same = len(marks) == len(self.marks) and all(map(torch.equal, marks, self.marks))
        fresh, self.marks = not self.marks, marks
        if same or fresh:
            return False
        self.moves += 1
        return self.moves > 2

    def before_backward(self) -> None:
        if not self.e.first:
            self.sample()
            if self.closure:
                self._remember(self._sampled())
        self.look_for_old()
        self.added = {index: self._both(index) for index in self.left}

    def after_backward(self) -> None:
        if self.closure:  # of an optimizer's step: the weights are still those of the forward
            self.note_gradients()
        self.added_to_old()
        for index, (mine, others) in self.added.items():
            now = self._both(index)
            if now[0] != mine and now[1] == others:  # a loss of this optimizer alone
                self.foreign.add(index)
        self.scale, self.added = None, {}

    def next_round(self) -> None:
        self.stepped = self.unscaled = False
        self.waiting = 0

    def release(self) -> None:
        self.shadow, self.before, self.old, self.marks = Shadow(), {}, {}, []
        for optimizer in self.e.optimizers:
            optimizer.object = None

    def _remember(self, tensors: dict[str, Tensor]) -> None:
        self.before = {name: measures.strided(p).clone() for name, p in tensors.items()}
        first = {n: self.e.first[n][1] for n in self.before if self.e.rounds and n in self.e.first}
        same = [(self.before[n][:MARKS] == t[:MARKS]).all().cpu() for n, t in first.items()]
        for name, back in zip(first, torch.stack(same).tolist() if same else []):
            self.e.returned[name] = self.e.returned.get(name, 0) + back

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

    # ---------------------------------------------------------------- steps
    @quietly
    def _before_step(self, optimizer, args, kwargs) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:  # the backward comes inside, or has come already (Lightning, by hand)
            self.closure = True
            if self.count > self.backwards.get(self.seen.get(id(optimizer), -1), 0):
                self.learn(optimizer)
                self.note_gradients()
            self._remember(self._sampled(optimizer))
            return
        self.learn(optimizer)
        self.note_gradients()
        self._note_step(optimizer)
        self.at.aside(self.shadow.before, optimizer)

    def _note_step(self, optimizer) -> None:
        index = self.learn(optimizer)
        if not self.closure:
            self._remember(self._sampled(optimizer))
        event = Step(
            round=self.e.rounds,
            optimizer=index,
            rates=[_rate(group) for group in optimizer.param_groups],
            backwards=self.count - self.backwards.get(index, 0),
            norm=self.sampled_norm(),
        )
        own = measures.gradients_of(p for group in optimizer.param_groups for p in group["params"])
        event.own = sum(n**2 for n in measures.norms(own)) ** 0.5 if own else None
        event.stale, event.foreign = index in self.stale, index in self.foreign
        self._left_by(index)
        self.stale.discard(index)
        self.old.pop(index, None)
        self.uncleared.add(index)
        self.backwards[index] = self.count
        self.e.note(event)
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
            rates = {id(p): _rate(g) for g in optimizer.param_groups for p in g["params"]}
            for name, p in self._sampled(optimizer).items():
                if name in self.before:
                    steps[-1].updates.append(measures.update(name, p, self.before[name], rates[id(p)]))
        self.before = {}
        self.at.aside(self.shadow.after, optimizer)
        self.e.shadow, self.e.unshadowed = self.shadow.coefficients(), self.shadow.why

    def note_gradients(self) -> None:
        """Once a round, before its first step: all gradients; in the first round the probes too."""
        if self.e.of(Gradients, round=self.e.rounds) or self.at.depth:
            return  # inside a backward (an optimizer that steps in gradient hooks) most are not there yet
        if self.e.rounds == 0:
            before = list(self.e.models)
            owners.settle(self.e)
            self.e.settled = True
            if before != self.e.models:
                self.sample()
        ps = self.e.trainable()
        have = {name: g for name, p in ps.items() if (g := measures.gradient_of(p)) is not None}
        norms = dict(zip(have, measures.norms(list(have.values()))))
        self.e.note(Gradients(self.e.rounds, {name: norms.get(name) for name in ps}))
        if self.e.rounds in histograms.LOOKS:
            histograms.gradients(self.e)
        self.layers.noted()
        if self.e.rounds == 0:
            self.at.aside(probes.run, self.e)
        self.at.aside(probes.fault, self.e)
        for call in self.e.of(Call, round=self.e.rounds):
            call.args, call.kwargs = (), {}

    def sample(self) -> None:
        """Choose, once, the tensors whose change is followed: trainable ones evenly over the depth, some frozen."""
        ps = self.e.parameters()
        matrices = [n for n, p in ps.items() if p.requires_grad and p.dim() >= 2]
        vectors = [n for n, p in ps.items() if p.requires_grad and p.dim() < 2]
        frozen = [n for n, p in ps.items() if not p.requires_grad and p.is_floating_point()]
        chosen = measures.spread(matrices, SAMPLED - 2) + measures.spread(vectors, 2) + measures.spread(frozen, 4)
        self.e.first = {n: (id(ps[n]), measures.strided(ps[n]).clone()) for n in chosen}
        self.e.frozen_at_start = {n for n in chosen if not ps[n].requires_grad}
        self.e.tied_at_start = measures.tied(self.e)
        into, out = self.e.embedding(), self.e.head()
        if self.e.tied_at_start is False and into.shape == out.shape and into.dtype == out.dtype:
            self.e.alike_at_start = bool(torch.equal(into, out))

    def _sampled(self, optimizer=None) -> dict[str, Tensor]:
        ps, mine = self.e.parameters(), None
        if optimizer is not None:
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {n: ps[n] for n in self.e.first if n in ps and (mine is None or id(ps[n]) in mine)}

    def sampled_norm(self) -> float | None:
        found = measures.norms(measures.gradients_of(self._sampled().values()))
        return sum(norm**2 for norm in found) ** 0.5 if found else None

    def look_for_old(self) -> None:
        """Before a backward: which optimizers' gradients are still those of their last step?"""
        for index in list(self.uncleared):
            groups = self.e.optimizers[index].object.param_groups
            left = [p for g in groups for p in g["params"] if p.grad is not None and p.grad.layout == torch.strided]
            left = [p for p in left if not p.grad.is_meta]
            left = left[:: max(1, len(left) // SAMPLED)]
            norms = measures.norms([p.grad for p in left])
            if any(norm != 0 for norm in norms):
                self.old[index] = left, norms
            self.uncleared.discard(index)

    def added_to_old(self) -> None:
        """After it: to which of them has it added? Copies of the weights that are given gradients by hand are not."""
        for index, (left, norms) in list(self.old.items()):
            now = [p.grad for p in left]
            if None not in now and measures.norms(now) != norms:
                self.stale.add(index)
                del self.old[index]

    def _waiting(self, index: int) -> list[float]:
        """Norms of a few of an optimizer's gradients."""
        optimizer = self.e.optimizers[index].object
        have = measures.gradients_of(p for g in optimizer.param_groups for p in g["params"]) if optimizer else []
        return measures.norms(have[:: max(1, len(have) // SAMPLED)])

    def _both(self, index: int) -> tuple[list[float], list[float]]:
        return self._waiting(index), self._waiting(self.left[index])

    def _left_by(self, index: int) -> None:
        """An optimizer steps: on which others does its backward leave gradients?"""
        self.left.pop(index, None)
        self.foreign.discard(index)
        for other in range(len(self.e.optimizers)):
            if (
                other != index
                and other not in self.left
                and not self.e.optimizers[other].ids & self.e.optimizers[index].ids
            ):
                if any(norm != 0 for norm in self._waiting(other)):
                    self.left[other] = index

    def _cleared(self, ids: frozenset[int]) -> None:
        cleared = {i for i, o in enumerate(self.e.optimizers) if o.ids & ids}
        self.uncleared -= cleared
        self.stale -= cleared
        self.foreign -= cleared
        for index in cleared:
            self.old.pop(index, None)
            self.left.pop(index, None)

    def _see_zero(self, original: Callable, holder, *args, **kwargs) -> Any:
        """What counts is the effect: accelerate's zero_grad does nothing until gradients are synced."""
        before = None if self.at.idle else self._there(holder)
        result = original(holder, *args, **kwargs)
        if before is not None:
            self._zeroed(before, isinstance(holder, nn.Module))
        return result

    @quietly
    def _there(self, holder) -> list[tuple[Tensor, Tensor | None, int]]:
        groups = [{"params": holder.parameters()}] if isinstance(holder, nn.Module) else holder.param_groups
        ps = [p for group in groups for p in group["params"]]
        return [(p, p.grad, 0 if p.grad is None else _version(p.grad)) for p in ps]

    @quietly
    def _zeroed(self, before: list[tuple[Tensor, Tensor | None, int]], module: bool) -> None:
        had = any(g is not None for _, g, _ in before)
        left = [p for p, g, version in before if g is not None and p.grad is g and _version(g) == version]
        if had and len(left) == sum(g is not None for _, g, _ in before):
            return  # nothing was cleared
        kept = {id(p) for p in left}
        ids = frozenset(id(p) for p, _, _ in before if id(p) not in kept)
        if had or not module:
            self.e.note(ZeroGrad(self.e.rounds, had, ids))
        self._cleared(ids)

    # ---------------------------------------------------------------- clipping, scalers, schedulers
    @quietly
    def _clip(self, parameters, max_norm, total_norm=None, *args, **kwargs) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        total = float(total_norm) if isinstance(total_norm, Tensor) and gradients else None
        scaled = self.scaling and not self.unscaled
        ids = frozenset(id(p) for p in parameters)
        self.e.note(Clip(self.e.rounds, float(max_norm), total, not gradients, scaled, ids))

    @quietly
    def _scaled(self, scaler, *args, **kwargs) -> None:
        if scaler.is_enabled():
            self.scale, self.scaling, self.unscaled = float(scaler.get_scale()), True, False

    @quietly
    def _unscale(self, scaler, *args, **kwargs) -> None:
        if scaler.is_enabled():
            self.unscaled = True
            self.e.note(Unscale(self.e.rounds))

    def _see_scaler_step(self, original: Callable, scaler, optimizer, *args, **kwargs) -> Any:
        before = len(self.e.of(Step)) if self.at.on else 0
        result = original(scaler, optimizer, *args, **kwargs)
        if self.at.on and not self.at.busy:
            self.stepped = True
            stepped = len(self.e.of(Step)) > before
            scale = float(scaler.get_scale())
            self.e.note(ScalerStep(self.e.rounds, scaler.is_enabled(), stepped, scale))
        return result

    def _see_schedule(self, original: Callable, scheduler, *args, **kwargs) -> Any:
        initial = getattr(scheduler, "_is_initial", False) or getattr(scheduler, "last_epoch", 0) == -1
        inner, self.scheduling = self.scheduling, True  # SequentialLR steps others
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            self.scheduling = inner
            if not inner and not initial:
                self._scheduled(scheduler)

    @quietly
    def _scheduled(self, scheduler) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        index = self.seen.get(id(optimizer), -1)
        epochal, kind = isinstance(scheduler, ReduceLROnPlateau), type(scheduler).__name__
        self.e.note(Schedule(self.e.rounds, index, epochal, id(scheduler), kind))


class Observer(Part):
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
        super().__init__(Attachments(Evidence(steps=steps, model=model, **declared)))
        self.steps, self.terms = steps, terms
        self.at.full = full
        self.waits = Waits(self.at)
        self.calls = Calls(self.at, model, teachers, self.waits)
        self.optimizers = Optimizers(self.at, optimizers, self.calls.layers)

    def start(self) -> None:
        at = self.at
        at.on = True
        self.e.warned += spoken_before()
        self.calls.start()
        self.optimizers.start()
        self.waits.start()
        at.around(torch.autograd, "backward", self._see_backward)
        at.around(checkpoint.CheckpointFunction, "apply", at.see_region)
        at.around(nn.Module, "load_state_dict", at.see_loading)
        at.around(warnings, "warn", at.see_warning)

    def stop(self) -> None:
        """Take everything off. Safe to call twice."""
        self._settle()
        self.at.off()

    @quietly
    def _settle(self) -> None:
        self.calls.settle()

    def release(self) -> None:
        """Let go of the user's objects."""
        self.calls.release()
        self.optimizers.release()
        self.at.e = Evidence(**self.e.declared)
        self.at.full = self.terms = dict  # they hold the observer: without them no garbage collection is needed

    def _see_backward(self, original: Callable, tensors: Any, *args, **kwargs) -> None:
        at = self.at
        if at.idle or at.depth:  # the inner backward of a reentrant checkpoint
            return original(tensors, *args, **kwargs)
        with torch.enable_grad():
            event = self._begin_backward(tensors)
        if event is not None:
            event.retained = bool(kwargs.get("retain_graph") or (len(args) > 1 and args[1]))
        self.calls.let_go()
        if not at.on:  # that was the first backward after the last watched step
            return original(tensors, *args, **kwargs)
        at.depth += 1
        try:
            return original(tensors, *args, **kwargs)
        except BaseException as error:
            if event is not None:
                event.raised = f"{type(error).__name__}: {error}"
            raise
        finally:
            at.depth -= 1
            self._end_backward(event)

    @quietly
    def _begin_backward(self, tensors: Any) -> Backward | None:
        if self.optimizers.stepped or self.optimizers.by_hand():
            self._next_round()
        elif self.optimizers.waiting >= BACKWARDS * self.steps:
            self.at.full()
        if not self.at.on:
            return None
        e, scale = self.e, self.optimizers.scale
        loss = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        if not isinstance(loss, Tensor):
            return None
        if loss.is_meta:
            e.opaque, self.at.on = "the tensors are on the meta device, which has no numbers", False
            return None
        if not e.first:
            self.calls.name_models()
        self.optimizers.before_backward()
        self.calls.complete()
        scalar = loss.numel() == 1 and readable(loss)
        event = Backward(
            round=e.rounds,
            value=float(loss.detach().float()) / (scale or 1.0) if scalar else None,
            requires_grad=bool(loss.requires_grad),
            leaf=bool(loss.requires_grad and loss.is_leaf),
            scale=scale,
            calls=self.calls.calls,
            entropies=self.calls.entropies,
            declared=self.terms(),
        )
        if not e.note(event):
            return None  # only counted
        if scalar:
            if e.rounds < fed.ROUNDS or any(n.fed is not None for n in event.entropies):
                event.entropies += fed.mark(loss, event.entropies, e.rounds)
                event.square = fed.square(loss)
            event.reading = fingerprint.read(e, event, loss)
            graphs.mark(e, loss)
            if event.value is not None and not math.isfinite(event.value) and not e.crooked:
                e.crooked, event.source = True, graphs.source(loss)
            event.dead_term = anatomy.constant_added(loss, event, scale)
            event.dead_values = anatomy.unconnected(event)
        return event

    @quietly
    def _end_backward(self, event: Backward | None) -> None:
        self.optimizers.count += 1
        self.optimizers.waiting += 1
        if event is not None:
            event.norm = self.optimizers.sampled_norm()
            for call in event.calls:
                now = int(call.cache().get_seq_length()) if call.cache() is not None else 0
                call.recached = now if now > call.kept else 0
        self.optimizers.after_backward()
        self.calls.forget()

    def _next_round(self) -> None:
        self.e.rounds += 1
        self.optimizers.next_round()
        self.calls.next_round()
        if self.e.rounds >= self.steps:
            self.at.full()


def _version(g: Tensor) -> int:
    """How often it was written to; a tensor made under inference_mode does not count that, and passes as written to."""
    return time.perf_counter_ns() if g.is_inference() else g._version


def _rate(group: dict) -> float:
    """NaN where an optimizer has none."""
    rate = group.get("lr")
    return math.nan if rate is None else float(rate)
