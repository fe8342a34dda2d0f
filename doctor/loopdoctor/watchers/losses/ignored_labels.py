"""A class that is taken for padding: `ignore_index=0`, and 0 is the label O of a tagger as well.
And padding that is taken for a class.

    tags = pad_sequence(tags, batch_first=True, padding_value=0)
    F.cross_entropy(logits.reshape(-1, 5), tags.reshape(-1), ignore_index=0)

Padding stands at the ends of rows. So the labels of a batch (B, T) are looked at row by row: are
there ignored ones in the midst of others, beside those at the ends? Labels that were flattened
first are followed to their rows. Of maps (B, H, W) it is asked whether most places are left out, as
a background is.

    tags = pad_sequence(tags, batch_first=True)             0 where there is no word, and 0 is a tag
    F.cross_entropy(logits.reshape(-1, 5), tags.reshape(-1))

Where ids of words (B, T) went into a table and as many labels are judged, the runs of one id at the
ends of rows are padding; is there a label, one and the same, that counts?

Footguns: -100 is no class, and who writes it there means it. With thousands of classes it is words
that were masked, where most are ignored on purpose. Who writes words (as many classes as the table
has rows) may have to write where they end.
"""

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Op, Watcher
from loopdoctor.probes import tail

LOSSES = {"cross_entropy", "nll_loss"}
# share of the labels that stand at padding; its length in some rows; rows of a table
PADDED, RUN, WORDS = 0.1, 3, 16


class IgnoredLabels(Watcher):
    names = begins = LOSSES | {"embedding"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        # ids (B, T) and the rows of their table, since the last backward
        self.words: list[tuple[Tensor, int]] = []

    def saw(self, op: Op) -> None:
        if op.name == "embedding":
            ids, rows = op.given[0], len(op.given[-1])
            if ids.dim() == 2 and rows >= WORDS and self.eye.grad and len(self.words) < 4:
                self.words.append((ids, rows))
            return
        ignored = op.kwargs.get("ignore_index", -100)
        if len(op.given) == 2 and op.kwargs.get("reduction", "mean") != "none":
            for ids, rows in self.words:
                self._at_padding(ids, rows, op.given[0], op.given[1], ignored)

    def _at_padding(
        self, ids: Tensor, rows: int, logits: Tensor, labels: Tensor, ignored: int
    ) -> None:
        if (
            labels.numel() != ids.numel()
            or labels.is_floating_point()
            or logits.shape[1] in (rows, rows + 1)
        ):
            return
        pads = padding(ids)
        if pads is None or pads.float().mean() < PADDED:
            return
        there = labels.detach().reshape(ids.shape)[pads].unique()
        if len(there) == 1 and int(there) != ignored:
            self.note("F15", (int(there), float(pads.float().mean())))

    def backward(self, loss: Tensor) -> None:
        self.words = []

    def close(self) -> None:
        self.words = []


def padding(ids: Tensor) -> Tensor | None:
    """(B, T): runs at the ends of rows, of different lengths, of one id that stands nowhere
    else.
    """
    ends = ids[tail(ids, ids[:, -1:]).sum(1) >= RUN, -1]
    if not len(ends) or bool((ends != ends[0]).any()):
        return None
    pads = ids == ends[0]
    different = len(set(pads.sum(1)[pads.any(1)].tolist())) > 1
    return pads if different and torch.equal(pads, tail(ids, ends[0])) else None
