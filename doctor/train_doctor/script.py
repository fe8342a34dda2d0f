"""`train-doctor FILE.py[:function]`: run somebody's training script as it is, and say what is wrong with it.

    train-doctor train.py --html report.html --junit report.xml --format annotations
    train-doctor train.py --baseline healthy.json     what changed first against a saved report (record.py)
    train-doctor --overfit train.py                   one batch by heart (overfit.py)
    train-doctor --log trainer_state.json             what a log alone shows (logs.py)

It runs as `python FILE.py` would run it: `__name__` is `"__main__"`, `sys.argv` holds its own arguments, modules next
to it can be imported. It runs in this process under a watch that finds model, optimizers and teacher by itself.
With `:function` the file is imported under another name, so that its main guard stays shut, and the function is called
without arguments.

Exit codes: 0 no error found, 1 an error was found or the script raised, 2 nothing could be run.

Footgun: what a script does in other processes (torchrun, spawn, subprocess) is not seen here; put `doctor.watch` into
the script itself then.
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
from typing import NamedTuple

from train_doctor import logs, overfit, record
from train_doctor.control import ControlError, control
from train_doctor.report import Report
from train_doctor.watching import watch


class BadInput(ValueError):
    """The command line names something that cannot be run; the text is one sentence that says what can."""


class _Enough(BaseException):
    """Ends a script after its watched steps; not an Exception, so that the script's own handlers let it through."""


def command(arguments: Sequence[str] | None = None) -> int:
    """The command `train-doctor`; `nblib doctor` calls `main` with the same options."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)  # argparse loses what stands behind it
    parser = argparse.ArgumentParser(
        prog="train-doctor",
        description="Run a training script as it is, watch its first steps and name what is wrong with its loop.",
        epilog="Arguments of the script itself come last, after --. Exit code 0: no error found; 1: an error was found "
        "or the script raised; 2: it could not be run.",
    )
    parser.add_argument("target", nargs="?", metavar="FILE.py[:function]", help="a script, or one function of it")
    parser.add_argument("--log", metavar="FILE", help="read a log alone: trainer_state.json, or lines of JSON")
    parser.add_argument("--overfit", action="store_true", help="learn one batch by heart, in --steps steps (100)")
    parser.add_argument("--steps", type=_positive, metavar="N", help="training steps to watch (default 10)")
    parser.add_argument("--at", type=_places, default=(), metavar="N,N", help="watch from these steps on: 0,500")
    parser.add_argument("--every", type=_positive, metavar="N", help="watch from step 0, N, 2 N ... on")
    parser.add_argument("--format", choices=FORMATS, help="of what is printed (default text)")
    parser.add_argument("--html", metavar="FILE", help="write the report as one page")
    parser.add_argument("--junit", metavar="FILE", help="write it as XML for CI; only errors fail")
    parser.add_argument("--baseline", metavar="FILE", help="a report in JSON of a healthy run: what changed first?")
    parser.add_argument("--json", action="store_true", help="the report as JSON; what the script prints goes to stderr")
    parser.add_argument("--stop", action="store_true", help="end the script after the watched steps")
    options = parser.parse_args(given[:at])
    form = options.format or ("json" if options.json else "text")
    out = Out(form, html=options.html, junit=options.junit, baseline=options.baseline)
    try:
        if (options.target is None) == (options.log is None):
            raise BadInput("Give a FILE.py to run, or --log FILE to read, one of the two.")
        if options.log is not None:
            return _read_log(Path(options.log), out)
        if options.overfit:
            return _overfit(options.target, given[at + 1 :], options.steps or 100)
        windows = dict(at=options.at, every=options.every)
        return _watch(options.target, given[at + 1 :], out, steps=options.steps or 10, stop=options.stop, **windows)
    except (BadInput, logs.Unreadable, record.Unreadable, ControlError) as error:
        print(f"train-doctor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


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

    def before(self) -> list | None:
        """The records to compare with. Raises for what cannot be read or written, before anything runs."""
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
        return forms[self.form]().rstrip("\n") if self.form in forms else f"\n{report}"


def _places(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of steps such as 0,500")
    return [int(part) for part in text.split(",")]


def main(target: str, arguments: Sequence[str] = (), *, steps: int = 10, as_json: bool = False, stop=False) -> int:
    """Run, print the report (JSON to stdout, and what the script prints to stderr), return the exit code."""
    return _watch(target, arguments, Out("json" if as_json else "text"), steps=steps, stop=stop)


def _watch(target: str, arguments: Sequence[str], form: Out, *, steps: int, stop: bool, **windows) -> int:
    path, function = located(target)
    healthy = form.before()
    with contextlib.nullcontext(sys.stdout) if form.form == "text" else _all_output_to_stderr() as out:
        report, code = diagnose(path, function, arguments, steps=steps, stop=stop, **windows)
        if healthy is not None:
            report.compared = record.compare(report, healthy)
        sys.stdout.flush()
        print(form.write(report, str(path), exit_code_of_script=code), file=out, flush=True)
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
    with _as_started(path, arguments):
        held = overfit.learn(lambda: _run(path, function), steps)
    sys.stdout.flush()
    print(f"\n{held}", flush=True)
    return held.code


def located(target: str) -> tuple[Path, str]:
    """File and function of FILE.py or FILE.py:function."""
    name, colon, function = target.rpartition(":") if ".py:" in target else (target, "", "")
    path = Path(name)
    if not name.endswith(".py") or (colon and not function.isidentifier()):
        raise BadInput(f"{target!r} cannot be run; give FILE.py or FILE.py:function.")
    if not path.is_file():
        raise BadInput(f"There is no file {name!r}; give the path of an existing FILE.py.")
    try:
        tree = compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError, OSError) as error:
        raise BadInput(f"{name} cannot be run as Python: {error}; give a FILE.py that Python can read.") from error
    if function and function not in tree.co_names:
        known = [c.co_name for c in tree.co_consts if hasattr(c, "co_name") and c.co_name.isidentifier()]
        raise BadInput(f"{name} has no function {function!r}; it has: {', '.join(known) or 'none'}.")
    return path, function


def diagnose(
    path: Path, function: str, arguments: Sequence[str], *, steps: int = 10, stop: bool = False, **windows
) -> tuple[Report, int]:
    """The report, and the script's own exit code."""
    code, report = 0, Report()
    with _as_started(path, arguments):
        try:
            with watch(steps=steps, say=False, **windows) as report:
                if stop:
                    report.when_done = _enough
                _run(path, function)
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
            traceback.print_exception(type(error), error, _theirs(error.__traceback__, path), file=sys.stderr)
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
    needed = [p.name for p in inspect.signature(wanted).parameters.values() if p.default is p.empty and p.kind < 2]
    if needed:
        raise BadInput(f"{function} in {path} needs {', '.join(needed)}; name a function that takes no arguments.")
    wanted()


def _enough() -> None:
    raise _Enough


@contextlib.contextmanager
def _as_started(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """What Python sets up for a script, for the time of its run."""
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
    """Lend stdout's place to stderr, down to the file descriptor, where children and C code write; yields stdout."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # no descriptors here
        kept = None
    stream, sys.stdout = sys.stdout, sys.stderr
    try:
        yield stream if kept is None or stream is not sys.__stdout__ else os.fdopen(os.dup(kept), "w")
    finally:
        sys.stdout.flush()
        sys.stdout = stream
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def _theirs(tb, path: Path):
    """The traceback from the script's own first line on, without the frames of this package above it."""
    while tb is not None and os.path.abspath(tb.tb_frame.f_code.co_filename) != str(path.resolve()):
        tb = tb.tb_next
    return tb
