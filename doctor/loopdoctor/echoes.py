"""Targets that went into the network at the place where they are asked for.

    decoder(ids); cross_entropy(logits, ids)        a decoder that copies: at inference there is
                                                    nothing to copy
    labels[masked] = -100                           a masked model that is asked for what it can
                                                    read
    labels = ids; ids[masked] = mask_id
    a masked model that is asked for the mask: one tensor
    labels = ids.clone()                            all of it: of the rest -100 was left out

The ids given to embeddings since the last backward are laid beside the targets of a loss, place by
place. Where the first answers were cut off, decoder(ids)[:, 1:], so are the first ids.

Footgun: an autoencoder is given its target and must get it through a bottleneck. So of two
embeddings at work the last one counts, which is the decoder's, and with one alone only a mask that
hides what is not asked for.
"""

from typing import Any

from torch import Tensor

from loopdoctor.fed import RESHAPES, kind

LEAST, SAME = 8, 0.98  # targets; share of them that went in at their own place
PERSISTS = 0.9  # of the places, how many hold what the one before holds
OFTEN = 0.5  # of the targets, how many are the mask
DECODER, MASK, ALIAS, VISIBLE, UNMASKED = "decoder", "mask", "alias", "visible", "unmasked"
FEW = 0.6  # of the places, that are asked for
APART = 1.5  # pieces of a row that they make, on average: an answer is one piece
WORDS = 8
# what may come between a cut and the loss
SAME_PLACES = (*RESHAPES, "Clone", "ToCopy", "Transpose", "Alias")
# of the targets, those that can be read; of the others, those under one token
SEEN, HIDDEN = 0.7, 0.6


def echo(inputs: list[Tensor], target: Tensor, ignored: int) -> str:
    """Whether a loss asks for what went in: "decoder", "mask" or "alias"; "" if not.

    All tensors hold whole numbers.
    """
    asked = target.detach().flatten().cpu()
    there = asked != ignored
    fitting = [
        (n, ids.detach().flatten().cpu())
        for n, ids in enumerate(inputs)
        if ids.numel() == asked.numel()
    ]
    if int(there.sum()) < LEAST or not fitting:
        return ""
    padded = _at_the_end(~there.view(inputs[fitting[0][0]].shape))  # what is not asked for
    same = [(n, ids) for n, ids in fitting if float((ids == asked)[there].float().mean()) >= SAME]
    if any(_asks_for_the_mask(ids, there) for _, ids in same):
        return ALIAS
    words = [ids for ids in inputs if int(ids.max()) > 1 and not _places(ids)]
    if (
        len(words) == 1
        and words[0].numel() == asked.numel()
        and _asks_for_all(words[0].flatten().cpu(), asked, there)
    ):
        return VISIBLE
    if len(words) == 1 and words[0].dim() == 2 and words[0].numel() == asked.numel():
        whole = there.view(words[0].shape)
        if _scattered(whole) and bool((words[0].cpu() == asked.view(whole.shape))[whole].all()):
            hidden = words[0].cpu()[~whole & _before_the_end(whole, words[0]).view(whole.shape)]
            if len(hidden.unique()) > 1:
                return UNMASKED
    # not the kinds of places (BERT)
    fitting = [(n, ids) for n, ids in fitting if int(ids.max()) > 1] or fitting
    last, ids = fitting[-1]
    if float((ids == asked)[there].float().mean()) < SAME or _persists(inputs[last]):
        return ""
    hidden = ids[~there & _before_the_end(there, inputs[last])]
    alike = hidden.numel() and (hidden == hidden[0]).all() and not (ids[there] == hidden[0]).any()
    if alike and not padded and int(hidden[0]) != ignored:
        return MASK
    others = [
        i for i in inputs[:last] if i.shape != inputs[last].shape or not i.equal(inputs[last])
    ]
    # tables of distances have no rows
    behind = any(len(i) == len(inputs[last]) for i in inputs[last + 1 :])
    return DECODER if others and not behind else ""


def cut_like(node: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Return the ids without the places whose answers were cut off at the front before a loss,
    found from its input's node.
    """
    while kind(node) in SAME_PLACES or _cut(node) == slice(0, None):
        node = node.next_functions[0][0]
    if (part := _cut(node)) is None or not part.start:
        return inputs
    return [
        ids[:, part] if ids.shape == tuple(node._saved_self_sym_sizes)[:2] else ids
        for ids in inputs
    ]


def _cut(node: Any) -> slice | None:
    """Which places (B, T, D) a slice keeps; None where it keeps other things, or every second."""
    sizes = tuple(getattr(node, "_saved_self_sym_sizes", ())) if kind(node) == "Slice" else ()
    if len(sizes) != 3:
        return None
    numbers = (node._saved_dim, node._saved_start, node._saved_end)
    # torch tells those below 0 so
    dim, start, end = (n - 2**64 if n >= 2**63 else n for n in numbers)
    if dim % 3 != 1 or node._saved_step != 1:
        return None
    return slice(start, None if end >= sizes[1] else end)


def _persists(ids: Tensor) -> bool:
    """Whether nearly all places hold what the place before them holds, so a shift by one hardly
    shows.
    """
    return ids.dim() == 2 and float((ids[:, 1:] == ids[:, :-1]).float().mean()) > PERSISTS


def _at_the_end(places: Tensor) -> bool:
    """Whether each row has them at its end alone."""
    return places.dim() == 2 and bool((places[:, 1:] >= places[:, :-1]).all())


def _before_the_end(there: Tensor, ids: Tensor) -> Tensor:
    """Places after which some are asked for in the same row: the others may be padding."""
    rows = there.view(ids.shape) if ids.dim() == 2 else there[None]
    return rows.flip(1).cummax(1).values.flip(1).flatten()


def _asks_for_the_mask(ids: Tensor, there: Tensor) -> bool:
    """Whether few places are asked for, and most of these hold one token that no other place
    has.
    """
    mine, others = ids[there], ids[~there]
    if 2 * len(mine) > len(ids) or len(others.unique()) < 3:  # padding, and nothing to read
        return False
    token = mine.mode().values
    return float((mine == token).float().mean()) > OFTEN and not bool((others == token).any())


def _scattered(there: Tensor) -> bool:
    """Whether few places are asked for, here and there in a row, as a random mask picks them."""
    begins = (there[:, 1:] & ~there[:, :-1]).sum(1) + there[:, 0].int()
    return (
        0 < float(there.float().mean()) < FEW and float(begins[begins > 0].float().mean()) > APART
    )


def _places(ids: Tensor) -> bool:
    """Whether the numbers are those of places, one more each."""
    return ids.shape[-1] > 1 and bool((ids.reshape(-1, ids.shape[-1]).diff(dim=-1) == 1).all())


def _asks_for_all(ids: Tensor, asked: Tensor, there: Tensor) -> bool:
    """Whether most targets can be read at their own places, and most others are under one token
    that is never asked for.
    """
    same = ids == asked
    # the tokens that come next
    if float((ids[1:] == asked[:-1])[there[:-1]].float().mean()) > SAME - 0.1:
        return False
    if not SEEN < float(same[there].float().mean()) < SAME:
        return False
    if len(asked[there].unique()) < WORDS:
        return False  # a code of a few letters
    others = ids[there & ~same]
    token = others.mode().values
    return float((others == token).float().mean()) > HIDDEN and not bool(
        (asked[there] == token).any()
    )
