"""The loss fingerprint: which way of computing a cross-entropy gives exactly the number that the user's loop got?

From the logits and the batch, a cross-entropy can be formed in a few dozen ways: labels shifted by nought, one or two;
masked by the labels, by the attention mask or not at all; averaged or summed; times or divided by the number of
micro-batches. Only one of them (or a few that are the same thing) gives the loss to four digits, and that one names
what the code does.

Footgun: a loss with other terms in it matches nothing, and that is no finding.
"""

from dataclasses import dataclass, field

from nblib.doctor.evidence import Backward, Evidence


@dataclass
class Reading:
    """What a loss turned out to be."""

    how: str  # "recorded": a call of cross_entropy was seen; "enumerated": found by trying; "": neither
    offset: int | None = None  # how far ahead in the ids the target of a position lies: 1 predicts the next token
    given: int | None = None  # how far ahead the labels passed to the model lie: 0 where the model shifts itself
    tokens: int | None = None  # supervised tokens
    mean: float | None = None  # cross-entropy per supervised token, in nats, as it should be computed
    ratio: float | None = None  # the loss over that mean
    reduction: str = ""  # "mean" or "sum"
    masked: str = ""  # "labels", "attention", "nothing"
    hits: list[str] = field(default_factory=list)  # every way that gave the number, in words


def read(e: Evidence, event: Backward) -> Reading | None:
    """The reading of one backward's loss, from the logits and losses recorded since the last one."""
    return None
