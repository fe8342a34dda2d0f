"""One thing in two places where two were meant: a tensor beside itself, and weights minus themselves.

    d = decoder(torch.cat([d, d], dim=1))                   a skip connection that does not bring the encoder's features
    anchor = {n: p.detach() for n, p in ...}                no clone(): the anchor moves along with the weights,
    penalty = sum((p - anchor[n]).pow(2).sum() ...)         and the penalty is 0 for ever

    before = model.state_dict()                             the same of Reptile and of averages: no copy was made, so
    before[k] + 0.1 * (after[k] - before[k])                the step from before to after is 0

Footgun: tensors are doubled on purpose (rows for two views, angles, the halves of a complex number), and a weight minus
itself carries a gradient past a rounding. So the first must go into a layer, and the second into a square, or there is
no gradient.
"""

from torch import Tensor, nn

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, POWERS

LISTED = {"cat", "concat", "concatenate"}
LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
BENDS = {"relu", "gelu", "silu", "leaky_relu", "batch_norm", "group_norm", "layer_norm", "dropout", "flatten"}


class Twins(Watcher):
    """What is known of a tensor: what to note once it goes into a layer, or into a square."""

    begins = LISTED | MINUS | {"mse_loss"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.joined: dict[int, dict[str, tuple]] = {}  # weights of layers that were given two tensors beside each other

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        check, shape = (self.known.get(op.given[0]) if op.given else None) or ("", ())
        if check in ("S34", "pair") and op.name in LAYERS and len(op.given) > 1:
            self.joined.setdefault(id(op.given[1]), {})[check] = shape
        elif check == "S35" and (op.name in POWERS or "norm" in op.name):
            self.note(check, shape)
        elif check in ("S34", "pair") and op.name in BENDS and r is not None:
            self.known.put(r, (check, shape))
        elif op.name in LISTED and len(op.given) == 2 and r is not None and r.requires_grad:
            if self._beside(op):
                self.known.put(r, ("S34", tuple(op.given[0].shape)))
            elif op.given[0] is not op.given[1]:
                self.known.put(r, ("pair", ()))
        elif op.name in MINUS | {"mse_loss"} and len(op.given) == 2 and r is not None:
            if self._minus(*op.given):
                self.known.put(r, ("S35", tuple(r.shape)))
            elif not r.requires_grad and self._copies(*op.given):
                self.note("S35", tuple(r.shape))

    def backward(self, loss: Tensor) -> None:
        """A layer that is given pairs of others as well is given all pairs."""
        for given in self.joined.values():
            if "S34" in given and "pair" not in given:
                self.note("S34", given["S34"])
        self.joined = {}

    def _beside(self, op: Op) -> bool:
        if len(op.given) != 2 or op.given[0] is not op.given[1] or not op.given[0].requires_grad:
            return False
        x, dim = op.given[0], op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
        return bool(dim % max(x.dim(), 1)) and not isinstance(x, nn.Parameter)

    def _minus(self, one: Tensor, two: Tensor) -> bool:
        weight, other = (one, two) if isinstance(one, nn.Parameter) else (two, one)
        if not isinstance(weight, nn.Parameter) or other is weight or other.requires_grad or not weight.requires_grad:
            return False
        return other.shape == weight.shape and other.data_ptr() == weight.data_ptr() and weight.numel() > 0

    def _copies(self, one: Tensor, two: Tensor) -> bool:
        """Two tensors with the memory of one weight that an optimizer holds."""
        same = one is not two and one.shape == two.shape and one.data_ptr() == two.data_ptr() and one.dim() > 1
        held = (p for o in self.e.optimizers if o.object for g in o.object.param_groups for p in g["params"])
        return same and any(p.data_ptr() == one.data_ptr() and p.shape == one.shape for p in held)

    def close(self) -> None:
        self.known.by_id.clear()
