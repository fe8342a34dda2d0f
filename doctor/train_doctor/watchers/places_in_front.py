"""A prompt of learned vectors stands in front of the text, and the loss takes the first logits for those of the text.

    logits = model(input_ids=ids).logits                        (B, 8 + T, V) with 8 virtual tokens in front
    F.cross_entropy(logits[:, :T][:, :-1]..., ids[:, 1:]...)    logits[:, 8:] was meant

The text's embeddings are known from their ids, and what is put in front of them from torch.cat. Of logits that are as
long as both, it is known at which place a part of them begins.

Footgun: logits may also be longer at the end (padding to a multiple, registers), a vector in front may stand for the
first token, and learned places in front may be asked for tokens themselves. So the targets must be the ids from the
second one to the last, each at its place in the text as if nothing stood in front of it, and more or fewer than what
does. Where other features of that length are cut as well, or the logits are rolled, the vectors may have been moved
away or dropped.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import PLUS, TIMES

JOINS = {"cat", "concat", "concatenate"}
CASTS = {"to", "float", "double", "half", "bfloat16", "type", "contiguous", "clone", "dropout"}
FOLLOWED = CASTS | PLUS | TIMES | {"view", "reshape", "flatten", "transpose", "permute", "log_softmax"}
LOSSES = {"cross_entropy", "nll_loss", "gather"}
TOKENS, DISTINCT, PREFIX = 16, 4, 2  # targets; different ones; the shortest prompt
ALIKE = 0.5  # share of targets that are right by chance


class Part(NamedTuple):
    """Some places of logits."""

    size: tuple[int, int]  # rows and places of all of them
    start: int
    places: int


class PlacesInFront(Watcher):
    """Known are the ids of embeddings, and parts of logits."""

    names = JOINS | FOLLOWED | LOSSES | {"embedding", "__getitem__", "narrow", "roll"}
    begins = {"embedding", "__getitem__", "narrow", "roll"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.fronts: dict[tuple[int, int], tuple[int, Tensor]] = {}  # rows and places -> how many in front, ids behind
        self.found: tuple[int, int] | None = None
        self.joined = self.cut = 0  # how often something was put in front, and such a length was cut or rolled

    def saw(self, op: Op) -> None:
        if not self.eye.grad or not op.given:
            return
        x = op.given[0]
        if op.name == "embedding":
            if x.dim() == 2 and not x.is_floating_point() and op.results:
                self.known.put(op.results[0], x)
        elif op.name in JOINS:
            self._join(op)
        elif op.name == "roll":
            self.cut += x.dim() == 3 and tuple(x.shape[:2]) in self.fronts
        elif op.name in self.begins:
            if op.results and x.dim() == 3 and (part := self._part(x, op.results[0])) is not None:
                self.known.put(op.results[0], part)
        elif op.name in LOSSES:
            part = self.known.get(x)
            if isinstance(part, Part) and len(op.given) > 1 and self.found is None:
                self.found = self._misplaced(part, op.given[1])
        elif (fact := self.known.get(x)) is not None and op.results and op.results[0].numel() == x.numel():
            self.known.put(op.results[0], fact)

    def _join(self, op: Op) -> None:
        """Vectors in front of a text's embeddings."""
        *front, text = op.given
        ids, whole = self.known.get(text), op.results[0] if op.results else text
        if isinstance(ids, Tensor) and front and whole.dim() == text.dim() == 3 and len(whole) == len(text):
            before = whole.shape[1] - text.shape[1]
            if before >= PREFIX and ids.shape == text.shape[:2]:
                self.fronts[tuple(whole.shape[:2])] = before, ids
                self.joined += 1

    def _part(self, x: Tensor, r: Tensor) -> Part | None:
        known = self.known.get(x)
        part = known if isinstance(known, Part) else Part(tuple(x.shape[:2]), 0, x.shape[1])
        if part.size not in self.fronts or r.dim() != 3 or r.stride() != x.stride() or not x.stride(1):
            return None
        if len(r) != len(x) or r.shape[2] != x.shape[2] or part.places != x.shape[1]:
            return None
        start, rest = divmod(r.storage_offset() - x.storage_offset(), x.stride(1))
        if rest or start < 0:
            return None
        if part is not known and r.shape[1] < x.shape[1]:
            self.cut += 1
            self.known.put(x, part)
        return part._replace(start=part.start + start, places=r.shape[1])

    def _misplaced(self, part: Part, target: Tensor) -> tuple[int, int] | None:
        """How many places stand in front, and of how many a text has, where they were overlooked."""
        before, ids = self.fronts.get(part.size, (0, target))
        rows, texts = part.size[0], ids.shape[-1]
        first = part.start + 1
        if not before or first + part.places != texts or target.numel() != rows * part.places or part.places == before:
            return None
        target = target.reshape(rows, part.places)
        asked = target >= 0
        if int(asked.sum()) < TOKENS or len(target[asked].unique()) < DISTINCT:
            return None
        if not torch.equal(target[asked], ids[:, first:][asked]):
            return None
        skipped = max(0, before - first)  # places of the prompt that have no text behind them
        right = target[:, skipped:] == ids[:, first - before + skipped :][:, : part.places - skipped]
        behind = asked[:, skipped:]
        return (before, texts) if int((right & behind).sum()) <= ALIKE * int(behind.sum()) else None

    def backward(self, loss: Tensor) -> None:
        if self.found is not None and self.cut <= self.joined:
            self.note("F131", self.found)
        self.fronts, self.found, self.joined, self.cut = {}, None, 0, 0

    def close(self) -> None:
        self.known.by_id.clear()
        self.fronts = {}
