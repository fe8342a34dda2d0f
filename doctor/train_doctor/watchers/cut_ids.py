"""Numbers of words that were cut to a byte, or to two, before torch saw them: high words turn into low ones.

    np.array(ids, dtype=np.uint8)           330 words: 300 becomes 44, and nothing is raised
    np.array(ids, dtype=np.uint16)          nanoGPT's type, and a vocabulary of 151,936

What an embedding is asked for is counted: its table has more rows than the type can name, the ids reach up to the
type's last number, and none goes beyond it.

Footguns: bytes of a text are bytes on purpose, under a table that is a little larger; they never reach 249 in UTF-8,
and 256 codes have a table of 256 and a few, or the next multiple of 64. Of 320 or 384 rows it is therefore asked where
the lost words went: 256 to 319 land on 0 to 63, which then come twice as often as all others do. Places and distances
also end at 255 where a row is that long, so ids that go up or down by one, and rows that have no id twice, are left
alone. Rows that come in order show the low ids first, so both ends of the type must be seen at once.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher
from train_doctor.watchers.shared_rows import LOOKUPS

TYPES = {2**8: (272, 2**12), 2**16: (2**16 + 2**11, 2**22)}  # numbers of a type -> rows of a table that has more
LAST = 0.97  # of the numbers of the type, from where on its last ones begin
HIGH, TOLD = 0.75, 30  # where the high numbers begin, and how many of them must be seen in a step
COUNTED, ALONE = 0.4, 0.8  # of the steps from one id to the next, those by one; of the rows, those without a repeat
PADDED, LOOKED, TABLES = {320, 384, 448, 512}, 2**20, 4  # rows of a table for 256 codes
# of a padded table: ids that are counted together, and of how many at least; how far counts of two such blocks may
# differ that are alike, and how far those where the lost words land are above the others
BLOCK, ENOUGH, ALIKE, TWICE, MOST = 64, 1024, 1.5, 1.4, 3.5


class CutIds(Watcher):
    names = begins = LOOKUPS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.now: dict[int, list[Tensor]] = {}  # rows of a table -> ids, since the last backward
        self.whole: set[int] = set()  # tables that were asked for more than the type can name
        self.blocks: dict[int, list[int]] = {}  # rows of a padded table -> how many ids of each block there were

    def saw(self, op: Op) -> None:
        if len(op.given) < 2 or not self.eye.grad:
            return
        ids, table = op.given[:2]
        if ids.is_floating_point() or table.dim() != 2 or len(table) in self.whole or _type(len(table)) is None:
            return
        if ids.dim() and 4 * TOLD <= ids.numel() <= LOOKED and (len(table) in self.now or len(self.now) < TABLES):
            self.now.setdefault(len(table), []).append(ids.detach())

    def backward(self, loss: Tensor) -> None:
        now, self.now = self.now, {}
        for rows, given in now.items():
            if rows in self.whole:
                continue
            last, high = 0, 0
            for cut, counted, top, most, *blocks in (_numbers(ids, rows) for ids in given):
                if top >= cut:
                    self.whole.add(rows)
                elif not counted:
                    last, high = max(last, top), high + most
                    self.blocks[rows] = [a + b for a, b in zip(self.blocks.get(rows, [0] * len(blocks)), blocks)]
            if rows in self.whole:
                self.e.habits["D44"].clear()
            elif last >= LAST * _type(rows) and high >= TOLD and (rows not in PADDED or self._landed(rows)):
                self.note("D44", (_type(rows), rows, last))

    def _landed(self, rows: int) -> bool:
        """Whether the ids that this table has beyond a byte were added to the first ones."""
        blocks, lost = self.blocks[rows], (rows - 256) // BLOCK
        first, others = blocks[:lost], blocks[lost:]
        if sum(blocks) < ENOUGH or len(others) < 2 or any(max(part) > ALIKE * min(part) for part in (first, others)):
            return False
        return TWICE * max(others) < min(first) < MOST * min(others)

    def close(self) -> None:
        self.now = {}


def _type(rows: int) -> int | None:
    """How many numbers the type has to which ids of this table may have been cut."""
    return next((cut for cut, (least, most) in TYPES.items() if least <= rows <= most), None)


def _numbers(ids: Tensor, rows: int) -> list[int]:
    """Numbers of the type, whether the ids are places, the last one, how many are high where some are low, and how many
    there are of each block of a byte."""
    cut, along = _type(rows), ids.reshape(-1, ids.shape[-1])
    counted = along.new_zeros((), dtype=torch.bool)
    if along.shape[-1] > 1:
        by_one = (along.diff(dim=-1).abs() == 1).float().mean()
        alone = (along.sort(-1).values.diff(dim=-1) > 0).all(-1).float().mean()
        counted = (by_one > COUNTED) | (alone > ALONE if cut == 2**8 else False)
    counts = [counted, ids.max(), (ids >= HIGH * cut).sum(), (ids < cut - HIGH * cut).sum()]
    counts += [(ids // BLOCK == block).sum() for block in range(256 // BLOCK)] if rows in PADDED else []
    counted, top, high, low, *blocks = torch.stack([count.long() for count in counts]).tolist()
    return [cut, counted, top, high if low else 0, *blocks]
