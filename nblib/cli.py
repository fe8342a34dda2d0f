"""The command line. Of notebooks: `nblib list`, `run`, `train`, `sweep`, `search`, `refresh`. Of jobs: `status`,
`cancel`. Of runs: `audit`, `report`, `compare`, `note`, `rm`, `export`. And `estimate`, `doctor` and `gpu-check`.

Bad input of any kind ends in one sentence on stderr and exit code 2, before anything was started or written. Other
codes: 0 everything done, 1 a run failed, 70 an error of our own, whose traceback is in a file that the sentence names,
74 runs were made and then something could not be written, 130 interrupted, 141 nobody reads what is printed any more.

Footgun: an import at the top of this file is paid by every `--help`; heavy ones belong into the commands.
"""

import argparse
import contextlib
import difflib
import errno
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

from nblib.files import Unreadable, Unwritable
from nblib.run.parameters import ParameterError, clip

# What a machine may refuse at any time and no code of ours can be blamed for.
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE)

INSTALL = "run `make env` (or: pip install -e .)"  # where the lessons are missing
EXAMPLES = {  # shown by --help of a command
    "run": "  nblib run 00_setup -p steps=40 -p corpus=code\n  nblib run --all --profile full --keep-going",
    "train": "  nblib train 10_lrc --processes 2 -p mesh=fsdp",
    "sweep": "  nblib sweep 10_lrc\n  nblib sweep 10_lrc -f my.sweep.yaml --on slurm --resources gpus=1,hours=2",
    "search": "  nblib search 10_lrc --trials 20 --prune",
    "report": "  nblib report",
    "compare": "  nblib compare 10 10~1",
    "estimate": "  nblib estimate --rows 16 --length 1024\n  nblib estimate --model folder/of/model --rank 16",
    "audit": "  nblib audit 12\n  nblib audit my.yaml",
    "export": "  nblib export 10 --to tensorboard --follow",
}


def main(arguments: Sequence[str] | None = None) -> int:
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # else the next file that is opened would take the number of a stdin, stdout or stderr that is closed
    os.close(descriptor)
    sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # names of files may be in another encoding
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = argparse.Namespace(ran=False)
    try:
        try:
            if not given:
                _parser().print_help()
                return 0
            if given[:1] == ["doctor"]:
                return _doctor(given[1:])
            return _parser().parse_args(given, options).command(options)
        finally:
            print(end="", flush=True)  # here and not when Python ends, where an error can no longer be told
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _mute(sys.stdout)
        return 141
    except (ParameterError, Unwritable, Unreadable) as error:
        return _say(str(error), code=74 if options.ran else 2)
    except OSError as error:
        if error.errno not in REFUSED:
            return _internal(error)
        if not error.filename:
            _mute(sys.stdout)
        code = 74 if options.ran or not error.filename else 2
        return _say(f"{error.filename or 'stdout'}: {error.strerror}.", code=code)
    except Exception as error:
        return _internal(error)


def _mute(stream: TextIO) -> None:
    """What is still in its buffer goes nowhere, instead of raising once more when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(problem: str, *, code: int) -> int:
    try:
        for sentence in problem.splitlines():
            print(f"nblib: {clip(sentence, 9999)}", file=sys.stderr)
    except OSError:  # nobody hears it
        _mute(sys.stderr)
    return code


def _internal(error: Exception) -> int:
    """What nobody foresaw: the traceback goes to a file, and one sentence to stderr."""
    import tempfile
    import traceback

    from nblib import paths

    name = f"nblib-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    file = "what you did; its traceback could not be written"
    for folder in (paths.outputs(), Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):  # not there, full, read only
            text = "".join(traceback.format_exception(error))
            (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
            file = folder / name
            break
    what = f"{type(error).__name__}: {clip(str(error))}".removesuffix(": ")
    return _say(f"internal error ({what}); please report it with {file}", code=70)


def _import(module: str, how: str) -> ModuleType:
    """A package that nblib itself does not need, or how to get it."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (package, module):  # it is there and lacks something itself
            raise
        raise ParameterError(f"{package} is not installed; {how}") from None


def _list(options: argparse.Namespace) -> int:
    if options.pitfalls:
        for p in _import("lessons.pitfalls", INSTALL).catalogue():
            print(f"{p.id}  {p.symptom}\n     {p.title}. Fix: {p.fix}")
        return 0
    from nblib import paths
    from nblib.run import jobs, manage, parameters, runs

    if options.runs is not None:
        print(manage.listing(jobs.resolve(options.runs) if options.runs else ""))
        return 0
    for name in jobs.names():
        folders = sorted(path.parent for path in (paths.outputs() / name).glob("*/run.json"))
        state = f"{runs.status(folders[-1])} {folders[-1].name[:15]}" if folders else "never run"
        if folders and (problem := runs.problem(folders[-1])):
            state = f"{state}, {problem}"
        try:
            title = parameters.title(paths.notebooks() / f"{name}.ipynb")
        except ParameterError as error:
            title = f"unreadable: {error}"
        print(f"{name}  {title}")
        sweeps = "".join(f"  sweep: {paths.short(path)};" for path in jobs.sweeps_of(name))
        print(f"    profiles: {', '.join(jobs.profiles_of(name)) or 'none'};{sweeps}  last run: {state}")
    return 0


def _run(options: argparse.Namespace) -> int:
    from nblib import paths
    from nblib.run import jobs, report, runner

    if options.all == bool(options.notebooks):
        raise ParameterError("run takes either names of notebooks or --all; `nblib list` shows them.")
    names = jobs.names() if options.all else options.notebooks
    if not names:
        raise ParameterError(f"There are no notebooks in {paths.notebooks()}.")
    given = {"profile": options.profile, "overrides": options.parameters, "files": options.files}
    planned = jobs.plan(names, profile_optional=options.all, **given)
    at_once = (int(not options.all) if options.jobs is None else options.jobs) or None
    if options.dry_run:
        print(runner.preview(planned, jobs_at_once=at_once, force=options.force))
        return 0
    outcomes = _execute(planned, options, jobs_at_once=at_once, keep_going=options.keep_going)
    options.ran = True
    print(f"\n{runner.summary(outcomes)}\n\nreport: {report.write()}")
    return runner.exit_code(outcomes)


def _train(options: argparse.Namespace) -> int:
    return _import("lessons.launch", INSTALL).main(options, **_how(options))


def _sweep(options: argparse.Namespace) -> int:
    from nblib.run import report, runner, sweep

    planned = sweep.plan(options.notebook, file=options.file, profile=options.profile, overrides=options.parameters)
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


def _execute(planned: Sequence[Any], options: argparse.Namespace, **here: Any) -> list[Any]:
    from nblib.run import engines, runner

    wanted = engines.resources(options.resources)
    if options.on == "local":
        if wanted or options.no_wait:
            raise ParameterError("--resources and --no-wait are of jobs; add --on slurm or --on ray.")
        return runner.run(planned, **here, **_how(options))
    if options.on == "ray":
        engines.ENGINES["ray"] = _import("lessons.on_ray", INSTALL).Ray
    outcomes = engines.run(planned, options.on, wanted=wanted, how=_how(options), wait=not options.no_wait)
    return sys.exit(0) if options.no_wait else outcomes


def _search(options: argparse.Namespace) -> int:
    return _import("lessons.search", INSTALL).main(options, **_how(options))


def _jobs(options: argparse.Namespace) -> int:
    from nblib.run import engines

    print(engines.cancel(options.jobs) if options.jobs else engines.listing())
    return 0


def _how(options: argparse.Namespace) -> dict[str, Any]:
    return {"force": options.force, "timeout": options.timeout, "detail": options.detail}


def _report(options: argparse.Namespace) -> int:
    from nblib.run import report

    print(report.write())
    return 0


def _compare(options: argparse.Namespace) -> int:
    from nblib.run import manage, report

    folders = list(dict.fromkeys(map(manage.find, options.runs)))
    if not 2 <= len(folders) <= 26:
        raise ParameterError(f"compare takes 2 to 26 different runs, not {len(folders)}.")
    print(_import("lessons.compare", INSTALL).text(folders, everything=options.all), flush=True)
    print(f"\nreport: {report.write()}")
    return 0


def _note(options: argparse.Namespace) -> int:
    from nblib.run import manage

    print(manage.note(manage.find(options.run), text=options.text, tags=options.tag, untag=options.untag))
    return 0


def _rm(options: argparse.Namespace) -> int:
    from nblib.run import manage

    folders = list(dict.fromkeys(map(manage.find, options.runs)))
    print("\n".join(map(manage.size, folders)), flush=True)
    if not options.yes and not (sys.stdin and sys.stdin.isatty()):
        raise ParameterError("rm asks before it deletes, and there is no terminal to answer: give --yes.")
    if not options.yes:
        print("Delete? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return 0
    for folder in folders:
        manage.remove(folder)
        options.ran = True
        print(f"deleted {folder.parent.name}/{folder.name}", flush=True)
    return 0


def _export(options: argparse.Namespace) -> int:
    from nblib.run import manage

    folder = manage.find(options.run)
    _import(options.to, f"pip install {options.to} (or: pip install -e '.[track]')")
    show = {"tensorboard": f"--logdir '{folder}'", "trackio": f"show --project {folder.parent.name}"}[options.to]
    print(f"look at it with: {options.to} {show}", flush=True)
    steps = _import("lessons.track", INSTALL).export(folder, options.to, follow=options.follow)
    print("\n".join(f"{name or folder.name}: {count} steps" for name, count in steps.items()) or "It has no metrics.")
    return 0


def _refresh(options: argparse.Namespace) -> int:
    from nblib.run import jobs, runner

    outcomes = _import("lessons.refresh", INSTALL).refresh(options.notebooks or jobs.names())
    options.ran = True
    print(f"\n{runner.summary(outcomes)}")
    return runner.exit_code(outcomes)


def _estimate(options: argparse.Namespace) -> int:
    from nblib import memory
    from nblib.methods import lrc

    if options.lrc is not None and options.rank:
        raise ParameterError("--rank and --lrc: choose one, adapters on float weights or a correction of ternary ones")
    attach = None if options.lrc is None else (lambda model: lrc.attach(model, percent=options.lrc, init="kaiming"))
    names = ("rows", "length", "rank", "precision", "optimizer", "checkpointing", "logits")
    try:
        config = memory.config_of(options.model)
        kinds = memory.estimate(config, attach=attach, **{name: getattr(options, name) for name in names})
    except Exception as error:  # of any type: a config decides which code of transformers runs, and on which sizes
        known = isinstance(error, (ValueError, OSError))
        what = "" if known else f"a step of this model cannot be counted: {type(error).__name__}: "
        raise ParameterError(what + clip(str(error).partition("\n")[0], 400)) from error
    for kind, size in kinds.items():
        print(f"{kind:12s} {size / 2**20:12,.1f} MiB")
    print("Each line is the maximum of its kind; they do not add up to the peak. Leave a tenth of a card free.")
    return 0


def _gpu_check(options: argparse.Namespace) -> int:
    return _import("lessons.gpu_check", INSTALL).main()


def _doctor(given: Sequence[str]) -> int:
    """Hand everything to the doctor's own command, which has its own options and its own errors."""
    return _import("loopdoctor.script", "run `make env` (or: pip install ./doctor)").command(given, prog="nblib doctor")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nblib", description="Run the notebooks of this workbook.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], **options: Any) -> argparse.ArgumentParser:
        if name in EXAMPLES:
            options["epilog"] = "\n\n".join(filter(None, [options.get("epilog"), f"examples:\n{EXAMPLES[name]}"]))
            options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(name, **options)
        added.set_defaults(command=command)
        return added

    command = add("list", _list, help="the notebooks, their profiles and their last runs")
    command.add_argument("--pitfalls", action="store_true", help="the catalogue of pitfalls, by symptom")
    command.add_argument("--runs", nargs="?", const="", metavar="NOTEBOOK", help="all runs, or those of one notebook")

    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--timeout", type=_positive, metavar="S", help="seconds a single cell may take")
    both.add_argument("--force", action="store_true", help="run again, in a fresh folder, what is done already")
    detail = both.add_mutually_exclusive_group()
    detail.add_argument("--quiet", dest="detail", action="store_const", const="little", help="no tables of the cells")
    detail.add_argument("--verbose", dest="detail", action="store_const", const="all", help="a line for every cell")
    both.set_defaults(detail="some")
    given = argparse.ArgumentParser(add_help=False)
    told = "set a parameter of the notebook; may be given again"
    given.add_argument("-p", dest="parameters", action="append", default=[], metavar="name=value", help=told)
    told = "take parameters from a file; -p wins; may be given again"
    given.add_argument("-f", dest="files", action="append", default=[], metavar="file.yaml", help=told)
    given.add_argument("--profile", metavar="P", help="take parameters/<notebook>.P.yaml")
    engine = argparse.ArgumentParser(add_help=False)
    engine.add_argument("--on", choices=("local", "slurm", "ray"), default="local", help="where the runs are made")
    asked = "of each job: cpus, gpus, gb, on Slurm hours, partition, account; and at_once, how many jobs"
    engine.add_argument("--resources", default="", metavar="cpus=4,...", help=asked)
    engine.add_argument("--no-wait", action="store_true", help="on Slurm: end when the jobs are in the queue")
    many = argparse.ArgumentParser(add_help=False)
    many.add_argument("notebook", metavar="NOTEBOOK", help="00, 00_setup or notebooks/00_setup.ipynb")
    many.add_argument("-f", dest="file", metavar="file.yaml", help="default: parameters/<notebook>.<command>.yaml")
    many.add_argument("--profile", metavar="P", help="parameters/<notebook>.P.yaml beneath the file")
    many.add_argument("-p", dest="parameters", action="append", default=[], metavar="name=value", help="hold it so")
    told = "execute notebooks; skips what is done, resumes what is not"
    command = add("run", _run, parents=[both, given, engine], help=told)
    command.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="00, 00_setup or notebooks/00_setup.ipynb")
    command.add_argument("--all", action="store_true", help="every notebook, in order")
    told = "so many at once, or auto: what cores and memory, or cards, allow (default auto with --all, else 1)"
    command.add_argument("--jobs", type=_at_once, metavar="N", help=told)
    command.add_argument("--keep-going", action="store_true", help="start the rest although one failed")
    command.add_argument("--dry-run", action="store_true", help="say what would be skipped, continued or run, and end")

    command = add("train", _train, parents=[both, given], help="one notebook in several processes that train as one")
    command.add_argument("notebook", metavar="NOTEBOOK", help="00, 00_setup or notebooks/00_setup.ipynb")
    told = "share rows, by -p mesh=ddp (default), fsdp or hsdp"
    command.add_argument("--processes", type=_positive, default=1, metavar="N", help=told)
    command.add_argument("--nodes", type=_positive, default=1, metavar="N", help="machines, each with this command")
    command.add_argument("--node", type=int, metavar="K", help="which of them this is: 0 (the first) .. N-1")
    command.add_argument("--rendezvous", default="127.0.0.1:29400", metavar="HOST:PORT", help="of node 0")
    command.add_argument("--wait", type=_positive, default=300, metavar="S", help="seconds until all are there (300)")

    command = add(
        "sweep",
        _sweep,
        parents=[both, engine, many],
        help="run one notebook over a grid of parameters and end with a table",
        description="Run one notebook once for each combination of the values in a sweep file, skip what is done, "
        "resume what is not, go on after a failure, and end with a table of the results, which is also written as "
        "outputs/<notebook>/sweep-<time>.json and .csv.",
        epilog="A sweep file is flat YAML: `name: value` sets, `name: [a, b]` varies; see parameters/README.md. "
        "Exit code 1: a run failed.",
    )
    command.add_argument("--list", action="store_true", help="print the combinations and end")
    command.add_argument("--show", type=_names, default=[], metavar="a,b", help="results in the table (default: a few)")

    command = add(
        "search",
        _search,
        parents=[both, engine, many],
        help="find the parameters of one notebook that make a result best",
        description="Propose parameters by what earlier trials gave, run the notebook with them, end with a table and "
        "a picture. The same command goes on after Ctrl-C or a kill. parameters/README.md describes search files.",
    )
    command.add_argument("--trials", type=_positive, default=30, metavar="N", help="of the whole study (default 30)")
    command.add_argument("--prune", action="store_true", help="stop runs that are worse than most; see the search file")
    command.add_argument("--seed", type=_positive, default=1, metavar="N", help="of the proposals (default 1)")

    told = "what looks wrong: with parameters before a run, with a run's first steps, with a checkpoint's weights"
    command = add("audit", lambda o: _import("lessons.audit", INSTALL).main(o.target), help=told, description=told)
    command.add_argument("target", metavar="WHAT", help="parameters .yaml, run, checkpoint's folder, .safetensors")

    add("status", _jobs, help="jobs that were given to Slurm or Ray, and their runs").set_defaults(jobs=None)
    command = add("cancel", _jobs, help="ask jobs on Slurm or Ray to stop; what they saved is kept")
    command.add_argument("jobs", nargs="+", metavar="JOB", help="its id or its array's, a notebook's name, or all")

    add("report", _report, help="write outputs/index.html and print its path")

    named = {"metavar": "RUN", "help": "folder, short id, path, or notebook: 10 is its newest run, 10~1 the one before"}
    command = add("compare", _compare, help="what differs between runs: parameters, versions, results, metrics")
    command.add_argument("runs", nargs="+", **named)
    command.add_argument("--all", action="store_true", help="also what is equal")

    command = add("note", _note, help="add a note or tags to a run, or show what is there")
    command.add_argument("run", **named)
    command.add_argument("text", nargs="?", help="up to 2,000 characters")
    command.add_argument("--tag", action="append", default=[], metavar="T", help="letters, digits and . _ -, up to 40")
    command.add_argument("--untag", action="append", default=[], metavar="T", help="take this tag away")

    command = add("rm", _rm, help="delete runs, after a question")
    command.add_argument("runs", nargs="+", **named)
    command.add_argument("--yes", action="store_true", help="do not ask")

    command = add("export", _export, help="the metrics of a run for TensorBoard or Trackio")
    command.add_argument("run", **named)
    command.add_argument("--to", required=True, choices=("tensorboard", "trackio"))
    command.add_argument("--follow", action="store_true", help="go on until the run ends, or Ctrl-C")

    command = add("refresh", _refresh, help="execute notebooks on their defaults and store the outputs in them")
    command.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="all of them when none is named")

    command = add("estimate", _estimate, help="bytes of a training step by kind, without running it")
    command.add_argument("--model", default="tiny", metavar="NAME", help="hub name or folder (default: our tiny Qwen3)")
    command.add_argument("--rows", type=_positive, default=16, metavar="N", help="rows per micro-batch (default 16)")
    command.add_argument("--length", type=_positive, default=256, metavar="N", help="tokens per row (default 256)")
    command.add_argument("--rank", type=_positive, default=0, metavar="N", help="of adapters; without it all trains")
    command.add_argument("--lrc", type=float, metavar="PERCENT", help="ternary with a correction of this rank percent")
    command.add_argument("--checkpointing", action="store_true", help="recompute every block in backward")
    command.add_argument("--precision", default="fp32", help="of autocast: fp32 or bf16; weights stay fp32")
    command.add_argument("--optimizer", default="adamw", help="adamw, momentum or sgd")
    command.add_argument("--logits", default="chunked", help="chunked, or full for the plain loss")

    commands.add_parser("doctor", help="run a training script and name what is wrong with its loop", add_help=False)
    add("gpu-check", _gpu_check, help="a minute on your card: driver, waits, speed, memory; outputs/gpu-check.json")
    return parser


class _Version(argparse.Action):
    """Asks for the version only where it is wanted: importlib.metadata would cost each --help a moment."""

    def __call__(self, *given: Any) -> NoReturn:
        metadata = importlib.import_module("importlib.metadata")
        try:
            print(f"nblib {metadata.version('nblib')}")
        except metadata.PackageNotFoundError:
            print("nblib, of a folder that is not installed")
        sys.exit(0)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with one sentence, without the usage that --help shows; of a command that does not exist, the nearest."""
        wrong = re.match(r"argument COMMAND: invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong is not None:
            known = re.findall(r"[a-z-]+", wrong[2])
            near = difflib.get_close_matches(wrong[1], known, n=3, cutoff=0.5)
            near.sort(key=lambda name: abs(len(name) - len(wrong[1])))  # of run and rm, "rum" is nearer to run
            meant = f"; did you mean {near[0]!r}?" if near else "."
            message = f"there is no command {wrong[1]!r}{meant} The commands are {', '.join(known)}."
        sys.exit(_say(clip(message, 1000), code=2))


def _names(text: str) -> list[str]:
    if not all(names := [name.strip() for name in text.split(",")]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names such as a,b")
    return names


def _at_once(text: str) -> int:
    """0 for auto."""
    return 0 if text == "auto" else _positive(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:10]) < 10**9:
        raise argparse.ArgumentTypeError(f"{clip(text)!r} is not a whole number from 1 to 999,999,999")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
