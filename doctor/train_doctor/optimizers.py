"""Steps of optimizers, and the gradients before them: their norms, and whether old ones were cleared or left over.

Steps are seen through torch's global hooks, so any optimizer is, also one made inside the block. Once a round, before
its first step, all gradients are measured; of eight tensors the change by the step is.

Footgun: an optimizer with a closure (LBFGS) calls backward inside its step. What belongs before the step then comes in
the middle of it.
"""

import math

import torch
from torch import Tensor

from train_doctor import measures, owners, probes
from train_doctor.evidence import Call, Gradients, Step, ZeroGrad
from train_doctor.measures import SAMPLED
from train_doctor.state import State, quietly


class Optimizers(State):
    """Sees optimizers step, and gradients being cleared."""

    @quietly
    def _before_step(self, optimizer, args, kwargs) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:  # the backward comes inside
            self.closure = True
            self.before = {name: measures.strided(p).clone() for name, p in self._sampled(optimizer).items()}
            return
        self.learn(optimizer)
        self._note_gradients()
        self._note_step(optimizer)
        self.aside(self.shadow.before, optimizer)

    def _note_step(self, optimizer) -> None:
        index = self.learn(optimizer)
        names = self._sampled(optimizer)
        if not self.closure:
            self.before = {name: measures.strided(p).clone() for name, p in names.items()}
        event = Step(
            round=self.round,
            optimizer=index,
            rates=[_rate(group) for group in optimizer.param_groups],
            backwards=self.count - self.backwards.get(index, 0),
            norm=self._sampled_norm(),
        )
        own = measures.gradients_of(p for group in optimizer.param_groups for p in group["params"])
        event.own = sum(n**2 for n in measures.norms(own)) ** 0.5 if own else None
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
            rates = {id(p): _rate(g) for g in optimizer.param_groups for p in g["params"]}
            for name, p in self._sampled(optimizer).items():
                if name in self.before:
                    steps[-1].updates.append(measures.update(name, p, self.before[name], rates[id(p)]))
        self.before = {}
        self.aside(self.shadow.after, optimizer)
        self.e.shadow, self.e.unshadowed = self.shadow.coefficients(), self.shadow.why

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
        have = {name: g for name, p in ps.items() if (g := measures.gradient_of(p)) is not None}
        norms = dict(zip(have, measures.norms(list(have.values()))))
        self.e.events.append(Gradients(self.round, {name: norms.get(name) for name in ps}))
        if self.round == 0:
            self.aside(probes.run, self.e)
        self.aside(probes.fault, self.e)
        for call in self.e.of(Call, round=self.round):
            call.args, call.kwargs = (), {}

    def _sample(self) -> None:
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

    def _sampled_norm(self) -> float | None:
        found = measures.norms(measures.gradients_of(self._sampled().values()))
        return sum(norm**2 for norm in found) ** 0.5 if found else None

    def _look_for_old(self) -> None:
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

    def _added_to_old(self) -> None:
        """After it: to which of them has it added? Copies of the weights that are given gradients by hand are not."""
        for index, (left, norms) in list(self.old.items()):
            now = [p.grad for p in left]
            if None not in now and measures.norms(now) != norms:
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


def _rate(group: dict) -> float:
    """NaN where an optimizer has none."""
    rate = group.get("lr")
    return math.nan if rate is None else float(rate)
