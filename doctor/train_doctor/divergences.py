"""A divergence that is summed over the rows of the batch, beside a reconstruction that is averaged over them.

    rec = F.mse_loss(answer, x)                                             a mean
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())            a sum over all rows: 64 times too much

Then the divergence of a VAE outweighs the rest by the size of the batch, and the posterior collapses. Its formula is
known by its graph: a logarithm of a variance stands there once as it is and once in an exponential. From the loss down,
sums and factors that are plain numbers are followed to the reductions of its terms.

Footgun: a weight on the divergence says that its author knew. So a factor far from one half is left alone, and so is a
loss that is divided by the batch as a whole.
"""

import contextlib
import math

from torch import Tensor

from train_doctor.eye import Op, Watcher
from train_doctor.fed import kind, shape_of

LEAST = 8  # rows, below which a sum is not far from a mean
HALF = 0.4, 0.6  # the factor in front of the divergence
TERMS, PIECES = 40, 16  # nodes that are looked through, of the loss and of a term
LOSSES = {"MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"}
POINTWISE = {"Add", "Sub", "Rsub", "Mul", "Neg", "Pow", "Exp", "Div"}


class Divergences(Watcher):
    names = frozenset()

    def saw(self, op: Op) -> None:
        """Nothing: the graph tells it."""

    def backward(self, loss: Tensor) -> None:
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):  # another version's name
            terms = list(_terms(loss.grad_fn)) if not self.e.packed else []
            for node, factor in terms:
                shape = shape_of(node.next_functions[0][0]) if kind(node) == "Sum" and node.next_functions else ()
                if len(shape) > 1 and shape[0] >= LEAST and HALF[0] <= abs(factor) <= HALF[1]:
                    if _is_divergence(node.next_functions[0][0]) and any(_mean(*t, shape[0]) for t in terms):
                        self.e.summed.setdefault(self.eye.turn, shape)


def _terms(node, factor: float = 1.0, left: int = TERMS):
    """The reductions that a loss is a sum of, each with its factor."""
    queue = [(node, factor)]
    while queue and left:
        node, factor = queue.pop(0)
        left -= 1
        what, edges = kind(node), [edge for edge, _ in node.next_functions] if node is not None else []
        live = [edge for edge in edges if edge is not None]
        if what in ("Add", "Sub"):
            queue += [(edge, factor) for edge in live]
        elif what == "Neg":
            queue.append((live[0], -factor))
        elif what in ("Mul", "Div") and len(live) == 1:
            number = _number(node)
            if number:
                queue.append((live[0], factor * number if what == "Mul" else factor / number))
        elif what in LOSSES or what in ("Sum", "Mean"):
            yield node, factor


def _number(node) -> float | None:
    """The plain number that a tensor was multiplied by or divided by."""
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
        return True
    return abs(abs(factor) * rows - 1) < 0.5


def _is_divergence(node) -> bool:
    """1 + logvar - mu^2 - exp(logvar), or the same with the signs turned."""
    queue, parts, exponents, squares = [node], set(), set(), 0
    for _ in range(PIECES):
        node = queue.pop(0) if queue else None
        what = kind(node)
        if what not in POINTWISE:
            continue
        edges = [edge for edge, _ in node.next_functions if edge is not None]
        if what == "Exp":
            exponents.add(edges[0])
            continue
        squares += what == "Pow" or what == "Mul" and len(edges) == 2 and edges[0] is edges[1]
        if what in ("Add", "Sub", "Rsub"):
            parts |= set(edges)
        if what != "Pow":
            queue += edges
    return squares > 0 and bool(parts & exponents)
