"""The rule of admission (README): two public threads for each check, and a program of the bench that it names.

That it names its programs first, and is silent on the healthy ones and the twins, is asked by test_bench.py.
"""

import tomllib
from pathlib import Path

import bench
from bench.programs import programs
from loopdoctor import checks

RECORDS = tomllib.loads((Path(bench.__file__).parent / "records.toml").read_text(encoding="utf-8"))
# Taken over with one thread when the rule was made. To become fewer.
ONE_THREAD = {"N24", "N28"}
# What needs several processes, a compiler or waits of seconds has a test of its own, and no program.
WITHOUT_PROGRAM = {"N18", "N19", "N21"}
FAULTS = {p.name: p for p in programs() if p.fault}


def test_every_check_has_a_record_and_no_other():
    assert set(RECORDS) == {check.id for check in checks.ALL}


def test_the_core_is_small():
    assert len(checks.ALL) <= 90


def test_each_check_is_admitted():
    wrong = []
    for id, record in RECORDS.items():
        threads = {thread for thread in record["threads"] if thread.startswith("https://github.com/")}
        if len(threads) < (1 if id in ONE_THREAD else 2):
            wrong.append(f"{id}: {len(threads)} public threads")
        named = [name for name in record["programs"] if id in FAULTS[name].names and not FAULTS[name].missed]
        if not named and id not in WITHOUT_PROGRAM:
            wrong.append(f"{id}: no program of the bench that it names")
    assert wrong == []
