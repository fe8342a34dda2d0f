"""`nblib sweep --trials N`: the parameters of a notebook that make one of its results best, by
Optuna (extra `search`).

`parameters/<notebook>.search.yaml` is flat, like a sweep file. Exactly one line names the goal:

    minimise: loss             # a result of the run, or `maximise: recovered`
    lr: 1e-4 .. 1e-1 log       # a range of numbers; `log` draws its logarithm
    rank: 2 .. 16              # of whole numbers, where the parameter is one
    start: [svd, zeros]        # a choice
    steps: 200                 # the same in all runs
    prune_high: lrc/loss       # with --prune: stop runs in which this metric is high (or prune_low)

Each trial is the run that `nblib run` would make, so one that is done already costs nothing. The
proposals are those of TPE (Bergstra et al., Algorithms for Hyper-Parameter Optimization, 2011):
parameters that are likely among the good trials and unlikely among the others. Values of a range
are rounded to four digits, and no combination runs twice. With `--prune`, metrics.jsonl is read
while the run writes it. A run whose best value so far is worse than the median of the others at the
same step is stopped, as by Ctrl-C, after three trials and a tenth of the steps.

The study is a file, outputs/<notebook>/search-<id>/study.log; the id holds the ranges, what is
fixed, and the code. After Ctrl-C or a kill the same command goes on: trials that were running keep
their numbers, their parameters and their run folders. What is proposed hangs on the seed, the
trial's number and the trials before it, not on who runs the command.

Footgun: thirty trials are thirty draws of noise as well. The best of them looks better than it is;
run it again with other seeds.
"""

import json
import math
import signal
import subprocess
import sys
import threading
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from nblib import files, paths
from nbworkbook import (
    cluster,
    jobs,
    on_ray,
    parameters,
    pictures,
    report,
    runner,
    runs,
    sweep,
    track,
)
from nbworkbook.parameters import Parameter, ParameterError
from nbworkbook.runner import Outcome
from nbworkbook.schema import GOALS, WATCHED

REPEATS = 50  # proposals in a row that were tried before, after which nothing new is left
WARM = 3  # trials before any run is pruned
SHARE = 0.1  # of the steps, in which no run is pruned

WORDS = {"COMPLETE": "done", "PRUNED": "pruned", "RUNNING": "stopped", "FAIL": "failed"}


class Range(NamedTuple):
    low: float
    high: float
    log: bool
    whole: bool


class Search(NamedTuple):
    notebook: str
    profile: str | None
    goal: tuple[str, str]  # minimise or maximise, and the result
    watched: tuple[str, str] | None  # prune_high or prune_low, and the metric
    ranges: dict[str, Range | list[str]]  # of each parameter that varies; a choice as `name=value`
    fixed: list[str]  # name=value
    folder: Path
    command: str

    def job(self, drawn: Mapping[str, Any]) -> jobs.Job:
        """Return the run of what was drawn, with four digits, as a person writes numbers."""
        texts = list(self.fixed)
        for name, allowed in self.ranges.items():
            value = drawn[name]
            if isinstance(allowed, list):
                texts.append(value)
                continue
            if isinstance(value, float):
                rounded = float(f"{value:.4g}")
                value = min(max(rounded, allowed.low), allowed.high)
            texts.append(parameters.assignment(name, value))

        (job,) = jobs.variants(self.notebook, [texts], profile=self.profile)
        return job


# ------------------------------------------------------------------ what is searched


def plan(
    notebook: str,
    *,
    file: str | None = None,
    profile: str | None = None,
    overrides: Sequence[str] = (),
) -> Search:
    """Return what is searched; ParameterError lists every problem of the search file."""
    name = jobs.resolve(notebook)
    path = sweep.file_of(name, "search", file)
    source = paths.short(path)
    known = parameters.declared(paths.notebooks() / f"{name}.ipynb")

    # The lines that name the goal, and those of parameters.
    given = parameters.load_yaml(path, depth=2)
    words = {word: given.pop(word) for word in (*GOALS, *WATCHED) if word in given}
    problems = _problems_of_words(words, source)
    held = {text.partition("=")[0] for text in overrides}
    ranges, fixed, more = _split(known, given, held, source)
    problems += more
    if problems:
        raise ParameterError("\n".join(dict.fromkeys(problems)))
    if not ranges:
        form = "`name: 1e-4 .. 1e-1 log` or `name: [a, b]`"
        raise ParameterError(f"{source}: nothing varies; write {form}.")

    # The study is another one where what it measures is another.
    fixed += overrides
    (job,) = jobs.variants(name, [fixed], profile=profile)
    stays = {
        part: value
        for part, value in job.inputs.items()
        if part.removeprefix("parameter ") not in ranges
    }
    goals = [(word, words[word]) for word in GOALS if word in words]
    watched = [(word, words[word]) for word in WATCHED if word in words]
    varies = {each: list(allowed) for each, allowed in ranges.items()}
    digest = files.digest([stays, goals, varies])[:8]

    return Search(
        notebook=name,
        profile=profile,
        goal=goals[0],
        watched=watched[0] if watched else None,
        ranges=ranges,
        fixed=fixed,
        folder=paths.outputs() / name / f"search-{digest}",
        command=sweep.command_of(name, source, profile, overrides),
    )


def _problems_of_words(words: Mapping[str, Any], source: str) -> list[str]:
    """Return what is wrong with the lines that name the goal and the metric that is watched."""
    problems = []
    goals = [word for word in GOALS if word in words]
    if len(goals) != 1:
        what = f"exactly one of {' and '.join(GOALS)} is written"
        problems.append(f"{source}: {what}, not {len(goals)}.")

    watched = [word for word in WATCHED if word in words]
    if len(watched) > 1:
        what = f"at most one of {' and '.join(WATCHED)} is written"
        problems.append(f"{source}: {what}, not {len(watched)}.")

    for word, value in words.items():
        if not isinstance(value, str):
            problems.append(f"{source}: {word} takes the name of a number, not {value!r}.")
    return problems


def _split(
    known: Mapping[str, Parameter], given: Mapping[str, Any], held: set[str], source: str
) -> tuple[dict[str, Range | list[str]], list[str], list[str]]:
    """Return the parameters that vary, those that are set as `name=value`, and the problems.

    What is held still by -p is checked as well, and left out."""
    ranges: dict[str, Range | list[str]] = {}
    fixed: list[str] = []
    problems: list[str] = []

    for name, value in given.items():
        try:
            is_number = name in known and known[name].type in ("int", "float")
            if is_number and isinstance(value, str) and ".." in value:
                ranges[name] = _range(known, name, value, source)
            elif sweep.is_several(known, name, value):
                ranges[name] = _choices(known, name, value, source)
            else:
                checked = parameters.check(known, {name: value}, source)
                fixed.append(parameters.assignment(name, checked[name]))
        except ParameterError as error:
            problems.append(str(error))

    ranges = {name: allowed for name, allowed in ranges.items() if name not in held}
    fixed = [text for text in fixed if text.partition("=")[0] not in held]
    return ranges, fixed, problems


def _range(known: Mapping[str, Parameter], name: str, text: str, source: str) -> Range:
    """Return `low .. high`, with `log` after it or without; both ends are allowed values."""
    low, _, rest = text.partition("..")
    high, _, last = rest.strip().partition(" ")
    last = last.strip()

    ends = []
    for end in (low, high):
        _, value = parameters.parse_assignment(f"{name}={end.strip()}", known)
        ends.append(parameters.check(known, {name: value}, source)[name])

    is_bad_log = last == "log" and ends[0] <= 0
    if last not in ("", "log") or not ends[0] < ends[1] or is_bad_log:
        form = "`low .. high` or `low .. high log`, low below high, and above 0 with log"
        raise ParameterError(f"{source}: '{name}' is {text!r}, but a range is {form}.")
    return Range(*ends, log=last == "log", whole=known[name].type == "int")


def _choices(known: Mapping[str, Parameter], name: str, values: list, source: str) -> list[str]:
    """Return the values of a choice as `name=value`."""
    checked = [parameters.check(known, {name: value}, source)[name] for value in values]
    texts = [parameters.assignment(name, value) for value in checked]
    if len(set(texts)) < max(2, len(texts)):
        why = "but a choice is two different values or more."
        raise ParameterError(f"{source}: '{name}' is {values}, {why}")
    if known[name].allowed == "secret":
        why = "is secret and cannot vary: no result hangs on it."
        raise ParameterError(f"{source}: '{name}' {why}")
    return texts


# ------------------------------------------------------------------ the study


class _Ours:
    """The lock of the study's file: we hold one on its folder, which ends with our process."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def open_study(search: Search) -> Any:
    """Return Optuna's study of the search, which is made where there is none."""
    optuna = cluster.need("optuna", "search")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)

    log = files.make_folder(search.folder) / "study.log"
    if log.exists():
        runs.drop_torn_line(log)  # a kill may have cut the last one short
    journal = optuna.storages.journal
    backend = journal.JournalFileBackend(str(log), lock_obj=_Ours())

    return optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name=search.folder.name,
        direction="minimize" if search.goal[0] == "minimise" else "maximize",
        load_if_exists=True,
    )


def _propose(study: Any, search: Search, *, seed: int, begun: Any, repeats: int) -> Any:
    """Return a new trial with its parameters, or the one that was begun, with its own.

    The draw hangs on the seed, the trial's number and the trials before it."""
    import optuna

    number = begun.number if begun else len(study.trials)
    mixed = seed * 1_000_003 + number
    if repeats < 3:
        study.sampler = optuna.samplers.TPESampler(
            seed=mixed,
            n_startup_trials=2 * len(search.ranges) + 2,
            constant_liar=True,
            multivariate=True,
        )
    else:  # it proposes again and again what was tried
        study.sampler = optuna.samplers.RandomSampler(seed=mixed)

    trial = optuna.trial.Trial(study, begun._trial_id) if begun else study.ask()
    for name, allowed in search.ranges.items():
        if isinstance(allowed, list):
            trial.suggest_categorical(name, allowed)
        elif allowed.whole:
            trial.suggest_int(name, allowed.low, allowed.high, log=allowed.log)
        else:
            trial.suggest_float(name, allowed.low, allowed.high, log=allowed.log)
    return trial


@dataclass
class Live:
    """A trial whose run was begun."""

    trial: Any
    job: jobs.Job
    id: str  # of the engine's job
    seen: set[int]  # steps that were reported
    folder: Path | None = None  # of the run, once there is one


@dataclass
class Session:
    """The trials of one command: what it was given, what runs, and what was tried."""

    search: Search
    study: Any
    engine: Any
    on: str
    wanted: dict[str, Any]
    how: dict[str, Any]
    trials: int  # of the whole study
    prune: bool
    seed: int
    begun: list[Any] = field(default_factory=list)  # trials that an earlier command left
    tried: set[str] = field(default_factory=set)  # keys of runs
    live: dict[int, Live] = field(default_factory=dict)  # by the trial's number
    repeats: int = 0  # proposals in a row that were tried before

    def has_room(self) -> bool:
        """Return whether one more trial may begin now."""
        is_wanted = bool(self.begun) or len(self.tried) < self.trials
        is_free = len(self.live) < self.wanted.get("at_once", 1)
        return is_wanted and is_free and self.repeats < REPEATS

    def begin_trial(self) -> None:
        """Begin a trial, or count a proposal that was tried before."""
        import optuna

        # The proposal and its run.
        begun = self.begun.pop(0) if self.begun else None
        trial = _propose(self.study, self.search, seed=self.seed, begun=begun, repeats=self.repeats)
        job = self.search.job(trial.params)

        # One that was tried counts for nothing, except where it is the trial that was begun.
        is_own = begun is not None and begun.user_attrs.get("key") == job.key
        if job.key in self.tried and not is_own:
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            self.repeats += 1
            return

        self.repeats = 0
        self.tried.add(job.key)
        trial.set_user_attr("key", job.key)

        # A job that is still in the engine's queue is not submitted a second time.
        what = [f"{name} {sweep.brief(job.parameters[name])}" for name in self.search.ranges]
        job = job._replace(label=f"trial {trial.number}: {', '.join(what)}")
        ids = [
            given.job["id"]
            for given in cluster.batches()
            if given.state and given.on == self.on and given.job["key"] == job.key
        ]
        if not ids:
            ids = cluster.submit(self.engine, self.on, [job], wanted=self.wanted, how=self.how)

        seen = {
            step
            for each in self.study.trials
            if each.number == trial.number
            for step in each.intermediate_values
        }
        self.live[trial.number] = Live(trial, job, ids[0], seen)

    def look(self) -> None:
        """Tell the study of the runs that ended, and stop those that are hopeless."""
        alive = self.engine.states()
        for number, one in list(self.live.items()):
            is_hopeless = self.prune and _is_hopeless(self.study, self.search, one)
            if one.id in alive and is_hopeless:
                cluster.end(self.engine, [one.id])
            if one.id not in alive or is_hopeless:
                del self.live[number]
                _tell(self.study, self.search, one, cluster.ending(one.job), is_hopeless)


def go(
    search: Search,
    *,
    trials: int,
    prune: bool,
    seed: int,
    engine: Any,
    on: str,
    wanted: dict[str, Any],
    how: dict[str, Any],
) -> bool:
    """Run trials until there are so many; return False if somebody stopped it before."""
    import optuna

    waiting = f"another search uses {paths.short(search.folder)}; waiting"
    with files.locked(search.folder / "lock", waiting=waiting):
        study = open_study(search)
        session = Session(search, study, engine, on, wanted, how, trials, prune, seed)

        # What earlier commands left.
        for trial in study.trials:
            if trial.state == optuna.trial.TrialState.RUNNING:
                session.begun.append(trial)
            if "key" in trial.user_attrs:
                session.tried.add(trial.user_attrs["key"])

        # As many at once as there is room for, until none is left or somebody stops it.
        stopping = threading.Event()
        with runner.handling(lambda *_: stopping.set()):
            while not stopping.is_set() and session.repeats < REPEATS:
                while session.has_room():
                    session.begin_trial()
                if not session.live:
                    break
                stopping.wait(engine.every)
                session.look()

        if not engine.outlives:
            cluster.end(engine, [one.id for one in session.live.values()])
        if session.repeats >= REPEATS:
            print("the ranges hold nothing new", flush=True)
        return not stopping.is_set()


def _is_hopeless(study: Any, search: Search, one: Live) -> bool:
    """Report what the run wrote of the metric, and return whether it is so much worse than the
    others that it should stop."""
    import optuna

    # What is new of the metric; where a high value is bad in a search for a maximum, its negative.
    if one.folder is None:
        one.folder = runner.newest(one.job)
    way, metric = search.watched
    sign = 1.0 if (way == "prune_high") == (search.goal[0] == "minimise") else -1.0
    for step, value in _watched_values(one.folder, metric).items():
        if step not in one.seen:
            one.seen.add(step)
            one.trial.report(sign * value, step)

    # Not before some trials ended, and not in their first steps.
    ended = [
        trial
        for trial in study.trials
        if trial.state == optuna.trial.TrialState.COMPLETE and trial.intermediate_values
    ]
    if len(ended) < WARM or not one.seen:
        return False
    warm = math.ceil(SHARE * max(ended[0].intermediate_values))
    study.pruner = optuna.pruners.MedianPruner(n_startup_trials=WARM, n_warmup_steps=warm)
    return one.trial.should_prune()


def _watched_values(folder: Path | None, metric: str) -> dict[int, float]:
    """Return the values of `name of the training/metric` by step, so far."""
    if folder is None:
        return {}
    training, _, name = metric.rpartition("/")
    series = track.series(folder)
    if not training and training not in series:  # no training is named: the first one of the run
        training = next(iter(series), "")

    values = {step: runs.scalars(each).get(name) for step, each in series.get(training, {}).items()}
    return {step: value for step, value in values.items() if value is not None}


def _tell(study: Any, search: Search, one: Live, outcome: Outcome, is_hopeless: bool) -> None:
    """Tell the study how a trial ended, and print it."""
    import optuna

    states = optuna.trial.TrialState
    head = f"[{search.notebook}] {one.job.label}"
    if outcome.status == "stopped" and not is_hopeless:
        print(f"{head}: stopped; the same command goes on with it", flush=True)
        return

    # Its value, and a word for the line.
    result = search.goal[1]
    value = None
    word = outcome.status
    if outcome.status == "done":
        value = _number(files.read_json(outcome.folder / "result.json").get(result))
        word = f"no number {result!r} in its results"
        if value is not None:
            word = f"{result} {value:.5g}"
    elif is_hopeless:
        word = f"pruned at step {max(one.seen)}"

    if value is not None:
        state = states.COMPLETE
    elif is_hopeless:
        state = states.PRUNED
    else:
        state = states.FAIL
    one.trial.set_user_attr("run", outcome.folder.name if outcome.folder else "")
    study.tell(one.trial.number, value, state=state)

    print(f"{head}: {word}", flush=True)
    if outcome.sentence and not is_hopeless:
        print(f"nblib: {outcome.sentence}", file=sys.stderr, flush=True)


def _number(value: Any) -> float | None:
    is_number = type(value) in (int, float) and math.isfinite(value)
    return float(value) if is_number else None


# ------------------------------------------------------------------ what came out


def trials_of(search: Search) -> list[Any]:
    """Return the trials that count; a proposal that was tried before does not."""
    return [trial for trial in open_study(search).trials if "key" in trial.user_attrs]


def _completed(search: Search) -> list[Any]:
    """Return the trials that have a result."""
    trials = trials_of(search)
    return [trial for trial in trials if trial.value is not None and trial.state.name == "COMPLETE"]


def best_of(search: Search) -> Any:
    """Return the trial with the best result; None before one was done."""
    best = min if search.goal[0] == "minimise" else max
    return best(_completed(search), key=lambda trial: trial.value, default=None)


def table(search: Search) -> tuple[sweep.Sweep, list[sweep.Row]]:
    """Return the trials as the rows of a sweep, which is how the report shows them."""
    planned = []
    outcomes = []
    for trial in trials_of(search):
        folder = paths.outputs() / search.notebook / (trial.user_attrs.get("run") or "-")
        status = WORDS.get(trial.state.name, "not run")
        planned.append(search.job(trial.params))
        place = folder if folder.is_dir() else None
        outcomes.append(Outcome(search.notebook, status, 0.0, place))

    varied = {name: [job.parameters[name] for job in planned] for name in search.ranges}
    whole = sweep.Sweep(search.notebook, search.command, varied, planned)
    return whole, sweep.rows(whole, outcomes)


def picture(search: Search) -> pictures.Picture:
    """Draw the best result so far against the trials, and the result against each parameter."""
    trials = _completed(search)
    best = best_of(search)
    names = list(search.ranges)
    way, result = search.goal

    width = 3.2 * (len(names) + 1)
    figure = Figure(figsize=(width, 2.8), layout="constrained")
    first, *others = figure.subplots(1, len(names) + 1, squeeze=False, sharey=True)[0]

    # The results in their order, and the best so far.
    values = [trial.value for trial in trials]
    best_yet = min if way == "minimise" else max
    numbers = range(1, len(values) + 1)
    first.plot(numbers, [best_yet(values[:n]) for n in numbers], color="tab:orange")
    first.plot(numbers, values, "o", markersize=4)
    first.set(xlabel="trials that were done", ylabel=result)

    # Against each parameter, darker the later the trial was drawn.
    for name, axes in zip(names, others):
        allowed = search.ranges[name]
        drawn = [trial.params[name] for trial in trials]
        if isinstance(allowed, list):
            drawn = [text.partition("=")[2] for text in drawn]
        axes.scatter(drawn, values, c=range(len(drawn)), cmap="Blues", vmin=-len(drawn), s=18)
        axes.set_xlabel(name)
        if isinstance(allowed, Range) and allowed.log:
            axes.set_xscale("log")

    summary = (
        f"{len(trials)} trials were done, and trial {best.number} is the best: {result} "
        f"{best.value:.5g}. Each point is a trial, darker the later it was drawn. The line is the "
        "best so far."
    )
    return pictures.Picture(figure, summary, title=f"{way} {result} of {search.notebook}")


# ------------------------------------------------------------------ the command


def main(options: Namespace, **how: Any) -> int:
    """Do what the command line says, and return the exit code."""
    search = plan(
        options.notebook,
        file=options.file,
        profile=options.profile,
        overrides=options.parameters,
    )
    search = search._replace(command=_whole_command(search, options))
    if options.no_wait:
        raise ParameterError("--no-wait: a search proposes by results, so it waits for them.")
    if options.prune and search.watched is None:
        lines = "`prune_high: metric` or `prune_low: metric`"
        raise ParameterError(f"--prune: the search file has no line {lines}.")
    cluster.need("optuna", "search")

    # Where the trials run.
    wanted = cluster.resources(options.resources)
    cluster.check(paths.outputs())
    engines = {"local": Local, "ray": on_ray.Ray, **cluster.ENGINES}
    engine = engines[options.on](wanted)

    # The trials.
    print(f"the study is {paths.short(search.folder)}", flush=True)
    is_whole = go(
        search,
        trials=options.trials,
        prune=options.prune,
        seed=options.seed or 1,
        engine=engine,
        on=options.on,
        wanted=wanted,
        how=how,
    )
    options.ran = True

    best = best_of(search)
    _print_results(search, best)
    if not is_whole:
        print("stopped; the same command goes on")
        return 130
    return 0 if best else 1


def _whole_command(search: Search, options: Namespace) -> str:
    """Return the command with the options of a search."""
    command = f"{search.command} --trials {options.trials}"
    if options.prune:
        command += " --prune"
    if options.seed:
        command += f" --seed {options.seed}"
    return command


def _print_results(search: Search, best: Any) -> None:
    """Print the table of the trials and the best one, and write its files and the picture."""
    if trials_of(search):
        whole, rows = table(search)
        show = [search.goal[1]] if best else ()
        print(f"\n{sweep.text(whole, rows, show=show)}\n")
        for path in sweep.write(whole, rows):
            print(path)

    if best:
        path = search.folder / "trials.png"
        with files.replacing(path) as partial:
            picture(search).save(partial)
        print(f"{path}\n{report.write()}")
        told = f"best: trial {best.number}, {search.goal[1]} {best.value:.6g}"
        print(f"{told}; {search.job(best.params).resume}")


class Local:
    """Jobs as processes of this machine. They end with the one that started them, by SIGINT."""

    every = 0.3  # seconds between two looks
    outlives = False

    def __init__(self, wanted: dict[str, Any]):
        self.live: dict[str, subprocess.Popen] = {}

    def submit(self, orders: Sequence[dict[str, Any]], folder: Path) -> list[str]:
        """Start a process for each order, and return their ids."""
        ids = []
        for number, order in enumerate(orders):
            with (folder / f"{number}.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "nbworkbook.search"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            process.stdin.write(json.dumps(order).encode())
            process.stdin.close()
            self.live[str(process.pid)] = process
            ids.append(str(process.pid))
        return ids

    def states(self) -> dict[str, str]:
        """Return the state of those that have not ended."""
        return {id_: "running" for id_, process in self.live.items() if process.poll() is None}

    def cancel(self, ids: Sequence[str]) -> None:
        """Stop the jobs, which save what they have."""
        for id_ in ids:
            if id_ in self.live:
                self.live[id_].send_signal(signal.SIGINT)


if __name__ == "__main__":
    cluster.work(json.loads(sys.stdin.read()))
