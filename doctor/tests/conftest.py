"""What a test has compiled must not keep the eye shut in the next one: it stays off where anything was compiled.

What is there before the first test (a million objects of imported packages) is taken out of the garbage collector's
sight, so that collections, and searches for a model's owner, go through what tests have made. They keep their usual
pace: what a test has left would be found by the next one's searches.

Fifty sets were judged, and two thirds of their bugs are named by forty checks. A program beyond the EACH of a check,
newest sets first, is marked `again`, and so is its twin: `make test-all` leaves them out, `make test-doctor` does not.
"""

import gc
import re
import sys
from collections import defaultdict

import pytest

EACH = 4  # programs of judged sets for each check


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    programs = defaultdict(lambda: defaultdict(list))  # by cause and by program
    for item in items:
        name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        judged = re.fullmatch(r"test_judge(\d+)", item.module.__name__.split(".")[-1])
        if judged and name in item.module.NAMED:
            programs[item.module.NAMED[name]][-int(judged[1]), name].append(item)
    for of_one_cause in programs.values():
        for which in sorted(of_one_cause)[EACH:]:
            for item in of_one_cause[which]:
                item.add_marker(pytest.mark.again)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def nothing_was_compiled():
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters["frames"].clear()
