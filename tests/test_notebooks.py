"""Hygiene of what is committed: a notebook must be readable without running it and runnable without
reading it.

nbval re-executes every notebook but compares only tagged cells, passes a stripped notebook, and
knows nothing of size, order or parameters. What it lets through is caught here.
"""

import json
import re
import textwrap
from pathlib import Path

import huggingface_hub
import nbformat
import pytest
import yaml

from lessons.pitfalls import catalogue
from lessons.trials import lines_of
from nblib import paths
from nbworkbook import parameters, search, sweep

NOTEBOOKS = sorted(paths.notebooks().glob("*.ipynb"))
SWEEPS = sorted(paths.profiles().glob("*.sweep.yaml"))
SEARCHES = sorted(paths.profiles().glob("*.search.yaml"))
PROFILES = sorted(set(paths.profiles().glob("*.yaml")) - {*SWEEPS, *SEARCHES})
HEADINGS = ("## Parameters", "## Set-up", "## What to remember", "## Exercises")


def test_there_are_notebooks_and_profiles():
    assert NOTEBOOKS and PROFILES


@pytest.fixture(params=NOTEBOOKS, ids=lambda p: p.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def _code(notebook):
    return [c for c in notebook.cells if c.cell_type == "code"]


def test_executed_in_order_without_errors_or_stderr(notebook):
    assert [c.execution_count for c in _code(notebook)] == list(range(1, len(_code(notebook)) + 1))
    outputs = [o for c in _code(notebook) for o in c.outputs]
    assert len(outputs) > len(_code(notebook)) // 2  # stripped notebooks teach nothing
    for output in outputs:
        assert output.output_type != "error" and output.get("name") != "stderr", str(output)[:300]


def test_no_widgets_no_run_metadata_no_paths(notebook):
    assert set(notebook.metadata) <= {"kernelspec", "language_info", "nblib"}
    # how long it takes, for a batch to begin with the longest
    assert notebook.metadata.nblib.keys() == {"seconds"}
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags", "jupyter"}, cell.metadata
        assert cell.metadata.get("jupyter", {"outputs_hidden": True}) == {"outputs_hidden": True}
    text = json.dumps(notebook)
    assert "widget-view" not in text
    assert not re.search(r"(/root/|/home/\w|/tmp/|/Users/)", text)


def test_only_drawings_stand_above_the_parameters_and_nothing_hides(notebook):
    for cell in _code(notebook):
        if "parameters" in cell.metadata.get("tags", []):
            break
        assert set(re.findall(r"^(?:from|import) ([\w.]+)", cell.source, re.M)) <= {
            "lessons.drawings",
            "lessons",
        }
    tags = [tag for c in _code(notebook) for tag in c.metadata.get("tags", [])]
    assert set(tags) <= {"parameters", "nbval-check-output"} and sorted(tags) == [
        "nbval-check-output",
        "parameters",
    ]
    for cell in _code(notebook):
        # the doctor's own
        source = re.sub(r"^(%load_ext loopdoctor|%%doctor( .*)?)$", "", cell.source, flags=re.M)
        assert not re.search(r"^\s*[!%]|if False|NBLIB_|tqdm", source, re.M), cell.source[:80]


def test_the_checked_cell_has_something_to_compare(notebook):
    cell = next(c for c in _code(notebook) if "nbval-check-output" in c.metadata.get("tags", []))
    text = "".join(o.get("text", "") for o in cell.outputs)
    assert len(text.splitlines()) >= 3
    assert not re.search(r"\d\.\d{2,}", text)  # no measured floats


def test_prose_repeats_no_measured_number(notebook):
    """A number with two decimals or more belongs to a cell's output, where it is measured."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            own = re.sub(r"(arXiv:|arxiv.org/abs/|doi.org/)[\w./]+", "", cell.source)
            assert not re.search(r"\b\d+\.\d{2,}\b(?!\d*\.)", own), cell.source[:200]


def test_the_broken_lines_of_every_pitfall_are_on_a_page():
    shown = "\n".join(
        "".join(output.get("data", {}).get("text/plain", ""))
        for path in NOTEBOOKS
        for cell in _code(nbformat.read(path, as_version=4))
        for output in cell.outputs
    )
    missing = [
        p.id
        for p in catalogue()
        if textwrap.indent("\n".join(lines_of(p.wrong)), "    ") not in shown
    ]
    assert not missing, "stored outputs are older than these pitfalls: make refresh"


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_every_profile_fits_its_notebook(profile: Path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # a name is enough here
    name = profile.name.split(".")[0]
    declared = parameters.declared(paths.notebooks() / f"{name}.ipynb")
    values = parameters.load_yaml(profile)
    assert values and parameters.check(declared, values, str(profile))
    assert yaml.safe_load(profile.read_text()) == values  # so plain papermill -f reads the same
    assert "nblib run" in profile.read_text().split("\n\n")[0]  # the header says how


@pytest.mark.parametrize("file", SWEEPS, ids=lambda p: p.name)
def test_every_sweep_fits_its_notebook_and_varies_something(file: Path):
    name = file.name.split(".")[0]
    assert len(sweep.plan(name, file=str(file)).jobs) > 1
    assert f"nblib sweep {name}" in file.read_text().split("\n\n")[0]  # the header says how


@pytest.mark.parametrize("file", SEARCHES, ids=lambda p: p.name)
def test_every_search_fits_its_notebook_and_names_a_result_of_it(file: Path):
    name = file.name.split(".")[0]
    plan = search.plan(name, file=str(file))
    assert plan.ranges and f"{plan.goal[1]}=" in (paths.notebooks() / f"{name}.ipynb").read_text()
    # the header says how
    assert f"nblib sweep {name} --trials" in file.read_text().split("\n\n")[0]
