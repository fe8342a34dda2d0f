"""How much noise a diffusion model ever sees: shares of noise that never come near 1.

    a = alphas[t]                                   alphas_cumprod[t] was meant
    x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise

With the product of all steps so far the last x_t is nearly all noise, and there a sampler begins. With the factor of
one step alone, x_t is nearly all data for every t. The shares of data and noise that are put together, one for each
row, are collected over three steps, where their squares add up to 1.

Footgun: a denoiser may be meant for weak noise only; it has one share for all, or adds noise to data left as they are.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import PLUS, TIMES

DRAWS = {"randn", "randn_like", "normal"}
DRAWN, NOISE, DATA = "drawn", "noise", "data"
LEAST = 4  # rows


class NoiseLevels(Watcher):
    """What is known of a tensor: that it was drawn, or what it is and its share in each row."""

    begins = DRAWS | TIMES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        r = op.result if isinstance(op.result, Tensor) else None
        if r is None or r.requires_grad or r.dim() < 2:
            return
        if op.name in DRAWS:
            self.known.put(r, (DRAWN, None))
        elif op.name in TIMES and len(op.given) == 2:
            self._times(r, *op.given)
        elif op.name in PLUS and len(op.given) == 2:
            facts = dict(f for f in map(self.known.get, op.given) if f)
            if facts.get(NOISE) is not None and facts.get(DATA) is not None:
                noise, data = facts[NOISE], facts[DATA]
                if noise.shape == data.shape and torch.allclose(noise**2 + data**2, torch.ones_like(noise), atol=1e-3):
                    rows, most = self.e.habits["F84"].get(self.eye.turn, (0, 0.0))
                    most = max(most, float(noise.abs().max()))  # a condition may have less than what is denoised
                    self.e.habits["F84"][self.eye.turn] = (rows or noise.numel(), most)

    def _times(self, r: Tensor, one: Tensor, two: Tensor) -> None:
        share, of = (one, two) if one.numel() < two.numel() else (two, one)
        rows = len(of) if of.dim() > 1 else 0
        if rows < LEAST or share.numel() != rows or share.dim() != of.dim() or len(share) != rows:
            return
        fact = self.known.get(of)
        self.known.put(r, (NOISE if fact and fact[0] == DRAWN else DATA, share.detach().flatten()))

    def close(self) -> None:
        self.known.by_id.clear()
