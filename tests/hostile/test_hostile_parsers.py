"""Everything that parses, fed by hypothesis: the value that was written, or the one error that is
documented.
"""

import contextlib
import json
import math
import shutil

import pytest
import torch
from attack import within
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some

from nblib import checkpoint, files
from nblib.methods.distill import teacher_cache
from nbworkbook import parameters
from nbworkbook.parameters import ParameterError

pytestmark = pytest.mark.slow  # not one of them, all together


# The same examples each time: a failure here is found before a merge and not by chance after it.
FUZZ = settings(
    max_examples=300,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inner: (
        some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
TEXT = some.text(some.characters(codec="utf-8"))  # what a file can hold
NUMBERS = some.floats(allow_nan=False, allow_infinity=False).filter(lambda x: abs(x) < 1e308)
INTEGERS = some.integers(-(2**63), 2**63)
VALUES = {"int": INTEGERS, "float": NUMBERS, "str": TEXT, "bool": some.booleans()}
VALUES |= {
    f"list[{kind}]": some.lists(VALUES[kind], max_size=5) for kind in ("int", "float", "str")
}
NAMES = some.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True)
PAIRS = some.sampled_from(sorted(VALUES)).flatmap(
    lambda kind: some.tuples(some.just(kind), VALUES[kind])
)
# words of which the thing that is parsed is made, so that some of it comes close
YAMLISH = some.lists(
    some.sampled_from(
        [
            "a",
            "b",
            ": ",
            "\n",
            "- ",
            "[",
            "]",
            "{",
            "}",
            ",",
            "'",
            '"',
            "!!int ",
            "&x ",
            "*x",
            "? ",
            "|",
            ">",
            "%",
            "#",
        ]
        + [
            "1",
            "1e3",
            ".",
            "\\ud800",
            "\t",
            "  ",
            "---",
            "...",
            "<<",
            "~",
            "\x00",
            "\x85",
            "\ufeff",
            "é",
            "@",
            "`",
        ]
    ),
    max_size=30,
).map("".join)
LINES = some.lists(
    some.sampled_from(
        [
            "a",
            "b",
            ": ",
            "int",
            "float",
            "str",
            "list[int]",
            "bool",
            " = ",
            "1",
            "-1",
            "[1]",
            "[]",
            '""',
            "'x'",
            "True",
        ]
        + [
            "  # ",
            "word",
            " [",
            "]",
            "..",
            ",",
            "secret",
            "a corpus",
            "nan",
            "\n",
            ";",
            "(",
            ")",
            "\\",
            "0x",
            "lambda",
        ]
    ),
    max_size=14,
).map("".join)


def _parameter(kind: str) -> parameters.Parameter:
    return parameters.Parameter("a", kind, None, "meaning", None)


def _same(left, right) -> bool:
    """Equal, of the same type, the sign of a zero included."""
    return repr(left) == repr(right)


@FUZZ
@given(some.dictionaries(NAMES, some.one_of(*VALUES.values()), max_size=5))
@example({"null": 1, "true": True, "y": "no", "_": "\x85 \u2028 \x7f \ufeff \ufffe"})
def test_yaml_round_trip(tmp_path, values):
    file = tmp_path / "a.yaml"
    file.write_text(parameters.dump_yaml(values), encoding="utf-8")
    assert _same(parameters.load_yaml(file), values)


@FUZZ
@given(
    some.binary(max_size=60) | (YAMLISH | some.text(some.characters(codec="utf-8"))).map(str.encode)
)
def test_any_bytes_as_yaml(tmp_path, content):
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    with within(), contextlib.suppress(ParameterError):
        values = parameters.load_yaml(file)
        assert all(type(name) is str for name in values)


@FUZZ
@given(PAIRS)
@example(("list[str]", ["a,b", "'", "[", "\ud7ff", " x "]))
@example(("float", -0.0))
def test_an_assignment_round_trip(pair):
    """What a sweep spells, the command line reads."""
    kind, value = pair
    known = {"a": _parameter(kind)}
    read = dict([parameters.parse_assignment(parameters.assignment("a", value), known)])
    assert _same(parameters.check(known, read, "src"), {"a": value})


@FUZZ
@given(some.sampled_from(sorted(VALUES)), some.text() | YAMLISH)
def test_any_text_as_an_assignment(kind, text):
    known = {"a": _parameter(kind)}
    for given_text in (text, f"a={text}"):
        with within(), contextlib.suppress(ParameterError):
            values = parameters.check(
                known, dict([parameters.parse_assignment(given_text, known)]), f"-p {given_text}"
            )
            parameters.dump_yaml(values).encode()


@FUZZ
@given(some.sampled_from(sorted(VALUES)), JSON)
def test_any_value_is_judged(kind, value):
    """And one that passes can be written."""
    with contextlib.suppress(ParameterError):
        parameters.dump_yaml(
            parameters.check({"a": _parameter(kind)}, {"a": value}, "src")
        ).encode()


@FUZZ
@given((LINES | some.text()).filter(lambda text: "\ud800" not in ascii(text)))
def test_any_text_as_a_declaration(tmp_path_factory, text):
    file = tmp_path_factory.getbasetemp() / "00_a.ipynb"
    cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": text}
    file.write_text(json.dumps({"cells": [cell], "nbformat": 4}))
    with within(), contextlib.suppress(ParameterError):
        known = parameters.declared(file)
        defaults = {name: parameter.default for name, parameter in known.items()}
        assert _same(parameters.check(known, defaults, "src"), defaults), (
            "a default that its declaration refuses"
        )


@FUZZ
@given(
    some.fixed_dictionaries(
        {"nbformat": some.just(4) | JSON}, optional={"cells": some.lists(JSON) | JSON}
    )
    | JSON
)
def test_any_json_as_a_notebook(tmp_path, document):
    _notebook(tmp_path, json.dumps(document).encode())


@FUZZ
@given(
    some.lists(
        some.fixed_dictionaries(
            {
                "cell_type": some.sampled_from(["code", "markdown"]) | JSON,
                "source": some.text() | JSON,
            },
            optional={
                "metadata": some.fixed_dictionaries({"tags": JSON}) | JSON,
                "outputs": some.lists(JSON) | JSON,
            },
        ),
        max_size=3,
    )
)
def test_any_cells_of_a_notebook(tmp_path, cells):
    _notebook(tmp_path, json.dumps({"cells": cells, "nbformat": 4}).encode())


@FUZZ
@given(some.binary(max_size=100))
def test_any_bytes_as_a_notebook(tmp_path, content):
    _notebook(tmp_path, content)


def _notebook(folder, content: bytes) -> None:
    file = folder / "00_a.ipynb"
    file.write_bytes(content)
    for read in (parameters.cells, parameters.declared, parameters.title):
        with within(), contextlib.suppress(ParameterError):
            read(file)


@FUZZ
@given(some.binary(max_size=100) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_json(tmp_path, content):
    """An object, or Unreadable; what was merged into it is there afterwards."""
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with contextlib.suppress(files.Unreadable):
        assert isinstance(files.read_json(file), dict)
    files.merge(file, {"a": 1})
    assert files.read_json(file)["a"] == 1
    for damaged in tmp_path.glob("damaged-*"):
        damaged.unlink()


@FUZZ
@given(some.dictionaries(some.text(max_size=8), JSON, max_size=5))
def test_json_round_trip(tmp_path, value):
    def plain(value):  # numbers that JSON has no word for are text
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    files.write(tmp_path / "a.json", files.to_json(value))
    try:
        assert _same(files.read_json(tmp_path / "a.json"), plain(value))
    except files.Unreadable:
        assert any(0xD800 <= ord(c) < 0xE000 for c in files.to_json(value)), (
            "only half a pair of surrogates is refused"
        )


MANIFESTS = JSON | some.fixed_dictionaries(
    {
        "sha256": some.dictionaries(
            some.sampled_from(["a", "../a", "/dev/zero", "training.pt", ""]) | some.text(), JSON
        )
    }
)


@FUZZ
@given(some.binary(max_size=60) | MANIFESTS.map(lambda value: json.dumps(value).encode()))
def test_any_manifest_of_a_sealed_folder(tmp_path, content):
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / files.MANIFEST).write_bytes(content)
    with within(), pytest.raises(files.Unreadable):
        files.verify(tmp_path, ["a"])


@pytest.fixture(scope="module")
def a_checkpoint(tmp_path_factory):
    """A real one, of one small layer."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = checkpoint.capture(model, [optimizer], progress={"step": 1})
    return checkpoint.save(tmp_path_factory.mktemp("checkpoints"), state)


CHECKPOINT_FILES = (
    files.MANIFEST,
    checkpoint.WEIGHTS,
    checkpoint.TRAINING,
    "training-00001-of-00001.safetensors",
)


@FUZZ
@given(file=some.sampled_from(CHECKPOINT_FILES), content=some.binary(max_size=60) | JSON)
def test_any_content_of_a_checkpoint(a_checkpoint, tmp_path, file, content):
    """Under a hash that is true: what then is wrong is found by whoever reads it."""
    assert (a_checkpoint / file).exists()
    copy = tmp_path / a_checkpoint.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(a_checkpoint, copy)
    if file == checkpoint.TRAINING and not isinstance(content, bytes):
        torch.save(content, copy / file)
    else:
        (copy / file).write_bytes(
            content if isinstance(content, bytes) else json.dumps(content).encode()
        )
    if file != files.MANIFEST:
        files.seal(copy)
    with within(), pytest.raises(checkpoint.CheckpointError):
        checkpoint.read(copy)


@FUZZ
@given(content=some.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_the_meta_of_a_checkpoint(tmp_path, content):
    (tmp_path / checkpoint.META).write_bytes(content)
    assert isinstance(checkpoint.read_meta(tmp_path), dict)


@FUZZ
@given(
    manifest=some.fixed_dictionaries(
        {"about": JSON, "shards": some.lists(JSON, max_size=2) | JSON, "done": JSON},
        optional={"sha256": JSON},
    )
    | some.fixed_dictionaries(
        {
            "about": some.dictionaries(some.text(), JSON, max_size=2),
            "shards": some.lists(
                some.fixed_dictionaries(
                    {"name": some.just("shard-00000.safetensors")},
                    optional={"sha256": JSON, "rows": JSON},
                ),
                max_size=2,
            ),
            "done": some.integers(),
        }
    )
    | JSON
)
def test_any_manifest_of_a_teacher_cache(tmp_path, manifest):
    """Also under a digest that is true."""
    (tmp_path / "shard-00000.safetensors").write_bytes(b"rubbish")
    if isinstance(manifest, dict) and "sha256" not in manifest:
        manifest |= {"sha256": files.digest(manifest)}
    (tmp_path / teacher_cache.MANIFEST).write_text(json.dumps(manifest))
    with within(), contextlib.suppress(teacher_cache.CacheError):
        shards = teacher_cache._Shards(tmp_path)
        for entry in shards.entries:
            shards.open(entry)
        shards.expect({"a": 1})
