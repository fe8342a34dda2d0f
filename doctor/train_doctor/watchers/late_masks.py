"""A mask of the answer that is one place late: the losses of the tokens are those of ids[:, 1:], the mask is not.

    each = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    loss = (each * mask[:, :-1]).sum() / mask[:, :-1].sum()             mask[:, 1:] was meant

Then the first token of each answer is never asked for. Which end of its rows a tensor was cut at is known from where
it lies in memory.

Footgun: attention[:, :-1] is right for rows that are filled up in front, and a mask may say from which places on the
model is to answer; then it is right as well. So the mask must begin inside the rows, with tokens that differ from row
to row, behind one that is the same in all (the mark at which the prompt ends), behind prompts that differ; and it must
reach the last place, which a mask of places that answer never does, as nothing comes after it. A first token that
stands in its own prompt (the key that is asked for), or is of a class of its own (the language that is wanted), is
given and is not to be foretold.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import TIMES

CASTS = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "bool", "int", "long", "contiguous", "clone"}
FOLLOWED = CASTS | {"view", "reshape", "flatten", "squeeze", "unsqueeze", "detach", "neg", "__neg__", "negative"}
UNLIKE = {"ne", "__ne__", "not_equal"}
LOSSES = {"cross_entropy", "nll_loss", "gather", "take_along_dim"}
PICKS = {"__getitem__", "masked_select"}
ROWS, VARIED, FRONT, LOOKED = 8, 5, 8, 2**20  # rows; first tokens; tokens in front of them; numbers of a mask


class Cut(NamedTuple):
    """Rows without their last place (0), or without their first (1)."""

    whole: Tensor
    start: int


class Each(NamedTuple):
    """Losses of tokens, which are these ids without their first place."""

    ids: Tensor


class LateMasks(Watcher):
    names = FOLLOWED | UNLIKE | LOSSES | TIMES | PICKS | {"narrow"}
    begins = {"__getitem__", "narrow"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.late: int | None = None  # the token at which the prompts end, since the last backward
        self.right = False  # losses meet a mask that was cut as they were

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        facts = [self.known.get(t) for t in op.given[:2]]
        each, cut = (next((f for f in facts if isinstance(f, kind)), None) for kind in (Each, Cut))
        if each is not None and cut is not None:
            if op.name in TIMES | PICKS:
                self._meet(each.ids, cut)
                for r in op.results[:1]:
                    self.known.put(r, each)  # it may meet the other end of the mask as well
        elif fact := self._fact(op, *facts):
            for r in op.results[:1]:
                self.known.put(r, fact)

    def _fact(self, op: Op, fact: Cut | Each | None, second: Cut | Each | None = None) -> Cut | Each | None:
        if op.name in LOSSES:
            fits = isinstance(second, Cut) and second.start == 1 and op.results and op.results[0].requires_grad
            return Each(second.whole) if fits and op.results[0].numel() == second.whole[:, 1:].numel() else None
        if fact is None:
            return _cut(op.given[0], op.results[0]) if op.name in self.begins and op.results else None
        if op.name in UNLIKE and isinstance(fact, Cut) and len(op.args) == 2 and isinstance(op.args[1], int):
            return Cut(fact.whole != op.args[1], fact.start)
        return fact if op.name in FOLLOWED else None

    def _meet(self, ids: Tensor, mask: Cut) -> None:
        if mask.start == 1:
            self.right = True
        elif mask.whole.shape == ids.shape and mask.whole.numel() <= LOOKED and mask.whole.device == ids.device:
            self.late = _end_of_prompts(ids, mask.whole) if self.late is None else self.late

    def backward(self, loss: Tensor) -> None:
        if self.late is not None and not self.right:
            self.note("F130", self.late)
        self.late, self.right = None, False

    def close(self) -> None:
        self.known.by_id.clear()


def _cut(whole: Tensor, part: Tensor) -> Cut | None:
    if part.dim() == 3 and part.shape[2] == 1:
        part = part.squeeze(2)  # ids[:, 1:, None]
    if whole.dim() != 2 or part.shape != (len(whole), whole.shape[1] - 1) or whole.requires_grad:
        return None
    start = part.storage_offset() - whole.storage_offset()
    same = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() and part.stride() == whole.stride()
    return Cut(whole, int(start > 0)) if same else None


def _end_of_prompts(ids: Tensor, mask: Tensor) -> int | None:
    """The token in front of all answers, where the mask is one of the answers' own places."""
    on = mask != 0
    if not bool((mask == on).all()) or not bool(on[:, -1].any()):
        return None
    ids, on = ids[on.any(1)], on[on.any(1)]
    first, rows = on.long().argmax(1), torch.arange(len(ids), device=ids.device)
    before = min(int(first.min()), FRONT) if len(ids) >= ROWS else 0
    marks, answers = ids[rows, first - 1].unique(), ids[rows, first].unique()
    if len(marks) > 1 or len(answers) < VARIED:
        return None
    varied = any(len(ids[rows, first - back].unique()) >= VARIED for back in range(2, before + 1))
    return int(marks) if varied and not _given(ids, first) else None


def _given(ids: Tensor, first: Tensor) -> bool:
    """Whether all first tokens stand in front of themselves, or none stands anywhere else."""
    asked = ids.gather(1, first[:, None])
    places = torch.arange(ids.shape[1], device=ids.device)
    again = (ids == asked) & (places < first[:, None])
    if bool(again.any(1).all()):
        return True
    return not bool(torch.isin(ids[places != first[:, None]], asked).any())
