"""Routings that are known: so many tokens sent to given experts with certainty, or routed by given
logits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nblib.methods import moe

E, K = 8, 2  # experts, and those that each token takes


def routed(logits: Tensor, k: int = K) -> moe.Routed:
    return moe.Routed("a", logits, logits.topk(k, dim=1).indices)


def towards(experts: Sequence[int], tokens: int = 400, strength: float = 60.0) -> Tensor:
    """Logits that send every token to these experts."""
    logits = torch.zeros(tokens, E)
    logits[:, experts] = strength
    return logits
