"""The schemas take what the notebooks take and refuse what they refuse, and the stored ones are up
to date.
"""

import json

import jsonschema
import pytest
import small_notebooks
import yaml
from small_notebooks import write

from nblib import paths
from nbworkbook import jobs, parameters, schema, search
from nbworkbook.parameters import ParameterError

PARAMETERS = """steps: int = 3  # optimizer steps [1 .. 100]
lr: float = 1e-3  # learning rate [0 .. ]
precision: str = "auto"  # dtype [auto, fp32]
sizes: list[int] = [1, 2]  # layer sizes [1 .. 9]
shuffle: bool = True  # mix the data
title: str = "a"  # any words
token: str = ""  # access [secret]"""

GOOD = [
    {},
    {"steps": 100, "lr": 1, "precision": "fp32", "sizes": [9], "shuffle": False, "title": ""},
    {"token": "@HOME", "sizes": []},
]
BAD = [
    {"stepz": 3},
    {"steps": 0},
    {"steps": 101},
    {"steps": 1.5},
    {"steps": "3"},
    {"steps": True},
    {"steps": [3]},
    {"lr": -0.1},
    {"lr": "1e-3 "},
    {"precision": "fp64"},
    {"sizes": [10]},
    {"sizes": 1},
    {"sizes": ["1"]},
    {"shuffle": "yes"},
    {"title": 3},
    {"token": "hunter2"},
]


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    folder = small_notebooks.steady_workbook(tmp_path, monkeypatch)
    write("10_lrc", "1", parameters=PARAMETERS)
    return folder


@pytest.fixture
def known(workbook):
    return parameters.declared(workbook / "notebooks" / "10_lrc.ipynb")


def takes(made, values) -> bool:
    return jsonschema.Draft7Validator(made).is_valid(values)


@pytest.mark.parametrize("values", GOOD)
def test_what_a_run_takes_the_schema_takes(known, values):
    parameters.check(known, values, "test")
    made = schema.of_profiles("10_lrc", known)
    jsonschema.Draft7Validator.check_schema(made)
    assert takes(made, values)


@pytest.mark.parametrize("values", BAD)
def test_what_a_run_refuses_the_schema_refuses(known, values):
    with pytest.raises(ParameterError):
        parameters.check(known, values, "test")
    assert not takes(schema.of_profiles("10_lrc", known), values)


def test_it_says_what_a_parameter_means_and_its_default(known):
    properties = schema.of_profiles("10_lrc", known)["properties"]
    assert properties["steps"] == {
        "description": "optimizer steps [1 .. 100]",
        "default": 3,
        "type": "integer",
        "minimum": 1,
        "maximum": 100,
    }
    assert properties["precision"]["enum"] == ["auto", "fp32"] and "maximum" not in properties["lr"]


def test_a_sweep_takes_a_value_or_several(known):
    made = schema.of_sweeps("10_lrc", known)
    jsonschema.Draft7Validator.check_schema(made)
    for good in ({"steps": [1, 2], "lr": 0.1}, {"sizes": [[1, 2], [3]]}, {"sizes": [1, 2]}):
        assert takes(made, good)
    for bad in ({"steps": [1, 101]}, {"steps": []}, {"steps": [1, 1]}, {"sizes": [[10]]}, {"a": 1}):
        assert not takes(made, bad)


def test_a_search_takes_ranges_and_one_goal(known):
    made = schema.of_searches("10_lrc", known)
    jsonschema.Draft7Validator.check_schema(made)
    goal = {"minimise": "loss"}
    for good in (
        goal | {"lr": "1e-4 .. 1e-1 log", "steps": "1 .. 9", "prune_high": "loss"},
        {"maximise": "recovered", "precision": ["auto", "fp32"], "steps": 8},
    ):
        assert takes(made, good)
    for bad in (
        {"lr": "0.1 .. 0.2"},
        goal | {"maximise": "loss"},
        goal | {"lr": "0.1 to 0.2"},
        goal | {"lr": "0.1 .. 0.2 linear"},
        goal | {"precision": "auto .. fp32"},
        {"minimise": ["loss"]},
    ):
        assert not takes(made, bad)
    assert search.GOALS == tuple(each["required"][0] for each in made["oneOf"])


def test_a_search_file_with_a_schema_is_read_as_before(workbook):
    file = workbook / "parameters" / "10_lrc.search.yaml"
    file.write_text("minimise: loss\nlr: 1e-4 .. 1e-1 log\nsteps: 8\n")
    before = search.plan("10")
    schema.write(["10"])
    assert file.read_text().startswith(
        "# yaml-language-server: $schema=./10_lrc.search.schema.json\n"
    )
    assert search.plan("10") == before


def test_every_file_names_its_schema_once_and_keeps_its_text(workbook):
    texts = {
        "full": "steps: 5  # é\n",
        "mine": "# of mine\n\nsteps: 6\n",
        "windows": "steps: 7\r\nlr: 1\r\n",
        "race.sweep": "steps: [1, 2]\n",
        "sweep": "steps: [1, 2]\n",
        "elsewhere": "# yaml-language-server: $schema=https://example.org/a.json\nsteps: 8\n",
        "old": "# yaml-language-server: $schema=./09_lrc.schema.json\nsteps: 9\n",
    }
    folder = workbook / "parameters"
    for name, text in texts.items():
        (folder / f"10_lrc.{name}.yaml").write_bytes(text.encode())
    (folder / "10_lrc.bom.yaml").write_bytes(b"\xef\xbb\xbfsteps: 4\n")
    values = {path: parameters.load_yaml(path, depth=2) for path in folder.glob("*.yaml")}

    written = schema.write(["10"])
    assert {path.name for path in written if path.suffix == ".json"} == {
        "10_lrc.schema.json",
        "10_lrc.sweep.schema.json",
    }
    for path, before in values.items():
        first, _, rest = path.read_bytes().decode().partition("\n")
        kind = "sweep." if "sweep" in path.name else ""
        where = f"./10_lrc.{kind}schema.json"
        if "elsewhere" in path.name:
            where = "https://example.org/a.json"
        assert first == f"# yaml-language-server: $schema={where}"
        assert rest.count("yaml-language-server") == 0
        assert parameters.load_yaml(path, depth=2) == before
    assert (folder / "10_lrc.windows.yaml").read_bytes().endswith(texts["windows"].encode())
    assert schema.write(["10"]) == [], "writing twice changes something"


def test_nothing_is_written_when_a_notebook_cannot_be_read(workbook):
    write("11_bad", "1", parameters="steps: int = many  # a")
    with pytest.raises(ParameterError, match="11_bad"):
        schema.write(["10", "11"])
    assert list((workbook / "parameters").iterdir()) == []


# ------------------------------------------------------------------ the stored ones


@pytest.mark.parametrize("notebook", jobs.names())
def test_the_stored_schemas_are_what_the_command_writes(notebook):
    stale = [
        path.name
        for path, content in schema._files_of(notebook).items()
        if not path.exists() or path.read_bytes() != content
    ]
    assert stale == [], "run: nblib schema"


def test_no_schema_is_left_of_a_notebook_or_a_file_that_is_gone():
    made = {path.name for name in jobs.names() for path in schema._files_of(name)}
    stored = {path.name for path in paths.profiles().glob("*.json")}
    assert stored - made == set()


@pytest.mark.parametrize(
    "file", sorted(paths.profiles().glob("*.yaml")), ids=lambda path: path.name
)
def test_every_stored_file_fits_the_schema_that_it_names(file):
    first = file.read_text().splitlines()[0]
    made = json.loads((file.parent / first.partition("$schema=")[2]).read_text())
    for values in (parameters.load_yaml(file, depth=2), yaml.safe_load(file.read_text())):
        jsonschema.Draft7Validator(made).validate(values)
