"""Feature dynamics distillation: the student's layers change the state as the teacher's layers do.

    Dynamics   1 - CKA of the layers' updates h_(l+1) - h_l, one more term of a loss (`alignment` of
               objective.py)

Linear CKA needs no map between widths. It is 1 for states that are rotations and scalings of each
other (Kornblith et al., arXiv:1905.00414):

    CKA(X, Y) = HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)),
    HSIC = |X^T Y|^2 of centred (n, D) states

With n tokens and D channels this plug-in HSIC finds similarity where there is none, and more of it
the larger D / n is. Two independent Gaussians of n = 512, D = 768 have a CKA of 0.6. `debiased`
takes the unbiased HSIC (Song et al., 2012), whose value for independent states is 0 in the mean and
may be negative. `floor` measures this for any two states, as their CKA after one of them was
shuffled.

Footgun: HSIC is a property of the whole batch and no sum over tokens. `Dynamics` is computed per
micro-batch and weighted by its tokens, so micro-batches do not add up to the large batch, and few
tokens make it noisy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nblib import losses
from nblib.batch import Batch
from nblib.methods.distill.alignment import Pairs, checked


def cka(x: Tensor, y: Tensor, *, debiased: bool = True) -> Tensor:
    """Linear CKA of two sets of states of the same n tokens, (n, D) and (n, E)."""
    least = 4 if debiased else 2
    if len(y) != len(x) or len(x) < least:
        raise ValueError(
            f"cka needs the same tokens twice, at least {least}: got {len(x)} and {len(y)}"
        )
    exact = torch.promote_types(x.dtype, torch.float32)
    x, y = (z.to(exact) - z.to(exact).mean(0) for z in (x, y))
    hsic = _unbiased if debiased else lambda a, b: (a.T @ b).square().sum()
    product = hsic(x, x) * hsic(y, y)
    return hsic(x, y) / product.clamp_min(torch.finfo(exact).tiny).sqrt()


def _unbiased(x: Tensor, y: Tensor) -> Tensor:
    """Song's HSIC with the kernels x x^T and y y^T, whose diagonals count as 0, without making
    them: O(n D E).
    """
    n = len(x)
    own_x, own_y = x.square().sum(1), y.square().sum(1)  # the diagonals
    row_x, row_y = x @ x.sum(0) - own_x, y @ y.sum(0) - own_y  # the sums of rows without them
    trace = (x.T @ y).square().sum() - own_x @ own_y
    means = row_x.sum() * row_y.sum() / ((n - 1) * (n - 2))
    return (trace + means - 2 * (row_x @ row_y) / (n - 2)) / (n * (n - 3))


@torch.no_grad()
def floor(x: Tensor, y: Tensor, *, debiased: bool = True, draws: int = 10, seed: int = 0) -> Tensor:
    """Return the CKA of the same states where nothing can be shared: y's rows in another order,
    `draws` times, (draws,).
    """
    if draws < 1:
        raise ValueError(f"draws = {draws}: must be at least 1")
    draw = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(y), generator=draw).to(y.device) for _ in range(draws)]
    return torch.stack([cka(x, y[order], debiased=debiased) for order in orders])


class Dynamics(nn.Module):
    """Mean over the pairs of 1 - CKA between updates of layers, times the supervised tokens.

    Has no parameters.
    """

    def __init__(
        self,
        pairs: Pairs,
        student: nn.Module,
        teacher: nn.Module,
        *,
        debiased: bool = True,
        weight: float = 1.0,
    ):
        super().__init__()
        self.debiased, self.weight, self.pairs = (
            debiased,
            weight,
            checked(pairs, student, teacher, weight, steps=1),
        )

    def forward(
        self, student: Sequence[Tensor], teacher: Sequence[Tensor], labels: Tensor | Batch
    ) -> Tensor:
        total = 0.0
        tokens = losses.supervised(labels.labels if isinstance(labels, Batch) else labels)
        for s, t in self.pairs:
            x, _ = losses.shifted_rows(student[s + 1] - student[s], labels)
            y, _ = losses.shifted_rows((teacher[t + 1] - teacher[t]).detach(), labels)
            total = total + 1 - cka(x, y, debiased=self.debiased)
        return self.weight * tokens * total / len(self.pairs)
