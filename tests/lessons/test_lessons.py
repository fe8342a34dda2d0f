"""The package itself: light to import, found beside the notebooks, and a sentence where it is not."""

import importlib.util
import subprocess
import sys

import pytest

import nblib.run
from nblib import paths


def test_importing_it_is_light():
    code = "import sys, lessons; print([name for name in ('torch', 'transformers', 'nblib') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_it_is_found_beside_the_notebooks_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert nblib.run._Lessons in sys.meta_path and nblib.run._Lessons.find_spec("nothing") is None
    spec = nblib.run._Lessons.find_spec("lessons")
    assert spec.origin == str(paths.root() / "notebooks" / "lessons" / "__init__.py")


@pytest.mark.parametrize("folder", ["", "notebooks/lessons"])
def test_missing_it_says_how_to_install_it(tmp_path, monkeypatch, folder):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    monkeypatch.delitem(sys.modules, "lessons", raising=False)
    monkeypatch.setattr(sys, "meta_path", [nblib.run._Lessons])
    with pytest.raises(ModuleNotFoundError, match="lessons.*by `make env` or `pip install -e .` in ") as error:
        importlib.util.find_spec("lessons")
    assert error.value.name == "lessons"
