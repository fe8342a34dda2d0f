"""A person's kernel: real ones that believe they are in JupyterLab, killed, run again and continued."""

import json
import os
import signal
import threading
import time

import nbformat
import papermill
import pytest
import small_notebooks
from hand_kernels import folders, kernel
from small_notebooks import nblib, write

from nblib.run import by_hand, jobs, runner, runs

SET_UP = "from nblib.run import runs, show\nrun = runs.begin('00_a', globals())"
# A training that leaves a checkpoint every two steps; PACE makes it slow enough to be killed in its middle.
TRAIN = """import os, time, torch
from nblib import models, runtime, text, train
runtime.seed_all(0)
model = models.tiny(64, hidden=16, layers=1, heads=2)
stream = torch.randint(0, 64, (4000,), generator=torch.Generator().manual_seed(1))
batches = text.Batches(stream, rows=2, length=16)
machine = runtime.Machine(torch.device("cpu"), "fp32", "a test")
options = dict(checkpoints=run.checkpoints / "main", checkpoint_every=2, log=run.log, log_every=1, machine=machine)
records = []
for record in train.steps(model, batches, train.adamw(model, lr=1e-2), total=steps, records=records, **options):
    time.sleep(float(os.environ.get("PACE", 0)))
"""
RESULT = "run.result(loss=records[-1]['loss'], losses=[r['loss'] for r in records])\nrun.headline('loss')"
TWELVE = small_notebooks.PARAMETERS.replace("steps: int = 3", "steps: int = 12")


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # an input of a run, here and in the kernels
    return small_notebooks.move_workbook(tmp_path, monkeypatch)


def result(folder) -> dict:
    return json.loads((folder / "result.json").read_text())


def lines(held, start: str) -> list[str]:
    return [text for text in held.shown() if text.startswith(start)]


def notebook(folder) -> dict:
    executed = nbformat.read(folder / "notebook.ipynb", 4)
    nbformat.validate(executed)
    return {cell.id: cell for cell in executed.cells}


@pytest.mark.kernel
@pytest.mark.slow
def test_killed_in_the_middle_of_a_training_run_all_gives_the_straight_run(workbook):
    write("00_a", SET_UP, TRAIN, RESULT, "run.finish()", parameters=TWELVE)
    with kernel(PACE="0.2") as killed:
        half = workbook / "outputs/00_a"
        assert killed.run_all("00_a", until=lambda: list(half.glob("*/checkpoints/main/step-00000004")))[-1] == ""
        (folder,) = folders("00_a")
        assert runs.status(folder) == "running"
        killed.kill()
    assert runs.status(folder) == "killed" and not (folder / "result.json").exists()
    code, out, _ = nblib("list")
    assert code == 0 and f"last run: killed {folder.name[:15]}" in out
    with kernel() as fresh:
        assert set(fresh.run_all("00_a")) == {"ok"}
        (line,) = lines(fresh, "continues run")
        assert line.startswith(f"continues run {folder.name} from step ") and line.endswith("(killed)")
        assert folders("00_a") == [folder] and runs.status(folder) == "done"
        assert runs.is_done(folder) and runs.problem(folder) is None and runs.record(folder)["attempts"] == 2
        assert set(fresh.run_all("00_a")) == {"ok"}  # the newest is done: this is another run, and the straight one
        _, straight = folders("00_a")
        assert result(folder) == result(straight) and runs.is_done(straight) and len(lines(fresh, "continues")) == 1
        job, facts = jobs.plan(["00"])[0], runs.record(straight)
        assert jobs.why(facts["inputs"], job.inputs) == "" and runner.done(job) is None


@pytest.mark.kernel
@pytest.mark.slow
def test_how_cells_end_is_how_the_run_stands(workbook):
    path = write(
        "00_a",
        SET_UP,
        "print('x' * 7)\nshow.bars({'a': 1}, x='x', summary='a')",
        "1 / 0",
        "import time\ntime.sleep(60)",
        "run.finish()",
    )
    with kernel() as page:
        assert page.run_all("00_a") == ["ok", "ok", "ok", "error"]
        (folder,) = folders("00_a")
        assert runs.status(folder) == "failed in cell 4" and not runs.is_done(folder)
        cells = notebook(folder)
        assert [o["output_type"] for o in cells["code-2"].outputs] == ["stream", "execute_result"]
        assert cells["code-2"].outputs[1].data["image/png"].startswith("iVBOR")
        assert cells["code-3"].outputs[0].ename == "ZeroDivisionError" and cells["code-4"].execution_count is None
        assert cells["code-0"].execution_count == 1 and cells["title"].cell_type == "markdown"
        assert page.run("1", "code-3") == "ok" and runs.status(folder) == "running"
        threading.Timer(1, os.kill, (page.pid, signal.SIGINT)).start()
        assert page.run("import time\ntime.sleep(60)", "code-4") == "error"
        assert runs.status(folder) == "failed in cell 5"
        assert page.run("2", "code-2") == "ok" and runs.status(folder) == "running"
        assert page.run("run.finish()", "code-5") == "ok"
        assert runs.status(folder) == "failed in cell 5", "a cell that failed was not run again"
        assert page.run("async def wait(): pass\nawait wait()", "code-4") == "ok" and runs.status(folder) == "done"
        assert page.run("oops", "not-in-the-file") == "error" and runs.status(folder) == "failed in a new cell"
        assert page.run("3", "also-new") == "ok" and runs.status(folder) == "done"
        time.sleep(11)  # what runs after the end is written soon
        cells = notebook(folder)
        assert runs.is_done(folder) and runs.problem(folder) is None
        assert cells["also-new"].outputs[0].data["text/plain"] == "3" and "not-in-the-file" not in cells
        assert cells["code-3"].source == "1" and list(cells)[:3] == ["title", "code-0", "code-1"]
        page.run("import os\nif os.fork() == 0: time.sleep(30); os._exit(0)")
        page.kill()
    assert runs.status(folder) == "done" and 0 < runs.record(folder)["seconds"] < 60
    assert path.read_text().count("ZeroDivisionError") == 0


@pytest.mark.kernel
def test_a_checkpoint_that_is_half_deleted_is_not_the_last_one(tmp_path):
    for age, name in enumerate(("other/step-00000050", *(f"main/step-0000000{step}" for step in (2, 4, 6)))):
        (place := tmp_path / "checkpoints" / name).mkdir(parents=True)
        for file in ("manifest.json", "training.pt"):
            (place / file).touch()
        os.utime(place / "manifest.json", (100 + age, 100 + age))
    (tmp_path / "checkpoints/main/step-00000002/training.pt").unlink()  # the folder is the newest now
    assert by_hand._last_step(tmp_path) == 6
    (tmp_path / "checkpoints/main/step-00000006/manifest.json").unlink()
    assert by_hand._last_step(tmp_path) == 4


@pytest.mark.slow
def test_a_fork_of_the_kernel_does_not_keep_the_run_running(workbook):
    write("00_a", SET_UP)
    with kernel() as page:
        page.run_all("00_a")
        page.run("import os, time\nif os.fork() == 0: os.setsid(); time.sleep(20); os._exit(0)")
        (folder,) = folders("00_a")
        assert runs.status(folder) == "running"
        page.kill()
        assert runs.status(folder) == "killed"


@pytest.mark.kernel
@pytest.mark.slow
def test_edited_parameters_are_noticed_and_that_run_is_not_continued(workbook):
    write("00_a", SET_UP, TRAIN, "run.result(loss=1.0)", "run.finish()")
    said = (
        "steps is 5 now and was 3 when the set-up cell ran; run the set-up cell again, or this run's records are wrong"
    )
    with kernel() as page:
        document = json.loads((workbook / "notebooks/00_a.ipynb").read_text())["cells"]
        for cell in document[1:4]:
            assert page.run(cell["source"], cell["id"]) == "ok"
        (first,) = folders("00_a")
        edited = document[1]["source"].replace("= 3", "= 5")
        assert page.run(edited, "code-0") == "ok" and lines(page, "steps is") == []
        assert page.run("run.result(loss=1.0)", "code-3") == "ok" and lines(page, "steps is") == [said]
        assert page.messages[-1]["content"].get("execution_state") == "idle"
        assert runs.record(first)["edited"] == {"steps": {"was": 3, "is": 5}}
        assert page.run(SET_UP, "code-1") == "ok"  # reads it anew
        assert len(lines(page, "steps is")) == 1
        (line,) = lines(page, f"run {first.name}")
        assert line.endswith("not continued, because it differs: parameter steps 3 to 5")
        assert page.run("run.result(loss=2.0)", "code-3") == "ok" and len(lines(page, "steps is")) == 1
        first, second = folders("00_a")
        assert runs.status(first) == "stopped" and runs.status(second) == "running"
        assert notebook(first)["code-3"].outputs[0].data["text/plain"] == said
        assert set(page.run_all("00_a")) == {
            "ok"
        }  # back to 3 steps, and the newest run is of 5 and without checkpoints
        assert len(folders("00_a")) == 3


@pytest.mark.kernel
@pytest.mark.slow
def test_a_stopped_training_is_a_stopped_run_that_run_all_continues(workbook):
    stop = "if run.history() and not run.dir.joinpath('again').exists():\n    run.stopped('main', 2, 3, 'Stop')"
    stop += "\n    run.dir.joinpath('again').touch()\nelse:\n    run.resumed('main')\nruns.notice()"
    write("00_a", SET_UP, TRAIN, stop, "run.result(a=1)\nrun.headline('a')", "run.finish()")
    with kernel() as page:
        assert set(page.run_all("00_a")) == {"ok"}
        (folder,) = folders("00_a")
        assert runs.status(folder) == "stopped, 2 of 3" and not runs.is_done(folder)
        sentence = "main was stopped at step 2 of 3. Run all cells again: the run goes on from there."
        assert runs.record(folder)["sentence"] == sentence and "main was stopped at step 2 of 3" in str(page.shown())
        assert set(page.run_all("00_a")) == {"ok"}
        assert lines(page, "continues") == [f"continues run {folder.name} from step 3 (stopped at step 2 of 3)"]
        assert folders("00_a") == [folder] and runs.status(folder) == "done" and runs.is_done(folder)
        assert "sentence" not in runs.record(folder)


@pytest.mark.kernel
@pytest.mark.slow
def test_the_line_of_the_set_up_cell_goes_on_in_its_own_place(workbook):
    long = "import time\ntime.sleep(3.5)"
    write("00_a", SET_UP, long, "print('y' * 10**8)\nprint('end')", "run.finish()")
    with kernel() as page:
        assert set(page.run_all("00_a", ids=False)) == {"ok"}  # a front end without ids: by the sources
        shown = [m for m in page.messages if m["msg_type"] in ("display_data", "update_display_data")]
        shown = [m for m in shown if not m["content"]["data"]["text/plain"].startswith("still running")]  # the ticker's
        updates = [m for m in shown if m["msg_type"] == "update_display_data"]
        texts = [m["content"]["data"]["text/plain"] for m in updates]
        waiting = [text for text in texts if text.startswith("cell 3 of 5, ")]
        assert len(waiting) >= 4 and texts[-1].startswith("5 cells in 0:0") and not any("left" in t for t in texts)
        (first,) = [m for m in shown if m["msg_type"] == "display_data"]
        place = {m["content"]["transient"]["display_id"] for m in (first, *updates)}
        parents = {m["parent_header"]["msg_id"] for m in (first, *updates)}
        assert len(place) == len(parents) == 1
        (folder,) = folders("00_a")
        cells = notebook(folder)
        printed = cells["code-3"].outputs[0].text
        assert printed.startswith("yyy") and printed.endswith("yyy\nend\n") and "left out" in printed
        assert len(printed) < 500_000 and runs.is_done(folder)
        assert 3.5 < cells["code-2"].metadata.papermill.duration < 6
        assert cells["code-2"].outputs == [] and "cells in" in cells["code-1"].outputs[0].data["text/plain"]
        page.messages.clear()
        page.run_all("00_a", until=lambda: any(": about" in t or "about" in t for t in page.shown("update")))
        assert any(t.startswith("cell 3 of 5, 0:0") and " left" in t for t in page.shown("update"))


@pytest.mark.kernel
@pytest.mark.slow
def test_under_plain_papermill_there_is_a_lock_and_nothing_else(workbook):
    path = write("00_a", SET_UP, "print(runs.status(run.dir), run.page)")
    executed = papermill.execute_notebook(path, workbook / "out.ipynb", progress_bar=False)
    (folder,) = folders("00_a")
    assert executed.cells[-1].outputs[0].text == "running None\n" and executed.cells[-2].outputs == []
    assert runs.status(folder) == "killed" and not (folder / "notebook.ipynb").exists()
