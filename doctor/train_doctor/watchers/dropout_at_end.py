"""Answers that a dropout has gone through: a network whose last layer is a dropout.

    nn.Sequential(..., nn.Linear(64, 10), nn.Dropout(0.5))

Half of the answers of a step are 0, whatever was learned, and the others are doubled. The loss judges these numbers, so
the model learns to answer against a noise that is gone at inference. What a dropout gives is followed through views
into a loss.

Footgun: a dropout before the last layer, or between a last layer and a cosine, is a regulariser. So nothing but views
may lie between.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import LOSSES

DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
VIEWS = {"view", "reshape", "squeeze", "unsqueeze", "flatten", "transpose", "permute", "__getitem__", "float", "to"}
VIEWS |= {"contiguous", "T", "t"}


class DropoutAtEnd(Watcher):
    names = DROPOUTS | VIEWS | set(LOSSES) | {"log_softmax"}
    begins = DROPOUTS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # what a dropout gave -> its share

    def saw(self, op: Op) -> None:
        if op.name in DROPOUTS:
            share = op.kwargs.get("p", 0.5)
            if op.kwargs.get("training", True) and share and isinstance(op.result, Tensor) and op.result.requires_grad:
                self.known.put(op.result, float(share))
            return
        share = self.known.get(op.given[0]) if op.given else None
        if share is None:
            return
        if op.name in VIEWS:
            if isinstance(op.result, Tensor):
                self.known.put(op.result, share)
        else:
            self.e.wet.setdefault(self.eye.turn, (op.name, share))

    def close(self) -> None:
        self.known.by_id.clear()
