"""A divergence that is summed over the rows of the batch, beside a reconstruction that is averaged
over them.

    rec = F.mse_loss(answer, x)                                             a mean
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    a sum over all rows: 64 times too much

Then the divergence of a VAE outweighs the rest by the size of the batch, and the posterior
collapses. Its formula is known by its graph: a logarithm of a variance stands there once as it is
and once in an exponential. From the loss down, sums and factors that are plain numbers are followed
to the reductions of its terms.

The reconstruction may also be a mean over all numbers of a row, beside a divergence that is summed
in each row. Then the divergence outweighs it by the numbers of a row.

A divergence of weights (Bayes by backprop) counts once for all data: as it is, beside a mean over
the rows of a batch, it weighs as much as all rows of the data together.

The other way round, a divergence that is a mean over all its numbers, beside a reconstruction that
is a sum over all of its own, costs nearly nothing.

In the loss the variance must cost something: where the divergence is taken away from it, the loss
falls without end.

Footgun: a weight on the divergence says that its author knew. So a factor far from one half is left
alone, and so is a loss that is divided by the batch as a whole.
"""

import contextlib
import math
from collections.abc import Container

from torch import Tensor

from loopdoctor.evidence import Evidence
from loopdoctor.eye import Op, Watcher
from loopdoctor.fed import kind, shape_of

LEAST = 8  # rows, below which a sum is not far from a mean
HALF = 0.4, 0.6  # the factor in front of the divergence
WEIGHTS, MUCH = 1000, 0.1  # numbers whose divergence is summed; a factor of them, at least
# a term with data
DATA = {"Addmm", "Mm", "Bmm", "Convolution", "Embedding", "NativeBatchNorm", "Index"}
MANY = 32  # numbers of a row, of which it is not the same to take the mean or the sum
TERMS, PIECES = 40, 16  # nodes that are looked through, of the loss and of a term
LOSSES = {
    "MseLoss",
    "L1Loss",
    "SmoothL1Loss",
    "HuberLoss",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
}
POINTWISE = {"Add", "Sub", "Rsub", "Mul", "Neg", "Pow", "Exp", "Div"}


class Divergences(Watcher):
    names = frozenset()

    def saw(self, op: Op) -> None:
        """Nothing: the graph tells it."""

    def backward(self, loss: Tensor) -> None:
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):  # another version's name
            terms = terms_of_loss(self.e, loss)
            self._of_weights(terms)
            for node, factor in terms:
                self._averaged(node, factor, terms)
                term, factor, rows = in_each_row(node, factor)
                shape = shape_of(term) if term is not None else ()
                if len(shape) < 2 or shape[0] < LEAST or not _is_divergence(term):
                    continue
                if (
                    not rows
                    and HALF[0] <= abs(factor) <= HALF[1]
                    and any(_mean(*t, shape[0]) for t in terms)
                ):
                    self.e.summed.setdefault(self.eye.turn, shape)
                factor *= 1 if rows else shape[0]
                numbers = max((_numbers(*t, shape[0]) for t in terms), default=0)
                if HALF[0] <= abs(factor) <= HALF[1] and numbers >= MANY:
                    self.e.over_numbers.setdefault(self.eye.turn, numbers)

    def _of_weights(self, terms: list) -> None:
        """Find sums over weights and nothing else, with a logarithm in them, beside a mean over
        rows.
        """
        sums = [
            n
            for n, factor in terms
            if kind(n) == "Sum" and 0.9 < factor < 1.1 and _weights_alone(n)
        ]
        numbers = sum(math.prod(shape_of(n.next_functions[0][0])) for n in sums)
        others = [(n, f) for n, f in terms if n not in sums]
        if numbers >= WEIGHTS and any(
            _mean(n, f, shape_of(n.next_functions[0][0])[0]) for n, f in others
        ):
            self.note("F40", ("weights", numbers))

    def _averaged(self, node, factor: float, terms: list) -> None:
        """Find a mean over all numbers of a divergence, beside a sum over all numbers of as many
        rows.
        """
        shape = shape_of(node.next_functions[0][0]) if kind(node) == "Mean" else ()
        if len(shape) < 2 or shape[0] < LEAST or not HALF[0] <= abs(factor) <= HALF[1]:
            return
        if any(_whole(*t, shape[0]) for t in terms) and _is_divergence(node.next_functions[0][0]):
            self.note("F40", ("averaged", math.prod(shape)))


def _weights_alone(node) -> bool:
    """Whether a sum is one over weights, of which logarithms and squares are taken, and no data, as
    it is.
    """
    queue, seen, logarithm, square = [node], 0, False, False
    inside = node.next_functions[0][0]
    while (
        kind(inside) in ("Mul", "Div")
        and sum(edge is not None for edge, _ in inside.next_functions) == 1
    ):
        number = number_of(inside) or 1.0
        if not MUCH < abs(number if kind(inside) == "Mul" else 1 / number):
            return False  # it is divided before
        inside = next(edge for edge, _ in inside.next_functions if edge is not None)
    while queue:
        node, seen = queue.pop(), seen + 1
        what, edges = kind(node), [edge for edge, _ in node.next_functions if edge is not None]
        if what in DATA or seen > TERMS:
            return False
        logarithm = logarithm or what == "Log"
        square = (
            square or what == "Pow" or what == "Mul" and len(edges) == 2 and edges[0] is edges[1]
        )
        queue += edges
    return logarithm and square


def _whole(node, factor: float, rows: int) -> bool:
    """Whether a term is a sum over all numbers of as many rows, with a factor of about 1."""
    shape = shape_of(node.next_functions[0][0])
    whole = kind(node) == "Sum" or kind(node) in LOSSES and node._saved_reduction == 2
    return whole and len(shape) > 1 and shape[0] == rows and 0.4 < abs(factor) < 2.1


def in_each_row(node, factor: float):
    """Return what is summed in a term, with its factor, and whether the sum is one of each row, of
    which the mean is taken.
    """
    if kind(node) == "Sum":
        return node.next_functions[0][0], factor, False
    if kind(node) != "Mean":
        return None, factor, True
    for term, times in terms_of(node.next_functions[0][0], factor):
        if kind(term) == "Sum":
            return term.next_functions[0][0], times, True
    return None, factor, True


def _numbers(node, factor: float, rows: int) -> int:
    """How many numbers of a row a reconstruction is a mean over; 0 where it is none."""
    shape = shape_of(node.next_functions[0][0])
    mean = kind(node) == "Mean" or kind(node) in LOSSES and node._saved_reduction == 1
    # or a half, or divided by the rows again
    plain = any(0.9 < abs(factor) * times < 1.1 for times in (1, 2, rows))
    if not mean or not plain or len(shape) < 2 or shape[0] != rows:
        return 0
    return math.prod(shape[1:])


def terms_of_loss(e: Evidence, loss: Tensor, more: Container[str] = ()) -> list[tuple]:
    """Of a loss, with nodes of more kinds; none where its graph can't be read, because the program
    packs what nodes save.
    """
    with contextlib.suppress(AttributeError, RuntimeError, TypeError):  # another version's name
        return list(terms_of(loss.grad_fn, more=more)) if not e.packed else []
    return []


def terms_of(node, factor: float = 1.0, left: int = TERMS, more: Container[str] = ()):
    """Yield the reductions that a loss is a sum of, each with its factor."""
    queue = [(node, factor)]
    while queue and left:
        node, factor = queue.pop(0)
        left -= 1
        what, edges = (
            kind(node),
            [edge for edge, _ in node.next_functions] if node is not None else [],
        )
        live = [edge for edge in edges if edge is not None]
        if what in ("Add", "Sub"):
            queue += [
                (e, -factor if what == "Sub" and n else factor)
                for n, e in enumerate(edges)
                if e is not None
            ]
        elif what == "Neg":
            queue.append((live[0], -factor))
        elif what in ("Mul", "Div") and len(live) == 1:
            number = number_of(node)
            if number:
                queue.append((live[0], factor * number if what == "Mul" else factor / number))
        elif what in LOSSES or what in ("Sum", "Mean") or what in more:
            yield node, factor


def number_of(node) -> float | None:
    """Return the plain number that a tensor was multiplied by or divided by."""
    other = node._saved_other
    if isinstance(other, Tensor):
        other = other.item() if other.numel() == 1 and other.device.type == "cpu" else None
    return float(other) if other is not None and math.isfinite(other) else None


def _mean(node, factor: float, rows: int) -> bool:
    """Whether a term is a mean over the rows, of whatever each row gives."""
    what = kind(node)
    shape = shape_of(node.next_functions[0][0])
    if not shape or shape[0] != rows:
        return False
    if what == "Mean" or what in LOSSES and node._saved_reduction == 1:
        return 0.4 < abs(factor) < 2.1
    return abs(abs(factor) * rows - 1) < 0.5


def _is_divergence(node) -> bool:
    return bool(log_variances(node))


def log_variances(node) -> set[tuple]:
    """Of 1 + logvar - mu^2 - exp(logvar), or of the same with the signs turned, as nodes and which
    of their results; none of anything else.
    """
    queue, parts, exponents, squares = [node], set(), set(), 0
    for _ in range(PIECES):
        node = queue.pop(0) if queue else None
        what = kind(node)
        if what not in POINTWISE:
            continue
        edges = [edge for edge, _ in node.next_functions if edge is not None]
        if what == "Exp":
            exponents.add(node.next_functions[0])
            continue
        squares += what == "Pow" or what == "Mul" and len(edges) == 2 and edges[0] is edges[1]
        if what in ("Add", "Sub", "Rsub"):
            parts |= {edge for edge in node.next_functions if edge[0] is not None}
        if what != "Pow":
            queue += edges
    return parts & exponents if squares else set()
