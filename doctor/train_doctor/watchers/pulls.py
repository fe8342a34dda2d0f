"""Pairs of inputs that the loss draws together, and pairs that it pushes apart: which are more alike to begin with?

    d = pairwise_distance(net(a), net(b))
    loss = (1 - same) * d**2 + same * relu(margin - d)**2          drawn together where they are not the same

What a gradient does to a pair is known: g(b) . (a - b) is below 0 where a step of b along -g comes nearer to a. So is
how far apart the two inputs are. Pairs of one kind lie nearer to each other than pairs of two, also before anything is
learned; where those that are drawn together lie clearly further apart, labels or sides are turned round.

Pairs of one kind lie nearer than they would at random, and pairs of two kinds do not. Negatives that were picked for
being near do, so where both lie nearer nothing is said.

Footgun: a loss that pushes what is near and draws what is far (a regression of similarities) does so by the distances
themselves. So pairs of one call are told apart only by a label of two values that decides the sign in every row.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, TIMES

FIRST = {"linear", "conv1d", "conv2d", "conv3d"}
MEET = {"pairwise_distance", "cosine_similarity", "cosine_embedding_loss"} | MINUS | TIMES
THREE = {"triplet_margin_loss", "triplet_margin_with_distance_loss"}
LEAST, LOOKED = 8, 2**21  # rows, numbers of a batch


@dataclass(eq=False)
class Pair:
    """Two batches of embeddings of one network, row by row."""

    one: Tensor
    two: Tensor
    seen: list[tuple[Tensor, Tensor]]  # (B, D) what is compared of the inputs, in one way or two
    labels: list[Tensor] = field(default_factory=list)  # of two values, that met what was made of the pair


class Pulls(Watcher):
    begins = FIRST

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # what an embedding was made of, with which weights; or the pairs a tensor is made of
        self.pairs: list[Pair] = []

    def saw(self, op: Op) -> None:
        r = op.results[0] if len(op.results) == 1 and op.given else None
        if r is not None and r.requires_grad and r.is_floating_point() and (fact := self._of(op)):
            self.known.put(r, fact)

    def _of(self, op: Op) -> Any:
        facts = [self.known.get(t) for t in op.given]
        if not any(facts):
            x = op.given[0]
            fits = op.name in FIRST and len(op.given) > 1 and not x.requires_grad and x.dim() > 1 and len(x) >= LEAST
            return (x, id(op.given[1])) if fits and x.numel() <= LOOKED else None
        made = [(t, f) for t, f in zip(op.given, facts) if isinstance(f, tuple)]
        pairs = [p for f in facts if isinstance(f, list) for p in f]
        if not pairs and len({id(f[0]) for _, f in made}) == 1:
            x, weights = made[0][1]
            return (x, weights) if op.results[0].dim() and len(op.results[0]) == len(x) else None
        if op.name in THREE and len(made) == 3:
            pairs = [self._pair(made[0], other) for other in made[1:]]
        elif op.name in MEET and len(made) == 2:
            pairs = [self._pair(*made)]
        pairs = [p for p in pairs if p is not None]
        for p in pairs:
            p.labels += [t for t in op.given if not t.requires_grad and t.numel() == len(p.seen[0][0])]
        return pairs or None

    def _pair(self, one: tuple, two: tuple) -> Pair | None:
        (a, (x, weights)), (b, (y, same)) = one, two
        fits = a.dim() == 2 and a.shape == b.shape and a.shape[1] > 1 and x.shape == y.shape and weights == same
        if not fits or a.grad_fn is None or b.grad_fn is None or len(self.pairs) > 8:
            return None
        self.pairs.append(pair := Pair(a, b, [*zip(_seen(x), _seen(y))]))
        return pair

    def backward(self, loss: Tensor) -> None:
        pairs, self.pairs = self.pairs, []
        met = Counter(id(t) for p in pairs for t in (p.one, p.two))  # an anchor is drawn to one and pushed by another
        for pair in pairs:
            moved, still = (pair.two, pair.one) if met[id(pair.two)] == 1 else (pair.one, pair.two)
            if not self.eye.rising:  # such a loss would be read the other way round
                self._listen(pair, moved, still.detach())
            pair.one = pair.two = None
        self.known.by_id.clear()

    def _listen(self, pair: Pair, moved: Tensor, still: Tensor) -> None:
        way = still - moved.detach()
        turn, told = self.eye.turn, self.e.habits["F74"]

        def drawn(g: Tensor) -> None:
            if groups := _groups(pair, (g * way).sum(1)):
                told.setdefault(turn, []).extend(groups)

        self.hear(moved, drawn)

    def close(self) -> None:
        self.known.by_id.clear()
        self.pairs = []


def _seen(x: Tensor) -> list[Tensor]:
    """The inputs; of pictures and series also what does not depend on where something stands in them: how strong each
    frequency is."""
    x = x.detach().float()
    if x.dim() < 3:
        return [x]
    return [torch.fft.rfftn(x, dim=tuple(range(2, x.dim()))).abs().log1p().flatten(1), x.flatten(1)]


def _groups(pair: Pair, nearer: Tensor) -> list[tuple]:
    """Whether a group of rows is drawn together, how many they are, and the mean and variance of how far they lie
    apart, in each way. Rows without a gradient are of the group of their label."""
    drawn, pushed = nearer < 0, nearer > 0
    if not bool(torch.isfinite(nearer).all()) or not bool(drawn.any() | pushed.any()):
        return []
    if not bool(drawn.any() & pushed.any()):
        return _group(bool(drawn.any()), pair, torch.ones_like(drawn))
    for label in pair.labels:
        high = label.detach().flatten()
        low, most = high.aminmax()
        high = high == most
        if low == most or not bool((high | (label.detach().flatten() == low)).all()):
            continue
        for one in (high, ~high):
            if bool((one[drawn]).all()) and not bool(one[pushed].any()):
                return _group(True, pair, one) + _group(False, pair, ~one)
    return []


def _group(drawn: bool, pair: Pair, rows: Tensor) -> list[tuple[bool, int, float, float, float, int]]:
    """The last numbers: how far apart they would be if paired at random, and the way in which they are compared."""
    groups = []
    for way, seen in enumerate(pair.seen):
        one, two = (s[rows] for s in seen)
        apart, random = ((one - other).pow(2).mean(1) for other in (two, two.roll(1, 0)))
        variance = float(apart.var()) if len(apart) > 1 else 0.0
        groups.append((drawn, len(one), float(apart.mean()), variance, float(random.mean()), way))
    return groups
