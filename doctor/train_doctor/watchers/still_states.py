"""Transitions whose state was never moved on: obs is that of the reset in each of an episode.

    memory.append((obs, action, reward, next_obs))
    obs = next_obs                                      forgotten

Then many rows of a batch have one state, and each a next state of its own. The first layer tells: it is given the
states with a graph, and a layer of its size (of a target network, or itself) the next ones without.

Footgun: environments that always begin with the same state give some such rows, and those with few states give many on
both sides, as a small memory does. So the next states must be twice as many.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

LAYERS = {"linear", "conv2d"}
REPEATS = {"repeat", "repeat_interleave", "expand", "tile"}
JOINED = {"cat", "concat"}
ROWS, FEW, COLUMNS = 16, 2, 512


class StillStates(Watcher):
    """Known are rows that were repeated on purpose, and states with their actions: what is drawn again is another."""

    names = begins = LAYERS | REPEATS | JOINED

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.states: dict[tuple, Tensor] = {}  # by the shapes of what a layer was given and of its weights
        self.next: dict[tuple, Tensor] = {}

    def saw(self, op: Op) -> None:
        if op.name not in LAYERS:
            for r in op.results:
                if op.name in REPEATS or len(r) == len(op.given[0]):  # else rows were put below rows
                    self.known.put(r, True)
            return
        if len(op.given) < 2 or self.known.get(op.given[0]):
            return
        x, weights = op.given[:2]
        if x.requires_grad or not x.is_floating_point() or x.dim() < 2 or len(x) < ROWS or x[0].numel() < 2:
            return
        learns = self.eye.grad and weights.requires_grad
        (self.states if learns else self.next).setdefault((tuple(x.shape), tuple(weights.shape)), x)

    def backward(self, loss: Tensor) -> None:
        states, self.states, later, self.next = self.states, {}, self.next, {}
        for key in states.keys() & later.keys():
            if states[key] is not later[key]:
                known, rows = _distinct(states[key]), len(states[key])
                if FEW < known <= rows / 2 and _distinct(later[key]) >= 2 * known:
                    self.note("D24", (known, rows))

    def close(self) -> None:
        self.known.by_id.clear()
        self.states, self.next = {}, {}


def _distinct(x: Tensor) -> int:
    rows = x.detach().flatten(1)
    return len(rows[:, :: max(1, rows.shape[1] // COLUMNS)].unique(dim=0))
