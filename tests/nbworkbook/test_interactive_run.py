"""A person's kernel: real ones that believe they are in JupyterLab, killed, run again and
continued.
"""

import json
import os

import papermill
import pytest
import small_notebooks
from hand_kernels import folders, kernel
from small_notebooks import nblib, write

from nbworkbook import interactive_run, jobs, runner, runs

SET_UP = "from nbworkbook import runs, show\nrun = runs.begin('00_a', globals())"
# A training that leaves a checkpoint every two steps; PACE makes it slow enough to be killed in its
# middle.
TRAIN = """import os, time, torch
from nblib import models, runtime, text, train
runtime.seed_all(0)
model = models.tiny(64, hidden=16, layers=1, heads=2)
stream = torch.randint(0, 64, (4000,), generator=torch.Generator().manual_seed(1))
batches = text.Batches(stream, rows=2, length=16)
machine = runtime.Machine(torch.device("cpu"), "fp32", "a test")
records = []
checkpoints = train.Checkpoints(run.checkpoints / "main", every=2)
watch = train.Watch(log=run.log, log_every=1, records=records)
options = dict(checkpoints=checkpoints, watch=watch, machine=machine)
for record in train.steps(model, batches, train.adamw(model, lr=1e-2), total=steps, **options):
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


@pytest.mark.kernel
@pytest.mark.slow
def test_killed_in_the_middle_of_a_training_run_all_gives_the_straight_run(workbook):
    write("00_a", SET_UP, TRAIN, RESULT, "run.finish()", parameters=TWELVE)
    with kernel(PACE="0.2") as killed:
        half = workbook / "outputs/00_a"
        assert (
            killed.run_all(
                "00_a", until=lambda: list(half.glob("*/checkpoints/main/step-00000004"))
            )[-1]
            == ""
        )
        (folder,) = folders("00_a")
        assert runs.status(folder) == "running"
        killed.kill()
    assert runs.status(folder) == "killed" and not (folder / "result.json").exists()
    code, out, _ = nblib("list")
    assert code == 0 and f"last run: killed {folder.name[:15]}" in out
    with kernel() as fresh:
        assert set(fresh.run_all("00_a")) == {"ok"}
        (line,) = lines(fresh, "continues run")
        assert line.startswith(f"continues run {folder.name} from step ") and "(killed)" in line
        assert folders("00_a") == [folder] and runs.status(folder) == "done"
        assert (
            runs.is_done(folder)
            and runs.problem(folder) is None
            and runs.record(folder)["attempts"] == 2
        )
        # the newest is done: this is another run, and the straight one
        assert set(fresh.run_all("00_a")) == {"ok"}
        _, straight = folders("00_a")
        assert (
            result(folder) == result(straight)
            and runs.is_done(straight)
            and len(lines(fresh, "continues")) == 1
        )
        job, facts = jobs.plan(["00"])[0], runs.record(straight)
        assert jobs.why(facts["inputs"], job.inputs) == "" and runner.done(job) is None


@pytest.mark.kernel
def test_the_page_is_kept_as_it_was_saved_last(workbook):
    """Its file is the one that JupyterLab names; saved again and finished again, it is the new
    one.
    """
    write("00_a", SET_UP, "run.result(a=1)", "run.finish()")
    page_file = workbook / "a copy of it.ipynb"
    page_file.write_text('{"cells": []}')
    with kernel(JPY_SESSION_NAME=page_file) as page:
        assert set(page.run_all("00_a")) == {"ok"}
        (folder,) = folders("00_a")
        assert (folder / "notebook.ipynb").read_text() == '{"cells": []}'
        assert runs.record(folder)["page"].startswith("kept as saved on") and runs.is_done(folder)
        page_file.write_text('{"cells": [], "metadata": {}}')
        assert page.run("run.finish()") == "ok"
        assert (folder / "notebook.ipynb").read_text() == page_file.read_text()
        assert runs.is_done(folder) and runs.problem(folder) is None
        page_file.unlink()
        (workbook / "notebooks/00_a.ipynb").unlink()
        assert page.run("run.finish()") == "ok"
        assert runs.record(folder)["page"] == "not kept: the notebook's file was not found"


@pytest.mark.kernel
@pytest.mark.slow
def test_a_run_is_held_while_its_kernel_lives_and_no_longer(workbook):
    """A fork of the kernel that outlives it holds nothing; another kernel begins a run of its own
    meanwhile.
    """
    write("00_a", SET_UP, TRAIN, "run.result(a=1)")
    with kernel() as page, kernel() as other:
        assert set(page.run_all("00_a")) == {"ok"}
        (folder,) = folders("00_a")
        assert set(other.run_all("00_a")) == {"ok"}
        assert lines(other, "run ") == [
            f"run {folder.name} is running in another kernel, so this is a new run"
        ]
        assert len(folders("00_a")) == 2
        page.run("import os, time\nif os.fork() == 0: os.setsid(); time.sleep(20); os._exit(0)")
        assert runs.status(folder) == "running"
        page.kill()
        assert runs.status(folder) == "killed"


@pytest.mark.kernel
@pytest.mark.slow
def test_a_run_that_was_left_is_not_continued(workbook):
    write("00_a", SET_UP, TRAIN, "run.result(a=1)")
    with kernel() as page:
        page.run_all("00_a")
        page.run_all("00_a")
        (first,) = folders("00_a")
        assert lines(page, "continues") == [
            f"continues run {first.name} from step 3 (its cells were run again); "
            "for a new run execute run.leave() and run all cells again"
        ]
        assert page.run("run.leave()") == "ok"
        page.run_all("00_a")
        assert len(folders("00_a")) == 2 and runs.status(first) == "stopped"


@pytest.mark.kernel
def test_a_checkpoint_that_is_half_deleted_is_not_the_last_one(tmp_path):
    for age, name in enumerate(
        ("other/step-00000050", *(f"main/step-0000000{step}" for step in (2, 4, 6)))
    ):
        (place := tmp_path / "checkpoints" / name).mkdir(parents=True)
        for file in ("manifest.json", "training.pt"):
            (place / file).touch()
        os.utime(place / "manifest.json", (100 + age, 100 + age))
    # the folder is the newest now
    (tmp_path / "checkpoints/main/step-00000002/training.pt").unlink()
    assert interactive_run._last_step(tmp_path) == 6
    (tmp_path / "checkpoints/main/step-00000006/manifest.json").unlink()
    assert interactive_run._last_step(tmp_path) == 4


@pytest.mark.kernel
@pytest.mark.slow
def test_with_other_parameters_it_is_another_run(workbook):
    """Also in the same kernel, which then holds the new run alone."""
    write("00_a", SET_UP, TRAIN, "run.result(a=1)")
    with kernel() as page:
        page.run_all("00_a")
        assert page.run("steps = 5") == page.run(SET_UP, "code-1") == "ok"
        first, second = folders("00_a")
        (line,) = lines(page, f"run {first.name}")
        assert line.endswith("not continued, because it differs: parameter steps 3 to 5")
        assert runs.status(first) == "stopped" and runs.status(second) == "running"


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
        sentence = (
            "main was stopped at step 2 of 3. Run all cells again: the run goes on from there."
        )
        assert runs.record(folder)[
            "sentence"
        ] == sentence and "main was stopped at step 2 of 3" in str(page.shown())
        assert set(page.run_all("00_a")) == {"ok"}
        (line,) = lines(page, "continues")
        assert line.startswith(f"continues run {folder.name} from step 3 (stopped at step 2 of 3)")
        assert (
            folders("00_a") == [folder] and runs.status(folder) == "done" and runs.is_done(folder)
        )
        assert "sentence" not in runs.record(folder)


@pytest.mark.kernel
@pytest.mark.slow
def test_under_plain_papermill_there_is_a_lock_and_nothing_else(workbook):
    path = write("00_a", SET_UP, "print(runs.status(run.dir))")
    executed = papermill.execute_notebook(path, workbook / "out.ipynb", progress_bar=False)
    (folder,) = folders("00_a")
    assert executed.cells[-1].outputs[0].text == "running\n" and executed.cells[-2].outputs == []
    assert runs.status(folder) == "killed" and not (folder / "notebook.ipynb").exists()
