"""A teacher's probabilities that belong to other texts: kept in one order, and looked up in another.

    soft = cache[step * B : (step + 1) * B]             kept in the order of the files, and the loader shuffles
    soft = cache[index]
    loss = F.kl_div(student, soft, reduction="batchmean")

A teacher that is sure of something is mostly right about the text that it has read: what it gives the next token costs
less than the shares of the tokens do, which know no context. Of strangers it is sure, and wrong more often than these.

Footguns: a teacher that knows nothing is sure of nothing, and one of masked texts answers for the token itself, so that
is tried as well. One that was trained on another kind of text altogether looks the same, and is of as little use.
"""

import torch
from torch import Tensor

from train_doctor.eye import Op, Watcher

SURE, LOOKED = 0.9, 2**24  # of what the shares of the tokens cost; numbers
LEVELS = 4  # different numbers of a row


class StrangeTeachers(Watcher):
    names = begins = {"kl_div"}

    def saw(self, op: Op) -> None:
        if len(op.given) < 2 or op.given[1].requires_grad or not op.given[0].requires_grad or not self.e.lookups:
            return
        target, words = op.given[1].detach(), op.given[1].shape[-1]
        texts = [ids for ids in self.e.lookups if ids.dim() == 2 and len(ids) > 1 < ids.shape[1]]
        ids = next((ids for ids in reversed(texts) if int(ids.max()) < words and ids.device == target.device), None)
        if ids is None or target.numel() > LOOKED or (kept := _kept(ids, target.numel() // words)) is None:
            return
        if len(target.reshape(-1, words)[0].unique()) < LEVELS:
            return  # a label, smoothed: no network has said it
        logs = target.float() if op.kwargs.get("log_target") else target.float().clamp(min=1e-9).log()
        logs = logs.reshape(-1, words)  # (places, V)
        entropy = float(-(logs.exp() * logs).sum(-1).mean())
        later = torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)[kept]  # what comes next; of the last place itself
        inner = torch.cat([kept[:, 1:], torch.zeros_like(kept[:, :1])], dim=1)[kept]
        cost = min(_cost(logs[inner], later[inner]), _cost(logs, ids[kept])) if bool(inner.any()) else entropy
        shares = ids[kept].bincount().float() / int(kept.sum())
        shares = shares[shares > 0]
        known = float(-(shares * shares.log()).sum()) + len(shares) / (2 * int(kept.sum()))  # without any context
        if cost > known and 0 < entropy < SURE * known:
            self.note("D46 teacher", (cost, entropy))


def _kept(ids: Tensor, places: int) -> Tensor | None:
    """Which places of the texts a loss is of: all of them, or those that are no padding."""
    if places == ids.numel():
        return torch.ones_like(ids, dtype=torch.bool)
    for pad in ids[:, (0, -1)].unique().tolist()[:4]:
        if int((ids != pad).sum()) == places:
            return ids != pad
    return None


def _cost(logs: Tensor, ids: Tensor) -> float:
    return float(-torch.gather(logs, -1, ids[..., None]).mean())
