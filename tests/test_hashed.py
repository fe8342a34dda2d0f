"""What is read is what was written, whatever JSON it is; damage is noticed, and so is a hash that
is not there.
"""

import json
import math

import pytest
from bit_flips import flips
from hypothesis import given
from hypothesis import strategies as some

from nblib import files

JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(),
    lambda inner: (
        some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    facts=some.dictionaries(
        some.text(max_size=5).filter(lambda name: name != "sha256"), JSON, max_size=4
    )
)
def test_what_is_read_is_what_was_written(tmp_path_factory, facts):
    path = tmp_path_factory.mktemp("hashed") / "facts.json"
    files.write_checked_json(path, facts)
    assert files.to_json(files.read_checked_json(path)) == files.to_json(facts)


def test_numbers_that_json_does_not_know_are_read_as_words(tmp_path):
    files.write_checked_json(tmp_path / "a", {"loss": math.nan, "at": tmp_path})
    assert files.read_checked_json(tmp_path / "a") == {"loss": "nan", "at": str(tmp_path)}


@pytest.mark.parametrize("needed", [True, False])
def test_no_flipped_bit_changes_what_is_read(tmp_path, needed):
    path, facts = (
        tmp_path / "facts.json",
        {"about": {"rows": 3}, "done": False, "names": ["a", "b"]},
    )
    files.write_checked_json(path, facts)
    for _ in flips(path, count=200):
        try:
            read = files.read_checked_json(path, needed=needed)
        except files.Unreadable:
            continue
        # what fell was the name of the hash
        assert not needed and {name: read[name] for name in facts} == facts


def test_an_object_without_a_hash(tmp_path):
    assert files.read_checked_json(tmp_path / "none") == {}
    for content in ({"a": 1}, {"a": 1, "sha256": None}, {"a": 1, "sha256": files.digest({"a": 2})}):
        (tmp_path / "a").write_text(json.dumps(content))
        with pytest.raises(files.Unreadable, match="a: it changed since it was written"):
            files.read_checked_json(tmp_path / "a")
    (tmp_path / "a").write_text('{"a": 1}')
    assert files.read_checked_json(tmp_path / "a", needed=False) == {"a": 1}


def test_the_order_of_names_does_not_count():
    assert files.digest({"a": 1, "b": [2, {"c": 3, "d": 4}]}) == files.digest(
        {"b": [2, {"d": 4, "c": 3}], "a": 1}
    )
    assert files.digest(["a", "b"]) != files.digest(["b", "a"])
