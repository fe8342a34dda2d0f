"""A recurrent decoder that is given, at each place, what it is asked for there.

    out, _ = decoder(y, h)
    y[t] goes in, and y[t] is asked for: it learns to copy
    out, _ = decoder(torch.cat([start, y[:, :-1]], 1), h)

Without a narrow place between them, what goes in at a place can be copied to it. What a recurrent
layer made of a series, place by place, is followed through layers that work on each place by itself
to a loss against the same numbers.

Footgun: an autoencoder asks for its input as well, but through its last state, or place by place
through fewer numbers than it has columns (factors of many neurons); and one that is asked to take
noise away has other numbers as its target.
"""

import torch

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import PLAIN
from loopdoctor.watchers.operators import MINUS

RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
KEEPS = {
    "linear",
    "relu",
    "tanh",
    "gelu",
    "dropout",
    "layer_norm",
    "silu",
    "sigmoid",
    "squeeze",
    "transpose",
    "view",
}
LEAST = 4  # places


class EchoedSeries(Watcher):
    """Known is the series that a recurrent layer was given."""

    begins = RECURRENT

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not op.given or not op.results:
            return
        x, r = op.given[0], op.results[0]
        if op.name in RECURRENT:
            if (
                not x.requires_grad
                and x.dim() == 3
                and x.is_floating_point()
                and min(x.shape[:2]) >= LEAST
            ):
                if r.shape[-1] >= x.shape[-1]:  # else that is a narrow place
                    self.known.put(r, x)
            return
        source = self.known.get(x)
        if source is None and len(op.given) == 2:
            x, source = op.given[1], self.known.get(op.given[1])
        if source is None:
            return
        if op.name in PLAIN or op.name in MINUS and len(op.given) == 2:
            target = op.given[0] if x is op.given[1] else op.given[1]
            same = target.numel() == source.numel() == x.numel() and not target.requires_grad
            if (
                same
                and bool(source.std() > 0)
                and torch.equal(target.reshape(-1), source.reshape(-1).to(target.dtype))
            ):
                self.note("F33 series", tuple(source.shape))
        elif op.name in KEEPS and len([t for t in op.given if t.dim() > 2]) == 1:
            if op.name != "linear" or r.shape[-1] >= source.shape[-1]:
                self.known.put(r, source)

    def close(self) -> None:
        self.known.by_id.clear()
