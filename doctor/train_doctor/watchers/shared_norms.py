"""One batch normalisation after several layers, one behind the other: its running statistics are those of none.

    x = F.relu(self.bn(self.conv1(x)))
    x = F.relu(self.bn(self.conv2(x)))          bn2 was meant

In training each call has its own mean and spread, so nothing shows. What is kept for the evaluation is a mixture. The
weights that made the input of each call are kept, and the calls must lie one behind the other.

Footgun: an encoder that is called twice, a recurrent cell and a head for several levels have the layer in common as
well, so the same weights come again. A block of which each turn begins with its norm is given the stem's output first,
and goes on into the same layer in each turn. Two stems, or branches side by side, may lead into one trunk on purpose.
Weights that are made anew in each call (spectral norm, fast weights of an inner loop) tell nothing: only parameters
count. One without running statistics, or that is frozen, keeps nothing. And one without weights of its own (affine is
False) standardises embeddings for a loss, as in Barlow Twins, and is no layer.
"""

from torch import Tensor, nn

from train_doctor.eye import Eye, Known, Op, Watcher

LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
CALLS = 64  # of norms in a step that are followed


class SharedNorms(Watcher):
    """Known are what a layer made, or a norm, with nothing else added to it; and what a tensor came through: norms, and
    norms with the layers that followed them."""

    begins = LAYERS | {"batch_norm"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.made = Known(self)  # ids of weights
        self.normed = Known(self)  # ids of running means
        self.through = Known(self)
        self.weights: dict[int, set[int]] = {}  # of the layers before each norm, that lie one behind the other
        self.turns: set[int] = set()  # norms of blocks that are called again on what they gave
        self.calls = 0

    def saw(self, op: Op) -> None:
        if not op.given or not op.results:
            return
        came = frozenset().union(*(self.through.get(t) or () for t in op.given))
        made = normed = None
        if op.name in LAYERS:
            made = id(op.given[1]) if len(op.given) > 1 and isinstance(op.given[1], nn.Parameter) else None
            came = self._layer(op, came, made)
        elif op.name == "batch_norm":
            normed = self._norm(op, came)
            came |= {normed} if normed is not None else set()
        elif len(op.given) == 1:  # a view, a function of each number
            made, normed = self.made.get(op.given[0]), self.normed.get(op.given[0])
        for r in op.results:
            if made is not None:
                self.made.put(r, made)
            if normed is not None:
                self.normed.put(r, normed)
            if came:
                self.through.put(r, came)

    def _layer(self, op: Op, came: frozenset, made: int | None) -> frozenset:
        norm = self.normed.get(op.given[0])
        if norm is None or made is None:
            return came
        if (norm, made) in came:
            self.turns.add(norm)
        return came | {(norm, made)}

    def _norm(self, op: Op, came: frozenset) -> int | None:
        running = op.args[1] if len(op.args) > 1 else op.kwargs.get("running_mean")
        training = op.kwargs.get("training", op.args[5] if len(op.args) > 5 else False)
        made = self.made.get(op.given[0])
        weight = op.args[3] if len(op.args) > 3 else op.kwargs.get("weight")
        if not isinstance(running, Tensor) or weight is None or not training or made is None or self.calls >= CALLS:
            return None
        self.calls += 1
        if not self.weights.get(id(running)):
            self.weights[id(running)] = {made}
        elif id(running) in came:
            self.weights[id(running)].add(made)
        return id(running)

    def backward(self, loss: Tensor) -> None:
        found = {norm: len(weights) for norm, weights in self.weights.items() if norm not in self.turns}
        norm = max(found, key=found.get, default=None)
        if norm is not None and found[norm] > 1:
            self.note("S62", (found[norm], self._name(norm)))
        self.weights, self.turns, self.calls = {}, set(), 0

    def _name(self, key: int) -> str:
        return next((n for n, m in self.e.modules() if id(getattr(m, "running_mean", None)) == key), "")

    def close(self) -> None:
        for known in (self.made, self.normed, self.through):
            known.by_id.clear()
