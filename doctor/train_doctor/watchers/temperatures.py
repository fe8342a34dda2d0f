"""Distillation at two temperatures: the teacher's logits are divided by one and the student's are not.

    F.kl_div(F.log_softmax(student, 1), F.softmax(teacher / 4, 1))            log_softmax(student / 4, 1) was meant

The student is asked to be as unsure at 1 as the teacher is at 4, so it learns to be unsure. The other way round it is
asked to be as sure at 4 as the teacher is at 1.

Footgun: other losses have two temperatures rightly (DINO sharpens its teacher). So one of the two sides must have been
divided by more than 1, and the other by nothing.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import OVER, TIMES

SOFT = {"softmax", "log_softmax"}
KEEPS = {"view", "reshape", "flatten", "detach", "__getitem__", "float", "to", "squeeze"}


class Temperatures(Watcher):
    """What is known of a tensor: what it was divided by, and (that,) of its softmax."""

    begins = OVER | TIMES | SOFT

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        result, facts = op.result, [self.known.get(t) for t in op.given]
        if not isinstance(result, Tensor):
            return
        if len(facts) == 2 and all(isinstance(f, tuple) for f in facts):  # kl_div, or a product by hand
            learns = [t.requires_grad for t in op.given]
            if sum(learns) == 1 and min(facts) == (1.0,) < max(facts):
                self.note("F72", ("student" if learns[facts.index(max(facts))] else "teacher", max(facts)[0]))
        elif op.name in OVER | TIMES and len(op.given) == 2 and result.dim() > 1 and op.given[1].numel() == 1:
            self.known.put(result, -1.0)  # by a tensor, whatever it is
        elif op.name in OVER | TIMES and len(op.given) == 1 and result.dim() > 1:
            numbers = [a for a in op.args if isinstance(a, int | float) and a]
            if numbers:
                self.known.put(result, float(numbers[0]) if op.name in OVER else 1 / float(numbers[0]))
        elif op.name in SOFT and op.given:
            self.known.put(result, (facts[0] if isinstance(facts[0], float) else 1.0,))
        elif op.name in KEEPS and facts and facts[0] is not None:
            self.known.put(result, facts[0])

    def close(self) -> None:
        self.known.by_id.clear()
