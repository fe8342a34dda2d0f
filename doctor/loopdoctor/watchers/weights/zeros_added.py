"""Zeros that are added to what learns and stay zeros: a position embedding that is no nn.Parameter.

    self.pos_embed = torch.zeros(1, n, d)               a plain tensor: nothing trains it
    x = x + self.pos_embed

Footgun: masks that are added are zeros where nothing is hidden. So S19 asks for a plain tensor that
a module holds, and not for a buffer.
"""

from loopdoctor.eye import Op, Watcher
from loopdoctor.watchers.operators import PLUS

LEAST, LOOKED = 8, 2**22  # numbers


class ZerosAdded(Watcher):
    names = begins = PLUS

    def saw(self, op: Op) -> None:
        if len(op.given) != 2 or op.given[0].requires_grad == op.given[1].requires_grad:
            return
        t = op.given[1] if op.given[0].requires_grad else op.given[0]
        whole = t.dim() > 1 and t.is_floating_point() and LEAST <= t.numel() <= LOOKED
        if whole and t.shape[-1] == op.result.shape[-1] != t.shape[-2] and not bool(t.any()):
            self.note("S19", id(t))
