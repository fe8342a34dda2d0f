"""A finding, and the report of a watch: the root cause first, with its fix, and what follows from it folded below.

Four verdicts are possible for each check: FIRE (a Finding), OK, NOT-APPLICABLE and UNKNOWN. UNKNOWN is what honesty
demands where nothing could be seen; it is listed, never counted as OK.

Severities: ERROR only for what cannot happen in a healthy run; WARN for what a healthy run may do on purpose; NOTE for
what is worth knowing.
"""

import html
import json
import textwrap
from typing import NamedTuple

from torch import Tensor

ERROR, WARN, NOTE = "ERROR", "WARN", "NOTE"
SEVERITIES = (ERROR, WARN, NOTE)
LOSSES = ("F3", "F20", "F21")  # checks that look at what a loss is given


class Finding(NamedTuple):
    check: str  # S3, F14, N4 ...
    name: str  # optimizer-misses-trainables
    severity: str
    observed: str
    expected: str
    diagnosis: str  # the cause, in one sentence
    fix: str
    because: str = ""  # check whose finding explains this one; "" for a root


class Verdict(NamedTuple):
    """The outcome of a check that did not fire."""

    state: str  # OK, NOT-APPLICABLE, UNKNOWN
    why: str = ""


OK = Verdict("OK")


def not_applicable(why: str) -> Verdict:
    return Verdict("NOT-APPLICABLE", why)


def unknown(why: str) -> Verdict:
    return Verdict("UNKNOWN", why)


class Unhealthy(RuntimeError):
    """Raised by `Report.raise_for_errors`."""


class Report:
    """What the doctor found. It fills when the watch ends: after its steps, or when the block is left."""

    def __init__(self):
        self.findings: list[Finding] = []  # root causes first, each followed by what it explains
        self.verdicts: dict[str, Verdict] = {}  # of every check that did not fire
        self.rounds = 0  # training steps seen; 0: nothing was watched
        self.stepped = False  # an optimizer stepped
        self.calls = 0  # of models
        self.done = False
        self.when_done = lambda: None  # called when the watched steps are over, unless the block was left before
        self.exception: BaseException | None = None
        self.declared: dict[str, tuple[float, bool]] = {}
        self.faults: list[str] = []  # what went wrong in watching itself; empty in a sound report

    @property
    def root(self) -> Finding | None:
        """The first root cause, or None for a healthy run. A NOTE is no cause."""
        return next((f for f in self.findings if f.severity != NOTE), None)

    @property
    def errors(self) -> list[Finding]:
        return [f for f in self.findings if f.severity == ERROR]

    def raise_for_errors(self) -> None:
        """Raise `Unhealthy` with the first error's root."""
        if self.errors:
            raise Unhealthy(f"{self.root.check} {self.root.name}: {self.root.diagnosis} Fix: {self.root.fix}")

    def terms(self, **terms: Tensor) -> None:
        """Declare the terms of the loss about to be differentiated, for example ``report.terms(ce=ce, kd=kd)``."""
        self.declared = {name: (float(term.detach()), term.requires_grad) for name, term in terms.items()}

    # ---------------------------------------------------------------- showing
    def json(self) -> str:
        """Findings and verdicts as JSON."""
        verdicts = {check: verdict._asdict() for check, verdict in self.verdicts.items()}
        found = [f._asdict() for f in self.findings]
        raised = f"{type(self.exception).__name__}: {self.exception}" if self.exception is not None else None
        return json.dumps(
            {
                "rounds": self.rounds,
                "raised": raised,
                "healthy": self.root is None and raised is None and self.rounds > 0,
                "findings": found,
                "verdicts": verdicts,
                "faults": self.faults,
            },
            indent=1,
            allow_nan=False,
        )

    def __str__(self) -> str:
        if not self.done:
            return "doctor: still watching"
        lines = [self._headline()]
        for f in self.findings:
            if f.because:
                lines.append(f"    follows: {f.check} {f.name} ({f.observed})")
                continue
            lines.append(f"\n{f.severity} {f.check} {f.name}")
            for label, text in (
                ("observed", f.observed),
                ("expected", f.expected),
                ("cause", f.diagnosis),
                ("fix", f.fix),
            ):
                lines.append(textwrap.fill(text, 110, initial_indent=f"    {label}: ", subsequent_indent=" " * 8))
        lines += [f"\nthe doctor itself failed at: {fault}" for fault in self.faults]
        return "\n".join(lines)

    def _judged(self) -> bool:
        """Whether some check of the loss itself could look; one that fired is in no verdict."""
        return any(check not in self.verdicts or self.verdicts[check].state == "OK" for check in LOSSES)

    def _headline(self) -> str:
        states = [verdict.state for verdict in self.verdicts.values()]
        counts = f"{states.count('OK')} checks passed, {states.count('UNKNOWN')} could not see enough"
        roots = [f for f in self.findings if not f.because]
        said = [f"{sum(f.severity == s for f in roots)} {s}" for s in SEVERITIES if any(f.severity == s for f in roots)]
        if not self.rounds and not self.exception:
            looked = f"{self.calls} calls of a model but " if self.calls else ""
            nothing = f"doctor: nothing was watched, {looked}no backward and no optimizer step came by"
            return f"{nothing}; {', '.join(said)}" if said else f"{nothing}. This says nothing about the run."
        raised = f", then {type(self.exception).__name__}" if self.exception is not None else ""
        nothing = "nothing found" if self._judged() else "nothing found, but its loss was not judged"
        found = ", ".join(said) or ("the cause was not found" if raised else nothing)
        return f"doctor, {self.rounds} steps watched{raised}: {found}; {counts}"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        colour = {ERROR: "#c0392b", WARN: "#b9770e", NOTE: "#566573"}
        parts = [f"<p><b>{html.escape(self._headline() if self.done else str(self))}</b></p>"]
        for f in self.findings:
            title = f"{f.check} {f.name}"
            if f.because:
                parts.append(f"<p style='margin-left:2em'>follows: {html.escape(f'{title} ({f.observed})')}</p>")
                continue
            rows = zip(("observed", "expected", "cause", "fix"), (f.observed, f.expected, f.diagnosis, f.fix))
            cells = "".join(
                f"<tr><td style='text-align:left;vertical-align:top'>{a}</td>"
                f"<td style='text-align:left;white-space:normal'>{html.escape(b)}</td></tr>"
                for a, b in rows
            )
            head = f"<b style='color:{colour[f.severity]}'>{f.severity}</b> {html.escape(title)}"
            parts.append(f"<p>{head}</p><table>{cells}</table>")
        return {"text/plain": str(self), "text/html": "".join(parts)}
