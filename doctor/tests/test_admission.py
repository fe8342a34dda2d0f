"""The rule of admission (README): two public threads for each check, and a program of the bench
that it names.

That the doctor is silent on the healthy programs and the twins is asked by test_bench.py.
"""

import tomllib
from pathlib import Path

import pytest

import bench
from bench.__main__ import apart
from bench.programs import programs
from loopdoctor import checks

RECORDS = tomllib.loads((Path(bench.__file__).parent / "records.toml").read_text(encoding="utf-8"))
# Taken over with one thread when the rule was made. To become fewer.
ONE_THREAD = {"N24", "N28"}
# What needs several processes, a compiler or waits of seconds has a test of its own, and no
# program.
WITHOUT_PROGRAM = {"N18", "N19", "N21"}
FAULTS = {p.name: p for p in programs() if p.fault}


def test_every_check_has_a_record_and_no_other():
    assert set(RECORDS) == {check.id for check in checks.ALL}


def test_the_core_is_small():
    assert len(checks.ALL) <= 90


def test_every_check_has_two_public_threads():
    few = {}
    for id, record in RECORDS.items():
        threads = {
            thread for thread in record["threads"] if thread.startswith("https://github.com/")
        }
        if len(threads) < (1 if id in ONE_THREAD else 2):
            few[id] = sorted(threads)
    assert few == {}


@pytest.mark.slow
def test_every_check_names_one_of_its_programs(imported):
    def is_named(id: str, name: str) -> bool:
        told = apart(FAULTS[name].text, name, watched=True)
        return id in [check for check, *_ in told["said"][:3]]

    asked = {id: record["programs"] for id, record in RECORDS.items() if id not in WITHOUT_PROGRAM}
    silent = [id for id, names in asked.items() if not any(is_named(id, name) for name in names)]
    assert silent == []
