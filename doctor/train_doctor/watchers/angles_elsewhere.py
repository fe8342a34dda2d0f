"""Angles and lengths along another axis than that of the features: dim=1 is the default, of (B, N, D) as well.

    cos = F.cosine_similarity(prediction, normals)          (B, N, 3): along the points. dim=-1 was meant
    z = F.normalize(tokens); z @ z.transpose(1, 2)          (B, N, D): no cosines
    F.cosine_similarity(z[:, None], z[None, :])             (N, 1, D) and (1, N, D): along the rows

Three things tell that the features lie last: the targets are directions, of length one along the last axis; both sides
come from a lookup, a layer norm or a recurrent network; or the products of what was made to length one are summed along
the last axis. And an axis along which one side has a single number has no angle.

Footgun: maps of a convolution have their features in dim 1, whatever lies or has length one along their last axis, and
so have what was transposed, and a layer for all times of a channel; a layer alone therefore tells nothing, nor does one
behind a recurrent network, which may answer channels. A colour and its own mean have an angle, that to the grey axis.
Products that are divided by their own length are kernels. One-hot rows have length one too. Who writes dim=1, or takes
the mean along it first, means the times or the places. What meets over the places (q.mT @ k) may have length one there.
And answers that also meet data in a plain loss are channels of series, which are told over their times.
"""

import ast

from torch import Tensor

from train_doctor.callers import caller, written
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN
from train_doctor.watchers.operators import MINUS, OVER, TIMES

RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
SOURCES = RECURRENT | {"embedding", "layer_norm"}  # of features that lie last
CONVOLUTIONS = {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
LENGTHS = {"norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "matrix_norm", "linalg_matrix_norm"}
TURNS = {"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "mT", "mH", "T", "einsum"}
PRODUCTS = {"matmul", "bmm", "__matmul__"}
LOOKED, CLOSE = 2**21, 1e-3  # numbers; to a length of 1
AS_IT_IS, TURNED, PAIRED = range(1, 4)
ANY, STATES = "any", "states"  # what has its features last


class AnglesElsewhere(Watcher):
    """Known are what has its features last, and what has length one along dim 1; maps of a convolution, means, with
    what they are of, and products of what has length one, with their number, and their
    lengths."""

    begins = SOURCES | CONVOLUTIONS | {"cosine_similarity", "normalize", "mean"} | set(PLAIN)

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.last = Known(self)
        self.unit = Known(self)
        self.maps, self.means, self.products = Known(self), Known(self), Known(self)
        self.pending: list[tuple | None] = []  # shapes of these products, but for kernels
        self.cosines: list[tuple[tuple, int]] = []  # the fact, and of which answer
        self.answers: set[int] = set()  # what met data in a plain loss

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if r is None or not op.given:
            return
        if op.name == "cosine_similarity" and len(op.given) == 2:
            self._cosine(op)
        elif op.name == "normalize":
            if r.dim() > 2 and op.kwargs.get("dim") == 1 and _unwritten():
                self.unit.put(r, AS_IT_IS)
        elif len(op.given) < 3 and any(facts := [self.unit.get(t) for t in op.given]):
            self._lengths(op, facts, r)
        if op.name in PLAIN and len(op.given) > 1 and op.given[0].requires_grad and not self.last.get(op.given[1]):
            self.answers.add(id(op.given[0]))
        self._follow(op, r)
        if r.is_floating_point() and r.dim() > 2 and not self.maps.get(r) and self._lies_last(op, r):
            states = op.name in RECURRENT or any(self.last.get(t) == STATES for t in op.given)
            self.last.put(r, STATES if states else ANY)

    def _follow(self, op: Op, r: Tensor) -> None:
        """Maps, means and products."""
        maps = [t for t in op.given if self.maps.get(t)]
        if op.name in CONVOLUTIONS or op.name not in TURNS | PRODUCTS and any(t.shape == r.shape for t in maps):
            self.maps.put(r, True)
        elif op.name == "mean":
            self.means.put(r, id(op.given[0]))
        known = [fact for t in op.given if (fact := self.products.get(t))]
        if len(known) > 1 and op.name in OVER and known[0] == (known[1][0], False):
            self.pending[known[0][0]] = None
        elif known and (op.name in LENGTHS or r.numel() == op.given[0].numel()):
            self.products.put(r, (known[0][0], known[0][1] or op.name in LENGTHS))

    def _lies_last(self, op: Op, r: Tensor) -> bool:
        if op.name in SOURCES:
            given = op.args[1] if op.name == "layer_norm" and len(op.args) > 1 else ()
            return op.name != "layer_norm" or len(given) == 1
        if op.name == "linear" and self.last.get(op.given[0]) == STATES:
            return False
        known = [t for t in op.given if self.last.get(t)]
        alike = all(t.shape[:-1] == r.shape[:-1] for t in known)
        means = any(t.dim() == r.dim() and t.shape[1] == 1 < r.shape[1] for t in op.given)
        return bool(known) and alike and not means and op.name not in TURNS | PRODUCTS

    def _cosine(self, op: Op) -> None:
        one, two = op.given
        dim = op.args[2] if len(op.args) > 2 else op.kwargs.get("dim")
        if one.dim() != two.dim() or one.dim() < 3 or not (one.requires_grad or two.requires_grad):
            return
        narrow, wide = sorted((one, two), key=lambda t: t.shape[1 if dim is None else dim])
        sizes = [t.shape[1 if dim is None else dim] for t in (narrow, wide)]
        if sizes[0] == 1 < sizes[1] and narrow.numel() > 1:
            if self.means.get(narrow) == id(wide):
                return
            self.note("F134", ("one", tuple(one.shape), tuple(two.shape)))
        elif dim is None and one.shape == two.shape and min(one.shape[1], one.shape[-1]) > 1:
            if self.last.get(one) and self.last.get(two):
                fact = "", tuple(one.shape), tuple(two.shape)
                self.cosines.append((fact, id(one if one.requires_grad else two)))
            elif not self.maps.get(one) and not self.maps.get(two) and directions(two if one.requires_grad else one):
                self.note("F134", ("", tuple(one.shape), tuple(two.shape)))

    def _lengths(self, op: Op, facts: list, r: Tensor) -> None:
        """What was made to length one along dim 1 meets a direction, or its like along the last axis."""
        x = next(t for t, fact in zip(op.given, facts) if fact)
        other = next((t for t, fact in zip(op.given, facts) if not fact), None)
        fact = next(f for f in facts if f)
        if other is not None:
            if op.name in MINUS | TIMES | set(PLAIN) and fact == AS_IT_IS and other.shape == x.shape:
                if directions(other):
                    self.note("F134 lengths", tuple(x.shape))
        elif op.name in PRODUCTS and facts == [AS_IT_IS, TURNED]:
            if r.requires_grad and all(map(self.last.get, op.given[:1])):
                self.products.put(r, (len(self.pending), False))
                self.pending.append(tuple(x.shape))
        elif op.name in TIMES and facts == [AS_IT_IS, AS_IT_IS] and all(map(self.last.get, op.given)):
            self.unit.put(r, PAIRED)
        elif op.name == "sum" and fact == PAIRED:
            dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
            if dim in (-1, x.dim() - 1) and r.requires_grad:
                self.note("F134 lengths", tuple(x.shape))
        elif op.name in ("detach", "clone", "float"):
            self.unit.put(r, fact)
        elif op.name in TURNS and fact == AS_IT_IS and x.dim() == 3 and r.shape == (x.shape[0], x.shape[2], x.shape[1]):
            self.unit.put(r, TURNED)

    def backward(self, loss: Tensor) -> None:
        for shape in filter(None, self.pending):
            self.note("F134 lengths", shape)
        for fact, answer in self.cosines:
            if answer not in self.answers:
                self.note("F134", fact)
        self.products.by_id.clear()
        self.pending, self.cosines, self.answers = [], [], set()

    def close(self) -> None:
        for known in (self.last, self.unit, self.maps, self.means, self.products):
            known.by_id.clear()


def _unwritten() -> bool:
    """Whether the program calls normalize and says nothing of the axis."""
    frame = caller()
    call = written(frame) if frame is not None else None
    if call is None or getattr(call.func, "attr", getattr(call.func, "id", "")) != "normalize":
        return False
    starred = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
    return not starred and len(call.args) < 3 and all(k.arg != "dim" for k in call.keywords)


def directions(t: Tensor) -> bool:
    """Whether it holds vectors of length one along its last axis, but for empty ones, and along no other; one-hot
    rows are none."""
    if t.requires_grad or not t.is_floating_point() or t.dim() < 3 or not 0 < t.numel() <= LOOKED or t.shape[-1] < 2:
        return False
    t = t.detach().float()
    lengths, others = t.norm(dim=-1), t.norm(dim=1)
    one = (lengths - 1).abs() < CLOSE
    if not bool((one | (lengths < CLOSE)).all()) or float(one.float().mean()) < 0.5:
        return False
    return not bool((t.abs() > 1 - CLOSE).any(-1)[one].all()) and not bool(((others - 1).abs() < CLOSE).all())
