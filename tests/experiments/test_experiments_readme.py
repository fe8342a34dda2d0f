"""The README of the experiments lists each of them with its newest record, and its figures are
those of the records.
"""

import importlib
import re
import statistics

import pytest

from experiments import (
    ard_relevance,
    ard_rivals,
    goose_context,
    lrc_comparison,
    lrc_spreads,
    muon_rival_runs,
    record,
    student_starts,
    uld_runs,
)
from lessons import seeds
from nblib import paths

FOLDER = paths.notebooks() / "experiments"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
ROWS = {row.split("`")[1]: row for row in README.splitlines() if row.startswith("| `")}
MODULES = [
    path.stem
    for path in FOLDER.glob("*.py")
    if re.search(r"^RECORD = ", path.read_text("utf-8"), re.M)
]


def test_every_module_with_a_record_has_a_row_with_the_newest_one():
    assert sorted(MODULES) == sorted(ROWS) and len(ROWS) == 13
    for name, row in ROWS.items():
        newest = record.newest(importlib.import_module(f"experiments.{name}").RECORD)
        assert f"(../../outputs/published/{newest.name})" in row


def has(name: str, *figures: str) -> None:
    for figure in figures:
        assert figure in ROWS[name], f"{name}: {figure} is of the record"


def mean_gain(one: list[float], other: list[float]) -> str:
    return f"{abs(statistics.mean(seeds.gains(one, other))):.3f}"


def test_the_figures_of_lrc():
    default = dict(
        percent=15.0, steps=lrc_spreads.STEPS, scale="least_squares", start="alternating"
    )
    for base in lrc_spreads.BASES:
        shares = lrc_spreads.shares(lrc_spreads.published(), base=base, **default)
        has("lrc_spreads", f"{statistics.mean(shares):.3f}")
        assert max(shares) - min(shares) < 0.01
    table = lrc_comparison.table(lrc_comparison.published(), "stored")
    rows = {(row["method"], row["steps"]): row for row in table}
    for kind in (("LRC, 15 %", 90), ("joint", 30), ("feedback, least_squares", 0), ("float", 0)):
        has("lrc_comparison", f"{float(rows[kind]['perplexity'].split()[0]):.1f}")
    assert rows["LRC, 15 %", 90]["bits per weight"] == pytest.approx(5.5, abs=0.05)


def test_the_figures_of_ard():
    table = {row["pruned by"]: row for row in ard_relevance.table(ard_relevance.published())}
    for name in ("signal", "leave one out", "at random"):
        has("ard_relevance", table[name]["keep 50%"].split()[0])
    agree = [float(row["agrees with leave one out"].split()[0]) for name, row in table.items()]
    has("ard_relevance", str(sorted(agree)[-2]))
    rivals = ard_rivals.published()
    places = [(task, on) for task in ard_rivals.tasks(rivals) for on in ("held out", "shifted")]
    best = [
        ard_rivals.winner(rivals, *place, m)[0] for place in places for m in ard_rivals.MEASURES
    ]
    has("ard_rivals", f"{sum(name.startswith('ARD') for name in best)} of {len(best)}")
    undecided = {
        len(ard_rivals.standing(rivals, *place, "nll", "ARD")["undecided"]) for place in places
    }
    assert undecided == {11, 12}


def test_the_figures_of_muon_and_of_students():
    race = muon_rival_runs.published()
    muon = muon_rival_runs.losses_of(race, "muon")
    for racer in ("adamw", "polar_express"):
        has("muon_rival_runs", mean_gain(muon, muon_rival_runs.losses_of(race, racer)))
    starts = student_starts.published()
    new, *others = (
        student_starts.ends(starts, data="text", how=how, taught="teacher")
        for how in reversed(student_starts.STARTS)
    )
    has("student_starts", *(mean_gain(new, other) for other in others))
    uld = uld_runs.published()["lines"]
    ends = {way: [line["loss"] for line in uld if line["way"] == way] for way in uld_runs.WAYS}
    has(
        "uld_runs",
        *(mean_gain(ends[uld_runs.ALONE], ends[way]) for way in list(uld_runs.WAYS)[1:3]),
    )
    for kind in goose_context.KINDS:
        last = [
            line["losses"][-1]
            for line in goose_context.published()["lines"]
            if line["model"] == kind
        ]
        has("goose_context", f"{statistics.mean(last):.3f}")
