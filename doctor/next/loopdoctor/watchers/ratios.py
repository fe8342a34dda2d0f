"""A ratio of probabilities that is one whatever the policy does: `exp(logp - old)` where both are the policy of now.

    old = policy(states).log_prob(actions)          computed again, with its graph
    ratio = torch.exp(logp - old)                   1 in every place; and its gradient is that of x - x, which is 0

A policy gradient by ratios (PPO, GRPO) asks how far the policy has gone since the actions were drawn. Both sides of the
difference are laid side by side: the same functions of the same weights, both with a graph, and zero everywhere.

    old.append(policy(state).log_prob(action))      with its graph, one state after the other in the game
    ratio = torch.exp(logp - torch.stack(old))      the same, but for the last bits

    ratio = logp - old                              and the exponential forgotten: about 0, and cut to 0.8 .. 1.2

Footgun: in the first pass over a batch the ratio is one rightly. Then the old side has no graph (`logp.detach()`), and
the gradient is that of logp. And a softmax by hand takes off its own largest number, which is one for many.
In eval mode that one tells that the policy rests on purpose, without dropout (S11).
"""

from torch import Tensor

from loopdoctor import graphs
from loopdoctor.eye import Op, Watcher
from loopdoctor.fed import kind, shape_of
from loopdoctor.watchers.views import same_functions

NODES, CLOSE, LOOKED = 3000, 1e-4, 2**20


class Ratios(Watcher):
    names = {"exp", "clamp", "clip"}

    def saw(self, op: Op) -> None:
        if op.name != "exp":
            self._cut(op)
            return
        if len(op.given) != 1 or kind(op.given[0].grad_fn) != "Sub" or op.given[0].numel() < 2:
            return
        sides = [edge for edge, _ in op.given[0].grad_fn.next_functions]
        if len(sides) != 2 or None in sides:
            self._first(op.given[0], sides)
            return
        same = sides[0] is sides[1] or same_functions(*sides)
        if not op.given[0].any() if same else _alike(op.given[0].detach(), sides):
            self.e.ratios.setdefault(self.eye.turn, tuple(op.given[0].shape))

    def _first(self, difference: Tensor, sides: list) -> None:
        """A ratio to what was said without a graph, which is one in all places because nothing drops out: S11 asks."""
        asleep = not any(m.training for m in self.e.models) and difference.numel() <= LOOKED
        answers = [kind(side) for side in sides if side is not None]
        if asleep and answers != ["AccumulateGrad"] and bool((difference.detach().abs() < CLOSE).all()):
            self.note("S11 ratio", tuple(difference.shape))

    def _cut(self, op: Op) -> None:
        """To a range around 1, of numbers that all lie around 0."""
        asked = [*op.args, None, None, None]
        low, high = op.kwargs.get("min", asked[1]), op.kwargs.get("max", asked[2])
        x = op.given[0] if op.given else None
        if x is None or not x.requires_grad or x.numel() < 2 or not all(isinstance(end, float) for end in (low, high)):
            return
        if 0.4 < low < 1 < high < 2 and kind(x.grad_fn) == "Sub" and bool((x.detach().abs() < low / 2).all()):
            self.e.unraised.setdefault(self.eye.turn, (low, high))


def _alike(difference: Tensor, sides: list) -> bool:
    """Whether two sides of one shape, made of the same weights, are the same up to the last bits."""
    shapes = {shape_of(side) for side in sides}
    return (
        shapes == {tuple(difference.shape)}
        and bool((difference.abs() < CLOSE).all())
        and bool(reached := graphs.leaves(sides[0], NODES))
        and reached == graphs.leaves(sides[1], NODES)
    )
