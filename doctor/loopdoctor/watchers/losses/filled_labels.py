"""Labels of a prompt that were set to a token, and not to the number that the loss ignores.

    labels[:, :prompt] = 0                              or pad_token_id
    F.cross_entropy(logits, labels)                     ignores -100, and asks for token 0 all along
                                                        the prompt

The text itself goes on with its words there. In each row such places come first, and after them the
labels are the next words.

Footguns: labels that are no words (tags, of masked tokens) hardly ever are the next words. A prompt
of one token may be asked for anything. Where each token has a loss of its own (reduction="none") a
mask comes behind it, and a class may weigh nothing. A token that is neither 0 nor padding nor the
end may be meant: one that says that the model listens.
"""

from torch import Tensor

from loopdoctor.eye import Op, Watcher

LEAST, PLACES, LOOKED = 4, 6, 2**18  # rows; places of a row; numbers
IGNORED = -100
# of what is no next word, how much is that token in front; rows that have both
FRONT, MOST = 0.98, 0.75


class FilledLabels(Watcher):
    names = begins = {"cross_entropy", "nll_loss"}

    def saw(self, op: Op) -> None:
        each = op.kwargs.get("reduction", "mean") == "none"
        if len(op.given) < 2 or not op.given[0].requires_grad or each:
            return
        asked = op.given[1].detach()
        ignored = op.kwargs.get("ignore_index", op.args[4] if len(op.args) > 4 else IGNORED)
        texts = [
            ids
            for ids in self.e.lookups
            if ids.dim() == 2 and len(ids) >= LEAST and ids.shape[1] >= PLACES
        ]
        if asked.is_floating_point() or not texts or asked.numel() > LOOKED:
            return
        for ids in texts:
            for after in (ids.shape[1], ids.shape[1] - 1):  # HF asks nothing of the last place
                if asked.numel() == len(ids) * after and asked.device == ids.device:
                    found = _filled(ids, asked.reshape(len(ids), after), ignored)
                    if (
                        found is not None
                        and found[0] in self._fillers()
                        and not _free(op, found[0])
                    ):
                        self.note("F15 filled", found)
                        return

    def _fillers(self) -> set[int | None]:
        return {0, self.e.token("pad"), self.e.token("eos")}


def _free(op: Op, token: int) -> bool:
    """Whether the class weighs nothing."""
    weight = op.kwargs.get("weight", op.args[2] if len(op.args) > 2 else None)
    return weight is not None and not float(weight[token])


def _filled(ids: Tensor, asked: Tensor, ignored: int) -> tuple[int, float] | None:
    """Return the token that stands for nothing, and its share of all that is asked."""
    places = ids.shape[1] - 1
    words, asked = ids[:, 1:], asked[:, :places]  # (B, T - 1)
    there = asked != ignored
    other = there & (asked != words)
    if not bool(other.any()):
        return None
    token = asked[other].mode().values
    begins = (there & (asked == token)).long().cumprod(1).bool()  # in front of each row
    front = float((begins & other).sum() / other.sum())
    right = there & ~other & (asked != token)
    most = min(float((begins.sum(1) > 1).float().mean()), float(right.any(1).float().mean()))
    if front < FRONT or most < MOST:
        return None
    return int(token), float((asked[there] == token).float().mean())
