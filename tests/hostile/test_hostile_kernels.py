"""Notebooks that pass the planning and misbehave when they are executed, all in one batch that goes
on; and secrets.
"""

import json
import shlex
from pathlib import Path

import pytest
import small_notebooks
from attack import Ending, held

from nbworkbook import jobs, runs

BEGIN = "from nbworkbook import runs\nrun = runs.begin({name!r}, globals())"


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.move_workbook(tmp_path, monkeypatch)


def _changed(name: str, change) -> None:
    path = small_notebooks.write(name, "print('ran')")
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


CODE = {  # what the cell after `begin` does, and how the run ends
    "10_good": ("print('fine')", "done"),
    "11_control": ("print('\\x1e\\x1f\\x00\\x1b[2J\\r\\x07')", "done"),
    "12_surrogate": ("print('\\ud800 \\udfff')", "done"),
    "13_message": ("raise ValueError('\\ud800\\n\\x1b[2J' + 'Oh ' * 100_000)", "failed"),
    "14_strange_error": (
        "class E(Exception):\n    def __str__(self): raise KeyError\nraise E",
        "failed",
    ),
    "15_exit": ("import os\nos._exit(0)", "failed"),
    "16_interrupt": ("raise KeyboardInterrupt", "failed"),
    "17_no_folder": ("import shutil\nshutil.rmtree(run.dir)", "done"),
    "18_no_working_folder": (
        "import os, tempfile\nos.chdir(tempfile.mkdtemp())\nos.rmdir(os.getcwd())",
        "done",
    ),
    "19_record": ("(run.dir / 'run.json').write_bytes(b'\\xff')", "done"),
    "20_result": ("(run.dir / 'result.json').write_bytes(b'\\xff')", None),
    "21_streams": ("import os\nos.close(1); os.close(2)", "done"),
    "22_input": ("input('name? ')", "failed"),
}
FORM = {  # what is no notebook by the letter
    "30_minor": (lambda d: d.update(nbformat_minor=99), None),
    "31_no_metadata": (lambda d: d.pop("metadata"), None),
    "32_extra": (lambda d: d["cells"][2].update(extra=[1]), None),
    "33_same_ids": (lambda d: [cell.update(id="same") for cell in d["cells"]], None),
    "34_odd_id": (lambda d: d["cells"][2].update(id="not allowed! " * 20), None),
    "35_kernelspec": (lambda d: d.update(metadata={"kernelspec": ["python3"]}), None),
    "36_outputs": (lambda d: d["cells"][2].update(outputs=[{"output_type": "poem"}]), None),
    "37_language": (lambda d: d.update(metadata={"language_info": 3}), None),
}


@pytest.mark.kernel
@pytest.mark.slow
def test_a_batch_of_hostile_notebooks(workbook):
    """Those that fail end in a row of the table and in a sentence; the good ones are done, and
    counted.
    """
    for name, (source, _) in CODE.items():
        small_notebooks.write(name, BEGIN.format(name=name), source)
    for name, (change, _) in FORM.items():
        _changed(name, change)
    process = small_notebooks.start("run", "--all", "--keep-going", "--jobs", "2")
    out, err = process.communicate(timeout=400)
    ending = Ending(process.returncode, out, err)
    assert ending.code == 1
    held(ending)

    # each notebook's row, which only a failed one has, and its sentence
    failures = 0
    for name, (_, expected) in (CODE | FORM).items():
        rows = [line.split() for line in out.splitlines() if line.startswith(f"{name} ")]
        assert [row[1] for row in rows] in ([], ["failed"]), rows
        status = "failed" if rows else "done"
        assert expected in (status, None), (name, err)
        sentences = [line for line in err.splitlines() if line.startswith(f"nblib: {name} ")]
        assert len(sentences) == len(rows), (name, err)
        failures += len(rows)

    # the count of all, and the pages
    count = len(CODE) + len(FORM)
    assert f"{count} notebooks: {count - failures} done, {failures} failed" in out
    assert (workbook / "outputs" / "index.html").exists()
    code, out, err = small_notebooks.nblib("report")
    assert (code, err) == (0, "")


SECRET = "hunter2-5f0c1e"


@pytest.mark.kernel
@pytest.mark.slow
def test_a_secret_stands_in_no_file(workbook, monkeypatch):
    """Given by the name of a variable it reaches the notebook, after a failure and its resume as
    well, and is in no file, no printed line and no key.
    """
    monkeypatch.setenv("HUB_TOKEN", SECRET)
    small_notebooks.write(
        "00_setup",
        BEGIN.format(name="00_setup") + "\n" + BEGIN.format(name="00_setup"),
        f"assert len(token) == {len(SECRET)} and token.startswith('hunter')",
        "run.result(shown=repr(token), parameters=run.parameters)\nrun.log({'step': 1, 'run': repr(token)})\ntoken",
        "first = run.dir / 'first'\nif not first.exists():\n    first.touch()\n    raise OSError(repr(token))",
        parameters='token: str = ""  # access to the hub [secret]\nsteps: int = 3  # steps',
    )
    code, out, err = small_notebooks.nblib("run", "00", "-p", "token=@HUB_TOKEN")
    assert code == 1 and "raised OSError: '@HUB_TOKEN'" in err
    (folder,) = (workbook / "outputs" / "00_setup").glob("2*")
    command = json.loads((folder / "run.json").read_text())["command"]
    assert command in err and "token=@HUB_TOKEN" in command
    code, again, _ = small_notebooks.nblib(*shlex.split(command)[1:])
    assert code == 0 and runs.is_done(folder) and "resumes" in again
    assert json.loads((folder / "result.json").read_text())["parameters"] == {
        "token": "@HUB_TOKEN",
        "steps": 3,
    }
    for text in (out, err, again, *map(_content, workbook.rglob("*"))):
        assert SECRET not in text
    (before,) = jobs.plan(["00"], overrides=["token=@HUB_TOKEN"])
    monkeypatch.setenv("HUB_TOKEN", "another")
    (after,) = jobs.plan(["00"], overrides=["token=@HUB_TOKEN"])
    assert before == after, "the value is in the key"


def _content(path: Path) -> str:
    return path.read_bytes().decode("latin-1") if path.is_file() else path.name
