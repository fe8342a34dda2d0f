"""The nearest of one side, twice: both terms of a Chamfer distance with the minimum over one and the same dim.

    d = torch.cdist(a, b)                                           # (B, N, M)
    loss = d.min(dim=2).values.mean() + d.min(dim=1).values.mean()  each of a has a near b, and each of b a near a
    loss = d.min(dim=2).values.mean() + d.min(dim=-1).values.mean() the first, twice

Footgun: a nearest and a second nearest are taken by topk or sort; the minimum of one tensor over one dim is one number,
so there is no reason to take it twice. Only what learns, from both, is looked at.
"""

from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher

NEAREST = {"min", "amin"}


class OneSide(Watcher):
    names = begins = NEAREST

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.taken: dict[int, tuple[Tensor, list[int]]] = {}  # distances, and the dims of their minima

    def saw(self, op: Op) -> None:
        x = op.given[0] if len(op.given) == 1 else None
        dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
        if x is None or not isinstance(dim, int) or x.dim() < 2 or not x.requires_grad or len(self.taken) > 16:
            return
        self.taken.setdefault(id(x), (x, []))[1].append(dim % x.dim())

    def backward(self, loss: Tensor) -> None:
        taken, self.taken = self.taken, {}
        for x, dims in taken.values():
            if len(dims) == 2 and dims[0] == dims[1] and min(x.shape[-2:]) > 1:
                self.note("F92", (tuple(x.shape), dims[0]))

    def close(self) -> None:
        self.taken = {}
