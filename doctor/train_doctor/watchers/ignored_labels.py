"""A class that is taken for padding: `ignore_index=0`, and 0 is the label O of a tagger as well.

    tags = pad_sequence(tags, batch_first=True, padding_value=0)
    F.cross_entropy(logits.reshape(-1, 5), tags.reshape(-1), ignore_index=0)

Padding stands at the ends of rows. So the labels of a batch (B, T) are looked at row by row: are there ignored ones in
the midst of others, beside those at the ends? Labels that were flattened first are followed to their rows. Of maps
(B, H, W) it is asked whether most places are left out, as a background is.

Footguns: -100 is no class, and who writes it there means it. With thousands of classes it is words that were masked,
where most are ignored on purpose.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

FLAT = {"view", "reshape", "flatten"}
CLASSES, SHARE, MOST = 64, 0.2, 0.5  # of classes, at most; of the labels that stand in the midst; of a map


class IgnoredLabels(Watcher):
    """Known are the rows from which labels were flattened."""

    names = FLAT | {"cross_entropy", "nll_loss"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name in FLAT:
            x = op.given[0]
            if x.dim() == 2 and not x.is_floating_point() and op.results and op.results[0].dim() == 1:
                self.known.put(op.results[0], x)
            return
        ignored = op.kwargs.get("ignore_index", -100)
        if not 0 <= ignored < CLASSES or len(op.given) < 2 or op.given[0].dim() < 2 or op.given[0].shape[1] > CLASSES:
            return
        if op.given[1].dim() == 3 and op.given[0].dim() == 4 and ignored < op.given[0].shape[1]:
            share = float((op.given[1] == ignored).float().mean())
            if share > MOST and len(op.given[1].unique()) > 1:
                self.note("F98", (int(ignored), share))
            return
        labels = op.given[1] if op.given[1].dim() == 2 else self.known.get(op.given[1])
        if isinstance(labels, Tensor) and labels.dim() == 2 and ignored < op.given[0].shape[1]:
            self._look(labels.detach(), int(ignored))

    def _look(self, labels: Tensor, ignored: int) -> None:
        kept = labels != ignored
        begun, left = kept.long().cumsum(1) > 0, kept.long().flip(1).cumsum(1).flip(1) > 0
        within, ends = begun & left, bool((~left).any())
        share = float((within & ~kept).sum() / within.sum().clamp(min=1))
        if ends and share > SHARE:
            self.note("F98", (ignored, share))

    def close(self) -> None:
        self.known.by_id.clear()
