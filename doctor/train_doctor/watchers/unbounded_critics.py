"""A Wasserstein critic that nothing keeps from growing: no clipping, no gradient penalty, no spectral norm.

    loss = critic(fake).mean() - critic(real).mean()            falls for ever, as all weights grow
    for p in critic.parameters(): p.data.clamp_(-0.01, 0.01)    or + 10 * penalty, or spectral_norm layers

Footgun: an energy that is learned by contrast has the same loss and one optimizer, and often a price elsewhere. So
there must be two optimizers, the loss of the critic must be these two means of a layer's answers and nothing else, and
whatever holds weights down anywhere in the program counts.
"""

from torch import Tensor, nn

from train_doctor.eye import Eye, Op, Watcher
from train_doctor.fed import kind
from train_doctor.watchers.divergences import terms_of_loss

LAYERS = {"Addmm", "Mm", "Convolution", "MkldnnConvolution"}
VIEWS = {"View", "Squeeze", "Unsqueeze", "UnsafeView", "ReshapeAlias"}
CUTS = {"clamp", "clip", "renorm", "clamp_min", "clamp_max"}
NAMES = ("parametrizations", "weight_orig", "weight_g")  # of what other ways to hold weights add to a layer


class UnboundedCritics(Watcher):
    names = begins = CUTS | {"grad"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.turns: dict[int, bool] = {}
        self.held = False

    def saw(self, op: Op) -> None:
        """A weight that is clipped, or a derivative that can be learned from."""
        weights = any(isinstance(t, nn.Parameter) or t.is_leaf and t.dim() > 1 for t in op.given[:1])
        derived = op.name == "grad" and isinstance(op.result, tuple)  # not p.grad
        self.held = self.held or derived or op.name in CUTS and weights

    def backward(self, loss: Tensor) -> None:
        terms = terms_of_loss(self.e, loss) if loss.grad_fn is not None else []
        if len(terms) == 2 and abs(terms[0][1] + terms[1][1]) < 1e-6 and all(kind(n) == "Mean" for n, _ in terms):
            ends = [_layer(node.next_functions[0][0]) for node, _ in terms]
            if None not in ends and ends[0] & ends[1]:
                self.turns[self.eye.turn] = True

    def close(self) -> None:
        if self.held or len(self.e.optimizers) < 2:
            return
        if any(hasattr(m, name) for _, m in self.e.modules() for name in NAMES):
            return
        for turn in self.turns:
            self.note("F114", True, turn)


def _layer(node) -> set[int] | None:
    """Ids of the weights of the layer whose answer this is."""
    while node is not None and kind(node) in VIEWS:
        node = node.next_functions[0][0]
    if node is None or kind(node) not in LAYERS:
        return None
    near = [n for n, _ in node.next_functions if n is not None]
    near += [m for n in near if kind(n) in ("T", "Transpose") for m, _ in n.next_functions]
    return {id(n.variable) for n in near if hasattr(n, "variable")}
