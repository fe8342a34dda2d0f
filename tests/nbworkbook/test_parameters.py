"""The declaration is read as papermill reads it, and no wrong value, name or file gets past it."""

import json

import papermill
import pytest
import small_notebooks
import yaml

from nbworkbook import parameters
from nbworkbook.parameters import ParameterError, Range, check, declared


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.move_workbook(tmp_path, monkeypatch)


def test_declaration_is_read_and_papermill_agrees(workbook):
    path = small_notebooks.write("00_a", "1")
    found = declared(path)
    assert [p.default for p in found.values()] == [3, 1e-3, "auto", [1, 2], True]
    assert found["steps"].allowed == Range(1, 100) and found["precision"].allowed == (
        "auto",
        "fp32",
    )
    assert found["shuffle"].allowed is None and found["lr"].comment == "learning rate [0 .. 1]"
    theirs = papermill.inspect_notebook(str(path))
    assert {name: p["inferred_type_name"] for name, p in theirs.items()} == {
        n: p.type for n, p in found.items()
    }
    assert {name: p["help"] for name, p in theirs.items()} == {
        n: p.comment for n, p in found.items()
    }
    assert parameters.title(path) == "About 00_a & <more>"


@pytest.mark.parametrize(
    "line, said",
    [
        ("steps = 3  # no type", "name: type = literal"),
        ("steps: int = 3", "one '#'"),
        ("steps: int = 3  #", "the comment must say"),
        ("steps: int = 2 * 3  # expression", "a literal and not an expression"),
        ("steps: int = len([1])  # call", "a literal and not an expression"),
        ("steps: int | None = 3  # union", "no '|'"),
        ("steps: int = 3  # so that x=3", "one '='"),
        ('steps: str = "#1"  # hash', "one '#'"),
        ("steps: dict = {}  # mapping", "type 'dict' is not one of"),
        ("steps: int = 3.5  # wrong default", "must be of type int"),
        ("steps: int = True  # a bool is no int", "must be of type int"),
        ("steps: int = 3  # range [5 .. 9]", "allowed: 5 .. 9"),
        ("steps: int = 3  # range [a .. b]", "is not a range"),
        ('steps: str = "a"  # range of text [1 .. 2]', "needs numbers"),
        ("sizes: list[int] = [  # over two lines", "a literal"),
        ("import os  # no", "name: type = literal"),
        ("steps: int = 3  # once\nsteps: int = 4  # twice", "declared twice"),
    ],
)
def test_a_line_nobody_could_represent_is_named(workbook, line, said):
    path = small_notebooks.write("00_a", "1", parameters=f"# a comment is fine\n\n{line}")
    with pytest.raises(ParameterError) as caught:
        declared(path)
    assert said in str(caught.value) and "00_a.ipynb, parameters cell, line" in str(caught.value)


def test_the_cell_must_be_tagged_and_the_file_a_notebook(workbook):
    path = small_notebooks.write("00_a", "1")
    document = json.loads(path.read_text())
    document["cells"][1]["metadata"] = {}
    path.write_text(json.dumps(document))
    with pytest.raises(ParameterError, match="must carry the tag 'parameters'"):
        declared(path)
    for text in ("{", "[]", '{"worksheets": []}'):
        path.write_text(text)
        with pytest.raises(ParameterError, match="not a readable version 4 notebook"):
            declared(path)
    with pytest.raises(ParameterError, match="Cannot read the notebook"):
        declared(path.with_name("none.ipynb"))


@pytest.mark.parametrize(
    "values, said",
    [
        ({"step": 3}, "src: unknown parameter 'step'; did you mean 'steps'?"),
        ({"zzz": 3}, "known: lr, precision, shuffle, sizes, steps"),
        ({"steps": "7"}, "'steps' is '7', but it must be of type int"),
        ({"steps": 7.0}, "type int"),
        ({"steps": True}, "type int"),
        ({"steps": 0}, "'steps' is 0, allowed: 1 .. 100"),
        ({"lr": "1e-3"}, "type float"),
        ({"lr": float("nan")}, "type float"),
        ({"lr": float("inf")}, "type float"),
        ({"lr": 10**400}, "type float"),
        ({"lr": None}, "type float"),
        ({"precision": "fp31"}, "allowed: auto, fp32"),
        ({"sizes": [1, 10]}, "allowed: 1 .. 9"),
        ({"sizes": [1, "2"]}, "type list[int]"),
        ({"sizes": 3}, "type list[int]"),
        ({"shuffle": 1}, "type bool (true or false)"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(workbook, values, said):
    with pytest.raises(ParameterError) as caught:
        check(declared(small_notebooks.write("00_a", "1")), values, "src")
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1


SECRET = 'token: str = ""  # access to the hub [secret]'


def test_a_secret_is_only_ever_a_name(workbook, monkeypatch):
    known = declared(small_notebooks.write("00_a", "1", parameters=SECRET))
    monkeypatch.setenv("HUB", "hunter2")
    monkeypatch.delenv("NONE", raising=False)
    assert check(known, {"token": "@HUB"}, "src") == {"token": "@HUB"} and check(
        known, {"token": ""}, "src"
    )
    for value, said in (
        ("hunter2", "must be given as @NAME"),
        ("@NONE", "NONE, which is not set"),
        ("@a b", "@NAME"),
    ):
        with pytest.raises(ParameterError, match=said) as caught:
            check(known, {"token": value}, f"-p token={value}")
        assert "hunter2" not in str(caught.value) and str(caught.value).startswith(
            "-p token: 'token' is hidden"
        )
    with pytest.raises(ParameterError, match="unknown parameter 'tokn'") as caught:
        parameters.parse_assignment("tokn=hunter2", known)
    assert "hunter2" not in str(caught.value)
    (token,) = parameters.secrets(known, {"token": "@HUB"}).values()
    assert (
        token == "hunter2"
        and f"{token}" == "hunter2"
        and repr(token) == "'@HUB'" == repr(token.reference)
    )
    assert parameters.secrets(known, {"token": ""}) == {}


@pytest.mark.parametrize(
    "line, said",
    [
        (SECRET.replace('""', '"hunter2"'), "default"),
        (SECRET.replace("str", "list[str]").replace('""', "[]"), "its type is str"),
    ],
)
def test_a_secret_is_declared_as_empty_text(workbook, line, said):
    with pytest.raises(ParameterError, match=said) as caught:
        declared(small_notebooks.write("00_a", "1", parameters=line))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"nbformat": 99}, "version 4"),
        ({"cells": None}, "version 4"),
        ({"cells": [1]}, "version 4"),
        ({"cells": [{"source": "1"}]}, "version 4"),
        ({"cells": [{"cell_type": "poem", "source": "1"}]}, "version 4"),
        ({"cells": [{"cell_type": "code", "source": None}]}, "version 4"),
        ({"cells": [{"cell_type": "code", "source": "1", "metadata": []}]}, "version 4"),
        (
            {"cells": [{"cell_type": "code", "source": "1", "metadata": {"tags": None}}]},
            "version 4",
        ),
        ({"cells": [{"cell_type": "code", "source": "1", "outputs": [{}]}]}, "version 4"),
        ({"cells": [{"cell_type": "code", "source": "1", "outputs": 3}]}, "version 4"),
        ({"cells": [{"cell_type": "code", "source": "'\ud800'"}]}, "version 4"),
        ({"cells": [{"cell_type": "code", "source": "1"}]}, "must carry the tag"),
    ],
)
def test_a_notebook_of_another_shape_is_one_sentence(workbook, change, said):
    path = small_notebooks.write("00_a", "1")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ParameterError, match=said):
        declared(path)


def test_good_values_pass_and_all_problems_are_listed_at_once(workbook):
    known = declared(small_notebooks.write("00_a", "1"))
    good = check(known, {"lr": 1, "sizes": [9], "shuffle": False}, "src")
    assert good == {"lr": 1.0, "sizes": [9], "shuffle": False} and type(good["lr"]) is float
    with pytest.raises(ParameterError) as caught:
        check(known, {"lr": 2, "steps": 0, "lrr": 1}, "src")
    assert len(str(caught.value).splitlines()) == 3


def test_assignments_are_typed_by_the_declaration(workbook):
    known = declared(small_notebooks.write("00_a", "1"))
    texts = {
        "steps=7": 7,
        "lr=1e-3": 1e-3,
        "lr=1": 1.0,
        "shuffle=False": False,
        "sizes=[3, 4]": [3, 4],
        "sizes=5": [5],
    }
    for text, value in texts.items():
        found = check(known, dict([parameters.parse_assignment(text, known)]), "-p")
        assert list(found.values()) == [value], text
    for text in ("steps=1.5", "shuffle=maybe", "lr=fast", "sizes=[1,x]", "lr=nan"):
        with pytest.raises(ParameterError, match="must be of type"):
            check(known, dict([parameters.parse_assignment(text, known)]), "-p")
    with pytest.raises(ParameterError, match="expected name=value"):
        parameters.parse_assignment("steps", known)
    with pytest.raises(ParameterError, match="did you mean 'steps'"):
        parameters.parse_assignment("stebs=1", known)


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("7", 7),
        ("1_000", 1000),
        ("true", True),
    ]
    + [
        ("010", "010"),
        ("12:30", "12:30"),
        ("yes", "yes"),
        ("2024-01-01", "2024-01-01"),
        ("[1, 2]", [1, 2]),
    ],
)
def test_yaml_numbers_are_what_a_person_means(tmp_path, text, value):
    (tmp_path / "a.yaml").write_text(f"x: {text}\n")
    found = parameters.load_yaml(tmp_path / "a.yaml")["x"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text, said",
    [
        ("a: [", "line 1"),
        ("a: 1\nb: 2\na: 3\n", "line 3: 'a' is given twice"),
        ("- 1\n", "expected lines of"),
        ("a: {b: 1}\n", "line 1: the mapping must be flat"),
        ("a: [[1]]\n", "must be flat"),
        ("a: !!python/object:os.system 1\n", "line 1: a value is what it looks like: no tag (!)"),
        ("a: 1\nb: !!int foo\n", "line 2: a value is what it looks like"),
        ("a: &x [1]\n", "no tag (!), anchor (&) or alias (*)"),
        ("a: " + "9" * 5000, "a number has more digits than Python reads"),
        ("a: " + "[" * 5000, "must be flat"),
        ("a: 1\n\tb: 2\n", "line 2"),
        ("a: 1\n---\nb: 2\n", "a.yaml"),
        ("a: *b\n", "anchor (&) or alias (*)"),
        ("a: \x00\n", "not valid YAML"),
    ],
)
def test_unreadable_yaml_is_one_sentence_with_file_and_line(tmp_path, text, said):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ParameterError) as caught:
        parameters.load_yaml(tmp_path / "a.yaml")
    assert (
        said in str(caught.value)
        and "a.yaml" in str(caught.value)
        and len(str(caught.value).splitlines()) == 1
    )
    (tmp_path / "a.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(ParameterError, match="not UTF-8"):
        parameters.load_yaml(tmp_path / "a.yaml")
    with pytest.raises(ParameterError, match="Cannot read"):
        parameters.load_yaml(tmp_path)


def test_written_yaml_reads_the_same_here_and_in_papermill(tmp_path):
    values = {
        "a": 1e-5,
        "b": [1e16, 2.0, -3e-7],
        "c": "1e-3",
        "d": True,
        "e": 3,
        "f": "yes",
        "g": 'q"\\ é',
        "h": [],
    }
    # what YAML would fold or refuse, unless it is escaped
    values["i"] = "\x7f \x85 \u2028 \ufeff \U0001f600 \t\r\n"
    (tmp_path / "a.yaml").write_text(parameters.dump_yaml(values))
    assert (
        parameters.load_yaml(tmp_path / "a.yaml")
        == values
        == yaml.safe_load((tmp_path / "a.yaml").read_text())
    )
