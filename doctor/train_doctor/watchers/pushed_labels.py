"""What a loss of two classes that is written by hand does to the answers of each class.

    -(y * log(p) + (1 - y) * log(1 - p)).mean()             raises p where y is 1, lowers it where y is 0
    -(y * log(p)).mean()                                    asks nothing where y is 0: p is 1 for all
    -((1 - y) * log(p) + y * log(1 - p)).mean()             asks for the opposite
    relu(1 + t * s).mean()                                  and so does this of t = -1, 1

What a last layer answered is followed as long as it keeps its size, until flags of its size meet it in a product. Then
the gradient of the answer itself is read off in the backward, for each class.

Footgun: flags are masks as well, and those ask nothing where they are 0 either; so that is said only of the logarithm
of a sigmoid.
"""

from functools import partial

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, TIMES

LAYERS = {"linear", "conv1d", "conv2d", "conv3d"}
COMPLEMENTS = {"rsub", "__rsub__"}
LEAST, LOOKED, MOST = 16, 2**20, 0.95  # answers; the share of a class that is pushed one way
PLAIN, SHARE, LOG = "plain", "share", "log"


class PushedLabels(Watcher):
    """What is known of a tensor: the answer that it is made of and how, or the flags of which it is the complement."""

    begins = LAYERS | COMPLEMENTS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.met: dict[int, tuple[Tensor, list[tuple[Tensor, str]]]] = {}  # answers, and the flags that they met

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if r is None or not op.given:
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name in COMPLEMENTS and len(op.given) == 1 and not r.requires_grad:
            self.known.put(r, (op.given[0], "complement"))
        elif not r.requires_grad or not r.is_floating_point():
            return
        elif op.name in LAYERS and LEAST <= r.numel() <= LOOKED:
            self.known.put(r, (r, PLAIN))
        else:
            made = [f for t, f in zip(op.given, facts) if f and t.requires_grad]
            if len(made) == 1 and r.numel() == made[0][0].numel():
                self._follow(op, r, *made[0])

    def _follow(self, op: Op, r: Tensor, answer: Tensor, way: str) -> None:
        others = [t for t in op.given if not t.requires_grad and t.numel() == answer.numel()]
        if op.name in TIMES and others:
            fact = self.known.get(others[0])
            base = fact[0] if fact else others[0]
            self.met.setdefault(id(answer), (answer, []))[1].append((base, way))
            return
        if op.name in MINUS and len(op.given) == 2 and self.known.get(op.given[1]):
            return  # a difficulty or a threshold: it is to be lower where more succeeds
        if op.name in ("logsigmoid", "log_sigmoid") or op.name == "log" and way == SHARE:
            way = LOG
        elif op.name == "sigmoid":
            way = SHARE
        self.known.put(r, (answer, way))

    def backward(self, loss: Tensor) -> None:
        met, self.met = self.met, {}
        for answer, flags in met.values():
            labels = flags[0][0].detach()
            high = labels == labels.max()
            if not self.eye.rising and len({id(t) for t, _ in flags}) == 1 and _two(labels, high):
                logs = all(way == LOG for _, way in flags)
                self.hear(answer, partial(self._pushed, self.eye.turn, high.flatten(), logs and len(flags) == 1))
        self.known.by_id.clear()

    def _pushed(self, turn: int, high: Tensor, one: bool, g: Tensor) -> None:
        up, down = g.flatten()[high], g.flatten()[~high]
        if bool((up > 0).float().mean() > MOST) and bool((down < 0).float().mean() > MOST):
            self.note("F87", "opposite", turn)
        elif one and not bool(down.any()) and bool((up < 0).float().mean() > MOST):
            self.note("F87", "half", turn)

    def close(self) -> None:
        self.known.by_id.clear()
        self.met = {}


def _two(labels: Tensor, high: Tensor) -> bool:
    """0 and 1, or -1 and 1, and both."""
    low = labels.min()
    return bool(((labels == low) | high).all()) and float(low) in (0, -1) and float(labels.max()) == 1
