"""What a test has compiled must not keep the eye shut in the next one: it stays off where anything was compiled."""

import sys

import pytest


@pytest.fixture(autouse=True)
def nothing_was_compiled():
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters["frames"].clear()
