"""The two states of an LSTM in each other's place.

    _, (cell, hidden) = self.encoder(x)             hidden comes first: (h, c)
    y, _ = self.decoder(start, (hidden, cell))      the decoder begins with the cell state as its hidden state

Both have one shape, so nothing is raised; but a hidden state lies in -1..1, and a cell state anywhere. Each is followed
from the LSTM that gave it, through what only cuts and joins it, to the LSTM that is given it.

Footgun: some give one of the two alone (and zeros, or the same twice) on purpose. So both must be exchanged.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

NETWORKS = {"lstm", "lstm_cell"}
KEEPS = {"view", "reshape", "squeeze", "unsqueeze", "flatten", "transpose", "permute", "contiguous", "detach", "clone"}
KEEPS |= {"__getitem__", "index_select", "unbind", "chunk", "split", "cat", "concat", "stack", "repeat", "expand", "to"}
KEEPS |= {"repeat_interleave", "float", "movedim", "swapaxes", "select", "narrow", "tile"}
HIDDEN, CELL = "hidden", "cell"


class SwappedStates(Watcher):
    """Known is which of the two states a tensor is."""

    begins = NETWORKS
    names = NETWORKS | KEEPS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name in NETWORKS:
            self._network(op)
            return
        facts = {self.known.get(t) for t in op.given if t.is_floating_point()}
        if len(facts) == 1 and (fact := facts.pop()):
            for r in op.results:
                if r.is_floating_point():
                    self.known.put(r, fact)

    def _network(self, op: Op) -> None:
        states = next((a for a in op.args[1:3] if isinstance(a, tuple | list)), ())  # lengths of packed rows come first
        if len(states) == 2 and self.eye.grad and all(isinstance(s, Tensor) for s in states):
            if [self.known.get(s) for s in states] == [CELL, HIDDEN]:
                self.note("S45 swapped", tuple(states[0].shape))
        if isinstance(op.result, tuple) and len(op.result) > 1:
            self.known.put(op.result[-2], HIDDEN)
            self.known.put(op.result[-1], CELL)

    def close(self) -> None:
        self.known.by_id.clear()
