"""A loss of classes that is to grow: `-F.cross_entropy(logits, y)`, or `maximize=True` of a loss.

    loss = -F.cross_entropy(model(x), y)                    away from the right class

The sign of each of torch's losses of classes in the sum that is differentiated is read off the graph.

Footguns: two networks that work against each other do this on purpose, so a program with two optimizers is left alone,
and so is a loss in which one term rises and another one falls: what is forgotten, or confused, stands beside what is
kept. An attack makes a loss grow by its input, so the optimizer must hold weights of the model; and a policy gradient
multiplies by rewards, which differ from step to step.
"""

from torch import Tensor

from train_doctor.eye import Eye, Watcher
from train_doctor.fed import kind
from train_doctor.watchers.divergences import terms_of_loss

CLASSES = {"NllLoss", "NllLoss2D", "BinaryCrossEntropyWithLogits", "BinaryCrossEntropy", "CtcLoss"}


class LossSigns(Watcher):
    names = begins = frozenset()

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.found: dict[int, list[float | None]] = {}  # step -> the factor of each loss that is to grow

    def backward(self, loss: Tensor) -> None:
        if loss.grad_fn is None or len(self.e.optimizers) > 1:
            return
        turned, held = -1 if self.eye.rising else 1, self.e.optimized()
        terms = terms_of_loss(self.e, loss, more=CLASSES)
        factors = [f * turned for node, f in terms if kind(node) in CLASSES]
        mine = any(id(p) in held and p.requires_grad and p.dim() > 1 for p in self.e.parameters().values())
        wrong = bool(factors) and max(factors) < 0 and mine
        self.found.setdefault(self.eye.turn, []).append(round(factors[0], 6) if wrong else None)

    def close(self) -> None:
        """A factor that is another one in each step is a reward; several losses in a step have parts of their own."""
        same = len({tuple(factors) for factors in self.found.values()}) == 1
        for turn, factors in self.found.items():
            if same and len(factors) == 1 and factors[0] is not None:
                self.note("F75 classes", "a cross-entropy", turn)
