"""A sweep runs every combination once, says what is wrong before it starts, and its table holds
what the runs said.
"""

import csv
import json
import os
import re
import shlex
import signal

import pytest
import small_notebooks
from small_notebooks import nblib, write

from nblib import files, paths
from nbworkbook import jobs, parameters, report, runner, sweep
from nbworkbook.parameters import ParameterError

PARAMETERS = """rank: int = 2  # rank [1 .. 8]
lr: float = 1e-3  # rate [0 .. 1]
start: str = "svd"  # how to begin [svd, zeros]
sizes: list[int] = [1, 2]  # layer sizes [1 .. 9]
words: list[str] = []  # any words
steps: int = 3  # steps [1 .. 100]"""
BEGIN = "from nbworkbook import runs\nrun = runs.begin('10_lrc', globals())"
RESULT = "run.result(loss=1 / rank + len(sizes), diverged=float('nan'), rank=rank * 100, how=start, each=[1, 2])"
GRID = "rank: [2, 4]\nsteps: 7\nsizes: [[1, 2], [3]]\n"


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    folder = small_notebooks.steady_workbook(tmp_path, monkeypatch)
    monkeypatch.chdir(folder)
    return folder


def put(text, name="10_lrc.sweep.yaml"):
    path = paths.profiles() / name
    path.write_text(text)
    return str(path)


def main(capsys, *arguments):
    from nbworkbook import cli

    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_grid_is_the_product_in_order_on_top_of_the_profile_and_beneath_p(workbook):
    write("10_lrc", "1", parameters=PARAMETERS)
    put("steps: 50\nlr: 1e-2\n", "10_lrc.full.yaml")
    put("start: [zeros, svd]\nsizes: [[1, 2], [3]]\nlr: [1e-4, 1, 0.5]\nwords: [a, b]\n")
    planned = sweep.plan("10", profile="full", overrides=["rank=8", "lr=0.5"])
    expected = [(start, sizes) for start in ("zeros", "svd") for sizes in ([1, 2], [3])]
    assert [(job.parameters["start"], job.parameters["sizes"]) for job in planned.jobs] == expected
    same = {"rank": 8, "lr": 0.5, "words": ["a", "b"], "steps": 50}
    assert all(job.parameters | same == job.parameters for job in planned.jobs)
    assert (
        list(planned.varied) == ["start", "sizes"] and len({job.key for job in planned.jobs}) == 4
    )
    assert len(sweep.plan("10_lrc.ipynb").jobs) == 12


def test_every_job_is_the_one_that_its_resume_command_makes(workbook):
    write("10_lrc", "1", parameters=PARAMETERS)
    words = [["a, b", 'q"\\ é'], [" edge ", ""], ["plain"], [], ["1"]]
    put(f"words: {json.dumps(words)}\nlr: [1e-05, 0.1, 1]\nstart: [svd, zeros]\n")
    put("steps: 50\n", "10_lrc.full.yaml")
    planned = sweep.plan("10", profile="full").jobs
    assert len(planned) == 30 and [job.parameters["words"] for job in planned[::6]] == words
    for job in planned:
        _, command, name, *options = shlex.split(job.resume)
        assert (
            command == "run"
            and options[:2] == ["--profile", "full"]
            and set(options[2::2]) == {"-p"}
        )
        (again,) = jobs.plan([name], profile="full", overrides=options[3::2])
        assert (again.parameters, again.key) == (job.parameters, job.key)


@pytest.mark.parametrize(
    "text, options, said",
    [
        ("rnak: [2, 3]\n", "", "unknown parameter 'rnak'; did you mean 'rank'?"),
        (
            "rank: [2, 9, x]\nlr: 2\n",
            "",
            "'rank' is 9, allowed: 1 .. 8|'rank' is 'x', but it must be|'lr' is 2",
        ),
        (
            "rank: [2, 9]\n",
            "-p start=qr",
            "'rank' is 9, allowed|-p start=qr: 'start' is 'qr', allowed: svd, zeros",
        ),
        ("rank: [2, 3]\n", "-p stepz=1", "did you mean 'steps'"),
        ("rank: [2, 3]\n", "-p steps", "expected name=value"),
        ("rank: [2, 3]\n", "--profile gpu", "10_lrc: unknown profile 'gpu'"),
        ("rank: [2, 3]\n", "--profile sweep", "10_lrc: unknown profile 'sweep'"),
        ("rank: [2, 3]\n", "-f none.yaml", "Cannot read the parameter file none.yaml"),
        ("rank: [2, 3, 2]\n", "", "'rank' takes 2 twice"),
        ("lr: [1, 1.0]\n", "", "'lr' takes 1 twice"),
        ("rank: []\nlr: [0.1, 0.2]\n", "", "'rank' is [], but it must take one value or more"),
        (
            "rank: 3\n",
            "",
            "10_lrc.sweep.yaml: nothing varies; write `name: [a, b]`, or `name: [[a], [b]]`",
        ),
        ("rank: [3]\nsizes: [1, 2]\n", "", "nothing varies"),
        ("", "", "nothing varies"),
        ("rank: [2, 3]\n", "-p rank=2", "nothing varies"),
        ("sizes: [[1], 2]\n", "", "'sizes' is 2, but it must be of type list[int]"),
        ("sizes: [[1], [2, 99]]\n", "", "'sizes' is [2, 99], allowed: 1 .. 9"),
        ("sizes: [[[1]], [2]]\n", "", "line 1: the mapping must be flat"),
        ("sizes: &a [*a, [1]]\n", "", "line 1: a value is what it looks like: no tag"),
        ("rank: [{a: 1}]\n", "", "line 1: the mapping must be flat"),
        ("rank: [2, [3]]\n", "", "'rank' is [3], but it must be of type int"),
        ("rank: [2, 3]\nrank: 4\n", "", "'rank' is given twice"),
        ("rank: [\n", "", "10_lrc.sweep.yaml, line 2"),
        (
            f"steps: {list(range(1, 101))}\nsizes: {[[i] for i in range(1, 10)]}\nrank: [1, 2]\n",
            "",
            "1800 combin",
        ),
        (
            None,
            "",
            "10_lrc has no sweep file parameters/10_lrc.sweep.yaml; write one, or name another with -f",
        ),
    ],
)
def test_all_that_is_wrong_is_said_before_anything_starts(workbook, capsys, text, options, said):
    write("10_lrc", "1", parameters=PARAMETERS)
    if text is not None:
        put(text)
    code, _, err = main(capsys, "sweep", "10", *options.split())
    assert code == 2 and "Traceback" not in err and not (workbook / "outputs").exists()
    assert len(err.splitlines()) == len(said.split("|")), err
    for line, part in zip(err.splitlines(), said.split("|"), strict=True):
        assert line.startswith("nblib: ") and part in line


@pytest.mark.parametrize("given", ["", ",", "a,,b"])
def test_names_to_show_are_names(given, capsys):
    from nbworkbook import cli

    with pytest.raises(SystemExit) as leaving:
        cli.main(["sweep", "10", "--show", given])
    assert leaving.value.code == 2 and "is not a list of names" in capsys.readouterr().err


def test_a_sweep_file_is_no_profile(workbook, capsys):
    write("10_lrc", "1", parameters=PARAMETERS)
    put("rank: 3\n", "10_lrc.gpu.yaml"), put(GRID), put(GRID, "10_lrc.rank.sweep.yaml")
    assert jobs.profiles_of("10_lrc") == ["gpu"]
    out = main(capsys, "list")[1]
    assert (
        "profiles: gpu;  sweep: parameters/10_lrc.rank.sweep.yaml;  sweep: parameters/10_lrc.sweep.yaml;"
        in out
    )
    for profile in ("sweep", "rank", "rank.sweep"):
        with pytest.raises(ParameterError, match="unknown profile"):
            jobs.plan(["10"], profile=profile)
    # and it is not mistaken for one with -f
    with pytest.raises(ParameterError, match="must be flat"):
        jobs.plan(["10"], files=[put(GRID)])


@pytest.mark.kernel
def test_real_runs_the_table_its_files_and_nothing_twice(workbook, capsys):
    fails = "if (rank, sizes) == (2, [3]) and not open('../mended').read():\n    1 / 0"
    write("10_lrc", BEGIN, RESULT, fails, parameters=PARAMETERS)
    (workbook / "mended").write_text("")
    put(GRID)
    (by_hand,) = runner.run(jobs.plan(["10"], overrides=["sizes=1,2", "steps=7"]))
    listed = main(capsys, "sweep", "10", "--list")[1].splitlines()[-5:]
    expected = [["rank", "sizes", "done in"], ["2", "[1, 2]", by_hand.folder.name], ["2", "[3]"]]
    assert [re.split(r"\s{2,}", line) for line in listed] == [
        *expected,
        ["4", "[1, 2]"],
        ["4", "[3]"],
    ]
    assert len(list((workbook / "outputs" / "10_lrc").iterdir())) == 1, "--list ran something"

    code, out, err = main(capsys, "sweep", "10")
    assert code == 1 and "cell 5 (`if (rank, sizes)" in err and "ZeroDivisionError" in err
    assert "nblib run 10_lrc -p rank=2 -p steps=7 -p 'sizes=[3]'" in err
    said = [line for line in out.splitlines() if line.startswith("[10_lrc]") and "cell" not in line]
    ended = [
        said.pop(n)
        for n in reversed(range(len(said)))
        if re.match(r"\[10_lrc\] (done|failed), ", said[n])
    ][::-1]
    assert [line.split(";")[1].split(",")[0] for line in ended] == [
        f" {n} of 4 runs" for n in (2, 3, 4)
    ]
    marks = ["1 of 4: rank 2, sizes [1, 2]: done already", "2 of 4: rank 2, sizes [3]: runs in"]
    marks += ["3 of 4: rank 4, sizes [1, 2]: runs in", "4 of 4: rank 4, sizes [3]: runs in"]
    assert len(said) == len(marks) and all(mark in line for mark, line in zip(marks, said))
    found = table_of(out)
    assert found[0] == [
        "rank",
        "sizes",
        "status",
        "seconds",
        "loss",
        "diverged",
        "result.rank",
        "run",
    ]
    assert [line[:3] + line[4:7] for line in found[1:] if len(line) == 8] == [
        ["2", "[1, 2]", "done", "2.5", "nan", "200"],
        ["4", "[1, 2]", "done", "2.25", "nan", "400"],
        ["4", "[3]", "done", "1.25", "nan", "400"],
    ]
    assert found[1][-1] == by_hand.folder.name and float(found[1][3]) > 0, (
        "a skipped run has its own seconds"
    )
    assert found[2][:3] == ["2", "[3]", "failed"] and len(found[2]) == 5, "a failed run has numbers"
    assert "--show a,b shows any of: loss, diverged, rank, how" in out

    (workbook / "mended").write_text("now")
    code, out, err = main(capsys, "sweep", "10", "--show", "how, los,loss")
    assert (
        (code, err) == (0, "") and out.count("done already") == 3 and out.count("resumes in") == 1
    )
    assert table_of(out)[0] == ["rank", "sizes", "status", "seconds", "how", "los", "loss", "run"]
    assert table_of(out)[2][-2] == "1.5" and "unknown result 'los'; did you mean 'loss'?" in out
    assert len(list((workbook / "outputs" / "10_lrc").glob("*/run.json"))) == 4, (
        "something ran in a folder of its own"
    )
    assert "10_lrc" in report.write().read_text() and not list(
        (workbook / "outputs").rglob("*.partial")
    )
    key = files.read_json(workbook / "outputs" / "10_lrc" / found[2][-1] / "run.json")["key"]
    assert jobs.plan(["10"], overrides=["rank=2", "sizes=3", "steps=7"])[0].key == key

    first, second = sorted((workbook / "outputs" / "10_lrc").glob("sweep-*.json"))
    assert re.fullmatch(r"sweep-\d{8}-\d{6}(-\d+)?", second.stem)
    for path, failed in ((first, 1), (second, 0)):
        kept = json.loads(path.read_text(), parse_constant=pytest.fail)
        assert (
            kept["varied"] == {"rank": [2, 4], "sizes": [[1, 2], [3]]}
            and str(workbook) not in path.read_text()
        )
        assert kept["fixed"] == {"lr": 1e-3, "start": "svd", "words": [], "steps": 7}
        assert kept["environment"]["packages"]["torch"] and not any(
            "environment" in row for row in kept["rows"]
        )
        assert [row["status"] for row in kept["rows"]].count("failed") == failed
        assert kept["rows"][0]["results"]["each"] == [1, 2] and "sentence" not in kept["rows"][0]
        assert bool(failed) == ("ZeroDivisionError" in kept["rows"][1].get("sentence", ""))
        lines = list(csv.DictReader(path.with_suffix(".csv").open()))
        assert [line["rank"] for line in lines] == ["2", "2", "4", "4"] and lines[1][
            "sizes"
        ] == "[3]"
        for line, row in zip(lines, kept["rows"], strict=True):
            assert line["run"] == row["run"] and line["how"] == row["results"].get("how", "")
            assert float(line["loss"] or -1) == row["results"].get("loss", -1)
    assert (
        shlex.split(kept["command"]) == "nblib sweep 10_lrc -f parameters/10_lrc.sweep.yaml".split()
    )


@pytest.mark.kernel
def test_an_environment_that_differs_is_kept_with_its_run_and_a_digit_is_not_lost(workbook):
    write("10_lrc", "1", parameters=PARAMETERS)
    put("rank: [1, 2, 3]\n")
    planned, outcomes = sweep.plan("10"), []
    for number, commit in enumerate("aab"):
        folder = files.make_folder(workbook / "outputs" / "10_lrc" / f"run-{number}")
        files.merge(folder / "environment.json", {"commit": commit})
        files.merge(
            folder / "result.json", {"loss": 1 / 3, "ok": True} | {f"x{n}": n for n in range(20)}
        )
        outcomes.append(runner.Outcome("10_lrc", "done", 1.0, folder))
    rows = sweep.rows(planned, outcomes)
    paths = [sweep.write(planned, rows) for _ in range(3)]
    assert len(set(paths)) == 3, "a table was written over another one"
    kept = json.loads(paths[2][0].read_text())
    assert kept["environment"] == {"commit": "a"}
    assert [row.get("environment") for row in kept["rows"]] == [None, None, {"commit": "b"}]
    lines = list(csv.DictReader(paths[0][1].open()))
    assert float(lines[0]["loss"]) == 1 / 3 and lines[0]["x19"] == "19" and lines[0]["ok"] == "true"
    head = sweep.text(planned, rows).splitlines()[0].split()
    assert head == [
        "rank",
        "status",
        "seconds",
        "loss",
        *(f"x{n}" for n in range(sweep.FEW - 1)),
        "run",
    ]


@pytest.mark.parametrize("file", ["run.json", "result.json", "environment.json"])
@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b'{"loss": 1', b"[1]", b"[" * 100_000, b"1" * 5000, None]
)
def test_one_bad_file_is_one_bad_row(workbook, file, content):
    write("10_lrc", "1", parameters=PARAMETERS)
    put("rank: [1, 2, 3]\n")
    planned, outcomes = sweep.plan("10"), []
    for number in range(3):
        folder = files.make_folder(workbook / "outputs" / "10_lrc" / f"run-{number}")
        for name, facts in {
            "run": {"seconds": 5},
            "result": {"loss": number},
            "environment": {"commit": "a"},
        }.items():
            files.merge(folder / f"{name}.json", facts)
        outcomes.append(runner.Outcome("10_lrc", ("skipped", "done")[number % 2], 1.0, folder))
    bad = outcomes[1].folder / file
    bad.unlink()
    bad.mkdir() if content is None else bad.write_bytes(content)
    rows = sweep.rows(planned, outcomes)
    assert [row["status"] for row in rows] == ["done", "unreadable", "done"]
    assert [row["results"] for row in rows] == [{"loss": 0}, {}, {"loss": 2}]
    assert file in rows[1]["sentence"] and len(rows[1]["sentence"].splitlines()) == 1
    table = sweep.text(planned, rows)
    assert "unreadable" in table and f"run-1: {rows[1]['sentence']}" in table.splitlines()
    assert "unknown result 'no'" in sweep.text(planned, rows, show=["no"])
    kept = json.loads(sweep.write(planned, rows)[0].read_text())
    assert kept["rows"][1]["sentence"] == rows[1]["sentence"] and kept["environment"] == {
        "commit": "a"
    }
    if file == "environment.json":  # a failed run stays one, and says both
        failed = outcomes[1]._replace(status="failed", sentence="it failed")
        row = sweep.rows(planned, [outcomes[0], failed, outcomes[2]])[1]
        assert (
            row["status"] == "failed"
            and row["sentence"].startswith("it failed; ")
            and file in row["sentence"]
        )


@pytest.mark.kernel
def test_force_runs_again_in_fresh_folders(workbook, capsys):
    write("10_lrc", "1", parameters=PARAMETERS)
    put("rank: [1, 2]\n")
    for options, count in (([], 2), ([], 2), (["--force"], 4)):
        assert main(capsys, "sweep", "10", *options)[0] == 0
        assert len(list((workbook / "outputs" / "10_lrc").glob("*/run.json"))) == count


@pytest.mark.kernel
def test_ctrl_c_ends_the_run_in_hand_and_the_sweep_and_keeps_what_is_done(workbook):
    waits = "import time\ntry:\n    print('here', rank, flush=True)\n    time.sleep(60 if rank == 2 else 0)\n"
    waits += "except KeyboardInterrupt:\n    print('saved', flush=True)"
    write("10_lrc", BEGIN, "run.result(loss=rank)", waits, "print('after')", parameters=PARAMETERS)
    put("rank: [1, 2, 3]\n")
    process = small_notebooks.start("sweep", "10", "--verbose")
    for line in process.stdout:
        if "here 2" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (
        process.returncode == 130
        and "Traceback" not in err
        and "saved" in out
        and "after" not in out
    )
    assert "here 3" not in out and "10_lrc was stopped in cell 5" in err
    assert [line[1] for line in table_of(out)[1:]] == ["done", "stopped", "not run"]
    (path,) = (workbook / "outputs" / "10_lrc").glob("sweep-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["results"] for row in rows] == [{"loss": 1}, {}, {}] and rows[2]["run"] == ""
    code, out, _ = nblib("sweep", "10", "--list")
    assert code == 0 and [len(line.split()) for line in out.splitlines()[-3:]] == [2, 1, 1]


def test_no_place_to_write_is_said_before_the_first_run(workbook, monkeypatch, capsys):
    write("10_lrc", "1", parameters=PARAMETERS)
    put("rank: [1, 2, 3]\n")
    (workbook / "a_file").write_text("earlier results")
    monkeypatch.setenv("NBLIB_OUTPUTS", str(workbook / "a_file"))
    code, out, err = main(capsys, "sweep", "10")
    assert (
        code == 2 and out == "" and err.startswith("nblib: Cannot ") and len(err.splitlines()) == 1
    )


def test_assignments_say_every_value(workbook):
    known = parameters.declared(write("10_lrc", "1", parameters=PARAMETERS))
    for name, value in {
        "lr": 1e-7,
        "words": ["a,b", "", "[x]", "'"],
        "start": "a=b ",
        "sizes": [],
    }.items():
        assert parameters.parse_assignment(parameters.assignment(name, value), known) == (
            name,
            value,
        )
    assert parameters.parse_assignment("words=[1, a]", known) == ("words", ["1", "a"])


def table_of(out):
    """The table's lines, cut where its head begins columns (two spaces apart)."""
    lines = out.splitlines()
    start = next(n for n, line in enumerate(lines) if re.match(r"\w+  .*status  ", line))
    end = next(n for n, line in enumerate(lines) if n > start and not line)
    return [re.split(r"\s{2,}", line.strip()) for line in lines[start:end]]
