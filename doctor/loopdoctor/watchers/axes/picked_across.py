"""Shares that were made along one axis, and are used along another.

    log_p = logits.log_softmax(1)                       (B, T, V): the shares of the places, for
                                                        each word
    log_p.gather(2, y[..., None])                       picks a word
    F.kl_div(logits.log_softmax(1), ..., ...)           the same, where a linear layer has made the
                                                        logits
    router(x).softmax(1).topk(2, -1)                    (B, T, E): experts are picked, and the
                                                        places share the weight

Footgun: a softmax over places is what attention does. So only those count from which a class is
picked along another axis, and those that a divergence is given as both of its sides, of what a
linear layer gave. Products of two sides that learn are scores of pairs, which have no axis of
classes; where the same column is picked at all places, these are the classes (a pointer); and two
columns are a start and an end. Experts that pick their places (topk along them) share out each
place among themselves, and are left alone. Shares of places that are multiplied with shares of
classes are both (detection without boxes); and a linear layer of what another one gave, transposed,
mixes places (classes are dim 1).
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import VIEWS, chain, kind
from loopdoctor.watchers.operators import OVER, TIMES

SHARES, MADE = {"softmax", "log_softmax"}, "linear"
KEEPS = TIMES | OVER | {"log", "clamp", "float", "to", "__getitem__", "detach"}
LAYERS, DEEP = ("Addmm", "Mm", "Convolution"), 4  # functions in front of a layer
ENDS = 2  # of a span


class PickedAcross(Watcher):
    """Known are outputs of linear layers, and the axes along which shares were made of them."""

    names, begins = SHARES | KEEPS | {MADE, "gather", "kl_div", "topk"}, SHARES | {MADE}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        x = op.given[0] if op.given else None
        fact = self.known.get(x) if x is not None else None
        if op.name == "topk":
            if fact == (1, True) and x.requires_grad and op.results and _last(op, x):
                self.note("S33 picked", (1, 2))
            return
        if x is None or not isinstance(op.result, Tensor):
            return
        if op.name == MADE:
            if op.result.dim() == 3 and not _mixes_places(x):
                self.known.put(op.result, MADE)
        elif op.name in SHARES:
            dim = op.kwargs.get("dim", next((a for a in op.args[1:] if isinstance(a, int)), None))
            if x.dim() > 2 and isinstance(dim, int) and not _pairs(x):
                self.known.put(op.result, (dim % x.dim(), fact == MADE))
        elif op.name == "gather":
            along = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
            if isinstance(fact, tuple) and isinstance(along, int) and along % x.dim() != fact[0]:
                if x.requires_grad and op.result.shape[along] == 1 and not _one_column(op, fact[0]):
                    self.note("S33 picked", (fact[0], along % x.dim()))
        elif op.name == "kl_div":
            sides = [self.known.get(t) for t in op.given[:2]]
            spans = x.shape[-1] == ENDS
            if (
                x.requires_grad
                and all(side == (1, True) for side in sides)
                and len(sides) == 2
                and not spans
            ):
                self.note("S33 picked", (1, 2))
        elif fact and op.result.dim() == x.dim() and not _of_both(op):
            self.known.put(op.result, fact)

    def close(self) -> None:
        self.known.by_id.clear()


def _of_both(op: Op) -> bool:
    """Shares times something else that learns."""
    return op.name in TIMES and len(op.given) > 1 and op.given[1].requires_grad


def _mixes_places(x: Tensor) -> bool:
    """Return the columns are places: x is what a linear layer gave, transposed."""
    if x.stride(-1) == 1:
        return False
    return next((name for name in chain(x.grad_fn, DEEP) if name in LAYERS), "") in LAYERS[:2]


def _last(op: Op, x: Tensor) -> bool:
    """Return some of several columns are picked, of each of several places."""
    dim = op.kwargs.get("dim", op.args[2] if len(op.args) > 2 else -1)
    return (
        dim in (-1, x.dim() - 1)
        and x.dim() == 3
        and op.results[0].shape[-1] < x.shape[-1]
        and x.shape[1] > 1
    )


def _pairs(x: Tensor) -> bool:
    """Products of two sides that learn."""
    node = x.grad_fn
    while kind(node) in (*VIEWS, "Mul", "Div") and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return kind(node) == "Bmm" and all(side is not None for side, _ in node.next_functions)


def _one_column(op: Op, dim: int) -> bool:
    index = next((t for t in op.given[1:] if not t.is_floating_point()), None)
    return (
        index is not None
        and index.shape[dim] > 1
        and bool((index == index.narrow(dim, 0, 1)).all())
    )
