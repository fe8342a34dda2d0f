"""Watch a user's own training loop from outside: hooks on the model, patches on the few calls every
loop makes.

Nothing is driven and nothing is wrapped. Optimizers are seen through torch's global step hooks, so
any optimizer is, also one made inside the block; `backward`, gradient clipping, `zero_grad`,
GradScaler, schedulers, the losses of torch.nn.functional and reentrant checkpoints through
attributes that are replaced while the watch lasts and put back after it, also when the block
raises. Patches sit on names that torch itself looks up at each call, because a loop may hold its
own name for a function (`from torch.nn.utils import clip_grad_norm_`). After the watched steps
everything is taken off again, so that the rest of the run costs nothing. The parts are listed in
attach.py.

Once a round, before its first step, all gradients are measured. Of each optimizer's first three
steps, and of its 8th, 16th and so on, the change of eight tensors is; the other steps must cost
next to nothing. Nothing here draws a random number or writes to a tensor of the user. What needs
another forward pass is in probes.py, and that one restores generators and buffers.

Footguns: a round ends with the first backward after a step, not with the step: several optimizers
may step, and a scheduler, a scaler and `zero_grad` come after them. An optimizer with a closure
(LBFGS) calls backward inside its step, so what belongs before the step comes in the middle of it.
SequentialLR steps other schedulers inside its own step, and every scheduler steps once when it is
made. Only the outermost step of a scheduler that is under way is the loop's.
"""

import contextlib
import dis
import math
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import (
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils import checkpoint
from torch.utils.data import DataLoader

from loopdoctor import (
    after,
    anatomy,
    decoders,
    fed,
    fingerprint,
    graphs,
    histograms,
    loads,
    measures,
    owners,
    probes,
    series,
    watchers,
)
from loopdoctor.attach import Attachments, Part, quietly, quietly_calling, spoken_before, with_own
from loopdoctor.calls import Calls
from loopdoctor.evidence import (
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
from loopdoctor.eye import Eye
from loopdoctor.measures import SAMPLED
from loopdoctor.reading import readable
from loopdoctor.shadow import Shadow
from loopdoctor.waits import Waits
from loopdoctor.watchers.weights.rounded_weights import of_few_levels

BACKWARDS = 256  # without a step, for each step to be watched; then the watch ends
EARLY = 4  # steps before which it is looked whether the last one was undone
MARKS = 64  # numbers of a tensor that tell whether it moved
FEW, OPPOSED = 64, -0.3  # numbers of a gradient; the cosine of two gradients of adversaries
# steps of a named optimizer that are waited for, where others step; how many times as long
NAMED, LONGER = 3, 5
# functions of numbers that a schedule may call
NUMBERS = (min, max, abs, float, int, bool, round, pow)
KEEPING = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_SUBSCR", "IMPORT_NAME")
COARSE = (3, 8)  # steps after which it is asked which updates will be rounded away
# steps in which it is asked what a clearing between losses takes away, and of how many tensors
MIDST, MANY = 10, 1000
# what is held, what of it had a gradient (which, its version), and the ids of those with one to
# lose
Before = tuple[list[Tensor], list[tuple[Tensor, Tensor, int]], frozenset[int]]
ROWS = 32  # of text whose loss is read in any case; later in the steps that are measured


class Optimizers(Part):
    """Sees optimizers step and gradients being cleared, clipped and scaled."""

    def __init__(
        self,
        at: Attachments,
        optimizers: Sequence[torch.optim.Optimizer],
        layers: histograms.Given,
        eye: Eye,
    ):
        super().__init__(at)
        self.layers, self.eye = layers, eye
        self.seen: dict[int, int] = {}  # id(optimizer) -> index
        self.count = 0  # of outermost backwards
        self.waiting = 0  # of those since an optimizer stepped, or the weights moved
        self.moved: set[str] = set()  # of these, those that the step moved
        # before the last step: its number, a few numbers of tensors
        self.last: tuple[int, dict[str, Tensor]] = -2, {}
        # a few weights at the last backward, while no optimizer has stepped
        self.marks: list[Tensor] = []
        self.moves = 0  # how often they had changed
        self.backwards: dict[int, int] = {}  # index -> count at its last step
        self.stepped = False  # an optimizer stepped, or a scaler skipped, since the last backward
        self.closure = False  # inside an optimizer's step that was given one
        # norms of the gradients after each backward of its evaluations
        self.inside: list[float | None] = []
        self.summed = 0  # to how many of these another backward has added
        self.asked: Counter[int] = Counter()  # index -> evaluations until its last step
        # the followed tensors before a step that is measured
        self.before: list[measures.Pieces] = []
        self.counts: Counter[int] = Counter()  # index -> steps made
        self.ends: dict[
            str, tuple[Tensor, int, Tensor]
        ] = {}  # followed tensors: the address, and a view of a few numbers
        # indices of optimizers whose gradients were not cleared since their step
        self.uncleared: set[int] = set()
        self.stale: set[int] = set()  # those of them to whose old gradients a backward has added
        # candidates for it: tensors, norms before it
        self.old: dict[int, tuple[list[Tensor], list[float]]] = {}
        # index -> optimizer that stepped while gradients waited here
        self.left: dict[int, int] = {}
        self.added: dict[int, tuple] = {}  # of those, before a backward: norms of both
        self.foreign: set[int] = set()  # those to which another loss was added since
        self.shadow = Shadow()
        self.scale: float | None = None  # of the scaler that scaled a loss since the last backward
        self.scaling = False  # an enabled scaler has scaled a loss
        self.unscaled = False
        self.scheduling = False  # inside a scheduler's step
        self.roots: list[tuple[str, Tensor]] = []  # square roots of the losses since the last step
        self.noted = -1  # the last round whose gradients were noted
        self.past = 0  # calls whose arguments were let go of
        self.used: dict[str, float] = {}  # norms of the followed gradients at the step under way
        # takes the hook after a step where torch cannot, see windows.py
        self.hold: Callable | None = None
        for optimizer in optimizers:
            self.learn(optimizer)

    def start(self) -> None:
        at, clip, scaler = self.at, torch.nn.utils.clip_grad, torch.amp.GradScaler
        at.undo.append(torch_optimizer.register_optimizer_step_pre_hook(self._before_step).remove)
        register = torch_optimizer.register_optimizer_step_post_hook
        at.undo.append(
            register(self._after_step).remove if self.hold is None else self.hold(self._after_step)
        )
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
        """Whether the weights are moved without an optimizer of torch, so that this backward begins
        a step.

        Once may be a search for a direction (SAM) whose optimizer has yet to step; the third time
        is a habit.
        """
        if self.backwards or self.closure:
            return False
        marks = [
            measures.strided(p)[:: max(1, p.numel() // MARKS)].clone()
            for p in self._sampled().values()
        ]
        same = len(marks) == len(self.marks) and all(map(torch.equal, marks, self.marks))
        fresh, self.marks = not self.marks, marks
        if same or fresh:
            return False
        self.moves += 1
        return self.moves > 2

    def before_backward(self) -> None:
        if self.closure and self.inside:
            self.summed += bool(self.inside[-1]) and self.sampled_norm() == self.inside[-1]
        if not self.e.first:
            self.e.brought = self.e.brought or loads.brought()
            self.sample()
            if self.closure:
                self._remember(self._sampled(), measured=True)
        self.look_for_old()
        self.added = {index: (*self._both(index), self._numbers(index)) for index in self.left}

    def after_backward(self, norm: float | None) -> None:
        """`norm` is that of the followed gradients now."""
        if self.closure:  # of an optimizer's step: the weights are still those of the forward
            self.note_gradients()
            self.inside.append(norm)
        self.added_to_old()
        for index, (mine, others, few) in self.added.items():
            now = self._both(index)
            alone = now[1] == others  # a loss of this optimizer alone
            if now[0] != mine and (alone or _opposed(few, self._numbers(index))):
                self.foreign.add(index)
        self.scale, self.added = None, {}
        for layer in self.e.teachers:  # one that was taken for a teacher, and gets gradients
            ps = [] if any(layer.children()) else list(layer.parameters())
            if ps and all(p.requires_grad and p.grad is not None for p in ps):
                if any(
                    c.round == self.e.rounds and c.grad and c.module() is layer
                    for c in self.e.of(Call)
                ):
                    self.e.lone.setdefault(id(layer), {})[self.e.rounds] = tuple(
                        p._version for p in ps
                    )

    def next_round(self) -> None:
        self.stepped = self.unscaled = False
        self.waiting = 0
        self.roots = []

    def release(self) -> None:
        self.shadow, self.before, self.old, self.marks, self.ends = Shadow(), [], {}, [], {}
        self.last = -2, {}
        self.roots = []
        for optimizer in self.e.optimizers:
            optimizer.object = None

    def _remember(self, tensors: dict[str, Tensor], measured: bool) -> None:
        """Before a step: which tensors are where they were at the start; and, where it is measured,
        some of each.
        """
        self.before = measures.pieces(tensors) if measured else []
        self._as_before(tensors, measured)
        if not self.e.rounds:
            return
        if not measured:  # one that has moved on stands for all of its model
            ones: dict[str, str] = {}
            for n, p in tensors.items():
                if p.requires_grad and p.device.type == "cpu":
                    ones.setdefault(n.partition(".")[0] if n.startswith("model") else "", n)
            if ones and not any(
                torch.equal(self._few(n, tensors[n]), self.e.first[n][1][:MARKS])
                for n in ones.values()
            ):
                return
        views = {n: (self._few(n, p), self.e.first[n][1][:MARKS]) for n, p in tensors.items()}
        if all(view.device.type == "cpu" for view, _ in views.values()):
            same = [
                first.device == view.device and torch.equal(view, first)
                for view, first in views.values()
            ]
        else:  # one wait for all of them
            same = [(view == first).all().cpu() for view, first in views.values()]
            same = torch.stack(same).tolist() if same else []
        for name, back in zip(views, same):
            self.e.returned[name] = self.e.returned.get(name, 0) + back

    def _as_before(self, tensors: dict[str, Tensor], measured: bool) -> None:
        """Which tensors are where they were before the last step, as if it had not been made."""
        rounds, last = self.last
        early = measured or self.e.rounds < EARLY
        if early and rounds == self.e.rounds - 1:
            for name, p in tensors.items():
                if (
                    name in self.moved
                    and p.device.type == "cpu"
                    and torch.equal(last[name], _spread(p))
                    and bool(last[name].all())
                ):
                    self.e.as_before.setdefault(name, set()).add(self.e.rounds)
        few = (
            {n: _spread(p) for n, p in tensors.items() if p.device.type == "cpu" and p.numel() > 1}
            if early
            else {}
        )
        self.last, self.moved = (self.e.rounds, few), set()
        # what the step begins with
        for name in set(self.e.habits["N3 rounded"].values()) & few.keys():
            if of_few_levels(tensors[name].detach()):
                self.e.habits["N3 levels"][len(self.e.habits["N3 levels"])] = name

    def _few(self, name: str, p: Tensor) -> Tensor:
        """Return a view of the first of the numbers that are followed."""
        if type(p) not in measures.PLAIN:
            return measures.strided(p)[:MARKS]
        known = self.ends.get(name)
        if known is None or known[0] is not p or known[1] != p.data_ptr():
            known = self.ends[name] = p, p.data_ptr(), measures.strided(p)[:MARKS]
        return known[2]

    def learn(self, optimizer: torch.optim.Optimizer) -> int:
        """Its index; its parameters are read anew, because groups may be added."""
        if id(optimizer) not in self.seen:
            self.seen[id(optimizer)] = len(self.e.optimizers)
            rates = tuple(
                _rate(g | {"lr": g.get("initial_lr", g.get("lr"))}) for g in optimizer.param_groups
            )
            self.e.optimizers.append(Optimizer(type(optimizer), set(), False, optimizer, rates))
        entry = self.e.optimizers[self.seen[id(optimizer)]]
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if ids != entry.ids or not self.counts[self.seen[id(optimizer)]]:
            ps = (p for group in optimizer.param_groups for p in group["params"])
            entry.ids, entry.low = (
                ids,
                any(p.is_floating_point() and p.dtype.itemsize < 4 for p in ps),
            )
        return self.seen[id(optimizer)]

    # ---------------------------------------------------------------- steps
    @quietly_calling
    def _before_step(self, optimizer, args, kwargs) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        came = self.count > self.backwards.get(self.seen.get(id(optimizer), -1), 0)
        self.eye.before_step(closure is not None and not came)
        # the backward comes inside, or has come already (Lightning, by hand)
        if closure is not None:
            self.closure = True
            if came:
                self.learn(optimizer)
                self.note_gradients()
            self._remember(self._sampled(optimizer), measured=True)
            return
        index = self.learn(optimizer)
        norms = self.note_gradients()
        self._note_step(optimizer, index, norms)
        if self.e.optimizers[index].low:
            self.at.aside(self.shadow.before, optimizer)

    def _note_step(self, optimizer, index: int, norms: dict[int, float]) -> None:
        """`norms` are those that were measured just now, by id of the tensor."""
        ps = [p for group in optimizer.param_groups for p in group["params"]]
        live = [p for p in ps if p.grad is not None]
        measured = measures.looked(self.counts[index])
        self.counts[index] += 1
        followed = self._sampled()
        mine = self.e.optimizers[index].ids
        if not self.closure:
            self._remember({n: p for n, p in followed.items() if id(p) in mine}, measured)
        unknown = {id(p): p for p in (*live, *followed.values()) if id(p) not in norms}
        have = {
            number: g for number, p in unknown.items() if (g := measures.gradient_of(p)) is not None
        }
        norms = norms | dict(zip(have, measures.norms(list(have.values()))))
        own = [norms[id(p)] for p in live if id(p) in norms]
        sampled = [norms[id(p)] for p in followed.values() if p.grad is not None and id(p) in norms]
        self.used = {
            n: norms[id(p)] for n, p in followed.items() if p.grad is not None and id(p) in norms
        }
        asked = _evaluated(optimizer) if self.closure else 0
        event = Step(
            round=self.e.rounds,
            optimizer=index,
            rates=[_rate(group) for group in optimizer.param_groups],
            backwards=self.count - self.backwards.get(index, 0),
            norm=sum(norm**2 for norm in sampled) ** 0.5 if sampled else None,
            own=sum(norm**2 for norm in own) ** 0.5 if own else None,
            stale=index in self.stale,
            foreign=index in self.foreign,
            summed=self.closure
            and asked > self.asked[index] + 1
            and self.summed == len(self.inside) - 1,
        )
        self.inside, self.summed, self.asked[index] = [], 0, asked
        self._left_by(index)
        self.stale.discard(index)
        self.old.pop(index, None)
        self.uncleared.add(index)
        self.backwards[index] = self.count
        self.e.note(event)
        self.e.optimizers[index].live.update(map(id, live))

    @quietly_calling
    def _after_step(self, optimizer, args, kwargs) -> None:
        self.stepped = True
        if self.closure:
            self._note_step(optimizer, self.learn(optimizer), {})
            self.closure = False
        index = self.seen.get(id(optimizer), -1)
        if self.last[0] == self.e.rounds and self.last[1]:
            known, tensors = self.last[1], self._sampled(optimizer)
            self.moved |= {
                n
                for n, p in tensors.items()
                if n in known and not torch.equal(_spread(p), known[n])
            }
        if self.before:
            steps = self.e.every(Step)
            if steps and steps[-1].optimizer == index:
                rates = {id(p): _rate(g) for g in optimizer.param_groups for p in g["params"]}
                steps[-1].updates += measures.updates(
                    self.before, self._sampled(optimizer), rates, self.used
                )
            self.before = []
        if index >= 0 and self.e.optimizers[index].low:
            self.at.aside(self.shadow.after, optimizer)
            self.e.shadow, self.e.unshadowed = self.shadow.coefficients(), self.shadow.why
            if self.e.shadow and self.counts[index] in COARSE:
                self.e.coarse = self.shadow.coarse()
        if self.e.awake is None:
            self.e.awake = after.awake(self.e)
        self.eye.after_step()

    def note_gradients(self) -> dict[int, float]:
        """Once a round, before its first step: all gradients; in the first round the probes too.

        Norms by id.
        """
        if self.noted == self.e.rounds or self.at.depth:
            # inside a backward (an optimizer that steps in gradient hooks) most are not there yet
            return {}
        if self.e.rounds == 0:
            before = list(self.e.models)
            owners.settle(self.e)
            self.e.settled = True
            if before != self.e.models:
                self.sample()
        ps = self.e.trainable()
        have = {name: g for name, p in ps.items() if (g := measures.gradient_of(p)) is not None}
        norms = dict(zip(have, measures.norms(list(have.values()))))
        broken = self.roots and not all(map(math.isfinite, norms.values()))
        root = graphs.at_zero(self.roots) if broken else ""
        self.roots = []
        if self.e.note(Gradients(self.e.rounds, {name: norms.get(name) for name in ps}, root)):
            self.noted = self.e.rounds
        if self.e.rounds in histograms.LOOKS:
            histograms.gradients(self.e)
        self.layers.noted()
        if self.e.rounds == 0:
            self.at.aside(probes.run, self.e)
        if probes.spoilt(self.e):
            self.at.aside(probes.fault, self.e)
        calls = self.e.every(Call)
        for call in calls[self.past :]:
            call.args, call.kwargs, call.looked = (), {}, ()
        self.past = len(calls)
        return {id(ps[name]): norm for name, norm in norms.items()}

    def sample(self) -> None:
        """Choose, once, the tensors whose change is followed: trainable ones evenly over the depth,
        some frozen.

        A sparse one may hold more numbers after each step, so it is not.
        """
        ps = {n: p for n, p in self.e.parameters().items() if p.layout == torch.strided}
        matrices = [n for n, p in ps.items() if p.requires_grad and p.dim() >= 2]
        vectors = [n for n, p in ps.items() if p.requires_grad and p.dim() < 2]
        frozen = [n for n, p in ps.items() if not p.requires_grad and p.is_floating_point()]
        chosen = (
            measures.spread(matrices, SAMPLED - 2)
            + measures.spread(vectors, 2)
            + measures.spread(frozen, 4)
        )
        self.e.first = {n: (id(ps[n]), measures.strided(ps[n]).clone()) for n in chosen}
        self.e.frozen_at_start = {n for n in chosen if not ps[n].requires_grad}
        self.e.tracked = measures.tracked(self.e)
        self.e.tied_at_start = measures.tied(self.e)
        into, out = self.e.embedding(), self.e.head()
        if self.e.tied_at_start is False and into.shape == out.shape and into.dtype == out.dtype:
            self.e.alike_at_start = bool(torch.equal(into, out))

    def _sampled(self, optimizer=None) -> dict[str, Tensor]:
        if optimizer is None:
            return self.e.followed
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {n: p for n, p in self.e.followed.items() if id(p) in mine}

    def sampled_norm(self) -> float | None:
        found = measures.norms(measures.gradients_of(self._sampled().values()))
        return sum(norm**2 for norm in found) ** 0.5 if found else None

    def look_for_old(self) -> None:
        """Before a backward: which optimizers' gradients are still those of their last step?"""
        for index in list(self.uncleared):
            groups = self.e.optimizers[index].object.param_groups
            left = [
                p
                for g in groups
                for p in g["params"]
                if p.grad is not None and p.grad.layout == torch.strided
            ]
            left = [p for p in left if not p.grad.is_meta]
            left = left[:: max(1, len(left) // SAMPLED)]
            norms = measures.norms([p.grad for p in left])
            if any(norm != 0 for norm in norms):
                self.old[index] = left, norms
            self.uncleared.discard(index)

    def added_to_old(self) -> None:
        """After it: to which of them has it added?

        Copies of the weights that are given gradients by hand are not.
        """
        for index, (left, norms) in list(self.old.items()):
            now = [p.grad for p in left]
            if None not in now and measures.norms(now) != norms:
                self.stale.add(index)
                del self.old[index]

    def _waiting(self, index: int) -> list[float]:
        """Norms of a few of an optimizer's gradients."""
        optimizer = self.e.optimizers[index].object
        have = (
            measures.gradients_of(p for g in optimizer.param_groups for p in g["params"])
            if optimizer
            else []
        )
        return measures.norms(have[:: max(1, len(have) // SAMPLED)])

    def _numbers(self, index: int) -> list[Tensor]:
        """Return some numbers of a few of its gradients, as they are now."""
        optimizer = self.e.optimizers[index].object
        have = (
            measures.gradients_of(p for g in optimizer.param_groups for p in g["params"])
            if optimizer
            else []
        )
        return [
            measures.strided(g, FEW).float().clone() for g in have[:: max(1, len(have) // SAMPLED)]
        ]

    def _both(self, index: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        return self._touched(index), self._touched(self.left[index])

    def _touched(self, index: int) -> list[tuple[int, int]]:
        """Return what differs once a backward has come to an optimizer's gradients."""
        optimizer = self.e.optimizers[index].object
        ps = [p for g in optimizer.param_groups for p in g["params"]] if optimizer else []
        return [
            (id(g), _version(g))
            for p in ps[:: max(1, len(ps) // SAMPLED)]
            if (g := p.grad) is not None
        ]

    def _left_by(self, index: int) -> None:
        """Note on which other optimizers' weights the backward pass leaves gradients."""
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
        cleared = {i for i, o in enumerate(self.e.optimizers) if not o.ids.isdisjoint(ids)}
        self.uncleared -= cleared
        self.stale -= cleared
        self.foreign -= cleared
        for index in cleared:
            self.old.pop(index, None)
            self.left.pop(index, None)

    def _see_zero(self, original: Callable, holder, *args, **kwargs) -> Any:
        """Return what counts is the effect: accelerate's zero_grad does nothing until gradients are
        synced.
        """
        before = None if self.at.idle else self._there(holder)
        result = original(holder, *args, **kwargs)
        if before is not None:
            self._zeroed(before, isinstance(holder, nn.Module))
        return result

    @quietly
    def _there(self, holder) -> Before:
        groups = (
            [{"params": holder.parameters()}]
            if isinstance(holder, nn.Module)
            else holder.param_groups
        )
        ps = [p for group in groups for p in group["params"]]
        had = [(p, p.grad, _version(p.grad)) for p in ps if p.grad is not None]
        between = self.waiting and self.e.rounds < MIDST and len(had) < MANY
        held = (
            frozenset(id(p) for p, g, _ in had if not g.is_sparse and bool(g.any()))
            if between
            else frozenset()
        )
        return ps, had, held

    @quietly
    def _zeroed(self, before: Before, module: bool) -> None:
        ps, had, held = before
        kept = {id(p) for p, g, version in had if p.grad is g and _version(g) == version}
        if had and len(kept) == len(had):
            return  # nothing was cleared
        ids = frozenset(map(id, ps)) - kept
        if had or not module:
            self.e.note(ZeroGrad(self.e.rounds, bool(had), ids, module, held & ids))
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
        if total == math.inf and not self.e.habits["B4 clipped"]:
            self.e.habits["B4 clipped"][self.e.rounds] = measures.largest(self.e.parameters(), ids)

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
        before = len(self.e.every(Step))
        result = original(scaler, optimizer, *args, **kwargs)
        if self.at.on and not self.at.busy:
            self.stepped = True
            stepped = len(self.e.every(Step)) > before
            scale = float(scaler.get_scale())
            self.e.note(ScalerStep(self.e.rounds, scaler.is_enabled(), stepped, scale))
        return result

    def _see_schedule(self, original: Callable, scheduler, *args, **kwargs) -> Any:
        initial = (
            getattr(scheduler, "_is_initial", False) or getattr(scheduler, "last_epoch", 0) == -1
        )
        inner, self.scheduling = self.scheduling, True  # SequentialLR steps others
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            self.scheduling = inner
            if not inner and not initial:
                self._scheduled(scheduler, args[0] if args else kwargs.get("metrics"))

    @quietly
    def _scheduled(self, scheduler, metric) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        index = self.seen.get(id(optimizer), -1)
        epochal, kind = isinstance(scheduler, ReduceLROnPlateau), type(scheduler).__name__
        made = Schedule(self.e.rounds, index, epochal, id(scheduler), kind, _hundredth(scheduler))
        if kind == "CosineAnnealingLR":
            self.e.cosines_of[id(scheduler)] = weakref.ref(scheduler)
            made.past = scheduler.last_epoch > getattr(scheduler, "T_max", math.inf)
        if epochal and isinstance(metric, int | float | Tensor):
            made.mode, made.metric, made.evaluated = scheduler.mode, float(metric), self.e.evaluated
        if kind == "LambdaLR" and not self.e.of(Schedule, scheduler=id(scheduler)):
            # of all groups
            peaks = [_peak(factor) for factor in {id(f): f for f in scheduler.lr_lambdas}.values()]
            made.peak = None if None in peaks else max(peaks)
            made.warm_up = next(filter(None, map(_warm_up, scheduler.lr_lambdas)), None)
        self.e.note(made)


class Observer(Part):
    """Fills an Evidence from `start` until `stop`, or until `steps` rounds are complete; then it
    calls `full`.
    """

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
        self.named = [id(optimizer) for optimizer in optimizers]
        self.rows = 0  # of text whose loss was read
        self.after: Any = None  # what stays on when the watch is over, see after.py
        self.at.full = full
        self.waits = Waits(self.at)
        self.eye = Eye(self.at)
        self.calls = Calls(self.at, model, teachers, self.waits, self.eye)
        self.optimizers = Optimizers(self.at, optimizers, self.calls.layers, self.eye)

    def start(self) -> None:
        at = self.at
        at.on = True
        self.e.warned += spoken_before()
        self.e.loads_before = loads.count()
        self.calls.start()
        self.optimizers.start()
        self.waits.start()
        self.eye.start([watcher(self.eye) for watcher in watchers.ALL])
        at.around(torch.autograd, "backward", self._see_backward)
        at.around(checkpoint.CheckpointFunction, "apply", at.see_region)
        at.around(nn.Module, "load_state_dict", at.see_loading)
        at.before(nn.Module, "state_dict", at.see_taking)
        at.around(DataLoader, "__iter__", at.see_restart)
        at.before(saved_tensors_hooks, "__enter__", at.note_packing)
        at.around(warnings, "warn", at.see_warning)

    def stop(self) -> None:
        """Take everything off. Safe to call twice."""
        self.eye.close()
        self._settle()
        self.e.loads = loads.kept()
        self.at.off()

    @quietly
    def _settle(self) -> None:
        self.calls.settle()

    def release(self) -> None:
        """Let go of the user's objects."""
        self.calls.release()
        self.eye.release()
        self.optimizers.release()
        self.at.e = Evidence(**self.e.declared)
        # they hold the observer: without them no garbage collection is needed
        self.at.full = self.terms = dict

    def _see_backward(self, original: Callable, tensors: Any, *args, **kwargs) -> None:
        at = self.at
        if at.idle or at.depth:  # the inner backward of a reentrant checkpoint
            return original(tensors, *args, **kwargs)
        with torch.enable_grad():
            event = self._begin_backward(
                tensors, kwargs.get("grad_tensors", args[0] if args else None)
            )
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
            self._end_backward(event, tensors)

    @quietly
    def _begin_backward(self, tensors: Any, given: Any) -> Backward | None:
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
        self.eye.backward(loss, given)
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
        if not e.rounds:
            series.match(e, event, loss)
        if e.rounds < decoders.ROUNDS:
            decoders.match(e, event)
        if scalar:
            measured, broken = measures.looked(e.rounds), not math.isfinite(event.value)
            if measured or any(n.fed is not None for n in event.entropies):
                event.entropies += fed.mark(loss, event.entropies, e.rounds)
                event.square = fed.square(loss)
            if measured or broken or self.rows < ROWS:
                event.reading = fingerprint.read(e, event, loss)
                self.rows += sum(len(c.ids) for c in event.calls if c.ids is not None)
            graphs.mark(e, loss)
            if measured:
                held = self.optimizers.roots
                held += graphs.roots(e, loss)[: max(0, graphs.ROOTS - len(held))]
            if broken and not e.crooked:
                e.crooked, event.source = True, graphs.source(loss)
            event.dead_term = anatomy.constant_added(loss, event, scale)
            event.dead_values = anatomy.unconnected(event)
            for n in event.entropies if not e.packed else ():
                if (
                    n.name == "kl_div"
                    and n.reduction == "batchmean"
                    and n.connected
                    and n.value is not None
                ):
                    n.factors = anatomy.factors(loss, n.value)
        event.inputs = any(call.learns for call in event.calls)
        if not event.inputs and e.rounds < MIDST:  # parts of a model may be called by themselves
            event.inputs = graphs.asks_inputs(loss, e.optimized(), graphs.WALKED)
        return event

    @quietly
    def _end_backward(self, event: Backward | None, tensors: Any) -> None:
        self.optimizers.count += 1
        self.optimizers.waiting += 1
        if event is not None:
            event.norm = self.optimizers.sampled_norm()
            if event.norm is None and not event.round and isinstance(tensors, Tensor):
                event.copies = graphs.on_copies(self.e, tensors)
            for call in event.calls:
                now = int(call.cache().get_seq_length()) if call.cache() is not None else 0
                call.recached = now if now > call.kept else 0
        self.optimizers.after_backward(event.norm if event is not None else None)
        self.calls.forget()

    def _next_round(self) -> None:
        self.e.rounds += 1
        self.optimizers.next_round()
        self.calls.next_round()
        if self.e.rounds >= self.steps and not self._of_others():
            self.at.full()

    def _of_others(self) -> bool:
        """Whether the steps were those of optimizers that the user did not name: of copies that
        learn a task each.
        """
        made = [
            self.optimizers.counts[self.optimizers.seen.get(number, -1)] for number in self.named
        ]
        others = len(self.e.optimizers) > len(made)
        return (
            bool(made)
            and others
            and min(made) < min(NAMED, self.steps)
            and self.e.rounds < LONGER * self.steps
        )


def _evaluated(optimizer: torch.optim.Optimizer) -> int:
    """How often LBFGS has asked its closure, in all of its steps."""
    return max(
        (
            state.get("func_evals", 0)
            for state in optimizer.state.values()
            if isinstance(state, dict)
        ),
        default=0,
    )


def _version(g: Tensor) -> int:
    """How often it was written to; a tensor made under inference_mode does not count that, and
    passes as written to.
    """
    return time.perf_counter_ns() if g.is_inference() else g._version


def _opposed(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether what was added to gradients leads the other way than what was there."""
    if not before or [g.shape for g in before] != [g.shape for g in after]:
        return False
    was, now = (torch.cat([g.cpu() for g in grads]) for grads in (before, after))
    added = now - was
    length = float(was.norm() * added.norm())
    return length > 0 and float(was @ added) < OPPOSED * length


def _hundredth(scheduler) -> int | None:
    """How many of its steps make the rate a hundredth; None for a schedule that is not made of
    equal factors.
    """
    gamma = getattr(scheduler, "gamma", None)
    if not isinstance(gamma, float) or not 0 < gamma < 1:
        return None
    factors = math.ceil(math.log(0.01) / math.log(gamma) - 1e-9)
    if isinstance(scheduler, StepLR):
        return factors * scheduler.step_size
    if isinstance(scheduler, MultiStepLR):
        places = sorted(scheduler.milestones.elements())
        return places[factors - 1] if len(places) >= factors else None
    return factors if isinstance(scheduler, ExponentialLR) else None


def _warm_up(factor: Callable) -> tuple[int, int] | None:
    """Return steps of the warm-up and of the run that a schedule of transformers was told."""
    told = getattr(factor, "keywords", None) or {}
    numbers = told.get("num_warmup_steps"), told.get("num_training_steps")
    return numbers if all(isinstance(n, int) for n in numbers) else None


def _peak(factor: Callable) -> float | None:
    """Return the largest factor of a LambdaLR; None where it might notice that it is called."""
    with contextlib.suppress(Exception):
        if _of_numbers(factor):
            return max(float(factor(step)) for step in (*range(32), *(2**n for n in range(5, 20))))
    return None


def _of_numbers(factor: Callable) -> bool:
    """Whether a function, or a method of an object with such numbers, holds nothing but numbers,
    keeps none, and calls what math and Python have for them.
    """
    owner = getattr(factor, "__self__", None)
    code, own = factor.__code__, vars(owner) if owner is not None else {}
    # a name of the file's is that
    known = own | vars(math) | {f.__name__: f for f in NUMBERS} | factor.__globals__
    held = [
        *(cell.cell_contents for cell in factor.__closure__ or ()),
        *(known[name] for name in code.co_names),
    ]
    plain = all(
        isinstance(x, int | float) or x is math or x in NUMBERS or x in vars(math).values()
        for x in held
    )
    keeps = any(step.opname in KEEPING for step in dis.get_instructions(code))
    inner = any(hasattr(constant, "co_code") for constant in code.co_consts)
    return plain and not keeps and not inner and code.co_argcount == (1 if owner is None else 2)


def _rate(group: dict) -> float:
    """NaN where an optimizer has none."""
    rate = group.get("lr")
    return math.nan if rate is None else float(rate)


def _spread(p: Tensor) -> Tensor:
    """Return a copy of a few numbers of a tensor, from its beginning to its end."""
    flat = measures.strided(p)
    return flat[:: max(1, flat.numel() // MARKS)].clone()
