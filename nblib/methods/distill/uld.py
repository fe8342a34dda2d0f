"""Distillation between two vocabularies: Universal Logit Distillation compares sorted
probabilities.

    D(p, q) = sum_i | p_(i) - q_(i) |
    p_(1) >= p_(2) >= ...,  the shorter one is filled up with zeros
    loss    = cross-entropy on the labels + weight * mean D

A student with another tokenizer has other tokens, so no entry of p belongs to an entry of q and no
KL exists. Boizard et al. (2024, arXiv:2402.12030) sort both: D is what a transport of p to q costs
when every two tokens are equally far apart, up to a factor. It is 0 for equal distributions in any
order of the vocabulary, and at most 2.

Which positions are compared? The paper takes the first of one with the first of the other. After a
few tokens these have read different texts. Here a position of the student is compared with the
position of the teacher which has read the same bytes (`aligned`). The tokenizers must be
byte-level, and both must know the same special tokens.

Footgun: sorting forgets which token is meant. A student that is sure of the wrong token is as far
from the teacher as one that is sure of the right one. So D teaches how sure to be and nothing else:
without labels no student learns text.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nblib import losses, text, wiring
from nblib.losses import Batch, Terms

NONE = -1  # a position of the student that the teacher has no partner for


def distance(student: Tensor, teacher: Tensor) -> Tensor:
    """D of logits (N, V) and (N, W), one number per row."""
    p, q = (
        logits.float().softmax(-1).sort(dim=-1, descending=True).values
        for logits in (teacher, student)
    )
    wide = max(p.shape[-1], q.shape[-1])
    p, q = (F.pad(x, (0, wide - x.shape[-1])) for x in (p, q))
    return (p - q).abs().sum(-1)


def aligned(ids: Tensor, tokenizer, teachers) -> tuple[Tensor, Tensor]:
    """Return the same rows in the teacher's tokens (B, S), and for every position of ids (B, T) the
    one of the teacher that has read the same bytes, or NONE.
    """
    rows, places = [], torch.full(ids.shape, NONE)
    for b, row in enumerate(ids.tolist()):
        words = tokenizer.decode(row, clean_up_tokenization_spaces=False)
        theirs = teachers(words, add_special_tokens=False)["input_ids"]
        read, read_by_teacher = _bytes_read(row, tokenizer), _bytes_read(theirs, teachers)
        # else a row begins or ends inside of a character
        if theirs and read[-1] == read_by_teacher[-1]:
            at = {end: j for j, end in enumerate(read_by_teacher)}
            places[b] = torch.tensor([at.get(end, NONE) for end in read])
        rows.append(torch.tensor(theirs or [teachers.pad_token_id]))
    return nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=teachers.pad_token_id
    ), places


def by_index(ids: Tensor, tokenizer, teachers) -> tuple[Tensor, Tensor]:
    """Return the same rows, and the paper's partners: the first with the first."""
    theirs, _ = aligned(ids, tokenizer, teachers)
    numbers = torch.arange(ids.shape[1])
    lengths = (theirs != teachers.pad_token_id).sum(1, keepdim=True)
    return theirs, torch.where(numbers < lengths, numbers, NONE)


def _bytes_read(ids: list[int], tokenizer) -> list[int]:
    """How many bytes have been read after each token; a special token counts by its name, in both
    tokenizers alike.
    """
    lengths = torch.tensor([len(token) for token in tokenizer.convert_ids_to_tokens(ids)])
    return lengths.cumsum(0).tolist()


class Paired:
    """Batches of the student's rows with the teacher's beside them; where they stand is where the
    batches stand.
    """

    def __init__(self, batches: text.Batches, tokenizer, teachers, *, pair: Callable = aligned):
        self.batches, self.tokenizer, self.teachers, self.pair = batches, tokenizer, teachers, pair
        self.tokens = batches.tokens

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self.batches)
        theirs, places = self.pair(batch["input_ids"], self.tokenizer, self.teachers)
        return batch | {"teacher_ids": theirs, "teacher_at": places}

    @property
    def epoch(self) -> int:
        return self.batches.epoch

    def state_dict(self) -> dict:
        return self.batches.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.batches.load_state_dict(state)


def from_teacher(teacher: nn.Module, *, weight: float = 1.5) -> Callable[[nn.Module, Batch], Terms]:
    """Return the labels' loss and `weight` times the mean D over the positions that have a partner;
    batches of `Paired`.
    """
    if not weight > 0:
        raise ValueError(f"weight = {weight}: must be above 0")
    if teacher.training or wiring.trainable(teacher):
        raise ValueError(
            "the teacher must be frozen and in evaluation mode: models.as_teacher(teacher)"
        )

    def terms(model: nn.Module, batch: Batch) -> Terms:
        places = batch["teacher_at"].clone()
        places[:, -1] = NONE  # the last token of a row predicts nothing here
        rows, mine = (places != NONE).nonzero(as_tuple=True)
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        with torch.no_grad():
            theirs = teacher(input_ids=batch["teacher_ids"], use_cache=False).logits[
                rows, places[rows, mine]
            ]
        scores, targets = losses.shifted_rows(logits, Batch.of(batch))
        values = {"ce": F.cross_entropy(scores.float(), targets, reduction="sum")}
        if len(rows):
            mean = distance(logits[rows, mine], theirs).mean()
            values["uld"] = weight * mean * losses.supervised(batch["labels"])
        return values

    return terms
