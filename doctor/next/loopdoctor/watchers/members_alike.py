"""Members of an ensemble that are copies of one network, and stay so.

    members = nn.ModuleList([copy.deepcopy(base) for _ in range(5)])    five times the same answer
    members = nn.ModuleList([make() for _ in range(5)])

Equal weights that see equal data have equal gradients, for ever. Modules of one class under one parent, or models that
one loss hangs on, are compared by a few of their numbers at the first backward that is seen and two steps later.

Footguns: layers that were copied from each other (nn.TransformerEncoder) and experts drift apart, for they are given
other numbers. Replicas with averaged gradients stay equal on purpose: each has a part of the batch. So the first layers
must have been given the same. Two models that are trained side by side, each with its own loss, may be a comparison.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from loopdoctor import graphs
from loopdoctor.eye import Eye, Op, Watcher, plain
from loopdoctor.fed import kind

LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "embedding", "lstm", "gru", "rnn_tanh", "bilinear"}
FEW, WEIGHTS, MEMBERS = 16, 32, 256  # numbers of a weight; weights of a member; members
STEPS, LIMIT = 2, 5000  # between the first look and the last; nodes of a graph


@dataclass
class Member:
    module: nn.Module
    weight: nn.Parameter  # the first matrix
    began: Tensor  # a few of its numbers
    given: dict[int, Tensor] = field(default_factory=dict)  # turn -> a few numbers of what its layer was given first
    learned: bool = False


class MembersAlike(Watcher):
    names = begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.groups: list[tuple[str, bool, list[Member]]] | None = None
        self.by_weight: dict[int, list[Member]] = {}
        self.began = 0  # turn in which these numbers were taken
        self.together: list[set[int]] = []  # weights that one loss hangs on

    def saw(self, op: Op) -> None:
        if self.by_weight and self.eye.grad:
            for t in op.given[1:]:
                for member in self.by_weight.get(id(t), ()):
                    if self.eye.turn not in member.given:
                        member.given[self.eye.turn] = _few(op.given[0])

    def backward(self, loss: Tensor) -> None:
        if self.groups is None:
            self.groups, self.began = self._groups(), self.eye.turn
            for m in (m for _, _, members in self.groups for m in members):
                self.by_weight.setdefault(id(m.weight), []).append(m)
        if self.by_weight and loss.grad_fn is not None:
            leaves = {id(n.variable) for n in graphs.walk(loss, LIMIT) if kind(n) == "AccumulateGrad"}
            self.together.append(leaves & self.by_weight.keys())
            for key in self.together[-1]:
                for member in self.by_weight[key]:
                    member.learned = True
            if self.eye.turn >= self.began + STEPS:
                self._look()

    def _groups(self) -> list[tuple[str, bool, list[Member]]]:
        """Modules of one class with the same numbers, and whether one parent has them."""
        found, held = [], self.e.optimized()
        constant = {id(p) for name, p in self.e.parameters().items() if _constant(self.e.first.get(name))}
        sides = [(True, name, list(m.children())) for name, m in self.e.modules()]
        for family, name, modules in [*sides, (False, "", self.e.models)]:
            by_shape: dict[tuple, list[Member]] = {}
            for m in modules if len(modules) <= MEMBERS else ():
                if (member := _member(m, held)) is not None and id(member.weight) not in constant:
                    by_shape.setdefault((type(m), *member.weight.shape), []).append(member)
            for alike in by_shape.values():
                found += [(name, family, same) for same in _same_numbers(alike)]
        return found

    def _look(self) -> None:
        """All optimizers have made their steps by now: a round ends with the next backward."""
        for _, family, members in self.groups or ():
            members = [m for m in members if m.learned]
            if not family:
                one_loss = [{id(m.weight) for m in members} <= together for together in self.together]
                members = members if any(one_loss) else []
            same = [m for m in members if _alike(m, members[0])]
            if len(same) > 1 and not _few(same[0].weight).equal(same[0].began):
                self.note("S49", (len(same), type(same[0].module).__name__))

    def close(self) -> None:
        self.groups, self.by_weight, self.together = [], {}, []


def _constant(first: tuple[int, Tensor] | None) -> bool:
    """Whether a weight began as one number, which is no draw."""
    return first is not None and not first[1].is_meta and bool((first[1] == first[1][:1]).all())


def _member(module: nn.Module, held: set[int]) -> Member | None:
    for p in module.parameters():
        if p.dim() > 1 and p.numel() >= 2 and id(p) in held and p.requires_grad and plain(p):
            return Member(module, p, _few(p))
    return None


def _same_numbers(members: list[Member]) -> list[list[Member]]:
    """Groups of them; a constant is no draw, and one object twice is one member."""
    if len(members) < 2 or len({m.weight.device for m in members}) > 1 or len({m.weight.dtype for m in members}) > 1:
        return []
    groups: dict[tuple, dict[int, Member]] = {}
    for m, numbers in zip(members, torch.stack([m.began for m in members]).tolist()):
        if len(set(numbers)) > 1:
            groups.setdefault(tuple(numbers), {}).setdefault(m.weight.data_ptr(), m)
    return [list(group.values()) for group in groups.values() if len(group) > 1]


def _alike(one: Member, other: Member) -> bool:
    """In all of their weights, and in what they were given."""
    if one is other:
        return True
    turns = one.given.keys() & other.given.keys()
    if not turns or any(not _equal(one.given[turn], other.given[turn]) for turn in turns):
        return False
    mine, its = [list(m.module.parameters())[:WEIGHTS] for m in (one, other)]
    return len(mine) == len(its) and all(p.shape == q.shape and _equal(_few(p), _few(q)) for p, q in zip(mine, its))


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.dtype == other.dtype and one.equal(other)


def _few(x: Tensor) -> Tensor:
    flat = x.detach().reshape(-1)
    return flat[:: max(1, len(flat) // FEW)][:FEW].clone()
