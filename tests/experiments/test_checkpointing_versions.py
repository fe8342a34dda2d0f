"""The record of older transformers: it has every attempt, and its last stack says what this
environment says.
"""

import re
from importlib.metadata import version

import pytest

from experiments import checkpointing_versions as versions

ATTEMPTS = 2 * 3 * 5  # what trains, the kind, the order with its loop


@pytest.fixture(scope="module")
def record() -> dict:
    name, content = versions.published()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-checkpointing-order\.json", name) and name.startswith(
        content["date"]
    )
    return content


def test_the_record_names_its_machine_and_four_stacks_from_4_46_to_that_of_the_lock(record):
    assert record["environment"]["cpu"] and record["environment"]["packages"]["torch"]
    found = [stack["versions"]["transformers"] for stack in record["stacks"]]
    assert (
        len(set(found)) == 4
        and found[0].startswith("4.46.")
        and found[-1] == version("transformers")
    )
    for stack, wanted in zip(record["stacks"], versions.VERSIONS, strict=True):
        assert set(stack["versions"]) == set(versions.PACKAGES)
        assert all(
            stack["versions"][name] == number for name, number in (w.split("==") for w in wanted)
        )


def test_every_attempt_is_there_once_and_its_outcome_fits_its_counts(record):
    for stack in record["stacks"]:
        which = {
            tuple(a[key] for key in ("order", "kind", "loop", "trains")) for a in stack["attempts"]
        }
        assert len(which) == len(stack["attempts"]) == ATTEMPTS
        for a in stack["attempts"]:
            assert a["outcome"] == (
                "raises" if a["message"] else "works" if a["moved"] == a["of"] else "silent"
            )


def test_here_an_attempt_ends_as_on_record(record):
    today = {
        tuple(a[key] for key in ("order", "kind", "loop", "trains")): a
        for a in record["stacks"][-1]["attempts"]
    }
    for case in (
        (versions.ADAPTER_FIRST, "reentrant", versions.RAW, versions.AND_HEAD),
        (versions.CHECKPOINTING_FIRST, "default", versions.TRAINER, versions.ADAPTERS),
        (versions.TRAINER_SWITCH, "default", versions.TRAINER, versions.ADAPTERS),
    ):
        assert versions.attempt(*case) == today[case]


def test_an_attempt_tells_what_raises_and_what_is_silent(monkeypatch):
    """Transformers 5 adds a hook to the embeddings; without it the outcomes of transformers 4 come
    back.
    """
    monkeypatch.setattr(
        versions.tf.PreTrainedModel, "enable_input_require_grads", lambda self: None
    )
    case = (versions.ADAPTER_FIRST, "reentrant", versions.RAW)
    raised, silent = (
        versions.attempt(*case, versions.ADAPTERS),
        versions.attempt(*case, versions.AND_HEAD),
    )
    assert raised["outcome"] == "raises" and raised["message"].startswith("element 0 of tensors")
    assert silent["outcome"] == "silent" and silent["moved"] == 1


def test_the_table_has_a_row_for_each_stack_and_kind():
    rows = versions.table()
    assert [(row["transformers"][:4], row["kind"]) for row in rows[:2]] == [
        ("4.46", "reentrant"),
        ("4.46", "non-reentrant"),
    ]
    assert len(rows) == 4 * 3 and all(len(row) == 3 + 3 for row in rows)
    old = rows[0]
    assert old[versions.CHECKPOINTING_FIRST] == "works"
    assert old[versions.ADAPTER_FIRST] == "raises; silent if the head trains"
