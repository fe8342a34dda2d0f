"""A frozen network that is fed other numbers than it was trained on: pictures that nobody normalised, or did twice.

    Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])        as in pretraining
    ToTensor()                                                              alone: a quarter of the spread, all bright

A normalisation in eval mode holds the mean and the variance of what it was given when it learned. Those of what it is
given now are compared with them, at the first normalisation of the frozen part; the middle channel must be far off. Of
pictures from 0 to 1, as ToTensor gives them, half the spread is enough: in ImageNet's numbers they had four times that.

Footguns: the first averages of a young network are far off as well, and move. So they must be the same in all steps,
and not those that a layer is made with. The frozen part must stand before a part that learns, in one model: a teacher
that is no part of it sees what it sees.
"""

from torch import Tensor, nn

from train_doctor.eye import Eye, Op, Watcher

CHANNELS, ROWS, LOOKED = 4, 32, 2**22  # channels; numbers of each; all numbers
NARROW, WIDE, OFF = 0.15, 7.0, 1.5  # spread of what is given over what was; distance of the means in spreads
BARE = 0.45  # such a spread, where the pictures lie from 0 to 1


class OtherStatistics(Watcher):
    names = begins = {"batch_norm", "conv2d"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.averages: dict[int, tuple[str, int]] = {}  # id of a running mean -> name of the layer, number of the model
        self.models, self.asked = -1, set()  # how many were looked through; those asked about since the last backward
        self.bare: bool | None = None  # the first picture since then lies from 0 to 1

    def saw(self, op: Op) -> None:
        if op.name == "conv2d":
            if self.bare is None:
                self.bare = _bare(*op.given[:2])
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
            if not (BARE if self.bare else NARROW) <= spread <= WIDE or off > OFF:
                self.note("S47", (name, spread, off, float(mean.float().sum())))

    def _look_through(self) -> None:
        self.models = len(self.e.models)
        for number, model in enumerate(self.e.models):
            if any(p.requires_grad for p in model.parameters()):
                for name, m in model.named_modules():
                    if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None:
                        self.averages[id(m.running_mean)] = name, number

    def backward(self, loss: Tensor) -> None:
        self.asked, self.bare = set(), None

    def close(self) -> None:
        self.averages, self.asked = {}, set()


def _bare(x: Tensor, weight: Tensor) -> bool:
    """Whether a frozen layer is given a picture as it is read from a file, and divided by 255."""
    plain = x.dim() == 4 and x.shape[1] in (1, 3) and x.is_floating_point() and 0 < x.numel() <= LOOKED
    if not plain or x.requires_grad or weight.requires_grad:
        return False
    low, high = x.aminmax()
    return bool((low >= 0) & (high <= 1) & (high > 0.5))
