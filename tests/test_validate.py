"""Which notebooks are validated, in which order, and with what in the environment; nbval itself is not run here."""

import os
import subprocess

import pytest
import small_notebooks
import validate

from nblib import paths


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    """A workbook under git with three notebooks committed."""
    folder = small_notebooks.move_workbook(tmp_path, monkeypatch)
    for name, source in (("00_setup", "1"), ("01_loop", "2"), ("10_lrc", "from nblib import base\nbase.load(recipe)")):
        small_notebooks.write(name, source)
    names = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for command in ("init -q", "add .", "commit -q -m x"):
        subprocess.run(["git", *command.split()], cwd=folder, check=True, env=os.environ | names)
    monkeypatch.delenv("BASE", raising=False)
    return folder


@pytest.fixture
def calls(monkeypatch):
    """What would have been run, and the environment at that time."""
    made = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(validate.pytest, "main", lambda how: made.append((how, dict(os.environ))) or 0)
    monkeypatch.setattr(validate, "make_base", lambda: made.append("base"))
    return made


def main(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["validate.py", *arguments])
    return validate.main()


def notebooks(how: list[str]) -> list[str]:
    return [part.rpartition("/")[2] for part in how if part.endswith(".ipynb")]


def test_those_that_changed_and_those_that_are_new(workbook, calls, monkeypatch, capsys):
    assert main(monkeypatch) == 0 and calls == [] and "No notebook differs from HEAD" in capsys.readouterr().out
    small_notebooks.write("01_loop", "3")
    small_notebooks.write("12_new", "4")
    (paths.notebooks() / "lessons").mkdir()
    (paths.notebooks() / "lessons" / "draft.ipynb").write_text("{}")  # not one of the workbook
    assert main(monkeypatch) == 0
    ((how, environment),) = calls
    assert notebooks(how) == ["12_new.ipynb", "01_loop.ipynb"] and how[how.index("-n") + 1] == "2"
    assert environment["OMP_NUM_THREADS"] == "1" and environment["NBLIB_FACTS"] == ""


def test_a_deleted_one_is_not_asked_for(workbook, calls, monkeypatch):
    (paths.notebooks() / "00_setup.ipynb").unlink()
    assert main(monkeypatch) == 0 and calls == []


def test_named_ones_and_the_base_model_only_where_it_is_used(workbook, calls, monkeypatch):
    assert main(monkeypatch, "00", "01_loop") == 0
    assert notebooks(calls[0][0]) == ["01_loop.ipynb", "00_setup.ipynb"]
    assert main(monkeypatch, "10") == 0
    assert calls[1] == "base" and notebooks(calls[2][0]) == ["10_lrc.ipynb"]


def test_all_with_facts(workbook, calls, monkeypatch):
    monkeypatch.setenv("NBLIB_FACTS", "from somewhere")
    assert main(monkeypatch, "--all", "--facts", "facts", "--junit-xml=x.xml") == 0
    how, environment = calls[1]
    assert len(notebooks(how)) == 3 and "--junit-xml=x.xml" in how
    assert environment["NBLIB_FACTS"] == os.path.abspath("facts")


@pytest.mark.parametrize(
    ("arguments", "base", "said"), [(["99"], "", "unknown notebook '99'"), ([], "no-such-branch", "git diff: ")]
)
def test_what_is_wrong_is_one_sentence(workbook, calls, monkeypatch, capsys, arguments, base, said):
    monkeypatch.setenv("BASE", base)
    assert main(monkeypatch, *arguments) == 2 and calls == []
    (line,) = capsys.readouterr().err.splitlines()
    assert said.lower() in line.lower()
