"""Labels that mean "none", pushed into the range of the classes: `F.cross_entropy(out, y.clamp(max=classes - 1))`.

255 marks the pixels that nobody labelled, or -1 the rows without a label. With 5 classes both are errors of index, and
a clamp silences them: then each such pixel is asked for as class 4, or as class 0.

Footguns: numbers that are sorted into bins may lie just beyond the last one, or anywhere. So only one number must have
been changed, and it must lie far from the classes, or below them; and into one of theirs, for a mask of 0 and 255, or
labels of -1 and 1, become classes in this way. A loss of each row may be masked afterwards, and one class left out.
"""

from train_doctor.eye import Eye, Known, Op, Watcher

CUTS = {"clamp", "clip", "clamp_max", "clamp_min", "minimum", "maximum"}
KEEPS = {"to", "long", "view", "reshape", "flatten", "squeeze"}
LOSSES = {"cross_entropy", "nll_loss"}
FAR, SHARE, LOOKED = 2, 0.01, 2**22  # from the last class; of the labels; numbers


class ClampedLabels(Watcher):
    """What is known of a tensor: the number that was changed, into which, and how large its share is."""

    names, begins = CUTS | KEEPS | LOSSES, CUTS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name in LOSSES:
            fact = self.known.get(op.given[1]) if len(op.given) > 1 and op.given[0].requires_grad else None
            if fact is not None and op.kwargs.get("reduction", "mean") != "none":
                left_out = op.kwargs.get("ignore_index") == fact[1]
                weights = op.given[2] if len(op.given) > 2 and op.given[2].dim() == 1 else None
                if not left_out and (weights is None or fact[1] < len(weights) and bool(weights[fact[1]])):
                    self.note("D39", fact)
            return
        fact = _cut(op) if op.name in CUTS else self.known.get(op.given[0])
        for r in op.results if fact else ():
            self.known.put(r, fact)

    def close(self) -> None:
        self.known.by_id.clear()


def _cut(op: Op) -> tuple[int, int, float] | None:
    if not op.given or not op.results:
        return None
    before, after = op.given[0], op.results[0]
    if before.is_floating_point() or before.shape != after.shape or not 0 < before.numel() <= LOOKED:
        return None
    changed = before != after
    values = before[changed].unique()
    if len(values) != 1:
        return None
    mark, share, into = int(values), float(changed.float().mean()), int(after[changed][0])
    kept = before[~changed]
    if share < SHARE or not bool((kept == into).any()) or not (mark < 0 or mark >= int(kept.max()) + FAR):
        return None
    return mark, into, share
