"""A torch.py beside a script or a notebook is named in one sentence, and nothing else is taken for
one.
"""

import os
import subprocess
import sys

import pytest
import small_notebooks
from small_notebooks import run_one, write

from nbworkbook import shadowing

TENSOR = "cannot import name 'Tensor' from 'torch' (/somewhere/torch.py)"


def test_the_file_or_the_folder_in_the_place_of_a_package_is_named(tmp_path):
    (tmp_path / "torch.py").touch()
    (tmp_path / "random.py").touch()
    (tmp_path / "helper.py").touch()
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").touch()
    for problem, name in {
        TENSOR: "torch.py is imported in place of the package torch",
        "module 'torch' has no attribute 'nn'": "torch.py is imported in place of the package torch",
        "module 'random' has no attribute 'seed'": "random.py is imported in place of the module of",
        "cannot import name 'ndarray' from 'numpy' (unknown)": "numpy is imported in place of the",
    }.items():
        assert f"{tmp_path}/{name}" in shadowing.explain(problem, ["/nowhere", tmp_path]), problem
    for problem in ("module 'helper' has no attribute 'x'", "no torch here", "'nothing'"):
        assert shadowing.explain(problem, [tmp_path]) == "", "it is what it says"


def test_the_packages_themselves_are_in_the_place_of_nothing():
    for problem in (TENSOR, "module 'random' has no attribute 'x'", "module 'nblib' has no 'x'"):
        assert shadowing.explain(problem, sys.path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["doctor", "script.py"], ["estimate"]])
def test_a_command_says_so_and_ends_with_2(tmp_path, arguments):
    (tmp_path / "torch.py").write_text("x = 1")
    (tmp_path / "script.py").write_text("import torch")
    process = subprocess.run(
        [sys.executable, "-m", "nbworkbook.cli", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    (line,) = process.stderr.splitlines()
    assert process.returncode == 2 and f"{tmp_path}/torch.py is imported in place of" in line


@pytest.mark.kernel
def test_a_notebook_beside_it_says_so(tmp_path, monkeypatch):
    workbook = small_notebooks.steady_workbook(tmp_path, monkeypatch)
    (workbook / "notebooks" / "torch.py").write_text("x = 1")
    write("00_a", "import torch\nprint(torch.nn)")
    outcome = run_one("00_a")
    file = workbook / "notebooks" / "torch.py"
    assert outcome.status == "failed" and "internal error" not in outcome.sentence
    assert outcome.sentence.startswith(f"{file} is imported in place of the package torch; give it")
    assert "module 'torch' has no attribute 'nn'" in outcome.sentence


@pytest.mark.kernel
def test_in_the_current_folder_it_is_in_the_way_of_no_run(tmp_path, monkeypatch):
    small_notebooks.steady_workbook(tmp_path, monkeypatch)
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    write("00_a", "1")
    assert run_one("00_a").status == "done"
