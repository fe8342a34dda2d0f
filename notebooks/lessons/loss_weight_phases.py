"""Where a router of two losses gives up on one of them: its weight at the end, over their ratio and
the penalty.

A `loss_weights.Router` is trained on two losses alone, without a model, once per cell. As it was
published it collapses beyond the ratio (1 + penalty) / (1 - penalty); the other ways to normalise
and to learn move or remove that line.

Footgun: a constant ratio is the easiest case. Let the losses fall differently (`falls`) before
trusting a remedy.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from lessons.single_process import alone
from nblib import runtime
from nblib.methods.distill.loss_weights import Router


def phase_diagram(
    ratios: Sequence[float],
    penalties: Sequence[float],
    *,
    steps: int = 400,
    lr: float = 3e-3,
    falls: tuple[float, float] = (0.0, 0.0),
    seed: int = 0,
    **router,
) -> Tensor:
    """Train a router per cell on two losses alone and return its w1 at the end, (ratios,
    penalties).

    The losses start at (ratio, 1) and fall by the factors exp(-falls) over the run. `router` takes
    its options. All cells start from the same weights and run side by side under vmap; Adam works
    per element, so they do not meet.
    """
    with runtime.seeded(seed):
        first = Router(("one", "two"), **router)
    cells = [(float(r), float(p)) for r in ratios for p in penalties]
    routers = [copy.deepcopy(first) for _ in cells]
    for module, (_, penalty) in zip(routers, cells):
        module.penalty.fill_(penalty)
    params, buffers = torch.func.stack_module_state(routers)
    start = torch.tensor([[ratio, 1.0] for ratio, _ in cells])  # (cells, 2)
    adam = torch.optim.Adam(params.values(), lr=lr)

    def cell(params: dict, buffers: dict, means: Tensor) -> tuple[Tensor, Tensor]:
        mixed, spread, weights = torch.func.functional_call(first, (params, buffers), (means,))
        return mixed.sum() + spread, weights[0]

    weights_of_first = []
    for step in range(steps):
        means = start * torch.exp(-torch.tensor(falls) * step / steps)
        with alone():  # the losses are numbers of ours and have no rows to share
            total, w1 = torch.vmap(cell)(params, buffers, means)
        adam.zero_grad()
        total.sum().backward()
        adam.step()
        weights_of_first.append(w1)
    # their mean, because the weight jitters at the kink
    last = weights_of_first[-max(1, steps // 20) :]
    return torch.stack(last).mean(0).view(len(ratios), len(penalties))
