"""Targets that went into the network at the place where they are asked for.

    decoder(ids); cross_entropy(logits, ids)        a decoder that copies: at inference there is nothing to copy
    labels[masked] = -100                           a masked model that is asked for what it can read
    labels = ids; ids[masked] = mask_id             a masked model that is asked for the mask: one tensor

The ids given to embeddings since the last backward are laid beside the targets of a loss, place by place.

Footgun: an autoencoder is given its target and must get it through a bottleneck. So of two embeddings at work the last
one counts, which is the decoder's, and with one alone only a mask that hides what is not asked for.
"""

from torch import Tensor

LEAST, SAME = 8, 0.98  # targets; share of them that went in at their own place
PERSISTS = 0.9  # of the places, how many hold what the one before holds
OFTEN = 0.5  # of the targets, how many are the mask
DECODER, MASK, ALIAS = "decoder", "mask", "alias"


def echo(inputs: list[Tensor], target: Tensor, ignored: int) -> str:
    """Whether a loss asks for what went in: "decoder", "mask" or "alias"; "" if not. All tensors hold whole numbers."""
    asked = target.detach().flatten().cpu()
    there = asked != ignored
    fitting = [(n, ids.detach().flatten().cpu()) for n, ids in enumerate(inputs) if ids.numel() == asked.numel()]
    if int(there.sum()) < LEAST or not fitting:
        return ""
    padded = _at_the_end(~there.view(inputs[fitting[0][0]].shape))  # what is not asked for
    same = [(n, ids) for n, ids in fitting if float((ids == asked)[there].float().mean()) >= SAME]
    if any(_asks_for_the_mask(ids, there) for _, ids in same):
        return ALIAS
    fitting = [(n, ids) for n, ids in fitting if int(ids.max()) > 1] or fitting  # not the kinds of places (BERT)
    last, ids = fitting[-1]
    if float((ids == asked)[there].float().mean()) < SAME or _persists(inputs[last]):
        return ""
    hidden = ids[~there]
    alike = hidden.numel() and (hidden == hidden[0]).all() and not (ids[there] == hidden[0]).any()
    if alike and not padded and int(hidden[0]) != ignored:
        return MASK
    others = [i for i in inputs[:last] if i.shape != inputs[last].shape or not i.equal(inputs[last])]
    return DECODER if others and last == len(inputs) - 1 else ""


def _persists(ids: Tensor) -> bool:
    """Whether nearly all places hold what the place before them holds, so a shift by one hardly shows."""
    return ids.dim() == 2 and float((ids[:, 1:] == ids[:, :-1]).float().mean()) > PERSISTS


def _at_the_end(places: Tensor) -> bool:
    """Whether each row has them at its end alone."""
    return places.dim() == 2 and bool((places[:, 1:] >= places[:, :-1]).all())


def _asks_for_the_mask(ids: Tensor, there: Tensor) -> bool:
    """Whether few places are asked for, and most of these hold one token that no other place has."""
    mine, others = ids[there], ids[~there]
    if 2 * len(mine) > len(ids) or len(others.unique()) < 3:  # padding, and nothing to read
        return False
    token = mine.mode().values
    return float((mine == token).float().mean()) > OFTEN and not bool((others == token).any())
