"""A regression that is averaged over places where there is nothing: boxes of a detector at all cells of its grid.

    obj = F.binary_cross_entropy_with_logits(cls, there)            (N, H, W) zeros, and a one here and there
    box = F.smooth_l1_loss(reg, target)                             (N, 4, H, W), zeros wherever `there` is zero

Two losses over the same places tell it together: the targets of one are zero exactly where the other says that nothing
is there.

Footgun: a map of depths or counts may be zero nearly everywhere and be meant so. It has no loss beside it that says the
same of each place.
"""

from torch import Tensor

from train_doctor.evidence import Backward, Entropy, Evidence
from train_doctor.fed import BINARY, PLAIN, kind, shape_of
from train_doctor.reading import readable

RARE = 0.25  # of the places
LAID = {"Sum", "Mean", "View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Permute", "Transpose"}
NODES = 200


def look(e: Evidence, event: Backward, loss: Tensor) -> None:
    """Before a backward, while the tensors of its losses are there."""
    whether = [n for n in event.entropies if n.name in BINARY and n.used and n.fed is not None and n.fed.target_hard]
    what = [n for n in event.entropies if n.name in PLAIN and n.used]
    what = [n for n in what if n.reduction == "mean" or n.reduction == "none" and _averaged(loss, n.value)]
    for one in whether:
        for two in what:
            share = _share(one, two)
            if share:
                e.empties.setdefault(e.rounds, (share, two.name))


def _averaged(loss: Tensor, each: Tensor | None) -> bool:
    """Whether the values of all places come to one number by a mean, and nothing has chosen or weighed any of them."""
    queue = [(loss.grad_fn, False)]  # node; whether it is under that mean
    for _ in range(NODES):
        node, under = queue.pop() if queue else (None, False)
        if each is not None and node is each.grad_fn:
            return under
        if node is not None and (kind(node) in LAID or not under and shape_of(node) == ()):
            under = under or kind(node) == "Mean" and shape_of(node) == ()
            queue += [(edge, under) for edge, _ in node.next_functions if edge is not None]
    return False


def _share(one: Entropy, two: Entropy) -> float:
    """Of the places that hold something, where both losses agree on which; 0 where they do not."""
    there, wanted = one.target, two.target
    if not (readable(there) and readable(wanted)) or there.device != wanted.device or there.dim() < 2:
        return 0.0
    if wanted.dim() == there.dim() and wanted.shape[1] > 1 == there.shape[1]:
        there = there.squeeze(1)
    if wanted.dim() != there.dim() + 1:
        return 0.0
    for channels in (1, wanted.dim() - 1):
        if _without(wanted, channels) == tuple(there.shape):
            held = (wanted != 0).any(channels)
            share = float(held.float().mean())
            if 0 < share < RARE and bool((held == (there > 0)).all()):
                return share
    return 0.0


def _without(t: Tensor, dim: int) -> tuple[int, ...]:
    return tuple(size for d, size in enumerate(t.shape) if d != dim)
