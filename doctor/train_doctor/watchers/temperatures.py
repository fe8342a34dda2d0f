"""Distillation at two temperatures: the teacher's logits are divided by one and the student's are not.

    F.kl_div(F.log_softmax(student, 1), F.softmax(teacher / 4, 1))            log_softmax(student / 4, 1) was meant

The student is asked to be as unsure at 1 as the teacher is at 4, so it learns to be unsure. The other way round it is
asked to be as sure at 4 as the teacher is at 1.

Gradients of a softmax at T are 1 / T as large, and those of the divergence 1 / T**2. So it needs T * T in front of it
beside a cross-entropy with labels.

Footgun: other losses have two temperatures rightly (DINO sharpens its teacher). So one of the two sides must have been
divided by more than 1, and the other by nothing.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import OVER, PLUS, TIMES

HOT = 3.0  # from here on the square matters
SOFT = {"softmax", "log_softmax"}
KEEPS = {"view", "reshape", "flatten", "detach", "__getitem__", "float", "to", "squeeze"}


class Temperatures(Watcher):
    """What is known of a tensor: what it was divided by, and (that,) of its softmax."""

    begins = OVER | TIMES | SOFT | {"cross_entropy"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.terms = Known(self)  # a divergence of two softmaxes at T -> T and the factor so far
        self.labelled = False  # a cross-entropy with labels, in this step

    def saw(self, op: Op) -> None:
        result, facts = op.result, [self.known.get(t) for t in op.given]
        if not isinstance(result, Tensor):
            return
        if op.name == "cross_entropy" and len(op.given) > 1:
            self.labelled = self.labelled or not op.given[1].is_floating_point()
            return
        if not result.dim() and result.requires_grad:
            return self._scalar(op, facts)
        if op.name == "kl_div":
            if len(facts) == 2 and all(isinstance(f, tuple) for f in facts):
                self._compared(op, facts)
        elif op.name in OVER | TIMES and len(op.given) == 2 and result.dim() > 1 and op.given[1].numel() == 1:
            self.known.put(result, -1.0)  # by a tensor, whatever it is
        elif op.name in OVER | TIMES and len(op.given) == 1 and result.dim() > 1 and not result.is_complex():
            numbers = [a for a in op.args if isinstance(a, int | float) and a]
            if numbers:
                by = float(numbers[0]) if op.name in OVER else 1 / float(numbers[0])
                distances = not op.given[0].requires_grad and not bool((op.given[0] > 0).any())  # or logarithms
                self.known.put(result, -1.0 if distances else by)
        elif op.name in SOFT and op.given:
            self.known.put(result, (facts[0] if isinstance(facts[0], float) else 1.0,))
        elif op.name in KEEPS and facts and facts[0] is not None:
            self.known.put(result, facts[0])

    def _compared(self, op: Op, facts: list) -> None:
        learns, x = [t.requires_grad for t in op.given], op.given[0]
        if x.dim() > 2 and x.shape[-1] == x.shape[-2]:
            return  # attention, whose scores may be divided before or after
        if sum(learns) == 1 and min(facts) == (1.0,) < max(facts):
            self.note("F72", ("student" if learns[facts.index(max(facts))] else "teacher", max(facts)[0]))

    def _scalar(self, op: Op, facts: list) -> None:
        if op.name == "kl_div" and len(facts) == 2 and all(isinstance(f, tuple) for f in facts):
            self._compared(op, facts)
            if facts[0] == facts[1] and facts[0][0] >= HOT:
                self.terms.put(op.result, (facts[0][0], 1.0))
            return
        terms = [f for f in map(self.terms.get, op.given) if f]
        numbers = [a for a in op.args if isinstance(a, int | float) and a]
        if op.name in OVER | TIMES and terms and numbers and len(op.given) == 1:
            by = numbers[0] if op.name in TIMES else 1 / numbers[0]
            self.terms.put(op.result, (terms[0][0], terms[0][1] * by))
        elif op.name in PLUS and len(terms) == 1 and len(op.given) == 2 and self.labelled and 0 < terms[0][1] <= 1:
            self.note("F72", ("square", terms[0][0]))

    def backward(self, loss: Tensor) -> None:
        self.labelled = False

    def close(self) -> None:
        self.known.by_id.clear()
        self.terms.by_id.clear()
