"""A recurrent cell that begins anew at every step of time: nobody gives it the state that it came to.

    for t in range(steps):
        h, c = self.cell(x[:, t])               (h, c) is left out, and zeros stand for it
        h, c = self.cell(x[:, t], (h, c))       was meant

Then what the last step is told is all that counts. Each call of a cell, or of a whole layer with one step of time, is
asked whether its state is nothing but zeros; of four calls or more between two backwards, all of them must be.

Footguns: each row of a batch may be an episode of one step, called once; and a layer that reads whole sequences begins
with zeros each time. The leaves of a tree begin with zeros as well, but its knots do not.
"""

from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher

CELLS = {"lstm_cell": "LSTMCell", "gru_cell": "GRUCell", "rnn_tanh_cell": "RNNCell", "rnn_relu_cell": "RNNCell"}
LAYERS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
CALLS, KEPT = 4, 64  # of one cell between two backwards; of cells


class LostStates(Watcher):
    names = begins = {*CELLS, *LAYERS}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.calls: dict[int, int] = {}  # id of the first weights -> calls with zeros; -1: one had a state
        self.kinds: dict[int, str] = {}

    def saw(self, op: Op) -> None:
        x, states = op.args[0], op.args[1] if isinstance(op.args[1], tuple | list) else op.args[1:2]
        matrix = op.given[1 + len(states)]  # the first weights
        if not matrix.requires_grad or self.calls.get(id(matrix), 0) < 0 or len(self.calls) > KEPT:
            return
        once = op.name in CELLS or x.dim() == 3 and x.shape[1 if op.args[-1] else 0] == 1  # batch_first comes last
        lost = once and self.eye.grad and not any(s.requires_grad or bool(s.any()) for s in states)
        self.calls[id(matrix)] = self.calls.get(id(matrix), 0) + 1 if lost else -1
        self.kinds[id(matrix)] = (CELLS | LAYERS)[op.name]

    def backward(self, loss: Tensor) -> None:
        for key, calls in self.calls.items():
            if calls >= CALLS:
                self.note("S45", (self.kinds[key], calls))
        self.calls, self.kinds = {}, {}

    def close(self) -> None:
        self.calls, self.kinds = {}, {}
