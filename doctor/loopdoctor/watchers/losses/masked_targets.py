"""A cross-entropy that asks for what a mask has taken away: the logit of the target is the number
it was filled with.

    similarity.masked_fill_(torch.eye(n, dtype=torch.bool), -1e9)       a row and itself
    loss = F.cross_entropy(similarity, torch.arange(n))
    and that is what is asked for

Footguns: classes that are not allowed (an action, a token) may be asked for now and then by noisy
data. So most of the rows must ask for what has the least number of all. A row whose classes were
all filled asks for nothing: it fills a game up to the length of others, or is an action without
such an argument, and its loss is taken out behind.
"""

from loopdoctor.eye import Op, Watcher

FAR, LEAST, SHARE = -1e3, 4, 0.5  # a logit that somebody wrote; rows; of them


class MaskedTargets(Watcher):
    names = begins = {"cross_entropy"}

    def saw(self, op: Op) -> None:
        if len(op.given) < 2:
            return
        logits, target = op.given[:2]
        whole = (
            not target.is_floating_point() and logits.dim() == target.dim() + 1 and logits.dim() > 1
        )
        if (
            not whole
            or not logits.requires_grad
            or target.shape[:1] != logits.shape[:1]
            or len(logits) < LEAST
        ):
            return
        logits = logits.detach().movedim(1, -1)
        there = (
            (target >= 0)
            & (target < logits.shape[-1])
            & (target != op.kwargs.get("ignore_index", -100))
        )
        if not bool(there.any()):
            return
        asked = logits.gather(-1, target.long().clamp(0, logits.shape[-1] - 1)[..., None])[..., 0][
            there
        ].float()
        gone = (asked < FAR) & (logits.amax(-1)[there] > asked)
        if bool(gone.float().mean() > SHARE) and len(asked[gone].unique()) == 1:
            self.note("F20 masked", (int(gone.sum()), len(asked), float(asked[gone][0])))
