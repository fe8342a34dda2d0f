"""The weights of the best step that are kept without a copy, so they go on learning.

    best = model.state_dict()                           the tensors in it share the memory of the weights
    best = copy.deepcopy(model.state_dict())

The tensors of a state dict have weak references. Where the program's line gives them to something that is called
`best...`, and they are still alive at the next backward, untouched, they are kept and are no copy.

Footguns: a dict that was saved, loaded or copied in the meantime has done its work, and stays in a variable for no
reason. So nothing is said where anything was done with its tensors, or anything was saved, or these weights learn no
more (a new model of the next fold).
"""

import linecache
import re
import weakref

import torch
from torch import Tensor, nn

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher, place
from train_doctor.measures import values_of

GIVEN = re.compile(r"""\s*[\w.\[\]"', ]*best[\w.\[\]"', ]*=(?!=)""", re.IGNORECASE)
MOST, FEWEST = 32, 2  # tensors of a state dict
NODES = 1000  # of a graph


class BestStates(Watcher):
    """Known are tensors of such a dict."""

    begins = frozenset()

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.kept: list[weakref.ref] = []
        self.after(nn.Module, "state_dict", "made")
        self.after(nn.Module, "load_state_dict", "used")
        self.after(torch, "save", "used")

    def made(self, state: dict, module: nn.Module, *args, **kwargs) -> None:
        if args or kwargs.get("destination") is not None or kwargs.get("keep_vars") or not isinstance(state, dict):
            return
        where = place()
        if where is None or not GIVEN.match(linecache.getline(where[0], where[1])):
            return
        held = {values_of(p).data_ptr() for p in module.parameters() if id(p) in self.e.optimized() and p.numel()}
        found = [t for t in state.values() if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
        found = [t for t in found if t.layout == torch.strided and t.numel() and t.data_ptr() in held][:MOST]
        if len(found) >= FEWEST:
            self.kept = [weakref.ref(t) for t in found]
            for t in found:
                self.known.put(t, True)

    def used(self, *args, **kwargs) -> None:
        self.kept = []

    def saw(self, op: Op) -> None:
        if any(map(self.known.get, op.given)):
            self.kept = []

    def backward(self, loss: Tensor) -> None:
        alive = [ref() for ref in self.kept]
        if not alive or any(t is None for t in alive):
            return
        asked = {values_of(n.variable).data_ptr() for n in graphs.walk(loss, NODES) if hasattr(n, "variable")}
        if any(t.data_ptr() in asked for t in alive):  # else these weights learn no more
            self.note("S35", "best")

    def close(self) -> None:
        self.known.by_id.clear()
        self.kept = []
