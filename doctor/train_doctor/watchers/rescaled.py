"""Derivatives by a variable that was rescaled, in an equation of the one before.

    z = (2 * x / length - 1).requires_grad_()
    u_zz = derivative(derivative(model(z), z), z)
    residual = u_zz + source(x)                     an equation in x, where d/dx is 2 / length times d/dz
    residual = u_zz * (2 / length) ** 2 + source(x)

What was made of x by plain numbers alone, and is a leaf that derivatives are taken by, is known, and so are its slopes
until a number multiplies them. They are wrong where they are added to what was made of x itself.

Footgun: an equation may be written in the rescaled variable, and then its sources are too: of x times that factor, or
multiplied by it in turn.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES, TURNS, plain_number

SUMS = MINUS | PLUS
AFFINE = SUMS | TIMES | OVER | TURNS
SAME = {"clone", "detach", "float", "double", "to", "contiguous", "squeeze", "unsqueeze", "view", "reshape"}
SAME_FACTOR = 0.005  # by how much two factors of one size may differ
X, Z, SLOPE = "x", "z", "slope"


class Rescaled(Watcher):
    """What is known of a tensor: (Z, [what it was made of by plain numbers, and their product]), (X, that product) of
    what was made of such a one, or (SLOPE,)."""

    begins = AFFINE | {"grad"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name == "grad":
            self._derive(op)
            return
        facts = [f for f in map(self.known.get, op.given) if f]
        kinds, made = {f[0] for f in facts}, None
        if op.name in SUMS and kinds == {X, SLOPE}:
            self.note("F118", next(f[1] for f in facts if f[0] == X))
        elif len(op.given) == 1:
            made = self._follow(op, facts[0] if facts else None)
        elif SLOPE in kinds:
            made = (SLOPE,) if op.name in SUMS else None
        elif kinds == {X}:
            made = facts[0]
        for r in op.results if made else ():
            self.known.put(r, made)

    def _follow(self, op: Op, fact: tuple | None) -> tuple | None:
        """Of one tensor."""
        x, number = op.given[0], next((plain_number(a) for a in op.args if not isinstance(a, Tensor)), None)
        scaled = op.name in TIMES | OVER and number not in (None, 0.0, 1.0)
        if fact is None:
            column = scaled and not x.requires_grad and x.dim() == 2 and x.shape[1] == 1
            return (Z, [(x, number if op.name in TIMES else 1 / number)]) if column else None
        if fact[0] == SLOPE:
            return None if scaled else fact
        if fact[0] == X and scaled:
            times = number if op.name in TIMES else 1 / number
            mine = any(abs(times / fact[1] ** power - 1) < SAME_FACTOR for power in (1, -1, -2))
            return None if mine else fact  # in the rescaled variable already
        if fact[0] == X or op.name in SAME:
            return fact
        if op.name not in AFFINE:
            return None
        times = 1.0 if not scaled else number if op.name in TIMES else 1 / number
        return Z, [(x, times), *((before, factor * times) for before, factor in fact[1])]

    def _derive(self, op: Op) -> None:
        if len(op.args) < 2 or not isinstance(op.result, tuple):
            return
        inputs = op.args[1] if isinstance(op.args[1], list | tuple) else [op.args[1]]
        for z, slope in zip(inputs, op.result):
            fact = self.known.get(z) if isinstance(z, Tensor) else None
            if fact and fact[0] == Z and z.is_leaf and isinstance(slope, Tensor):
                self.known.put(slope, (SLOPE,))
                for x, factor in fact[1]:
                    if abs(factor - 1) > 0.05:
                        self.known.put(x, (X, factor))

    def close(self) -> None:
        self.known.by_id.clear()
