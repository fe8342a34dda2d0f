"""Boxes that are written from a corner and are taken for a centre and a size.

    boxes = annotation["bbox"]                      COCO: x and y of the corner, width, height
    x, y, w, h = boxes.unbind(-1)
    corners = stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1)      as of a centre

All boxes are learned half their size too far to the left and to the top. It shows where boxes in shares of the picture
reach over its edge when read from their centre, and none does when read from its corner.

Footgun: pieces of a picture cut boxes off, and then a centre may lie near an edge. So many must reach over it, on the
left or at the top, and all must fit when read from the corner.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, TIMES

PICKS = {"unbind", "__getitem__", "select", "split", "chunk", "tensor_split"}
LEAST, SHARE, EDGE = 48, 0.15, 1e-4  # boxes; of them over an edge; of the picture


class BoxCentres(Watcher):
    """Known are columns of boxes, and halves of the last two of them."""

    begins = PICKS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.turns: set[int] = set()
        self.seen: dict[int, list[int]] = {}  # column -> boxes, those over the edge; -1 once one does not fit

    def saw(self, op: Op) -> None:
        x = op.given[0] if op.given else None
        if x is None or not op.results or x.requires_grad:
            return
        if op.name in PICKS and x.dim() == 2 and x.shape[1] == 4 and x.is_floating_point():
            self._columns(op, x)
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name in OVER | TIMES and facts == [facts[0]] and facts[0] is not None and not facts[0][2]:
            boxes, column, _ = facts[0]
            number = next((a for a in op.args if isinstance(a, (int, float))), None)
            if column > 1 and number == (2 if op.name in OVER else 0.5):
                self.known.put(op.results[0], (boxes, column, True))
        elif op.name in MINUS and len(facts) == 2 and None not in facts:
            (boxes, column, half), (others, size, halved) = facts
            if boxes is others and halved and not half and size == column + 2:
                self._look(boxes, column)

    def _columns(self, op: Op, x: Tensor) -> None:
        if op.name in ("unbind", "split", "chunk", "tensor_split"):
            for n, r in enumerate(op.results) if len(op.results) == 4 else ():
                self.known.put(r, (x, n, False))
        elif op.name == "__getitem__" and isinstance(op.args[1], tuple) and len(op.args[1]) == 2:
            rows, column = op.args[1]
            every = rows is Ellipsis or isinstance(rows, slice) and rows == slice(None)
            if every and type(column) is int and -4 <= column < 4:
                self.known.put(op.results[0], (x, column % 4, False))

    def _look(self, boxes: Tensor, column: int) -> None:
        self.turns.add(self.eye.turn)
        begins, sizes = boxes.detach()[:, column], boxes.detach()[:, column + 2]
        seen = self.seen.setdefault(column, [0, 0])
        fits = bool((begins >= -EDGE).all()) and bool((sizes >= 0).all()) and bool((begins + sizes <= 1 + EDGE).all())
        if not fits or seen[0] < 0:
            self.seen[column] = [-1, 0]
            return
        seen[0] += len(boxes)
        seen[1] += int((begins - sizes / 2 < -EDGE).sum())

    def close(self) -> None:
        all_fit = all(number >= 0 for number, _ in self.seen.values())
        for number, over in self.seen.values() if all_fit else ():
            if number >= LEAST and over >= SHARE * number:
                for turn in self.turns:
                    self.note("F86", ("centre", over / number), turn)
        self.seen.clear()
        self.known.by_id.clear()
