"""Maps that are asked for the wrong way round: rows and columns changed places, left and right, top and bottom.

    heat[x, y] = 1                                  heat[y, x] was meant: rows come first

What a map (a mask, a heat map, a depth) says of a picture lies where something is in the picture. So maps go along with
how far pictures are from their middle grey, place by place. Whether they do so better when they are turned is asked of
all eight ways to lay a square on itself, for each picture. A map may be coarser than its picture: the cells of a
detector.

Footguns: pictures have the sky above, and their maps do too. What all pictures of a batch have in common is taken away
first. And an answer may be turned back before it meets the map, or come from a dense layer, which can turn anything.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher
from train_doctor.fed import LOSSES, kind

NODES = 5  # that an answer is followed back
LEAST, LOOKED, CELLS = 8, 2**21, 4  # pictures, numbers, rows and columns of a map
WAYS = {
    "with rows and columns exchanged": lambda m: m.transpose(1, 2),
    "with left and right exchanged": lambda m: m.flip(2),
    "upside down": lambda m: m.flip(1),
    "turned by half": lambda m: m.flip(1, 2),
    "turned to the left": lambda m: m.rot90(1, (1, 2)),
    "turned to the right": lambda m: m.rot90(-1, (1, 2)),
    "exchanged along the other diagonal": lambda m: m.rot90(2, (1, 2)).transpose(1, 2),
}


class TurnedTargets(Watcher):
    names = begins = {"conv2d", *LOSSES}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.pictures: list[Tensor] = []  # that a first layer was given since the last backward

    def saw(self, op: Op) -> None:
        if len(op.given) < 2:
            return
        x, other = op.given[:2]
        if op.name == "conv2d":
            fits = not x.requires_grad and x.dim() == 4 and len(x) >= LEAST and x.numel() <= LOOKED
            if fits and x.is_floating_point() and self.eye.grad and len(self.pictures) < 3:
                self.pictures.append(x)
        elif len(self.pictures) == 1 and _upright(x) and not other.requires_grad and not other.is_complex():
            self._compare(self.pictures[0], other)

    def _compare(self, x: Tensor, target: Tensor) -> None:
        maps = target[:, 0] if target.dim() == 4 and target.shape[1] == 1 else target
        if maps.dim() != 3 or len(maps) != len(x) or self.eye.turn in self.e.habits["D28"]:
            return
        cell = x.shape[2] // maps.shape[1]
        if min(maps.shape[1:]) < CELLS or [cell * size for size in maps.shape[1:]] != list(x.shape[2:]):
            return
        x, maps = x.detach().float(), maps.detach().float()
        grey = x.flatten(2).median(2).values[..., None, None]  # (B, C, 1, 1)
        far = _apart(torch.nn.functional.avg_pool2d((x - grey).abs().sum(1), cell))
        as_it_is = _alike(far, _apart(maps))
        ways = {}
        for name, turn in WAYS.items():
            if (turned := turn(maps)).shape == maps.shape:
                gain = (alike := _alike(far, _apart(turned))) - as_it_is
                ways[name] = (len(x), float(gain.sum()), float(gain.square().sum()), float(alike.sum()))
        self.note("D28", ways)

    def backward(self, loss: Tensor) -> None:
        self.pictures = []

    def close(self) -> None:
        self.pictures = []


def _upright(x: Tensor) -> bool:
    """Whether an answer stands as the pictures did: it was not turned, and comes from no dense layer."""
    node = x.grad_fn
    if node is None or x.dim() < 3 or x.stride(-2) < x.stride(-1):
        return False
    for _ in range(NODES):
        if kind(node) in ("Flip", "Rot90", "Addmm"):
            return False
        node = next((edge for edge, _ in node.next_functions if edge is not None), None) if node is not None else None
    return True


def _apart(x: Tensor) -> Tensor:
    """(B, N) what each has that is not in all of the batch, with the mean 0."""
    own = (x - x.mean(0)).flatten(1)
    return own - own.mean(1, keepdim=True)


def _alike(x: Tensor, y: Tensor) -> Tensor:
    """(B) the sizes of the correlations."""
    return torch.nn.functional.cosine_similarity(x, y, dim=1).abs()
