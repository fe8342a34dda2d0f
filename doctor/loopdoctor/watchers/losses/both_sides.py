"""Two views that are pulled together from both sides, and nothing that keeps them apart.

    loss = -cosine(p1, z2).mean()
    both learn: the shortest way is one answer for everything
    loss = -cosine(p1, z2.detach()).mean()      SimSiam, BYOL: only one side moves

Where nothing is pushed away (no other rows, no variance), the answers to all data become alike. The
cosines of two tensors that both learn are followed, with their sign, up to the loss.

    loss = F.mse_loss(student(x), teacher(x))
    with a teacher that learns: it comes to meet its student
    loss = ce + F.kl_div(student, teacher)
    the same, where no other term asks anything of the teacher
    loss = kl + F.mse_loss(hidden, theirs)
    and this is no other term: it is one more distance of the two

Footgun: what is pulled and pushed by turns (pairs, triplets, InfoNCE) ends in something else than a
mean of cosines with one sign, and so does a loss with further terms that learn. Two networks of one
equation (a derivative of the one is the other) come to meet each other by right, and so do answers
that are whitened over the batch, for none of them can be the same for everything.
"""

from torch import Tensor

from loopdoctor import graphs
from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import VIEWS, kind
from loopdoctor.watchers.losses import signs
from loopdoctor.watchers.operators import TIMES

DISTANCES = {"MseLoss", "SmoothL1Loss", "L1Loss", "HuberLoss"}
SQUARES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
WHITENING = {"LinalgSolveTriangular", "LinalgSolveEx", "LinalgInvEx"}
NODES, WALKED, KEPT = 3000, 20_000, 4


def _loss(node):
    """Return what is behind plain numbers, or a mean by hand."""
    while kind(node) in ("Mul", "Div", "Add", "Sum", "Mean"):
        live = [edge for edge, _ in node.next_functions if edge is not None]
        if len(live) != 1:
            break
        node = live[0]
    return node


def _whitened(node) -> bool:
    """Whether an answer was brought to one spread over the batch, by nothing that learns."""
    while kind(node) in VIEWS:
        node = node.next_functions[0][0]
    if kind(node).endswith("BatchNorm"):
        return all(edge is None for edge, _ in node.next_functions[1:3])
    return kind(node) in WHITENING


class BothSides(Watcher):
    """Known: "unit" of what was normalised, "product" of two of these, or the signs of cosines."""

    names = signs.FOLLOWED | SQUARES | {"cosine_similarity", "normalize", "kl_div", "grad"}
    begins = SQUARES | {"cosine_similarity", "normalize", "kl_div", "grad"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.own: dict[int, set[int]] = {}  # step -> weights of the target's side alone
        self.asked: dict[int, set[int]] = {}  # step -> weights that anything else asks for
        # step -> weights of one side alone, and the other
        self.pairs: dict[int, list[tuple[set[int], set[int]]]] = {}
        # of two tensors that both learn: their nodes and its own, in this step
        self.distances: list[tuple] = []
        self.derived = False  # whether a derivative that has a graph was taken in this step

    def saw(self, op: Op) -> None:
        if op.name == "grad":
            self.derived = self.derived or any(t.requires_grad for t in op.results)
        if not isinstance(op.result, Tensor) or not op.result.requires_grad:
            return
        learn = [t.requires_grad for t in op.given]
        facts = [self.known.get(t) for t in op.given]
        made = None
        if (
            op.name in SQUARES | {"kl_div"}
            and learn[:2] == [True, True]
            and len(self.distances) < KEPT
        ):
            nodes = [t.grad_fn for t in (*op.given[:2], op.result)]
            self.distances += [(op.name, *nodes)] if None not in nodes else []
        if op.name == "cosine_similarity":
            made = (
                frozenset({1})
                if learn == [True, True] and op.given[0].shape == op.given[1].shape
                else None
            )
        elif op.name == "normalize":
            made = "unit"
        elif (
            op.name in TIMES
            and facts == ["unit", "unit"]
            and op.given[0].shape == op.given[1].shape
        ):
            made = "product" if op.given[0] is not op.given[1] else None
        elif facts[:1] == ["product"] and op.name == "sum":
            made = frozenset({1}) if op.result.dim() == op.given[0].dim() - 1 else None
        elif not any(learns and not isinstance(f, frozenset) for f, learns in zip(facts, learn)):
            made = signs.followed(op, self.known)  # no other term that learns
        if made is not None:
            self.known.put(op.result, made)

    def backward(self, loss: Tensor) -> None:
        distances, self.distances = (
            [d for d in self.distances if not any(map(_whitened, d[1:3]))],
            [],
        )
        derived, self.derived = self.derived, False
        if not derived and self._both(loss):
            self.note("F57 two", kind(_loss(loss.grad_fn)))
        self._meets(loss, distances if not derived else [])
        if self.known.get(loss) == frozenset({-1}) and not self.eye.rising:
            self.e.both_sides.add(self.eye.turn)
        self.known.by_id.clear()

    def _both(self, loss: Tensor) -> bool:
        """Whether the loss is one distance alone, of two networks that both learn."""
        node = _loss(loss.grad_fn)
        edges = [edge for edge, _ in node.next_functions] if kind(node) in DISTANCES else []
        if len(edges) < 2 or None in edges[:2] or any(map(_whitened, edges[:2])):
            return False
        one, two = (graphs.leaves(edge, NODES) & self.e.optimized() for edge in edges[:2])
        return len(one) > 1 and len(two) > 1 and not one & two

    def _meets(self, loss: Tensor, distances: list[tuple]) -> None:
        """Whether weights of a target's own learn by its distances alone, in all that is
        differentiated in a step. The first step shows that there is something to look for.
        """
        if not distances and not self.own and not self.pairs:
            return
        turn, held = self.eye.turn, self.e.optimized()
        for name, one, two, _ in distances:
            answer, target = (graphs.leaves(node, WALKED) & held for node in (one, two))
            if name == "kl_div":
                self.own.setdefault(turn, set()).update(target - answer)
            else:
                self.pairs.setdefault(turn, []).append((answer - target, target - answer))
        rest = list(graphs.below(loss.grad_fn, WALKED, {node for *_, node in distances}))
        more = (
            {id(n.variable) for n in rest if hasattr(n, "variable")} if len(rest) < WALKED else held
        )
        self.asked.setdefault(turn, set()).update(more)

    def close(self) -> None:
        for turn in sorted(self.own)[1:]:
            if len(self.own[turn] - self.asked.get(turn, set())) > 1:
                self.note("F57 two", "divergence (kl_div)", turn)
        for turn in sorted(self.pairs)[1:]:
            alone = [
                [len(side - self.asked.get(turn, set())) for side in pair]
                for pair in self.pairs[turn]
            ]
            if any(min(one) > 1 for one in alone):
                self.note("F57 two", "distance", turn)
        self.known.by_id.clear()
