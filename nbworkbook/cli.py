"""The command line: a function adds the options of a command, and the one below it runs it.

Bad input of any kind ends in one sentence on stderr and exit code 2, before anything was started
or written. Other codes: 0 everything done, 1 a run failed, 70 an error of our own, whose traceback
is in a file that the sentence names, 74 runs were made and then something could not be written,
130 interrupted, 141 nobody reads what is printed any more.

Footgun: an import at the top of this file is paid by every `--help`; heavy ones belong into the
functions that run the commands.
"""

import argparse
import contextlib
import difflib
import errno
import importlib
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

from nblib.files import Unreadable, Unwritable
from nbworkbook.parameters import ParameterError, clip

# What a machine may refuse at any time and no code of ours can be blamed for.
REFUSED = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
)

# Commands of version 0.1, and what does the same now.
MOVED = {
    "search": "nblib sweep NOTEBOOK --trials N",
    "compare": "nblib report RUN RUN",
    "status": "nblib list --jobs",
    "cancel": "nblib sweep --cancel JOB",
    "refresh": "python -m nbworkbook.refresh",
    "rm": "rm -r on the run's folder",
}

# The extra of pyproject.toml that brings a package, by the name it is imported under.
EXTRA_OF = dict.fromkeys(
    "IPython PIL ipywidgets jinja2 jupyter_client jupyter_core latex2mathml matplotlib nbclient "
    "nbconvert nbformat nh3 papermill pygments shtab yaml".split(),
    "workbook",
)
EXTRA_OF |= dict.fromkeys(("datasets", "pyarrow"), "data")
EXTRA_OF |= dict.fromkeys(("bitsandbytes", "accelerate"), "four-bit")
EXTRA_OF |= {"peft": "adapters", "gguf": "gguf", "optuna": "search", "ray": "ray"}

NOTEBOOK = "00, 00_setup or notebooks/00_setup.ipynb"
RUN = "folder, short id, path, or notebook: 10 is its newest run, 10~1 the one before"

Commands = Any  # what add_subparsers returns; argparse has no public name for its type


# ------------------------------------------------------------------ how every command ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that is given, and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)

    def work(options: argparse.Namespace) -> int:
        if given[:1] == ["doctor"]:
            return _doctor(given[1:])

        parser = command_line()
        if given and not given[0].startswith("-"):
            _check_command(given[0], list(_commands_of(parser)))
        return parser.parse_args(given, options).command(options)

    return guarded(work)


def guarded(work: Callable[[argparse.Namespace], int]) -> int:
    """Call `work` and return its exit code, or say in one sentence why it could not end.

    It gets a namespace for its options, whose `ran` it sets when runs were made."""
    _open_standard_streams()
    options = argparse.Namespace(ran=False)

    try:
        try:
            return work(options)
        finally:
            # Here and not when Python ends, where an error can no longer be told.
            print(end="", flush=True)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _mute(sys.stdout)
        return 141
    except (ParameterError, Unwritable, Unreadable) as error:
        return _say(str(error), code=74 if options.ran else 2)
    except OSError as error:
        return _say_refusal(error, ran=options.ran)
    except ModuleNotFoundError as error:
        return _say_missing(error)
    except Exception as error:
        return _say_internal(error)


def _open_standard_streams() -> None:
    """Open stdin, stdout and stderr where they are closed, and let them print any name."""
    # Else the next file that is opened would take the number of the one that is closed.
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < 3:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)

    sys.stdout = sys.stdout or open(1, "w")
    sys.stderr = sys.stderr or open(2, "w")

    # Names of files may be in another encoding.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")


def _mute(stream: TextIO) -> None:
    """Let what is still in its buffer go nowhere, instead of raising once more when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(problem: str, *, code: int) -> int:
    """Print each sentence to stderr and return the code."""
    try:
        for sentence in problem.splitlines():
            print(f"nblib: {clip(sentence, 9999)}", file=sys.stderr)
    except OSError:  # nobody reads it
        _mute(sys.stderr)
    return code


def _say_refusal(error: OSError, *, ran: bool) -> int:
    """Say what the machine refused; an OSError of any other kind is an error of our own."""
    if error.errno not in REFUSED:
        return _say_internal(error)
    if not error.filename:
        _mute(sys.stdout)
    code = 74 if ran or not error.filename else 2
    return _say(f"{error.filename or 'stdout'}: {error.strerror}.", code=code)


def _say_missing(error: ModuleNotFoundError) -> int:
    """Say which extra brings a package that is not installed; any other module is an error of
    ours.
    """
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA_OF:
        return _say_internal(error)
    how = f"pip install 'nblib[{EXTRA_OF[package]}]'"
    return _say(f"{package} is not installed, and this command needs it: {how}", code=2)


def _say_internal(error: Exception) -> int:
    """Write the traceback of what nobody foresaw to a file, and name the file in one sentence."""
    import tempfile
    import traceback

    from nblib import paths
    from nbworkbook import shadowing

    # A file of the user's, torch.py say, may have taken the place of a package.
    if isinstance(error, (ImportError, AttributeError)):
        wrong = shadowing.explain(str(error), sys.path)
        if wrong:
            return _say(wrong, code=2)

    name = f"nblib-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    text = "".join(traceback.format_exception(error))
    file = "what you did; its traceback could not be written"

    for folder in (paths.outputs(), Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):  # not there, full, read only
            (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
            file = folder / name
            break

    what = f"{type(error).__name__}: {clip(str(error))}".removesuffix(": ")
    return _say(f"internal error ({what}); please report it with {file}", code=70)


# ------------------------------------------------------------------ the parser


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, with the nearest option where there is one."""

    def error(self, message: str) -> NoReturn:
        """End with one sentence, without the usage that --help shows."""
        sys.exit(_say(clip(message, 1000), code=2))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse what is unknown here, where the options of the command are known."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            words = clip(" ".join(unknown), 300)
            self.error(f"unrecognized arguments: {words}; {self._hint(unknown)}")
        return options, unknown

    def _hint(self, unknown: Sequence[str]) -> str:
        """Return what may have been meant by the first of the options that are unknown."""
        known = [option for option in self._option_string_actions if option.startswith("--")]
        typed = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        near = difflib.get_close_matches(typed[0], known, n=1) if typed else []
        if near:
            return f"did you mean {near[0]}?"
        return f"`{self.prog} --help` shows what there is."


def command_line() -> Parser:
    """Return the parser of the whole command, whose options say by `command` what runs them."""
    parser = Parser(
        prog="nblib",
        description="Run the notebooks of this workbook, and look at what they left.",
        epilog="`nblib COMMAND --help` shows the options and examples of a command. "
        'TAB completes them after: eval "$(nblib completion bash)"',
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    parser.set_defaults(command=lambda options: parser.print_help() or 0)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    _add_list(commands)
    _add_init(commands)
    _add_run(commands)
    _add_train(commands)
    _add_sweep(commands)
    _add_report(commands)
    _add_audit(commands)
    _add_export(commands)
    _add_estimate(commands)
    _add_doctor(commands)
    _add_gpu_check(commands)
    _add_schema(commands)
    _add_completion(commands)
    return parser


class _Version(argparse.Action):
    """Print the version; importlib.metadata is imported here, since it takes a moment."""

    def __call__(self, *given: Any) -> NoReturn:
        metadata = importlib.import_module("importlib.metadata")
        try:
            print(f"nblib {metadata.version('nblib')}")
        except metadata.PackageNotFoundError:
            print("nblib, of a folder that is not installed")
        sys.exit(0)


def _add(
    commands: Commands,
    name: str,
    command: Callable[[argparse.Namespace], int],
    *,
    short: str | None,
    long: str,
    examples: Sequence[str],
) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    `short` stands in the list of commands, from which None leaves it out; `long` and the examples
    stand in its own help."""
    listed = {} if short is None else {"help": short}
    added = commands.add_parser(
        name,
        description=textwrap.fill(long, 80),
        epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **listed,
    )
    added.set_defaults(command=command)
    return added


def _commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command by its name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _check_command(name: str, known: list[str]) -> None:
    """Raise ParameterError with the nearest command unless there is one of this name."""
    if name in known:
        return

    if name in MOVED:
        raise ParameterError(f"there is no command '{name}' any more; use: {MOVED[name]}")

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    near.sort(key=lambda each: abs(len(each) - len(name)))
    meant = f"; did you mean {near[0]!r}?" if near else "."
    wrong = f"there is no command '{clip(name)}'{meant}"
    raise ParameterError(f"{wrong} The commands are {', '.join(known)}.")


# ------------------------------------------------------------------ options of several commands


def _add_parameters(command: argparse.ArgumentParser) -> None:
    """Add what sets the parameters of a run."""
    command.add_argument(
        "-p",
        dest="parameters",
        action="append",
        default=[],
        metavar="name=value",
        help="set a parameter of the notebook; may be given again",
    )
    command.add_argument(
        "-f",
        dest="files",
        action="append",
        default=[],
        metavar="file.yaml",
        help="take parameters from a file; -p wins; may be given again",
    )
    command.add_argument("--profile", metavar="P", help="take parameters/<notebook>.P.yaml")


def _add_execution(command: argparse.ArgumentParser) -> None:
    """Add how runs are made and how much is printed."""
    command.add_argument(
        "--timeout", type=_positive, metavar="S", help="seconds a single cell may take"
    )
    command.add_argument(
        "--force", action="store_true", help="run again, in a fresh folder, what is done already"
    )
    detail = command.add_mutually_exclusive_group()
    detail.add_argument(
        "--quiet",
        dest="detail",
        action="store_const",
        const="little",
        help="no tables of the cells",
    )
    detail.add_argument(
        "--verbose", dest="detail", action="store_const", const="all", help="a line for every cell"
    )
    command.set_defaults(detail="some")


def _add_engine(command: argparse.ArgumentParser) -> None:
    """Add where runs are made, and what ends them there."""
    group = command.add_argument_group("where the runs are made")
    group.add_argument(
        "--on", choices=("local", "slurm", "ray"), default="local", help="where the runs are made"
    )
    group.add_argument(
        "--resources",
        default="",
        metavar="cpus=4,...",
        help=(
            "of each job: cpus, gpus, gb, on Slurm hours, partition, account; "
            "and at_once, how many jobs"
        ),
    )
    group.add_argument(
        "--no-wait", action="store_true", help="on Slurm: end when the jobs are in the queue"
    )
    group.add_argument(
        "--cancel",
        nargs="+",
        metavar="JOB",
        help=(
            "ask jobs of an engine to stop, and end; what they saved is kept. A job is its id "
            "or its array's, a notebook's name, or all"
        ),
    )


def _execution(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of _add_execution as the runner takes them."""
    return {"force": options.force, "timeout": options.timeout, "detail": options.detail}


def _execute(planned: Sequence[Any], options: argparse.Namespace, **here: Any) -> list[Any]:
    """Make the runs where the options say, and return how each ended."""
    from nbworkbook import cluster, runner

    wanted = cluster.resources(options.resources)
    if options.on == "local":
        if wanted or options.no_wait:
            problem = "--resources and --no-wait are of jobs; add --on slurm or --on ray."
            raise ParameterError(problem)
        return runner.run(planned, **here, **_execution(options))

    if options.on == "ray":
        from nbworkbook import on_ray

        cluster.ENGINES["ray"] = on_ray.Ray

    how = _execution(options)
    outcomes = cluster.run(planned, options.on, wanted=wanted, how=how, wait=not options.no_wait)
    if options.no_wait:
        sys.exit(0)
    return outcomes


def _cancel(jobs: Sequence[str]) -> int:
    from nbworkbook import cluster

    print(cluster.cancel(jobs))
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:10]) < 10**9:
        problem = f"{clip(text)!r} is not a whole number from 1 to 999,999,999"
        raise argparse.ArgumentTypeError(problem)
    return int(text)


def _at_once(text: str) -> int:
    """Return how many; 0 for auto."""
    return 0 if text == "auto" else _positive(text)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names such as a,b")
    return names


def _no_notebooks() -> ParameterError:
    from nblib import paths

    place = paths.short(paths.notebooks())
    return ParameterError(f"There are no notebooks in {place}; `nblib init DIR` makes a workbook.")


# ------------------------------------------------------------------ init


def _add_init(commands: Commands) -> None:
    command = _add(
        commands,
        "init",
        _init,
        short="make a workbook of your own in a folder",
        long=(
            "Make a workbook of your own: one notebook that trains a small model, its parameters, "
            "and a pyproject.toml that marks the folder as a workbook. Nothing that is there is "
            "replaced."
        ),
        examples=["nblib init mine", "nblib init ."],
    )
    command.add_argument("folder", metavar="DIR", type=Path, help="the folder; it may exist")


def _init(options: argparse.Namespace) -> int:
    from nblib import paths
    from nbworkbook import init

    for file in init.make(options.folder):
        print(paths.short(file))
    place = shlex.quote(str(options.folder))
    enter = "" if options.folder.resolve() == Path.cwd() else f"cd {place} && "
    print(f"run its notebook with: {enter}nblib run {init.NOTEBOOK}")
    return 0


# ------------------------------------------------------------------ list


def _add_list(commands: Commands) -> None:
    command = _add(
        commands,
        "list",
        _list,
        short="the notebooks, their profiles and their last runs",
        long=(
            "Show the notebooks with their profiles and last runs, or all runs, or the jobs "
            "of an engine. A run is a folder: `rm -r` deletes it."
        ),
        examples=["nblib list", "nblib list --runs 10_lrc", "nblib list --jobs"],
    )
    instead = command.add_mutually_exclusive_group()
    instead.add_argument(
        "--runs",
        nargs="?",
        const="",
        metavar="NOTEBOOK",
        help="all runs, or those of one notebook, with their results",
    )
    instead.add_argument(
        "--jobs", action="store_true", help="jobs that were given to Slurm or Ray, and their runs"
    )


def _list(options: argparse.Namespace) -> int:
    from nbworkbook import jobs, manage

    if options.jobs:
        from nbworkbook import cluster

        print(cluster.listing())
        return 0

    if options.runs is not None:
        print(manage.listing(jobs.name_of_runs(options.runs) if options.runs else ""))
        return 0

    names = jobs.names()
    if not names:
        raise _no_notebooks()
    for name in names:
        print(_line_of(name))
    return 0


def _line_of(notebook: str) -> str:
    """Return what `nblib list` shows of a notebook, on two lines."""
    from nblib import paths
    from nbworkbook import jobs, parameters, runs

    # The newest run, and what is wrong with its files.
    folders = sorted(path.parent for path in (paths.outputs() / notebook).glob("*/run.json"))
    state = "never run"
    if folders:
        state = f"{runs.status(folders[-1])} {folders[-1].name[:15]}"
        problem = runs.problem(folders[-1])
        if problem:
            state = f"{state}, {problem}"

    # A notebook that cannot be read is a row like the others.
    try:
        title = parameters.title(paths.notebooks() / f"{notebook}.ipynb")
    except ParameterError as error:
        title = f"unreadable: {error}"

    profiles = ", ".join(jobs.profiles_of(notebook)) or "none"
    sweeps = "".join(f"  sweep: {paths.short(path)};" for path in jobs.sweeps_of(notebook))
    return f"{notebook}  {title}\n    profiles: {profiles};{sweeps}  last run: {state}"


# ------------------------------------------------------------------ run


def _add_run(commands: Commands) -> None:
    command = _add(
        commands,
        "run",
        _run,
        short="execute notebooks; skips what is done, resumes what is not",
        long=(
            "Execute notebooks, each in a run folder of its own. A run that is done is "
            "skipped until its notebook, its parameters or the code it uses change. One that "
            "was stopped, killed or out of memory goes on from its last checkpoint."
        ),
        examples=[
            "nblib run 00_setup -p steps=40 -p corpus=code",
            "nblib run --all --profile full --keep-going",
            "nblib run --all --dry-run",
        ],
    )
    command.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help=NOTEBOOK)
    command.add_argument("--all", action="store_true", help="every notebook, in order")
    _add_parameters(command)
    command.add_argument(
        "--jobs",
        type=_at_once,
        metavar="N",
        help=(
            "so many at once, or auto: what cores and memory, or cards, allow "
            "(default auto with --all, else 1)"
        ),
    )
    command.add_argument(
        "--keep-going", action="store_true", help="start the rest although one failed"
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="say what would be skipped, continued or run, and end",
    )
    _add_execution(command)
    _add_engine(command)


def _run(options: argparse.Namespace) -> int:
    from nbworkbook import jobs, report, runner

    # What is asked for, before anything is started.
    if options.cancel:
        return _cancel(options.cancel)
    if options.all == bool(options.notebooks):
        problem = "run takes either names of notebooks or --all; `nblib list` shows them."
        raise ParameterError(problem)
    names = jobs.names() if options.all else options.notebooks
    if not names:
        raise _no_notebooks()

    planned = jobs.plan(
        names,
        profile=options.profile,
        overrides=options.parameters,
        files=options.files,
        profile_optional=options.all,
    )

    # One at a time where notebooks are named; the runner takes None for as many as fit.
    at_once: int | None = options.jobs
    if at_once is None:
        at_once = 0 if options.all else 1
    at_once = at_once or None

    if options.dry_run:
        print(runner.preview(planned, jobs_at_once=at_once, force=options.force))
        return 0

    # The runs, a table of them and the page.
    outcomes = _execute(planned, options, jobs_at_once=at_once, keep_going=options.keep_going)
    options.ran = True
    print(f"\n{runner.summary(outcomes)}\n\nreport: {report.write()}")
    return runner.exit_code(outcomes)


# ------------------------------------------------------------------ train


def _add_train(commands: Commands) -> None:
    command = _add(
        commands,
        "train",
        _train,
        short="one notebook in several processes that train as one",
        long=(
            "Execute one notebook in several processes, on one machine or several, that "
            "torch's engines make into one training. Its run has the same key whatever the "
            "number of processes."
        ),
        examples=[
            "nblib train 10_lrc --processes 2 -p mesh=fsdp",
            "nblib train 10_lrc --processes 8 --nodes 2 --node 0 --rendezvous node0:29400",
        ],
    )
    command.add_argument("notebook", metavar="NOTEBOOK", help=NOTEBOOK)
    command.add_argument(
        "--processes",
        type=_positive,
        default=1,
        metavar="N",
        help="share rows, by -p mesh=ddp (default), fsdp or hsdp",
    )
    command.add_argument(
        "--nodes", type=_positive, default=1, metavar="N", help="machines, each with this command"
    )
    command.add_argument(
        "--node", type=int, metavar="K", help="which of them this is: 0 (the first) .. N-1"
    )
    command.add_argument(
        "--rendezvous", default="127.0.0.1:29400", metavar="HOST:PORT", help="of node 0"
    )
    command.add_argument(
        "--wait", type=_positive, default=300, metavar="S", help="seconds until all are there (300)"
    )
    _add_parameters(command)
    _add_execution(command)


def _train(options: argparse.Namespace) -> int:
    from nbworkbook import launch

    return launch.main(options, **_execution(options))


# ------------------------------------------------------------------ sweep


def _add_sweep(commands: Commands) -> None:
    command = _add(
        commands,
        "sweep",
        _sweep,
        short="one notebook over a grid of parameters, or a search",
        long=(
            "Run one notebook once for each combination of the values in a sweep file, in which "
            "`name: value` sets and `name: [a, b]` varies. What is done is skipped, what is not is "
            "resumed, and a failure stops none of the others. It ends with a table of the results, "
            "which is also written as outputs/<notebook>/sweep-<time>.json and .csv. With --trials "
            "N a search file is read in its place: N trials, each proposed by what the earlier "
            "ones gave. The same command goes on after Ctrl-C or a kill. parameters/README.md "
            "describes both files. Exit code 1: a run failed."
        ),
        examples=[
            "nblib sweep 10_lrc --list",
            "nblib sweep 10_lrc -f my.sweep.yaml --on slurm --resources gpus=1,hours=2",
            "nblib sweep 10_lrc --trials 20 --prune",
            "nblib sweep --cancel 10_lrc",
        ],
    )
    command.add_argument("notebook", nargs="?", metavar="NOTEBOOK", help=NOTEBOOK)
    command.add_argument(
        "-f",
        dest="file",
        metavar="file.yaml",
        help="default: parameters/<notebook>.sweep.yaml, with --trials .search.yaml",
    )
    command.add_argument(
        "-p",
        dest="parameters",
        action="append",
        default=[],
        metavar="name=value",
        help="hold a parameter at this value; may be given again",
    )
    command.add_argument(
        "--profile", metavar="P", help="parameters/<notebook>.P.yaml beneath the file"
    )
    command.add_argument("--list", action="store_true", help="print the combinations and end")
    command.add_argument(
        "--show",
        type=_names,
        default=[],
        metavar="a,b",
        help="results in the table (default: a few)",
    )
    group = command.add_argument_group("search")
    group.add_argument(
        "--trials",
        type=_positive,
        metavar="N",
        help="so many trials of the whole study; needs optuna",
    )
    group.add_argument(
        "--prune",
        action="store_true",
        help="stop runs that are worse than most; see the search file",
    )
    group.add_argument("--seed", type=_positive, metavar="N", help="of the proposals (default 1)")
    _add_execution(command)
    _add_engine(command)


def _sweep(options: argparse.Namespace) -> int:
    if options.cancel:
        return _cancel(options.cancel)
    if options.notebook is None:
        raise ParameterError("the following arguments are required: NOTEBOOK")

    if options.trials is None:
        if options.prune or options.seed:
            raise ParameterError("--prune and --seed are of a search; add --trials N.")
        return _grid(options)

    if options.list or options.show:
        raise ParameterError("--list and --show are of a grid; leave out --trials.")
    from nbworkbook import search

    return search.main(options, **_execution(options))


def _grid(options: argparse.Namespace) -> int:
    from nbworkbook import report, runner, sweep

    planned = sweep.plan(
        options.notebook, file=options.file, profile=options.profile, overrides=options.parameters
    )
    if options.list:
        print(sweep.listing(planned))
        return 0

    outcomes = _execute(planned.jobs, options, keep_going=True)
    options.ran = True

    rows = sweep.rows(planned, outcomes)
    print(f"\n{sweep.text(planned, rows, show=options.show)}\n")
    for path in (*sweep.write(planned, rows), report.write()):
        print(path)
    return runner.exit_code(outcomes)


# ------------------------------------------------------------------ report


def _add_report(commands: Commands) -> None:
    command = _add(
        commands,
        "report",
        _report,
        short="the page of all runs; of runs that are named, what differs",
        long=(
            "Write the page of all runs, outputs/index.html, which opens without a network, "
            "and print its path. Where two runs or more are named, first print what differs "
            "between them: the results that count, then the parameters, versions, results and "
            "metrics that all of them have."
        ),
        examples=["nblib report", "nblib report 10 10~1", "nblib report 10 11 --all"],
    )
    command.add_argument("runs", nargs="*", metavar="RUN", help=RUN)
    command.add_argument(
        "--all",
        action="store_true",
        help="of named runs: also what is equal, and what only some of them have",
    )


def _report(options: argparse.Namespace) -> int:
    from nblib import paths
    from nbworkbook import compare, jobs, manage, report

    if not options.runs:
        if options.all:
            raise ParameterError("--all is of a comparison; name two runs or more.")
        if not os.path.isdir(paths.outputs()) and not jobs.names():
            raise _no_notebooks()
        print(report.write())
        return 0

    folders = list(dict.fromkeys(map(manage.find, options.runs)))
    if not 2 <= len(folders) <= 26:
        raise ParameterError(f"report compares 2 to 26 different runs, not {len(folders)}.")
    print(compare.text(folders, everything=options.all), flush=True)
    print(f"\nreport: {report.write()}")
    return 0


# ------------------------------------------------------------------ audit


def _add_audit(commands: Commands) -> None:
    command = _add(
        commands,
        "audit",
        _audit,
        short="what looks wrong with parameters, steps or weights",
        long=(
            "Say what looks wrong: with parameters before a run, with a run's first steps, "
            "with a checkpoint's weights. Exit code 1: something does."
        ),
        examples=["nblib audit my.yaml", "nblib audit 12", "nblib audit folder/of/checkpoint"],
    )
    command.add_argument(
        "target", metavar="WHAT", help="parameters .yaml, run, checkpoint's folder, .safetensors"
    )


def _audit(options: argparse.Namespace) -> int:
    from nbworkbook import audit

    return audit.main(options.target)


# ------------------------------------------------------------------ export


def _add_export(commands: Commands) -> None:
    command = _add(
        commands,
        "export",
        _export,
        short="the metrics of a run for TensorBoard or Trackio",
        long=("Write the metrics of a run for TensorBoard or Trackio, once or as the run goes on."),
        examples=["nblib export 10 --to tensorboard --follow", "nblib export 10~1 --to trackio"],
    )
    command.add_argument("run", metavar="RUN", help=RUN)
    command.add_argument(
        "--to",
        required=True,
        choices=("tensorboard", "trackio"),
        help="the program that shows them; an extra: pip install 'nblib[track]'",
    )
    command.add_argument(
        "--follow", action="store_true", help="go on until the run ends, or Ctrl-C"
    )


def _export(options: argparse.Namespace) -> int:
    from nbworkbook import manage, track

    folder = manage.find(options.run)
    _import(options.to, f"pip install {options.to} (or: pip install -e '.[track]')")

    shown_by = {
        "tensorboard": f"tensorboard --logdir '{folder}'",
        "trackio": f"trackio show --project {folder.parent.name}",
    }
    print(f"look at it with: {shown_by[options.to]}", flush=True)

    steps = track.export(folder, options.to, follow=options.follow)
    for name, count in steps.items():
        print(f"{name or folder.name}: {count} steps")
    if not steps:
        print("It has no metrics.")
    return 0


def _import(module: str, how: str) -> ModuleType:
    """Return a package that nblib itself does not need; ParameterError says how to get it."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (package, module):  # it is there and lacks something itself
            raise
        raise ParameterError(f"{package} is not installed; {how}") from None


# ------------------------------------------------------------------ estimate


def _add_estimate(commands: Commands) -> None:
    command = _add(
        commands,
        "estimate",
        _estimate,
        short="bytes of a training step by kind, without running it",
        long="Count the bytes that a training step takes, by kind, without running it.",
        examples=[
            "nblib estimate --rows 16 --length 1024",
            "nblib estimate --model folder/of/model --rank 16",
        ],
    )
    command.add_argument(
        "--model",
        default="tiny",
        metavar="NAME",
        help="hub name or folder (default: our tiny Qwen3)",
    )
    command.add_argument(
        "--rows", type=_positive, default=16, metavar="N", help="rows per micro-batch (default 16)"
    )
    command.add_argument(
        "--length", type=_positive, default=256, metavar="N", help="tokens per row (default 256)"
    )
    command.add_argument(
        "--rank", type=_positive, default=0, metavar="N", help="of adapters; without it all trains"
    )
    command.add_argument(
        "--lrc",
        type=float,
        metavar="PERCENT",
        help="ternary with a correction of this rank percent",
    )
    command.add_argument(
        "--checkpointing", action="store_true", help="recompute every block in backward"
    )
    command.add_argument(
        "--precision", default="fp32", help="of autocast: fp32 or bf16; weights stay fp32"
    )
    command.add_argument("--optimizer", default="adamw", help="adamw, momentum or sgd")
    command.add_argument("--logits", default="chunked", help="chunked, or full for the plain loss")


def _estimate(options: argparse.Namespace) -> int:
    from nblib import memory
    from nblib.methods import lrc

    if options.lrc is not None and options.rank:
        choice = "adapters on float weights or a correction of ternary ones"
        raise ParameterError(f"--rank and --lrc: choose one, {choice}")

    attach = None
    if options.lrc is not None:

        def attach(model: Any) -> Any:
            return lrc.attach(model, percent=options.lrc, init="kaiming")

    # A config decides which code of transformers runs, and on which sizes: any type of error.
    names = ("rows", "length", "rank", "precision", "optimizer", "checkpointing", "logits")
    given = {name: getattr(options, name) for name in names}
    try:
        config = memory.config_of(options.model)
        kinds = memory.estimate(config, attach=attach, **given)
    except Exception as error:
        known = isinstance(error, (ValueError, OSError))
        what = "" if known else f"a step of this model cannot be counted: {type(error).__name__}: "
        raise ParameterError(what + clip(str(error).partition("\n")[0], 400)) from error

    for kind, size in kinds.items():
        print(f"{kind:12s} {size / 2**20:12,.1f} MiB")
    print("Each line is the maximum of its kind; they do not add up to the peak.", end=" ")
    print("Leave a tenth of a card free.")
    return 0


# ------------------------------------------------------------------ doctor


def _add_doctor(commands: Commands) -> None:
    """Add it for the list alone: `main` hands its arguments on before they are parsed."""
    commands.add_parser(
        "doctor", help="run a training script and name what is wrong with its loop", add_help=False
    )


def _doctor(given: Sequence[str]) -> int:
    """Hand everything to the doctor's own command, which has its own options and its own errors."""
    try:
        from loopdoctor import script
    except ModuleNotFoundError as error:
        if error.name != "loopdoctor":
            raise
        how = "run `make env` (or: pip install loopdoctor)"
        raise ParameterError(f"loopdoctor is not installed; {how}") from None
    return script.command(given, prog="nblib doctor")


# ------------------------------------------------------------------ gpu-check


def _add_gpu_check(commands: Commands) -> None:
    _add(
        commands,
        "gpu-check",
        _gpu_check,
        short="a minute on your card: driver, waits, speed, memory",
        long=(
            "Measure a minute on your card: driver, waits, speed and memory, and write what "
            "was found to outputs/gpu-check.json."
        ),
        examples=["nblib gpu-check"],
    )


def _gpu_check(options: argparse.Namespace) -> int:
    from nbworkbook import gpu_check

    return gpu_check.main()


# ------------------------------------------------------------------ schema


def _add_schema(commands: Commands) -> None:
    command = _add(
        commands,
        "schema",
        _schema,
        short="let editors check parameter files",
        long=(
            "Write a JSON Schema of each notebook's parameters beside the parameter files, "
            "and name it in their first line, so that an editor with a YAML language server "
            "completes names, shows what they mean and marks a wrong value."
        ),
        examples=["nblib schema", "nblib schema 10_lrc"],
    )
    command.add_argument(
        "notebooks", nargs="*", metavar="NOTEBOOK", help="all of them when none is named"
    )


def _schema(options: argparse.Namespace) -> int:
    from nblib import paths
    from nbworkbook import jobs, schema

    names = options.notebooks or jobs.names()
    if not names:
        raise _no_notebooks()
    written = schema.write(names)
    for path in written:
        print(paths.short(path))
    if not written:
        print("All schemas are up to date.")
    return 0


# ------------------------------------------------------------------ completion


def _add_completion(commands: Commands) -> None:
    """Add it without a line in the list of commands, whose last sentence names it."""
    command = _add(
        commands,
        "completion",
        _completion,
        short=None,
        long="Print a script that lets the shell complete commands, options and files by TAB.",
        examples=[
            'eval "$(nblib completion bash)"           # in ~/.bashrc',
            "nblib completion zsh > ~/.zfunc/_nblib    # a folder of $fpath",
        ],
    )
    command.add_argument("shell", metavar="SHELL", choices=("bash", "zsh"), help="bash or zsh")


def _completion(options: argparse.Namespace) -> int:
    shtab = _import("shtab", "pip install shtab")

    # Everything that is no choice and no number is a file, a folder, or a name that looks like one.
    parser = command_line()
    for command in _commands_of(parser).values():
        for action in command._actions:
            if action.metavar in ("NOTEBOOK", "RUN", "WHAT", "file.yaml"):
                action.complete = shtab.FILE
    print(shtab.complete(parser, options.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
