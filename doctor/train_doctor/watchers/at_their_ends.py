"""Hidden units that stand at the ends of a tanh or a sigmoid, where it is flat: nearly no gradient comes through.

    h = torch.tanh(self.fc1(x))                     of x in the hundreds, or of weights that began far too large

Nearly all of them must be there, in three of the first steps, and the next layer must be given them. Ends that a last
sigmoid reaches are answers, and may be sure.

Footguns: a factor in front that is written down (tanh(beta * z)) is wanted, so a layer must have given the numbers.
Gates are at their ends when they have learned to be, and masks are meant to be. So what meets them is a layer, and not
a product.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

BENDS, LAYERS = {"tanh", "sigmoid"}, {"linear", "conv1d", "conv2d"}
KEEPS = {"view", "reshape", "flatten", "dropout", "contiguous", "transpose", "permute"}
LAYER = "layer"
LEAST, LOOKED = 256, 2**22
SHARE, SLOPE = 0.9, 1e-3  # of the units; of the function there, beside that in its middle


class AtTheirEnds(Watcher):
    """What is known of a tensor: that a layer made it, or the function and the share at its ends."""

    names = BENDS | LAYERS | KEEPS
    begins = BENDS | LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        x, r = op.given[0] if op.given else None, op.result
        if x is None or not isinstance(r, Tensor) or not r.requires_grad:
            return
        if op.name in LAYERS and len(op.given) > 1 and self.known.get(x) is None:
            self.known.put(r, LAYER)
            return
        if op.name in BENDS:
            if self.known.get(x) != LAYER or x.dim() < 2 or not LEAST <= r.numel() <= LOOKED:
                return
            slope = 1 - r.detach() ** 2 if op.name == "tanh" else 4 * r.detach() * (1 - r.detach())
            share = float((slope < SLOPE).float().mean())
            if share >= SHARE:
                self.known.put(r, (op.name, share))
        elif (fact := self.known.get(x)) is not None:
            if op.name in KEEPS:
                self.known.put(r, fact)
            elif op.name in LAYERS:
                if fact != LAYER and op.given[1].requires_grad:
                    self.note("B9", fact)
                self.known.put(r, LAYER)

    def close(self) -> None:
        self.known.by_id.clear()
