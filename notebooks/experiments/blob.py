"""BLoB: a LoRA whose first factor is a distribution over weights, learned by gradients
(arXiv:2406.11675).

    y = W x + s B A x,
    A ~ q(A) = N(M, G^4) elementwise: the standard deviation is G^2;
    p(A) = N(0, sigma_p^2)
    loss = CE + weight / questions * KL(q || p)
    weight = 1 is the evidence bound of a data set of this size

One draw of A for a whole batch would give all its tokens the same noise. Flipout (arXiv:1803.04386)
shares one draw of |noise| and gives every token signs of its own, which makes the noise of the
tokens independent in pairs at the cost of one more thin product:  noise(x) = ((x * r) E^T) * t,  E
= G^2 * normal,  r and t random signs.

The authors step CE by AdamW and the KL by an SGD of its own. Here one AdamW steps the sum, and
`weight` sets the share.

Footgun: ARD-LoRA (nblib/methods/ard/layer.py) is noisy in its r latents, BLoB in r x in weights.
Their KL terms count other things, so a weight of one says nothing about a weight of the other.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nblib import losses, wiring
from nblib.losses import Batch, Terms


class BlobLinear(nn.Module):
    """A frozen projection with a noisy LoRA beside it."""

    def __init__(
        self, base: nn.Module, rank: int, scale: float, *, start: float = 0.05, prior: float = 0.2
    ):
        super().__init__()
        (out, width), device = wiring.shape(base), base.weight.device
        self.base, self.scale, self.prior, self.sampled = (
            base.requires_grad_(False),
            scale,
            prior,
            False,
        )
        fp32 = dict(device=device, dtype=torch.float32)
        self.lora_mean = nn.Parameter(
            torch.empty(rank, width, **fp32).uniform_(-1, 1).mul_(math.sqrt(6 / width))
        )
        # G
        self.lora_root = nn.Parameter(
            torch.empty(rank, width, **fp32).uniform_(start / math.sqrt(2), start)
        )
        self.lora_up = nn.Parameter(torch.zeros(out, rank, **fp32))

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        with torch.autocast(x.device.type, enabled=False):
            h = x.to(self.lora_mean.dtype)
            z = F.linear(h, self.lora_mean)  # (..., r)
            if self.training or self.sampled:
                # (r, in), of the whole batch
                noise = self.lora_root.square() * torch.randn_like(self.lora_root)
                z = z + F.linear(h * _signs(h), noise) * _signs(z)
            update = F.linear(z, self.lora_up) * self.scale
        return out + update.to(out.dtype)

    def kl(self) -> Tensor:
        """Of all weights from the prior, in nats."""
        deviation = self.lora_root.square()
        square = (deviation.square() + self.lora_mean.square()) / (2 * self.prior**2)
        return (math.log(self.prior) - deviation.clamp_min(1e-6).log() + square - 0.5).sum()


def _signs(like: Tensor) -> Tensor:
    return (
        torch.randint(0, 2, like.shape, device=like.device, dtype=torch.int8).to(like.dtype) * 2 - 1
    )


def attach(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    targets: Iterable[nn.Module] | None = None,
    **options: float,
) -> nn.Module:
    """Freeze the model and put a BlobLinear beside each target (default: every linear layer but the
    head).
    """
    if rank < 1 or not alpha > 0:
        raise ValueError(f"rank = {rank}, alpha = {alpha}: both must be positive")
    chosen = list(wiring.select(model).values() if targets is None else targets)
    places = {name: m for name, m in model.named_modules() if any(m is target for target in chosen)}
    model.requires_grad_(False)
    wiring.swap(
        model, lambda _, m: BlobLinear(m, rank, alpha / rank, **options).train(m.training), places
    )
    return model


def adapters(model: nn.Module) -> list[BlobLinear]:
    return [m for m in model.modules() if isinstance(m, BlobLinear)]


def loss(
    model: nn.Module,
    *,
    questions: int,
    weight: float = 1.0,
    language: Callable[[nn.Module, Batch], Terms] = losses.causal_lm,
) -> Callable[[nn.Module, Batch], Terms]:
    """`language`, and "kl" with its share of the data set: each of `questions` pays 1 / questions
    of the whole KL.
    """
    if not adapters(model):
        raise ValueError("the model has no adapters: attach first")
    if questions < 1 or weight < 0:
        raise ValueError(f"questions = {questions}, weight = {weight}: at least 1 and 0")

    def terms(running: nn.Module, batch: Batch) -> Terms:
        share = losses.supervised(batch["labels"]) / questions
        return language(running, batch) | {
            "kl": weight * share * sum(a.kl() for a in adapters(running))
        }

    return terms


@contextmanager
def sampling(model: nn.Module) -> Iterator[None]:
    """Draw in evaluation mode too."""
    for adapter in adapters(model):
        adapter.sampled = True
    try:
        yield
    finally:
        for adapter in adapters(model):
            adapter.sampled = False
