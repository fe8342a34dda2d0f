"""Pictures that were flipped or turned in the dataset, and targets that were not.

    if random.random() < 0.5:
        image = image.flip(-1)          and mask = mask.flip(-1) was forgotten

Half of the masks are then in the wrong place, and so they are where each of the two draws its own
number. Rows that were flipped, turned or rolled are followed into the batch, and the batches into
the first convolution and the loss. It is wrong where pictures were moved and targets of the same
size (or some times as large: super-resolution) never were, or where some pictures were moved alone
and some targets alone. Both must have been put together in sight.

A target that is drawn for each picture has nothing to be flipped: points and boxes are moved by
arithmetic, and their heat maps, masks and grids are made of zeros or of an arange after that. It is
told by being made in sight, of nothing as large as itself. And rows that are many times one and the
same (the vectors of a caption) are no maps of pictures.

Footguns: only what the main process does is seen, so a loader with workers shows nothing. What went
through numpy is not followed, and nothing is said where a batch was not seen to be stacked. A map
that is drawn by a comparison with a grid from before the watch looks like one that was stored.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher, plain
from loopdoctor.fed import LOSSES

MOVES = {"flip", "fliplr", "flipud", "rot90", "roll"}
FIRST = {"conv2d", "conv3d"}
LIKE = {
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
}
# a map is drawn of these
FRESH = {"zeros", "ones", "full", "empty", "arange", "linspace", "eye", "exp"} | LIKE
STARTS = MOVES | FRESH | {"stack"}  # all else asks for something that is known
DRAWN = "drawn"
LEAST, CELLS = 4, 4  # rows of a batch; lines of a target that is smaller than its picture


class MovedRows(Watcher):
    """What is known of a tensor: True of a row that was moved, DRAWN of one that was made here, or
    for each row of a batch whether it was moved.
    """

    begins = MOVES | LIKE | {"stack", "exp"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.pictures: list[tuple[tuple, tuple]] = []  # of a first layer: sizes, moved rows

    def saw(self, op: Op) -> None:
        if not self.known.by_id and op.name not in STARTS:
            return
        result = op.result if isinstance(op.result, Tensor) else None
        facts = [self.known.get(t) for t in op.given]
        if (
            op.name == "stack"
            and result is not None
            and result.dim() > 2
            and len(op.given) >= LEAST
        ):
            # else a few, again and again
            if 2 * len({t.data_ptr() for t in op.given}) >= len(op.given):
                drawn = all(f is DRAWN for f in facts)
                self.known.put(result, DRAWN if drawn else tuple(f is True for f in facts))
            return
        fact = next((f for f in facts if f is True or isinstance(f, tuple)), None)
        if (
            op.name in FRESH
            and fact is None
            and result is not None
            and not result.requires_grad
            and plain(result)
        ):
            self.known.put(result, DRAWN)
            return
        if not op.given:
            return
        first = op.given[0]
        if op.name in MOVES and result is not None and first.dim() > 1 and not result.requires_grad:
            self.known.put(
                result,
                (True,) * len(fact) if isinstance(fact := self.known.get(first), tuple) else True,
            )
            return
        if fact is None:
            if DRAWN in facts:
                self._draw(op, [t for t, f in zip(op.given, facts) if f is not DRAWN])
            return
        if op.name in FIRST and isinstance(fact, tuple) and self.known.get(first) is fact:
            self.pictures.append((tuple(first.shape), fact))
        elif op.name in LOSSES and len(op.given) > 1:
            self._compare(op.given[1], self.known.get(op.given[1]))
        # a mask that is written into zeros
        for r in op.results or (op.given[:1] if facts[0] is DRAWN else ()):
            if not r.requires_grad and (fact is True or r.dim() and len(r) == len(fact)):
                self.known.put(r, fact)

    def _draw(self, op: Op, others: list[Tensor]) -> None:
        """Call drawn what is made of such a tensor, or written into it, if no other map was, half
        as large or more.
        """
        for r in op.results or op.given[:1]:
            if not r.requires_grad and all(map(plain, (r, *others))):
                small = all(
                    t.dim() < 2 or 2 * t.shape[-2:].numel() < r.shape[-2:].numel() for t in others
                )
                self.known.put(r, DRAWN if small else None)

    def _compare(self, target: Tensor, rows: tuple | bool | None) -> None:
        for shape, moved in self.pictures:
            if (
                isinstance(rows, tuple)
                and len(rows) == len(moved)
                and _laid_on(target.shape, shape)
            ):
                told = self.e.moved.setdefault(self.eye.turn, [0, 0, 0, 0])
                apart = (
                    sum(a and not b for a, b in zip(moved, rows)),
                    sum(b and not a for a, b in zip(moved, rows)),
                )
                for n, number in enumerate((sum(moved), sum(rows), len(rows), min(apart))):
                    told[n] += number

    def backward(self, loss: Tensor) -> None:
        self.pictures = []

    def close(self) -> None:
        self.known.by_id.clear()
        self.pictures = []


def _laid_on(target: tuple, picture: tuple) -> bool:
    """Whether targets have the height and width of their pictures, or all of it some times as
    large, or as small.
    """
    small, large = sorted((tuple(target[-2:]), tuple(picture[-2:])))
    if small == large or len(target) < 3 or small[0] < CELLS:
        return small == large
    return tuple(n * (large[0] // small[0]) for n in small) == large
