"""Q-learning whose target, or what meets it, is the value of another action or state than the one that was meant.

    q = net(states).gather(1, actions[:, None]).squeeze(1)
    target = reward + gamma * target_net(next_states).max(1).values

    q = net(states).max(1).values                   that of another action than the one that earned the reward
    target_net(next_states).max()                   the largest of the whole batch, for each of its rows
    target_net(states).max(1).values                where the action was taken, and not where it led to

Maxima without a graph are followed through arithmetic into a target, and it is asked what meets them there.

Footguns: a maximum that learns is right elsewhere (pooling, several instances), so only one over as many values as the
target's own maximum is meant. Targets are also scaled by their largest number, and what a teacher is sure of is one; a
bootstrap is added to something that has a number for each row. The largest of all may be one of a table of costs, and
no answer of a layer. A network may be asked for the value of the same state for other ends, so all that it was asked
without a graph must be of the states that learn, what learns must be the value of an action that was picked, and the
maximum be one of the network's answer itself; and where it was given the very same tensor, another one of its shape
must be at hand, or there is no next state. With double Q-learning it is a value that was picked there, which is
scaled by a discount. Where each episode has one step, the next state is any, and what follows it counts nothing; where
there is but one state it is the next one as well; and of a few rows all may have bumped into a wall. A largest number
that is taken off first, and added again after an exponential, changes nothing.
"""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN, VIEWS, kind, shape_of
from train_doctor.watchers.operators import PLUS, TIMES

KEPT = {
    *("mul", "multiply", "add", "sub", "subtract", "rsub", "__rsub__", "where", "masked_fill", "squeeze", "unsqueeze"),
    *("view", "reshape", "detach", "flatten", "__getitem__", "clamp", "float", "to", "neg", "div", "minimum"),
}
PICKS = {"gather", "__getitem__"}
LAYERS = {"linear", "conv2d"}
FRAMES, FEW = 60, 200  # of the stack; names in one place
LEAST, MANY = 2, 8  # sizes of what a maximum is taken of; calls of one shape in a step
ROWS = 16  # of states that all lead to themselves


class Ahead(NamedTuple):
    """A value without a graph that may look ahead."""

    shape: tuple[int, ...]  # of what it was chosen from
    whole: bool  # it is the maximum of all of it
    weight: Tensor | None  # of the layer that gave that
    added: bool = False  # something with a number for each row was
    scaled: bool = True  # by a discount; asked only of what was picked
    picked: bool = False  # and is no maximum
    some: bool = False  # most rows hold more than 0 when that is added


def named_target() -> str:
    """The name of a module that a line of the program, or an object at hand there, calls a target."""
    frame = sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None:
            return ""
        for thing in (frame.f_locals, *map(_attributes, frame.f_locals.values())):
            for name, held in list(thing.items()):
                if isinstance(held, nn.Module) and isinstance(name, str) and ("targ" in name or "tgt" in name):
                    return name
        frame = frame.f_back
    return ""


def _attributes(thing: Any) -> dict:
    if isinstance(thing, dict):
        return thing if len(thing) < FEW else {}
    held = getattr(thing, "__dict__", None) if type(thing).__module__ not in ("torch", "builtins") else None
    return {**held, **(held.get("_modules") or {})} if isinstance(held, dict) and len(held) < FEW else {}


def _another(than: Tensor) -> bool:
    """Whether another tensor of numbers with its shape is at hand where it is used."""
    frame = sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None:
            return False
        for thing in (frame.f_locals, *map(_attributes, frame.f_locals.values())):
            held = list(thing.values())
            held += [t for some in held if isinstance(some, tuple | list) and len(some) < FEW for t in some]
            alike = (t for t in held if isinstance(t, Tensor) and t.shape == than.shape and t.dtype == than.dtype)
            if any(t is not than and not t.requires_grad for t in alike):
                return True
        frame = frame.f_back
    return False


def _each_row(index: Any, rows: int) -> bool:
    """Whether it is an index of (each row, an action)."""
    first = index[0] if isinstance(index, tuple) and len(index) == LEAST else None
    if isinstance(first, range | list):
        first = torch.tensor(first)
    return isinstance(first, Tensor) and first.shape == (rows,) and torch.equal(first.cpu(), torch.arange(rows))


def _alike(x: Tensor, s: Tensor) -> bool:
    """The same states, of which there are several."""
    return len(x) >= ROWS and (x is s or torch.equal(x, s)) and bool((x != x[:1]).any())


class Bootstraps(Watcher):
    """What is known of a tensor without a graph: whether it is a maximum, or was picked from a network's answer."""

    names = {"max", "amax", *PLAIN} | PICKS | KEPT | LAYERS
    begins = {"max", "amax"} | LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.stable = False  # a maximum of all was taken off all, in this step
        self.answers = Known(self)  # of a layer without a graph -> its weight
        self.asked: dict[bool, dict[tuple, list[Tensor]]] = {True: {}, False: {}}  # to learn or not -> shapes -> given

    def saw(self, op: Op) -> None:
        if op.name in LAYERS:
            self._layer(op)
            return
        if op.name in ("max", "amax"):
            if op.results and op.given and op.given[0].dim() == LEAST and not op.results[0].requires_grad:
                if op.given[0].is_floating_point() and len(op.given) == 1:
                    whole = not op.results[0].dim() and len(op.given[0]) > 1
                    weight = self.answers.get(op.given[0])
                    self.known.put(op.results[0], Ahead(tuple(op.given[0].shape), whole, weight))
            return
        if op.name in PICKS and op.results and (weight := self.answers.get(op.given[0])) is not None:
            self._picked(op, weight)
            return
        if not self.known.by_id or not op.given:
            return
        if op.name in ("sub", "subtract") and len(op.given) == 2 and (fact := self.known.get(op.given[1])):
            self.stable = self.stable or fact.whole and tuple(op.given[0].shape) == fact.shape
        if op.name in PLAIN or op.name in ("sub", "subtract"):
            self._compare(op.given[:2])
        known = next((t for t in op.given if self.known.get(t)), None) if op.name in KEPT else None
        for r in op.results if known is not None else ():
            if not r.requires_grad:
                self.known.put(r, self._further(op, known))

    def _further(self, op: Op, known: Tensor) -> Ahead:
        fact = self.known.get(known)
        if op.name in TIMES:
            return fact._replace(scaled=True)
        others = [t for t in op.given if not self.known.get(t)]
        if fact.added or op.name not in PLUS or all(t.numel() != fact.shape[0] for t in others):
            return fact
        return fact._replace(added=True, some=bool((known != 0).float().mean() > 0.5))

    def _picked(self, op: Op, weight: Tensor) -> None:
        """One number of each row of an answer; rows are not to be moved."""
        answer = op.given[0]
        of_each = op.name == "gather" or op.name == "__getitem__" and _each_row(op.args[1], len(answer))
        if of_each and answer.dim() == LEAST and answer.shape[1] > 1:
            self.known.put(op.results[0], Ahead(tuple(answer.shape), False, weight, scaled=False, picked=True))

    def _layer(self, op: Op) -> None:
        x, weights = (*op.given, None, None)[:2]
        if weights is None or x.requires_grad or not x.is_floating_point() or x.dim() < 2 or len(x) < 2:
            return
        learns = self.eye.grad and weights.requires_grad
        if not learns and isinstance(op.result, Tensor):
            self.answers.put(op.result, weights)
        given = self.asked[learns].setdefault((tuple(x.shape), tuple(weights.shape)), [])
        if len(given) < MANY:
            given.append(x)

    def _compare(self, sides: list[Tensor]) -> None:
        for one, two in (sides, sides[::-1]) if len(sides) == 2 else ():
            fact, node = self.known.get(two), one.grad_fn
            if not fact or node is None:
                continue
            shape, whole, weight, added = fact[:4]
            if added and weight is not None and not fact.picked:
                self.note("F28", id(weight))
                if id(weight) in self.e.optimized() and not whole and (name := named_target()):
                    self.note("F116", name)
            picked = False
            while kind(node) in VIEWS:
                picked = picked or kind(node) == "Index"
                node = node.next_functions[0][0]
            picked = picked or kind(node) == "Gather"
            if fact.picked and not fact.scaled:
                continue
            if kind(node) in ("Max", "Amax") and not fact.picked and shape_of(node.next_functions[0][0]) == shape:
                if added:
                    self.note("F39", ("", shape))
            elif whole and added and weight is not None and one.numel() == shape[0] and not self.stable:
                self.note("F39", ("of-all", shape))
            elif fact.some and picked and weight is not None and not whole and self._same_states():
                self.note("F39", ("own-state", shape))

    def _same_states(self) -> bool:
        """All that a network was asked without a graph is what it was asked with one."""
        states, later = self.asked[True], self.asked[False]
        both = states.keys() & later.keys()
        few = all(len(later[key]) < MANY for key in both)  # an evaluation would not be kept whole
        same = (any(_alike(x, s) for s in states[key]) for key in both for x in later[key])
        if not both or not few or not all(same):
            return False
        own = [x for key in both for x in later[key] if any(x is s for s in states[key])]
        return not own or _another(own[0])

    def backward(self, loss: Tensor) -> None:
        self.asked, self.stable = {True: {}, False: {}}, False

    def close(self) -> None:
        self.known.by_id.clear()
        self.answers.by_id.clear()
        self.asked = {True: {}, False: {}}
