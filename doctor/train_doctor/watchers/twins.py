"""One thing in two places where two were meant: a tensor beside itself, and weights minus themselves.

    d = decoder(torch.cat([d, d], dim=1))                   a skip connection that does not bring the encoder's features
    anchor = {n: p.detach() for n, p in ...}                no clone(): the anchor moves along with the weights,
    penalty = sum((p - anchor[n]).pow(2).sum() ...)         and the penalty is 0 for ever

Footgun: rows are doubled for two views (cat along dim 0), and tables of angles hold each number twice; these have
no gradient.
"""

from torch import Tensor, nn

from train_doctor.eye import Op, Watcher
from train_doctor.watchers.operators import MINUS

LISTED = {"cat", "concat", "concatenate"}


class Twins(Watcher):
    names = begins = LISTED | MINUS | {"mse_loss", "dist"}

    def saw(self, op: Op) -> None:
        if op.name in LISTED:
            self._beside(op)
        elif len(op.given) == 2:
            self._minus(*op.given)

    def _beside(self, op: Op) -> None:
        if len(op.given) != 2 or op.given[0] is not op.given[1] or not op.given[0].requires_grad:
            return
        x, dim = op.given[0], op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
        if dim % max(x.dim(), 1) and not isinstance(x, nn.Parameter):
            self.note("S34", tuple(x.shape))

    def _minus(self, one: Tensor, two: Tensor) -> None:
        weight, other = (one, two) if isinstance(one, nn.Parameter) else (two, one)
        if not isinstance(weight, nn.Parameter) or other is weight or other.requires_grad or not weight.requires_grad:
            return
        if other.shape == weight.shape and other.data_ptr() == weight.data_ptr() and weight.numel():
            self.note("S35", tuple(weight.shape))
