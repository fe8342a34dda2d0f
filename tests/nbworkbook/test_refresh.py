"""Refreshing stores outputs in a notebook and touches nothing else."""

import json
import os

import pytest
import small_notebooks
from small_notebooks import write

from nblib import files, paths
from nbworkbook import refresh, runner


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.steady_workbook(tmp_path, monkeypatch)


@pytest.mark.kernel
def test_refresh_stores_outputs_and_touches_nothing_else(workbook):
    shows = "from IPython.display import HTML\nHTML('<b>x</b>')"
    good = write(
        "00_a", "import time\nprint('one', steps, flush=True)\ntime.sleep(0.4)\nprint('two')", shows
    )
    bad = write("01_b", "1 / 0")
    before, broken = json.loads(good.read_text()), bad.read_bytes()
    assert [outcome.status for outcome in refresh.refresh(["00", "01"])] == ["done", "failed"]
    first = good.read_bytes()
    after = json.loads(first)
    assert bad.read_bytes() == broken, "a notebook that failed was replaced"
    assert [cell["execution_count"] for cell in after["cells"][1:]] == [1, 2, 3]
    assert after["cells"][2]["outputs"] == [
        {"name": "stdout", "output_type": "stream", "text": ["one 3\n", "two\n"]},
    ]
    metadata = {
        "kernelspec": refresh.KERNEL,
        "language_info": {"name": "python"},
        "nblib": {"seconds": 0},
    }
    assert after["metadata"] == metadata
    for old, new in zip(before["cells"], after["cells"], strict=True):
        assert (old["id"], old["metadata"], old["source"]) == (
            new["id"],
            new["metadata"],
            "".join(new["source"]),
        )
    refresh.refresh(["00"])
    assert good.read_bytes() == first, "refreshing twice gives another file"
    assert [path.name for path in (workbook / "outputs").iterdir()] == []


@pytest.mark.kernel
def test_a_notebook_that_changes_meanwhile_stays_as_its_author_saved_it(workbook, capsys):
    """Its code, more cells, or nothing at all: what was executed is what was read at the start."""
    added = json.loads(write("00_a", "1").read_text())
    added["cells"].append(
        {"cell_type": "code", "metadata": {}, "source": "2", "outputs": [], "execution_count": None}
    )
    texts = {"00_a": json.dumps(added), "01_b": "gone wrong"}
    for name, text in texts.items():
        (workbook / f"{name}.new").write_text(text)
        write(
            name,
            f"open('{name}.ipynb', 'w').write(open('../{name}.new').read())\nprint('old code')",
        )
    write("02_c", "import os\nos.remove('02_c.ipynb')")
    write("03_d", "print('steady')")
    outcomes = refresh.refresh(["00", "01", "02", "03"])
    assert [outcome.status for outcome in outcomes] == ["failed", "failed", "unwritten", "done"]
    assert runner.exit_code(outcomes[:2]) == 1 and runner.exit_code(outcomes) == 74
    for name, text in texts.items():
        assert (workbook / "notebooks" / f"{name}.ipynb").read_text() == text
    assert "steady" in (workbook / "notebooks" / "03_d.ipynb").read_text()
    said = capsys.readouterr().err
    assert "00_a changed while it was executed; its outputs are not stored; again with: " in said
    assert "python -m nbworkbook.refresh 00_a" in said
    assert "Traceback" not in said


@pytest.mark.kernel
def test_its_folder_is_locked_while_it_runs_and_swept_when_it_died(workbook):
    write("00_a", "import os\nprint([os.path.basename(p) for p in (os.environ['NBLIB_OUTPUTS'],)])")
    dead = files.make_folder(paths.outputs() / "refresh-dead")
    os.utime(dead, (0, 0))
    locks = []

    def looked(*given, run=runner.run, **options):
        (folder,) = paths.outputs().parent.glob("refresh-*")
        locks.append(files.claim(folder))
        return run(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", looked)
        assert refresh.refresh(["00"])[0].status == "done"
    assert locks == [None] and not list(paths.outputs().iterdir())


def test_collapsed_outputs_stay_collapsed_and_begin_with_a_sentence():
    """What stands for them on the page is the beginning of the first output: never the answer,
    never HTML.
    """
    ran = {
        "execution_count": 3,
        "outputs": [{"output_type": "execute_result", "data": {"text/html": "<b>42</b>"}}],
    }
    hidden = {"tags": ["a"], "jupyter": {"outputs_hidden": True}, "execution": {}}
    cells = [
        {"cell_type": "code", "id": "x", "source": "6 * 7", "metadata": m}
        for m in (hidden, {"jupyter": {}})
    ]
    stored = refresh.with_outputs({"cells": cells}, {"cells": [ran, ran]})["cells"]
    assert (
        stored[0]["metadata"] == {"tags": ["a"], "jupyter": {"outputs_hidden": True}}
        and stored[1]["metadata"] == {}
    )
    assert (
        stored[0]["outputs"] == [refresh.ANSWER, *ran["outputs"]]
        and stored[1]["outputs"] == ran["outputs"]
    )


@pytest.mark.parametrize(
    "given, said",
    [
        (["99"], "Unknown notebook '99'"),
        (["00", "/etc/passwd"], "is not in"),
        (["--alll"], "unrecognized arguments: --alll"),
    ],
)
def test_bad_input_is_one_sentence_and_starts_nothing(workbook, capsys, given, said):
    write("00_a", "1")
    try:
        code = refresh.main(given)
    except SystemExit as leaving:
        code = leaving.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith("nblib: ") and said in line
    assert not (workbook / "outputs").exists()
