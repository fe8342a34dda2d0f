"""A parameter of its own, beside the model, that gets gradients and that no optimizer holds.

    log_vars = nn.Parameter(torch.zeros(2))
    optimizer = Adam(model.parameters())                the weights of the losses stay as they began
    optimizer = Adam([*model.parameters(), log_vars])

Leaves of the loss are asked for what is an nn.Parameter, of no model that was seen, in no optimizer, and stays what it
was from step to step. At the end it is asked whether any module has it.

Footgun: somebody may step by hand, also past torch's count of versions (p.data -= ...), so its numbers are compared.
The weights of a network for features, which nothing trains on purpose, are those of a module.
"""

import gc
import weakref

from torch import Tensor, nn

from train_doctor import graphs
from train_doctor.eye import Eye, Watcher

NODES, MOST, KEPT, STEPS = 3000, 4096, 8, 3  # nodes; numbers of one; of them in all; steps with a gradient


class LoneParameters(Watcher):
    names = frozenset()

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.seen: dict[int, list] = {}  # id -> weak reference, its numbers, steps in which it stood still

    def backward(self, loss: Tensor) -> None:
        if loss.grad_fn is None or not self.e.stepped:
            return
        known = self.e.optimized() | {id(p) for p in self.e.parameters().values()}
        for node in graphs.below(loss.grad_fn, NODES):
            p = getattr(node, "variable", None)
            if type(p) is not nn.Parameter or id(p) in known or p.numel() > MOST or len(self.seen) > KEPT:
                continue
            before = self.seen.get(id(p))
            if before is None or before[0]() is not p:
                self.seen[id(p)] = [weakref.ref(p), p.detach().clone(), {self.eye.turn}]
            elif p.detach().equal(before[1]):
                before[2].add(self.eye.turn)
            else:
                before[2].clear()

    def close(self) -> None:
        ps = [p for ref, _, turns in self.seen.values() if (p := ref()) is not None and len(turns) >= STEPS]
        if ps and (lone := _of_no_module(ps)):
            for turn in range(STEPS):
                self.note("S3 parameter", {id(p): tuple(p.shape) for p in lone}, turn)
        self.seen = {}


def _of_no_module(ps: list[nn.Parameter]) -> list[nn.Parameter]:
    held = {
        id(p) for m in gc.get_objects() if isinstance(m, nn.Module) for p in vars(m).get("_parameters", {}).values()
    }
    return [p for p in ps if id(p) not in held]
