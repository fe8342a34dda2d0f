"""Documents of a packed row that cannot see each other, and places that are counted over all of the
row.

    mask = (document[:, :, None] == document[:, None, :]) & causal      nothing of the others
    positions = torch.arange(T)                                         0 1 2 3 4 5 6 7 8: 0 1 2 3 0
                                                                        1 2 0 1 was meant

Only the first document of a row stands at the places at which a text alone will stand. What a table
holds for the others is learned for places that depend on what happened to be packed before.

Footgun: only differences count for angles (rotary) and for distances, so a learned table of places
is looked at alone. Windows of a picture are blocks as well, the same ones in each row, and a text
behind padding begins late. So a row needs three documents and rows other ones, and a query must see
nothing that comes later.
"""

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Op, Watcher

SCORES = {"scaled_dot_product_attention", "masked_fill", "where", "add", "__add__"}
ROWS, SHORT, LOOKED = 3, 8, 2**22  # documents of a row; its places at least; numbers of a mask


class PlacesRunOn(Watcher):
    names = begins = SCORES | {"embedding"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self._forget()

    def _forget(self) -> None:
        # lengths of rows whose places were looked up in a table that learns
        self.counted: set[int] = set()
        self.others: list[Tensor] = []  # other ids that were looked up
        self.blocks: dict[int, bool] = {}  # length of a row -> whether all attention was in blocks

    def saw(self, op: Op) -> None:
        if not self.eye.grad:
            return
        if op.name == "embedding":
            ids, table = op.given[0], op.given[-1]
            ids, table = (table, ids) if ids.is_floating_point() else (ids, table)
            if (
                ids.is_floating_point()
                or not ids.dim()
                or ids.shape[-1] < SHORT
                or not 0 < ids.numel() <= LOOKED
            ):
                return
            if bool((ids.diff(dim=-1) == 1).all()):
                if table.requires_grad:
                    self.counted.add(ids.shape[-1])
            elif len(self.others) < 4:
                self.others.append(ids)
            return
        if not self.counted:
            return
        # a layer that sees all of the row
        if op.name.startswith("scaled_dot") and _given_mask(op) is None:
            self.blocks[op.given[0].shape[-2]] = False
            return
        mask = _mask(op)
        if mask is not None and (size := mask.shape[-1]) in self.counted:
            self.blocks[size] = self.blocks.get(size, True) and _in_blocks(mask)

    def backward(self, loss: Tensor) -> None:
        for size in (size for size, all_of_it in self.blocks.items() if all_of_it):
            rows = [ids for ids in self.others if ids.shape[-1] == size]
            # no places within a document, and no numbers of documents, beside the words
            if len(rows) == 1:
                self.note("F12 places", size)
        self._forget()

    def close(self) -> None:
        self._forget()


def _given_mask(op: Op) -> Tensor | None:
    return op.kwargs.get("attn_mask", op.args[3] if len(op.args) > 3 else None)


def _mask(op: Op) -> Tensor | None:
    """Return true where a query sees, (B, T, T); None where there is no mask."""
    if op.name.startswith("scaled_dot"):
        mask = _given_mask(op)
        sees = isinstance(mask, Tensor) and (mask if mask.dtype == torch.bool else mask > -1e4)
    elif op.name in ("masked_fill", "where"):
        mask = next((t for t in op.given if t.dtype == torch.bool), None)
        scores = [t for t in op.given if t.requires_grad and t.dim() > 2]
        sees = mask is not None and bool(scores) and (~mask if op.name == "masked_fill" else mask)
    else:
        mask = next(
            (t for t in op.given if not t.requires_grad and t.is_floating_point() and t.dim() > 1),
            None,
        )
        sees = mask is not None and bool((mask < -1e4).any()) and mask > -1e4
    if (
        not isinstance(sees, Tensor)
        or sees.dim() < 2
        or sees.shape[-1] != sees.shape[-2]
        or not 0 < sees.numel() <= LOOKED
    ):
        return None
    return (
        sees[None] if sees.dim() == 2 else sees.reshape(sees.shape[0], -1, *sees.shape[-2:])[:, 0]
    )


def _in_blocks(sees: Tensor) -> bool:
    """Whether each row (T, T) holds several triangles, side by side on its diagonal, and rows other
    ones.
    """
    places = torch.arange(sees.shape[-1], device=sees.device)
    first = sees.int().argmax(-1)  # (B, T): the first that is seen
    # from there to the query itself
    whole = (places >= first[..., None]) & (places <= places[:, None])
    alone = sees.sum(-1) == 0  # of padding
    if not bool((sees == whole).all(-1).logical_or(alone).all()):
        return False
    # padding may see itself
    starts = ((first == places) & ~alone)[:, :-1] & (first[:, 1:] == first[:, :-1])
    alike = len(starts) < 2 or bool((starts == starts[:1]).all())
    return not alike and int(starts.sum(1).max()) >= ROWS
