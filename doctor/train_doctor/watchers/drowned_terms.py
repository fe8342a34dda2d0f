"""A regression in its own unit beside a cross-entropy, through one trunk: the first outweighs the second by far.

    loss = F.mse_loss(age, years) + F.cross_entropy(scores, label)      1,500 and 1.6
    loss = F.mse_loss(age, (years - mean) / std) + ...                  1 and 1.6

The loss is taken apart into its terms with their factors, by its graph, which holds what each of them was given.

Footgun: a term may be large at the start and small soon. So the targets must lie far from what an untrained network
gives (tens, not ones), and both terms must reach weights in common, which is where one drowns the other. A term whose
slope is bounded (smooth_l1) drowns nothing, however large it is.
"""

from torch import Tensor
from torch.nn import functional as F

from train_doctor import graphs
from train_doctor.eye import Watcher
from train_doctor.fed import kind
from train_doctor.watchers.divergences import terms_of_loss

REGRESSION = "MseLoss"
CLASSES = {"NllLoss", "NllLoss2D", "BinaryCrossEntropyWithLogits", "BinaryCrossEntropy"}
REDUCTIONS = ("none", "mean", "sum")
TIMES, RAW = 100.0, 10.0  # one term over the other; root mean square of targets
EASY, LEARNED = 0.05, 0.2  # a classification that is learned; a regression, of the variance of its targets
NODES = 2000  # of a graph


class DrownedTerms(Watcher):
    names = begins = frozenset()

    def backward(self, loss: Tensor) -> None:
        terms = terms_of_loss(self.e, loss, CLASSES) if loss.grad_fn is not None else []
        large = [(node, abs(factor)) for node, factor in terms if kind(node) == REGRESSION]
        small = [(node, abs(factor)) for node, factor in terms if kind(node) in CLASSES]
        if len(large) != 1 or len(small) != 1:
            return
        (of_numbers, by), (of_classes, of) = large[0], small[0]
        error, surprise = _value(of_numbers), _value(of_classes)
        target = of_numbers._saved_target.float()
        raw, learned = float(target.pow(2).mean().sqrt()), error < LEARNED * float(target.var())
        if raw > RAW and by * error > TIMES * of * surprise and surprise > EASY and not learned:
            if graphs.leaves(of_numbers, NODES) & graphs.leaves(of_classes, NODES):
                self.note("F125", (by * error, kind(of_classes), of * surprise, raw))


def _value(node) -> float:
    """What this node gave, without the weights of classes."""
    given, target, reduction = node._saved_self.detach(), node._saved_target, REDUCTIONS[node._saved_reduction]
    if kind(node) == REGRESSION:
        return float(F.mse_loss(given, target, reduction=reduction))
    if kind(node) == "BinaryCrossEntropy":
        return float(F.binary_cross_entropy(given, target, reduction=reduction))
    if kind(node) == "BinaryCrossEntropyWithLogits":
        return float(F.binary_cross_entropy_with_logits(given, target, reduction=reduction))
    ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63  # it is shown without its sign
    return float(F.nll_loss(given, target, ignore_index=ignored, reduction=reduction))
