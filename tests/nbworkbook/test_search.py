"""A search finds the best of a grid in a third of its runs, stops the hopeless, and goes on after
Ctrl-C and kills.
"""

import itertools
import json
import os
import re
import signal
import sys
import time

import pytest
import small_notebooks
from small_notebooks import nblib, start, write

from nblib import files, paths
from nbworkbook import report, runs, search
from nbworkbook.parameters import ParameterError

optuna = pytest.importorskip(
    "optuna", reason="optuna is not installed: pip install 'nblib[search]'"
)

PARAMETERS = """lr: float = 1e-3  # rate [0 .. 1]
rank: int = 4  # rank [1 .. 64]
start: str = "svd"  # how to begin [svd, zeros]
sizes: list[int] = [1]  # layer sizes [1 .. 9]
steps: int = 8  # steps [1 .. 1000]
token: str = ""  # access [secret]"""
FILE = """minimise: loss
prune_high: loss
lr: 1e-4 .. 1e-1 log
rank: 2 .. 16
start: [svd, zeros]
sizes: [[1, 2], [3]]
steps: 8
"""


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    folder = small_notebooks.steady_workbook(tmp_path, monkeypatch)
    monkeypatch.chdir(folder)
    write("10_lrc", "1", parameters=PARAMETERS)
    return folder


def put(text: str = FILE) -> str:
    path = paths.profiles() / "10_lrc.search.yaml"
    path.write_text(text)
    return str(path)


# ------------------------------------------------------------------ what is searched


def test_a_file_says_what_varies_what_is_fixed_and_what_counts(workbook):
    put()
    plan = search.plan("10", overrides=["start=svd"])
    assert (plan.goal, plan.watched) == (("minimise", "loss"), ("prune_high", "loss"))
    assert plan.ranges == {
        "lr": search.Range(1e-4, 0.1, True, False),
        "rank": search.Range(2, 16, False, True),
        "sizes": ["sizes=[1, 2]", "sizes=[3]"],
    }
    job = plan.job({"lr": 0.00123456, "rank": 3, "sizes": "sizes=[3]"})
    expected = {"lr": 0.001235, "rank": 3, "sizes": [3], "start": "svd", "steps": 8, "token": ""}
    assert job.parameters == expected


@pytest.mark.parametrize(
    "before, after, said",
    [
        ("minimise: loss\n", "", "exactly one of minimise and maximise is written, not 0"),
        ("minimise: loss\n", "minimise: loss\nmaximise: loss\n", "is written, not 2"),
        ("minimise: loss", "minimise: [loss]", "minimise takes the name of a number"),
        (
            "prune_high: loss",
            "prune_high: loss\nprune_low: loss",
            "at most one of prune_high and prune_low",
        ),
        ("rank: 2", "rnak: 2", "unknown parameter 'rnak'; did you mean 'rank'?"),
        ("rank: 2 .. 16", "rank: 2 .. 128", "'rank' is 128, allowed: 1 .. 64"),
        ("rank: 2 .. 16", "rank: 2.5 .. 16", "'rank' is '2.5', but it must be of type int"),
        ("rank: 2 .. 16", "rank: 16 .. 2", "a range is `low .. high`"),
        ("rank: 2 .. 16", "rank: 2 .. 16 lin", "a range is `low .. high`"),
        ("lr: 1e-4", "lr: 0", "above 0 with log"),
        ("lr: 1e-4", "lr: x", "'lr' is 'x', but it must be of type float"),
        ("start: [svd, zeros]", "start: [svd]", "two different values or more"),
        ("start: [svd, zeros]", "start: [svd, svd]", "two different values or more"),
        ("start: [svd, zeros]", "start: [svd, ones]", "'start' is 'ones', allowed: svd, zeros"),
        ("steps: 8", "steps: many", "'steps' is 'many', but it must be of type int"),
        (FILE.partition("lr")[2], ": 0.1", "nothing varies"),
        ("steps: 8", 'token: ["@HOME", "@PATH"]', "'token' is secret and cannot vary"),
    ],
)
def test_bad_files_end_in_a_sentence(workbook, before, after, said):
    assert before in FILE
    put(FILE.replace(before, after))
    with pytest.raises(ParameterError, match=re.escape(said)):
        search.plan("10")


def test_bad_commands_end_in_a_sentence_and_start_nothing(workbook, monkeypatch, capsys):
    from nbworkbook import cli

    def said(*arguments):
        assert cli.main(["sweep", "10", "--trials", "3", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "has no search file parameters/10_lrc.search.yaml" in said()
    put()
    assert "unknown resource 'cpu'; did you mean 'cpus'?" in said("--resources", "cpu=1")
    assert "a search proposes by results" in said("--no-wait")
    put(FILE.replace("prune_high: loss\n", ""))
    assert "--prune: the search file has no line" in said("--prune")
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "optuna is not installed; pip install 'nblib[search]'" in said()
    assert list((workbook / "outputs").glob("*/*")) == []


def test_the_study_is_another_one_when_what_it_measures_is_another(workbook):
    put()
    first = search.plan("10").folder
    assert search.plan("10").folder == first
    put(FILE + "# a comment\n")
    assert search.plan("10").folder == first
    others = [
        search.plan("10", overrides=["rank=3"]).folder,
        search.plan("10", overrides=["steps=9"]).folder,
    ]
    put(FILE.replace("2 .. 16", "2 .. 17"))
    others.append(search.plan("10").folder)
    write("10_lrc", "2", parameters=PARAMETERS)
    others.append(search.plan("10").folder)
    assert len({first, *others}) == 5


# ------------------------------------------------------------------ the study, on stored runs


class Stored:
    """An engine whose runs are looked up: each is there, with its curve, when it is asked for."""

    every, outlives = 0.0, True

    def __init__(self, loss, steps: int = 9, dies_after: int = 10**9):
        self.loss, self.steps, self.left, self.asked = loss, steps, dies_after, []

    def submit(self, orders, folder):
        for order in orders:
            if not self.left:
                raise ZeroDivisionError("killed")
            self.left -= 1
            given = dict(re.findall(r"(\w+)=(\S+)", order["command"].replace("'", "")))
            self.asked.append(given)
            place = runs.new_folder("10_lrc")
            value = self.loss(given)
            runs.note(
                place, {k: order[k] for k in ("key", "inputs")} | {"status": "done", "seconds": 1.0}
            )
            files.write(place / "result.json", json.dumps({"loss": value}))
            source = json.loads((paths.notebooks() / "10_lrc.ipynb").read_text())
            for cell in source["cells"]:
                cell.update({"execution_count": 1} if cell["cell_type"] == "code" else {})
            files.write(place / "notebook.ipynb", json.dumps(source))
            runs.note(place, {"sealed": runs.seal(place)})
        return [str(len(self.asked))] * len(orders)

    def states(self):
        return {}

    def cancel(self, ids):
        pass


GRID = {"rank": list(range(1, 13)), "lr": [0.0, 0.1, 0.2, 0.3, 0.4], "start": ["svd", "zeros"]}
GRID_FILE = "minimise: loss\nrank: 1 .. 12\nlr: [0.0, 0.1, 0.2, 0.3, 0.4]\nstart: [svd, zeros]\n"


def bowl(given) -> float:
    return (
        (int(given["rank"]) - 8) ** 2 / 10
        + 20 * (float(given["lr"]) - 0.3) ** 2
        + (given["start"] == "zeros")
    )


def searched(engine, *, trials: int, seed: int = 1) -> tuple[search.Search, bool]:
    plan = search.plan("10")
    how = {"force": False, "timeout": None, "detail": "some"}
    return plan, search.go(
        plan, trials=trials, prune=False, seed=seed, engine=engine, on="stored", wanted={}, how=how
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_best_of_a_stored_grid_is_found_in_a_third_of_its_runs(workbook, seed):
    put(GRID_FILE)
    every = [dict(zip(GRID, each)) for each in itertools.product(*GRID.values())]
    best = min(map(bowl, every))
    assert best == bowl({"rank": 8, "lr": 0.3, "start": "svd"}) and len(every) == 120
    engine = Stored(bowl)
    plan, ended = searched(engine, trials=40, seed=seed)
    assert ended and len(engine.asked) == len({json.dumps(each) for each in engine.asked}) == 40, (
        "a run was made twice"
    )
    first = (
        [bowl(each) for each in engine.asked].index(best) + 1
        if best in map(bowl, engine.asked)
        else None
    )
    print(f"seed {seed}: the best of {len(every)} was run {first} of 40")
    assert first and search.best_of(plan).value == pytest.approx(best)


def test_a_study_that_was_killed_proposes_what_it_would_have(workbook):
    put(GRID_FILE)
    straight = Stored(bowl)
    searched(straight, trials=12)
    for place in [*(workbook / "outputs" / "10_lrc").glob("search-*")]:
        place.rename(workbook / "aside")
    parts = []
    for after in (0, 3, 1, 100):  # the trial in hand has its parameters, and goes on with them
        parts.append(Stored(bowl, dies_after=after))
        if after < 100:
            with pytest.raises(ZeroDivisionError):
                searched(parts[-1], trials=12)
            with next((workbook / "outputs" / "10_lrc").glob("search-*/study.log")).open(
                "ab"
            ) as log:
                log.write(b'{"op_code": 5, "wor')  # a kill in the middle of a line
    plan, ended = searched(parts[-1], trials=12)
    assert ended and [each for part in parts for each in part.asked] == straight.asked
    assert [trial.state.name for trial in search.trials_of(plan)] == ["COMPLETE"] * 12
    again = Stored(bowl)
    assert searched(again, trials=12)[1] and again.asked == []


def test_when_nothing_new_is_left_the_search_ends(workbook, capsys):
    put("maximise: loss\nstart: [svd, zeros]\nrank: 1 .. 2\n")
    engine = Stored(lambda given: float(given["rank"]))
    plan, ended = searched(engine, trials=9)
    assert (
        ended
        and len(engine.asked) == 4
        and "the ranges hold nothing new" in capsys.readouterr().out
    )
    assert search.best_of(plan).value == 2.0


def test_a_result_that_is_no_number_is_a_failed_trial_and_not_the_best(workbook, capsys):
    put(GRID_FILE)
    values = itertools.chain([float("nan"), 0.5, "inf"], itertools.repeat(2.0))
    engine = Stored(lambda given: next(values))
    plan, _ = searched(engine, trials=5)
    assert [t.state.name for t in search.trials_of(plan)] == [
        "FAIL",
        "COMPLETE",
        "FAIL",
        "COMPLETE",
        "COMPLETE",
    ]
    assert (
        search.best_of(plan).value == 0.5 and capsys.readouterr().out.count("no number 'loss'") == 2
    )
    whole, rows = search.table(plan)
    assert [row["status"] for row in rows] == ["failed", "done", "failed", "done", "done"]
    assert search.picture(plan).summary.startswith(
        "3 trials were done, and trial 1 is the best: loss 0.5"
    )


# ------------------------------------------------------------------ real runs

BODY = """import time
from nbworkbook import runs
run = runs.begin('10_lrc', globals())
done = [record['step'] for record in run.history()]
for step in range(len(done) + 1, steps + 1):
    run.log({'step': step, 'of': steps, 'loss': rank + 1 / step})
    time.sleep(0.3 if rank < 20 else 1)
run.result(loss=rank + 1 / steps)"""


@pytest.mark.slow
@pytest.mark.kernel
def test_ctrl_c_and_a_kill_lose_nothing_and_the_hopeless_are_stopped(tmp_path, monkeypatch):
    workbook = small_notebooks.move_workbook(tmp_path, monkeypatch)
    monkeypatch.chdir(workbook)
    write("10_lrc", BODY, parameters=PARAMETERS)
    put("minimise: loss\nprune_high: loss\nrank: [1, 2, 3, 40, 50, 60]\nsteps: 8\n")
    ask = ["sweep", "10", "--trials", "6", "--prune", "--resources", "at_once=2"]
    homes = workbook / "outputs" / "10_lrc"

    def two_began(logged: int) -> bool:
        return (
            sum(
                len(path.read_text().splitlines()) >= logged
                for path in homes.glob("*/metrics.jsonl")
            )
            >= 2
        )

    process = start(*ask)
    until(lambda: two_began(2))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on" in out, (out, err)
    states = {place.parent.name: runs.status(place.parent) for place in homes.glob("*/run.json")}
    assert len(states) == 2 and set(states.values()) <= {"stopped", "done"}, states

    process = start(*ask)
    until(
        lambda: all(
            runs.record(homes / name)["attempts"] == 2
            for name in states
            if states[name] == "stopped"
        )
    )
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    code, out, err = nblib(*ask)
    assert code == 0, (out, err)
    plan = search.plan("10")
    trials = search.trials_of(plan)
    assert (
        sorted(trial.params["rank"] for trial in trials) == sorted(plan.ranges["rank"])
        and len(trials) == 6
    )
    assert len([*homes.glob("*/run.json")]) == 6, "a run was made twice"
    ended = {int(trial.params["rank"][5:]): trial.state.name for trial in trials}
    assert (
        [ended[rank] for rank in (1, 2, 3)] == ["COMPLETE"] * 3
        and "best: trial" in out
        and "rank=1" in out
    )
    assert "PRUNED" in ended.values(), ended
    pruned = [homes / t.user_attrs["run"] for t in trials if t.state.name == "PRUNED"]
    assert all(
        runs.status(place) == "stopped" and len(runs.Run(place, {}).history()) < 8
        for place in pruned
    )
    assert (
        plan.folder / "trials.png"
    ).stat().st_size > 1000 and "sweep-" in report.write().read_text()


def until(condition, seconds: float = 90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)
