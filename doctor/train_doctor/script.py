"""`train-doctor FILE.py[:function]`: run somebody's training script as it is, and say what is wrong with it.

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

from train_doctor.finding import Report
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
    parser.add_argument("target", metavar="FILE.py[:function]", help="a script, or one function of it")
    parser.add_argument("--steps", type=_positive, default=10, metavar="N", help="training steps to watch (default 10)")
    parser.add_argument("--json", action="store_true", help="the report as JSON; what the script prints goes to stderr")
    parser.add_argument("--stop", action="store_true", help="end the script after the watched steps")
    options = parser.parse_args(given[:at])
    try:
        return main(options.target, given[at + 1 :], steps=options.steps, as_json=options.json, stop=options.stop)
    except BadInput as error:
        print(f"train-doctor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def main(target: str, arguments: Sequence[str] = (), *, steps: int = 10, as_json: bool = False, stop=False) -> int:
    """Run, print the report (JSON to stdout, and what the script prints to stderr), return the exit code."""
    path, function = located(target)
    with _all_output_to_stderr() if as_json else contextlib.nullcontext(sys.stdout) as out:
        report, code = diagnose(path, function, arguments, steps=steps, stop=stop)
        sys.stdout.flush()
        print(_json(report, code) if as_json else f"\n{report}", file=out, flush=True)
    if code == 130:
        return code
    return 1 if report.errors or report.exception is not None or code else 0


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
    path: Path, function: str, arguments: Sequence[str], *, steps: int = 10, stop: bool = False
) -> tuple[Report, int]:
    """The report, and the script's own exit code."""
    code, report = 0, Report()
    with _as_started(path, arguments):
        try:
            with watch(steps=steps, say=False) as report:
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
        except BadInput:
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


def _json(report: Report, code: int) -> str:
    return json.dumps(json.loads(report.json()) | {"exit_code_of_script": code}, indent=1)


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
