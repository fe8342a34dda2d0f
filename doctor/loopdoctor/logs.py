"""What a log alone shows: `loopdoctor --log train.log`.

A log has a few numbers for each step and neither tensors nor code. Some faults show in them all the
same, and some are named by a warning that was read past. Each finding says what in the log says so,
what the log cannot tell, and what does: a run under `loopdoctor`.

Numbers and messages come from log_lines.py and log_texts.py. A fault that only numbers show has an
id of its own, L1 to L7; one that a message names has the id of the check that sees it live.

Footgun: a log is thinned out (`logging_steps`), and its losses are means over the steps between two
entries. A step that is not in it is not judged.
"""

import math
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from loopdoctor import log_lines, log_texts
from loopdoctor.finding import ERROR, OK, Finding, Verdict, unknown
from loopdoctor.log_faults import FAULTS, Fault
from loopdoctor.log_lines import Entry, Log, Unreadable
from loopdoctor.report import Report

FEW = 8  # entries below which nothing is said of a trend
EXPLODED = 100.0  # times the first quarter's median of the gradient norm
ZEROS = 3  # entries whose gradient norm is 0, below which nothing is said of it
LN2 = math.log(2)  # the loss of a fair guess between two
SHOWN = 2_000  # points of a curve in the report


__all__ = ["FAULTS", "Unreadable", "diagnose", "read"]


class Seen(NamedTuple):
    """What a log shows of a fault."""

    observed: str
    expected: str
    why: str = ""  # what else the cause is told by


def read(path: Path) -> Log:
    """Read the entries and messages of a log. Raise `Unreadable`, with one sentence, for no log."""
    log = log_lines.read(path, log_texts.look, log_texts.ENDS)
    told = any(log_texts.MESSAGES[key].check for key in log.messages)
    if not log.entries and not told and log_texts.first(log.messages, log_texts.MEMORY) is None:
        raise Unreadable(
            f"--log {path} has no number that it could be judged by; looked for loss or grad_norm, "
            "with lr, step and epoch, in lines such as 'step 10: loss 2.3' or {'loss': 2.3}."
        )
    return log


def diagnose(log: Log, control: Any) -> Report:
    """Make a report of a log; `control` is what the user decides about its findings."""
    report = Report()
    report.rounds, report.done, report.source = log.count, True, "log"
    # ask the numbers
    seen = {fault.id: look(log) for fault, look in zip(FAULTS, LOOKS)}
    found = [
        _finding(fault, seen[fault.id]) for fault in FAULTS if isinstance(seen[fault.id], Seen)
    ]
    report.verdicts = {id: v for id, v in seen.items() if isinstance(v, Verdict)}
    # ask the messages, which the numbers may confirm
    stuck, flat = (seen[id].observed if isinstance(seen[id], Seen) else "" for id in ("L6", "L5"))
    found += log_texts.findings(log.messages, stuck, flat)
    report.findings, report.ignored = control.sort(found)
    report.notes = _notes(log, report)
    # keep the curves, for a page and for a comparison
    entries = log.entries[:: max(1, math.ceil(len(log.entries) / SHOWN))]
    curves = {}
    for name, key in (("loss", "loss"), ("gradient norm", "norm"), ("rate", "rate")):
        values = [getattr(entry, key) for entry in entries]
        if any(value is not None for value in values):
            curves[name] = [math.nan if value is None else value for value in values]
    report.record = {"curves": curves}
    return report


def _finding(fault: Fault, seen: Seen) -> Finding:
    """Return a finding with what the log cannot tell."""
    why = f" {seen.why}" if seen.why else ""
    cause = f"{fault.cause}{why} The log cannot tell {fault.unseen}"
    return Finding(
        fault.id, fault.name, fault.severity, seen.observed, seen.expected, cause, fault.fix
    )


def _notes(log: Log, report: Report) -> list[str]:
    """Return what a reader should know of the log itself."""
    notes = []
    if log.runs > 1:
        notes.append(
            f"steps or epochs begin again, so it holds {log.runs} runs; the last is judged, "
            f"from line {log.line} on"
        )
    if log.every > 1:
        notes.append(
            f"it is long, so one part in {log.every} of it is judged, and all of its messages"
        )
    error = log.messages.get("error")
    if error is not None and not any(f.severity == ERROR for f in report.findings):
        text = " ".join(error.last_text.split())[: log_texts.SHOWN]
        notes.append(f'line {error.last_line} has an error that no check here names: "{text}"')
    return notes


def _of(log: Log, *names: str) -> list[Entry]:
    """Return the entries that have all of these numbers."""
    return [e for e in log.entries if all(getattr(e, name) is not None for name in names)]


def _zero_and_nan(log: Log) -> Seen | Verdict:
    """Look for losses of 0 beside a gradient norm of NaN."""
    both = _of(log, "loss", "norm")
    if not both:
        return unknown("no entry has both a loss and a gradient norm")
    hit = [e for e in both if e.loss == 0 and not math.isfinite(e.norm)]
    if not hit:
        return OK
    rates = [e.rate for e in hit if e.rate is not None]
    rate = why = ""
    if rates and not any(rates):
        rate = ", rate 0 in all of them"
        why = (
            "A rate of 0 is that of the first step of a warm-up, and a GradScaler that skips every "
            "step keeps the schedule there."
        )
    elif rates:
        rate = f", rate {rates[0]:g} at the first"
    first = f"first at {hit[0].where()}"
    observed = (
        f"loss 0 with a gradient norm of nan in {len(hit)} of {len(both)} entries, {first}{rate}"
    )
    return Seen(observed, "numbers", why)


def _not_finite(log: Log) -> Seen | Verdict:
    """Look for numbers that stop to be finite and are so at the end."""
    wrong = [n for n, e in enumerate(log.entries) if _wrong(e)]
    if not log.entries:
        return unknown("no entry was read")
    if not wrong or wrong[-1] != len(log.entries) - 1:  # a scaler skips such steps, and goes on
        return OK
    first = log.entries[wrong[0]]
    after = len(log.entries) - wrong[0]
    every = "in every entry" if after == len(wrong) else f"in {len(wrong)} of {after} entries"
    name, value = ("gradient norm", first.norm)
    if first.loss is not None and not math.isfinite(first.loss):
        name, value = ("loss", first.loss)
    observed = f"{name} {value} at {first.where()}, and not finite {every} from there on"
    return Seen(observed, "numbers that are finite")


def _wrong(entry: Entry) -> bool:
    """Tell whether a loss or norm of an entry is NaN or infinite."""
    return any(value is not None and not math.isfinite(value) for value in (entry.loss, entry.norm))


def _rate_zero(log: Log) -> Seen | Verdict:
    """Look for a learning rate that is 0 throughout."""
    rates = [e.rate for e in _of(log, "rate")]
    if len(rates) < 2:
        return unknown("fewer than two entries have a rate")
    if any(rates):
        return OK
    return Seen(f"the rate is 0 in all {len(rates)} entries", "a rate above 0")


def _exploding(log: Log) -> Seen | Verdict:
    """Look for gradient norms that grow by far."""
    norms = [e.norm for e in _of(log, "norm") if math.isfinite(e.norm)]
    if len(norms) < FEW:
        return unknown(f"fewer than {FEW} entries have a gradient norm that is a number")
    quarter = len(norms) // 4
    first, last = median(norms[:quarter]), median(norms[-quarter:])
    if not first > 0 or last < EXPLODED * first:
        return OK
    observed = f"gradient norm {first:.3g} in the first quarter, {last:.3g} in the last"
    return Seen(observed, "the same order of size")


def _flat(log: Log) -> Seen | Verdict:
    """Look for a loss that does not fall."""
    losses = [e.loss for e in _of(log, "loss") if math.isfinite(e.loss)]
    if len(losses) < FEW:
        return unknown(f"fewer than {FEW} entries have a loss that is a number")
    quarter = max(2, len(losses) // 4)
    first, last = losses[:quarter], losses[-quarter:]
    noise = (stdev(first) ** 2 / quarter + stdev(last) ** 2 / quarter) ** 0.5
    fallen = fmean(first) - fmean(last)
    if fallen > 2 * noise and fallen > 1e-3 * abs(fmean(first)):
        return OK
    observed = f"loss {fmean(first):.4g} in the first quarter, {fmean(last):.4g} in the last"
    whys = []
    # a loss that is flat and known tells more
    if abs(fmean(first) - LN2) < 1e-3 and abs(fmean(last) - LN2) < 1e-3:
        whys.append(
            "It is ln 2, a guess between two: in preference training policy and reference are "
            "alike "
            "(N14), in a classifier of two classes nothing is told apart."
        )
    on = log_texts.checkpointing(log.messages)
    if on is not None:
        whys.append(
            f"Gradient checkpointing is on ({log_texts.quote(on)}): if it is reentrant and stands "
            "behind frozen inputs, no gradient reaches the adapters inside it (S10)."
        )
    return Seen(observed, "a loss that falls", " ".join(whys))


def _norm_zero(log: Log) -> Seen | Verdict:
    """Look for gradient norms that are exactly 0 throughout, with a loss that does not fall."""
    entries = _of(log, "norm")
    if len(entries) < ZEROS:
        return unknown(f"fewer than {ZEROS} entries have a gradient norm")
    if any(e.norm != 0 for e in entries):
        return OK
    losses = [e.loss for e in entries if e.loss is not None]
    if _flat(log) == OK:
        return unknown(
            "the loss falls, so the norm of 0 that was logged is not that of the gradients"
        )
    observed = f"the gradient norm is exactly 0 in all {len(entries)} entries"
    if losses and not any(losses):
        return Seen(
            f"{observed}, and so is the loss",
            "a norm above 0",
            "The loss is 0 as well, as it is where all labels are masked (-100): F14.",
        )
    if any(e.rate for e in entries):
        observed = f"{observed}, with a learning rate above 0"
    on = log_texts.checkpointing(log.messages)
    why = ""
    if on is not None:
        why = (
            f"Gradient checkpointing is on ({log_texts.quote(on)}): if it is reentrant and stands "
            "behind frozen inputs (a frozen embedding under adapters), it is the cause (S10)."
        )
    return Seen(observed, "a norm above 0", why)


def _memory(log: Log) -> Seen | Verdict:
    """Look for a device whose memory has ended."""
    message = log_texts.first(log.messages, log_texts.MEMORY)
    if message is None:
        return OK
    if message.entries == 0:
        when = "before the first entry"
        why = "It ended in the first steps, so model, batch or length are too large for it."
    else:
        when = f"after {message.entries} entries{' and more' if log.every > 1 else ''}"
        why = (
            "It was enough for the steps before, so either a longer batch or an evaluation "
            "came, or "
            "something is kept from step to step (N27)."
        )
    return Seen(f"{log_texts.quote(message)}, {when}", "memory that is enough", why)


LOOKS = (_zero_and_nan, _not_finite, _rate_zero, _exploding, _flat, _norm_zero, _memory)
