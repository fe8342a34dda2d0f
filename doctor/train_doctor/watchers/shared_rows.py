"""One table for several columns of ids whose rows they share, for nobody added where each column's own rows begin.

    table = nn.Embedding(sum(sizes), 16)
    table(x + offsets)                      offsets = cumsum of the sizes before: each column has rows of its own
    table(x)                                category 3 of every column is row 3, and most rows are never used

The largest id of each column is kept over some steps. With rows for all columns together, and no id beyond the
largest column's own range, the offsets are missing.

Footgun: the ids of a text, of a board or of a history come from one list at each place, so all columns reach equally
far, and together much farther than the table. So the columns must differ in range, add up to the table, and use most of
what lies in their range: the largest id of a rare word does not tell how many there are. Counts of several things may
share a table of numbers; so where all ranges are known, they must add up to it exactly.
"""

from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher

LOOKUPS = {"embedding", "embedding_bag"}
COLUMNS, ROWS, LOOKED, TABLES = (2, 64), 16, 2**18, 4
USED, FILLED, FARTHEST = 0.75, 0.85, 0.9  # ids in a column's range; rows of the table; the farthest id of these
UNLIKE = 1.3  # the widest range over the narrowest
LARGE = 0.25  # of the rows that were seen: the range of a column with more ids is not known to be used


class SharedRows(Watcher):
    names = begins = LOOKUPS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.seen: dict[tuple[int, int], list[Tensor]] = {}  # rows of a table, columns -> ids, those of each step
        self.now: dict[tuple[int, int], Tensor] = {}  # since the last backward

    def saw(self, op: Op) -> None:
        if len(op.given) < 2 or not self.eye.grad:
            return
        ids, table = op.given[:2]
        fits = not ids.is_floating_point() and ids.dim() == 2 and COLUMNS[0] <= ids.shape[1] <= COLUMNS[1]
        if fits and len(ids) >= ROWS and ids.numel() <= LOOKED and len(self.now) < TABLES:
            self.now.setdefault((len(table), ids.shape[1]), ids.detach())

    def backward(self, loss: Tensor) -> None:
        now, self.now = self.now, {}
        for key, ids in now.items():
            self.seen.setdefault(key, []).append(ids.clone())
            if len(self.seen[key]) > 1 and (found := _shared(key[0], self.seen[key])):
                self.note("D23", found)

    def close(self) -> None:
        self.seen, self.now = {}, {}


def _shared(rows: int, kept: list[Tensor]) -> tuple[str, int, int] | None:
    columns = [[ids[:, n] for ids in kept] for n in range(kept[0].shape[1])]
    seen, far, short = sum(map(len, kept)), [], 0
    for column in columns:
        reach = max(int(ids.max()) for ids in column) + 1
        if min(int(ids.min()) for ids in column) < 0:
            return None
        far.append(reach)
        if reach <= LARGE * seen:
            different = len(set().union(*(ids.unique().tolist() for ids in column)))
            if different < USED * reach:
                return None
            short += 1
    all_seen = short == len(columns)  # then nothing may lack
    whole = (1.0 if all_seen else FILLED) * rows <= sum(far) <= rows and max(far) <= FARTHEST * rows
    return ("offsets", rows, max(far)) if whole and short > 1 and max(far) > UNLIKE * min(far) else None
