"""What a method asks for, turned round or left in half: F63 to F73, D16 to D18, S32, N34 and N35.

Most of it was noted step by step (watchers/, in `e.habits`); here it is asked whether it is a habit.

Footgun: as in arithmetic.py, each of these lines is right in some other program. They warn, and each page says what is
left alone.
"""

from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.arithmetic import no_habit
from loopdoctor.evidence import Evidence
from loopdoctor.finding import Verdict


@check("F66")
def blank_among_labels(e: Evidence) -> Fired | Verdict:
    """A speech or handwriting model never writes one of its labels, and leaves gaps.

    Fires when ctc_loss is given labels one of which is its blank, 0 unless it says otherwise. What lies behind the
    length of a row is padding, and left alone.

    ERROR blank-among-labels: {count} of {total} labels are {blank}, which ctc_loss takes for the blank: that label can
    never be told from nothing. Fix: Begin labels at 1 and give the model one output more, or CTCLoss(blank=number of
    labels).
    WARN blank-among-labels/lengths: The lengths of the targets are those of the filled rows, so the {count} blanks at
    their ends (of {total} labels) count as text. Fix: target_lengths hold how many labels each row really has.
    """
    if (verdict := no_habit(e, seen := e.habits["F66"])) is not None:
        return verdict
    blank, count, total, at_ends = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps the labels held the index of the blank, {blank}",
        "no blank among the labels",
        fault="blank-among-labels" + ("/lengths" if at_ends else ""),
        blank=blank,
        count=count,
        total=total,
    )
