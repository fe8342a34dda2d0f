"""A discriminator that is taught one answer alone: all of its targets are 1, or all are 0.

    loss_d = bce(d(real), ones) + bce(d(fake.detach()), ones)
    zeros were meant for what is made

Of each optimizer it is asked which targets the losses had whose gradients went into its steps. Of
two networks that learn against each other, the one whose own layer gives the scores must meet both.

Footguns: the other network's loss asks for one answer, as it should, and leaves gradients on the
discriminator, which are cleared before its next backward; some of its layers may be frozen, and
have none. Real and made rows may have a step each, so those are judged in which at least two losses
meet. And a difference of two answers (a relativistic judge, pairs of a ranking) has one target.
"""

from torch import Tensor

from loopdoctor import graphs
from loopdoctor.evidence import Step
from loopdoctor.eye import Eye, Op, Watcher
from loopdoctor.fed import chain, kind

LAYERS = {"Addmm", "Mm", "Linear", "Convolution"}

KEY, BOTH = "loopdoctor_judged", "both"
JUDGES = {"binary_cross_entropy_with_logits", "binary_cross_entropy"}
HALF, LEAST, STEPS, NEAR, NODES = 0.5, 4, 2, 24, 3000


class OneSidedJudges(Watcher):
    names = begins = JUDGES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.waiting: dict[int, list] = {}  # optimizer -> sides whose gradients wait for its step
        self.steps: dict[int, int] = {}  # optimizer -> its steps, as far as they were looked at
        self.taught: dict[int, list[list]] = {}  # optimizer -> the sides of each of its steps

    def saw(self, op: Op) -> None:
        if len(self.e.optimizers) < 2 or len(op.given) < 2 or op.given[0].numel() < LEAST:
            return
        low, high = (float(end) for end in op.given[1].detach().aminmax())
        side = "ones" if low > HALF else "zeros" if high < HALF else BOTH
        graphs.tell(op.given[0], KEY, BOTH if chain(op.given[0].grad_fn, 1) == ["Sub"] else side)

    def _stepped(self) -> None:
        """Gradients that waited for a step, and have had it."""
        steps = [step.optimizer for step in self.e.every(Step)]
        for index, sides in list(self.waiting.items()):
            if steps.count(index) > self.steps.get(index, 0):
                self.taught.setdefault(index, []).append(sides)
                del self.waiting[index]
        self.steps = {index: steps.count(index) for index in range(len(self.e.optimizers))}

    def backward(self, loss: Tensor) -> None:
        if len(self.e.optimizers) < 2 or loss.grad_fn is None:
            return
        self._stepped()
        below = graphs.below(loss.grad_fn, NODES)
        asked = [(node, side) for node in below if (side := graphs.told(node, KEY))]
        for index, o in enumerate(self.e.optimizers):
            if not any(bool(g.any()) for g in _gradients(o)[:2]):
                self.waiting.pop(index, None)  # they were cleared
            # N1, S36
            others = set().union(*(other.ids for other in self.e.optimizers if other is not o))
            sides = [side for node, side in asked if _weight(node) in o.ids - others]
            if sides:
                self.waiting[index] = self.waiting.get(index, []) + sides

    def close(self) -> None:
        self._stepped()
        for steps in self.taught.values():
            sides = set().union(*steps)
            if (
                len(steps) >= STEPS
                and len(sides) == 1
                and BOTH not in sides
                and min(map(len, steps)) > 1
            ):
                for turn in range(len(steps)):
                    self.note("F20 judge", (len(steps), next(iter(sides))), turn)
        self.waiting, self.taught = {}, {}


def _gradients(o) -> list[Tensor]:
    groups = o.object.param_groups if o.object is not None else ()
    return [p.grad for group in groups for p in group["params"] if p.grad is not None]


def _weight(node) -> int | None:
    """Return the id of the weight of the layer that gave the scores."""
    for below in graphs.below(node, NEAR):
        if kind(below) in LAYERS:
            leaves = [n.variable for n in graphs.near(below) if hasattr(n, "variable")]
            return next((id(leaf) for leaf in leaves if leaf.dim() > 1), None)
    return None
