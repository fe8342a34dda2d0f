"""Several processes: N21.

Footgun: never a collective here. A rank that does not take part would hang the run that is watched.
"""

from nblib.doctor.evidence import Evidence
from nblib.doctor.finding import ERROR, OK, Finding, Verdict, not_applicable, unknown


def wrapper_gone_round(e: Evidence) -> Finding | Verdict:
    """N21. Each process trains a model of its own: the loss is fine on every rank and evaluation is worse than it.

    Fires when the model was called with gradients while its DistributedDataParallel wrapper never was, so that
    gradients are not averaged. A call of `.module` under no_grad (evaluation) is fine.
    """
    wrappers = [w for w in e.wrappers if type(w).__name__ == "DistributedDataParallel"]
    if not wrappers:
        return not_applicable("no DistributedDataParallel wrapper was seen")
    gone_round = [w for w in wrappers if not e.called.get(id(w))]
    if not e.forwards:
        return unknown("no training forward was seen")
    if not gone_round:
        return OK
    return Finding(
        "N21",
        "ddp-wrapper-gone-round",
        ERROR,
        f"the model was called {len(e.forwards)} times with gradients, its DistributedDataParallel wrapper never",
        "training calls go through the wrapper",
        "The forward pass goes through ddp.module and not through the DDP wrapper, so gradients are never averaged "
        "(no all-reduce) and the ranks drift apart.",
        "Call the wrapper itself: ddp(...), not ddp.module(...).",
    )


CHECKS = [("N21", wrapper_gone_round)]
