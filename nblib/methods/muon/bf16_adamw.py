"""Writing an update into a bf16 weight without losing it: stochastic rounding, and Kahan's
compensation.

bf16 has 8 significant bits, so between 1 and 2 it has 128 numbers and nothing in between. A weight
is rounded to the nearest of them after every step. An update below half the distance to the next
number is lost, every time: after a thousand such steps the weight is where it was. Two remedies
need no fp32 copy of the weights:

    stochastic   round up with the probability that makes the result right on average
    kahan        carry what was rounded away in a second bf16 number, and add it to the next update

torch.optim 2.13 has neither, so they stand here, around an ordinary AdamW update with fp32 moments.

Footgun: stochastic rounding draws from the generator. A run that resumes without its generator
state differs from the uninterrupted run at once.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def survives(value: float, update: float, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return does a weight of this value still feel an update of this size after rounding?"""
    weight = torch.tensor(value, dtype=dtype)
    return bool((weight.double() + update).to(dtype) != weight)


def stochastically(exact: Tensor) -> Tensor:
    """fp32 to bf16, up or down with the probability that makes the mean exact.

    bf16 is the upper half of fp32's bits, so noise in the lower half followed by truncation does
    it.
    """
    noise = torch.randint_like(exact, 1 << 16, dtype=torch.int32)
    return (exact.view(torch.int32) + noise).bitwise_and(-65536).view(torch.float32).bfloat16()


class BF16AdamW(Optimizer):
    """AdamW on bf16 weights, fp32 moments, with a choice of how the result is written: nearest,
    stochastic, kahan.
    """

    WAYS = ("nearest", "stochastic", "kahan")

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        way: str,
        betas=(0.9, 0.999),
        eps: float = 1e-8,
    ):
        if way not in self.WAYS:
            raise ValueError(f"way = {way!r}: allowed are {', '.join(self.WAYS)}")
        super().__init__(params, dict(lr=lr, way=way, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._write(p, self._update(p, group), group["way"])

    def _update(self, p: Tensor, group: dict) -> Tensor:
        s, (b1, b2) = self.state[p], group["betas"]
        if not s:
            s.update(
                step=0,
                m=torch.zeros_like(p, dtype=torch.float32),
                v=torch.zeros_like(p, dtype=torch.float32),
            )
        s["step"] += 1
        grad = p.grad.float()
        s["m"].lerp_(grad, 1 - b1)
        s["v"].lerp_(grad.square(), 1 - b2)
        size = (s["v"] / (1 - b2 ** s["step"])).sqrt_().add_(group["eps"])
        return -group["lr"] / (1 - b1 ** s["step"]) * s["m"] / size

    def _write(self, p: Tensor, update: Tensor, way: str) -> None:
        if way == "nearest":
            p.copy_(p.float() + update)
        elif way == "stochastic":
            p.copy_(stochastically(p.float() + update))
        else:
            carried = self.state[p].setdefault("carried", torch.zeros_like(p))
            wanted = p.float() + update + carried.float()
            p.copy_(wanted)
            carried.copy_(wanted - p.float())
