"""The wheel in a fresh environment, outside the clone: a workbook of one's own runs, is killed,
goes on to the same bits and is reported, and nothing is written beside the installed packages.

Footgun: the dependencies are those of the environment that runs the tests, seen by a .pth file. A
package that is imported and not declared is found in tests/test_environment.py, not here.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from nblib import paths

pytestmark = [pytest.mark.kernel, pytest.mark.slow]
SOURCES = ("nblib", "nbworkbook", "pyproject.toml", "README.md", "LICENSE")
LONGER = ("-p", "steps=120", "-p", "checkpoint_every=10", "-p", "hidden=32", "-p", "device=cpu")


class Installed(NamedTuple):
    folder: Path  # of the environment
    site: Path
    home: Path

    def command(self, *arguments: str) -> list[str]:
        return [str(self.folder / "bin" / "nblib"), *arguments]

    def environment(self) -> dict[str, str]:
        """What a user has, with a home of its own and none of our variables."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("NBLIB_", "PYTHON", "XDG_"))
        }
        ours = {
            "HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        return kept | ours | {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def nblib(self, *arguments: str, at: Path) -> subprocess.CompletedProcess:
        options = {
            "capture_output": True,
            "text": True,
            "timeout": 600,
            "stdin": subprocess.DEVNULL,
        }
        return subprocess.run(self.command(*arguments), cwd=at, env=self.environment(), **options)

    def files(self) -> dict[str, tuple[int, int]]:
        """Every file beside the packages, with size and time, without what Python compiles."""
        found = [path for path in self.site.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    """A fresh environment with the wheel of a copy of the sources, since a build writes beside
    them.
    """
    place = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        _copy(paths.code() / name, place / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--quiet", "--no-deps", "--no-index"]
    build = [
        *pip,
        "wheel",
        *options,
        "--no-build-isolation",
        "--wheel-dir",
        place,
        place / "source",
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = place.glob("nblib-*.whl")

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "env"], check=True)
    (site,) = (place / "env" / "lib").glob("python3*/site-packages")
    into = [*pip, "--python", place / "env" / "bin" / "python", "install", *options, wheel]
    subprocess.run(into, check=True, capture_output=True)

    # what the wheel depends on, and what Jupyter keeps outside of packages: kernels and templates
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    if not (place / "env" / "share").exists():
        (place / "env" / "share").symlink_to(Path(sys.prefix) / "share")
    (place / "home").mkdir()
    return Installed(place / "env", site, place / "home")


def test_the_packages_in_use_are_those_of_the_wheel(installed, tmp_path):
    code = "import nblib, nbworkbook; print(nblib.__file__, nbworkbook.__file__)"
    python = [installed.folder / "bin" / "python", "-c", code]
    told = subprocess.run(
        python,
        cwd=tmp_path,
        env=installed.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(Path(file).is_relative_to(installed.site) for file in told.stdout.split())


def test_a_run_that_was_killed_goes_on_to_the_same_bits(installed, tmp_path):
    before = installed.files()
    for name in ("killed", "straight"):
        assert installed.nblib("init", name, at=tmp_path).returncode == 0
    killed, straight = tmp_path / "killed", tmp_path / "straight"

    _kill_after_a_checkpoint(installed, killed)
    again = installed.nblib("run", "00", *LONGER, at=killed)
    assert again.returncode == 0 and "resumes in" in again.stdout, again.stdout + again.stderr
    whole = installed.nblib("run", "00", *LONGER, at=straight / "notebooks")
    assert whole.returncode == 0, whole.stdout + whole.stderr

    (one,), (other,) = _runs(killed), _runs(straight)
    assert _losses(one) == _losses(other) and len(_losses(one)) >= 120 // 10
    assert json.loads((one / "result.json").read_text()) == json.loads(
        (other / "result.json").read_text()
    )
    assert _weights(one) == _weights(other)
    assert "resumed at step" in (one / "notebook.ipynb").read_text()

    # what is done is skipped, listed and reported, and the packages are as they were
    assert "skipped" in installed.nblib("run", "00", *LONGER, at=killed).stdout
    assert one.name in installed.nblib("list", "--runs", at=killed).stdout
    report = installed.nblib("report", at=killed)
    assert report.returncode == 0 and one.name in (killed / "outputs" / "index.html").read_text()
    assert installed.files() == before
    assert list((installed.home / ".cache" / "nblib").rglob("prose-*.json"))


def test_a_notebook_of_any_folder_runs_by_its_path(installed, tmp_path):
    before = installed.files()
    path = tmp_path / "papers" / "trial.ipynb"
    path.parent.mkdir()
    (path.parent / "beside.py").write_text("FACTOR = 2\n")
    (path.parent / "numbers.txt").write_text("1 2 3")
    code = "import beside\nwords = open(table).read().split()\nprint('sum', beside.FACTOR * sum(map(int, words)))"
    _write_notebook(path, 'table: str = "numbers.txt"  # a file beside the notebook', code)

    def run(*more: str) -> tuple[int, str]:
        done = installed.nblib("run", "papers/trial.ipynb", *more, at=tmp_path)
        return done.returncode, done.stdout + done.stderr

    assert run()[0] == 0 and len(_runs(tmp_path, "trial")) == 1
    assert "sum 12" in (_runs(tmp_path, "trial")[0] / "notebook.ipynb").read_text()
    assert "skipped" in run()[1]
    (path.parent / "beside.py").write_text("FACTOR = 3\n")
    assert "code of beside" in run("--dry-run")[1], (
        "a module beside the notebook is part of its code"
    )
    (path.parent / "beside.py").write_text("FACTOR = 2  # two\n")
    assert "skipped" in run("--dry-run")[1]
    (path.parent / "numbers.txt").write_text("1 2 4")
    assert "table numbers.txt" in run("--dry-run")[1]
    code, words = run("-p", "tabel=x")
    assert code == 2 and "did you mean 'table'" in words and len(_runs(tmp_path, "trial")) == 1
    assert installed.nblib("report", at=tmp_path).returncode == 0
    assert "trial" in (tmp_path / "outputs" / "index.html").read_text()
    assert installed.files() == before


@pytest.mark.parametrize(
    "command", ["list", "run 00", "run --all", "sweep 10", "report", "run no/such.ipynb"]
)
def test_a_folder_that_is_no_workbook_gets_one_sentence_and_no_file(installed, tmp_path, command):
    done = installed.nblib(*command.split(), at=tmp_path)
    words = (done.stdout + done.stderr).strip()
    assert done.returncode == 2 and len(words.splitlines()) == 1 and not list(tmp_path.iterdir())
    assert "nblib init" in words or "there is no notebook no/such.ipynb" in words


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(
            source, target, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        )
    else:
        shutil.copy2(source, target)


def _write_notebook(path: Path, parameters: str, code: str) -> None:
    cells = []
    for number, source in enumerate((parameters, code)):
        metadata = {"tags": ["parameters"]} if number == 0 else {}
        cell = {"cell_type": "code", "id": f"cell-{number}", "metadata": metadata, "source": source}
        cells.append(cell | {"outputs": [], "execution_count": None})
    path.write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )


def _runs(book: Path, name: str = "00_first_training") -> list[Path]:
    return sorted(path.parent for path in (book / "outputs" / name).glob("*/run.json"))


def _losses(folder: Path) -> dict[int, float]:
    """The loss of each step; of a step that came twice the later line counts."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records}


def _weights(folder: Path) -> str:
    newest = max((folder / "checkpoints" / "first").glob("step-*"))
    return newest.name + hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()


def _kill_after_a_checkpoint(installed: Installed, book: Path) -> None:
    """Kill the command and all that it started with SIGKILL, once two checkpoints are whole."""
    quiet = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "stdin": subprocess.DEVNULL,
    }
    process = subprocess.Popen(
        installed.command("run", "00", *LONGER), cwd=book, env=installed.environment(), **quiet
    )
    began = time.monotonic()
    while len(list(book.glob("outputs/*/*/checkpoints/first/step-*/manifest.json"))) < 2:
        assert process.poll() is None and time.monotonic() - began < 300, (
            "it ended before it could be killed"
        )
        time.sleep(0.01)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in family:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(family, timeout=20)
