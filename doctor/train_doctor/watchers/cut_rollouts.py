"""A rollout through a simulator whose state is detached in each turn: an action is blamed for its own turn alone.

    for t in range(horizon):
        state = simulate(state, policy(state))
        cost = cost + price(state)
        state = state.detach()                      the cost of later turns does not reach this action

Something that a network answers to a state is put together with that state, and what comes of it is detached and given
to the network again, three times or more before one backward, while the loss asks for what was cut.

Footguns: who refines an answer in turns detaches it as well (RAFT, boxes of a decoder, forecasts of a series): there
the network answers with something of the state's own width. A critic stands for all later turns; there a network is
given the state itself before it is cut. And a simulator that is compared with its reference in each turn may be
corrected turn by turn. A hidden state that nothing asks for is another question (cut_states.py).
"""

import torch
from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES

LAYERS = {"linear", "addmm", "conv1d", "conv2d"}
MIXES = PLUS | MINUS | TIMES | OVER | {"cat", "stack", "concat", "addcmul", "lerp", "matmul"}
CUT, ANSWER, STATE = "cut", "answer", "state"
LEAST, NODES, KEPT = 3, 20000, 64  # turns; nodes of a loss; cuts that are remembered


class CutRollouts(Watcher):
    """What is known of a tensor: (CUT, turns, shape), or what was made of one: (ANSWER or STATE, turns, shape, width of
    the last layer)."""

    begins = {"detach"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.cuts: list = []  # nodes that were cut off, since the last backward
        self.turns = 0
        self.followed = False  # a network is asked about a state before it is cut
        self.references: list[Tensor] = []  # that states were compared with, each another one

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if r is None or not op.given:
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name == "detach":
            return self._cut(op.given[0], r, facts[0])
        there = [f for f in facts if f]
        if there:
            self._judged(op, facts)
        if not there or not r.dim():
            return
        if not r.requires_grad:
            self.known.put(r, there[0])
        elif op.name in LAYERS:
            self.known.put(r, (ANSWER, *there[0][1:3], r.shape[-1]))
        else:
            kinds, last = {f[0] for f in there}, max(there, key=len)
            mixed = op.name in MIXES and CUT in kinds and len(last) == 4
            for result in op.results:
                self.known.put(result, (STATE if mixed or STATE in kinds else ANSWER, *last[1:3], (*last, 0)[3]))

    def _judged(self, op: Op, facts: list) -> None:
        x, fact = op.given[0], facts[0]
        if op.name in LAYERS and fact and fact[0] == STATE:
            self.followed = self.followed or x.shape == fact[2]
        elif (op.name in PLAIN or op.name in MINUS) and len(op.given) == 2 and len(self.references) < LEAST:
            for t, own, other in zip(op.given, facts, reversed(facts)):
                data = own is None and other is not None and other[0] == STATE and not t.requires_grad
                if data and t.shape == other[2] and not any(torch.equal(t, before) for before in self.references):
                    self.references.append(t)

    def _cut(self, x: Tensor, r: Tensor, fact: tuple | None) -> None:
        if x.grad_fn is None or x.dim() != 2:
            return
        turns = 1
        if fact and fact[0] == STATE and x.shape == fact[2] and fact[3] not in (0, x.shape[-1]):
            turns = fact[1] + 1
        self.known.put(r, (CUT, turns, x.shape))
        self.turns = max(self.turns, turns)
        if len(self.cuts) < KEPT:
            self.cuts.append(x.grad_fn)

    def backward(self, loss: Tensor) -> None:
        turns, cuts, self.turns, self.cuts = self.turns, self.cuts, 0, []
        meant = self.followed or len(self.references) >= LEAST
        self.followed, self.references = False, []
        self.known.by_id.clear()
        if turns >= LEAST and not meant:
            reached = set(graphs.walk(loss, NODES))
            if len(reached) < NODES and sum(node in reached for node in cuts) >= LEAST - 1:
                self.note("S38", -turns)

    def close(self) -> None:
        self.known.by_id.clear()
        self.cuts, self.references = [], []
