"""`nblib search`: the parameters of a notebook that make one of its results best, by Optuna (extra `search`).

`parameters/<notebook>.search.yaml` is flat, like a sweep file. Exactly one line names the goal:

    minimise: loss             # a result of the run, or `maximise: recovered`
    lr: 1e-4 .. 1e-1 log       # a range of numbers; `log` draws its logarithm
    rank: 2 .. 16              # of whole numbers, where the parameter is one
    start: [svd, zeros]        # a choice
    steps: 200                 # the same in all runs
    prune_high: lrc/loss       # with --prune: stop runs in which this metric is high (or prune_low)

Each trial is the run that `nblib run` would make, so one that is done already costs nothing. The proposals are those of
TPE (Bergstra et al., Algorithms for Hyper-Parameter Optimization, 2011): parameters that are likely among the good
trials and unlikely among the others. Values of a range are rounded to four digits, and no combination runs twice. With
`--prune`, metrics.jsonl is read while the run writes it. A run whose best value so far is worse than the median of the
others at the same step is asked to stop, as by Ctrl-C, after three trials and a tenth of the steps.

The study is a file, outputs/<notebook>/search-<id>/study.log; the id holds the ranges, what is fixed, and the code.
After Ctrl-C or a kill the same command goes on: trials that were running keep their numbers, their parameters and their
run folders. What is proposed hangs on the seed, the trial's number and the trials before it, not on who asks.

Footgun: thirty trials are thirty draws of noise as well. The best of them looks better than it is; run it again with
other seeds.
"""

import json
import math
import shlex
import signal
import subprocess
import sys
import threading
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from lessons import on_ray, track
from nblib import files, hashed, paths
from nblib.run import engines, jobs, parameters, pictures, report, runner, runs, sweep
from nblib.run.parameters import ParameterError
from nblib.run.runner import Outcome

GOALS, WATCHED = ("minimise", "maximise"), ("prune_high", "prune_low")
WORDS = (*GOALS, *WATCHED)
REPEATS = 50  # proposals in a row that were tried before, after which nothing new is left
WARM, SHARE = 3, 0.1  # no pruning before so many trials, and in this share of the steps


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

    def job(self, drawn: dict[str, Any]) -> jobs.Job:
        """The run of what was drawn; numbers of four digits, as a person would write them."""
        texts = list(self.fixed)
        for name, r in self.ranges.items():
            value = drawn[name]
            if isinstance(value, float):
                value = min(max(float(f"{value:.4g}"), r.low), r.high)
            texts.append(value if isinstance(r, list) else parameters.assignment(name, value))
        return jobs.variants(self.notebook, [texts], profile=self.profile)[0]


# ------------------------------------------------------------------ what is searched


def plan(
    notebook: str, *, file: str | None = None, profile: str | None = None, overrides: Sequence[str] = ()
) -> Search:
    """ParameterError lists every problem of the search file."""
    name = jobs.resolve(notebook)
    path = Path(file) if file else paths.profiles() / f"{name}.search.yaml"
    if not file and not path.exists():
        raise ParameterError(f"{name} has no search file {paths.short(path)}; write one, or name another with -f.")
    known, source = parameters.declared(paths.notebooks() / f"{name}.ipynb"), paths.short(path)
    given, problems, ranges, fixed = parameters.load_yaml(path, depth=2), [], {}, []
    words = {word: given.pop(word) for word in WORDS if word in given}
    for names, wanted in ((GOALS, "exactly one of"), (WATCHED, "at most one of")):
        several = [word for word in names if word in words]
        if len(several) > 1 or (names is GOALS and not several):
            problems.append(f"{source}: {wanted} {' and '.join(names)} is written, not {len(several)}.")
    problems += [
        f"{source}: {w} takes the name of a number, not {v!r}." for w, v in words.items() if type(v) is not str
    ]
    held = {text.partition("=")[0] for text in overrides}
    for parameter, value in given.items():
        try:
            kind = known[parameter].type if parameter in known else ""
            if kind in ("int", "float") and isinstance(value, str) and ".." in value:
                ranges[parameter] = _range(known, parameter, value, source)
            elif isinstance(value, list) and (not kind.startswith("list") or any(isinstance(v, list) for v in value)):
                ranges[parameter] = _choices(known, parameter, value, source)
            else:
                checked = parameters.check(known, {parameter: value}, source)
                fixed += [parameters.assignment(parameter, checked[parameter])] * (parameter not in held)
        except ParameterError as error:
            problems.append(str(error))
    if problems:
        raise ParameterError("\n".join(dict.fromkeys(problems)))
    ranges = {n: r for n, r in ranges.items() if n not in held}
    if not ranges:
        raise ParameterError(f"{source}: nothing varies; write `name: 1e-4 .. 1e-1 log` or `name: [a, b]`.")
    fixed += overrides
    (job,) = jobs.variants(name, [fixed], profile=profile)
    stays = {part: v for part, v in job.inputs.items() if part.removeprefix("parameter ") not in ranges}
    goal, watched = ([(w, words[w]) for w in names if w in words] for names in (GOALS, WATCHED))
    digest = hashed.digest([stays, goal, {n: list(r) for n, r in ranges.items()}])[:8]
    command = ["nblib", "search", name, "-f", source, *(["--profile", profile] if profile else [])]
    command += [part for text in overrides for part in ("-p", text)]
    folder = paths.outputs() / name / f"search-{digest}"
    return Search(name, profile, goal[0], next(iter(watched), None), ranges, fixed, folder, shlex.join(command))


def _range(known: dict, name: str, text: str, source: str) -> Range:
    """`low .. high`, with `log` after it or without; both ends are allowed values of the parameter."""
    low, _, rest = text.partition("..")
    high, _, last = rest.strip().partition(" ")
    ends = [parameters.parse_assignment(f"{name}={end.strip()}", known)[1] for end in (low, high)]
    values = [parameters.check(known, {name: end}, source)[name] for end in ends]
    if last.strip() not in ("", "log") or not values[0] < values[1] or (last and values[0] <= 0):
        form = "`low .. high` or `low .. high log`, low below high, and above 0 with log"
        raise ParameterError(f"{source}: '{name}' is {text!r}, but a range is {form}.")
    return Range(*values, bool(last), known[name].type == "int")


def _choices(known: dict, name: str, values: list, source: str) -> list[str]:
    checked = [parameters.check(known, {name: value}, source)[name] for value in values]
    texts = [parameters.assignment(name, value) for value in checked]
    if len(set(texts)) < max(2, len(texts)):
        raise ParameterError(f"{source}: '{name}' is {values}, but a choice is two different values or more.")
    if known[name].allowed == "secret":
        raise ParameterError(f"{source}: '{name}' is secret and cannot vary: no result hangs on it.")
    return texts


# ------------------------------------------------------------------ the study


class _Ours:
    """The lock of the study's file: we hold one on its folder, which ends with us however we end."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def open_study(search: Search) -> Any:
    optuna = engines.need("optuna", "search")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    log = files.make_folder(search.folder) / "study.log"
    if log.exists():
        runs.drop_torn_line(log)  # a kill may have cut the last one short
    backend = optuna.storages.journal.JournalFileBackend(str(log), lock_obj=_Ours())
    storage, direction = optuna.storages.JournalStorage(backend), search.goal[0]
    options = {"study_name": search.folder.name, "load_if_exists": True, "direction": direction.replace("ise", "ize")}
    return optuna.create_study(storage=storage, **options)


def _propose(study: Any, search: Search, *, seed: int, trial: Any = None, again: int = 0) -> Any:
    """A new trial, or one that was begun, with its parameters. The draw hangs on seed and number alone."""
    import optuna

    number = trial.number if trial else len(study.trials)
    mixed, begin = seed * 1_000_003 + number, 2 * len(search.ranges) + 2
    tpe = optuna.samplers.TPESampler(seed=mixed, n_startup_trials=begin, constant_liar=True, multivariate=True)
    study.sampler = tpe if again < 3 else optuna.samplers.RandomSampler(seed=mixed)
    trial = optuna.trial.Trial(study, trial._trial_id) if trial else study.ask()
    for name, r in search.ranges.items():
        if isinstance(r, list):
            trial.suggest_categorical(name, r)
        else:
            (trial.suggest_int if r.whole else trial.suggest_float)(name, r.low, r.high, log=r.log)
    return trial


class Live(NamedTuple):
    trial: Any
    job: jobs.Job
    id: str
    seen: set[int]  # steps that were reported
    place: list[Path]  # the run folder, once there is one


def go(search: Search, *, trials: int, prune: bool, seed: int, engine: Any, on: str, wanted: dict, how: dict) -> bool:
    """Run trials until there are so many; False if somebody asked to stop before."""
    import optuna

    states = optuna.trial.TrialState
    with files.locked(search.folder / "lock", waiting=f"another search uses {paths.short(search.folder)}; waiting"):
        study = open_study(search)
        begun = [trial for trial in study.trials if trial.state == states.RUNNING]
        tried = {t.user_attrs["key"] for t in study.trials if "key" in t.user_attrs}
        live: dict[int, Live] = {}
        stopping, again = threading.Event(), 0
        with runner.handling(lambda *_: stopping.set()):
            while not stopping.is_set() and again < REPEATS:
                while len(live) < wanted.get("at_once", 1) and again < REPEATS and (begun or len(tried) < trials):
                    old = begun.pop(0) if begun else None
                    trial = _propose(study, search, seed=seed, trial=old, again=again)
                    job = search.job(trial.params)
                    if job.key in tried and (old is None or old.user_attrs.get("key") != job.key):
                        study.tell(trial, state=states.FAIL)  # it counts for nothing
                        again += 1
                        continue
                    again, label = 0, ", ".join(f"{n} {sweep.brief(job.parameters[n])}" for n in search.ranges)
                    trial.set_user_attr("key", job.key)
                    tried.add(job.key)
                    queued = [j["id"] for o, j, state in engines.batches() if state and (o, j["key"]) == (on, job.key)]
                    job = job._replace(label=f"trial {trial.number}: {label}")
                    (name,) = queued or engines.submit(engine, on, [job], wanted=wanted, how=how)
                    known = {step for t in study.trials if t.number == trial.number for step in t.intermediate_values}
                    live[trial.number] = Live(trial, job, name, known, [])
                if not live:
                    break
                stopping.wait(engine.every)
                alive = engine.states()
                for number, one in list(live.items()):
                    is_hopeless = prune and _watch(study, search, one)
                    if one.id in alive and is_hopeless:
                        engines.end(engine, [one.id])
                    if one.id not in alive or is_hopeless:
                        del live[number]
                        _tell(study, search, one, engines.ending(one.job), is_hopeless)
        if not engine.outlives:
            engines.end(engine, [one.id for one in live.values()])
        if again >= REPEATS:
            print("the ranges hold nothing new", flush=True)
        return not stopping.is_set()


def _watch(study: Any, search: Search, one: Live) -> bool:
    """Report what the run wrote of the metric; whether it is so much worse than the others that it should stop."""
    import optuna

    one.place[:] = one.place or filter(None, [runner.newest(one.job)])
    way, metric = search.watched
    training, _, name = metric.rpartition("/")
    sign = 1.0 if (way == "prune_high") == (search.goal[0] == "minimise") else -1.0
    series = track.series(one.place[0]) if one.place else {}
    if not training and training not in series:  # no training is named: the first one of the run
        training = next(iter(series), "")
    for step, record in series.get(training, {}).items():
        value = runs.scalars(record).get(name)
        if value is not None and step not in one.seen:
            one.seen.add(step)
            one.trial.report(sign * value, step)
    ended = [t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE and t.intermediate_values]
    if len(ended) < WARM or not one.seen:
        return False
    warm = SHARE * max(ended[0].intermediate_values)
    study.pruner = optuna.pruners.MedianPruner(n_startup_trials=WARM, n_warmup_steps=math.ceil(warm))
    return one.trial.should_prune()


def _tell(study: Any, search: Search, one: Live, outcome: Outcome, is_hopeless: bool) -> None:
    import optuna

    states, number, status, value = optuna.trial.TrialState, one.trial.number, outcome.status, None
    if outcome.status == "done":
        value = _number(files.read_json(outcome.folder / "result.json").get(search.goal[1]))
        status = (
            f"{search.goal[1]} {value:.5g}" if value is not None else f"no number {search.goal[1]!r} in its results"
        )
    elif is_hopeless:
        status = f"pruned at step {max(one.seen)}"
    if outcome.status == "stopped" and not is_hopeless:
        print(f"[{search.notebook}] {one.job.label}: stopped; the same command goes on with it", flush=True)
        return
    one.trial.set_user_attr("run", outcome.folder.name if outcome.folder else "")
    state = states.COMPLETE if value is not None else states.PRUNED if is_hopeless else states.FAIL
    study.tell(number, value, state=state)
    print(f"[{search.notebook}] {one.job.label}: {status}", flush=True)
    if outcome.sentence and not is_hopeless:
        print(f"nblib: {outcome.sentence}", file=sys.stderr, flush=True)


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


# ------------------------------------------------------------------ what came out


def trials_of(search: Search) -> list[Any]:
    """Those that count; a proposal that was tried before does not."""
    return [trial for trial in open_study(search).trials if "key" in trial.user_attrs]


def best_of(search: Search) -> Any:
    """The trial with the best result; None before one was done."""
    ended = [trial for trial in trials_of(search) if trial.value is not None and trial.state.name == "COMPLETE"]
    return (min if search.goal[0] == "minimise" else max)(ended, key=lambda trial: trial.value, default=None)


def table(search: Search) -> tuple[sweep.Sweep, list[dict[str, Any]]]:
    """The trials as the rows of a sweep, which is how the report shows them."""
    planned, outcomes, words = [], [], {"COMPLETE": "done", "PRUNED": "pruned", "RUNNING": "stopped", "FAIL": "failed"}
    for trial in trials_of(search):
        folder = paths.outputs() / search.notebook / (trial.user_attrs.get("run") or "-")
        folder = folder if folder.is_dir() else None
        planned.append(search.job(trial.params))
        outcomes.append(Outcome(search.notebook, words.get(trial.state.name, "not run"), 0.0, folder))
    varied = {name: [job.parameters[name] for job in planned] for name in search.ranges}
    whole = sweep.Sweep(search.notebook, search.command, varied, planned)
    return whole, sweep.rows(whole, outcomes)


def picture(search: Search) -> pictures.Picture:
    """The result against each parameter, darker the later the trial, and the best so far against the trials."""
    trials, best = [t for t in trials_of(search) if t.state.name == "COMPLETE"], best_of(search)
    names, result = list(search.ranges), search.goal[1]
    figure = Figure(figsize=(3.2 * (len(names) + 1), 2.8), layout="constrained")
    first, *others = figure.subplots(1, len(names) + 1, squeeze=False, sharey=True)[0]
    values, best_yet = [t.value for t in trials], min if search.goal[0] == "minimise" else max
    first.plot(range(1, len(values) + 1), [best_yet(values[: n + 1]) for n in range(len(values))], color="tab:orange")
    first.plot(range(1, len(values) + 1), values, "o", markersize=4)
    first.set(xlabel="trials that were done", ylabel=result)
    for name, axes in zip(names, others):
        r, drawn = search.ranges[name], [t.params[name] for t in trials]
        x = [value.partition("=")[2] for value in drawn] if isinstance(r, list) else drawn
        axes.scatter(x, values, c=range(len(x)), cmap="Blues", vmin=-len(x), s=18)
        axes.set(xlabel=name, xscale="log" if isinstance(r, Range) and r.log else axes.get_xscale())
    summary = (
        f"{len(trials)} trials were done, and trial {best.number} is the best: {result} {best.value:.5g}. Each point "
    )
    summary += "is a trial, darker the later it was drawn. The line is the best so far."
    return pictures.Picture(figure, summary, title=f"{search.goal[0]} {result} of {search.notebook}")


def main(options: Namespace, **how: Any) -> int:
    """What the command line does; its exit code."""
    search = plan(options.notebook, file=options.file, profile=options.profile, overrides=options.parameters)
    if options.no_wait:
        raise ParameterError("--no-wait: a search proposes by results, so it waits for them.")
    if options.prune and search.watched is None:
        raise ParameterError("--prune: the search file has no line `prune_high: metric` or `prune_low: metric`.")
    engines.need("optuna", "search")
    wanted = engines.resources(options.resources)
    engines.check(paths.outputs())
    engine = {"local": Local, "ray": on_ray.Ray, **engines.ENGINES}[options.on](wanted)
    print(f"the study is {paths.short(search.folder)}", flush=True)
    given = {"trials": options.trials, "prune": options.prune, "seed": options.seed}
    ended = go(search, engine=engine, on=options.on, wanted=wanted, how=how, **given)
    options.ran = True
    if trials_of(search):
        whole, rows = table(search)
        print(f"\n{sweep.text(whole, rows, show=[search.goal[1]] if best_of(search) else ())}\n")
        for path in sweep.write(whole, rows):
            print(path)
    if best := best_of(search):
        with files.replacing(search.folder / "trials.png") as partial:
            picture(search).save(partial)
        print(f"{search.folder / 'trials.png'}\n{report.write()}")
        print(f"best: trial {best.number}, {search.goal[1]} {best.value:.6g}; {search.job(best.params).resume}")
    if not ended:
        print("stopped; the same command goes on")
    return (0 if best else 1) if ended else 130


class Local:
    """Jobs as processes of this machine. They end with the one who started them, who asks them by SIGINT."""

    every, outlives = 0.3, False

    def __init__(self, wanted: dict[str, Any]):
        self.live: dict[str, subprocess.Popen] = {}

    def submit(self, orders: Sequence[dict[str, Any]], folder: Path) -> list[str]:
        ids = []
        for number, order in enumerate(orders):
            with (folder / f"{number}.log").open("ab") as log:
                pipes = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "start_new_session": True}
                process = subprocess.Popen([sys.executable, "-m", "lessons.search"], **pipes)
            process.stdin.write(json.dumps(order).encode())
            process.stdin.close()
            self.live[str(process.pid)] = process
            ids.append(str(process.pid))
        return ids

    def states(self) -> dict[str, str]:
        return {name: "running" for name, process in self.live.items() if process.poll() is None}

    def cancel(self, ids: Sequence[str]) -> None:
        for process in (self.live[name] for name in ids if name in self.live):
            process.send_signal(signal.SIGINT)


if __name__ == "__main__":
    engines.work(json.loads(sys.stdin.read()))
