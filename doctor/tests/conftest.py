"""What a test has compiled must not keep the eye shut in the next one: it stays off where anything
was compiled.

What is there before the first test (a million objects of imported packages) is taken out of the
garbage collector's sight, so that collections, and searches for a model's owner, go through what
tests have made. They keep their usual pace: what a test has left would be found by the next one's
searches.
"""

import gc
import sys

import pytest
import torch

import loopdoctor


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


@pytest.fixture(scope="module")
def imported():
    """What the programs of the bench import is imported once, before their processes are forked."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.set_num_threads(1)
    with loopdoctor.watch(say=False):
        pass
