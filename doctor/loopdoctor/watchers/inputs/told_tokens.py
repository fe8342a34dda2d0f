"""A decoder that is given the very tokens that a loss of the user's own asks it for.

    logits = model(input_ids=source, decoder_input_ids=labels).logits
    decoder_input_ids: not moved on
    nll = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1))
    labels are not given to the model

Where the labels are given to the model, that is read from the call, and a cross-entropy of torch's
is looked at by F33 (echoes.py).

Footgun: one that puts words back in place of a mask is given most of what it is asked for as well.
So all places must be the same, but for padding: places that hold one number in the input, and one
in what is asked for.
"""

from torch import Tensor

from loopdoctor.eye import Op, Watcher
from loopdoctor.targets import IGNORED

LEAST, VARIED = 32, 4  # tokens that are the same; different ones


class ToldTokens(Watcher):
    names = {"gather", "take_along_dim"}

    def saw(self, op: Op) -> None:
        index = next((t for t in op.given[1:] if not t.is_floating_point()), None)
        if (
            index is None
            or not self.eye.grad
            or not op.given[0].requires_grad
            or op.given[0].dim() < 2
        ):
            return
        call = next(reversed(self.e.forwards), None)
        if call is None or call.decoder is None or call.decoder.numel() != index.numel():
            return
        asked = index.detach().cpu().reshape(call.decoder.shape)
        if count := _told(call.decoder, asked):
            self.note("F3 told", count)


def _told(given: Tensor, asked: Tensor) -> int:
    """How many tokens are the same at their own places; 0 where others than padding are not."""
    same, other = given == asked, (given != asked) & (asked != IGNORED)
    if int(same.sum()) < LEAST or len(asked[same].unique()) < VARIED:
        return 0
    padding = len(asked[other].unique()) < 2 and len(given[other].unique()) < 2
    return int(same.sum()) if padding else 0
