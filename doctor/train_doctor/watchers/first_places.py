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

ATTENTION, WHOLE = "scaled_dot_product_attention", "multi_head_attention_forward"  # the latter in torch's layers
MEANS = {"mean", "sum", "amax", "max"}
LEAST, PLACES = 4, 3  # rows; places


class FirstPlaces(Watcher):
    names = {ATTENTION, WHOLE, "softmax", "__getitem__", "cross_entropy"} | MEANS
    begins = names

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.causal: list[bool] = []  # of each attention since the last backward
        self.read = 0  # rows whose first place was read
        self.alike: bool | None = None  # all rows begin with one token; not known yet

    def saw(self, op: Op) -> None:
        if not self.eye.grad or not op.given or not op.results:
            return
        x = op.given[0]
        if op.name in (ATTENTION, WHOLE, "softmax") and not self._begin_alike():
            return  # masks need not be read
        if op.name == ATTENTION:
            self.causal.append(_causal(op))
        elif op.name == WHOLE:
            self.causal.append(_hides(op.kwargs.get("attn_mask")))
        elif op.name == "softmax" and op.result.dim() == 4 and op.result.shape[2] == op.result.shape[3] > 1:
            self.causal.append(not bool(op.result.detach()[:, :, 0, 1:].any()))
        elif op.name == "cross_entropy" and x.dim() == 3:
            self.read = -1  # a loss over places
        elif op.name == "__getitem__" and x.dim() == 3 and x.requires_grad and self.read >= 0:
            self._look(op.args[1], x)
        elif op.name in MEANS and x.dim() == 3 and x.requires_grad and _over_places(op):
            self.read = -1 if any(ids.shape == x.shape[:2] for ids in self.e.lookups) else self.read

    def _begin_alike(self) -> bool:
        """Whether all rows that tables were asked for begin with one token, and differ."""
        if self.alike is None and (rows := [i for i in self.e.lookups if len(i) >= LEAST and i.shape[1] >= PLACES]):
            self.alike = all(bool((i[:, 0] == i[0, 0]).all()) and bool((i != i[:1]).any()) for i in rows)
        return bool(self.alike)

    def _look(self, index, x: Tensor) -> None:
        if not any(ids.shape == x.shape[:2] for ids in self.e.lookups):
            return
        rows = isinstance(index, tuple) and len(index) > 1 and isinstance(index[0], slice) and index[0] == slice(None)
        if rows and (index[1] is None or isinstance(index[1], slice) and index[1] == slice(None)):
            return  # no place is chosen
        first = rows and type(index[1]) is int and index[1] == 0
        self.read = len(x) if first and self._begin_alike() else -1

    def backward(self, loss: Tensor) -> None:
        if self.read > 0 and self.causal and all(self.causal):
            self.note("F124", (self.read,))
        self.causal, self.read, self.alike = [], 0, None

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


def _hides(mask) -> bool:
    """Whether such a mask of torch's layers, in which True hides, leaves the first place itself alone."""
    if not isinstance(mask, Tensor) or mask.dim() < 2 or min(mask.shape[-2:]) < PLACES:
        return False
    first = mask.detach()[..., 0, :]
    hidden = first < -1e4 if first.is_floating_point() else first.bool()
    return bool(hidden[..., 1:].all()) and not bool(hidden[..., 0].any())


def _over_places(op: Op) -> bool:
    over = op.kwargs.get("dim", (*op.args, None)[1])
    return over in (1, -2) or isinstance(over, list | tuple) and bool({1, -2} & {*over})
