"""Every folder can be moved, and a path is shown as a person would type it."""

from pathlib import Path

import pytest

from nblib import paths

MOVABLE = {
    "NBLIB_NOTEBOOKS": "notebooks",
    "NBLIB_PARAMETERS": "profiles",
    "NBLIB_OUTPUTS": "outputs",
}


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A home, packages installed from a wheel, and a folder where somebody works, in no
    workbook.
    """
    for name in ("ROOT", "NOTEBOOKS", "PARAMETERS", "OUTPUTS", "BASE"):
        monkeypatch.delenv(f"NBLIB_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(paths, "code", lambda: tmp_path / "site-packages")
    (tmp_path / "work" / "deep").mkdir(parents=True)
    (tmp_path / "site-packages").mkdir()
    monkeypatch.chdir(tmp_path / "work" / "deep")
    return tmp_path


def test_an_editable_install_is_the_root_where_there_is_no_workbook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert paths.root() == paths.code() == Path(paths.__file__).parents[1] and paths.is_workbook()


def test_the_root_is_the_nearest_parent_that_is_a_workbook(wheel, monkeypatch):
    here = wheel / "work" / "deep"
    assert paths.root() == here and not paths.is_workbook() and paths.notebooks() == here
    (wheel / "work" / "pyproject.toml").write_text("[tool.other]\nname = 'nblib'\n[tool.nblibx]\n")
    assert not paths.is_workbook()
    (wheel / "work" / "pyproject.toml").write_text("[tool.other]\n[ tool . nblib ]  # of ours\n")
    assert paths.root() == wheel / "work" and paths.is_workbook()
    assert paths.notebooks() == wheel / "work" / "notebooks"
    (here / "notebooks").mkdir()
    assert paths.root() == wheel / "work"
    (here / "parameters").mkdir()
    assert paths.root() == here and paths.outputs() == here / "outputs"
    monkeypatch.setenv("NBLIB_ROOT", str(wheel))
    assert paths.root() == wheel and not paths.is_workbook()


@pytest.mark.parametrize("content", [b"\xff nblib", b"nblib = ", b"tool = 'nblib'", b"[nblib]"])
def test_a_pyproject_that_cannot_be_read_marks_nothing(wheel, content):
    (wheel / "work" / "pyproject.toml").write_bytes(content)
    assert not paths.is_workbook()


def test_what_outlives_a_run_lies_in_the_cache_of_the_user_and_in_the_clone_beside_its_runs(
    wheel, monkeypatch
):
    cache = wheel / "home" / ".cache" / "nblib"
    assert (paths.store(), paths.corpora()) == (cache / "base", cache / "corpora")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert paths.cache() == cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(wheel / "large disk"))
    assert paths.corpora() == wheel / "large disk" / "nblib" / "corpora"
    clone = wheel / "site-packages"
    monkeypatch.chdir(clone)
    assert paths.root() == clone and paths.store() == wheel / "large disk" / "nblib" / "base"
    for name in ("notebooks", "parameters"):
        (clone / name).mkdir()
    assert (paths.store(), paths.corpora()) == (
        clone / "outputs" / "base",
        clone / "outputs" / "corpora",
    )


def test_a_notebook_that_lies_elsewhere_has_its_own_folder_for_a_while(wheel):
    usual = paths.notebooks()
    with pytest.raises(KeyError), paths.notebooks_at(wheel / "home"):
        assert paths.notebooks() == wheel / "home"
        raise KeyError
    assert paths.notebooks() == usual


def test_a_deleted_folder_is_named_as_the_shell_names_it(wheel, monkeypatch):
    monkeypatch.setenv("PWD", str(wheel / "work" / "deep"))
    (wheel / "work" / "deep").rmdir()
    assert (
        paths.root() == wheel / "work" / "deep" and paths.short(Path("/etc/hosts")) == "/etc/hosts"
    )


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
