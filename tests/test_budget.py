"""The hook that keeps the first tier short: over the limit without a mark is a failure that says so."""

import os
import subprocess
import sys

import budget
import pytest

from nblib import paths

CONFTEST = "pytest_plugins = ['budget']"
BUSY = """import time
import pytest

def busy(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

@pytest.fixture(scope="module")
def prepared():
    busy(0.6)
"""


def run(folder, tests: str, *, seconds: str = "0.2") -> tuple[int, str]:
    """Exit code and output of a session of its own over these tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: s\n    kernel: k\n")
    (folder / "test_here.py").write_text(BUSY + tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    environment = os.environ | {"NBLIB_TEST_SECONDS": seconds, "PYTHONPATH": str(paths.root() / "tests")}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to import
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    return done.returncode, done.stdout


def test_over_the_limit_without_a_mark_fails_and_says_so(tmp_path):
    code, said = run(tmp_path, "def test_long():\n    busy(0.6)\n\ndef test_short():\n    busy(0.01)\n")
    assert code == 1 and "1 failed, 1 passed" in said
    assert "took 0.6 s without @pytest.mark.slow (allowed here: 0.2 s)" in said


@pytest.mark.parametrize("mark", ["slow", "kernel"])
def test_with_a_mark_it_may_take_longer(tmp_path, mark):
    assert run(tmp_path, f"@pytest.mark.{mark}\ndef test_long(prepared):\n    busy(0.6)\n")[0] == 0


def test_less_than_twice_the_limit_is_told_and_is_no_failure(tmp_path):
    code, said = run(tmp_path, "def test_long():\n    busy(0.6)\n", seconds="0.4")
    assert code == 0 and "1 passed, 1 warning" in said
    assert "took 0.6 s without @pytest.mark.slow (allowed here: 0.4 s)" in said


def test_the_fixtures_of_a_test_count_too(tmp_path):
    code, said = run(tmp_path, "def test_short(prepared):\n    pass\n")
    assert code == 1 and "its fixtures took 0.6 s without @pytest.mark.slow" in said


def test_the_programs_that_a_test_starts_count_too(tmp_path):
    (tmp_path / "program.py").write_text(BUSY + "\nbusy(0.6)\n")
    start = f"subprocess.run([sys.executable, {str(tmp_path / 'program.py')!r}])"
    test = f"import subprocess, sys\n\ndef test_child():\n    {start}\n"
    code, said = run(tmp_path, test)
    assert code == 1 and "without @pytest.mark.slow" in said


def test_waiting_for_a_busy_machine_does_not_count(tmp_path):
    assert run(tmp_path, "def test_waits():\n    time.sleep(0.6)\n")[0] == 0


def test_a_failure_stays_the_failure_that_it_is(tmp_path):
    code, said = run(tmp_path, "def test_long():\n    busy(0.6)\n    assert 1 == 2\n")
    assert code == 1 and "assert 1 == 2" in said and "without @pytest.mark" not in said


def test_a_slower_machine_gets_more_seconds_and_none_gets_fewer(monkeypatch):
    monkeypatch.setattr(budget, "_work", lambda dtype: 0.3 if "bfloat16" in str(dtype) else 0.1)
    assert budget.slowness() == pytest.approx(0.3 / budget.REFERENCE["bfloat16"])
    monkeypatch.setattr(budget, "_work", lambda dtype: 0.001)
    assert budget.slowness() == 1


class Item:
    def __init__(self, path: str, mark: str = ""):
        self.path, self.mark = path, mark

    def get_closest_marker(self, name: str) -> bool:
        return name == self.mark


def test_each_half_begins_with_long_tests_and_ends_with_short_ones():
    items = [Item(path, mark) for path in "abcdef" for mark in ("slow", "kernel" if path < "d" else "", "", "", "")]
    ordered = items.copy()
    budget.pytest_collection_modifyitems(ordered)
    halves = [[item.mark != "" for item in half] for half in (ordered[:15], ordered[15:])]
    assert all(any(half) and half == sorted(half, reverse=True) for half in halves)
    assert set(ordered) == set(items) and len(ordered) == len(items)
    paths = [item.path for item in ordered if item.mark]
    assert all(paths[paths.index(path) :][: paths.count(path)] == [path] * paths.count(path) for path in paths)


def test_measuring_the_machine_leaves_the_generator_alone():
    import torch

    before = torch.get_rng_state()
    assert budget.slowness() >= 1
    assert torch.equal(torch.get_rng_state(), before)
