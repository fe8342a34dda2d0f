"""Does a router know words from punctuation? Where each kind of token goes, and how much the kind
tells of the expert.

A token is put into one of six kinds by its text alone. `routing_map` counts which experts serve
each kind, and `told_by_kind` reduces that table to one number: the mutual information of kind and
expert over the entropy of the load, 0 if the kind tells nothing and 1 if it tells all.

Footgun: a collapsed router has no entropy to tell anything about; its number is 0, like that of a
router that mixes.
"""

import torch
from torch import Tensor

from nblib.methods.moe import Routed

KINDS = ("word", "inside a word", "number", "punctuation", "space", "special")


def kinds(tokenizer) -> Tensor:
    """Return the kind of every token, an index into KINDS, (V,)."""
    special = set(tokenizer.all_special_ids)
    pieces = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    return torch.tensor([5 if i in special else _kind(piece) for i, piece in enumerate(pieces)])


def _kind(piece: str) -> int:
    bare = piece.strip()
    if not bare:
        return 4
    if any(c.isdigit() for c in bare):
        return 2
    if any(c.isalpha() for c in bare):
        return 0 if piece[0].isspace() or bare[0].isupper() else 1
    return 3


def routing_map(routed: Routed, tokens: Tensor, kind_of: Tensor) -> Tensor:
    """Where each kind of token goes: (kinds, E), rows summing to 1, nan for a kind that does not
    occur.

    `tokens` are the rows that were observed; a layer that skips some cannot be mapped.
    """
    if tokens.numel() != len(routed.chosen):
        raise ValueError(
            f"{routed.layer} saw {len(routed.chosen)} tokens, given are {tokens.numel()}"
        )
    kind, E = kind_of[tokens.flatten().cpu()], routed.logits.shape[1]
    counts = torch.zeros(len(KINDS), E)
    counts.index_put_(
        (kind[:, None].expand_as(routed.chosen), routed.chosen), torch.tensor(1.0), accumulate=True
    )
    return counts / counts.sum(dim=1, keepdim=True)


def told_by_kind(table: Tensor, counts: Tensor) -> float:
    """How much the kind of a token says about its expert: mutual information over the entropy of
    the load, 0 to 1.

    `counts` are the tokens of each kind, (kinds,).
    """
    joint = table.nan_to_num() * (counts / counts.sum())[:, None]
    independent = joint.sum(dim=1, keepdim=True) * joint.sum(dim=0, keepdim=True)
    shared = torch.xlogy(joint, joint).sum() - torch.xlogy(joint, independent).sum()
    share = joint.sum(dim=0)
    entropy = -torch.xlogy(share, share).sum()
    return float(shared / entropy) if entropy > 0 else 0.0
