"""Pieces that were cut out of a picture and out of its target at different places.

    a, b = random_corner(); x = picture[:, a : a + 64, b : b + 64]
    a, b = random_corner(); y = mask[a : a + 64, b : b + 64]            another draw

A piece is a view: its storage tells from where it was cut, and of how large a whole. The pieces of
a batch are put together by `stack`; the first layer is given those of the pictures, and a loss
those of the targets. A finer target has places and sizes as many times as large. The frames of one
film are cut at one place as well.

Footguns: rows that were copied before (an augmentation of colours, for instance) have no such
storage, and tell nothing. The pictures of a batch follow each other in one tensor as well: only
what is put together once more, as a row of a batch, is a film.
"""

import math

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher

LOSSES = {
    "cross_entropy",
    "binary_cross_entropy_with_logits",
    "binary_cross_entropy",
    "mse_loss",
    "l1_loss",
}
LOSSES |= {"smooth_l1_loss", "nll_loss", "sub", "huber_loss"}
FOLLOWED = {"to", "float", "long", "div", "mul", "sub", "unsqueeze", "squeeze", "contiguous"}
LAID = FOLLOWED | {"transpose", "permute"}  # a film may be turned as well
LEAST, APART, LAYER = 4, 0.5, "conv2d"  # rows; share of them that were cut elsewhere
Cut = tuple[int, int]  # the first line and column of a piece


class Crops(Watcher):
    """What is known of a tensor: where its pieces were cut, their size and that of the whole."""

    names = {"stack", LAYER} | LOSSES | LAID
    begins = {"stack"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.pictures: list[tuple] = []  # that first layers were given in this step
        # put together, and how many were cut elsewhere than the one before
        self.frames = Known(self)
        self.films: list[tuple] = []  # such that were put together in turn

    def saw(self, op: Op) -> None:
        if op.name == "stack":
            cuts = [_cut(t) for t in op.given] if len(op.given) >= LEAST else [None]
            if films := [film for t in op.given if (film := self.frames.get(t))]:
                self.films += films
            elif None not in cuts and (film := _film(op.given, cuts)):
                self.frames.put(op.results[0], film)
            elif None not in cuts and len({cut[1:] for cut in cuts}) == 1 and op.results:
                self.known.put(op.results[0], ([cut[0] for cut in cuts], *cuts[0][1:]))
            return
        facts = [f for f in map(self.known.get, op.given) if f]
        if not facts:
            if op.name in LAID and op.results and (film := self.frames.get(op.given[0])):
                self.frames.put(op.results[0], film)
            return
        if op.name == LAYER:
            self.pictures.append(facts[0])
        elif op.name in LOSSES and any(t.requires_grad for t in op.given):
            self._compare(facts[0])
        elif op.name in FOLLOWED and len(facts) == 1:
            for r in op.results:
                if len(r) == len(facts[0][0]):
                    self.known.put(r, facts[0])

    def _compare(self, wanted: tuple) -> None:
        for cuts, size, whole in self.pictures:
            theirs, its_size, its_whole = wanted
            times = its_whole[0] // whole[0]
            fits = (
                times > 0
                and its_whole == (whole[0] * times, whole[1] * times)
                and len(cuts) == len(theirs)
            )
            if not fits or its_size != (size[0] * times, size[1] * times) or len(set(cuts)) < 2:
                continue
            ways = [(a * times - c, b * times - d) for (a, b), (c, d) in zip(cuts, theirs)]
            apart = sum(way != (0, 0) for way in ways)
            # not next to each other
            if apart > APART * len(cuts) and len(set(theirs)) > 1 and len(set(ways)) > 1:
                self.note("D14 crops", (apart, len(cuts), size, whole))

    def backward(self, loss: Tensor) -> None:
        if len(self.films) > 1:
            self.note("D14 frames", self.films[0])
        self.pictures, self.films = [], []

    def close(self) -> None:
        self.known.by_id.clear()
        self.frames.by_id.clear()
        self.pictures, self.films = [], []


def _film(frames: list[Tensor], cuts: list) -> tuple | None:
    """How many frames that follow each other in one tensor were cut at other places than the one
    before.
    """
    base = frames[0]._base
    if frames[0].dim() != 3 or any(t._base is not base for t in frames):
        return None
    planes = [
        (t.storage_offset() - base.storage_offset()) // math.prod(base.shape[-2:]) for t in frames
    ]
    steps = {b - a for a, b in zip(planes, planes[1:])}
    moved = sum(a[0] != b[0] for a, b in zip(cuts, cuts[1:]))
    return (
        (moved, len(cuts)) if len(steps) == 1 and min(steps) > 0 and 2 * moved > len(cuts) else None
    )


def _cut(t: Tensor) -> tuple[Cut, tuple[int, int], tuple[int, int]] | None:
    """Where it begins in the picture that it is a view of, its size, and that of the picture."""
    whole = t._base
    if (
        whole is None
        or t.dim() < 2
        or whole.dim() < 2
        or t.stride()[-2:] != whole.stride()[-2:]
        or t.stride(-1) != 1
    ):
        return None
    high, wide = whole.shape[-2:]
    size = tuple(t.shape[-2:])
    if (
        not high * wide
        or size == (high, wide)
        or whole.stride(-2) != wide
        or size[0] > high
        or size[1] > wide
    ):
        return None
    line, column = divmod((t.storage_offset() - whole.storage_offset()) % (high * wide), wide)
    return (line, column), tuple(t.shape[-2:]), (high, wide)
