"""A run is a folder: what the set-up cell checks and writes, and when the folder says that the run
is done.
"""

import json
import os
import random
import shutil

import papermill
import pytest
import small_notebooks
from small_notebooks import run_one, write

from nblib import files
from nbworkbook import run_record, runs


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.steady_workbook(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "given, said",
    [({"stepps": 3}, "did you mean 'steps'"), ({"steps": "3"}, "must be of type int")],
)
@pytest.mark.kernel
def test_plain_papermill_is_checked_by_the_set_up_cell(workbook, given, said):
    path = write("00_a", "from nbworkbook import runs\nrun = runs.begin('00_a', globals())")
    with pytest.raises(papermill.PapermillExecutionError) as caught:
        papermill.execute_notebook(path, workbook / "out.ipynb", given, progress_bar=False)
    assert caught.value.ename == "ParameterError" and said in caught.value.evalue
    assert not (workbook / "outputs").exists()


def test_by_hand_a_run_gets_its_own_folder_and_resume_drops_a_torn_line(workbook, monkeypatch):
    write("00_a", "1")
    run = runs.begin("00_a", {"steps": 4})
    assert run.parameters["steps"] == 4 and runs.status(run.dir) == "running"
    run.log({"step": 1})
    run.finish()
    assert runs.status(run.dir) == "done" and runs.is_done(run.dir)
    assert "page" not in runs.record(run.dir)  # no kernel, so no page
    with (run.dir / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 2, "lo')
    monkeypatch.setenv("NBLIB_RUN_DIR", str(run.dir))
    runs.begin("00_a", {}).log({"step": 2})
    assert (run.dir / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    monkeypatch.setenv("RANK", "1")
    other = runs.begin("00_a", {})
    other.log({"step": 3}), other.result(x=1), other.finish()
    assert (
        "3" not in (run.dir / "metrics.jsonl").read_text()
        and not (run.dir / "result.json").exists()
    )


def test_folders_of_the_same_second_sort_by_the_time_they_were_made(workbook):
    made = [runs.new_folder("00_a") for _ in range(50)]
    assert sorted(made) == made and len(set(made)) == 50


def test_tensorboard_gets_the_numbers_of_each_step(tmp_path):
    """Read back by TensorBoard itself, which is not among what this workbook installs."""
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed: no event files to read"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = runs.Run(tmp_path, {})
    for step in (1, 2):
        run.log(
            {
                "run": "ard",
                "step": step,
                "of": 2,
                "loss": 3.0 / step,
                "kl": float("nan"),
                "stopped": "Stop",
            }
        )
    run.log({"epoch": 1})  # no step, so no place on the axis
    run.finish()
    found = EventAccumulator(str(tmp_path / "events")).Reload()
    assert sorted(found.Tags()["scalars"]) == ["ard/kl", "ard/loss"]
    assert [(e.step, e.value) for e in found.Scalars("ard/loss")] == [(1, 3.0), (2, 1.5)]


def test_columns_are_as_wide_as_their_widest_cell():
    assert runs.columns([["a", "name"], ["long", "b"], ["", "c"]]) == "a     name\nlong  b\n      c"


@pytest.fixture
def finished(workbook):
    """A run that was executed, with something in each of its files."""
    set_up = "from nbworkbook import runs\nrun = runs.begin('00_a', globals())"
    end = "files.merge(run.dir / 'base.json', {'base': 'abc', 'content': '1'})\nrun.finish()"
    facts = "from nblib import files\nrun.log({'step': 1, 'loss': 0.5})\nrun.result(loss=0.5, words='a b')"
    write("00_a", set_up, facts, end)
    return run_one("00_a").folder


@pytest.mark.kernel
def test_a_flipped_bit_in_any_file_of_a_run_is_noticed_or_harmless(finished):
    sealed, whole = runs.record(finished)["sealed"], small_notebooks.files(finished)
    assert (
        set(sealed) == set(runs.SEALED)
        and runs.problem(finished) is None
        and runs.is_done(finished)
    )
    facts, draw = runs.record(finished), random.Random(15)
    for name in (*runs.SEALED, "run.json"):
        for _ in range(100):
            content = bytearray(whole[name])
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            (finished / name).write_bytes(content)
            if name in sealed:
                assert runs.problem(finished) == f"{name} changed since the run ended"
                assert runs.is_done(finished) == (name not in ("notebook.ipynb", "result.json"))
            elif runs.problem(finished) is None:  # harmless: it says the same
                kept = {key: value for key, value in runs.record(finished).items() if key in facts}
                assert kept | {"sha256": ""} == facts | {"sha256": ""}
            else:
                assert runs.status(finished) == "unreadable" and not runs.is_done(finished)
        (finished / name).write_bytes(whole[name])
    for name in runs.SEALED:
        (finished / name).unlink()
        assert runs.problem(finished) == f"{name} went away since the run ended"
        (finished / name).write_bytes(whole[name])


@pytest.mark.kernel
def test_a_run_of_old_without_hashes_counts_as_it_did(finished):
    facts = {
        k: v for k, v in runs.record(finished).items() if k not in ("sealed", "sha256", "inputs")
    }
    (finished / "run.json").write_text(json.dumps(facts))
    (finished / "result.json").write_text('{"loss": 0.25}')
    assert (
        runs.is_done(finished)
        and runs.problem(finished) is None
        and runs.status(finished) == "done"
    )


HOSTILE = {
    "empty": b"",
    "torn": b'{"status": "do',
    "not text": b"\xff\xfe\x00",
    "deep": b'{"a": ' * 100_000,
    "a list": b"[1, 2]",
    "a huge number": b'{"seconds": ' + b"9" * 5000 + b"}",
    "types": b'{"status": ["done"], "sealed": [1], "key": {}, "by": 3, "seconds": "x", "sha256": null}',
    "sealed elsewhere": b'{"status": "done", "sealed": {"/dev/zero": "x", "../x": "y"}}',
    "sealed oddly": b'{"status": "done", "sealed": "abc"}',
}


@pytest.mark.parametrize(
    "name", ["run.json", "result.json", "notebook.ipynb", "environment.json", "metrics.jsonl"]
)
def test_no_content_of_a_file_is_an_exception(tmp_path, name):
    for kind, content in [*HOSTILE.items(), ("a folder", None), ("a pipe", None), ("a loop", None)]:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        runs.note(tmp_path, {"status": "done", "key": "k"})
        path = tmp_path / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        elif kind == "a folder":
            path.mkdir()
        else:
            os.mkfifo(path) if kind == "a pipe" else path.symlink_to(path)
        problem, status = runs.problem(tmp_path), runs.status(tmp_path)
        assert problem is None or (
            problem.startswith("unreadable: ") and len(problem.splitlines()) == 1
        ), kind
        assert isinstance(status, str) and not runs.is_done(tmp_path)
        if kind not in ("types", "sealed elsewhere", "sealed oddly"):  # those are JSON objects
            read = name in ("run.json", "result.json", "environment.json")
            assert (problem is not None and str(path) in problem) == read, (kind, name)
            assert (status == "unreadable") == (name == "run.json"), (kind, name)


def test_a_damaged_record_is_set_aside_when_something_is_added(tmp_path, capsys):
    runs.note(tmp_path, {"status": "running", "key": "k"})
    runs.note(tmp_path, {"status": "failed", "seconds": float("inf")})
    assert runs.record(tmp_path)["key"] == "k" and runs.status(tmp_path) == "failed"
    (tmp_path / "run.json").write_text(
        (tmp_path / "run.json").read_text().replace("failed", "failee")
    )
    runs.note(tmp_path, {"status": "done"})
    assert "key" not in runs.record(tmp_path) and "set aside" in capsys.readouterr().out
    assert (tmp_path / "damaged-run.json").exists()


def test_history_is_whole_after_a_resume_and_its_later_lines_count(tmp_path):
    run = runs.Run(tmp_path, {})
    assert run.history() == []
    for step in (1, 2, 3):
        run.log({"run": "a", "step": step, "loss": float(step)})
    run.log({"run": "b", "step": 1, "loss": 9.0})
    run.log({"note": "no step"}), run.log({"note": "no step"})
    for step in (2, 3, 4):  # the last checkpoint was after step 1
        run.log({"run": "a", "step": step, "loss": 10.0 * step})
    assert [(r["step"], r["loss"]) for r in run.history("a")] == [
        (1, 1.0),
        (2, 20.0),
        (3, 30.0),
        (4, 40.0),
    ]
    assert run.history("b") == [{"run": "b", "step": 1, "loss": 9.0}] and run.history("c") == []
    assert run.history().count({"note": "no step"}) == 2 and len(run.history()) == 7
    for line in (b"\xff\n", b"[1]\n", b'{"step": []}\n', b"{\n"):
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line)
        with pytest.raises(files.Unreadable, match="line 2 is no record"):
            run.history()


def test_a_run_by_hand_is_sealed_too(workbook):
    write("00_a", "1")
    run = runs.begin("00_a", {})
    run.result(loss=1.0)
    run.finish()
    assert set(runs.record(run.dir)["sealed"]) == {
        "result.json",
        "parameters.yaml",
        "environment.json",
    }
    assert runs.problem(run.dir) is None
    files.write(run.dir / "result.json", "{}")
    assert runs.problem(run.dir) == "result.json changed since the run ended"


def test_a_stopped_training_makes_a_stopped_run(workbook):
    write("00_a", "1")
    run = runs.begin("00_a", {})
    assert runs.notice() == "" and runs.status(run.dir) == "running"
    run.stopped("main", 44, 600, "Stop"), run.stopped("other", 2, 3, "SIGINT")
    assert runs.notice() == "main was stopped at step 44 of 600, other was stopped at step 2 of 3"
    run.resumed("other"), run.resumed("never stopped")
    assert runs.record(run.dir)["stopped"] == {"main": {"step": 44, "of": 600, "by": "Stop"}}
    run.finish()
    assert (
        runs.status(run.dir) == "stopped, 44 of 600" and runs.record(run.dir)["status"] == "stopped"
    )
    assert runs.record(run.dir)["sentence"].startswith(
        "main was stopped at step 44 of 600. Run all"
    )
    run.resumed("main"), run.finish()
    assert (
        runs.status(run.dir) == "done"
        and "sentence" not in runs.record(run.dir)
        and runs.notice() == ""
    )


@pytest.mark.kernel
def test_no_run_with_a_stopped_training_is_done_whoever_says_so(finished):
    assert runs.is_done(finished)
    runs.note(finished, {"stopped": {"main": {"step": 44, "of": 600, "by": "Stop"}}})
    assert runs.status(finished) == "stopped, 44 of 600" and not runs.is_done(finished)
    for odd in ([1], "x", {"main": 3}, {"main": {}}):
        runs.note(finished, {"stopped": odd})
        assert runs.status(finished) == "done"


def test_the_headline_names_results_that_are_there(workbook, monkeypatch):
    write("00_a", "1")
    run = runs.begin("00_a", {})
    run.result(loss=1.0, lost=None)
    run.headline("loss", "lost")
    run.finish()
    assert runs.record(run.dir)["headline"] == ["loss", "lost"]
    run.headline("losss")
    for _ in ("by hand", "under the runner"):
        with pytest.raises(
            ValueError, match="run.headline: unknown result 'losss'; did you mean 'loss'"
        ):
            run.finish()
        monkeypatch.setenv("NBLIB_RUN_DIR", str(run.dir))


def test_a_run_by_hand_of_old_without_a_lock_was_killed(tmp_path):
    runs.note(tmp_path, {"status": "running", "by": "hand"})
    assert runs.status(tmp_path) == "killed"
    assert runs.hold(tmp_path) and runs.hold(tmp_path) and runs.status(tmp_path) == "running"
    pid = os.fork()
    if pid == 0:
        os._exit(len(run_record.HELD))
    assert os.waitpid(pid, 0)[1] == 0, "a fork keeps locks"
    runs.let_go(tmp_path)
    assert runs.status(tmp_path) == "killed"
