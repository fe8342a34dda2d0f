"""`%%doctor` above a training cell: the cell runs as ever, and under it stands what is wrong.

    %load_ext loopdoctor

    %%doctor --steps 20
    for x, y in loader: ...

The magic does not run the cell itself, as other cell magics do. Before IPython reads a cell, its
first line is turned into a call that opens a watch, and when the cell is over IPython's own event
closes it. So all that holds for a cell holds here: its variables, `await`, the value of its last
line, its errors with their lines, Interrupt. The report is shown last, after the cell's own output
and its pictures.

Only this file imports IPython, and only `%load_ext` imports this file.

Footgun: IPython also asks, while somebody types, whether a cell is complete, and runs it if so.
There the first line has to stay what it is, for with a call in its place it would be a complete
cell by itself.
"""

import argparse
import re
import shlex
import sys
import threading
from typing import Any, NamedTuple

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import cell_magic
from IPython.display import display

from loopdoctor.report import Report
from loopdoctor.script import _places, _positive
from loopdoctor.watching import watch

NAME = "doctor"
FIRST_LINE = re.compile(r"%%doctor(?:\s+(.*?))?\s*")
PATIENCE = 5.0  # seconds that a cell goes on after its watched steps, until a finding is announced


class Open(NamedTuple):
    """A watch that is open."""

    block: Any  # of `watch`
    report: Report
    cell: Any  # what IPython knows of the cell that it belongs to; None where that is not known
    notices: list[threading.Timer]


class Magic:
    """What the extension puts into one shell, and takes out again."""

    def __init__(self, shell: Any):
        self.shell = shell
        self.cells: list[Any] = []  # that run now, the outermost first
        self.open: Open | None = None

    def load(self) -> None:
        """Put it in."""
        self.shell.register_magic_function(self.begin, "line", NAME)
        self.shell.register_magic_function(self.run, "cell", NAME)
        self.shell.input_transformers_cleanup.append(as_line)
        self.shell.events.register("pre_run_cell", self.cell_begins)
        self.shell.events.register("post_run_cell", self.cell_ended)

    def unload(self) -> None:
        """Take it out. A watch that is open ends with its report."""
        if self.open is not None:
            self.end(None)
        for kind in ("line", "cell"):
            self.shell.magics_manager.magics[kind].pop(NAME, None)
        self.shell.input_transformers_cleanup.remove(as_line)
        self.shell.events.unregister("pre_run_cell", self.cell_begins)
        self.shell.events.unregister("post_run_cell", self.cell_ended)

    # ---------------------------------------------------------------- the magics
    def begin(self, line: str) -> None:
        """Watch the rest of this cell and show the report under it; `--help` lists the options.

        %%doctor [--steps N] [--teacher NAME] [--ignore ID=REASON] [--severity ID=LEVEL] [--at N,N]
        [--every N] [--into NAME]
        """
        options = _options(line)
        if options is None:
            return
        if self.open is not None:
            raise UsageError("%%doctor: this cell is watched already.")
        # What is bad input to `watch` is bad input here.
        block = watch(
            teacher=[self._named(name) for name in options.teacher] or None,
            steps=options.steps,
            ignore=dict(options.ignore),
            severity=dict(options.severity),
            at=options.at,
            every=options.every,
            say=False,
        )
        try:
            report = block.__enter__()
        except (TypeError, ValueError) as error:
            raise UsageError(f"%%doctor: {error}") from None
        cell = self.cells[-1] if self.cells else None
        self.open = Open(block, report, cell, [])
        report.when_done = self.steps_are_over
        if options.into:
            self.shell.user_ns[options.into] = report

    def run(self, line: str, cell: str) -> None:
        """Watch the training loop in this cell and show the report under it; see `--help`.

        %%doctor [--steps N] [--teacher NAME] [--ignore ID=REASON] [--severity ID=LEVEL] [--at N,N]
        [--every N] [--into NAME]

        IPython comes here only where code asks for it by `run_cell_magic`; a cell is changed by
        `as_line` before.
        """
        self.shell.run_cell(f"%%{NAME} {line}\n{cell}").raise_error()

    def _named(self, name: str) -> Any:
        """Give what `--teacher` names."""
        try:
            return eval(name, self.shell.user_ns)
        except Exception as error:
            raise UsageError(
                f"%%doctor: --teacher {name}: must name a module that an earlier cell has made "
                f"({type(error).__name__}: {error})."
            ) from None

    # ---------------------------------------------------------------- events
    def cell_begins(self, info: Any) -> None:
        """Note which cell runs: one may run another."""
        self.cells.append(info)

    def cell_ended(self, result: Any) -> None:
        """Close the watch with its cell."""
        info = getattr(result, "info", None)
        # An empty cell ends without having begun.
        if info is None or any(info is cell for cell in self.cells):
            mine = [n for n, cell in enumerate(self.cells) if cell is info] or [0]
            del self.cells[mine[0] :]
        if self.open is not None and (self.open.cell is None or self.open.cell not in self.cells):
            self.end(result)

    def steps_are_over(self) -> None:
        """Report when the watched steps are over, as the cell may go on for hours."""
        if self.open is not None and self.open.report.root is not None:
            notice = threading.Timer(PATIENCE, _tell, [self.open.report])
            notice.daemon = True
            self.open.notices.append(notice)
            notice.start()

    def end(self, result: Any) -> None:
        """Take everything off and show the report."""
        ending, self.open = self.open, None
        error = getattr(result, "error_in_exec", None) or getattr(result, "error_before_exec", None)
        for notice in ending.notices:
            notice.cancel()
        try:
            ending.block.__exit__(
                None if error is None else type(error), error, getattr(error, "__traceback__", None)
            )
        finally:
            display(ending.report)


def _tell(report: Report) -> None:
    """Say in one line what was found, while the cell still runs."""
    found = report.root
    print(
        f"doctor: {found.severity} {found.check} {found.name}. The report comes under the cell "
        "when it ends; interrupt it to see the report now.",
        file=sys.stderr,
        flush=True,
    )


# ----------------------------------------------------------------------------------- the first line
def as_line(lines: list[str]) -> list[str]:
    """Turn the first line of a cell, `%%doctor OPTIONS`, into a call in the same line."""
    match = FIRST_LINE.fullmatch(lines[0]) if lines else None
    if match is None:
        return lines
    options = match[1] or ""
    call = f"get_ipython().run_line_magic({NAME!r}, {options!r})\n"
    # To ask for help is not to run the cell.
    if {"-h", "--help"} & set(options.split()):
        return [call]
    # A second magic under it (%%time) takes the rest of the cell.
    rest = lines[1:]
    first = next((n for n, line in enumerate(rest) if line.strip()), 0)
    if rest and rest[first].startswith("%%"):
        rest = cell_magic(rest[first:])
    return [call, *rest]


as_line.has_side_effects = True  # so IPython leaves it out where it asks whether a cell is complete


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as IPython's magics say it, and leaves the process alone."""

    def error(self, message: str) -> None:
        raise UsageError(f"%%doctor: {message}; %%doctor --help lists the options.")


def _options(line: str) -> argparse.Namespace | None:
    """Read the options; None where only help was asked for."""
    parser = _Parser(
        prog="%%doctor",
        description="Watch the first training steps of this cell and show under it what is "
        "wrong with its loop.",
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=26, width=100),
    )
    parser.add_argument(
        "--steps", type=_positive, default=10, metavar="N", help="steps to watch (default 10)"
    )
    parser.add_argument(
        "--teacher",
        action="append",
        default=[],
        metavar="NAME",
        help="a model that teaches; may be given again",
    )
    parser.add_argument(
        "--ignore",
        type=_pair,
        action="append",
        default=[],
        metavar="ID=REASON",
        help='what this check finds decides nothing: --ignore "S3=a probe on purpose"',
    )
    parser.add_argument(
        "--severity",
        type=_pair,
        action="append",
        default=[],
        metavar="ID=LEVEL",
        help="error, warn or note: N5=note",
    )
    parser.add_argument(
        "--at", type=_places, default=(), metavar="N,N", help="watch from these steps on: 0,500"
    )
    parser.add_argument(
        "--every", type=_positive, metavar="N", help="watch from step 0, N, 2 N ... on"
    )
    parser.add_argument(
        "--into", type=_identifier, metavar="NAME", help="keep the report in this variable"
    )
    parser.add_argument(
        "-h", "--help", action="store_true", help="show this and do not run the cell"
    )
    try:
        options = parser.parse_args(shlex.split(line))
    except ValueError as error:
        raise UsageError(f"%%doctor: {line!r} cannot be read: {error}.") from None
    if options.help:
        print(parser.format_help().rstrip())
        return None
    return options


def _pair(text: str) -> tuple[str, str]:
    """Read ID=REASON."""
    key, _, value = text.partition("=")
    if not key.strip() or not value.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=TEXT, in quotes where it has blanks")
    return key.strip(), value.strip()


def _identifier(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a variable")
    return text


# ------------------------------------------------------------------------------------ the extension
LOADED: dict[Any, Magic] = {}  # by shell


def load(shell: Any) -> None:
    """`%load_ext loopdoctor`; a second time changes nothing."""
    if shell not in LOADED:
        LOADED[shell] = Magic(shell)
        LOADED[shell].load()


def unload(shell: Any) -> None:
    """`%unload_ext loopdoctor`."""
    if shell in LOADED:
        LOADED.pop(shell).unload()
