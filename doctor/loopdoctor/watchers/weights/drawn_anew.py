"""Weights that are drawn anew in each step of a training: nn.init in a forward, or in the loop.

    def forward(self, x):
        nn.init.xavier_uniform_(self.fc.weight)     belongs into __init__

The optimizer moves them, and nothing of that is left. A function that fills a tensor with random
numbers is given numbers in the place of a whole weight that an optimizer holds.

Footguns: rows of a codebook that nobody uses are drawn anew on purpose, and these are a part of it.
Noise that is added to weights is drawn into a tensor of its own.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Op, Watcher

DRAWS = {
    "uniform",
    "normal",
    "trunc_normal",
    "kaiming_uniform",
    "xavier_uniform",
    "orthogonal",
    "kaiming_normal",
}
DRAWS |= {"xavier_normal", "exponential", "cauchy"}


class DrawnAnew(Watcher):
    names = begins = DRAWS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        # of the first number of a weight -> its name and size
        self.places: dict[int, tuple[str, int]] = {}

    def saw(self, op: Op) -> None:
        t = op.given[0] if op.given else None
        if not isinstance(t, Tensor) or op.result is not t or t.dim() < 2:
            return
        if not self.places:
            held = self.e.optimized()
            self.places = {
                p.data_ptr(): (n, p.numel())
                for n, p in self.e.parameters().items()
                if id(p) in held and p.requires_grad
            }
        name, size = self.places.get(t.data_ptr(), ("", 0))
        if size == t.numel():
            self.note("N3 drawn", name)
