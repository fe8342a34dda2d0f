"""Lists whose candidates all have one and the same score: a reranker that reads what the texts of a
list share.

    end = (ids == eos).int().argmax(1)
    the first end: that of the question, with which all begin
    scores = head(hidden[rows, end]).view(-1, 4)
    one score per text, four texts to a question
    loss = F.cross_entropy(scores, best)                    ln 4 for ever

It is the same as pairs with one score (same_scores.py), of longer lists.

Footguns: a last layer that begins at zero gives all lists one score as well, so that of the lists
must differ; and the columns of a linear layer may be alike, which are no texts. So each score must
have been one number of its own text before they were laid side by side.
"""

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import OVER, TIMES

LAID = {"view", "reshape", "unflatten", "stack"}
KEEPS = {"to", "float"} | OVER | TIMES
LOSSES = {"cross_entropy", "log_softmax"}
LISTS, SAME = 4, 1e-5  # lists; how far apart those of one list are, as a share of how far lists are
APART = 1e-3  # and these, as a share of the scores


class SameLists(Watcher):
    """Known are scores, one of a text, that were laid out by lists."""

    names, begins = LAID | KEEPS | LOSSES, LAID

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        x, result = (*op.given, None)[0], op.result
        if x is None or not isinstance(result, Tensor):
            return
        if op.name in LOSSES:
            if self.known.get(x) and _over_candidates(op) and _alike(x.detach()):
                self.note("N14 lists", tuple(x.shape))
        elif op.name in LAID:
            single = all(t.dim() == 1 or t.dim() == 2 and t.shape[1] == 1 for t in op.given)
            if single and result.requires_grad and result.dim() == 2 and result.shape[1] > 1:
                self.known.put(result, True)
        elif self.known.get(x) and len(op.given) == 1:
            self.known.put(result, True)

    def close(self) -> None:
        self.known.by_id.clear()


def _over_candidates(op: Op) -> bool:
    return op.name == "cross_entropy" or op.kwargs.get("dim", (*op.args, None)[1]) in (1, -1)


def _alike(scores: Tensor) -> bool:
    """Whether those of a list are, and lists are not."""
    # fewer bits round differences away
    if len(scores) < LISTS or scores.dtype is not torch.float32:
        return False
    firsts, within = scores[:, 0], (scores.amax(1) - scores.amin(1)).max()
    between = firsts.max() - firsts.min()
    # and not by rounding
    return bool(within <= SAME * between) and bool(between > APART * firsts.abs().max())
