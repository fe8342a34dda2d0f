"""The state of a recurrent network that goes from one batch into the next, where the batches have nothing in common.

    output, state = lstm(x, state); state = state.detach()      in a loop over DataLoader(..., shuffle=True)

The end of one text is a good beginning for the next piece of the same text. A row of a shuffled batch has no such
beginning: it is told what another row has left behind. States are known by their numbers, and a loader by its sampler.

Footgun: a loader that shuffles may stand beside data that do not come from it. So the batch must be as large as the
loader's.
"""

from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher

NETWORKS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
KEPT = 64  # numbers of a state


class CarriedStates(Watcher):
    names = NETWORKS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.left: list[Tensor] = []  # a few numbers of the states that the step before left behind
        self.now: list[Tensor] = []

    def saw(self, op: Op) -> None:
        if len(op.args) < 2 or not isinstance(op.result, tuple) or not op.result[-1].requires_grad:
            return
        first = op.args[1][0] if isinstance(op.args[1], tuple | list) else op.args[1]
        if not isinstance(first, Tensor) or first.dim() != 3:
            return
        mark = _mark(first)
        if mark.any() and any(mark.shape == old.shape and mark.equal(old) for old in self.left):
            if first.shape[1] in self.e.shuffled:
                self.e.carried.setdefault(self.eye.turn, tuple(first.shape))
        self.now.append(_mark(op.result[1]))

    def backward(self, loss: Tensor) -> None:
        self.left, self.now = self.now, []

    def close(self) -> None:
        self.left, self.now = [], []


def _mark(state: Tensor) -> Tensor:
    return state.detach().flatten()[:KEPT].clone()
