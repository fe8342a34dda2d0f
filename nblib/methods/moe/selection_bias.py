"""Mixtures balanced without a loss: a bias per expert, which decides who is chosen and weighs
nothing.

    chosen = the k largest of s_e + b_e,
    weights from s_e alone
    s: the scores of the router
    b_e <- b_e + rate x sign(mean load - load_e)
    after each optimizer step
    (Wang et al., 2024; DeepSeek-V3)

No gradient of a balance loss disturbs the language loss. Routers of DeepSeek-V3 and GLM-4 have this
bias as a buffer and choose by it; theirs is updated here. Softmax routers get one of the same name.
It is saved with the weights, and a new model must have one before it loads them.

Footgun: the rate is in units of a score, and made for sigmoid, where one expert's score does not
lower another's. Where softmax has collapsed onto k experts, the bias must first grow to 1 / k, and
then it moves all tokens at once.
"""

from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nblib import parallel
from nblib.methods.moe import router_losses

BIAS = "e_score_correction_bias"  # its name in transformers


def attach(model: nn.Module, optimizer: Optimizer, *, rate: float = 1e-3) -> list[nn.Module]:
    """Balance every router from now on, once per step of this optimizer; returns the routers."""
    if not 0 < rate < 1:
        raise ValueError(f"rate = {rate}: must be above 0 and below 1")
    routers = router_losses.routers(model)
    for name, router in routers.items():
        if hasattr(router, "load"):
            raise ValueError(f"{name} has a selection bias already: attach once")
        zeros = torch.zeros(router.num_experts, device=router.weight.device)
        if not hasattr(router, BIAS):
            router.divides = _divides(name, router)
            router.register_buffer(BIAS, zeros.clone())
        router.register_buffer("load", zeros, persistent=False)
        router.register_forward_hook(_count, prepend=True)
        if hasattr(router, "divides"):
            # the first, so that all others see its choice
            router.register_forward_hook(_choose, prepend=True)
    optimizer.register_step_post_hook(
        lambda *_: [update(router, rate) for router in routers.values()]
    )
    return list(routers.values())


@torch.no_grad()
def update(router: nn.Module, rate: float) -> None:
    load = parallel.added(router.load)
    getattr(router, BIAS).add_((load.mean() - load).sign(), alpha=rate)
    load.zero_()


def _scores(logits: Tensor, chosen: Tensor, divide: bool) -> Tensor:
    s = logits.float().softmax(dim=-1).gather(1, chosen)  # (N, k)
    return s / s.sum(dim=1, keepdim=True) if divide else s


def _choose(
    router: nn.Module, _, output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    logits, weights, chosen = output  # (N, E), (N, k), (N, k)
    chosen = (
        (logits.float().softmax(dim=-1) + getattr(router, BIAS))
        .topk(chosen.shape[1], dim=-1)
        .indices
    )
    return logits, _scores(logits, chosen, router.divides).to(weights.dtype), chosen


@torch.no_grad()
def _count(router: nn.Module, _, output: tuple[Tensor, Tensor, Tensor]) -> None:
    if router.training:  # checkpointing counts twice, and a common factor changes no sign
        chosen = output[2].flatten()
        router.load.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=router.load.dtype))


@torch.no_grad()
def _divides(name: str, router: nn.Module) -> bool:
    """Whether this softmax router divides its k weights by their sum; a sentence where it does
    something else.
    """
    x = torch.randn(16, router.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(
        router.weight
    )
    with suppress(TypeError):  # some are given more than x
        logits, weights, chosen = router(x)
        for divide in (True, False):
            expected = _scores(logits, chosen, divide)
            if expected.shape == weights.shape and torch.allclose(
                expected, weights.float(), rtol=0.02, atol=0
            ):
                return divide
    raise ValueError(
        f"{name} is a {type(router).__name__}: its weights are not its softmax over the chosen "
        "experts"
    )
