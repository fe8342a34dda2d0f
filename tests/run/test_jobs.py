"""A job is planned before anything starts, and its key changes with all that decides its result."""

import os
import subprocess
import sys

import pytest
import small_notebooks
from small_notebooks import write

from nblib.run import jobs
from nblib.run.parameters import ParameterError

DEVICE = 'device: str = "auto"  # where to compute [auto, cpu, cuda]'


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.steady_workbook(tmp_path, monkeypatch)


def test_a_profile_with_all_leaves_the_others_on_their_defaults_and_says_so(workbook, capsys):
    write("00_setup", "1")
    write("10_lrc", "1")
    (workbook / "parameters" / "00_setup.gpu.yaml").write_text("steps: 9\n")
    planned = jobs.plan(["00", "10"], profile="gpu", profile_optional=True)
    assert [job.values for job in planned] == [{"steps": 9}, {}]
    assert "[10_lrc] has no profile 'gpu'" in capsys.readouterr().out
    assert planned[0].resume == "nblib run 00_setup --profile gpu" and planned[1].resume == "nblib run 10_lrc"


def test_the_key_knows_code_parameters_and_the_files_they_name(workbook, tmp_path):
    def key(*overrides: str) -> str:
        return jobs.plan(["00_a"], overrides=overrides)[0].key

    declared = f'data: str = "{tmp_path}/corpus.txt"  # a text file'
    write("00_a", "1 + 1", parameters=declared)
    keys = [key(), key("data=other.txt")]
    (tmp_path / "corpus.txt").write_text("words")
    keys.append(key())
    write("00_a", "1 + 2", parameters=declared)
    keys.append(key())
    assert len(set(keys)) == 4 and key() == keys[-1]


@pytest.mark.parametrize("name", ["00", "00_setup", "00_setup.ipynb"])
def test_a_notebook_has_a_short_name(workbook, name):
    write("00_setup", "1")
    write("01_next", "1")
    assert jobs.resolve(name) == "00_setup"


def test_every_problem_of_a_plan_is_listed_once(workbook):
    write("00_a", "1")
    write("01_b", "1")
    with pytest.raises(ParameterError) as caught:
        jobs.plan(["00", "01", "07"], overrides=["stepz=1"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 and "did you mean 'steps'" in lines[0] and "Unknown notebook '07'" in lines[1]


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """The same with the code as it is."""
    return small_notebooks.move_workbook(tmp_path, monkeypatch)


def key(**values) -> str:
    return jobs.plan(["00_a"], overrides=[f"{name}={value}" for name, value in values.items()])[0].key


def test_the_device_that_is_asked_for_counts_and_the_one_that_is_here_does_not(notebooks, tmp_path, monkeypatch):
    write("00_a", "1", parameters=DEVICE)
    before = key()
    assert len({before, key(device="cpu"), key(device="cuda")}) == 3
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H100'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert jobs.gpus() == [("0", "NVIDIA H100")] and key() == before


def test_what_a_cell_does_counts_and_how_it_is_written_does_not(notebooks):
    write("00_a", "x = 1", parameters=DEVICE)
    before = key()
    write("00_a", "x  =  1  # the start", parameters=DEVICE.replace("where to", "on what to"))
    assert key() == before
    write("00_a", "x = 2", parameters=DEVICE)
    assert key() != before
    write("00_a", "x = 1", "x", parameters=DEVICE)
    assert key() != before


def test_planning_imports_no_torch():
    program = "import sys\nfrom nblib.run import jobs\njobs.plan(jobs.names())\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
