"""The programs of notebook 05 are as ill and as well as it says, and what the peers said of them is on record."""

import pytest

from lessons import peers, programs

CAUSES = {
    "adapters cut off": "S10",
    "labels shifted twice": "F17",
    "updates lost in bf16": "N4",
    "teacher in train mode": "F6",
    "optimizer made too early": "S3",
}


@pytest.mark.parametrize("name", programs.ILL)
def test_the_ill_are_named_and_train_all_the_same(name):
    said = peers.ask(programs.ILL[name], peers.by_doctor)
    assert said[0].severity == "ERROR" and said[0].check.split()[0] == CAUSES[name], said
    losses = programs.train(programs.ILL[name](), peers.STEPS)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", programs.WELL)
def test_the_well_are_left_alone(name):
    assert [r for r in peers.ask(programs.WELL[name], peers.by_doctor) if r.severity not in peers.SILENT] == []


def test_a_peer_that_is_not_there_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(peers, "PEERS", {"no-such-package": peers.by_guardtower})
    assert peers.missing() == "not installed here: no-such-package; pip install no-such-package"
    assert peers.ask(programs.ILL["labels shifted twice"], lambda p: 1 / 0)[0].check == "ZeroDivisionError"


def test_the_record_covers_every_program_and_peer():
    name, said = peers.published()
    assert name.endswith("-cpu.json") and list(said) == [*programs.ILL, *programs.WELL]
    for row in peers.rows(said):
        assert set(row) == {"program", "is", "doctor", *peers.PEERS}
        assert (
            row["doctor"].startswith(f"ERROR {CAUSES[row['program']]} ") if row["is"] == "ill" else row["doctor"] == "-"
        )
        assert "RAISED" not in " ".join(row.values())
