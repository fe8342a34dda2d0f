"""Losses that are written by hand and are not quite their formula: F85 to F90, F100 and F105.

What a formula does shows in the gradients of the answers, or in the steps that lead from a difference to the loss.

Footgun: each of these is the formula of something else. So they warn, and each page says what is left alone.
"""

from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.arithmetic import no_habit
from loopdoctor.evidence import Evidence
from loopdoctor.finding import Verdict


@check("F89")
def divergence_per_class(e: Evidence) -> Fired | Verdict:
    """Distillation hardly differs from training without a teacher.

    Fires when kl_div of rows of several classes has the reduction "mean".

    WARN divergence-per-class: kl_div's "mean" divides by the {classes} classes as well as by the rows, so the
    divergence counts {classes} times less than it says. Fix: reduction="batchmean".
    """
    if (verdict := no_habit(e, seen := e.habits["F89"])) is not None:
        return verdict
    classes = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps kl_div took the mean over {classes} classes", "batchmean", classes=classes)
