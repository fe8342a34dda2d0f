"""Two sides of a similarity that are the same to the last bit: one view of the data twice.

A contrastive loss compares what a network makes of two views of a picture. Where both views are the same one, the pair
that should be alike is alike from the beginning, and nothing is learned. Both sides then are equal bit for bit, and
their graphs are the same functions of the same weights.

Footguns: with dropout two calls with one input differ, which is a method of its own. A network whose last layer is
still zero, or that has collapsed, gives the same answer to any input; so rows must differ from each other. A step of a
recurrence that has come to rest is equal to the one before, whose graph is shorter. Where all rows are compared with
all (z @ z.T), the halves of one tensor are the two sides; a picture that was laid out twice makes them equal.
"""

import torch
from torch import Tensor

from loopdoctor import graphs
from loopdoctor.eye import Eye, Op, Watcher

PAIRED = {
    *("cat", "concat", "stack", "matmul", "mm", "__matmul__", "bmm", "cosine_similarity", "pairwise_distance", "cdist"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "sub", "subtract", "cosine_embedding_loss", "triplet_margin_loss"),
    *("einsum", "mul", "multiply"),
}
NODES, WALKED, MOST, UNIT = 500, 5000, 2**14, 1e-3  # of two graphs; of a loss; rows that are compared; off length 1


class Views(Watcher):
    names = PAIRED

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.halves: list[tuple] = []  # products of all rows with all since the last backward: node, shape of a half

    def saw(self, op: Op) -> None:
        if op.name not in PAIRED or not 2 <= len(op.given) <= 3:
            return
        one, two = op.given[:2]
        if op.name in ("cat", "concat") and len(op.given) == 2:
            self._data(one, two)
        if one.dim() == 2 and two.shape == one.T.shape and one.requires_grad and _one_storage(one, two):
            self._halves(one, op.result)
        if one is two or not (one.requires_grad and two.requires_grad) or one.grad_fn is two.grad_fn:
            return
        if op.name.endswith(("mul", "multiply", "mm", "__")) and one.dim() != 2:
            return
        made = one.grad_fn, two.grad_fn
        if op.name.endswith(("mm", "matmul__", "matmul")) and _is_turned(made[0]) and not _is_turned(made[1]):
            return  # a covariance of columns, of which each is compared with itself as well
        two = two if two.shape == one.shape else two.T if two.dim() == 2 and two.T.shape == one.shape else two
        if one.shape != two.shape or one.dim() < 2 or len(one) < 2 or one.numel() == len(one) or one.dtype != two.dtype:
            return
        if torch.equal(one, two) and not bool((one[:1] == one[1:]).all()) and same_functions(*made):
            self.e.same_views.setdefault(self.eye.turn, (op.name, tuple(one.shape)))

    def _data(self, one: Tensor, two: Tensor) -> None:
        """Two batches of data that are put together, for a network without live dropout."""
        if one is two or one.requires_grad or two.requires_grad or one.shape != two.shape or one.dim() < 2:
            return
        alike = one.is_floating_point() and len(one) > 1 and torch.equal(one, two) and not bool((one[:1] == one).all())
        if alike and not any(training and p > 0 for _, training, p in self.e.dropouts.values()):
            self.e.same_data.setdefault(self.eye.turn, tuple(one.shape))

    def _halves(self, z: Tensor, result: Tensor) -> None:
        """All rows against all, by cosines: two views of each, one below the other."""
        half = len(z) // 2
        if half > 1 and len(z) == 2 * half < MOST and not bool((z[:1] == z[1:half]).all()):
            if torch.equal(z[:half], z[half:]) and bool(((z.norm(dim=1) - 1).abs() < UNIT).all()):
                self.halves.append((result.grad_fn, (half, *z.shape[1:])))

    def backward(self, loss: Tensor) -> None:
        """Products that no loss asks for may be masks of what is alike."""
        halves, self.halves = self.halves, []
        if halves and loss.grad_fn is not None:
            asked = set(map(id, graphs.walk(loss, WALKED)))
            for node, shape in halves:
                if id(node) in asked:
                    self.e.same_data.setdefault(self.eye.turn, shape)

    def close(self) -> None:
        self.halves = []


def _one_storage(one: Tensor, two: Tensor) -> bool:
    """Such as of z and z.T."""
    same = one.untyped_storage()._cdata == two.untyped_storage()._cdata
    return same and one.storage_offset() == two.storage_offset() and one.stride() == two.stride()[::-1]


def same_functions(one, two) -> bool:
    """Whether two graphs are the same functions of the same weights, and two in all but these."""
    one, two = _unturned(one), _unturned(two)
    queue, seen, weights, apart = [(one, two)], set(), 0, 0
    while queue:
        a, b = queue.pop()
        if a is None or b is None:
            if a is not b:
                return False
            continue
        if (a, b) in seen:
            continue
        seen.add((a, b))
        if len(seen) > NODES or type(a) is not type(b):
            return False
        if hasattr(a, "variable"):
            if a.variable is not b.variable:
                return False
            weights += 1
            continue
        apart += a is not b
        edges = [edge for edge, _ in a.next_functions], [edge for edge, _ in b.next_functions]
        if len(edges[0]) != len(edges[1]):
            return False
        queue += zip(*edges)
    return weights > 0 and apart > 1


def _unturned(node):
    """Without a transposition, which the other side of a product needs."""
    while _is_turned(node):
        node = node.next_functions[0][0]
    return node


def _is_turned(node) -> bool:
    return type(node).__name__.startswith(("TBackward", "TransposeBackward", "PermuteBackward"))
