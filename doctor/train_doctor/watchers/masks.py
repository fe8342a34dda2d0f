"""Attention masks that hide the text and show the padding.

    key_padding_mask = ids != PAD            torch's layers hide what is True; ids == PAD was meant

A mask of (batch, length) becomes minus infinity on the scores, by `masked_fill`. There it is laid over the ids that the
embedding was given last, or over the rows of numbers that a first layer was given: what it shows and what it hides.

Footgun: padding is known by being one and the same id everywhere, or all zeros. A text of one word would pass for it,
so what is hidden must hold several. A class token in front makes the mask longer than the rows.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher

LOW, LEAST = -1e4, 8  # a score that hides; ids that are shown


class Masks(Watcher):
    names = {"masked_fill", "linear", "multi_head_attention_forward"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.rows: Tensor | None = None  # (B, T, C) that a first layer was given

    def backward(self, loss: Tensor) -> None:
        self.rows = None

    def close(self) -> None:
        self.rows = None

    def saw(self, op: Op) -> None:
        if op.name == "linear":
            if op.given and op.given[0].dim() == 3 and not op.given[0].requires_grad:
                self.rows = op.given[0]
            return
        if op.name == "multi_head_attention_forward":
            self._of_data(op)
            return
        if len(op.given) < 2 or not self.e.lookups and self.rows is None:
            return
        value = op.kwargs.get("value", op.args[2] if len(op.args) > 2 else 0.0)
        mask = op.given[1]
        if isinstance(value, Tensor) or not value <= LOW or mask.dtype is not torch.bool:
            return
        mask = mask.reshape([size for n, size in enumerate(mask.shape) if size > 1 or n == 0])
        if self.rows is not None and mask.dim() == 2 and mask.device == self.rows.device:
            self._over_rows(mask, self.rows)
        ids = self.e.lookups[-1] if self.e.lookups else None
        if ids is not None and mask.shape == ids.shape and mask.device == ids.device:
            shown, hidden = ids[~mask], ids[mask]
            if len(shown) >= LEAST and len(hidden) > 1:
                inverted = bool((shown == shown[0]).all()) and not bool((hidden == hidden[0]).all())
                self.e.hiding.setdefault(self.eye.turn, inverted and not bool((hidden == shown[0]).any()))

    def _of_data(self, op: Op) -> None:
        """Attention over data as they are, (T, B, C), with no layer before it."""
        mask, rows = op.kwargs.get("key_padding_mask"), op.args[1] if len(op.args) > 1 else op.given[0]  # the keys
        both = isinstance(mask, Tensor) and isinstance(rows, Tensor)
        if both and mask.dim() == 2 and rows.dim() == 3 and not rows.requires_grad:
            self._over_rows(mask if mask.dtype is torch.bool else mask <= LOW, rows.transpose(0, 1))

    def _over_rows(self, mask: Tensor, rows: Tensor) -> None:
        """A mask of (batch, length), with up to two places more in front."""
        if len(mask) != len(rows) or not 0 <= mask.shape[1] - rows.shape[1] <= 2:
            return
        mask, empty = mask[:, mask.shape[1] - rows.shape[1] :], (rows == 0).all(-1)
        if int((~mask).sum()) >= LEAST and int(mask.sum()) >= LEAST:
            self.e.hiding.setdefault(self.eye.turn, bool(empty[~mask].all()) and not bool(empty[mask].any()))
