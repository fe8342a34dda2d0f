"""Pseudo-labels that are trusted by a threshold on logits, which are no probabilities.

    sure, label = model(weak).max(1);  mask = sure > 0.95               logits are above 0.95 soon, and often
    sure, label = model(weak).softmax(1).max(1)

The largest of what a layer answered, as it is and without a gradient, is compared with a number between one half and
one.

Footgun: scores of a network that ends in a sigmoid lie between 0 and 1 and are compared as they are. So some of the
numbers must lie outside, and nothing may come between the layer and the maximum.
"""

from train_doctor.eye import Eye, Known, Op, Watcher

LAYERS, MOST = {"linear", "addmm"}, {"max", "amax"}
COMPARES = {"gt", "ge", "__gt__", "__ge__"}
VIEWS = {"detach", "squeeze", "view", "float", "clone", "__getitem__", "chunk", "split", "narrow"}
LEAST = 8  # rows


class Confidences(Watcher):
    """Known is whether it is the largest of each row (else all of a row's logits)."""

    begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if r is None or not op.given:
            return
        if op.name in LAYERS:
            if r.dim() == 2 and len(r) >= LEAST and r.shape[1] > 1:
                self.known.put(r, False)
            return
        fact = self.known.get(op.given[0])
        if fact is None:
            return
        if op.name in VIEWS:
            for result in op.results:
                self.known.put(result, fact)
        elif op.name in MOST and fact is False and len(op.given) == 1 and r.dim() == 1 and not r.requires_grad:
            self.known.put(r, True)
        elif op.name in COMPARES and fact and len(op.given) == 1:
            number = next((a for a in op.args[1:] if isinstance(a, float)), 0.0)
            if 0.5 <= number < 1 and bool(((op.given[0] < 0) | (op.given[0] > 1)).any()):
                self.note("F112", number)

    def close(self) -> None:
        self.known.by_id.clear()
