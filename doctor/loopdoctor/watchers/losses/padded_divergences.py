"""A distillation of texts that averages over their padding: `F.kl_div(student, teacher,
reduction="batchmean")`.

    kl = F.kl_div(log_q, p, reduction="none").sum(-1)       (B, T)
    loss = kl.mean()                                        padding is a place like any other
    loss = (kl * mask).sum() / mask.sum()

What a divergence over all places gave is followed to one number. Whether there is padding, and how
much, is known from the mask that the model was given; the check asks for it.

Footgun: what was multiplied with a mask, or picked, is left alone, and so are places that were
chosen before.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import OVER, TIMES

HALF = 0.5  # of the sum of a row of shares
KEEPS = {"sum", "view", "reshape", "squeeze", "clamp", "neg"} | TIMES | OVER


class PaddedDivergences(Watcher):
    """What is known of a tensor: the places of the divergence in it, (B, T) or (B * T,)."""

    names = KEEPS | {"kl_div", "mean"}
    begins = {"kl_div"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        r = op.result
        if not isinstance(r, Tensor) or not r.requires_grad or not op.given:
            return
        places = self.known.get(op.given[0])
        if op.name == "kl_div":
            places = tuple(op.given[0].shape[:-1])
            target = op.given[1].detach() if len(op.given) > 1 else None
            if (
                target is None
                or not op.kwargs.get("log_target")
                and float(target.sum(-1).min()) < HALF
            ):
                return  # no target at all where there is padding
            if not r.dim():
                self.note("F15 divergence", places)
                return
        elif places is None or any(t.numel() > 1 for t in op.given[1:]):
            return
        if not r.dim() and op.name in ("mean", "sum"):
            self.note("F15 divergence", places)
        elif r.dim():
            self.known.put(r, places)

    def close(self) -> None:
        self.known.by_id.clear()
