"""The comparison is paired and goes on where it stopped, and the record on disk holds what its
verdicts say.
"""

import json

import pytest

from experiments import uld_runs
from lessons import seeds
from nblib import models, runtime, text
from nbworkbook.setup import Setup

CPU = runtime.pick("cpu", "fp32")
DOCUMENTS = [
    f"The quick brown fox number {i} jumps over {i * i} lazy dogs. " * 6 for i in range(40)
]
SPLITS = {"train": DOCUMENTS[8:], "held_out": DOCUMENTS[:8]}
OPTIONS = dict(
    steps=3, rows=2, length=32, words=280, repeats=2, eval_rows=8, hidden=16, layers=1, heads=2
)


@pytest.fixture(scope="module")
def opened():
    tokenizer = text.train_tokenizer(DOCUMENTS, vocab_size=320)
    rows = text.fixed_rows(text.encode(DOCUMENTS, tokenizer), length=32, limit=8)
    model = models.tiny(len(tokenizer), hidden=16, layers=1, heads=2, length=64, seed=3)
    return Setup(model, tokenizer, rows.flatten(), rows, rows, CPU)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("records") / "uld.json"


@pytest.fixture(scope="module")
def lines(opened, path):
    return uld_runs.measure(path, opened, SPLITS, **OPTIONS)["lines"]


def test_every_way_has_every_seed_and_only_those_with_a_teacher_have_its_term(lines):
    assert [(line["way"], line["seed"]) for line in lines] == [
        (way, seed) for seed in range(2) for way in uld_runs.WAYS
    ]
    assert all((line["uld"][0] is None) == (line["way"] == uld_runs.ALONE) for line in lines)
    first = {line["way"]: line["uld"][0] for line in lines if line["seed"] == 0}
    full, _, tenth = (first[way] for way in list(uld_runs.WAYS)[1:])
    assert tenth == pytest.approx(full / 10, rel=1e-5)  # the same first weights and rows


def test_what_is_known_is_not_trained_again_and_the_rest_comes_out_the_same(
    opened, lines, path, tmp_path
):
    stored = json.loads(path.read_text())
    stored["lines"] = [*({**line, "known": True} for line in lines[:5])]
    (tmp_path / "cut.json").write_text(json.dumps(stored))
    again = uld_runs.measure(tmp_path / "cut.json", opened, SPLITS, **OPTIONS)
    assert again["lines"][:5] == stored["lines"] and again["lines"][5:] == lines[5:]
    assert again["verdicts"] == uld_runs.verdicts(lines)


def test_tables_and_verdicts(opened, lines):
    share = uld_runs.shared(opened, SPLITS["train"], words=280, length=32, rows=8)
    bits = uld_runs.teachers_bits(opened, SPLITS["held_out"], length=32, rows=8)
    assert 0 < share <= 1 < bits
    table = uld_runs.means({"lines": lines, "teacher_bits_per_byte": bits})
    assert [row["trained on"] for row in table] == [*uld_runs.WAYS, "the teacher itself"]
    assert set(uld_runs.verdicts(lines)) == set(uld_runs.WAYS) - {uld_runs.ALONE}
    assert (
        uld_runs.means({"lines": lines[:1], "teacher_bits_per_byte": bits})[0]["held-out loss"]
        == lines[0]["loss"]
    )


def test_the_record_on_disk():
    """It was no gain: at the paper's weight labels alone end lower at every seed."""
    record = uld_runs.published()
    assert record["verdicts"] == uld_runs.verdicts(record["lines"])
    at = {
        way: [line["loss"] for line in record["lines"] if line["way"] == way]
        for way in uld_runs.WAYS
    }
    assert {len(losses) for losses in at.values()} == {3}
    for way in list(uld_runs.WAYS)[1:3]:
        gains = seeds.gains(at[uld_runs.ALONE], at[way])
        assert seeds.distinct(gains) and max(gains) < 0
    assert (
        0 < record["positions_shared"] < 1
        and record["teacher_bits_per_byte"] < uld_runs.means(record)[0]["bits per byte"]
    )
