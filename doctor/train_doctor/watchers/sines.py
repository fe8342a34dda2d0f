"""Sines of sines that are far too fast: a SIREN whose hidden layers began as nn.Linear does.

    torch.sin(30 * linear(x))       needs weights of the hidden layers within sqrt(6 / n) / 30

A sine layer with a factor of 30 turns many times between two neighbouring inputs if its weights are as large as usual.
The network then fits the places that it is given, with noise between them. What goes into a sine that is computed from
another sine has a spread of about 1 where the weights are drawn as the method asks.

Footgun: the first layer, and features of fixed frequencies, are fast on purpose; nothing is asked of them.
"""

from torch import Tensor

from train_doctor.eye import Op, Watcher
from train_doctor.fed import kind

NODES = 12


class Sines(Watcher):
    names = {"sin"}

    def saw(self, op: Op) -> None:
        x = op.given[0] if op.given else None
        if isinstance(x, Tensor) and x.requires_grad and x.numel() > 1 and _of_a_sine(x.grad_fn):
            self.e.sines.setdefault(self.eye.turn, []).append(float(x.float().pow(2).mean().sqrt()))


def _of_a_sine(node) -> bool:
    """Through a few functions, the way on which data go."""
    queue, seen = [node], 0
    while queue and seen < NODES:
        node, seen = queue.pop(0), seen + 1
        if kind(node) == "Sin":
            return True
        queue += [edge for edge, _ in node.next_functions if edge is not None] if node is not None else []
    return False
