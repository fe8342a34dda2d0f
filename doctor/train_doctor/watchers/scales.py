"""How large the numbers are that the first layers are given.

    model(images.float())            0 to 255, where the weights were drawn for numbers of about 1

A linear layer or a convolution draws its first weights for inputs of about that size. Numbers a hundred times as large
make its answers and gradients as much larger: the first steps saturate what comes after, and every rate is too high.
What is looked at is what such a layer is given without a gradient: data, for nothing that learns has made it.

Footgun: the features of a frozen network come without a gradient too, and their size is that network's. They are
rarely that large.
"""

import torch

from train_doctor.eye import Op, Watcher

FIRST = {"linear", "conv1d", "conv2d", "conv3d"}
LOOKED = 2**22  # numbers


class Scales(Watcher):
    names = FIRST

    def saw(self, op: Op) -> None:
        if len(op.given) < 2 or self.eye.turn in self.e.scales:
            return
        x, weight = op.given[:2]
        if x.requires_grad or not weight.requires_grad or not x.is_floating_point() or not 1 < x.numel() <= LOOKED:
            return
        low, high = torch.aminmax(x)
        self.e.scales[self.eye.turn] = (
            *torch.stack([x.float().pow(2).mean().sqrt(), low, high]).tolist(),
            tuple(x.shape),
            bool((x != 0).float().mean() > 0.5),  # counts of words are mostly zeros, and small
        )
