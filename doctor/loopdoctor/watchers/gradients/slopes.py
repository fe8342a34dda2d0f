"""Derivatives with respect to inputs that are part of the loss: `torch.autograd.grad` without
`create_graph=True`.

    du = torch.autograd.grad(u.sum(), t)[0]
    a number like any other: no graph leads from it to the weights
    loss = (du - f(u)).pow(2).mean()
    so the optimizer sees u and takes u' for a constant

The derivative of something that hangs on weights is followed through sums, powers and reductions to
the loss.

Footguns: without a graph it is right where it only makes another input (adversarial training,
Langevin dynamics), where it is a weight of a term, and where it is detached on purpose; so it is
followed no further through a layer, a product with what has a gradient, a sign or a detach. Several
inputs with the shapes of weights are those of an inner loop.
"""

from torch import Tensor, nn

from loopdoctor import graphs
from loopdoctor.eye import Eye, Known, Op, Watcher

PRODUCTS = {"mul", "multiply", "div", "divide", "true_divide"}
FOLLOWED = PRODUCTS | {
    *(
        "add",
        "sub",
        "subtract",
        "rsub",
        "__rsub__",
        "neg",
        "negative",
        "pow",
        "square",
        "abs",
        "sqrt",
        "sum",
        "mean",
    ),
    *(
        "norm",
        "linalg_norm",
        "vector_norm",
        "linalg_vector_norm",
        "view",
        "reshape",
        "flatten",
        "squeeze",
        "unsqueeze",
    ),
    *(
        "__getitem__",
        "select",
        "narrow",
        "split",
        "chunk",
        "unbind",
        "cat",
        "stack",
        "concat",
        "transpose",
        "permute",
    ),
    *(
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "relu",
        "clamp",
        "exp",
        "log",
        "sin",
        "cos",
        "float",
    ),
    *("double", "to", "index_select", "nan_to_num", "max", "amax", "T", "mT", "clip", "clamp_min"),
}
NODES = 2000  # of a graph that are looked through for a weight


class Slopes(Watcher):
    names = FOLLOWED | {"grad"}
    begins = {"grad"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.shapes: set = set()

    def saw(self, op: Op) -> None:
        if op.name == "grad" and isinstance(op.result, tuple) and len(op.args) > 1:
            self._derived(op)
        elif op.name in FOLLOWED and any(self.known.get(t) for t in op.given):
            live = [t for t in op.given if t.requires_grad]
            if op.name in PRODUCTS and any(not self.known.get(t) for t in live):
                return
            for r in op.results or op.given[:1]:
                self.known.put(r, True)

    def _derived(self, op: Op) -> None:
        create = op.kwargs.get("create_graph", op.args[4] if len(op.args) > 4 else False)
        inputs = op.args[1] if isinstance(op.args[1], (list, tuple)) else (op.args[1],)
        outputs = op.args[0] if isinstance(op.args[0], (list, tuple)) else (op.args[0],)
        if not all(isinstance(t, Tensor) for t in (*inputs, *outputs)):
            return
        if create:
            return
        self.shapes = self.shapes or {p.shape for p in self.e.parameters().values()}
        weights = self.e.optimized()
        if any(isinstance(t, nn.Parameter) or id(t) in weights for t in inputs):
            return
        if len(inputs) > 1 and all(t.shape in self.shapes for t in inputs):
            return
        if any(_learns(t) for t in outputs):
            for r in op.result:
                if isinstance(r, Tensor) and not r.requires_grad:
                    self.known.put(r, True)

    def backward(self, loss: Tensor) -> None:
        if self.known.get(loss):
            self.e.slopes.add(self.eye.turn)

    def close(self) -> None:
        self.known.by_id.clear()


def _learns(t: Tensor) -> bool:
    """Whether a weight is in its graph. The walk ends where the graph was freed, too."""
    return any(
        isinstance(getattr(node, "variable", None), nn.Parameter) for node in graphs.walk(t, NODES)
    )
