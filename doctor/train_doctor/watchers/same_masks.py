"""A dropout that drops the same units in every step: the program's generator is seeded anew in the loop.

    for x, y in loader:
        torch.manual_seed(0)                        reproducible, and no dropout, noise or mixing is random any more

Where the generator stands after the first dropout of a step tells it: in three steps at the same place.

Footgun: an evaluation may be seeded on purpose, so only dropouts of a forward with gradients are looked at, and a step
that is made again from the same place (a search, a checkpoint of activations) counts as one.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher

DROPS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"}


class SameMasks(Watcher):
    names = begins = DROPS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.places: dict[int, int] = {}  # step -> where the generator stood after its first dropout

    def saw(self, op: Op) -> None:
        r = op.result
        if not isinstance(r, Tensor) or not r.requires_grad or r.device.type != "cpu" or self.eye.turn in self.places:
            return
        p = op.kwargs.get("p", op.args[1] if len(op.args) > 1 else 0.5)
        live = op.kwargs.get("training", op.args[2] if len(op.args) > 2 else True)
        if live and isinstance(p, int | float) and 0 < p < 1:
            self.places[self.eye.turn] = hash(torch.get_rng_state().numpy().tobytes())

    def close(self) -> None:
        if len(self.places) > 2 and len(set(self.places.values())) == 1:
            for turn in self.places:
                self.note("D20 dropout", True, turn)
