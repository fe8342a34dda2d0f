"""A teacher's answers to other places of a text than the student's.

    student = model(ids).logits[:, :-1]
    teacher = old(ids).logits[:, 1:]                    what the teacher says one word later
    F.kl_div(student.log_softmax(-1), teacher.softmax(-1), ...)

Both are slices of answers (B, T, V) to T places, and a divergence holds them against each other.

Footgun: what is predicted of a later state (in features, by a distance) is meant so. A divergence of words is not,
where both have read the same text. A head on the teacher's own features foretells the word after the next (Medusa), a
masked model that teaches a causal one was given other ids, and frames may be answered later. So the ids of one text
must have been looked up twice.
"""

import itertools

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import OVER, TIMES

FLAT = {"view", "reshape", "flatten", "contiguous", "softmax", "log_softmax", "float", "to", "detach", "log", "clamp"}
KEEPS = TIMES | OVER | FLAT
READ = 16  # texts of a step that are kept


class OtherPlaces(Watcher):
    """Known is where a slice of places begins, and how many places there were."""

    names, begins = KEEPS | {"__getitem__", "kl_div", "embedding"}, {"__getitem__", "embedding"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.read: list[Tensor] = []  # texts that were looked up in this step

    def saw(self, op: Op) -> None:
        if op.name == "embedding":
            ids = op.given[0]
            if ids.dim() == 2 and len(self.read) < READ and bool((ids != ids[:1]).any()):  # no places, no types
                self.read.append(ids)
        elif op.name == "kl_div":
            one, two = map(self.known.get, op.given[:2]) if len(op.given) > 1 else (None, None)
            shifted = one and two and one[1] == two[1] and one[0] != two[0] and op.given[0].requires_grad
            if shifted and any(torch.equal(a, b) for a, b in itertools.combinations(self.read, 2)):
                self.note("D46 places", (one[0], two[0]))
        elif op.name == "__getitem__":
            x, r = op.given[0] if op.given else None, op.result
            if isinstance(r, Tensor) and x is not None and r.dim() == x.dim() == 3 and x.is_floating_point():
                if r.shape[0] == x.shape[0] and r.shape[1] < x.shape[1] and r.shape[2] == x.shape[2] and x.stride(1):
                    before, whole = self.known.get(x) or (0, tuple(x.shape))  # a part of a part
                    self.known.put(r, (before + (r.storage_offset() - x.storage_offset()) // x.stride(1), whole))
        elif fact := next((f for t in op.given if (f := self.known.get(t))), None):
            for r in op.results:
                if r.numel() == op.given[0].numel():
                    self.known.put(r, fact)

    def backward(self, loss: Tensor) -> None:
        self.read = []

    def close(self) -> None:
        self.known.by_id.clear()
        self.read = []
