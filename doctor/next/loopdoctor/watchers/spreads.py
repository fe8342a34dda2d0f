"""Noise of a latent whose spread is taken from its variance, or that is not normal at all.

    z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)         the spread is the root of the variance
    z = mean + torch.exp(logvar) * torch.randn_like(mean)               the variance stands where its root belongs
    z = mean + logvar * torch.randn_like(mean)                          its logarithm does
    z = mean + torch.exp(0.5 * logvar) * torch.rand_like(mean)          numbers from 0 to 1, with a mean of one half

The divergence of a VAE tells which tensor is the logarithm of a variance: it stands there once as it is and once in an
exponential. What the noise was multiplied by is known from its product.

Normal noise, one vector for each text of the batch, with a spread that was computed: the mark of a latent that may have
been told of the whole text, which a decoder is then given on purpose (sees-the-future).

Footgun: who models the logarithm of the spread itself takes the exponential of twice that in the divergence. Then the
noise and the divergence are exponentials of different tensors, and both are right.
"""

import contextlib

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.divergences import logarithms
from loopdoctor.watchers.operators import TIMES

NORMAL, UNIFORM = {"randn", "randn_like", "normal"}, {"rand", "rand_like", "uniform"}


class Spreads(Watcher):
    names = NORMAL | UNIFORM | TIMES | {"exp", "to"}
    begins = NORMAL | UNIFORM | {"exp"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.noise, self.exponents = Known(self), Known(self)
        self.used: list[tuple] = []  # whether the noise is normal, the node whose exponential it was multiplied by
        self.logarithms: list = []  # nodes of what else normal noise was multiplied by

    def saw(self, op: Op) -> None:
        result = op.result
        if not isinstance(result, Tensor):
            return
        if op.name in NORMAL | UNIFORM:
            self.noise.put(result, op.name in NORMAL)
        elif op.name == "to" and op.given and self.noise.get(op.given[0]) is not None:
            self.noise.put(result, self.noise.get(op.given[0]))
        elif op.name == "exp" and op.given and op.given[0].grad_fn is not None:
            x = op.given[0].grad_fn
            half = type(x).__name__.startswith(("Mul", "Div")) and x.next_functions[0][0]
            self.exponents.put(result, (x, half))
        elif op.name in TIMES and len(op.given) == 2:
            kinds = [self.noise.get(t) for t in op.given]
            made = [self.exponents.get(t) for t in op.given]
            normal, by = next((k for k in kinds if k is not None), None), next((m for m in made if m), None)
            other = op.given[kinds[0] is not None]
            if normal and other.grad_fn is not None and self._one_for_each_text(op.result):
                self.note("F11 latent", tuple(op.result.shape))
            if normal is not None and by is not None:
                self.used.append((normal, *by))
            elif normal and kinds.count(None) == 1 and other.grad_fn is not None:
                self.logarithms.append(other.grad_fn)

    def _one_for_each_text(self, draw: Tensor) -> bool:
        vectors = draw.numel() // max(1, draw.shape[-1]) if draw.dim() > 1 else 0
        return any(ids.dim() == 2 and len(ids) == vectors for ids in self.e.lookups)

    def backward(self, loss: Tensor) -> None:
        used, self.used = self.used, []
        others, self.logarithms = self.logarithms, []
        if not (used or others) or self.e.packed:
            return
        with contextlib.suppress(AttributeError, RuntimeError, TypeError, IndexError):  # another version's name
            known = logarithms(loss)
            if any(node in known for node in others):
                self.e.spreads.setdefault(self.eye.turn, "logarithm")
            for normal, whole, half in used:
                if normal and whole in known:
                    self.e.spreads.setdefault(self.eye.turn, "variance")
                elif not normal and (whole in known or half in known):
                    self.e.spreads.setdefault(self.eye.turn, "uniform")

    def close(self) -> None:
        self.noise.by_id.clear()
        self.exponents.by_id.clear()
        self.used, self.logarithms = [], []
