"""A loss that asks scores to rise and asks for nothing else: pairs that belong together, and none
that do not.

    loss = -F.logsigmoid(score(user, item)).mean()
    every score goes up, whoever it is of
    loss = loss - F.logsigmoid(-score(user, drawn)).mean()

The graph of the loss is read: one mean of what only rises with a score, and nothing beside it.

Footgun: a difference of two scores that is to rise (BPR, DPO) holds both sides. A generator asks
for no more than this in its own step, so two optimizers are left alone, and a program with any
other loss.
"""

from torch import Tensor

from loopdoctor import graphs
from loopdoctor.eye import Eye, Watcher
from loopdoctor.fed import kind
from loopdoctor.watchers.losses.divergences import terms_of_loss

NEAR, NODES = 12, 2000  # nodes below the score in which a difference is looked for; of a loss


class RisesAlone(Watcher):
    names = begins = frozenset()

    def __init__(self, eye: Eye):
        super().__init__(eye)
        # step -> whether every loss of it asked for no more than this
        self.turns: dict[int, bool] = {}

    def backward(self, loss: Tensor) -> None:
        terms = terms_of_loss(self.e, loss) if loss.grad_fn is not None else []
        alone = len(terms) == 1 and not self.eye.rising and _rises(*terms[0]) and _once(loss)
        self.turns[self.eye.turn] = self.turns.get(self.eye.turn, True) and alone

    def close(self) -> None:
        if len(self.e.optimizers) == 1 and self.turns and all(self.turns.values()):
            for turn in self.turns:
                self.note("F20 rises", True, turn)


def _once(loss: Tensor) -> bool:
    """Another such term may have a weight of 0 for now."""
    return (
        sum(kind(node) in ("LogSigmoid", "Softplus", "Log") for node in graphs.walk(loss, NODES))
        == 1
    )


def _rises(node, factor: float) -> bool:
    """Whether less of this term means a larger score: minus a log-sigmoid, or a softplus of minus
    the score.
    """
    below = next((edge for edge, _ in node.next_functions if edge is not None), None)
    if kind(below) == "LogSigmoid" and factor < 0:
        score = below.next_functions[0][0]
    elif kind(below) == "Log" and kind(below.next_functions[0][0]) == "Sigmoid" and factor < 0:
        score = below.next_functions[0][0].next_functions[0][0]
    elif kind(below) == "Softplus" and factor > 0 and kind(below.next_functions[0][0]) == "Neg":
        score = below.next_functions[0][0].next_functions[0][0]
    else:
        return False
    near = list(graphs.below(score, NEAR))
    return not any(kind(n) in ("Sub", "Rsub", "Add") for n in near)
