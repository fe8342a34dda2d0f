"""Every folder can be moved, and a path is shown as a person would type it."""

from pathlib import Path

import pytest

from nblib import paths

MOVABLE = {"NBLIB_NOTEBOOKS": "notebooks", "NBLIB_PARAMETERS": "profiles", "NBLIB_OUTPUTS": "outputs"}


def test_the_root_holds_the_project_wherever_we_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (paths.root() / "pyproject.toml").is_file() and (paths.root() / "nblib" / "paths.py").is_file()


@pytest.mark.parametrize("variable", [*MOVABLE, "NBLIB_BASE"])
def test_a_variable_moves_its_folder_and_empty_means_the_default(tmp_path, monkeypatch, variable):
    function = getattr(paths, MOVABLE.get(variable, "store"))
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    assert function() == tmp_path / "elsewhere"
    monkeypatch.setenv(variable, "")
    monkeypatch.chdir(tmp_path)  # which an empty path would mean
    assert function().is_relative_to(paths.outputs() if variable == "NBLIB_BASE" else paths.root())


def test_the_store_follows_the_outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("NBLIB_OUTPUTS", str(tmp_path))
    monkeypatch.delenv("NBLIB_BASE")
    assert paths.store() == tmp_path / "base"


def test_short_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert paths.short(tmp_path / "a" / "b") == "a/b"
    assert paths.short(paths.root() / "nblib" / "paths.py") == "nblib/paths.py"
    assert paths.short(Path("/etc/hosts")) == "/etc/hosts"
