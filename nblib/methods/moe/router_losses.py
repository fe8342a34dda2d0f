"""Mixtures of experts: the two losses that keep a router healthy, and what each router chose.

    balance   E sum_e f_e P_e     f_e the share of the k N assignments that go to expert e, P_e its
              mean probability
    z         mean (log sum_e exp logit_e)^2                          (Fedus et al., 2021; Zoph et
              al., 2022)

f counts and has no gradient; P has one, and is pushed down where f is large. Balance is 1 where
either is uniform, E when one expert takes all with certainty, and E / k when always the same k do
(with probability 1 / k each). It is taken per layer, then averaged over layers. transformers'
`load_balancing_loss_func` differs twice. Its f sums to k, so its uniform is k. And it averages f
and P over all layers before it multiplies, so layers that collapse onto different experts cancel.

Both are terms of their own beside the language loss, so `train.evaluate` and perplexity do not
contain them. A term is summed over tokens, so each is weight x value x the tokens of this
micro-batch. Dividing by the tokens of the step then weighs micro-batches by their tokens. Their
number multiplies nothing.

Router logits are collected by hooks during one forward pass, so activation checkpointing, which
runs the routers again in backward, does not count twice.

Footgun: a collapsed router costs little language loss on a small model. Look at the load, not at
the loss.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nblib import losses, parallel
from nblib.train import Batch, Terms


def is_router(module: nn.Module) -> bool:
    """Return transformers' routers, and ours: a weight of their own, `top_k` of `num_experts`,
    (logits, weights, indices).
    """
    return hasattr(module, "top_k") and hasattr(module, "num_experts") and bool(module._parameters)


def routers(model: nn.Module) -> dict[str, nn.Module]:
    named = {name: m for name, m in model.named_modules() if is_router(m)}
    if not named:
        raise ValueError(f"{type(model).__name__} has no router: it is not a mixture of experts")
    return named


class Routed(NamedTuple):
    """What one router did in one forward pass."""

    layer: str
    logits: Tensor  # (N, E)
    chosen: Tensor  # (N, k)


@contextmanager
def routing(model: nn.Module) -> Iterator[list[Routed]]:
    """Collect what the routers do in the forward passes inside, in the order in which they run."""
    named, seen = routers(model), []
    fresh = [m for m in named.values() if "reports_to" not in m.__dict__]
    for m in fresh:
        m.register_forward_hook(_report)
    if fresh and any(m._compiled_call_impl is not None for m in model.modules()):
        # code compiled before a hook was there does not call it, and nothing notices
        torch._dynamo.reset()
    for name, m in named.items():
        m.reports_to = (name, seen)
    try:
        yield seen
    finally:
        for m in named.values():
            m.reports_to = None


# traced, the list it writes to would be the first one for ever; so a graph ends at a router
@torch.compiler.disable
def _report(router: nn.Module, args, output) -> None:
    if router.reports_to is not None:
        name, seen = router.reports_to
        if len(output) != 3:
            raise ValueError(
                f"{name}: {type(router).__name__} does not give (logits, weights, indices) of "
                "its choice"
            )
        seen.append(Routed(name, output[0], output[2]))


def sizes(model: nn.Module) -> dict[str, int]:
    """Parameters: all, those that work on one token (of the experts only k), and those of the
    experts.
    """
    stacks = [
        p
        for m in model.modules()
        for p in m._parameters.values()
        if p is not None and p.ndim == 3 and getattr(m, "num_experts", None) == len(p)
    ]
    k = next(iter(routers(model).values())).top_k
    total, experts = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in stacks)
    active = total - experts + sum(k * p[0].numel() for p in stacks)
    return {"parameters": total, "active": active, "of the experts": experts}


def balance(logits: Tensor, chosen: Tensor) -> Tensor:
    """E sum f P of one router: logits (N, E), chosen (N, k)."""
    E = logits.shape[1]
    # of all processes: a product of their own averages would be another
    share = parallel.averaged(load(chosen, E))
    return E * (share * logits.float().softmax(dim=1).mean(dim=0)).sum()


def z(logits: Tensor) -> Tensor:
    return logits.float().logsumexp(dim=1).square().mean()


def load(chosen: Tensor, experts: int) -> Tensor:
    """Share of the assignments per expert, (E,), summing to 1."""
    flat = chosen.flatten()
    counts = torch.zeros(experts, device=flat.device)  # not bincount, which waits for the device
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype)) / flat.numel()


def loss(
    *,
    balance_weight: float = 0.01,
    z_weight: float = 0.001,
    language: Callable[[nn.Module, Batch], Terms] = losses.causal_lm,
) -> Callable[[nn.Module, Batch], Terms]:
    """Return a loss for the loop: the terms of `language`, and 'balance' and 'z' where their weight
    is not zero.
    """
    weights = dict(balance_weight=balance_weight, z_weight=z_weight)
    for name, value in weights.items():
        if value < 0:
            raise ValueError(f"{name} = {value}: must be at least 0")

    def terms(model: nn.Module, batch: Batch) -> Terms:
        batch = Batch.of(batch)  # a mask that leaves nothing out is None
        with routing(model) as seen:
            values = language(model, batch)
        # Both terms are means over rows, also over those of other processes: so each process weighs
        # the same.
        tokens, mask = (
            parallel.averaged(losses.supervised(batch["labels"])),
            batch.get("attention_mask"),
        )
        return values | auxiliary(seen, tokens=tokens, mask=mask, **weights)

    return terms


def auxiliary(
    seen: list[Routed],
    *,
    tokens: int | Tensor,
    balance_weight: float,
    z_weight: float,
    mask: Tensor | None = None,
) -> Terms:
    """Return the weighted terms, as sums over `tokens`.

    Padded positions, where `mask` is 0, do not count.
    """
    if not seen:
        raise ValueError(
            "no router has reported: the language loss did not run the model that routing() "
            "was given"
        )
    seen, terms = [_unpadded(r, mask) for r in seen], {}
    if balance_weight:
        mean = torch.stack([balance(r.logits, r.chosen) for r in seen]).mean()
        terms["balance"] = balance_weight * mean * tokens
    if z_weight:
        terms["z"] = z_weight * torch.stack([z(r.logits) for r in seen]).mean() * tokens
    return terms


def _unpadded(routed: Routed, mask: Tensor | None) -> Routed:
    if mask is None:
        return routed
    if mask.numel() != len(routed.logits):
        raise ValueError(
            f"attention_mask has {mask.numel()} positions, {routed.layer} saw "
            f"{len(routed.logits)}: "
            "with layers that skip tokens, leave padding out of the batch"
        )
    keep = mask.flatten().bool()
    return routed._replace(logits=routed.logits[keep], chosen=routed.chosen[keep])
