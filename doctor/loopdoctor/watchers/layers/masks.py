"""Attention masks that hide the text and show the padding.

    key_padding_mask = ids != PAD            torch's layers hide what is True; ids == PAD was meant
    mask = torch.ones(T, T).tril().bool()    hides the past: in these layers ~mask was meant
    key_padding_mask = (ids != PAD).float()  numbers are added to the scores: a 1 here hides nothing
    encoder(ids, types, mask)                of (ids, mask, types): a table of types is asked for
                                             the padding

A mask of (batch, length) becomes minus infinity on the scores, by `masked_fill`. There it is laid
over the ids that the embedding was given last, or over the rows of numbers that a first layer was
given: what it shows and what it hides.

Footgun: padding is known by being one and the same id everywhere, or all zeros. A text of one word
would pass for it, so what is hidden must hold several. A class token in front makes the mask longer
than the rows. Neighbours of a graph may be added to the scores as ones: they go both ways, and are
neither blocks of a row (documents) nor a window.
"""

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher

ATTENDS = {"multi_head_attention_forward", "scaled_dot_product_attention"}
ASKS = {"masked_fill"} | ATTENDS
LAYERS = {"linear", "conv1d"}
KEEPS = {
    "relu",
    "gelu",
    "silu",
    "tanh",
    "add",
    "mul",
    "layer_norm",
    "dropout",
    "transpose",
    "permute",
    "contiguous",
}
LOW, LEAST, PLACES = -1e4, 8, 3  # a score that hides; ids that are shown; places of a square


class Masks(Watcher):
    """What is known of a tensor: the rows of data that a first layer was given, of which it was
    made.
    """

    names = ASKS | LAYERS | KEEPS
    begins = ASKS | LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.made_of = Known(self)  # rows of data that a first layer was given
        self.rows: Tensor | None = None  # (B, T, C) that a first layer was given
        self.several = False  # more than one was, in this step

    def backward(self, loss: Tensor) -> None:
        self.rows, self.several = None, False

    def close(self) -> None:
        self.rows = None
        self.made_of.by_id.clear()

    def saw(self, op: Op) -> None:
        if op.name in LAYERS:
            if op.given and op.given[0].dim() == 3 and not op.given[0].requires_grad:
                rows = op.given[0] if op.name == "linear" else op.given[0].transpose(1, 2)
                self.several = (
                    self.several
                    or self.rows is not None
                    and rows.data_ptr() != self.rows.data_ptr()
                )
                self.rows = rows
                for r in op.results:
                    self.made_of.put(r, self.rows.detach())
                return
        rows = next((found for t in op.given if (found := self.made_of.get(t)) is not None), None)
        for r in op.results if rows is not None else ():
            if r.is_floating_point() and r.dim() == 3:
                self.made_of.put(r, rows)
        if op.name not in ASKS:
            return
        if op.name in ATTENDS:
            masks = [op.kwargs.get(name) for name in ("key_padding_mask", "attn_mask")]
            if any(isinstance(mask, Tensor) and _of_ones(mask) for mask in (*masks, *op.args[3:4])):
                self.note("F34 ones", op.name)
            if op.name == "multi_head_attention_forward":
                if isinstance(masks[1], Tensor) and _of_the_past(masks[1]):
                    self.note("F34 past", tuple(masks[1].shape))
                self._of_data(op)
            elif isinstance(
                mask := op.kwargs.get("attn_mask", op.args[3] if len(op.args) > 3 else None), Tensor
            ):
                if mask.dim() == 4 and _exchanged(mask, self.e.lookups):
                    self.note("F34 exchanged", tuple(mask.shape))
            return
        if len(op.given) < 2 or not self.e.lookups and self.rows is None:
            return
        value = op.kwargs.get("value", op.args[2] if len(op.args) > 2 else 0.0)
        mask = op.given[1]
        if isinstance(value, Tensor) or not value <= LOW or mask.dtype is not torch.bool:
            return
        mask = mask.reshape([size for n, size in enumerate(mask.shape) if size > 1 or n == 0])
        if (
            self.rows is not None
            and not self.several
            and mask.dim() == 2
            and mask.device == self.rows.device
        ):
            self._over_rows(mask, self.rows)
        if self.e.lookups:
            self._over_ids(mask, self.e.lookups[-1:])

    def _over_ids(self, mask: Tensor, texts: list[Tensor]) -> None:
        """Return a mask over ids; of several texts that it would fit, the one whose padding alone
        it shows.
        """
        for ids in texts:
            if mask.shape != ids.shape or mask.device != ids.device:
                continue
            shown, hidden = ids[~mask], ids[mask]
            if len(shown) >= LEAST and len(hidden) > 1:
                inverted = bool((shown == shown[0]).all()) and not bool((hidden == hidden[0]).all())
                inverted = inverted and not bool((hidden == shown[0]).any())
                self.e.hiding[self.eye.turn] = self.e.hiding.get(self.eye.turn, False) or inverted

    def _of_data(self, op: Op) -> None:
        """Attention over data as they are, (T, B, C), or over what the first layer made of them."""
        # the keys
        mask, rows = (
            op.kwargs.get("key_padding_mask"),
            op.args[1] if len(op.args) > 1 else op.given[0],
        )
        if (
            not isinstance(mask, Tensor)
            or not isinstance(rows, Tensor)
            or mask.dim() != 2
            or rows.dim() != 3
        ):
            return
        fitting = [ids for ids in self.e.lookups if ids.shape == mask.shape]
        if fitting:
            self._over_ids(mask if mask.dtype is torch.bool else mask <= LOW, fitting)
            return
        rows = self.made_of.get(rows) if rows.requires_grad else rows.transpose(0, 1)
        if rows is not None:
            self._over_rows(mask if mask.dtype is torch.bool else mask <= LOW, rows)

    def _over_rows(self, mask: Tensor, rows: Tensor) -> None:
        """Return a mask of (batch, length), with up to two places more in front."""
        if len(mask) != len(rows) or not 0 <= mask.shape[1] - rows.shape[1] <= 2:
            return
        mask, empty = mask[:, mask.shape[1] - rows.shape[1] :], (rows == 0).all(-1)
        if int((~mask).sum()) >= LEAST and int(mask.sum()) >= LEAST:
            self.e.hiding.setdefault(
                self.eye.turn, bool(empty[~mask].all()) and not bool(empty[mask].any())
            )


def _exchanged(mask: Tensor, looked: list[Tensor]) -> bool:
    """Return the first token of all rows is hidden, and what tells the padding went into a table,
    as the types of tokens.
    """
    # keys that no place sees
    hidden = (~mask if mask.dtype is torch.bool else mask <= LOW).all(2)[:, 0]
    fitting = [t for t in looked if t.shape == hidden.shape and t.device == hidden.device]
    flags = [t for t in fitting if t.unique().tolist() == [0, 1] and bool(hidden[t == 0].all())]
    for flag in flags if bool(hidden[:, 0].all()) else ():
        pads = flag == 0
        one = [
            bool((ids[pads] == ids[pads][0]).all()) and pads.equal(ids == ids[pads][0])
            for ids in fitting
        ]
        texts = [
            ids for ids, padded in zip(fitting, one) if padded and len(ids[hidden].unique()) > LEAST
        ]
        if texts and not bool(pads[:, 0].any()):
            return True
    return False


def _of_the_past(mask: Tensor) -> bool:
    """Hides each place from itself and all places behind it, and shows what comes later."""
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or len(mask) < PLACES:
        return False
    hidden = mask if mask.dtype is torch.bool else mask <= LOW
    return bool(hidden.equal(torch.ones_like(hidden).tril()))


def _of_ones(mask: Tensor) -> bool:
    """Zeros and ones, both, which an attention adds to its scores."""
    if not mask.is_floating_point() or mask.numel() < LEAST or mask.requires_grad:
        return False
    low, high = mask.aminmax()
    flags = float(low) == 0 and float(high) == 1 and bool(((mask == 0) | (mask == 1)).all())
    return flags and not _of_neighbours(mask == 1)


def _of_neighbours(mask: Tensor) -> bool:
    """(..., T, T): the edges of a graph, which go both ways, where documents are blocks and a
    window moves along.
    """
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or not mask.equal(mask.mT):
        return False
    window = mask[..., 1:, 1:].equal(mask[..., :-1, :-1])
    return not window and not _in_blocks(mask) and not _in_blocks(~mask)


def _in_blocks(mask: Tensor) -> bool:
    """Whether places see those that see the same first one, or nothing."""
    first = torch.where(mask.any(-1), mask.long().argmax(-1), -1)
    return mask.equal((first[..., :, None] == first[..., None, :]) & (first[..., :, None] >= 0))
