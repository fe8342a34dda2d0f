"""Take the student's hidden states to the teacher's by linear maps, where the widths differ.

    Hidden   distance of a student layer, after a map to the teacher's width, to a teacher layer:
             one more term (`alignment` of objective.py, whose `hidden_distillation` compares states
             of one shape without maps)
    layer_weights   a number per layer for `hidden_distillation`: uniform, progressive or
                    exponential

The map is trained with the student and thrown away afterwards. So what it learns is not in the
student, and the states need only hold the same information, linearly.

Attach the module to the student before its optimizer is made, `student.alignment = Hidden(...)`, so
that the maps train, and delete it before saving.

Footgun: later blocks have larger activations, and a few features in them far larger ones. `mse` is
mostly about those.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nblib import losses
from nblib.batch import Batch
from nblib.methods.distill import objective

LAYER_WEIGHTS = {
    "uniform": lambda i: 1.0,
    "progressive": lambda i: float(i),
    "exponential": lambda i: 2.0**i,
}
# of a student's and a teacher's layer; 0 is the output of the embedding
Pairs = Sequence[tuple[int, int]]


class Hidden(nn.Module):
    """Sum over the pairs of the distance between mapped student states and teacher states, per
    supervised token.
    """

    def __init__(
        self,
        pairs: Pairs,
        student: nn.Module,
        teacher: nn.Module,
        *,
        kind: str = "mse",
        weight: float = 1.0,
    ):
        super().__init__()
        if kind not in objective.DISTANCES:
            raise ValueError(f"kind = {kind!r}: allowed are {', '.join(objective.DISTANCES)}")
        self.distance, self.weight = objective.DISTANCES[kind], weight
        self.pairs = checked(pairs, student, teacher, weight, steps=0)
        widths = (student.config.hidden_size, teacher.config.hidden_size)
        self.maps = nn.ModuleList([nn.Linear(*widths, bias=False) for _ in self.pairs])

    def forward(
        self, student: Sequence[Tensor], teacher: Sequence[Tensor], labels: Tensor | Batch
    ) -> Tensor:
        total = 0.0
        for linear, (s, t) in zip(self.maps, self.pairs):
            (x, _), (y, _) = (
                losses.shifted_rows(h, labels) for h in (student[s], teacher[t].detach())
            )
            exact = torch.promote_types(x.dtype, torch.float32)
            total = total + self.distance(linear(x).to(exact), y.to(exact)).sum()
        return self.weight * total / len(self.pairs)


def layer_weights(kind: str, layers: int) -> list[float]:
    """One share per layer, adding up to 1."""
    if kind not in LAYER_WEIGHTS:
        raise ValueError(f"weights = {kind!r}: allowed are {', '.join(LAYER_WEIGHTS)}")
    numbers = [LAYER_WEIGHTS[kind](i) for i in range(1, layers + 1)]
    return [number / sum(numbers) for number in numbers]


def checked(
    pairs: Pairs, student: nn.Module, teacher: nn.Module, weight: float, *, steps: int
) -> list:
    """Return the pairs, or a sentence about one that is not there; `steps` layers fewer where
    updates are compared.
    """
    if not 0 < weight < float("inf"):
        raise ValueError(f"weight = {weight}: must be above 0")
    last = tuple(m.config.num_hidden_layers - steps for m in (student, teacher))
    if not pairs or any(not (0 <= s <= last[0] and 0 <= t <= last[1]) for s, t in pairs):
        raise ValueError(
            f"pairs = {list(pairs)}: student layers from 0 to {last[0]}, teacher layers from 0 "
            f"to {last[1]}"
        )
    return [tuple(pair) for pair in pairs]
