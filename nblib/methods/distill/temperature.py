"""The temperature of distillation: a number, or a parameter with a force that holds it.

T^2 KL(softmax(t / T) || softmax(s / T)) is 0 as T goes to 0, tends to half the variance of t - s as
T grows, and often has a hump between. A T that minimises it falls on one side of the hump and rises
on the other, without end. So a learned T needs a force against it:

    Learned       a prior on log T, by default 5 (log T - log anchor)^2 per token, without any bound
    Adversarial   T = low + (high - low) sigmoid(raw), with the gradient reversed: T seeks the hump
                  (CTKD, arXiv:2211.16231). The reversal's strength is 0 at first, so that T stands
                  still, then rises to 1

Attach it to the student (`student.temperature = Learned(2.0)`, after the student's own optimizer
was made), so that it is saved, clipped and stepped with the rest. `optimizer()` gives it an
optimizer of its own, without weight decay. Decay pulls the *raw* parameter to 0, which moves T by
itself, and a log of T then looks like learning.

Footguns: `clamp` has no gradient beyond its bounds. A T that reached one is stuck, and so is a
regulariser that reads the clamped value. Bound T by a sigmoid, or regularise the raw parameter. And
Adam divides by the size of a gradient, so the strength of the reversal mostly sets when T starts to
move, not how fast.
"""

import math

import torch
from torch import Tensor, nn


class Learned(nn.Module):
    """T = exp(raw), learned together with the student, held near `anchor` by a prior in log
    space.
    """

    def __init__(self, start: float = 2.0, *, anchor: float | None = None, strength: float = 5.0):
        super().__init__()
        self.anchor, self.strength = start if anchor is None else anchor, strength
        for name, value in (("start", start), ("anchor", self.anchor)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} = {value}: must be above 0")
        if not 0 <= strength < math.inf:
            raise ValueError(f"strength = {strength}: must be from 0 (nothing holds T) up")
        self.raw = nn.Parameter(torch.tensor(math.log(start)))

    def forward(self) -> Tensor:
        return self.raw.exp()

    def penalty(self) -> Tensor:
        """Per token, on the raw parameter: it pulls from wherever T is."""
        return self.strength * (self.raw - math.log(self.anchor)).square()

    def optimizer(self, lr: float = 1e-2) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=lr, weight_decay=0.0)


class Adversarial(nn.Module):
    """T between `low` and `high`, learned to make the loss large; `strength()` is the reversal's,
    by the schedule.

    total       micro-batches of the run, so steps * accumulate
    rest        share of the run in which the strength is 0; it then rises as half a cosine to 1 at
                the end
    """

    def __init__(
        self,
        start: float = 2.0,
        *,
        total: int,
        low: float = 1.0,
        high: float = 5.0,
        rest: float = 0.2,
    ):
        super().__init__()
        if not 0 < low < start < high < math.inf:
            raise ValueError(
                f"low = {low}, start = {start}, high = {high}: must rise, from above 0"
            )
        if total < 1 or not 0 <= rest < 1:
            raise ValueError(
                f"total = {total}, rest = {rest}: total must be at least 1, rest from 0 to below 1"
            )
        self.low, self.high, self.total, self.rest = low, high, total, rest
        share = (start - low) / (high - low)
        self.raw = nn.Parameter(torch.tensor(math.log(share / (1 - share))))
        # resumes with the model
        self.register_buffer("micro_batches", torch.zeros((), dtype=torch.long))

    def strength(self) -> float:
        done = int(self.micro_batches) / self.total
        return 0.5 * (
            1 - math.cos(math.pi * min(1.0, max(0.0, done - self.rest) / (1 - self.rest)))
        )

    def forward(self) -> Tensor:
        raw = Reversed.apply(self.raw, self.strength())
        if self.training and torch.is_grad_enabled():
            self.micro_batches += 1
        return self.low + (self.high - self.low) * raw.sigmoid()

    optimizer = Learned.optimizer


class Reversed(torch.autograd.Function):
    """x forward, -strength times the gradient backward (Ganin and Lempitsky, arXiv:1409.7495)."""

    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None
