"""`loopdoctor FILE.py[:function]`: run somebody's training script as it is, and say what is wrong
with it.

    loopdoctor page.ipynb[:cell]                    a notebook as one script (notebook.py)
    loopdoctor train.py --html report.html --junit report.xml --format annotations
    loopdoctor train.py --baseline healthy.json
    what changed first against a saved report (record.py)
    loopdoctor --overfit train.py                   one batch by heart (overfit.py)
    loopdoctor --log train.log                      what a log alone shows (logs.py)

It runs as `python FILE.py` would run it: `__name__` is `"__main__"`, `sys.argv` holds its own
arguments, modules next to it can be imported. It runs in this process under a watch that finds
model, optimizers and teacher by itself. With `:function` the file is imported under another name,
so that its main guard stays shut, and the function is called without arguments.

Exit codes: 0 no error found, 1 an error was found or the script raised, 2 nothing could be run.

Footgun: what a script does in other processes (torchrun, spawn, subprocess) is not seen here; put
`doctor.watch` into the script itself then.
"""

import argparse
import contextlib
import importlib.util
import inspect
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from loopdoctor import logs, notebook, overfit, record
from loopdoctor.control import ControlError, control, known
from loopdoctor.report import Report
from loopdoctor.watching import watch


class BadInput(ValueError):
    """The command line names something that cannot be run; the text is one sentence that says what
    can.
    """


class _Enough(BaseException):
    """Ends a script after its watched steps; not an Exception, so that the script's own handlers
    let it through.
    """


def command(arguments: Sequence[str] | None = None, prog: str = "loopdoctor") -> int:
    """Run the command with these arguments and return its exit code; `nblib doctor` is the same
    under another name.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)  # argparse loses what stands behind it
    options = command_line(prog).parse_args(given[:at])
    form = options.format or ("json" if options.json else "text")
    out = Out(
        form, html=options.html, junit=options.junit, baseline=options.baseline, why=options.why
    )
    try:
        if options.why is not None:
            known(options.why)
        if (options.target is None) == (options.log is None):
            raise BadInput("Give a FILE.py to run, or --log FILE to read, one of the two.")
        if options.log is not None:
            return _read_log(Path(options.log), out)
        if options.overfit:
            return _overfit(options.target, given[at + 1 :], options.steps or 100)
        windows = dict(at=options.at, every=options.every)
        return _watch(
            options.target,
            given[at + 1 :],
            out,
            steps=options.steps or 10,
            stop=options.stop,
            **windows,
        )
    except (
        BadInput,
        logs.Unreadable,
        notebook.Unreadable,
        record.Unreadable,
        ControlError,
    ) as error:
        print(f"{prog.partition(' ')[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def command_line(prog: str = "loopdoctor") -> argparse.ArgumentParser:
    """Make the parser of the options that stand before `--`."""
    parser = _Parser(
        prog=prog,
        description="Run a training script as it is, watch its first steps and name what is "
        "wrong with its loop.",
        epilog="Arguments of the script itself come last, after --. Exit code 0: no error "
        "found; 1: an error was found "
        "or the script raised; 2: it could not be run.",
    )
    parser.add_argument(
        "target", nargs="?", metavar="FILE", help="FILE.py[:function] or FILE.ipynb[:cell]"
    )
    parser.add_argument(
        "--log", metavar="FILE", help="read a log alone: what was printed, or trainer_state.json"
    )
    parser.add_argument(
        "--overfit", action="store_true", help="learn one batch by heart, in --steps steps (100)"
    )
    parser.add_argument(
        "--steps", type=_positive, metavar="N", help="training steps to watch (default 10)"
    )
    parser.add_argument(
        "--at", type=_places, default=(), metavar="N,N", help="watch from these steps on: 0,500"
    )
    parser.add_argument(
        "--every", type=_positive, metavar="N", help="watch from step 0, N, 2 N ... on"
    )
    parser.add_argument("--format", choices=FORMATS, help="of what is printed (default text)")
    parser.add_argument("--html", metavar="FILE", help="write the report as one page")
    parser.add_argument("--junit", metavar="FILE", help="write it as XML for CI; only errors fail")
    parser.add_argument(
        "--baseline", metavar="FILE", help="a report in JSON of a healthy run: what changed first?"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="the report as JSON; what the script prints goes to stderr",
    )
    parser.add_argument(
        "--why", metavar="ID", help="why this check spoke or did not: what it saw, at which lines"
    )
    parser.add_argument(
        "--stop", action="store_true", help="end the script after the watched steps"
    )
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog.partition(' ')[0]}: {message}", file=sys.stderr)
        sys.exit(2)  # one sentence, without the usage that --help shows


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


FORMATS = ("text", "json", "markdown", "annotations")


class Out(NamedTuple):
    """What a report becomes."""

    form: str = "text"
    html: str | None = None
    junit: str | None = None
    baseline: str | None = None
    why: str | None = None  # id of a check

    def before(self) -> list | None:
        """Return the records to compare with.

        Raises for what cannot be read or written, before anything runs.
        """
        for file in filter(None, (self.html, self.junit)):
            if not Path(file).resolve().parent.is_dir() or Path(file).is_dir():
                raise BadInput(f"{file!r} cannot be written; give a file in a folder that exists.")
        return record.load(Path(self.baseline)) if self.baseline else None

    def write(self, report: Report, file: str = "", **more) -> str:
        for path, text in ((self.html, report.html), (self.junit, report.junit)):
            if path:
                Path(path).write_text(text(), encoding="utf-8")
        if self.form == "json":
            return json.dumps(json.loads(report.json()) | more, indent=1)
        forms = {"markdown": report.markdown, "annotations": lambda: report.annotations(file)}
        if self.form in forms:
            return forms[self.form]().rstrip("\n")
        return f"\n{report}" + (f"\n\n{report.why(self.why)}" if self.why else "")


def _places(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of steps such as 0,500")
    return [int(part) for part in text.split(",")]


def _watch(
    target: str, arguments: Sequence[str], form: Out, *, steps: int, stop: bool, **windows
) -> int:
    path, function = located(target)
    healthy = form.before()
    with (
        contextlib.nullcontext(sys.stdout)
        if form.form == "text"
        else _all_output_to_stderr() as out
    ):
        program = _program(path, function)
        report, code = diagnose(program, arguments, steps=steps, stop=stop, **windows)
        if healthy is not None:
            report.compared = record.compare(report, healthy)
        sys.stdout.flush()
        print(form.write(report, str(path), exit_code_of_script=code), file=out, flush=True)
        if program.left_out:
            print(f"\n{_not_run(program.left_out)}", flush=True)
    if code == 130:
        return code
    return 1 if report.errors or report.exception is not None or code else 0


def _read_log(path: Path, form: Out) -> int:
    form.before()
    report = logs.diagnose(logs.read(path), control(None, None))
    print(form.write(report, str(path)))
    return 1 if report.errors else 0


def _overfit(target: str, arguments: Sequence[str], steps: int) -> int:
    path, function = located(target)
    program = _program(path, function)
    with _as_started(path, arguments), program:
        program.run_before()
        held = overfit.learn(program.run, steps)
    sys.stdout.flush()
    print(f"\n{held}", flush=True)
    return held.code


def located(target: str) -> tuple[Path, str]:
    """File and function of FILE.py or FILE.py:function; file and cell of FILE.ipynb or
    FILE.ipynb:cell.
    """
    if notebook.ENDING in target:
        return _located_notebook(target)
    name, colon, function = target.rpartition(":") if ".py:" in target else (target, "", "")
    path = Path(name)
    if not name.endswith(".py") or (colon and not function.isidentifier()):
        raise BadInput(f"{target!r} cannot be run; give FILE.py or FILE.py:function.")
    if not path.is_file():
        raise BadInput(f"There is no file {name!r}; give the path of an existing FILE.py.")
    try:
        tree = compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError, OSError) as error:
        raise BadInput(
            f"{name} cannot be run as Python: {error}; give a FILE.py that Python can read."
        ) from error
    if function and function not in tree.co_names:
        known = [
            c.co_name for c in tree.co_consts if hasattr(c, "co_name") and c.co_name.isidentifier()
        ]
        raise BadInput(
            f"{name} has no function {function!r}; it has: {', '.join(known) or 'none'}."
        )
    return path, function


def _located_notebook(target: str) -> tuple[Path, str]:
    name, ending, cell = target.rpartition(notebook.ENDING)
    path = Path(name + ending)
    if cell and not (cell[0] == ":" and cell[1:].isdecimal()):
        raise BadInput(
            f"{target!r} cannot be run; give FILE.ipynb, or FILE.ipynb:7 for its seventh code cell."
        )
    if not path.is_file():
        raise BadInput(f"There is no file {str(path)!r}; give the path of an existing FILE.ipynb.")
    notebook.check(path, cell[1:])
    return path, cell[1:]


class Script:
    """A script, or one function of it, with the methods of a Notebook."""

    left_out: Sequence[str] = ()

    def __init__(self, path: Path, function: str):
        self.path, self.function = path, function
        self.files = {str(path.resolve())}

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, *raised) -> None:
        pass

    def run_before(self) -> None:
        pass

    def run(self) -> None:
        _run(self.path, self.function)


def _program(path: Path, part: str) -> "Script | notebook.Notebook":
    return (notebook.Notebook if path.suffix == notebook.ENDING else Script)(path, part)


def _not_run(left_out: Sequence[str]) -> str:
    """Return what of a notebook was left out."""
    lines = [f"    {line}" for line in dict.fromkeys(left_out)]
    return "\n".join(["not run, because it is no Python but Jupyter's:", *lines])


def diagnose(
    program: "Script | notebook.Notebook",
    arguments: Sequence[str],
    *,
    steps: int = 10,
    stop: bool = False,
    **windows,
) -> tuple[Report, int]:
    """Return the report, and the script's own exit code."""
    code, report = 0, Report()
    with _as_started(program.path, arguments), program:
        try:
            program.run_before()
            with watch(steps=steps, say=False, **windows) as report:
                if stop:
                    report.when_done = _enough
                program.run()
        except _Enough:
            report.exception = None
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
            report.exception = None
            if isinstance(leave.code, str):
                print(leave.code, file=sys.stderr)
        except (BadInput, ControlError):
            raise
        except KeyboardInterrupt:
            code = 130
        except Exception as error:
            traceback.print_exception(
                type(error), error, _theirs(error.__traceback__, program.files), file=sys.stderr
            )
            report.exception = report.exception or error.with_traceback(None)
    # also where nothing was watched, because a cell above the one that is meant has ended it
    report.done = True
    return report, code


def _run(path: Path, function: str) -> None:
    if not function:
        runpy.run_path(str(path), run_name="__main__")
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    wanted: Callable = getattr(module, function, None)
    if not callable(wanted):
        raise BadInput(f"{function!r} in {path} is no function; name one that takes no arguments.")
    needed = [
        p.name
        for p in inspect.signature(wanted).parameters.values()
        if p.default is p.empty and p.kind < 2
    ]
    if needed:
        raise BadInput(
            f"{function} in {path} needs {', '.join(needed)}; name a function that takes no "
            "arguments."
        )
    wanted()


def _enough() -> None:
    raise _Enough


@contextlib.contextmanager
def _as_started(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set up what Python sets up for a script, for the time of its run."""
    before = sys.argv, list(sys.path), sys.modules.get(path.stem)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        if before[2] is not None:
            sys.modules[path.stem] = before[2]


@contextlib.contextmanager
def _all_output_to_stderr() -> Iterator:
    """Lend stdout's place to stderr, down to the file descriptor, where children and C code write;
    yields stdout.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # no descriptors here
        kept = None
    stream, sys.stdout = sys.stdout, sys.stderr
    try:
        yield (
            stream if kept is None or stream is not sys.__stdout__ else os.fdopen(os.dup(kept), "w")
        )
    finally:
        sys.stdout.flush()
        sys.stdout = stream
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def _theirs(tb, files: set[str]):
    """Return the traceback from the script's own first line on, without the frames of this package
    above it.
    """
    while tb is not None and not {tb.tb_frame.f_code.co_filename, _absolute(tb)} & files:
        tb = tb.tb_next
    return tb


def _absolute(tb) -> str:
    return os.path.abspath(tb.tb_frame.f_code.co_filename)
