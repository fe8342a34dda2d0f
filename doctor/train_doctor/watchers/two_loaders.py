"""Inputs of one loader and targets of another one, where each of them shuffles for itself.

    for (low,), (high,) in zip(DataLoader(small, shuffle=True), DataLoader(large, shuffle=True)):
        loss = l1_loss(model(low), high)                row by row other pictures
    for low, high in DataLoader(TensorDataset(small, large), shuffle=True):

What an iterator gives is known by its loader, into the first layers on one side and to a loss as its target on the
other.

Footguns: two loaders may hold two kinds of data (two domains, labelled and not), so they must be of one length, and
what the targets' loader gives may go into no layer, nor into another function beside something that learns. Rows may
be matched before they are compared: those that were picked by an index are others. Two generators that begin at one
seed give one order, so none may be given.
"""

from typing import Any

from torch import Tensor
from torch.utils.data import RandomSampler, dataloader

from train_doctor.eye import Eye, Known, Op, Watcher, plain, tensors
from train_doctor.fed import BINARY, CLASSES, PLAIN, kind
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES

LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "embedding"}
COMPARES = {*PLAIN, *CLASSES, *BINARY}
KEPT = MINUS | OVER | PLUS | TIMES
KEPT |= {"to", "float", "long", "view", "reshape", "unsqueeze", "squeeze", "flatten", "__getitem__", "permute"}
PICKED = {"Index", "IndexSelect", "Gather"}
ROWS = 2


class TwoLoaders(Watcher):
    """What is known of a tensor: which sampler it came by, and how many rows that has."""

    names = None  # of whatever a known tensor goes into
    begins = LAYERS | COMPARES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.given: set[Any] = set()  # to layers, since the last backward: what is known, or None
        self.asked: set[Any] = set()  # of targets
        self.loaded = False
        self.after(dataloader._BaseDataLoaderIter, "__next__", "fetched")

    def fetched(self, batch: Any, iterator: Any) -> None:
        sampler = getattr(getattr(iterator, "_index_sampler", None), "sampler", None)
        alone = type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement
        for t in tensors((batch,)) if alone else ():
            if plain(t) and t.dim() and len(t) >= ROWS:
                self.known.put(t, (id(sampler), len(sampler)))
                self.loaded = True

    def saw(self, op: Op) -> None:
        if not self.loaded:
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name in LAYERS and len(op.given) > 1:
            place = int(op.name == "embedding" and op.given[0].is_floating_point())  # the ids may come second
            if not op.given[place].requires_grad:
                self.given.add(facts[place])
        elif op.name in COMPARES and len(op.given) > 1 and op.given[0].requires_grad:
            self.asked.add(facts[1] if kind(op.given[0].grad_fn) not in PICKED else None)
        elif op.name not in KEPT and any(r.requires_grad for r in op.results):
            self.given |= {fact for fact in facts if fact}
        elif op.name in KEPT and not (op.name == "__getitem__" and len(op.given) > 1):
            known = {fact: len(t) for t, fact in zip(op.given, facts) if fact}
            for r in op.results if len(known) == 1 else ():
                ((fact, rows),) = known.items()
                if not r.requires_grad and r.dim() and len(r) == rows:
                    self.known.put(r, fact)

    def backward(self, loss: Tensor) -> None:
        given, self.given, asked, self.asked = self.given, set(), self.asked, set()
        if len(given) == len(asked) == 1 and None not in given | asked and given != asked:
            ((_, inputs),), ((_, targets),) = given, asked
            if inputs == targets:
                self.note("D54", inputs)

    def close(self) -> None:
        self.known.by_id.clear()
