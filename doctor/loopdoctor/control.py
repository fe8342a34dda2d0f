"""What the user decides about checks: some are ignored, with a reason, some weigh more or less than
their page says.

    with doctor.watch(model, ignore={"S3": "a probe on purpose"}, severity={"N5": "note"}): ...

    [tool.loopdoctor]                      # in pyproject.toml, the same
    ignore = { S3 = "a probe on purpose" }
    severity = { N5 = "note" }

The file is the nearest pyproject.toml above the working folder that has such a table; what is given
in the code wins. An ignored finding is listed at the end of the report with its reason, and decides
nothing.

Footgun: to ignore a cause does not ignore its effects. What was folded under it stands by itself
then, for it was seen.
"""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from loopdoctor import causes
from loopdoctor.finding import ERROR, NOTE, WARN, Finding

LEVELS = {"error": ERROR, "warn": WARN, "warning": WARN, "note": NOTE, "info": NOTE}
TABLE = "tool.loopdoctor"


class ControlError(ValueError):
    """What the user decided cannot be: an id that no check has, or a severity that does not
    exist.
    """


class Control(NamedTuple):
    ignore: dict[str, str]  # id of a check -> reason
    severity: dict[str, str]  # id of a check -> ERROR, WARN or NOTE

    def sort(self, findings: list[Finding]) -> tuple[list[Finding], list[tuple[Finding, str]]]:
        """Those that count, root causes first, and those that are ignored, each with its reason."""
        kept = [f for f in findings if f.check not in self.ignore]
        kept = [
            f._replace(severity=self.severity.get(f.check, f.severity), because="") for f in kept
        ]
        ignored = [
            (f._replace(because=""), self.ignore[f.check])
            for f in findings
            if f.check in self.ignore
        ]
        return causes.order(kept), ignored


def control(ignore: Mapping[str, str] | None, severity: Mapping[str, str] | None) -> Control:
    """Return what was given, over what the nearest pyproject.toml says."""
    file, table = _table(Path.cwd())
    written = _read(f"[{TABLE}] of {file}: ", table.get("ignore"), table.get("severity"))
    given = _read("", ignore, severity)
    return Control(written.ignore | given.ignore, written.severity | given.severity)


def _read(
    where: str, ignore: Mapping[str, str] | None, severity: Mapping[str, str] | None
) -> Control:
    for name, given in (("ignore", ignore), ("severity", severity)):
        if not isinstance(given or {}, Mapping):
            raise ControlError(f"{where}{name} = {given!r}: must name checks, each with a text")
        for id, text in (given or {}).items():
            _known(f"{where}{name}", id)
            if not isinstance(text, str) or not text.strip():
                raise ControlError(f"{where}{name}[{id!r}] = {text!r}: must be a text")
    levels = {id: LEVELS.get(text.lower()) for id, text in (severity or {}).items()}
    if wrong := [id for id, level in levels.items() if level is None]:
        text = severity[wrong[0]]
        raise ControlError(
            f"{where}severity[{wrong[0]!r}] = {text!r}: allowed are error, warn, note (or info)"
        )
    return Control(dict(ignore or {}), levels)


def known(id: object) -> None:
    """Raise for an id that no check has, with the nearest one that exists."""
    _known("why", id)


def _known(where: str, id: object) -> None:
    # both are read when they are asked for: they take time to import
    from loopdoctor import checks, log_faults

    ids = {c.id: c.id for c in checks.ALL} | {fault.id: fault.id for fault in log_faults.FAULTS}
    if id in ids:
        return
    names = {f.name: c.id for c in checks.ALL for f in c.faults.values()} | {
        f.name: f.id for f in log_faults.FAULTS
    }
    upper = {name.lower(): id for name, id in (ids | names).items()}
    near = difflib.get_close_matches(str(id).lower(), upper, n=1, cutoff=0.5)
    meant = f"; did you mean {upper[near[0]]!r}?" if near else "."
    raise ControlError(
        f"{where} names {id!r}, and no check has that id{meant} Allowed are {', '.join(ids)}"
    )


def _table(folder: Path) -> tuple[Path, dict]:
    """Return the nearest pyproject.toml with a table for us, and the table."""
    for parent in (folder, *folder.parents):
        file = parent / "pyproject.toml"
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        if "loopdoctor" not in text:
            continue
        try:
            table = tomllib.loads(text).get("tool", {}).get("loopdoctor")
        except tomllib.TOMLDecodeError as error:
            raise ControlError(f"{file} cannot be read: {error}") from error
        if not isinstance(table, Mapping | None):
            raise ControlError(
                f"{TABLE} = {table!r} in {file}: must be a table with ignore or severity"
            )
        if wrong := sorted(set(table or ()) - {"ignore", "severity"}):
            raise ControlError(
                f"[{TABLE}] of {file}: {wrong[0]!r} is no option; allowed are ignore and severity"
            )
        if table is not None:
            return file, dict(table)
    return folder, {}
