"""A causal network whose first place is read: that place has seen nothing but itself.

    hidden = gpt(ids)                       causal: place n sees the places up to n
    self.head(hidden[:, 0])                 as one reads BERT, whose first place sees all
    self.head(hidden[rows, lengths - 1])

All attention of the step must be causal, all rows must begin with the same token, and nothing may be made of any other
place. Then all rows get the same answer.

Footgun: a first token may tell (a language, a class that is to be drawn). So it must be the same in all rows.
"""

from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher

ATTENTION = "scaled_dot_product_attention"
LEAST, PLACES = 4, 3  # rows; places


class FirstPlaces(Watcher):
    names = {ATTENTION, "softmax", "__getitem__", "cross_entropy"}
    begins = names

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.causal: list[bool] = []  # of each attention since the last backward
        self.read = 0  # rows whose first place was read

    def saw(self, op: Op) -> None:
        if not self.eye.grad or not op.given or not op.results:
            return
        x = op.given[0]
        if op.name == ATTENTION:
            self.causal.append(_causal(op))
        elif op.name == "softmax" and op.result.dim() == 4 and op.result.shape[2] == op.result.shape[3] > 1:
            self.causal.append(not bool(op.result.detach()[:, :, 0, 1:].any()))
        elif op.name == "cross_entropy" and x.dim() == 3:
            self.read = -1  # a loss over places
        elif op.name == "__getitem__" and x.dim() == 3 and x.requires_grad and self.read >= 0:
            self._look(op.args[1], x)

    def _look(self, index, x: Tensor) -> None:
        alike = [i for i in self.e.lookups if i.shape == x.shape[:2] and len(i) >= LEAST and i.shape[1] >= PLACES]
        if not alike:
            return
        rows = isinstance(index, tuple) and len(index) > 1 and isinstance(index[0], slice) and index[0] == slice(None)
        if rows and (index[1] is None or isinstance(index[1], slice) and index[1] == slice(None)):
            return  # no place is chosen
        first = rows and type(index[1]) is int and index[1] == 0
        same = first and all(bool((ids[:, 0] == ids[0, 0]).all()) and bool((ids != ids[:1]).any()) for ids in alike)
        self.read = len(x) if same else -1

    def backward(self, loss: Tensor) -> None:
        if self.read > 0 and self.causal and all(self.causal):
            self.note("F124", (self.read,))
        self.causal, self.read = [], 0

    def close(self) -> None:
        self.causal = []


def _causal(op: Op) -> bool:
    """Whether the first place sees itself alone."""
    if op.kwargs.get("is_causal", op.args[5] if len(op.args) > 5 else False):
        return True
    mask = op.kwargs.get("attn_mask", op.args[3] if len(op.args) > 3 else None)
    if not isinstance(mask, Tensor) or mask.dim() < 2 or mask.shape[-1] < PLACES or mask.shape[-2] < PLACES:
        return False
    first = mask.detach()[..., 0, 1:]
    return not bool(first.any()) if not first.is_floating_point() else bool((first < -1e4).all())
