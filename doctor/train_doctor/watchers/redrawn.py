"""Random numbers that are the same in each step: a generator that is seeded anew where they are drawn.

    def corrupt(x):
        g = torch.Generator().manual_seed(42)           reproducible, and the same noise for every batch
        return x + torch.randn(x.shape, generator=g)

Draws are told apart by a few of their numbers, and so is what they are added to or multiplied with. In three steps with
the same draw and other data, nothing was random.

Footgun: what is drawn while gradients are off is an evaluation, which should be the same each time. Masks may be drawn
once and kept for some steps. And fixed random features may be made again in each step, but they meet no data of their
size.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, PLUS, TIMES

DRAWS = {"randn", "randn_like", "rand", "rand_like", "normal", "uniform", "bernoulli"}
KEEPS = {
    "lt",
    "gt",
    "le",
    "ge",
    "__lt__",
    "__gt__",
    "float",
    "to",
    "rsub",
    "__invert__",
    "view",
    "reshape",
    "unsqueeze",
}
MEETS = TIMES | PLUS | MINUS | {"where", "masked_fill"}
LEAST, SOME, LONGEST = 8, 64, 1000  # numbers, and draws that are kept


class Redrawn(Watcher):
    begins = DRAWS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # a name and a few numbers of what was drawn
        self.seen: dict[tuple, dict[tuple, int]] = {}  # what was drawn -> what it met, and when it was drawn

    def saw(self, op: Op) -> None:
        r = op.result if isinstance(op.result, Tensor) else None
        if r is None or not self.eye.grad:
            return
        if op.name in DRAWS:
            if not r.requires_grad and r.numel() >= LEAST:
                some = few(r)
                if len(set(some)) > 2:
                    self.known.put(r, (op.name, tuple(r.shape), some, self.eye.turn))
            return
        facts = [self.known.get(t) for t in op.given]
        fact = next((f for f in facts if f), None)
        if fact is None:
            return
        shape = next(t.shape for t, f in zip(op.given, facts) if f)
        others = [t for t, f in zip(op.given, facts) if f is None and _data(t) and t.shape == shape]
        if op.name in MEETS and others and len(self.seen) < LONGEST:
            *draw, turn = fact
            self.seen.setdefault(tuple(draw), {}).setdefault(few(others[0]), turn)
        elif op.name in KEEPS or op.name in MEETS:
            self.known.put(r, fact)

    def close(self) -> None:
        for (name, shape, _), met in self.seen.items():
            if len(set(met.values())) > 2:
                for turn in met.values():
                    self.note("D20", (name, shape), turn)
        self.seen.clear()
        self.known.by_id.clear()


def _data(t: Tensor) -> bool:
    return not t.requires_grad and t.dtype is not torch.bool and not t.is_complex()


def few(t: Tensor) -> tuple:
    return tuple(t.detach().flatten()[:: max(1, t.numel() // SOME)][:SOME].tolist())
