"""The report of a watch: the root cause first, with its fix, and what follows from it folded below.

Footgun: inside the block of a watch it is empty, and `done` says so. Empty is not healthy.
"""

import json
import textwrap
from typing import Any

from torch import Tensor

from loopdoctor import rich
from loopdoctor.finding import ERROR, NOTE, SEVERITIES, Finding, Verdict

LOSSES = ("F3", "F20", "F21")  # checks that look at what a loss is given


class Unhealthy(RuntimeError):
    """Raised by `Report.raise_for_errors`."""


class Report:
    """What the doctor found.

    It fills when the watch ends: after its steps, or when the block is left.
    """

    def __init__(self):
        self.findings: list[Finding] = []  # root causes first, each followed by what it explains
        self.verdicts: dict[str, Verdict] = {}  # of every check that did not fire
        self.rounds = 0  # training steps seen; 0: nothing was watched
        self.stepped = False  # an optimizer stepped
        self.calls = 0  # of models
        self.done = False
        # called when the watched steps are over, unless the block was left before
        self.when_done = lambda: None
        self.exception: BaseException | None = None
        self.declared: dict[str, tuple[float, bool]] = {}
        self.faults: list[str] = []  # what went wrong in watching itself; empty in a sound report
        # what the user ignores, each with the reason given
        self.ignored: list[tuple[Finding, str]] = []
        self.record: dict = {}  # curves and tensors as numbers, see record.py
        self.compared: list[str] = []  # what changed against a baseline
        self.source = "watch"  # or "log"
        self.notes: list[str] = []  # what a reader of a log should know of it
        self.first = 0  # steps before the watch began
        self.windows: list[Report] = []  # of a watch that stays on, see windows.py
        self.asked: dict[str, list[str]] = {}  # id of a check -> what it looked at, a line each
        self.control: Any = None  # what the user decides about checks, see control.py

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
            raise Unhealthy(
                f"{self.root.check} {self.root.name}: {self.root.diagnosis} Fix: {self.root.fix}"
            )

    def terms(self, **terms: Tensor) -> None:
        """Declare the terms of the loss about to be differentiated, for example
        ``report.terms(ce=ce, kd=kd)``.
        """
        self.declared = {
            name: (float(term.detach()), term.requires_grad) for name, term in terms.items()
        }

    def why(self, id: str) -> str:
        """Say why a check spoke or did not: its rule, what it looked at and at which lines, and
        what came of it.
        """
        from loopdoctor import checks, control

        control.known(id)
        page = next((c for c in checks.ALL if c.id == id), None)
        found = next((f for f in self.findings if f.check == id), None)
        verdict = self.verdicts.get(id)
        if found is not None:
            outcome = f"{found.severity}, because {found.observed}; expected: {found.expected}"
        elif verdict is not None:
            outcome = f"{verdict.state}{f', because {verdict.why}' if verdict.why else ''}"
        else:
            outcome = "not asked: nothing was watched"
        lines = [f"{id} {page.name if page else ''}: {outcome}"]
        lines += [f"  at: {place}" for place in (found.where if found is not None else ())]
        for paragraph in page.about if page else ():
            lines.append(
                textwrap.fill(paragraph, 110, initial_indent="  rule: ", subsequent_indent=" " * 8)
            )
        lines += [f"  looked at {line}" for line in self.asked.get(id, ())]
        return "\n".join(lines)

    # ---------------------------------------------------------------- showing
    def json(self) -> str:
        """Return findings, verdicts and the curves as JSON; a later run may be compared with it."""
        from loopdoctor import record

        verdicts = {check: verdict._asdict() for check, verdict in self.verdicts.items()}
        found = [f._asdict() for f in self.findings]
        raised = (
            f"{type(self.exception).__name__}: {self.exception}"
            if self.exception is not None
            else None
        )
        return json.dumps(
            {
                "rounds": self.rounds,
                "raised": raised,
                "healthy": self.root is None and raised is None and self.rounds > 0,
                "findings": found,
                "verdicts": verdicts,
                "faults": self.faults,
                "ignored": [f._asdict() | {"reason": reason} for f, reason in self.ignored],
                "compared": self.compared,
                "notes": self.notes,
                "record": record.plain(self.record),
                "windows": [
                    {"first": w.first, "record": record.plain(w.record)} for w in self.windows
                ],
            },
            indent=1,
            allow_nan=False,
        )

    def __str__(self) -> str:
        if not self.done:
            return "doctor: still watching"
        lines = [self.headline()]
        for f in self.findings:
            if f.because:
                lines.append(f"    follows: {f.check} {f.name} ({f.observed})")
                continue
            lines.append(f"\n{f.severity} {f.check} {f.name}")
            for label, text in (
                *(("where", place) for place in f.where),
                ("observed", f.observed),
                ("expected", f.expected),
                ("cause", f.diagnosis),
                ("fix", f.fix),
            ):
                lines.append(
                    textwrap.fill(
                        text, 110, initial_indent=f"    {label}: ", subsequent_indent=" " * 8
                    )
                )
        from loopdoctor import reports

        return "\n".join(lines + [f"\n{line}" for line in reports.ends(self)])

    def html(self) -> str:
        """One page with its pictures in it, that needs nothing from outside."""
        return self._written("html")

    def markdown(self) -> str:
        return self._written("markdown")

    def junit(self) -> str:
        """XML for CI: a test for each check, of which only errors fail."""
        return self._written("junit")

    def annotations(self, file: str = "") -> str:
        """Lines that GitHub shows beside the file."""
        return self._written("annotations", file)

    def _written(self, form: str, *options: str) -> str:
        from loopdoctor import reports

        return getattr(reports, form)(self, *options)

    def _judged(self) -> bool:
        """Whether some check of the loss itself could look; one that fired is in no verdict."""
        return any(
            check not in self.verdicts or self.verdicts[check].state == "OK" for check in LOSSES
        )

    def headline(self) -> str:
        """Return the first line."""
        if not self.done:
            return "doctor: still watching"
        states = [verdict.state for verdict in self.verdicts.values()]
        counts = (
            f"{states.count('OK')} checks passed, {states.count('UNKNOWN')} could not see enough"
        )
        roots = [f for f in self.findings if not f.because]
        said = [
            f"{sum(f.severity == s for f in roots)} {s}"
            for s in SEVERITIES
            if any(f.severity == s for f in roots)
        ]
        if self.source == "log":
            counts = (
                f"{states.count('OK')} questions well, {states.count('UNKNOWN')} could not be asked"
            )
            found = ", ".join(said) or "nothing found that a log can show"
            return f"doctor, {self.rounds} entries of a log read: {found}; {counts}"
        if not self.rounds and not self.exception:
            looked = f"{self.calls} calls of a model but " if self.calls else ""
            nothing = (
                f"doctor: nothing was watched, {looked}no backward and no optimizer step came by"
            )
            return (
                f"{nothing}; {', '.join(said)}"
                if said
                else f"{nothing}. This says nothing about the run."
            )
        stopped = isinstance(self.exception, KeyboardInterrupt)
        raised = (
            f", then {'interrupted' if stopped else type(self.exception).__name__}"
            if self.exception
            else ""
        )
        nothing = (
            "nothing found" if self._judged() else "nothing found, but its loss was not judged"
        )
        found = ", ".join(said) or (
            "the cause was not found" if raised and not stopped else nothing
        )
        windows = f" in {len(self.windows)} windows" if len(self.windows) > 1 else ""
        return f"doctor, {self.rounds} steps watched{windows}{raised}: {found}; {counts}"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        """Return what Jupyter shows under a cell."""
        return {"text/plain": str(self), "text/html": rich.fragment(self)}
