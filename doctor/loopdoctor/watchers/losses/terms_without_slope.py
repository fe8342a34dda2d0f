"""Terms of a loss that train nothing, because a function without a slope stands in each way to a
weight.

    loss = bce(logits, y) + dice(torch.round(torch.sigmoid(logits)), y)
    the gradient of the second is 0
    loss = bce(logits, y) + dice(torch.sigmoid(logits), y)

The graph has such a term, and its number moves as the weights do. The loss is taken apart at its
outermost sums; a term is alive if any way from it to a leaf passes no flat function.

Footguns: a straight-through step, x + (round(x) - x).detach(), leaves no flat node. A function of
the user's own may have any slope, and hide its weights (a checkpoint), so it is alive. x - floor(x)
has a slope, that of x, so what is rounded may not be a term itself.
"""

from torch import Tensor

from loopdoctor.eye import Watcher
from loopdoctor.fed import kind
from loopdoctor.watchers.losses.loss_graphs import FLAT

SUMS = {"Add", "Sub", "Rsub", "Stack", "Cat"}
THROUGH = {
    "Mul",
    "Div",
    "Neg",
    "Mean",
    "Sum",
    "View",
    "UnsafeView",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Clone",
}
TERMS, LIMIT = 64, 2000  # of a loss; nodes below one of them that are looked at


class TermsWithoutSlope(Watcher):
    names = frozenset()

    def backward(self, loss: Tensor) -> None:
        if loss.grad_fn is None or loss.dim():
            return
        terms = _terms(loss.grad_fn)
        if not 1 < len(terms) <= TERMS:
            return
        flat = {node: _flat(node) for node in dict.fromkeys(terms)}
        dead = {node: found for node, found in flat.items() if found}
        if not dead or len(dead) == len(flat):
            return
        for found in dead.values():
            if not _below(found) & flat.keys():
                self.note("F2 flat", FLAT[kind(found[0])])


def _terms(node) -> list:
    """Return what the outermost sums add up."""
    found, queue, seen = [], [node], 0
    while queue and seen < LIMIT:
        node, seen = queue.pop(), seen + 1
        below = [edge for edge, _ in node.next_functions if edge is not None]
        if kind(node) in SUMS and below or kind(node) in THROUGH and len(below) == 1:
            queue += below
        else:
            found.append(node)
    return found if not queue else []


def _flat(node) -> list:
    """Return the flat functions that stand in all ways from a node to leaves; none where one way is
    free.
    """
    found, queue, seen = [], [node], set()
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        # RoundBackward0; of a user's class it is RoundBackward
        native = type(node).__name__[-1].isdigit()
        if not native or len(seen) > LIMIT:
            return []
        if kind(node) in FLAT:
            found.append(node)
        else:
            queue += [edge for edge, _ in node.next_functions if edge is not None]
    return found


def _below(found: list) -> set:
    """Return what the flat functions are given, and what that is computed from."""
    queue, seen = [edge for node in found for edge, _ in node.next_functions], set()
    while queue and len(seen) < LIMIT:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [edge for edge, _ in node.next_functions]
    return seen
