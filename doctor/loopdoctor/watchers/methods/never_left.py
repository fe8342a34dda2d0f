"""States from which nothing is ever done, whose values Q-learning builds on as on all others: ends
that nobody noted.

    memory.append((state, action, reward, next_state))
    no sign of the end of an episode
    target = reward + gamma * net(next_state).max(1).values
    and so the value after an end counts

No flag tells (ends_of_episodes.py asks what becomes of flags). The states themselves do, where
there are few of them: in a memory of episodes a state is left about as often as it is reached. One
that is reached again and again and never left ends an episode, and its value, which is never
learned, is part of the targets.

So rows are counted that a network was asked for without a graph, and those that it learns from, in
steps in which a target is a reward and a discounted value of its own.

Footguns: a target that is multiplied with flags, or written over in places, may leave the ends out.
Rows of numbers that are never the same twice tell nothing, so most of what is often reached must be
left as well. The newest states of a memory are not left yet, but they are in the next step.
"""

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import PLAIN
from loopdoctor.watchers.operators import MINUS, PLUS, TIMES, written

LAYERS = {"linear", "conv2d", "embedding"}
VALUES = {
    "gather",
    "max",
    "amax",
    "squeeze",
    "view",
    "reshape",
    "flatten",
    "minimum",
    "min",
    "detach",
    "__getitem__",
}
KEPT = VALUES | {"unsqueeze", "clamp", "float", "to", "relu", "tanh"}
DISCOUNT = 0.5  # below which a factor is none
# times that a state is reached, in how many steps; that chance has left one out
OFTEN, APART, CHANCE = 5, 2, 0.02
# of the states that are often reached, those that are left; of the rows, those of ends
LEFT, SHARE = 0.6, 0.03
STEPS, ROWS, WIDE, CALLS = 3, 1024, 512, 8


class NeverLeft(Watcher):
    """What is known of a tensor without a graph: "value", "discounted", or "target"."""

    names = (
        LAYERS | KEPT | TIMES | PLUS | MINUS | set(PLAIN) | {"__setitem__", "masked_fill", "where"}
    )
    begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        # to learn or not -> shapes -> given
        self.asked: dict[bool, dict[tuple, list[Tensor]]] = {True: {}, False: {}}
        self.built_on = False
        # shapes -> states that learn and next ones, by step
        self.seen: dict[tuple, list[tuple[Tensor, Tensor]]] = {}

    def saw(self, op: Op) -> None:
        facts = [self.known.get(t) for t in op.given]
        if op.name in LAYERS:
            self._layer(op)
        elif written(op):
            self.known.put(op.given[0], None)
            return
        fact = next((f for f in facts if f), None)
        if fact == "target" and (op.name in PLAIN or op.name in MINUS):
            self.built_on = self.built_on or any(t.requires_grad for t in op.given)
        made = self._made(op, fact, facts) if fact else None
        for r in op.results if made else ():
            if not r.requires_grad and r.is_floating_point():
                self.known.put(r, made)

    def _made(self, op: Op, fact: str, facts: list) -> str | None:
        if op.name in TIMES:
            number = next((a for a in op.args if isinstance(a, float)), 0.0)
            return (
                "discounted"
                if fact == "value" and len(op.given) == 1 and DISCOUNT < number < 1
                else None
            )
        if op.name in PLUS:
            rewards = [t for t, known in zip(op.given, facts) if not known]
            same = rewards and rewards[0].numel() == op.given[facts.index(fact)].numel()
            return (
                "target" if fact == "discounted" and same and not rewards[0].requires_grad else None
            )
        if op.name == "__getitem__" and any(isinstance(a, Tensor) for a in op.args[1:]):
            return None
        return fact if op.name in KEPT else None

    def _layer(self, op: Op) -> None:
        x, weights = (*op.given, None, None)[:2]
        if (
            weights is None
            or not x.dim()
            or x.requires_grad
            or not 1 < len(x) <= ROWS
            or x.numel() > WIDE * len(x)
        ):
            return
        learns = self.eye.grad and weights.requires_grad
        given = self.asked[learns].setdefault((tuple(x.shape), tuple(weights.shape)), [])
        if len(given) < CALLS and not any(x is t or torch.equal(x, t) for t in given):
            given.append(x.detach())
        for r in () if learns else op.results:
            self.known.put(r, "value")

    def backward(self, loss: Tensor) -> None:
        asked, self.asked, built_on, self.built_on = (
            self.asked,
            {True: {}, False: {}},
            self.built_on,
            False,
        )
        for key in asked[True].keys() & asked[False].keys() if built_on else ():
            steps = self.seen.setdefault(key, [])
            if len(steps) < STEPS:
                steps.append(tuple(_rows(asked[learns][key]) for learns in (True, False)))

    def close(self) -> None:
        for steps in self.seen.values():
            if len(steps) == STEPS and (found := _ends(steps)) is not None:
                self.note("F56 never left", found)
        self.seen, self.asked = {}, {True: {}, False: {}}
        self.known.by_id.clear()


def _rows(given: list[Tensor]) -> Tensor:
    # (rows, numbers of one)
    return torch.cat([x.flatten(1) if x.dim() > 1 else x[:, None] for x in given])


def _ends(steps: list[tuple[Tensor, Tensor]]) -> tuple[int, int, int] | None:
    """How many states are reached often and never left, in how many of all rows."""
    rows = [x for step in steps for x in step]
    of, number = torch.unique(torch.cat(rows), dim=0, return_inverse=True)
    counts = torch.stack(
        [part.bincount(minlength=len(of)) for part in number.split([len(x) for x in rows])]
    )
    left, reached = counts[::2].sum(0), counts[1::2]  # (states,), (steps, states)
    often = (reached.sum(0) >= OFTEN) & ((reached > 0).sum(0) >= APART)
    # features of zeros have the value 0 by themselves
    ends = often & (left == 0) & (of != 0).any(1)
    told = int(reached.sum(0)[ends].sum())
    # each is left about as often as it is reached
    chance = float((-reached.sum(0)[often].double()).exp().sum())
    if (
        not ends.any()
        or ends.sum() > (1 - LEFT) * often.sum()
        or told < SHARE * reached.sum()
        or chance > CHANCE
    ):
        return None
    return int(ends.sum()), told, int(reached.sum())
