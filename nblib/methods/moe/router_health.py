"""The health of routers: how they spread the tokens of some rows over their experts, as a table
with a row per layer.

    diagnose(model, rows)    a `Health` per router
    observe(model, rows)     what every router does: its logits and its choices, on the CPU
    health(routed)           the judgement on one of them

Shares are in units of the fair share 1 / E, so that models with few and with many experts compare.

Footgun: an expert has a fair share of k N / E of N tokens. Where that is a few tokens, some experts
get none by chance.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nblib import wiring
from nblib.methods.moe import router_losses

STARVED = 0.1  # of the fair share


class Health(NamedTuple):
    """How one router spreads its tokens. Shares are in units of the fair share 1 / E."""

    layer: str
    smallest: float
    largest: float
    entropy: float  # of the load, over that of a uniform one
    gini: float  # 0 when all experts take the same, towards 1 when one takes all
    effective: float  # experts, exp of the entropy
    dead: int  # experts without a token
    starved: int  # experts under a tenth of the fair share, the dead included
    balance: float
    z: float
    collapsed: bool


@torch.no_grad()
def health(routed: router_losses.Routed) -> Health:
    """Judge one router.

    Collapsed: nearer to 'always the same k' than to uniform, on the scale of the entropy.
    """
    (_, E), k = routed.logits.shape, routed.chosen.shape[1]
    share = router_losses.load(routed.chosen, E)
    entropy = float(-torch.xlogy(share, share).sum())
    least, most = math.log(k), math.log(E)
    return Health(
        layer=routed.layer,
        smallest=float(share.min()) * E,
        largest=float(share.max()) * E,
        entropy=entropy / most if E > 1 else 1.0,
        gini=gini(share),
        effective=math.exp(entropy),
        dead=int((share == 0).sum()),
        starved=int((share < STARVED / E).sum()),
        balance=float(router_losses.balance(routed.logits, routed.chosen)),
        z=float(router_losses.z(routed.logits)),
        collapsed=k < E and entropy < (least + most) / 2,
    )


def gini(share: Tensor) -> float:
    """Mean absolute difference between two experts over twice the mean."""
    return float((share[:, None] - share[None]).abs().mean() / (2 * share.mean()))


@torch.no_grad()
def observe(model: nn.Module, rows: Tensor, *, batch: int = 16) -> list[router_losses.Routed]:
    """Return what every router does on rows (R, T) in evaluation mode, the batches put together, on
    the CPU.
    """
    device, parts = next(model.parameters()).device, {}
    with wiring.evaluating(model):
        for few in rows.split(batch):
            with router_losses.routing(model) as seen:
                model.base_model(input_ids=few.to(device), use_cache=False)
            for r in seen:
                parts.setdefault(r.layer, []).append((r.logits.cpu(), r.chosen.cpu()))
    return [
        router_losses.Routed(name, *(torch.cat(column) for column in zip(*pairs)))
        for name, pairs in parts.items()
    ]


def diagnose(model: nn.Module, rows: Tensor, *, batch: int = 16) -> list[Health]:
    """Return the health of every router on rows (R, T)."""
    return [health(r) for r in observe(model, rows, batch=batch)]
