"""A job is planned before anything starts, and its key changes with all that decides its result."""

import os
import subprocess
import sys

import pytest
import small_notebooks
from small_notebooks import write

from nbworkbook import input_hash, jobs
from nbworkbook.parameters import ParameterError

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
    assert (
        planned[0].resume == "nblib run 00_setup --profile gpu"
        and planned[1].resume == "nblib run 10_lrc"
    )


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
    assert (
        len(lines) == 2
        and "did you mean 'steps'" in lines[0]
        and "Unknown notebook '07'" in lines[1]
    )


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """The same with the code as it is."""
    return small_notebooks.move_workbook(tmp_path, monkeypatch)


def key(**values) -> str:
    return jobs.plan(["00_a"], overrides=[f"{name}={value}" for name, value in values.items()])[
        0
    ].key


def test_the_device_that_is_asked_for_counts_and_the_one_that_is_here_does_not(
    notebooks, tmp_path, monkeypatch
):
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
    program = "import sys\nfrom nbworkbook import jobs\njobs.plan(jobs.names())\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    "version, says", [("2.10.1", True), ("2.11.0", False), ("2.13.0+cpu", False), ("3.0", True)]
)
def test_a_torch_that_is_not_tested_is_named_once(workbook, capsys, monkeypatch, version, says):
    monkeypatch.setattr(input_hash, "version", {"torch": version}.get)
    jobs._warn_of_untested_torch.cache_clear()
    write("00_a", "1")
    for _ in range(2):
        jobs.plan(["00_a"])
    told = capsys.readouterr().err.splitlines()
    jobs._warn_of_untested_torch.cache_clear()
    assert told == (
        [f"nblib: torch {version} is untested here; tested are 2.11 to 2.13."] if says else []
    )


def test_a_notebook_is_found_by_its_path_and_runs_in_its_own_folder(
    workbook, tmp_path, monkeypatch
):
    usual = write("00_a", "1")
    papers = tmp_path / "papers"
    papers.mkdir()
    (papers / "texts.txt").write_text("words")
    monkeypatch.setenv("NBLIB_NOTEBOOKS", str(papers))
    declared = 'data: str = "texts.txt"  # words\ncorpus: str = "texts.txt"  # text [a corpus]'
    path = write("trial", "2", parameters=declared)
    monkeypatch.setenv("NBLIB_NOTEBOOKS", str(usual.parent))
    monkeypatch.chdir(tmp_path)
    (job,) = jobs.plan(["papers/trial.ipynb"], overrides=["data=other"])
    assert (job.notebook, job.path) == (
        "trial",
        path,
    ) and job.resume == "nblib run papers/trial.ipynb -p data=other"
    assert job.environment()["NBLIB_NOTEBOOKS"] == str(papers)
    (plain,) = jobs.plan([str(path)])
    assert {"data texts.txt", "corpus texts.txt"} <= plain.inputs.keys()
    both = jobs.plan(["00", "papers/trial.ipynb", "./papers/../papers/trial.ipynb"])
    assert [each.notebook for each in both] == ["00_a", "trial"] and jobs.find(
        "00_a.ipynb"
    ) == usual


@pytest.mark.parametrize("name", ["base", "published", "corpora", "batches"])
def test_a_notebook_whose_runs_would_lie_among_something_else_is_refused(
    workbook, tmp_path, monkeypatch, name
):
    (tmp_path / f"{name}.ipynb").write_text("{}")
    with pytest.raises(ParameterError, match=f"would write its runs into outputs/{name}"):
        jobs.plan([str(tmp_path / f"{name}.ipynb")])


def test_a_path_that_names_nothing_ends_in_one_sentence(workbook, tmp_path):
    write("00_a", "1")
    for wrong in ("papers/none.ipynb", str(tmp_path), "a\0b.ipynb", f"{'x' * 5000}.ipynb"):
        with pytest.raises(ParameterError) as caught:
            jobs.plan([wrong])
        assert len(str(caught.value).splitlines()) == 1


def test_without_what_runs_notebooks_a_plan_says_what_to_install(workbook, monkeypatch):
    write("00_a", "1")
    found = jobs.find_spec
    monkeypatch.setattr(
        jobs, "find_spec", lambda name: None if name == "papermill" else found(name)
    )
    with pytest.raises(
        ParameterError, match=r"papermill must be installed: pip install 'nblib\[workbook\]'"
    ):
        jobs.plan(["00_a"])


def test_runs_of_a_notebook_from_elsewhere_are_found_by_its_name(workbook):
    write("00_a", "1")
    (workbook / "outputs" / "trial" / "20260101-000000-abcdef").mkdir(parents=True)
    (workbook / "outputs" / "trial" / "20260101-000000-abcdef" / "run.json").write_text("{}")
    assert jobs.name_of_runs("papers/trial.ipynb") == jobs.name_of_runs("trial") == "trial"
    assert jobs.name_of_runs("00") == "00_a"
    with pytest.raises(ParameterError, match="Unknown notebook 'other'"):
        jobs.name_of_runs("other")
