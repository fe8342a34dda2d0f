"""A latent that is drawn for each text, with a spread that was computed: a VAE of sentences.

    z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
    one vector for each row of ids

It may have been told of the whole text on purpose, so a decoder that is given it looks as if it saw
the future; F11 leaves it alone.

Footgun: noise for each token is no latent of a text, so the number of vectors must be that of the
rows.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import TIMES

NORMAL = {"randn", "randn_like", "normal"}


class Spreads(Watcher):
    """Known is normal noise."""

    names = NORMAL | TIMES | {"to"}
    begins = NORMAL

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.noise = Known(self)

    def saw(self, op: Op) -> None:
        if not isinstance(op.result, Tensor):
            return
        if op.name in NORMAL:
            self.noise.put(op.result, True)
        elif op.name == "to":
            self.noise.put(op.result, True)
        elif len(op.given) == 2:
            other = op.given[0] if self.noise.get(op.given[1]) else op.given[1]
            if other.grad_fn is not None and self._one_for_each_text(op.result):
                self.note("F11 latent", tuple(op.result.shape))

    def _one_for_each_text(self, draw: Tensor) -> bool:
        """Tell whether there is one vector for each row of ids that a table was asked for."""
        vectors = draw.numel() // max(1, draw.shape[-1]) if draw.dim() > 1 else 0
        return any(ids.dim() == 2 and len(ids) == vectors for ids in self.e.lookups)

    def close(self) -> None:
        self.noise.by_id.clear()
