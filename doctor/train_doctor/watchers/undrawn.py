"""A variational autoencoder that draws nothing, or the same for all rows of a batch.

    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    answer = decoder(mu)                                    logvar has a price, and no use
    z = mu + torch.randn(latent) * (0.5 * logvar).exp()     one draw for the whole batch
    z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()

The logarithm of the variance is found in the divergence (divergences.py), and it is asked whether anything else in the
loss hangs on it. A draw of one row that multiplies a spread of many rows is one for all of them.

Footgun: a divergence may be measured and left out of the loss. Then it is no term.
"""

from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import kind
from train_doctor.watchers.divergences import in_each_row, log_variances, terms_of_loss
from train_doctor.watchers.operators import TIMES

DRAWS = {"randn", "normal"}
SPREADS = {"Exp", "Sqrt", "Softplus"}
NODES, ROWS = 3000, 4


class Undrawn(Watcher):
    """What is known of a tensor: it is a draw of one row."""

    names = DRAWS | TIMES
    begins = DRAWS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name in DRAWS:
            for r in op.results:
                if r.dim() == 1 and r.numel() > 1 or r.dim() > 1 and len(r) == 1:
                    self.known.put(r, True)
        elif len(op.given) == 2 and op.results:
            spread = op.given[1] if self.known.get(op.given[0]) else op.given[0]
            rows = spread.dim() > 1 and len(spread) >= ROWS and spread.shape == op.results[0].shape
            if rows and kind(spread.grad_fn) in SPREADS and not bool((spread == spread[:1]).all()):
                self.note("F119", (len(spread),))

    def backward(self, loss: Tensor) -> None:
        terms = terms_of_loss(self.e, loss)
        for number, (node, factor) in enumerate(terms):
            term, *_ = in_each_row(node, factor)
            for logarithm in log_variances(term) if term is not None else ():
                others = [other for n, (other, _) in enumerate(terms) if n != number]
                if others and not any(logarithm in _edges(other) for other in others):
                    self.note("F119", ())

    def close(self) -> None:
        self.known.by_id.clear()


def _edges(node) -> set[tuple]:
    return {edge for n in graphs.below(node, NODES) for edge in n.next_functions}
