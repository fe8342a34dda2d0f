"""Attention masks that hide the text and show the padding.

    key_padding_mask = ids != PAD            torch's layers hide what is True; ids == PAD was meant

A mask of (batch, length) becomes minus infinity on the scores, by `masked_fill`. There it is laid over the ids that the
embedding was given last: what it shows and what it hides.

Footgun: padding is known by being one and the same id everywhere. A text of one word would pass for it, so what is
hidden must hold several.
"""

import torch
from torch import Tensor

from train_doctor.eye import Op, Watcher

LOW, LEAST = -1e4, 8  # a score that hides; ids that are shown


class Masks(Watcher):
    names = {"masked_fill"}

    def saw(self, op: Op) -> None:
        if op.name != "masked_fill" or len(op.given) < 2 or not self.e.lookups:
            return
        value = op.kwargs.get("value", op.args[2] if len(op.args) > 2 else 0.0)
        mask, ids = op.given[1], self.e.lookups[-1]
        if isinstance(value, Tensor) or not value <= LOW or mask.dtype is not torch.bool:
            return
        mask = mask.reshape([size for n, size in enumerate(mask.shape) if size > 1 or n == 0])
        if mask.shape == ids.shape and mask.device == ids.device:
            shown, hidden = ids[~mask], ids[mask]
            if len(shown) >= LEAST and len(hidden) > 1:
                inverted = bool((shown == shown[0]).all()) and not bool((hidden == hidden[0]).all())
                self.e.hiding.setdefault(self.eye.turn, inverted and not bool((hidden == shown[0]).any()))
