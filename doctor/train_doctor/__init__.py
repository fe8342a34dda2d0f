"""The doctor: watch a few steps of anyone's training loop and name the one thing that is wrong with it.

    from nblib import doctor

    with doctor.watch(model, optimizer=optimizer, steps=10) as report:
        train()                      # your own loop, as it is
    report.raise_for_errors()

It looks on and drives nothing: losses, weights and random numbers are bit for bit those of a run without it, and after
the watched steps it is gone. What it saw (evidence.py, by observe.py) is put before the checks (checks/), whose
findings are ordered by a graph of causes and effects (causes.py), so that a report begins with the root and its fix.

Three mechanisms see what a look at gradients and shapes cannot: the loss fingerprint (fingerprint.py), the fp32 shadow
(shadow.py) and replays of the first batch (probes.py).

This package imports nothing else of nblib: it can be lifted out.

Footgun: ten steps show ten steps. A fault that needs a thousand is not seen, and a silent report is no proof.
"""

from train_doctor.finding import ERROR, NOTE, WARN, Finding, Report, Unhealthy, Verdict
from train_doctor.trainer import TrainerCallback
from train_doctor.watching import preflight, watch

__all__ = [
    "ERROR",
    "NOTE",
    "WARN",
    "Finding",
    "Report",
    "TrainerCallback",
    "Unhealthy",
    "Verdict",
    "preflight",
    "watch",
]
