"""Who trains, and which optimizer holds it: S1 to S4.

Footgun: several optimizers are normal (Muon for matrices, AdamW for the rest). What counts is the union of all that
stepped.
"""

from nblib.doctor.evidence import Evidence, is_adapter
from nblib.doctor.finding import ERROR, OK, Finding, Verdict, not_applicable, unknown


def nothing_trainable(e: Evidence) -> Finding | Verdict:
    """S1. The loss stays where it is and no parameter changes, or backward says that no element requires a gradient.

    Fires when not one parameter of the model requires a gradient. A run that trains something outside the model (a soft
    prompt) holds those tensors in its optimizer and is left alone.
    """
    if e.model is None:
        return unknown("no model was seen")
    every = e.parameters()
    if e.trainable():
        return OK
    if e.optimized() - {id(p) for p in every.values()}:
        return not_applicable("the optimizer trains something outside the model")
    adapters = sum(is_adapter(name) for name in every)
    why = (
        f"all {adapters} adapter tensors are frozen: the adapter was loaded with is_trainable=False (the default of "
        "PeftModel.from_pretrained), or the model was prepared for k-bit training after it was attached"
        if adapters
        else "the whole model is frozen"
    )
    fix = "load it with is_trainable=True, and prepare before attaching" if adapters else "unfreeze what should learn"
    return Finding(
        "S1",
        "nothing-trainable",
        ERROR,
        f"0 of {len(every)} parameter tensors require a gradient",
        "at least one",
        f"Nothing can learn: {why}.",
        f"{fix[0].upper()}{fix[1:]}.",
    )


CHECKS = [("S1", nothing_trainable)]
