"""What a check says of a kind of program that it is not about: NOT-APPLICABLE, and not UNKNOWN.

UNKNOWN is for what could have been seen: more steps, a mask, a loss of torch. A program without
text has no padding to look for, one that moves its weights by hand has no optimizer to judge, and
one that trains a picture has no gradients in its model.

Footgun: not to have seen a thing is not to know that it is not there. So each kind asks for what
was seen of it: a call of the model, several steps, an optimizer that stepped.
"""

from torch import nn

from loopdoctor.evidence import Backward, Evidence
from loopdoctor.finding import Verdict, not_applicable

# tokens, their targets and their table
TEXT = {"F14", "F15", "F16", "F17", "F18", "F19", "F127", "D8", "S9", "N13", "S14"}
STEPS = {
    "S2",
    "S3",
    "S4",
    "S17",
    "N1",
    "N2",
    "N5",
    "N11",
    "N12",
    "N24",
    "N25",
    "N26",
    "N33",
    "B8",
}  # what optimizers hold and do
GRADIENTS = {"B1", "B3", "B4", "B7", "N3", "S20"}  # of the model's own tensors


def of(e: Evidence) -> dict[str, Verdict]:
    """For each check that has nothing to look at in a program of this kind, why."""
    found = {}
    if _without_text(e):
        found |= dict.fromkeys(
            TEXT, not_applicable("the model is given no token ids and has no embedding")
        )
    if _by_hand(e):
        found |= dict.fromkeys(
            STEPS, not_applicable("no optimizer of torch: the weights are moved by hand")
        )
    if e.stepped and e.models and e.optimized() and not e.trainable():
        found |= dict.fromkeys(
            GRADIENTS, not_applicable("the optimizer trains something outside the model")
        )
    return found


def _without_text(e: Evidence) -> bool:
    """Return the model was called, never with ids, and has no table of anything.

    A table may be one of users or of nodes.
    """
    tables = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for _, m in e.modules())
    calls = [c for c in e.forwards if c.args or c.kwargs or c.module() is not None]
    return bool(calls) and not tables and all(c.ids is None and c.labels is None for c in calls)


def _by_hand(e: Evidence) -> bool:
    """Several rounds passed, which without an optimizer only a weight that moves can begin."""
    return not e.stepped and not e.optimizers and len({b.round for b in e.of(Backward)}) >= 2
