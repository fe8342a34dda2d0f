"""The programs of notebook 05 are as ill and as well as it says, and what the peers said of them is
on record.
"""

import pytest

from experiments import peers
from lessons import programs

CAUSES = {
    "adapters cut off": "S10",
    "labels shifted twice": "F17",
    "updates lost in bf16": "N4",
    "teacher in train mode": "F6",
    "optimizer made too early": "S3",
}
OF_KINDS = {
    "classification": "F3",
    "regression": "F21",
    "several labels": "F3",
    "fine tuning": "S18",
    "branches": "S19",
    "distillation": "F3",
}


@pytest.mark.parametrize("name", programs.ILL)
def test_the_ill_are_named_and_train_all_the_same(name):
    said = peers.ask(programs.ILL[name], peers.by_doctor)
    assert said[0].severity == "ERROR" and said[0].check.split()[0] == CAUSES[name], said
    losses = programs.train(programs.ILL[name](), peers.STEPS)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", programs.WELL)
def test_the_well_are_left_alone(name):
    assert [
        r for r in peers.ask(programs.WELL[name], peers.by_doctor) if r.severity not in peers.SILENT
    ] == []


@pytest.mark.parametrize("kind", programs.OF_KINDS)
def test_of_each_kind_the_fault_is_named_and_the_mended_one_left_alone(kind):
    said = peers.ask(lambda: programs.OF_KINDS[kind](False), peers.by_doctor)
    assert said[0].check.split()[0] == OF_KINDS[kind], said
    said = peers.ask(lambda: programs.OF_KINDS[kind](True), peers.by_doctor)
    assert [r for r in said if r.severity not in peers.SILENT] == []


def test_a_peer_that_is_not_there_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(peers, "PEERS", {"no-such-package": peers.by_guardtower})
    assert peers.missing() == "not installed here: no-such-package; pip install no-such-package"
    assert (
        peers.ask(programs.ILL["labels shifted twice"], lambda p: 1 / 0)[0].check
        == "ZeroDivisionError"
    )


def test_the_record_covers_every_program_and_peer():
    name, said = peers.published()
    assert name.endswith("-cpu.json") and list(said) == list(peers.everything())
    wanted = (
        CAUSES
        | {peers.OVERFLOWED: "N17"}
        | {f"{kind}, with its fault": c for kind, c in OF_KINDS.items()}
    )
    for row in peers.rows(said):
        assert set(row) == {"program", "is", "doctor", *peers.PEERS}
        named = row["doctor"].partition(" ")[2].split(" ")[0]
        assert named == wanted[row["program"]] if row["is"] == "ill" else row["doctor"] == "-"
        assert "RAISED" not in " ".join(row.values()) or row["program"] == peers.OVERFLOWED
