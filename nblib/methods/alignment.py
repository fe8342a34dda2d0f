"""Make the student's hidden states resemble the teacher's.

    hidden_distillation   distance of every student layer to the teacher's, where both have the same shape
    Hidden                distance of a student layer, taken to the teacher's width by a linear map, to a teacher layer

The map is trained with the student and thrown away afterwards. So what it learns is not in the student, and the states
need only hold the same information, linearly.

Attach the module to the student before its optimizer is made, `student.alignment = Hidden(...)`, so that the maps
train, and delete it before saving.

Footgun: later blocks have larger activations, and a few features in them far larger ones. `mse` is mostly about those.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nblib import losses

DISTANCES = {  # of two tensors (n, D), one number per row; in fp32 or better
    "mse": lambda s, t: (s - t).square().mean(-1),
    "relative": lambda s, t: (s - t).square().sum(-1) / t.square().sum(-1).clamp_min(1e-12),
    "normalised": lambda s, t: (F.normalize(s, dim=-1) - F.normalize(t, dim=-1)).square().mean(-1),  # 2 / D cosine
    "cosine": lambda s, t: 1 - F.cosine_similarity(s, t, dim=-1),
}
LAYER_WEIGHTS = {"uniform": lambda i: 1.0, "progressive": lambda i: float(i), "exponential": lambda i: 2.0**i}
Pairs = Sequence[tuple[int, int]]  # of a student's and a teacher's layer; 0 is the output of the embedding


def hidden_distillation(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    labels: Tensor,
    *,
    kind: str = "mse",
    weights: str | Sequence[float] = "uniform",
) -> Tensor:
    """Weighted mean over layers of the distance between hidden states, summed over the positions cross-entropy uses.

    One (B, T, D) per block, the last after the final norm: the layers of `objective.states_of` without the first. Later
    blocks have larger activations, so `mse` is mostly about them and about a few outlier features; `relative` divides
    by the teacher's square per token.
    """
    distance = DISTANCES[_known(kind)]
    shapes = [[tuple(h.shape) for h in layers] for layers in (student, teacher)]
    if shapes[0] != shapes[1] or not student:
        sides = [f"{len(layers)} of {layers[-1:]}" for layers in shapes]
        raise ValueError(f"hidden states: student {sides[0]}, teacher {sides[1]}; allowed: as many, as wide")
    total = 0.0
    for share, s, t in zip(layer_weights(weights, len(student)), student, teacher, strict=True):
        if share:
            exact = torch.promote_types(s.dtype, torch.float32)
            (s, _), (t, _) = losses.shifted_rows(s, labels), losses.shifted_rows(t.detach(), labels)
            total = total + share * distance(s.to(exact), t.to(exact)).sum()
    return total


def layer_weights(weights: str | Sequence[float], layers: int) -> list[float]:
    """One share per layer, adding up to 1."""
    if isinstance(weights, str):
        if weights not in LAYER_WEIGHTS:
            raise ValueError(f"weights = {weights!r}: allowed are {', '.join(LAYER_WEIGHTS)} or one number per layer")
        weights = [LAYER_WEIGHTS[weights](i) for i in range(1, layers + 1)]
    if len(weights) != layers or not all(0 <= w < float("inf") for w in weights) or not any(weights):
        raise ValueError(f"weights = {weights}: allowed are {layers} numbers, none negative, not all zero")
    return [w / sum(weights) for w in weights]


class Hidden(nn.Module):
    """Sum over the pairs of the distance between mapped student states and teacher states, per supervised token."""

    def __init__(self, pairs: Pairs, student: nn.Module, teacher: nn.Module, *, kind: str = "mse", weight: float = 1.0):
        super().__init__()
        self.kind, self.weight, self.pairs = _known(kind), weight, checked(pairs, student, teacher, weight, steps=0)
        widths = (student.config.hidden_size, teacher.config.hidden_size)
        self.maps = nn.ModuleList([nn.Linear(*widths, bias=False) for _ in self.pairs])

    def forward(self, student: Sequence[Tensor], teacher: Sequence[Tensor], labels: Tensor) -> Tensor:
        total = 0.0
        for linear, (s, t) in zip(self.maps, self.pairs):
            (x, _), (y, _) = (losses.shifted_rows(h, labels) for h in (student[s], teacher[t].detach()))
            exact = torch.promote_types(x.dtype, torch.float32)
            total = total + DISTANCES[self.kind](linear(x).to(exact), y.to(exact)).sum()
        return self.weight * total / len(self.pairs)


def _known(kind: str) -> str:
    if kind not in DISTANCES:
        raise ValueError(f"kind = {kind!r}: allowed are {', '.join(DISTANCES)}")
    return kind


def checked(pairs: Pairs, student: nn.Module, teacher: nn.Module, weight: float, *, steps: int) -> list:
    """The pairs, or a sentence about one that is not there; `steps` layers fewer where updates are compared."""
    if not 0 < weight < float("inf"):
        raise ValueError(f"weight = {weight}: must be above 0")
    last = tuple(m.config.num_hidden_layers - steps for m in (student, teacher))
    if not pairs or any(not (0 <= s <= last[0] and 0 <= t <= last[1]) for s, t in pairs):
        raise ValueError(
            f"pairs = {list(pairs)}: student layers from 0 to {last[0]}, teacher layers from 0 to {last[1]}"
        )
    return [tuple(pair) for pair in pairs]
