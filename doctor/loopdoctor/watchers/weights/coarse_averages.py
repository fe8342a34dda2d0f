"""An average of the weights that is kept in 16 bits, and stays where it is.

    shadow = copy.deepcopy(model).bfloat16()
    s.mul_(0.999).add_(p.to(s.dtype), alpha=0.001)
    or s.lerp_(p, 0.001), or s -= 0.001 * (s - p)

A number s of bf16 moves by 2^-8 of itself or not at all, and a step of the average is `rate * (p -
s)`. So at a rate of 0.001 a weight must have grown fivefold before its average takes note. Between
a backward and the next forward it is followed how a tensor of 16 bits that no optimizer holds is
drawn to a weight that one holds.

Footgun: larger rates arrive (a target network's 0.05), and so does what goes all the way, a copy in
16 bits. And so do steps that are gathered in a tensor of their own (Kahan's sum), where the way
begins at another one.
"""

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import MINUS, PLUS, TIMES, plain_number

SAME = {"to", "data", "detach", "clone", "type_as", "type", "bfloat16", "half"}
ADDS, SUBTRACTS = PLUS | {"__iadd__"}, MINUS | {"__isub__"}
LERPS = {"lerp", "_foreach_lerp"}
# rates up to which a quarter of a weight is no step
COARSE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# ("part", share of a weight), ("kept", share of an average), ("way", share, where the way begins)
Fact = tuple | None


class CoarseAverages(Watcher):
    names = SAME | TIMES | {"__imul__"} | ADDS | SUBTRACTS | LERPS
    begins = frozenset()
    between = True

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        # ids of the weights of all optimizers, as they were in this turn
        self.held, self.turn = set(), -1

    def saw(self, op: Op) -> None:
        if self.eye.forward or not op.given:
            return
        if self.turn != self.eye.turn:
            self.held, self.turn = self.e.optimized(), self.eye.turn
        x, y = op.given[0], op.given[1] if len(op.given) > 1 else None
        one, other = self._of(x), self._of(y)
        number = next((n for a in op.args[1:] if (n := plain_number(a)) is not None), None)
        if op.name in LERPS:
            rate = number if number is not None else plain_number(op.kwargs.get("weight"))
            y = y if op.name == "lerp" else next(iter(op.args[1]), None)
            return self._draws(x, rate if self._of(y) == ("part", 1.0) else None)
        if op.name in SAME:
            fact = one
        elif op.name in TIMES | {"__imul__"}:
            name, share, *begins = one or ("kept", 1.0)
            fact = (name, share * number, *begins) if number is not None and y is None else None
        else:
            alpha = plain_number(op.kwargs.get("alpha", 1.0)) or 0.0
            fact = self._together(
                one, (other[0], other[1] * alpha) if other else None, op.name in SUBTRACTS
            )
            if fact is not None and fact[0] == "way":
                fact = (*fact, _numbers(x if one is None else y))
        if fact is not None and fact[0] == "drawn":
            average = x if one is None or one[0] == "kept" else y
            if not _gathers(average, other):
                self._draws(average, fact[1])
        elif fact is not None and isinstance(op.result, Tensor):
            self.known.put(op.result, fact)

    def _together(self, one: Fact, other: Fact, minus: bool) -> Fact:
        """Of a sum or a difference."""
        kinds = {f[0]: f[1] for f in (one, other) if f is not None}
        if minus and kinds == {"part": 1.0}:
            return "way", 1.0
        if kinds.keys() == {"way"} and one is None:
            return "drawn", kinds["way"]
        whole = (
            not minus and kinds.keys() == {"kept", "part"} and abs(sum(kinds.values()) - 1) < 1e-6
        )
        return ("drawn", kinds["part"]) if whole else None

    def _draws(self, average: Tensor | None, rate: float | None) -> None:
        if average is None or rate is None or average.numel() < 2 or id(average) in self.held:
            return
        if 0 < rate <= COARSE.get(average.dtype, 0.0):
            self.note("N4 average", (rate, str(average.dtype).removeprefix("torch.")))

    def _of(self, t: Tensor | None) -> Fact:
        if t is None:
            return None
        return ("part", 1.0) if id(t) in self.held else self.known.get(t)

    def close(self) -> None:
        self.known.by_id.clear()


def _numbers(t: Tensor) -> tuple[torch.dtype, int]:
    """Of which kind its numbers are, and which ones: another view of them is the same average."""
    return t.dtype, t.untyped_storage()._cdata


def _gathers(average: Tensor, fact: Fact) -> bool:
    """Whether the way that is added to it begins at other numbers, and not at a copy of its own in
    finer ones.
    """
    begins = fact[2] if fact is not None and fact[0] == "way" else _numbers(average)
    return begins[0] == average.dtype and begins != _numbers(average)
