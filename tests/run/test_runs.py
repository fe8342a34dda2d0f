"""A run is a folder: what the set-up cell checks and writes, and when the folder says that the run is done."""

import papermill
import pytest
import small_notebooks
from small_notebooks import write

from nblib.run import runs


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.steady_workbook(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "given, said", [({"stepps": 3}, "did you mean 'steps'"), ({"steps": "3"}, "must be of type int")]
)
@pytest.mark.kernel
def test_plain_papermill_is_checked_by_the_set_up_cell(workbook, given, said):
    path = write("00_a", "from nblib.run import runs\nrun = runs.begin('00_a', globals())")
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
    assert runs.status(run.dir) == "done" and not runs.is_done(run.dir)  # nobody executed a notebook there
    with (run.dir / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 2, "lo')
    monkeypatch.setenv("NBLIB_RUN_DIR", str(run.dir))
    runs.begin("00_a", {}).log({"step": 2})
    assert (run.dir / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    monkeypatch.setenv("RANK", "1")
    other = runs.begin("00_a", {})
    other.log({"step": 3}), other.result(x=1), other.finish()
    assert "3" not in (run.dir / "metrics.jsonl").read_text() and not (run.dir / "result.json").exists()


def test_tensorboard_gets_the_numbers_of_each_step(tmp_path):
    """Read back by TensorBoard itself, which is not among what this workbook installs."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: no event files to read")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = runs.Run(tmp_path, {})
    for step in (1, 2):
        run.log({"run": "ard", "step": step, "of": 2, "loss": 3.0 / step, "kl": float("nan"), "stopped": "Stop"})
    run.log({"epoch": 1})  # no step, so no place on the axis
    run.finish()
    found = EventAccumulator(str(tmp_path / "events")).Reload()
    assert sorted(found.Tags()["scalars"]) == ["ard/kl", "ard/loss"]
    assert [(e.step, e.value) for e in found.Scalars("ard/loss")] == [(1, 3.0), (2, 1.5)]


def test_columns_are_as_wide_as_their_widest_cell():
    assert runs.columns([["a", "name"], ["long", "b"], ["", "c"]]) == "a     name\nlong  b\n      c"
