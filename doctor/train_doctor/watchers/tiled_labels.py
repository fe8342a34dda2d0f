"""Labels of clips that are laid along the frames the other way: `y.repeat(T)` beside `clip.flatten(0, 1)`.

    frames = clip.flatten(0, 1)             (B, T, ...) to (B * T, ...): all frames of the first clip, then the next
    y.repeat(T)                             y0 y1 y2 ... y0 y1 y2 ...
    y.repeat_interleave(T)                  y0 y0 ... y1 y1 ...             was meant

Both have B * T rows, so nothing is raised, and most frames get the label of another clip. What went into the network is
remembered with its two sizes, and so are labels that were repeated.

Footguns: frames that were laid one time after the other, (T, B, ...), want `repeat`. So the sizes are compared in
order, and must differ. And answers may be laid anew before the loss.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import LOSSES, VIEWS, kind

FLAT, TILES = {"flatten", "view", "reshape"}, {"repeat", "tile"}
LEAST = 2


class TiledLabels(Watcher):
    """Known are labels that were repeated as a whole -> (how many, how often)."""

    begins = FLAT | TILES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.frames: set[tuple[int, int]] = set()  # (rows, pieces of each) of what was flattened to single pieces

    def saw(self, op: Op) -> None:
        x, result = (*op.given, None)[0], op.result
        if x is None or not isinstance(result, Tensor):
            return
        if op.name in LOSSES:
            sizes = self.known.get(op.given[1]) if len(op.given) > 1 else None
            node, laid = x.grad_fn, False
            while kind(node) in VIEWS:
                laid = laid or kind(node) in ("Transpose", "Permute")
                node = node.next_functions[0][0]
            if sizes and sizes in self.frames and not laid and len(x) == sizes[0] * sizes[1]:
                self.note("D29", sizes)
        elif op.name in TILES and x.dim() == 1 and result.dim() == 1 and not x.requires_grad:
            often = len(result) // max(1, len(x))
            if min(len(x), often) >= LEAST and len(x) != often:
                self.known.put(result, (len(x), often))
        elif op.name in FLAT and x.dim() > 2 and result.dim() == x.dim() - 1 and x.is_floating_point():
            if len(result) == x.shape[0] * x.shape[1] and result.shape[1:] == x.shape[2:] and x.is_contiguous():
                self.frames.add(tuple(x.shape[:2]))
        elif op.name in ("long", "float", "to", "unsqueeze", "view", "reshape") and (sizes := self.known.get(x)):
            self.known.put(result, sizes)

    def backward(self, loss: Tensor) -> None:
        self.frames = set()

    def close(self) -> None:
        self.known.by_id.clear()
