"""The entropy of a policy that is added to the loss where it should be taken away.

    loss = pg_loss + 0.5 * value_loss + 0.01 * entropy.mean()       makes the policy sure of itself at once
    loss = pg_loss + 0.5 * value_loss - 0.01 * entropy.mean()       keeps it trying

What `Distribution.entropy()` gives is followed, with its sign, up to the loss.

Footgun: sure answers are wanted elsewhere (test-time adaptation, labels that are guessed). So a log-probability of an
action must have been asked for in the same step.
"""

from collections.abc import Callable

from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers import signs


class Entropies(Watcher):
    names = signs.FOLLOWED
    begins = frozenset()

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # signs of entropies
        self.scored = False  # since the last backward
        self.of_distributions("entropy", "asked")
        self.of_distributions("log_prob", "score")

    def asked(self, original: Callable, of: distributions.Distribution, *args, **kwargs) -> Tensor:
        entropy = original(of, *args, **kwargs)
        if self.eye.on and isinstance(entropy, Tensor) and entropy.requires_grad:
            self.known.put(entropy, frozenset({1}))
        return entropy

    def score(self, original: Callable, *args, **kwargs) -> Tensor:
        self.scored = True
        return original(*args, **kwargs)

    def saw(self, op: Op) -> None:
        if self.known.by_id and isinstance(op.result, Tensor) and op.result.requires_grad:
            made = signs.followed(op, self.known)
            if made is not None:
                self.known.put(op.result, made)

    def backward(self, loss: Tensor) -> None:
        if self.scored and not self.eye.rising and self.known.get(loss) == frozenset({1}):
            self.e.punished.add(self.eye.turn)
        self.scored = False

    def close(self) -> None:
        self.known.by_id.clear()
