"""Who sets the weights of several losses: a schedule, or a small network trained along with the
model.

A `Curriculum` is the `weights` of an `objective.Objective`, a `Router` its `router`. Both are
modules to attach to the model (`model.mixer = ...`, after the model's own optimizer was made), so
that their state is in every checkpoint. The router's parameters get an optimizer of their own and
are clipped with the rest. They step once per optimizer step, on the gradient summed over
micro-batches and processes. The write-up's router stood outside the model: never clipped, not
saved, and stepped after each of 32 micro-batches on the noise of one.

`Router` is LDC-MTL (arXiv:2502.08585) as the write-up simplified it: over the weights w, too, it
minimises

    sum(w_i l_i) + penalty (max w_i l_i - min w_i l_i),
    w = softmax(router(l)), l without gradient,

so it is paid for giving the weight to whatever is small already. For l1 > l2 the slope in w1 below
balance is (1 - penalty) l1 - (1 + penalty) l2: beyond l1 / l2 = (1 + penalty) / (1 - penalty), 1.22
at the usual 0.1, it ends at w1 = 0 (notebook 10 measures it). Dividing each loss by its first value
holds until the losses have fallen differently, by its running mean while they fall slowly.
`learns="spread"` does not collapse. There the weights see the spread alone and the model the
weighted sum alone, as the two levels of the paper do. At its balance w_i is in proportion to 1 /
l_i. So a small loss still takes most of the weight unless losses are normalised as well.

Footguns: the weights add up to 1, so switching the router on replaces (1, 0.5) by a smaller total.
It reads the losses of its micro-batch, so with it the cut into micro-batches matters a little.
Without normalising, its gradient takes most of the norm that is clipped (notebook 10). `del
model.mixer` before counting or saving the model.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nblib.methods.distill.objective import check_weights


class Curriculum(nn.Module):
    """Weights that follow the run: phases of (share of the run at which it ends, weights), in
    order.

    A phase starts at its own weights; `linear` and `cosine` move from there to those of the next,
    `step` stays. The position is a buffer that counts the micro-batches of training, and all of one
    optimizer step get the same weights. Evaluation does not advance it.
    """

    def __init__(
        self,
        phases: Sequence[tuple[float, dict[str, float]]],
        *,
        total: int,
        accumulate: int = 1,
        how: str = "step",
    ):
        super().__init__()
        ends = [end for end, _ in phases]
        if not ends or ends != sorted(set(ends)) or ends[0] <= 0 or ends[-1] != 1:
            raise ValueError(f"phases end at {ends}: must rise from above 0 to exactly 1")
        if how not in ("step", "linear", "cosine"):
            raise ValueError(f"how = {how!r}: allowed are step, linear, cosine")
        if total < 1 or accumulate < 1:
            raise ValueError(f"total = {total}, accumulate = {accumulate}: must be at least 1")
        self.phases = [(end, check_weights(weights)) for end, weights in phases]
        self.total, self.accumulate, self.how = total, accumulate, how
        self.register_buffer("micro_batches", torch.zeros((), dtype=torch.long))

    def all(self) -> list[dict[str, float]]:
        return [weights for _, weights in self.phases]

    def at(self, share: float) -> dict[str, float]:
        """Return the weights at a share of the run."""
        k = next((k for k, (end, _) in enumerate(self.phases) if share < end), len(self.phases) - 1)
        start, (end, weights) = self.phases[k - 1][0] if k else 0.0, self.phases[k]
        following = self.phases[min(k + 1, len(self.phases) - 1)][1]
        part = min(1.0, (share - start) / (end - start))
        blend = {"step": 0.0, "linear": part, "cosine": 0.5 * (1 - math.cos(math.pi * part))}[
            self.how
        ]
        return {
            n: (1 - blend) * weights.get(n, 0.0) + blend * following.get(n, 0.0)
            for n in weights | following
        }

    def forward(self) -> dict[str, float]:
        weights = self.at(int(self.micro_batches) // self.accumulate / self.total)
        if self.training:
            self.micro_batches += 1
        return weights


class Router(nn.Module):
    """K losses in, K weights of sum 1 out: LDC-MTL's K -> 32 -> K, trained along with the model.

    penalty    on the largest minus the smallest weighted loss
    normalise  none (the write-up), initial (each loss over its first value), running (over its own
               running mean)
    learns     total: the weights minimise weighted sum + spread, and so does the model (the
               write-up) spread: the weights minimise the spread alone, the model the weighted sum
               alone
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        penalty: float = 0.1,
        normalise: str = "running",
        learns: str = "spread",
        decay: float = 0.98,
    ):
        super().__init__()
        if normalise not in ("none", "initial", "running"):
            raise ValueError(f"normalise = {normalise!r}: allowed are none, initial, running")
        if learns not in ("total", "spread"):
            raise ValueError(f"learns = {learns!r}: allowed are total, spread")
        if penalty < 0 or (learns == "spread" and not penalty):
            raise ValueError(f"penalty = {penalty}: must be above 0, or the router learns nothing")
        if not 0 <= decay < 1:
            raise ValueError(f"decay = {decay}: must be from 0 to below 1")
        self.names, self.normalise, self.learns, self.decay = tuple(names), normalise, learns, decay
        self.net = nn.Sequential(nn.Linear(len(names), 32), nn.ReLU(), nn.Linear(32, len(names)))
        self.register_buffer("scale", torch.zeros(len(names)))  # 0: this loss has not been seen
        self.register_buffer("penalty", torch.tensor(float(penalty)), persistent=False)

    def mix(self, sums: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
        """Return summed losses by name to their weighted sums, and the penalty as one more term,
        `spread`.
        """
        zero, tokens = torch.zeros_like(next(iter(sums.values()))), tokens.clamp(min=1)
        mixed, spread, _ = self(torch.stack([sums.get(n, zero) for n in self.names]) / tokens)
        return {n: m * tokens for n, m in zip(self.names, mixed) if n in sums} | {
            "spread": spread * tokens
        }

    def forward(self, means: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean losses (K,), 0 where an objective is off, to the weighted losses (K,), penalty *
        spread, weights (K,).

        An absent loss is left out of the softmax: at value 0 it would be the easiest of all and
        take the weight.
        """
        with torch.autocast(means.device.type, enabled=False):
            # the same weights and buffers in each
            seen = _over_processes(means.detach().to(self.scale.dtype))
            present = seen > 0
            present = present | ~present.any()
            scale = self._scale(seen, present)
            logits = self.net(seen / scale)
            weights = logits.masked_fill(~present, -math.inf).softmax(-1)
            scaled = means / scale
            only_spread = self.learns == "spread"
            weighted = weights * (scaled.detach() if only_spread else scaled)
            # by what every process sees, or the gradients would not add up
            rank = weights.detach() * seen / scale
            top, low = (
                rank.masked_fill(~present, -1).argmax(-1),
                rank.masked_fill(~present, math.inf).argmin(-1),
            )
            spread = (
                self.penalty
                * (weighted.gather(-1, top[..., None]) - weighted.gather(-1, low[..., None])).sum()
            )
            return (
                (weights.detach() * scaled if only_spread else weighted),
                spread,
                weights.detach(),
            )

    def _scale(self, seen: Tensor, present: Tensor) -> Tensor:
        if self.normalise == "none":
            return torch.ones_like(seen)
        if self.training:
            moved = (
                self.decay * self.scale + (1 - self.decay) * seen
                if self.normalise == "running"
                else self.scale
            )
            new = torch.where(present, torch.where(self.scale == 0, seen, moved), self.scale)
            self.scale.copy_(new)
        return torch.where(self.scale > 0, self.scale, 1.0)


def _over_processes(means: Tensor) -> Tensor:
    if torch.distributed.is_initialized():
        means = means.clone() / torch.distributed.get_world_size()
        torch.distributed.all_reduce(means)
    return means
