"""A critic that steps on the actor's gradients: they are added to its own before its optimizer steps.

    critic_loss.backward()
    actor_loss = -critic(s, actor(s)).mean()        on its way to the actor it leaves gradients on the critic as well
    actor_loss.backward()
    actor_opt.step(); critic_opt.step()             so the critic also learns to answer higher

    (critic_loss + actor_loss).backward()           the same at once

Where the critic steps before the actor's loss, or its gradients are cleared in between, nothing is wrong. So it is
asked of each backward whether its loss is a plain mean (sum, smaller of two) of what weights of an optimizer answer,
while gradients of another loss wait on them for a step, and whether that optimizer steps next; and of a loss of several
terms whether one is a regression of these weights alone and another such a mean that reaches other weights too.

    actor_loss = critic(s, actor(s)).mean()         the minus is missing: the actor looks for the worst action

Where the critic is trained by a regression, such a loss of the actor must fall as the value rises.

Footgun: two losses of one network are meant to be added. Only an answer that is to rise by itself, beside one that is
held to a target, is taken for this.
"""

import math
from collections.abc import Iterator

from torch import Tensor

from train_doctor import graphs
from train_doctor.evidence import Step
from train_doctor.eye import Eye, Op, Watcher
from train_doctor.fed import kind
from train_doctor.watchers.log_scales import factor_sign

NODES, PATHS = 3000, 60
PLAIN = set("Mean Sum Neg Sub Add Rsub Minimum Min Mul Div".split())
PLAIN |= set("Squeeze Unsqueeze View UnsafeView Reshape ReshapeAlias Select Slice Permute T Cat Stack".split())
REGRESSIONS = {"MseLoss", "SmoothL1Loss", "HuberLoss", "L1Loss"}
LAYERS = {"Addmm", "Mm", "Linear", "Convolution"}


class LentGradients(Watcher):
    names = frozenset()

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.waiting: dict[int, int] = {}  # optimizer whose own loss was differentiated -> its steps so far
        self.lent: dict[int, int] = {}  # the same, where an answer that is to rise was added since
        self.regressed: set[int] = set()  # optimizers whose own loss was a regression

    def saw(self, op: Op) -> None:
        """Nothing: the graphs tell it."""

    def backward(self, loss: Tensor) -> None:
        if len(self.e.optimizers) < 2:
            return
        steps = [step.optimizer for step in self.e.every(Step)]
        for index, before in self.lent.items():
            if steps.count(index) > before:
                self.note("N38", self.e.optimizers[index].kind.__name__)
        self.lent = {}
        reached = graphs.leaves(loss.grad_fn, NODES)
        for index, o in enumerate(self.e.optimizers):
            if not reached & o.ids:
                continue
            valued, now = _valued(loss.grad_fn, o.ids), steps.count(index)
            others = any(reached & other.ids - o.ids for other in self.e.optimizers)
            if valued > 0 and others and index in self.regressed and not self.eye.rising:
                self.note("F63", "value")
            if not valued and not others and kind(_first(loss.grad_fn)) in REGRESSIONS:
                self.regressed.add(index)
            if valued and others and self.waiting.get(index) == now and _full(o) or others and self._both(loss, o.ids):
                self.lent[index] = now
            elif not valued:
                self.waiting[index] = now

    def _both(self, loss: Tensor, ids: set[int]) -> bool:
        """Whether a regression of these weights alone, and an answer of them that others are to raise, are added."""
        terms = _terms(loss.grad_fn)
        alone = any(
            kind(_first(term)) in REGRESSIONS and (reached := graphs.leaves(term, NODES)) & ids and reached <= ids
            for term, _ in terms
        )
        answers = ((sign * way, node) for term, way in terms for sign, node in _answers(term, ids))
        return alone and any(sign < 0 and not graphs.leaves(node, NODES) <= ids for sign, node in answers)

    def close(self) -> None:
        self.waiting, self.lent = {}, {}


def _first(node):
    """The loss behind a factor."""
    while kind(node) in ("Mul", "Div", "Add", "ToCopy") and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


def _terms(node) -> list[tuple]:
    """What a loss adds up, each with its sign; of very many the last ones."""
    terms, left = [], [(node, 1)]
    while left and len(terms) < PATHS:
        node, sign = left.pop()
        if kind(node) not in ("Add", "Sub"):
            terms.append((node, sign))
            continue
        signs = (sign, sign if kind(node) == "Add" else -sign)
        left += [(edge, s) for (edge, _), s in zip(node.next_functions, signs) if edge is not None]
    return terms


def _valued(node, ids: set[int]) -> float:
    """The sign of the first of them; 0 for a loss without."""
    return next((sign for sign, _ in _answers(node, ids)), 0)


def _answers(node, ids: set[int]) -> Iterator[tuple]:
    """What layers with one of these weights answer, as it is in a loss, and the sign with which it holds it, or nan
    where a factor may have any."""
    queue = [(node, 1.0)]
    for _ in range(PATHS):
        node, sign = queue.pop() if queue else (None, 0)
        what = kind(node)
        if what in LAYERS:
            if any(id(getattr(n, "variable", None)) in ids for n in graphs.near(node)):
                yield sign, node
        elif what in PLAIN:
            edges = [edge for edge, _ in node.next_functions]
            live = [edge for edge in edges if edge is not None]
            if what in ("Mul", "Div") and len(live) == 1:
                queue.append((live[0], sign * (factor_sign(node) or math.nan)))
            elif what not in ("Mul", "Div"):
                turns = [what in ("Neg", "Rsub") or what == "Sub" and n == 1 for n in range(len(edges))]
                queue += [(e, -sign if turn else sign) for e, turn in zip(edges, turns) if e is not None]


def _full(o) -> bool:
    """Its weights hold gradients."""
    held = [p for g in o.object.param_groups for p in g["params"]] if o.object is not None else []
    return any(p.grad is not None and bool(p.grad.any()) for p in held[:2])
