"""Classes that were mixed like colours: a mask of class ids that is resized bilinearly.

    mask = F.interpolate(mask.float(), size=..., mode="bilinear").long()

Between class 1 and class 5 lies 3 on the new grid, which is another class, or none at all. So whole numbers are
followed as floats through views into a function that interpolates, and back to whole numbers, to where a loss takes
them for classes.

Footgun: of two classes, 0 and 1, nothing is invented between them; only the edge moves. So there must be a third one.
"""

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import CLASSES

CASTS = {"float", "double", "half", "to", "type", "type_as", "long", "int", "round", "floor"}
VIEWS = {
    *("__getitem__", "unsqueeze", "squeeze", "view", "reshape", "permute", "transpose", "contiguous", "clone", "cpu"),
    *("cuda", "expand", "flatten", "cat", "stack", "detach", "movedim", "select", "narrow", "index_select", "clamp"),
}
SMOOTH = ("linear", "bilinear", "bicubic", "trilinear", "area")
UPSAMPLED = {
    f"{private}upsample_{mode}"
    for private in ("", "_")
    for mode in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d", "bilinear2d_aa", "bicubic2d_aa")
}
WHOLE, MIXED = "whole", "mixed"


class Blended(Watcher):
    names = CASTS | VIEWS | {*CLASSES, "interpolate", "grid_sample", *UPSAMPLED}
    begins = CASTS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        first = op.given[0]
        if op.name in CLASSES:
            target = op.kwargs.get("target", op.given[1] if len(op.given) > 1 else first)
            fact = self.known.get(target)
            if fact is not None and fact[0] == MIXED and not target.is_floating_point() and bool((target > 1).any()):
                self.e.blended.setdefault(self.eye.turn, fact[1])
            return
        fact = self.known.get(first)
        if op.name in CASTS and fact is None and not first.is_floating_point() and first.numel() > 1:
            fact = (WHOLE, "")
        if fact is None:
            return
        mode = _mode(op)
        if mode:
            fact = (MIXED, mode) if mode in SMOOTH else fact
        elif op.name not in CASTS and op.name not in VIEWS:
            return
        for r in op.results:
            self.known.put(r, fact)

    def close(self) -> None:
        self.known.by_id.clear()


def _mode(op: Op) -> str:
    """How a function makes a grid of another; "" for any other function."""
    if op.name == "interpolate":
        return op.kwargs.get("mode", op.args[3] if len(op.args) > 3 else "nearest")
    if op.name == "grid_sample":
        return op.kwargs.get("mode", op.args[2] if len(op.args) > 2 else "bilinear")
    return op.name.partition("upsample_")[2].rstrip("123d_a") if op.name in UPSAMPLED else ""
