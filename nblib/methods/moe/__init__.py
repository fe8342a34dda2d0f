"""Mixtures of experts: losses of the router, balance without a loss, and their relatives. README.md
has formula and use.

router_losses   balance and z loss of any router of transformers, counted over all processes
selection_bias  balance by a bias that only chooses
router_health   what a router does with tokens: dead, starved, drowned experts
qk_clip         attention logits kept in bounds (MuonClip)
depths          mixture of depths: tokens skip a layer
multi_token     heads that predict several tokens ahead
jamba           Mamba and attention in one stack, with what transformers' Jamba needs to train
"""

from nblib.methods.moe import depths, multi_token, qk_clip, router_health, selection_bias
from nblib.methods.moe.router_losses import (
    Routed,
    auxiliary,
    balance,
    is_router,
    load,
    loss,
    routers,
    routing,
    sizes,
    z,
)

__all__ = [
    "Routed",
    "auxiliary",
    "balance",
    "depths",
    "is_router",
    "load",
    "loss",
    "multi_token",
    "qk_clip",
    "router_health",
    "routers",
    "routing",
    "selection_bias",
    "sizes",
    "z",
]
