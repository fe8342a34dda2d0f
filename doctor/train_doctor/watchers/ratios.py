"""A ratio of probabilities that is one whatever the policy does: `exp(logp - old)` where both are the policy of now.

    old = policy(states).log_prob(actions)          computed again, with its graph
    ratio = torch.exp(logp - old)                   1 in every place; and its gradient is that of x - x, which is 0

A policy gradient by ratios (PPO, GRPO) asks how far the policy has gone since the actions were drawn. Both sides of the
difference are laid side by side: the same functions of the same weights, both with a graph, and zero everywhere.

    ratio = logp - old                              and the exponential forgotten: about 0, and cut to 0.8 .. 1.2

Footgun: in the first pass over a batch the ratio is one rightly. Then the old side has no graph (`logp.detach()`), and
the gradient is that of logp.
"""

from train_doctor.eye import Op, Watcher
from train_doctor.fed import kind
from train_doctor.watchers.views import same_functions


class Ratios(Watcher):
    names = {"exp", "clamp", "clip"}

    def saw(self, op: Op) -> None:
        if op.name != "exp":
            self._cut(op)
            return
        if len(op.given) != 1 or kind(op.given[0].grad_fn) != "Sub" or op.given[0].numel() < 2:
            return
        sides = [edge for edge, _ in op.given[0].grad_fn.next_functions]
        if len(sides) == 2 and None not in sides and (sides[0] is sides[1] or same_functions(*sides)):
            if not op.given[0].any():
                self.e.ratios.setdefault(self.eye.turn, tuple(op.given[0].shape))

    def _cut(self, op: Op) -> None:
        """To a range around 1, of numbers that all lie around 0."""
        asked = [*op.args, None, None, None]
        low, high = op.kwargs.get("min", asked[1]), op.kwargs.get("max", asked[2])
        x = op.given[0] if op.given else None
        if x is None or not x.requires_grad or x.numel() < 2 or not all(isinstance(end, float) for end in (low, high)):
            return
        if 0.4 < low < 1 < high < 2 and kind(x.grad_fn) == "Sub" and bool((x.detach().abs() < low / 2).all()):
            self.e.unraised.setdefault(self.eye.turn, (low, high))
