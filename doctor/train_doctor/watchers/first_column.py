"""Labels of a contrastive loss that name the first row as everybody's partner.

    logits = a @ b.T                                (B, B): the partner of row i is column i
    F.cross_entropy(logits, torch.arange(B))        and this says so
    F.cross_entropy(logits, torch.zeros(B))         row 0 is the partner of all

Zeros belong to logits into whose first column the partners were put: torch.cat([positive, negatives], 1), as in MoCo.
So a product of two batches is followed to the cross-entropy through what leaves each number in its place.

Footgun: a classifier with weights of its own may have as many classes as a batch has rows, and data in the order of
their classes. So both sides of the product must be made by layers, of inputs. All rows may be views of one picture, the
first of the columns; then they are much more alike than the columns are.
"""

from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import kind
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES

PRODUCTS = {"matmul", "mm", "__matmul__", "einsum", "linear"}
KEEPS = OVER | TIMES | MINUS | PLUS | {"clamp", "float", "to", "exp", "clone", "log_softmax", "T", "t", "mT"}
LAYERS = {"Addmm", "Convolution", "Embedding", "EmbeddingBag", "CudnnRnn", "NativeBatchNorm"}
LEAST, NODES = 4, 200
SAVED = {"Addmm": "_saved_mat1", "Convolution": "_saved_input"}
ALIKE = 0.3  # how widely rows are spread, over the columns


class FirstColumn(Watcher):
    begins = PRODUCTS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else op.given[0] if op.given else None
        if op.name in ("cross_entropy", "nll_loss"):
            if len(op.given) > 1 and self.known.get(op.given[0]):
                self._look(*op.given[:2])
        elif r is None or r.dim() != 2 or r.shape[0] != r.shape[1] or len(r) < LEAST or not r.requires_grad:
            return
        elif any(map(self.known.get, op.given)):
            if op.name in KEEPS:
                self.known.put(r, True)
        elif op.name in PRODUCTS and len(op.given) == 2:
            one, two = op.given
            if one.dim() == two.dim() == 2 and sorted(one.shape) == sorted(two.shape) and len(r) in one.shape:
                if all(map(_by_layers, op.given)) and _spread(one) > ALIKE * _spread(two):
                    self.known.put(r, True)

    def _look(self, answer: Tensor, target: Tensor) -> None:
        if target.shape == answer.shape[:1] and not target.is_floating_point() and not target.any():
            self.note("F94", (len(target), "zeros"))

    def close(self) -> None:
        self.known.by_id.clear()


def _by_layers(t: Tensor) -> bool:
    return t.grad_fn is not None and any(kind(n) in LAYERS for n in graphs.walk(t, NODES))


def _spread(t: Tensor) -> float:
    """Of the rows that went into the layers around their mean, as a share of their size; 1 where they are not known.
    What came out tells nothing: under one label for all, all rows come together in a few steps."""
    for node in graphs.walk(t, NODES):
        x = getattr(node, SAVED.get(kind(node), ""), None)
        if isinstance(x, Tensor) and not x.requires_grad and len(x) == len(t) and x.is_floating_point():
            x = x.detach().double()
            return float((x - x.mean(0)).square().sum() / x.square().sum().clamp_min(1e-30))
    return 1.0
