"""Two views that are pulled together from both sides, and nothing that keeps them apart.

    loss = -cosine(p1, z2).mean()               both learn: the shortest way is one answer for everything
    loss = -cosine(p1, z2.detach()).mean()      SimSiam, BYOL: only one side moves

Where nothing is pushed away (no other rows, no variance), the answers to all data become alike. The cosines of two
tensors that both learn are followed, with their sign, up to the loss.

    loss = F.mse_loss(student(x), teacher(x))   with a teacher that learns: it comes to meet its student

Footgun: what is pulled and pushed by turns (pairs, triplets, InfoNCE) ends in something else than a mean of cosines
with one sign, and so does a loss with further terms that learn.
"""

from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import kind
from train_doctor.watchers import signs
from train_doctor.watchers.operators import TIMES

DISTANCES = {"MseLoss", "SmoothL1Loss", "L1Loss", "HuberLoss"}
NODES = 3000


def _loss(node):
    """What is behind plain numbers, or a mean by hand."""
    while kind(node) in ("Mul", "Div", "Add", "Sum", "Mean"):
        live = [edge for edge, _ in node.next_functions if edge is not None]
        if len(live) != 1:
            break
        node = live[0]
    return node


class BothSides(Watcher):
    """Known: "unit" of what was normalised, "product" of two of these, or the signs of cosines."""

    names = signs.FOLLOWED | {"cosine_similarity", "normalize"}
    begins = {"cosine_similarity", "normalize"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not isinstance(op.result, Tensor) or not op.result.requires_grad:
            return
        learn = [t.requires_grad for t in op.given]
        facts = [self.known.get(t) for t in op.given]
        made = None
        if op.name == "cosine_similarity":
            made = frozenset({1}) if learn == [True, True] and op.given[0].shape == op.given[1].shape else None
        elif op.name == "normalize":
            made = "unit"
        elif op.name in TIMES and facts == ["unit", "unit"] and op.given[0].shape == op.given[1].shape:
            made = "product" if op.given[0] is not op.given[1] else None
        elif facts[:1] == ["product"] and op.name == "sum":
            made = frozenset({1}) if op.result.dim() == op.given[0].dim() - 1 else None
        elif not any(learns and not isinstance(f, frozenset) for f, learns in zip(facts, learn)):
            made = signs.followed(op, self.known)  # no other term that learns
        if made is not None:
            self.known.put(op.result, made)

    def backward(self, loss: Tensor) -> None:
        if self._both(loss):
            self.note("F57 two", kind(_loss(loss.grad_fn)))
        if self.known.get(loss) == frozenset({-1}) and not self.eye.rising:
            self.e.both_sides.add(self.eye.turn)
        self.known.by_id.clear()

    def _both(self, loss: Tensor) -> bool:
        """Whether the loss is one distance alone, of two networks that both learn."""
        node = _loss(loss.grad_fn)
        edges = [edge for edge, _ in node.next_functions] if kind(node) in DISTANCES else []
        if len(edges) < 2 or None in edges[:2]:
            return False
        one, two = (graphs.leaves(edge, NODES) & self.e.optimized() for edge in edges[:2])
        return len(one) > 1 and len(two) > 1 and not one & two

    def close(self) -> None:
        self.known.by_id.clear()
