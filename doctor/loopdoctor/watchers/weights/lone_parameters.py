"""A parameter of its own, beside the model, that gets gradients and that no optimizer holds.

    log_vars = nn.Parameter(torch.zeros(2))
    optimizer = Adam(model.parameters())                the weights of the losses stay as they began
    optimizer = Adam([*model.parameters(), log_vars])

Leaves of the loss are asked for what is an nn.Parameter, of no model that was seen, in no
optimizer, and stays what it was from step to step. At the end it is asked whether any module has
it.

Footgun: somebody may step by hand, also past torch's count of versions (p.data -= ...), so its
numbers are compared. The weights of a network for features, which nothing trains on purpose, are
those of a module. An optimizer that steps once an epoch is not seen, and is looked for. A
multiplier of a term that learns (a constraint) is moved now and then by hand: no minimum is to be
found for it. Points may be parameters for their derivatives' sake. And the program may have another
one join its optimizer, after a warm-up.
"""

import gc
import sys
import weakref

from torch import Tensor, nn
from torch.optim import Optimizer

from loopdoctor import graphs
from loopdoctor.eye import Eye, Op, Watcher, tensors
from loopdoctor.fed import VIEWS, kind
from loopdoctor.places import whose

# nodes; numbers of one; of them in all; steps with a gradient
NODES, MOST, KEPT, STEPS = 3000, 4096, 8, 3


class LoneParameters(Watcher):
    names = begins = {"grad"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.points: set[int] = set()  # ids of what a derivative was taken by
        # id -> weak reference, its numbers, steps in which it stood still
        self.seen: dict[int, list] = {}

    def saw(self, op: Op) -> None:
        """torch.autograd.grad(outputs, inputs), and not p.grad."""
        self.points |= {id(t) for t in tensors((*op.args[1:2], op.kwargs.get("inputs")))}

    def backward(self, loss: Tensor) -> None:
        if loss.grad_fn is None or not self.e.stepped:
            return
        known = self.e.optimized() | {id(p) for p in self.e.parameters().values()}
        below = set(graphs.below(loss.grad_fn, NODES))
        for node in below:
            p = getattr(node, "variable", None)
            if (
                type(p) is not nn.Parameter
                or id(p) in known
                or p.numel() > MOST
                or len(self.seen) > KEPT
            ):
                continue
            if (
                id(p) in self.points
                or _joins_later()
                or _multiplier(node, below, graphs.summed(loss.grad_fn, NODES))
            ):
                continue
            before = self.seen.get(id(p))
            if before is None or before[0]() is not p:
                self.seen[id(p)] = [weakref.ref(p), p.detach().clone(), {self.eye.turn}]
            elif p.detach().equal(before[1]):
                before[2].add(self.eye.turn)
            else:
                before[2].clear()

    def close(self) -> None:
        ps = [
            p
            for ref, _, turns in self.seen.values()
            if (p := ref()) is not None and len(turns) >= STEPS
        ]
        if ps and (lone := _of_no_module(ps)):
            for turn in range(STEPS):
                self.note("S3 parameter", {id(p): tuple(p.shape) for p in lone}, turn)
        self.seen = {}


def _joins_later() -> bool:
    """Whether a function of the program that is under way gives an optimizer more than it was made
    with.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if (
            "add_param_group" in frame.f_code.co_names
            and whose(frame.f_code.co_filename) == "program"
        ):
            return True
        frame = frame.f_back
    return False


def _multiplier(node, below: set, summed: set) -> bool:
    """Whether all that becomes of it is a factor of numbers that learn, in a loss that is the sum
    of these products.
    """
    users = [user for user in below if any(edge is node for edge, _ in user.next_functions)]
    for user in users:
        both = all(edge is not None for edge, _ in user.next_functions)
        views = kind(user) in VIEWS and _multiplier(user, below, summed)
        if not views and not (kind(user) == "Mul" and both and user in summed):
            return False
    return True


def _of_no_module(ps: list[nn.Parameter]) -> list[nn.Parameter]:
    """Of no optimizer either."""
    held: set[int] = set()
    for thing in gc.get_objects():
        if isinstance(thing, nn.Module):
            held |= {id(p) for p in vars(thing).get("_parameters", {}).values()}
        elif isinstance(thing, Optimizer):
            held |= {id(p) for group in thing.param_groups for p in group["params"]}
    return [p for p in ps if id(p) not in held]
