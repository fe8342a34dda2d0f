"""What a generator made for one set of labels, judged under another one.

    fake = generator(z, made_for)                       made_for = torch.randint(classes, (B,))
    discriminator(fake, made_for)                       asks whether it looks like what it was made for
    discriminator(fake, labels)                         asks whether it looks like something else

Labels are known by their numbers, as ids of a table or one-hot, and each tensor has those that had a part in it. Where
it meets labels on its way into another optimizer's network, these should be among them.

Footguns: translators are given pictures, which have labels of their own; so the generator must be given noise and
labels alone. A discriminator may be shown pairs that do not belong together, beside those that do; so all fakes must be
judged under other labels, and these are the labels of what is real, by more than other numbers of the same classes. A
generator's own layers may be given labels again.
"""

from typing import NamedTuple

import torch
from torch import nn

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.adversaries import LAYERS
from train_doctor.watchers.noise import NORMAL, UNIFORM

ROWS, MOST, KEPT = (8, 2**14), 256, 64  # of labels; classes; sets of labels that are kept
JOINS = {"cat", "concat", "concatenate"}
DRAWS = NORMAL | UNIFORM


class Made(NamedTuple):
    labels: frozenset = frozenset()  # numbers of those that had a part in it
    owners: frozenset = frozenset()  # optimizers whose weights had one
    noise: bool = False  # it is made of draws and labels alone
    judged: tuple = ()  # what it was put beside on the way into a network: (labels, their own) of a fake, (labels,)


class OtherLabels(Watcher):
    begins = LAYERS | DRAWS | JOINS | {"embedding", "one_hot", "__getitem__"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.labels: list[tuple] = []  # ids, number of classes
        self.fakes: list[tuple] = []  # turn, network, labels it was judged under, those it was made for
        self.reals: set[tuple] = set()  # network, labels

    def saw(self, op: Op) -> None:
        if len(self.e.optimizers) < 2 or not op.results:
            return
        fact = self._fact(op)
        if fact != Made():
            for r in op.results:
                self.known.put(r, fact)

    def _fact(self, op: Op) -> Made:
        if op.name in DRAWS:
            return Made(noise=op.results[0].dim() > 1)
        ids = {id(t) for t in op.given}
        owners = frozenset(n for n, optimizer in enumerate(self.e.optimizers) if ids & optimizer.ids)
        if (labels := self._labels(op)) is not None:
            return Made(frozenset({labels}), owners)
        facts = [self.known.get(t) for t in op.given if not isinstance(t, nn.Parameter)]
        there = [fact for fact in facts if fact]
        made = frozenset().union(*(fact.owners for fact in there))
        noise = any(f.noise for f in there) and (bool(made) or all(f and (f.noise or f.labels) for f in facts))
        judged = next((f.judged for f in there if f.judged), ())
        if op.name in JOINS and len(op.given) == 2:
            judged = self._meets(*(self.known.get(t) or Made() for t in op.given)) or judged
        elif owners and judged:
            self._judged(owners, made, judged)
            judged = ()
        return Made(frozenset().union(*(fact.labels for fact in there)), made | owners, noise, judged)

    def _labels(self, op: Op) -> int | None:
        """The number of labels that were looked up or made one-hot."""
        if op.name == "one_hot":
            y, classes = op.given[0], op.results[0].shape[-1]
        elif op.name == "embedding" and len(op.given) == 2:
            y, classes = op.given[0], len(op.given[1])
        elif op.name == "__getitem__" and len(op.given) == 2 and op.given[0].dim() == 2:
            y, classes = op.given[1], len(op.given[0])
            if op.given[0].shape != (classes, classes) or classes > MOST or not op.given[0].is_floating_point():
                return None
            if not torch.equal(op.given[0], torch.eye(classes, dtype=op.given[0].dtype, device=op.given[0].device)):
                return None
        else:
            return None
        if y.dtype != torch.long or y.dim() != 1 or not ROWS[0] <= len(y) <= ROWS[1] or classes > MOST:
            return None
        for number, (ids, of) in enumerate(self.labels):
            if of == classes and ids.device == y.device and torch.equal(ids, y):
                return number
        if len(self.labels) >= KEPT:
            return None
        self.labels.append((y.clone(), classes))
        return len(self.labels) - 1

    def _meets(self, one: Made, two: Made) -> tuple:
        """Labels beside something else: what is judged, and under which labels."""
        if two.noise or not two.labels:
            one, two = two, one
        if len(two.labels) != 1 or two.noise or one.owners & two.owners:
            return ()
        under = next(iter(two.labels))
        if one.noise and one.owners and one.labels:
            return under, one.labels
        return (under,) if not one.owners and not one.labels else ()

    def _judged(self, owners: frozenset, made: frozenset, judged: tuple) -> None:
        for owner in owners:
            if len(judged) == 1:
                self.reals.add((owner, *judged))
            elif owner not in made or len(made) > 1:
                self.fakes.append((self.eye.turn, owner, *judged))

    def _renamed(self, under: int, made_for: frozenset) -> bool:
        """Whether one set of labels is the other by other numbers."""
        (one, _), (two, _) = self.labels[under], self.labels[min(made_for)]
        if len(one) != len(two) or one.device != two.device:
            return False
        pairs = torch.stack([one, two]).unique(dim=1).shape[1]
        return pairs == len(one.unique()) == len(two.unique())

    def close(self) -> None:
        right = {owner for _, owner, under, made_for in self.fakes if under in made_for}
        for turn, owner, under, made_for in self.fakes:
            classes = {self.labels[n][1] for n in {under, *made_for}}
            if (
                owner not in right
                and (owner, under) in self.reals
                and len(classes) == 1
                and not self._renamed(under, made_for)
            ):
                self.note("D32", len(self.labels[under][0]), turn)
        self.known.by_id.clear()
        self.labels, self.fakes, self.reals = [], [], set()
