"""A mean over places that takes the padding along: `h.mean(dim=1)` of rows that were filled up to
one length.

    h.mean(1)                                           a short row counts mostly what it was filled
                                                        with
    (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    h[:, -1], score(h).squeeze(-1)[:, -1]               the last place of most rows is padding

Rows that end in one and the same vector, in runs of several lengths, are followed from a first
layer to a mean over their places (endings.py tells such rows).

Footgun: where a mask of the places has multiplied them, or filled them in, nothing is said, and nor
is it where a number for each row multiplies the mean, by which zeros in the padding can be made up
for.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.layers.endings import RUN, SHARE, runs_at_end
from loopdoctor.watchers.operators import OVER, TIMES

FIRST = {"linear", "embedding", "conv1d", "gru", "lstm"}
SOME = 8
MEANS = {"mean", "adaptive_avg_pool1d"}
MASKED = TIMES | {"masked_fill", "where"}


class Pooled(Watcher):
    """What is known of a tensor: how many of how many rows are padded, and of how many places."""

    begins = FIRST | TIMES | OVER

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.lasts: list[tuple] = []  # of the last places
        self.means: list[tuple[Tensor, tuple]] = []  # of this step, and how many rows were padded

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        fact = next((f for f in map(self.known.get, op.given) if f), None)
        if fact is None:
            fact = self._begins(op) if op.name in FIRST else None
            # by the share of the places that are filled
            if op.name in TIMES | OVER and len(op.given) == 2:
                self.means = [
                    (m, f)
                    for m, f in self.means
                    if not any(m is t for t in op.given) or not _rows(op, f)
                ]
        elif op.name == "__getitem__" and fact[0] < fact[1] and _last(op, fact):
            self.lasts.append(fact)
            return
        elif op.name == "__setitem__":
            self.known.put(op.given[0], None)  # a mask, it may be
            return
        elif op.name in MASKED and any(_masks(t, fact) for t in op.given):
            return
        elif op.name in MEANS:
            dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
            if op.name != "mean":
                dim = -1 if op.result.shape[-1] == 1 else None
            x = op.given[0]
            if isinstance(dim, int) and x.dim() == 3 and x.shape[dim] == fact[2] != fact[1]:
                self.means.append((op.result, fact))
            return
        for r in op.results if fact else ():
            if r.requires_grad and (
                r.dim() == 3 and set(fact[1:]) <= set(r.shape) or _scores(op, r, fact)
            ):
                self.known.put(r, fact)

    def _begins(self, op: Op) -> tuple[int, int, int] | None:
        x = op.result if op.name == "embedding" else op.given[0]
        if not isinstance(x, Tensor) or x.dim() != 3 or op.name != "embedding" and x.requires_grad:
            return None
        x = x.transpose(1, 2) if op.name == "conv1d" else x
        runs = runs_at_end(x.detach()[..., :SOME])  # of each place a few numbers tell it
        if runs is None or len(set(runs.tolist())) < 3:
            return None
        padded = int((runs >= RUN).sum())
        return (padded, len(runs), x.shape[1]) if padded >= SHARE * len(runs) else None

    def backward(self, loss: Tensor) -> None:
        means, self.means = self.means, []
        lasts, self.lasts = self.lasts, []
        for _, fact in means:
            self.note("S25", fact[:2])
        for fact in lasts:
            self.note("S25 last", fact[:2])

    def close(self) -> None:
        self.known.by_id.clear()
        self.means, self.lasts = [], []


def _last(op: Op, fact: tuple) -> bool:
    """x[:, -1], of (B, T, C), or of a score for each place."""
    key, x = op.args[1], op.given[0]
    whole = (
        isinstance(key, tuple)
        and 2 <= len(key) <= x.dim()
        and isinstance(key[0], slice)
        and key[0] == slice(None)
    )
    last = whole and isinstance(key[1], int) and key[1] in (-1, x.shape[1] - 1)
    return last and x.dim() in (2, 3) and x.shape[1] == fact[2] and x.requires_grad


def _scores(op: Op, r: Tensor, fact: tuple) -> bool:
    """Whether it is one number for each place, of as many."""
    return r.shape == fact[1:] and op.given[0].numel() == r.numel()


def _masks(t: Tensor, fact: tuple) -> bool:
    """Whether it has a number for each place, or for each number there."""
    return (
        not t.requires_grad
        and t.numel() >= fact[1] * fact[2]
        and t.numel() % (fact[1] * fact[2]) == 0
    )


def _rows(op: Op, fact: tuple) -> bool:
    """Whether one of both is a number for each row."""
    return any(not t.requires_grad and t.numel() == fact[1] for t in op.given)
