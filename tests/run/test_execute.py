"""One notebook in its kernel: every ending has its sentence, and nothing of a kernel stays behind."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import small_notebooks
from small_notebooks import run_one, sentence_of, write

from nblib import files
from nblib.run import execute, jobs, runner


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.steady_workbook(tmp_path, monkeypatch)


@pytest.fixture
def sockets(monkeypatch):
    """A folder of this test alone, here and in what it starts: other tests start kernels at the same time."""
    folder = Path(tempfile.mkdtemp(prefix="nb-"))  # pytest's own path is too long for a socket
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.kernel
def test_progress_that_updates_in_place_still_reaches_the_console(workbook, capfd):
    """A display with an id leaves no line in any log, so the runner passes on what the progress says of itself."""
    write(
        "00_long",
        "import time\nfrom nblib.run import show\nprogress = show.Progress('long')\n"
        "for step in range(1, 41):\n    progress({'step': step, 'of': 40, 'loss': 1.0})\n    time.sleep(0.02)",
        "print('after')",
    )
    assert run_one("00_long").status == "done"
    said = capfd.readouterr().out
    assert "[00_long] long: step 40 of 40, loss 1.0000" in said
    assert said.index("[00_long] long: step 1 of 40") < said.index("after")  # while the cell was running


@pytest.mark.parametrize(
    "source, options, said",
    [
        ("import os; os._exit(9)", {}, "the kernel died in cell 2 (`import os; os._exit(9)`), exit code 9"),
        ("import os; os.kill(os.getpid(), 9)", {}, "killed by SIGKILL, most likely for lack of memory"),
        ("import time; time.sleep(60)", {"timeout": 1}, "took longer than the timeout of 1 s"),
        ("import sys; sys.exit(0)", {}, "cell 2 (`import sys; sys.exit(0)`) ended the kernel's run (sys.exit?)"),
        ("import sys; sys.exit(3)", {}, "cell 2 (`import sys; sys.exit(3)`) raised SystemExit: 3"),
    ],
)
@pytest.mark.kernel
def test_every_other_ending_is_one_sentence_too(workbook, sockets, source, options, said):
    write("00_a", source, "print('never')")
    assert said in sentence_of(run_one("00_a", **options))
    assert not list(sockets.glob("nblib-kernel-*"))


@pytest.mark.kernel
def test_the_kernel_named_in_the_file_need_not_exist(workbook):
    write("00_a", "1", kernelspec={"name": "of_another_machine", "display_name": "x"})
    write("01_b", "1", kernelspec={})
    planned = jobs.plan(["00", "01"], overrides=["steps=2"])
    assert [outcome.status for outcome in runner.run(planned)] == ["done", "done"]


@pytest.mark.kernel
def test_no_kernel_at_all_is_said(workbook, monkeypatch, tmp_path):
    write("00_a", "1")
    blind = "import jupyter_client.kernelspec as k; k.KernelSpecManager._find_spec_directory = lambda *_: None"
    (tmp_path / "sitecustomize.py").write_text(blind)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "no Jupyter kernel named python3" in sentence_of(run_one("00_a"))


@pytest.mark.kernel
def test_the_kernel_knows_where_it_is(workbook, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "somebody sits here")
    names = "NBLIB_RUN_DIR NBLIB_HEADLESS JUPYTER_PREFER_ENV_PATH PYTHONUNBUFFERED JPY_SESSION_NAME".split()
    write("00_a", f"import os, json\nprint(json.dumps([os.getcwd(), *map(os.environ.get, {names})]))")
    outcome = run_one("00_a")
    cells = json.loads((outcome.folder / "notebook.ipynb").read_text())["cells"]
    seen = json.loads("".join(cells[-1]["outputs"][0]["text"]))
    assert seen == [str(workbook / "notebooks"), str(outcome.folder), "1", "1", "1", None]


def test_sockets_left_by_a_kill_are_swept_once_nobody_holds_them(sockets):
    left, held, new = (sockets / f"nblib-kernel-{name}" for name in ("left", "held", "new"))
    for folder in (left, held, new):
        folder.mkdir()
        os.utime(folder, (0, 0)) if folder is not new else None
    lock = files.claim(held)
    mine, in_use = execute.socket_folder()
    assert {path.name for path in sockets.iterdir()} == {held.name, new.name, mine.name}
    os.close(lock), os.close(in_use)
