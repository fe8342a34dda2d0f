"""The checks: plain functions from what was seen to a finding or a verdict, one module per family.

A function that is marked as a check (check.py) takes the Evidence and returns `fires(...)`, or a
Verdict: OK, not_applicable(why) or unknown(why). Its docstring is its page: the symptom as a person
meets it, what is looked at, what could be mistaken for it and why it is not, and the faults it may
name, each with its fix.

Footgun: a check that cannot see must say `unknown`. Falling through to OK is how peers miss half of
what they list.
"""

import traceback

from loopdoctor.check import Check
from loopdoctor.checks import (
    attention,
    augmentation,
    axes,
    checkpoints,
    embeddings,
    errors,
    gradients,
    kinds,
    labels,
    loss_graph,
    loss_inputs,
    loss_value,
    methods,
    modes,
    precision,
    processes,
    rates,
    speed,
    steps,
    teachers,
    trainables,
)
from loopdoctor.evidence import Evidence
from loopdoctor.finding import Finding, Verdict, unknown
from loopdoctor.looked import Looked, Written

MODULES = (
    trainables,
    checkpoints,
    modes,
    embeddings,
    teachers,
    attention,
    labels,
    loss_graph,
    loss_value,
    loss_inputs,
)
MODULES += (
    gradients,
    steps,
    rates,
    precision,
    processes,
    speed,
    axes,
    augmentation,
    methods,
    errors,
)
ALL = tuple(
    check for module in MODULES for check in vars(module).values() if isinstance(check, Check)
)


def examine(e: Evidence) -> tuple[list[Finding], dict[str, Verdict], dict[str, list[str]]]:
    """Ask every check. One that fails itself is UNKNOWN, with the reason: it must not end the run
    it looks at. After a fault in watching something may not have been seen, so no check may say OK.
    """
    findings, verdicts, others, asked = [], {}, kinds.of(e), {}
    written = Written()
    for check in ALL:
        try:
            looked = Looked(e, written)
            outcome = check.look(looked)
            if isinstance(outcome, Verdict) and outcome.state == "UNKNOWN":
                outcome = others.get(check.id, outcome)
        except Exception:
            outcome = unknown(f"the check itself failed: {traceback.format_exc(limit=-3)}")
        asked[check.id] = looked.lines()
        if e.faults and isinstance(outcome, Verdict) and outcome.state == "OK":
            outcome = unknown(
                "watching itself failed, so something may not have been seen; report.faults "
                "says where"
            )
        if isinstance(outcome, Finding):
            findings.append(outcome)
        else:
            verdicts[check.id] = outcome
    return findings, verdicts, asked
