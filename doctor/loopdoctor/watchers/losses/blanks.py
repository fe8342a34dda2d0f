"""Labels that stand for the blank of a CTC loss: the index is 0 unless it is given, and labels
often begin at 0.

The blank means that nothing is said here. A label with its number can never be written, for it is
taken out again when the answer is read, and the two are learned as one.

Footgun: rows of labels are filled up to one length, often with the blank. Only what the lengths say
is text counts. Where that is all of each row, and blanks stand at the ends of rows alone, it is the
lengths that are wrong.
"""

import torch
from torch import Tensor

from loopdoctor.eye import Op, Watcher
from loopdoctor.probes import tail


class Blanks(Watcher):
    names = {"ctc_loss"}

    def saw(self, op: Op) -> None:
        if len(op.args) < 4 or not isinstance(op.args[1], Tensor) or op.args[1].is_floating_point():
            return
        targets, blank = op.args[1], op.kwargs.get("blank", op.args[4] if len(op.args) > 4 else 0)
        at_ends = False
        if targets.dim() == 2:
            lengths = torch.as_tensor(op.args[3], device=targets.device).view(-1, 1)
            blanks = targets == blank
            at_ends = bool((lengths == targets.shape[1]).all()) and torch.equal(
                blanks, tail(targets, blank)
            )
            targets = targets[torch.arange(targets.shape[1], device=targets.device) < lengths]
        if count := int((targets == blank).sum()):
            self.note("F66", (blank, count, targets.numel(), at_ends))
