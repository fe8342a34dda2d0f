"""The doctor: watch a few steps of anyone's training loop and name the one thing that is wrong with
it.

    import loopdoctor as doctor

    with doctor.watch(model, optimizer=optimizer, steps=10) as report:
        train()                      # your own loop, as it is
    report.raise_for_errors()

It watches and changes nothing: losses, weights and random numbers are bit for bit those of a run
without it. After the watched steps it removes itself. What it saw (evidence.py, by observe.py) is
given to the checks (checks/). Their findings are ordered by a graph of causes and effects
(causes.py): a report begins with the root cause and its fix.

Three mechanisms see what a look at gradients and shapes cannot: the loss fingerprint
(fingerprint.py), the fp32 shadow (shadow.py) and replays of the first batch (probes.py).

It needs torch alone. The callbacks are imported when they are first asked for, because transformers
takes seconds.

Footgun: ten steps show ten steps. A fault that needs a thousand is not seen, and a silent report is
no proof.
"""

import importlib
from typing import Any

from loopdoctor import loads, places  # noqa: F401  both listen from the import on
from loopdoctor.asserting import assert_trains
from loopdoctor.finding import ERROR, NOTE, WARN, Finding, Verdict
from loopdoctor.report import Report, Unhealthy
from loopdoctor.watching import preflight, watch

__all__ = [
    "ERROR",
    "NOTE",
    "WARN",
    "Finding",
    "LightningCallback",
    "Report",
    "TrainerCallback",
    "Unhealthy",
    "Verdict",
    "assert_trains",
    "preflight",
    "watch",
]


CALLBACKS = {"TrainerCallback": "loopdoctor.trainer", "LightningCallback": "loopdoctor.lightning"}


def __getattr__(name: str) -> Any:
    if name not in CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(CALLBACKS[name]), name)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext loopdoctor`: the magic `%%doctor`, see magic.py."""
    from loopdoctor import magic

    magic.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext loopdoctor`."""
    from loopdoctor import magic

    magic.unload(shell)
