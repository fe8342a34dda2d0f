"""What is in the key of a run, and what is not."""

import importlib.metadata
import os
import subprocess
import sys

import pytest
import small_notebooks
from small_notebooks import write

from nblib.run import jobs

DEVICE = 'device: str = "auto"  # where to compute [auto, cpu, cuda]'


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.move_workbook(tmp_path, monkeypatch)


def key(**values) -> str:
    return jobs.plan(["00_a"], overrides=[f"{name}={value}" for name, value in values.items()])[0].key


def test_the_device_that_is_asked_for_counts_and_the_one_that_is_here_does_not(workbook, tmp_path, monkeypatch):
    write("00_a", "1", parameters=DEVICE)
    before = key()
    assert len({before, key(device="cpu"), key(device="cuda")}) == 3
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H100'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert jobs.gpus() == [("0", "NVIDIA H100")] and key() == before


@pytest.mark.parametrize("library", ["python", *jobs.LIBRARIES])
def test_each_version_counts(workbook, monkeypatch, library):
    write("00_a", "1", parameters=DEVICE)
    before, version = key(), importlib.metadata.version
    jobs._versions.cache_clear()
    monkeypatch.setattr(jobs.importlib.metadata, "version", lambda n: "0.0" if n == library else version(n))
    if library == "python":
        monkeypatch.setattr(jobs.platform, "python_version", lambda: "3.0.0")
    assert key() != before
    jobs._versions.cache_clear()


def test_a_library_that_is_absent_is_a_version_too(workbook, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    write("00_a", "1", parameters=DEVICE)
    before = key()
    jobs._versions.cache_clear()
    monkeypatch.setattr(jobs.importlib.metadata, "version", absent)
    assert key() != before
    jobs._versions.cache_clear()


def test_what_a_cell_does_counts_and_how_it_is_written_does_not(workbook):
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
