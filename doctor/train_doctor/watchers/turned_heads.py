"""Rotary positions that run over the heads: every place of a head is turned by one and the same angle.

    q * cos + rotate_half(q) * sin          cos, sin: (T, 1, D) for q of (B, T, H, D), and (T, D) for (B, H, T, D)
    torch.view_as_complex(q) * freqs        the same in complex numbers

Queries and keys are turned by angles that grow with their place, and their product hangs on the distance of two places
(RoFormer, Su 2021). Given the other layout, the table of angles is cut and laid over the heads. Each shape fits, and
the angles cancel in every product of one head: attention is told nothing of places.

A table is known where it is used: by two products with one x, of which the tables' squares add up to one number, or by
a product with complex numbers of size 1. The axes along which it differs are followed to the attention.

Where one side alone is turned by its place, no product hangs on a distance either.

Footgun: one step of decoding has one place, so no axis differs but that of the features; tables of a grid differ along
several. So only a table that differs along the heads, and not along the places, is meant.
"""

import math
from typing import NamedTuple

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, PLUS, TIMES

ATTENDS = {"scaled_dot_product_attention", "flex_attention"}
PRODUCTS = {"matmul", "bmm", "__matmul__", "einsum"}
LAID = {
    *("transpose", "permute", "swapaxes", "movedim", "moveaxis", "mT", "unsqueeze", "expand", "__getitem__"),
    *("swapdims", "split", "chunk", "unbind", "narrow", "select", "squeeze", "view", "reshape", "flatten", "unflatten"),
}
KEEPS = {
    *("view_as_real", "view_as_complex", "float", "to", "type", "type_as", "half", "bfloat16", "contiguous", "clone"),
    *("cat", "concat", "concatenate", "stack", "dropout", "repeat_interleave", "repeat", "rms_norm", "layer_norm"),
    *("div", "normalize", "__truediv__", "true_divide", "divide", "real", "imag", "expand_as", "__setitem__"),
}
LOOKED, PAIRS = 2**22, 8  # numbers of a table; tables of which the numbers are looked at between two backwards


class Part(NamedTuple):
    """A product with what may be a table of angles."""

    table: Tensor


class Turned(NamedTuple):
    """The axes along which the angles differ."""

    axes: frozenset[int]


class TurnedHeads(Watcher):
    names = TIMES | PLUS | MINUS | ATTENDS | PRODUCTS | LAID | KEEPS
    begins = TIMES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.pairs = 0
        self.turns = 0  # since the last attention

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name in ATTENDS:
            self._attends(op, *(op.given[:2] if len(op.given) > 1 else (None, None)))
        elif op.name in PRODUCTS:
            if all(isinstance(f, Turned) for f in facts[:2]) and len(facts) > 1:
                self._einsum(op) if op.name == "einsum" else self._attends(op, *op.given[:2])
            elif any(isinstance(f, Turned) for f in facts):
                if op.name == "einsum" and self.turns == 1 and self.pairs <= PAIRS:
                    self._einsum_one(op, facts)
                self._follow(op, facts)
        elif any(facts):
            self._follow(op, facts)
        elif op.name in TIMES:
            self._times(op)

    def _times(self, op: Op) -> None:
        """A product with a smaller table, which learns nothing and has a number for each feature."""
        if len(op.given) != 2 or not isinstance(op.result, Tensor) or op.result.dim() < 4:
            return
        x, table = op.given if op.given[0].shape == op.result.shape else op.given[::-1]
        if table.requires_grad or x.shape != op.result.shape or not 1 < table.dim() <= x.dim():
            return
        spread = table.numel() < x.numel() or 0 in table.stride()
        if not spread or table.shape[-1] != x.shape[-1] or not 1 < table.shape[-1] < table.numel() <= LOOKED:
            return
        if table.is_complex():
            if self._room() and _alike(table.abs()):
                self._turn(op.result, table)
        elif table.is_floating_point():
            self.known.put(op.result, Part(table))

    def _follow(self, op: Op, facts: list) -> None:
        parts = [f for f in facts if isinstance(f, Part)]
        if parts and op.name in PLUS | MINUS:
            one, *other = parts
            if other and one.table.shape == other[0].table.shape and self._room():
                if _alike(one.table.float().square() + other[0].table.float().square()):
                    self._turn(op.result, one.table)
            return
        if op.name == "__setitem__":
            self._written(op.given[0], op.given[-1], facts[-1])
        for r in op.results:
            turned = [(x, f) for x, f in zip(op.given, facts) if isinstance(f, Turned)]
            axes = {_where(axis, x, r, op.name in LAID) for x, f in turned for axis in f.axes}
            if axes and None not in axes:
                self.known.put(r, Turned(frozenset(axes)))
            elif parts and r.shape == op.given[facts.index(parts[0])].shape and op.name not in LAID:
                self.known.put(r, parts[0])

    def _written(self, target: Tensor, value: Tensor, fact: object) -> None:
        """out[..., ::2] = what was turned"""
        if isinstance(fact, Turned) and target.dim() == value.dim():
            if all(target.shape[axis] == value.shape[axis] for axis in fact.axes):
                self.known.put(target, fact)

    def _room(self) -> bool:
        self.pairs += 1
        return self.pairs <= PAIRS

    def _turn(self, result: Tensor, table: Tensor) -> None:
        """Known from here on, where the table has several frequencies and several angles."""
        more = result.dim() - table.dim()
        axes = [a for a in range(table.dim()) if table.shape[a] > 1 and not _constant(table, a)]
        self.turns += 1
        if axes and axes[-1] == table.dim() - 1 and len(axes) > 1:
            self.known.put(result, Turned(frozenset(a + more for a in axes[:-1])))

    def _attends(self, op: Op, q: Tensor | None, k: Tensor | None) -> None:
        """Places are the last axis but one of what asks; of a key that was laid across for a product, the last."""
        facts = [self.known.get(t) for t in (q, k) if t is not None]
        if len(facts) > 1 and q.dim() >= 3 and q.shape[-1] > 1:
            if self.turns == 1:
                self._one_side(op, q, k, facts)
            self.turns = 0
        if len(facts) < 2 or not all(isinstance(f, Turned) for f in facts) or q.dim() < 3:
            return
        heads = [t.dim() - 3 for t in (q, k)]
        along = all(f.axes == {axis} for f, axis in zip(facts, heads))
        places = k.shape[-1] if op.name in PRODUCTS else k.shape[-2]
        if along and min(q.shape[-3], q.shape[-2], places) > 1:
            self.note("F120", (q.shape[-3], q.shape[-2]))

    def _one_side(self, op: Op, q: Tensor, k: Tensor, facts: list) -> None:
        """One side is turned along its places, and the other one is no product with any table."""
        axes = [t.dim() - 2 for t in (q, k)]
        if op.name in PRODUCTS:
            axes[1] = k.dim() - 1
        for side, (one, other) in enumerate((facts, facts[::-1])):
            turned = isinstance(one, Turned) and one.axes == {axes[side]}
            if (
                turned
                and other is None
                and q.shape[axes[0]] == k.shape[axes[1]] > 1
                and not _repeated((q, k)[1 - side], (q, k)[side])
            ):
                self.note("F120 one", ("queries", "keys")[side])

    def _einsum_one(self, op: Op, facts: list) -> None:
        """Scores of places, of which one side is turned by them, and the other one learns, and met no table."""
        terms, out = _letters(op)
        if len(terms) != 2 or facts.count(None) != 1:
            return
        side = facts.index(None)
        other, turned = op.given[side], {terms[1 - side][a] for a in facts[1 - side].axes}
        places = [set(term) & set(out) - set(rest) for term, rest in zip(terms, terms[::-1])]
        features = set(terms[0]) & set(terms[1]) - set(out)
        sizes = dict(zip(terms[0], op.given[0].shape)) | dict(zip(terms[1], op.given[1].shape))
        scores = turned == places[1 - side] and len(turned) == len(places[side]) == len(features) == 1
        words = other.requires_grad and not other.is_leaf and not _repeated(other, op.given[1 - side])
        if scores and features == {terms[0][-1]} == {terms[1][-1]} and words:
            if sizes[next(iter(turned))] == sizes[next(iter(places[side]))] > 1:
                self.note("F120 one", ("queries", "keys")[1 - side])
                self.turns = 0

    def _einsum(self, op: Op) -> None:
        """Heads are letters of both sides that come out; places are those of one side."""
        terms, out = _letters(op)
        if len(terms) != 2:
            return
        turned = [{term[a] for a in self.known.get(t).axes} for term, t in zip(terms, op.given)]
        heads = set(terms[0]) & set(terms[1]) & set(out)
        places = [(set(term) & set(out)) - heads for term in terms]
        if turned[0] == turned[1] and len(turned[0]) == 1 and turned[0] <= heads and all(len(p) == 1 for p in places):
            sizes = dict(zip(terms[0], op.given[0].shape)) | dict(zip(terms[1], op.given[1].shape))
            letter, many = next(iter(turned[0])), [sizes[next(iter(p))] for p in places]
            if terms[0].index(letter) and min(sizes[letter], *many) > 1:
                self.note("F120", (sizes[letter], many[0]))

    def backward(self, loss: Tensor) -> None:
        self.known.by_id.clear()
        self.pairs = 0

    def close(self) -> None:
        self.known.by_id.clear()


def _repeated(t: Tensor, beside: Tensor) -> bool:
    """Whether all rows of a batch are one: latents that are learned, which stand at no place of a text."""
    return len(beside) > 1 and (len(t) == 1 or t.stride(0) == 0)


def _letters(op: Op) -> tuple[list[str], str]:
    """Those of the sides of an einsum, and of what comes out; none where they are not all written."""
    equation = op.args[0] if op.args and isinstance(op.args[0], str) else ""
    left, arrow, out = equation.replace(" ", "").partition("->")
    return (left.split(","), out) if arrow and "." not in equation else ([], "")


def _alike(x: Tensor) -> bool:
    """One number everywhere, but for rounding."""
    least, most = (float(n) for n in x.float().aminmax())
    return least > 0.1 and most - least < 0.03 * most


def _constant(table: Tensor, axis: int) -> bool:
    return bool((table == table.narrow(axis, 0, 1)).all())


def _where(axis: int, x: Tensor, r: Tensor, laid: bool) -> int | None:
    """Where an axis of x is in what was made of it: by its stride in a view, else by what stands before it."""
    if laid and r.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        same = [b for b in range(r.dim()) if r.shape[b] == x.shape[axis] and r.stride(b) == x.stride(axis)]
        if len(same) == 1:
            return same[0]
    if r.shape[: axis + 1] == x.shape[: axis + 1] and (not laid or r.dim() >= x.dim()):
        return axis
    if r.dim() == x.dim() and sum(a != b for a, b in zip(r.shape, x.shape)) == 1:
        return axis  # put to others, or repeated
    before, size = math.prod(x.shape[:axis]), x.shape[axis]
    for b in range(r.dim()):  # axes were laid together or apart
        low, high = math.prod(r.shape[:b]), math.prod(r.shape[: b + 1])
        if r.numel() == x.numel() and r.shape[b] > 1 and low <= before and before * size <= high:
            return b
    return None
