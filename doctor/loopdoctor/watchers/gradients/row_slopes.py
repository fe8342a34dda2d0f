"""Derivatives for each row that are taken of something else than each row's own answer.

    torch.autograd.grad(net(x).sum(), x, create_graph=True)         each row's slope, for rows know
                                                                    nothing of another
    torch.autograd.grad(net(x).mean(), x, create_graph=True)        the same, and B times too small
    torch.autograd.grad(y, t, torch.ones_like(y), create_graph=True)
    of y with k columns: the sum of their slopes

The derivative is followed to the loss. A mean is asked about where the network judges each row by
itself; a sum over columns where it meets the columns of the same answer, one by one.

Footguns: the energy of a set may be a mean, and its slope is right. So between the input and the
mean only functions of single rows may stand, and the mean may not be a part of the loss. A slope
that is divided by its length has any size. The sum over the rows of a mean's slopes is the mean of
slopes; so where rows are summed before any power, nothing is said. Forces are the slope of a sum of
energies, and they meet targets. A solution may be the sum of two parts; it is held against that
sum, and not against a column. So a sum of slopes must meet what the answer's columns made, with
more columns than it has, or by its own columns.
"""

import contextlib
from collections import deque

from torch import Tensor, nn

from loopdoctor import graphs
from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import kind
from loopdoctor.watchers.gradients.slopes import FOLLOWED, NODES
from loopdoctor.watchers.operators import MINUS, OVER, PLUS, TIMES, written

LENGTHS = {"norm", "linalg_norm", "vector_norm", "linalg_vector_norm"}
COLUMNS = {"__getitem__", "select", "narrow", "split", "chunk", "unbind", "index_select"}
VIEWED = {
    "view",
    "reshape",
    "flatten",
    "squeeze",
    "unsqueeze",
    "__getitem__",
    "select",
    "float",
    "double",
    "to",
}
VIEWS = {"View", "UnsafeView", "Squeeze", "Reshape", "Alias"}
LAYERS = {"Addmm", "Mm", "Linear"}
ROWWISE = VIEWS | LAYERS  # each row by itself
ROWWISE |= set(
    "Add Sub Rsub Mul Div Neg Pow Exp Log Sin Cos Tanh Sigmoid Relu Silu Gelu Elu LeakyRelu".split()
)
ROWWISE |= set(
    "Softplus Mish Celu Selu Sqrt Abs T Transpose Convolution NativeLayerNorm Unsqueeze Cat".split()
)
ROWWISE |= set("Clone Slice Select Split Unbind AccumulateGrad AdaptiveAvgPool2D AvgPool2D".split())
ROWWISE |= set("MaxPool2DWithIndices Hardtanh Hardswish LogSigmoid Threshold".split())
EVENLY = (
    LENGTHS | TIMES | OVER | VIEWED | {"abs", "relu", "neg", "negative", "sum", "mean", "clamp_min"}
)
LEAST, FEW, MOST = 4, 2, 8  # rows; columns of an answer
NEAR = 8  # nodes between a column and its answer


class RowSlopes(Watcher):
    """What is known of a slope: what is wrong with it, its graph's node, rows or columns, whether
    it was taken apart, and whether it met what belongs to each column.
    """

    names = FOLLOWED | LENGTHS | TIMES | OVER | PLUS | MINUS | {"grad"}
    begins = {"grad"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.single: set = set()  # answers whose columns were derived one by one
        self.still = False  # a slope of a mean has no graph: what meets it may be as small

    def saw(self, op: Op) -> None:
        if op.name == "grad":
            if isinstance(op.result, tuple) and len(op.args) > 1:
                self._derived(op)
            return
        facts = [f for f in map(self.known.get, op.given) if f]
        fact = self._next(op, facts) if facts else None
        if fact:
            for r in op.results or op.given[:1]:
                self.known.put(r, fact)
        elif facts and written(op):  # slope *= len(x)
            self.known.put(op.given[0], None)

    def _next(self, op: Op, facts: list[tuple]) -> tuple | None:
        what, node, size, apart, met = next((f for f in facts if f[4]), facts[0])
        r = op.results[0] if op.results else op.given[0]
        if (
            op.name in OVER
            and len(op.given) > 1
            and (self.known.get(op.given[1]) or op.given[1].requires_grad)
        ):
            return None  # by its length, or by something else that learns
        if what == "of-mean":
            if _given_back(op, r, size) or not apart and op.name == "sum" and _over_rows(op):
                return None
            return what, node, size, apart or op.name not in EVENLY, met  # a power came
        if not met and op.name in LENGTHS | {"pow", "square", "abs"}:
            return None
        if op.name in PLUS | MINUS | {"mse_loss"} and len(op.given) == 2:
            other = next((t for t in op.given if not self.known.get(t)), None)
            mine = next(t for t in op.given if self.known.get(t))
            if other is not None and _hangs(other, node):
                wider = (
                    mine.dim() == other.dim() == 2
                    and mine.shape[1] == 1
                    and other.shape == (len(mine), size)
                )
                met = met or apart or wider
        return what, node, size, apart or op.name in COLUMNS and bool(r.dim()), met

    def _derived(self, op: Op) -> None:
        outputs, inputs = (a if isinstance(a, list | tuple) else (a,) for a in op.args[:2])
        if len(outputs) != 1 or not isinstance(outputs[0], Tensor) or outputs[0].grad_fn is None:
            return
        weights = self.e.optimized()
        given = op.kwargs.get("grad_outputs", op.args[2] if len(op.args) > 2 else None)
        given = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
        for x, slope in zip(inputs, op.result):
            plain = (
                isinstance(x, Tensor)
                and not isinstance(x, nn.Parameter)
                and id(x) not in weights
                and x.dim() > 1
            )
            if not plain or not isinstance(slope, Tensor) or len(x) < LEAST:
                continue
            # another version's name
            with contextlib.suppress(AttributeError, RuntimeError, TypeError, IndexError):
                fact = self._of_mean(outputs[0], given, x) or self._of_several(outputs[0], given, x)
                if fact and slope.requires_grad:
                    self.known.put(slope, fact)
                self.still |= bool(fact) and not slope.requires_grad

    def _of_mean(self, out: Tensor, given: Tensor | None, x: Tensor) -> tuple | None:
        node, by_hand = out.grad_fn, kind(out.grad_fn) == "Div"
        if out.dim() or given is not None and not bool((given == 1).all()):
            return None
        below = node.next_functions[0][0] if by_hand else node
        if kind(below) != ("Sum" if by_hand else "Mean"):
            return None
        shape, answer = tuple(below._saved_self_sym_sizes), _behind(below.next_functions[0][0])
        if shape not in ((len(x),), (len(x), 1)) or kind(answer) not in LAYERS | {
            "Add",
            "Sigmoid",
            "Tanh",
        }:
            return None
        if kind(answer) == "Add" and kind(answer.next_functions[0][0]) not in LAYERS:
            return None
        if by_hand and not _is(out, below, len(x)):
            return None
        if all(kind(n) in ROWWISE for n in graphs.below(answer, NODES)) and _by_weights(answer):
            return "of-mean", node, len(x), False, False
        return None

    def _of_several(self, out: Tensor, given: Tensor | None, x: Tensor) -> tuple | None:
        node = out.grad_fn
        if not out.dim() and kind(node) == "Sum":
            shape, node = tuple(node._saved_self_sym_sizes), node.next_functions[0][0]
        else:
            shape = tuple(out.shape)
        ones = given is None and not out.dim() or given is not None and bool((given == 1).all())
        if (
            ones
            and len(shape) == 2
            and shape[0] == len(x)
            and x.dim() == 2
            and FEW <= shape[1] <= MOST
        ):
            return "of-several", node, shape[1], False, False
        self.single |= {n for n in list(graphs.below(node, NEAR))[1:] if n is not None}
        return None

    def backward(self, loss: Tensor) -> None:
        what, node, *_, met = self.known.get(loss) or ("", None, False)
        if (
            what == "of-mean"
            and not self.still
            and all(n is not node for n in graphs.walk(loss, NODES))
        ):
            self.note("F25", (what, self.known.get(loss)[2]))
        elif what == "of-several" and met and node not in self.single:
            self.note("F25", (what, self.known.get(loss)[2]))
        self.known.by_id.clear()
        self.single, self.still = set(), False

    def close(self) -> None:
        self.known.by_id.clear()
        self.single = set()


def _over_rows(op: Op) -> bool:
    """Whether a sum is taken over the rows, be it over other dimensions as well."""
    dims = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
    dims = dims if isinstance(dims, list | tuple) else () if dims is None else (dims,)
    return not dims or any(d % op.given[0].dim() == 0 for d in dims)


def _given_back(op: Op, r: Tensor, rows: int) -> bool:
    """Whether a slope, or what was made of it, is multiplied by something as large as the number of
    rows.
    """
    # a loss is scaled by a tensor
    numbers = [a for a in op.args[:2] if r.dim() or isinstance(a, int | float)]
    least = rows / 2 if r.dim() else rows
    if op.name in OVER:
        return any(_size(a) <= 1 / least for a in numbers[-1:])
    return op.name in TIMES and any(_size(a) >= least for a in numbers)


def _size(a) -> float:
    """Of a factor that does not learn."""
    if isinstance(a, int | float):
        return abs(float(a))
    still = isinstance(a, Tensor) and a.is_floating_point() and not a.requires_grad and a.numel()
    return float(a.abs().max()) if still else 1.0


def _behind(node):
    """Return what views or columns were taken of."""
    while kind(node) in VIEWS | {"Slice", "Select", "Split", "Unbind"}:
        node = node.next_functions[0][0]
    return node


def _by_weights(answer) -> bool:
    """Whether weights made it, by layers."""
    found = list(graphs.below(answer, NODES))
    return any(kind(n) in LAYERS for n in found) and any(
        isinstance(getattr(n, "variable", None), nn.Parameter) for n in found
    )


def _is(out: Tensor, summed, rows: int) -> bool:
    """Whether a sum was divided by the number of rows."""
    other = out.grad_fn._saved_other
    return isinstance(other, Tensor) and other.numel() == 1 and float(other) == rows


def _hangs(t: Tensor, node) -> bool:
    """Whether a tensor was made of what a node gave, in few steps, and not of the sum of its
    columns.
    """
    queue, seen = deque([t.grad_fn]), set()
    while queue and len(seen) < 4 * NEAR:
        at = queue.popleft()
        if at is node and at is not None:
            return True
        if at is None or at in seen:
            continue
        seen.add(at)
        below = [edge for edge, _ in at.next_functions]
        queue += [] if kind(at) == "Sum" and below[0] is node else below
    return False
