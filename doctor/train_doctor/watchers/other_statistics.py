"""A frozen network that is fed other numbers than it was trained on: pictures that nobody normalised, or did twice.

    Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])        as in pretraining
    ToTensor()                                                              alone: a quarter of the spread, all bright

A normalisation in eval mode holds the mean and the variance of what it was given when it learned. Those of what it is
given now are compared with them, at the first normalisation of the frozen part; the middle channel must be far off. Of
pictures from 0 to 1, as ToTensor gives them, half the spread is enough: in ImageNet's numbers they had four times that.

Footguns: the first averages of a young network are far off as well, and move. So they must be the same in all steps,
and not those that a layer is made with. The frozen part must stand before a part that learns, in one model: a teacher
that is no part of it sees what it sees. A network may have learned from pictures from 0 to 1, and of little contrast
they are spread less: so ImageNet's numbers must bring them near to the averages. And a sky is dark: where most of a
picture that was normalised lies at one end, means that are off tell nothing.
"""

import math

import torch
from torch import Tensor, nn

from train_doctor.eye import Eye, Op, Watcher

CHANNELS, ROWS, LOOKED = 4, 32, 2**22  # channels; numbers of each; all numbers
NARROW, WIDE, OFF = 0.15, 7.0, 1.5  # spread of what is given over what was; distance of the means in spreads
MIDDLES, SPREADS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
SOME, DARK = 2**18, 0.1  # numbers; of the range of a picture, where its median lies
NEAR = 0.4  # of the means, once normalised
BARE = 0.45  # such a spread, where the pictures lie from 0 to 1


class OtherStatistics(Watcher):
    names = begins = {"batch_norm", "conv2d"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.averages: dict[int, tuple[str, int]] = {}  # id of a running mean -> name of the layer, number of the model
        self.models, self.asked = -1, set()  # how many were looked through; those asked about since the last backward
        self.first: Op | None = None  # that convolution
        self.bare: bool | None = None  # the first picture since then lies from 0 to 1

    def saw(self, op: Op) -> None:
        if op.name == "conv2d":
            if self.bare is None:
                self.bare = _bare(*op.given[:2])
                self.first = op if op.args else None
            return
        x, training = op.given[0], op.kwargs.get("training", op.args[5] if len(op.args) > 5 else False)
        if training or x.requires_grad or not x.is_floating_point() or x.dim() < 2 or x.shape[1] < CHANNELS:
            return
        if len(self.e.models) != self.models:
            self._look_through()
        mean, var = op.given[1:3]
        name, model = self.averages.get(id(mean), ("", -1))
        if model < 0 or model in self.asked or any(t.requires_grad for t in op.given[1:]):
            return
        self.asked.add(model)
        made = not bool(mean.any()) and bool((var == 1).all())  # as a layer is made
        x = x.detach()[: max(1, len(x) * LOOKED // max(1, x.numel()))].transpose(0, 1).flatten(1).float()
        if not made and x.shape[1] >= ROWS and mean.shape == x.shape[:1]:
            was = var.float().clamp_min(1e-12).sqrt()
            spread = float((x.std(1) / was).median())
            off = float(((x.mean(1) - mean.float()).abs() / was).median())
            narrow = spread < NARROW or bool(self.bare) and spread < BARE
            if narrow and self.bare and not self._better(mean.float(), was, abs(math.log(max(spread, 1e-9))) + off):
                return
            if narrow or spread > WIDE or off > OFF and not self._lopsided():
                self.note("S47", (name, spread, off, float(mean.float().sum())))

    def _better(self, mean: Tensor, was: Tensor, apart: float) -> bool:
        """Whether the first convolution would make of the normalised pictures what is nearer to the averages."""
        if self.first is None:
            return True
        x = self.first.args[0].detach()
        x = x[: max(1, len(x) * SOME // x.numel())]
        middle, size = (torch.tensor(n, dtype=x.dtype, device=x.device).view(1, 3, 1, 1) for n in (MIDDLES, SPREADS))
        middle, size = (middle, size) if x.shape[1] == 3 else (middle.mean(), size.mean())
        x = torch.conv2d((x - middle) / size, *self.first.args[1:], **self.first.kwargs)
        x = x.transpose(0, 1).flatten(1).float()
        if x.shape[:1] != mean.shape:
            return True  # another layer lies between
        spread, off = (x.std(1) / was).median(), ((x.mean(1) - mean).abs() / was).median()
        return float(off) < NEAR and float(spread.clamp_min(1e-9).log().abs() + off) < apart

    def _lopsided(self) -> bool:
        """Most of the pictures is black, or white, though somebody normalised them: a sky is dark."""
        if self.bare or self.first is None or not self.first.args[0].numel():
            return False
        x = self.first.args[0].detach().flatten().float()
        x = x[:: max(1, len(x) // SOME)]
        low, high = x.aminmax()
        at = (x.median() - low) / (high - low).clamp_min(1e-9)
        return bool(low < 0) and not DARK < float(at) < 1 - DARK

    def _look_through(self) -> None:
        self.models = len(self.e.models)
        for number, model in enumerate(self.e.models):
            if any(p.requires_grad for p in model.parameters()):
                for name, m in model.named_modules():
                    if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None:
                        self.averages[id(m.running_mean)] = name, number

    def backward(self, loss: Tensor) -> None:
        self.asked, self.bare, self.first = set(), None, None

    def close(self) -> None:
        self.averages, self.asked, self.first = {}, set(), None


def _bare(x: Tensor, weight: Tensor) -> bool:
    """Whether a frozen layer is given a picture as it is read from a file, and divided by 255."""
    plain = x.dim() == 4 and x.shape[1] in (1, 3) and x.is_floating_point() and 0 < x.numel() <= LOOKED
    if not plain or x.requires_grad or weight.requires_grad:
        return False
    low, high = x.aminmax()
    return bool((low >= 0) & (high <= 1) & (high > 0.5))
