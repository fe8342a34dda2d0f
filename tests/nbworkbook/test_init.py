"""A workbook of one's own: what `nblib init` writes, what it refuses, and that its notebook
plans.
"""

import json

import nbformat
import pytest

from nblib import paths
from nbworkbook import init, jobs, parameters, sweep
from nbworkbook.parameters import ParameterError


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder that is in no workbook, our packages as a wheel installs them, and no variable that
    moves anything.
    """
    (tmp_path / "site-packages").mkdir()
    for name in ("nblib", "nbworkbook"):
        (tmp_path / "site-packages" / name).symlink_to(paths.code() / name)
    for name in ("NOTEBOOKS", "PARAMETERS", "OUTPUTS", "ROOT", "BASE"):
        monkeypatch.delenv(f"NBLIB_{name}", raising=False)
    monkeypatch.setattr(paths, "code", lambda: tmp_path / "site-packages")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_what_it_makes_is_a_workbook_from_every_folder_inside(elsewhere, monkeypatch):
    assert not paths.is_workbook()
    made = init.make(elsewhere / "My Own!")
    assert all(path.is_file() for path in made) and not (elsewhere / "My Own!" / "outputs").exists()
    assert 'name = "my-own"' in (elsewhere / "My Own!" / "pyproject.toml").read_text()
    for inside in (".", "notebooks", "../My Own!/parameters"):
        monkeypatch.chdir(elsewhere / "My Own!" / inside)
        assert paths.is_workbook() and paths.root() == elsewhere / "My Own!"
        assert jobs.names() == [init.NOTEBOOK]
        monkeypatch.chdir(elsewhere / "My Own!")


def test_its_notebook_its_profile_and_its_sweep_plan(elsewhere, monkeypatch):
    init.make(elsewhere)
    notebook = elsewhere / "notebooks" / f"{init.NOTEBOOK}.ipynb"
    nbformat.validate(nbformat.read(notebook, as_version=4))
    assert not [
        c
        for c in json.loads(notebook.read_text())["cells"]
        if c.get("outputs") or c.get("execution_count")
    ]
    (job,), (long,) = jobs.plan([init.NOTEBOOK]), jobs.plan(["00"], profile="long")
    assert job.path == notebook and long.parameters["steps"] > job.parameters["steps"]
    assert {"code of nblib.train", "torch", "python"} <= job.inputs.keys() and job.key != long.key
    planned = sweep.plan("00")
    assert len(planned.jobs) == 6 and len({each.key for each in planned.jobs}) == 6
    with pytest.raises(ParameterError, match="'steps' is 0, allowed"):
        jobs.plan(["00"], overrides=["steps=0"])


def test_it_replaces_nothing_and_says_what_is_in_the_way(elsewhere):
    folder = elsewhere / "mine"
    init.make(folder)
    init.make(folder)  # the same once more, as after a kill
    (folder / "pyproject.toml").write_text("[project]\n")
    (folder / "notebooks" / f"{init.NOTEBOOK}.ipynb").unlink()
    with pytest.raises(
        ParameterError, match=r"mine/pyproject.toml is there already and is not replaced"
    ):
        init.make(folder)
    assert not list((folder / "notebooks").iterdir()), (
        "nothing is written where all of it cannot be"
    )
    (elsewhere / "file").write_text("")
    with pytest.raises(ParameterError, match="file is a file; name a folder"):
        init.make(elsewhere / "file")


def test_its_corpora_and_models_lie_in_the_cache_of_the_user(elsewhere, tmp_path):
    init.make(elsewhere)
    assert paths.store() == tmp_path / "cache" / "nblib" / "base" == paths.usual_store()
    assert paths.corpora() == tmp_path / "cache" / "nblib" / "corpora"
    assert paths.outputs() == elsewhere / "outputs"


def test_every_parameter_of_its_notebook_has_a_meaning(elsewhere):
    init.make(elsewhere)
    declared = parameters.declared(elsewhere / "notebooks" / f"{init.NOTEBOOK}.ipynb")
    assert declared["steps"].allowed is not None and "checkpoint_every" in declared
