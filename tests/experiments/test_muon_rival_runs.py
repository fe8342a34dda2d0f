"""The race of four: rates come from the same search, runs go on where they stopped, and the record
is fair.
"""

import copy
import json

import pytest

from experiments import muon_race, muon_rival_runs
from lessons import seeds
from nblib import runtime, text
from nbworkbook.setup import Setup


class Tokenizer:
    def __len__(self):
        return 256


@pytest.fixture
def opened(stream):
    rows = text.fixed_rows(stream, length=16, limit=4)
    return Setup(None, Tokenizer(), stream, rows, rows, runtime.pick("cpu", "fp32"))


@pytest.mark.slow
def test_a_race_goes_on_where_it_stopped_and_is_fair(opened, tmp_path, monkeypatch):
    small = dict(family="qwen3_moe", hidden=16, layers=1, heads=2, width=16, experts=4, top_k=2)
    monkeypatch.setattr(muon_race, "SHAPE", small)
    monkeypatch.setattr(muon_rival_runs, "FACTORS", (1.0,))
    monkeypatch.setattr(muon_rival_runs, "REST", (0.5,))
    monkeypatch.setattr(
        muon_rival_runs,
        "USUAL",
        {racer: muon_rival_runs.USUAL[racer] for racer in ("adamw", "muon")},
    )
    muon_race.step_flops.cache_clear()
    path, options = tmp_path / "race.json", dict(count=1, steps=2, rows=2, length=16)
    record = muon_rival_runs.measure(path, opened, **options)
    assert [line["racer"] for line in record["lines"]] == [
        *2 * ["adamw"],
        *2 * ["muon"],
        "adamw",
        "muon",
        muon_rival_runs.LONGER,
    ]
    stored = json.loads(path.read_text())
    kept = stored["lines"][:-1]
    path.write_text(json.dumps(stored | {"lines": kept}))
    again = muon_rival_runs.measure(path, opened, **options)
    timeless = [
        [{k: v for k, v in line.items() if k != "seconds"} for line in r["lines"]]
        for r in (record, again)
    ]
    assert timeless[0] == timeless[1] and [line["seconds"] for line in again["lines"][:-1]] == [
        line["seconds"] for line in kept
    ]
    with pytest.raises(ValueError, match="other settings, steps = 2 and not 3"):
        muon_rival_runs.measure(path, opened, **(options | dict(steps=3)))
    muon_race.step_flops.cache_clear()


def test_the_record_is_fair_and_a_record_that_is_not_is_refused():
    record = muon_rival_runs.published()
    muon_rival_runs.fair(record)
    for name in ("tokens", "parameters", "flops"):
        unfair = copy.deepcopy(record)
        next(
            line for line in unfair["lines"] if (line["kind"], line["racer"]) == ("race", "normuon")
        )[name] += 1
        with pytest.raises(AssertionError):
            muon_rival_runs.fair(unfair)


def test_each_racer_ran_at_the_best_of_the_rates_tried_on_rows_of_another_split():
    record = muon_rival_runs.published()
    counts = set()
    for racer in muon_rival_runs.USUAL:
        tuned = [e for e in record["lines"] if (e["kind"], e["racer"]) == ("tuning", racer)]
        counts.add(len(tuned))
        best = min(tuned, key=lambda e: e["loss"])
        raced = [e for e in record["lines"] if (e["kind"], e["racer"]) == ("race", racer)]
        assert {(e["lr"], e["adamw_lr"]) for e in raced} == {(best["lr"], best["adamw_lr"])}
        assert sorted(e["seed"] for e in raced) == [
            0,
            1,
            2,
        ] and muon_rival_runs.TUNING_SEED not in (0, 1, 2)
    assert counts == {len(record["factors"]) + len(record["rest"])}  # the same search for each


def test_the_table_and_the_verdicts_are_of_the_record():
    record = muon_rival_runs.published()
    table = {row["optimizer"]: row for row in muon_rival_runs.table(record)}
    assert len(table) == 5 and len({row["tokens"] for row in list(table.values())[:4]}) == 1
    longer, plain = (table[muon_rival_runs.title(r)] for r in (muon_rival_runs.LONGER, "adamw"))
    assert longer["steps"] > plain["steps"] and longer["rate"] == plain["rate"]
    for racer, sentence in muon_rival_runs.verdicts(record).items():
        gains = seeds.gains(*(muon_rival_runs.losses_of(record, r) for r in ("muon", racer)))
        assert ("not distinguishable" in sentence) != seeds.distinct(gains)
