"""A recurrent cell that begins anew at every step of time: nobody gives it the state that it came to.

    for t in range(steps):
        h, c = self.cell(x[:, t])               (h, c) is left out, and zeros stand for it
        h, c = self.cell(x[:, t], (h, c))       was meant

Then what the last step is told is all that counts. Each call of a cell, or of a whole layer with one step of time, is
asked whether its state is nothing but zeros; of four calls or more between two backwards, all of them must be.

Footguns: each row of a batch may be an episode of one step, called once; and a layer that reads whole sequences begins
with zeros each time. The leaves of a tree begin with zeros as well, but its knots do not. Several players may share one
cell in a game of one step: so what goes in must be a step of a series (x[:, t], an item of unbind), or made of an
earlier answer of a cell. And rows of a memory are zeros as long as nobody was met twice.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

CELLS = {"lstm_cell": "LSTMCell", "gru_cell": "GRUCell", "rnn_tanh_cell": "RNNCell", "rnn_relu_cell": "RNNCell"}
LAYERS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
ONE = {"__getitem__", "select", "unbind", "split", "chunk", "narrow", "tensor_split"}
PICKS = {"__getitem__", "index_select", "gather", "embedding", "take_along_dim"}
KEEPS = {"to", "float", "contiguous", "view", "reshape", "squeeze", "unsqueeze", "detach", "clone", "__getitem__"}
CALLS, KEPT = 4, 64  # of one cell between two backwards; of cells


class LostStates(Watcher):
    """Known are steps of a series, and what was made of them, or of a cell's states -> the sizes of these steps."""

    begins = {*CELLS, *LAYERS, *ONE, *PICKS}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.calls: dict[int, int] = {}  # id of the first weights -> calls with zeros; -1: one had a state
        self.kinds: dict[int, str] = {}
        self.known = Known(self)
        self.memory = Known(self)  # rows that were picked from something, which may be zeros by now
        self.alone: dict[int, int] = {}  # id of the first weights -> calls with something that is no step of a series

    def saw(self, op: Op) -> None:
        if op.name in CELLS or op.name in LAYERS:
            self._called(op)
        steps = frozenset().union(*filter(None, map(self.known.get, op.given)))
        if op.name in ONE and op.given:
            steps |= _steps(op)
        elif op.name in CELLS or op.name in LAYERS:
            steps |= frozenset(op.args[0].shape[:-1])
        memory = op.name in PICKS and len(op.given) > 1 or op.name in KEEPS and any(map(self.memory.get, op.given))
        for r in op.results:
            if steps:
                self.known.put(r, steps)
            if memory:
                self.memory.put(r, True)

    def _called(self, op: Op) -> None:
        x, states = op.args[0], op.args[1] if isinstance(op.args[1], tuple | list) else op.args[1:2]
        matrix = op.given[1 + len(states)]  # the first weights
        if not matrix.requires_grad or self.calls.get(id(matrix), 0) < 0 or len(self.calls) > KEPT:
            return
        once = op.name in CELLS or x.dim() == 3 and x.shape[1 if op.args[-1] else 0] == 1  # batch_first comes last
        lost = (
            once and self.eye.grad and not any(s.requires_grad or self.memory.get(s) or bool(s.any()) for s in states)
        )
        rows = x.shape[0 if op.name in CELLS or op.args[-1] else 1]
        self.alone[id(matrix)] = self.alone.get(id(matrix), 0) + (rows not in (self.known.get(x) or ()))
        self.calls[id(matrix)] = self.calls.get(id(matrix), 0) + 1 if lost else -1
        self.kinds[id(matrix)] = (CELLS | LAYERS)[op.name]

    def backward(self, loss: Tensor) -> None:
        for key, calls in self.calls.items():
            if calls >= CALLS and self.alone[key] < 2:  # the first may be a sign to begin
                self.note("S45", (self.kinds[key], calls))
        self.calls, self.kinds, self.alone = {}, {}, {}
        self.known.by_id.clear()

    def close(self) -> None:
        self.calls, self.kinds, self.alone = {}, {}, {}
        self.known.by_id.clear()
        self.memory.by_id.clear()


def _steps(op: Op) -> frozenset[int]:
    """The sizes of what is one step of a longer series."""
    first, r = op.given[0], op.results[0] if op.results else None
    if r is None or first.dim() < 2 or len(op.given) > 1:
        return frozenset()
    one = r.dim() < first.dim() or any(a == 1 < b for a, b in zip(r.shape, first.shape))
    return frozenset(r.shape) if one else frozenset()
