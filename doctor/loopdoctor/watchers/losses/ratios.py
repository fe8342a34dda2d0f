"""A ratio of probabilities that begins at one because the policy rests in eval mode on purpose.

    ratio = torch.exp(logp - old)           1 in every place, where nothing drops out

A policy gradient by ratios (PPO, GRPO) compares the policy with what it said before. In the first
pass over a batch the ratio is one, and with live dropout it would not be. So a model in eval mode
whose ratio is one rests rightly, and S11 leaves it alone.

Footgun: the old side has no graph then (`logp.detach()`), and a softmax by hand also takes off its
own largest number, which is one for many; so the difference must be of numbers that were computed.
"""

from torch import Tensor

from loopdoctor.eye import Op, Watcher
from loopdoctor.fed import kind

CLOSE, LOOKED = 1e-4, 2**20  # off zero; numbers that are looked at


class Ratios(Watcher):
    names = begins = {"exp"}

    def saw(self, op: Op) -> None:
        if len(op.given) != 1 or kind(op.given[0].grad_fn) != "Sub" or op.given[0].numel() < 2:
            return
        sides = [edge for edge, _ in op.given[0].grad_fn.next_functions]
        if len(sides) != 2 or None in sides:
            self._first(op.given[0], sides)

    def _first(self, difference: Tensor, sides: list) -> None:
        """Note a ratio to what was said without a graph, which is one in all places."""
        asleep = not any(m.training for m in self.e.models) and difference.numel() <= LOOKED
        answers = [kind(side) for side in sides if side is not None]
        if (
            asleep
            and answers != ["AccumulateGrad"]
            and bool((difference.detach().abs() < CLOSE).all())
        ):
            self.note("S11 ratio", tuple(difference.shape))
